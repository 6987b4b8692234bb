"""Commands that go on for a while: what they show meanwhile, and how they end."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import signal
import termios
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from noetl_grpc import NoetlClient
from noetl_grpc.cli.story import Story, stories
from noetl_grpc.server import Server
from tests.cli import Cli
from tests.conftest import TOKEN
from tests.subscriptions import add_entry


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    """The command line, told of the server by the environment."""
    return Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN})


@pytest.fixture
async def story(conn: asyncpg.Connection) -> Story:
    """An execution that is not in the log yet."""
    catalog_id = await add_entry(conn, "demo/order", kind="playbook")
    ids = itertools.count(1000)
    telling = stories(lambda: next(ids), catalog_id=catalog_id, parent_id=1, now=lambda: datetime.now(UTC))
    return next(telling)


@asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    """A process that is not left behind."""
    try:
        async with asyncio.timeout(40):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def _next_line(process: Process) -> Any:
    assert process.stdout is not None
    return json.loads(await process.stdout.readline())


async def test_a_watched_replay_tells_the_present_and_each_change_until_ctrl_c(
    cli: Cli, client: NoetlClient, story: Story
) -> None:
    first, rest = story.events[:2], story.events[2:]
    await client.projection.project_events(first)

    async with running(await cli.start("replay", story.execution_id, "--watch", "--json")) as process:
        present = await _next_line(process)
        await client.projection.project_events(rest)
        later = await _next_line(process)
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()

    assert (present["event_count"], present["execution"]["status"]) == (2, "RUNNING")
    assert (later["event_count"], later["execution"]["status"]) == (len(story.events), "COMPLETED")
    assert present["execution_id"] == str(story.execution_id)
    assert process.returncode == 130
    assert said == b""


async def test_a_watched_replay_reads_well_where_it_is_not_a_terminal(
    cli: Cli, client: NoetlClient, story: Story
) -> None:
    async with running(await cli.start("replay", story.execution_id, "--watch")) as process:
        assert process.stdout is not None
        nothing = await process.stdout.readuntil(b"sha256")
        await client.projection.project_events(story.events)
        everything = await process.stdout.readuntil(b"sha256")
        process.send_signal(signal.SIGINT)
        await process.communicate()

    assert b"0 events" in nothing
    assert b"COMPLETED" in everything
    assert b"start" in everything
    assert process.returncode == 130


@pytest.mark.parametrize(
    "arguments", [("replay", "7", "--watch", "--json"), ("top", "--json", "--interval", "0.2")]
)
async def test_who_reads_only_the_first_line_meets_no_traceback(
    cli: Cli, client: NoetlClient, story: Story, arguments: tuple[str, ...]
) -> None:
    async with running(await cli.start(*arguments)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.readline()
        process.stdout._transport.close()  # type: ignore[attr-defined]  # as `| head -1` does
        await client.projection.project_events([replace(event, execution_id=7) for event in story.events])
        said = await process.stderr.read()
        await process.wait()

    assert said == b""
    assert process.returncode == 1


async def test_top_ends_with_q_and_leaves_the_terminal_as_it_was(cli: Cli) -> None:
    async with _terminal() as (screen, descriptor):
        attributes, flags = termios.tcgetattr(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL)
        process = await cli.start("top", "--interval", "0.2", stdin=descriptor, stdout=descriptor)
        async with running(process):
            await screen.readuntil(b"OUTBOX")
            # Keys that come together, of which only the last one counts.
            os.write(screen.ours, b"xq")
            _, said = await process.communicate()

        assert termios.tcgetattr(descriptor) == attributes
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) == flags
    assert process.returncode == 0
    assert said == b""


ROWS = 2500
LOCK = 4242


async def test_a_purge_shows_how_far_it_is(cli: Cli, conn: asyncpg.Connection) -> None:
    await conn.execute(
        f"""
        INSERT INTO noetl.outbox (event_id, payload, status, published_at)
        SELECT n, '{{}}', 'PUBLISHED', now() - interval '9 days' FROM generate_series(1, {ROWS}) AS n;
        CREATE FUNCTION wait_for_the_test() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN OLD; END';
        CREATE TRIGGER waits BEFORE DELETE ON noetl.outbox
            FOR EACH ROW WHEN (OLD.event_id = {ROWS}) EXECUTE FUNCTION wait_for_the_test();
        SELECT pg_advisory_lock({LOCK});
        """
    )
    async with _terminal() as (screen, descriptor):
        process = await cli.start("projection", "purge", "--outbox-days", "1", "--json", stderr=descriptor)
        async with running(process):
            # Two of three pages are gone; the third waits.
            shown = await screen.readuntil(b"2000/2500")
            await conn.execute(f"SELECT pg_advisory_unlock({LOCK})")
            out, _ = await process.communicate()

    assert b"deleting" in shown
    assert json.loads(out)["outbox_purged"] == ROWS
    assert process.returncode == 0


class Screen(asyncio.StreamReader):
    """What a terminal shows; `ours` is where its keys are pressed."""

    ours: int


@asynccontextmanager
async def _terminal() -> AsyncIterator[tuple[Screen, int]]:
    """A terminal, and the descriptor of its other side."""
    ours, theirs = os.openpty()
    screen = Screen()
    screen.ours = ours
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(screen), os.fdopen(ours, "rb", buffering=0)
    )
    try:
        yield screen, theirs
    finally:
        os.close(theirs)
        transport.close()
