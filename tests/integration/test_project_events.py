"""ProjectEvents on a real database: every column, every duplicate, every bad event, and crashes in the middle."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2, projection_pb2_grpc
from noetlpb.v1 import projection_pb2 as pb

from noetl_grpc.convert.events import batch_from_pb, event_to_pb
from noetl_grpc.core.envelope import COLUMNS, examine
from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.server import Server
from noetl_grpc.services.intake import Delivery, Intake
from noetl_grpc.settings import Settings
from noetl_grpc.status import from_rpc_error
from noetl_grpc.storage.pool import open_shards
from noetl_grpc.storage.queries import queries
from tests.conftest import AUTHORIZATION, settings_for
from tests.factories import CATALOG_ID, EVENT_ID, EXECUTION_ID, add_catalog_entry, make_event

Stub = projection_pb2_grpc.ProjectionServiceStub
StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]
NewDatabase = Callable[[], Awaitable[str]]


@pytest.fixture
async def stub(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> Stub:
    await add_catalog_entry(conn)
    return projection_pb2_grpc.ProjectionServiceStub(channel)


async def project(stub: Stub, *events: event_pb2.EventEnvelope, **options: Any) -> pb.ProjectEventsResponse:
    request = pb.ProjectEventsRequest(events=events, **options)
    return await stub.ProjectEvents(request, metadata=AUTHORIZATION, timeout=15)


async def count(conn: asyncpg.Connection, table: str = "event") -> int:
    return await conn.fetchval(f"SELECT count(*) FROM noetl.{table}")


def figures(answer: pb.ProjectEventsResponse) -> tuple[int, int, int]:
    return answer.projected, answer.duplicates, len(answer.rejected)


async def test_every_column_of_the_log_is_written_and_none_is_forgotten(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    columns = await conn.fetch(
        """
        SELECT attname::text AS name, format_type(atttypid, NULL) AS type
        FROM pg_attribute
        WHERE attrelid = 'noetl.event'::regclass AND attnum > 0 AND NOT attisdropped
        """
    )
    mapped = {column.name for column in COLUMNS}

    assert {column["name"] for column in columns} - {"xact_id"} == mapped


FULL = event_pb2.EventEnvelope(
    execution_id=EXECUTION_ID,
    catalog_id=CATALOG_ID,
    event_id=EVENT_ID,
    parent_event_id=2,
    parent_execution_id=3,
    created_at=Timestamp(seconds=1_800_000_000, nanos=123_456_000),
    event_type="command.completed",
    node_id="n1",
    node_name="fetch",
    node_type="http",
    status="success",
    duration=0.1,
    context_json='{"a": [1, 2.50, null]}',
    result_json='{"status": "ok", "context": {"n": 12345678901234567890}}',
    meta_json='{"attempt": 1}',
    error="",
    current_index=0,
    current_item="item",
    worker_id="w1",
    distributed_state="d",
    context_key="k",
    context_value="v",
    trace_component_json='{"span": "x"}',
    stack_trace="trace",
    tenant_id="acme",
    organization_id="west",
    stream_id="s",
    stream_version=9,
    aggregate_id="a",
    aggregate_type="frame",
    schema_name="schema",
    schema_version=4,
    event_time=Timestamp(seconds=-1, nanos=999_999_000),
    ingest_time=Timestamp(seconds=253_402_300_799, nanos=999_999_000),
    producer="p",
    causation_id="c1",
    correlation_id="c2",
    idempotency_key="key",
    payload_ref_json='{"uri": "gs://a"}',
    envelope_checksum="abc",
    prev_event_id=5,
    command_id=6,
    stage_id=7,
    frame_id=8,
)


async def test_a_row_comes_back_as_the_envelope_it_was_written_from(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    assert {field.name for field, _ in FULL.ListFields()} == {column.field for column in COLUMNS}

    assert figures(await project(stub, FULL)) == (1, 0, 0)

    read = event_to_pb(await conn.fetchrow("SELECT * FROM noetl.event"))
    for column in COLUMNS:
        sent, got = getattr(FULL, column.field), getattr(read, column.field)
        if column.field.endswith("_json"):
            sent, got = json.loads(sent), json.loads(got)
        assert got == sent, column.field

    # And the row that this envelope makes elsewhere is the same row.
    row = await conn.fetchrow("DELETE FROM noetl.event RETURNING *")
    assert figures(await project(stub, read)) == (1, 0, 0)
    again = await conn.fetchrow("SELECT * FROM noetl.event")
    assert {**row, "xact_id": None} == {**again, "xact_id": None}


async def test_an_envelope_with_nothing_in_it_makes_a_row_of_nulls_and_defaults(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    bare = event_pb2.EventEnvelope(execution_id=EXECUTION_ID, event_id=EVENT_ID, catalog_id=CATALOG_ID)

    before = await conn.fetchval("SELECT clock_timestamp()")
    assert figures(await project(stub, bare)) == (1, 0, 0)
    after = await conn.fetchval("SELECT clock_timestamp()")

    row = dict(await conn.fetchrow("SELECT * FROM noetl.event"))
    for column in COLUMNS:
        assert (row[column.name] is None) == column.nullable, column.name
    assert (row["tenant_id"], row["organization_id"], row["schema_version"]) == ("default", "default", 1)
    assert before <= row["created_at"].replace(tzinfo=UTC) == row["event_time"] == row["ingest_time"] <= after


async def test_times_keep_their_instant_whatever_zone_the_producer_lives_in(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    moment = datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=timezone(timedelta(hours=-9, minutes=-30)))
    timestamp = Timestamp()
    timestamp.FromDatetime(moment)
    await project(
        stub,
        make_event(0, timestamp=timestamp, created_at=Timestamp(seconds=1)),
        make_event(1, created_at=timestamp),
        make_event(2, created_at=timestamp, event_time=Timestamp(seconds=7, nanos=1_999)),
    )

    rows = await conn.fetch("SELECT created_at, event_time FROM noetl.event ORDER BY event_id")

    utc = moment.astimezone(UTC)
    assert [row["created_at"] for row in rows] == [utc.replace(tzinfo=None)] * 3
    assert [row["event_time"] for row in rows] == [utc, utc, datetime(1970, 1, 1, 0, 0, 7, 1, tzinfo=UTC)]


async def test_duplicates_are_counted_exactly_also_inside_the_batch(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    first = await project(stub, *(make_event(index) for index in (0, 1, 1, 2, 0)))
    second = await project(stub, *(make_event(index) for index in (1, 2, 3, 3)))

    assert figures(first) == (3, 2, 0)
    assert figures(second) == (1, 3, 0)
    assert not first.conflicts
    assert not second.conflicts
    assert await count(conn) == 4


async def test_the_same_event_id_in_another_execution_is_another_event(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    answer = await project(stub, make_event(), make_event(execution_id=EXECUTION_ID + 1))

    assert figures(answer) == (2, 0, 0)


async def test_a_duplicate_with_other_content_is_named_and_the_stored_one_stays(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    stored = make_event(0, meta_json='{"a": 1, "b": 2}', timestamp=Timestamp(seconds=5), error="")
    await project(stub, stored, make_event(1))

    answer = await project(
        stub,
        make_event(9),
        make_event(0, meta_json='{"b":2,  "a":1.0}', error=""),  # the same JSON, and no time given
        make_event(0, meta_json='{"a": 1, "b": 3}', timestamp=Timestamp(seconds=5), error=""),
        make_event(0, meta_json='{"a": 1, "b": 2}', timestamp=Timestamp(seconds=6), error=""),
        make_event(1, catalog_id=0),  # resolved to what is stored
        make_event(1, tenant_id="other"),
        make_event(9, status="FAILED"),
        make_event(1, ingest_time=Timestamp(seconds=1)),  # says when it was delivered, not what happened
    )

    assert figures(answer) == (1, 7, 0)
    assert [(conflict.index, conflict.event_id) for conflict in answer.conflicts] == [
        (2, EVENT_ID),
        (3, EVENT_ID),
        (5, EVENT_ID + 1),
        (6, EVENT_ID + 9),
    ]
    assert await conn.fetchval("SELECT meta->>'b' FROM noetl.event WHERE event_id = $1", EVENT_ID) == "2"
    assert (
        await conn.fetchval("SELECT status FROM noetl.event WHERE event_id = $1", EVENT_ID + 9) == "COMPLETED"
    )


async def test_the_same_batch_from_eight_connections_at_once_is_stored_once(
    conn: asyncpg.Connection, stub: Stub, server: Server, channel_to: ChannelTo
) -> None:
    events = [make_event(index, execution_id=EXECUTION_ID + index % 7) for index in range(300)]
    stubs = [projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address)) for _ in range(8)]

    answers = await asyncio.gather(
        *(project(one, *(events if number % 2 else reversed(events))) for number, one in enumerate(stubs))
    )

    assert sum(answer.projected for answer in answers) == 300
    assert all(answer.projected + answer.duplicates == 300 and not answer.rejected for answer in answers)
    assert await count(conn) == 300


BAD: dict[str, event_pb2.EventEnvelope] = {
    "CATALOG_UNKNOWN": make_event(1, catalog_id=404),
    "RESULT_SHAPE": make_event(2, result_json='{"rows": 3}'),
    "JSON_INVALID": make_event(3, context_json=r'{"text": "\u0000"}'),
    "FIELD_INVALID event_id": make_event(4, event_id=0),
    "FIELD_INVALID execution_id": make_event(5, execution_id=0),
    "TIME_INVALID": make_event(6, timestamp=Timestamp(seconds=253_402_300_800)),
    "JSON_INVALID text": make_event(7, meta_json="not JSON"),
}


async def test_bad_events_are_named_and_parked_and_cost_the_good_ones_nothing(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    events = [make_event(1000 + index) for index in range(993)]
    places = [0, 100, 500, 501, 700, 998, 999]
    for place, event in zip(places, BAD.values(), strict=True):
        events.insert(place, event)

    first = await project(stub, *events)

    assert figures(first) == (993, 0, 7)
    assert [rejected.index for rejected in first.rejected] == places
    for rejected, (reason, event) in zip(first.rejected, BAD.items(), strict=True):
        assert rejected.reason == reason.split()[0]
        assert rejected.event_id == event.event_id
        assert rejected.detail
    assert await count(conn) == 993
    parked = await conn.fetch("SELECT * FROM noetl.event_dead_letter ORDER BY event_id")
    assert [(row["event_id"] - EVENT_ID, row["reason"]) for row in parked] == [
        (1, "CATALOG_UNKNOWN"),
        (2, "RESULT_SHAPE"),
        (3, "JSON_INVALID"),
        (6, "TIME_INVALID"),
        (7, "JSON_INVALID"),
    ]
    assert all(json.loads(row["payload"])["event_id"] == row["event_id"] for row in parked)
    assert {(row["parked_by"], row["attempts"], row["resolved_at"]) for row in parked} == {
        ("project", 1, None)
    }

    second = await project(stub, *events)

    assert figures(second) == (0, 993, 7)
    assert not second.conflicts
    assert await conn.fetch("SELECT * FROM noetl.event_dead_letter ORDER BY event_id") == parked
    assert await count(conn) == 993


async def test_what_only_the_database_can_know_is_found_row_by_row(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    # Too long for an index, and not compressible.
    endless = "".join(hashlib.sha256(bytes([number])).hexdigest() for number in range(200))
    await conn.execute("ALTER TABLE noetl.event ADD CONSTRAINT no_monday CHECK (event_type <> 'monday')")

    answer = await project(
        stub,
        *(make_event(index) for index in range(50)),
        make_event(60, event_type=endless),
        make_event(61, event_type="monday"),
        make_event(62, event_type="monday"),
        make_event(62),  # the first of the two is refused, this one is not
        make_event(63),
    )

    assert figures(answer) == (52, 0, 3)
    assert [(rejected.index, rejected.reason) for rejected in answer.rejected] == [
        (50, "STORE_REFUSED"),
        (51, "STORE_REFUSED"),
        (52, "STORE_REFUSED"),
    ]
    assert await count(conn) == 52
    assert await count(conn, "event_dead_letter") == 3


async def test_a_batch_without_events_or_with_too_many_is_refused_before_any_write(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    for events, rule in (
        ([], "events must not be empty"),
        ([make_event(index) for index in range(10_001)], "events must not hold more than 10000 items"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await project(stub, *events)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rule in (failure.value.details() or "")

    with pytest.raises(grpc.aio.AioRpcError, match=r"enqueue\.subject must not hold the character NUL"):
        await project(stub, make_event(), enqueue=pb.EnqueueOptions(subject="a\0"))
    assert await count(conn) == 0


async def test_the_largest_batch_is_taken(conn: asyncpg.Connection, stub: Stub) -> None:
    answer = await project(stub, *(make_event(index) for index in reversed(range(10_000))))

    assert figures(answer) == (10_000, 0, 0)
    assert await count(conn) == 10_000


class Catalogs:
    """Two entries, an execution with a stored event, and one with only a command."""

    STORED, COMMANDED, UNKNOWN, MIXED = (EXECUTION_ID + offset for offset in (10, 20, 30, 40))


async def test_a_catalog_entry_is_taken_from_the_execution_in_one_query(
    conn: asyncpg.Connection, stub: Stub, postgres: Any
) -> None:
    other = await add_catalog_entry(conn, CATALOG_ID + 1)
    await project(stub, make_event(0, execution_id=Catalogs.STORED, catalog_id=other))
    await conn.execute(
        """
        INSERT INTO noetl.command (command_id, event_id, execution_id, catalog_id, step_name)
        VALUES (1, 1, $1, $2, 'fetch')
        """,
        Catalogs.COMMANDED,
        other,
    )

    answer = await project(
        stub,
        *(make_event(index, execution_id=Catalogs.STORED, catalog_id=0) for index in range(1, 200)),
        make_event(1, execution_id=Catalogs.COMMANDED, catalog_id=0),
        make_event(1, execution_id=Catalogs.UNKNOWN, catalog_id=0),
        make_event(1, execution_id=Catalogs.MIXED, catalog_id=0),
        make_event(2, execution_id=Catalogs.MIXED, catalog_id=CATALOG_ID),
    )

    assert figures(answer) == (202, 0, 1)
    assert (answer.rejected[0].index, answer.rejected[0].reason) == (200, "CATALOG_UNKNOWN")
    assert "catalog_id" in answer.rejected[0].detail
    found = await conn.fetch(
        "SELECT DISTINCT execution_id, catalog_id FROM noetl.event ORDER BY execution_id"
    )
    assert [tuple(row) for row in found] == [
        (Catalogs.STORED, other),
        (Catalogs.COMMANDED, other),
        (Catalogs.MIXED, CATALOG_ID),
    ]


async def test_the_number_of_queries_does_not_depend_on_the_number_of_events(
    conn: asyncpg.Connection, database_url: str
) -> None:
    await add_catalog_entry(conn)
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, event_id, catalog_id)
        SELECT $1::bigint + n, 1, $2 FROM generate_series(0, 999) AS n
        """,
        EXECUTION_ID,
        CATALOG_ID,
    )
    shards = await open_shards([database_url], cluster_url=database_url, size_max=1)
    asked: list[str] = []

    async def take(amount: int) -> int:
        """Queries for so many events, each of an execution of its own and without a catalog entry."""
        batch, timestamps = batch_from_pb(
            [make_event(index, execution_id=EXECUTION_ID + index, catalog_id=0) for index in range(amount)]
        )
        problems = examine(batch, timestamps)
        before = len(asked)
        outcome = await Intake(shards).take(
            Delivery(batch=batch, problems=problems, payload_of=str, parked_by="test", compares=True)
        )
        assert outcome.stored + outcome.duplicates == amount
        return len(asked) - before

    try:
        async with shards.pools[0].acquire() as only:
            only.add_query_logger(lambda record: asked.append(record.query))
        await take(1)  # the driver asks about types once
        few, many = await take(2), await take(1000)
    finally:
        await shards.close()

    assert few > 4, asked
    assert many == few, asked


