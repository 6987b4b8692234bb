"""Many claimers that fail, crash, dawdle and give back, at two servers on one outbox."""

from __future__ import annotations

import random
from collections.abc import Sequence

from noetl_grpc.checks._claimers import Books, Plan, check_table, fill, run_claimers, servers
from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres

SUMMARY = (
    "16 claimers with failures, crashes and releases: every row ends published or dead, none is held twice"
)

PLANS: dict[Size, Plan] = {
    "small": Plan(
        rows=1500, executions=40, claimers=8, limit=50, attempts_max=3, poison=10, seconds_max=15.0
    ),
    "full": Plan(
        rows=100_000, executions=1000, claimers=16, limit=100, attempts_max=6, poison=200, seconds_max=600.0
    ),
}


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """On a PostgreSQL of its own."""
    async with Postgres(durable=False) as postgres:
        url = await create_database(postgres, "check")
        async with servers(url, PLANS[size]) as addresses:
            return await run_on(url, addresses, size=size, seed=seed, progress=progress)


async def run_on(url: str, addresses: Sequence[str], *, size: Size, seed: int, progress: Progress) -> Verdict:
    """On an empty, migrated database with servers that allow as many attempts as the plan."""
    plan = PLANS[size]
    verdict = Verdict("outbox", seed)
    progress("filling the outbox")
    rows = await fill(url, plan)
    poison = frozenset(random.Random(seed).sample(sorted(rows), plan.poison))
    books = Books(verdict, plan.attempts_max, poison)
    await run_claimers(url, addresses, books, plan, ordered=False, seed=seed, progress=progress)
    await check_table(url, books, plan)
    return verdict
