"""ReconcileStream: what the broker lost comes back from the log, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from nats.js.api import StreamConfig
from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.core.tailing import STREAM
from noetl_grpc.dev.nats import Nats
from noetl_grpc.server import Server
from noetl_grpc.settings import EventStreamSettings, Settings
from noetl_grpc.storage.pool import shard_of
from tests.conftest import AUTHORIZATION, settings_for
from tests.events import add_catalog_entry, write_events
from tests.streams import client, messages, until, until_tailing, wait_for_messages

EXECUTION = 600_000_000_000_000_001

Reconcile = Callable[..., Awaitable[tuple[int, int, int]]]


def note(event_id: int, **columns: Any) -> dict[str, Any]:
    return {"event_id": event_id, "event_type": "note", **columns}


@pytest.fixture
async def log(conn: asyncpg.Connection) -> asyncpg.Connection:
    await add_catalog_entry(conn)
    return conn


@pytest.fixture
async def server(
    database_url: str,
    log: asyncpg.Connection,
    nats: Nats,
    start_server: Callable[[Settings], Awaitable[Server]],
) -> Server:
    started = await start_server(
        settings_for(database_url, nats_url=nats.url, event_stream=EventStreamSettings(enabled=True))
    )
    await until_tailing(log)
    return started


@pytest.fixture
def reconcile(channel: grpc.aio.Channel) -> Reconcile:
    async def call(**fields: Any) -> tuple[int, int, int]:
        answer = await rpc.OperationsServiceStub(channel).ReconcileStream(
            pb.ReconcileStreamRequest(**fields), metadata=AUTHORIZATION
        )
        return answer.checked, answer.missing, answer.republished

    return call


async def delete(url: str, sequences: range) -> None:
    async with client(url) as connection:
        for sequence in sequences:
            await connection.jetstream().delete_msg(STREAM, sequence)


def moment(value: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(value)
    return stamp


async def test_lost_messages_come_back_exactly_once(
    log: asyncpg.Connection, nats: Nats, reconcile: Reconcile
) -> None:
    async with log.transaction():
        await write_events(log, EXECUTION, [note(number) for number in range(200)])
    before = await wait_for_messages(nats.url, 200)
    await delete(nats.url, range(51, 101))

    assert await reconcile(dry_run=True) == (200, 50, 0)
    assert await reconcile() == (200, 50, 50)
    assert await reconcile() == (200, 0, 0)

    after = await messages(nats.url)
    assert Counter(message.key for message in after) == Counter(message.key for message in before)
    again = after[150:]
    assert {message.body["event_id"] for message in again} == set(range(50, 100))
    assert all(
        message.headers["Nats-Msg-Id"].startswith(f"{EXECUTION}-{message.body['event_id']}-r")
        for message in again
    )


async def test_events_from_before_the_first_start_are_not_looked_for(
    log: asyncpg.Connection, nats: Nats, reconcile: Reconcile
) -> None:
    await write_events(log, EXECUTION, [note(1)])
    await wait_for_messages(nats.url, 1)
    await log.execute("UPDATE noetl.event SET ingest_time = ingest_time - interval '1 hour'")
    await delete(nats.url, range(1, 2))

    assert await reconcile() == (0, 0, 0)
    assert await reconcile(since=moment(datetime.now(UTC) - timedelta(days=1))) == (0, 0, 0)


async def test_only_the_time_that_was_asked_for_is_looked_at(
    log: asyncpg.Connection, nats: Nats, reconcile: Reconcile
) -> None:
    await write_events(log, EXECUTION, [note(1)])
    middle = await log.fetchval("SELECT clock_timestamp()")
    await write_events(log, EXECUTION, [note(2), note(3)])
    await wait_for_messages(nats.url, 3)
    await delete(nats.url, range(1, 4))

    assert await reconcile(until=moment(middle), dry_run=True) == (1, 1, 0)
    assert await reconcile(since=moment(middle)) == (2, 2, 2)
    assert {message.body["event_id"] for message in await messages(nats.url)} == {2, 3}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"since": Timestamp(seconds=100), "until": Timestamp(seconds=99)}, "until must not be before since"),
        ({"since": Timestamp(seconds=10**15)}, "since must lie between"),
    ],
)
async def test_times_that_make_no_sense_are_refused(
    reconcile: Reconcile, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refusal:
        await reconcile(**fields)

    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_parked_event_is_published_and_resolved_once_the_stream_takes_it(
    log: asyncpg.Connection, nats: Nats, reconcile: Reconcile, channel: grpc.aio.Channel
) -> None:
    async with client(nats.url) as connection:
        js = connection.jetstream()
        config: StreamConfig = (await js.stream_info(STREAM)).config
        config.max_msg_size = 3000
        await js.update_stream(config)
        async with log.transaction():
            await write_events(log, EXECUTION, [note(1), note(2, context={"text": "x" * 9000})])
        await until(lambda: log.fetchval("SELECT count(*) FROM noetl.event_dead_letter"))
        stub = rpc.OperationsServiceStub(channel)
        (status,) = (await stub.GetTailerStatus(pb.GetTailerStatusRequest(), metadata=AUTHORIZATION)).shards
        still_refused = await reconcile()
        config.max_msg_size = -1
        await js.update_stream(config)
        mended = await reconcile()

    assert status.parked == 1
    assert still_refused == (2, 1, 0)
    assert mended == (2, 1, 1)
    assert await reconcile() == (2, 0, 0)
    parked = await log.fetchrow("SELECT attempts, resolved_at FROM noetl.event_dead_letter")
    assert parked["attempts"] == 2
    assert parked["resolved_at"] is not None


async def test_two_comparisons_at_once_are_one_too_many(
    log: asyncpg.Connection, nats: Nats, database_url: str, reconcile: Reconcile
) -> None:
    other = await asyncpg.connect(database_url)
    await other.execute("SELECT pg_advisory_lock(x'6E6F6511'::integer, 0)")

    with pytest.raises(grpc.aio.AioRpcError, match="compared with the stream already") as refusal:
        await reconcile()

    assert refusal.value.code() is grpc.StatusCode.ABORTED
    await other.close()
    assert await reconcile() == (0, 0, 0)


async def test_without_a_broker_it_says_so(
    database_url: str,
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    bare = await start_server(settings_for(database_url))
    stub = rpc.OperationsServiceStub(await channel_to(bare.address))

    with pytest.raises(grpc.aio.AioRpcError, match="no broker is configured") as refusal:
        await stub.ReconcileStream(pb.ReconcileStreamRequest(), metadata=AUTHORIZATION)

    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_each_shard_is_tailed_and_mended(
    new_database: Callable[[], Awaitable[str]],
    nats: Nats,
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    urls = [await new_database(), await new_database()]
    logs = [await asyncpg.connect(url) for url in urls]
    for each in logs:
        await add_catalog_entry(each)
    server = await start_server(
        settings_for(*urls, nats_url=nats.url, event_stream=EventStreamSettings(enabled=True))
    )
    for each in logs:
        await until_tailing(each, shard=logs.index(each))
    executions = [EXECUTION + number for number in range(20)]
    for execution_id in executions:
        await write_events(logs[shard_of(execution_id, 2)], execution_id, [note(1)])
    await wait_for_messages(nats.url, 20)
    await delete(nats.url, range(1, 6))
    stub = rpc.OperationsServiceStub(await channel_to(server.address))
    answer = await stub.ReconcileStream(pb.ReconcileStreamRequest(), metadata=AUTHORIZATION)
    status = await stub.GetTailerStatus(pb.GetTailerStatusRequest(), metadata=AUTHORIZATION)
    for each in logs:
        await each.close()

    assert (answer.checked, answer.missing, answer.republished) == (20, 5, 5)
    assert {message.key for message in await messages(nats.url)} == {(each, 1) for each in executions}
    assert [(shard.shard, shard.leader) for shard in status.shards] == [(0, True), (1, True)]
