"""Makes the event log's partitions before events need them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

import asyncpg

from noetl_grpc.core.partitions import IdRange, NewPartition, plan
from noetl_grpc.storage.locks import LockedOut, with_short_locks
from noetl_grpc.storage.queries import queries

logger = logging.getLogger(__name__)

_TABLE: Final = "noetl.event"
#: It runs again at the next start or purge, months before the partition is needed.
_PATIENCE_SECONDS: Final = 3.0
_PLANS_MAX: Final = 3
#: Another server made the partition, is just making it, or made one that overlaps it.
_MADE_MEANWHILE: Final = (
    asyncpg.DuplicateTableError,
    asyncpg.UniqueViolationError,
    asyncpg.InvalidObjectDefinitionError,
)


class Obstacle(StrEnum):
    """Why a partition could not be made."""

    EVENTS_IN_DEFAULT = "EVENTS_IN_DEFAULT"
    NOT_OWNER = "NOT_OWNER"
    LOCK_TIMEOUT = "LOCK_TIMEOUT"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class Blocked:
    """A partition that is not there and should be, and the SQL that makes it."""

    partition: NewPartition
    obstacle: Obstacle
    detail: str
    sql: str

    def __str__(self) -> str:
        return (
            f"partition noetl.{self.partition.name} can't be made: {self.detail}. This mends it:\n{self.sql}"
        )


@dataclass(slots=True)
class PartitionReport:
    """Which partitions were made (as `partition noetl.x`), and which could not be."""

    created: list[str] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of noetl.event; the default one has no bounds."""

    name: str
    is_default: bool
    lower: int | None
    upper: int | None


async def read_partitions(conn: asyncpg.Connection) -> list[Partition]:
    """List the partitions of noetl.event by their lower bound."""
    return [Partition(*row) for row in await conn.fetch(queries["event_partitions"])]


async def ensure_partitions(conn: asyncpg.Connection, *, now: datetime) -> PartitionReport:
    """Make the partitions for the current and the next two quarters, in both id layouts, where none lies yet.

    Never touches an event and never fails for what it finds: what can't be made is reported, and logged as a
    warning, with the SQL.
    """
    report = PartitionReport()
    try:
        log = await conn.fetchrow(queries["event_ownership"])
    except asyncpg.InsufficientPrivilegeError:
        # A role that may not even use the schema is told so elsewhere.
        return report
    if log is None or not log["is_by_range"]:
        return report
    done: set[tuple[int, int]] = set()
    for _ in range(_PLANS_MAX):
        partitions = await read_partitions(conn)
        planned = [item for item in _plan(partitions, now) if (item.lower, item.upper) not in done]
        if not planned:
            break
        for item in planned:
            default = next((partition.name for partition in partitions if partition.is_default), None)
            try:
                blocked = await _make(conn, item, default=default, is_owned=log["is_owned"])
            except _MADE_MEANWHILE:
                break
            done.add((item.lower, item.upper))
            if blocked is None:
                report.created.append(f"partition noetl.{item.name}")
            else:
                report.blocked.append(blocked)
                logger.warning("%s", blocked)
    return report


def _plan(partitions: list[Partition], now: datetime) -> list[NewPartition]:
    ranges = [IdRange(item.lower, item.upper) for item in partitions if not item.is_default]
    return plan(ranges, [item.name for item in partitions], now=now)


async def _make(
    conn: asyncpg.Connection, item: NewPartition, *, default: str | None, is_owned: bool
) -> Blocked | None:
    values = (item.name, item.lower, item.upper)
    sql: str = await conn.fetchval(queries["addition_of_partition"], *values)
    if not is_owned:
        return Blocked(item, Obstacle.NOT_OWNER, "this role does not own noetl.event", f"{sql};")
    # Looked up first because attaching would find out only by reading the whole default partition, locked.
    if default and await conn.fetchval(queries["holds_events_outside_partitions"], item.lower, item.upper):
        moving = await conn.fetchval(queries["addition_of_filled_partition"], *values, default)
        detail = f"events of its range are in noetl.{default}, where they stay for ever and can't be purged"
        return Blocked(item, Obstacle.EVENTS_IN_DEFAULT, detail, moving)
    try:
        await with_short_locks(conn, sql, table=_TABLE, patience_seconds=_PATIENCE_SECONDS, say=logger.info)
    except LockedOut as error:
        return Blocked(item, Obstacle.LOCK_TIMEOUT, str(error), f"{sql};")
    except asyncpg.CheckViolationError as error:
        moving = await conn.fetchval(queries["addition_of_filled_partition"], *values, default)
        return Blocked(item, Obstacle.EVENTS_IN_DEFAULT, str(error), moving)
    except _MADE_MEANWHILE:
        raise
    except asyncpg.PostgresError as error:
        if conn.is_closed():
            raise
        return Blocked(item, Obstacle.REFUSED, str(error), f"{sql};")
    return None
