"""How much of the time that fetching the events takes is left when they are folded and saved."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import grpc
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.storage.queries import queries

SUMMARY = "Advancing snapshots, cold and with a few new events each, against fetching the same rows."

TOKEN = "bench"
CATALOG_ID = 7_000_001
EXECUTION_ID = 381_000_000_000_000_000
EVENTS_EACH = 100
NEW_EVENTS_EACH = 5


async def run(options: Options) -> list[Case]:
    """Cold: no snapshot. Warm: five new events behind each snapshot, against the cold advance and against the fetch."""
    executions, rounds = (50, 2) if options.quick else (1000, 9)
    async with AsyncExitStack() as stack:
        url = options.database_url
        if not url:
            postgres = await stack.enter_async_context(
                Postgres(durable=False, settings={"shared_buffers": "512MB"})
            )
            url = await create_database(postgres, "bench")
        server = await stack.enter_async_context(server_process(url, token=TOKEN))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.line))
        conn = await asyncpg.connect(url)
        stack.push_async_callback(conn.close)
        ids = [EXECUTION_ID + number for number in range(executions)]
        await _prepare(conn)
        await _write(conn, ids, 1, EVENTS_EACH)
        await conn.execute("VACUUM ANALYZE noetl.event")
        stub = rpc.ProjectionServiceStub(channel)

        async def advance() -> None:
            answer = await stub.AdvanceProjections(
                pb.AdvanceProjectionsRequest(execution_ids=ids),
                metadata=(("authorization", f"Bearer {TOKEN}"),),
                timeout=300,
            )
            if len(answer.advanced) != executions:
                raise RuntimeError(f"{len(answer.failed)} executions could not be advanced")

        async def fetch() -> None:
            async with conn.transaction(isolation="repeatable_read", readonly=True):
                nothing = [0] * executions
                await conn.fetch(queries["events_to_fold"], "default", "default", ids, nothing, 2**31)

        cold: list[tuple[float, float]] = []
        warm: list[tuple[float, float]] = []
        warm_to_fetch: list[tuple[float, float]] = []
        for number in range(-1, rounds):
            options.progress("rounds", max(number, 0), rounds)
            await conn.execute("DELETE FROM noetl.projection_snapshot")
            cold_rate = executions / await _seconds(advance)
            fetch_rate = executions / await _seconds(fetch)
            await _write(conn, ids, EVENTS_EACH + 1, NEW_EVENTS_EACH)
            warm_rate = executions / await _seconds(advance)
            # Every round begins with the same log.
            await conn.execute("DELETE FROM noetl.event WHERE event_id > $1", EVENTS_EACH)
            if number >= 0:  # the first round warms everything up
                cold.append((cold_rate, fetch_rate))
                warm.append((warm_rate, cold_rate))
                warm_to_fetch.append((warm_rate, fetch_rate))
    return [
        faster("cold", "executions/s", cold, goal=0.2),
        faster("5 new events each", "executions/s", warm, goal=5.0),
        # What both goals come to: the first says what cold has to reach, the second how much more this has to.
        faster("5 new events each, to the fetch of all", "executions/s", warm_to_fetch, goal=1.0),
    ]


async def _seconds(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def _prepare(conn: Any) -> None:
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'bench', 1, 'playbook')"
        " ON CONFLICT DO NOTHING",
        CATALOG_ID,
    )


async def _write(conn: Any, ids: list[int], first: int, count: int) -> None:
    """Events as a playbook leaves them: ten for each command it runs, from entering the step to leaving it."""
    await conn.execute(
        """
        INSERT INTO noetl.event
            (execution_id, event_id, catalog_id, event_type, node_name, status, command_id, meta, result)
        SELECT execution_id, event_id, $4,
            (ARRAY['step.enter', 'command.issued', 'command.claimed', 'command.started', 'command.heartbeat',
                'command.heartbeat', 'command.heartbeat', 'call.done', 'command.completed', 'step.exit'])
                [1 + event_id % 10],
            'step_' || event_id / 10, 'COMPLETED', event_id / 10,
            jsonb_build_object('attempt', 1, 'worker', 'pool-' || event_id % 8, 'note', repeat('x', 200)),
            jsonb_build_object('status', 'ok', 'context', jsonb_build_object('rows', event_id, 'text', repeat('y', 99)))
        FROM unnest($1::bigint[]) AS execution_id, generate_series($2::bigint, $2::bigint + $3::bigint - 1) AS event_id
        """,
        ids,
        first,
        count,
        CATALOG_ID,
    )
