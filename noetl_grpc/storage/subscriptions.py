"""Subscriptions in the log. Times in `noetl.event.created_at` are UTC without saying so; they leave here aware."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson

from noetl_grpc.core.following import Key, Page, Position
from noetl_grpc.core.lifecycle import Cause, LifecycleEvent, Runtime, State, Subscription
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """What registering needs to know of a catalog entry."""

    catalog_id: int
    kind: str
    version: int


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many subscriptions are in a state."""

    state: State
    subscriptions: int
    runtimes_dead: int


async def lock_path(conn: Connection, path: str) -> None:
    """Wait until nobody else registers the path; until the transaction ends nobody else will."""
    await conn.execute(queries["lock_subscription_path"], path)


async def lock(conn: Connection, subscription_id: int) -> None:
    """Wait until nobody else changes the subscription; until the transaction ends nobody else will."""
    await conn.execute(queries["lock_subscription"], subscription_id)


async def check_lock_connection(conn: Connection) -> None:
    """Fail if the connection is gone, and its locks with it."""
    await conn.execute(queries["check_lock_connection"])


async def read_clock(conn: Connection) -> datetime:
    """The database's time, which all servers share."""
    now: datetime = await conn.fetchval(queries["read_clock"])
    return now


async def newest_catalog_entry(conn: Connection, path: str) -> CatalogEntry | None:
    """The entry of a path with the highest version."""
    row = await conn.fetchrow(queries["newest_catalog_entry"], path)
    return None if row is None else CatalogEntry(**row)


async def read(conn: Connection, subscription_id: int) -> tuple[Subscription, datetime] | None:
    """The subscription as it is, and the database's time."""
    row = await conn.fetchrow(queries["read_subscription"], subscription_id)
    return None if row is None else (_subscription(row), row["now"])


async def live_of_path(conn: Connection, path: str) -> list[Subscription]:
    """Subscriptions of a path that are not DEACTIVATED, newest change first."""
    return [_subscription(row) for row in await conn.fetch(queries["live_subscriptions_of_path"], path)]


async def draining_since(conn: Connection, subscription_id: int) -> datetime | None:
    """When a subscription that is DRAINING began to."""
    created_at = await conn.fetchval(queries["draining_since"], subscription_id)
    return None if created_at is None else _utc(created_at)


async def event_of_request(
    conn: Connection, subscription_id: int, *, request_id: str
) -> LifecycleEvent | None:
    """The event that a request of this id wrote."""
    row = await conn.fetchrow(queries["lifecycle_event_of_request"], subscription_id, request_id)
    return None if row is None else _event(row)


async def append(conn: Connection, event: LifecycleEvent) -> LifecycleEvent:
    """Store an event and return it as stored: an id that another event of the execution has is passed over."""
    while not await conn.fetchval(
        queries["append_lifecycle_event"],
        event.subscription_id,
        event.catalog_id,
        event.event_id,
        event.event_type,
        event.path,
        event.state.value,
        orjson.dumps(event.context()).decode(),
        orjson.dumps(event.meta()).decode(),
        event.created_at,
    ):
        event = replace(event, event_id=event.event_id + 1)
    return event


async def save_runtime(conn: Connection, subscription_id: int, runtime: Runtime) -> None:
    """Store what a runtime reported."""
    await conn.execute(
        queries["save_runtime"],
        subscription_id,
        runtime.runtime_id,
        runtime.in_flight,
        runtime.backlog,
        runtime.last_heartbeat_at,
        runtime.lease_expires_at,
    )


async def list_page(
    conn: Connection, *, after: int, states: Collection[State], path_prefix: str, limit: int
) -> list[Subscription]:
    """Subscriptions behind an id, by id; no states means all. In a transaction of its own: it sets how to plan."""
    words = [state.value for state in states] or None
    await conn.execute(queries["walk_lifecycle_index"])
    rows = await conn.fetch(queries["list_subscriptions"], after, words, path_prefix, limit)
    return [_subscription(row) for row in rows]


