from typing import Any

import pytest

from noetl_grpc.core.difference import (
    MISSING,
    Change,
    differences,
    lookup,
    noted_event_id,
    parse_pointer,
    pointer,
)
from noetl_grpc.errors import InvalidRequest


@pytest.mark.parametrize("text", ["", "/", "/a", "/a/b~1c/d~0e", "/execution/payload_refs/0"])
def test_pointers_come_back_as_they_were(text: str) -> None:
    assert pointer(parse_pointer(text)) == text


def test_a_pointer_starts_with_a_slash() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_pointer("execution")

    assert refused.value.violations[0][0] == "path"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", {"a/b": [1, {"~": 2}]}),
        ("/a~1b/1/~0", 2),
        ("/a~1b/01", MISSING),
        ("/a~1b/-", MISSING),
        ("/a~1b/2", MISSING),
        ("/a~1b/0/x", MISSING),
        ("/x", MISSING),
    ],
)
def test_lookup(path: str, value: Any) -> None:
    assert lookup({"a/b": [1, {"~": 2}]}, parse_pointer(path)) == value


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, [Change(("a",), 1, 1.0)]),
        ({"a": 1}, {"a": True}, [Change(("a",), 1, True)]),
        ({"a": 0.0}, {"a": -0.0}, [Change(("a",), 0.0, -0.0)]),
        ({"a": {"b": 1}}, {}, [Change(("a",), {"b": 1}, MISSING)]),
        ({"a": [1]}, {"a": [1, 2, 3]}, [Change(("a", "1"), MISSING, 2), Change(("a", "2"), MISSING, 3)]),
        ({"a": [1, 2, 3]}, {"a": [1]}, [Change(("a", "2"), 3, MISSING), Change(("a", "1"), 2, MISSING)]),
        ({"a": [1, 2]}, {"a": [2]}, [Change(("a",), [1, 2], [2])]),
        ({"a": {"b": None}}, {"a": {"b": {}}}, [Change(("a", "b"), None, {})]),
    ],
)
def test_differences(before: Any, after: Any, changes: list[Change]) -> None:
    found = list(differences(before, after))

    assert repr(found) == repr(changes)


@pytest.mark.parametrize(
    ("path", "event_id"),
    [
        (("execution", "payload_refs", "3"), 5),
        (("business_objects", "k", "payload_refs", "3"), 5),
        (("business_objects", "k", "attributes", "payload_refs", "3"), None),
        (("frames", "payload_refs", "3"), None),
        (("execution", "payload_refs"), None),
    ],
)
def test_only_entries_of_reference_lists_name_their_event(
    path: tuple[str, ...], event_id: int | None
) -> None:
    assert noted_event_id(Change(path, MISSING, {"event_id": 5})) == event_id
    assert noted_event_id(Change(path, {"event_id": 5}, MISSING)) == event_id
