"""Outbox rows per second, claimed and marked through gRPC, against the seed's statements called directly."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import grpc
from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc.benches.frame import Case, Options, Progress, faster
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.storage import migrate, outbox

SUMMARY = (
    "claim + mark through gRPC, against the seed's SQL; --fresh: an empty past; --raw: against our own SQL"
)

TOKEN = "bench"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
CALL_SECONDS = 120.0
IDLE_SECONDS_MAX = 5.0
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)

#: What NoETL's servers execute.
SEED_CLAIM = """
WITH ready AS (
    SELECT outbox_id
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED') AND available_at <= now()
    ORDER BY outbox_id
    LIMIT $1
    FOR UPDATE SKIP LOCKED
)
UPDATE noetl.outbox o
SET status = 'IN_FLIGHT', attempts = attempts + 1, locked_at = now(), updated_at = now()
FROM ready
WHERE o.outbox_id = ready.outbox_id
RETURNING o.outbox_id, o.event_id, o.execution_id, o.subject, o.payload, o.payload_codec, o.attempts
"""
SEED_MARK = """
UPDATE noetl.outbox
SET status = 'PUBLISHED', published_at = now(), updated_at = now(), last_error = NULL
WHERE outbox_id = ANY($1)
"""
#: The indexes that NoETL's own schema has beside its keys.
NOETL_INDEXES = """
CREATE INDEX idx_outbox_ready ON noetl.outbox (status, available_at, outbox_id)
    WHERE status = ANY (ARRAY['PENDING'::text, 'FAILED'::text]);
CREATE INDEX idx_outbox_execution_event ON noetl.outbox (execution_id, event_id);
"""
OUR_INDEXES = ("event_alone", "claimable", "leased", "undelivered", "dead")


class Way(Protocol):
    """A way to claim and mark; one per claimer."""

    async def turn(self, limit: int) -> int:
        """Claim up to so many rows and mark them; how many are published now."""
        ...


class ThroughGrpc:
    """Our service. A share of the rows may fail."""

    def __init__(self, channel: grpc.aio.Channel, *, ordered: bool = False, failing: float = 0) -> None:
        self._stub = rpc.OutboxServiceStub(channel)
        self._ordered = ordered
        self._failing = failing
        self._chance = random.Random(1)

    async def turn(self, limit: int) -> int:
        claim = await self._stub.ClaimOutboxBatch(
            pb.ClaimOutboxBatchRequest(limit=limit, ordered=self._ordered),
            metadata=METADATA,
            timeout=CALL_SECONDS,
        )
        if not claim.rows:
            return 0
        failing, published = self._deal(claim.rows)
        if published:
            await self._stub.MarkOutboxPublished(
                pb.MarkOutboxPublishedRequest(outbox_ids=published, claim_token=claim.claim_token),
                metadata=METADATA,
                timeout=CALL_SECONDS,
            )
        if failing:
            await self._stub.MarkOutboxFailedBatch(
                pb.MarkOutboxFailedBatchRequest(
                    failures=[
                        pb.OutboxFailure(outbox_id=outbox_id, error="no", max_delay_seconds=1)
                        for outbox_id in failing
                    ],
                    claim_token=claim.claim_token,
                ),
                metadata=METADATA,
                timeout=CALL_SECONDS,
            )
        return len(published)

    def _deal(self, rows: Sequence[pb.OutboxRow]) -> tuple[list[int], list[int]]:
        """Rows that fail and rows that are published; with order what is behind a failure goes back by itself."""
        if not self._failing:
            return [], [row.outbox_id for row in rows]
        failing: list[int] = []
        published: list[int] = []
        stopped: set[int] = set()
        for row in rows:
            if self._ordered and row.execution_id in stopped:
                continue
            if self._chance.random() < self._failing:
                failing.append(row.outbox_id)
                stopped.add(row.execution_id)
            else:
                published.append(row.outbox_id)
        return failing, published


class SeedSql:
    """The seed's two statements on a connection of one's own."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self._conn = conn

    async def turn(self, limit: int) -> int:
        rows = await self._conn.fetch(SEED_CLAIM, limit)
        await self._conn.execute(SEED_MARK, [row[0] for row in rows])
        return len(rows)


