"""Publishes one shard's log for as long as this process leads: read a page, publish it, move the cursor.

The cursor moves only over what the broker has acknowledged, and is saved on the session that holds the lock: a leader
that was replaced can't move it, and what it may still send carries the message ids that its successor uses too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Final, TypeVar

from noetl_grpc.broker import Broker, PublishInterrupted
from noetl_grpc.core.following import Key, Position
from noetl_grpc.core.messages import Message, Refusal, Refused
from noetl_grpc.core.tailing import BODY_BYTES_MAX, Cursor, Event, fitting, is_reference, message_of, settled
from noetl_grpc.errors import BrokerUnavailable, DatabaseUnavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.storage import cursors, tailing
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.tailing import IDLE_SECONDS, History

logger = logging.getLogger("noetl_grpc.tailer")

#: How often the leader's session is used at least, and how long after that it may still publish.
KEEP_SECONDS: Final = 3.0
LEASE_SECONDS: Final = IDLE_SECONDS * 0.8
#: Bodies of one batch in memory; a page is read ahead while another is published.
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
PAGE_BYTES_MAX: Final = 32 * 1024 * 1024
REFERENCE_BYTES: Final = 1024
#: An event that the broker refuses is parked after so many tries.
TRIES: Final = 3
TRY_SECONDS: Final = 0.2
#: How often a cursor is saved that moved over nothing.
SAVE_SECONDS: Final = 1.0
#: Sees nothing: the whole log is in its gap.
NOTHING_SEEN: Final = "1:1:"

T = TypeVar("T")


class Leadership:
    """The session that holds the lock of a shard. It ends by itself when it is not used."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._turn = asyncio.Lock()
        self._confirmed = monotonic()

    async def ask(self, statement: Callable[[Connection], Awaitable[T]]) -> T:
        """Use the session, which also keeps it."""
        async with self._turn:
            asked = monotonic()
            answer = await statement(self._conn)
            self._confirmed = asked
        return answer

    def holds(self) -> bool:
        """Whether nobody else can have taken over yet."""
        return monotonic() - self._confirmed < LEASE_SECONDS

    async def keep(self) -> None:
        """Use the session again and again; ends with an error when it is lost."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            await self.ask(lambda conn: conn.fetchval("SELECT 1"))


@dataclass(frozen=True, slots=True)
class Batch:
    """Some events of a gap, ready to be published."""

    keys: list[Key]
    events: list[Event]
    messages: list[Message]
    #: Where it was read from, inside its gap, and where to go on.
    before: Position
    after: Position


@dataclass(slots=True)
class Progress:
    """What this process has published of a shard, for those who ask."""

    last_published_at: datetime | None = None
    in_flight: Callable[[], int] = field(default=lambda: 0)


class Tail:
    """The work of a leader. `run_once` does a batch of it."""

    def __init__(
        self,
        *,
        shard: int,
        leadership: Leadership,
        reader: Connection,
        broker: Broker,
        cursor: Cursor,
        history: History | None,
        batch_size: int,
        metrics: Metrics,
        progress: Progress,
    ) -> None:
        assert cursor.position is not None
        self._shard = shard
        self._leadership = leadership
        self._reader = reader
        self._broker = broker
        self._cursor = cursor
        self._position = cursor.position
        self._history = history
        self._batch_size = batch_size
        self._limit = batch_size
        self._metrics = metrics
        self._progress = progress
        self._target_taken_at = cursor.seen_at
        self._saved = monotonic()
        self._ahead: asyncio.Task[Batch | None] | None = None

    async def run_once(self) -> bool:
        """Publish what the next page holds; whether there is more to do at once."""
        batch = await self._next_batch()
        if batch is None:
            return False
        if batch.after.target is not None:
            self._ahead = asyncio.create_task(self._read(batch.after))
        if batch.messages:
            await self._publish(batch)
        await self._move(batch.after, must_save=bool(batch.keys))
        return batch.after.target is not None

    async def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._ahead

    async def _next_batch(self) -> Batch | None:
        if self._ahead is None:
            return await self._read(self._position)
        ahead, self._ahead = self._ahead, None
        return await ahead

    async def _read(self, position: Position) -> Batch | None:
        """The next page of the gap, as messages; None when nothing has become visible."""
        if position.target is None:
            snapshot = await cursors.look_at_log(self._reader)
            if snapshot is None:
                raise DatabaseUnavailable("the database is a standby, where the log can't be followed")
            if snapshot == position.seen:
                return None
            position = position.towards(snapshot)
            self._target_taken_at = datetime.now(UTC)
        if self._history is not None:
            keys, after = await tailing.history_keys(self._reader, position, self._history, limit=self._limit)
        else:
            keys, after = await cursors.gap_keys(self._reader, position, limit=self._limit)
        if not keys:
            return Batch([], [], [], position, after)
        return await self._render(keys, before=position, after=after)

    async def _render(self, keys: list[Key], *, before: Position, after: Position) -> Batch:
        """As much of a page as memory allows."""
        inline_bytes_max = PAGE_BYTES_MAX // len(keys)
        found = await tailing.event_bodies(self._reader, keys, inline_bytes_max=inline_bytes_max)
        count = fitting(keys, [_bytes_in_memory(event) for event in found], bytes_max=BATCH_BYTES_MAX)
        if count < len(keys):
            keys, found = keys[:count], found[:count]
            after = replace(before, at_xact=keys[-1].xact_id, at_event=keys[-1].event_id)
        # The next page is about as long as this one could be, so that little is rendered in vain.
        self._limit = min(self._batch_size, max(16, 2 * count))
        await self._fetch_large(keys, found)
        # One that is no longer there was purged; nobody can be sent it.
        present = [(key, event) for key, event in zip(keys, found, strict=True) if event is not None]
        messages = [
            message_of(event, message_bytes_max=self._broker.message_bytes_max) for _, event in present
        ]
        return Batch([key for key, _ in present], [event for _, event in present], messages, before, after)

    async def _fetch_large(self, keys: list[Key], found: list[Event | None]) -> None:
        left_out = [
            place
            for place, event in enumerate(found)
            if event is not None and event.body is None and event.sha256 is None
        ]
        if not left_out:
            return
        fetched = await tailing.event_bodies(
            self._reader,
            [keys[place] for place in left_out],
            inline_bytes_max=BODY_BYTES_MAX,
        )
        for place, event in zip(left_out, fetched, strict=True):
            found[place] = event

    async def _publish(self, batch: Batch) -> None:
        """Until each message is acknowledged or its event parked."""
        done: set[int] = set()
        pending = list(range(len(batch.messages)))
        for attempt in range(1, TRIES + 1):
            refused = await self._try(batch, pending, done)
            if not refused:
                break
            self._hold_if_not_the_events_fault(refused, done)
            pending = sorted(refused)
            if attempt < TRIES:
                await asyncio.sleep(TRY_SECONDS * attempt)
            else:
                await self._park(batch, refused)
        self._count(batch, done)

    async def _try(self, batch: Batch, pending: list[int], done: set[int]) -> dict[int, Refusal]:
        try:
            refused = await self._broker.publish([batch.messages[index] for index in pending])
        except PublishInterrupted as interruption:
            done |= {pending[place] for place in interruption.acknowledged}
            await self._save_part(batch, done)
            raise BrokerUnavailable(str(interruption)) from interruption
        done |= {index for place, index in enumerate(pending) if place not in refused}
        stopped = next((why for why in refused.values() if why.about is Refused.STREAM), None)
        if stopped is not None:
            await self._save_part(batch, done)
            raise BrokerUnavailable(f"the stream refuses events: {stopped.text}")
        return {pending[place]: why for place, why in refused.items()}

    def _hold_if_not_the_events_fault(self, refused: dict[int, Refusal], done: set[int]) -> None:
        """What could be wrong with every event must not park them one after the other."""
        unclear = next((why for why in refused.values() if why.about is Refused.UNCLEAR), None)
        if unclear is not None and not done:
            raise BrokerUnavailable(f"the broker refuses events: {unclear.text}")

    async def _park(self, batch: Batch, refused: dict[int, Refusal]) -> None:
        for index, why in refused.items():
            key = batch.keys[index]
            await self._leadership.ask(lambda conn, key=key, why=why: tailing.park(conn, key, error=why.text))  # type: ignore[misc]  # mypy#4226
            logger.error(
                "shard %d: event %d of execution %d is parked, the broker refuses it: %s",
                self._shard,
                key.event_id,
                key.execution_id,
                why.text,
            )
        self._metrics.stream_parked.inc(len(refused))

    def _count(self, batch: Batch, done: set[int]) -> None:
        self._progress.last_published_at = datetime.now(UTC)
        types = Counter(batch.events[index].event_type or "" for index in done)
        for event_type, count in types.items():
            self._metrics.stream_published.labels(self._metrics.event_type_label(event_type)).inc(count)
        self._metrics.stream_referenced.inc(sum(is_reference(batch.messages[index]) for index in done))

    async def _save_part(self, batch: Batch, done: set[int]) -> None:
        """Keep what was acknowledged before something went wrong; the rest comes again."""
        count = settled(batch.keys, done)
        if count:
            last = batch.keys[count - 1]
            await self._move(
                replace(batch.before, at_xact=last.xact_id, at_event=last.event_id), must_save=True
            )

    async def _move(self, position: Position, *, must_save: bool) -> None:
        self._position = position
        finished = position.target is None
        seen_at = self._target_taken_at if finished else self._cursor.seen_at
        self._cursor = replace(self._cursor, position=position, seen_at=seen_at)
        if finished and self._history is not None:
            self._history = None
            must_save = True
        # A restored log is gone through as a whole: until then the cursor says what the former cluster had published.
        may_save = self._history is None or self._history.known is None
        if may_save and (must_save or monotonic() - self._saved > SAVE_SECONDS):
            await self._save()

    async def _save(self) -> None:
        cursor = self._cursor
        saved = await self._leadership.ask(lambda conn: tailing.save_cursor(conn, cursor, shard=self._shard))
        if not saved:
            raise DatabaseUnavailable("another process has taken the cursor over")
        self._saved = monotonic()


def _bytes_in_memory(event: Event | None) -> int:
    if event is None:
        return 0
    return REFERENCE_BYTES if event.sha256 is not None else event.byte_length


async def open_cursor(
    *, shard: int, leadership: Leadership, reader: Connection, facts: tailing.DatabaseFacts, backfill: bool
) -> tuple[Cursor, History | None]:
    """Take the cursor over; at the very first start decide where the log begins for us."""
    cursor = await leadership.ask(lambda conn: tailing.take_cursor(conn, shard=shard))
    history = None
    if cursor.position is None:
        cursor, history = await _first_start(cursor, reader, facts, backfill=backfill)
    elif cursor.system_identifier != facts.system_identifier:
        return await _from_another_cluster(cursor, reader, facts, cursor.position)
    elif cursor.position.seen == NOTHING_SEEN:
        history = _history_of_first_start(facts, backfill=backfill)
    first = cursor
    if not await leadership.ask(lambda conn: tailing.save_cursor(conn, first, shard=shard)):
        raise DatabaseUnavailable("another process has taken the cursor over")
    return cursor, history


async def _first_start(
    cursor: Cursor, reader: Connection, facts: tailing.DatabaseFacts, *, backfill: bool
) -> tuple[Cursor, History | None]:
    now = await cursors.look_at_log(reader)
    if now is None:
        raise DatabaseUnavailable("the database is a standby, where the log can't be followed")
    history = None
    position = Position(now)
    if backfill or facts.seed_event_id is not None:
        history = _history_of_first_start(facts, backfill=backfill)
        position = Position(NOTHING_SEEN).towards(now)
    cursor = replace(
        cursor, position=position, seen_at=datetime.now(UTC), system_identifier=facts.system_identifier
    )
    return cursor, history


def _history_of_first_start(facts: tailing.DatabaseFacts, *, backfill: bool) -> History:
    if backfill or facts.seed_event_id is None:
        return History()
    return History(above_event_id=facts.seed_event_id)


async def _from_another_cluster(
    cursor: Cursor, reader: Connection, facts: tailing.DatabaseFacts, position: Position
) -> tuple[Cursor, History | None]:
    """A log that was restored, or a cluster that was upgraded."""
    renamed = replace(cursor, system_identifier=facts.system_identifier)
    if await tailing.is_this_clusters_log(reader, position.seen):
        logger.warning("the cluster has another system identifier, but the log is its own; going on")
        return renamed, None
    logger.warning(
        "the log was restored into another cluster: going through all of it once; events of its last moments there"
        " may be published twice"
    )
    now = await cursors.look_at_log(reader)
    if now is None:
        raise DatabaseUnavailable("the database is a standby, where the log can't be followed")
    cursor = replace(renamed, position=Position(NOTHING_SEEN).towards(now), restored_at=datetime.now(UTC))
    return cursor, History(known=position.seen)
