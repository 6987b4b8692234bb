from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from noetl_grpc.core.envelope import (
    COLUMNS,
    Batch,
    Reason,
    examine,
    first_of_each,
    pick,
    resolve_catalogs,
    result_fault,
)


def batch_of(*rows: dict[str, Any]) -> Batch:
    """Valid events by column; each row says only what matters."""
    given: dict[str, Any] = {"execution_id": 7, "event_id": 9, "catalog_id": 1, "schema_version": 0}
    return {column.name: [{**given, **row}.get(column.name) for row in rows] for column in COLUMNS}


def examined(**row: Any) -> tuple[Batch, Any]:
    batch = batch_of(row)
    problems = examine(batch, [row.get("timestamp")])
    return batch, problems.get(0)


def test_what_is_absent_gets_its_default() -> None:
    batch, problem = examined(tenant_id="", organization_id=" \t")

    assert problem is None
    assert (batch["tenant_id"], batch["organization_id"]) == (["default"], ["default"])
    assert batch["schema_version"] == [1]
    assert [batch[name] for name in ("created_at", "event_time", "ingest_time")] == [[None]] * 3


def test_a_tenant_is_kept_as_it_was_written() -> None:
    batch, _ = examined(tenant_id=" acme ", organization_id="o", schema_version=3)

    assert (batch["tenant_id"], batch["organization_id"], batch["schema_version"]) == ([" acme "], ["o"], [3])


@pytest.mark.parametrize("text", [None, "", "null", " null\n"])
def test_json_that_means_nothing_is_sql_null(text: str | None) -> None:
    batch, problem = examined(context=text, result=text, meta=text)

    assert problem is None
    assert (batch["context"], batch["result"], batch["meta"]) == ([None], [None], [None])


@pytest.mark.parametrize("text", ["0", "false", '""', "[]", '{"a": 0.10000000000000000001}', r'"\\u0000"'])
def test_json_is_stored_as_it_was_sent(text: str) -> None:
    batch, problem = examined(context=text, trace_component=text, payload_ref=text)

    assert problem is None
    assert (batch["context"], batch["trace_component"], batch["payload_ref"]) == ([text], [text], [text])


def test_timestamp_wins_over_created_at_and_times_are_cut_to_microseconds() -> None:
    batch, problem = examined(
        timestamp=(1, 999_999_999), created_at=(2, 0), event_time=(3, 1_999), ingest_time=(-62_135_596_800, 0)
    )

    assert problem is None
    assert batch["created_at"] == [datetime(1970, 1, 1, 0, 0, 1, 999_999)]
    assert batch["event_time"] == [datetime(1970, 1, 1, 0, 0, 3, 1, tzinfo=UTC)]
    assert batch["ingest_time"] == [datetime(1, 1, 1, tzinfo=UTC)]


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"execution_id": 0}, Reason.FIELD_INVALID, "execution_id"),
        ({"execution_id": -(2**63)}, Reason.FIELD_INVALID, "execution_id"),
        ({"event_id": 0}, Reason.FIELD_INVALID, "event_id"),
        ({"catalog_id": -1}, Reason.FIELD_INVALID, "catalog_id"),
        ({"duration": float("nan")}, Reason.FIELD_INVALID, "duration"),
        ({"duration": float("-inf")}, Reason.FIELD_INVALID, "duration"),
        ({"node_name": "a\0"}, Reason.FIELD_INVALID, "node_name"),
        ({"tenant_id": "\0"}, Reason.FIELD_INVALID, "tenant_id"),
        ({"timestamp": (253_402_300_800, 0)}, Reason.TIME_INVALID, "timestamp"),
        ({"created_at": (-62_135_596_801, 0)}, Reason.TIME_INVALID, "created_at"),
        ({"event_time": (0, 1_000_000_000)}, Reason.TIME_INVALID, "event_time"),
        ({"ingest_time": (0, -1)}, Reason.TIME_INVALID, "ingest_time"),
        ({"timestamp": (2**63 - 1, 0), "created_at": (0, 0)}, Reason.TIME_INVALID, "timestamp"),
        ({"context": "not JSON"}, Reason.JSON_INVALID, "context_json"),
        ({"context": " "}, Reason.JSON_INVALID, "context_json"),
        ({"meta": r'{"a": ["\u0000"]}'}, Reason.JSON_INVALID, "meta_json"),
        ({"meta": r'{"\u0000": 1}'}, Reason.JSON_INVALID, "meta_json"),
        ({"payload_ref": r'"\ud800"'}, Reason.JSON_INVALID, "payload_ref_json"),
        ({"trace_component": "1 2"}, Reason.JSON_INVALID, "trace_component_json"),
        ({"result": "[]"}, Reason.RESULT_SHAPE, "result_json"),
    ],
)
def test_what_the_table_would_refuse_is_named_with_its_field(
    row: dict[str, Any], reason: Reason, field: str
) -> None:
    _, problem = examined(**row)

    assert problem is not None
    assert problem.reason is reason
    assert problem.detail.startswith(f"{field} ")


def test_the_first_of_several_problems_is_reported() -> None:
    _, problem = examined(execution_id=0, context="x", result="[]")

    assert problem is not None
    assert problem.detail == "execution_id must be above 0"


def test_one_bad_event_does_not_touch_its_neighbours() -> None:
    batch = batch_of({"context": "1"}, {"context": "x"}, {"context": "null"})

    problems = examine(batch, [None] * 3)

    assert list(problems) == [1]
    assert (batch["context"][0], batch["context"][2]) == ("1", None)


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (None, None),
        ({"status": "ok"}, None),
        ({"status": "", "reference": {}, "context": {"any": 1}}, None),
        ([], "must be an object"),
        ("text", "must be an object"),
        ({}, "must have a text `status`"),
        ({"status": 1}, "must have a text `status`"),
        ({"status": "ok", "reference": None}, "must have an object as `reference`"),
        ({"status": "ok", "context": []}, "must have an object as `context`"),
        ({"status": "ok", "rows": 1}, "may hold only status, reference and context, not 'rows'"),
    ],
)
def test_a_result_has_the_shape_that_the_table_demands(result: object, fault: str | None) -> None:
    assert result_fault(result) == fault


def test_pick_takes_rows_in_the_order_asked_for() -> None:
    batch = batch_of({"event_id": 1}, {"event_id": 2}, {"event_id": 3})

    assert pick(batch, [2, 0])["event_id"] == [3, 1]


def test_the_first_of_equal_keys_is_kept_and_the_others_are_repeats() -> None:
    assert first_of_each(["a", "b", "a", "c", "a"], [0, 1, 2, 4]) == ([0, 1], [2, 4])


def test_a_catalog_comes_from_the_log_first_and_then_from_the_batch() -> None:
    batch = batch_of(
        {"execution_id": 1, "catalog_id": 0},
        {"execution_id": 2, "catalog_id": 0},
        {"execution_id": 2, "catalog_id": 20},
        {"execution_id": 1, "catalog_id": 11},
        {"execution_id": 3, "catalog_id": 0},
    )

    unresolved = resolve_catalogs(batch, range(5), {1: 10})

    assert batch["catalog_id"] == [10, 20, 20, 11, 0]
    assert unresolved == [4]


def test_a_rejected_event_lends_nobody_its_catalog() -> None:
    batch = batch_of({"catalog_id": 0}, {"catalog_id": 5})

    assert resolve_catalogs(batch, [0], {}) == [0]
