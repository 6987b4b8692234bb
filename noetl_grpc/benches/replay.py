"""How much of the rate of merely fetching the rows is left when they are decoded, folded, hashed and sent."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import grpc
from noetlpb.v1 import projection_pb2, projection_pb2_grpc
from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import replay_pb2_grpc as rpc

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.dev.sample_log import write_sample_log

SUMMARY = (
    "Replaying a long execution, against fetching the same rows; from a snapshot, against doing without."
)

TOKEN = "bench"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
EXECUTION_ID = 382_000_000_000_000_000
#: Of a state that stays small however long the log is, as in a service that works for months.
STEADY_ID = EXECUTION_ID + 1
NEW_EVENTS = 100
#: One alone takes so little that what the machine does beside it would be most of what is measured.
SEEDED_REPLAYS = 10
CALL_SECONDS = 300
#: The columns that a fold reads, as they are stored.
FETCH = """
SELECT event_id, event_type, status, node_name, meta, payload_ref, result, stage_id, frame_id, command_id,
    worker_id, aggregate_type, aggregate_id, schema_version
FROM noetl.event
WHERE execution_id = $1 AND tenant_id = 'default' AND organization_id = 'default'
ORDER BY event_id
"""


async def run(options: Options) -> list[Case]:
    """Interleaved rounds through the whole server; the control is one fetch on a connection of its own."""
    events, rounds = (5_000, 3) if options.quick else (100_000, 7)
    async with AsyncExitStack() as stack:
        url = options.database_url
        if not url:
            postgres = await stack.enter_async_context(
                Postgres(durable=False, settings={"shared_buffers": "512MB"})
            )
            url = await create_database(postgres, "bench")
        server = await stack.enter_async_context(server_process(url, token=TOKEN))
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(
                server.line, options=[("grpc.max_receive_message_length", 64 * 1024 * 1024)]
            )
        )
        conn = await asyncpg.connect(url)
        stack.push_async_callback(conn.close)
        options.progress("writing the logs")
        await write_sample_log(conn, EXECUTION_ID, last=events)
        steady = events - NEW_EVENTS
        await write_sample_log(conn, STEADY_ID, last=steady, events_per_stage=events // 5)
        await conn.execute("VACUUM ANALYZE noetl.event", timeout=120)
        await projection_pb2_grpc.ProjectionServiceStub(channel).AdvanceProjections(
            projection_pb2.AdvanceProjectionsRequest(execution_ids=[STEADY_ID]),
            metadata=METADATA,
            timeout=CALL_SECONDS,
        )
        await write_sample_log(conn, STEADY_ID, first=steady + 1, last=events, events_per_stage=events // 5)
        stub = rpc.ReplayServiceStub(channel)

        async def replay(execution_id: int, *, seeded: bool = False) -> None:
            answer = await stub.ReplayState(
                pb.ReplayStateRequest(execution_id=execution_id, use_snapshot=seeded),
                metadata=METADATA,
                timeout=CALL_SECONDS,
            )
            if answer.state.event_count != events or answer.state.HasField("seed") != seeded:
                raise RuntimeError(f"{answer.state.event_count} of {events} events were folded")

        async def in_turn(replays: int) -> None:
            for _ in range(replays):
                await replay(STEADY_ID, seeded=True)

        async def fetch() -> None:
            await conn.fetch(FETCH, EXECUTION_ID)

        cold: list[tuple[float, float]] = []
        warm: list[tuple[float, float]] = []
        for number in range(-1, rounds):
            options.progress("rounds", max(number, 0), rounds)
            pair = events / await _seconds(replay(EXECUTION_ID)), events / await _seconds(fetch())
            whole = await _seconds(replay(STEADY_ID))
            seeded = await _seconds(in_turn(SEEDED_REPLAYS)) / SEEDED_REPLAYS
            if number >= 0:  # the first round warms everything up
                cold.append(pair)
                warm.append((1 / seeded, 1 / whole))
    return [
        faster("cold", "events/s", cold, goal=0.22),
        faster(
            f"the last {NEW_EVENTS} events from a snapshot",
            "replays/s",
            warm,
            goal=None if options.quick else 50.0,
        ),
    ]


async def _seconds(work: Awaitable[Any]) -> float:
    # What an earlier measurement has left behind is not charged to this one.
    gc.collect()
    began = time.perf_counter()
    await work
    return time.perf_counter() - began
