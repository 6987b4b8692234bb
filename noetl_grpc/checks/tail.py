"""Many writers, late commits, rollbacks and strangers, while servers, broker and database are killed and frozen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import asyncpg
from nats.aio.client import Client

from noetl_grpc.broker import Broker
from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.core.tailing import STREAM, key_of
from noetl_grpc.dev.child import Child, child, server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.storage.tailing import APPLICATION, CURSOR, LOCK_SPACE

SUMMARY = "Every committed event reaches the stream, however late it commits and whatever dies."

TOKEN = "check"
CATALOG_ID = 4_000_000_002
EXECUTION_ID = 600_000_000_000_000_000
EVENT_ID = 610_000_000_000_000_000
#: Events that only measure how long they take.
PROBE_EXECUTION_ID = EXECUTION_ID - 1
PROBE_TYPE = "probe"
EXECUTIONS = 200
ROLLBACK_SHARE = 0.1
TRANSACTION_EVENTS_MAX = 20
PAUSE_SECONDS_MAX = 0.02
PROBE_SECONDS = 0.1

HANDOVER_SECONDS_MAX = 5.0
THAW_SECONDS_MAX = 20.0
WAIT_SECONDS = 120.0

#: What a statement may end with while the database is being restarted.
DATABASE_AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)

INSERT = """
INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, context)
SELECT $1, $2, event_id, $4, jsonb_build_object('text', repeat('x', 300))
FROM unnest($3::bigint[]) AS e(event_id)
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    writers: int
    events: int
    kills: int
    broker_kills: int
    database_restarts: int
    terminations: int
    freezes: int
    #: What an event may take while strangers are open.
    lag_seconds_max: float
    #: Whole servers, or only their tailers, which start faster.
    servers: bool


