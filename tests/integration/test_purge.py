"""PurgeStale on a real database: what goes, what stays and why, and who may hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc

from noetl_grpc.checks import purge as check_purge
from noetl_grpc.checks.frame import silent
from noetl_grpc.core.snowflake import DATABASE_TIME_SHIFT, TIME_SHIFT, first_id_of
from noetl_grpc.server import Server, serving
from noetl_grpc.settings import Settings
from noetl_grpc.storage.queries import queries
from tests.conftest import AUTHORIZATION, TOKEN, settings_for
from tests.factories import CATALOG_ID, add_catalog_entry
from tests.locks import waiting_for_lock

Stub = projection_pb2_grpc.ProjectionServiceStub
StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]
NewDatabase = Callable[[], Awaitable[str]]

#: A retention whose cutoff is the fifth of July, whatever the day of the test.
DAYS = (datetime.now(UTC) - datetime(2026, 7, 5, tzinfo=UTC)).days
#: Partitions of NoETL's own schema whose range is over by then.
OVER = ["event_pre_2026", "event_2026_q1", "event_2026_q2"]
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
MAY = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.fixture
async def stub(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> Stub:
    await add_catalog_entry(conn)
    return projection_pb2_grpc.ProjectionServiceStub(channel)


@pytest.fixture
async def other_conn(database_url: str, conn: asyncpg.Connection) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def purge(stub: Stub, *, dry_run: bool = False, **policy: int) -> pb.PurgeStaleResponse:
    request = pb.PurgeStaleRequest(policy=pb.PurgePolicy(**policy), dry_run=dry_run)
    return await stub.PurgeStale(request, metadata=AUTHORIZATION, timeout=18)


def kept(answer: pb.PurgeStaleResponse) -> dict[str, str]:
    return {partition.partition: partition.reason for partition in answer.partitions_kept}


async def add_event(
    conn: asyncpg.Connection,
    moment: datetime,
    *,
    shift: int = TIME_SHIFT,
    event_type: str = "step.exit",
    status: str = "COMPLETED",
    created_at: datetime | None = None,
    offset: int = 1,
) -> int:
    """An event of an execution that began at a moment, with ids of one layout; its execution."""
    execution_id = first_id_of(moment, time_shift=shift)
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, status, created_at)
        VALUES ($1, $2, $3, $4, $5, $6)
        """,
        execution_id,
        execution_id + offset,
        CATALOG_ID,
        event_type,
        status,
        (created_at or moment).replace(tzinfo=None),
    )
    return execution_id


async def add_commands(conn: asyncpg.Connection) -> None:
    """Ten finished eight days ago, five finished yesterday, three never finished, two finished without a time."""
    await conn.execute(
        """
        INSERT INTO noetl.command
            (command_id, event_id, execution_id, catalog_id, step_name, status, completed_at, updated_at)
        SELECT n, n, n % 7, 1, 's',
            CASE WHEN n > 18 THEN 'FAILED' WHEN n > 15 THEN 'RUNNING' ELSE 'COMPLETED' END,
            CASE WHEN n <= 10 THEN now() - interval '8 days' WHEN n <= 15 THEN now() - interval '1 day' END,
            now() - interval '9 days'
        FROM generate_series(1, 20) AS n
        """
    )


async def add_runtimes(conn: asyncpg.Connection) -> None:
    """Two stale worker pools, a live one, and a server that nobody may delete."""
    await conn.execute(
        """
        INSERT INTO noetl.runtime (runtime_id, name, kind, status, heartbeat)
        VALUES (1, 'a', 'worker_pool', 'ready', now() - interval '61 minutes'),
            (2, 'b', 'worker_pool', 'offline', now() - interval '9 days'),
            (3, 'c', 'worker_pool', 'ready', now() - interval '59 minutes'),
            (4, 'd', 'server_api', 'ready', now() - interval '9 days')
        """
    )


async def add_outbox_rows(conn: asyncpg.Connection) -> None:
    """Six published long ago, two just now, and one of each other status from long ago."""
    await conn.execute(
        """
        INSERT INTO noetl.outbox (execution_id, event_id, payload, status, published_at, updated_at)
        SELECT 1, n, '{}',
            CASE n WHEN 9 THEN 'PENDING' WHEN 10 THEN 'IN_FLIGHT' WHEN 11 THEN 'FAILED' ELSE 'PUBLISHED' END,
            CASE WHEN n <= 5 THEN now() - interval '40 days' WHEN n IN (7, 8) THEN now() END,
            now() - interval '40 days'
        FROM generate_series(1, 11) AS n
        """
    )


