"""The consume loop: rows in over one stream, handlers side by side, acknowledgements out, leases kept alive.

What it promises: a row is acknowledged only after its handler returned; with `ordered` a row's handler starts only
after the one of the row before it, of the same execution, has returned; whatever is not acknowledged goes back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import grpc
from noetlpb.v1 import outbox_pb2 as pb

from noetl_grpc.client.channel import Pause, can_come_back
from noetl_grpc.client.mapping import duration
from noetl_grpc.status import from_rpc_error

if TYPE_CHECKING:
    from noetl_grpc.client.outbox import OutboxRow

logger = logging.getLogger("noetl_grpc.client")

#: Acknowledgements wait this long for company: one message and one transaction then carry many of them.
LINGER_SECONDS = 0.005
ERROR_CHARACTERS_MAX = 2000
#: How long the last acknowledgements and the end of the stream may take once the handlers are done.
FAREWELL_SECONDS = 10.0

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ConsumeOutboxRequest, pb.ConsumeOutboxResponse]"
Handler: TypeAlias = "Callable[[OutboxRow], Awaitable[object]]"


class Release(Exception):
    """Raised by a handler that can't work now, through no fault of the row: it goes back with its attempt."""


@dataclass(slots=True)
class Consumption:
    """What a consume loop has done so far."""

    published: int = 0
    failed: int = 0
    stale: int = 0
    #: Streams opened.
    streams: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to consume."""

    concurrency: int
    ordered: bool
    lease_seconds: float
    window: int
    max_bytes: int
    drain_seconds: float


async def consume_for_ever(
    open_stream: Callable[[], Call],
    handler: Handler,
    *,
    to_row: Callable[[pb.OutboxRow], OutboxRow],
    ready: Callable[[], Awaitable[object]] | None,
    tally: Consumption,
    **options: Any,
) -> NoReturn:
    """One stream after the other. Ends by cancellation, or with an error that waiting does not cure."""
    pause = Pause()
    while True:
        if ready is not None:
            await ready()
        before = tally.published
        stream = ConsumeStream(open_stream(), handler, to_row=to_row, options=Options(**options), tally=tally)
        tally.streams += 1
        try:
            await stream.run()
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if not can_come_back(error):
                raise error from None
            logger.warning("the outbox stream broke off: %s; opening it again", error.message)
        if tally.published > before:
            pause.reset()
        await pause.wait()


@dataclass(slots=True, eq=False)
class _Run:
    """Rows that are handled one after the other, by one task."""

    rows: list[OutboxRow]
    task: asyncio.Task[None] | None = None
    #: The row whose handler runs now.
    current_id: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """One claim's rows that are ours, and what is still to be said about them."""

    token: str
    held: dict[int, _Run] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    failures: list[pb.OutboxFailure] = field(default_factory=list)
    must_extend: bool = False
    #: A message about this batch is on its way. The next one waits for its result, and grows meanwhile.
    is_asking: bool = False

    @property
    def has_acknowledgements(self) -> bool:
        return self.is_asking or bool(self.published) or bool(self.failures)

    def take_message(self) -> pb.ConsumeOutboxRequest | None:
        """What to say next. What was published comes first: a failure gives younger rows back."""
        if self.published:
            ids, self.published = self.published, []
            message = pb.ConsumeOutboxRequest.Published(claim_token=self.token, outbox_ids=ids)
            return pb.ConsumeOutboxRequest(published=message)
        if self.failures:
            failures, self.failures = self.failures, []
            failed = pb.ConsumeOutboxRequest.Failed(claim_token=self.token, failures=failures)
            return pb.ConsumeOutboxRequest(failed=failed)
        if self.must_extend and self.held:
            self.must_extend = False
            return pb.ConsumeOutboxRequest(extend=pb.ConsumeOutboxRequest.Extend(claim_token=self.token))
        return None


