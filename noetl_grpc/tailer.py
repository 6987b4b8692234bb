"""The tailer: committed events to JetStream, none lost. One process leads each shard; the others wait to take over.

Whatever fails, at the start or later, is tried again for ever and told by health, status and log; it never stops the
RPCs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from noetl_grpc import overlap
from noetl_grpc import tail as snapshots
from noetl_grpc.broker import Broker, StreamSpec
from noetl_grpc.core.tailing import STREAM, SUBJECTS, Cursor, Mode, ShardStatus
from noetl_grpc.delivery import Delivery, Leadership, Progress, Renderer, Work
from noetl_grpc.errors import BrokerUnavailable, DatabaseUnavailable, NoetlError
from noetl_grpc.metrics import Metrics
from noetl_grpc.overlap import OVERLAP, OverlapTail
from noetl_grpc.storage import cursors, tailing
from noetl_grpc.storage.pool import Connection, Pool, Shards
from noetl_grpc.storage.tailing import DatabaseFacts, History
from noetl_grpc.tail import Tail

if TYPE_CHECKING:
    from noetl_grpc.spans import Spans

logger = logging.getLogger("noetl_grpc.tailer")

#: How often a process that does not lead asks whether it may.
CANDIDATE_SECONDS: Final = 1.0
RETRY_SECONDS_MIN: Final = 0.2
#: Short, as a leader may be killed while the one that is to follow waits to try again.
RETRY_SECONDS_MAX: Final = 2.0
#: Looking for nothing may take this part of a session's time at most.
SHARE_MAX: Final = 0.25
#: How long a batch may take to finish when the process ends.
STOP_SECONDS: Final = 10.0
MEASURE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TailerOptions:
    """What an operator decides."""

    broker_url: str
    batch_size: int
    poll_seconds: float
    backfill: bool
    dedup_seconds: float
    retention_seconds: float

    @property
    def overlap(self) -> timedelta:
        """How far overlap mode looks back: what it publishes again, the broker must remember."""
        return min(OVERLAP, timedelta(seconds=self.dedup_seconds))

    @property
    def stream(self) -> StreamSpec:
        """The stream as it should be."""
        return StreamSpec(
            name=STREAM,
            subjects=SUBJECTS,
            description="Committed events of NoETL, published by noetl_grpc.",
            max_age_seconds=self.retention_seconds,
            duplicate_window_seconds=self.dedup_seconds,
        )


class ShardTailer:
    """Leads one shard, or waits until it may."""

    def __init__(
        self,
        *,
        shard: int,
        database_url: str,
        options: TailerOptions,
        metrics: Metrics,
        on_change: Callable[[], Awaitable[None]],
        spans: Spans | None = None,
    ) -> None:
        self.shard = shard
        self._spans = spans
        self._database_url = database_url
        self._options = options
        self.metrics = metrics
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._leading = metrics.stream_leader.labels(str(shard))
        self.progress = Progress()
        self.mode = Mode.SNAPSHOT
        self.is_leader = False
        #: Why nothing is published just now; None while it has not been tried yet.
        self.last_error: str | None = None
        self.is_well = False

    def wake(self) -> None:
        """Look at once: this process has just written events."""
        self._woken.set()

    def stop(self) -> None:
        """End after the batch that is being published."""
        self._stopping.set()
        self._woken.set()

    async def run(self) -> None:
        """Lead, or wait for it, until stopped."""
        delay_seconds = RETRY_SECONDS_MIN
        while not self._stopping.is_set():
            began = monotonic()
            try:
                await self._run_session()
            except NoetlError as error:
                await self._report(str(error))
            except asyncpg.PostgresError as error:
                await self._report(f"the database refuses: {error}")
            except Exception as error:
                logger.exception("shard %d: the tailer failed", self.shard)
                await self._report(f"internal error: {type(error).__name__}")
            if monotonic() - began > RETRY_SECONDS_MAX:
                delay_seconds = RETRY_SECONDS_MIN
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_seconds):
                    await self._stopping.wait()
            delay_seconds = min(2 * delay_seconds, RETRY_SECONDS_MAX)

    async def _run_session(self) -> None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(tailing.leader_session(self._database_url))
            leadership = Leadership(session, shard=self.shard)
            facts = await leadership.ask(tailing.database_facts)
            if facts.in_recovery:
                raise DatabaseUnavailable(tailing.STANDBY)
            broker = await Broker.connect(self._options.broker_url, name=f"noetl_grpc tailer {self.shard}")
            stack.push_async_callback(broker.close)
            broker.may_send = leadership.holds
            if not await self._win(leadership, broker):
                return
            await _race(self._lead(leadership, facts, broker), leadership.keep(), _lost(broker))

    async def _win(self, leadership: Leadership, broker: Broker) -> bool:
        """Wait until this process may lead; false when it is to stop first."""
        while not self._stopping.is_set():
            if await leadership.ask(lambda conn: tailing.try_to_lead(conn, shard=self.shard)):
                return True
            if broker.closed.is_set():
                raise BrokerUnavailable("the connection to the broker was lost")
            await self._report("")
            with suppress(TimeoutError):
                async with asyncio.timeout(CANDIDATE_SECONDS):
                    await self._stopping.wait()
        return False

    async def _lead(self, leadership: Leadership, facts: DatabaseFacts, broker: Broker) -> None:
        for change in await broker.ensure_stream(self._options.stream):
            logger.info("shard %d: %s", self.shard, change)
        async with (
            tailing.reader_session(self._database_url) as reader,
            tailing.reader_session(self._database_url) as second_reader,
        ):
            tail = await self._open(leadership, facts, broker, reader, second_reader)
            self.progress.in_flight = lambda: broker.in_flight
            self.is_leader = True
            self._leading.set(1)
            await self._report("")
            try:
                await self._publish(tail)
            finally:
                self.is_leader = False
                self._leading.set(0)
                self.progress.in_flight = lambda: 0
                await tail.close()

    async def _open(
        self,
        leadership: Leadership,
        facts: DatabaseFacts,
        broker: Broker,
        reader: Connection,
        second_reader: Connection,
    ) -> Tail | OverlapTail:
        """Take the cursor over, by the best mode that this log allows."""
        await self._set_mode(Mode.SNAPSHOT if await cursors.can_follow_snapshots(reader) else Mode.OVERLAP)
        cursor = await leadership.ask(lambda conn: tailing.take_cursor(conn, shard=self.shard))
        history = self._history_at_first_start(facts)
        renderer = Renderer(
            reader,
            second_reader,
            message_bytes_max=broker.message_bytes_max,
            batch_size=self._options.batch_size,
        )
        delivery = Delivery(
            broker, leadership, metrics=self.metrics, progress=self.progress, spans=self._spans
        )
        if self.mode is Mode.OVERLAP:
            cursor = await overlap.begin(cursor, leadership=leadership, facts=facts, history=history)
            logger.info("shard %d: publishing, %s", self.shard, cursor)
            return OverlapTail(
                leadership=leadership,
                reader=reader,
                renderer=renderer,
                delivery=delivery,
                cursor=cursor,
                history=history,
                overlap=self._options.overlap,
            )
        if cursor.position is None and cursor.system_identifier is not None:
            # Until now it was read by time.
            history = History(since=overlap.naive(cursor.updated_at) - self._options.overlap)
        cursor, history = await snapshots.begin(
            cursor, leadership=leadership, reader=reader, facts=facts, history=history
        )
        logger.info("shard %d: publishing, %s", self.shard, cursor)
        return Tail(
            leadership=leadership,
            reader=reader,
            renderer=renderer,
            delivery=delivery,
            cursor=cursor,
            history=history,
        )

    def _history_at_first_start(self, facts: DatabaseFacts) -> History | None:
        if self._options.backfill:
            return History()
        return None if facts.seed_event_id is None else History(above_event_id=facts.seed_event_id)

    async def _set_mode(self, mode: Mode) -> None:
        if mode is Mode.OVERLAP:
            logger.warning(
                "shard %d: noetl.event has no xact_id, or not its index: events that commit more than %d s late can be"
                " missed; `noetl-grpc migrate --sql` prints what its owner has to run",
                self.shard,
                self._options.overlap.total_seconds(),
            )
        self.mode = mode
        await self._on_change()

    async def _publish(self, tail: Tail | OverlapTail) -> None:
        while not self._stopping.is_set():
            self._woken.clear()
            began = monotonic()
            work = await tail.run_once()
            if work is Work.MORE:
                continue
            if isinstance(tail, OverlapTail) and await tail.is_needless():
                logger.warning("shard %d: noetl.event has its xact_id by now", self.shard)
                return
            pause_seconds = self._options.poll_seconds
            if work is Work.NOTHING:
                took_seconds = monotonic() - began
                pause_seconds = max(pause_seconds, took_seconds / SHARE_MAX - took_seconds)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._woken.wait()

    async def _report(self, problem: str) -> None:
        """Say how it goes, once: an empty problem is none."""
        if problem == self.last_error:
            return
        if problem:
            logger.warning("shard %d: events are not published: %s", self.shard, problem)
        elif self.last_error:
            logger.warning(
                "shard %d: events are published again, by %s",
                self.shard,
                "this process" if self.is_leader else "another process",
            )
        self.last_error = problem
        self.is_well = not problem
        await self._on_change()


class Tailer:
    """The tailers of all shards of this process."""

    def __init__(
        self,
        shards: Shards,
        *,
        database_urls: Sequence[str],
        options: TailerOptions,
        metrics: Metrics,
        on_health: Callable[[bool], Awaitable[None]],
        spans: Spans | None = None,
    ) -> None:
        self._shards = shards
        self._metrics = metrics
        self._on_health = on_health
        self.tailers = [
            ShardTailer(
                shard=number,
                database_url=url,
                options=options,
                metrics=metrics,
                on_change=self._on_change,
                spans=spans,
            )
            for number, url in enumerate(database_urls)
        ]

    async def run(self) -> None:
        """Tail every shard until stopped."""
        await self._on_change()
        await asyncio.gather(*(tailer.run() for tailer in self.tailers))

    def wake(self, shard: int) -> None:
        """Events of this shard have just been written by this process."""
        self.tailers[shard].wake()

    def stop(self) -> None:
        """End after the batches that are being published."""
        for tailer in self.tailers:
            tailer.stop()

    @property
    def mode(self) -> Mode:
        """The weakest mode of all shards."""
        return Mode.OVERLAP if any(each.mode is Mode.OVERLAP for each in self.tailers) else Mode.SNAPSHOT

    async def status(self) -> list[ShardStatus]:
        """Where each shard stands; one out of reach is shown with its problem."""
        return list(
            await asyncio.gather(
                *(
                    _status(tailer, pool)
                    for tailer, pool in zip(self.tailers, self._shards.pools, strict=True)
                )
            )
        )

    async def measure(self) -> None:
        """Keep the lag of the shards that this process leads among the metrics, until cancelled."""
        pause_seconds = MEASURE_SECONDS
        while True:
            await asyncio.sleep(pause_seconds)
            began = monotonic()
            for tailer, pool in zip(self.tailers, self._shards.pools, strict=True):
                await self._measure(tailer, pool)
            pause_seconds = max(MEASURE_SECONDS, (monotonic() - began) / SHARE_MAX)

    async def _measure(self, tailer: ShardTailer, pool: Pool) -> None:
        events, seconds = 0, 0.0
        if tailer.is_leader:
            try:
                async with pool.acquire() as conn:
                    events, seconds = await _lag(conn, await tailing.read_cursor(conn, shard=tailer.shard))
            except NoetlError:
                return  # The last figure stands; health says what is wrong.
        self._metrics.stream_lag_events.labels(str(tailer.shard)).set(events)
        self._metrics.stream_lag_seconds.labels(str(tailer.shard)).set(seconds)

    async def lag_events(self) -> float:
        """Committed events of all shards that are not published yet."""
        return float(sum(status.lag_events for status in await self.status()))

    async def _on_change(self) -> None:
        for mode in Mode:
            self._metrics.stream_mode.labels(mode.value).set(mode is self.mode)
        await self._on_health(all(tailer.is_well for tailer in self.tailers))


async def _status(tailer: ShardTailer, pool: Pool) -> ShardStatus:
    status = ShardStatus(
        shard=tailer.shard,
        mode=tailer.mode,
        leader=tailer.is_leader,
        in_flight=tailer.progress.in_flight(),
        last_error=tailer.last_error or "",
        last_published_at=tailer.progress.last_published_at,
    )
    try:
        async with pool.acquire() as conn:
            cursor = await tailing.read_cursor(conn, shard=tailer.shard)
            parked = await tailing.count_parked(conn)
            events, seconds = await _lag(conn, cursor)
    except NoetlError as error:
        return replace(status, last_error=status.last_error or str(error))
    return replace(
        status,
        cursor="" if cursor is None else str(cursor),
        parked=parked,
        lag_events=events,
        lag_seconds=seconds,
    )


async def _lag(conn: Connection, cursor: Cursor | None) -> tuple[int, float]:
    """How many committed events are not published, and since when at most."""
    now = await cursors.look_at_log(conn)
    if now is None or cursor is None or cursor.system_identifier is None:
        return 0, 0.0
    if cursor.position is None:
        events = await tailing.count_moments(conn, since=overlap.naive(cursor.updated_at))
    else:
        events = await tailing.count_gap(conn, cursor.position, now=now)
    since = cursor.seen_at or cursor.updated_at
    return events, max(0.0, (datetime.now(UTC) - since).total_seconds()) if events else 0.0


async def _lost(broker: Broker) -> None:
    await broker.closed.wait()
    raise BrokerUnavailable("the connection to the broker was lost")


async def _race(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run all of them until the first ends, one way or the other."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
