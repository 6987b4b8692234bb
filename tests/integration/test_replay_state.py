"""ReplayState through PostgreSQL and gRPC: the same bytes as the fold alone, as of any event or time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import event_pb2, projection_pb2, projection_pb2_grpc, state_pb2
from noetlpb.v1 import replay_pb2 as pb

from noetl_grpc.checks import replay as check_replay
from noetl_grpc.checks.frame import silent
from noetl_grpc.core.fold import Fold, FoldEvent
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.errors import EventMalformed, InvalidRequest, NotFound, StateTooLarge
from noetl_grpc.server import Server
from noetl_grpc.services import replay as replay_service
from noetl_grpc.settings import Settings
from tests.conftest import AUTHORIZATION, settings_for
from tests.events import CATALOG_ID, add_catalog_entry, copy_log, write_events
from tests.logs import (
    EMPTY_REGISTRY,
    GOLDEN,
    GOLDEN_CHECKSUMS,
    checksums,
    event,
    identity_of,
    vectors,
)
from tests.replay_api import STRICT, UNION, ReplayApi, timestamp
from tests.unit.core.test_fold_vectors import V2, V3, V3_CHECKSUMS, V6, V7, V8A_CHECKSUMS, finished

EXECUTION = 600_000_000_000_000_001
NOON = datetime(2026, 5, 20, 12, tzinfo=UTC)


@pytest.fixture
async def api(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> ReplayApi:
    await add_catalog_entry(conn)
    return ReplayApi(channel)


@pytest.mark.parametrize(
    ("name", "rules"),
    [("replay-python-4.26", STRICT), ("replay-python-4.26-edges", STRICT), ("replay-union", UNION)],
)
async def test_every_vector_comes_out_of_the_database_to_the_byte(
    api: ReplayApi, conn: asyncpg.Connection, name: str, rules: Any
) -> None:
    cases = list(vectors(name))
    for case in cases:
        await copy_log(conn, case["input"])

    different = []
    for case in cases:
        log, expected = case["input"], case["expected"]
        tenant = {"tenant_id": log["tenant_id"], "organization_id": log["organization_id"]}
        state = await api.state(log["execution_id"], rules=rules, include_canonical_json=True, **tenant)
        found = {
            **json.loads(state.canonical_json),
            "checksum_algorithm": state.checksum.algorithm,
            "checksum": state.checksum.value,
            "projection_checksums": dict(state.projection_checksums),
        }
        if found != expected:
            different.append(case["case"])

    assert different == []


@pytest.mark.parametrize("log", [GOLDEN, V2, V3, V6, V7], ids=["golden", "V2", "V3", "V6", "V7"])
async def test_pinned_examples_come_out_of_the_database_to_the_byte(
    api: ReplayApi, conn: asyncpg.Connection, log: dict[str, Any]
) -> None:
    await copy_log(conn, log)
    tenant = {
        "tenant_id": log.get("tenant_id", ""),
        "organization_id": log.get("organization_id", ""),
    }

    state = await api.state(log["execution_id"], rules=STRICT, **tenant)

    assert state.checksum.value == finished(log)["checksum"]
    assert dict(state.projection_checksums) == finished(log)["projection_checksums"]


async def test_v3_as_of_its_sixth_event_is_v8a_and_then_v3(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await copy_log(conn, V3)

    early = await api.state(77, rules=STRICT, as_of_event_id=6)
    late = await api.state(77, rules=STRICT)

    assert {"checksum": early.checksum.value, **early.projection_checksums} == V8A_CHECKSUMS
    assert {"checksum": late.checksum.value, **late.projection_checksums} == V3_CHECKSUMS


async def test_events_written_by_the_service_replay_the_same(
    api: ReplayApi, channel: grpc.aio.Channel, conn: asyncpg.Connection
) -> None:
    messages = []
    for each in GOLDEN["events"]:
        plain = {name: value for name, value in each.items() if name not in ("meta", "payload_ref")}
        documents = {
            f"{name}_json": json.dumps(each[name]) for name in ("meta", "payload_ref") if name in each
        }
        messages.append(
            event_pb2.EventEnvelope(execution_id=9001, catalog_id=CATALOG_ID, **plain, **documents)
        )
    stub = projection_pb2_grpc.ProjectionServiceStub(channel)
    stored = await stub.ProjectEvents(
        projection_pb2.ProjectEventsRequest(events=messages), metadata=AUTHORIZATION
    )

    state = await api.state(9001)

    assert stored.projected == 7
    assert {"checksum": state.checksum.value, **state.projection_checksums} == GOLDEN_CHECKSUMS


async def test_the_message_says_what_the_canonical_state_says(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await copy_log(conn, V3)

    state = await api.state(77)

    assert state.event_count == 11
    assert (state.last_event_id, state.last_event_type) == (11, "playbook.completed")
    assert state.rules == UNION
    assert state.projection == state_pb2.REPLAY_PROJECTION_ALL
    assert state.complete
    assert not state.HasField("next_after_event_id")
    assert not state.HasField("seed")
    assert not state.HasField("canonical_json")
    assert state.upcaster_registry_digest == EMPTY_REGISTRY
    assert (state.execution.status, state.execution.last_node_name) == ("COMPLETED", "end")
    assert json.loads(state.execution.payload_refs[0].reference_json)["sha256"] == "beef"
    assert state.stages["20"] == state_pb2.StageState(
        stage_id="20",
        status="COMPLETED",
        kind_json='"loop"',
        step_name="load",
        parent_stage_id="19",
        loop_event_id="lp-1",
        opened_event_id=2,
        closed_event_id=10,
        frame_count=1,
        row_count=40,
        events_emitted=4,
        last_event_id=10,
    )
    frame = state.frames["300"]
    assert (frame.attempts, frame.row_count, frame.cursor_json) == (2, 40, '{"last_id":40}')
    assert json.loads(frame.output_ref_summary_json)["row_count"] == 40
    command = state.commands["900"]
    assert (command.worker_id, command.locality_json, command.placement_json) == (
        "w-1",
        '{"node_id":"n1"}',
        "{}",
    )
    assert not command.HasField("started_event_id")
    invoice = state.business_objects["invoice/i-9"]
    assert json.loads(invoice.attributes_json) == {"total": 12.5, "note": "café"}
    assert state.loops["lp-1"] == state_pb2.LoopState(
        loop_id="lp-1", step_name="load", total_json="2", done=1, completed=True, last_event_id=8
    )


async def test_a_projection_returns_its_surface_and_has_its_own_checksum(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await copy_log(conn, V3)
    whole = await api.state(77)

    stages = await api.state(77, projection=state_pb2.REPLAY_PROJECTION_STAGE)

    assert list(stages.stages) == ["20"]
    assert not stages.HasField("execution")
    assert [len(getattr(stages, name)) for name in ("frames", "commands", "business_objects", "loops")] == [
        0
    ] * 4
    assert stages.projection_checksums["stages"] == whole.projection_checksums["stages"]
    assert stages.checksum.value != whole.checksum.value
    assert stages.checksum.value == checksums({**(await api.canonical(77)), "projection": "stage"}).value


async def test_an_execution_without_events_is_an_empty_state(api: ReplayApi) -> None:
    state = await api.state(1)

    assert (state.event_count, state.execution.status, state.complete) == (0, "UNKNOWN", True)
    assert not state.HasField("last_event_id")
    assert state.checksum.value == "249eabf600e917d6031a1c70d35823cfaec1cfcda22b48dfee57ffd18d4cb6a6"


async def test_cutoffs_are_inclusive_and_zero_is_zero(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(conn, EXECUTION, [event(number) for number in (1, 2, 3)])

    async def count(**cutoff: Any) -> int:
        return (await api.state(EXECUTION, **cutoff)).event_count

    assert [await count(as_of_event_id=cutoff) for cutoff in (0, 1, 2, 99)] == [0, 1, 2, 3]
    assert [await count(as_of_position=cutoff) for cutoff in (0, 2)] == [0, 2]
    assert await count() == 3


async def test_time_cutoffs_compare_instants_to_the_microsecond(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    offset = timezone(timedelta(hours=-7))
    await write_events(
        conn,
        EXECUTION,
        [
            event(1, event_time=NOON),
            event(2, event_time=NOON.astimezone(offset)),
            event(3, event_time=NOON + timedelta(microseconds=1)),
            event(4, event_time=NOON - timedelta(hours=1)),
        ],
    )

    async def ids(moment: datetime) -> int:
        return (await api.state(EXECUTION, as_of_time=timestamp(moment))).event_count

    assert await ids(NOON - timedelta(microseconds=1)) == 1
    assert await ids(NOON) == 3
    assert await ids(NOON + timedelta(microseconds=1)) == 4


async def test_a_database_in_another_time_zone_gives_the_same_answer(
    conn: asyncpg.Connection,
    database_url: str,
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    await add_catalog_entry(conn)
    name = await conn.fetchval("SELECT current_database()")
    await conn.execute(f"ALTER DATABASE {name} SET timezone = 'America/New_York'")
    await conn.execute("ALTER ROLE noetl SET timezone = 'America/New_York'")
    try:
        other = await asyncpg.connect(database_url)
        assert await other.fetchval("SHOW timezone") == "America/New_York"
        await write_events(other, EXECUTION, [event(1, event_time=NOON), event(2, event_time=NOON)])
        await other.close()
        server = await start_server(settings_for(database_url))
        api = ReplayApi(await channel_to(server.address))

        before = await api.state(EXECUTION, as_of_time=timestamp(NOON - timedelta(microseconds=1)))
        at = await api.state(EXECUTION, as_of_time=timestamp(NOON))
    finally:
        await conn.execute("ALTER ROLE noetl RESET timezone")

    assert (before.event_count, at.event_count) == (0, 2)


async def test_another_tenants_events_are_never_read(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(conn, EXECUTION, [event(1, "execution.started")])
    await write_events(conn, EXECUTION, [event(2, "execution.failed")], tenant_id="acme")
    await write_events(
        conn, EXECUTION, [event(3, "execution.completed")], tenant_id="acme", organization_id="east"
    )

    async def seen(tenant_id: str, organization_id: str) -> tuple[str, list[int], list[int]]:
        tenant = {"tenant_id": tenant_id, "organization_id": organization_id}
        state = await api.state(EXECUTION, **tenant)
        messages = await api.all_events(EXECUTION, **tenant)
        causes = await api.explain(EXECUTION, "/execution/status", **tenant)
        streamed = [each.event_id for message in messages for each in message.events]
        return state.execution.status, streamed, [cause.event_id for cause in causes]

    assert await seen("", "") == ("RUNNING", [1], [1])
    assert await seen("acme", "") == ("FAILED", [2], [2])
    assert await seen("acme", "east") == ("COMPLETED", [3], [3])
    assert await seen("other", "") == ("UNKNOWN", [], [])
    with pytest.raises(NotFound) as refused:
        await api.event(EXECUTION, 2)
    assert refused.value.reason == "EVENT_NOT_FOUND"


async def test_rows_as_noetl_has_them_are_folded(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(
        conn,
        EXECUTION,
        [
            {"event_id": 1},
            event(2, None, status=None, meta="not an object"),
            event(3, "playbook_started", meta=[1, 2]),
            event(4, "step.enter", node_name="a", meta={"stage_id": "7", "command_id": "08"}),
            event(5, "frame.dispatched", frame_id=8, meta={"attempt": "many"}),
            event(6, "stage.closed", stage_id=7, meta={"row_count": 10**30, "frame_count": "x"}),
        ],
    )

    state = await api.state(EXECUTION)

    assert state.event_count == 6
    assert (state.execution.status, state.execution.last_node_name) == ("RUNNING", "a")
    assert state.frames["8"].attempts == 1
    assert state.commands["08"].stage_id == "7"
    assert state.stages["7"].row_count == 2**63 - 1
    assert [(warning.event_id, warning.path) for warning in state.warnings] == [
        (5, "meta.attempt"),
        (6, "meta.frame_count"),
        (6, "/stages/7/row_count"),
    ]
    assert (await api.canonical(EXECUTION))["stages"]["7"]["row_count"] == 10**30
    with pytest.raises(EventMalformed) as refused:
        await api.state(EXECUTION, rules=STRICT)
    assert refused.value.metadata == {"event_id": "5", "path": "meta.attempt"}


async def test_a_schema_version_below_one_is_malformed(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(conn, EXECUTION, [event(1), event(2, schema_version=0)])

    with pytest.raises(EventMalformed) as refused:
        await api.state(EXECUTION)

    assert refused.value.metadata == {"event_id": "2", "path": "schema_version"}


async def test_a_limit_says_where_it_cut_and_the_rest_can_be_folded_from_there(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await copy_log(conn, V3)
    whole = await api.state(77)

    cut = await api.state(77, limit=4, include_canonical_json=True)
    exact = await api.state(77, limit=11)
    tail = await api.all_events(77, after_event_id=cut.next_after_event_id)
    events = [each for message in tail for each in message.events]
    continued = replay_fold(cut, events)

    assert (cut.complete, cut.next_after_event_id, cut.event_count) == (False, 4, 4)
    assert (exact.complete, exact.HasField("next_after_event_id")) == (True, False)
    assert [each.event_id for each in events] == [5, 6, 7, 8, 9, 10, 11]
    assert continued == whole.checksum.value


def replay_fold(cut: state_pb2.ReplayedState, events: list[Any]) -> str:
    fold = Fold(identity_of({"execution_id": 77}), FoldRules.UNION, json.loads(cut.canonical_json))
    fold.apply(FoldEvent.of(columns(each)) for each in events)
    return checksums(fold.state).value


def columns(message: Any) -> dict[str, Any]:
    return {
        field.name.removesuffix("_json"): json.loads(value) if field.name.endswith("_json") else value
        for field, value in message.ListFields()
    }


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"execution_id": 0}, "execution_id"),
        ({"execution_id": -1}, "execution_id"),
        ({"execution_id": 1, "as_of_event_id": -1}, "as_of_event_id"),
        ({"execution_id": 1, "as_of_position": -5}, "as_of_position"),
        ({"execution_id": 1, "as_of_time": {"nanos": -1}}, "as_of_time"),
        ({"execution_id": 1, "limit": -1}, "limit"),
        ({"execution_id": 1, "rules": 99}, "rules"),
        ({"execution_id": 1, "projection": 99}, "projection"),
        ({"execution_id": 1, "tenant_id": "a\0b"}, "tenant_id"),
    ],
)
async def test_bad_requests_name_the_field(
    api: ReplayApi, request_fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await api.call("ReplayState", pb.ReplayStateRequest(**request_fields))

    assert refused.value.violations[0][0] == field


async def test_two_cutoffs_cannot_be_sent(api: ReplayApi, conn: asyncpg.Connection) -> None:
    request = pb.ReplayStateRequest(execution_id=EXECUTION, as_of_event_id=1, as_of_position=2)

    assert request.WhichOneof("cutoff") == "as_of_position"


async def test_a_state_that_does_not_fit_is_refused_with_advice(
    api: ReplayApi, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_service.MessageBudget, "_OVERHEAD_BYTES", 64 * 1024 * 1024)
    await copy_log(conn, V3)

    with pytest.raises(StateTooLarge, match="ask for one projection") as refused:
        await api.state(77)

    assert refused.value.metadata == {"limit_bytes": str(64 * 1024 * 1024)}


async def test_many_replays_at_once_agree(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(
        conn, EXECUTION, [event(number, "frame.dispatched", frame_id=number % 7) for number in range(1, 301)]
    )

    states = await asyncio.gather(*(api.state(EXECUTION) for _ in range(20)))

    assert len({state.checksum.value for state in states}) == 1
    assert {state.event_count for state in states} == {300}


async def test_long_logs_cost_little_memory_and_many_replays_starve_nobody() -> None:
    verdict = await check_replay.run(size="small", seed=1, progress=silent)

    assert verdict.violations == []
