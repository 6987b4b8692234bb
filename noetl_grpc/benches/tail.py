"""Committed events to JetStream's acknowledgements, against the seed's way: one publish, one awaited ack at a time."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import asyncpg
from nats.aio.client import Client
from nats.aio.msg import Msg

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.broker import Broker
from noetl_grpc.core.tailing import STREAM, SUBJECTS
from noetl_grpc.delivery import Delivery, Leadership, Progress, Renderer, Work
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.metrics import Metrics
from noetl_grpc.storage import tailing
from noetl_grpc.tail import Tail, begin
from noetl_grpc.tailer import ShardTailer, TailerOptions

SUMMARY = (
    "Events from the log to JetStream's acks, against one awaited ack at a time; --latency against polling."
)

CATALOG_ID = 4_000_000_003
EXECUTION_ID = 600_000_000_000_000_000
EVENT_ID = 620_000_000_000_000_000
EXECUTIONS = 100
#: Cursors of its own beside those of a real tailer.
FIRST_SHARD = 1_000_000
SEED_BATCH = 500
SEED_POLL_SECONDS = 0.5

INSERT = """
INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, node_name, status, context, result, meta)
SELECT $1::bigint + g % $4::integer, $2::bigint, $3::bigint + g, 'step.exit', 'fetch', 'COMPLETED',
    jsonb_build_object('text', repeat('x', 150)),
    jsonb_build_object('status', 'ok', 'context', jsonb_build_object('rows', repeat('y', 100))),
    jsonb_build_object('attempt', 1, 'note', repeat('z', 100))
FROM generate_series(0, $5::integer - 1) AS g
"""

#: The seed's page, with the index that NoETL lacks: without it the control would only be slower.
SEED_INDEX = "CREATE INDEX IF NOT EXISTS bench_event_id ON noetl.event (event_id)"
SEED_TABLE = (
    "CREATE TABLE IF NOT EXISTS noetl.bench_cursor"
    " (name text PRIMARY KEY, position bigint NOT NULL, updated_at timestamptz NOT NULL DEFAULT now())"
)
LEAVE_NOTHING = (
    "DROP INDEX IF EXISTS noetl.bench_event_id",
    "DROP TABLE IF EXISTS noetl.bench_cursor",
    f"DELETE FROM noetl.log_cursor WHERE shard >= {FIRST_SHARD}",
)
SEED_PAGE = """
SELECT e.event_id, COALESCE(e.event_type, 'unknown') AS event_type, to_jsonb(e)::text AS payload
FROM noetl.event AS e
WHERE e.event_id > $1
ORDER BY e.event_id ASC
LIMIT $2
"""
SEED_CURSOR = """
INSERT INTO noetl.bench_cursor (name, position, updated_at)
VALUES ('bench', $1, now())
ON CONFLICT (name) DO UPDATE SET position = EXCLUDED.position, updated_at = now()
"""


@dataclass(slots=True)
class Stage:
    """A log and a broker."""

    database_url: str
    nats_url: str
    conn: asyncpg.Connection
    next_id: Any
    shards: Any = field(default_factory=lambda: count(FIRST_SHARD))

    async def write(self, events: int) -> int:
        """Commit so many events; the first one's id."""
        first = next(self.next_id)
        await self.conn.execute(INSERT, EXECUTION_ID, CATALOG_ID, first, EXECUTIONS, events)
        return int(first)

    def options(self, batch_size: int) -> TailerOptions:
        """As a server has them by default, but for the batch."""
        return TailerOptions(
            broker_url=self.nats_url,
            batch_size=batch_size,
            poll_seconds=0.01,
            backfill=False,
            dedup_seconds=120,
            retention_seconds=86_400,
        )


async def run(options: Options) -> list[Case]:
    """Throughput, or with --latency the time from commit to ack."""
    async with _stage(options) as stage:
        if "latency" in options.flags:
            return await _latency(stage, options)
        return await _throughput(stage, options)


