"""Writes events, and parks those that can't be written. One function per statement; the caller owns the transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg

from noetl_grpc.core.envelope import COLUMNS, Batch, Problem, Reason, pick
from noetl_grpc.core.parking import DeadEvent, NewDeadEvent
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries

Key = tuple[int, int]
"""execution_id, event_id"""

#: How many locks the executions of the whole log share: one transaction must not use up the server's lock table.
_LOCK_STRIPES = 256
_LOCK_SPACE = 0x6E6F6501

#: What PostgreSQL says when the row itself is to blame; anything else may pass with time.
DATA_ERRORS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)


async def insert(conn: Connection, batch: Batch) -> set[Key]:
    """Store the events that are not stored yet; the keys of those."""
    rows = await conn.fetch(queries["insert_events"], *_arguments(batch))
    return {(row["execution_id"], row["event_id"]) for row in rows}


async def insert_one_by_one(
    conn: Connection, batch: Batch, rows: Sequence[int]
) -> tuple[set[Key], dict[int, Problem]]:
    """Store these rows of a batch that PostgreSQL refused as a whole: find those to blame by halving it."""
    try:
        async with conn.transaction():
            return await insert(conn, pick(batch, rows)), {}
    except DATA_ERRORS as error:
        if len(rows) == 1:
            return set(), {rows[0]: refusal(error)}
    half = len(rows) // 2
    stored, refused = await insert_one_by_one(conn, batch, rows[:half])
    more_stored, more_refused = await insert_one_by_one(conn, batch, rows[half:])
    return stored | more_stored, refused | more_refused


def refusal(error: asyncpg.PostgresError) -> Problem:
    """What a refusal means to the sender, without the driver's words."""
    match error:
        case asyncpg.ForeignKeyViolationError():
            return Problem(Reason.CATALOG_UNKNOWN, "catalog_id names no catalog entry")
        case asyncpg.CheckViolationError(constraint_name="chk_event_result_shape"):
            return Problem(Reason.RESULT_SHAPE, "result_json has a shape that the table does not accept")
        case asyncpg.InvalidTextRepresentationError() | asyncpg.UntranslatableCharacterError():
            return Problem(Reason.JSON_INVALID, "a JSON field holds what PostgreSQL can't store")
        case asyncpg.ProgramLimitExceededError():
            return Problem(Reason.STORE_REFUSED, "a text is too long for an index of the table")
        case asyncpg.CheckViolationError():
            return Problem(
                Reason.STORE_REFUSED, "a rule of the table forbids the row, or no partition takes it"
            )
        case _:
            return Problem(Reason.STORE_REFUSED, "the database refuses the row")


async def enqueue(
    conn: Connection, keys: Collection[Key], *, subject: str | None, traceparent: str | None
) -> int:
    """Make outbox rows of stored events; how many there were not yet."""
    status = await conn.execute(queries["enqueue_events"], *_split(keys), subject, traceparent)
    return _count(status)


async def differing(conn: Connection, batch: Batch) -> list[int]:
    """The rows of a batch whose key is stored with other content."""
    rows = await conn.fetch(queries["differing_events"], *_arguments(batch))
    return [row["place"] - 1 for row in rows]


async def catalogs_of(conn: Connection, execution_ids: Collection[int]) -> dict[int, int]:
    """The catalog entry of each execution that the database knows."""
    rows = await conn.fetch(queries["catalogs_of_executions"], list(execution_ids))
    return {row["execution_id"]: row["catalog_id"] for row in rows}


async def lock_executions(conn: Connection, execution_ids: Collection[int]) -> None:
    """Wait until no other transaction looks for keys of these executions, and keep others out until the end."""
    stripes = sorted({execution_id % _LOCK_STRIPES for execution_id in execution_ids})
    await conn.fetchval(queries["lock_executions"], _LOCK_SPACE, stripes)


async def stored_keys(
    conn: Connection, keys: Sequence[tuple[int, str]], *, tenant_id: str, organization_id: str
) -> set[tuple[int, str]]:
    """Those (execution_id, idempotency_key) that are stored already."""
    execution_ids, texts = zip(*keys, strict=True)
    rows = await conn.fetch(queries["stored_keys"], tenant_id, organization_id, execution_ids, texts)
    return {(row["execution_id"], row["idempotency_key"]) for row in rows}


async def park(conn: Connection, events: Collection[NewDeadEvent], *, parked_by: str) -> int:
    """Keep events that can't be stored; how many were not parked like this before."""
    latest = {(event.execution_id, event.event_id): event for event in events}
    columns = (
        [getattr(event, name) for event in latest.values()]
        for name in (
            "execution_id",
            "event_id",
            "catalog_id",
            "event_type",
            "node_name",
            "reason",
            "last_error",
            "payload_json",
        )
    )
    status = await conn.execute(queries["park_events"], *columns, parked_by)
    return _count(status)


async def list_dead(conn: Connection, *, after: Key, limit: int, with_payload: bool) -> list[DeadEvent]:
    """Unresolved parked events by key."""
    rows = await conn.fetch(queries["list_dead_events"], *after, limit, with_payload)
    return [DeadEvent(*row) for row in rows]


async def retryable_keys(conn: Connection, *, after: Key, limit: int) -> list[Key]:
    """The keys of unresolved parked events by key, but for the tailer's."""
    rows = await conn.fetch(queries["retryable_dead_events"], *after, limit)
    return [(row["execution_id"], row["event_id"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Held:
    """What a retry must know of a parked event."""

    parked_by: str | None
    is_resolved: bool
    payload_json: str


async def read_dead(conn: Connection, keys: Collection[Key]) -> dict[Key, Held]:
    """Those of the keys that are or were parked."""
    rows = await conn.fetch(queries["read_dead_events"], *_split(keys))
    return {
        (row["execution_id"], row["event_id"]): Held(row["parked_by"], row["is_resolved"], row["payload"])
        for row in rows
    }


async def lock_dead(conn: Connection, keys: Collection[Key]) -> set[Key]:
    """Hold these parked events until the transaction ends; those that are still unresolved then."""
    rows = await conn.fetch(queries["lock_dead_events"], *_split(keys))
    return {(row["execution_id"], row["event_id"]) for row in rows}


async def resolve_dead(conn: Connection, keys: Collection[Key]) -> None:
    """Mark parked events as stored."""
    await conn.execute(queries["resolve_dead_events"], *_split(keys))


async def note_failed_retries(conn: Connection, problems: Mapping[Key, Problem]) -> None:
    """Remember why parked events still can't be stored."""
    reasons = [problem.reason for problem in problems.values()]
    details = [problem.detail for problem in problems.values()]
    await conn.execute(queries["note_failed_retries"], *_split(problems), reasons, details)


def _arguments(batch: Batch) -> list[list[Any] | None]:
    columns = (batch[column.name] for column in COLUMNS)
    return [None if values.count(None) == len(values) else values for values in columns]


def _split(keys: Collection[Key]) -> tuple[list[int], list[int]]:
    return [execution_id for execution_id, _ in keys], [event_id for _, event_id in keys]


def _count(status: str) -> int:
    """The number of rows at the end of a command tag."""
    return int(status.rpartition(" ")[2])
