"""What an autoscaler asks of the outbox."""

from __future__ import annotations

from dataclasses import dataclass

from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rows that a claim would get now, and how long the first has waited."""

    rows: int
    oldest_seconds: float


async def count_waiting(conn: Connection, *, rows_max: int) -> Waiting:
    """Counted up to `rows_max`."""
    record = await conn.fetchrow(queries["count_waiting"], rows_max)
    return Waiting(rows=record["rows_waiting"], oldest_seconds=record["oldest_seconds"])
