"""Partitions of the event log, made before events need them and never over events that are there."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime

import asyncpg
import pytest

from noetl_grpc.storage.partitions import Obstacle, ensure_partitions, read_partitions

#: The quarter after next is the first of 2028. None of NoETL's own partitions holds its first day in the
#: servers' layout, nor its last in the database's.
SUMMER_2027 = datetime(2027, 8, 5, tzinfo=UTC)
MADE_IN_SUMMER_2027 = ["partition noetl.event_2028_q1", "partition noetl.event_2028_q1_standard_2"]
SPRING_2028 = datetime(2028, 4, 2, tzinfo=UTC)
NEW_YEAR_2028 = 529_448_671_641_600_000
APRIL_2028_IN_DATABASE = 1_124_851_934_822_400_000


async def insert_event(conn: asyncpg.Connection, execution_id: int, event_id: int = 1) -> None:
    await conn.execute(
        """
        INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES (1, 'demo/one', 1, 'playbook')
        ON CONFLICT DO NOTHING
        """
    )
    await conn.execute(
        "INSERT INTO noetl.event (execution_id, catalog_id, event_id) VALUES ($1, 1, $2)",
        execution_id,
        event_id,
    )


async def partition_of(conn: asyncpg.Connection, execution_id: int) -> str:
    name: str = await conn.fetchval(
        """
        SELECT c.relname::text FROM noetl.event AS e JOIN pg_class AS c ON c.oid = e.tableoid
        WHERE e.execution_id = $1 LIMIT 1
        """,
        execution_id,
    )
    return name


async def test_nothing_is_made_while_noetls_own_reach_far_enough(conn: asyncpg.Connection) -> None:
    report = await ensure_partitions(conn, now=datetime(2026, 11, 18, tzinfo=UTC))

    assert (report.created, report.blocked) == ([], [])


async def test_coming_quarters_get_partitions_where_none_lies(conn: asyncpg.Connection) -> None:
    report = await ensure_partitions(conn, now=SPRING_2028)

    assert report.blocked == []
    assert report.created
    for execution_id in (APRIL_2028_IN_DATABASE, APRIL_2028_IN_DATABASE + 10**17):
        await insert_event(conn, execution_id)
        assert (await partition_of(conn, execution_id)).startswith("event_2028_q")
    assert (await ensure_partitions(conn, now=SPRING_2028)).created == []


async def test_a_new_partition_is_like_the_others(conn: asyncpg.Connection) -> None:
    await ensure_partitions(conn, now=SUMMER_2027)

    await insert_event(conn, NEW_YEAR_2028)

    name = await partition_of(conn, NEW_YEAR_2028)
    assert name == "event_2028_q1"
    shapes = await conn.fetch(
        """
        SELECT t.relowner,
            ARRAY(
                SELECT substring(pg_get_indexdef(indexrelid) FROM ' USING .*') AS index
                FROM pg_index WHERE indrelid = t.oid ORDER BY index
            ),
            ARRAY(
                SELECT pg_get_constraintdef(oid) AS definition
                FROM pg_constraint WHERE conrelid = t.oid ORDER BY definition
            )
        FROM pg_class AS t WHERE t.relname = ANY($1)
        """,
        [name, "event_2026_q1"],
    )
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
    assert await conn.fetchval(
        "SELECT xact_id IS NOT NULL FROM noetl.event WHERE execution_id = $1", NEW_YEAR_2028
    )


async def test_events_in_the_default_partition_are_reported_and_can_be_moved(
    conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await insert_event(conn, NEW_YEAR_2028 + 5)
    written_by = await conn.fetchval("SELECT xact_id FROM noetl.event")

    report = await ensure_partitions(conn, now=SUMMER_2027)

    assert report.created == MADE_IN_SUMMER_2027[1:]
    assert [item.obstacle for item in report.blocked] == [Obstacle.EVENTS_IN_DEFAULT]
    blocked = report.blocked[0]
    assert "partition noetl.event_2028_q1 can't be made" in caplog.text
    assert blocked.sql in caplog.text
    assert await partition_of(conn, NEW_YEAR_2028 + 5) == "event_default"

    await conn.execute(blocked.sql)

    assert await partition_of(conn, NEW_YEAR_2028 + 5) == "event_2028_q1"
    assert await conn.fetchval("SELECT xact_id FROM noetl.event") == written_by
    again = await ensure_partitions(conn, now=SUMMER_2027)
    assert (again.created, again.blocked) == ([], [])


async def test_two_servers_at_once_make_each_partition_once(
    conn: asyncpg.Connection, database_url: str
) -> None:
    other = await asyncpg.connect(database_url)
    try:
        reports = await asyncio.gather(*(ensure_partitions(each, now=SPRING_2028) for each in (conn, other)))
    finally:
        await other.close()

    created = [name for report in reports for name in report.created]
    assert created
    assert len(created) == len(set(created))
    assert [report.blocked for report in reports] == [[], []]
    ranges = [(item.lower, item.upper) for item in await read_partitions(conn) if item.lower and item.upper]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))


async def test_a_role_that_does_not_own_the_log_is_told_the_sql(
    conn: asyncpg.Connection, database_url: str
) -> None:
    await conn.execute("CREATE ROLE guest LOGIN; GRANT USAGE ON SCHEMA noetl TO guest")
    guest = await asyncpg.connect(database_url, user="guest")
    try:
        report = await ensure_partitions(guest, now=SUMMER_2027)
    finally:
        await guest.close()
        await conn.execute("DROP OWNED BY guest; DROP ROLE guest")

    assert [item.obstacle for item in report.blocked] == [Obstacle.NOT_OWNER, Obstacle.NOT_OWNER]
    for item in report.blocked:
        await conn.execute(item.sql)
    assert (await ensure_partitions(conn, now=SUMMER_2027)).created == []


async def test_a_reader_of_the_log_delays_the_partition_and_no_writer(
    conn: asyncpg.Connection, database_url: str
) -> None:
    reader, writer = [await asyncpg.connect(database_url) for _ in range(2)]
    event_ids = itertools.count(1)
    try:
        async with reader.transaction():
            await reader.fetchval("SELECT count(*) FROM noetl.event")
            making = asyncio.create_task(ensure_partitions(conn, now=SUMMER_2027))
            while not making.done():
                async with asyncio.timeout(1.0):
                    await insert_event(writer, 1, event_id=next(event_ids))
            report = await making
    finally:
        await reader.close()
        await writer.close()

    assert next(event_ids) > 10
    assert report.created == []
    assert {item.obstacle for item in report.blocked} == {Obstacle.LOCK_TIMEOUT}
    assert (await ensure_partitions(conn, now=SUMMER_2027)).created == MADE_IN_SUMMER_2027
