"""Long logs cost no memory, and many replays at once leave the server answering."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import asyncpg
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import replay_pb2_grpc as rpc

from noetl_grpc.checks._memory import Memory
from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.dev.sample_log import write_sample_log

SUMMARY = "replaying and streaming 1 000 000 events takes little memory, and 50 replays at once starve nobody"

TOKEN = "check"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
LONG = 382_000_000_000_000_000
SHORT = 382_000_000_000_000_001
MEMORY_MB_MAX = 150.0
HEALTH_EVERY_SECONDS = 0.01
IDLE_SECONDS = 0.5
#: The reader rests after each message, and long in the middle.
READER_PAUSE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    long_events: int
    short_events: int
    replays: int
    reader_break_seconds: float
    #: How long a health check may take (p99); small runs share the machine with other tests.
    answer_seconds_max: float
    seconds_max: float


PLANS: dict[Size, Plan] = {
    "small": Plan(
        long_events=3_000,
        short_events=5_000,
        replays=32,
        reader_break_seconds=0.1,
        answer_seconds_max=3.0,
        seconds_max=18.0,
    ),
    "full": Plan(
        long_events=1_000_000,
        short_events=20_000,
        replays=50,
        reader_break_seconds=3.0,
        answer_seconds_max=0.2,
        seconds_max=1800.0,
    ),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """One long execution and many replays of a shorter one; there is nothing random in it."""
    verdict = Verdict("replay", seed)
    plan = PLANS[size]
    async with asyncio.timeout(plan.seconds_max), AsyncExitStack() as stack:
        postgres = await stack.enter_async_context(
            Postgres(durable=False, settings={"shared_buffers": "512MB", "max_wal_size": "4GB"})
        )
        url = await create_database(postgres, "replay")
        await _write(url, plan, progress)
        server = await stack.enter_async_context(server_process(url, token=TOKEN))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.line))
        stub = rpc.ReplayServiceStub(channel)
        # What is loaded and cached once is no cost of a long log.
        await _replay(stub, SHORT)
        memory = Memory(server.pid)
        progress("replaying the long log")
        await _replay_long(stub, plan, verdict, memory)
        progress("streaming the long log to a slow reader")
        await _stream_long(stub, plan, verdict, memory)
        progress(f"{plan.replays} replays at once")
        await _replay_many(stub, server.line, plan, verdict)
    return verdict


async def _write(url: str, plan: Plan, progress: Progress) -> None:
    conn = await asyncpg.connect(url)
    try:
        step = 50_000
        for first in range(1, plan.long_events + 1, step):
            progress("writing the log", first, plan.long_events)
            last = min(first + step - 1, plan.long_events)
            # Stages so long that the state stays small.
            await write_sample_log(conn, LONG, first=first, last=last, events_per_stage=plan.long_events // 5)
        await write_sample_log(conn, SHORT, last=plan.short_events, events_per_stage=2_000)
        await conn.execute("VACUUM ANALYZE noetl.event", timeout=600)
    finally:
        await conn.close()


async def _replay(stub: Any, execution_id: int) -> pb.ReplayStateResponse:
    request = pb.ReplayStateRequest(execution_id=execution_id, use_snapshot=False)
    answer: pb.ReplayStateResponse = await stub.ReplayState(request, metadata=METADATA, timeout=900)
    return answer


async def _replay_long(stub: Any, plan: Plan, verdict: Verdict, memory: Memory) -> None:
    began = time.perf_counter()
    answer = await _replay(stub, LONG)
    verdict.figures["replay_seconds"] = round(time.perf_counter() - began, 2)
    verdict.figures["replay_memory_mb"] = memory.grown_mb()
    verdict.require(answer.state.complete, "the replay says that it is not complete")
    verdict.require(
        answer.state.event_count == plan.long_events,
        f"{answer.state.event_count} of {plan.long_events} events were folded",
    )
    verdict.require(
        memory.grown_mb() <= MEMORY_MB_MAX,
        f"the server grew by {memory.grown_mb()} MB while it replayed, more than {MEMORY_MB_MAX:g}",
    )


async def _stream_long(stub: Any, plan: Plan, verdict: Verdict, memory: Memory) -> None:
    began = time.perf_counter()
    expected, caught_up, rested = 1, False, False
    async for message in stub.StreamEvents(
        pb.StreamEventsRequest(execution_id=LONG), metadata=METADATA, timeout=1200
    ):
        for event in message.events:
            verdict.require(
                event.event_id == expected, f"event {event.event_id} came where {expected} was due"
            )
            expected += 1
        caught_up = message.caught_up
        if not rested and expected > plan.long_events // 2:
            rested = True
            await asyncio.sleep(plan.reader_break_seconds)
        await asyncio.sleep(READER_PAUSE_SECONDS)
    verdict.figures["stream_seconds"] = round(time.perf_counter() - began, 2)
    verdict.figures["stream_memory_mb"] = memory.grown_mb()
    verdict.require(expected == plan.long_events + 1, f"the stream ended before event {expected}")
    verdict.require(caught_up, "the stream ended without saying that it had caught up")
    verdict.require(
        memory.grown_mb() <= MEMORY_MB_MAX,
        f"the server grew by {memory.grown_mb()} MB while it streamed, more than {MEMORY_MB_MAX:g}",
    )


async def _replay_many(stub: Any, address: str, plan: Plan, verdict: Verdict) -> None:
    """Replays of one log at the same time, and health checks beside them on a connection of their own."""
    idle: list[float] = []
    seconds: list[float] = []
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        # What the machine itself costs: on one that is busy with other things no bound can hold.
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await _check_health(health, idle)
        checking = asyncio.create_task(_check_health(health, seconds))
        began = time.perf_counter()
        answers = await asyncio.gather(*(_replay(stub, SHORT) for _ in range(plan.replays)))
        verdict.figures["replays_seconds"] = round(time.perf_counter() - began, 2)
        checking.cancel()
        await asyncio.wait([checking])
    p99 = quantiles(seconds, n=100)[98] if len(seconds) > 1 else 0.0
    verdict.figures["health_idle_max_ms"] = round(max(idle, default=0.0) * 1000, 1)
    verdict.figures["health_checks"] = len(seconds)
    verdict.figures["health_p50_ms"] = round(median(seconds) * 1000, 1)
    verdict.figures["health_p99_ms"] = round(p99 * 1000, 1)
    verdict.require(len(seconds) >= 2, f"only {len(seconds)} health checks were answered beside the replays")
    verdict.require(
        p99 <= plan.answer_seconds_max, f"health answered within {p99 * 1000:.0f} ms (p99) beside the replays"
    )
    sums = {answer.state.checksum.value for answer in answers}
    verdict.require(len(sums) == 1, f"{len(sums)} different states came out of one log")


async def _check_health(stub: Any, seconds: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(HEALTH_EVERY_SECONDS)
