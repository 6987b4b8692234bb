"""The outbox of one shard as this process works on it: its statements, and where to look for due rows next."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from noetl_grpc.core.claiming import Lanes, LowWater
from noetl_grpc.core.outbox import (
    ROW_BYTES_MAX,
    ClaimedRow,
    ClaimToken,
    DeadFilter,
    DeadRow,
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
    oldest_of_each,
    split_by_weight,
    weight_of,
)
from noetl_grpc.errors import Conflict, NoetlError
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.chores import Chores
from noetl_grpc.services.outbox_waiting import Waiting
from noetl_grpc.storage import outbox
from noetl_grpc.storage.pool import Connection, Pool, retry_conflicts

logger = logging.getLogger("noetl_grpc.outbox")

#: How often ordered claims look for rows that belong to no execution while there are none.
LOOSE_LOOK_SECONDS = 0.1
REQUEUE_ROWS = 5000
LONG_AGO = datetime(1970, 1, 2, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a claimer asks for."""

    limit: int
    bytes_max: int
    lease: timedelta
    ordered: bool

    def with_limit(self, limit: int) -> Terms:
        """The same for another number of rows."""
        return replace(self, limit=limit)


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


@dataclass(frozen=True, slots=True)
class Extended:
    """What an extension did."""

    extended: int
    lost_ids: Sequence[int]
    lease_expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Released:
    """What a release gave back: the rows asked for, those behind them, and what was not held."""

    rows: int
    younger_ids: Sequence[int]
    lost_ids: Sequence[int]