async def counts(conn: asyncpg.Connection) -> list[int]:
    return [
        await conn.fetchval(f"SELECT count(*) FROM noetl.{table}")
        for table in ("command", "runtime", "outbox", "event", "projection_snapshot")
    ]


async def partitions(conn: asyncpg.Connection) -> list[str]:
    rows = await conn.fetch(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'noetl.event'::regclass"
    )
    return sorted(row[0].removeprefix("noetl.") for row in rows)


async def test_the_defaults_are_the_seeds(conn: asyncpg.Connection, stub: Stub) -> None:
    await add_commands(conn)
    await add_runtimes(conn)
    await add_outbox_rows(conn)
    await add_event(conn, FEBRUARY)
    before = await partitions(conn)

    answer = await purge(stub)

    assert (answer.commands_purged, answer.runtime_purged) == (12, 2)
    assert (answer.outbox_purged, answer.events_purged) == (0, 0)
    assert not answer.event_partitions_dropped
    assert not answer.partitions_kept
    assert await counts(conn) == [8, 2, 11, 1, 0]
    assert await partitions(conn) == before


async def test_a_dry_run_tells_exactly_what_the_real_one_does(conn: asyncpg.Connection, stub: Stub) -> None:
    await add_commands(conn)
    await add_runtimes(conn)
    await add_outbox_rows(conn)
    await add_event(conn, FEBRUARY)
    await add_event(conn, MAY, event_type="subscription.registered", status="REGISTERED")
    policy = {"event_retention_days": DAYS, "outbox_retention_days": 30}
    before = await counts(conn), await partitions(conn)

    dry = await purge(stub, dry_run=True, **policy)
    assert (await counts(conn), await partitions(conn)) == before
    real = await purge(stub, **policy)

    assert dry == real
    assert (real.commands_purged, real.runtime_purged, real.outbox_purged) == (12, 2, 6)
    assert list(real.event_partitions_dropped) == ["event_pre_2026", "event_2026_q1"]
    assert real.events_purged == 2
    assert kept(real)["event_2026_q2"] == "LIVE_SUBSCRIPTION"
    assert await counts(conn) == [8, 2, 5, 1, 0]
    assert not {"event_pre_2026", "event_2026_q1"} & set(await partitions(conn))
    again = await purge(stub, **policy)
    assert (again.commands_purged, again.runtime_purged, again.outbox_purged, again.events_purged) == (
        0,
        0,
        0,
        0,
    )


