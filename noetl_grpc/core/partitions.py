"""Which partitions of the event log are still to be made.

An execution's id is a snowflake in one of two layouts: for one instant the database's ids are twice those of
the servers. A partition is a range of ids, so each coming quarter needs two of them, and only where none lies
yet: NoETL's bounds follow no calendar, and the layouts run into each other's years.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from noetl_grpc.core.snowflake import DATABASE_TIME_SHIFT, TIME_SHIFT, first_id_of

#: What the name of a partition ends in, by the layout of its ids.
LAYOUTS: Final = {"": TIME_SHIFT, "_standard": DATABASE_TIME_SHIFT}
#: The current quarter and the next two.
QUARTERS_AHEAD: Final = 3


@dataclass(frozen=True, slots=True)
class IdRange:
    """Ids from `lower` up to and without `upper`; None is unbounded."""

    lower: int | None
    upper: int | None


@dataclass(frozen=True, slots=True)
class NewPartition:
    """A partition to make."""

    name: str
    lower: int
    upper: int


def plan(existing: Iterable[IdRange], taken_names: Collection[str], *, now: datetime) -> list[NewPartition]:
    """The partitions to add so that ids of both layouts have one until the end of the quarter after next."""
    ranges = list(existing)
    names = set(taken_names)
    planned = []
    for year, quarter in _quarters(now):
        first, last = _start(year, quarter), _start(*_next(year, quarter))
        for suffix, time_shift in LAYOUTS.items():
            lower, upper = (first_id_of(moment, time_shift=time_shift) for moment in (first, last))
            for free in _free_parts(lower, upper, ranges):
                name = _new_name(f"event_{year}_q{quarter}{suffix}", names)
                planned.append(NewPartition(name, *free))
                ranges.append(IdRange(*free))
                names.add(name)
    return planned


def _quarters(now: datetime) -> Iterator[tuple[int, int]]:
    current = now.astimezone(UTC)
    place = (current.year, (current.month - 1) // 3 + 1)
    for _ in range(QUARTERS_AHEAD):
        yield place
        place = _next(*place)


def _next(year: int, quarter: int) -> tuple[int, int]:
    return (year, quarter + 1) if quarter < 4 else (year + 1, 1)


def _start(year: int, quarter: int) -> datetime:
    return datetime(year, quarter * 3 - 2, 1, tzinfo=UTC)


def _free_parts(lower: int, upper: int, taken: Iterable[IdRange]) -> list[tuple[int, int]]:
    """What of a range no taken one covers, in order."""
    free = [(lower, upper)]
    for other in taken:
        start = lower if other.lower is None else other.lower
        end = upper if other.upper is None else other.upper
        free = [
            part
            for first, last in free
            for part in ((first, min(last, start)), (max(first, end), last))
            if part[0] < part[1]
        ]
    return free


def _new_name(wanted: str, taken: Collection[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name
