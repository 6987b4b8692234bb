"""Heartbeats: one runtime at a time, takeover after its lease, and draining that ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from noetlpb.v1 import subscription_pb2 as pb

from noetl_grpc.core.lifecycle import Action, State
from noetl_grpc.errors import InvalidRequest, LeaseHeld, NotFound
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.subscriptions import Api, add_entry, outcome_of, state_of

StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]


@pytest.fixture
def api(channel: grpc.aio.Channel) -> Api:
    return Api(channel)


async def expire(conn: asyncpg.Connection, subscription_id: int) -> None:
    """The runtime was killed, and its lease has run out."""
    await conn.execute(
        "UPDATE noetl.subscription_runtime SET lease_expires_at = clock_timestamp() WHERE subscription_id = $1",
        subscription_id,
    )


async def test_a_heartbeat_is_seen_by_everybody(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")

    answer = await api.call(
        "HeartbeatSubscription",
        pb.HeartbeatSubscriptionRequest(
            subscription_id=active.subscription_id, runtime_id="pod-1", in_flight=3, backlog=0
        ),
    )

    runtime = answer.subscription.runtime
    assert (runtime.runtime_id, runtime.alive, runtime.in_flight, runtime.backlog) == ("pod-1", True, 3, 0)
    assert answer.lease_expires_at == runtime.lease_expires_at
    heartbeat_at = runtime.last_heartbeat_at.ToDatetime(UTC)
    assert abs(heartbeat_at - datetime.now(UTC)) < timedelta(seconds=30)
    assert runtime.lease_expires_at.ToDatetime(UTC) - heartbeat_at == timedelta(seconds=30)
    assert await api.get(active.subscription_id) == answer.subscription
    assert answer.subscription.etag == active.etag
    assert len(await api.events(active.subscription_id)) == 2

    # What the last heartbeat did not say is not known.
    silent = await api.heartbeat(
        active.subscription_id, "pod-1", lease=Duration(seconds=2, nanos=500_000_000)
    )
    assert not silent.runtime.HasField("in_flight")
    assert not silent.runtime.HasField("backlog")
    leased = silent.runtime.lease_expires_at.ToDatetime() - silent.runtime.last_heartbeat_at.ToDatetime()
    assert leased == timedelta(seconds=2.5)


async def test_one_runtime_holds_a_subscription_until_its_lease_is_over(
    api: Api, conn: asyncpg.Connection
) -> None:
    await add_entry(conn, "jobs/listen")
    subscription_id = (await api.put_into(State.ACTIVE, "jobs/listen")).subscription_id
    first = await api.heartbeat(subscription_id, "pod-1", in_flight=1)

    held = await outcome_of(api.heartbeat(subscription_id, "pod-2", in_flight=9))
    assert isinstance(held, LeaseHeld)
    assert held.reason == "LEASE_HELD"
    assert held.metadata["runtime_id"] == "pod-1"
    assert await api.get(subscription_id) == first

    await expire(conn, subscription_id)
    lost = (await api.get(subscription_id)).runtime
    assert (lost.runtime_id, lost.alive) == ("pod-1", False)
    taken = await api.heartbeat(subscription_id, "pod-2", in_flight=9)
    assert (taken.runtime.runtime_id, taken.runtime.alive) == ("pod-2", True)
    late = await outcome_of(api.heartbeat(subscription_id, "pod-1"))
    assert isinstance(late, LeaseHeld)
    assert late.metadata["runtime_id"] == "pod-2"


async def test_of_many_runtimes_at_once_one_gets_the_lease(
    api: Api, conn: asyncpg.Connection, settings: Settings, start_server: StartServer, channel_to: ChannelTo
) -> None:
    await add_entry(conn, "jobs/listen")
    second = Api(await channel_to((await start_server(settings)).address))
    subscription_id = (await api.put_into(State.ACTIVE, "jobs/listen")).subscription_id

    for _ in range(3):
        outcomes = await asyncio.gather(
            *(
                outcome_of((api, second)[number % 2].heartbeat(subscription_id, f"pod-{number}"))
                for number in range(20)
            )
        )

        winners = [outcome for outcome in outcomes if not isinstance(outcome, LeaseHeld)]
        assert len(winners) == 1
        assert (await api.get(subscription_id)).runtime == winners[0].runtime
        await expire(conn, subscription_id)


async def test_any_state_is_answered_so_that_a_runtime_learns_to_stop(
    api: Api, conn: asyncpg.Connection
) -> None:
    for state in State:
        await add_entry(conn, state.value)
        subscription = await api.put_into(state, state.value)

        answer = await api.heartbeat(subscription.subscription_id, "pod-1", in_flight=1)

        assert state_of(answer) is state
        assert answer.etag == subscription.etag


async def test_draining_ends_when_nothing_is_in_flight(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    draining = await api.put_into(State.DRAINING, "jobs/listen")
    subscription_id = draining.subscription_id

    for fields in ({"in_flight": 2}, {}, {"in_flight": 1, "backlog": 0}):
        assert state_of(await api.heartbeat(subscription_id, "pod-1", **fields)) is State.DRAINING
    # Only the holder knows what is in flight.
    assert isinstance(await outcome_of(api.heartbeat(subscription_id, "pod-2", in_flight=0)), LeaseHeld)
    assert state_of(await api.get(subscription_id)) is State.DRAINING

    over = await api.heartbeat(subscription_id, "pod-1", in_flight=0)

    assert state_of(over) is State.DEACTIVATED
    assert over.last_event_type == "subscription.deactivated"
    assert (over.runtime.runtime_id, over.runtime.in_flight) == ("pod-1", 0)
    assert await api.get(subscription_id) == over
    last = (await api.events(subscription_id))[-1]
    assert (last.actor, last.reason) == ("noetl_grpc", "drained")
    again = await api.heartbeat(subscription_id, "pod-1", in_flight=0)
    assert again.etag == over.etag
    assert (await api.register("jobs/listen")).created


async def test_parallel_last_heartbeats_deactivate_once(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    draining = await api.put_into(State.DRAINING, "jobs/listen")

    await asyncio.gather(
        *(api.heartbeat(draining.subscription_id, "pod-1", in_flight=0) for _ in range(10)),
        *(outcome_of(api.act(Action.DRAIN, draining.subscription_id)) for _ in range(3)),
    )

    ends = [
        event
        for event in await api.events(draining.subscription_id)
        if event.event_type == "subscription.deactivated"
    ]
    assert len(ends) == 1


async def test_a_path_left_draining_by_a_dead_runtime_is_freed(api: Api, conn: asyncpg.Connection) -> None:
    """The crash between drain and deactivate, which once blocked the path for ever."""
    await add_entry(conn, "jobs/listen")
    draining = await api.put_into(State.DRAINING, "jobs/listen")
    subscription_id = draining.subscription_id
    await api.heartbeat(subscription_id, "pod-1", in_flight=1)

    alive = await api.register("jobs/listen")
    await expire(conn, subscription_id)
    answers = await asyncio.gather(*(api.register("jobs/listen") for _ in range(10)))

    assert not alive.created
    assert alive.subscription.subscription_id == subscription_id
    assert len({answer.subscription.subscription_id for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1
    new = answers[0].subscription
    assert new.subscription_id != subscription_id
    assert state_of(await api.act(Action.ACTIVATE, new.subscription_id)) is State.ACTIVE
    assert state_of(await api.heartbeat(subscription_id, "pod-1", in_flight=1)) is State.DEACTIVATED


async def test_an_expired_lease_frees_the_path_only_while_draining(
    api: Api, conn: asyncpg.Connection
) -> None:
    for state in (State.REGISTERED, State.ACTIVE, State.PAUSED):
        await add_entry(conn, state.value)
        subscription = await api.put_into(state, state.value)
        await api.heartbeat(subscription.subscription_id, "pod-1")
        await expire(conn, subscription.subscription_id)

        answer = await api.register(state.value)

        assert not answer.created
        assert answer.subscription.subscription_id == subscription.subscription_id
        assert not answer.subscription.runtime.alive


async def test_bad_heartbeats_name_the_field(api: Api) -> None:
    wrong: list[tuple[str, Any]] = [
        ("subscription_id", 0),
        ("runtime_id", ""),
        ("runtime_id", " "),
        ("runtime_id", "x" * 257),
        ("runtime_id", "a\0"),
        ("in_flight", -1),
        ("backlog", -1),
        ("lease", Duration(nanos=1)),
        ("lease", Duration(seconds=3601)),
        ("lease", Duration(seconds=-5)),
    ]
    for field, value in wrong:
        request = pb.HeartbeatSubscriptionRequest(
            **{"subscription_id": 5, "runtime_id": "pod-1", field: value}
        )

        error = await outcome_of(api.call("HeartbeatSubscription", request))

        assert isinstance(error, InvalidRequest), (field, value)
        assert error.violations[0][0] == field


async def test_a_heartbeat_for_nothing_is_not_found_and_leaves_no_trace(
    api: Api, conn: asyncpg.Connection
) -> None:
    error = await outcome_of(api.heartbeat(12345, "pod-1"))

    assert isinstance(error, NotFound)
    assert error.reason == "SUBSCRIPTION_NOT_FOUND"
    assert await conn.fetchval("SELECT count(*) FROM noetl.subscription_runtime") == 0
