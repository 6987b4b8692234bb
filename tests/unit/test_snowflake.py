from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from noetl_grpc.core import snowflake
from noetl_grpc.core.snowflake import Clock


def test_the_layout_is_that_of_the_application() -> None:
    identity = snowflake.compose(Clock(ms=snowflake.EPOCH_MS + 5, sequence=7), machine_id=3)

    assert identity == 5 << 22 | 3 << 12 | 7


def test_an_id_tells_when_it_was_made() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)

    assert snowflake.first_id_of(moment) == 264905529753600000
    assert snowflake.time_of(264905529753600000) == moment
    assert snowflake.first_id_of(moment, time_shift=snowflake.DATABASE_TIME_SHIFT) == 529811059507200000


def test_a_used_up_millisecond_borrows_from_the_next() -> None:
    assert Clock(ms=10, sequence=snowflake.SEQUENCE_MAX).next(10) == Clock(ms=11, sequence=0)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=200))
def test_ids_grow_whatever_the_clock_does(readings: list[int]) -> None:
    clock = Clock(ms=0)
    made = []
    for now_ms in readings:
        clock = clock.next(now_ms)
        made.append((clock.ms, clock.sequence))

    assert made == sorted(set(made))
