"""The tailer when something is wrong: with the broker, the stream, an event, the database or another tailer."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from noetl_grpc import server as servers
from noetl_grpc.broker import Broker
from noetl_grpc.core.tailing import STREAM, Mode
from noetl_grpc.delivery import Delivery, Leadership, Progress, Renderer, Work
from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.postgres import Postgres, find_binaries
from noetl_grpc.metrics import Metrics
from noetl_grpc.settings import EventStreamSettings
from noetl_grpc.storage import migrate, tailing
from noetl_grpc.tail import Tail, begin
from noetl_grpc.tailer import ShardTailer, TailerOptions
from tests.conftest import settings_for
from tests.events import add_catalog_entry, write_events
from tests.streams import client, messages, until, until_tailing, wait_for_messages

EXECUTION = 600_000_000_000_000_001

Tailing = Callable[..., Any]


def note(event_id: int, event_type: str | None = "note", **columns: Any) -> dict[str, Any]:
    return {"event_id": event_id, "event_type": event_type, **columns}


def options(broker_url: str, **changes: Any) -> TailerOptions:
    values: dict[str, Any] = {
        "batch_size": 500,
        "poll_seconds": 0.01,
        "backfill": False,
        "dedup_seconds": 120,
        "retention_seconds": 86_400,
        **changes,
    }
    return TailerOptions(broker_url=broker_url, **values)


@asynccontextmanager
async def tailer_of(database_url: str, broker_url: str, **changes: Any) -> AsyncIterator[ShardTailer]:
    """A tailer of one shard, running."""

    async def ignore() -> None:
        """Nobody asks for its health."""

    tailer = ShardTailer(
        shard=0,
        database_url=database_url,
        options=options(broker_url, **changes),
        metrics=Metrics(),
        on_change=ignore,
    )
    task = asyncio.create_task(tailer.run())
    try:
        yield tailer
    finally:
        tailer.stop()
        await task


async def until_error(tailer: ShardTailer, words: str) -> None:
    async def says_so() -> bool:
        return words in (tailer.last_error or "")

    await until(says_so)


async def until_leading(tailer: ShardTailer) -> None:
    async def leads() -> bool:
        return tailer.is_leader and tailer.last_error == ""

    await until(leads)


async def event_ids(url: str, count: int) -> list[int]:
    return [message.key[1] for message in await wait_for_messages(url, count)]


@pytest.fixture
async def log(conn: asyncpg.Connection) -> asyncpg.Connection:
    """A connection to a log that events may be written to."""
    await add_catalog_entry(conn)
    return conn


async def test_a_broker_that_comes_later_is_waited_for_and_health_says_so(
    database_url: str, log: asyncpg.Connection, channel_to: Callable[[str], Awaitable[Any]], nats: Nats
) -> None:
    await nats.stop()
    settings = settings_for(database_url, nats_url=nats.url, event_stream=EventStreamSettings(enabled=True))
    async with servers.serving(settings) as server:
        health = health_pb2_grpc.HealthStub(await channel_to(server.address))

        async def is_(wanted: int) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service="tailer"))
            return bool(answer.status == wanted)

        await until(lambda: is_(health_pb2.HealthCheckResponse.NOT_SERVING))
        assert not await is_(health_pb2.HealthCheckResponse.SERVING)
        await nats.start()
        await until(lambda: is_(health_pb2.HealthCheckResponse.SERVING))
        await write_events(log, EXECUTION, [note(1)])

        assert await event_ids(nats.url, 1) == [1]


async def test_credentials_in_the_url_are_used(database_url: str, log: asyncpg.Connection) -> None:
    async with Nats(config='authorization { user: "eve", password: "p@ss:word" }') as guarded:
        address = f"127.0.0.1:{guarded.port}"
        async with tailer_of(database_url, f"nats://eve:wrong@{address}") as tailer:
            await until_error(tailer, "the broker refuses our credentials")
        async with tailer_of(database_url, f"nats://eve:p%40ss%3Aword@{address}") as tailer:
            await until_leading(tailer)


async def test_an_account_without_jetstream_is_named(database_url: str, log: asyncpg.Connection) -> None:
    async with Nats(jetstream=False) as plain:
        port = plain.port
        async with tailer_of(database_url, plain.url) as tailer:
            await until_error(tailer, "the broker's account has no JetStream")
            await plain.stop()
            async with Nats(port=port):
                await until_leading(tailer)


async def test_a_stream_of_somebody_else_is_named_until_it_is_gone(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with client(nats.url) as connection:
        js = connection.jetstream()
        await js.add_stream(StreamConfig(name="NOETL_EVENTS", subjects=["noetl.events.>"]))
        async with tailer_of(database_url, nats.url) as tailer:
            await until_error(tailer, "noetl.events.> belong to stream NOETL_EVENTS")
            await js.delete_stream("NOETL_EVENTS")
            await until_leading(tailer)
            await write_events(log, EXECUTION, [note(1)])

            assert await event_ids(nats.url, 1) == [1]


async def test_a_stream_with_unsafe_settings_is_named_until_it_is_mended(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with client(nats.url) as connection:
        js = connection.jetstream()
        await js.add_stream(StreamConfig(name=STREAM, subjects=["other.>"], storage=StorageType.MEMORY))
        async with tailer_of(database_url, nats.url) as tailer:
            await until_error(
                tailer,
                f"stream {STREAM} can't be used: its storage is memory, expected file;"
                " its subjects are other.>, expected noetl.events.>",
            )
            await js.delete_stream(STREAM)
            await until_leading(tailer)


async def test_safe_settings_are_brought_in_line_and_others_stay(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with client(nats.url) as connection:
        js = connection.jetstream()
        await js.add_stream(
            StreamConfig(
                name=STREAM,
                subjects=["noetl.events.>", "mine.>"],
                max_age=50,
                duplicate_window=10,
                max_bytes=10_000_000,
            )
        )
        async with tailer_of(database_url, nats.url, dedup_seconds=30, retention_seconds=7200) as tailer:
            await until_leading(tailer)
        config = (await js.stream_info(STREAM)).config

    assert (config.max_age, config.duplicate_window) == (7200, 30)
    assert (config.max_bytes, config.subjects) == (10_000_000, ["noetl.events.>", "mine.>"])


async def test_a_refused_event_is_parked_and_the_rest_flows(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with client(nats.url) as connection:
        js = connection.jetstream()
        await js.add_stream(StreamConfig(name=STREAM, subjects=["noetl.events.>"], max_msg_size=5000))
        async with tailer_of(database_url, nats.url) as tailer:
            await until_leading(tailer)
            async with log.transaction():
                await write_events(log, EXECUTION, [note(1), note(2, context={"text": "x" * 9000}), note(3)])
            found = await event_ids(nats.url, 2)
            await until(lambda: log.fetchval("SELECT count(*) FROM noetl.event_dead_letter"))
            await write_events(log, EXECUTION, [note(4)])
            found = await event_ids(nats.url, 3)

            assert tailer.last_error == ""

    assert found == [1, 3, 4]
    parked = await log.fetchrow("SELECT * FROM noetl.event_dead_letter")
    assert (parked["execution_id"], parked["event_id"], parked["parked_by"]) == (EXECUTION, 2, "tailer")
    assert (parked["reason"], parked["resolved_at"]) == ("PUBLISH_REFUSED", None)
    assert "message size exceeds maximum allowed" in parked["last_error"]


async def test_one_refused_event_among_many_does_not_stop_a_fast_batch(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with client(nats.url) as connection:
        await connection.jetstream().add_stream(
            StreamConfig(name=STREAM, subjects=["noetl.events.>"], max_msg_size=5000)
        )
    async with log.transaction():
        await write_events(
            log, EXECUTION, [note(n, context={"text": "x" * (9000 if n == 150 else 1)}) for n in range(300)]
        )
    async with tailer_of(database_url, nats.url, backfill=True):
        found = await event_ids(nats.url, 299)

    assert found == [n for n in range(300) if n != 150]


async def test_a_forbidden_subject_parks_its_event_only(database_url: str, log: asyncpg.Connection) -> None:
    config = """
        authorization { users: [
          {user: tailer, password: x, permissions: {
            publish: {deny: ["noetl.events.secret"]}, subscribe: {allow: [">"]}}},
          {user: reader, password: x}
        ] }
    """
    async with Nats(config=config) as guarded:
        address = f"127.0.0.1:{guarded.port}"
        async with tailer_of(database_url, f"nats://tailer:x@{address}") as tailer:
            await until_leading(tailer)
            async with log.transaction():
                await write_events(log, EXECUTION, [note(1), note(2, "secret"), note(3)])
            found = await event_ids(f"nats://reader:x@{address}", 2)
            await until(lambda: log.fetchval("SELECT count(*) FROM noetl.event_dead_letter"))

    assert found == [1, 3]
    assert await log.fetchval("SELECT event_id FROM noetl.event_dead_letter") == 2


async def test_a_full_stream_holds_the_cursor_and_parks_nothing(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with client(nats.url) as connection:
        js = connection.jetstream()
        config = StreamConfig(name=STREAM, subjects=["noetl.events.>"], max_msgs=2, discard=DiscardPolicy.NEW)
        await js.add_stream(config)
        async with tailer_of(database_url, nats.url) as tailer:
            await until_leading(tailer)
            await write_events(log, EXECUTION, [note(1), note(2), note(3), note(4)])
            await until_error(tailer, "maximum messages exceeded")
            info = await js.stream_info(STREAM)
            info.config.max_msgs = 100
            await js.update_stream(info.config)
            found = await event_ids(nats.url, 4)

    assert found == [1, 2, 3, 4]
    assert await log.fetchval("SELECT count(*) FROM noetl.event_dead_letter") == 0


async def test_a_broker_that_is_killed_loses_and_repeats_nothing(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with tailer_of(database_url, nats.url) as tailer:
        await until_leading(tailer)
        for number in range(3):
            await write_events(log, EXECUTION, [note(10 * number + n) for n in range(5)])
            nats.kill()
            await write_events(log, EXECUTION, [note(10 * number + n) for n in range(5, 10)])
            await nats.start()
        found = await event_ids(nats.url, 30)

    assert sorted(found) == list(range(30))


async def test_losing_its_database_sessions_loses_nothing(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with tailer_of(database_url, nats.url) as tailer:
        await until_leading(tailer)
        for number in range(3):
            await write_events(log, EXECUTION, [note(2 * number)])
            ended = await log.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'noetl_grpc tailer%'"
            )
            assert ended
            await write_events(log, EXECUTION, [note(2 * number + 1)])
            await until_tailing(log, epoch=number + 2)
        found = await event_ids(nats.url, 6)

    assert found == list(range(6))


async def test_one_leads_and_another_takes_over(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(tailer_of(database_url, nats.url))
        await until_leading(first)
        async with tailer_of(database_url, nats.url) as second:

            async def waits() -> bool:
                return second.last_error == ""

            await until(waits)
            await write_events(log, EXECUTION, [note(1)])
            assert await event_ids(nats.url, 1) == [1]
            assert not second.is_leader
            await stack.aclose()
            async with asyncio.timeout(5):
                await until_leading(second)
            await write_events(log, EXECUTION, [note(2)])

            assert await event_ids(nats.url, 2) == [1, 2]
    assert await log.fetchval("SELECT epoch FROM noetl.log_cursor") == 2


async def test_a_replaced_leader_can_not_move_the_cursor(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    async with tailer_of(database_url, nats.url) as tailer:
        await until_leading(tailer)
        await log.execute("UPDATE noetl.log_cursor SET epoch = epoch + 1")
        await write_events(log, EXECUTION, [note(1)])

        # It notices, and begins an epoch of its own.
        await until_tailing(log, epoch=3)
        await write_events(log, EXECUTION, [note(2)])

        assert await event_ids(nats.url, 2) == [1, 2]


@asynccontextmanager
async def tail_by_hand(database_url: str, nats: Nats, *, batch_size: int) -> AsyncIterator[Tail]:
    """A leader's work, to be done batch by batch, and given up anywhere."""
    async with (
        tailing.leader_session(database_url) as session,
        tailing.reader_session(database_url) as reader,
    ):
        broker = await Broker.connect(nats.url, name="test")
        leadership = Leadership(session, shard=0)
        assert await leadership.ask(lambda conn: tailing.try_to_lead(conn, shard=0))
        await broker.ensure_stream(options(nats.url).stream)
        cursor, history = await begin(
            await leadership.ask(lambda conn: tailing.take_cursor(conn, shard=0)),
            leadership=leadership,
            reader=reader,
            facts=await tailing.database_facts(reader),
            history=None,
        )
        tail = Tail(
            leadership=leadership,
            reader=reader,
            renderer=Renderer(reader, message_bytes_max=2**20, batch_size=batch_size),
            delivery=Delivery(broker, leadership, metrics=Metrics(), progress=Progress()),
            cursor=cursor,
            history=history,
        )
        try:
            yield tail
        finally:
            await tail.close()
            await broker.close()


