from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from noetl_grpc.core.retention import (
    Content,
    KeepReason,
    Newest,
    Policy,
    decide,
    make_policy,
    time_shift_of,
)
from noetl_grpc.core.snowflake import DATABASE_TIME_SHIFT, TIME_SHIFT, first_id_of
from noetl_grpc.errors import InvalidRequest

NOW = datetime(2026, 11, 18, tzinfo=UTC)
EMPTY = Content(newest=None, live_subscription_id=None, has_unpublished=False)

PRE_2026 = 264905529753600000
Q1_2026 = 297520437657600000
Q1_2026_STANDARD = 569000000000000000
Q2_2026_STANDARD = 660995466854400000


def newest(moment: datetime, *, shift: int = TIME_SHIFT, created_at: datetime | None = None) -> Content:
    event = Newest(first_id_of(moment, time_shift=shift) + 5, created_at or moment)
    return Content(newest=event, live_subscription_id=None, has_unpublished=False)


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
    assert decide(PRE_2026, EMPTY, cutoff=cutoff) is None


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

    keep = decide(Q1_2026_STANDARD, newest(moment), cutoff=moment - timedelta(days=1))

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


def test_the_default_policy_spares_events_and_the_outbox() -> None:
    assert make_policy() == Policy(
        command_retention=timedelta(days=7),
        runtime_staleness=timedelta(minutes=60),
        event_retention=None,
        outbox_retention=None,
    )


@pytest.mark.parametrize("amount", [0, -1, -(2**31), -(2**63)])
def test_nothing_and_less_than_nothing_is_never(amount: int) -> None:
    policy = make_policy(
        command_retention_days=amount,
        runtime_stale_minutes=amount,
        event_retention_days=amount,
        outbox_retention_days=amount,
    )

    assert policy == Policy(
        command_retention=None, runtime_staleness=None, event_retention=None, outbox_retention=None
    )


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("command_retention_days", 36_500),
        ("runtime_stale_minutes", 52_560_000),
        ("event_retention_days", 36_500),
        ("outbox_retention_days", 36_500),
    ],
)
def test_an_age_beyond_a_century_is_an_error_that_names_the_field(field: str, most: int) -> None:
    make_policy(**{field: most})
    for amount in (most + 1, 2**31, 2**32 + 1, 2**63 - 1):
        with pytest.raises(InvalidRequest, match=f"policy.{field} must not be above {most}"):
            make_policy(**{field: amount})
