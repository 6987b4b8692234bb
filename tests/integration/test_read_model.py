"""Snapshots that only go forwards, know what they hold, and can be verified and mended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import orjson
import pytest

from noetl_grpc.core import snapshots
from noetl_grpc.core.access import Tenant
from noetl_grpc.core.projections import Advanced, Check, NotAdvanced
from noetl_grpc.core.snapshots import SeedOutcome
from noetl_grpc.core.upcast import Registry
from noetl_grpc.errors import NotFound, Unavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.services import readmodel
from noetl_grpc.services.readmodel import ReadModel
from noetl_grpc.services.seeds import Seeds
from noetl_grpc.services.waiters import Waiters
from noetl_grpc.storage import projections
from noetl_grpc.storage.pool import Shards, open_shards
from noetl_grpc.storage.projections import Awaited
from tests.factories import CATALOG_ID, EXECUTION_ID, add_catalog_entry
from tests.locks import waiting_for_lock

DEFAULT = Tenant("default", "default")
OTHER = Tenant("acme", "default")


async def insert(
    conn: asyncpg.Connection,
    event_ids: Sequence[int],
    *,
    execution_id: int = EXECUTION_ID,
    tenant: Tenant = DEFAULT,
    event_type: str = "command.completed",
    meta: dict[str, Any] | None = None,
) -> None:
    """Events of one execution, as any writer would store them."""
    await conn.executemany(
        "INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, node_name, status, meta, tenant_id,"
        " organization_id) VALUES ($1, $2, $3, $4, 'step', 'COMPLETED', $5, $6, $7)",
        [
            (
                execution_id,
                event_id,
                CATALOG_ID,
                event_type,
                orjson.dumps(meta or {"command_id": event_id % 7, "stage_id": event_id % 3}).decode(),
                tenant.tenant_id,
                tenant.organization_id,
            )
            for event_id in event_ids
        ],
    )


@pytest.fixture
async def shards(database_url: str, conn: asyncpg.Connection) -> AsyncIterator[Shards]:
    await add_catalog_entry(conn)
    opened = await open_shards([database_url], cluster_url=database_url)
    yield opened
    await opened.close()


def _model(shards: Shards, registry: Registry | None = None) -> ReadModel:
    registry = registry or Registry.of()
    metrics = Metrics(shards=len(shards))
    seeds = Seeds(registry=registry, metrics=metrics)
    return ReadModel(shards, seeds=seeds, registry=registry, metrics=metrics, folding=asyncio.Semaphore(4))


@pytest.fixture
def model(shards: Shards) -> ReadModel:
    return _model(shards)


async def _advance(model: ReadModel, execution_id: int = EXECUTION_ID, tenant: Tenant = DEFAULT) -> Advanced:
    (outcome,) = await model.advance(tenant, [execution_id])
    assert isinstance(outcome, Advanced)
    return outcome


async def _checksums(model: ReadModel, execution_id: int = EXECUTION_ID) -> tuple[str, str]:
    """Of the stored snapshot and of a fold of the whole log."""
    (verified,) = await model.verify(DEFAULT, [execution_id], repair=False)
    return verified.stored_checksum, verified.log_checksum


async def test_a_first_advance_folds_everything_and_a_second_nothing(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await insert(conn, range(1, 51))

    first, second = await _advance(model), await _advance(model)

    assert first == Advanced(EXECUTION_ID, version=50, events=50, changed=True, rebuilt=False)
    assert second == Advanced(EXECUTION_ID, version=50, events=50, changed=False, rebuilt=False)


async def test_new_events_go_on_from_the_snapshot_and_equal_a_whole_fold(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await insert(conn, range(1, 51))
    await _advance(model)
    await insert(conn, range(51, 61))

    assert await _advance(model) == Advanced(EXECUTION_ID, version=60, events=60, changed=True, rebuilt=False)
    stored, log = await _checksums(model)
    assert stored == log


async def test_many_executions_are_read_page_by_page_and_each_is_folded_whole(
    model: ReadModel, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readmodel, "PAGE_ROWS", 7)
    sizes = {EXECUTION_ID + number: size for number, size in enumerate((3, 7, 1, 30, 4, 14))}
    for execution_id, size in sizes.items():
        await insert(conn, range(1, 1 + size), execution_id=execution_id)

    outcomes = await model.advance(DEFAULT, [*reversed(sizes)])

    assert {
        outcome.execution_id: outcome.events for outcome in outcomes if isinstance(outcome, Advanced)
    } == sizes
    assert {item.outcome for item in await model.verify(DEFAULT, [*sizes], repair=False)} == {Check.SAME}


async def test_a_straggler_of_any_age_is_noticed(
    model: ReadModel, conn: asyncpg.Connection, database_url: str
) -> None:
    late = await asyncpg.connect(database_url)
    transaction = late.transaction()
    await transaction.start()
    await insert(late, [7])
    await late.execute(
        "UPDATE noetl.event SET created_at = created_at - interval '3 days' WHERE event_id = 7"
    )
    await insert(conn, [event_id for event_id in range(1, 21) if event_id != 7])
    await _advance(model)
    await insert(conn, [21])
    await _advance(model)

    await transaction.commit()
    await late.close()
    outcome = await _advance(model)

    assert outcome == Advanced(EXECUTION_ID, version=21, events=21, changed=True, rebuilt=True)
    stored, log = await _checksums(model)
    assert stored == log


async def test_an_older_fold_never_replaces_a_newer_one_not_even_at_equal_version(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    stored = "SELECT version, snapshot::text, checksum, meta::text FROM noetl.projection_snapshot"
    await insert(conn, [1, 2, 4, 10])
    await _advance(model)
    old = await conn.fetchrow(stored)
    await insert(conn, [3])
    await _advance(model)
    new = await conn.fetchrow(stored)
    assert old["version"] == new["version"] == 10

    row = snapshots.SnapshotRow(EXECUTION_ID, *old)
    written = await projections.save_snapshots(conn, DEFAULT, [row])

    assert written == {}
    assert await conn.fetchrow(stored) == new


async def test_unknown_executions_fail_alone_and_duplicates_count_once(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await insert(conn, [1])
    await insert(conn, [5], execution_id=EXECUTION_ID + 1)

    outcomes = await model.advance(
        DEFAULT, [EXECUTION_ID + 1, EXECUTION_ID + 9, EXECUTION_ID, EXECUTION_ID + 1, EXECUTION_ID]
    )

    assert [(type(outcome), outcome.execution_id - EXECUTION_ID) for outcome in outcomes] == [
        (Advanced, 1),
        (NotAdvanced, 9),
        (Advanced, 0),
    ]
    assert isinstance(outcomes[1], NotAdvanced)
    assert outcomes[1].reason == "NO_EVENTS"


async def test_tenants_are_carried(model: ReadModel, conn: asyncpg.Connection) -> None:
    await insert(conn, [1, 2, 3])
    await insert(conn, [10, 11], tenant=OTHER)

    assert (await _advance(model)).events == 3
    assert (await _advance(model, tenant=OTHER)).events == 2
    snapshot = (await model.get(OTHER, EXECUTION_ID)).snapshot
    assert (snapshot.state["tenant_id"], snapshot.version) == ("acme", 11)
    with pytest.raises(NotFound):
        await model.get(Tenant("third", "default"), EXECUTION_ID)


@pytest.mark.parametrize(
    "damage",
    [
        "snapshot = jsonb_set(snapshot, '{execution,status}', '\"FAILED\"')",
        "snapshot = '[]'",
        "checksum = 'x'",
        "meta = meta || '{\"event_count\": 1000000}'",
        "meta = '{}'",
        'meta = meta || \'{"fold_version": "0"}\'',
        'meta = meta || \'{"log_snapshot": "nonsense"}\'',
        "version = 1",
    ],
)
async def test_a_damaged_row_is_no_seed_is_found_and_mended(
    model: ReadModel, conn: asyncpg.Connection, damage: str
) -> None:
    await insert(conn, range(1, 11))
    await _advance(model)
    await conn.execute(f"UPDATE noetl.projection_snapshot SET {damage}")

    with pytest.raises(NotFound):
        await model.get(DEFAULT, EXECUTION_ID)
    (found,) = await model.verify(DEFAULT, [EXECUTION_ID], repair=False)
    (mended,) = await model.verify(DEFAULT, [EXECUTION_ID], repair=True)
    (clean,) = await model.verify(DEFAULT, [EXECUTION_ID], repair=True)

    assert (found.outcome, found.repaired) == (Check.DIFFERENT, False)
    assert (mended.outcome, mended.repaired) == (Check.DIFFERENT, True)
    assert (clean.outcome, clean.repaired) == (Check.SAME, False)


ROW = "SELECT version, snapshot::text, checksum, meta::text FROM noetl.projection_snapshot"


async def _advanced_in_two_parts(model: ReadModel, conn: asyncpg.Connection) -> None:
    """Events up to 40 are the document, one more is beside it."""
    await insert(conn, range(1, 41))
    await _advance(model)
    await insert(conn, [41])
    await _advance(model)


async def test_a_few_new_events_leave_the_document_as_it_is(
    model: ReadModel, shards: Shards, conn: asyncpg.Connection
) -> None:
    await insert(conn, range(1, 41))
    await _advance(model)
    before = await conn.fetchrow(ROW)
    await insert(conn, [41])

    assert await _advance(model) == Advanced(EXECUTION_ID, version=41, events=41, changed=True, rebuilt=False)

    after = await conn.fetchrow(ROW)
    assert after["snapshot"] == before["snapshot"]
    assert (after["version"], after["checksum"]) == (40, before["checksum"])
    # Also to somebody who did not write it.
    for reader in (model, _model(shards)):
        projection = await reader.get(DEFAULT, EXECUTION_ID)
        assert (projection.snapshot.version, projection.snapshot.event_count) == (41, 41)
        assert await reader.stored_version(DEFAULT, EXECUTION_ID) == 41
        stored, log = await _checksums(reader)
        assert stored == log == projection.checksums.value
    await insert(conn, [42])
    assert not (await _advance(_model(shards))).rebuilt


async def test_a_long_run_of_advances_writes_the_document_now_and_then(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await insert(conn, range(1, 41))
    documents = []
    for event_id in range(41, 81):
        outcome = await _advance(model)
        assert (outcome.events, outcome.rebuilt) == (event_id - 1, False)
        documents.append((await conn.fetchrow(ROW))["version"])
        await insert(conn, [event_id])

    assert documents == sorted(documents)
    assert 2 < len(set(documents)) < 20
    stored, log = await _checksums(model)
    assert stored != log
    await _advance(model)
    stored, log = await _checksums(model)
    assert stored == log


@pytest.mark.parametrize(
    "damage",
    [
        "snapshot = jsonb_set(snapshot, '{commands,1,status}', '\"FAILED\"')",
        "meta = meta - 'gains'",
        "meta = jsonb_set(meta, '{gains}', '\"{}\"')",
        "meta = meta || '{\"version\": 40}'",
        "meta = meta || '{\"version\": 1e30}'",
        'meta = meta || \'{"version": "x"}\'',
        "version = 41",
    ],
)
async def test_damage_to_a_document_or_to_what_it_gained_is_found_and_mended(
    model: ReadModel, conn: asyncpg.Connection, damage: str
) -> None:
    await _advanced_in_two_parts(model, conn)
    await conn.execute(f"UPDATE noetl.projection_snapshot SET {damage}")

    with pytest.raises(NotFound):
        await model.get(DEFAULT, EXECUTION_ID)
    assert await model.stored_version(DEFAULT, EXECUTION_ID) >= 0
    (found,) = await model.verify(DEFAULT, [EXECUTION_ID], repair=True)
    (clean,) = await model.verify(DEFAULT, [EXECUTION_ID], repair=False)
    assert (found.outcome, found.repaired) == (Check.DIFFERENT, True)
    assert clean.outcome is Check.SAME


async def test_a_state_beside_another_document_or_beside_none_is_not_stored(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await _advanced_in_two_parts(model, conn)
    version, _, checksum, meta = await conn.fetchrow(ROW)
    row = snapshots.SnapshotRow(EXECUTION_ID, version, None, checksum, meta)

    for other in ("checksum = 'x'", "checksum = '', version = 39"):
        await conn.execute(f"UPDATE noetl.projection_snapshot SET {other}")
        before = await conn.fetchrow(ROW)
        assert await projections.save_snapshots(conn, DEFAULT, [row]) == {}
        assert await conn.fetchrow(ROW) == before
    await conn.execute("DELETE FROM noetl.projection_snapshot")
    assert await projections.save_snapshots(conn, DEFAULT, [row]) == {}
    assert await conn.fetchrow(ROW) is None


@pytest.mark.parametrize("replaced_by", ["another document", "nothing"])
async def test_a_document_that_goes_while_it_is_gone_on_from_is_written_whole(
    model: ReadModel, shards: Shards, conn: asyncpg.Connection, database_url: str, replaced_by: str
) -> None:
    await _advanced_in_two_parts(model, conn)
    await insert(conn, [42])
    other = await asyncpg.connect(database_url)
    transaction = other.transaction()
    await transaction.start()
    if replaced_by == "nothing":
        await other.execute("DELETE FROM noetl.projection_snapshot")
    else:
        await other.execute(
            "UPDATE noetl.projection_snapshot SET version = 1, checksum = 'x', meta = '{\"event_count\": 1}'"
        )

    # It has read the row as it was, and waits for whoever is changing it.
    advance = asyncio.ensure_future(_advance(model))
    await waiting_for_lock(conn)
    await transaction.commit()
    await other.close()

    assert await advance == Advanced(EXECUTION_ID, version=42, events=42, changed=True, rebuilt=False)
    # A row that was deleted comes back around the document that the statement saw.
    assert (await conn.fetchrow(ROW))["version"] == (40 if replaced_by == "nothing" else 42)
    stored, log = await _checksums(_model(shards))
    assert stored == log


async def test_a_row_that_anybody_changed_is_noticed_by_the_next_advance(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await insert(conn, range(1, 11))
    await _advance(model)
    await conn.execute(
        "UPDATE noetl.projection_snapshot SET snapshot = jsonb_set(snapshot, '{execution,status}', '\"FAILED\"')"
    )
    await insert(conn, [11])

    assert (await _advance(model)).rebuilt
    stored, log = await _checksums(model)
    assert stored == log


async def test_callers_of_two_processes_take_turns(shards: Shards, conn: asyncpg.Connection) -> None:
    here, there = _model(shards), _model(shards)
    await insert(conn, range(1, 11))
    for number, model in enumerate((here, there, here, here, there)):
        outcome = await _advance(model)
        assert (outcome.events, outcome.rebuilt) == (10 + number, False)
        await insert(conn, [11 + number])

    await asyncio.gather(*(_advance(model) for model in (here, there, here, there)))
    stored, log = await _checksums(here)
    assert stored == log


async def test_missing_and_stale_snapshots_are_named_and_mended(
    model: ReadModel, conn: asyncpg.Connection
) -> None:
    await insert(conn, [1, 2])
    await _advance(model)
    await insert(conn, [3])
    await insert(conn, [1], execution_id=EXECUTION_ID + 1)
    both = [EXECUTION_ID, EXECUTION_ID + 1]

    found = await model.verify(DEFAULT, both, repair=True)
    clean = await model.verify(DEFAULT, both, repair=False)

    assert [item.outcome for item in found] == [Check.STALE, Check.MISSING]
    assert [item.repaired for item in found] == [True, True]
    assert [item.outcome for item in clean] == [Check.SAME, Check.SAME]


async def test_another_registry_folds_anew(shards: Shards, conn: asyncpg.Connection) -> None:
    await insert(conn, [1, 2])
    await _advance(_model(shards))

    def lift(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "schema_version": 2, "event_type": "playbook.completed"}

    lifted = _model(shards, Registry.of([("noetl.event", 1, lift)]))
    outcome = await _advance(lifted)
    snapshot = (await lifted.get(DEFAULT, EXECUTION_ID)).snapshot

    assert outcome.rebuilt
    assert snapshot.state["execution"]["status"] == "COMPLETED"


async def test_executions_are_found_by_hopping(model: ReadModel, conn: asyncpg.Connection) -> None:
    wanted = [EXECUTION_ID + step for step in range(0, 30, 3)]
    for execution_id in wanted:
        await insert(conn, [1, 2, 3], execution_id=execution_id)
    await insert(conn, [1], execution_id=EXECUTION_ID + 1, tenant=OTHER)

    found: list[int] = []
    while page := await model.executions_behind(DEFAULT, behind=found[-1] if found else 0, limit=4):
        found += page

    assert found == wanted


async def test_eight_callers_and_late_writers_never_move_a_snapshot_back(
    model: ReadModel, conn: asyncpg.Connection, database_url: str
) -> None:
    draw = random.Random(11)
    executions = [EXECUTION_ID + number for number in range(3)]
    done = asyncio.Event()
    seen: dict[int, tuple[int, int]] = {}
    regressions: list[str] = []

    async def write(number: int) -> None:
        connection = await asyncpg.connect(database_url)
        try:
            for round_number in range(6):
                async with connection.transaction():
                    for execution_id in draw.sample(executions, 2):
                        await insert(connection, [1 + number + 20 * round_number], execution_id=execution_id)
                    for _ in range(draw.randrange(4)):
                        await connection.fetchval("SELECT 1")
        finally:
            await connection.close()

    async def advance() -> None:
        while not done.is_set():
            for outcome in await model.advance(DEFAULT, executions):
                if isinstance(outcome, Advanced):
                    before = seen.get(outcome.execution_id, (0, 0))
                    reached = (outcome.version, outcome.events)
                    if before[0] > reached[0] and before[1] > reached[1]:
                        continue  # this answer was overtaken on its way; the stored row is what counts
                    seen[outcome.execution_id] = max(before, reached)

    async def watch() -> None:
        highest: dict[str, tuple[int, int]] = {}
        connection = await asyncpg.connect(database_url)
        while not done.is_set():
            for row in await connection.fetch(
                "SELECT aggregate_id, COALESCE((meta ->> 'version')::bigint, version) AS version,"
                " (meta ->> 'event_count')::int AS events FROM noetl.projection_snapshot"
            ):
                before = highest.get(row["aggregate_id"], (0, 0))
                reached = (row["version"], row["events"])
                if reached[0] < before[0] or reached[1] < before[1]:
                    regressions.append(f"{row['aggregate_id']}: {before} then {reached}")
                highest[row["aggregate_id"]] = reached
        await connection.close()

    async with asyncio.TaskGroup() as group:
        background = [group.create_task(advance()) for _ in range(8)] + [group.create_task(watch())]
        await asyncio.gather(*(write(number) for number in range(16)))
        done.set()
    assert all(task.done() for task in background)

    await model.advance(DEFAULT, executions)
    verified = await model.verify(DEFAULT, executions, repair=False)

    assert regressions == []
    assert {item.outcome for item in verified} == {Check.SAME}


async def test_a_waiter_sees_its_event_and_no_other(
    shards: Shards, model: ReadModel, conn: asyncpg.Connection, database_url: str
) -> None:
    waiters = Waiters(shards)
    late = await asyncpg.connect(database_url)
    transaction = late.transaction()
    await transaction.start()
    await insert(late, [5])
    await insert(conn, [1, 9])
    await _advance(model)

    # Version 9 is stored, but 5 is not in it, and 6 does not exist.
    assert await waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 9), seconds=5) == 9
    assert await waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 5), seconds=0.1) is None
    assert await waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 6), seconds=0.1) is None
    assert await waiters.wait(Awaited(OTHER, EXECUTION_ID, 9), seconds=0.1) is None

    waiting = asyncio.create_task(waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 5), seconds=15))
    await transaction.commit()
    await late.close()
    assert not waiting.done()
    await _advance(model)

    assert await waiting == 9
    await waiters.close()


async def test_five_hundred_waiters_hold_no_connection_each(
    model: ReadModel, conn: asyncpg.Connection, database_url: str
) -> None:
    await add_catalog_entry(conn, CATALOG_ID + 1)
    small = await open_shards([database_url], cluster_url=database_url, size_max=2, wait_seconds=5)
    waiters = Waiters(small)
    waiting = [
        asyncio.create_task(waiters.wait(Awaited(DEFAULT, EXECUTION_ID + number, 1), seconds=15))
        for number in range(500)
    ]
    for number in range(500):
        await insert(conn, [1], execution_id=EXECUTION_ID + number)

    await model.advance(DEFAULT, [EXECUTION_ID + number for number in range(500)])
    waiters.wake()

    assert set(await asyncio.gather(*waiting)) == {1}
    await waiters.close()
    await small.close()


async def test_without_the_column_membership_is_decided_by_counts(
    shards: Shards, model: ReadModel, conn: asyncpg.Connection
) -> None:
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN xact_id")
    waiters = Waiters(shards)
    await insert(conn, [1, 2, 9])

    first = await _advance(model)
    assert await waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 2), seconds=5) == 9
    await insert(conn, [5])
    assert await waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 2), seconds=0.1) is None
    second = await _advance(model)

    assert (first.rebuilt, second.rebuilt, second.events) == (False, True, 4)
    assert await waiters.wait(Awaited(DEFAULT, EXECUTION_ID, 5), seconds=5) == 9
    await waiters.close()


async def test_a_shard_that_is_away_fails_alone(
    new_database: Callable[[], Awaitable[str]], conn: asyncpg.Connection, database_url: str
) -> None:
    await add_catalog_entry(conn)
    away = "postgresql://nobody@127.0.0.1:1/none"
    half = await open_shards([database_url, away], cluster_url=database_url)
    model = _model(half)
    here = next(item for item in range(EXECUTION_ID, EXECUTION_ID + 50) if half.shard_of(item) == 0)
    there = next(item for item in range(EXECUTION_ID, EXECUTION_ID + 50) if half.shard_of(item) == 1)
    await insert(conn, [1], execution_id=here)

    outcomes = await model.advance(DEFAULT, [there, here])

    assert isinstance(outcomes[0], NotAdvanced)
    assert outcomes[0].reason == "SHARD_UNAVAILABLE"
    assert isinstance(outcomes[1], Advanced)
    with pytest.raises(Unavailable):
        await model.advance(DEFAULT, [there])
    await half.close()


async def test_the_order_of_first_touch_survives_jsonb(model: ReadModel, conn: asyncpg.Connection) -> None:
    await insert(conn, [1], meta={"stage_id": "05"})
    await insert(conn, [2], meta={"stage_id": "5"})
    await insert(conn, [3], meta={"stage_id": "005"})
    await _advance(model)
    snapshot = (await model.get(DEFAULT, EXECUTION_ID)).snapshot
    await insert(conn, [4], meta={"stage_id": "5"})

    outcome = await _advance(model)
    stored, log = await _checksums(model)

    assert list(snapshot.state["stages"]) == ["05", "5", "005"]
    assert not outcome.rebuilt
    assert stored == log


@pytest.mark.parametrize(
    "number",
    ["123456789012345678.5", "10000000000000000.0", "1e300", "1.5e-9", "-0.0", "12345678901234567890123"],
)
async def test_numbers_survive_jsonb(model: ReadModel, conn: asyncpg.Connection, number: str) -> None:
    for event_id, object_id in ((1, "9"), (2, "10"), (3, "9")):
        named = f'{{"type": "order", "id": "{object_id}", "attributes": {{"total": {number}}}}}'
        await conn.execute(
            "INSERT INTO noetl.event (execution_id, event_id, catalog_id, event_type, meta)"
            " VALUES ($1, $2, $3, 'order.updated', $4)",
            EXECUTION_ID,
            event_id,
            CATALOG_ID,
            f'{{"business_object": {named}}}',
        )
        outcome = await _advance(model)

    assert not outcome.rebuilt
    stored, log = await _checksums(model)
    assert stored == log
    assert (await model.get(DEFAULT, EXECUTION_ID)).checksums.value == log


def test_a_row_of_somebody_else_is_no_seed() -> None:
    row = snapshots.SnapshotRow(1, 5, '{"event_count": 3}', "x", '{"upcaster_registry_digest": "y"}')

    assert snapshots.read(row) is SeedOutcome.FOLD_VERSION


@pytest.mark.parametrize("known", [True, False])
def test_slices_weigh_what_memory_allows(known: bool) -> None:
    heavy = readmodel.SLICE_BYTES // 2
    ids = [*range(100)]
    at_hand = {item: heavy if item < 10 else 1 for item in ids} if known else {}
    queue = readmodel.Queue(ids, known_bytes=at_hand.get)

    slices = []
    while part := queue.take():
        slices.append(len(part))
        queue.learn(len(part), len(part) * (heavy if part[0] < 10 else 1))

    assert sum(slices) == len(ids)
    # Where nobody knows, the first slice tells: one that was too heavy makes the next one small.
    assert slices == ([2, 2, 2, 2, 2, 90] if known else [readmodel.SLICE_FIRST, 2, 78])
    one = readmodel.Queue([1], known_bytes=lambda _: 10 * readmodel.SLICE_BYTES)
    assert (one.take(), one.take()) == ([1], [])


def test_a_slice_that_could_not_be_advanced_tells_nothing_of_weights() -> None:
    queue = readmodel.Queue([*range(100)], known_bytes=lambda _: None)

    queue.learn(len(queue.take()), 0)

    assert len(queue.take()) == readmodel.SLICE_FIRST
