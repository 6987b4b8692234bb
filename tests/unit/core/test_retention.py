from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from noetl_grpc.core.retention import (
    ID_MIN,
    Bounds,
    Content,
    KeepReason,
    Newest,
    decide,
    missing_partitions,
    parse_bounds,
    time_shift_of,
)
from noetl_grpc.core.snowflake import DATABASE_TIME_SHIFT, TIME_SHIFT, first_id_of

NOW = datetime(2026, 11, 18, tzinfo=UTC)
EMPTY = Content(newest=None, live_subscription_id=None, has_unpublished=False)

#: The partitions that NoETL's own schema brings, in id order.
NOETL = [
    Bounds(ID_MIN, 264905529753600000),
    Bounds(264905529753600000, 297520437657600000),
    Bounds(297520437657600000, 330497733427200000),
    Bounds(330497733427200000, 363837417062400000),
    Bounds(363837417062400000, 397177100697600000),
    Bounds(397177100697600000, 462769304371200000),
    Bounds(462769304371200000, 529448671641600000),
    Bounds(529811059507200000, 569000000000000000),
    Bounds(569000000000000000, 600000000000000000),
    Bounds(600000000000000000, 660995466854400000),
    Bounds(660995466854400000, 727674834124800000),
    Bounds(727674834124800000, 794354201395200000),
    Bounds(794354201395200000, 925538608742400000),
    Bounds(925538608742400000, 1058897343283200000),
    Bounds(1058897343283200000, 1124137159091200000),
]
Q1_2026 = NOETL[1]
Q2_2026_STANDARD = NOETL[9]


def newest(moment: datetime, *, shift: int = TIME_SHIFT, created_at: datetime | None = None) -> Content:
    event = Newest(first_id_of(moment, time_shift=shift) + 5, created_at or moment)
    return Content(newest=event, live_subscription_id=None, has_unpublished=False)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("FOR VALUES FROM ('264905529753600000') TO ('297520437657600000')", Q1_2026),
        ("FOR VALUES FROM (MINVALUE) TO ('264905529753600000')", NOETL[0]),
        ("FOR VALUES FROM ('-5') TO ('7')", Bounds(-5, 7)),
        ("FOR VALUES FROM ('5') TO (MAXVALUE)", None),
        ("DEFAULT", None),
        ("FOR VALUES IN ('1')", None),
        ("FOR VALUES WITH (modulus 16, remainder 0)", None),
        ("FOR VALUES FROM ('1', '2') TO ('3', '4')", None),
        ("", None),
        (None, None),
    ],
)
def test_bounds_are_read_as_the_database_shows_them(text: str | None, bounds: Bounds | None) -> None:
    assert parse_bounds(text) == bounds


@pytest.mark.parametrize("shift", [TIME_SHIFT, DATABASE_TIME_SHIFT])
def test_the_layout_is_the_one_in_which_an_event_agrees_with_its_own_time(shift: int) -> None:
    event = newest(datetime(2026, 5, 1, tzinfo=UTC), shift=shift).newest

    assert time_shift_of(event) == shift


def test_an_event_that_agrees_with_neither_layout_is_read_in_the_applications() -> None:
    moment = datetime(2026, 5, 1, tzinfo=UTC)
    event = newest(moment, shift=DATABASE_TIME_SHIFT, created_at=moment - timedelta(days=2)).newest

    assert time_shift_of(event) == TIME_SHIFT
    assert time_shift_of(None) == TIME_SHIFT


def test_a_partition_that_is_over_and_old_may_go() -> None:
    cutoff = NOW - timedelta(days=30)

    assert decide(Q1_2026, EMPTY, cutoff=cutoff) is None
    assert decide(Q1_2026, newest(datetime(2026, 3, 30, tzinfo=UTC)), cutoff=cutoff) is None
    assert decide(NOETL[0], EMPTY, cutoff=cutoff) is None


def test_the_range_must_have_ended_before_the_cutoff_to_the_millisecond() -> None:
    end = datetime(2026, 4, 1, tzinfo=UTC)

    assert decide(Q1_2026, EMPTY, cutoff=end) is None
    keep = decide(Q1_2026, EMPTY, cutoff=end - timedelta(milliseconds=1))
    assert keep is not None
    assert keep.reason is KeepReason.RECENT_EVENTS


