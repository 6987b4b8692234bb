"""Compares the log with the stream and publishes again what the broker lost.

A broker can lose what it has acknowledged; the log can not. So the log decides what the stream should hold: everything
that the tailer has passed, and that the stream would still keep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from time import monotonic, time_ns
from typing import Final

from noetl_grpc.broker import Broker, PublishInterrupted, StreamFacts
from noetl_grpc.core.following import Key
from noetl_grpc.core.messages import Refusal, Refused
from noetl_grpc.core.tailing import STREAM, Cursor, Reconciled, key_of, repair_id
from noetl_grpc.delivery import Batch, Renderer
from noetl_grpc.errors import BrokerUnavailable, Conflict
from noetl_grpc.metrics import Metrics
from noetl_grpc.overlap import OVERLAP, naive
from noetl_grpc.storage import cursors, reconciling, tailing
from noetl_grpc.storage.pool import Connection, shard_of

logger = logging.getLogger("noetl_grpc.tailer")

PAGE_SIZE: Final = 500
#: How long the tailer may take to pass what was committed before the call.
PATIENCE_SECONDS: Final = 5.0
#: How long a comparison waits for one before it to be over.
LOCK_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.05


class Reconciler:
    """Mends the stream from the log of every shard."""

    def __init__(self, *, database_urls: Sequence[str], broker_url: str, metrics: Metrics) -> None:
        self._database_urls = database_urls
        self._broker_url = broker_url
        self._metrics = metrics

    async def reconcile(self, *, since: datetime | None, until: datetime | None, dry_run: bool) -> Reconciled:
        """Look for the events ingested in that time; unless it is a dry run, publish those that are missing."""
        if not self._broker_url:
            raise BrokerUnavailable("no broker is configured; set NOETL_NATS_URL")
        async with AsyncExitStack() as stack:
            broker = await Broker.connect(self._broker_url, name="noetl_grpc reconciliation")
            stack.push_async_callback(broker.close)
            shards = [
                _Shard(number, await stack.enter_async_context(tailing.session(url)))
                for number, url in enumerate(self._database_urls)
            ]
            await asyncio.gather(*(shard.begin() for shard in shards))
            facts = await self._read_stream(broker, shards)
            found = [
                await shard.compare(_oldest(facts, since), until, with_all_parked=since is None)
                for shard in shards
            ]
            republished = 0
            if not dry_run:
                for shard in shards:
                    async for amount in shard.republish(broker):
                        republished += amount
                        self._metrics.stream_republished.inc(amount)
        checked, missing = (sum(counts) for counts in zip(*found, strict=True))
        if missing:
            logger.warning("%d of %d events were not in the stream", missing, checked)
        return Reconciled(checked, missing, republished)

    async def _read_stream(self, broker: Broker, shards: list[_Shard]) -> StreamFacts:
        """Let each shard know which of its events the stream holds."""
        facts = await broker.stream_facts(STREAM)
        async for identifiers in broker.message_ids(STREAM, last_sequence=facts.last_sequence):
            keys = [key for identifier in identifiers if (key := key_of(identifier)) is not None]
            for shard in shards:
                mine = [key for key in keys if shard_of(key[0], len(shards)) == shard.number]
                await shard.add(mine)
        return facts


def _oldest(facts: StreamFacts, since: datetime | None) -> datetime:
    """From when on the stream should hold everything: it may have dropped what is older."""
    if since is not None:
        return since
    oldest = datetime.min.replace(tzinfo=UTC)
    if facts.max_age_seconds:
        oldest = datetime.now(UTC) - timedelta(seconds=facts.max_age_seconds)
    return max(oldest, facts.first_time) if facts.is_limited else oldest


class _Shard:
    """One shard's part of a comparison."""

    def __init__(self, number: int, conn: Connection) -> None:
        self.number = number
        self._conn = conn
        self._cursor: Cursor | None = None

    async def begin(self) -> None:
        """Note what the tailer has passed, before the stream is read."""
        deadline = monotonic() + LOCK_SECONDS
        while not await reconciling.begin(self._conn, shard=self.number):
            if monotonic() > deadline:
                raise Conflict(
                    f"shard {self.number} is being compared with the stream already; try again later"
                )
            # A comparison that is over gives its lock up when the database notices that its session has ended.
            await asyncio.sleep(LOCK_SECONDS / 10)
        self._cursor = await self._passed_by_now()

    async def _passed_by_now(self) -> Cursor | None:
        """The cursor once it has passed what is committed now, or after a while in any case."""
        deadline = monotonic() + PATIENCE_SECONDS
        now = await cursors.look_at_log(self._conn)
        while True:
            cursor = await tailing.read_cursor(self._conn, shard=self.number)
            if now is None or cursor is None or cursor.position is None or monotonic() > deadline:
                return cursor
            if not await tailing.count_gap(self._conn, cursor.position, now=now):
                return cursor
            await asyncio.sleep(LOOK_SECONDS)

    async def add(self, keys: list[tuple[int, int]]) -> None:
        """Events that the stream holds."""
        await reconciling.add_streamed(self._conn, keys)

    async def compare(
        self, since: datetime, until: datetime | None, *, with_all_parked: bool
    ) -> tuple[int, int]:
        """How many events were looked for, and how many are missing."""
        cursor = self._cursor
        if cursor is None or cursor.system_identifier is None:
            return 0, 0
        since = max(since, cursor.created_at)
        last = until or datetime.max.replace(tzinfo=UTC)
        if cursor.position is None:
            made_by = naive(cursor.updated_at) - OVERLAP
            await reconciling.gather_passed_by_time(self._conn, made_by=made_by, since=since, until=last)
        else:
            await reconciling.gather_passed(self._conn, cursor, since=since, until=last)
        parked_since = datetime.min.replace(tzinfo=UTC) if with_all_parked else since
        await reconciling.gather_parked(self._conn, since=parked_since, until=last)
        return await reconciling.keep_missing(self._conn)

    async def republish(self, broker: Broker) -> AsyncIterator[int]:
        """Publish what is missing; page by page, how many events the broker took."""
        renderer = Renderer(
            self._conn,
            message_bytes_max=broker.message_bytes_max,
            batch_size=PAGE_SIZE,
            # The broker may still remember the id of the message that it lost.
            identify=lambda key: repair_id(key.execution_id, key.event_id, now_ms=time_ns() // 1_000_000),
        )
        last: Key | None = None
        while keys := await reconciling.missing_keys(self._conn, after=last, limit=renderer.page_size):
            count, batch = await renderer.render(keys)
            last = keys[count - 1]
            yield await self._publish(broker, batch)

    async def _publish(self, broker: Broker, batch: Batch) -> int:
        try:
            refused = await broker.publish(batch.messages)
        except PublishInterrupted as interruption:
            raise BrokerUnavailable(str(interruption)) from interruption
        taken = [key for index, key in enumerate(batch.keys) if index not in refused]
        await reconciling.resolve_parked(self._conn, taken)
        for index, why in refused.items():
            await self._refuse(batch.keys[index], why)
        return len(taken)

    async def _refuse(self, key: Key, why: Refusal) -> None:
        if why.about is not Refused.MESSAGE:
            raise BrokerUnavailable(f"the stream refuses events: {why.text}")
        await tailing.park(self._conn, key, error=why.text)
