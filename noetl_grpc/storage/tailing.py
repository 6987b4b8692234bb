"""The tailer's side of the database: its session, its cursor, the bodies of events, parked publications."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

import asyncpg

from noetl_grpc.core.following import Key, Position
from noetl_grpc.core.tailing import BODY_BYTES_MAX, Cursor, Event
from noetl_grpc.errors import DatabaseUnavailable
from noetl_grpc.storage.pool import CONNECT_SECONDS, Connection, translate_errors
from noetl_grpc.storage.queries import queries

CURSOR: Final = "event_stream_tailer"
#: The sessions' application_name, followed by the id of the process.
APPLICATION: Final = "noetl_grpc tailer"
LOCK_SPACE: Final = 0x6E6F6510

STANDBY: Final = "the database is a standby, where the log can't be followed"

#: How long a statement of a tailer's may take; a page of a log without its index is slow.
STATEMENT_SECONDS: Final = 60.0
#: A leader that is frozen or cut off must lose its session, and with it the lock.
IDLE_SECONDS: Final = 10

_LEADER_SETTINGS: Final = {
    "idle_session_timeout": f"{IDLE_SECONDS}s",
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": f"{IDLE_SECONDS * 1000}",
    # A crash of the server may lose the last moves; what it then publishes again carries the same message ids.
    "synchronous_commit": "off",
}
#: A page comes in order from the indexes of many partitions: nothing else is ever faster, whatever the statistics say,
#: and planning it anew each time costs more than reading it.
_READER_SETTINGS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
}


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What a tailer must know of a database before it reads its log."""

    in_recovery: bool
    system_identifier: int
    #: Where NoETL's own tailer stood, if one ever ran.
    seed_event_id: int | None


@asynccontextmanager
async def leader_session(url: str) -> AsyncIterator[Connection]:
    """A connection that ends by itself when nobody uses it: whoever holds a lock on it is alive."""
    async with _session(url, _LEADER_SETTINGS, timeout_seconds=IDLE_SECONDS / 2) as conn:
        yield conn


@asynccontextmanager
async def reader_session(url: str) -> AsyncIterator[Connection]:
    """A connection for reading the log from all its partitions in the order of commits."""
    async with _session(url, _READER_SETTINGS, timeout_seconds=STATEMENT_SECONDS) as conn:
        yield conn


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Connection]:
    """A connection for long work that no other call should wait for."""
    async with _session(url, {}, timeout_seconds=3600) as conn:
        yield conn


@asynccontextmanager
async def _session(
    url: str, settings: dict[str, str], *, timeout_seconds: float
) -> AsyncIterator[Connection]:
    with translate_errors():
        conn = await asyncpg.connect(
            url,
            timeout=CONNECT_SECONDS,
            command_timeout=timeout_seconds,
            server_settings={
                "application_name": f"{APPLICATION} {os.getpid()}",
                "timezone": "UTC",
                **settings,
            },
        )
        try:
            yield conn
        finally:
            # Never politely: a server that does not answer must not hold us up.
            conn.terminate()


async def database_facts(conn: Connection) -> DatabaseFacts:
    row = await conn.fetchrow(queries["database_facts"])
    statement = row["seed_cursor_statement"]
    return DatabaseFacts(
        row["in_recovery"], row["system_identifier"], await conn.fetchval(statement) if statement else None
    )


async def try_to_lead(conn: Connection, *, shard: int) -> bool:
    """Whether this session is the one that publishes the shard's events from now on."""
    return bool(await conn.fetchval(queries["try_to_lead"], LOCK_SPACE, shard))


async def take_cursor(conn: Connection, *, shard: int) -> Cursor:
    """The cursor in a new epoch of ours; a new one has no position yet."""
    await conn.execute(queries["start_cursor"], CURSOR, shard)
    return _cursor(await conn.fetchrow(queries["take_cursor"], CURSOR, shard))


async def read_cursor(conn: Connection, *, shard: int) -> Cursor | None:
    row = await conn.fetchrow(queries["read_cursor"], CURSOR, shard)
    return None if row is None else _cursor(row)


async def save_cursor(
    conn: Connection, cursor: Cursor, *, shard: int, moved_at: datetime | None = None
) -> bool:
    """Whether the cursor was still ours to move."""
    position = cursor.position
    epoch = await conn.fetchval(
        queries["save_cursor"],
        CURSOR,
        shard,
        cursor.epoch,
        position.seen if position else None,
        position.target if position else None,
        position.at_xact if position and position.target else None,
        position.at_event if position and position.target else None,
        cursor.system_identifier,
        cursor.seen_at,
        cursor.restored_at,
        moved_at,
    )
    return epoch is not None


