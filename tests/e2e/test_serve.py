"""`noetl-grpc serve` as an orchestrator meets it: settings, signals, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import asyncpg
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from noetlpb.v1 import operations_pb2, operations_pb2_grpc, outbox_pb2, outbox_pb2_grpc

from noetl_grpc.dev.postgres import Postgres
from tests.cli import Cli
from tests.conftest import AUTHORIZATION, TOKEN

Serve = Callable[..., Awaitable[tuple[Process, str]]]

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def serve(database_url: str) -> AsyncIterator[Serve]:
    """Starts `noetl-grpc serve` in a process of its own; returns it and its address."""
    started: list[Process] = []

    async def start(*, wait: bool = True, **changes: str) -> tuple[Process, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("NOETL_")} | {
            "NOETL_DATABASE_URL": database_url,
            "NOETL_INTERNAL_API_TOKEN": TOKEN,
            "NOETL_GRPC_HOST": "127.0.0.1",
            "NOETL_GRPC_PORT": "0",
            "NOETL_METRICS_ADDR": "127.0.0.1:0",
            "NOETL_DRAIN_SECS": "0",
            **changes,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noetl_grpc", "serve", "--print-address"),
            stdout=PIPE,
            stderr=PIPE,
            env=env,
        )
        started.append(process)
        if not wait:
            return process, ""
        assert process.stdout is not None
        async with asyncio.timeout(15):
            return process, (await process.stdout.readline()).decode().strip()

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NOETL_GRPC_PORT", "99999"),
        ("NOETL_DATABASE_URL", "postgresql//db"),
        ("NOETL_SHARDS", "postgresql://a/x,what"),
        ("NOETL_API_TOKENS_FILE", "/nowhere"),
    ],
)
async def test_a_bad_setting_stops_the_process_with_one_line(serve: Serve, name: str, value: str) -> None:
    process, _ = await serve(**{name: value})
    _, said = await process.communicate()

    assert process.returncode == 2
    assert len(said.decode().splitlines()) == 1
    assert name in said.decode()


async def _info(channel: grpc.aio.Channel) -> operations_pb2.GetServerInfoResponse:
    return await operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
        operations_pb2.GetServerInfoRequest(), metadata=AUTHORIZATION, timeout=5
    )


async def test_sigterm_with_a_watch_open_ends_at_once(serve: Serve) -> None:
    process, address = await serve(NOETL_GRACE_SECS="60")
    async with grpc.aio.insecure_channel(address) as channel:
        await _info(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()

        process.send_signal(signal.SIGTERM)

        async with asyncio.timeout(10):  # not the grace of a minute
            assert await watch.code() == grpc.StatusCode.UNAVAILABLE
            assert await process.wait() == 0


async def test_while_draining_calls_are_served_and_health_says_no(serve: Serve) -> None:
    process, address = await serve(NOETL_DRAIN_SECS="600")
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="noetlpb.v1.OutboxService")
        )
        await watch.read()

        process.send_signal(signal.SIGTERM)

        async with asyncio.timeout(10):
            assert (await watch.read()).status == NOT_SERVING
        assert (await _info(channel)).version

        process.send_signal(signal.SIGTERM)  # a second one ends it at once
        async with asyncio.timeout(10):
            await process.wait()


async def test_a_server_that_waits_for_its_database_says_so_and_can_be_stopped(serve: Serve) -> None:
    process, _ = await serve(wait=False, NOETL_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert process.stderr is not None
    async with asyncio.timeout(15):
        assert b"out of reach" in await process.stderr.readline()

        process.send_signal(signal.SIGTERM)

        assert await process.wait() == 0


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command line, without a server."""
    return Cli(tmp_path)


@pytest.mark.timeout(60)
async def test_migrate_twice_changes_nothing_and_verify_agrees(cli: Cli, postgres: Postgres) -> None:
    conn = await asyncpg.connect(postgres.url())
    await conn.execute("CREATE DATABASE migrate_cli")
    url = postgres.url("migrate_cli")

    unverified = await cli("migrate", "--verify", "--json", code=1, NOETL_DATABASE_URL=url)
    first = await cli("migrate", "--json", NOETL_DATABASE_URL=url)
    second = await cli("migrate", NOETL_DATABASE_URL=url)
    verified = await cli("migrate", "--verify", NOETL_DATABASE_URL=url)
    await conn.execute("DROP DATABASE migrate_cli")
    await conn.close()

    assert unverified.document["ok"] is False
    (found,) = unverified.document["databases"]
    assert "noetl.log_cursor" in " ".join(one["what"] for one in found["differences"])
    (made,) = first.document["databases"]
    assert (first.document["ok"], made["missing"], made["blocked"]) == (True, [], [])
    assert made["applied"]
    assert second.out == "database 0: 0 changes applied\n"
    assert verified.out == "database 0: as expected\n"


async def test_migrate_prints_the_same_sql_every_time(cli: Cli) -> None:
    first, second = await cli("migrate", "--sql"), await cli("migrate", "--sql")

    assert first == second
    assert "CREATE TABLE IF NOT EXISTS noetl.log_cursor" in first.out


async def test_migrate_of_a_database_that_is_away_says_so(cli: Cli) -> None:
    answer = await cli("migrate", code=3, NOETL_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")

    assert answer.err.count("\n") == 1


async def test_sigterm_lets_a_running_call_finish_and_refuses_new_ones(
    serve: Serve, database_url: str
) -> None:
    process, address = await serve(NOETL_GRACE_SECS="60")
    conn = await asyncpg.connect(database_url)
    async with grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        lock = conn.transaction()
        await lock.start()
        await conn.execute("LOCK TABLE noetl.outbox IN ACCESS EXCLUSIVE MODE")
        running = asyncio.ensure_future(
            outbox_pb2_grpc.OutboxServiceStub(channel).CountOutboxPending(
                outbox_pb2.CountOutboxPendingRequest(), metadata=AUTHORIZATION, timeout=30
            )
        )
        async with asyncio.timeout(15):
            while not await conn.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                pass

            process.send_signal(signal.SIGTERM)

            assert await watch.code() == grpc.StatusCode.UNAVAILABLE
            with suppress(grpc.aio.AioRpcError):
                while True:  # streams are ended a moment before calls are refused
                    await _info(channel)
            assert not running.done()
            await lock.commit()
            assert (await running).pending == 0
            assert await process.wait() == 0
    await conn.close()
