"""A caller's `traceparent` goes along with what it stores, with or without OpenTelemetry, and changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import outbox_pb2, outbox_pb2_grpc, projection_pb2, projection_pb2_grpc, replay_pb2
from noetlpb.v1 import replay_pb2_grpc as replay_rpc

from tests.conftest import AUTHORIZATION
from tests.factories import EXECUTION_ID, add_catalog_entry, make_event, make_native
from tests.traces import MALFORMED, OTHER_TRACEPARENT, TRACEPARENT

#: Those that gRPC lets through as metadata.
SENDABLE = [text for text in MALFORMED if text.isascii() and text.strip() == text]


def under(traceparent: str) -> Any:
    """The metadata of a caller inside a trace."""
    return (*AUTHORIZATION, ("traceparent", traceparent))


@pytest.fixture
async def project(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> Any:
    await add_catalog_entry(conn)
    stub = projection_pb2_grpc.ProjectionServiceStub(channel)

    async def send(*events: Any, metadata: Any = AUTHORIZATION, **options: Any) -> Any:
        request = projection_pb2.ProjectEventsRequest(events=events, **options)
        return await stub.ProjectEvents(request, metadata=metadata, timeout=15)

    return send


async def headers_of_rows(conn: asyncpg.Connection) -> list[Any]:
    rows = await conn.fetch("SELECT headers FROM noetl.outbox ORDER BY event_id")
    return [row["headers"] and json.loads(row["headers"]) for row in rows]


async def components(conn: asyncpg.Connection) -> list[Any]:
    rows = await conn.fetch("SELECT trace_component FROM noetl.event ORDER BY event_id")
    return [row["trace_component"] and json.loads(row["trace_component"]) for row in rows]


async def enqueue(channel: grpc.aio.Channel, metadata: Any, *headers: dict[str, str]) -> None:
    messages = [
        outbox_pb2.OutboxMessage(event_id=number, payload_json="{}", headers=own)
        for number, own in enumerate(headers, 1)
    ]
    stub = outbox_pb2_grpc.OutboxServiceStub(channel)
    await stub.EnqueueOutbox(outbox_pb2.EnqueueOutboxRequest(messages=messages), metadata=metadata)


async def test_enqueued_messages_carry_the_callers_trace_unless_they_have_one(
    channel: grpc.aio.Channel, conn: asyncpg.Connection
) -> None:
    own = {"Traceparent": OTHER_TRACEPARENT}

    await enqueue(channel, under(TRACEPARENT), {}, {"k": "v"}, own)

    assert await headers_of_rows(conn) == [
        {"traceparent": TRACEPARENT},
        {"k": "v", "traceparent": TRACEPARENT},
        own,
    ]
    claim = await outbox_pb2_grpc.OutboxServiceStub(channel).ClaimOutboxBatch(
        outbox_pb2.ClaimOutboxBatchRequest(), metadata=AUTHORIZATION
    )
    assert claim.rows[0].headers["traceparent"] == TRACEPARENT


async def test_a_malformed_traceparent_is_as_good_as_none(
    channel: grpc.aio.Channel, conn: asyncpg.Connection, project: Any
) -> None:
    for index, sent in enumerate(SENDABLE):
        await enqueue(channel, under(sent), {})
        await project(make_event(index), metadata=under(sent))

    assert await headers_of_rows(conn) == [None]
    assert await components(conn) == [None] * len(SENDABLE)


async def test_events_note_the_callers_trace_unless_they_name_one(
    conn: asyncpg.Connection, project: Any
) -> None:
    await project(
        make_event(0),
        make_event(1, trace_component_json='{"span": "x"}'),
        make_event(2, meta_json=json.dumps({"traceparent": OTHER_TRACEPARENT})),
        make_event(3, meta_json='{"traceparent": "nonsense"}'),
        metadata=under(TRACEPARENT),
        enqueue={},
    )

    assert await components(conn) == [{"traceparent": TRACEPARENT}, {"span": "x"}, None, None]
    assert await headers_of_rows(conn) == [
        {"traceparent": TRACEPARENT},
        {"traceparent": TRACEPARENT},
        {"traceparent": OTHER_TRACEPARENT},
        {"traceparent": TRACEPARENT},
    ]


async def test_materialized_events_note_it_too(
    channel: grpc.aio.Channel, conn: asyncpg.Connection, project: Any
) -> None:
    stub = projection_pb2_grpc.ProjectionServiceStub(channel)
    await project(make_event(0))
    request = projection_pb2.MaterializeEventsRequest(events=[make_native(1)])

    await stub.MaterializeEvents(request, metadata=under(TRACEPARENT))

    assert await components(conn) == [None, {"traceparent": TRACEPARENT}]


async def test_a_repeat_under_another_trace_is_no_conflict(conn: asyncpg.Connection, project: Any) -> None:
    await project(make_event(0), metadata=under(TRACEPARENT))
    await project(make_event(1))

    answers = [
        await project(make_event(0), make_event(1), make_event(1), metadata=metadata)
        for metadata in (under(TRACEPARENT), under(OTHER_TRACEPARENT), AUTHORIZATION)
    ]

    assert [(answer.duplicates, list(answer.conflicts)) for answer in answers] == [(3, [])] * 3
    assert await components(conn) == [{"traceparent": TRACEPARENT}, None]


async def test_tracing_details_that_a_writer_gives_are_content(
    conn: asyncpg.Connection, project: Any
) -> None:
    await project(
        make_event(0, trace_component_json='{"span": "x"}'), make_event(1), metadata=under(TRACEPARENT)
    )

    answer = await project(
        make_event(0),
        make_event(0, trace_component_json='{"span": "y"}'),
        make_event(1, trace_component_json='{"span": "x"}'),
        make_event(1, trace_component_json="[]"),
        make_event(1, trace_component_json=json.dumps({"traceparent": TRACEPARENT})),
        metadata=under(TRACEPARENT),
    )

    assert [conflict.index for conflict in answer.conflicts] == [0, 1, 2, 3]


async def test_a_trace_changes_no_checksum(channel: grpc.aio.Channel, project: Any) -> None:
    later = EXECUTION_ID + 1
    await project(make_event(0), make_event(1))
    await project(*(make_event(index, execution_id=later) for index in range(2)), metadata=under(TRACEPARENT))
    stub = replay_rpc.ReplayServiceStub(channel)

    states = [
        (
            await stub.ReplayState(
                replay_pb2.ReplayStateRequest(execution_id=execution_id, include_canonical_json=True),
                metadata=AUTHORIZATION,
            )
        ).state.canonical_json
        for execution_id in (EXECUTION_ID, later)
    ]

    assert states[0]
    assert states[0].replace(str(EXECUTION_ID), str(later)) == states[1]