class ConsumeStream:
    """One ConsumeOutbox stream and the handlers of its rows."""

    def __init__(
        self,
        call: Call,
        handler: Handler,
        *,
        to_row: Callable[[pb.OutboxRow], OutboxRow],
        options: Options,
        tally: Consumption,
    ) -> None:
        self._call = call
        self._handler = handler
        self._to_row = to_row
        self._options = options
        self._tally = tally
        self._slots = asyncio.Semaphore(options.concurrency)
        self._batches: dict[str, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Messages that wait for their result, in the order in which they were sent.
        self._asked: deque[tuple[_Batch, pb.ConsumeOutboxRequest]] = deque()
        self._has_news = asyncio.Event()
        self._has_settled = asyncio.Event()
        self._is_stopping = False
        self._must_pause = asyncio.Event()

    async def run(self) -> None:
        """Until a handler asks for a pause (returns), the stream breaks (raises) or we are cancelled."""
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        renewer = asyncio.create_task(self._renew())
        pausing = asyncio.create_task(self._must_pause.wait())
        jobs: tuple[asyncio.Task[Any], ...] = (reader, writer, renewer, pausing)
        try:
            try:
                await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                await self._take_leave(reader)
                raise
            if writer.done() and isinstance(writer.exception(), asyncio.InvalidStateError):
                # It found the stream ended; the reader knows how.
                await reader
            elif pausing.done() and not reader.done():
                await self._take_leave(reader)
            for job in jobs:
                if job.done():
                    job.result()
        finally:
            self._call.cancel()
            await _end_all((*jobs, *self._tasks))

    async def _take_leave(self, reader: asyncio.Task[None]) -> None:
        """Let running handlers finish, say what they did, and give the rest back."""
        self._is_stopping = True
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=self._options.drain_seconds)
        await _end_all(tuple(self._tasks))
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                while not reader.done() and any(
                    batch.has_acknowledgements for batch in self._batches.values()
                ):
                    self._has_settled.clear()
                    settled = asyncio.create_task(self._has_settled.wait())
                    await asyncio.wait((reader, settled), return_when=asyncio.FIRST_COMPLETED)
                    settled.cancel()
                await self._call.done_writing()
                await reader
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            logger.warning("the outbox stream did not end well; what it held comes back by itself")

    async def _read(self) -> None:
        while True:
            response = await self._call.read()
            if not isinstance(response, pb.ConsumeOutboxResponse):
                return
            if response.HasField("batch"):
                self._begin(response.batch)
            elif response.HasField("result"):
                self._settle(response.result)

    def _begin(self, message: pb.ConsumeOutboxResponse.Batch) -> None:
        batch = self._batches.setdefault(message.claim_token, _Batch(message.claim_token))
        for rows in self._runs([self._to_row(row) for row in message.rows]):
            run = _Run(rows)
            batch.held.update((row.outbox_id, run) for row in rows)
            run.task = asyncio.create_task(self._handle(batch, run))
            self._tasks.add(run.task)
            run.task.add_done_callback(self._tasks.discard)

    def _runs(self, rows: Iterable[OutboxRow]) -> Iterable[list[OutboxRow]]:
        if not self._options.ordered:
            return [[row] for row in rows]
        runs: dict[tuple[str, int], list[OutboxRow]] = {}
        for row in rows:
            key = ("row", row.outbox_id) if row.execution_id is None else ("execution", row.execution_id)
            runs.setdefault(key, []).append(row)
        return runs.values()

    async def _handle(self, batch: _Batch, run: _Run) -> None:
        for number, row in enumerate(run.rows):
            async with self._slots:
                if self._is_stopping:
                    return
                if row.outbox_id not in batch.held:
                    continue
                run.current_id = row.outbox_id
                try:
                    await self._handler(row)
                except asyncio.CancelledError:
                    if row.outbox_id in batch.held:
                        raise
                    # Only this row was taken away from us.
                    cast("asyncio.Task[None]", asyncio.current_task()).uncancel()
                    continue
                except Release:
                    self._is_stopping = True
                    self._must_pause.set()
                    return
                except Exception as error:
                    self._fail(batch, row, error)
                    # The server gives these back together with the failed one.
                    for younger in run.rows[number + 1 :]:
                        batch.held.pop(younger.outbox_id, None)
                    return
                finally:
                    run.current_id = 0
            if row.outbox_id in batch.held:
                batch.published.append(row.outbox_id)
                self._has_news.set()

    def _fail(self, batch: _Batch, row: OutboxRow, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        logger.info("outbox row %d of shard %d failed: %s", row.outbox_id, row.shard, text)
        if row.outbox_id in batch.held:
            batch.failures.append(pb.OutboxFailure(outbox_id=row.outbox_id, error=text))
            self._has_news.set()

    async def _write(self) -> None:
        start = pb.ConsumeOutboxRequest.Start(
            lease=duration(self._options.lease_seconds),
            ordered=self._options.ordered,
            max_bytes=self._options.max_bytes,
        )
        credit = pb.ConsumeOutboxRequest.Credit(rows=self._options.window)
        await self._call.write(pb.ConsumeOutboxRequest(start=start))
        await self._call.write(pb.ConsumeOutboxRequest(credit=credit))
        while True:
            await self._has_news.wait()
            await asyncio.sleep(LINGER_SECONDS)
            self._has_news.clear()
            for batch in tuple(self._batches.values()):
                message = None if batch.is_asking else batch.take_message()
                if message is not None:
                    batch.is_asking = True
                    self._asked.append((batch, message))
                    await self._call.write(message)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._options.lease_seconds / 3)
            for batch in self._batches.values():
                batch.must_extend = True
            self._has_news.set()

    def _settle(self, result: pb.ConsumeOutboxResponse.Result) -> None:
        batch, message = self._asked.popleft()
        batch.is_asking = False
        stale = set(result.stale_ids)
        if message.HasField("published"):
            self._tally.published += len(message.published.outbox_ids) - len(stale)
            done: Iterable[int] = message.published.outbox_ids
        elif message.HasField("failed"):
            stale.update(o.outbox_id for o in result.outcomes if o.outcome == pb.OUTBOX_OUTCOME_STALE)
            self._tally.failed += len(message.failed.failures) - len(stale)
            done = (failure.outbox_id for failure in message.failed.failures)
        else:
            done = ()
        for outbox_id in (*done, *result.released_ids):
            batch.held.pop(outbox_id, None)
        self._lose(batch, [i for i in result.lost_ids if i in batch.held])
        if stale:
            self._tally.stale += len(stale)
            logger.warning("%d outbox rows were no longer ours when we acknowledged them", len(stale))
        if not batch.held and not batch.has_acknowledgements:
            del self._batches[batch.token]
        self._has_settled.set()
        self._has_news.set()

    def _lose(self, batch: _Batch, outbox_ids: Iterable[int]) -> None:
        """Stop working on what somebody else has now."""
        for outbox_id in outbox_ids:
            self._tally.stale += 1
            run = batch.held.pop(outbox_id)
            if run.current_id == outbox_id and run.task is not None:
                run.task.cancel()


async def _end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
