"""The tailer against a real PostgreSQL and a real nats-server: every committed event, once, whatever happens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import asyncpg
import orjson
import pytest
from noetlpb.v1 import operations_pb2, operations_pb2_grpc

from noetl_grpc import server as servers
from noetl_grpc.dev.nats import Nats
from noetl_grpc.server import Server
from noetl_grpc.settings import EventStreamSettings, Settings
from tests.conftest import AUTHORIZATION, settings_for
from tests.events import add_catalog_entry, write_events
from tests.streams import until, until_tailing, wait_for_messages

EXECUTION = 600_000_000_000_000_001

Start = Callable[[Settings], Awaitable[Server]]
Connect = Callable[[], Awaitable[asyncpg.Connection]]


def tailing(database_url: str, nats: Nats, **changes: Any) -> Settings:
    stream = replace(EventStreamSettings(enabled=True), **changes)
    return settings_for(database_url, nats_url=nats.url, event_stream=stream)


@pytest.fixture
async def log(conn: asyncpg.Connection) -> asyncpg.Connection:
    """A connection to a log that events may be written to."""
    await add_catalog_entry(conn)
    return conn


@pytest.fixture
async def connect(database_url: str) -> AsyncIterator[Connect]:
    async with AsyncExitStack() as stack:

        async def make() -> asyncpg.Connection:
            made = await asyncpg.connect(database_url)
            stack.push_async_callback(made.close)
            return made

        yield make


async def status_of(server: Server, channel_to: Callable[..., Awaitable[Any]]) -> Any:
    stub = operations_pb2_grpc.OperationsServiceStub(await channel_to(server.address))
    answer = await stub.GetTailerStatus(operations_pb2.GetTailerStatusRequest(), metadata=AUTHORIZATION)
    (shard,) = answer.shards
    return shard


def note(event_id: int, event_type: str | None = "note", **columns: Any) -> dict[str, Any]:
    return {"event_id": event_id, "event_type": event_type, **columns}


async def test_a_committed_event_is_in_the_stream(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await start_server(tailing(database_url, nats))
    await until_tailing(log)

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await write_events(log, EXECUTION, [note(5, "step.exit", meta={"a": 1, "traceparent": trace})])
    (message,) = await wait_for_messages(nats.url, 1)

    assert message.subject == "noetl.events.step.exit"
    assert message.headers == {
        "Nats-Msg-Id": f"{EXECUTION}-5",
        "Noetl-Event-Id": "5",
        "Noetl-Event-Type": "step.exit",
        "traceparent": trace,
    }
    row = await log.fetchval("SELECT to_jsonb(e) - 'xact_id' FROM noetl.event AS e")
    assert message.body == orjson.loads(row)


async def test_only_what_is_written_from_now_on_is_published(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await write_events(log, EXECUTION, [note(1), note(2)])
    await start_server(tailing(database_url, nats))
    await until_tailing(log)

    await write_events(log, EXECUTION, [note(3)])
    found = await wait_for_messages(nats.url, 1)

    assert [message.key for message in found] == [(EXECUTION, 3)]


async def test_backfill_publishes_the_whole_history_once(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await write_events(log, EXECUTION, [note(number) for number in range(1, 30)])
    await start_server(tailing(database_url, nats, backfill=True, batch_size=7))

    await wait_for_messages(nats.url, 29)
    await write_events(log, EXECUTION, [note(30)])
    found = await wait_for_messages(nats.url, 30)

    assert [message.key[1] for message in found] == list(range(1, 31))


async def test_the_former_tailers_position_is_taken_over(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await log.execute(
        "CREATE TABLE noetl.stream_cursor (name text PRIMARY KEY, position bigint NOT NULL, updated_at timestamptz)"
    )
    await log.execute("INSERT INTO noetl.stream_cursor VALUES ('event_stream_tailer', 10, now())")
    await write_events(log, EXECUTION, [note(number) for number in (9, 10, 11, 12)])
    await start_server(tailing(database_url, nats, batch_size=1))

    await wait_for_messages(nats.url, 2)
    # Below the old position, but written now.
    await write_events(log, EXECUTION, [note(3)])
    found = await wait_for_messages(nats.url, 3)

    assert [message.key[1] for message in found] == [11, 12, 3]


async def test_what_commits_late_is_published_and_strangers_stall_nothing(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start, connect: Connect
) -> None:
    await start_server(tailing(database_url, nats))
    await until_tailing(log)
    late, undone, stranger = await connect(), await connect(), await connect()
    slow, lost, foreign = late.transaction(), undone.transaction(), stranger.transaction()
    await slow.start()
    await write_events(late, EXECUTION, [note(100), note(101)])
    await lost.start()
    await write_events(undone, EXECUTION, [note(102)])
    await foreign.start()
    await stranger.execute("SELECT pg_current_xact_id()")

    await write_events(log, EXECUTION, [note(103)])
    await wait_for_messages(nats.url, 1)
    await slow.commit()
    await lost.rollback()
    found = await wait_for_messages(nats.url, 3)
    await foreign.rollback()

    assert [message.key[1] for message in found] == [103, 100, 101]


async def test_the_same_event_id_in_two_executions_is_two_messages(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await start_server(tailing(database_url, nats, batch_size=1))
    await until_tailing(log)

    async with log.transaction():
        await write_events(log, EXECUTION, [note(1), note(2)])
        await write_events(log, EXECUTION + 1, [note(1), note(2)])
    found = await wait_for_messages(nats.url, 4)

    assert Counter(message.key for message in found) == Counter(
        (EXECUTION + number, event_id) for number in (0, 1) for event_id in (1, 2)
    )


@pytest.mark.parametrize(
    ("event_type", "subject", "header"),
    [
        ("two words * >", "noetl.events.two_words____", "two words * >"),
        (".dots.", "noetl.events._.dots._", ".dots."),
        ("", "noetl.events.unknown", ""),
        (None, "noetl.events.unknown", None),
        ("x" * 10_000, None, "x" * 10_000),
    ],
)
async def test_any_type_has_a_legal_subject_and_stays_what_it_is(
    database_url: str,
    log: asyncpg.Connection,
    nats: Nats,
    start_server: Start,
    event_type: str | None,
    subject: str | None,
    header: str | None,
) -> None:
    await start_server(tailing(database_url, nats))
    await until_tailing(log)
    # The columns have an index that takes no such long text.
    await log.execute("DROP INDEX noetl.idx_event_exec_type")

    await write_events(log, EXECUTION, [note(1, event_type)])
    (message,) = await wait_for_messages(nats.url, 1)

    assert subject is None or message.subject == subject
    assert message.headers.get("Noetl-Event-Type") == header
    assert message.body["event_type"] == event_type


async def test_values_that_only_postgresql_knows_are_spelled_out(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await start_server(tailing(database_url, nats))
    await until_tailing(log)

    await log.execute(
        "INSERT INTO noetl.event (execution_id, catalog_id, event_id, duration, event_time, created_at)"
        " SELECT $1, catalog_id, 1, 'NaN', 'infinity', '0044-03-15 12:00:00 BC' FROM noetl.catalog LIMIT 1",
        EXECUTION,
    )
    (message,) = await wait_for_messages(nats.url, 1)

    assert message.body["duration"] == "NaN"
    assert message.body["event_time"] == "infinity"
    assert message.body["created_at"] == "0044-03-15T12:00:00 BC"


async def test_a_large_event_goes_by_reference_and_the_others_flow_on(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await start_server(tailing(database_url, nats))
    await until_tailing(log)

    text = "é" * 2_500_000
    await write_events(log, EXECUTION, [note(1, "step.exit", context={"text": text}), note(2)])
    reference, other = await wait_for_messages(nats.url, 2)

    assert reference.headers["Noetl-Payload"] == "reference"
    body = reference.body
    rendered = await log.fetchval(
        "SELECT (SELECT row_to_json(b) FROM (SELECT e.*) AS b)::text FROM noetl.event AS e WHERE event_id = 1"
    )
    columns = {key: value for key, value in orjson.loads(rendered).items() if key != "xact_id"}
    assert columns["context"]["text"] == text
    assert body == {
        "execution_id": EXECUTION,
        "event_id": 1,
        "tenant_id": "default",
        "organization_id": "default",
        "event_type": "step.exit",
        "byte_length": body["byte_length"],
        "sha256": body["sha256"],
    }
    # xact_id is the last column.
    whole = rendered[: rendered.rindex(',"xact_id"')] + "}"
    assert body["byte_length"] == len(whole.encode())
    assert body["sha256"] == hashlib.sha256(whole.encode()).hexdigest()
    assert other.key == (EXECUTION, 2)


async def test_many_large_events_pass_in_order(
    database_url: str, log: asyncpg.Connection, nats: Nats, start_server: Start
) -> None:
    await start_server(tailing(database_url, nats, backfill=True))

    async with log.transaction():
        for number in range(40):
            await write_events(log, EXECUTION, [note(number, context={"text": "x" * 700_000 * (number % 2)})])
    found = await wait_for_messages(nats.url, 40)

    assert [message.key[1] for message in found] == list(range(40))
    assert all(
        len(message.body["context"]["text"]) == 700_000 * (number % 2) for number, message in enumerate(found)
    )


async def test_a_restart_goes_on_where_it_was(database_url: str, log: asyncpg.Connection, nats: Nats) -> None:
    async with servers.serving(tailing(database_url, nats)):
        await until_tailing(log)
        await write_events(log, EXECUTION, [note(1)])
        await wait_for_messages(nats.url, 1)
    await write_events(log, EXECUTION, [note(2), note(3)])
    async with servers.serving(tailing(database_url, nats)):
        await until_tailing(log, epoch=2)
        await write_events(log, EXECUTION, [note(4)])
        found = await wait_for_messages(nats.url, 4)

    assert [message.key[1] for message in found] == [1, 2, 3, 4]


async def test_the_status_tells_where_the_tailer_stands(
    database_url: str,
    log: asyncpg.Connection,
    nats: Nats,
    start_server: Start,
    channel_to: Callable[..., Any],
) -> None:
    server = await start_server(tailing(database_url, nats))
    await until_tailing(log)
    await write_events(log, EXECUTION, [note(1)])
    await wait_for_messages(nats.url, 1)

    async def has_passed() -> bool:
        return (await status_of(server, channel_to)).lag_events == 0

    await until(has_passed)
    status = await status_of(server, channel_to)

    assert (status.shard, status.mode, status.leader) == (0, operations_pb2.TAILER_MODE_SNAPSHOT, True)
    assert (status.lag_seconds, status.in_flight, status.parked, status.last_error) == (0, 0, 0, "")
    assert status.cursor.startswith("epoch 1, seen ")
    assert status.HasField("last_published_at")


async def test_a_server_without_tailer_says_so(
    settings: Settings, start_server: Start, channel_to: Callable[..., Any]
) -> None:
    server = await start_server(settings)

    status = await status_of(server, channel_to)

    assert (status.mode, status.leader) == (operations_pb2.TAILER_MODE_DISABLED, False)
