"""MaterializeEvents on a real database: normalised, idempotent in every cut, safe from two connections at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2, projection_pb2_grpc
from noetlpb.v1 import projection_pb2 as pb

from noetl_grpc.core.snowflake import time_of
from noetl_grpc.server import Server
from tests.conftest import AUTHORIZATION
from tests.factories import CATALOG_ID, EVENT_ID, EXECUTION_ID, add_catalog_entry, make_native

Stub = projection_pb2_grpc.ProjectionServiceStub
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def stub(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> Stub:
    """A stub, and an execution whose catalog entry is known."""
    await add_catalog_entry(conn)
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type)
        SELECT $1::bigint + n, 1, $2, 'playbook.initialized' FROM generate_series(0, 9) AS n
        """,
        EXECUTION_ID,
        CATALOG_ID,
    )
    return projection_pb2_grpc.ProjectionServiceStub(channel)


async def materialize(
    stub: Stub, *events: event_pb2.NativeEvent, **fields: Any
) -> pb.MaterializeEventsResponse:
    request = pb.MaterializeEventsRequest(events=events, **fields)
    return await stub.MaterializeEvents(request, metadata=AUTHORIZATION, timeout=15)


def figures(answer: pb.MaterializeEventsResponse) -> tuple[int, int, int]:
    return answer.materialized, answer.duplicates, len(answer.rejected)


async def written(conn: asyncpg.Connection) -> list[asyncpg.Record]:
    return await conn.fetch("SELECT * FROM noetl.event WHERE event_id > 1 ORDER BY execution_id, event_id")


