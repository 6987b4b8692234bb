"""The ways that `noetl-grpc bench outbox` and `bench order` compare do the same work."""

from __future__ import annotations

from collections.abc import Callable

import asyncpg
import pytest

from noetl_grpc.benches import outbox
from noetl_grpc.server import Server
from tests.conftest import TOKEN


@pytest.mark.parametrize("way", [outbox.SeedSql, outbox.OurSql])
async def test_statements_called_directly_publish_what_they_claim(
    database_url: str, conn: asyncpg.Connection, way: Callable[[asyncpg.Connection], outbox.Way]
) -> None:
    await outbox.fill(database_url, pending=200, published=50)

    async with outbox.directly(database_url, 2, way) as ways:
        assert await outbox.rate(ways, limit=30, rows=200) > 0

    assert await conn.fetchval("SELECT count(*) FROM noetl.outbox WHERE status = 'PUBLISHED'") == 250


@pytest.mark.parametrize(("ordered", "failing"), [(False, 0.0), (True, 0.0), (True, 0.1)])
async def test_claimers_through_grpc_publish_what_does_not_fail(
    database_url: str,
    conn: asyncpg.Connection,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    ordered: bool,
    failing: float,
) -> None:
    monkeypatch.setattr(outbox, "METADATA", (("authorization", f"Bearer {TOKEN}"),))
    await outbox.fill(database_url, pending=200, executions=20)

    async with outbox.through_grpc(server.address, 3, ordered=ordered, failing=failing) as ways:
        assert await outbox.rate(ways, limit=30, rows=100 if failing else 200) > 0

    published, failed = await conn.fetchrow(
        "SELECT count(*) FILTER (WHERE status = 'PUBLISHED'), count(*) FILTER (WHERE last_error IS NOT NULL)"
        " FROM noetl.outbox"
    )
    assert published >= (100 if failing else 200)
    assert bool(failed) is bool(failing)
