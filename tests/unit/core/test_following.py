from typing import Any

import pytest

from noetl_grpc.core.following import Key, Position, is_ahead, is_snapshot


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("10:20:", True),
        ("10:20:10,15,19", True),
        ("10:10:", True),
        ("10:20:15,12", False),
        ("10:20:20", False),
        ("20:10:", False),
        ("0:10:", False),
        ("10:20", False),
        ("10:20:x", False),
        ("10:20:15,", False),
        ("10:99999999999999999999:", False),
        ("", False),
    ],
)
def test_which_texts_are_snapshots(text: str, valid: bool) -> None:
    assert is_snapshot(text) is valid


def test_a_gap_ends_with_a_page_that_is_not_full() -> None:
    start = Position("10:10:").towards("20:20:")

    inside = start.behind([Key(11, 5, 1, None), Key(12, 4, 1, None)], limit=2)
    tied = start.behind([Key(11, 5, 1, None), Key(11, 5, 2, None)], limit=1)
    end = inside.behind([Key(13, 1, 1, None)], limit=2)

    assert inside == Position("10:10:", "20:20:", 12, 4)
    assert tied == Position("10:10:", "20:20:", 11, 5)
    assert end == Position("20:20:")


def test_a_position_survives_a_token() -> None:
    position = Position("10:20:15", "30:30:", 17, -4)

    assert Position.from_list(position.as_list()) == position


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        ["x", None, 0, 0],
        ["10:10:", "x", 0, 0],
        ["10:10:", None, -1, 0],
        ["10:10:", None, 0, 2**63],
        ["10:10:", None, "0", 0],
        {"seen": "10:10:"},
    ],
)
def test_what_a_database_would_refuse_is_no_position(values: Any) -> None:
    assert Position.from_list(values) is None


def test_a_snapshot_of_the_future_is_another_databases() -> None:
    assert is_ahead("5:30:", "10:20:")
    assert not is_ahead("10:20:", "10:20:")
