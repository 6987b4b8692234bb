"""Claimers that fail, crash, dawdle and give back at random, and the books that are kept about them.

The books know only what the claimers see, so they hold whatever the server does inside. Everything happens in one
event loop: what was noted before an answer came is older than what the answer tells.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import asyncpg
import grpc
from google.protobuf.duration_pb2 import Duration
from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc.checks.frame import Progress, Verdict
from noetl_grpc.dev.child import server_process

TOKEN = "check"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
LEASE_SECONDS = 1
CALL_SECONDS = 60.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    rows: int
    executions: int
    claimers: int
    limit: int
    attempts_max: int
    #: Rows that always fail.
    poison: int
    seconds_max: float
    #: Chances of a batch: its claimer dies, marks it only after the lease, or gives part of it back.
    crash: float = 0.03
    dawdle: float = 0.02
    release: float = 0.05
    #: Chance of a row to fail.
    fail: float = 0.02


@dataclass(slots=True)
class Holding:
    """A batch as its claimer knows it."""

    token: str
    #: By the claimer's own clock, and certainly not after the real end.
    held_until: float
    rows: dict[int, pb.OutboxRow]


@dataclass(slots=True)
class Books:
    """What is known of every row, and what was done."""

    verdict: Verdict
    attempts_max: int
    poison: frozenset[int]
    #: With order: every execution's rows, oldest first, and how many of them are delivered for certain.
    lanes: dict[int, list[int]] = field(default_factory=dict)
    delivered: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    execution_of: dict[int, int] = field(default_factory=dict)
    holder: dict[int, Holding] = field(default_factory=dict)
    published: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    #: Messages on their way that would publish a row, or be the last failure of it.
    underway: Counter[int] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)

    def expect_order(self, execution_of: dict[int, int]) -> None:
        """From now on rows of an execution must come in the order of their ids."""
        self.execution_of = execution_of
        for outbox_id in sorted(execution_of):
            self.lanes.setdefault(execution_of[outbox_id], []).append(outbox_id)

    def is_finished(self, outbox_id: int) -> bool:
        """Whether a row is out of the way, or may be by now."""
        return outbox_id in self.published or outbox_id in self.dead or self.underway[outbox_id] > 0

    def claimed(self, holding: Holding) -> None:
        """Rows were handed out: nobody else may hold them, and with order nothing older may be left out."""
        now = time.monotonic()
        for outbox_id in holding.rows:
            other = self.holder.get(outbox_id)
            self.verdict.require(
                other is None or other.held_until <= now,
                f"row {outbox_id} was handed out while another claim held it",
            )
        self._check_order(sorted(holding.rows))
        for outbox_id in holding.rows:
            self.verdict.require(
                outbox_id not in self.dead, f"row {outbox_id} was handed out though it is dead"
            )
            self.holder[outbox_id] = holding
        self.done["rows handed out"] += len(holding.rows)

    def _check_order(self, outbox_ids: Sequence[int]) -> None:
        if not self.lanes:
            return
        batch = set(outbox_ids)
        for outbox_id in outbox_ids:
            execution = self.execution_of[outbox_id]
            lane, place = self.lanes[execution], self.delivered[execution]
            while place < len(lane) and (lane[place] in self.published or lane[place] in self.dead):
                place += 1
            self.delivered[execution] = place
            for older in itertools.takewhile(lambda older, limit=outbox_id: older < limit, lane[place:]):  # type: ignore[misc]  # mypy#4226
                self.verdict.require(
                    older in batch or self.is_finished(older),
                    f"row {outbox_id} was handed out before row {older} of the same execution",
                )

    def leave(self, holding: Holding, outbox_ids: Iterable[int]) -> None:
        """The holder lets go of rows; from the moment it says so, anybody may have them."""
        for outbox_id in outbox_ids:
            if self.holder.get(outbox_id) is holding:
                del self.holder[outbox_id]


class Claimer:
    """One of many."""

    def __init__(
        self, channel: grpc.aio.Channel, books: Books, plan: Plan, *, ordered: bool, chance: random.Random
    ) -> None:
        self._stub = rpc.OutboxServiceStub(channel)
        self._books = books
        self._plan = plan
        self._ordered = ordered
        self._chance = chance

    async def run(self, all_done: asyncio.Event) -> None:
        """Until there is nothing left."""
        while not all_done.is_set():
            holding = await self._claim()
            if holding is None:
                continue
            whim = self._chance.random()
            if (whim := whim - self._plan.crash) < 0:
                self._books.done["crashes"] += 1
            elif (whim := whim - self._plan.dawdle) < 0:
                await self._dawdle(holding)
            elif whim < self._plan.release:
                await self._release(holding)
            else:
                await self._work(holding)

    async def _claim(self) -> Holding | None:
        asked = time.monotonic()
        answer = await self._stub.ClaimOutboxBatch(
            pb.ClaimOutboxBatchRequest(
                limit=self._chance.choice((self._plan.limit, self._plan.limit, 7)),
                lease=Duration(seconds=LEASE_SECONDS),
                wait=Duration(nanos=200_000_000),
                ordered=self._ordered,
            ),
            metadata=METADATA,
            timeout=CALL_SECONDS,
        )
        if not answer.rows:
            return None
        # The lease began after we asked, unless we waited; then it began at most that much later.
        holding = Holding(
            answer.claim_token, asked + LEASE_SECONDS, {row.outbox_id: row for row in answer.rows}
        )
        self._books.claimed(holding)
        return holding

    async def _work(self, holding: Holding) -> None:
        """Publish what does not fail. With order a run ends at its first failure."""
        failures: list[pb.OutboxFailure] = []
        published: list[int] = []
        stopped: set[int] = set()
        for outbox_id, row in sorted(holding.rows.items()):
            if self._ordered and row.execution_id in stopped:
                continue
            if outbox_id in self._books.poison or self._chance.random() < self._plan.fail:
                failures.append(pb.OutboxFailure(outbox_id=outbox_id, error="no", max_delay_seconds=1))
                stopped.add(row.execution_id)
            else:
                published.append(outbox_id)
        if published:
            await self._publish(holding, published)
        if failures:
            await self._fail(holding, failures)

    async def _publish(self, holding: Holding, outbox_ids: Sequence[int]) -> None:
        books = self._books
        books.underway.update(outbox_ids)
        books.leave(holding, outbox_ids)
        answer = await self._stub.MarkOutboxPublished(
            pb.MarkOutboxPublishedRequest(outbox_ids=outbox_ids, claim_token=holding.token),
            metadata=METADATA,
            timeout=CALL_SECONDS,
        )
        books.underway.subtract(outbox_ids)
        marked = set(outbox_ids).difference(answer.stale_ids)
        books.verdict.require(not marked & books.published, "a row was published twice")
        books.published |= marked
        books.done["stale"] += len(answer.stale_ids)
        books.verdict.require(not answer.unknown_ids, f"rows {list(answer.unknown_ids)} are unknown")
        books.verdict.require(
            answer.marked + len(answer.stale_ids) == len(outbox_ids),
            f"{len(outbox_ids)} rows were marked, {answer.marked} are published, {len(answer.stale_ids)} stale",
        )

    async def _fail(self, holding: Holding, failures: Sequence[pb.OutboxFailure]) -> None:
        books = self._books
        doomed = [
            failure.outbox_id
            for failure in failures
            if holding.rows[failure.outbox_id].attempts >= books.attempts_max
        ]
        books.underway.update(doomed)
        books.leave(holding, holding.rows if self._ordered else [failure.outbox_id for failure in failures])
        answer = await self._stub.MarkOutboxFailedBatch(
            pb.MarkOutboxFailedBatchRequest(failures=failures, claim_token=holding.token),
            metadata=METADATA,
            timeout=CALL_SECONDS,
        )
        outcomes = {outcome.outbox_id: outcome.outcome for outcome in answer.outcomes}
        dead = {outbox_id for outbox_id, outcome in outcomes.items() if outcome == pb.OUTBOX_OUTCOME_DEAD}
        books.verdict.require(
            dead <= set(doomed), f"rows {sorted(dead - set(doomed))} died before their last attempt"
        )
        books.underway.subtract(doomed)
        books.dead |= dead
        books.done["failures"] += len(failures)
        books.done["given back with a failure"] += len(answer.released_ids)

    async def _release(self, holding: Holding) -> None:
        ids = sorted(holding.rows)
        some = ids[self._chance.randrange(len(ids)) :] if self._chance.random() < 0.7 else []
        self._books.leave(holding, ids)
        answer = await self._stub.ReleaseOutboxLease(
            pb.ReleaseOutboxLeaseRequest(claim_token=holding.token, outbox_ids=some),
            metadata=METADATA,
            timeout=CALL_SECONDS,
        )
        self._books.done["released"] += answer.released
        gone = {*(some or ids), *answer.released_ids}
        await self._publish_healthy(holding, [outbox_id for outbox_id in ids if outbox_id not in gone])

    async def _publish_healthy(self, holding: Holding, outbox_ids: Iterable[int]) -> None:
        """Poison rows are left to their lease."""
        healthy = [outbox_id for outbox_id in outbox_ids if outbox_id not in self._books.poison]
        if healthy:
            await self._publish(holding, healthy)

    async def _dawdle(self, holding: Holding) -> None:
        """Come back when the lease is over; who took the rows meanwhile must not notice."""
        await asyncio.sleep(LEASE_SECONDS * (0.8 + 0.6 * self._chance.random()))
        self._books.done["dawdled"] += 1
        await self._publish_healthy(holding, holding.rows)


async def watch(url: str, plan: Plan, all_done: asyncio.Event, progress: Progress) -> None:
    """Say how far it is, and when nothing is left that could still be published."""
    conn = await asyncpg.connect(url)
    try:
        while True:
            left = await conn.fetchval(
                "SELECT count(*) FROM noetl.outbox WHERE status <> 'PUBLISHED' AND dead_at IS NULL"
            )
            progress("delivering", plan.rows - left, plan.rows)
            if not left:
                all_done.set()
                return
            await asyncio.sleep(0.25)
    finally:
        await conn.close()


async def run_claimers(
    url: str,
    addresses: Sequence[str],
    books: Books,
    plan: Plan,
    *,
    ordered: bool,
    seed: int,
    progress: Progress,
) -> None:
    """Everybody works until everything is published or dead, or the time is over."""
    all_done = asyncio.Event()
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
            for address in addresses
        ]
        claimers = [
            Claimer(
                channels[number % len(channels)],
                books,
                plan,
                ordered=ordered,
                chance=random.Random(f"{seed}/{number}"),
            )
            for number in range(plan.claimers)
        ]
        try:
            async with asyncio.timeout(plan.seconds_max), asyncio.TaskGroup() as group:
                group.create_task(watch(url, plan, all_done, progress))
                for claimer in claimers:
                    group.create_task(claimer.run(all_done))
        except TimeoutError:
            books.verdict.require(False, f"rows were left after {plan.seconds_max:g} s")
    seconds = time.monotonic() - began
    books.verdict.figures |= {
        "rows": plan.rows,
        "published": len(books.published),
        "dead": len(books.dead),
        **{name.replace(" ", "_"): count for name, count in sorted(books.done.items())},
        "seconds": round(seconds, 1),
        "rows_per_second": round(plan.rows / seconds),
    }


@asynccontextmanager
async def servers(url: str, plan: Plan) -> AsyncIterator[list[str]]:
    """Two of them, so that what one remembers is of no use to the other; their addresses."""
    env = {"NOETL_OUTBOX_MAX_ATTEMPTS": str(plan.attempts_max)}
    async with (
        server_process(url, token=TOKEN, env=env) as one,
        server_process(url, token=TOKEN, env=env) as other,
    ):
        yield [one.line, other.line]


async def fill(url: str, plan: Plan) -> dict[int, int]:
    """The rows, dealt out to the executions in turn; the execution of each."""
    conn = await asyncpg.connect(url)
    try:
        records = await conn.fetch(
            "INSERT INTO noetl.outbox (execution_id, event_id, payload, payload_codec)"
            " SELECT n % $2::int + 1, n, jsonb_build_object('text', repeat('x', 1000)), 'json'"
            " FROM generate_series(1, $1::int) AS n RETURNING outbox_id, execution_id",
            plan.rows,
            plan.executions,
        )
    finally:
        await conn.close()
    return dict(records)


async def check_table(url: str, books: Books, plan: Plan) -> None:
    """What is in the table must be what the books say."""
    conn = await asyncpg.connect(url)
    try:
        rows = await conn.fetch(
            "SELECT status, dead_at IS NOT NULL AS dead, count(*) AS rows, array_agg(outbox_id) AS ids"
            " FROM noetl.outbox GROUP BY 1, 2"
        )
    finally:
        await conn.close()
    found = {(row["status"], row["dead"]): row for row in rows}
    published = found.pop(("PUBLISHED", False), None)
    dead = found.pop(("FAILED", True), None)
    require = books.verdict.require
    require(not found, f"rows are left: { {key: row['rows'] for key, row in found.items()} }")
    published_ids = set(published["ids"]) if published else set()
    require(published_ids == books.published, "other rows are published than the claimers know of")
    dead_ids = set(dead["ids"]) if dead else set()
    require(dead_ids == books.dead, f"{len(dead_ids)} rows are dead, the claimers know of {len(books.dead)}")
    require(books.poison <= dead_ids, "a poison row is not dead")
