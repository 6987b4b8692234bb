"""Which partitions of the event log may be dropped, and which must be made before events need them.

A partition's bounds are ids, and an id means a time only in the layout it was made in. NoETL has two, a
factor of two apart, and partition names don't tell which. Events do: their ids and times agree in one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from noetl_grpc.core.snowflake import DATABASE_TIME_SHIFT, TIME_SHIFT, first_id_of, time_of

DAYS_MAX = 36_500
MINUTES_MAX = DAYS_MAX * 24 * 60
#: How far ahead partitions are made: two quarters, so that a cron job may fail for months unnoticed.
AHEAD = timedelta(days=183)
#: How far an event's own time may lie from the time in its id. Readings in the two layouts are years apart.
AGREEMENT_MAX = timedelta(days=1)

ID_MIN, ID_MAX = -(2**63), 2**63 - 1

_BOUNDS = re.compile(r"FOR VALUES FROM \((MINVALUE|'-?\d+')\) TO \((MAXVALUE|'-?\d+')\)")


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
class Bounds:
    """The executions a partition holds: from `lower`, up to but without `upper`."""

    lower: int
    upper: int


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


def parse_bounds(text: str | None) -> Bounds | None:
    """The bounds as PostgreSQL shows them; None for the default partition and whatever has no end."""
    match = _BOUNDS.fullmatch(text or "")
    if match is None or match[2] == "MAXVALUE":
        return None
    lower = ID_MIN if match[1] == "MINVALUE" else int(match[1].strip("'"))
    return Bounds(lower, int(match[2].strip("'")))


def time_shift_of(newest: Newest | None) -> int:
    """The layout of the partition's events; the application's when there are none or it is neither."""
    if newest is not None:
        for shift in (TIME_SHIFT, DATABASE_TIME_SHIFT):
            if abs(time_of(newest.event_id, time_shift=shift) - newest.created_at) <= AGREEMENT_MAX:
                return shift
    return TIME_SHIFT


def decide(bounds: Bounds | None, content: Content, *, cutoff: datetime) -> Keep | None:
    """Why a partition stays; None when it may go."""
    if bounds is None:
        return Keep(KeepReason.UNBOUNDED, "its range has no upper end")
    end = time_of(bounds.upper, time_shift=time_shift_of(content.newest))
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


@dataclass(frozen=True, slots=True)
class NewPartition:
    """A partition to make."""

    name: str
    bounds: Bounds


def missing_partitions(
    existing: Collection[Bounds], *, names: Collection[str], now: datetime, ahead: timedelta = AHEAD
) -> list[NewPartition]:
    """What must be made so that ids of either layout have a partition of their own until `now + ahead`."""
    covered = list(existing)
    taken = set(names)
    made: list[NewPartition] = []
    for shift, ending in ((TIME_SHIFT, ""), (DATABASE_TIME_SHIFT, "_standard")):
        for start, end in _quarters(now, now + ahead):
            wanted = Bounds(first_id_of(start, time_shift=shift), first_id_of(end, time_shift=shift))
            for piece in _uncovered(wanted, covered):
                name = _free_name(f"event_{start.year}_q{(start.month + 2) // 3}{ending}", taken)
                taken.add(name)
                covered.append(piece)
                made.append(NewPartition(name, piece))
    return made


def _quarters(first: datetime, last: datetime) -> Iterator[tuple[datetime, datetime]]:
    start = datetime(first.year, (first.month - 1) // 3 * 3 + 1, 1, tzinfo=UTC)
    while start <= last:
        end = datetime(start.year + start.month // 10, (start.month + 2) % 12 + 1, 1, tzinfo=UTC)
        yield start, end
        start = end


def _uncovered(wanted: Bounds, covered: Iterable[Bounds]) -> list[Bounds]:
    """The parts of a range that no other range holds."""
    pieces: list[Bounds] = []
    at = wanted.lower
    for other in sorted(covered, key=lambda bounds: bounds.lower):
        if other.upper <= at or other.lower >= wanted.upper:
            continue
        if other.lower > at:
            pieces.append(Bounds(at, other.lower))
        at = other.upper
    if at < wanted.upper:
        pieces.append(Bounds(at, wanted.upper))
    return pieces


def _free_name(name: str, taken: Collection[str]) -> str:
    candidates: Sequence[str] = (name, *(f"{name}_{number}" for number in range(2, 1000)))
    return next(candidate for candidate in candidates if candidate not in taken)
