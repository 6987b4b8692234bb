"""What is old, and which partitions of the event log may be dropped.

A partition's bounds are ids, and an id means a time only in the layout it was made in. NoETL has two, a
factor of two apart, and partition names don't tell which. Events do: their ids and times agree in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from noetl_grpc.core.snowflake import DATABASE_TIME_SHIFT, TIME_SHIFT, time_of
from noetl_grpc.errors import InvalidRequest

DAYS_MAX = 36_500
MINUTES_MAX = DAYS_MAX * 24 * 60
#: How far an event's own time may lie from the time in its id. Readings in the two layouts are years apart.
AGREEMENT_MAX = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """After how long things are old; None is never."""

    command_retention: timedelta | None
    runtime_staleness: timedelta | None
    event_retention: timedelta | None
    outbox_retention: timedelta | None


def make_policy(
    *,
    command_retention_days: int | None = None,
    runtime_stale_minutes: int | None = None,
    event_retention_days: int | None = None,
    outbox_retention_days: int | None = None,
) -> Policy:
    """The policy that was asked for; None takes the default, 0 and less is never, too much is an error."""
    return Policy(
        command_retention=_age("command_retention_days", command_retention_days, default=7),
        runtime_staleness=_age("runtime_stale_minutes", runtime_stale_minutes, default=60, unit="minutes"),
        event_retention=_age("event_retention_days", event_retention_days, default=0),
        outbox_retention=_age("outbox_retention_days", outbox_retention_days, default=0),
    )


def _age(field: str, asked: int | None, *, default: int, unit: str = "days") -> timedelta | None:
    amount = default if asked is None else asked
    most = MINUTES_MAX if unit == "minutes" else DAYS_MAX
    if amount > most:
        raise InvalidRequest(f"policy.{field}", f"must not be above {most}")
    return timedelta(**{unit: amount}) if amount > 0 else None


class KeepReason(StrEnum):
    """Why a partition stays."""

    LIVE_SUBSCRIPTION = "LIVE_SUBSCRIPTION"
    RECENT_EVENTS = "RECENT_EVENTS"
    NOT_PUBLISHED = "NOT_PUBLISHED"
    NOT_OWNER = "NOT_OWNER"
    LOCK_TIMEOUT = "LOCK_TIMEOUT"
    UNBOUNDED = "UNBOUNDED"


@dataclass(frozen=True, slots=True)
class Keep:
    """The decision that a partition stays."""

    reason: KeepReason
    detail: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The event of a partition with the latest time of its own."""

    event_id: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Content:
    """What a partition holds that decides about it."""

    newest: Newest | None
    #: A subscription that is not DEACTIVATED.
    live_subscription_id: int | None
    has_unpublished: bool


def time_shift_of(newest: Newest | None) -> int:
    """The layout of the partition's events; the application's when there are none or it is neither."""
    if newest is not None:
        for shift in (TIME_SHIFT, DATABASE_TIME_SHIFT):
            if abs(time_of(newest.event_id, time_shift=shift) - newest.created_at) <= AGREEMENT_MAX:
                return shift
    return TIME_SHIFT


def decide(upper: int | None, content: Content, *, cutoff: datetime) -> Keep | None:
    """Why a partition with this upper bound stays; None when it may go."""
    if upper is None:
        return Keep(KeepReason.UNBOUNDED, "its range has no upper end")
    end = time_of(upper, time_shift=time_shift_of(content.newest))
    if end > cutoff:
        return Keep(KeepReason.RECENT_EVENTS, f"its range ends at {end:%Y-%m-%dT%H:%M:%SZ}, after the cutoff")
    if content.newest is not None and content.newest.created_at > cutoff:
        moment = f"{content.newest.created_at:%Y-%m-%dT%H:%M:%SZ}"
        return Keep(
            KeepReason.RECENT_EVENTS, f"event {content.newest.event_id} is of {moment}, after the cutoff"
        )
    if content.live_subscription_id is not None:
        return Keep(
            KeepReason.LIVE_SUBSCRIPTION, f"subscription {content.live_subscription_id} is not DEACTIVATED"
        )
    if content.has_unpublished:
        return Keep(KeepReason.NOT_PUBLISHED, "the tailer has not published all of its events yet")
    return None
