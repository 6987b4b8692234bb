from typing import Any

import pytest

from noetl_grpc.core.canonical import checksum
from noetl_grpc.core.payloads import (
    NO_LOCATOR,
    locator_of,
    payload_uses,
    reference_of,
    resolution_row,
    resolution_summary,
    resolved,
    summarise,
    unresolved,
)
from tests.logs import event, fold_events


@pytest.mark.parametrize(
    ("payload_ref", "result", "reference"),
    [
        ({}, {"reference": {"ref": "r"}}, {}),
        (False, {"reference": {"ref": "r"}}, False),
        ("s3://x", None, "s3://x"),
        (None, {"reference": {"ref": "r"}}, {"ref": "r"}),
        (None, {"reference": None}, None),
        (None, "text", None),
        (None, None, None),
    ],
)
def test_which_reference_an_event_has(payload_ref: Any, result: Any, reference: Any) -> None:
    assert reference_of(payload_ref, result) == reference


def summary(**values: Any) -> dict[str, Any]:
    empty = {"sha256": None, "schema_digest": None, "row_count": None, "media_type": None, "ref": None}
    return {**empty, **values}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (None, summary()),
        ("s3://x", summary()),
        ([1], summary()),
        ({}, summary()),
        ({"sha256": "a", "digest": "b", "uri": "u"}, summary(sha256="a", ref="u")),
        ({"digest": "b", "row_count": 0}, summary(sha256="b")),
        ({"digest": ""}, summary(sha256="")),
        (
            {
                "uri": "u",
                "rows_ref": {
                    "ref": "r",
                    "meta": {"sha256": "m", "row_count": 0},
                    "ipc": {"row_count": 0, "media_type": "t"},
                },
            },
            summary(sha256="m", row_count=0, media_type="t", ref="r"),
        ),
        ({"rows_ref": {"meta": "x", "ipc": [1]}, "schema_digest": "d"}, summary(schema_digest="d")),
    ],
)
def test_summary(reference: Any, expected: dict[str, Any]) -> None:
    assert summarise(reference) == expected


@pytest.mark.parametrize(
    ("reference", "locator"),
    [
        ({"kind": "payload_store", "uri": "u", "sha256": "s"}, "u"),
        ({"kind": "payload_store", "sha256": "s"}, "s"),
        ({"kind": "payload_store"}, None),
        ({"kind": "payload_store", "ref": "r"}, "r"),
        ({}, None),
        (None, None),
        (42, None),
        ([1], None),
        ({"uri": "u"}, "u"),
        ({"kind": "temp_ref", "ref": "r", "uri": "u"}, "r"),
        ("text", "text"),
        ({"rows_ref": {"ref": "r"}}, "r"),
        ({"locator": "l"}, "l"),
        ({"sha256": "abc"}, None),
    ],
)
def test_locator(reference: Any, locator: str | None) -> None:
    assert locator_of(reference) == locator


def test_uses_come_in_order_and_the_same_locator_has_one_key() -> None:
    rows_ref = {"rows_ref": {"ref": "noetl://r/1"}}
    state = fold_events(
        event(1, "frame.committed", frame_id=9, payload_ref=rows_ref),
        event(2, "x.created", meta={"object_type": "x", "object_id": 1}, payload_ref={"uri": "u"}),
    ).state

    uses = list(payload_uses(state))

    assert [use.labels for use in uses] == [
        {"scope": "execution", "event_id": 1},
        {"scope": "execution", "event_id": 2},
        {"scope": "frame", "frame_id": "9", "event_id": 1},
        {"scope": "business_object", "object_key": "x/1", "event_id": 2},
    ]
    assert [use.key for use in uses] == ["noetl://r/1", "u", "noetl://r/1", "u"]


def test_a_resolved_list_tells_its_rows_and_the_checksum_of_its_text() -> None:
    payload = [{"a": 1}, {"a": 2}]

    assert resolved({"uri": "u"}, payload) == {
        "ref": "u",
        "resolved": True,
        "checksum": checksum(payload),
        "size_bytes": len('[{"a":1},{"a":2}]'),
        "row_count": 2,
        "value_type": "list",
        "error": None,
    }
    assert resolved("u", {"rows": [1]})["row_count"] == 1
    assert resolved("u", b"\x00\xff")["checksum"] == checksum("00ff")


def test_a_reference_without_locator_is_not_resolved() -> None:
    resolution = unresolved({"sha256": "abc"}, NO_LOCATOR)

    assert (resolution["ref"], resolution["resolved"], resolution["error"]) == ("", False, NO_LOCATOR)


def test_summaries_have_the_recorded_checksums() -> None:
    refs = [("noetl://payload/1", True), ("noetl://payload/2", False), ("noetl://payload/1", True)]
    rows = [{"resolution": {"ref": ref, "resolved": done}} for ref, done in refs]

    assert resolution_summary([]) == {
        "total": 0,
        "resolved": 0,
        "unresolved": 0,
        "unique_refs": 0,
        "all_resolved": True,
        "checksum": "2e54ff069f73cdc8097ffa309d05220ef1a095a9f7370a06d4fabaa58d8e9ca8",
    }
    assert resolution_summary(rows) == {
        "total": 3,
        "resolved": 2,
        "unresolved": 1,
        "unique_refs": 2,
        "all_resolved": False,
        "checksum": "15d18ae0e57f5e34fcba7fb63694ab59075e0c8fb80392ce8bf69dc700e295bc",
    }


def test_a_row_carries_labels_summary_and_resolution() -> None:
    (use,) = payload_uses(fold_events(event(1, payload_ref={"uri": "u", "sha256": "s"})).state)

    row = resolution_row(use, unresolved(use.reference, "away"))

    assert row["scope"] == "execution"
    assert row["reference_summary"] == summary(sha256="s", ref="u")
    assert row["resolution"]["error"] == "away"
