"""What the README shows runs as typed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc.dev.catalog import SAMPLE_CATALOG, load_catalog
from noetl_grpc.server import Server
from tests.conftest import TOKEN

REPOSITORY = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.fixture
async def folder(server: Server, conn: asyncpg.Connection, tmp_path: Path) -> Path:
    """A folder in which `noetl-grpc dev` seems to run."""
    await load_catalog(conn, SAMPLE_CATALOG)
    (tmp_path / ".noetl").mkdir()
    (tmp_path / ".noetl/ready.json").write_text(json.dumps({"address": server.address, "token": TOKEN}))
    return tmp_path


async def _run(program: str, folder: Path) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("NOETL_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=folder, env=env, stdout=PIPE, stderr=PIPE
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return out.decode()


def test_there_is_a_worker_in_about_twenty_lines() -> None:
    (worker,) = (block for block in BLOCKS if "heartbeat" in block)

    assert len([line for line in worker.splitlines() if line.strip()]) <= 20


@pytest.mark.timeout(60)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n", 1)[0])
async def test_each_block_runs_as_typed_and_again(block: str, folder: Path) -> None:
    first = await _run(block, folder)
    second = await _run(block, folder)

    if "heartbeat" in block:
        assert "4 Materialized(materialized=1, duplicates=0, rejected=())" in first
        assert "4 Materialized(materialized=0, duplicates=1, rejected=())" in second
        assert first.endswith("7 events\n")


def test_the_pages_blocks_are_python() -> None:
    pages = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
    blocks = [
        (page.name, block)
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]

    assert blocks
    for name, block in blocks:
        # Some pages show only the inside of a coroutine.
        body = "\n".join(f"    {line}" for line in block.splitlines())
        compile(f"async def page():\n{body}", name, "exec")
