"""Publishes one shard's log by snapshots for as long as this process leads: read a page, publish it, move the cursor.

The cursor moves only over what the broker has acknowledged, and is saved on the session that holds the lock: a leader
that was replaced can't move it, and what it may still send carries the message ids that its successor uses too.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from noetl_grpc.core.following import Position
from noetl_grpc.core.tailing import Cursor, settled
from noetl_grpc.delivery import Batch, Delivery, Interrupted, Leadership, Renderer, Work
from noetl_grpc.errors import DatabaseUnavailable
from noetl_grpc.storage import cursors, tailing
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.tailing import DatabaseFacts, History

logger = logging.getLogger("noetl_grpc.tailer")

#: How often a cursor is saved that moved over nothing.
SAVE_SECONDS: Final = 1.0
#: Sees nothing: the whole log is in its gap.
NOTHING_SEEN: Final = "1:1:"


@dataclass(frozen=True, slots=True)
class Page:
    """A batch, where it was read from inside its gap, where to go on, and when the gap's end was taken."""

    batch: Batch
    before: Position
    after: Position
    target_taken_at: datetime | None


class Tail:
    """The work of a leader. `run_once` does a batch of it."""

    def __init__(
        self,
        *,
        leadership: Leadership,
        reader: Connection,
        renderer: Renderer,
        delivery: Delivery,
        cursor: Cursor,
        history: History | None,
    ) -> None:
        assert cursor.position is not None
        self._leadership = leadership
        self._reader = reader
        self._renderer = renderer
        self._delivery = delivery
        self._cursor = cursor
        self._position = cursor.position
        self._history = history
        self._target_taken_at = cursor.seen_at
        self._saved = monotonic()
        self._ahead: asyncio.Task[Page | None] | None = None

    async def run_once(self) -> Work:
        """Publish what the next page holds."""
        page = await self._next_page()
        if page is None:
            return Work.NOTHING
        ends_gap = page.after.target is None
        # Where events keep coming, the next gap is read ahead like the next page. The first one after a history is not:
        # it is read another way.
        if not ends_gap or (page.batch.keys and self._history is None):
            self._ahead = asyncio.create_task(self._read(page.after, page.target_taken_at))
        if page.batch.messages:
            await self._publish(page)
        await self._move(page, must_save=bool(page.batch.keys))
        if self._ahead is not None and not (self._ahead.done() and self._ahead.result() is None):
            return Work.MORE
        self._ahead = None
        return Work.DONE if page.batch.keys else Work.NOTHING

    async def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._ahead

    async def _next_page(self) -> Page | None:
        if self._ahead is None:
            return await self._read(self._position, self._target_taken_at)
        ahead, self._ahead = self._ahead, None
        return await ahead

    async def _read(self, position: Position, target_taken_at: datetime | None) -> Page | None:
        """The next page of the gap, or the first of the next; None when nothing has become visible."""
        if position.target is None:
            snapshot = await look(self._reader)
            if snapshot == position.seen:
                return None
            position = position.towards(snapshot)
            target_taken_at = datetime.now(UTC)
        limit = self._renderer.page_size
        if self._history is not None:
            keys, after = await tailing.history_keys(self._reader, position, self._history, limit=limit)
        else:
            keys, after = await cursors.gap_keys(self._reader, position, limit=limit)
            if keys and self._cursor.restored_at is not None:
                keys = await tailing.without_restored(
                    self._reader, keys, restored_at=self._cursor.restored_at
                )
        if not keys:
            return Page(Batch([], [], []), position, after, target_taken_at)
        count, batch = await self._renderer.render(keys)
        if count < len(keys):
            last = keys[count - 1]
            after = replace(position, at_xact=last.xact_id, at_event=last.event_id)
        return Page(batch, position, after, target_taken_at)

    async def _publish(self, page: Page) -> None:
        try:
            await self._delivery.publish(page.batch)
        except Interrupted as interruption:
            # What was acknowledged before something went wrong is kept; the rest comes again.
            count = settled(page.batch.keys, interruption.done)
            if count:
                last = page.batch.keys[count - 1]
                place = replace(page.before, at_xact=last.xact_id, at_event=last.event_id)
                await self._move(replace(page, after=place), must_save=True)
            raise interruption.as_unavailable() from interruption

    async def _move(self, page: Page, *, must_save: bool) -> None:
        """Go to where the page ends."""
        self._position, self._target_taken_at = page.after, page.target_taken_at
        finished = page.after.target is None
        seen_at = page.target_taken_at if finished else self._cursor.seen_at
        self._cursor = replace(self._cursor, position=page.after, seen_at=seen_at)
        if finished and self._history is not None:
            self._history = None
            must_save = True
        is_due = must_save or monotonic() - self._saved > SAVE_SECONDS
        if is_due and (self._history is None or self._history.can_be_interrupted):
            await self._leadership.save(self._cursor)
            self._saved = monotonic()


async def look(reader: Connection) -> str:
    """The snapshot of now."""
    snapshot = await cursors.look_at_log(reader)
    if snapshot is None:
        raise DatabaseUnavailable(tailing.STANDBY)
    return snapshot


async def begin(
    cursor: Cursor,
    *,
    leadership: Leadership,
    reader: Connection,
    facts: DatabaseFacts,
    history: History | None,
) -> tuple[Cursor, History | None]:
    """Where to go on, or where the log begins for us: at the very first start with `history`, if any, else with now."""
    position = cursor.position
    if position is None:
        cursor = replace(cursor, seen_at=datetime.now(UTC), system_identifier=facts.system_identifier)
        now = await look(reader)
        if history is None:
            cursor = replace(cursor, position=Position(now))
        else:
            cursor = replace(cursor, position=Position(NOTHING_SEEN).towards(now))
    elif cursor.system_identifier != facts.system_identifier:
        cursor, history = await _in_another_cluster(cursor, position, reader, facts)
    elif position.seen == NOTHING_SEEN:
        history = history or History()
    else:
        history = None
    if history is None or history.can_be_interrupted:
        await leadership.save(cursor)
    return cursor, history


async def _in_another_cluster(
    cursor: Cursor, position: Position, reader: Connection, facts: DatabaseFacts
) -> tuple[Cursor, History | None]:
    """A log that was restored, or a cluster that was upgraded."""
    cursor = replace(cursor, system_identifier=facts.system_identifier)
    if await tailing.is_this_clusters_log(reader, position.seen):
        logger.warning("the cluster has another system identifier, but the log is its own: going on")
        return cursor, None
    logger.warning(
        "the log was restored into another cluster: going through all of it once; events that were published in its"
        " last moments there may be published again"
    )
    now = await look(reader)
    cursor = replace(cursor, position=Position(NOTHING_SEEN).towards(now), restored_at=datetime.now(UTC))
    return cursor, History(known=position.seen)
