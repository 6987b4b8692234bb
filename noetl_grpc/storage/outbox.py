"""The statements of the outbox. Each is one function; whoever needs several to be atomic opens the transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from noetl_grpc.core.outbox import (
    ROW_BYTES_MAX,
    ClaimedRow,
    DeadFilter,
    DeadRow,
    Failure,
    Heads,
    HeldRow,
    Message,
    Outcome,
    Stats,
    Status,
    Verdict,
)
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries

#: Rows that are stored in less are measured only where it matters; claim_rows has the same number.
SMALL_ROW_BYTES = 8192
#: How far the database's clock may have been set back while a claim lived.
CLOCK_SLACK = timedelta(minutes=1)


async def enqueue_messages(
    conn: Connection, messages: Sequence[Message]
) -> dict[tuple[int | None, int], int]:
    """Add messages; the outbox_ids of those that became rows, by key."""
    records = await conn.fetch(
        queries["enqueue_messages"],
        [message.execution_id for message in messages],
        [message.event_id for message in messages],
        [message.subject for message in messages],
        [message.payload_json for message in messages],
        [message.payload_codec for message in messages],
        [message.headers_json for message in messages],
        [message.available_at for message in messages],
    )
    return {(execution_id, event_id): outbox_id for outbox_id, execution_id, event_id in records}


async def find_unstorable(conn: Connection, texts: Sequence[str]) -> int | None:
    """The first text that PostgreSQL does not take as JSON."""
    begin, end = 0, len(texts)
    while begin < end:
        middle = (begin + end) // 2
        try:
            await conn.fetchval(queries["parse_json"], texts[begin : middle + 1])
        except asyncpg.DataError:
            end = middle
        else:
            begin = middle + 1
    return begin if begin < len(texts) else None


async def find_messages(
    conn: Connection, keys: Iterable[tuple[int | None, int]]
) -> dict[tuple[int | None, int], int]:
    """The outbox_ids of messages that have a row."""
    keys = list(keys)
    of_executions = [key for key in keys if key[0] is not None]
    records = await conn.fetch(
        queries["find_messages"],
        [execution_id for execution_id, _ in of_executions],
        [event_id for _, event_id in of_executions],
        [event_id for execution_id, event_id in keys if execution_id is None],
    )
    return {(execution_id, event_id): outbox_id for outbox_id, execution_id, event_id in records}


async def claim_rows(
    conn: Connection,
    claim: UUID,
    *,
    limit: int,
    bytes_max: int,
    lease: timedelta,
    at_least_one: bool,
    outbox_id_min: int,
    with_expired: bool,
) -> list[ClaimedRow]:
    """Take due rows, the oldest first; they come in the order of their ids."""
    records = await conn.fetch(
        queries["claim_rows"],
        limit,
        bytes_max,
        claim,
        lease,
        at_least_one,
        outbox_id_min,
        with_expired,
        _needs_exact_sizes(limit, bytes_max),
    )
    # RETURNING promises no order; outbox_id is the first column and unique.
    return sorted(map(ClaimedRow._make, records))


async def lock_heads(conn: Connection, *, lanes: int, after: int, walk_max: int) -> Heads:
    """Lock the heads of executions behind `after`, where they are due; for `claim_runs` in the same transaction."""
    return Heads(*await conn.fetchrow(queries["lock_heads"], lanes, after, walk_max))


async def claim_runs(
    conn: Connection,
    claim: UUID,
    heads: Heads,
    *,
    limit: int,
    bytes_max: int,
    lease: timedelta,
    at_least_one: bool,
    rows_per_execution: int,
) -> list[ClaimedRow]:
    """Take the gapless due runs that begin with these heads, in the order of their ids."""
    records = await conn.fetch(
        queries["claim_runs"],
        heads.execution_ids,
        heads.outbox_ids,
        claim,
        limit,
        rows_per_execution,
        bytes_max,
        lease,
        at_least_one,
        _needs_exact_sizes(limit, bytes_max),
    )
    return sorted(map(ClaimedRow._make, records))


async def claim_rows_without_execution(
    conn: Connection,
    claim: UUID,
    *,
    limit: int,
    bytes_max: int,
    lease: timedelta,
    at_least_one: bool,
    outbox_id_min: int,
) -> list[ClaimedRow]:
    """Take due rows that have no order, the oldest first."""
    records = await conn.fetch(
        queries["claim_rows_without_execution"],
        limit,
        bytes_max,
        claim,
        lease,
        at_least_one,
        outbox_id_min,
        _needs_exact_sizes(limit, bytes_max),
    )
    return sorted(map(ClaimedRow._make, records))


async def look_for_due(conn: Connection, *, above: int) -> tuple[float | None, int]:
    """Seconds until the next row above an id is due (None when none waits), and the highest id of a waiting row."""
    seconds, highest = await conn.fetchrow(queries["look_for_due"], above)
    return seconds, highest or 0


async def mark_published(conn: Connection, outbox_ids: Sequence[int], claim: UUID | None) -> int:
    """Publish rows that the claim holds, or whoever holds them without one; how many became PUBLISHED."""
    if claim is None:
        return _affected(await conn.execute(queries["mark_published_by_anyone"], outbox_ids))
    return _affected(await conn.execute(queries["mark_published"], outbox_ids, claim))


async def read_holders(conn: Connection, outbox_ids: Sequence[int]) -> dict[int, tuple[Status, UUID | None]]:
    """Status and claim of those rows that exist."""
    records = await conn.fetch(queries["read_holders"], outbox_ids)
    return {outbox_id: (Status(status), claim) for outbox_id, status, claim in records}


async def lock_for_failure(conn: Connection, outbox_ids: Sequence[int]) -> dict[int, HeldRow]:
    """Those rows that exist, locked until the transaction ends."""
    records = await conn.fetch(queries["lock_for_failure"], outbox_ids)
    return {
        outbox_id: HeldRow(outbox_id, execution_id, Status(status), claim, attempts, dead)
        for outbox_id, execution_id, status, claim, attempts, dead in records
    }


async def fail_rows(conn: Connection, failures: Sequence[Failure], verdicts: Sequence[Verdict]) -> None:
    """Write down the failures whose verdict marks the row."""
    marked = [
        (failure, verdict) for failure, verdict in zip(failures, verdicts, strict=True) if verdict.is_marked
    ]
    await conn.execute(
        queries["fail_rows"],
        [verdict.outbox_id for _, verdict in marked],
        [failure.error for failure, _ in marked],
        [verdict.delay_seconds for _, verdict in marked],
        [verdict.outcome is Outcome.DEAD for _, verdict in marked],
    )


async def release_younger(conn: Connection, older: Sequence[HeldRow], *, but_not: Sequence[int]) -> list[int]:
    """Give back what the claims of these rows hold of their executions behind them; the ids, ascending."""
    records = await conn.fetch(
        queries["release_younger"],
        [row.execution_id for row in older],
        [row.outbox_id for row in older],
        [row.claim for row in older],
        but_not,
    )
    return sorted(outbox_id for (outbox_id,) in records)


async def extend_rows(
    conn: Connection, outbox_ids: Sequence[int], claim: UUID, *, lease: timedelta
) -> dict[int, datetime]:
    """Hold rows of a claim longer, from now on; until when, by row."""
    return dict(await conn.fetch(queries["extend_rows"], outbox_ids, claim, lease))


async def extend_claim(
    conn: Connection, claim: UUID, *, claimed_at: datetime, lease: timedelta
) -> dict[int, datetime]:
    """Hold all rows of a claim longer, from now on; until when, by row."""
    return dict(await conn.fetch(queries["extend_claim"], claim, lease, claimed_at - CLOCK_SLACK))


async def release_rows(conn: Connection, outbox_ids: Sequence[int], claim: UUID) -> dict[int, int | None]:
    """Give back rows of a claim as if they had not been claimed; their executions, by row."""
    return dict(await conn.fetch(queries["release_rows"], outbox_ids, claim))


async def release_claim(conn: Connection, claim: UUID, *, claimed_at: datetime) -> list[int]:
    """Give back all rows of a claim as if they had not been claimed; their ids."""
    records = await conn.fetch(queries["release_claim"], claim, claimed_at - CLOCK_SLACK)
    return [outbox_id for (outbox_id,) in records]


async def abandon_rows(
    conn: Connection, outbox_ids: Sequence[int], claim: UUID, *, attempts_max: int, error: str
) -> dict[int, bool]:
    """Give back rows of a claim with their attempt kept; whether each is dead now, by row."""
    return dict(await conn.fetch(queries["abandon_rows"], outbox_ids, claim, attempts_max, error))


async def count_pending(conn: Connection) -> int:
    """How many rows a claim without limit would get."""
    pending: int = await conn.fetchval(queries["count_pending"])
    return pending


async def read_stats(conn: Connection) -> Stats:
    """Undelivered rows by situation."""
    return Stats(**await conn.fetchrow(queries["read_stats"]))


async def list_dead_rows(
    conn: Connection, dead: DeadFilter, *, after: int, limit: int, bytes_max: int, with_payload: bool
) -> list[DeadRow]:
    """Dead rows behind an id, by id; fewer than the limit also when they are heavy."""
    records = await conn.fetch(
        queries["list_dead_rows"],
        *_filter_arguments(dead),
        after,
        limit,
        bytes_max,
        with_payload,
        ROW_BYTES_MAX,
    )
    return [DeadRow._make(record) for record in records]


async def count_dead_rows(conn: Connection, dead: DeadFilter) -> int:
    """How many dead rows there are."""
    rows: int = await conn.fetchval(queries["count_dead_rows"], *_filter_arguments(dead))
    return rows


async def requeue_dead_rows(conn: Connection, dead: DeadFilter, *, after: int, limit: int) -> list[int]:
    """Make dead rows behind an id due again; their ids, ascending."""
    records = await conn.fetch(queries["requeue_dead_rows"], *_filter_arguments(dead), after, limit)
    return sorted(outbox_id for (outbox_id,) in records)


def _filter_arguments(dead: DeadFilter) -> tuple[object, ...]:
    return dead.error_contains, dead.subject, dead.execution_id, dead.dead_before, dead.outbox_ids


def _affected(command_tag: str) -> int:
    return int(command_tag.rpartition(" ")[2])


def _needs_exact_sizes(limit: int, bytes_max: int) -> bool:
    """Whether small rows can fill the bytes; measuring a row costs as much as sending it."""
    return bytes_max < limit * SMALL_ROW_BYTES
