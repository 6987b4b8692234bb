"""Eight callers of two servers advance the same executions while sixteen writers add events, some committing late with
lower ids."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg
import grpc
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc

from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres

SUMMARY = "Snapshots never go back, miss no straggler, and equal a whole fold when all is quiet."

TOKEN = "check"
CATALOG_ID = 7_000_001
EXECUTION_ID = 381_000_000_000_000_000
ADVANCERS = 8
WRITERS = 16
WAITERS = 32
SECONDS_MAX = 600
#: Events with an entry each that are there from the start: states are large enough to be kept beside a document.
PAST_EVENTS = 300

PAST = """
INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, node_name, status, meta)
SELECT execution_id, event_id, $2, 'command.completed', 'step', 'COMPLETED',
    jsonb_build_object('command_id', 'past-' || event_id)
FROM unnest($1::bigint[]) AS execution_id, generate_series(1, $3::integer) AS event_id
"""


@dataclass(frozen=True, slots=True)
class _Scale:
    executions: int
    rounds: int


SIZES: dict[Size, _Scale] = {
    "small": _Scale(executions=3, rounds=5),
    "full": _Scale(executions=20, rounds=150),
}


@dataclass(slots=True)
class _Run:
    """What the parts of a run tell each other."""

    url: str
    stubs: Sequence[rpc.ProjectionServiceStub]
    metadata: tuple[tuple[str, str], ...]
    executions: Sequence[int]
    verdict: Verdict
    draw: random.Random
    advances: int = 0
    rebuilt: int = 0
    waits: int = 0
    written: int = 0
    #: How often the table held a state beside a document.
    beside: int = 0

    @property
    def stub(self) -> rpc.ProjectionServiceStub:
        """Any of the servers."""
        return self.stubs[0]


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """Write, advance, wait and watch side by side; then look at what is stored."""
    scale = SIZES[size]
    verdict = Verdict("read-model", seed)
    async with asyncio.timeout(SECONDS_MAX), Postgres(durable=False, in_memory=size == "small") as postgres:
        url = await create_database(postgres, "noetl")
        conn = await asyncpg.connect(url)
        await conn.execute(
            "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'check', 1, 'playbook')",
            CATALOG_ID,
        )
        async with (
            server_process(url, token=TOKEN) as one,
            server_process(url, token=TOKEN) as other,
            grpc.aio.insecure_channel(one.line) as to_one,
            grpc.aio.insecure_channel(other.line) as to_other,
        ):
            part = _Run(
                url=url,
                stubs=[rpc.ProjectionServiceStub(channel) for channel in (to_one, to_other)],
                metadata=(("authorization", f"Bearer {TOKEN}"),),
                executions=[EXECUTION_ID + number for number in range(scale.executions)],
                verdict=verdict,
                draw=random.Random(seed),
            )
            await conn.execute(PAST, part.executions, CATALOG_ID, PAST_EVENTS)
            await _provoke(part, scale, progress)
            await _judge(part)
        await conn.close()
    verdict.figures.update(
        events=part.written,
        advances=part.advances,
        rebuilt=part.rebuilt,
        seen_beside_a_document=part.beside,
        answered_waits=part.waits,
    )
    return verdict


async def _provoke(run: _Run, scale: _Scale, progress: Progress) -> None:
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(ADVANCERS):
            group.create_task(_advance(run, run.stubs[number % len(run.stubs)], done))
        group.create_task(_watch(run, done))
        writers = [group.create_task(_write(run, number, scale)) for number in range(WRITERS)]
        for finished, writer in enumerate(writers):
            await writer
            progress("writers", finished + 1, WRITERS)
        done.set()


async def _write(run: _Run, number: int, scale: _Scale) -> None:
    """Events whose ids are drawn before their transaction is long open, so that they commit in another order."""
    conn = await asyncpg.connect(run.url)
    try:
        for round_number in range(scale.rounds):
            event_id = PAST_EVENTS + 1 + number + WRITERS * round_number
            mine = run.draw.sample(run.executions, run.draw.randint(1, len(run.executions)))
            transaction = conn.transaction()
            await transaction.start()
            await conn.executemany(
                "INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, node_name, status, meta)"
                " VALUES ($1, $2, $3, 'command.completed', 'step', 'COMPLETED', $4)",
                [(item, event_id, CATALOG_ID, f'{{"command_id": {event_id % 9}}}') for item in mine],
            )
            for _ in range(run.draw.randrange(20)):
                await conn.fetchval("SELECT 1")
            if run.draw.random() < 0.1:
                await transaction.rollback()
                continue
            await transaction.commit()
            run.written += len(mine)
            if round_number % 5 == 0:
                await _await_inclusion(run, conn, mine[0], event_id)
    finally:
        await conn.close()


async def _await_inclusion(run: _Run, conn: asyncpg.Connection, execution_id: int, event_id: int) -> None:
    """Read your writes: when the answer is yes, the event must be in the snapshot that is stored."""
    answer = await run.stub.WaitForProjection(
        pb.WaitForProjectionRequest(execution_id=execution_id, event_id=event_id),
        metadata=run.metadata,
        timeout=60,
    )
    run.verdict.require(answer.included, f"event {event_id} of {execution_id} was never included")
    run.waits += 1
    is_there = await conn.fetchval(
        "SELECT pg_visible_in_snapshot(e.xact_id, (s.meta ->> 'log_snapshot')::pg_snapshot)"
        " FROM noetl.event e, noetl.projection_snapshot s"
        " WHERE e.execution_id = $1 AND e.event_id = $2 AND s.aggregate_id = 'execution/' || $1 || '/all'",
        execution_id,
        event_id,
    )
    run.verdict.require(is_there, f"event {event_id} of {execution_id} was said to be included and is not")


async def _advance(run: _Run, stub: rpc.ProjectionServiceStub, done: asyncio.Event) -> None:
    while not done.is_set():
        answer = await stub.AdvanceProjections(
            pb.AdvanceProjectionsRequest(execution_ids=run.executions), metadata=run.metadata, timeout=60
        )
        run.advances += 1
        run.rebuilt += sum(item.rebuilt for item in answer.advanced)
        for failed in answer.failed:
            run.verdict.require(failed.reason == "NO_EVENTS", f"{failed.execution_id}: {failed.reason}")


async def _watch(run: _Run, done: asyncio.Event) -> None:
    highest: dict[str, tuple[int, int, int]] = {}
    conn = await asyncpg.connect(run.url)
    try:
        while not done.is_set():
            for key, document, version, events in await conn.fetch(
                "SELECT aggregate_id, version, COALESCE((meta ->> 'version')::bigint, version),"
                " (meta ->> 'event_count')::int FROM noetl.projection_snapshot"
            ):
                before, now = highest.get(key, (0, 0, 0)), (document, version, events)
                run.verdict.require(
                    all(is_now >= was for is_now, was in zip(now, before, strict=True)),
                    f"{key} went from {before} to {now}: document, version, events",
                )
                highest[key] = now
                run.beside += document < version
    finally:
        await conn.close()


async def _judge(run: _Run) -> None:
    await run.stub.AdvanceProjections(
        pb.AdvanceProjectionsRequest(execution_ids=run.executions), metadata=run.metadata, timeout=60
    )
    answer = await run.stub.VerifyProjections(
        pb.VerifyProjectionsRequest(execution_ids=run.executions), metadata=run.metadata, timeout=60
    )
    run.verdict.require(len(answer.results) == len(run.executions), "not every execution was verified")
    for result in answer.results:
        run.verdict.require(
            result.outcome == pb.PROJECTION_CHECK_SAME,
            f"{result.execution_id} differs from its log: {result.outcome}",
        )
