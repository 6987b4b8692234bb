"""Connections: what the driver raises becomes ours, and a cancelled call ends its statement in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from noetl_grpc.errors import Conflict, DatabaseUnavailable, Overloaded
from noetl_grpc.storage.pool import Pool, create_pool


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    opened = await create_pool(database_url, name="0", size_max=2, wait_seconds=0.05)
    yield opened
    await opened.close()


async def test_sessions_are_in_utc_and_named(pool: Pool) -> None:
    async with pool.acquire() as conn:
        assert await conn.fetchval("SHOW timezone") == "UTC"
        assert await conn.fetchval("SHOW application_name") == "noetl_grpc"


async def test_json_travels_as_text(pool: Pool) -> None:
    async with pool.acquire() as conn:
        assert await conn.fetchval("SELECT '{\"a\": 9007199254740993}'::jsonb") == '{"a": 9007199254740993}'


async def test_a_full_pool_is_overloaded_and_recovers(pool: Pool) -> None:
    async with pool.acquire(), pool.acquire():
        with pytest.raises(Overloaded) as raised:
            async with pool.acquire():
                pass

    assert raised.value.retry_after_seconds
    async with pool.acquire() as conn:
        assert await conn.fetchval("SELECT 1") == 1


async def test_an_unreachable_database_is_unavailable() -> None:
    away = await create_pool("postgresql://nobody@127.0.0.1:1/none", name="away")

    with pytest.raises(DatabaseUnavailable) as raised:
        async with away.acquire():
            pass

    assert "127.0.0.1" not in str(raised.value)
    await away.close()


async def test_a_terminated_connection_is_unavailable_and_replaced(
    pool: Pool, conn: asyncpg.Connection
) -> None:
    async def use_a_connection_that_dies() -> None:
        async with pool.acquire() as used:
            pid = await used.fetchval("SELECT pg_backend_pid()")
            await conn.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
            await used.fetchval("SELECT 1")

    with pytest.raises(DatabaseUnavailable):
        await use_a_connection_that_dies()

    async with pool.acquire() as again:
        assert await again.fetchval("SELECT 1") == 1


async def test_a_session_that_is_being_ended_is_unavailable_and_replaced(pool: Pool) -> None:
    fields = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
    farewell = b"E" + (len(fields) + 4).to_bytes(4, "big") + fields

    async def ask() -> None:
        async with pool.acquire() as conn:
            # The server says so while nothing is asked; that it hangs up comes a moment later.
            conn._con._protocol.data_received(farewell)
            await conn.fetchval("SELECT 1")

    with pytest.raises(DatabaseUnavailable):
        await ask()

    async with pool.acquire() as conn:
        assert await conn.fetchval("SELECT 2") == 2


async def test_a_deadlock_is_a_conflict(pool: Pool) -> None:
    async with pool.acquire() as conn:
        await conn.execute(
            "CREATE TABLE pair (id int PRIMARY KEY, n int); INSERT INTO pair VALUES (1, 0), (2, 0)"
        )
    barrier = asyncio.Barrier(2)

    async def cross(first: int, second: int) -> None:
        async with pool.transaction() as conn:
            await conn.execute("UPDATE pair SET n = n + 1 WHERE id = $1", first)
            await barrier.wait()
            await conn.execute("UPDATE pair SET n = n + 1 WHERE id = $1", second)

    outcomes = await asyncio.gather(cross(1, 2), cross(2, 1), return_exceptions=True)

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Conflict", "NoneType"]
    assert any(isinstance(outcome, Conflict) for outcome in outcomes)


async def test_a_cancelled_call_ends_its_statement_in_the_database(
    pool: Pool, conn: asyncpg.Connection
) -> None:
    async def wait_long() -> None:
        async with pool.acquire() as used:
            await used.execute("SELECT pg_sleep(600)")

    running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"
    task = asyncio.create_task(wait_long())
    async with asyncio.timeout(10):
        while not await conn.fetchval(running):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while await conn.fetchval(running):
            pass


async def test_a_wrong_statement_stays_a_bug(pool: Pool) -> None:
    with pytest.raises(asyncpg.UndefinedTableError):
        async with pool.acquire() as conn:
            await conn.execute("SELECT * FROM nowhere")
