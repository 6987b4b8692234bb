"""The delays that NoETL's publishers reckon with."""

from __future__ import annotations

import pytest

from noetl_grpc.core.backoff import delay_seconds


@pytest.mark.parametrize(
    ("attempts", "maximum", "expected"),
    [(1, 300, 1), (2, 300, 2), (5, 300, 16), (9, 300, 256), (20, 300, 256), (5, 10, 10), (0, 300, 1)],
)
def test_the_seven_cases_of_the_reference(attempts: int, maximum: int, expected: int) -> None:
    assert delay_seconds(attempts, maximum=maximum) == expected


def test_it_doubles_until_its_cap_and_then_stays() -> None:
    assert [delay_seconds(attempts) for attempts in range(1, 12)] == [
        1, 2, 4, 8, 16, 32, 64, 128, 256, 256, 256,
    ]  # fmt: skip
