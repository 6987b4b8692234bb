"""Real PostgreSQL and NATS for every test: a fresh copy of a migrated database each time."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import asyncpg
import grpc
import pytest

from noetl_grpc import NoetlClient
from noetl_grpc import server as servers
from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.settings import Settings
from noetl_grpc.storage import migrate
from tests import leaks

TOKEN = leaks.TOKEN
TEMPLATE = "migrated"

_numbers = itertools.count(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and every process that a test starts would be deaf to Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Two on each core: half of the time a test waits for a server, a process or the broker."""
    return 2 * (os.cpu_count() or 1)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[list[str]]:
    """Of every test: nothing that must be kept is logged or told in an error."""
    with leaks.watched() as found:
        yield found
    assert found == []


@pytest.fixture(scope="session")
async def postgres() -> AsyncIterator[Postgres]:
    """One PostgreSQL for the whole run, with a migrated template database."""
    async with Postgres(durable=False, in_memory=True) as running:
        await _execute(running.url(), f"CREATE DATABASE {TEMPLATE}")
        conn = await asyncpg.connect(running.url(TEMPLATE))
        try:
            await migrate.migrate(conn)
        finally:
            await conn.close()
        yield running


@pytest.fixture
async def new_database(postgres: Postgres) -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Makes a fresh migrated database and returns its URL; for tests that need several."""
    made: list[str] = []

    async def make() -> str:
        name = f"test_{next(_numbers)}"
        await _execute(postgres.url(), f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        made.append(name)
        return postgres.url(name)

    yield make
    for name in made:
        await _execute(postgres.url(), f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def database_url(new_database: Callable[[], Awaitable[str]]) -> str:
    """A fresh migrated database."""
    return await new_database()


@pytest.fixture
async def conn(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to the test's database."""
    connection = await asyncpg.connect(database_url, server_settings={"timezone": "UTC"})
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def nats() -> AsyncIterator[Nats]:
    """A NATS server with JetStream on a temporary store."""
    async with Nats() as running:
        yield running


def settings_for(*urls: str, **changes: Any) -> Settings:
    """Settings of a server on loopback and free ports that drains at once."""
    base = Settings(
        grpc_host="127.0.0.1",
        grpc_port=0,
        metrics_address=None,
        api_token=TOKEN,
        database_url=_with_password(urls[0]),
        shard_urls=tuple(map(_with_password, urls)) if len(urls) > 1 else (),
        drain_seconds=0.0,
        grace_seconds=5.0,
    )
    return replace(base, **changes)


def _with_password(url: str) -> str:
    """The database asks for none on loopback; it is there to be found where it should not be."""
    return url.replace("@", f":{leaks.PASSWORD}@", 1)


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Settings of a server on the test's database."""
    return settings_for(database_url)


@pytest.fixture
async def start_server() -> AsyncIterator[Callable[[Settings], Awaitable[servers.Server]]]:
    """Starts servers that are stopped when the test ends."""
    async with AsyncExitStack() as stack:

        async def start(settings: Settings) -> servers.Server:
            return await stack.enter_async_context(servers.serving(settings))

        yield start


@pytest.fixture
async def server(
    settings: Settings, start_server: Callable[[Settings], Awaitable[servers.Server]]
) -> servers.Server:
    """A running server on the test's database."""
    return await start_server(settings)


AUTHORIZATION = (("authorization", f"Bearer {TOKEN}"),)

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    # Channels of one process share connections otherwise, and a test must not see another test's server.
    ("grpc.use_local_subchannel_pool", 1),
)


@pytest.fixture
async def channel(server: servers.Server) -> AsyncIterator[grpc.aio.Channel]:
    """An open channel to the server; calls pass `metadata=AUTHORIZATION`."""
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as opened:
        yield opened


@pytest.fixture
async def client(server: servers.Server) -> AsyncIterator[NoetlClient]:
    """The typed client of the server."""
    async with NoetlClient(server.address, token=TOKEN) as opened:
        yield opened


@pytest.fixture
async def channel_to() -> AsyncIterator[Callable[[str], Awaitable[grpc.aio.Channel]]]:
    """Opens channels that are closed when the test ends."""
    async with AsyncExitStack() as stack:

        async def open_channel(address: str) -> grpc.aio.Channel:
            return await stack.enter_async_context(
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            )

        yield open_channel


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
