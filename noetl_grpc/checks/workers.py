"""Publishers and projectors that are killed again and again lose nothing and mix up nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import nats
import orjson

from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.client import NoetlClient
from noetl_grpc.client.events import EventEnvelope
from noetl_grpc.client.outbox import OutboxMessage
from noetl_grpc.client.projection import ProjectionCheck
from noetl_grpc.dev.catalog import SAMPLE_CATALOG, load_catalog
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.stack import Stack

SUMMARY = (
    "publishers and projectors killed at random: nothing lost, nothing out of order, nothing left behind"
)

TOKEN = "check-workers"
ENQUEUE_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class _Plan:
    """How much of everything."""

    rows: int
    executions: int
    copies: int
    kills: int
    event_executions: int
    events_each: int
    projector_kills: int
    seconds: float


_PLANS: Mapping[Size, _Plan] = {
    "small": _Plan(
        rows=1500,
        executions=60,
        copies=2,
        kills=2,
        event_executions=20,
        events_each=20,
        projector_kills=1,
        seconds=60,
    ),
    "full": _Plan(
        rows=50_000,
        executions=1000,
        copies=3,
        kills=30,
        event_executions=400,
        events_each=60,
        projector_kills=30,
        seconds=900,
    ),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """First the publishers, then the projectors, on the same servers."""
    plan = _PLANS[size]
    verdict = Verdict("workers", seed)
    chance = random.Random(seed)
    progress("starting PostgreSQL, NATS and a server")
    try:
        async with asyncio.timeout(plan.seconds):
            await _run(plan, chance, verdict, progress)
    except TimeoutError:
        verdict.require(False, f"not done after {plan.seconds:.0f} s")
    return verdict


async def _run(plan: _Plan, chance: random.Random, verdict: Verdict, progress: Progress) -> None:
    async with Stack(durable=False) as stack:
        url = await create_database(stack.postgres, "noetl")
        await _load_sample_catalog(url)
        streaming = {
            "NOETL_NATS_URL": stack.nats.url,
            "NOETL_EVENT_STREAM_ENABLED": "true",
            "NOETL_EVENT_STREAM_BACKFILL": "true",
        }
        async with server_process(url, token=TOKEN, env=streaming) as server:
            env = {
                "NOETL_GRPC_ADDRESS": server.line,
                "NOETL_INTERNAL_API_TOKEN": TOKEN,
                "NOETL_NATS_URL": stack.nats.url,
            }
            async with NoetlClient(server.line, token=TOKEN) as client:
                await _check_publishers(client, stack.nats.url, env, plan, chance, verdict, progress)
                await _check_projectors(client, env, plan, chance, verdict, progress)


async def _check_publishers(
    client: NoetlClient,
    nats_url: str,
    env: Mapping[str, str],
    plan: _Plan,
    chance: random.Random,
    verdict: Verdict,
    progress: Progress,
) -> None:
    async with _Herd("publish-outbox", env=env, copies=plan.copies, chance=chance) as herd:
        outbox = _Outbox(client)
        writing = asyncio.create_task(outbox.fill(plan, chance))
        # Kills are spread over the work: each waits until so much more of it is done.
        for number in range(1, plan.kills + 1):
            share = plan.rows * number // (plan.kills + 1)
            await _until_published(outbox, writing, plan, at_least=share, progress=progress)
            await herd.kill_one()
        await writing
        await _until_published(outbox, writing, plan, at_least=plan.rows, progress=progress)
    stats = await client.outbox.stats()
    left = await outbox.left()
    delivered = await _first_deliveries(nats_url, "noetl_outbox")
    sent = sum(len(numbers) for numbers in delivered.values())
    distinct = sum(len(set(numbers)) for numbers in delivered.values())
    verdict.figures |= {"rows": plan.rows, "publisher_kills": herd.kills, "stored_in_stream": sent}
    verdict.require(left == 0, f"{left} rows were left behind")
    verdict.require(stats.dead == 0, f"{stats.dead} rows are dead")
    verdict.require(distinct == plan.rows, f"the stream holds {distinct} of {plan.rows} rows")
    for execution_id, numbers in delivered.items():
        firsts = list(dict.fromkeys(numbers))
        verdict.require(
            firsts == sorted(firsts),
            f"execution {execution_id}: first deliveries out of order: {firsts[:20]}",
        )


async def _check_projectors(
    client: NoetlClient,
    env: Mapping[str, str],
    plan: _Plan,
    chance: random.Random,
    verdict: Verdict,
    progress: Progress,
) -> None:
    path = "demo/order_events"
    catalog_id = (await client.subscription.register(path)).subscription.catalog_id
    batches = list(_event_batches(plan, chance, catalog_id=catalog_id))
    kill_after = set(chance.sample(range(len(batches)), min(plan.projector_kills, len(batches))))
    arguments = ("--ack-wait-seconds", "3")
    async with _Herd("run-projector", *arguments, env=env, copies=plan.copies, chance=chance) as herd:
        for number, batch in enumerate(batches):
            progress("writing events beside projectors", number, len(batches))
            stored = await client.projection.project_events(batch)
            verdict.require(
                stored.projected == len(batch), f"only {stored.projected} of {len(batch)} events stored"
            )
            if number in kill_after:
                await herd.kill_one()
        last_event = {event.execution_id: event.event_id for batch in batches for event in batch}
        for number, (execution_id, event_id) in enumerate(last_event.items()):
            progress("waiting for snapshots", number, len(last_event))
            waited = await client.projection.wait_for_projection(execution_id, event_id, wait_seconds=60)
            verdict.require(waited.included, f"the snapshot of {execution_id} never got event {event_id}")
    outcomes: defaultdict[str, int] = defaultdict(int)
    async for one in client.projection.verify(list(last_event)):
        outcomes[one.outcome.value] += 1
        verdict.require(one.outcome is ProjectionCheck.SAME, f"snapshot of {one.execution_id}: {one.outcome}")
    verdict.figures |= {
        "snapshots": dict(outcomes),
        "projector_kills": herd.kills,
        "events": sum(map(len, batches)),
    }


class _Herd:
    """So many copies of a worker. One that is killed is replaced, as an orchestrator would."""

    def __init__(self, *command: str, env: Mapping[str, str], copies: int, chance: random.Random) -> None:
        self._command = command
        self._env = env
        self._copies = copies
        self._chance = chance
        self._processes: list[Process] = []
        self.kills = 0

    async def __aenter__(self) -> _Herd:
        self._processes = [await self._start() for _ in range(self._copies)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def kill_one(self) -> None:
        """-9, in the middle of whatever it does."""
        process = self._processes.pop(self._chance.randrange(len(self._processes)))
        process.send_signal(signal.SIGKILL)
        await process.wait()
        self.kills += 1
        self._processes.append(await self._start())

    async def _start(self) -> Process:
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("NOETL_", "POSTGRES_"))
        }
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noetl_grpc", *self._command),
            stdout=DEVNULL,
            stderr=DEVNULL,
            env={**inherited, **self._env},
        )


class _Outbox:
    """The rows that were written, and those that are not published yet.

    The table tells, not the server's counters: a publisher that is killed takes the count of its last rows with it.
    """

    def __init__(self, client: NoetlClient) -> None:
        self._client = client
        self.written = 0

    async def fill(self, plan: _Plan, chance: random.Random) -> None:
        """Rows of all executions, mixed; those of one execution count up."""
        counts: defaultdict[int, int] = defaultdict(int)
        messages = []
        for event_id in range(1, plan.rows + 1):
            execution_id = chance.randint(1, plan.executions)
            counts[execution_id] += 1
            body = orjson.dumps({"execution_id": execution_id, "n": counts[execution_id]}).decode()
            messages.append(OutboxMessage(event_id=event_id, execution_id=execution_id, payload_json=body))
        for start in range(0, len(messages), ENQUEUE_AT_ONCE):
            part = messages[start : start + ENQUEUE_AT_ONCE]
            await self._client.outbox.enqueue(part)
            self.written += len(part)

    async def left(self) -> int:
        """Rows that somebody still has to publish."""
        stats = await self._client.outbox.stats()
        return stats.pending + stats.delayed + stats.in_flight + stats.expired


async def _until_published(
    outbox: _Outbox, writing: asyncio.Task[None], plan: _Plan, *, at_least: int, progress: Progress
) -> None:
    while True:
        if writing.done():
            writing.result()
        written = outbox.written
        published = max(0, written - await outbox.left())
        progress("publishing beside kills", published, plan.rows)
        if published >= at_least:
            return
        await asyncio.sleep(0.05)


async def _first_deliveries(nats_url: str, stream: str) -> dict[int, list[int]]:
    """The numbers of each execution in the order of the stream."""
    delivered: defaultdict[int, list[int]] = defaultdict(list)
    connection = await nats.connect(nats_url)
    try:
        jetstream = connection.jetstream()
        total = (await jetstream.stream_info(stream)).state.messages
        subscription = await jetstream.pull_subscribe("noetl.outbox.>", stream=stream)
        seen = 0
        while seen < total:
            for message in await subscription.fetch(1000, timeout=10):
                body = orjson.loads(message.data)
                delivered[body["execution_id"]].append(body["n"])
                await message.ack()
                seen += 1
    finally:
        await connection.close()
    return delivered


def _event_batches(plan: _Plan, chance: random.Random, *, catalog_id: int) -> Iterator[list[EventEnvelope]]:
    """Every execution's events in order, the executions mixed."""
    left = {10_000_000 + number: 0 for number in range(plan.event_executions)}
    event_id = 20_000_000
    batch: list[EventEnvelope] = []
    while left:
        execution_id = chance.choice(list(left))
        event_id += 1
        left[execution_id] += 1
        number = left[execution_id]
        is_last = number == plan.events_each
        kind = "playbook.initialized" if number == 1 else "playbook.completed" if is_last else "step.enter"
        batch.append(
            EventEnvelope(
                execution_id=execution_id,
                event_id=event_id,
                catalog_id=catalog_id,
                event_type=kind,
                node_name=f"step-{number}",
            )
        )
        if is_last:
            del left[execution_id]
        if len(batch) == 200 or not left:
            yield batch
            batch = []


async def _load_sample_catalog(url: str) -> None:
    import asyncpg

    conn = await asyncpg.connect(url)
    try:
        await load_catalog(conn, SAMPLE_CATALOG)
    finally:
        await conn.close()
