"""The outbox of one shard as this process works on it: its statements, and where to look for due rows next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from noetl_grpc.core.outbox import (
    ROW_BYTES_MAX,
    ClaimedRow,
    ClaimToken,
    Failure,
    Message,
    Outcome,
    Stats,
    Status,
    Verdict,
    claim_key,
    heads_of_failures,
    is_undeliverable,
    judge,
    split_by_weight,
    weight_of,
)
from noetl_grpc.errors import Conflict, NoetlError
from noetl_grpc.metrics import Metrics
from noetl_grpc.storage import outbox
from noetl_grpc.storage.pool import Connection, Pool, retry_conflicts

logger = logging.getLogger("noetl_grpc.outbox")

#: How often rows below the low-water mark are looked for, however many rows there are above it.
FULL_LOOK_SECONDS = 0.2
#: Below so many claimed rows nothing is worth skipping, and claims are strictly oldest first.
ROWS_WORTH_SKIPPING = 5000
#: A full look that is slow is made rarely, so that it takes at most this share of the time.
FULL_LOOK_SHARE = 0.05
LONG_AGO = datetime(1970, 1, 2, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a claimer asks for."""

    limit: int
    bytes_max: int
    lease: timedelta
    ordered: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows that are held, and the token that proves it."""

    token: ClaimToken
    rows: Sequence[ClaimedRow]
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class Published:
    """What a mark did."""

    marked: int
    stale_ids: Sequence[int] = ()
    unknown_ids: Sequence[int] = ()


class LowWater:
    """From which outbox_id on due rows are looked for.

    While somebody holds an old snapshot the index keeps an entry for every row that was ever claimed, and while
    rows wait for another attempt they stand in front; both would be walked over by every claim. The mark is only
    a hint: rows below it (late commits, failed rows that are due again) are found by a look without it, which is
    made when the look above found too little, and every now and then.
    """

    def __init__(self) -> None:
        self._mark = 0
        self._full_look_due = 0.0
        self._lowered = 0
        self._claimed = 0

    def begin(self, now: float) -> tuple[int, int]:
        """Where to look from, and what to tell `advance`."""
        everywhere = now >= self._full_look_due or self._claimed < ROWS_WORTH_SKIPPING
        return (0 if everywhere else self._mark), self._lowered

    def advance(self, ticket: int, rows: Sequence[ClaimedRow]) -> None:
        """These were the first due rows that could be had; the mark follows unless a row came back meanwhile."""
        self._claimed += len(rows)
        if rows and ticket == self._lowered:
            self._mark = max(self._mark, rows[-1].outbox_id + 1)

    def looked_everywhere(self, now: float, *, seconds: float) -> None:
        """A look without the mark is over, and took so long."""
        self._full_look_due = now + max(FULL_LOOK_SECONDS, seconds / FULL_LOOK_SHARE)

    def lower(self, outbox_id: int = 0) -> None:
        """A row came back."""
        self._mark = min(self._mark, outbox_id)
        self._lowered += 1


class OutboxShard:
    """One shard's outbox."""

    def __init__(self, number: int, pool: Pool, *, attempts_max: int, metrics: Metrics) -> None:
        self.number = number
        self._pool = pool
        self._attempts_max = attempts_max
        self._metrics = metrics
        self._low_water = LowWater()
        self._chores: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Finish what was begun for callers who are gone."""
        if self._chores:
            await asyncio.wait(self._chores, timeout=5)

    async def enqueue(self, messages: Sequence[Message]) -> tuple[int, list[int]]:
        """Add messages in one transaction; how many are new, and the outbox_id of each."""
        distinct = list({message.key: message for message in reversed(messages)}.values())[::-1]
        added, ids = await retry_conflicts(lambda: self._enqueue(distinct))
        self._metrics.outbox_enqueued.inc(added)
        return added, [ids[message.key] for message in messages]

    async def _enqueue(self, distinct: Sequence[Message]) -> tuple[int, dict[tuple[int | None, int], int]]:
        async with self._pool.transaction() as conn:
            ids = await outbox.enqueue_messages(conn, distinct)
            added = len(ids)
            if added < len(distinct):
                ids |= await outbox.find_messages(
                    conn, [message.key for message in distinct if message.key not in ids]
                )
            if len(ids) < len(distinct):
                raise Conflict("a row was deleted while its message was enqueued again; retry")
        return added, ids

    async def find_unstorable(self, texts: Sequence[str]) -> int | None:
        """The first text that PostgreSQL does not take as JSON."""
        async with self._pool.acquire() as conn:
            return await outbox.find_unstorable(conn, texts)

    async def claim(self, terms: Terms) -> Claim | None:
        """Take due rows; None when there are none."""
        key = claim_key(uuid4(), ordered=terms.ordered)
        async with self._pool.acquire() as conn:
            try:
                rows = await self._take(conn, key, terms)
                while rows and is_undeliverable(rows[0]):
                    await self._bury(conn, rows[0])
                    rows = rows[1:] or await self._take(conn, key, terms)
            except asyncio.CancelledError:
                # The statement may have been done already, and nobody will ever hear of its rows.
                self._do_later(self._forget(key))
                raise
        if not rows:
            return None
        self._metrics.outbox_claimed.inc(len(rows))
        expires_at = rows[0].lease_expires_at
        return Claim(ClaimToken(self.number, expires_at - terms.lease, key), rows, expires_at)

    async def _take(self, conn: Connection, key: UUID, terms: Terms) -> list[ClaimedRow]:
        """Claim what fits. The statement goes by the stored size, which can be far below that of the text."""
        rows = await self._claim_unordered(conn, key, terms)
        fitting = split_by_weight(rows, bytes_max=terms.bytes_max, at_least_one=True)
        if fitting < len(rows):
            given_back = [row.outbox_id for row in rows[fitting:]]
            await outbox.release_rows(conn, given_back, key)
            self._came_back(given_back)
        return rows[:fitting]

    async def _claim_unordered(self, conn: Connection, key: UUID, terms: Terms) -> list[ClaimedRow]:
        began = time.monotonic()
        low, ticket = self._low_water.begin(began)
        rows: list[ClaimedRow] = []
        if low:
            rows = await outbox.claim_rows(
                conn,
                key,
                limit=terms.limit,
                bytes_max=terms.bytes_max,
                lease=terms.lease,
                at_least_one=True,
                outbox_id_min=low,
                with_expired=False,
            )
            if len(rows) == terms.limit:
                self._low_water.advance(ticket, rows)
                return rows
        looked = time.monotonic()
        more = await outbox.claim_rows(
            conn,
            key,
            limit=terms.limit - len(rows),
            bytes_max=terms.bytes_max - sum(map(weight_of, rows)),
            lease=terms.lease,
            at_least_one=not rows,
            outbox_id_min=0,
            with_expired=True,
        )
        now = time.monotonic()
        self._low_water.looked_everywhere(now, seconds=now - looked)
        rows = sorted(rows + more)
        self._low_water.advance(ticket, rows)
        return rows

    async def _bury(self, conn: Connection, row: ClaimedRow) -> None:
        """A row that fits into no answer would come to the front of every claim for ever."""
        error = f"the row has {weight_of(row)} bytes; above {ROW_BYTES_MAX} it can't be delivered"
        await outbox.fail_rows(
            conn, [Failure(row.outbox_id, error, 0, 0)], [Verdict(row.outbox_id, Outcome.DEAD)]
        )
        self._metrics.outbox_dead.inc()

    async def _forget(self, key: UUID) -> None:
        try:
            async with self._pool.acquire() as conn:
                released = await outbox.release_claim(conn, key, claimed_at=LONG_AGO)
        except NoetlError as error:
            logger.warning("rows of a claim that was given up come back when their lease ends: %s", error)
        else:
            self._came_back(released)

    async def mark_published(self, outbox_ids: Sequence[int], claim: UUID | None) -> Published:
        """Publish rows; without a claim whoever holds them."""
        distinct = sorted(set(outbox_ids))
        published = await retry_conflicts(lambda: self._mark_published(distinct, claim))
        self._metrics.outbox_published.inc(published.marked)
        self._metrics.outbox_stale.inc(len(published.stale_ids))
        return published

    async def _mark_published(self, outbox_ids: Sequence[int], claim: UUID | None) -> Published:
        async with self._pool.acquire() as conn:
            marked = await outbox.mark_published(conn, outbox_ids, claim)
            if marked == len(outbox_ids):
                return Published(marked)
            # What was not marked now was published before, is held by somebody else, or is not there.
            holders = await outbox.read_holders(conn, outbox_ids)
        return Published(
            marked,
            stale_ids=[
                outbox_id
                for outbox_id, holder in holders.items()
                if claim is not None and holder != (Status.PUBLISHED, claim)
            ],
            unknown_ids=[outbox_id for outbox_id in outbox_ids if outbox_id not in holders],
        )

    async def fail(self, failures: Sequence[Failure], claim: UUID | None) -> tuple[list[Verdict], list[int]]:
        """Write failures down; what became of each, and the younger rows that had to go back with them."""
        verdicts, released = await retry_conflicts(lambda: self._fail(failures, claim))
        outcomes = [verdict.outcome for verdict in verdicts]
        self._metrics.outbox_failed.inc(sum(verdict.is_marked for verdict in verdicts))
        self._metrics.outbox_dead.inc(outcomes.count(Outcome.DEAD))
        self._metrics.outbox_stale.inc(outcomes.count(Outcome.STALE))
        self._came_back(released)
        return verdicts, released

    async def _fail(self, failures: Sequence[Failure], claim: UUID | None) -> tuple[list[Verdict], list[int]]:
        outbox_ids = [failure.outbox_id for failure in failures]
        released: list[int] = []
        async with self._pool.transaction() as conn:
            rows = await outbox.lock_for_failure(conn, outbox_ids)
            verdicts = [
                judge(failure, rows.get(failure.outbox_id), claim=claim, attempts_max=self._attempts_max)
                for failure in failures
            ]
            if any(verdict.is_marked for verdict in verdicts):
                await outbox.fail_rows(conn, failures, verdicts)
            heads = heads_of_failures(rows, verdicts)
            if heads:
                released = await outbox.release_younger(conn, heads, but_not=outbox_ids)
        return verdicts, released

    async def count_pending(self) -> int:
        """How many rows a claim without limit would get."""
        async with self._pool.acquire() as conn:
            return await outbox.count_pending(conn)

    async def stats(self) -> Stats:
        """Undelivered rows by situation."""
        async with self._pool.acquire() as conn:
            return await outbox.read_stats(conn)

    def _came_back(self, outbox_ids: Sequence[int]) -> None:
        if outbox_ids:
            self._low_water.lower(min(outbox_ids))

    def _do_later(self, chore: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
