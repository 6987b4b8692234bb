import itertools
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from noetl_grpc.core.partitions import IdRange, plan

BOUNDS = st.lists(st.integers(min_value=0, max_value=2**61), unique=True, max_size=12).map(sorted)


@given(bounds=BOUNDS, now=st.datetimes(datetime(2024, 1, 1), datetime(2060, 1, 1)))
def test_planned_partitions_overlap_nothing_and_leave_no_gap(bounds: list[int], now: datetime) -> None:
    existing = [IdRange(lower, upper) for lower, upper in zip(bounds[::2], bounds[1::2], strict=False)]
    moment = now.replace(tzinfo=UTC)

    planned = plan(existing, [], now=moment)

    after = sorted(
        [(item.lower or 0, item.upper or 0) for item in existing]
        + [(item.lower, item.upper) for item in planned]
    )
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(after))
    assert all(item.lower < item.upper for item in planned)
    assert len({item.name for item in planned}) == len(planned)
    assert plan([*existing, *(IdRange(item.lower, item.upper) for item in planned)], [], now=moment) == []
    for bits in (22, 23):
        an_id = int((moment - datetime(2024, 1, 1, tzinfo=UTC)).total_seconds() * 1000) << bits
        assert any(lower <= an_id < upper for lower, upper in after)
