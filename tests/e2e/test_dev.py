"""`noetl-grpc dev` as a newcomer meets it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import operations_pb2, operations_pb2_grpc

from tests.processes import is_running, until

Dev = tuple[Process, dict[str, Any]]
StartDev = Callable[..., Awaitable[Dev]]


@pytest.fixture
async def start_dev(tmp_path: Path) -> AsyncIterator[StartDev]:
    """Starts `noetl-grpc dev` in a process of its own; waits until its ready file is there."""
    started: list[Process] = []
    tmp_path.chmod(0o755)  # noqa: ASYNC240  # PostgreSQL runs as another user

    async def start(data_dir: Path = tmp_path / "data", *more: str) -> Dev:
        ready = tmp_path / f"ready-{len(started)}.json"
        env = {key: value for key, value in os.environ.items() if not key.startswith("NOETL_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noetl_grpc", "dev", "--port", "0", "--data-dir", str(data_dir)),
            *("--ready-file", str(ready), *more),
            stderr=PIPE,
            stdout=PIPE,
            env=env,
            start_new_session=True,
        )
        started.append(process)
        await until(lambda: ready.exists() or process.returncode is not None, seconds=15)
        return process, json.loads(ready.read_text()) if ready.exists() else {}

    yield start
    for process in started:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.communicate()


async def _says_its_version(ready: dict[str, Any]) -> bool:
    async with grpc.aio.insecure_channel(ready["address"]) as channel:
        info = await operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
            operations_pb2.GetServerInfoRequest(), metadata=(("authorization", f"Bearer {ready['token']}"),)
        )
    return bool(info.version)


async def _server_pids(ready: dict[str, Any]) -> list[int]:
    conn = await asyncpg.connect(ready["database_url"])
    try:
        data = Path(await conn.fetchval("SHOW data_directory"))
        postmaster = int((data / "postmaster.pid").read_text().split()[0])
        return [postmaster, await conn.fetchval("SELECT pg_backend_pid()")]
    finally:
        await conn.close()


@pytest.mark.timeout(60)
async def test_dev_serves_keeps_its_data_and_ends_on_ctrl_c(start_dev: StartDev) -> None:
    process, ready = await start_dev()
    assert set(ready) == {"address", "token", "database_url", "nats_url", "metrics_url", "pid"}
    assert ready["pid"] == process.pid
    assert await _says_its_version(ready)
    pids = await _server_pids(ready)
    conn = await asyncpg.connect(ready["database_url"])
    assert await conn.fetchval("SELECT count(*) FROM noetl.catalog WHERE path LIKE 'demo/%'") >= 2
    await conn.execute("CREATE TABLE kept (n int)")
    await conn.close()

    process.send_signal(signal.SIGINT)
    _, said = await process.communicate()

    assert process.returncode == 0
    assert b"Traceback" not in said
    assert ready["token"].encode() in said
    assert not any(is_running(pid) for pid in pids)

    _, again = await start_dev()
    assert again["token"] == ready["token"]
    conn = await asyncpg.connect(again["database_url"])
    assert await conn.fetchval("SELECT count(*) FROM kept") == 0
    await conn.close()


@pytest.mark.timeout(60)
async def test_a_second_dev_on_the_same_data_says_so_and_a_killed_one_leaves_nothing(
    start_dev: StartDev,
) -> None:
    first, ready = await start_dev()
    pids = await _server_pids(ready)

    second, nothing = await start_dev()
    _, said = await second.communicate()

    assert second.returncode == 1
    assert nothing == {}
    assert b"Traceback" not in said
    assert b"already" in said

    first.send_signal(signal.SIGKILL)
    await until(lambda: not any(is_running(pid) for pid in pids), seconds=15)
