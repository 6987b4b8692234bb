"""Events per second into the log through gRPC, against COPY into the table and against the seed's statement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import grpc
import orjson
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.core.snowflake import first_id_of
from noetl_grpc.dev.child import server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres

SUMMARY = "1000-event batches through ProjectEvents, against COPY and against the seed's SQL called directly."

TOKEN = "bench"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
CATALOG_ID = 4_000_000_001
BATCH_ROWS = 1000
EXECUTIONS_PER_BATCH = 10
MEMORY_CLIENTS = 8
MEMORY_ROWS = 10_000
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

#: What the seed's projector does: one JSON array in, one row per element out.
SEED_SQL = """
INSERT INTO noetl.event (
    event_id, execution_id, catalog_id, parent_event_id, event_type, node_id, node_name, node_type, status, duration,
    context, result, meta, error, stack_trace, tenant_id, organization_id, created_at
)
SELECT (e->>'event_id')::bigint,
    COALESCE(NULLIF(e->>'execution_id', '')::bigint, 0),
    COALESCE(NULLIF(e->>'catalog_id', '')::bigint, 0),
    NULLIF(e->>'parent_event_id', '')::bigint,
    e->>'event_type', e->>'node_id', e->>'node_name', e->>'node_type', e->>'status',
    NULLIF(e->>'duration', '')::double precision,
    NULLIF(e->'context', 'null'::jsonb), NULLIF(e->'result', 'null'::jsonb), NULLIF(e->'meta', 'null'::jsonb),
    e->>'error', e->>'stack_trace',
    COALESCE(NULLIF(e->>'tenant_id', ''), 'default'),
    COALESCE(NULLIF(e->>'organization_id', ''), 'default'),
    COALESCE(NULLIF(e->>'timestamp', '')::timestamp, NULLIF(e->>'created_at', '')::timestamp, now())
FROM jsonb_array_elements($1::jsonb) AS e
ON CONFLICT DO NOTHING
"""

Row = dict[str, Any]
#: Makes a batch ready to be sent; what it returns sends it.
Way = Callable[[list[Row]], Callable[[], Awaitable[object]]]
_serial = count(1)


async def run(options: Options) -> list[Case]:
    """Interleaved rounds of the three ways, one batch in flight each; then the memory of a crowd of large batches."""
    rounds, batches = (5, 3) if options.quick else (15, 10)
    async with AsyncExitStack() as stack:
        url = options.database_url
        if not url:
            settings = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
            postgres = await stack.enter_async_context(Postgres(settings=settings))
            url = await create_database(postgres, "bench")
        server = await stack.enter_async_context(server_process(url, token=TOKEN))
        conn = await asyncpg.connect(url, server_settings={"timezone": "UTC"})
        stack.push_async_callback(conn.close)
        await _add_catalog_entry(conn)
        channel = await stack.enter_async_context(_channel(server.line))
        stub = rpc.ProjectionServiceStub(channel)

        ways = (_ours(stub), _copier(conn), _seed(conn))
        measured: list[list[float]] = []
        for number in range(-1, rounds):
            options.progress("batches", max(number, 0), rounds)
            rates = [await _rate(way, batches) for way in ways]
            if number >= 0:  # the first round warms everything up
                measured.append(rates)
        cases = [
            faster("copy", "events/s", [(rates[0], rates[1]) for rates in measured], goal=0.20),
            faster("seed", "events/s", [(rates[0], rates[2]) for rates in measured], goal=0.50),
        ]
        cases.append(await _memory(options, server.line, server.pid))
    return cases


async def _add_catalog_entry(conn: asyncpg.Connection) -> None:
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'bench/project', 1, 'playbook')"
        " ON CONFLICT DO NOTHING",
        CATALOG_ID,
    )


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        address,
        options=(
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
        ),
    )


async def _rate(way: Way, batches: int) -> float:
    """Rows are put into each way's own form before the clock starts; serialising them counts."""
    prepared = [way(make_rows(BATCH_ROWS)) for _ in range(batches)]
    seconds = []
    for send in prepared:
        began = time.perf_counter()
        await send()
        seconds.append(time.perf_counter() - began)
    return BATCH_ROWS / median(seconds)


