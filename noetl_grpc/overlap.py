"""Publishes a log without xact_id: by the events' own time, looking back over a fixed stretch of it each time.

Event ids would be no better: two layouts of them are in use, of which one is always years ahead of the other, and no
index leads with them. An event that becomes visible later than the stretch is long is missed; status, log and metric
say so.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Final

from noetl_grpc.core.tailing import Cursor
from noetl_grpc.delivery import Delivery, Interrupted, Leadership, Renderer, Work
from noetl_grpc.storage import cursors, tailing
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.tailing import DatabaseFacts, History, Moment

#: How far each look goes back, unless the broker remembers message ids for less.
OVERLAP: Final = timedelta(seconds=60)
#: How often it is asked whether the log has got what it lacks.
MODE_SECONDS: Final = 10.0
SAVE_SECONDS: Final = 1.0


class OverlapTail:
    """The work of a leader. `run_once` does a page of it."""

    def __init__(
        self,
        *,
        leadership: Leadership,
        reader: Connection,
        renderer: Renderer,
        delivery: Delivery,
        cursor: Cursor,
        history: History | None,
        overlap: timedelta,
    ) -> None:
        self._leadership = leadership
        self._reader = reader
        self._renderer = renderer
        self._delivery = delivery
        self._cursor = cursor
        self._above_event_id = (history or History()).above_event_id
        self._overlap = overlap
        self._first_start = naive(cursor.created_at)
        #: Everything made before this, less the overlap, has been published.
        self._looked_to = naive(cursor.updated_at)
        self._recent: dict[tuple[int, int], datetime] = {}
        self._snapshot = ""
        #: The place inside a look that takes several pages, and when that look began.
        self._at: Moment | None = None
        self._began = self._looked_to
        self._saved = self._asked = monotonic()

    async def run_once(self) -> Work:
        """Publish what the next page holds. A look is dear here, whatever it finds."""
        if self._at is None and not await self._begin_look():
            return Work.NOTHING
        limit = self._renderer.page_size
        moments = await tailing.moments(
            self._reader,
            since=self._since(),
            at=self._at,
            first_start=self._first_start,
            above_event_id=self._above_event_id,
            limit=limit,
        )
        fresh = [moment for moment in moments if moment.identity not in self._recent]
        await self._publish(fresh)
        self._pass(moments, is_last=len(moments) < limit)
        if fresh or monotonic() - self._saved > SAVE_SECONDS:
            await self._save()
        return Work.NOTHING if self._at is None else Work.MORE

    async def is_needless(self) -> bool:
        """Whether the log can be followed by snapshots by now; asked now and then."""
        if monotonic() - self._asked < MODE_SECONDS:
            return False
        self._asked = monotonic()
        return await cursors.can_follow_snapshots(self._reader)

    async def close(self) -> None:
        """Nothing is under way between two pages."""

    async def _begin_look(self) -> bool:
        """Whether anything has been committed since the last look."""
        snapshot, now = await tailing.look_at_time(self._reader)
        if snapshot == self._snapshot:
            return False
        self._snapshot, self._began = snapshot, now
        return True

    def _since(self) -> datetime:
        if self._looked_to == datetime.min:
            return self._looked_to
        since = self._looked_to - self._overlap
        # Once the history is published, or if it never was to be, nothing from before the first start is new.
        return since if self._looked_to < self._first_start else max(since, self._first_start)

    async def _publish(self, moments: list[Moment]) -> None:
        while moments:
            count, batch = await self._renderer.render([moment.key for moment in moments])
            try:
                await self._delivery.publish(batch)
            except Interrupted as interruption:
                raise interruption.as_unavailable() from interruption
            moments = moments[count:]

    def _pass(self, moments: list[Moment], *, is_last: bool) -> None:
        self._recent |= {moment.identity: moment.created_at for moment in moments}
        self._at = None if is_last else moments[-1]
        reached = self._began if is_last else min(moments[-1].created_at, self._began)
        self._looked_to = max(self._looked_to, reached)
        if is_last:
            since = self._since()
            self._recent = {key: made for key, made in self._recent.items() if made >= since}

    async def _save(self) -> None:
        await self._leadership.save(self._cursor, moved_at=aware(self._looked_to))
        self._saved = monotonic()


async def begin(
    cursor: Cursor, *, leadership: Leadership, facts: DatabaseFacts, history: History | None
) -> Cursor:
    """Where to go on, or where the log begins for us. A position by snapshots was good until it was last saved."""
    looked_to = cursor.updated_at
    if cursor.system_identifier is None:
        looked_to = cursor.created_at if history is None else aware(datetime.min)
    cursor = replace(
        cursor,
        position=None,
        seen_at=None,
        system_identifier=facts.system_identifier,
        updated_at=looked_to,
    )
    await leadership.save(cursor, moved_at=looked_to)
    return cursor


def naive(moment: datetime) -> datetime:
    """UTC without a zone, as events have it."""
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.year > 1 else datetime.min


def aware(moment: datetime) -> datetime:
    """The same with its zone."""
    return moment.replace(tzinfo=UTC)
