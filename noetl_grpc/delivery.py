"""From keys of events to acknowledged messages: what both ways of following the log share."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

from noetl_grpc.broker import Broker, PublishInterrupted
from noetl_grpc.core.following import Key
from noetl_grpc.core.messages import Message, Refusal, Refused
from noetl_grpc.core.tailing import (
    BODY_BYTES_MAX,
    DESTINATION,
    Cursor,
    Event,
    fitting,
    is_reference,
    message_id,
    message_of,
)
from noetl_grpc.errors import BrokerUnavailable, DatabaseUnavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.storage import tailing
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.tailing import IDLE_SECONDS

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

logger = logging.getLogger("noetl_grpc.tailer")

#: How often the leader's session is used at least, and how long after that it may still publish.
KEEP_SECONDS: Final = 3.0
LEASE_SECONDS: Final = IDLE_SECONDS * 0.8
#: Bodies of one batch in memory; a page is read ahead while another is published.
BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
PAGE_BYTES_MAX: Final = 32 * 1024 * 1024
REFERENCE_BYTES: Final = 1024
PAGE_KEYS_MIN: Final = 16
#: What a session is given at least when several render a page.
PART_KEYS_MIN: Final = 100
#: A page of a long gap grows up to so many batches: what a page costs beside its events is then hardly felt. But not
#: beyond so many events, or the next page would not be rendered while this one is published.
PAGE_BATCHES_MAX: Final = 4
PAGE_KEYS_MAX: Final = 2000
#: An event that the broker refuses is parked after so many tries.
TRIES: Final = 3
TRY_SECONDS: Final = 0.2

T = TypeVar("T")


class Work(Enum):
    """What one go of a leader has come to."""

    MORE = "more"
    DONE = "done"
    NOTHING = "nothing"


class Leadership:
    """The session that holds the lock of a shard. It ends by itself when it is not used."""

    def __init__(self, conn: Connection, *, shard: int) -> None:
        self._conn = conn
        self._turn = asyncio.Lock()
        self._confirmed = monotonic()
        self.shard = shard

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

    async def save(self, cursor: Cursor, *, moved_at: datetime | None = None) -> None:
        """Move the cursor. An epoch of somebody else's means that this process no longer leads."""
        saved = await self.ask(
            lambda conn: tailing.save_cursor(conn, cursor, shard=self.shard, moved_at=moved_at)
        )
        if not saved:
            raise DatabaseUnavailable("another process has taken the cursor over")


@dataclass(frozen=True, slots=True)
class Batch:
    """Events with the messages that are sent for them, in order."""

    keys: list[Key]
    events: list[Event]
    messages: list[Message]


