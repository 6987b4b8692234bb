"""The log's side of a comparison with the stream: everything stays in tables of one session."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final

from noetl_grpc.core.following import Key
from noetl_grpc.core.tailing import Cursor
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries

_LOCK_SPACE: Final = 0x6E6F6511
_FIRST: Final = Key(-(2**63), -(2**63), -(2**63), None)


async def begin(conn: Connection, *, shard: int) -> bool:
    """Whether nobody else compares this shard; its tables are there from now on."""
    if not await conn.fetchval(queries["try_to_reconcile"], _LOCK_SPACE, shard):
        return False
    await conn.execute(queries["make_streamed"])
    await conn.execute(queries["make_passed"])
    return True


async def add_streamed(conn: Connection, keys: Collection[tuple[int, int]]) -> None:
    """Events, as (execution_id, event_id), that the stream holds."""
    await conn.copy_records_to_table(
        "streamed", schema_name="pg_temp", records=keys, columns=("execution_id", "event_id")
    )


async def gather_passed(conn: Connection, cursor: Cursor, *, since: datetime, until: datetime) -> None:
    """The events of that time which the tailer has passed, and which the stream should hold."""
    position = cursor.position
    assert position is not None
    await conn.execute(
        queries["gather_passed"],
        since,
        until,
        position.seen,
        cursor.restored_at,
        position.target,
        position.at_xact,
        position.at_event,
    )


async def gather_passed_by_time(
    conn: Connection, *, made_by: datetime, since: datetime, until: datetime
) -> None:
    """The same for a log that is read by time."""
    await conn.execute(queries["gather_passed_by_time"], since, until, made_by)


async def gather_parked(conn: Connection, *, since: datetime, until: datetime) -> None:
    """Events that the broker refused: they were passed, too."""
    await conn.execute(queries["gather_parked"], since, until)


async def keep_missing(conn: Connection) -> tuple[int, int]:
    """How many events were looked for, and how many the stream does not hold."""
    passed = int(await conn.fetchval(queries["count_passed"]))
    await conn.execute(queries["keep_missing"])
    await conn.execute(queries["index_missing"])
    return passed, int(await conn.fetchval(queries["count_passed"]))


async def missing_keys(conn: Connection, *, after: Key | None, limit: int) -> list[Key]:
    """One page of what is missing."""
    place = after or _FIRST
    rows = await conn.fetch(queries["missing_keys"], place.xact_id, place.event_id, place.execution_id, limit)
    return [Key(*row) for row in rows]


async def resolve_parked(conn: Connection, keys: Collection[Key]) -> None:
    """These events are in the stream now."""
    await conn.execute(
        queries["resolve_parked"], [key.execution_id for key in keys], [key.event_id for key in keys]
    )
