"""The schema: made on an empty database, completed on NoETL's own, beside writers, with few rights."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc.checks import migrate as check_migrate
from noetl_grpc.checks.frame import silent
from noetl_grpc.dev.postgres import Postgres, find_binaries
from noetl_grpc.dev.process import LaunchError
from noetl_grpc.errors import SchemaError
from noetl_grpc.storage import drift
from noetl_grpc.storage.migrate import migrate, render_sql, require_usable, verify
from noetl_grpc.storage.queries import queries

NOETL_4_26 = Path(__file__).with_name("noetl_4_26.sql").read_text(encoding="utf-8")
TEMPLATE = "noetl_4_26"

#: Ids of the third quarter of 2026 as servers mint them.
EXECUTION_ID = 340_000_000_000_000_000

ADDED_TO_NOETL = {
    "column noetl.outbox.claim_token",
    "column noetl.outbox.lease_expires_at",
    "column noetl.outbox.dead_at",
    "column noetl.outbox.headers",
    "column noetl.event.xact_id",
    "index noetl.idx_outbox_event_alone",
    "index noetl.idx_outbox_claimable",
    "index noetl.idx_outbox_leased",
    "index noetl.idx_outbox_undelivered",
    "index noetl.idx_outbox_dead",
    "index noetl.idx_event_xact_id",
    "index noetl.idx_event_subscription_state",
    "index noetl.idx_event_subscription_path",
    "index noetl.idx_event_dead_letter_unresolved",
    "table noetl.log_cursor",
    "table noetl.subscription_runtime",
    "table noetl.machine_lease",
    "table noetl.event_dead_letter",
    "column noetl.event_dead_letter.attempts",
    "column noetl.event_dead_letter.last_error",
    "table noetl.schema_version",
    "rows of noetl.resource",
}

Connect = Callable[..., Awaitable[asyncpg.Connection]]

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
async def noetl_template(postgres: Postgres) -> str:
    """A database as NoETL 4.26 itself leaves it."""
    server = await asyncpg.connect(postgres.url())
    await server.execute(f"CREATE DATABASE {TEMPLATE}")
    await server.close()
    installation = await asyncpg.connect(postgres.url(TEMPLATE))
    await installation.execute(NOETL_4_26)
    await installation.close()
    return TEMPLATE


@pytest.fixture
async def make_database(postgres: Postgres) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Makes a database from a template and returns its name."""
    server = await asyncpg.connect(postgres.url())
    made = []

    async def make(template: str) -> str:
        name = f"migration_{next(_numbers)}"
        await server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        made.append(name)
        return name

    yield make
    for name in made:
        await server.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await server.close()


@pytest.fixture
async def empty(make_database: Callable[[str], Awaitable[str]]) -> str:
    return await make_database("template0")


@pytest.fixture
async def existing(make_database: Callable[[str], Awaitable[str]], noetl_template: str) -> str:
    return await make_database(noetl_template)


@pytest.fixture(params=["template0", TEMPLATE])
async def either(
    request: pytest.FixtureRequest, make_database: Callable[[str], Awaitable[str]], noetl_template: str
) -> str:
    """An empty database, and NoETL's."""
    return await make_database(request.param)


@pytest.fixture
async def connect(postgres: Postgres) -> AsyncIterator[Connect]:
    """Opens connections that are closed when the test ends."""
    opened: list[asyncpg.Connection] = []

    async def open_connection(database: str, user: str = Postgres.user) -> asyncpg.Connection:
        connection = await asyncpg.connect(postgres.url(database), user=user)
        opened.append(connection)
        return connection

    yield open_connection
    for connection in opened:
        connection.terminate()


@pytest.fixture
async def stranger_role(postgres: Postgres) -> AsyncIterator[str]:
    """A role that owns nothing."""
    role = f"stranger_{next(_numbers)}"
    server = await asyncpg.connect(postgres.url())
    await server.execute(f"CREATE ROLE {role} LOGIN")
    yield role
    # What it owns goes with the test's database, whose fixture ends later.
    await server.close()