async def test_stored_events_become_outbox_rows_and_duplicates_do_not(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await project(stub, make_event(0))

    answer = await project(
        stub, make_event(2), make_event(0), make_event(1, meta_json='{"a": 1}'), make_event(3, catalog_id=404),
        enqueue=pb.EnqueueOptions(),
    )  # fmt: skip
    named = await project(stub, make_event(4), enqueue=pb.EnqueueOptions(subject="jobs.new"))

    assert figures(answer) == (2, 1, 1)
    assert figures(named) == (1, 0, 0)
    rows = await conn.fetch("SELECT * FROM noetl.outbox ORDER BY outbox_id")
    assert [(row["event_id"] - EVENT_ID, row["subject"]) for row in rows] == [
        (1, None),
        (2, None),
        (4, "jobs.new"),
    ]
    assert {(row["execution_id"], row["status"], row["payload_codec"]) for row in rows} == {
        (EXECUTION_ID, "PENDING", "json")
    }
    payload = json.loads(rows[0]["payload"])
    assert payload == json.loads(
        await conn.fetchval(
            "SELECT to_jsonb(e) - 'xact_id' FROM noetl.event AS e WHERE event_id = $1", EVENT_ID + 1
        )
    )
    assert set(payload) == {column.name for column in COLUMNS}


@pytest.fixture
async def other_conn(database_url: str, conn: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def blocked_backend(conn: asyncpg.Connection) -> int:
    """The server's backend, once it waits for a lock; PostgreSQL tells nobody when that happens, so we ask."""
    async with asyncio.timeout(10):
        while True:
            pid = await conn.fetchval(
                """
                SELECT pid FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'noetl_grpc' AND wait_event_type = 'Lock'
                """
            )
            if pid is not None:
                return pid


@pytest.mark.parametrize("enqueue", [None, pb.EnqueueOptions(subject="x")])
async def test_a_connection_killed_in_the_middle_leaves_nothing_and_a_retry_completes(
    conn: asyncpg.Connection, other_conn: asyncpg.Connection, stub: Stub, enqueue: pb.EnqueueOptions | None
) -> None:
    events = [make_event(index) for index in range(500)]
    # Somebody's uncommitted row stops the insert half-way; a lock on the outbox stops it after the events.
    blocker = other_conn.transaction()
    await blocker.start()
    if enqueue is None:
        await other_conn.execute(
            "INSERT INTO noetl.event (execution_id, event_id, catalog_id) VALUES ($1, $2, $3)",
            EXECUTION_ID,
            EVENT_ID + 250,
            CATALOG_ID,
        )
    else:
        await other_conn.execute("LOCK TABLE noetl.outbox IN EXCLUSIVE MODE")
    call = asyncio.ensure_future(project(stub, make_event(999, catalog_id=404), *events, enqueue=enqueue))

    await conn.execute("SELECT pg_terminate_backend($1)", await blocked_backend(conn))

    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = from_rpc_error(failure.value)
    assert (failure.value.code(), error.reason) == (grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
    assert error.retry_after_seconds is not None
    await blocker.rollback()
    assert [await count(conn, table) for table in ("event", "outbox", "event_dead_letter")] == [0, 0, 0]

    answer = await project(stub, make_event(999, catalog_id=404), *events, enqueue=enqueue)

    assert figures(answer) == (500, 0, 1)
    expected = [500, 0 if enqueue is None else 500, 1]
    assert [await count(conn, table) for table in ("event", "outbox", "event_dead_letter")] == expected


async def test_when_parking_fails_the_call_fails_and_stores_nothing(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await conn.execute("ALTER TABLE noetl.event_dead_letter RENAME TO gone")

    with pytest.raises(grpc.aio.AioRpcError):
        await project(stub, make_event(0), make_event(1, catalog_id=404))

    assert await count(conn) == 0


async def on_shard(url: str, statement: str, *arguments: Any) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement, *arguments)
    finally:
        await connection.close()


async def test_a_batch_over_two_shards_is_written_to_both_and_brings_its_catalog_entry_along(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    urls = [await new_database() for _ in range(3)]
    cluster = await asyncpg.connect(urls[2])
    await add_catalog_entry(cluster)
    await cluster.close()
    server = await start_server(settings_for(*urls[:2], cluster_url=urls[2]))
    stub = projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address))
    events = [make_event(index, execution_id=EXECUTION_ID + index) for index in range(40)]

    answer = await project(stub, *events, make_event(50, execution_id=EXECUTION_ID + 3, catalog_id=404))
    again = await project(stub, *events)

    assert figures(answer) == (40, 0, 1)
    assert figures(again) == (0, 40, 0)
    counts = [await on_shard(url, "SELECT count(*) FROM noetl.event") for url in urls]
    assert sum(counts) == 40
    assert min(counts[:2]) > 5
    assert counts[2] == 0
    dead = [await on_shard(url, "SELECT count(*) FROM noetl.event_dead_letter") for url in urls]
    assert sorted(dead) == [0, 0, 1]
    assert dead[2] == 0


async def test_a_shard_that_is_down_rejects_its_own_events_only(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    url = await new_database()
    async with Postgres(durable=False) as other:
        other_url = await create_database(other, "shard")
        for each in (url, other_url):
            connection = await asyncpg.connect(each)
            await add_catalog_entry(connection)
            await connection.close()
        server = await start_server(settings_for(url, other_url))
        stub = projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address))
        events = [make_event(index, execution_id=EXECUTION_ID + index) for index in range(30)]
        events.append(make_event(90, execution_id=EXECUTION_ID, catalog_id=404))
        await other.stop(mode="immediate")

        answer = await project(stub, *events)

        away = {rejected.index for rejected in answer.rejected if rejected.reason == "SHARD_UNAVAILABLE"}
        assert 5 < len(away) < 25
        assert answer.projected == await on_shard(url, "SELECT count(*) FROM noetl.event")
        assert answer.projected + len(answer.rejected) == 31
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await project(stub, *(events[index] for index in away))
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE

        await other.start()
        async with asyncio.timeout(10):
            while (repeated := await project(stub, *events)).projected == 0:
                pass
        assert (repeated.projected, repeated.duplicates) == (30 - answer.projected, answer.projected)
        assert [(rejected.index, rejected.reason) for rejected in repeated.rejected] == [
            (30, "CATALOG_UNKNOWN")
        ]


@pytest.mark.parametrize("name", ["enqueue_events", "stored_keys", "catalogs_of_executions"])
async def test_what_a_batch_asks_of_the_log_is_answered_by_an_index(
    conn: asyncpg.Connection, stub: Stub, name: str
) -> None:
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, event_id, catalog_id, idempotency_key)
        SELECT $1::bigint + n / 50, $2::bigint + n, $3, 'key-' || n FROM generate_series(1, 5000) AS n
        """,
        EXECUTION_ID,
        EVENT_ID,
        CATALOG_ID,
    )
    await conn.execute("ANALYZE noetl.event")
    executions, event_ids = [EXECUTION_ID] * 1000, list(range(1000))
    arguments: dict[str, list[Any]] = {
        "enqueue_events": [executions, event_ids, None, None],
        "stored_keys": ["default", "default", executions, [f"key-{number}" for number in event_ids]],
        "catalogs_of_executions": [executions],
    }
    # A generic plan knows neither the executions nor how many there are.
    await conn.execute("SET plan_cache_mode = force_generic_plan")

    plan = await conn.fetch(f"EXPLAIN {queries[name]}", *arguments[name])

    text = "\n".join(row[0][:200] for row in plan)
    assert "Index" in text
    assert "Seq Scan on event_2026_q4 " not in text, text
