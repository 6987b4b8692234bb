"""Rules that fields of requests share."""

from __future__ import annotations

from datetime import timedelta

import pytest

from noetl_grpc.core import fields
from noetl_grpc.errors import InvalidRequest


def test_ids_are_above_zero() -> None:
    assert fields.positive_id(1, "execution_id") == 1
    for wrong in (0, -1):
        with pytest.raises(InvalidRequest, match="execution_id must be above 0"):
            fields.positive_id(wrong, "execution_id")


def test_a_text_has_no_nul_and_keeps_its_bound() -> None:
    assert fields.text("äöü", "reason", characters_max=3) == "äöü"
    assert fields.text("", "reason") == ""
    with pytest.raises(InvalidRequest, match="reason must have at most 3 characters"):
        fields.text("abcd", "reason", characters_max=3)
    with pytest.raises(InvalidRequest, match="reason must not contain a NUL"):
        fields.text("a\0", "reason")


@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_a_required_text_says_something(blank: str) -> None:
    with pytest.raises(InvalidRequest, match="path is required"):
        fields.required_text(blank, "path")


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [
        (0, 0, timedelta(seconds=30)),
        (1, 0, timedelta(seconds=1)),
        (3600, 0, timedelta(hours=1)),
        (2, 500_000_999, timedelta(seconds=2.5)),
    ],
)
def test_a_lease_has_a_default_and_microseconds(seconds: int, nanos: int, expected: timedelta) -> None:
    assert fields.lease(seconds=seconds, nanos=nanos) == expected


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(0, 1), (0, 999_999_999), (-1, 0), (3600, 1000), (2**62, 0), (0, -1)]
)
def test_a_lease_out_of_bounds_is_refused(seconds: int, nanos: int) -> None:
    with pytest.raises(InvalidRequest, match="lease must be between 1 s and 1 h"):
        fields.lease(seconds=seconds, nanos=nanos)