async def objects_of(conn: asyncpg.Connection) -> set[str]:
    """Everything in the schema and what it looks like, partitions and their indexes included."""
    await conn.execute("SET search_path = pg_catalog")
    rows = await conn.fetch(
        """
        SELECT format('column %s.%s %s %s %s', a.attrelid::regclass, a.attname,
            format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p', 'v')
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'noetl'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT format('index %s valid %s owner %s', pg_get_indexdef(indexrelid), indisvalid, relowner)
        FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE relnamespace = 'noetl'::regnamespace
        UNION ALL
        SELECT format('constraint %s of %s: %s', conname, conrelid::regclass, pg_get_constraintdef(oid))
        FROM pg_constraint WHERE connamespace = 'noetl'::regnamespace
        UNION ALL
        SELECT format('relation %s %s %s', oid::regclass, relkind, pg_get_expr(relpartbound, oid))
        FROM pg_class WHERE relnamespace = 'noetl'::regnamespace
        UNION ALL
        SELECT format('function %s %s', oid::regprocedure, prosrc)
        FROM pg_proc WHERE pronamespace = 'noetl'::regnamespace
        UNION ALL
        SELECT format('resource %s', name) FROM noetl.resource
        """
    )
    await conn.execute("RESET search_path")
    return {row[0] for row in rows}


async def seed_catalog(conn: asyncpg.Connection) -> None:
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, kind) VALUES (1, 'demo/one', 'playbook')"
    )


