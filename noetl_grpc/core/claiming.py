"""Where a claim looks for due rows. All of it is hints: what they leave out is found a moment later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noetl_grpc.core.outbox import ClaimedRow, Heads

#: How often rows below the low-water mark are looked for, however many rows there are above it.
FULL_LOOK_SECONDS = 0.2
#: A full look that is slow is made rarely, so that it takes at most this share of the time.
FULL_LOOK_SHARE = 0.05
#: Below so many claimed rows nothing is worth skipping, and claims are strictly oldest first.
ROWS_WORTH_SKIPPING = 5000

#: Below every execution id.
BEGINNING = -(2**63)
#: A claim takes no more rows of one execution while others wait: if one fails, all behind it go back.
ROWS_PER_EXECUTION = 20
#: A walk that found something goes no further than this many times, however little it was.
STEPS_MAX = 3
#: How much the last claim counts in the mean length of runs.
RUN_WEIGHT = 0.2
PLACES_MAX = 64


class LowWater:
    """From which outbox_id on due rows are looked for.

    While somebody holds an old snapshot the index keeps an entry for every row that was ever claimed, and while
    rows wait for another attempt they stand in front; both would be walked over by every claim. Rows below the
    mark (late commits, failed rows that are due again) are found by a look without it, which is made when the
    look above found too little, and every now and then.
    """

    def __init__(self) -> None:
        self._mark = 0
        self._full_look_due = 0.0
        self._lowered = 0
        self._claimed = 0

    def begin(self, now: float) -> tuple[int, int]:
        """Where to look from, and what to tell `advance`."""
        everywhere = now >= self._full_look_due or self._claimed < ROWS_WORTH_SKIPPING
        return (0 if everywhere else self._mark), self._lowered

    def advance(self, ticket: int, rows: Sequence[ClaimedRow]) -> None:
        """These were the first due rows that could be had; the mark follows unless a row came back meanwhile."""
        self._claimed += len(rows)
        if rows and ticket == self._lowered:
            self._mark = max(self._mark, rows[-1].outbox_id + 1)

    def looked_everywhere(self, now: float, *, seconds: float) -> None:
        """A look without the mark is over, and took so long."""
        self._full_look_due = now + max(FULL_LOOK_SECONDS, seconds / FULL_LOOK_SHARE)

    def lower(self, outbox_id: int = 0) -> None:
        """A row came back."""
        self._mark = min(self._mark, outbox_id)
        self._lowered += 1


@dataclass(slots=True)
class Walk:
    """One claim's way round the executions, step by step, until it has enough or has been everywhere."""

    place: int
    _start: int
    _steps: int = 0
    _wrapped: bool = False
    is_over: bool = False

    @classmethod
    def begin(cls, place: int) -> Walk:
        """A walk from this place on."""
        return cls(place, _start=place)

    def step(self, heads: Heads, *, rows: int, limit: int) -> None:
        """Move behind what was looked at; `rows` is what the walk has claimed so far."""
        self._steps += 1
        if heads.at_end or heads.walked_to is None:
            self.place = BEGINNING
            self.is_over = self._wrapped or self._start == BEGINNING
            self._wrapped = True
        else:
            self.place = heads.walked_to
            self.is_over = self._wrapped and self.place >= self._start
        if rows >= limit or (rows and (2 * rows >= limit or self._steps >= STEPS_MAX)):
            self.is_over = True


class Lanes:
    """Where ordered claims look for executions.

    Each claim at work has a place of its own, which moves on and wraps: claims that began at the same place would
    meet at the same heads and get nothing. This is fair between executions, not first in, first out.
    """

    def __init__(self, choose: Callable[[int, int], int]) -> None:
        self._choose = choose
        self._places: deque[int] = deque(maxlen=PLACES_MAX)
        self._lowest: int | None = None
        self._highest: int | None = None
        self._mean_run = 1.0

    def begin(self) -> Walk:
        """A walk from a place that nobody else is at."""
        if self._places:
            return Walk.begin(self._places.popleft())
        if self._lowest is None or self._highest is None or self._lowest >= self._highest:
            return Walk.begin(BEGINNING)
        return Walk.begin(self._choose(self._lowest, self._highest))

    def end(self, walk: Walk) -> None:
        """Leave the place to a later claim."""
        self._places.append(walk.place)

    def wanted(self, rows: int) -> int:
        """How many executions are likely to have so many rows."""
        return max(1, math.ceil(rows / self._mean_run))

    def walk_max(self, wanted: int) -> int:
        """How many executions to look at for that; most may be blocked."""
        return 4 * wanted + 64

    def rows_per_execution(self, rows: int, heads: Heads) -> int:
        """How many rows to take of each: more than a few only where there are not enough executions."""
        return max(ROWS_PER_EXECUTION, math.ceil(rows / len(heads.execution_ids)))

    def learn(self, after: int, heads: Heads, rows: Sequence[ClaimedRow]) -> None:
        """Note what a step behind `after` has met."""
        if after == BEGINNING:
            self._lowest = heads.walked_from
        if heads.at_end and heads.walked_to is not None:
            self._highest = heads.walked_to
        executions = {row.execution_id for row in rows}
        if executions:
            run = min(len(rows) / len(executions), ROWS_PER_EXECUTION)
            self._mean_run += RUN_WEIGHT * (run - self._mean_run)
