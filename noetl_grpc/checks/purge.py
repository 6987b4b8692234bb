"""A large purge runs beside writers, behind a reader that stays, and takes nothing that is still needed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count

import asyncpg
import grpc
from noetlpb.v1 import event_pb2
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc

from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.core.snowflake import first_id_of
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres

SUMMARY = "purging 500 000 rows stops no writer for a second and takes nothing that is needed"

TOKEN = "check"
EVENTS_PER_CALL = 10
CATALOG_ID = 1
FEBRUARY, MAY = datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 5, 1, tzinfo=UTC)
#: Between the end of the second quarter and whatever day it is.
CUTOFF = datetime(2026, 7, 5, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    events: int
    commands: int
    outbox_rows: int
    writers: int
    reader_seconds: float
    #: The longest that a write may take; small runs share their machine with other tests.
    wait_seconds_max: float
    seconds_max: float


PLANS: dict[Size, Plan] = {
    "small": Plan(
        events=3_000,
        commands=3_000,
        outbox_rows=3_000,
        writers=3,
        reader_seconds=0.3,
        wait_seconds_max=3.0,
        seconds_max=18.0,
    ),
    "full": Plan(
        events=250_000,
        commands=150_000,
        outbox_rows=100_000,
        writers=20,
        reader_seconds=2.0,
        wait_seconds_max=1.0,
        seconds_max=600.0,
    ),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """The scenario on servers of its own."""
    settings = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
    async with Postgres(settings=settings, durable=size == "full") as postgres:
        url = await create_database(postgres, "check")
        async with server_process(url, token=TOKEN) as server:
            return await scenario(url, server.line, token=TOKEN, size=size, seed=seed, progress=progress)


async def scenario(
    url: str, address: str, *, token: str, size: Size, seed: int, progress: Progress
) -> Verdict:
    """Fill, write, purge with somebody in the way, count; on an empty database and its server."""
    plan, verdict = PLANS[size], Verdict("purge", seed)
    async with asyncio.timeout(plan.seconds_max), _connected(url) as watcher, _stub(address, token) as stub:
        progress("filling")
        await _fill(watcher, plan)
        await _purge_beside_writers(watcher, url, stub, plan, random.Random(seed), verdict, progress)
    return verdict


async def _purge_beside_writers(
    watcher: asyncpg.Connection,
    url: str,
    stub: Service,
    plan: Plan,
    randomness: random.Random,
    verdict: Verdict,
    progress: Progress,
) -> None:
    request = pb.PurgeStaleRequest(
        policy=pb.PurgePolicy(
            event_retention_days=(datetime.now(UTC) - CUTOFF).days,
            outbox_retention_days=1,
            command_retention_days=1,
        )
    )
    async with asyncio.TaskGroup() as group:
        expected = await _purge(stub, request, dry_run=True)
        writers = [Writer(stub, number, randomness) for number in range(plan.writers)]
        for writer in writers:
            group.create_task(writer.run())
        await asyncio.gather(*(writer.has_written.wait() for writer in writers))
        progress("purging")
        group.create_task(_stay(url, plan.reader_seconds))
        began = time.monotonic()
        purged = await _purge(stub, request)
        seconds = time.monotonic() - began
        for writer in writers:
            writer.is_stopped = True

    verdict.require(purged == expected, "the dry run told something else than the purge then did")
    verdict.require(
        (purged.commands_purged, purged.outbox_purged) == (plan.commands, plan.outbox_rows),
        f"{purged.commands_purged} commands and {purged.outbox_purged} outbox rows were purged",
    )
    dropped = list(purged.event_partitions_dropped)
    verdict.require(dropped == ["event_pre_2026", "event_2026_q1"], f"dropped were {dropped}")
    kept = {partition.partition: partition.reason for partition in purged.partitions_kept}
    verdict.require(kept.get("event_2026_q2") == "LIVE_SUBSCRIPTION", f"kept were {kept}")
    written = sum(writer.written for writer in writers)
    stored = await watcher.fetchval("SELECT count(*) FROM noetl.event")
    verdict.require(stored == written + 1, f"{written} events were acknowledged, {stored - 1} are stored")
    waits = sorted(wait for writer in writers for wait in writer.waits)
    verdict.require(waits[-1] < plan.wait_seconds_max, f"a write waited {waits[-1]:.2f} s")
    verdict.figures = {
        "rows": plan.events + plan.commands + plan.outbox_rows,
        "purge_seconds": round(seconds, 1),
        "written_meanwhile": written,
        "longest_wait_seconds": round(waits[-1], 3),
        "median_wait_seconds": round(waits[len(waits) // 2], 4),
    }


async def _purge(
    stub: Service, request: pb.PurgeStaleRequest, *, dry_run: bool = False
) -> pb.PurgeStaleResponse:
    asked = pb.PurgeStaleRequest(policy=request.policy, dry_run=dry_run)
    return await stub.methods.PurgeStale(asked, metadata=stub.metadata, timeout=300)


@dataclass(frozen=True, slots=True)
class Service:
    """The service, and what to show it."""

    methods: rpc.ProjectionServiceStub
    metadata: tuple[tuple[str, str], ...]


@asynccontextmanager
async def _stub(address: str, token: str) -> AsyncIterator[Service]:
    async with grpc.aio.insecure_channel(
        address, options=(("grpc.use_local_subchannel_pool", 1),)
    ) as channel:
        yield Service(rpc.ProjectionServiceStub(channel), (("authorization", f"Bearer {token}"),))


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    conn = await asyncpg.connect(url)
    try:
        yield conn
    finally:
        await conn.close()


class Writer:
    """Sends small batches of one young execution, one after the other; knows how long each took."""

    def __init__(self, stub: Service, number: int, randomness: random.Random) -> None:
        self._stub = stub
        self._execution_id = first_id_of(datetime.now(UTC)) + number
        self._event_ids = count(self._execution_id + randomness.randrange(1000))
        self.has_written = asyncio.Event()
        self.is_stopped = False
        self.waits: list[float] = []
        self.written = 0

    async def run(self) -> None:
        """Write until stopped."""
        while not self.is_stopped:
            events = [
                event_pb2.EventEnvelope(
                    execution_id=self._execution_id,
                    event_id=next(self._event_ids),
                    catalog_id=CATALOG_ID,
                    event_type="step.exit",
                )
                for _ in range(EVENTS_PER_CALL)
            ]
            began = time.monotonic()
            answer = await self._stub.methods.ProjectEvents(
                pb.ProjectEventsRequest(events=events), metadata=self._stub.metadata, timeout=60
            )
            self.waits.append(time.monotonic() - began)
            self.written += answer.projected
            self.has_written.set()


async def _stay(url: str, seconds: float) -> None:
    """A reader whose transaction keeps the log from being locked."""
    async with _connected(url) as conn, conn.transaction():
        await conn.fetchval("SELECT event_id FROM noetl.event_2026_q1 LIMIT 1")
        await asyncio.sleep(seconds)


async def _fill(conn: asyncpg.Connection, plan: Plan) -> None:
    """Old events in one partition, a live subscription in another, old commands, old outbox rows."""
    long_ago = datetime.now(UTC) - timedelta(days=30)
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'check/purge', 1, 'playbook')",
        CATALOG_ID,
    )
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, created_at, meta)
        SELECT $1::bigint + n % 1000, $1::bigint + n, $2, 'step.exit', $3, '{"attempt": 1}'
        FROM generate_series(1, $4::integer) AS n
        """,
        first_id_of(FEBRUARY),
        CATALOG_ID,
        FEBRUARY.replace(tzinfo=None),
        plan.events,
        timeout=300,
    )
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, status, created_at)
        VALUES ($1::bigint, $1::bigint + 1, $2, 'subscription.activated', 'ACTIVE', $3)
        """,
        first_id_of(MAY),
        CATALOG_ID,
        MAY.replace(tzinfo=None),
    )
    await conn.execute(
        """
        INSERT INTO noetl.command (command_id, event_id, execution_id, catalog_id, step_name, status, completed_at)
        SELECT n, n, n % 5000, $1, 'step', CASE WHEN n % 2 = 0 THEN 'RUNNING' ELSE 'COMPLETED' END,
            CASE WHEN n % 2 = 0 THEN NULL ELSE $2::timestamptz END
        FROM generate_series(1, $3::integer * 2) AS n
        """,
        CATALOG_ID,
        long_ago,
        plan.commands,
        timeout=300,
    )
    await conn.execute(
        """
        INSERT INTO noetl.outbox (execution_id, event_id, payload, status, published_at)
        SELECT 1, n, '{}', 'PUBLISHED', $1
        FROM generate_series(1, $2::integer) AS n
        """,
        long_ago,
        plan.outbox_rows,
        timeout=300,
    )
    await conn.execute("ANALYZE noetl.event, noetl.command, noetl.outbox", timeout=300)
