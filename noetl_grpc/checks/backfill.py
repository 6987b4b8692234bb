"""A long history is published at the first start, in little memory, and goes on where a kill has stopped it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass

import asyncpg

from noetl_grpc.broker import Broker
from noetl_grpc.checks._memory import Memory
from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.core.tailing import STREAM, key_of
from noetl_grpc.dev.child import Child, child
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.dev.sample_log import write_sample_log
from noetl_grpc.errors import NoetlError

SUMMARY = "a history of 1 000 000 events is published once, in little memory, and goes on after being killed"

EXECUTION_ID = 640_000_000_000_000_000
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    events: int
    executions: int
    kills: int
    memory_mb_max: float
    seconds_max: float


PLANS: dict[Size, Plan] = {
    "small": Plan(events=4_000, executions=4, kills=1, memory_mb_max=100.0, seconds_max=30.0),
    "full": Plan(events=1_000_000, executions=20, kills=5, memory_mb_max=100.0, seconds_max=1800.0),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """On servers of its own; the tailers are killed somewhere on their way."""
    verdict = Verdict("backfill", seed)
    plan, dice = PLANS[size], random.Random(seed)
    async with (
        asyncio.timeout(plan.seconds_max),
        Postgres(durable=False, settings={"max_wal_size": "4GB"}) as postgres,
        Nats() as nats,
    ):
        url = await create_database(postgres, "check")
        await _write(url, plan, progress)
        broker = await Broker.connect(nats.url, name="check")
        began = time.monotonic()
        grown = 0.0
        stops = sorted(dice.randrange(plan.events // 10, plan.events) for _ in range(plan.kills))
        for stop in (*stops, plan.events):
            async with child("noetl_grpc.checks._tailer", url, nats.url, "backfill") as tailer:
                grown = max(grown, await _until(broker, stop, tailer, progress, plan))
                # The last one too: whoever is asked to stop politely would finish what it is at.
                os.kill(tailer.pid, signal.SIGKILL)
        verdict.figures["seconds"] = round(time.monotonic() - began, 1)
        verdict.figures["memory_mb"] = grown
        verdict.require(
            grown <= plan.memory_mb_max,
            f"a tailer grew by {grown} MB, more than {plan.memory_mb_max:g}",
        )
        await _compare(url, broker, verdict)
        await broker.close()
    return verdict


async def _write(url: str, plan: Plan, progress: Progress) -> None:
    conn = await asyncpg.connect(url)
    try:
        each = plan.events // plan.executions
        for number in range(plan.executions):
            progress("writing the history", number * each, plan.events)
            await write_sample_log(conn, EXECUTION_ID + number, last=each)
        await conn.execute("VACUUM ANALYZE noetl.event", timeout=600)
    finally:
        await conn.close()


async def _until(broker: Broker, events: int, tailer: Child, progress: Progress, plan: Plan) -> float:
    """Wait until the stream holds so many; by how many MB the tailer has grown until then."""
    memory = Memory(tailer.pid)
    while (held := await _held(broker)) < events:
        progress("publishing", held, plan.events)
        await asyncio.sleep(LOOK_SECONDS)
    return memory.grown_mb()


async def _held(broker: Broker) -> int:
    try:
        return (await broker.stream_facts(STREAM)).last_sequence
    except NoetlError:
        # It is not there yet.
        return 0


async def _compare(url: str, broker: Broker, verdict: Verdict) -> None:
    conn = await asyncpg.connect(url)
    log = {tuple(row) for row in await conn.fetch("SELECT execution_id, event_id FROM noetl.event")}
    await conn.close()
    stream = [
        key_of(identifier)
        async for some in broker.message_ids(STREAM, last_sequence=await _held(broker))
        for identifier in some
    ]
    missing, twice = log - set(stream), len(stream) - len(set(stream))
    verdict.figures |= {"events": len(log), "missing": len(missing), "twice": twice}
    verdict.require(not missing, f"{len(missing)} events are not in the stream")
    verdict.require(set(stream) <= log, "the stream holds what the log does not")
    verdict.require(not twice, f"{twice} events are in the stream twice")
