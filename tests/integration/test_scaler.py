"""KEDA's external scaler against real tables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import grpc
import orjson
import pytest
from externalscaler import externalscaler_pb2 as pb
from externalscaler import externalscaler_pb2_grpc as rpc

from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from noetl_grpc.storage import scaler
from noetl_grpc.storage.queries import queries
from tests.conftest import AUTHORIZATION, settings_for
from tests.rpcs import info_of

_IDS = "(SELECT coalesce(max(event_id), 0) FROM noetl.outbox)"


async def add_rows(
    conn: asyncpg.Connection,
    count: int,
    *,
    status: str = "PENDING",
    available: str = "now()",
    lease: str = "NULL",
    dead: bool = False,
) -> None:
    """Rows of one kind behind all that are there."""
    await conn.execute(
        f"""
        INSERT INTO noetl.outbox (event_id, payload, status, available_at, lease_expires_at, dead_at)
        SELECT {_IDS} + n, '{{}}', $2, {available}, {lease}, CASE WHEN $3 THEN now() END
        FROM generate_series(1, $1::int) AS n
        """,
        count,
        status,
        dead,
    )


def ref(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="publisher", namespace="noetl", scalerMetadata=metadata)


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return rpc.ExternalScalerStub(channel)


async def _value(stub: Any, **metadata: str) -> float:
    answer = await stub.GetMetrics(
        pb.GetMetricsRequest(scaledObjectRef=ref(**metadata)), metadata=AUTHORIZATION
    )
    (value,) = answer.metricValues
    assert value.metricName == metadata.get("metric", "outbox_pending")
    assert 0 <= value.metricValue - value.metricValueFloat < 1
    return float(value.metricValueFloat)


async def test_rows_that_a_claim_would_get_are_counted(conn: asyncpg.Connection) -> None:
    await add_rows(conn, 1, status="PENDING")
    await add_rows(conn, 2, status="FAILED")
    await add_rows(conn, 4, status="IN_FLIGHT", lease="now() - interval '1 second'")
    await add_rows(conn, 8, status="IN_FLIGHT", lease="now() + interval '1 minute'")
    await add_rows(conn, 16, status="PENDING", available="now() + interval '1 minute'")
    await add_rows(conn, 32, status="FAILED", available="'infinity'", dead=True)
    await add_rows(conn, 64, status="PUBLISHED")

    waiting = await scaler.count_waiting(conn, rows_max=1000)

    assert waiting.rows == 1 + 2 + 4


async def test_counting_ends_at_the_bound(conn: asyncpg.Connection) -> None:
    await add_rows(conn, 30)
    await add_rows(conn, 30, status="IN_FLIGHT", lease="now() - interval '1 second'")

    assert (await scaler.count_waiting(conn, rows_max=10)).rows == 10
    assert (await scaler.count_waiting(conn, rows_max=60)).rows == 60


async def test_due_rows_behind_many_that_are_not_due_are_found(conn: asyncpg.Connection) -> None:
    await add_rows(conn, 50, status="FAILED", available="now() + interval '1 minute'")
    await add_rows(conn, 7)

    assert (await scaler.count_waiting(conn, rows_max=20)).rows == 7


async def test_due_rows_among_more_than_was_looked_at_still_keep_a_publisher(
    conn: asyncpg.Connection,
) -> None:
    await add_rows(conn, 50, status="FAILED", available="now() + interval '1 minute'")
    await add_rows(conn, 3)
    await add_rows(conn, 50, status="FAILED", available="now() + interval '1 minute'")

    assert (await scaler.count_waiting(conn, rows_max=20)).rows == 1


async def test_the_oldest_row_is_the_one_that_waits_longest(conn: asyncpg.Connection) -> None:
    assert (await scaler.count_waiting(conn, rows_max=10)).oldest_seconds == 0

    await add_rows(conn, 1, available="now() - interval '30 seconds'")
    assert 30 <= (await scaler.count_waiting(conn, rows_max=10)).oldest_seconds < 40

    await add_rows(conn, 1, status="IN_FLIGHT", lease="now() - interval '90 seconds'")
    assert 90 <= (await scaler.count_waiting(conn, rows_max=10)).oldest_seconds < 100


async def test_the_count_reads_bounded_parts_of_its_indexes(conn: asyncpg.Connection) -> None:
    await add_rows(conn, 20_000, status="PUBLISHED")
    await add_rows(conn, 20_000)
    await add_rows(conn, 20_000, status="IN_FLIGHT", lease="now() - interval '1 second'")
    await conn.execute("ANALYZE noetl.outbox")
    await conn.execute("PREPARE counting AS " + queries["count_waiting"])
    await conn.execute("SET plan_cache_mode = force_generic_plan")

    explained = await conn.fetchval("EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE counting(1000)")

    scans = list(_scans(orjson.loads(explained)[0]["Plan"]))
    assert {scan["Index Name"] for scan in scans} == {"idx_outbox_claimable", "idx_outbox_leased"}
    for scan in scans:
        assert scan["Actual Rows"] <= 1000, scan
        assert scan.get("Rows Removed by Filter", 0) == 0, scan


def _scans(plan: dict[str, Any]) -> Any:
    if plan.get("Relation Name") == "outbox":
        yield plan
    for child in plan.get("Plans", ()):
        yield from _scans(child)


async def test_spec_and_value_of_each_metric(stub: Any, conn: asyncpg.Connection) -> None:
    await add_rows(conn, 3, available="now() - interval '10 seconds'")

    spec = await stub.GetMetricSpec(ref(metric="outbox_oldest_seconds", target="2.5"), metadata=AUTHORIZATION)

    (one,) = spec.metricSpecs
    assert (one.metricName, one.targetSize, one.targetSizeFloat) == ("outbox_oldest_seconds", 3, 2.5)
    assert await _value(stub) == 3
    assert 10 <= await _value(stub, metric="outbox_oldest_seconds", target="2.5") < 20
    assert await _value(stub, metric="tailer_lag_events") == 0
    assert (await stub.IsActive(ref(), metadata=AUTHORIZATION)).result is True
    assert (await stub.IsActive(ref(metric="tailer_lag_events"), metadata=AUTHORIZATION)).result is False


async def test_every_rpc_refuses_an_unknown_metric_and_a_name_it_did_not_give(stub: Any) -> None:
    wrong = ref(metric="sunshine")
    for call in (
        stub.IsActive(wrong, metadata=AUTHORIZATION),
        stub.GetMetricSpec(wrong, metadata=AUTHORIZATION),
        stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=wrong), metadata=AUTHORIZATION),
        stub.GetMetrics(
            pb.GetMetricsRequest(scaledObjectRef=ref(), metricName="sunshine"), metadata=AUTHORIZATION
        ),
        stub.StreamIsActive(wrong, metadata=AUTHORIZATION).read(),
        stub.StreamMetricSpec(wrong, metadata=AUTHORIZATION).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert info_of(raised.value)[1]["field"] in ("scalerMetadata.metric", "metricName")


async def test_a_stream_tells_the_present_and_then_each_change(stub: Any, conn: asyncpg.Connection) -> None:
    stream = stub.StreamIsActive(ref(), metadata=AUTHORIZATION)
    async with asyncio.timeout(10):
        assert (await stream.read()).result is False

        await add_rows(conn, 1)
        assert (await stream.read()).result is True

        await conn.execute("UPDATE noetl.outbox SET status = 'PUBLISHED'")
        assert (await stream.read()).result is False


async def test_the_stream_of_specs_says_the_same_and_stays_open(stub: Any) -> None:
    chosen = ref(metric="outbox_pending", target="7")
    stream = stub.StreamMetricSpec(chosen, metadata=AUTHORIZATION, timeout=1)

    assert await stream.read() == await stub.GetMetricSpec(chosen, metadata=AUTHORIZATION)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stream.read()
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_shards_are_added_up_and_one_out_of_reach_fails_the_answer(
    new_database: Callable[[], Awaitable[str]],
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    urls = [await new_database(), await new_database()]
    server = await start_server(settings_for(*urls))
    stub = rpc.ExternalScalerStub(await channel_to(server.address))
    for url, count in zip(urls, (2, 3), strict=True):
        conn = await asyncpg.connect(url)
        await add_rows(conn, count)
        await conn.close()

    assert await _value(stub) == 5

    admin = await asyncpg.connect(urls[0])
    name = urls[1].partition("?")[0].rpartition("/")[2]
    try:
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
    finally:
        await admin.close()

    async def ask_until_it_fails() -> None:
        async with asyncio.timeout(10):
            while True:  # what was found a moment ago may still be told
                await _value(stub)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask_until_it_fails()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
