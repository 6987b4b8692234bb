"""Gauges that are read from elsewhere: the database, and the pools."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.request import urlopen

import asyncpg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from noetl_grpc.core.outbox import Stats
from noetl_grpc.errors import DatabaseUnavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.server import Server
from noetl_grpc.services.outbox_gauges import OutboxGauges
from noetl_grpc.settings import Settings
from tests.integration.test_scaler import add_rows


async def _scrape(server: Server, name: str) -> dict[tuple[str, ...], float]:
    def read() -> str:
        with urlopen(server.metrics_url, timeout=5) as answer:
            return str(answer.read().decode())

    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(read))
        for sample in family.samples
        if sample.name == name
    }


async def test_rows_and_connections_are_scraped(
    settings: Settings,
    start_server: Callable[[Settings], Awaitable[Server]],
    conn: asyncpg.Connection,
) -> None:
    await add_rows(conn, 3, available="now() - interval '1 minute'")
    await add_rows(conn, 2, status="FAILED", available="'infinity'", dead=True)
    server = await start_server(replace(settings, metrics_address=("127.0.0.1", 0)))

    async with asyncio.timeout(10):
        rows: dict[tuple[str, ...], float] = {}
        while rows.get(("pending",)) != 3:  # the first look is under way
            rows = await _scrape(server, "noetl_outbox_rows")

    assert rows == {("pending",): 3, ("delayed",): 0, ("in_flight",): 0, ("expired",): 0, ("dead",): 2}
    (oldest,) = (await _scrape(server, "noetl_outbox_oldest_pending_seconds")).values()
    assert 60 <= oldest < 120
    connections = await _scrape(server, "noetl_pool_connections")
    assert connections["0", "idle"] + connections["0", "used"] > 0
    assert connections["cluster", "idle"] == 0  # the same pool as that of the only shard


async def test_while_the_count_fails_the_gauges_stay() -> None:
    metrics = Metrics()
    answers = [Stats(pending=4), DatabaseUnavailable("away")]

    async def stats() -> Stats:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    gauges = OutboxGauges(stats, metrics)
    await gauges.look()
    with pytest.raises(DatabaseUnavailable):
        await gauges.look()

    assert metrics.registry.get_sample_value("noetl_outbox_rows", {"state": "pending"}) == 4
