"""Two states of one log compared, and the events to blame for what differs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice

from noetl_grpc.core.checksums import checksums_of
from noetl_grpc.core.cutoff import Cutoff, Scope
from noetl_grpc.core.difference import Blame, Cause, Change, Path, difference_steps, noted_event_id
from noetl_grpc.core.fold import Fold
from noetl_grpc.core.upcast import Registry
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.replay import START, EventPage, event_pages, fold_log, in_steps, turn

#: Each may look at many paths.
EVENTS_PER_TURN = 200


@dataclass(frozen=True, slots=True)
class Difference:
    from_checksum: str
    to_checksum: str
    changes: list[Change]
    #: path → the event that gave it its value in the second state; where it has none there, the event that
    #: removed it, or else the one that gave it its value in the first
    event_ids: dict[Path, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What can be asked of one execution's log. Use it inside one REPEATABLE READ transaction."""

    conn: Connection
    scope: Scope
    registry: Registry
    #: Makes an empty fold, or one that goes on from another.
    new_fold: Callable[[Fold | None], Fold]

    async def difference(self, before: Cutoff, after: Cutoff) -> Difference:
        """What leads from the state at one cutoff to the state at the other."""
        first = self.new_fold(None)
        await fold_log(self.conn, first, self.scope, before, self.registry)
        # Where the first is a prefix of the second, what they have in common need not be folded again.
        base, start = (first, before.event_id) if before.precedes(after) else (None, START)
        second = self.new_fold(base)
        await fold_log(self.conn, second, self.scope, after, self.registry, after_event_id=start)
        changes = await in_steps(difference_steps(first.state, second.state))
        event_ids = {change.path: noted for change in changes if (noted := noted_event_id(change))}
        event_ids |= await self._last_causes(
            self.new_fold(base), after, _without(changes, event_ids), after_event_id=start
        )
        event_ids |= await self._last_causes(self.new_fold(None), before, _without(changes, event_ids))
        return Difference(
            (await in_steps(checksums_of(first.state))).value,
            (await in_steps(checksums_of(second.state))).value,
            changes,
            event_ids,
        )

    async def causes(
        self, fold: Fold, cutoff: Cutoff, paths: Iterable[Path], *, after_event_id: int = START
    ) -> AsyncGenerator[Cause, None]:
        """Every event that changed the value at one of the paths, oldest first."""
        blame = Blame(fold, paths)
        pages = event_pages(self.conn, fold, self.scope, cutoff, self.registry, after_event_id=after_event_id)
        async with aclosing(pages):
            async for page in pages:
                async for cause in _in_turns(blame, page):
                    yield cause

    async def _last_causes(
        self, fold: Fold, cutoff: Cutoff, paths: list[Path], *, after_event_id: int = START
    ) -> dict[Path, int]:
        if not paths:
            return {}
        async with aclosing(self.causes(fold, cutoff, paths, after_event_id=after_event_id)) as causes:
            return {cause.path: cause.event_id async for cause in causes}


async def _in_turns(blame: Blame, page: EventPage) -> AsyncGenerator[Cause, None]:
    for part in page.parts:
        events = iter(part())
        while True:
            async with turn():
                some = list(islice(events, EVENTS_PER_TURN))
                causes = list(blame.apply(some))
            for cause in causes:
                yield cause
            if len(some) < EVENTS_PER_TURN:
                break


def _without(changes: Iterable[Change], event_ids: dict[Path, int]) -> list[Path]:
    return [change.path for change in changes if change.path not in event_ids]
