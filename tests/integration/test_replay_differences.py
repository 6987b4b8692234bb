"""DiffReplay and ExplainReplay over the database, against a search over all prefixes."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import state_pb2

from noetl_grpc.core.difference import MISSING, is_same, lookup, parse_pointer
from noetl_grpc.core.fold import fold
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.errors import EventMalformed, InvalidRequest, StateTooLarge
from noetl_grpc.services import replay as replay_service
from tests.events import add_catalog_entry, copy_log, write_events
from tests.logs import checksums, event, identity_of, vectors
from tests.replay_api import STRICT, ReplayApi, at_event, at_time, timestamp
from tests.unit.core.test_fold_vectors import V3

NOON = datetime(2026, 5, 20, 12, tzinfo=UTC)
EVERYTHING = state_pb2.Cutoff()


@pytest.fixture
async def api(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> ReplayApi:
    await add_catalog_entry(conn)
    return ReplayApi(channel)


def state_of(log: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    return fold(events, identity_of(log), FoldRules.UNION).state


def applied(state: Any, changes: list[pb.StateChange]) -> Any:
    """As a client would: change by change, in the order of the answer."""
    document = json.loads(json.dumps(state))
    for change in changes:
        *parents, last = parse_pointer(change.path)
        parent = lookup(document, tuple(parents))
        key: Any = int(last) if isinstance(parent, list) else last
        present = MISSING if isinstance(parent, list) and key == len(parent) else lookup(parent, (last,))
        if change.HasField("before_json"):
            assert is_same(present, json.loads(change.before_json))
        else:
            assert present is MISSING
        if not change.HasField("after_json"):
            del parent[key]
        elif present is MISSING and isinstance(parent, list):
            parent.append(json.loads(change.after_json))
        else:
            parent[key] = json.loads(change.after_json)
    return document


def causes(log: dict[str, Any], events: list[dict[str, Any]], path: str) -> list[tuple[int, Any]]:
    """By brute force: each event after which the value at the path is another, and that value."""
    place = parse_pointer(path)
    found = []
    before = lookup(state_of(log, []), place)
    for size in range(1, len(events) + 1):
        after = lookup(state_of(log, events[:size]), place)
        if not is_same(before, after):
            found.append((events[size - 1]["event_id"], after))
        before = after
    return found


def some_logs() -> list[dict[str, Any]]:
    cases = [case["input"] for case in vectors("replay-union")]
    return random.Random(11).sample([log for log in cases if 4 <= len(log["events"]) <= 14], 8)


@pytest.mark.parametrize("log", some_logs(), ids=lambda log: str(log["execution_id"]))
async def test_changes_lead_from_one_state_to_the_other_and_name_their_event(
    api: ReplayApi, conn: asyncpg.Connection, log: dict[str, Any]
) -> None:
    dice = random.Random(log["execution_id"])
    events = sorted(log["events"], key=lambda each: each["event_id"])
    await copy_log(conn, log)
    tenant = {"tenant_id": log["tenant_id"], "organization_id": log["organization_id"]}
    ids = [each["event_id"] for each in events]

    for _ in range(4):
        start, end = dice.choice([0, *ids]), dice.choice([0, *ids])
        before = [each for each in events if each["event_id"] <= start]
        after = [each for each in events if each["event_id"] <= end]
        answer = await api.diff(log["execution_id"], at_event(start), at_event(end), **tenant)

        first, second = state_of(log, before), state_of(log, after)
        changes = list(answer.changes)
        assert answer.from_checksum == checksums(first).value
        assert answer.to_checksum == checksums(second).value
        assert checksums(applied(first, changes)).value == answer.to_checksum
        for change in changes:
            blamed = causes(log, after, change.path) or causes(log, before, change.path)
            assert change.event_id == blamed[-1][0], change
            if start < end:
                assert start < change.event_id <= end


@pytest.mark.parametrize("log", some_logs()[:3], ids=lambda log: str(log["execution_id"]))
async def test_blame_agrees_with_a_search_over_all_prefixes(
    api: ReplayApi, conn: asyncpg.Connection, log: dict[str, Any]
) -> None:
    events = sorted(log["events"], key=lambda each: each["event_id"])
    await copy_log(conn, log)
    tenant = {"tenant_id": log["tenant_id"], "organization_id": log["organization_id"]}
    types = {each["event_id"]: each.get("event_type") or "" for each in events}

    for path in [
        "",
        "/event_count",
        "/execution",
        "/stages",
        "/nothing/here",
        *paths_of(state_of(log, events))[:12],
    ]:
        answer = await api.explain(log["execution_id"], path, **tenant)

        expected = causes(log, events, path)[::-1]
        assert [cause.event_id for cause in answer] == [event_id for event_id, _ in expected], path
        for cause, (event_id, value) in zip(answer, expected, strict=True):
            assert cause.event_type == types[event_id]
            assert (
                cause.value_json == "" if value is MISSING else is_same(json.loads(cause.value_json), value)
            )


def paths_of(state: dict[str, Any]) -> list[str]:
    found = ["/execution/status"]
    for surface in ("stages", "frames", "commands", "business_objects", "loops"):
        for key, entry in state[surface].items():
            where = f"/{surface}/{key.replace('~', '~0').replace('/', '~1')}"
            found += [where, f"{where}/status" if "status" in entry else f"{where}/done"]
    return found


async def test_cutoffs_by_time_need_not_be_prefixes(api: ReplayApi, conn: asyncpg.Connection) -> None:
    hour = timedelta(hours=1)
    log = {"execution_id": 4}
    events = [
        event(1, "execution.started", event_time=NOON, node_name="a"),
        event(2, "execution.failed", event_time=NOON + 2 * hour, node_name="b"),
        event(3, "note", event_time=NOON + hour, node_name="c", payload_ref="s3://x"),
    ]
    await write_events(conn, 4, events)

    forward = await api.diff(4, at_time(NOON + hour), EVERYTHING)
    mixed = await api.diff(4, at_event(2), at_time(NOON + hour))
    backward = await api.diff(4, EVERYTHING, at_event(0))

    early = state_of(log, [events[0], events[2]])
    assert applied(early, list(forward.changes)) == state_of(log, events)
    assert {change.path: change.event_id for change in forward.changes} == {
        "/event_count": 3,
        "/execution/status": 2,
    }
    assert applied(state_of(log, events[:2]), list(mixed.changes)) == early
    assert applied(state_of(log, events), list(backward.changes)) == state_of(log, [])
    assert backward.to_checksum == checksums(state_of(log, [])).value


async def test_equal_cutoffs_have_no_changes(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await copy_log(conn, V3)

    answer = await api.diff(77, EVERYTHING, EVERYTHING)

    assert list(answer.changes) == []
    assert answer.from_checksum == answer.to_checksum


async def test_a_new_entry_is_one_change_and_a_reference_names_its_own_event(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await copy_log(conn, V3)

    answer = await api.diff(77, at_event(5), at_event(8))

    changes = {change.path: change for change in answer.changes}
    assert changes["/execution/payload_refs/0"].event_id == 6
    assert not changes["/execution/payload_refs/0"].HasField("before_json")
    assert changes["/frames/300/status"].before_json == '"RUNNING"'
    assert changes["/frames/300/status"].event_id == 6
    assert changes["/commands/900/status"].event_id == 7
    assert changes["/loops/lp-1/completed"].event_id == 8


async def test_causes_carry_the_time_of_their_event_and_stop_at_the_cutoff(
    api: ReplayApi, conn: asyncpg.Connection
) -> None:
    await write_events(
        conn,
        4,
        [
            event(1, "execution.started", event_time=NOON),
            event(2, "note", event_time=NOON),
            event(3, "execution.completed", event_time=NOON + timedelta(seconds=1)),
        ],
    )

    everything = await api.explain(4, "/execution/status")
    early = await api.explain(4, "/execution/status", as_of_event_id=2)

    assert [(cause.event_id, cause.value_json) for cause in everything] == [
        (3, '"COMPLETED"'),
        (1, '"RUNNING"'),
    ]
    assert everything[0].event_time == timestamp(NOON + timedelta(seconds=1))
    assert [cause.event_id for cause in early] == [1]


async def test_strict_rules_are_asked_for_by_name(api: ReplayApi, conn: asyncpg.Connection) -> None:
    await write_events(conn, 4, [event(1, "frame.dispatched", frame_id=1, meta={"attempt": "x"})])

    with pytest.raises(EventMalformed):
        await api.diff(4, at_event(0), EVERYTHING, rules=STRICT)
    with pytest.raises(EventMalformed):
        await api.explain(4, "/execution/status", rules=STRICT)


async def test_an_unknown_execution_is_an_empty_answer(api: ReplayApi) -> None:
    assert list((await api.diff(4, at_event(0), EVERYTHING)).changes) == []
    assert await api.explain(4, "/execution/status") == []


async def test_bad_requests_name_the_field(api: ReplayApi) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await api.diff(4, at_event(-1), EVERYTHING)
    assert refused.value.violations[0][0] == "from_cutoff.as_of_event_id"
    with pytest.raises(InvalidRequest) as refused:
        await api.explain(4, "execution/status")
    assert refused.value.violations[0][0] == "path"
    with pytest.raises(InvalidRequest) as refused:
        await api.diff(4, EVERYTHING, EVERYTHING, rules=77)
    assert refused.value.violations[0][0] == "rules"


async def test_an_answer_that_does_not_fit_is_refused(
    api: ReplayApi, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await copy_log(conn, V3)
    monkeypatch.setattr(replay_service.MessageBudget, "_OVERHEAD_BYTES", 20 * 1024 * 1024)

    with pytest.raises(StateTooLarge, match="closer together"):
        await api.diff(77, at_event(0), EVERYTHING)
    with pytest.raises(StateTooLarge, match="longer path"):
        await api.explain(77, "/event_count")
