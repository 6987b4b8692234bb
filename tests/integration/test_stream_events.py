"""StreamEvents: what is there by id, then what becomes visible, each once, across restarts and slow readers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import event_pb2, projection_pb2, projection_pb2_grpc
from noetlpb.v1 import replay_pb2 as pb

from noetl_grpc.core import resuming
from noetl_grpc.core.following import Position
from noetl_grpc.core.resuming import Following, Reading
from noetl_grpc.errors import InvalidRequest, Overloaded, ShuttingDown
from noetl_grpc.server import Server, serving
from noetl_grpc.services import event_stream
from noetl_grpc.settings import Settings
from tests.conftest import AUTHORIZATION
from tests.events import CATALOG_ID, add_catalog_entry, write_events
from tests.logs import event
from tests.replay_api import ReplayApi, timestamp

EXECUTION = 600_000_000_000_000_001
NOON = datetime(2026, 5, 20, 12, tzinfo=UTC)

Messages = AsyncIterator[pb.StreamEventsResponse]


@pytest.fixture
async def api(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> ReplayApi:
    await add_catalog_entry(conn)
    return ReplayApi(channel)


def ids_of(messages: list[pb.StreamEventsResponse]) -> list[int]:
    return [each.event_id for message in messages for each in message.events]


async def until_caught_up(messages: Messages) -> list[pb.StreamEventsResponse]:
    seen = []
    async for message in messages:
        seen.append(message)
        if message.caught_up:
            break
    return seen


async def next_ids(messages: Messages, count: int) -> tuple[list[int], str]:
    """The next `count` events and the token behind them."""
    ids: list[int] = []
    token = ""
    while len(ids) < count:
        message = await anext(messages)
        ids += [each.event_id for each in message.events]
        token = message.resume_token
    assert len(ids) == count
    return ids, token


async def test_what_is_there_comes_by_id_and_the_stream_ends(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await write_events(conn, EXECUTION, [event(number) for number in (3, 1, 2)])

    messages = await api.all_events(EXECUTION)

    assert ids_of(messages) == [1, 2, 3]
    assert [message.caught_up for message in messages] == [False, True]


async def test_an_event_comes_whole(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(
        conn,
        EXECUTION,
        [
            event(
                1,
                "command.completed",
                status="ok",
                node_name="fetch",
                duration=1.5,
                meta={"a": 12345678901234567890},
                result={"status": "ok", "context": {"x": 1}},
                context={"y": [1, 2]},
                event_time=NOON,
                created_at=datetime(2026, 5, 20, 12, 0, 0, 5),
                stage_id=2**60,
                error="bad",
            )
        ],
    )

    (streamed,) = (await api.all_events(EXECUTION))[0].events
    fetched = await api.event(EXECUTION, 1)

    assert streamed == fetched
    assert fetched.meta_json == '{"a": 12345678901234567890}'
    assert fetched.result_json == '{"status": "ok", "context": {"x": 1}}'
    assert (fetched.duration, fetched.stage_id, fetched.error) == (1.5, 2**60, "bad")
    assert fetched.event_time == timestamp(NOON)
    assert fetched.created_at.nanos == 5000
    assert not fetched.HasField("command_id")
    assert not fetched.HasField("timestamp")


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"as_of_event_id": 2}, [1, 2]),
        ({"as_of_position": 0}, []),
        ({"after_event_id": 2}, [3, 4]),
        ({"after_event_id": 1, "as_of_event_id": 3}, [2, 3]),
        ({"as_of_time": timestamp(NOON)}, [1, 3]),
    ],
)
async def test_cutoffs(
    api: ReplayApi, conn: asyncpg.Connection, fields: dict[str, Any], ids: list[int]
) -> None:
    late = datetime(2026, 5, 20, 13, tzinfo=UTC)
    await write_events(
        conn,
        EXECUTION,
        [event(number, event_time=NOON if number in (1, 3) else late) for number in (1, 2, 3, 4)],
    )

    assert ids_of(await api.all_events(EXECUTION, **fields)) == ids


async def test_following_tells_each_new_event_once_late_commits_included(
    api: ReplayApi, conn: asyncpg.Connection, database_url: str
) -> None:
    await write_events(conn, EXECUTION, [event(10), event(20)])
    late = await asyncpg.connect(database_url)
    slow = late.transaction()
    await slow.start()
    await write_events(late, EXECUTION, [event(5), event(15)])
    async with api.stream(EXECUTION, follow=True) as messages:
        first = await until_caught_up(messages)
        await write_events(conn, EXECUTION, [event(30)])
        await write_events(conn, EXECUTION + 1, [event(31)])
        second, _ = await next_ids(messages, 1)
        await slow.commit()
        third, _ = await next_ids(messages, 2)
        await write_events(conn, EXECUTION, [event(1)], tenant_id="other")
        await write_events(conn, EXECUTION, [event(25)])
        fourth, _ = await next_ids(messages, 1)
    await late.close()

    assert ids_of(first) == [10, 20]
    assert (second, third, fourth) == ([30], [5, 15], [25])


async def test_events_this_server_writes_are_told_too(
    api: ReplayApi, channel: grpc.aio.Channel, conn: asyncpg.Connection
) -> None:
    stub = projection_pb2_grpc.ProjectionServiceStub(channel)
    async with api.stream(EXECUTION, follow=True) as messages:
        await until_caught_up(messages)
        message = event_pb2.EventEnvelope(execution_id=EXECUTION, event_id=7, catalog_id=CATALOG_ID)
        await stub.ProjectEvents(
            projection_pb2.ProjectEventsRequest(events=[message]), metadata=AUTHORIZATION
        )

        assert (await next_ids(messages, 1))[0] == [7]


async def test_every_token_resumes_without_loss_or_repeat(
    api: ReplayApi, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MESSAGE_EVENTS", 2)
    await write_events(conn, EXECUTION, [event(number) for number in range(1, 6)])
    async with api.stream(EXECUTION, follow=True) as messages:
        seen = await until_caught_up(messages)
        async with conn.transaction():
            await write_events(conn, EXECUTION, [event(number) for number in range(6, 11)])
        while len(ids_of(seen)) < 10:
            seen.append(await anext(messages))
    await write_events(conn, EXECUTION, [event(11)])

    for index, message in enumerate(seen):
        async with api.stream(EXECUTION, follow=True, resume_token=message.resume_token) as messages:
            rest = await until_caught_up(messages)
            assert sorted(ids_of(seen[: index + 1]) + ids_of(rest)) == list(range(1, 12))
            assert rest[-1].caught_up


async def test_a_stream_goes_on_after_the_server_was_restarted(
    settings: Settings, conn: asyncpg.Connection, channel_to: Callable[[str], Awaitable[grpc.aio.Channel]]
) -> None:
    await add_catalog_entry(conn)
    await write_events(conn, EXECUTION, [event(1)])
    async with serving(settings) as server:
        api = ReplayApi(await channel_to(server.address))
        async with api.stream(EXECUTION, follow=True) as messages:
            token = (await until_caught_up(messages))[-1].resume_token
    await write_events(conn, EXECUTION, [event(3), event(2)])
    async with serving(settings) as server:
        api = ReplayApi(await channel_to(server.address))
        async with api.stream(EXECUTION, follow=True, resume_token=token) as messages:
            again = await until_caught_up(messages)
            await write_events(conn, EXECUTION, [event(4)])
            new, _ = await next_ids(messages, 1)

    assert sorted(ids_of(again)) == [2, 3]
    assert new == [4]


async def test_shutting_down_ends_a_stream_with_its_token(
    settings: Settings, conn: asyncpg.Connection, channel_to: Callable[[str], Awaitable[grpc.aio.Channel]]
) -> None:
    await add_catalog_entry(conn)
    async with serving(settings) as server:
        api = ReplayApi(await channel_to(server.address))
        async with api.stream(EXECUTION, follow=True) as messages:
            token = (await until_caught_up(messages))[-1].resume_token
            drained = asyncio.create_task(server.drain())
            with pytest.raises(ShuttingDown) as ended:
                await anext(messages)
            await drained

    assert ended.value.metadata["resume_token"] == token


async def test_a_reader_that_is_too_slow_is_ended_and_can_go_on(
    api: ReplayApi, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "CAPACITY", 20)
    # So large that a few fill what gRPC buffers for a reader that does not read.
    padding = {"text": random.Random(1).randbytes(100_000).hex()}
    async with api.stream(EXECUTION, follow=True) as slow, api.stream(EXECUTION, follow=True) as keen:
        await until_caught_up(slow)
        await until_caught_up(keen)
        for start in range(1, 101, 10):
            async with conn.transaction():
                await write_events(
                    conn, EXECUTION, [event(number, context=padding) for number in range(start, start + 10)]
                )
            await next_ids(keen, 10)
        ids, ended = await drain(slow)
    assert len(ids) < 100
    async with api.stream(EXECUTION, follow=True, resume_token=ended.metadata["resume_token"]) as messages:
        ids += ids_of(await until_caught_up(messages))

    assert Counter(ids) == Counter(range(1, 101))


async def drain(messages: Messages) -> tuple[list[int], Overloaded]:
    ids: list[int] = []
    try:
        async for message in messages:
            ids += [each.event_id for each in message.events]
    except Overloaded as error:
        return ids, error
    raise AssertionError("the stream ended as if nothing had happened")


async def test_without_the_column_a_stream_follows_in_overlap_mode(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN xact_id")
    await write_events(conn, EXECUTION, [event(1)])
    async with api.stream(EXECUTION, follow=True) as messages:
        first = await until_caught_up(messages)
        await write_events(conn, EXECUTION, [event(5)])
        second, token = await next_ids(messages, 1)
        await write_events(conn, EXECUTION, [event(4)])
        third, _ = await next_ids(messages, 1)
    await write_events(conn, EXECUTION, [event(9)])
    async with api.stream(EXECUTION, follow=True, resume_token=token) as messages:
        again = await until_caught_up(messages)

    assert (ids_of(first), second, third, ids_of(again)) == ([1], [5], [4], [9])


async def test_large_events_come_in_several_messages(api: ReplayApi, conn: asyncpg.Connection) -> None:
    text = {"text": "x" * 700_000}
    await write_events(conn, EXECUTION, [event(number, context=text) for number in range(1, 6)])

    messages = await api.all_events(EXECUTION)

    assert [len(message.events) for message in messages] == [1, 1, 1, 1, 1, 0]


async def test_cancelling_gives_everything_back(
    api: ReplayApi, conn: asyncpg.Connection, server: Server
) -> None:
    for _ in range(3):
        async with api.stream(EXECUTION, follow=True) as messages:
            await until_caught_up(messages)

    async with asyncio.timeout(10):
        while await conn.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'noetl_grpc' AND state <> 'idle'"
            " AND datname = current_database()"
        ):
            pass
    await write_events(conn, EXECUTION, [event(1)])
    assert ids_of(await api.all_events(EXECUTION)) == [1]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"follow": True, "as_of_event_id": 5}, "follow"),
        ({"after_event_id": -1}, "after_event_id"),
        ({"as_of_event_id": -1}, "as_of_event_id"),
        ({"resume_token": "nonsense"}, "resume_token"),
        ({"resume_token": "bm9uc2Vuc2U"}, "resume_token"),
    ],
)
async def test_bad_requests_name_the_field(api: ReplayApi, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await api.all_events(EXECUTION, **fields)

    assert refused.value.violations[0][0] == field


async def test_a_token_belongs_to_its_request_and_its_database(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await write_events(conn, EXECUTION, [event(1)])
    token = (await api.all_events(EXECUTION))[-1].resume_token
    identity = {
        "tenant_id": "default",
        "organization_id": "default",
        "execution_id": EXECUTION,
        "event_id": 2**63 - 1,
        "time": None,
        "after_event_id": 0,
        "follow": True,
    }
    foreign = resuming.encode(Following(Position("9000000000:9000000000:")), identity)

    for fields in ({"tenant_id": "t"}, {"follow": True}, {"after_event_id": 1}, {"as_of_event_id": 9}):
        with pytest.raises(InvalidRequest, match="resume_token"):
            await api.all_events(EXECUTION, resume_token=token, **fields)
    with pytest.raises(InvalidRequest, match="another database"):
        await api.all_events(EXECUTION, follow=True, resume_token=foreign)
    assert ids_of(await api.all_events(EXECUTION, resume_token=token)) == []


@pytest.mark.parametrize(
    "place",
    [
        Reading(7),
        Reading(-(2**63), "5:9:6"),
        Following(None, 4),
        Following(Position("5:9:", "7:12:", 8, 3)),
    ],
)
def test_places_survive_a_token(place: resuming.Place) -> None:
    assert resuming.decode(resuming.encode(place, {"a": 1}), {"a": 1}) == place


async def test_rows_brought_from_another_cluster_are_read_before_following(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await write_events(conn, EXECUTION, [event(1), event(2, xact_id=9_000_000_000)])

    async with api.stream(EXECUTION, follow=True) as messages:
        assert ids_of(await until_caught_up(messages)) == [1, 2]