class OutboxShard:
    """One shard's outbox."""

    def __init__(
        self, number: int, pool: Pool, *, attempts_max: int, metrics: Metrics, chores: Chores
    ) -> None:
        self.number = number
        self._pool = pool
        self._attempts_max = attempts_max
        self._metrics = metrics
        self._low_water = LowWater()
        self._loose_low_water = LowWater()
        self._loose_look_due = 0.0
        self._loose_turn = False
        self._lanes = Lanes(random.randint)
        self._chores = chores
        self.waiting = Waiting(self._look_for_due)

    async def enqueue(self, messages: Sequence[Message]) -> tuple[int, list[int]]:
        """Add messages in one transaction; how many are new, and the outbox_id of each."""
        distinct = list({message.key: message for message in reversed(messages)}.values())[::-1]
        added, ids = await retry_conflicts(lambda: self._enqueue(distinct))
        self._metrics.outbox_enqueued.inc(added)
        if added:
            self.waiting.notify()
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
        has_begun = False
        try:
            async with self._pool.acquire() as conn:
                has_begun = True
                rows = await self._take(conn, key, terms)
                while rows and is_undeliverable(rows[0]):
                    await self._bury(conn, rows[0])
                    rows = rows[1:] or await self._take(conn, key, terms)
        except asyncio.CancelledError:
            # The statement may have been done already, and nobody will ever hear of its rows.
            if has_begun:
                self._chores.start(self._forget(key))
            raise
        if not rows:
            return None
        self._metrics.outbox_claimed.inc(len(rows))
        expires_at = rows[0].lease_expires_at
        return Claim(ClaimToken(self.number, expires_at - terms.lease, key), rows, expires_at)

    async def _take(self, conn: Connection, key: UUID, terms: Terms) -> list[ClaimedRow]:
        """Claim what fits. The statements go by the stored size, which can be far below that of the text."""
        if terms.ordered:
            async with conn.transaction():
                rows = await self._claim_ordered(conn, key, terms)
        else:
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

    async def _claim_ordered(self, conn: Connection, key: UUID, terms: Terms) -> list[ClaimedRow]:
        """Runs of executions, and rows without execution; these come first, but get at most half of the room."""
        rows: list[ClaimedRow] = []
        self._loose_turn = not self._loose_turn
        loose_limit = terms.limit // 2 or int(self._loose_turn)
        if time.monotonic() < self._loose_look_due:
            loose_limit = 0
        if loose_limit:
            rows = await self._claim_loose(conn, key, terms, [], limit=loose_limit)
        may_be_more = bool(loose_limit) and len(rows) == loose_limit
        rows += await self._claim_runs(conn, key, terms, rows)
        if not rows or (may_be_more and len(rows) < terms.limit):
            rows += await self._claim_loose(conn, key, terms, rows, limit=terms.limit - len(rows))
        return sorted(rows)

    async def _claim_runs(
        self, conn: Connection, key: UUID, terms: Terms, before: Sequence[ClaimedRow]
    ) -> list[ClaimedRow]:
        rows: list[ClaimedRow] = []
        limit = terms.limit - len(before)
        bytes_left = terms.bytes_max - sum(map(weight_of, before))
        if limit <= 0:
            return rows
        walk = self._lanes.begin()
        while not walk.is_over:
            wanted = self._lanes.wanted(limit - len(rows))
            heads = await outbox.lock_heads(
                conn, lanes=wanted, after=walk.place, walk_max=self._lanes.walk_max(wanted)
            )
            run: list[ClaimedRow] = []
            if heads.execution_ids:
                run = await outbox.claim_runs(
                    conn,
                    key,
                    heads,
                    limit=limit - len(rows),
                    bytes_max=bytes_left,
                    lease=terms.lease,
                    at_least_one=not rows and not before,
                    rows_per_execution=self._lanes.rows_per_execution(limit - len(rows), heads),
                )
                bytes_left -= sum(map(weight_of, run))
                rows += run
                if not run and bytes_left < terms.bytes_max:
                    # What is due does not fit any more.
                    break
            self._lanes.learn(walk.place, heads, run)
            walk.step(heads, rows=len(rows), limit=limit)
        self._lanes.end(walk)
        return rows

    async def _claim_loose(
        self, conn: Connection, key: UUID, terms: Terms, before: Sequence[ClaimedRow], *, limit: int
    ) -> list[ClaimedRow]:
        began = time.monotonic()
        low, ticket = self._loose_low_water.begin(began)
        rows: list[ClaimedRow] = []
        for outbox_id_min in (low, 0) if low else (0,):
            rows += await outbox.claim_rows_without_execution(
                conn,
                key,
                limit=limit - len(rows),
                bytes_max=terms.bytes_max - sum(map(weight_of, (*before, *rows))),
                lease=terms.lease,
                at_least_one=not before and not rows,
                outbox_id_min=outbox_id_min,
            )
            if len(rows) == limit:
                break
        else:
            now = time.monotonic()
            self._loose_low_water.looked_everywhere(now, seconds=now - began)
        self._loose_low_water.advance(ticket, sorted(rows))
        self._loose_look_due = began if rows else began + LOOSE_LOOK_SECONDS
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

    async def extend(self, token: ClaimToken, outbox_ids: Sequence[int], *, lease: timedelta) -> Extended:
        """Hold rows of a claim longer, all of them without ids."""
        async with self._pool.acquire() as conn:
            if outbox_ids:
                until = await outbox.extend_rows(conn, outbox_ids, token.claim, lease=lease)
            else:
                until = await outbox.extend_claim(conn, token.claim, claimed_at=token.claimed_at, lease=lease)
        return Extended(
            extended=len(until),
            lost_ids=[outbox_id for outbox_id in dict.fromkeys(outbox_ids) if outbox_id not in until],
            lease_expires_at=next(iter(until.values()), None),
        )

    async def release(self, token: ClaimToken, outbox_ids: Sequence[int]) -> Released:
        """Give rows of a claim back as if they had not been claimed, all of them without ids."""
        if outbox_ids:
            released, younger = await retry_conflicts(lambda: self._release(token.claim, outbox_ids))
        else:
            younger = []
            async with self._pool.acquire() as conn:
                released = await outbox.release_claim(conn, token.claim, claimed_at=token.claimed_at)
        self._came_back([*released, *younger])
        return Released(
            rows=len(released) + len(younger),
            younger_ids=younger,
            lost_ids=sorted(set(outbox_ids).difference(released, younger)),
        )

    async def _release(self, claim: UUID, outbox_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        younger: list[int] = []
        async with self._pool.transaction() as conn:
            executions = await outbox.release_rows(conn, outbox_ids, claim)
            heads = oldest_of_each(claim, executions)
            if heads:
                younger = await outbox.release_younger(conn, heads, but_not=[])
        return list(executions), younger

    async def abandon(self, claim: UUID, outbox_ids: Sequence[int], *, error: str) -> None:
        """Give rows of a claim back with the attempt counted, because their holder may have died of one of them."""
        async with self._pool.acquire() as conn:
            dead = await outbox.abandon_rows(
                conn, outbox_ids, claim, attempts_max=self._attempts_max, error=error
            )
        self._metrics.outbox_dead.inc(sum(dead.values()))
        self._came_back([outbox_id for outbox_id, is_dead in dead.items() if not is_dead])

    async def list_dead(
        self, dead: DeadFilter, *, after: int, limit: int, bytes_max: int, with_payload: bool
    ) -> list[DeadRow]:
        """Dead rows by id."""
        async with self._pool.acquire() as conn:
            return await outbox.list_dead_rows(
                conn, dead, after=after, limit=limit, bytes_max=bytes_max, with_payload=with_payload
            )

    async def count_dead(self, dead: DeadFilter) -> int:
        """How many dead rows there are."""
        async with self._pool.acquire() as conn:
            return await outbox.count_dead_rows(conn, dead)

    async def requeue(self, dead: DeadFilter) -> int:
        """Make dead rows due again, in pages, so that no transaction is long; a repeat goes on where it ended."""
        requeued = after = 0
        while True:
            async with self._pool.acquire() as conn:
                page = await outbox.requeue_dead_rows(conn, dead, after=after, limit=REQUEUE_ROWS)
            requeued += len(page)
            self._came_back(page)
            if len(page) < REQUEUE_ROWS:
                return requeued
            after = page[-1]

    async def count_pending(self) -> int:
        """How many rows a claim without limit would get."""
        async with self._pool.acquire() as conn:
            return await outbox.count_pending(conn)

    async def stats(self) -> Stats:
        """Undelivered rows by situation."""
        async with self._pool.acquire() as conn:
            return await outbox.read_stats(conn)

    async def _look_for_due(self, above: int) -> tuple[float | None, int]:
        async with self._pool.acquire() as conn:
            return await outbox.look_for_due(conn, above=above)

    def _came_back(self, outbox_ids: Sequence[int]) -> None:
        if outbox_ids:
            self._low_water.lower(min(outbox_ids))
            self._loose_low_water.lower(min(outbox_ids))
            self._loose_look_due = 0.0
            self.waiting.notify()