async def test_a_workers_event_is_stored_as_the_rules_say(conn: asyncpg.Connection, stub: Stub) -> None:
    answer = await materialize(
        stub,
        make_native(
            step="fetch",
            event_type="command.failed",
            payload_json='{"rows": 3, "password": "s3cret", "author": "me"}',
            meta_json='{"attempt": 2, "access_token": "abc", "tokens_used": 17}',
            worker_id="w1",
            actionable=False,
            created_at=Timestamp(seconds=1_800_000_000, nanos=123_456_789),
        ),
        tenant_id="acme",
        organization_id="west",
    )

    assert figures(answer) == (1, 0, 0)
    [row] = await written(conn)
    assert json.loads(row["result"]) == {
        "status": "FAILED",
        "context": {"rows": 3, "password": "[REDACTED]", "author": "me"},
    }
    assert json.loads(row["meta"]) == {
        "attempt": 2,
        "access_token": "[REDACTED]",
        "tokens_used": 17,
        "actionable": False,
        "informative": True,
        "worker_id": "w1",
    }
    expected = {
        "execution_id": EXECUTION_ID,
        "event_id": EVENT_ID,
        "catalog_id": CATALOG_ID,
        "event_type": "command.failed",
        "node_id": "fetch",
        "node_name": "fetch",
        "status": "FAILED",
        "worker_id": "w1",
        "tenant_id": "acme",
        "organization_id": "west",
        "idempotency_key": None,
        "context": None,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["created_at"].isoformat() == "2027-01-15T08:00:00.123456"
    assert row["event_time"].isoformat() == "2027-01-15T08:00:00.123456+00:00"


async def test_ids_may_come_as_text_in_json(conn: asyncpg.Connection, stub: Stub) -> None:
    body = {
        "execution_id": str(EXECUTION_ID),
        "event_id": str(EVENT_ID),
        "event_ids": [str(2**63 - 1), "5"],
        "result_kind": "refs",
        "step": "reduce",
        "event_type": "step.exit",
    }

    answer = await materialize(stub, ParseDict(body, event_pb2.NativeEvent()))

    assert figures(answer) == (1, 0, 0)
    [row] = await written(conn)
    assert json.loads(row["result"])["reference"] == {"event_ids": [2**63 - 1, 5], "total_parts": 2}


async def test_no_events_are_an_empty_answer(stub: Stub) -> None:
    assert figures(await materialize(stub)) == (0, 0, 0)


@pytest.mark.parametrize("identity", ["event_id", "idempotency_key"])
async def test_redelivery_in_other_cuts_stores_nothing_twice(
    conn: asyncpg.Connection, stub: Stub, identity: str
) -> None:
    def event(index: int) -> event_pb2.NativeEvent:
        execution_id = EXECUTION_ID + index % 3
        if identity == "event_id":
            return make_native(index, execution_id=execution_id)
        return make_native(execution_id=execution_id, event_id=None, idempotency_key=f"key-{index}")

    answers = [
        await materialize(stub, *(event(index) for index in cut), request_id=f"request-{number}")
        for number, cut in enumerate((range(30), range(20, 50), (49, 3, 49, 50), range(51)))
    ]

    assert [figures(answer) for answer in answers] == [(30, 0, 0), (20, 10, 0), (1, 3, 0), (0, 51, 0)]
    assert len(await written(conn)) == 51


async def test_a_request_id_alone_makes_the_same_batch_recognisable(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    events = [make_native(event_id=None, step=f"step-{index}") for index in range(20)]

    first = await materialize(stub, *events, request_id="request")
    again = await materialize(stub, *events, request_id="request")
    another = await materialize(stub, *events, request_id="another")

    assert [figures(answer) for answer in (first, again, another)] == [(20, 0, 0), (0, 20, 0), (20, 0, 0)]
    rows = await written(conn)
    assert [row["idempotency_key"] for row in rows[:20]] == [f"request/{index}" for index in range(20)]


async def test_minted_ids_are_snowflakes_of_now_in_the_order_of_the_batch(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    events = [make_native(event_id=None, step=f"step-{index:03}") for index in range(200)]

    await materialize(stub, *events, request_id="request")

    rows = await written(conn)
    assert [row["node_name"] for row in rows] == [event.step for event in events]
    for row in rows:
        assert abs((time_of(row["event_id"]) - row["ingest_time"]).total_seconds()) < 10


async def test_the_key_is_the_executions_and_the_tenants_own(conn: asyncpg.Connection, stub: Stub) -> None:
    mine = make_native(event_id=None, idempotency_key="key")
    theirs = make_native(event_id=None, idempotency_key="key", execution_id=EXECUTION_ID + 1)

    answers = [
        await materialize(stub, mine, theirs),
        await materialize(stub, mine, tenant_id="acme"),
        await materialize(stub, mine, tenant_id="acme", organization_id=" "),
    ]

    assert [figures(answer) for answer in answers] == [(2, 0, 0), (1, 0, 0), (0, 1, 0)]


async def test_two_deliveries_at_once_store_each_event_once(
    conn: asyncpg.Connection, stub: Stub, server: Server, channel_to: ChannelTo
) -> None:
    events = [
        make_native(execution_id=EXECUTION_ID + index % 10, event_id=None, idempotency_key=f"key-{index}")
        for index in range(100)
    ]
    stubs = [projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address)) for _ in range(4)]

    answers = await asyncio.gather(
        *(
            materialize(stubs[number % 4], *(events if number % 2 else reversed(events)))
            for number in range(8)
        )
    )

    assert sum(answer.materialized for answer in answers) == 100
    assert all(answer.materialized + answer.duplicates == 100 for answer in answers)
    rows = await written(conn)
    assert len(rows) == len({(row["execution_id"], row["idempotency_key"]) for row in rows}) == 100


async def test_bad_events_are_named_and_those_with_ids_are_parked(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    events = [
        make_native(0),
        make_native(1, payload_json="{"),
        make_native(2, execution_id=EXECUTION_ID + 99),
        make_native(3, event_id=None, idempotency_key="key", execution_id=EXECUTION_ID + 99),
        make_native(4, event_id=None),
        make_native(5, step=""),
        make_native(6, event_id=0),
        make_native(7, created_at=Timestamp(seconds=2**40)),
        make_native(8, meta_json=r'{"a": "\u0000"}'),
    ]

    for _ in range(2):
        answer = await materialize(stub, *events, tenant_id="acme")

    assert [(rejected.index, rejected.event_id, rejected.reason) for rejected in answer.rejected] == [
        (1, EVENT_ID + 1, "JSON_INVALID"),
        (2, EVENT_ID + 2, "CATALOG_UNKNOWN"),
        (3, 0, "CATALOG_UNKNOWN"),
        (4, 0, "FIELD_INVALID"),
        (5, EVENT_ID + 5, "FIELD_INVALID"),
        (6, 0, "FIELD_INVALID"),
        (7, EVENT_ID + 7, "TIME_INVALID"),
        (8, EVENT_ID + 8, "JSON_INVALID"),
    ]
    assert [row["event_id"] for row in await written(conn)] == [EVENT_ID]
    parked = await conn.fetch(
        "SELECT event_id, parked_by, payload FROM noetl.event_dead_letter ORDER BY event_id"
    )
    assert [row["event_id"] - EVENT_ID for row in parked] == [1, 2, 5, 7, 8]
    assert {row["parked_by"] for row in parked} == {"materialize"}
    # What could not be normalised is kept as it came, the rest as it would have been stored.
    raw = json.loads(parked[0]["payload"])
    assert (raw["native_event"]["payload_json"], raw["tenant_id"]) == ("{", "acme")
    assert json.loads(parked[1]["payload"])["result_json"]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"request_id": "x" * 129}, "request_id must not be longer than 128 characters"),
        ({"request_id": "a\0"}, "request_id must not hold the character NUL"),
        ({"tenant_id": "a\0"}, "tenant_id must not hold the character NUL"),
        ({"organization_id": "\0"}, "organization_id must not hold the character NUL"),
    ],
)
async def test_a_request_that_can_never_work_is_refused(
    stub: Stub, fields: dict[str, str], rule: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await materialize(stub, make_native(), **fields)

    assert (failure.value.code(), failure.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, rule)
