"""The log follower: every event that becomes visible is told once, whatever its id and however late it commits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc.core.following import Key, Position
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.errors import DatabaseUnavailable, Overloaded
from noetl_grpc.follower import Follower, Mode, Subscription
from noetl_grpc.storage import cursors, migrate
from noetl_grpc.storage.pool import Pool, create_pool
from noetl_grpc.storage.queries import queries
from tests.events import add_catalog_entry, write_events

EXECUTION = 600_000_000_000_000_001


@pytest.fixture
async def pool(database_url: str, conn: asyncpg.Connection) -> AsyncIterator[Pool]:
    await add_catalog_entry(conn)
    opened = await create_pool(database_url, name="0", size_max=4)
    yield opened
    await opened.close()


@pytest.fixture
async def connect(database_url: str) -> AsyncIterator[Callable[[], Awaitable[asyncpg.Connection]]]:
    async with AsyncExitStack() as stack:

        async def make() -> asyncpg.Connection:
            made = await asyncpg.connect(database_url)
            stack.push_async_callback(made.close)
            return made

        yield make


@asynccontextmanager
async def running(follower: Follower) -> AsyncIterator[Follower]:
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def take(subscription: Subscription, count: int) -> list[int]:
    """Event ids of the next `count` events, and not one more in the same page."""
    ids: list[int] = []
    async with asyncio.timeout(10):
        while len(ids) < count:
            ids += [key.event_id for key in (await subscription.next_page()).keys]
    assert len(ids) == count
    return ids


def event(event_id: int, event_type: str = "note") -> dict[str, object]:
    return {"event_id": event_id, "event_type": event_type}


async def test_an_event_that_commits_late_is_told_once_and_a_rolled_back_one_never(
    pool: Pool, conn: asyncpg.Connection, connect: Callable[[], Awaitable[asyncpg.Connection]]
) -> None:
    late, lost, stranger = await connect(), await connect(), await connect()
    slow, undone, foreign = late.transaction(), lost.transaction(), stranger.transaction()
    await slow.start()
    await write_events(late, EXECUTION, [event(100)])
    await undone.start()
    await write_events(lost, EXECUTION, [event(101)])
    # Somebody else's transaction that stays open must stall nothing.
    await foreign.start()
    await stranger.execute("SELECT pg_current_xact_id()")
    async with running(Follower(pool)) as follower, follower.subscribe() as (subscription, _):
        await write_events(conn, EXECUTION, [event(102)])
        first = await take(subscription, 1)
        await slow.commit()
        await undone.rollback()
        second = await take(subscription, 1)
        await write_events(conn, EXECUTION, [event(99)])
        third = await take(subscription, 1)
    await foreign.rollback()

    assert (first, second, third) == ([102], [100], [99])
    assert follower.mode is Mode.SNAPSHOT


async def test_many_writers_lose_and_repeat_nothing(
    pool: Pool, connect: Callable[[], Awaitable[asyncpg.Connection]]
) -> None:
    dice = random.Random(7)
    committed: list[int] = []

    async def write(writer: int) -> None:
        conn = await connect()
        for number in range(25):
            transaction = conn.transaction()
            await transaction.start()
            ids = [dice.randrange(10**6) * 100 + writer * 10 + index for index in range(dice.randrange(1, 4))]
            await write_events(conn, EXECUTION + number, [event(each) for each in ids])
            for _ in range(dice.randrange(20)):
                await conn.execute("SELECT 1")
            if dice.random() < 0.2:
                await transaction.rollback()
            else:
                await transaction.commit()
                committed.extend(ids)

    async with running(Follower(pool, page_size=3)) as follower, follower.subscribe() as (subscription, _):
        await asyncio.gather(*(write(writer) for writer in range(6)))
        told = await take_all(subscription, len(committed))

    assert Counter(told) == Counter(committed)


async def take_all(subscription: Subscription, count: int) -> list[int]:
    ids: list[int] = []
    async with asyncio.timeout(15):
        while len(ids) < count:
            ids += [key.event_id for key in (await subscription.next_page()).keys]
    return ids


async def test_subscribers_get_their_execution_or_their_types_only(
    pool: Pool, conn: asyncpg.Connection
) -> None:
    async with (
        running(Follower(pool)) as follower,
        follower.subscribe(execution_id=EXECUTION) as (of_one, _),
        follower.subscribe(event_types={"b", "c"}) as (of_types, _),
    ):
        await write_events(conn, EXECUTION + 1, [event(1, "a"), event(2, "b")])
        await write_events(conn, EXECUTION, [event(3, "a"), event(4, "c")])
        follower.wake()

        assert await take_all(of_one, 2) == [3, 4]
        assert await take_all(of_types, 2) == [2, 4]


async def test_who_joins_in_the_middle_of_a_gap_begins_at_the_next(
    pool: Pool, conn: asyncpg.Connection
) -> None:
    follower = Follower(pool, page_size=1)
    async with running(follower), follower.subscribe() as (first, begun):
        await write_events(conn, EXECUTION, [event(1), event(2), event(3)])
        async with follower.subscribe() as (second, joined):
            await write_events(conn, EXECUTION, [event(4)])
            all_ids = await take_all(first, 4)
            before = await gap(pool, Position(begun).towards(joined), limit=1)
            after = await take_all(second, 4 - len(before))

    assert sorted(all_ids) == [1, 2, 3, 4]
    assert [key.event_id for key in before] + after == all_ids


async def gap(pool: Pool, position: Position, *, limit: int) -> list[Key]:
    found: list[Key] = []
    async with pool.acquire() as conn:
        while position.target is not None:
            keys, position = await cursors.gap_keys(conn, position, limit=limit)
            found += keys
    return found


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_a_gap_can_be_left_and_entered_again_anywhere(
    pool: Pool, conn: asyncpg.Connection, connect: Callable[[], Awaitable[asyncpg.Connection]], limit: int
) -> None:
    late = await connect()
    slow = late.transaction()
    await slow.start()
    await write_events(late, EXECUTION, [event(5), event(50)])
    seen = await cursors.look_at_log(conn)
    assert seen is not None
    # Two executions with the same event id in one transaction: they share a place.
    async with conn.transaction():
        await write_events(conn, EXECUTION, [event(7), event(8)])
        await write_events(conn, EXECUTION + 1, [event(7), event(9)])
    await slow.commit()
    target = await cursors.look_at_log(conn)
    assert target is not None
    await write_events(conn, EXECUTION, [event(1000)])

    whole = await gap(pool, Position(seen).towards(target), limit=limit)
    position: Position | None = Position(seen).towards(target)
    of_one: list[int] = []
    while position is not None and position.target is not None:
        position = Position.from_list(position.as_list())
        assert position is not None
        keys, position = await cursors.gap_keys_of_execution(
            conn, position, execution_id=EXECUTION, limit=limit
        )
        of_one += [key.event_id for key in keys]

    assert [(key.event_id, key.execution_id - EXECUTION) for key in sorted(whole)] == [
        (5, 0),
        (50, 0),
        (7, 0),
        (7, 1),
        (8, 0),
        (9, 1),
    ]
    assert of_one == [5, 50, 7, 8]


async def test_a_reader_that_falls_behind_is_ended_after_what_was_kept(
    pool: Pool, conn: asyncpg.Connection
) -> None:
    follower = Follower(pool, page_size=10)
    async with running(follower), follower.subscribe(capacity=15) as (slow, _):
        async with follower.subscribe() as (keen, _):
            await write_events(conn, EXECUTION, [event(number) for number in range(1, 41)])
            assert len(await take_all(keen, 40)) == 40

        kept, position = await take_what_was_kept(slow)

    # Committed one by one, so the first looks may have found any number of them.
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) <= 15
    rest = await gap(pool, await to_now(pool, position), limit=100)
    assert [key.event_id for key in rest] == list(range(len(kept) + 1, 41))


async def take_what_was_kept(subscription: Subscription) -> tuple[list[int], Position]:
    ids: list[int] = []
    while True:
        try:
            page = await subscription.next_page()
        except Overloaded:
            return ids, page.after
        ids += [key.event_id for key in page.keys]


async def to_now(pool: Pool, position: Position) -> Position:
    """The same place, on the way to everything that is visible now."""
    async with pool.acquire() as conn:
        now = await cursors.look_at_log(conn)
    assert now is not None
    return Position(position.seen, now, position.at_xact, position.at_event)


async def test_losing_the_database_for_a_while_loses_no_event(pool: Pool, conn: asyncpg.Connection) -> None:
    async with running(Follower(pool)) as follower, follower.subscribe() as (subscription, _):
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'noetl_grpc' AND datname = current_database()"
        )
        await write_events(conn, EXECUTION, [event(1)])

        assert await take(subscription, 1) == [1]


async def test_without_the_column_it_follows_in_overlap_mode(pool: Pool, conn: asyncpg.Connection) -> None:
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN xact_id")
    await write_events(conn, EXECUTION, [event(1)])
    async with running(Follower(pool)) as follower, follower.subscribe() as (subscription, snapshot):
        await write_events(conn, EXECUTION, [event(3)])
        first = await take(subscription, 1)
        await write_events(conn, EXECUTION, [event(2)])
        second = await take(subscription, 1)

    assert (snapshot, follower.mode) == ("", Mode.OVERLAP)
    assert (first, second) == ([3], [2])


async def test_reading_a_gap_uses_the_index_under_a_generic_plan(conn: asyncpg.Connection) -> None:
    await add_catalog_entry(conn)
    await conn.execute(
        "INSERT INTO noetl.event (execution_id, catalog_id, event_id)"
        " SELECT (random() * 9e17)::bigint, (SELECT max(catalog_id) FROM noetl.catalog), number"
        " FROM generate_series(1, 20000) AS number"
    )
    await conn.execute("ANALYZE noetl.event")
    seen = await cursors.look_at_log(conn)
    await write_events(conn, EXECUTION, [event(10**7)])
    target = await cursors.look_at_log(conn)

    await conn.execute(f"PREPARE gap (text, text, xid8, bigint, bigint) AS {queries['gap_keys']}")
    async with conn.transaction():
        await cursors.prefer_generic_plans(conn)
        plan = await conn.fetch(
            f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) EXECUTE gap ('{seen}', '{target}', '0', 0, 500)"
        )

    text = "\n".join(line[0] for line in plan)
    assert "Seq Scan" not in text
    assert "xact_id >= pg_snapshot_xmax" in text
    assert "xact_id = ANY" in text
    # What was there before is not even looked at.
    assert "Rows Removed by Filter" not in text


@pytest.fixture
async def standby(tmp_path: Path) -> AsyncIterator[Postgres]:
    async with Postgres(durable=False) as postgres:
        conn = await asyncpg.connect(postgres.url())
        await migrate.migrate(conn)
        await conn.close()
        await postgres.stop()
        (postgres.data_dir / "data" / "standby.signal").touch()
        await postgres.start()
        yield postgres


async def test_a_standby_is_refused(standby: Postgres) -> None:
    pool = await create_pool(standby.url(), name="standby")
    try:
        async with running(Follower(pool)) as follower:
            with pytest.raises(DatabaseUnavailable, match="standby"):
                async with asyncio.timeout(10), follower.subscribe():
                    pass
            assert follower.problem is not None
    finally:
        await pool.close()