async def insert_events(conn: asyncpg.Connection, count: int, *, first: int = 1) -> None:
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type)
        SELECT $1, 1, id, 'step.exit' FROM generate_series($2::bigint, $2::bigint + $3::bigint - 1) AS id
        """,
        EXECUTION_ID,
        first,
        count,
    )


async def test_an_empty_database_gets_the_whole_schema(empty: str, connect: Connect) -> None:
    conn = await connect(empty)

    report = await migrate(conn)

    assert report.missing == []
    assert "table noetl.event" in report.applied
    assert await verify(conn) == []
    usability = await require_usable(conn)
    assert (usability.has_xact_id, usability.has_xact_index, usability.optional_drift) == (True, True, ())
    assert await conn.fetchval("SELECT array_agg(version ORDER BY version) FROM noetl.schema_version") == [
        1,
        2,
        3,
    ]


async def test_the_tables_we_make_are_noetls(empty: str, existing: str, connect: Connect) -> None:
    ours, noetls = await connect(empty), await connect(existing)
    await migrate(ours)
    await migrate(noetls)

    made, completed = await objects_of(ours), await objects_of(noetls)

    tables = [row[0] for row in await ours.fetch("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p')")]
    of_tables = {
        line
        for line in completed
        if line.startswith(("column ", "constraint ", "relation "))
        and any(f" noetl.{table}{end}" in line for table in tables for end in (" ", ".", ":"))
    }
    assert len(of_tables) > 1000
    assert of_tables <= made


async def test_an_existing_database_is_only_added_to(existing: str, connect: Connect) -> None:
    conn = await connect(existing)
    before = await objects_of(conn)

    report = await migrate(conn)

    after = await objects_of(conn)
    assert report.missing == []
    assert set(report.applied) == ADDED_TO_NOETL
    assert before <= after
    new_on_noetls_tables = {line for line in after - before if line.startswith("column noetl.event.")}
    assert new_on_noetls_tables == {"column noetl.event.xact_id xid8 f pg_current_xact_id()"}
    assert not any("valid f" in line for line in after)
    assert (await require_usable(conn)).has_xact_id


async def test_a_second_run_changes_nothing(either: str, connect: Connect) -> None:
    conn = await connect(either)
    await migrate(conn)
    before = await objects_of(conn)
    versions = await conn.fetch("SELECT version, name, applied_at FROM noetl.schema_version")

    report = await migrate(conn)

    assert (report.applied, report.missing) == ([], [])
    assert await objects_of(conn) == before
    assert await conn.fetch("SELECT version, name, applied_at FROM noetl.schema_version") == versions


async def test_rows_written_after_the_migration_carry_their_transaction(
    existing: str, connect: Connect
) -> None:
    conn = await connect(existing)
    await seed_catalog(conn)
    await insert_events(conn, 10)
    size = await conn.fetchval("SELECT relfilenode FROM pg_class WHERE oid = 'noetl.event_2026_q3'::regclass")

    await migrate(conn)

    async with conn.transaction():
        await insert_events(conn, 1, first=11)
        mine = await conn.fetchval("SELECT pg_current_xact_id()")
    written = await conn.fetch("SELECT event_id, xact_id FROM noetl.event WHERE xact_id = $1", mine)
    assert [row["event_id"] for row in written] == [11]
    assert await conn.fetchval("SELECT count(*) FROM noetl.event WHERE xact_id IS NULL") == 0
    assert size == await conn.fetchval(
        "SELECT relfilenode FROM pg_class WHERE oid = 'noetl.event_2026_q3'::regclass"
    )


async def test_columns_that_an_older_installation_lacks_are_added(existing: str, connect: Connect) -> None:
    conn = await connect(existing)
    await conn.execute("DROP VIEW noetl.event_log")
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN prev_event_id, DROP COLUMN schema_version")

    report = await migrate(conn)

    assert {"column noetl.event.prev_event_id", "column noetl.event.schema_version"} <= set(report.applied)
    assert await verify(conn) == []


DAMAGES = [
    ("ALTER TABLE noetl.outbox DROP COLUMN headers", "column noetl.outbox.headers is missing", True),
    (
        "ALTER TABLE noetl.outbox ALTER COLUMN claim_token TYPE text",
        "column noetl.outbox.claim_token is text, not uuid",
        True,
    ),
    (
        "ALTER TABLE noetl.outbox ALTER COLUMN subject SET NOT NULL",
        "column noetl.outbox.subject refuses NULL",
        True,
    ),
    (
        "ALTER TABLE noetl.outbox ALTER COLUMN last_error TYPE varchar(200)",
        "column noetl.outbox.last_error is character varying(200), not text",
        False,
    ),
    (
        "ALTER TABLE noetl.event ALTER COLUMN xact_id DROP DEFAULT",
        "column noetl.event.xact_id has the default NULL, not pg_current_xact_id()",
        False,
    ),
    (
        "ALTER TABLE noetl.outbox DROP CONSTRAINT outbox_execution_id_event_id_key",
        "constraint outbox_execution_id_event_id_key of noetl.outbox is missing",
        True,
    ),
    (
        "ALTER TABLE noetl.event DROP CONSTRAINT chk_event_result_shape",
        "constraint chk_event_result_shape of noetl.event is missing",
        False,
    ),
    ("DROP INDEX noetl.idx_outbox_event_alone", "index noetl.idx_outbox_event_alone is missing", True),
    ("DROP INDEX noetl.idx_outbox_claimable", "index noetl.idx_outbox_claimable is missing", False),
    (
        "DROP INDEX noetl.idx_outbox_dead; CREATE INDEX idx_outbox_dead ON noetl.outbox (status)",
        "index noetl.idx_outbox_dead is btree (status), not btree (dead_at) WHERE (dead_at IS NOT NULL)",
        False,
    ),
    ("DROP TABLE noetl.machine_lease", "table noetl.machine_lease is missing", True),
    ("DELETE FROM noetl.resource WHERE name = 'mcp'", "rows of noetl.resource is missing", False),
]


async def test_drift_is_listed(conn: asyncpg.Connection) -> None:
    await conn.execute("; ".join(damage for damage, _, _ in DAMAGES))

    found = await verify(conn)

    assert {(str(item), item.required) for item in found} == {
        (text, required) for _, text, required in DAMAGES
    }
    assert [item.required for item in found] == sorted((item.required for item in found), reverse=True)
    with pytest.raises(SchemaError, match=r"Run `noetl-grpc migrate`"):
        await require_usable(conn)


async def test_optional_drift_does_not_stop_the_service(conn: asyncpg.Connection) -> None:
    await conn.execute("; ".join(damage for damage, _, required in DAMAGES if not required))

    usability = await require_usable(conn)

    assert {str(item) for item in usability.optional_drift} == {
        text for _, text, required in DAMAGES if not required
    }
    assert (usability.has_xact_id, usability.has_xact_index) == (False, True)


async def test_an_index_of_another_name_serves_as_well(conn: asyncpg.Connection) -> None:
    await conn.execute("ALTER INDEX noetl.idx_outbox_dead RENAME TO somebody_elses")

    assert await verify(conn) == []
    assert (await migrate(conn)).applied == []


async def test_a_schema_that_was_never_migrated_is_refused(
    empty: str, existing: str, connect: Connect
) -> None:
    for database, lack in (
        (empty, "table noetl.outbox is missing"),
        (existing, "column noetl.outbox.dead_at"),
    ):
        conn = await connect(database)
        with pytest.raises(SchemaError) as refusal:
            await require_usable(conn)
        assert f"the schema of database {database} can't be used" in str(refusal.value)
        assert lack in str(refusal.value)
        assert "noetl-grpc migrate" in str(refusal.value)


async def test_an_old_server_is_refused(conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "SERVER_VERSION_NUM_MIN", 990_000)

    for refused in (require_usable, migrate):
        with pytest.raises(SchemaError, match="is too old: noetl_grpc needs version 15 or newer"):
            await refused(conn)


async def grant_as_noetl_does(owner: asyncpg.Connection, role: str) -> None:
    await owner.execute(
        f"""
        GRANT USAGE, CREATE ON SCHEMA noetl TO {role};
        GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA noetl TO {role};
        GRANT USAGE ON ALL SEQUENCES IN SCHEMA noetl TO {role};
        """
    )


async def test_a_role_that_owns_nothing_does_what_it_can(
    existing: str, connect: Connect, stranger_role: str
) -> None:
    owner = await connect(existing)
    await grant_as_noetl_does(owner, stranger_role)
    service = await connect(existing, stranger_role)

    report = await migrate(service)

    assert {title for title in report.applied if title.startswith("table ")} == {
        "table noetl.log_cursor",
        "table noetl.subscription_runtime",
        "table noetl.machine_lease",
        "table noetl.event_dead_letter",
        "table noetl.schema_version",
    }
    missing = {item.what: item for item in report.missing}
    assert set(missing) == {
        title for title in ADDED_TO_NOETL if title.startswith(("column noetl.outbox", "column noetl.event."))
    } | {title for title in ADDED_TO_NOETL if title.startswith("index noetl.idx_outbox")} | {
        "index noetl.idx_event_xact_id",
        "index noetl.idx_event_subscription_state",
        "index noetl.idx_event_subscription_path",
    }
    assert not report.is_usable
    assert missing["column noetl.outbox.claim_token"].required
    assert "must be owner of table outbox" in missing["column noetl.outbox.claim_token"].problem
    assert not missing["column noetl.event.xact_id"].required

    with pytest.raises(SchemaError) as refusal:
        await require_usable(service)
    for item in report.missing:
        if item.required:
            assert item.sql is not None
            assert item.sql in str(refusal.value)
            for statement in filter(None, map(str.strip, item.sql.split(";"))):
                await owner.execute(statement)
    usability = await require_usable(service)
    assert (usability.has_xact_id, usability.has_xact_index) == (False, False)
    assert (await migrate(service)).is_usable


async def test_a_role_without_any_right_is_told_everything(
    existing: str, connect: Connect, stranger_role: str
) -> None:
    service = await connect(existing, stranger_role)

    report = await migrate(service)

    assert report.applied == []
    assert {"table noetl.log_cursor", "privilege USAGE on schema noetl"} <= {
        item.what for item in report.missing
    }
    with pytest.raises(SchemaError, match=r"CREATE TABLE IF NOT EXISTS noetl\.log_cursor") as refusal:
        await require_usable(service)
    owner = await connect(existing)
    _, _, sql = str(refusal.value).partition("can run:\n")
    for statement in sql.removesuffix(";").split(";\n"):
        await owner.execute(statement)
    assert not (await require_usable(service)).has_xact_id


async def test_a_role_without_any_right_on_an_empty_database_is_told_everything(
    empty: str, connect: Connect, stranger_role: str
) -> None:
    service, owner = await connect(empty, stranger_role), await connect(empty)

    report = await migrate(service)

    assert report.applied == []
    with pytest.raises(SchemaError) as refusal:
        await require_usable(service)
    _, _, sql = str(refusal.value).partition("can run:\n")
    await owner.execute(sql.replace(" CONCURRENTLY", ""))
    assert (
        await owner.fetchval("SELECT count(*) FROM pg_inherits WHERE inhparent = 'noetl.event'::regclass")
        == 16
    )
    assert not (await require_usable(service)).has_xact_id


async def test_a_role_that_may_not_write_is_told_the_grant(
    conn: asyncpg.Connection, database_url: str, stranger_role: str
) -> None:
    await conn.execute(f"GRANT USAGE ON SCHEMA noetl TO {stranger_role}")
    service = await asyncpg.connect(database_url, user=stranger_role)

    try:
        with pytest.raises(SchemaError, match=rf"GRANT SELECT, INSERT ON noetl\.event TO {stranger_role};"):
            await require_usable(service)
    finally:
        await service.close()


async def test_two_migrators_at_once_share_the_work(either: str, connect: Connect) -> None:
    connections = [await connect(either) for _ in range(3)]

    reports = await asyncio.gather(*(migrate(conn) for conn in connections))

    assert [report.missing for report in reports] == [[], [], []]
    applied = [title for report in reports for title in report.applied]
    assert len(applied) == len(set(applied))
    assert await verify(connections[0]) == []


async def wait_for_build(conn: asyncpg.Connection) -> None:
    """Until some CREATE INDEX CONCURRENTLY waits for a transaction."""
    waiting = """
        SELECT count(*) FROM pg_stat_progress_create_index
        WHERE datname = current_database() AND phase LIKE 'waiting%'
    """
    while not await conn.fetchval(waiting):
        pass


async def test_an_interrupted_migration_goes_on(existing: str, connect: Connect) -> None:
    conn, stranger, watcher = [await connect(existing) for _ in range(3)]
    await seed_catalog(conn)
    await insert_events(conn, 100)
    transaction = stranger.transaction(isolation="repeatable_read")
    await transaction.start()
    await stranger.fetchval("SELECT count(*) FROM noetl.resource")

    running = asyncio.create_task(migrate(conn))
    async with asyncio.timeout(10):
        await wait_for_build(watcher)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    unfinished = await watcher.fetch("SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid")
    await transaction.rollback()
    report = await migrate(await connect(existing))

    assert unfinished
    assert report.missing == []
    assert not any("valid f" in line for line in await objects_of(watcher))


async def test_unfinished_indexes_of_partitions_are_built_again(existing: str, connect: Connect) -> None:
    conn, stranger, watcher = [await connect(existing) for _ in range(3)]
    await seed_catalog(conn)
    await insert_events(conn, 100)
    await conn.execute("ALTER TABLE noetl.event ADD COLUMN xact_id xid8 DEFAULT pg_current_xact_id()")
    await conn.execute("CREATE INDEX idx_event_xact_id ON ONLY noetl.event (xact_id, event_id)")
    await conn.execute("CREATE INDEX ready_made ON noetl.event_2026_q1 (xact_id, event_id)")
    async with stranger.transaction(isolation="repeatable_read"):
        await stranger.fetchval("SELECT count(*) FROM noetl.resource")
        building = asyncio.create_task(
            conn.execute(
                """
                CREATE INDEX CONCURRENTLY event_2026_q3_idx_event_xact_id
                ON noetl.event_2026_q3 (xact_id, event_id)
                """
            )
        )
        async with asyncio.timeout(10):
            await wait_for_build(watcher)
        await watcher.execute(f"SELECT pg_cancel_backend({conn.get_server_pid()})")
        with pytest.raises(asyncpg.QueryCanceledError):
            await building

    said: list[str] = []
    report = await migrate(conn, progress=said.append)

    assert report.missing == []
    assert "DROP INDEX CONCURRENTLY IF EXISTS noetl.event_2026_q3_idx_event_xact_id" in said
    assert not any("valid f" in line for line in await objects_of(watcher))
    parts = await conn.fetch(
        "SELECT inhrelid FROM pg_inherits WHERE inhparent = 'noetl.idx_event_xact_id'::regclass"
    )
    assert len(parts) == 16
    assert await conn.fetchval("SELECT 'noetl.ready_made'::regclass::oid") in [
        row["inhrelid"] for row in parts
    ]


async def test_writers_go_on_behind_strangers_while_a_migration_is_killed_and_repeated() -> None:
    verdict = await check_migrate.run(size="small", seed=1, progress=silent)

    assert verdict.violations == []
    assert verdict.figures["kills"] == 1
    assert verdict.figures["written_meanwhile"] > 100


async def test_a_lock_that_is_never_given_back_is_reported(existing: str, connect: Connect) -> None:
    conn, stranger = await connect(existing), await connect(existing)
    await stranger.execute("SET application_name = 'forgotten'")
    async with stranger.transaction():
        await stranger.execute("LOCK TABLE noetl.outbox IN ROW EXCLUSIVE MODE")

        report = await migrate(conn, lock_patience_seconds=1.0)

    problems = {item.what: item.problem for item in report.missing if item.required}
    assert "locked by process" in problems["column noetl.outbox.claim_token"]
    assert "(forgotten)" in problems["column noetl.outbox.claim_token"]
    assert (await migrate(conn)).missing == []


async def test_duplicates_without_an_execution_are_reported(existing: str, connect: Connect) -> None:
    conn = await connect(existing)
    await conn.execute("INSERT INTO noetl.outbox (event_id, payload) VALUES (7, '{}'), (7, '{}')")

    report = await migrate(conn)

    assert [(item.what, item.required) for item in report.missing] == [
        ("index noetl.idx_outbox_event_alone", True)
    ]
    assert "Key (event_id)=(7) is duplicated" in report.missing[0].problem
    assert not any("valid f" in line for line in await objects_of(conn))
    await conn.execute("DELETE FROM noetl.outbox WHERE outbox_id = 2")
    assert (await migrate(conn)).applied == ["index noetl.idx_outbox_event_alone"]


def run_psql(postgres: Postgres, database: str, *options: str, user: str = Postgres.user) -> str:
    url = postgres.url(database).replace(f"{Postgres.user}@", f"{user}@")
    done = subprocess.run(
        [postgres.binaries / "psql", "-X", "-q", *options, url],
        input=render_sql(),
        text=True,
        capture_output=True,
        timeout=15,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


async def test_the_script_does_what_migrate_does(
    either: str, postgres: Postgres, connect: Connect, stranger_role: str
) -> None:
    conn = await connect(either)
    has_noetl = await conn.fetchval("SELECT to_regclass('noetl.event') IS NOT NULL")
    before = await objects_of(conn) if has_noetl else set()

    await asyncio.to_thread(run_psql, postgres, either, "-v", f"service_role={stranger_role}")

    assert await verify(conn) == []
    after = await objects_of(conn)
    assert before <= after
    assert not any("valid f" in line for line in after)
    assert (await migrate(conn)).applied == []
    service = await connect(either, stranger_role)
    assert await verify(service) == []
    assert (await require_usable(service)).has_xact_id
    await asyncio.to_thread(run_psql, postgres, either)
    assert await objects_of(conn) == after


async def test_every_named_statement_fits_the_schema(conn: asyncpg.Connection) -> None:
    # Tables of a session, which other statements are about.
    await conn.execute(queries["make_streamed"])
    await conn.execute(queries["make_passed"])
    failures = []
    for name, statement in queries.items():
        try:
            await conn.prepare(statement)
        except asyncpg.PostgresError as error:
            failures.append(f"{name}: {error}")

    assert failures == []


async def test_subscriptions_are_found_by_their_own_indexes(conn: asyncpg.Connection) -> None:
    kinds = ", ".join(
        f"'subscription.{word}'"
        for word in ("registered", "activated", "paused", "resumed", "draining", "deactivated")
    )
    lifecycle = f"SELECT execution_id, status FROM noetl.event WHERE event_type IN ({kinds})"
    state = f"{lifecycle} AND execution_id = 5 ORDER BY event_id DESC LIMIT 1"
    path = f"{lifecycle} AND node_name = 'demo/orders'"

    plans = ["\n".join(row[0] for row in await conn.fetch(f"EXPLAIN {query}")) for query in (state, path)]

    assert "subscription_state" in plans[0] or "execution_id_event_id_idx" in plans[0], plans[0]
    assert "node_name_execution_id_event_id" in plans[1], plans[1]


async def test_the_oldest_server_we_support_prints_the_same_schema() -> None:
    try:
        binaries = find_binaries(15)
    except LaunchError:
        pytest.skip("PostgreSQL 15 is not installed")
    async with Postgres(binaries=binaries, durable=False) as oldest:
        conn = await asyncpg.connect(oldest.url())

        report = await migrate(conn)

        assert report.missing == []
        assert (await migrate(conn)).applied == []
        await conn.close()
