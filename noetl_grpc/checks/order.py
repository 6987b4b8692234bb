"""The same claimers, in order; and one execution with very many rows behind a head that waits."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import asyncpg
import grpc
from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc.checks._claimers import (
    CALL_SECONDS,
    CHANNEL_OPTIONS,
    METADATA,
    Books,
    Plan,
    check_table,
    fill,
    run_claimers,
    servers,
)
from noetl_grpc.checks.frame import Progress, Size, Verdict
from noetl_grpc.checks.outbox import PLANS as UNORDERED
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.storage.queries import queries

SUMMARY = (
    "the same in order: no row overtakes an older one of its execution, and none holds up another execution"
)

PLANS: dict[Size, Plan] = {
    "small": UNORDERED["small"],
    "full": replace(UNORDERED["full"], poison=100),
}
#: Rows behind the head that waits, by size.
BLOCKED: dict[Size, int] = {"small": 3000, "full": 50_000}
OTHERS = 1000
BLOCKED_EXECUTION = 500_000


async def run(*, size: Size, seed: int, progress: Progress) -> Verdict:
    """On a PostgreSQL of its own."""
    async with Postgres(durable=False) as postgres:
        url = await create_database(postgres, "check")
        async with servers(url, PLANS[size]) as addresses:
            return await run_on(url, addresses, size=size, seed=seed, progress=progress)


async def run_on(url: str, addresses: Sequence[str], *, size: Size, seed: int, progress: Progress) -> Verdict:
    """On an empty, migrated database with servers that allow as many attempts as the plan."""
    plan = PLANS[size]
    verdict = Verdict("order", seed)
    progress("filling the outbox")
    rows = await fill(url, plan)
    poison = frozenset(random.Random(seed).sample(sorted(rows), plan.poison))
    books = Books(verdict, plan.attempts_max, poison)
    books.expect_order(rows)
    await run_claimers(url, addresses, books, plan, ordered=True, seed=seed, progress=progress)
    await check_table(url, books, plan)
    progress("one execution waits")
    await _check_blocked(url, addresses[0], verdict, rows=BLOCKED[size])
    return verdict


async def _check_blocked(url: str, address: str, verdict: Verdict, *, rows: int) -> None:
    """The others' rows all leave, and the walk for them reads nothing of the execution that waits."""
    conn = await asyncpg.connect(url)
    try:
        await conn.execute("TRUNCATE noetl.outbox")
        await conn.execute(
            "INSERT INTO noetl.outbox (execution_id, event_id, payload, available_at)"
            " SELECT CASE WHEN n <= $1 THEN $2 ELSE n % 100 * 10000 + 1 END, n, '{}',"
            " now() + CASE WHEN n = 1 THEN interval '1 hour' ELSE interval '0' END"
            " FROM generate_series(1, $1::int + $3::int) AS n",
            rows,
            BLOCKED_EXECUTION,
            OTHERS,
        )
        await conn.execute("ANALYZE noetl.outbox")
        read = await _rows_read(conn)
        verdict.figures["rows_read_by_a_walk"] = read
        verdict.require(read < 500, f"a walk over 101 executions read {read:g} rows")
        began = time.monotonic()
        delivered = await _drain(address, verdict)
        verdict.figures["seconds_for_the_others"] = round(time.monotonic() - began, 3)
        verdict.require(delivered == OTHERS, f"{delivered} of {OTHERS} rows of the other executions left")
    finally:
        await conn.close()


async def _rows_read(conn: asyncpg.Connection) -> float:
    """How many rows of the table the walk for heads looks at."""
    async with conn.transaction():
        text = await conn.fetchval(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {queries['lock_heads']}", 200, -(2**63), 1000
        )
    read: float = sum(
        node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
        for node in _nodes(json.loads(text)[0]["Plan"])
        if node.get("Relation Name") == "outbox"
    )
    return read


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


async def _drain(address: str, verdict: Verdict) -> int:
    delivered = 0
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.OutboxServiceStub(channel)
        while True:
            claim = await stub.ClaimOutboxBatch(
                pb.ClaimOutboxBatchRequest(ordered=True), metadata=METADATA, timeout=CALL_SECONDS
            )
            if not claim.rows:
                return delivered
            verdict.require(
                all(row.execution_id != BLOCKED_EXECUTION for row in claim.rows),
                "a row behind the waiting head was handed out",
            )
            delivered += len(claim.rows)
            await stub.MarkOutboxPublished(
                pb.MarkOutboxPublishedRequest(
                    outbox_ids=[row.outbox_id for row in claim.rows], claim_token=claim.claim_token
                ),
                metadata=METADATA,
                timeout=CALL_SECONDS,
            )
