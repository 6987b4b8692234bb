"""How much of a bare grpc.aio's rate is left with auth, metrics, errors and the access log."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres

SUMMARY = "A unary call through the whole server, against a bare grpc.aio hello-world."

TOKEN = "bench"
IN_FLIGHT = 32


async def run(options: Options) -> list[Case]:
    """Interleaved rounds: ours, bare, ours, bare …"""
    rounds, calls = (3, 500) if options.quick else (9, 3000)
    async with AsyncExitStack() as stack:
        url = options.database_url
        if not url:
            postgres = await stack.enter_async_context(Postgres(durable=False))
            url = await create_database(postgres, "bench")
        ours = await stack.enter_async_context(_our_server(url))
        bare = await stack.enter_async_context(_bare_server())
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        measured: list[tuple[float, float]] = []
        for number in range(-1, rounds):
            options.progress("calls", max(number, 0), rounds)
            pair = (await _rate(ours, metadata, calls), await _rate(bare, metadata, calls))
            if number >= 0:  # the first round warms both up
                measured.append(pair)
    return [faster("unary", "calls/s", measured, goal=0.80)]


async def _rate(address: str, metadata: tuple[tuple[str, str], ...], calls: int) -> float:
    request = pb.GetServerInfoRequest()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.OperationsServiceStub(channel)
        await stub.GetServerInfo(request, metadata=metadata)

        async def caller() -> None:
            for _ in range(calls // IN_FLIGHT):
                await stub.GetServerInfo(request, metadata=metadata)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
        return calls / (time.perf_counter() - began)


@asynccontextmanager
async def _bare_server() -> AsyncIterator[str]:
    async with _child("noetl_grpc.benches.bare", {}) as line:
        yield f"127.0.0.1:{line}"


@asynccontextmanager
async def _our_server(url: str) -> AsyncIterator[str]:
    env = {
        "NOETL_DATABASE_URL": url,
        "NOETL_INTERNAL_API_TOKEN": TOKEN,
        "NOETL_GRPC_HOST": "127.0.0.1",
        "NOETL_GRPC_PORT": "0",
        "NOETL_METRICS_ADDR": "127.0.0.1:0",
        "NOETL_DRAIN_SECS": "0",
    }
    async with _child("noetl_grpc", env, "serve", "--print-address") as line:
        yield line


@asynccontextmanager
async def _child(module: str, env: dict[str, str], *arguments: str) -> AsyncIterator[str]:
    """A Python module in a process of its own; yields the first line it prints."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("NOETL_", "POSTGRES_"))
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdout=PIPE, stderr=DEVNULL, env=inherited | env
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"{module} did not start")
        yield line.decode().strip()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