def test_bounds_of_the_other_layout_are_read_in_it() -> None:
    events = newest(datetime(2026, 6, 30, tzinfo=UTC), shift=DATABASE_TIME_SHIFT)

    assert decide(Q2_2026_STANDARD, events, cutoff=datetime(2026, 7, 1, tzinfo=UTC)) is None
    keep = decide(Q2_2026_STANDARD, events, cutoff=datetime(2026, 6, 30, tzinfo=UTC))
    assert keep is not None
    assert keep.reason is KeepReason.RECENT_EVENTS


def test_an_empty_partition_of_the_other_layout_is_kept_because_it_reads_as_the_future() -> None:
    keep = decide(Q2_2026_STANDARD, EMPTY, cutoff=NOW)

    assert keep is not None
    assert keep.reason is KeepReason.RECENT_EVENTS
    assert "2028" in keep.detail or "2029" in keep.detail


def test_ids_of_the_application_that_reach_a_partition_of_the_other_layout_keep_it() -> None:
    moment = datetime(2028, 2, 1, tzinfo=UTC)

    keep = decide(NOETL[7], newest(moment), cutoff=moment - timedelta(days=1))

    assert keep is not None
    assert keep.reason is KeepReason.RECENT_EVENTS


def test_a_young_event_of_an_old_execution_keeps_the_partition() -> None:
    old = datetime(2026, 2, 1, tzinfo=UTC)

    keep = decide(Q1_2026, newest(old, created_at=NOW), cutoff=NOW - timedelta(days=30))

    assert keep is not None
    assert keep.reason is KeepReason.RECENT_EVENTS
    assert "event " in keep.detail


def test_a_live_subscription_and_unpublished_events_keep_the_partition() -> None:
    live = decide(Q1_2026, Content(None, 42, True), cutoff=NOW)
    unpublished = decide(Q1_2026, Content(None, None, True), cutoff=NOW)

    assert live is not None
    assert (live.reason, live.detail) == (KeepReason.LIVE_SUBSCRIPTION, "subscription 42 is not DEACTIVATED")
    assert unpublished is not None
    assert unpublished.reason is KeepReason.NOT_PUBLISHED


def test_what_has_no_end_is_never_dropped() -> None:
    keep = decide(None, EMPTY, cutoff=NOW)

    assert keep is not None
    assert keep.reason is KeepReason.UNBOUNDED


def test_noetls_own_partitions_suffice_for_now() -> None:
    assert missing_partitions(NOETL, names=(), now=NOW) == []


def test_the_gaps_that_noetls_own_bounds_leave_are_closed_in_time() -> None:
    made = missing_partitions(NOETL, names=(), now=datetime(2027, 9, 1, tzinfo=UTC))

    assert [(partition.name, partition.bounds) for partition in made] == [
        ("event_2028_q1", Bounds(529448671641600000, 529811059507200000)),
        ("event_2028_q1_standard", Bounds(1124137159091200000, 1124851934822400000)),
    ]


def test_both_layouts_are_covered_without_overlap_far_into_the_future() -> None:
    existing = list(NOETL)
    names: set[str] = set()
    now = NOW
    while now < datetime(2040, 1, 1, tzinfo=UTC):
        for partition in missing_partitions(existing, names=names, now=now):
            assert partition.name not in names
            assert not any(
                partition.bounds.lower < other.upper and other.lower < partition.bounds.upper
                for other in existing
            )
            names.add(partition.name)
            existing.append(partition.bounds)
        for shift in (TIME_SHIFT, DATABASE_TIME_SHIFT):
            for ahead in (0, 90, 180):
                identity = first_id_of(now + timedelta(days=ahead), time_shift=shift)
                assert any(bounds.lower <= identity < bounds.upper for bounds in existing), (
                    now,
                    shift,
                    ahead,
                )
        now += timedelta(days=30)


def test_an_empty_log_gets_partitions_of_both_layouts() -> None:
    made = missing_partitions([], names={"event_2026_q4"}, now=NOW)

    assert [partition.name for partition in made] == [
        "event_2026_q4_2",
        "event_2027_q1",
        "event_2027_q2",
        "event_2026_q4_standard",
        "event_2027_q1_standard",
        "event_2027_q2_standard",
    ]