@asynccontextmanager
async def _stage(options: Options) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        url = options.database_url
        if not url:
            postgres = await stack.enter_async_context(Postgres())
            url = await create_database(postgres, "bench")
        nats_url = options.nats_url
        if not nats_url:
            nats_url = (await stack.enter_async_context(Nats())).url
        conn = await asyncpg.connect(url)
        stack.push_async_callback(conn.close)
        await conn.execute(
            "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'bench', 1, 'playbook')"
            " ON CONFLICT DO NOTHING",
            CATALOG_ID,
        )
        await conn.execute(SEED_INDEX)
        await conn.execute(SEED_TABLE)
        try:
            yield Stage(url, nats_url, conn, count(EVENT_ID + time.time_ns() // 1000, 10_000_000))
        finally:
            for statement in LEAVE_NOTHING:
                await conn.execute(statement)


async def _throughput(stage: Stage, options: Options) -> list[Case]:
    rounds, events, seed_events = (1, 5_000, 1_000) if options.quick else (5, 100_000, 15_000)
    # As a server does when it has started; both ways run in this process.
    gc.collect()
    gc.freeze()
    cases = []
    for batch_size in (SEED_BATCH, 2000):
        measured = []
        for number in range(rounds):
            options.progress(f"batches of {batch_size}", number, rounds)
            ours = await _our_rate(stage, events, batch_size)
            theirs = await _seed_rate(stage, seed_events)
            measured.append((ours, theirs))
        goal = 8.0 if batch_size == SEED_BATCH else None
        cases.append(faster(f"events in batches of {batch_size}", "events/s", measured, goal=goal))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024 if sys.platform != "darwin" else 2**20
    )
    cases.append(
        Case(case="peak memory of the process", unit="MiB", value=peak_mib, control=peak_mib, ratio=1.0)
    )
    return cases


async def _our_rate(stage: Stage, events: int, batch_size: int) -> float:
    """What a leader does, from the look at the log to the saved cursor."""
    async with _leading(stage, batch_size) as tail:
        while await tail.run_once() is not Work.NOTHING:
            pass
        await stage.write(events)
        began = time.perf_counter()
        while await tail.run_once() is Work.MORE:
            pass
        return events / (time.perf_counter() - began)


@asynccontextmanager
async def _leading(stage: Stage, batch_size: int) -> AsyncIterator[Tail]:
    url = stage.database_url
    async with (
        tailing.leader_session(url) as session,
        tailing.reader_session(url) as reader,
        tailing.reader_session(url) as second,
    ):
        broker = await Broker.connect(stage.nats_url, name="bench")
        shard = next(stage.shards)
        leadership = Leadership(session, shard=shard)
        await broker.ensure_stream(stage.options(batch_size).stream)
        cursor, history = await begin(
            await leadership.ask(lambda conn: tailing.take_cursor(conn, shard=shard)),
            leadership=leadership,
            reader=reader,
            facts=await tailing.database_facts(reader),
            history=None,
        )
        keeping = asyncio.create_task(leadership.keep())
        tail = Tail(
            leadership=leadership,
            reader=reader,
            renderer=Renderer(
                reader, second, message_bytes_max=broker.message_bytes_max, batch_size=batch_size
            ),
            delivery=Delivery(broker, leadership, metrics=Metrics(), progress=Progress()),
            cursor=cursor,
            history=history,
        )
        try:
            yield tail
        finally:
            keeping.cancel()
            await tail.close()
            await broker.close()


async def _seed_rate(stage: Stage, events: int) -> float:
    """The seed's loop: a page, each event published and its ack awaited, the cursor saved."""
    first = await stage.write(events)
    client: Any = Client()
    await client.connect(stage.nats_url)
    try:
        began = time.perf_counter()
        await _seed_pages(stage, client, first - 1, until=events)
        return events / (time.perf_counter() - began)
    finally:
        await client.close()


async def _seed_pages(stage: Stage, client: Any, cursor: int, *, until: int) -> int:
    stream = client.jetstream()
    published = 0
    while published < until:
        rows = await stage.conn.fetch(SEED_PAGE, cursor, SEED_BATCH)
        if not rows:
            break
        for row in rows:
            await stream.publish(
                f"noetl.events.{row['event_type']}",
                row["payload"].encode(),
                headers={"Nats-Msg-Id": str(row["event_id"])},
            )
        cursor = rows[-1]["event_id"]
        published += len(rows)
        await stage.conn.execute(SEED_CURSOR, cursor)
    return cursor


async def _latency(stage: Stage, options: Options) -> list[Case]:
    """About 60 commits of one event a second, seen by a subscriber of the stream's subjects."""
    seconds = 2.0 if options.quick else 10.0
    options.progress("ours")
    ours = await _latencies(stage, seconds, _our_tailer)
    options.progress("polling every 500 ms")
    theirs = await _latencies(stage, seconds, _seed_tailer)
    return [
        Case(
            case=f"commit to delivery, p{percent}",
            unit="ms",
            value=_percentile(ours, percent),
            control=_percentile(theirs, percent),
            ratio=_percentile(theirs, percent) / _percentile(ours, percent),
            goal=20.0,
        )
        for percent in (50, 99)
    ]


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def _our_tailer(stage: Stage) -> None:
    async def ignore() -> None:
        """Nobody asks for its health."""

    tailer = ShardTailer(
        shard=next(stage.shards),
        database_url=stage.database_url,
        options=stage.options(SEED_BATCH),
        metrics=Metrics(),
        on_change=ignore,
    )
    await tailer.run()


async def _seed_tailer(stage: Stage) -> None:
    own = await asyncpg.connect(stage.database_url)
    client: Any = Client()
    await client.connect(stage.nats_url)
    try:
        cursor = await own.fetchval("SELECT max(event_id) FROM noetl.event")
        mine = Stage(stage.database_url, stage.nats_url, own, stage.next_id)
        while True:
            cursor = await _seed_pages(mine, client, cursor or 0, until=SEED_BATCH)
            await asyncio.sleep(SEED_POLL_SECONDS)
    finally:
        await client.close()
        await own.close()


async def _latencies(stage: Stage, seconds: float, tailer: Callable[[Stage], Awaitable[None]]) -> list[float]:
    committed: dict[int, float] = {}
    taken: list[float] = []

    async def arrive(message: Msg) -> None:
        event_id = int((message.headers or {})["Nats-Msg-Id"].rpartition("-")[2])
        began = committed.pop(event_id, None)
        if began is not None:
            taken.append(time.perf_counter() - began)

    client: Any = Client()
    await client.connect(stage.nats_url)
    stream = client.jetstream()
    task = asyncio.ensure_future(tailer(stage))
    try:
        # The first one tells that the tailer runs.
        await client.subscribe(SUBJECTS, cb=arrive)
        await _until_flowing(stage, taken, committed, stream)
        taken.clear()
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            committed[await stage.write(1)] = time.perf_counter()
            await asyncio.sleep(1 / 60)
        await asyncio.sleep(2 * SEED_POLL_SECONDS)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
    return taken


async def _until_flowing(stage: Stage, taken: list[float], committed: dict[int, float], stream: Any) -> None:
    async with asyncio.timeout(30):
        while not taken:
            committed[await stage.write(1)] = time.perf_counter()
            await asyncio.sleep(0.1)
    await stream.stream_info(STREAM)