async def list_as_of(
    conn: Connection, *, after: int, path_prefix: str, snapshot: str | None, limit: int
) -> list[Subscription]:
    """The same in all states, as a snapshot showed it, or as it is."""
    if snapshot is None:
        return await list_page(conn, after=after, states=(), path_prefix=path_prefix, limit=limit)
    await conn.execute(queries["walk_lifecycle_index"])
    rows = await conn.fetch(queries["list_subscriptions_seen"], after, path_prefix, limit, snapshot)
    return [_subscription(row) for row in rows]


async def read_as_of(conn: Connection, subscription_id: int, *, snapshot: str | None) -> Subscription | None:
    """One subscription as a snapshot showed it, or as it is."""
    if snapshot is None:
        row = await conn.fetchrow(queries["read_subscription"], subscription_id)
    else:
        row = await conn.fetchrow(queries["read_subscription_seen"], subscription_id, snapshot)
    return None if row is None else _subscription(row)


async def gap_keys(conn: Connection, position: Position, *, limit: int) -> tuple[list[Key], Position]:
    """The next lifecycle events of the gap a position is in, and the position behind them.

    In a transaction of its own: it sets how to plan.
    """
    await conn.execute(queries["plan_by_values"])
    rows = await conn.fetch(
        queries["lifecycle_gap_keys"],
        position.seen,
        position.target,
        position.at_xact,
        position.at_event,
        limit,
    )
    keys = [Key(*row) for row in rows]
    return keys, position.behind(keys, limit=limit)


async def read_changes(conn: Connection, page: Page) -> dict[tuple[int, int], Subscription]:
    """Subscriptions as of a page's events, by (subscription_id, event_id); events that do not count are left out."""
    subscription_ids, event_ids = [key.execution_id for key in page.keys], [key.event_id for key in page.keys]
    rows = await conn.fetch(queries["read_changes"], subscription_ids, event_ids)
    return {(row["subscription_id"], row["event_id"]): _subscription(row) for row in rows}


async def last_events_before(conn: Connection, page: Page) -> dict[int, int]:
    """The last event of each of a page's subscriptions for somebody who has read up to the page."""
    before = page.before
    if not before.seen:
        return {}
    rows = await conn.fetch(
        queries["last_events_before"],
        list({key.execution_id for key in page.keys}),
        before.seen,
        before.target,
        before.at_xact,
        before.at_event,
    )
    return {row["execution_id"]: row["event_id"] for row in rows if row["event_id"] is not None}


async def list_events(
    conn: Connection, subscription_id: int, *, after: int, limit: int
) -> Sequence[LifecycleEvent]:
    """Lifecycle events behind an event, oldest first."""
    rows = await conn.fetch(queries["list_lifecycle_events"], subscription_id, after, limit)
    return [_event(row) for row in rows]


async def count(conn: Connection) -> list[StateCount]:
    """Subscriptions by state; a state that nobody is in is left out."""
    rows = await conn.fetch(queries["count_subscriptions"])
    return [StateCount(State(row["state"]), row["subscriptions"], row["runtimes_dead"]) for row in rows]


def _utc(created_at: datetime) -> datetime:
    return created_at.replace(tzinfo=UTC)


def _subscription(row: Any) -> Subscription:
    return Subscription(
        subscription_id=row["subscription_id"],
        path=row["path"],
        catalog_id=row["catalog_id"],
        state=State(row["state"]),
        last_event_type=row["event_type"],
        last_event_id=row["event_id"],
        updated_at=_utc(row["created_at"]),
        runtime=None if row["runtime_id"] is None else _runtime(row),
    )


def _runtime(row: Any) -> Runtime:
    return Runtime(
        runtime_id=row["runtime_id"],
        last_heartbeat_at=row["last_heartbeat_at"],
        lease_expires_at=row["lease_expires_at"],
        alive=row["alive"],
        in_flight=row["in_flight"],
        backlog=row["backlog"],
    )


def _event(row: Any) -> LifecycleEvent:
    return LifecycleEvent(
        subscription_id=row["subscription_id"],
        event_id=row["event_id"],
        event_type=row["event_type"],
        state=State(row["state"]),
        path=row["path"],
        catalog_id=row["catalog_id"],
        created_at=_utc(row["created_at"]),
        cause=Cause(
            actor=row["actor"] or "",
            reason=row["reason"] or "",
            request_id=row["request_id"] or "",
        ),
    )
