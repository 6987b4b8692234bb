"""A server with tracing on, and what a collector gets of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from noetlpb.v1 import outbox_pb2, outbox_pb2_grpc, projection_pb2, replay_pb2, replay_pb2_grpc
from noetlpb.v1.projection_pb2_grpc import ProjectionServiceStub
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from noetl_grpc import NoetlClient, tracing
from noetl_grpc.server import Server, serving
from noetl_grpc.settings import Settings, TracingSettings
from noetl_grpc.spans import FAULTS
from noetl_grpc.storage.traced import name_of
from tests import leaks
from tests.collector import Collector, Kind, collecting
from tests.conftest import AUTHORIZATION, TOKEN
from tests.factories import EXECUTION_ID, add_catalog_entry, make_event
from tests.traces import TRACE, TRACEPARENT

StartServer = Callable[[Settings], Awaitable[Server]]

CLAIM = "noetlpb.v1.OutboxService/ClaimOutboxBatch"


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with collecting() as running:
        yield running


@pytest.fixture
def settings(settings: Settings, collector: Collector) -> Settings:
    """A server that is traced."""
    return replace(settings, tracing=TracingSettings(collector=collector.endpoint))


def under(traceparent: str) -> Any:
    return (*AUTHORIZATION, ("traceparent", traceparent))


async def claim(channel: grpc.aio.Channel, metadata: Any = AUTHORIZATION, **fields: Any) -> Any:
    stub = outbox_pb2_grpc.OutboxServiceStub(channel)
    return await stub.ClaimOutboxBatch(outbox_pb2.ClaimOutboxBatchRequest(**fields), metadata=metadata)


async def test_a_call_is_a_span_in_its_callers_trace(channel: grpc.aio.Channel, collector: Collector) -> None:
    await claim(channel, under(TRACEPARENT))

    span = await collector.wait("ClaimOutboxBatch")
    assert (span.name, span.kind, span.service) == (CLAIM, Kind.SPAN_KIND_SERVER, "noetl-grpc")
    assert f"00-{span.trace}-{span.parent}-01" == TRACEPARENT
    assert not span.failed
    assert span.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": CLAIM,
        "rpc.response.status_code": "OK",
    }


async def test_statements_are_children_by_their_name(
    channel: grpc.aio.Channel, collector: Collector, conn: asyncpg.Connection
) -> None:
    await add_catalog_entry(conn)
    request = projection_pb2.ProjectEventsRequest(
        events=[make_event(0, result_json=f'{{"status": "{leaks.PAYLOAD}"}}')]
    )
    await ProjectionServiceStub(channel).ProjectEvents(request, metadata=under(TRACEPARENT))

    call = await collector.wait("ProjectEvents")
    children = [span for span in collector.spans if span.parent == call.id]
    assert {span.name for span in children} >= {"BEGIN", "insert_events", "COMMIT"}
    assert {span.kind for span in children} == {Kind.SPAN_KIND_CLIENT}
    assert {span.trace for span in children} == {TRACE}
    insert = next(span for span in children if span.name == "insert_events")
    assert insert.attributes == {
        "db.system.name": "postgresql",
        "db.query.summary": "insert_events",
        "noetl.database": "0",
    }


async def test_a_statement_that_fails_says_so_without_its_text(
    channel: grpc.aio.Channel, collector: Collector, conn: asyncpg.Connection
) -> None:
    await add_catalog_entry(conn)
    await conn.execute("ALTER TABLE noetl.event ADD CONSTRAINT no_monday CHECK (event_type <> 'monday')")
    request = projection_pb2.ProjectEventsRequest(
        events=[make_event(0, event_type="monday", error=leaks.PAYLOAD)]
    )

    await ProjectionServiceStub(channel).ProjectEvents(request, metadata=AUTHORIZATION)

    failed = await collector.wait("insert_events", where=lambda span: span.failed)
    assert failed.attributes["error.type"] == "CheckViolationError"
    assert failed.attributes["db.response.status_code"] == "23514"


async def test_only_the_servers_own_faults_are_errors(
    channel: grpc.aio.Channel, collector: Collector, conn: asyncpg.Connection
) -> None:
    replay = replay_pb2_grpc.ReplayServiceStub(channel)
    for attempt in (
        claim(channel, limit=-1),
        claim(channel, (("authorization", "Bearer wrong"),)),
        replay.GetEvent(
            replay_pb2.GetEventRequest(execution_id=EXECUTION_ID, event_id=1), metadata=AUTHORIZATION
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await attempt
    await conn.execute("ALTER TABLE noetl.outbox RENAME TO gone")
    with pytest.raises(grpc.aio.AioRpcError):
        await claim(channel)

    found = {}
    for name, code, reason in (
        ("ClaimOutboxBatch", "INVALID_ARGUMENT", "FIELD_INVALID"),
        ("ClaimOutboxBatch", "UNAUTHENTICATED", "TOKEN_INVALID"),
        ("GetEvent", "NOT_FOUND", "EVENT_NOT_FOUND"),
        ("ClaimOutboxBatch", "INTERNAL", "INTERNAL"),
    ):
        span = await collector.wait(
            name, where=lambda span, code=code: span.attributes.get("rpc.response.status_code") == code
        )
        assert span.attributes["noetl.reason"] == reason
        found[code] = (span.failed, span.attributes.get("error.type"))
    assert found == {
        "INVALID_ARGUMENT": (False, None),
        "UNAUTHENTICATED": (False, None),
        "NOT_FOUND": (False, None),
        "INTERNAL": (True, "INTERNAL"),
    }


def test_which_codes_are_faults() -> None:
    assert {code.name for code in FAULTS} == {
        "UNKNOWN",
        "DEADLINE_EXCEEDED",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
    }


async def test_a_stream_is_one_span_that_ends_with_it(
    channel: grpc.aio.Channel, collector: Collector, conn: asyncpg.Connection
) -> None:
    await add_catalog_entry(conn)
    await ProjectionServiceStub(channel).ProjectEvents(
        projection_pb2.ProjectEventsRequest(events=[make_event(0)]), metadata=AUTHORIZATION
    )
    request = replay_pb2.StreamEventsRequest(execution_id=EXECUTION_ID, follow=True)
    stream = replay_pb2_grpc.ReplayServiceStub(channel).StreamEvents(request, metadata=under(TRACEPARENT))
    await stream.read()

    assert not collector.named("StreamEvents")
    stream.cancel()

    span = await collector.wait("StreamEvents")
    assert (span.trace, span.attributes["rpc.response.status_code"]) == (TRACE, "CANCELLED")
    assert not span.failed
    assert any(one.parent == span.id for one in collector.spans)


async def test_probes_and_our_own_polling_make_no_spans(
    channel: grpc.aio.Channel, collector: Collector
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    await health.Check(health_pb2.HealthCheckRequest())
    await claim(channel, wait=Duration(nanos=50_000_000))

    call = await collector.wait("ClaimOutboxBatch")

    assert not [span for span in collector.spans if "Health" in span.name]
    assert {span.trace for span in collector.spans} == {call.trace}


@pytest.mark.parametrize("sent", ["nonsense", f"ff{TRACEPARENT[2:]}", f"00-{'0' * 32}-b7ad6b7169203331-01"])
async def test_a_malformed_traceparent_begins_a_trace_of_its_own(
    channel: grpc.aio.Channel, collector: Collector, sent: str
) -> None:
    await claim(channel, under(sent))

    span = await collector.wait("ClaimOutboxBatch")
    assert span.parent == ""
    assert span.trace not in ("0" * 32, TRACE)


async def test_what_a_caller_does_not_record_is_not_recorded(
    channel: grpc.aio.Channel, collector: Collector
) -> None:
    await claim(channel, under(TRACEPARENT.removesuffix("01") + "00"))
    await claim(channel)

    span = await collector.wait("ClaimOutboxBatch")
    assert span.parent == ""
    assert TRACE not in {one.trace for one in collector.spans}


async def test_what_a_call_stores_goes_on_from_its_span(
    channel: grpc.aio.Channel, collector: Collector, conn: asyncpg.Connection
) -> None:
    stub = outbox_pb2_grpc.OutboxServiceStub(channel)
    for number, metadata in enumerate((under(TRACEPARENT), AUTHORIZATION), 1):
        message = outbox_pb2.OutboxMessage(event_id=number, payload_json=f'"{leaks.PAYLOAD}"')
        await stub.EnqueueOutbox(outbox_pb2.EnqueueOutboxRequest(messages=[message]), metadata=metadata)

    span = await collector.wait("EnqueueOutbox", where=lambda span: span.trace == TRACE)
    rows = await conn.fetch("SELECT headers ->> 'traceparent' AS trace FROM noetl.outbox ORDER BY event_id")
    # A caller without a trace adds nothing to what is stored.
    assert [row["trace"] for row in rows] == [f"00-{TRACE}-{span.id}-01", None]


async def test_the_typed_client_sends_the_trace_that_it_is_called_in(
    server: Server, collector: Collector
) -> None:
    inside = NonRecordingSpan(
        SpanContext(int(TRACE, 16), 0xB7AD6B7169203331, is_remote=False, trace_flags=TraceFlags(1))
    )
    async with NoetlClient(server.address, token=TOKEN) as client:
        with trace.use_span(inside):
            await client.outbox.stats()
        await client.operations.server_info()

    assert (await collector.wait("GetOutboxStats")).trace == TRACE
    assert (await collector.wait("GetServerInfo")).parent == ""


async def test_without_a_collector_calls_are_served_and_the_end_comes_soon(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.5)
    # Nobody listens on port 1, and nothing is answered within the bound.
    away = replace(settings, tracing=TracingSettings(collector="http://127.0.0.1:1"))
    async with (
        serving(away) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        asyncio.timeout(10),
    ):
        for _ in range(20):
            await claim(channel)
        began = time.monotonic()

    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("BEGIN;", "BEGIN"),
        ("set local statement_timeout = 5", "SET"),
        ("-- a comment", "statement"),
        ("", "statement"),
    ],
)
def test_statements_without_a_name_are_called_by_their_first_word(statement: str, name: str) -> None:
    assert name_of(statement) == name
