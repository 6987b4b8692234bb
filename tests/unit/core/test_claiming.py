"""Where claims look for rows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from noetl_grpc.core.claiming import BEGINNING, ROWS_WORTH_SKIPPING, Lanes, LowWater, Walk
from noetl_grpc.core.outbox import ClaimedRow, Heads


def rows(*outbox_ids: int, execution_id: int | None = 1) -> list[ClaimedRow]:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return [ClaimedRow(outbox_id, 1, execution_id, None, "{}", None, 1, now) for outbox_id in outbox_ids]


def busy() -> LowWater:
    """A mark at 5001, and no look everywhere due before 100.2."""
    low_water = LowWater()
    low_water.advance(low_water.begin(100.0)[1], rows(*range(1, ROWS_WORTH_SKIPPING + 1)))
    low_water.looked_everywhere(100.0, seconds=0.001)
    return low_water


def test_nothing_is_skipped_before_it_is_worth_it() -> None:
    low_water = LowWater()
    low_water.advance(low_water.begin(1.0)[1], rows(1, 2, 3))
    low_water.looked_everywhere(1.0, seconds=0.001)

    assert low_water.begin(1.01)[0] == 0


def test_claims_go_on_behind_what_was_taken() -> None:
    assert busy().begin(100.1)[0] == ROWS_WORTH_SKIPPING + 1


def test_rows_below_are_looked_for_every_now_and_then() -> None:
    assert busy().begin(100.21)[0] == 0


def test_a_slow_look_everywhere_is_made_rarely() -> None:
    low_water = busy()
    low_water.looked_everywhere(100.0, seconds=0.5)

    assert low_water.begin(109.9)[0] > 0
    assert low_water.begin(110.1)[0] == 0


def test_a_row_that_comes_back_lowers_the_mark_also_under_a_claim_at_work() -> None:
    low_water = busy()
    _, ticket = low_water.begin(100.1)
    low_water.lower(17)
    low_water.advance(ticket, rows(6000))

    assert low_water.begin(100.1)[0] == 17


def heads(*executions: int, walked_to: int | None = None, at_end: bool = False) -> Heads:
    return Heads(executions, executions, min(executions, default=None), walked_to, at_end)


def test_a_walk_from_the_beginning_is_over_at_the_end() -> None:
    walk = Walk.begin(BEGINNING)
    walk.step(heads(walked_to=50), rows=0, limit=10)
    assert not walk.is_over
    walk.step(heads(walked_to=90, at_end=True), rows=0, limit=10)

    assert walk.is_over
    assert walk.place == BEGINNING


def test_a_walk_from_the_middle_wraps_and_is_over_where_it_began() -> None:
    walk = Walk.begin(60)
    walk.step(heads(walked_to=90, at_end=True), rows=0, limit=10)
    assert (walk.place, walk.is_over) == (BEGINNING, False)
    walk.step(heads(walked_to=40), rows=0, limit=10)
    assert not walk.is_over
    walk.step(heads(walked_to=70), rows=0, limit=10)

    assert walk.is_over


@pytest.mark.parametrize(("claimed", "steps"), [(10, 1), (5, 1), (1, 3), (0, 10)])
def test_a_walk_goes_on_while_it_has_too_little(claimed: int, steps: int) -> None:
    walk = Walk.begin(BEGINNING)
    taken = 0
    while not walk.is_over and taken < 10:
        walk.step(heads(walked_to=taken + 1), rows=claimed, limit=10)
        taken += 1

    assert taken == steps


def test_claims_at_work_at_the_same_time_are_at_different_places() -> None:
    lanes = Lanes(lambda low, high: (low + high) // 2)
    first = lanes.begin()
    lanes.learn(BEGINNING, heads(10, 90, walked_to=90, at_end=True), rows(1))

    second = lanes.begin()
    assert (first.place, second.place) == (BEGINNING, 50)

    second.place = 77
    lanes.end(second)
    assert lanes.begin().place == 77


def test_as_many_executions_are_wanted_as_are_likely_to_have_the_rows() -> None:
    lanes = Lanes(lambda low, high: low)
    assert lanes.wanted(100) == 100

    for _ in range(50):
        lanes.learn(0, heads(1), rows(*range(1, 1000)))

    assert lanes.wanted(100) == pytest.approx(5, abs=1)
    assert lanes.wanted(1) == 1


@pytest.mark.parametrize(
    ("wanted", "executions", "expected"), [(100, 10, 20), (100, 1, 100), (1000, 10, 100)]
)
def test_one_execution_gives_many_rows_only_where_others_do_not(
    wanted: int, executions: int, expected: int
) -> None:
    lanes = Lanes(lambda low, high: low)

    assert lanes.rows_per_execution(wanted, heads(*range(1, executions + 1))) == expected
