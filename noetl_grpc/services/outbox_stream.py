"""One ConsumeOutbox stream: rows go out as far as the consumer's credit reaches, acknowledgements come in.

Three things run side by side: a reader that answers each acknowledgement, a claimer that fills the window, and the
stream itself, which sends what the two have for it. Claims run ahead of sending by a batch at most, so a consumer
that does not read costs a bounded amount of memory; nothing is read from it either while answers pile up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from noetlpb.v1 import outbox_pb2 as pb

from noetl_grpc import calls
from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.convert.outbox import (
    add_rows,
    check_batch,
    failures_from_pb,
    lease_from_pb,
    outcomes_to_pb,
)
from noetl_grpc.core.outbox import CLAIM_ROWS_MAX, ClaimToken, Outcome, claim_bytes
from noetl_grpc.errors import InvalidRequest, NoetlError
from noetl_grpc.services.chores import Chores
from noetl_grpc.services.outbox_shard import Claim, OutboxShard, Terms

logger = logging.getLogger("noetl_grpc.outbox")

#: More credit than this is taken as this: so many ids at most are remembered for a consumer that acknowledges none.
WINDOW_ROWS_MAX = 100_000
#: Batches that are claimed and not yet sent, the one being sent included.
BATCHES_AHEAD = 2
#: Answers that are not yet sent before no more acknowledgements are read.
RESULTS_AHEAD = 64
#: How long a nearly full window waits for more room, so that single acknowledgements don't become single claims.
GATHER_SECONDS = 0.005
WAIT_SECONDS = 60.0
#: A broken connection can look like a half-close first. Whoever really closed his side does not mind waiting.
BREAK_SECONDS = 0.02
BREAK_ERROR = "the consumer's stream broke while it held the row, and this was its last attempt"


class Source(Protocol):
    """Where rows come from: the outboxes of all shards."""

    async def claim_within(self, terms: Terms, *, seconds: float) -> Claim | None: ...

    def holder(self, token: str, *, field: str = "claim_token") -> tuple[OutboxShard, ClaimToken]: ...

    @property
    def chores(self) -> Chores: ...


@dataclass(slots=True)
class Held:
    """A batch that is out and not wholly acknowledged."""

    part: OutboxShard
    token: ClaimToken
    outbox_ids: set[int]
    #: Whether the consumer may have seen it.
    is_sent: bool = False


@dataclass(slots=True)
class Window:
    """How many rows may be out, and which are."""

    credit: int = 0
    batches: dict[str, Held] = field(default_factory=dict)
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    _out: int = 0

    @property
    def room(self) -> int:
        """How many more rows may go out."""
        return min(self.credit, WINDOW_ROWS_MAX) - self._out

    def widen(self, rows: int) -> None:
        """The consumer takes more rows."""
        self.credit += rows
        self._changed()

    def hold(self, token: str, held: Held) -> None:
        """Rows go out."""
        self.batches[token] = held
        self._out += len(held.outbox_ids)
        self._changed()

    def mark_sent(self, token: str) -> None:
        """The consumer may see the batch from now on."""
        if token in self.batches:
            self.batches[token].is_sent = True

    def let_go(self, token: str, outbox_ids: set[int]) -> None:
        """Rows are published, failed, released or lost."""
        held = self.batches.get(token)
        if held is None:
            return
        self._out -= len(held.outbox_ids & outbox_ids)
        held.outbox_ids -= outbox_ids
        if not held.outbox_ids:
            del self.batches[token]
        self._changed()

    def _changed(self) -> None:
        if self.room > 0:
            self.has_room.set()
        else:
            self.has_room.clear()


class OutboxStream:
    """Serves one consumer."""

    def __init__(self, source: Source, *, is_broken: Callable[[], bool]) -> None:
        self._source = source
        self._is_broken = is_broken
        self._window = Window()
        self._ready: deque[pb.ConsumeOutboxResponse] = deque()
        self._has_news = asyncio.Event()
        self._batch_slots = asyncio.Semaphore(BATCHES_AHEAD)
        self._result_slots = asyncio.Semaphore(RESULTS_AHEAD)

    async def serve(
        self, requests: AsyncIterator[pb.ConsumeOutboxRequest]
    ) -> AsyncGenerator[pb.ConsumeOutboxResponse, None]:
        """What to send. When it ends, for whatever reason, nothing is held any more."""
        terms = await _read_start(requests)
        reader = asyncio.create_task(self._read(requests, terms), name="outbox reader")
        claimer = asyncio.create_task(self._claim(terms), name="outbox claimer")
        takes_attempt_back = False
        try:
            async with aclosing(self._responses(reader, claimer)) as responses:
                async for response in responses:
                    yield response
            await asyncio.sleep(BREAK_SECONDS)
            takes_attempt_back = not self._is_broken()
        except NoetlError:
            # What we refuse or lack says nothing about the rows.
            takes_attempt_back = True
            raise
        finally:
            takes_attempt_back |= calls.current().is_ending
            tidy = self._tidy_up((reader, claimer), takes_attempt_back=takes_attempt_back)
            # In a task of its own, because this one may be cancelled at any moment.
            await asyncio.shield(self._source.chores.start(tidy))

    async def _responses(
        self, reader: asyncio.Task[None], claimer: asyncio.Task[None]
    ) -> AsyncGenerator[pb.ConsumeOutboxResponse, None]:
        """Answers and batches as they come, until the reader is done; then only the answers that are left."""
        for task in (reader, claimer):
            task.add_done_callback(lambda _: self._has_news.set())
        while True:
            self._has_news.clear()
            while self._ready:
                response = self._ready.popleft()
                if response.HasField("result"):
                    yield response
                    self._result_slots.release()
                elif not reader.done():
                    self._window.mark_sent(response.batch.claim_token)
                    yield response
                    self._batch_slots.release()
            if claimer.done():
                claimer.result()
            if reader.done():
                reader.result()
                return
            await self._has_news.wait()

    def _send(self, response: pb.ConsumeOutboxResponse) -> None:
        self._ready.append(response)
        self._has_news.set()

    async def _read(self, requests: AsyncIterator[pb.ConsumeOutboxRequest], terms: Terms) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "credit":
                    if request.credit.rows <= 0:
                        raise InvalidRequest("credit.rows", "must be above 0")
                    self._window.widen(request.credit.rows)
                    continue
                case "published":
                    result = await self._published(request.published)
                case "failed":
                    result = await self._failed(request.failed)
                case "extend":
                    result = await self._extend(request.extend, terms)
                case "start":
                    raise InvalidRequest("start", "must be the first message and only that")
                case _:
                    raise InvalidRequest("message", "must be one of credit, published, failed and extend")
            await self._result_slots.acquire()
            self._send(pb.ConsumeOutboxResponse(result=result))

    async def _published(self, request: pb.ConsumeOutboxRequest.Published) -> pb.ConsumeOutboxResponse.Result:
        check_batch(request.outbox_ids, "published.outbox_ids")
        part, token = self._source.holder(request.claim_token, field="published.claim_token")
        published = await part.mark_published(request.outbox_ids, token.claim)
        self._window.let_go(request.claim_token, set(request.outbox_ids))
        return pb.ConsumeOutboxResponse.Result(
            claim_token=request.claim_token,
            marked=published.marked,
            stale_ids=sorted((*published.stale_ids, *published.unknown_ids)),
        )

    async def _failed(self, request: pb.ConsumeOutboxRequest.Failed) -> pb.ConsumeOutboxResponse.Result:
        failures = failures_from_pb(request.failures, "failed.failures")
        part, token = self._source.holder(request.claim_token, field="failed.claim_token")
        verdicts, released = await part.fail(failures, token.claim)
        self._window.let_go(request.claim_token, {failure.outbox_id for failure in failures}.union(released))
        return pb.ConsumeOutboxResponse.Result(
            claim_token=request.claim_token,
            marked=sum(verdict.is_marked for verdict in verdicts),
            stale_ids=[verdict.outbox_id for verdict in verdicts if verdict.outcome is Outcome.STALE],
            outcomes=outcomes_to_pb(verdicts),
            released_ids=released,
        )

    async def _extend(
        self, request: pb.ConsumeOutboxRequest.Extend, terms: Terms
    ) -> pb.ConsumeOutboxResponse.Result:
        part, token = self._source.holder(request.claim_token, field="extend.claim_token")
        held = self._window.batches.get(request.claim_token)
        extended = await part.extend(token, sorted(held.outbox_ids) if held else (), lease=terms.lease)
        self._window.let_go(request.claim_token, set(extended.lost_ids))
        until = extended.lease_expires_at
        return pb.ConsumeOutboxResponse.Result(
            claim_token=request.claim_token,
            marked=extended.extended,
            lost_ids=extended.lost_ids,
            lease_expires_at=None if until is None else timestamp_to_pb(until),
        )

    async def _claim(self, terms: Terms) -> None:
        """Keep the window full."""
        while True:
            await self._batch_slots.acquire()
            claim = None
            while claim is None:
                limit = await self._room()
                claim = await self._source.claim_within(terms.with_limit(limit), seconds=WAIT_SECONDS)
            token = claim.token.encode()
            part, _ = self._source.holder(token)
            self._window.hold(token, Held(part, claim.token, {row.outbox_id for row in claim.rows}))
            response = pb.ConsumeOutboxResponse()
            response.batch.claim_token = token
            response.batch.lease_expires_at.CopyFrom(timestamp_to_pb(claim.lease_expires_at))
            add_rows(response.batch.rows.add, claim.rows, shard=claim.token.shard)
            self._send(response)

    async def _room(self) -> int:
        """How many rows to claim, as soon as there is room for one."""
        window = self._window
        await window.has_room.wait()
        if window.room * 4 < min(window.credit, WINDOW_ROWS_MAX):
            await asyncio.sleep(GATHER_SECONDS)
        return min(window.room, CLAIM_ROWS_MAX)

    async def _tidy_up(self, tasks: tuple[asyncio.Task[None], ...], *, takes_attempt_back: bool) -> None:
        """Give back what is still out. What the consumer can't have seen never counts as an attempt."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._window.batches.values():
            try:
                if takes_attempt_back or not held.is_sent:
                    await held.part.release(held.token, sorted(held.outbox_ids))
                else:
                    await held.part.abandon(held.token.claim, sorted(held.outbox_ids), error=BREAK_ERROR)
            except NoetlError as error:
                logger.warning("rows of a stream that ended come back when their lease ends: %s", error)


async def _read_start(requests: AsyncIterator[pb.ConsumeOutboxRequest]) -> Terms:
    async for request in requests:
        if request.WhichOneof("message") != "start":
            break
        return Terms(
            limit=CLAIM_ROWS_MAX,
            bytes_max=claim_bytes(request.start.max_bytes, field="start.max_bytes"),
            lease=lease_from_pb(request.start.lease, "start.lease"),
            ordered=request.start.ordered,
        )
    raise InvalidRequest("start", "must be the first message")