async def test_a_crash_inside_a_gap_loses_nothing_that_commits_meanwhile(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    older = await asyncpg.connect(database_url)
    async with tail_by_hand(database_url, nats, batch_size=2) as tail:
        slow = older.transaction()
        await slow.start()
        await write_events(older, EXECUTION, [note(1)])
        await write_events(log, EXECUTION, [note(n) for n in range(2, 8)])
        assert await tail.run_once() is Work.MORE
        # It is killed between two pages of the gap, and the older transaction commits.
    await slow.commit()
    await older.close()
    async with tail_by_hand(database_url, nats, batch_size=2) as tail:
        while await tail.run_once() is Work.MORE or len(await messages(nats.url)) < 7:
            pass
    found = [message.key[1] for message in await messages(nats.url)]

    assert sorted(found) == list(range(1, 8))


async def test_a_frozen_leader_sends_nothing_after_it_may_have_been_replaced(
    database_url: str, log: asyncpg.Connection, nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tail_by_hand(database_url, nats, batch_size=10) as tail:
        tail._delivery._broker.may_send = tail._leadership.holds
        await write_events(log, EXECUTION, [note(1)])
        monkeypatch.setattr("noetl_grpc.delivery.LEASE_SECONDS", 0.0)

        with pytest.raises(Exception, match="somebody else may publish by now"):
            await tail.run_once()

    assert await messages(nats.url) == []


async def test_a_standby_is_refused(tmp_path: Path, nats: Nats) -> None:
    async with Postgres(durable=False) as postgres:
        conn = await asyncpg.connect(postgres.url())
        await migrate.migrate(conn)
        await conn.close()
        await postgres.stop()
        (postgres.data_dir / "data" / "standby.signal").touch()
        await postgres.start()
        async with tailer_of(postgres.url(), nats.url) as tailer:
            await until_error(tailer, "the database is a standby")

            assert not tailer.is_leader


async def test_without_the_column_recent_events_are_published_and_it_says_so(
    database_url: str, log: asyncpg.Connection, nats: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    await log.execute("ALTER TABLE noetl.event DROP COLUMN xact_id CASCADE")
    await write_events(log, EXECUTION, [note(1)])
    late = await asyncpg.connect(database_url)
    async with tailer_of(database_url, nats.url) as tailer:
        await until_leading(tailer)
        slow = late.transaction()
        await slow.start()
        await write_events(late, EXECUTION, [note(3)])
        await write_events(log, EXECUTION, [note(900_000_000_000_000_000), note(2)])
        await wait_for_messages(nats.url, 2)
        await slow.commit()
        found = await event_ids(nats.url, 3)

        assert tailer.mode is Mode.OVERLAP
    await late.close()
    assert sorted(found) == [2, 3, 900_000_000_000_000_000]
    assert "can be missed; `noetl-grpc migrate --sql`" in caplog.text


async def test_without_the_column_a_restart_repeats_nothing(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    await log.execute("ALTER TABLE noetl.event DROP COLUMN xact_id CASCADE")
    async with tailer_of(database_url, nats.url, batch_size=3) as tailer:
        await until_leading(tailer)
        await write_events(log, EXECUTION, [note(n) for n in range(10)])
        await wait_for_messages(nats.url, 10)
    await write_events(log, EXECUTION, [note(10)])
    async with tailer_of(database_url, nats.url, batch_size=3) as tailer:
        await until_leading(tailer)
        await write_events(log, EXECUTION, [note(11)])
        found = await event_ids(nats.url, 12)

    assert found == list(range(12))


async def test_without_the_column_backfill_publishes_everything(
    database_url: str, log: asyncpg.Connection, nats: Nats
) -> None:
    await log.execute("ALTER TABLE noetl.event DROP COLUMN xact_id CASCADE")
    await write_events(log, EXECUTION, [note(n) for n in range(20)])
    await log.execute(
        "UPDATE noetl.event SET created_at = '2020-01-01'::timestamp + event_id * interval '1 day'"
    )
    async with tailer_of(database_url, nats.url, batch_size=7, backfill=True):
        found = await event_ids(nats.url, 20)

    assert found == list(range(20))


async def test_when_the_column_comes_the_tailer_changes_its_mode(
    database_url: str, log: asyncpg.Connection, nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noetl_grpc.overlap.MODE_SECONDS", 0.0)
    await log.execute("ALTER TABLE noetl.event DROP COLUMN xact_id CASCADE")
    await write_events(log, EXECUTION, [note(0)])
    await log.execute("UPDATE noetl.event SET created_at = created_at - interval '1 day'")
    async with tailer_of(database_url, nats.url) as tailer:
        await until_leading(tailer)
        await write_events(log, EXECUTION, [note(1)])
        await wait_for_messages(nats.url, 1)
        await migrate.migrate(log)

        async def follows_snapshots() -> bool:
            return tailer.mode is Mode.SNAPSHOT and tailer.is_leader

        await until(follows_snapshots)
        await write_events(log, EXECUTION, [note(2)])
        found = await event_ids(nats.url, 2)

    assert found == [1, 2]


def dump_and_restore(source: Postgres, target: Postgres, *, database: str, into: str) -> None:
    """As an operator moves a database to another cluster."""
    dumped = subprocess.run(
        [find_binaries() / "pg_dump", source.url(database)], capture_output=True, check=True, timeout=15
    )
    subprocess.run(
        [find_binaries() / "psql", "-q", "-v", "ON_ERROR_STOP=1", target.url(into)],
        input=dumped.stdout,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=15,
    )


async def use_up_transaction_ids(conn: asyncpg.Connection, count: int) -> None:
    await conn.execute(
        "CREATE TEMP TABLE IF NOT EXISTS used (number integer);"
        f"DO $$ BEGIN FOR n IN 1..{count} LOOP BEGIN"
        " INSERT INTO used VALUES (n); EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END $$"
    )


async def test_a_log_restored_into_another_cluster_loses_nothing(
    postgres: Postgres, nats: Nats, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Postgres(durable=False, in_memory=True) as old,
        Postgres(durable=False, in_memory=True) as new,
    ):
        conn = await asyncpg.connect(old.url())
        await migrate.migrate(conn)
        await add_catalog_entry(conn)
        # The old cluster is far ahead, so that its transaction ids lie in the new one's future.
        await use_up_transaction_ids(conn, 1000)
        async with tailer_of(old.url(), nats.url) as tailer:
            await until_leading(tailer)
            await write_events(conn, EXECUTION, [note(n) for n in range(10)])
            await wait_for_messages(nats.url, 10)
        # Not published when the dump is taken.
        await write_events(conn, EXECUTION, [note(n) for n in range(10, 15)])
        await conn.close()
        await asyncio.to_thread(dump_and_restore, old, new, database="postgres", into="postgres")
        conn = await asyncpg.connect(new.url())
        # Written in the new cluster before a tailer runs there.
        await write_events(conn, EXECUTION, [note(n) for n in range(15, 20)])
        async with tailer_of(new.url(), nats.url, batch_size=3) as tailer:
            await until_leading(tailer)
            await write_events(conn, EXECUTION, [note(n) for n in range(20, 25)])
            await wait_for_messages(nats.url, 25)
            # The new cluster's transaction ids pass those of the old one.
            for number in range(8):
                await use_up_transaction_ids(conn, 100)
                await write_events(conn, EXECUTION, [note(1000 + number)])
            found = await event_ids(nats.url, 33)
            counted = [
                sample.value
                for sample in tailer.metrics.stream_published.collect()[0].samples
                if sample.labels["event_type"] == "note" and sample.name.endswith("_total")
            ]
        await conn.close()

    assert sorted(found) == [*range(25), *range(1000, 1008)]
    # Not one of the first ten was sent again, whether or not the broker would have noticed.
    assert counted == [23]
    assert "the log was restored into another cluster" in caplog.text