PLANS: dict[Size, Plan] = {
    "small": Plan(
        writers=8,
        events=1000,
        kills=1,
        broker_kills=1,
        database_restarts=0,
        terminations=1,
        freezes=0,
        lag_seconds_max=5.0,  # it runs beside other tests
        servers=False,
    ),
    "full": Plan(
        writers=64,
        events=200_000,
        kills=20,
        broker_kills=3,
        database_restarts=2,
        terminations=5,
        freezes=1,
        lag_seconds_max=1.0,
        servers=True,
    ),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """On servers of its own."""
    async with Postgres(durable=False) as postgres, Nats() as nats:
        scene = Scene(
            plan=PLANS[size],
            dice=random.Random(seed),
            progress=progress,
            verdict=Verdict("tail", seed),
            postgres=postgres,
            nats=nats,
            url=await create_database(postgres, "check"),
        )
        await scene.play()
        return scene.verdict


@dataclass(slots=True)
class Scene:
    """Everything on stage."""

    plan: Plan
    dice: random.Random
    progress: Progress
    verdict: Verdict
    postgres: Postgres
    nats: Nats
    url: str
    numbers: Any = field(default_factory=lambda: count(1))
    written: int = 0
    lags: list[float] = field(default_factory=list)
    handovers: list[float] = field(default_factory=list)

    async def play(self) -> None:
        """First strangers, then deaths; then the stream is compared with the log."""
        await self._execute(
            "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'check', 1, 'playbook')",
            CATALOG_ID,
        )
        async with self._servers() as servers:
            await self._until_epoch_above(0, time.monotonic())
            await self._among_strangers()
            await self._under_fire(servers)
            await self._until_published()
            self.verdict.figures["handover_seconds_max"] = round(max(self.handovers, default=0.0), 2)
        await self._compare()

    async def _among_strangers(self) -> None:
        """One transaction stays open all the time, another writes at its very end; neither may hold anything up."""
        idle, late = await asyncpg.connect(self.url), await asyncpg.connect(self.url)
        async with idle.transaction():
            await idle.execute("SELECT pg_current_xact_id()")
            async with late.transaction():
                await late.execute("SELECT pg_current_xact_id()")
                async with self._probing() as begun:
                    await self._write(self.plan.events // 2)
                await self._insert(late, EXECUTION_ID, [self._event_id() for _ in range(10)])
            await self._until_published()
            self.lags = await self._lags(begun)
        await idle.close()
        await late.close()
        longest = max(self.lags, default=0.0)
        self.verdict.figures |= {
            "probes": len(self.lags),
            "lag_seconds_max": round(longest, 3),
            "lag_seconds_p50": round(sorted(self.lags)[len(self.lags) // 2], 4) if self.lags else 0,
        }
        self.verdict.require(bool(self.lags), "no probe came through while strangers were open")
        self.verdict.require(
            longest < self.plan.lag_seconds_max, f"an event took {longest:.2f} s while strangers were open"
        )

    async def _under_fire(self, servers: Servers) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            *[lambda: self._kill_leader(servers)] * self.plan.kills,
            *[self._kill_broker] * self.plan.broker_kills,
            *[self._restart_database] * self.plan.database_restarts,
            *[self._terminate_sessions] * self.plan.terminations,
            *[self._freeze_leader] * self.plan.freezes,
        ]
        self.dice.shuffle(faults)
        still_on_fire = asyncio.Event()
        still_on_fire.set()

        async def burn() -> None:
            for number, fault in enumerate(faults):
                self.progress("faults", number, len(faults))
                await fault()
                await asyncio.sleep(self.dice.random())
            still_on_fire.clear()

        async with asyncio.TaskGroup() as group:
            group.create_task(burn())
            group.create_task(self._write(self.plan.events - self.plan.events // 2, while_set=still_on_fire))

    async def _kill_leader(self, servers: Servers) -> None:
        leader, epoch = await self._leader(), await self._epoch()
        began = time.monotonic()
        os.kill(leader, signal.SIGKILL)
        took = await self._until_epoch_above(epoch, began)
        self.handovers.append(took)
        self.verdict.require(
            took <= HANDOVER_SECONDS_MAX, f"a killed leader was replaced after {took:.1f} s only"
        )
        await servers.replace(leader)

    async def _freeze_leader(self) -> None:
        leader, epoch = await self._leader(), await self._epoch()
        began = time.monotonic()
        os.kill(leader, signal.SIGSTOP)
        try:
            took = await self._until_epoch_above(epoch, began)
        finally:
            os.kill(leader, signal.SIGCONT)
        self.verdict.figures["thaw_seconds"] = round(took, 1)
        self.verdict.require(
            took <= THAW_SECONDS_MAX, f"a frozen leader was replaced after {took:.1f} s only"
        )

    async def _kill_broker(self) -> None:
        self.nats.kill()
        await asyncio.sleep(self.dice.random())
        await self.nats.start()

    async def _restart_database(self) -> None:
        await self.postgres.restart()

    async def _terminate_sessions(self) -> None:
        await self._execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE $1 || '%'",
            APPLICATION,
        )

    async def _write(self, events: int, *, while_set: asyncio.Event | None = None) -> None:
        """So many events, and more until the event is cleared."""
        goal = self.written + events

        async def write() -> None:
            conn: asyncpg.Connection | None = None
            while self.written < goal or (while_set is not None and while_set.is_set()):
                try:
                    conn = conn or await asyncpg.connect(self.url, timeout=5)
                    await self._transact(conn)
                except (*DATABASE_AWAY, TimeoutError):
                    # Whether it was committed, the log will tell.
                    _end(conn)
                    conn = None
                    await asyncio.sleep(0.1)
            _end(conn)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.plan.writers):
                group.create_task(write())

    async def _transact(self, conn: asyncpg.Connection) -> None:
        execution_id = EXECUTION_ID + self.dice.randrange(EXECUTIONS)
        transaction = conn.transaction()
        await transaction.start()
        written = 0
        for _ in range(self.dice.randrange(1, 4)):
            ids = [self._event_id() for _ in range(self.dice.randrange(1, TRANSACTION_EVENTS_MAX // 2))]
            self.dice.shuffle(ids)
            await self._insert(conn, execution_id, ids)
            written += len(ids)
            await asyncio.sleep(self.dice.random() * PAUSE_SECONDS_MAX)
        if self.dice.random() < ROLLBACK_SHARE:
            await transaction.rollback()
            return
        await transaction.commit()
        self.written += written
        self.progress("events", min(self.written, self.plan.events), self.plan.events)

    async def _insert(
        self, conn: asyncpg.Connection, execution_id: int, ids: list[int], event_type: str = "step.exit"
    ) -> None:
        await conn.execute(INSERT, execution_id, CATALOG_ID, ids, event_type)

    def _event_id(self) -> int:
        return EVENT_ID + int(next(self.numbers))

    @asynccontextmanager
    async def _probing(self) -> AsyncIterator[dict[str, float]]:
        """Write an event now and then; when each was about to be written, by its id."""
        begun: dict[str, float] = {}

        async def probe(conn: asyncpg.Connection) -> None:
            while True:
                event_id = self._event_id()
                # Before the commit: what is measured is never less than the truth.
                begun[str(event_id)] = time.time()
                await self._insert(conn, PROBE_EXECUTION_ID, [event_id], PROBE_TYPE)
                await asyncio.sleep(PROBE_SECONDS)

        conn = await asyncpg.connect(self.url)
        task = asyncio.create_task(probe(conn))
        try:
            yield begun
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            conn.terminate()

    async def _lags(self, begun: dict[str, float]) -> list[float]:
        """How long each took until the broker had stored it, by the broker's clock.

        The loop that writes all these events is far too busy to tell when a message arrives.
        """
        client: Any = Client()
        await client.connect(self.nats.url)
        subscription = await client.jetstream().pull_subscribe(f"noetl.events.{PROBE_TYPE}", stream=STREAM)
        lags: list[float] = []
        with suppress(TimeoutError):
            while len(lags) < len(begun):
                for message in await subscription.fetch(100, timeout=5):
                    stored = message.metadata.timestamp.timestamp()
                    lags.append(stored - begun[message.headers["Noetl-Event-Id"]])
                    await message.ack()
        await client.close()
        return lags

    async def _until_published(self) -> None:
        """Wait until the cursor has passed everything."""
        self.progress("waiting for the stream")
        conn = await asyncpg.connect(self.url)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not await conn.fetchval(  # noqa: ASYNC110 (nobody sets an event for it)
                    "SELECT NOT EXISTS (SELECT FROM noetl.event AS e"
                    " WHERE NOT pg_visible_in_snapshot(e.xact_id, k.seen)) FROM noetl.log_cursor AS k"
                    " WHERE k.name = $1",
                    CURSOR,
                ):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self.verdict.require(False, f"the tailer was not done {WAIT_SECONDS:g} s after the last event")
        finally:
            await conn.close()

    async def _compare(self) -> None:
        self.progress("comparing")
        conn = await asyncpg.connect(self.url)
        rows = await conn.fetch("SELECT execution_id, event_id, xact_id FROM noetl.event")
        await conn.close()
        log = {(row["execution_id"], row["event_id"]): row["xact_id"] for row in rows}
        broker = await Broker.connect(self.nats.url, name="check")
        facts = await broker.stream_facts(STREAM)
        stream = [
            key
            async for some in broker.message_ids(STREAM, last_sequence=facts.last_sequence)
            for identifier in some
            if (key := key_of(identifier)) is not None
        ]
        await broker.close()
        times = Counter(stream)
        missing = [key for key in log if key not in times]
        extra = [key for key in times if key not in log]
        twice = [key for key, number in times.items() if number > 1]
        disordered = _disordered(stream, log)
        self.verdict.figures |= {
            "committed": len(log),
            "missing": len(missing),
            "uncommitted": len(extra),
            "twice": len(twice),
            "disordered": disordered,
            "epochs": await self._epoch(),
        }
        for key in missing:
            self.verdict.require(False, f"event {key} is not in the stream")
        for key in extra:
            self.verdict.require(False, f"event {key} is in the stream and was never committed")
        for key in twice:
            self.verdict.require(False, f"event {key} is in the stream twice")
        self.verdict.require(not disordered, f"{disordered} events are out of order within their transaction")

    async def _epoch(self) -> int:
        return int(
            await self._value(
                "SELECT epoch FROM noetl.log_cursor WHERE name = $1 AND seen IS NOT NULL", CURSOR
            )
            or 0
        )

    async def _until_epoch_above(self, epoch: int, began: float) -> float:
        async with asyncio.timeout(WAIT_SECONDS):
            while await self._epoch() <= epoch:  # noqa: ASYNC110 (nobody sets an event for it)
                await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def _execute(self, statement: str, *arguments: Any) -> None:
        await self._value(statement, *arguments)

    async def _value(self, statement: str, *arguments: Any) -> Any:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                try:
                    conn = await asyncpg.connect(self.url, timeout=5)
                except (*DATABASE_AWAY, TimeoutError):
                    await asyncio.sleep(0.1)
                    continue
                try:
                    return await conn.fetchval(statement, *arguments)
                finally:
                    conn.terminate()

    async def _leader(self) -> int:
        """The process whose session holds the lock; waits until there is one."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                name = await self._value(
                    "SELECT a.application_name FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)"
                    " WHERE l.locktype = 'advisory' AND l.granted AND l.classid = $1",
                    LOCK_SPACE,
                )
                if name is not None:
                    return int(name.removeprefix(APPLICATION))
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[Servers]:
        """Two processes that may publish."""
        env = {
            "NOETL_NATS_URL": self.nats.url,
            "NOETL_EVENT_STREAM_ENABLED": "true",
            "POSTGRES_MAX_CONNECTIONS": "5",
        }

        def start() -> AbstractAsyncContextManager[Child]:
            if self.plan.servers:
                return server_process(self.url, token=TOKEN, env=env)
            return child("noetl_grpc.checks._tailer", self.url, self.nats.url)

        servers = Servers(start)
        try:
            await asyncio.gather(*(servers.add() for _ in range(2)))
            yield servers
        finally:
            await servers.close()


def _disordered(stream: list[tuple[int, int]], log: dict[tuple[int, int], int]) -> int:
    """How many events come after one of the same execution and transaction with a higher id."""
    highest: dict[tuple[int, int], int] = defaultdict(int)
    seen: set[tuple[int, int]] = set()
    wrong = 0
    for key in stream:
        if key in seen or key not in log:
            continue
        seen.add(key)
        execution_id, event_id = key
        wrong += event_id < highest[execution_id, log[key]]
        highest[execution_id, log[key]] = max(event_id, highest[execution_id, log[key]])
    return wrong


class Servers:
    """Processes that may publish."""

    def __init__(self, start: Callable[[], AbstractAsyncContextManager[Child]]) -> None:
        self._start = start
        self._running: dict[int, AsyncExitStack] = {}

    async def add(self) -> None:
        """One more."""
        stack = AsyncExitStack()
        started = await stack.enter_async_context(self._start())
        self._running[started.pid] = stack

    async def replace(self, pid: int) -> None:
        """Another one for one that was killed."""
        await self._running.pop(pid).aclose()
        await self.add()

    async def close(self) -> None:
        """End all of them."""
        for stack in self._running.values():
            await stack.aclose()


def _end(conn: asyncpg.Connection | None) -> None:
    if conn is not None:
        conn.terminate()
