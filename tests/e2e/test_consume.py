"""The client's consume loop against a running server: order, failures, leases, drains, restarts."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from noetl_grpc import Consumption, NoetlClient, OutboxMessage, OutboxRow, Release, Unauthenticated
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.conftest import TOKEN
from tests.processes import until, until_answered

StartServer = Callable[[Settings], Awaitable[Server]]


async def _enqueue(client: NoetlClient, *, executions: int, each: int) -> None:
    """Rows of so many executions, interleaved."""
    await client.outbox.enqueue(
        OutboxMessage(
            event_id=number * 1000 + execution, execution_id=execution, payload_json=f'{{"n":{number}}}'
        )
        for number in range(1, each + 1)
        for execution in range(1, executions + 1)
    )


@asynccontextmanager
async def _consuming(client: NoetlClient, handler: Any, **options: Any) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(client.outbox.consume(handler, **options))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _statuses(conn: asyncpg.Connection) -> Counter[str]:
    rows = await conn.fetch("SELECT status, count(*) AS n FROM noetl.outbox GROUP BY status")
    return Counter({row["status"]: row["n"] for row in rows})


async def test_rows_of_an_execution_are_handled_in_order_and_others_side_by_side(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await _enqueue(client, executions=20, each=10)
    handled: dict[int, list[int]] = defaultdict(list)
    busy: set[int] = set()
    together = 0
    tally = Consumption()

    async def handle(row: OutboxRow) -> None:
        nonlocal together
        assert row.execution_id is not None
        assert row.execution_id not in busy
        busy.add(row.execution_id)
        together = max(together, len(busy))
        await asyncio.sleep(0)
        busy.discard(row.execution_id)
        handled[row.execution_id].append(row.payload["n"])

    async with _consuming(client, handle, concurrency=8, tally=tally):
        await until(lambda: tally.published == 200)

    assert set(handled) == set(range(1, 21))
    assert all(numbers == list(range(1, 11)) for numbers in handled.values())
    assert 1 < together <= 8
    assert await _statuses(conn) == {"PUBLISHED": 200}


async def test_a_failing_row_holds_back_its_execution_alone_and_is_tried_again(client: NoetlClient) -> None:
    await _enqueue(client, executions=3, each=3)
    handled: list[tuple[int, int]] = []
    failures = 0

    async def handle(row: OutboxRow) -> None:
        nonlocal failures
        assert row.execution_id is not None
        if row.execution_id == 2 and row.payload["n"] == 2 and row.attempts == 1:
            failures += 1
            raise ValueError("no such place")
        handled.append((row.execution_id, row.payload["n"]))

    async with _consuming(client, handle):
        await until(lambda: len(handled) == 9)

    assert failures == 1
    assert [number for execution, number in handled if execution == 2] == [1, 2, 3]


async def test_the_reason_of_a_failure_is_kept(client: NoetlClient, conn: asyncpg.Connection) -> None:
    await _enqueue(client, executions=1, each=1)
    tally = Consumption()

    async def handle(row: OutboxRow) -> None:
        raise ValueError("no such place")

    async with _consuming(client, handle, tally=tally):
        await until(lambda: tally.failed == 1)

    assert await conn.fetchval("SELECT last_error FROM noetl.outbox") == "ValueError: no such place"


async def test_release_gives_everything_back_without_an_attempt_and_waits_until_ready(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await _enqueue(client, executions=30, each=2)
    is_back = asyncio.Event()
    is_back.set()
    waits = 0
    tally = Consumption()

    async def ready() -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            assert await _statuses(conn) == {"PENDING": 60}
            assert await conn.fetchval("SELECT max(attempts) FROM noetl.outbox") == 0
            is_back.set()

    async def handle(row: OutboxRow) -> None:
        if not is_back.is_set() or waits == 1:
            is_back.clear()
            raise Release

    async with _consuming(client, handle, ready=ready, tally=tally):
        await until(lambda: tally.published == 60)

    assert waits == 2
    assert await conn.fetchval("SELECT max(attempts) FROM noetl.outbox") == 1


async def test_cancelling_lets_running_handlers_finish_and_gives_the_rest_back(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await _enqueue(client, executions=10, each=3)
    go_on = asyncio.Event()
    running: list[int] = []

    async def handle(row: OutboxRow) -> None:
        running.append(row.outbox_id)
        await go_on.wait()

    async with _consuming(client, handle, concurrency=4) as consuming:
        await until(lambda: len(running) == 4)
        consuming.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await consuming

    assert len(running) == 4
    assert await _statuses(conn) == {"PUBLISHED": 4, "PENDING": 26}
    assert await conn.fetchval("SELECT sum(attempts) FROM noetl.outbox") == 4


async def test_leases_are_renewed_while_a_handler_is_slow(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await _enqueue(client, executions=1, each=1)
    runs = 0
    go_on = asyncio.Event()
    tally = Consumption()

    async def handle(row: OutboxRow) -> None:
        nonlocal runs
        runs += 1
        await go_on.wait()

    async with _consuming(client, handle, lease_seconds=1.0, tally=tally):
        await until(lambda: runs == 1)
        first = await conn.fetchval("SELECT lease_expires_at FROM noetl.outbox")

        async def is_renewed_twice() -> bool:
            now = await conn.fetchval("SELECT lease_expires_at FROM noetl.outbox")
            return bool(now - first > timedelta(seconds=2))

        await until_answered(is_renewed_twice)
        assert (await client.outbox.claim()).claimed == 0
        go_on.set()
        await until(lambda: tally.published == 1)

    assert runs == 1


async def test_a_handler_whose_row_was_lost_is_cancelled(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await _enqueue(client, executions=1, each=2)
    tally = Consumption()
    cancelled: list[int] = []
    started = asyncio.Event()

    async def handle(row: OutboxRow) -> None:
        if row.payload["n"] == 1:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(row.outbox_id)
                raise

    async with _consuming(client, handle, lease_seconds=1.0, tally=tally):
        await started.wait()
        # Somebody else takes both, as after an expired lease.
        await conn.execute(
            "UPDATE noetl.outbox SET claim_token = gen_random_uuid(), lease_expires_at = 'infinity'"
        )
        await until(lambda: bool(cancelled))
        await until(lambda: tally.stale == 2)

    assert tally.published == 0


async def test_it_outlives_a_restart_of_the_server(
    settings: Settings, start_server: StartServer, conn: asyncpg.Connection
) -> None:
    first = await start_server(settings)
    tally = Consumption()
    handled: list[int] = []

    async def handle(row: OutboxRow) -> None:
        handled.append(row.event_id)

    async with NoetlClient(first.address, token=TOKEN) as client, _consuming(client, handle, tally=tally):
        await _enqueue(client, executions=5, each=2)
        await until(lambda: tally.published == 10)
        await first.drain()
        await start_server(replace(settings, grpc_port=first.port))
        await client.outbox.enqueue([OutboxMessage(event_id=77, payload_json="{}")])
        await until(lambda: tally.published == 11)

    assert handled[-1] == 77
    assert await _statuses(conn) == {"PUBLISHED": 11}


async def test_several_consumers_share_the_work(client: NoetlClient, server: Server) -> None:
    await _enqueue(client, executions=50, each=4)
    seen: Counter[int] = Counter()
    tallies = [Consumption(), Consumption()]

    async def handle(row: OutboxRow) -> None:
        seen[row.outbox_id] += 1

    async with (
        NoetlClient(server.address, token=TOKEN) as other,
        _consuming(client, handle, concurrency=4, tally=tallies[0]),
        _consuming(other, handle, concurrency=4, tally=tallies[1]),
    ):
        await until(lambda: sum(tally.published for tally in tallies) == 200)

    assert set(seen.values()) == {1}


async def test_a_token_that_is_not_allowed_ends_it(server: Server) -> None:
    async with NoetlClient(server.address, token="wrong") as client:
        with pytest.raises(Unauthenticated):
            await client.outbox.consume(lambda row: asyncio.sleep(0))
