"""Waiting for processes, and a process of our own that owns servers and can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent

#: Starts what it is told to, prints where and as whom, and goes on until it is killed or told to end.
OWNER = """
import asyncio, json, os, sys
from pathlib import Path
from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres

if sys.argv[1]:
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))

async def main():
    postgres_dir, nats_dir = (Path(argument) if argument else None for argument in sys.argv[2:])
    async with Postgres(postgres_dir, durable=False) as postgres, Nats(nats_dir) as nats:
        print(json.dumps({
            "pids": [postgres.pid, nats.pid],
            "folders": [str(postgres.data_dir), str(nats.store_dir)],
            "url": postgres.url(),
            "nats_url": nats.url,
        }), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """Whether it does anything still; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_alive(pid: int) -> bool:
    """Whether the pid is in use, be it by a process that nobody has reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that announces itself to nobody."""
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110 (nobody sets an event for it)
            await asyncio.sleep(0.005)


async def until_answered(is_so: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait until somebody who must be asked says yes."""
    async with asyncio.timeout(seconds):
        while not await is_so():  # noqa: ASYNC110 (nobody sets an event for it)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def owner(
    postgres_dir: Path | None = None,
    nats_dir: Path | None = None,
    *,
    uid: int | None = None,
    python: str | None = None,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Another process that runs both servers, and what it says about them."""
    process = await asyncio.create_subprocess_exec(
        python or sys.executable,
        "-c",
        OWNER,
        "" if uid is None else str(uid),
        *(str(folder or "") for folder in (postgres_dir, nats_dir)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={"PYTHONPATH": os.pathsep.join((str(REPOSITORY), sysconfig.get_path("purelib")))},
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 15)
        assert line, "the owner ended before its servers ran"
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        # Reads to the end, so that no pipe is left open.
        await process.communicate()
