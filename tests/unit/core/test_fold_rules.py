"""The rules of the fold where NoETL's servers disagree and where logs are odd or numbers malformed."""

from typing import Any

import pytest

from noetl_grpc.core.fold import FoldEvent, Identity, fold, in_order
from noetl_grpc.core.numbers import WARNINGS_MAX
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.errors import EventMalformed
from tests.logs import checksums, event, fold_events

STRICT = FoldRules.PYTHON_4_26
UNION = FoldRules.UNION

STARTS = (
    "playbook.initialized execution.started stage.opened frame.dispatched step.enter step_enter step_started"
)
COMPLETES = "playbook.completed playbook_completed workflow.completed execution.completed"
FAILS = "playbook.failed playbook_failed workflow.failed execution.failed"
CANCELS = "playbook.cancelled playbook_cancelled execution.cancelled"
KEEPS = (
    "command.failed playbook_started workflow.initialized step.exit step_completed Playbook.Completed "
    "playbook.complete execution_completed"
)


@pytest.mark.parametrize(
    ("event_types", "from_unknown", "from_running", "from_terminal"),
    [
        (STARTS, "RUNNING", "RUNNING", None),
        (COMPLETES, "COMPLETED", "COMPLETED", "COMPLETED"),
        (FAILS, "FAILED", "FAILED", "FAILED"),
        (CANCELS, "CANCELLED", "CANCELLED", "CANCELLED"),
        (KEEPS, "UNKNOWN", "RUNNING", None),
    ],
)
def test_union_status_table(
    event_types: str, from_unknown: str, from_running: str, from_terminal: str | None
) -> None:
    for event_type in [*event_types.split(), *([None] if event_types == KEEPS else [])]:
        assert status_after("UNKNOWN", event_type, UNION) == from_unknown
        assert status_after("RUNNING", event_type, UNION) == from_running
        assert status_after("PAUSED", event_type, UNION) == (
            "PAUSED" if from_running == "RUNNING" and event_types == KEEPS else from_running
        )
        for terminal in ("COMPLETED", "FAILED", "CANCELLED"):
            assert status_after(terminal, event_type, UNION) == (from_terminal or terminal)


@pytest.mark.parametrize(
    ("event_types", "status"),
    [
        ("playbook.completed workflow.completed execution.completed", "COMPLETED"),
        ("playbook.failed workflow.failed execution.failed command.failed", "FAILED"),
        ("playbook.initialized execution.started stage.opened frame.dispatched", "RUNNING"),
        (
            "playbook_started playbook_completed step.enter workflow.initialized execution.cancelled "
            "playbook.cancelled",
            None,
        ),
    ],
)
def test_strict_status_table_even_after_a_terminal_status(event_types: str, status: str | None) -> None:
    for event_type in event_types.split():
        for before in ("UNKNOWN", "RUNNING", "COMPLETED"):
            assert status_after(before, event_type, STRICT) == (status or before)


def status_after(before: str, event_type: str | None, rules: FoldRules) -> str:
    base = {"execution": {"status": before, "last_node_name": None, "payload_refs": []}}
    folded = fold([event(1, event_type, status="IGNORED")], Identity(1), rules, base)
    return str(folded.state["execution"]["status"])


@pytest.mark.parametrize(
    ("events", "status", "last_node_name"),
    [
        ([], "UNKNOWN", None),
        ([event(1, "playbook_started"), event(2, "step.enter", node_name="start")], "RUNNING", "start"),
        (
            [
                event(1, "step.enter", node_name="start"),
                event(2, "command.completed", node_name="start"),
                event(3, "playbook.completed"),
            ],
            "COMPLETED",
            "start",
        ),
        ([event(1, "step.enter", node_name="start"), event(2, "playbook.failed")], "FAILED", "start"),
        ([event(1, "step_started", node_name="alpha"), event(2, "playbook_completed")], "COMPLETED", "alpha"),
        (
            [
                event(3, "playbook.completed"),
                event(2, "command.completed", node_name="start"),
                event(1, "step.enter", node_name="start"),
            ],
            "COMPLETED",
            "start",
        ),
    ],
)
def test_what_the_first_service_promised_still_holds_under_union(
    events: list[dict[str, Any]], status: str, last_node_name: str | None
) -> None:
    state = fold_events(*events).state

    assert state["event_count"] == len(events)
    assert state["last_event_id"] == (len(events) or None)
    assert state["execution"] == {"status": status, "last_node_name": last_node_name, "payload_refs": []}
    assert all(state[surface] == {} for surface in ("stages", "frames", "business_objects", "loops"))


def test_union_keeps_the_node_name_over_nulls_and_takes_empty_text() -> None:
    named = [event(1, node_name="a"), event(2)]

    assert fold_events(*named).state["execution"]["last_node_name"] == "a"
    assert fold_events(*named, rules=STRICT).state["execution"]["last_node_name"] is None
    assert fold_events(*named, event(3, node_name="")).state["execution"]["last_node_name"] == ""


