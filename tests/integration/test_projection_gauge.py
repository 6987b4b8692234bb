"""The gauge about snapshots that lag behind the log."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import asyncpg

from noetl_grpc import NoetlClient
from noetl_grpc.cli.story import stories
from noetl_grpc.storage import projections
from tests.subscriptions import add_entry


async def test_executions_count_until_their_snapshot_has_their_newest_event(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    catalog_id = await add_entry(conn, "demo/order", kind="playbook")
    ids = itertools.count(1000)
    telling = stories(lambda: next(ids), catalog_id=catalog_id, parent_id=1, now=lambda: datetime.now(UTC))
    told = list(itertools.islice(telling, 3))
    for story in told:
        await client.projection.project_events(story.events[:-1])
    assert await projections.count_behind(conn, events=1000) == 3

    await client.projection.advance([story.execution_id for story in told])
    assert await projections.count_behind(conn, events=1000) == 0

    await client.projection.project_events(told[0].events)
    assert await projections.count_behind(conn, events=1000) == 1
    # Only the latest event is looked at, and it is not that execution's.
    await client.projection.project_events(told[1].events)
    await client.projection.advance([told[1].execution_id])
    assert await projections.count_behind(conn, events=1) == 0


async def test_the_latest_events_are_found_by_an_index(conn: asyncpg.Connection) -> None:
    await conn.execute("SET enable_seqscan = off")
    plan = await conn.fetch(f"EXPLAIN {projections.queries['count_behind'].replace('$1', '1000')}")

    text = "\n".join(row[0] for row in plan)
    assert "Seq Scan on event" not in text
    assert "Sort Key: event_1.xact_id" not in text
