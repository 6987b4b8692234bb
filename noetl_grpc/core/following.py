"""Where a reader of the log stands: PostgreSQL snapshots, because event ids become visible out of order.

A gap is what is visible in `target` and was not in `seen`. With both and a place inside, a reader that stops
anywhere goes on without loss or repeat; with one snapshot alone a crash inside a gap would lose rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

_SNAPSHOT = re.compile(r"([0-9]{1,19}):([0-9]{1,19}):((?:[0-9]{1,19}(?:,[0-9]{1,19})*)?)")
_ID_MAX = 2**63 - 1


class Key(NamedTuple):
    """An event that became visible. `xact_id` is 0 where the log can't be followed by snapshots."""

    xact_id: int
    event_id: int
    execution_id: int
    event_type: str | None


@dataclass(frozen=True, slots=True)
class Position:
    """What has been read: everything visible in `seen`, and of the gap up to `target` what is not behind the place."""

    seen: str
    target: str | None = None
    at_xact: int = 0
    at_event: int = 0

    def towards(self, target: str) -> Position:
        """Begin the gap up to a later snapshot."""
        return replace(self, target=target, at_xact=0, at_event=0)

    def behind(self, page: Sequence[Key], *, limit: int) -> Position:
        """After a page of the gap; a page that is not full was its last."""
        if len(page) < limit:
            assert self.target is not None
            return Position(self.target)
        return replace(self, at_xact=page[-1].xact_id, at_event=page[-1].event_id)

    def as_list(self) -> list[str | int | None]:
        """Plain values, for a token."""
        return [self.seen, self.target, self.at_xact, self.at_event]

    @classmethod
    def from_list(cls, values: Any) -> Position | None:
        """From the values of a token; None if a database would not take them."""
        match values:
            case [str(seen), None | str() as target, int(at_xact), int(at_event)] if (
                is_snapshot(seen)
                and (target is None or is_snapshot(target))
                and 0 <= at_xact <= _ID_MAX
                and -_ID_MAX <= at_event <= _ID_MAX
            ):
                return cls(seen, target, at_xact, at_event)
        return None


@dataclass(frozen=True, slots=True)
class Page:
    """Some events of one gap, in the order of their places."""

    keys: list[Key]
    #: where the page was read from, inside its gap
    before: Position
    #: where to go on
    after: Position

    def behind(self, key: Key) -> Position:
        """The position right behind one of the page's events, for a reader that stops there."""
        return replace(self.before, at_xact=key.xact_id, at_event=key.event_id)


def is_snapshot(text: str) -> bool:
    """Whether PostgreSQL accepts this text as a snapshot."""
    match = _SNAPSHOT.fullmatch(text)
    if match is None:
        return False
    xmin, xmax = int(match[1]), int(match[2])
    running = [int(xid) for xid in match[3].split(",")] if match[3] else []
    return (
        0 < xmin <= xmax <= _ID_MAX
        and all(xmin <= xid < xmax for xid in running)
        and all(left < right for left, right in pairwise(running))
    )


def is_ahead(snapshot: str, now: str) -> bool:
    """Whether a snapshot knows transactions that do not exist yet, so it is another database's."""
    return int(snapshot.split(":")[1]) > int(now.split(":")[1])
