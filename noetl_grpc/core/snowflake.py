"""Ids in NoETL's application layout: 41 bits of milliseconds, 10 of machine, 12 of sequence.

Time is logical: it follows the clock, never goes back, and borrows from the future when a millisecond's 4096
ids are used up. So a backward clock or a burst neither repeats an id nor waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

EPOCH_MS = 1_704_067_200_000  # 2024-01-01T00:00:00Z
TIME_SHIFT = 22
MACHINE_SHIFT = 12
MACHINE_MAX = 1023
SEQUENCE_MAX = 4095

#: The shift of ids made by the database's own function `noetl.snowflake_id()`.
DATABASE_TIME_SHIFT = 23


@dataclass(frozen=True, slots=True)
class Clock:
    """The last place in time that was used: milliseconds since the Unix epoch, and the sequence within."""

    ms: int
    sequence: int = SEQUENCE_MAX

    def next(self, now_ms: int) -> Clock:
        """The place after this one, at the clock's time if that is later."""
        if now_ms > self.ms:
            return Clock(now_ms, 0)
        if self.sequence < SEQUENCE_MAX:
            return Clock(self.ms, self.sequence + 1)
        return Clock(self.ms + 1, 0)


def compose(clock: Clock, *, machine_id: int) -> int:
    """The id of this place in time on this machine."""
    return (clock.ms - EPOCH_MS) << TIME_SHIFT | machine_id << MACHINE_SHIFT | clock.sequence


def time_of(identity: int, *, time_shift: int = TIME_SHIFT) -> datetime:
    """When an id of this layout was made."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=EPOCH_MS + (identity >> time_shift))


def first_id_of(moment: datetime, *, time_shift: int = TIME_SHIFT) -> int:
    """The lowest id that this layout can make at a moment; the bound of a partition."""
    ms = (moment - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
    return (ms - EPOCH_MS) << time_shift