async def test_partitions_of_both_layouts_are_dropped_when_they_are_over(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await add_event(conn, FEBRUARY)
    await add_event(conn, MAY, shift=DATABASE_TIME_SHIFT)

    answer = await purge(stub, event_retention_days=DAYS)

    assert list(answer.event_partitions_dropped) == [*OVER, "event_2026_q2_standard"]
    # Empty ones of the other layout read as the future, and the default partition never ends.
    reasons = kept(answer)
    assert reasons["event_2026_q1_standard"] == "RECENT_EVENTS"
    assert reasons["event_default"] == "UNBOUNDED"
    assert set(reasons) | set(answer.event_partitions_dropped) >= set(await partitions(conn))
    assert await counts(conn) == [0, 0, 0, 0, 0]


async def test_a_young_event_of_an_old_execution_keeps_its_partition(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await add_event(conn, FEBRUARY)
    await add_event(conn, FEBRUARY, created_at=datetime.now(UTC) - timedelta(days=DAYS - 1), offset=2)

    answer = await purge(stub, event_retention_days=DAYS)

    assert kept(answer)["event_2026_q1"] == "RECENT_EVENTS"
    assert await counts(conn) == [0, 0, 0, 2, 0]
    assert "event_2026_q1" in (await purge(stub, event_retention_days=DAYS - 2)).event_partitions_dropped


@pytest.mark.parametrize(
    ("events", "is_live"),
    [
        ([("subscription.registered", "REGISTERED")], True),
        ([("subscription.registered", "REGISTERED"), ("subscription.deactivated", "DEACTIVATED")], False),
        ([("subscription.deactivated", "DEACTIVATED"), ("subscription.activated", "ACTIVE")], True),
        ([("subscription.deactivated", "DEACTIVATED"), ("subscription.circuit.opened", "OPEN")], False),
        ([("subscription.deactivated", "DEACTIVATED"), ("subscription.draining", "WHAT")], False),
    ],
)
async def test_a_subscription_that_is_not_deactivated_keeps_its_partition(
    conn: asyncpg.Connection, stub: Stub, events: list[tuple[str, str]], is_live: bool
) -> None:
    for offset, (event_type, status) in enumerate(events, start=1):
        subscription_id = await add_event(conn, FEBRUARY, event_type=event_type, status=status, offset=offset)

    answer = await purge(stub, event_retention_days=DAYS)

    assert ("event_2026_q1" in answer.event_partitions_dropped) is not is_live
    if is_live:
        [entry] = [one for one in answer.partitions_kept if one.partition == "event_2026_q1"]
        assert (entry.reason, entry.detail) == (
            "LIVE_SUBSCRIPTION",
            f"subscription {subscription_id} is not DEACTIVATED",
        )


async def test_a_subscription_registered_between_check_and_lock_keeps_its_partition(
    conn: asyncpg.Connection, other_conn: asyncpg.Connection, stub: Stub
) -> None:
    # The first partition to be looked at is the one that matters; a lock for an earlier one would come too soon.
    await conn.execute("DROP TABLE noetl.event_pre_2026")
    await add_snapshot(conn, first_id_of(FEBRUARY))
    registration = other_conn.transaction()
    await registration.start()
    await add_event(other_conn, FEBRUARY, event_type="subscription.registered", status="REGISTERED")
    call = asyncio.ensure_future(purge(stub, event_retention_days=DAYS))

    await waiting_for_lock(conn)
    await registration.commit()

    answer = await call
    assert kept(answer)["event_2026_q1"] == "LIVE_SUBSCRIPTION"
    assert await counts(conn) == [0, 0, 0, 1, 1]


async def add_snapshot(conn: asyncpg.Connection, execution_id: int) -> None:
    await conn.execute(
        """
        INSERT INTO noetl.projection_snapshot (aggregate_id, aggregate_type, version, snapshot, checksum)
        VALUES (format('execution/%s/all', $1::bigint), 'replay_state', 1, '{}', '')
        """,
        execution_id,
    )


async def test_snapshots_go_with_the_events_they_were_folded_from(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    old, young = await add_event(conn, FEBRUARY), first_id_of(datetime(2026, 7, 2, tzinfo=UTC))
    for execution_id in (old, young, 2**63 - 1):
        await add_snapshot(conn, execution_id)
    await conn.execute(
        """
        INSERT INTO noetl.projection_snapshot (aggregate_id, aggregate_type, version, snapshot, checksum)
        VALUES ($1, 'orchestrator_workflow_state', 1, '{}', ''), ($2, 'orchestrator_workflow_state', 1, '{}', ''),
            ('order-7', 'business', 1, '{}', ''), ('execution/x/all', 'replay_state', 1, '{}', ''),
            ('execution/99999999999999999999/all', 'replay_state', 1, '{}', '')
        """,
        str(old),
        str(young),
    )

    await purge(stub, event_retention_days=DAYS)

    left = await conn.fetch("SELECT aggregate_id FROM noetl.projection_snapshot ORDER BY 1")
    assert {row[0] for row in left} == {
        f"execution/{young}/all",
        f"execution/{2**63 - 1}/all",
        "execution/99999999999999999999/all",
        "execution/x/all",
        "order-7",
        str(young),
    }


async def save_cursor(conn: asyncpg.Connection, **columns: Any) -> None:
    names = ", ".join(columns)
    values = ", ".join(columns.values())
    await conn.execute(f"INSERT INTO noetl.log_cursor (name, {names}) VALUES ('tailer', {values})")


NOW_SNAPSHOT = "pg_current_snapshot()"


async def test_events_that_the_tailer_has_not_passed_keep_their_partition(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await add_event(conn, FEBRUARY)
    await save_cursor(conn, seen=NOW_SNAPSHOT)
    await add_event(conn, MAY)

    answer = await purge(stub, event_retention_days=DAYS)

    assert list(answer.event_partitions_dropped) == ["event_pre_2026", "event_2026_q1"]
    assert kept(answer)["event_2026_q2"] == "NOT_PUBLISHED"
    await conn.execute(f"UPDATE noetl.log_cursor SET seen = {NOW_SNAPSHOT}")
    assert list((await purge(stub, event_retention_days=DAYS)).event_partitions_dropped) == ["event_2026_q2"]


async def test_inside_a_gap_only_what_lies_before_the_place_is_passed(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    await save_cursor(conn, seen=NOW_SNAPSHOT)
    february, may = await add_event(conn, FEBRUARY), await add_event(conn, MAY)
    await conn.execute(
        f"""
        UPDATE noetl.log_cursor
        SET target = {NOW_SNAPSHOT}, (at_xact, at_event) = (
            SELECT xact_id, event_id FROM noetl.event WHERE execution_id = $1
        )
        """,
        february,
    )

    answer = await purge(stub, event_retention_days=DAYS)

    assert list(answer.event_partitions_dropped) == ["event_pre_2026", "event_2026_q1"]
    assert kept(answer)["event_2026_q2"] == "NOT_PUBLISHED"
    assert await conn.fetchval("SELECT execution_id FROM noetl.event") == may


async def test_without_the_column_a_cursor_is_compared_by_event_id(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    february, _ = await add_event(conn, FEBRUARY), await add_event(conn, MAY)
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN xact_id")
    await save_cursor(conn, at_event=str(february + 1))

    answer = await purge(stub, event_retention_days=DAYS)

    assert list(answer.event_partitions_dropped) == ["event_pre_2026", "event_2026_q1"]
    assert kept(answer)["event_2026_q2"] == "NOT_PUBLISHED"


@pytest.fixture
async def app_role(conn: asyncpg.Connection, database_url: str) -> AsyncIterator[str]:
    """A role that may use every table and owns none."""
    role = database_url.rpartition("/")[2] + "_app"
    await conn.execute(
        f"""
        CREATE ROLE {role} LOGIN;
        GRANT USAGE, CREATE ON SCHEMA noetl TO {role};
        GRANT ALL ON ALL TABLES IN SCHEMA noetl TO {role};
        GRANT ALL ON ALL SEQUENCES IN SCHEMA noetl TO {role};
        """
    )
    yield role
    await conn.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


async def test_a_partition_of_another_owner_is_reported_and_the_others_go(
    conn: asyncpg.Connection, database_url: str, app_role: str, channel_to: ChannelTo
) -> None:
    await add_catalog_entry(conn)
    await add_event(conn, FEBRUARY)
    await add_event(conn, MAY)
    await conn.execute(
        f"""
        REVOKE ALL ON noetl.event_2026_q1 FROM {app_role};
        ALTER TABLE noetl.event_2026_q2 OWNER TO {app_role};
        """
    )
    async with serving(settings_for(database_url.replace("://noetl@", f"://{app_role}@"))) as server:
        stub = projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address))

        dry = await purge(stub, dry_run=True, event_retention_days=DAYS)
        answer = await purge(stub, event_retention_days=DAYS)

    assert dry == answer
    assert list(answer.event_partitions_dropped) == ["event_2026_q2"]
    assert (kept(answer)["event_pre_2026"], kept(answer)["event_2026_q1"]) == ("NOT_OWNER", "NOT_OWNER")
    assert await counts(conn) == [0, 0, 0, 1, 0]


async def test_a_reader_that_stays_makes_the_purge_give_up_and_say_so(
    conn: asyncpg.Connection, other_conn: asyncpg.Connection, stub: Stub
) -> None:
    await add_event(conn, FEBRUARY)
    await add_snapshot(conn, first_id_of(FEBRUARY))
    async with other_conn.transaction():
        await other_conn.fetch("SELECT * FROM noetl.event_2026_q1")

        answer = await purge(stub, event_retention_days=DAYS)

        assert kept(answer)["event_2026_q1"] == "LOCK_TIMEOUT"
        assert {"event_pre_2026", "event_2026_q2"} <= set(answer.event_partitions_dropped)
        assert await counts(conn) == [0, 0, 0, 1, 1]


FIELDS = ("command_retention_days", "runtime_stale_minutes", "event_retention_days", "outbox_retention_days")


@pytest.mark.parametrize("field", FIELDS)
async def test_values_out_of_range_never_delete_anything(
    conn: asyncpg.Connection, stub: Stub, field: str
) -> None:
    await add_commands(conn)
    await add_runtimes(conn)
    await add_outbox_rows(conn)
    await add_event(conn, FEBRUARY)
    before = await counts(conn), await partitions(conn)
    off = dict.fromkeys(FIELDS, 0)

    for amount in (52_560_001, 2**31, 2**32, 2**32 - 6, 2**63 - 1):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await purge(stub, **{field: amount})
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"policy.{field} must not be above" in (failure.value.details() or "")
    for amount in (0, -1, -(2**31), -(2**63)):
        answer = await purge(stub, **{**off, field: amount})
        assert answer == pb.PurgeStaleResponse()

    assert (await counts(conn), await partitions(conn)) == before


async def test_locked_rows_are_left_for_the_next_time(
    conn: asyncpg.Connection, other_conn: asyncpg.Connection, stub: Stub
) -> None:
    await add_commands(conn)
    await add_runtimes(conn)
    await add_outbox_rows(conn)
    async with other_conn.transaction():
        await other_conn.execute("SELECT FROM noetl.command WHERE command_id = 1 FOR UPDATE")
        await other_conn.execute("SELECT FROM noetl.runtime WHERE runtime_id = 1 FOR UPDATE")
        await other_conn.execute("SELECT FROM noetl.outbox WHERE event_id = 1 FOR UPDATE")

        answer = await purge(stub, outbox_retention_days=30)

        assert (answer.commands_purged, answer.runtime_purged, answer.outbox_purged) == (11, 1, 5)
    again = await purge(stub, outbox_retention_days=30)
    assert (again.commands_purged, again.runtime_purged, again.outbox_purged) == (1, 1, 1)


async def test_two_purges_at_once_do_not_disturb_each_other(conn: asyncpg.Connection, stub: Stub) -> None:
    await add_commands(conn)
    await add_event(conn, FEBRUARY)

    answers = await asyncio.gather(*(purge(stub, event_retention_days=DAYS) for _ in range(4)))

    assert sum(answer.commands_purged for answer in answers) == 12
    dropped = sorted(name for answer in answers for name in answer.event_partitions_dropped)
    assert dropped == sorted(OVER)


async def test_partitions_to_come_are_made_and_a_dry_run_makes_none(
    conn: asyncpg.Connection, stub: Stub
) -> None:
    before = await partitions(conn)
    coming = (datetime.now(UTC) + timedelta(days=90)).year
    for name in before:
        if str(coming) in name:
            await conn.execute(f"DROP TABLE noetl.{name}")
    without = await partitions(conn)
    assert without != before

    await purge(stub, dry_run=True)
    assert await partitions(conn) == without
    await purge(stub)

    identity = first_id_of(datetime.now(UTC) + timedelta(days=90))
    assert await conn.fetchval(
        """
        SELECT count(*) FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'noetl.event'::regclass
            AND substring(pg_get_expr(c.relpartbound, c.oid) FROM 'FROM \\(''(\\d+)''\\)')::bigint <= $1
            AND substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \\(''(\\d+)''\\)')::bigint > $1
        """,
        identity,
    )


async def test_every_shard_is_purged_and_partitions_say_which(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    urls = [await new_database() for _ in range(2)]
    for url in urls:
        shard = await asyncpg.connect(url)
        await add_commands(shard)
        await shard.close()
    server = await start_server(settings_for(*urls))
    stub = projection_pb2_grpc.ProjectionServiceStub(await channel_to(server.address))

    answer = await purge(stub, event_retention_days=DAYS)

    assert answer.commands_purged == 24
    assert sorted(answer.event_partitions_dropped) == sorted(
        f"{name}@{shard}" for name in OVER for shard in (0, 1)
    )


@pytest.mark.parametrize(
    ("query", "arguments"),
    [
        ("purge_commands", [datetime(2026, 1, 1, tzinfo=UTC), 5, 5, 100]),
        ("purge_outbox", [datetime(2026, 1, 1, tzinfo=UTC), 5, 100]),
    ],
)
async def test_pages_are_read_by_key(conn: asyncpg.Connection, query: str, arguments: list[Any]) -> None:
    await conn.execute(
        """
        INSERT INTO noetl.command (command_id, event_id, execution_id, catalog_id, step_name)
        SELECT n, n, n, 1, 's' FROM generate_series(1, 20000) AS n;
        INSERT INTO noetl.outbox (execution_id, event_id, payload)
        SELECT 1, n, '{}' FROM generate_series(1, 20000) AS n;
        ANALYZE noetl.command, noetl.outbox;
        """
    )
    await conn.execute("SET plan_cache_mode = force_generic_plan")

    async with conn.transaction():
        await conn.execute(queries["prefer_index_joins"])
        plan = await conn.fetch(f"EXPLAIN {queries[query]}", *arguments)

    text = "\n".join(row[0] for row in plan)
    assert "Index Scan" in text
    assert "Seq Scan" not in text, text


async def test_a_purge_stops_no_writer_and_takes_nothing_that_is_needed(
    database_url: str, server: Server
) -> None:
    verdict = await check_purge.scenario(
        database_url, server.address, token=TOKEN, size="small", seed=1, progress=silent
    )

    assert verdict.violations == []
    assert verdict.figures["written_meanwhile"] > 100
