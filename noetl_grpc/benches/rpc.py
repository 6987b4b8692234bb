"""How much of a bare grpc.aio's rate is left with auth, metrics, errors and the access log; and what KEDA pays."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from statistics import median

import asyncpg
import grpc
from externalscaler import externalscaler_pb2, externalscaler_pb2_grpc
from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.benches.frame import Case, Options, faster
from noetl_grpc.dev.child import child, server_process
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.services.scaler import FRESH_SECONDS

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
        ours = (await stack.enter_async_context(server_process(url, token=TOKEN))).line
        bare = f"127.0.0.1:{(await stack.enter_async_context(child('noetl_grpc.benches.bare'))).line}"
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        measured: list[tuple[float, float]] = []
        for number in range(-1, rounds):
            options.progress("calls", max(number, 0), rounds)
            pair = (await _rate(ours, metadata, calls), await _rate(bare, metadata, calls))
            if number >= 0:  # the first round warms both up
                measured.append(pair)
        cases = [faster("unary", "calls/s", measured, goal=0.80)]
        if not options.database_url:  # a database of somebody else's is not filled with rows
            cases.append(await _keda(options, url, ours, bare, metadata))
    return cases


async def _keda(
    options: Options, url: str, ours: str, bare: str, metadata: tuple[tuple[str, str], ...]
) -> Case:
    """What KEDA's GetMetrics takes in front of a large backlog, over a bare call; each answer is a fresh one."""
    rows, calls = (50_000, 5) if options.quick else (1_000_000, 20)
    options.progress(f"{rows} pending rows")
    conn = await asyncpg.connect(url)
    try:
        await conn.execute(
            "INSERT INTO noetl.outbox (event_id, payload) SELECT n, jsonb_build_object('text', repeat('x', 200))"
            " FROM generate_series(1, $1::int) AS n",
            rows,
            timeout=300,
        )
        await conn.execute("ANALYZE noetl.outbox", timeout=60)
    finally:
        await conn.close()
    seconds: list[tuple[float, float]] = []
    async with grpc.aio.insecure_channel(ours) as channel, grpc.aio.insecure_channel(bare) as bare_channel:
        scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        hello = rpc.OperationsServiceStub(bare_channel)
        for number in range(-1, calls):
            options.progress("keda", max(number, 0), calls)
            await asyncio.sleep(FRESH_SECONDS * 1.1)
            began = time.perf_counter()
            answer = await scaler.GetMetrics(externalscaler_pb2.GetMetricsRequest(), metadata=metadata)
            between = time.perf_counter()
            await hello.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)
            if not answer.metricValues[0].metricValue:
                raise RuntimeError("the backlog was not seen")
            if number >= 0:  # the first pair warms both up
                seconds.append((between - began, time.perf_counter() - between))
    return Case(
        case="keda",
        unit="ms",
        value=median(value for value, _ in seconds) * 1000,
        control=median(control for _, control in seconds) * 1000,
        ratio=median(control / value for value, control in seconds),
    )


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
