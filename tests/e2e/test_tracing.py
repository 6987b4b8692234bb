"""Tracing from the outside: off it is not even loaded, on without the extra it says what is missing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from typing import Any

import pytest

from noetl_grpc.settings import Settings
from tests.conftest import TOKEN
from tests.processes import REPOSITORY

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


@pytest.mark.parametrize("command", ["serve"])
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