class OurSql:
    """Our own two statements on a connection of one's own."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self._conn = conn

    async def turn(self, limit: int) -> int:
        claim = uuid4()
        rows = await outbox.claim_rows(
            self._conn,
            claim,
            limit=limit,
            bytes_max=16 * 1024 * 1024,
            lease=timedelta(seconds=30),
            at_least_one=True,
            outbox_id_min=0,
            with_expired=True,
        )
        await outbox.mark_published(self._conn, [row.outbox_id for row in rows], claim)
        return len(rows)


@dataclass(frozen=True, slots=True)
class Bench:
    """What a run works with."""

    ours: str
    control: str
    address: str
    progress: Progress


async def run(options: Options) -> list[Case]:
    """The cases that the flags ask for; without any the large past and a held snapshot."""
    async with databases(options) as (ours, control), server_process(ours, token=TOKEN) as server:
        bench = Bench(ours, control, server.line, options.progress)
        if "raw" in options.flags:
            return await _raw(bench, quick=options.quick)
        if "fresh" in options.flags:
            return await _fresh(bench, quick=options.quick)
        return await _large_past(bench, quick=options.quick)


async def _large_past(bench: Bench, *, quick: bool) -> list[Case]:
    published, pending, rounds = (50_000, 40_000, 2) if quick else (1_000_000, 200_000, 5)
    for name, url in (("ours", bench.ours), ("the control", bench.control)):
        bench.progress(f"{published:,} published rows for {name}")
        await fill(url, pending=pending, published=published)
    cases = []
    async with through_grpc(bench.address, 1) as ours, directly(bench.control, 1, SeedSql) as control:
        for limit, goal, turns in ((100, 20.0, 40), (1000, 5.0, 6)):
            measured = []
            for number in range(-1, rounds):
                bench.progress(f"batches of {limit}", max(number, 0), rounds)
                pair = (
                    await rate(ours, limit=limit, rows=limit * turns),
                    await rate(control, limit=limit, rows=limit * min(turns, 4)),
                )
                if number >= 0:  # the first round warms both up
                    measured.append(pair)
            cases.append(faster(f"batches of {limit}", "rows/s", measured, goal=None if quick else goal))
    cases.append(await held_snapshot(bench, quick=quick, ordered=False))
    return cases


async def _fresh(bench: Bench, *, quick: bool) -> list[Case]:
    rows, rounds = (8000, 2) if quick else (40_000, 7)
    measured = []
    async with through_grpc(bench.address, 4) as ours, directly(bench.control, 4, SeedSql) as control:
        for number in range(-1, rounds):
            bench.progress("fresh tables", max(number, 0), rounds)
            pair = []
            for url, ways in ((bench.ours, ours), (bench.control, control)):
                await fill(url, pending=rows + 10_000)
                pair.append(await rate(ways, limit=1000, rows=rows))
            if number >= 0:
                measured.append((pair[0], pair[1]))
    return [faster("four claimers, batches of 1000", "rows/s", measured, goal=None if quick else 1.1)]


async def _raw(bench: Bench, *, quick: bool) -> list[Case]:
    rows, rounds = (8000, 2) if quick else (40_000, 7)
    cases = []
    for claimers in (1, 4):
        measured = []
        async with (
            through_grpc(bench.address, claimers) as ours,
            directly(bench.ours, claimers, OurSql) as control,
        ):
            for number in range(-1, rounds):
                bench.progress(f"{claimers} claimers", max(number, 0), rounds)
                pair = []
                for ways in (ours, control):
                    await fill(bench.ours, pending=rows + 10_000)
                    pair.append(await rate(ways, limit=1000, rows=rows))
                if number >= 0:
                    measured.append((pair[0], pair[1]))
        name = f"{claimers} claimer{'s' if claimers > 1 else ''}, batches of 1000"
        cases.append(faster(name, "rows/s", measured, goal=None if quick else 0.65))
    return cases


async def held_snapshot(bench: Bench, *, quick: bool, ordered: bool) -> Case:
    """A transaction left open elsewhere keeps every dead tuple; against the same without it."""
    rows, rounds = (10_000, 1) if quick else (150_000, 2)
    measured = []
    async with through_grpc(bench.address, 4, ordered=ordered) as ways:
        for number in range(rounds):
            bench.progress("a held snapshot", number, rounds)
            pair = []
            for is_held in (True, False):
                await fill(bench.ours, pending=rows)
                async with an_old_snapshot(bench.ours if is_held else None):
                    pair.append(await rate(ways, limit=100, rows=rows))
            measured.append((pair[0], pair[1]))
    goal = None if quick or ordered else 0.8
    return faster(
        f"{'ordered' if ordered else 'unordered'} under a held snapshot", "rows/s", measured, goal=goal
    )


@asynccontextmanager
async def an_old_snapshot(url: str | None) -> AsyncIterator[None]:
    """A transaction that has looked once and stays open; none without a URL."""
    if url is None:
        yield
        return
    conn = await asyncpg.connect(url)
    try:
        async with conn.transaction(isolation="repeatable_read"):
            await conn.fetchval("SELECT count(*) FROM noetl.schema_version")
            yield
    finally:
        await conn.close()


async def rate(ways: Sequence[Way], *, limit: int, rows: int) -> float:
    """Rows per second until so many are published, everybody at work."""
    published = 0

    async def work(way: Way) -> None:
        nonlocal published
        last_taken = time.perf_counter()
        # All that is left may wait for its next attempt, which comes after a second.
        while published < rows and time.perf_counter() - last_taken < IDLE_SECONDS_MAX:
            taken = await way.turn(limit)
            published += taken
            if taken:
                last_taken = time.perf_counter()

    began = time.perf_counter()
    await asyncio.gather(*(work(way) for way in ways))
    return published / (time.perf_counter() - began)


@asynccontextmanager
async def through_grpc(
    address: str, claimers: int, *, ordered: bool = False, failing: float = 0
) -> AsyncIterator[list[Way]]:
    """Claimers with a channel each."""
    async with AsyncExitStack() as stack:
        yield [
            ThroughGrpc(
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)),
                ordered=ordered,
                failing=failing,
            )
            for _ in range(claimers)
        ]


@asynccontextmanager
async def directly(
    url: str, claimers: int, way: Callable[[asyncpg.Connection], Way]
) -> AsyncIterator[list[Way]]:
    """Claimers with a connection each."""
    connections = [await asyncpg.connect(url) for _ in range(claimers)]
    try:
        yield [way(conn) for conn in connections]
    finally:
        for conn in connections:
            await conn.close()


async def fill(url: str, *, pending: int, published: int = 0, executions: int = 1000) -> None:
    """Only these rows, with bodies of 1 KB; nothing dead, and the planner knows them."""
    conn = await asyncpg.connect(url, timeout=60, command_timeout=900)
    try:
        await conn.execute("TRUNCATE noetl.outbox RESTART IDENTITY")
        await conn.execute(
            "INSERT INTO noetl.outbox (execution_id, event_id, subject, payload, payload_codec, status, published_at)"
            " SELECT n % $3::int + 1, n, 'noetl.outbox.bench',"
            " jsonb_build_object('event_id', n, 'text', repeat(md5(n::text), 30)), 'json',"
            " CASE WHEN n <= $1 THEN 'PUBLISHED' ELSE 'PENDING' END, CASE WHEN n <= $1 THEN now() END"
            " FROM generate_series(1, $1::int + $2::int) AS n",
            published,
            pending,
            executions,
        )
        await conn.execute("VACUUM ANALYZE noetl.outbox")
    finally:
        await conn.close()


@asynccontextmanager
async def databases(options: Options) -> AsyncIterator[tuple[str, str]]:
    """One as `migrate` makes it, and one with NoETL's own indexes instead of ours; both are dropped at the end."""
    async with AsyncExitStack() as stack:
        base = options.database_url
        if not base:
            postgres = await stack.enter_async_context(Postgres(settings=SETTINGS))
            base = postgres.url()
        admin = await asyncpg.connect(base)
        stack.push_async_callback(admin.close)
        urls = []
        for name in ("noetl_bench_ours", "noetl_bench_control"):
            await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
            await admin.execute(f"CREATE DATABASE {name}")
            stack.push_async_callback(_drop, admin, name)
            urls.append(urlunsplit(urlsplit(base)._replace(path=f"/{name}")))
            await _prepare(urls[-1], is_control=name.endswith("control"))
        yield urls[0], urls[1]


async def _drop(admin: asyncpg.Connection, name: str) -> None:
    await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


async def _prepare(url: str, *, is_control: bool) -> None:
    conn: Any = await asyncpg.connect(url)
    try:
        await migrate.migrate(conn)
        if is_control:
            await conn.execute(NOETL_INDEXES)
            for name in OUR_INDEXES:
                await conn.execute(f"DROP INDEX noetl.idx_outbox_{name}")
    finally:
        await conn.close()
