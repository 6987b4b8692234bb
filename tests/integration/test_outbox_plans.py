"""The hot statements read what they return and little else, whatever else is in the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from noetl_grpc.storage.queries import queries
from tests.outbox_api import insert

LEASE = timedelta(seconds=30)
MEGA = 2**20


@pytest.fixture(params=["custom", "generic"])
async def explained(request: pytest.FixtureRequest, conn: asyncpg.Connection) -> Any:
    """Explains a statement by executing it, with the plan that a pool's connection may end up with."""
    await conn.execute(f"SET plan_cache_mode = force_{request.param}_plan")

    async def explain(name: str, *arguments: object) -> list[dict[str, Any]]:
        async with conn.transaction():
            statement = await conn.prepare(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {queries[name]}")
            document = json.loads(await statement.fetchval(*arguments))
            await conn.execute("SET LOCAL transaction_read_only = off")
        return list(_nodes(document[0]["Plan"]))

    return explain


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _rows_read(nodes: list[dict[str, Any]]) -> float:
    """How many rows of the table were looked at, those that a filter threw away included."""
    return sum(
        node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
        for node in nodes
        if node.get("Relation Name") == "outbox" and node["Node Type"] != "ModifyTable"
    )


def _indexes(nodes: list[dict[str, Any]]) -> set[str]:
    return {node["Index Name"] for node in nodes if "Index Name" in node}


async def _publish_many(conn: asyncpg.Connection, rows: int = 30_000) -> None:
    await conn.execute(
        "INSERT INTO noetl.outbox (execution_id, event_id, payload, status, published_at)"
        " SELECT n, n, '{}', 'PUBLISHED', now() FROM generate_series(1, $1::int) AS n",
        rows,
    )
    await conn.execute("ANALYZE noetl.outbox")


async def test_published_rows_cost_a_claim_nothing(explained: Any, conn: asyncpg.Connection) -> None:
    await _publish_many(conn)
    await insert(conn, 300, event="n + 100000")
    await conn.execute("ANALYZE noetl.outbox")

    nodes = await explained("claim_rows", 100, MEGA, uuid4(), LEASE, True, 0, True, False)

    assert _rows_read(nodes) <= 250  # once to lock, once to change
    assert "idx_outbox_claimable" in _indexes(nodes)
    assert not any(node["Node Type"] == "Seq Scan" for node in nodes)


async def test_expired_leases_are_found_by_their_index(explained: Any, conn: asyncpg.Connection) -> None:
    await _publish_many(conn)
    await insert(conn, 3000, event="n + 100000")
    await conn.execute(
        "UPDATE noetl.outbox SET status = 'IN_FLIGHT', claim_token = gen_random_uuid(),"
        " lease_expires_at = now() + (outbox_id % 1000 - 10) * interval '1 min' WHERE status = 'PENDING'"
    )
    await conn.execute("ANALYZE noetl.outbox")

    nodes = await explained("claim_rows", 100, MEGA, uuid4(), LEASE, True, 0, True, False)

    assert "idx_outbox_leased" in _indexes(nodes)
    assert _rows_read(nodes) <= 100


async def test_published_rows_cost_the_counts_nothing(explained: Any, conn: asyncpg.Connection) -> None:
    await _publish_many(conn)
    await insert(conn, 100, event="n + 100000")
    await conn.execute("VACUUM ANALYZE noetl.outbox")

    for statement, arguments in (("read_stats", ()), ("count_pending", ()), ("look_for_due", (0,))):
        nodes = await explained(statement, *arguments)
        assert _rows_read(nodes) <= 220
        assert not any(node["Node Type"] == "Seq Scan" for node in nodes)


async def test_an_execution_with_many_rows_behind_a_waiting_head_costs_the_others_nothing(
    explained: Any, conn: asyncpg.Connection
) -> None:
    await _publish_many(conn, 5000)
    await insert(conn, 20_000, execution="500", event="n + 100000")
    await conn.execute(
        "UPDATE noetl.outbox SET available_at = now() + interval '1 hour' WHERE outbox_id ="
        " (SELECT min(outbox_id) FROM noetl.outbox WHERE status = 'PENDING')"
    )
    await insert(conn, 1000, execution="n % 100 + 450", event="n + 200000")
    await conn.execute("ANALYZE noetl.outbox")

    nodes = await explained("lock_heads", 100, 0, 464)
    assert _rows_read(nodes) <= 350  # walked, and locked
    assert _indexes(nodes) <= {"idx_outbox_undelivered", "outbox_pkey"}

    heads = await conn.fetch(
        "SELECT execution_id, min(outbox_id) AS head FROM noetl.outbox"
        " WHERE status = 'PENDING' AND execution_id <> 500 GROUP BY 1"
    )
    lanes = [head["execution_id"] for head in heads], [head["head"] for head in heads]
    nodes = await explained("claim_runs", *lanes, uuid4(), 1000, 20, MEGA, LEASE, True, False)
    assert _rows_read(nodes) <= 3300  # found, locked, changed
    assert _indexes(nodes) <= {"idx_outbox_undelivered", "outbox_pkey"}


async def test_rows_without_execution_are_found_behind_all_others(
    explained: Any, conn: asyncpg.Connection
) -> None:
    await insert(conn, 20_000)
    await insert(conn, 5000, execution="NULL", event="n + 200000")
    await conn.execute("ANALYZE noetl.outbox")

    nodes = await explained("claim_rows_without_execution", 100, MEGA, uuid4(), LEASE, True, 0, False)

    assert _rows_read(nodes) <= 250
    assert "idx_outbox_undelivered" in _indexes(nodes)


async def test_what_goes_back_with_a_failed_row_is_found_by_its_execution(
    explained: Any, conn: asyncpg.Connection
) -> None:
    token = uuid4()
    await insert(conn, 20_000, execution="n % 100 + 1")
    await conn.execute(
        "UPDATE noetl.outbox SET status = 'IN_FLIGHT', claim_token = $1, lease_expires_at = now() + interval '1 h'"
        " WHERE outbox_id <= 2000",
        token,
    )
    await conn.execute("ANALYZE noetl.outbox")

    nodes = await explained("release_younger", [7], [6], [token], [6])

    assert _rows_read(nodes) <= 400  # 200 rows of the execution, 20 of them are given back
    assert "idx_outbox_undelivered" in _indexes(nodes)


async def test_acknowledgements_go_by_the_primary_key(explained: Any, conn: asyncpg.Connection) -> None:
    token = uuid4()
    await _publish_many(conn)
    await insert(conn, 1000, event="n + 100000")
    # The planner then takes the index of leases for empty.
    await conn.execute("ANALYZE noetl.outbox")
    await conn.execute(
        "UPDATE noetl.outbox SET status = 'IN_FLIGHT', claim_token = $1, lease_expires_at = now()"
        " WHERE status = 'PENDING'",
        token,
    )
    ids = list(range(30_001, 30_101))

    for name, arguments in (
        ("mark_published", (ids, token)),
        ("mark_published_by_anyone", (ids,)),
        ("lock_for_failure", (ids,)),
        ("read_holders", (ids,)),
        ("extend_rows", (ids, token, LEASE)),
        ("release_rows", (ids, token)),
        ("abandon_rows", (ids, token, 20, "x")),
        ("fail_rows", (ids, ["x"] * 100, [1] * 100, [False] * 100)),
    ):
        nodes = await explained(name, *arguments)
        assert _indexes(nodes) == {"outbox_pkey"}, name
        assert _rows_read(nodes) <= 100, name