def make_rows(amount: int) -> list[Row]:
    """Events of a few executions with the columns that the seed sets and about half a kilobyte of JSON."""
    now = datetime.now(UTC).replace(tzinfo=None)
    base = first_id_of(datetime.now(UTC))
    rows = []
    for index in range(amount):
        serial = next(_serial)
        rows.append(
            {
                "event_id": base + serial,
                "execution_id": base + serial // (amount // EXECUTIONS_PER_BATCH),
                "catalog_id": CATALOG_ID,
                "parent_event_id": base,
                "event_type": "command.completed",
                "node_id": f"node-{index % 17}",
                "node_name": f"step_{index % 17}",
                "node_type": "http",
                "status": "COMPLETED",
                "duration": index / 7,
                "context": _text(
                    {"step": index, "workload": {"url": "https://example.org/items", "page": index}}
                ),
                "result": _text({"status": "ok", "context": {"rows": index, "items": ["a", "b", "c"] * 8}}),
                "meta": _text({"attempt": 1, "worker_id": "worker-7", "actionable": True, "trace": "0" * 32}),
                "error": None,
                "stack_trace": None,
                "tenant_id": "default",
                "organization_id": "default",
                "created_at": now,
            }
        )
    return rows


def _text(value: object) -> str:
    return orjson.dumps(value).decode()


def _request(rows: list[Row]) -> pb.ProjectEventsRequest:
    events = []
    for row in rows:
        timestamp = Timestamp()
        timestamp.FromDatetime(row["created_at"])
        fields = {name: value for name, value in row.items() if value is not None and name != "created_at"}
        for name in ("context", "result", "meta"):
            fields[f"{name}_json"] = fields.pop(name)
        events.append(event_pb2.EventEnvelope(timestamp=timestamp, **fields))
    return pb.ProjectEventsRequest(events=events)


def _ours(stub: rpc.ProjectionServiceStub) -> Way:
    def prepare(rows: list[Row]) -> Callable[[], Awaitable[object]]:
        request = _request(rows)

        async def send() -> None:
            answer = await stub.ProjectEvents(request, metadata=METADATA, timeout=60)
            if answer.projected != len(rows):
                raise RuntimeError(f"{answer.projected} of {len(rows)} events were stored")

        return send

    return prepare


def _copier(conn: asyncpg.Connection) -> Way:
    def prepare(rows: list[Row]) -> Callable[[], Awaitable[object]]:
        records = [tuple(row.values()) for row in rows]
        return lambda: conn.copy_records_to_table(
            "event", schema_name="noetl", columns=list(rows[0]), records=records
        )

    return prepare


def _seed(conn: asyncpg.Connection) -> Way:
    def prepare(rows: list[Row]) -> Callable[[], Awaitable[object]]:
        envelopes = [
            {
                **{name: value for name, value in row.items() if value is not None and name != "created_at"},
                "timestamp": row["created_at"].isoformat(),
                **{name: orjson.Fragment(row[name]) for name in ("context", "result", "meta")},
            }
            for row in rows
        ]
        return lambda: conn.execute(SEED_SQL, orjson.dumps(envelopes).decode())

    return prepare


async def _memory(options: Options, address: str, pid: int) -> Case:
    """The server's peak memory while a crowd sends the largest batches, beside what it had before."""
    idle = _resident_mib(pid)
    peak = idle
    sending = 1 if options.quick else 3

    async def client() -> None:
        async with _channel(address) as channel:
            stub = rpc.ProjectionServiceStub(channel)
            for _ in range(sending):
                request = _request(make_rows(MEMORY_ROWS))
                await stub.ProjectEvents(request, metadata=METADATA, timeout=300)

    options.progress(f"{MEMORY_CLIENTS} clients with {MEMORY_ROWS} events each")
    clients = asyncio.gather(*(client() for _ in range(MEMORY_CLIENTS)))
    while not clients.done():
        peak = max(peak, _resident_mib(pid))
        await asyncio.sleep(0.02)
    await clients
    return Case(case="memory", unit="MiB", value=peak, control=idle, ratio=idle / peak)


def _resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the server has gone")
