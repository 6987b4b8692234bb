"""A large log is migrated under writers, behind strangers' open transactions, and is killed on the way."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass

import asyncpg

from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.storage.ddl import FILES
from noetl_grpc.storage.migrate import migrate, verify

SUMMARY = "migrating a log of 1 000 000 events stops no writer for two seconds and survives being killed"

WAIT_SECONDS_MAX = 2.0
#: Ids of four quarters, in both layouts: four partitions share the log.
FIRST_IDS = (310 * 10**15, 340 * 10**15, 370 * 10**15, 700 * 10**15)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    events: int
    writers: int
    stranger_seconds: float
    kills: int
    kill_within_seconds: float
    seconds_max: float


PLANS: dict[Size, Plan] = {
    "small": Plan(
        events=20_000, writers=3, stranger_seconds=2.0, kills=1, kill_within_seconds=3.0, seconds_max=18.0
    ),
    "full": Plan(
        events=1_000_000,
        writers=8,
        stranger_seconds=20.0,
        kills=5,
        kill_within_seconds=12.0,
        seconds_max=900.0,
    ),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """Migrate NoETL's tables, full of events, to ours."""
    verdict = Verdict("migrate", seed)
    plan = PLANS[size]
    async with asyncio.timeout(plan.seconds_max), Postgres(durable=size == "full") as postgres:
        progress("writing the log")
        watcher = await asyncpg.connect(postgres.url())
        await fill(watcher, plan.events)
        files = await files_of_the_log(watcher)

        writers = [Writer(await asyncpg.connect(postgres.url()), number) for number in range(plan.writers)]
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for writer in writers:
                group.create_task(writer.run())
            strangers = [
                group.create_task(stay_open(postgres.url(), isolation, plan.stranger_seconds))
                for isolation in ("read_committed", "repeatable_read")
            ]
            kills = await migrate_and_be_killed(postgres.url(), watcher, random.Random(seed), plan, progress)
            seconds = time.monotonic() - started
            await asyncio.gather(*strangers)
            for writer in writers:
                writer.is_stopped = True

        drift = await verify(watcher)
        verdict.require(not drift, f"after the migration: {'; '.join(map(str, drift))}")
        unfinished = await watcher.fetchval("SELECT count(*) FROM pg_index WHERE NOT indisvalid")
        verdict.require(unfinished == 0, f"{unfinished} indexes are not valid")
        verdict.require(await files_of_the_log(watcher) == files, "the log was rewritten")
        written = sum(writer.written for writer in writers)
        stored, stamped = await watcher.fetchrow("SELECT count(*), count(xact_id) FROM noetl.event")
        verdict.require(
            stored == plan.events + written + 1, f"{plan.events + written + 1} events, {stored} stored"
        )
        verdict.require(stamped == stored, f"{stored - stamped} events without xact_id")
        longest_seconds = max(writer.longest_seconds for writer in writers)
        verdict.require(longest_seconds < WAIT_SECONDS_MAX, f"a write waited {longest_seconds:.2f} s")
        verdict.figures = {
            "events": plan.events,
            "written_meanwhile": written,
            "longest_wait_seconds": round(longest_seconds, 3),
            "migration_seconds": round(seconds, 1),
            "kills": kills,
        }
        for conn in (watcher, *(writer.conn for writer in writers)):
            await conn.close()
    return verdict


class Writer:
    """Appends events, one a transaction, and mirrors them to the outbox; knows its longest wait."""

    def __init__(self, conn: asyncpg.Connection, number: int) -> None:
        self.conn = conn
        self.execution_id = FIRST_IDS[number % len(FIRST_IDS)]
        self.event_ids = itertools.count(10**9 * (number + 1))
        self.longest_seconds = 0.0
        self.written = 0
        self.is_stopped = False

    async def run(self) -> None:
        """Write until stopped."""
        while not self.is_stopped:
            started = time.monotonic()
            async with self.conn.transaction():
                await append(self.conn, self.execution_id, event_id := next(self.event_ids))
                await self.conn.execute(
                    "INSERT INTO noetl.outbox (execution_id, event_id, payload) VALUES ($1, $2, '{}')",
                    self.execution_id,
                    event_id,
                )
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)
            self.written += 1


async def append(conn: asyncpg.Connection, execution_id: int, event_id: int) -> None:
    """One event, as NoETL's servers write it."""
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, status)
        VALUES ($1, 1, $2, 'step.exit', 'COMPLETED')
        ON CONFLICT (execution_id, event_id) DO NOTHING
        """,
        execution_id,
        event_id,
    )


async def fill(conn: asyncpg.Connection, events: int) -> None:
    """NoETL's tables as they are before us, with a log in four partitions."""
    await conn.execute(FILES[0].text)
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, kind) VALUES (1, 'check/one', 'playbook')"
    )
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, status, meta)
        SELECT ($1::bigint[])[1 + n % 4] + n / 100, 1, n, 'step.exit', 'COMPLETED', '{"attempt": 1}'
        FROM generate_series(1, $2::bigint) AS n
        """,
        FIRST_IDS,
        events,
        timeout=600,
    )


async def files_of_the_log(conn: asyncpg.Connection) -> list[int]:
    """Which files hold the events; a rewritten table gets a new one."""
    rows = await conn.fetch(
        """
        SELECT relfilenode FROM pg_class
        WHERE oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'noetl.event'::regclass)
        ORDER BY oid
        """
    )
    return [row["relfilenode"] for row in rows]


async def stay_open(url: str, isolation: str, seconds: float) -> None:
    """A transaction that has written to the log, or reads all the while, and does not end."""
    conn = await asyncpg.connect(url)
    try:
        async with conn.transaction(isolation=isolation):
            if isolation == "read_committed":
                await append(conn, FIRST_IDS[0], 10**15)
            else:
                await conn.fetchval("SELECT count(*) FROM noetl.catalog")
            await asyncio.sleep(seconds)
    finally:
        await conn.close()


async def migrate_and_be_killed(
    url: str, watcher: asyncpg.Connection, rng: random.Random, plan: Plan, progress: Progress
) -> int:
    """Migrate, lose the session at odd moments, and migrate again until it is through; the kills that hit."""
    hits = 0
    while True:
        conn = await asyncpg.connect(url)
        running = asyncio.create_task(migrate(conn, progress=progress))
        try:
            if hits < plan.kills:
                await asyncio.wait([running], timeout=rng.uniform(0.05, plan.kill_within_seconds))
                await watcher.execute("SELECT pg_terminate_backend($1)", conn.get_server_pid())
            await running
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            progress(f"killed: {type(error).__name__}")
            hits += 1
        else:
            return hits
        finally:
            conn.terminate()
