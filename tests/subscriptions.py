"""Subscriptions from a caller's side: a stub with the token, errors as our exceptions, and catalog entries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import grpc
from noetlpb.v1 import subscription_pb2 as pb
from noetlpb.v1 import subscription_pb2_grpc as rpc

from noetl_grpc import status
from noetl_grpc.core.lifecycle import Action, State
from noetl_grpc.errors import NoetlError
from tests.conftest import AUTHORIZATION

#: The way from REGISTERED into each state.
WAYS: dict[State, tuple[Action, ...]] = {
    State.REGISTERED: (),
    State.ACTIVE: (Action.ACTIVATE,),
    State.PAUSED: (Action.ACTIVATE, Action.PAUSE),
    State.DRAINING: (Action.ACTIVATE, Action.DRAIN),
    State.DEACTIVATED: (Action.DEACTIVATE,),
}


async def add_entry(
    conn: asyncpg.Connection, path: str, *, version: int = 1, kind: str = "subscription"
) -> int:
    """A catalog entry; its id."""
    await conn.execute("INSERT INTO noetl.resource (name) VALUES ($1) ON CONFLICT DO NOTHING", kind)
    catalog_id: int = await conn.fetchval(
        "INSERT INTO noetl.catalog (path, version, kind, content) VALUES ($1, $2, $3, '') RETURNING catalog_id",
        path,
        version,
        kind,
    )
    return catalog_id


async def add_event(conn: asyncpg.Connection, execution_id: int, event_id: int, **columns: Any) -> None:
    """An event that somebody else wrote straight into the log."""
    columns = {"execution_id": execution_id, "event_id": event_id, **columns}
    names = ", ".join(columns)
    places = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
    await conn.execute(f"INSERT INTO noetl.event ({names}) VALUES ({places})", *columns.values())


@asynccontextmanager
async def taken_away(conn: asyncpg.Connection, url: str) -> AsyncIterator[None]:
    """Another database of the same server, out of everybody's reach for the length of the block."""
    name = url.rpartition("/")[2]
    # A pool may connect again before the name is gone.
    async with asyncio.timeout(10):
        while True:
            await conn.fetch(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1", name
            )
            try:
                await conn.execute(f"ALTER DATABASE {name} RENAME TO {name}_away")
                break
            except asyncpg.ObjectInUseError:
                continue
    try:
        yield
    finally:
        await conn.execute(f"ALTER DATABASE {name}_away RENAME TO {name}")


def state_of(subscription: pb.Subscription) -> State:
    return State(pb.SubscriptionState.Name(subscription.state).removeprefix("SUBSCRIPTION_STATE_"))


class Api:
    """SubscriptionService over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = rpc.SubscriptionServiceStub(channel)

    async def call(self, method: str, request: Any) -> Any:
        """The answer, or one of our exceptions."""
        try:
            return await getattr(self.stub, method)(request, metadata=AUTHORIZATION)
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error) from None

    async def register(self, path: str) -> pb.RegisterSubscriptionResponse:
        return await self.call("RegisterSubscription", pb.RegisterSubscriptionRequest(path=path))

    async def act(self, action: Action, subscription_id: int, **fields: Any) -> pb.Subscription:
        verb = action.value.capitalize()
        request = getattr(pb, f"{verb}SubscriptionRequest")(subscription_id=subscription_id, **fields)
        return (await self.call(f"{verb}Subscription", request)).subscription

    async def get(self, subscription_id: int) -> pb.Subscription:
        request = pb.GetSubscriptionRequest(subscription_id=subscription_id)
        return (await self.call("GetSubscription", request)).subscription

    async def heartbeat(self, subscription_id: int, runtime_id: str, **fields: Any) -> pb.Subscription:
        request = pb.HeartbeatSubscriptionRequest(
            subscription_id=subscription_id, runtime_id=runtime_id, **fields
        )
        return (await self.call("HeartbeatSubscription", request)).subscription

    async def list_pages(self, **fields: Any) -> AsyncIterator[pb.ListSubscriptionsResponse]:
        token = ""
        while True:
            request = pb.ListSubscriptionsRequest(page_token=token, **fields)
            page = await self.call("ListSubscriptions", request)
            yield page
            token = page.next_page_token
            if not token:
                return

    async def list_ids(self, **fields: Any) -> list[int]:
        return [
            subscription.subscription_id
            async for page in self.list_pages(**fields)
            for subscription in page.subscriptions
        ]

    async def events(self, subscription_id: int, *, page_size: int = 0) -> list[pb.SubscriptionEvent]:
        found: list[pb.SubscriptionEvent] = []
        token = ""
        while True:
            request = pb.ListSubscriptionEventsRequest(
                subscription_id=subscription_id, page_size=page_size, page_token=token
            )
            page = await self.call("ListSubscriptionEvents", request)
            found.extend(page.events)
            token = page.next_page_token
            if not token:
                return found

    async def put_into(self, state: State, path: str) -> pb.Subscription:
        """A new subscription of the path in this state."""
        subscription = (await self.register(path)).subscription
        for action in WAYS[state]:
            subscription = await self.act(action, subscription.subscription_id)
        assert state_of(subscription) is state
        return subscription


async def outcome_of(call: Any) -> Any:
    """The answer or the exception."""
    try:
        return await call
    except NoetlError as error:
        return error


async def add_subscriptions(
    conn: asyncpg.Connection, count: int, *, first_id: int = 400_000_000_000_000_000, path: str = "bulk/"
) -> list[int]:
    """Many subscriptions straight in the log, in all states, three events each; their ids."""
    catalog_id = await add_entry(conn, path.rstrip("/") + str(first_id))
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, node_name, status, created_at)
        SELECT $1::bigint + 1000 * s.number, $2, $1::bigint + 1000 * s.number + e.number,
            CASE e.number WHEN 1 THEN 'subscription.registered' WHEN 2 THEN 'subscription.activated'
                ELSE (ARRAY['subscription.registered', 'subscription.resumed', 'subscription.paused',
                    'subscription.draining', 'subscription.deactivated'])[1 + s.number % 5] END,
            $3::text || s.number,
            CASE e.number WHEN 1 THEN 'REGISTERED' WHEN 2 THEN 'ACTIVE'
                ELSE (ARRAY['REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED'])[1 + s.number % 5] END,
            '2026-01-01'
        FROM generate_series(0, $4 - 1) AS s (number), generate_series(1, 3) AS e (number)
        """,
        first_id,
        catalog_id,
        path,
        count,
    )
    return [first_id + 1000 * number for number in range(count)]
