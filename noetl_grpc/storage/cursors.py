"""What became visible in the log since a snapshot, page by page."""

from __future__ import annotations

from noetl_grpc.core.following import Key, Position
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


async def look_at_log(conn: Connection) -> str | None:
    """The snapshot of now; None on a standby, whose snapshots do not tell what is still running."""
    row = await conn.fetchrow(queries["look_at_log"])
    return None if row["in_recovery"] else row["snapshot"]


async def can_follow_snapshots(conn: Connection) -> bool:
    """Whether the log has what `gap_keys` needs; without it only recent events can be looked at."""
    return bool(await conn.fetchval(queries["can_follow_snapshots"]))


async def prefer_generic_plans(conn: Connection) -> None:
    """Call it in the transaction that reads a gap of all executions."""
    await conn.execute(queries["prefer_generic_plans"])


async def gap_keys(conn: Connection, position: Position, *, limit: int) -> tuple[list[Key], Position]:
    """The next page of the gap a position is in, and the position behind it. Its target is None at the end."""
    rows = await conn.fetch(
        queries["gap_keys"], position.seen, position.target, position.at_xact, position.at_event, limit
    )
    keys = [*map(Key._make, rows)]
    return keys, position.behind(keys, limit=limit)


async def gap_keys_of_execution(
    conn: Connection, position: Position, *, execution_id: int, limit: int
) -> tuple[list[Key], Position]:
    """The same for one execution."""
    rows = await conn.fetch(
        queries["gap_keys_of_execution"],
        position.seen,
        position.target,
        position.at_xact,
        position.at_event,
        limit,
        execution_id,
    )
    keys = [*map(Key._make, rows)]
    return keys, position.behind(keys, limit=limit)


async def recent_keys(conn: Connection, *, seconds: float, limit: int) -> list[Key]:
    """Overlap mode: the youngest events, oldest first."""
    rows = await conn.fetch(queries["recent_keys"], seconds, limit)
    return [Key(0, *row) for row in reversed(rows)]
