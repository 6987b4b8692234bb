"""PostgreSQL and NATS together."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import asyncpg
import nats
import pytest

from noetl_grpc.dev.process import AlreadyRunning, LaunchError
from noetl_grpc.dev.stack import Stack
from tests.processes import is_alive


async def test_both_run_and_both_end() -> None:
    async with Stack(durable=False) as stack:
        connection = await asyncpg.connect(stack.postgres.url())
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()
        client = await nats.connect(stack.nats.url)
        await client.close()
        pids = [stack.postgres.pid, stack.nats.pid]

    assert not any(map(is_alive, pids))


async def test_the_second_on_one_folder_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    async with Stack(tmp_path, durable=False) as stack:
        try:
            with pytest.raises(AlreadyRunning):
                async with Stack(tmp_path):
                    pass

            assert stack.postgres.pid
            assert stack.nats.pid
        finally:
            if stack.postgres.relocated_to:
                await stack.close()
                shutil.rmtree(stack.postgres.relocated_to)


async def test_when_one_fails_the_other_does_not_stay() -> None:
    stack = Stack(durable=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stack.nats.port = listener.getsockname()[1]

        with pytest.raises(LaunchError, match="nats-server can't listen"):
            await stack.__aenter__()

    assert (stack.postgres.pid, stack.nats.pid) == (0, 0)