class Renderer:
    """Makes messages of keys, no more at a time than memory allows."""

    def __init__(
        self,
        *readers: Connection,
        message_bytes_max: int,
        batch_size: int,
        identify: Callable[[Key], str] = lambda key: message_id(key.execution_id, key.event_id),
    ) -> None:
        self._readers = readers
        self._identify = identify
        self._message_bytes_max = message_bytes_max
        self._page_size_max = max(batch_size, min(PAGE_BATCHES_MAX * batch_size, PAGE_KEYS_MAX))
        #: How many keys to come with, so that little is rendered in vain where bodies are large.
        self.page_size = batch_size

    async def render(self, keys: list[Key]) -> tuple[int, Batch]:
        """How many of the keys were taken, and the batch of those that are still there."""
        found = await self._bodies(keys, inline_bytes_max=PAGE_BYTES_MAX // max(len(keys), 1))
        count = fitting(keys, [_bytes_in_memory(event) for event in found], bytes_max=BATCH_BYTES_MAX)
        self.page_size = min(self._page_size_max, max(PAGE_KEYS_MIN, 2 * count))
        keys, found = keys[:count], found[:count]
        await self._fetch_large(keys, found)
        # One that is no longer there was purged; nobody can be sent it.
        present = [(key, event) for key, event in zip(keys, found, strict=True) if event is not None]
        messages = [
            message_of(event, identifier=self._identify(key), message_bytes_max=self._message_bytes_max)
            for key, event in present
        ]
        return count, Batch([key for key, _ in present], [event for _, event in present], messages)

    async def _bodies(self, keys: list[Key], *, inline_bytes_max: int) -> list[Event | None]:
        """By all sessions at once: beside many busy writers one alone gets little of the machine."""
        share = max(PART_KEYS_MIN, -(-len(keys) // len(self._readers)))
        parts = [keys[start : start + share] for start in range(0, len(keys), share)]
        asked = (
            tailing.event_bodies(reader, part, inline_bytes_max=inline_bytes_max)
            for reader, part in zip(self._readers, parts, strict=False)
        )
        # Each is over when this is, so that no session is closed in the middle of its statement.
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: list[Event | None] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found += answer
        return found

    async def _fetch_large(self, keys: list[Key], found: list[Event | None]) -> None:
        left_out = [
            place
            for place, event in enumerate(found)
            if event is not None and event.body is None and event.sha256 is None
        ]
        if not left_out:
            return
        fetched = await self._bodies([keys[place] for place in left_out], inline_bytes_max=BODY_BYTES_MAX)
        for place, event in zip(left_out, fetched, strict=True):
            found[place] = event


def _bytes_in_memory(event: Event | None) -> int:
    if event is None:
        return 0
    return REFERENCE_BYTES if event.sha256 is not None else event.byte_length


@dataclass(slots=True)
class Progress:
    """What this process has published of a shard, for those who ask."""

    last_published_at: datetime | None = None
    in_flight: Callable[[], int] = field(default=lambda: 0)


class Interrupted(Exception):
    """Publishing stopped in the middle of a batch."""

    def __init__(self, problem: str, done: set[int]) -> None:
        super().__init__(problem)
        self.done = done

    def as_unavailable(self) -> BrokerUnavailable:
        """What it means to everybody else."""
        return BrokerUnavailable(str(self))


class Delivery:
    """Publishes batches until each event is acknowledged or parked."""

    def __init__(
        self,
        broker: Broker,
        leadership: Leadership,
        *,
        metrics: Metrics,
        progress: Progress,
        spans: Spans | None = None,
    ) -> None:
        self._broker = broker
        self._spans = spans
        self._leadership = leadership
        self._metrics = metrics
        self._progress = progress

    async def publish(self, batch: Batch) -> None:
        """All of it; raises Interrupted with what was done until then."""
        if self._spans is None:
            await self._publish(batch)
            return
        origins = (event.traceparent for event in batch.events)
        with self._spans.publish(DESTINATION, origins, count=len(batch.messages)):
            await self._publish(batch)

    async def _publish(self, batch: Batch) -> None:
        done: set[int] = set()
        pending = list(range(len(batch.messages)))
        for attempt in range(1, TRIES + 1):
            refused = await self._try(batch, pending, done)
            if not refused:
                break
            pending = sorted(refused)
            if attempt < TRIES:
                await asyncio.sleep(TRY_SECONDS * attempt)
            else:
                await self._park(batch, refused)
        self._count(batch, done)

    async def _try(self, batch: Batch, pending: list[int], done: set[int]) -> dict[int, Refusal]:
        try:
            answers = await self._broker.publish([batch.messages[index] for index in pending])
        except PublishInterrupted as interruption:
            done |= {pending[place] for place in interruption.acknowledged}
            raise Interrupted(str(interruption), done) from interruption
        refused = {pending[place]: why for place, why in answers.items()}
        done |= set(pending) - refused.keys()
        for why in refused.values():
            # What could be wrong with every event must not park them one after the other.
            if why.about is Refused.STREAM or (why.about is Refused.UNCLEAR and not done):
                raise Interrupted(f"the stream refuses events: {why.text}", done)
        return refused

    async def _park(self, batch: Batch, refused: dict[int, Refusal]) -> None:
        for index, why in refused.items():
            await self._park_one(batch.keys[index], why)
        self._metrics.stream_parked.inc(len(refused))

    async def _park_one(self, key: Key, why: Refusal) -> None:
        await self._leadership.ask(lambda conn: tailing.park(conn, key, error=why.text))
        logger.error(
            "shard %d: event %d of execution %d is parked, the broker refuses it: %s",
            self._leadership.shard,
            key.event_id,
            key.execution_id,
            why.text,
        )

    def _count(self, batch: Batch, done: set[int]) -> None:
        self._progress.last_published_at = datetime.now(UTC)
        types = Counter(batch.events[index].event_type or "" for index in done)
        for event_type, count in types.items():
            self._metrics.stream_published.labels(self._metrics.event_type_label(event_type)).inc(count)
        self._metrics.stream_referenced.inc(sum(is_reference(batch.messages[index]) for index in done))