def test_union_lets_the_type_speak_where_a_business_status_is_empty() -> None:
    created = event(1, "x.created", status="", meta={"object_type": "x", "object_id": 0})
    deleted = event(2, "x.DELETED", status="", meta={"object_type": "x", "object_id": 0})

    union = fold_events(created, deleted).state["business_objects"]["x/0"]
    strict = fold_events(created, deleted, rules=STRICT).state["business_objects"]["x/0"]

    assert (union["status"], union["deleted_event_id"]) == ("DELETED", 2)
    assert (strict["status"], strict["deleted_event_id"]) == ("UNKNOWN", None)


@pytest.mark.parametrize("malformed", ["5x", "1.5", [1], {"a": 1}, float("inf"), float("nan"), "9" * 5000])
@pytest.mark.parametrize(
    ("build", "path", "where", "kept"),
    [
        (
            lambda bad: [
                event(1, "stage.closed", stage_id=1, meta={"row_count": 4}),
                event(2, "stage.closed", stage_id=1, meta={"row_count": bad}),
            ],
            "meta.row_count",
            ("stages", "1", "row_count"),
            4,
        ),
        (
            lambda bad: [
                event(1, "frame.committed", frame_id=1, meta={"row_count": 4}),
                event(2, "frame.committed", frame_id=1, meta={"row_count": bad}),
            ],
            "meta.row_count",
            ("frames", "1", "row_count"),
            4,
        ),
        (
            lambda bad: [
                event(1, "frame.failed", frame_id=1, meta={"events_emitted": 4}),
                event(2, "frame.failed", frame_id=1, meta={"events_emitted": bad}),
            ],
            "meta.events_emitted",
            ("frames", "1", "events_emitted"),
            4,
        ),
        (
            lambda bad: [event(2, "frame.dispatched", frame_id=1, meta={"attempt": bad})],
            "meta.attempt",
            ("frames", "1", "attempts"),
            1,
        ),
        (
            lambda bad: [
                event(
                    2,
                    meta={
                        "business_object": {"type": "x", "id": 1, "version": bad},
                        "business_object_version": 9,
                    },
                )
            ],
            "meta.business_object.version",
            ("business_objects", "x/1", "version"),
            9,
        ),
        (
            lambda bad: [event(2, meta={"object_type": "x", "object_id": 1, "business_object_version": bad})],
            "meta.business_object_version",
            ("business_objects", "x/1", "version"),
            1,
        ),
        (
            lambda bad: [event(2, meta={"loop_id": "l", "collection_size": bad, "total": "7"})],
            "meta.collection_size",
            ("loops", "l", "total"),
            "7",
        ),
        (
            lambda bad: [event(2, meta={"loop_id": "l", "collection_size": 0, "total": bad})],
            "meta.total",
            ("loops", "l", "total"),
            None,
        ),
    ],
    ids=["stage", "frame-rows", "frame-emitted", "attempt", "version", "flat-version", "size", "total"],
)
def test_a_malformed_number_is_a_warning_under_union_and_an_error_under_the_strict_rules(
    malformed: Any, build: Any, path: str, where: tuple[str, str, str], kept: Any
) -> None:
    folded = fold_events(*build(malformed))

    surface, key, field = where
    assert folded.state[surface][key][field] == kept
    assert [(warning.event_id, warning.path) for warning in folded.warnings] == [(2, path)]
    assert checksums(folded.state).value

    with pytest.raises(EventMalformed) as refused:
        checksums(fold_events(*build(malformed), rules=STRICT).state)
    assert refused.value.metadata == {"event_id": "2", "path": path}


@pytest.mark.parametrize(
    ("given", "read"), [(2.9, 2), (True, 1), ("7", 7), (" 1_0 ", 10), (-3, -3), ("\u0663", 3)]
)
@pytest.mark.parametrize("rules", FoldRules)
def test_numbers_that_are_readable(given: Any, read: int, rules: FoldRules) -> None:
    folded = fold_events(event(1, "stage.closed", stage_id=1, meta={"row_count": given}), rules=rules)

    assert folded.state["stages"]["1"]["row_count"] == read
    assert folded.warnings == []


@pytest.mark.parametrize("rules", FoldRules)
def test_a_falsy_count_leaves_the_earlier_one(rules: FoldRules) -> None:
    closed = [
        event(1, "stage.closed", stage_id=1, meta={"row_count": 5}),
        event(2, "stage.closed", stage_id=1, meta={"row_count": 0}),
        event(3, "stage.closed", stage_id=1, meta={"row_count": ""}),
    ]

    assert fold_events(*closed, rules=rules).state["stages"]["1"]["row_count"] == 5


def test_an_absent_attempt_is_one_and_a_null_attempt_is_malformed() -> None:
    dispatched = event(1, "frame.dispatched", frame_id=1, meta={"attempt": None})

    assert fold_events(event(1, "frame.dispatched", frame_id=1)).state["frames"]["1"]["attempts"] == 1
    assert [warning.path for warning in fold_events(dispatched).warnings] == ["meta.attempt"]
    with pytest.raises(EventMalformed):
        fold_events(dispatched, rules=STRICT)