def _cursor(row: asyncpg.Record) -> Cursor:
    position = None
    if row["seen"] is not None:
        position = Position(row["seen"], row["target"], row["at_xact"] or 0, row["at_event"] or 0)
    return Cursor(
        epoch=row["epoch"],
        position=position,
        system_identifier=row["system_identifier"],
        seen_at=row["seen_at"],
        restored_at=row["restored_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What of a log counts that is read from its beginning."""

    above_event_id: int = -(2**63)
    #: What a former cluster had shown, in its own transaction ids.
    known: str | None = None
    #: By created_at, UTC without a zone.
    since: datetime = datetime.min

    @property
    def can_be_interrupted(self) -> bool:
        """Whether a place inside it says everything that is needed to go on."""
        return self.known is None and self.since == datetime.min


async def history_keys(
    conn: Connection, position: Position, history: History, *, limit: int
) -> tuple[list[Key], Position]:
    """Like `gap_keys` for a log that is read from its beginning."""
    rows = await conn.fetch(
        queries["history_keys"],
        position.at_xact,
        position.at_event,
        position.target,
        history.above_event_id,
        history.known,
        limit,
        history.since,
    )
    keys = [*map(Key._make, rows)]
    return keys, position.behind(keys, limit=limit)


async def without_restored(conn: Connection, keys: list[Key], *, restored_at: datetime) -> list[Key]:
    """The keys less those that came with a restored log."""
    rows = await conn.fetch(
        queries["restored_keys"],
        [key.execution_id for key in keys],
        [key.event_id for key in keys],
        restored_at,
    )
    restored = {(row["execution_id"], row["event_id"]) for row in rows}
    return [key for key in keys if (key.execution_id, key.event_id) not in restored]


async def is_this_clusters_log(conn: Connection, seen: str) -> bool:
    """Whether the transaction ids of a snapshot still mean the same, although the cluster has another identifier."""
    return bool(await conn.fetchval(queries["is_this_clusters_log"], seen))


class Moment(NamedTuple):
    """Overlap mode: an event by the time it was made."""

    created_at: datetime
    event_id: int
    execution_id: int
    event_type: str | None

    @property
    def identity(self) -> tuple[int, int]:
        return self.execution_id, self.event_id

    @property
    def key(self) -> Key:
        return Key(0, self.event_id, self.execution_id, self.event_type)


async def look_at_time(conn: Connection) -> tuple[str, datetime]:
    """The snapshot of now, and what time it is there."""
    row = await conn.fetchrow(queries["look_at_time"])
    if row["in_recovery"]:
        raise DatabaseUnavailable(STANDBY)
    return row["snapshot"], row["now"]


async def moments(
    conn: Connection,
    *,
    since: datetime,
    at: Moment | None,
    first_start: datetime,
    above_event_id: int,
    limit: int,
) -> list[Moment]:
    """One page of the events made at or after `since` and behind a place, oldest first."""
    created_at, event_id, execution_id = at[:3] if at else (datetime.min, -(2**63), -(2**63))
    rows = await conn.fetch(
        queries["moments"], since, created_at, event_id, execution_id, first_start, above_event_id, limit
    )
    return [Moment(*row) for row in rows]


async def count_moments(conn: Connection, *, since: datetime) -> int:
    return int(await conn.fetchval(queries["count_moments"], since))


async def event_bodies(conn: Connection, keys: Sequence[Key], *, inline_bytes_max: int) -> list[Event | None]:
    """What is sent for each event; None for one that is no longer there. Larger bodies are left out."""
    rows = await conn.fetch(
        queries["event_bodies"],
        [key.execution_id for key in keys],
        [key.event_id for key in keys],
        inline_bytes_max,
        BODY_BYTES_MAX,
    )
    events: list[Event | None] = [None] * len(keys)
    for place, event_type, tenant_id, organization_id, traceparent, byte_length, body, sha256 in rows:
        key = keys[place - 1]
        events[place - 1] = Event(
            key.execution_id,
            key.event_id,
            event_type,
            tenant_id,
            organization_id,
            traceparent,
            body,
            byte_length,
            sha256,
        )
    return events


async def park(conn: Connection, key: Key, *, error: str) -> None:
    """Keep an event that the broker refuses for good."""
    await conn.execute(
        queries["park_published_event"], key.execution_id, key.event_id, "PUBLISH_REFUSED", error
    )


async def count_parked(conn: Connection) -> int:
    return int(await conn.fetchval(queries["count_parked_publications"]))


async def count_gap(conn: Connection, position: Position, *, now: str) -> int:
    """How many committed events are not yet published."""
    return int(
        await conn.fetchval(
            queries["count_gap"], position.seen, position.target, position.at_xact, position.at_event, now
        )
    )
