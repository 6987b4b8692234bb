"""Our own programs in processes of their own, for benches and checks that must not share a loop with them."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

#: Also on a machine that a scenario keeps busy.
START_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Child:
    """A running process, and the first line that it printed."""

    pid: int
    line: str


@asynccontextmanager
async def child(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Child]:
    """A Python module that prints a line when it is ready; it is ended with the block.

    It inherits no setting of ours but those given.
    """
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("NOETL_", "POSTGRES_"))
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdout=PIPE,
        stderr=DEVNULL,
        env={**inherited, **(env or {})},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} did not start")
        yield Child(process.pid, line.decode().strip())
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def server_process(
    url: str, *, token: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """A server on a database that is migrated already; its line is its address."""
    settings = {
        "NOETL_DATABASE_URL": url,
        "NOETL_INTERNAL_API_TOKEN": token,
        "NOETL_GRPC_HOST": "127.0.0.1",
        "NOETL_GRPC_PORT": "0",
        "NOETL_METRICS_ADDR": "127.0.0.1:0",
        "NOETL_DRAIN_SECS": "0",
    }
    async with child("noetl_grpc", "serve", "--print-address", env={**settings, **(env or {})}) as running:
        yield running
