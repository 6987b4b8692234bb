"""Parked events on a real database: listed in pages, tried again, resolved."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc

from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.conftest import AUTHORIZATION, settings_for
from tests.factories import CATALOG_ID, EVENT_ID, EXECUTION_ID, add_catalog_entry, make_event, make_native

Stub = projection_pb2_grpc.ProjectionServiceStub
StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]
NewDatabase = Callable[[], Awaitable[str]]


@pytest.fixture
async def stub(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> Stub:
    await add_catalog_entry(conn)
    return projection_pb2_grpc.ProjectionServiceStub(channel)


async def list_dead(stub: Stub, **fields: Any) -> pb.ListDeadEventsResponse:
    return await stub.ListDeadEvents(pb.ListDeadEventsRequest(**fields), metadata=AUTHORIZATION, timeout=15)


async def retry(stub: Stub, *keys: tuple[int, int], everything: bool = False) -> pb.RetryDeadEventsResponse:
    request = pb.RetryDeadEventsRequest(
        keys=[pb.EventKey(execution_id=key[0], event_id=key[1]) for key in keys], all=everything
    )
    return await stub.RetryDeadEvents(request, metadata=AUTHORIZATION, timeout=15)


async def project(stub: Stub, *events: Any) -> pb.ProjectEventsResponse:
    return await stub.ProjectEvents(
        pb.ProjectEventsRequest(events=events), metadata=AUTHORIZATION, timeout=15
    )


def figures(answer: pb.RetryDeadEventsResponse) -> tuple[int, int, list[str]]:
    return answer.stored, answer.duplicates, [failed.reason for failed in answer.failed]


async def test_parked_events_are_listed_without_their_payload_unless_asked(stub: Stub) -> None:
    await project(
        stub, make_event(1, catalog_id=404, event_type="t", node_name="n"), make_event(2, result_json="7")
    )

    answer = await list_dead(stub)
    full = await list_dead(stub, include_payload=True)

    first, second = answer.events
    assert (first.execution_id, first.event_id, first.catalog_id) == (EXECUTION_ID, EVENT_ID + 1, 404)
    assert (first.event_type, first.node_name, first.parked_by) == ("t", "n", "project")
    assert (first.reason, first.attempts) == ("CATALOG_UNKNOWN", 1)
    assert first.last_error == "catalog_id 404 names no catalog entry"
    assert first.parked_at.seconds > 0
    assert second.reason == "RESULT_SHAPE"
    assert not first.HasField("payload_json")
    assert json.loads(full.events[0].payload_json)["event_type"] == "t"
    assert json.loads(full.events[1].payload_json)["result_json"] == "7"


async def test_pages_go_on_where_the_last_one_ended(stub: Stub) -> None:
    await project(stub, *(make_event(index, catalog_id=404) for index in range(25)))

    seen: list[int] = []
    token = ""
    for _ in range(3):
        page = await list_dead(stub, page_size=10, page_token=token)
        seen += [event.event_id for event in page.events]
        token = page.next_page_token

    assert seen == [EVENT_ID + index for index in range(25)]
    assert token == ""


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"page_size": -1}, "page_size must not be negative"),
        ({"page_token": "?"}, "page_token is not a next_page_token"),
    ],
)
async def test_a_page_that_can_not_be_is_refused(stub: Stub, fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rule) as failure:
        await list_dead(stub, **fields)

    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_token_with_other_filters_is_refused(stub: Stub) -> None:
    await project(stub, make_event(1, catalog_id=404), make_event(2, catalog_id=404))
    page = await list_dead(stub, page_size=1)

    with pytest.raises(grpc.aio.AioRpcError, match="page_token"):
        await list_dead(stub, page_token=page.next_page_token, include_payload=True)


async def test_after_the_cause_is_mended_a_retry_stores_and_resolves(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    moment = Timestamp(seconds=1_800_000_000, nanos=123_000)
    await project(
        stub,
        make_event(1, catalog_id=404, timestamp=moment, meta_json='{"a": 1.50}', error=""),
        make_event(2, result_json='{"rows": 3}'),
        make_event(3, catalog_id=405),
    )
    assert figures(await retry(stub, everything=True)) == (
        0,
        0,
        ["CATALOG_UNKNOWN", "RESULT_SHAPE", "CATALOG_UNKNOWN"],
    )

    await add_catalog_entry(conn, 404)
    await conn.execute(
        """
        UPDATE noetl.event_dead_letter
        SET payload = payload || '{"result_json": "{\\"status\\": \\"ok\\"}"}'
        WHERE reason = 'RESULT_SHAPE'
        """
    )
    answer = await retry(stub, everything=True)

    assert figures(answer) == (2, 0, ["CATALOG_UNKNOWN"])
    assert (answer.failed[0].execution_id, answer.failed[0].event_id) == (EXECUTION_ID, EVENT_ID + 3)
    assert answer.failed[0].detail == "catalog_id 405 names no catalog entry"
    rows = await conn.fetch("SELECT * FROM noetl.event ORDER BY event_id")
    assert [(row["event_id"] - EVENT_ID, row["catalog_id"]) for row in rows] == [(1, 404), (2, CATALOG_ID)]
    assert rows[0]["created_at"].isoformat() == "2027-01-15T08:00:00.000123"
    assert (rows[0]["meta"], rows[0]["error"]) == ('{"a": 1.50}', "")
    [left] = (await list_dead(stub)).events
    assert (left.event_id, left.attempts) == (EVENT_ID + 3, 3)


async def test_a_retry_by_key_is_idempotent_and_names_what_is_not_parked(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await project(stub, *(make_event(index, catalog_id=404) for index in range(3)))
    await add_catalog_entry(conn, 404)
    keys = [(EXECUTION_ID, EVENT_ID), (EXECUTION_ID, EVENT_ID + 1)]

    first = await retry(stub, *keys, (EXECUTION_ID, EVENT_ID + 77), keys[0])
    again = await retry(stub, *keys)

    assert figures(first) == (2, 0, ["EVENT_NOT_FOUND"])
    assert first.failed[0].event_id == EVENT_ID + 77
    assert figures(again) == (0, 2, [])
    assert [event.event_id for event in (await list_dead(stub)).events] == [EVENT_ID + 2]


async def test_an_event_that_was_sent_again_in_good_order_is_a_duplicate(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await project(stub, make_event(1, result_json="7"))
    await project(stub, make_event(1))
    await conn.execute("UPDATE noetl.event_dead_letter SET payload = payload - 'result_json'")

    assert figures(await retry(stub, everything=True)) == (0, 1, [])
    assert not (await list_dead(stub)).events


async def test_events_that_the_tailer_parked_are_left_to_it(conn: asyncpg.Connection, stub: Stub) -> None:
    await project(stub, make_event(1))
    await conn.execute(
        """
        INSERT INTO noetl.event_dead_letter (execution_id, event_id, reason, payload, parked_by)
        VALUES ($1, $2, 'PUBLISH_REFUSED', '{}', 'tailer')
        """,
        EXECUTION_ID,
        EVENT_ID + 1,
    )

    everything = await retry(stub, everything=True)
    one = await retry(stub, (EXECUTION_ID, EVENT_ID + 1))
    await project(stub, make_event(1, result_json="7"))

    assert figures(everything) == (0, 0, [])
    assert figures(one) == (0, 0, ["EVENT_NOT_FOUND"])
    assert "ReconcileStream" in one.failed[0].detail
    [event] = (await list_dead(stub)).events
    assert (event.parked_by, event.attempts, event.reason) == ("tailer", 1, "PUBLISH_REFUSED")


async def test_what_noetls_own_servers_parked_is_understood(conn: asyncpg.Connection, stub: Stub) -> None:
    payload = {
        "execution_id": str(EXECUTION_ID),
        "event_id": EVENT_ID + 1,
        "catalog_id": CATALOG_ID,
        "event_type": "command.completed",
        "result": {"status": "ok", "context": {"n": 1}},
        "meta": {"a": [1]},
        "created_at": "2026-11-18 07:00:00.5",
        "event_time": "2026-11-18T09:00:00+02:00",
        "something_else": {"b": 2},
    }
    await conn.execute(
        """
        INSERT INTO noetl.event_dead_letter (execution_id, event_id, reason, payload, parked_by)
        VALUES ($1, $2, 'fk', $3, 'events_materialize'), ($1, $2 + 1, 'fk', '[1]', NULL)
        """,
        EXECUTION_ID,
        EVENT_ID + 1,
        json.dumps(payload),
    )

    answer = await retry(stub, everything=True)

    assert figures(answer) == (1, 0, ["FIELD_INVALID"])
    row = await conn.fetchrow("SELECT * FROM noetl.event")
    assert json.loads(row["result"]) == payload["result"]
    assert json.loads(row["meta"]) == payload["meta"]
    assert row["created_at"].isoformat() == "2026-11-18T07:00:00.500000"
    assert row["event_time"].isoformat() == "2026-11-18T07:00:00+00:00"


async def test_a_workers_event_is_normalised_when_it_is_tried_again(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await project(stub, make_event(0))
    request = pb.MaterializeEventsRequest(events=[make_native(1, payload_json="{")], tenant_id="acme")
    await stub.MaterializeEvents(request, metadata=AUTHORIZATION, timeout=15)
    await conn.execute(
        """UPDATE noetl.event_dead_letter
        SET payload = jsonb_set(payload, '{native_event,payload_json}', to_jsonb('{"token": "abc"}'::text))"""
    )

    assert figures(await retry(stub, everything=True)) == (1, 0, [])

    row = await conn.fetchrow("SELECT * FROM noetl.event WHERE event_id = $1", EVENT_ID + 1)
    assert json.loads(row["result"])["context"] == {"token": "[REDACTED]"}
    assert (row["tenant_id"], row["node_name"], row["catalog_id"]) == ("acme", "fetch", CATALOG_ID)


async def test_texts_that_jsonb_can_not_hold_are_parked_whole(conn: asyncpg.Connection, stub: Stub) -> None:
    bad = make_event(1, node_name="a\0b", timestamp=Timestamp(seconds=2**60, nanos=-7), duration=float("nan"))
    await project(stub, bad)

    [event] = (await list_dead(stub, include_payload=True)).events

    assert event.node_name == "a␀b"
    payload = json.loads(event.payload_json)
    assert payload["timestamp"] == {"seconds": 2**60, "nanos": -7}
    assert type(bad).FromString(base64.b64decode(payload["protobuf_base64"])) == bad
    assert figures(await retry(stub, everything=True)) == (0, 0, ["TIME_INVALID"])


async def test_two_retries_at_once_share_the_work(conn: asyncpg.Connection, stub: Stub) -> None:
    await project(stub, *(make_event(index, catalog_id=404) for index in range(1200)))
    await add_catalog_entry(conn, 404)

    answers = await asyncio.gather(*(retry(stub, everything=True) for _ in range(4)))

    assert sum(answer.stored for answer in answers) == 1200
    assert not any(answer.failed for answer in answers)
    assert await conn.fetchval("SELECT count(*) FROM noetl.event") == 1200
    assert await conn.fetchval("SELECT max(attempts) FROM noetl.event_dead_letter") == 2


@pytest.mark.parametrize(
    ("keys", "everything"), [([], False), ([(1, 1)], True), ([(0, 1)], False), ([(1, -1)], False)]
)
async def test_a_retry_says_what_it_wants(stub: Stub, keys: list[tuple[int, int]], everything: bool) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="keys") as failure:
        await retry(stub, *keys, everything=everything)

    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_lists_and_retries_cover_every_shard(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    urls = [await new_database() for _ in range(2)]
    server = await start_server(settings_for(*urls))
    stub = projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address))
    await project(stub, *(make_event(index, execution_id=EXECUTION_ID + index) for index in range(20)))

    seen: list[int] = []
    token = ""
    while True:
        page = await list_dead(stub, page_size=3, page_token=token)
        seen += [event.event_id for event in page.events]
        if not (token := page.next_page_token):
            break
    assert sorted(seen) == [EVENT_ID + index for index in range(20)]
    assert seen != sorted(seen)

    cluster = await asyncpg.connect(urls[0])
    await add_catalog_entry(cluster)
    await cluster.close()
    assert figures(await retry(stub, everything=True)) == (20, 0, [])
    assert not (await list_dead(stub)).events