def test_warnings_are_bounded_and_say_how_many_are_not_listed() -> None:
    bad = [event(i, "frame.dispatched", frame_id=1, meta={"attempt": "x"}) for i in range(WARNINGS_MAX + 5)]

    warnings = fold_events(*bad).warnings

    assert len(warnings) == WARNINGS_MAX + 1
    assert warnings[-1].problem == "5 more warnings are not listed"


@pytest.mark.parametrize("meta", ['{"stage_id": 1}', [1], 5, None, True])
def test_a_meta_that_is_no_object_counts_as_empty(meta: Any) -> None:
    state = fold_events(event(1, meta=meta)).state

    assert state["event_count"] == 1
    assert state["stages"] == {}


def test_ids_that_are_text_null_or_no_number_are_folded_first() -> None:
    events = [event("10"), event(None), event("abc"), event(9)]

    ordered = [each.event_id for each in in_order(FoldEvent.of(each) for each in events)]

    assert ordered == [None, None, 9, 10]
    assert fold_events(*events).state["last_event_id"] == 10


def test_a_null_event_type_becomes_empty_text() -> None:
    assert fold_events(event(1, None)).state["last_event_type"] == ""


def test_the_same_event_twice_counts_twice() -> None:
    done = event(5, "command.completed", meta={"loop_id": "l"})

    assert fold_events(done, done).state["loops"]["l"]["done"] == 2


@pytest.mark.parametrize(
    ("columns", "stages"),
    [
        ({"stage_id": 0}, ["0"]),
        ({"stage_id": "", "meta": {"stage_id": 5}}, []),
        ({"aggregate_type": "stage", "aggregate_id": "stage/", "meta": {"stage_id": 5}}, []),
        ({"aggregate_type": "stage", "aggregate_id": "stage/stage/1"}, ["stage/1"]),
        ({"aggregate_type": "stage", "aggregate_id": "", "meta": {"stage_id": 5}}, ["5"]),
        ({"aggregate_type": "Stage", "aggregate_id": "stage/1", "meta": {"stage_id": 7.0}}, ["7.0"]),
        ({"meta": {"stage_id": True}}, ["True"]),
        ({"meta": {"stage_id": None}}, []),
    ],
)
def test_where_a_stage_id_comes_from(columns: dict[str, Any], stages: list[str]) -> None:
    assert list(fold_events(event(1, **columns)).state["stages"]) == stages


@pytest.mark.parametrize(
    ("aggregate_id", "key"),
    [
        ("a/b/c", "a/b/c"),
        ("business_object/a/b/c", "a/b/c"),
        ("/business_object/patient/p1", "patient/p1"),
        ("patient", "business_object/patient"),
        ("business_object/patient", "business_object/business_object/patient"),
        ("", "business_object/"),
    ],
)
def test_business_object_keys_from_the_aggregate(aggregate_id: str, key: str) -> None:
    state = fold_events(event(1, aggregate_type="business_object", aggregate_id=aggregate_id)).state

    assert list(state["business_objects"]) == [key]


@pytest.mark.parametrize(
    ("meta", "keys"),
    [
        ({"business_object": {"type": "t", "id": 0}}, []),
        ({"object_type": "t", "object_id": 0}, ["t/0"]),
        ({"object_type": "", "object_id": ""}, ["/"]),
        ({"business_object_type": "t", "object_id": 3}, ["t/3"]),
        ({"business_object": {"object_type": "t"}, "business_object_id": 4}, ["t/4"]),
        ({"business_object": "t", "object_id": 3}, []),
    ],
)
def test_business_object_keys_from_meta(meta: dict[str, Any], keys: list[str]) -> None:
    assert list(fold_events(event(1, meta=meta)).state["business_objects"]) == keys


def test_the_fold_changes_neither_its_events_nor_its_base() -> None:
    created = event(1, meta={"business_object": {"type": "t", "id": 1, "state": {"a": 1}}})
    patched = event(2, meta={"business_object": {"type": "t", "id": 1, "patch": {"b": 2}}})
    base = fold_events(created).state
    before = checksums(base).value

    fold([patched], Identity(1), UNION, base)
    fold_events(created, patched)

    assert checksums(base).value == before
    assert created["meta"]["business_object"]["state"] == {"a": 1}


def test_continuing_takes_the_identity_of_the_call_and_drops_old_checksums() -> None:
    base = {
        **fold_events(event(1)).state,
        "checksum": "old",
        "checksum_algorithm": "x",
        "projection_checksums": {},
    }

    state = fold([event(2)], Identity(9, "t", "o", "stage", "d"), UNION, base).state

    assert state["event_count"] == 2
    assert (state["execution_id"], state["tenant_id"], state["organization_id"]) == (9, "t", "o")
    assert (state["projection"], state["upcaster_registry_digest"]) == ("stage", "d")
    assert "checksum" not in state
