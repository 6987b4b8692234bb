"""Tracing from outside: one trace through every process; off it is not even loaded, and a lacking extra is named."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from noetl_grpc import EventEnvelope, NoetlClient, OutboxMessage
from noetl_grpc.dev.nats import Nats
from noetl_grpc.settings import Settings
from tests import leaks, streams
from tests.cli import Cli
from tests.collector import Collector, Kind, Received, collecting
from tests.conftest import TOKEN
from tests.factories import CATALOG_ID, EVENT_ID, EXECUTION_ID, add_catalog_entry
from tests.processes import REPOSITORY
from tests.traces import TRACE

#: Serves, is called by the typed client, and tells what of OpenTelemetry was loaded for it.
SERVED = """
import asyncio, json, sys
from noetl_grpc import NoetlClient
from noetl_grpc.server import serving
from noetl_grpc.settings import Settings
import noetl_grpc.workers.projector, noetl_grpc.workers.publisher

async def main():
    async with serving(Settings.from_env()) as server:
        async with NoetlClient(server.address, token=sys.argv[1]) as client:
            await client.outbox.stats()
    print(json.dumps([name for name in sys.modules if name.startswith("opentelemetry")]))

asyncio.run(main())
"""

#: The command line where OpenTelemetry can't be imported.
WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from noetl_grpc.cli import main
sys.argv[0] = "noetl-grpc"
main()
"""


async def _python(script: str, *arguments: str, **env: str) -> tuple[int | None, str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("NOETL_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, *arguments),
        stdout=PIPE,
        stderr=PIPE,
        cwd=REPOSITORY,
        env={**clean, **env},
    )
    async with asyncio.timeout(45):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def _served(settings: Settings, **env: str) -> Any:
    code, out, err = await _python(
        SERVED,
        TOKEN,
        NOETL_DATABASE_URL=settings.database_url,
        NOETL_INTERNAL_API_TOKEN=TOKEN,
        NOETL_GRPC_HOST="127.0.0.1",
        NOETL_GRPC_PORT="0",
        NOETL_METRICS_ADDR="",
        NOETL_DRAIN_SECS="0",
        **env,
    )
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    "env", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}]
)
async def test_where_tracing_is_off_nothing_of_it_is_loaded(settings: Settings, env: dict[str, str]) -> None:
    assert await _served(settings, **env) == []


@pytest.mark.parametrize("command", ["serve", "publish-outbox", "run-projector"])
async def test_tracing_without_its_extra_stops_the_process_with_one_line(command: str) -> None:
    code, _, said = await _python(
        WITHOUT,
        command,
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
        NOETL_DATABASE_URL="postgresql://127.0.0.1:1/none",
        NOETL_NATS_URL="nats://127.0.0.1:1",
        NOETL_INTERNAL_API_TOKEN=TOKEN,
    )

    assert code == 2
    assert len(said.splitlines()) == 1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in said
    assert "pip install 'noetl-grpc[otel]'" in said


@asynccontextmanager
async def _processes(cli: Cli) -> AsyncIterator[tuple[str, list[Process]]]:
    """The server and both workers, each a process of its own, and the server's address."""
    server = await cli.start("serve", "--print-address")
    processes = [server]
    try:
        assert server.stdout is not None
        async with asyncio.timeout(30):
            address = (await server.stdout.readline()).decode().strip()
        for worker in ("publish-outbox", "run-projector"):
            processes.append(await cli.start(worker, NOETL_GRPC_ADDRESS=address))
        yield address, processes
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            _, said = await process.communicate()
            assert b"Traceback" not in said, said.decode()


async def _in_trace(collector: Collector, name: str) -> Received:
    return await collector.wait(name, where=lambda span: span.trace == TRACE, seconds=40)


async def test_one_trace_goes_through_every_process(
    settings: Settings, conn: asyncpg.Connection, nats: Nats, tmp_path: Path
) -> None:
    await add_catalog_entry(conn)
    inside = NonRecordingSpan(SpanContext(int(TRACE, 16), 1, is_remote=False, trace_flags=TraceFlags(1)))
    event = EventEnvelope(
        execution_id=EXECUTION_ID,
        event_id=EVENT_ID,
        catalog_id=CATALOG_ID,
        event_type="command.completed",
        meta_json=json.dumps({"secret": leaks.PAYLOAD}),
    )
    message = OutboxMessage(event_id=1, payload_json=json.dumps(leaks.PAYLOAD))
    async with collecting() as collector:
        cli = Cli(
            tmp_path,
            {
                "NOETL_DATABASE_URL": settings.database_url,
                "NOETL_INTERNAL_API_TOKEN": TOKEN,
                "NOETL_GRPC_HOST": "127.0.0.1",
                "NOETL_GRPC_PORT": "0",
                "NOETL_METRICS_ADDR": "",
                "NOETL_DRAIN_SECS": "0",
                "NOETL_NATS_URL": nats.url,
                "NOETL_EVENT_STREAM_ENABLED": "true",
                "NOETL_EVENT_STREAM_BACKFILL": "true",
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
                "OTEL_BSP_SCHEDULE_DELAY": "10",
            },
        )
        async with (
            _processes(cli) as (address, processes),
            NoetlClient(address, token=TOKEN) as client,
        ):
            with trace.use_span(inside):
                await client.outbox.enqueue([message])
                await client.projection.project_events([event])
            enqueue = await _in_trace(collector, "EnqueueOutbox")
            published = await _in_trace(collector, "publish noetl_outbox")
            project = await _in_trace(collector, "ProjectEvents")
            tailed = await _in_trace(collector, "publish noetl_events")
            processed = await _in_trace(collector, "process noetl_events")
            advance = await _in_trace(collector, "AdvanceProjections")
            for process in processes:
                process.terminate()
            async with asyncio.timeout(30):
                ended = [await process.wait() for process in processes]
        (row,) = await streams.messages(nats.url, "noetl_outbox")
        (told,) = await streams.messages(nats.url)

    assert ended == [0, 0, 0]
    assert enqueue.parent == project.parent == f"{1:016x}"
    assert (published.parent, published.kind) == (enqueue.id, Kind.SPAN_KIND_PRODUCER)
    assert (tailed.parent, tailed.kind) == (project.id, Kind.SPAN_KIND_PRODUCER)
    assert (processed.parent, processed.kind) == (project.id, Kind.SPAN_KIND_CONSUMER)
    assert advance.parent == processed.id
    assert [span.service for span in (enqueue, published, tailed, processed)] == [
        "noetl-grpc",
        "noetl-grpc-publish-outbox",
        "noetl-grpc",
        "noetl-grpc-run-projector",
    ]
    assert row.headers["traceparent"] == f"00-{TRACE}-{published.id}-01"
    assert told.headers["traceparent"] == f"00-{TRACE}-{project.id}-01"
