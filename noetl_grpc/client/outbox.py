"""The outbox: enqueue, claim, acknowledge, retry, and a loop that does it all for a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NoReturn

import orjson
from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc.client.channel import CALL_SECONDS, LONG_CALL_SECONDS, Line
from noetl_grpc.client.consume import Consumption, consume_for_ever
from noetl_grpc.client.mapping import Id, duration, from_pb, to_pb


class OutboxOutcome(StrEnum):
    """What became of a row that was reported as failed."""

    UNSPECIFIED = "UNSPECIFIED"
    FAILED = "FAILED"
    DEAD = "DEAD"
    STALE = "STALE"
    UNKNOWN = "UNKNOWN"
    ALREADY_PUBLISHED = "ALREADY_PUBLISHED"


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """An outgoing message."""

    outbox_id: Id
    event_id: Id
    execution_id: Id | None
    #: None leaves the choice to the publisher.
    subject: str | None
    payload_json: str
    payload_codec: str
    headers: Mapping[str, str]
    #: How often it was claimed, this time included.
    attempts: int
    shard: int

    @property
    def payload(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.payload_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxMessage:
    """A message to enqueue. One execution's messages leave in the order in which they were enqueued."""

    event_id: Id
    payload_json: str
    execution_id: Id | None = None
    subject: str | None = None
    payload_codec: str = ""
    available_at: datetime | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Enqueued:
    """One id per message in order; for a duplicate the existing row's."""

    enqueued: int
    duplicates: int
    outbox_ids: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows that are ours until somebody else claims them after the lease."""

    rows: tuple[OutboxRow, ...]
    claimed: int
    claim_token: str
    lease_expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Marked:
    """What an acknowledgement did."""

    marked: int
    stale_ids: tuple[Id, ...]
    unknown_ids: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """What became of a failed row, and of the younger ones of its execution."""

    marked: bool
    #: Seconds.
    available_at_in: int
    dead: bool
    released_ids: tuple[Id, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxFailure:
    """A row's failure."""

    outbox_id: Id
    error: str
    attempts: int = 0
    max_delay_seconds: int = 0


@dataclass(frozen=True, slots=True)
class OutboxFailureOutcome:
    """What became of one failure."""

    outbox_id: Id
    outcome: OutboxOutcome
    #: Seconds.
    available_at_in: int


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """What became of each failure, and the younger rows that were given back with them."""

    outcomes: tuple[OutboxFailureOutcome, ...]
    released_ids: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class Extended:
    """How many rows are held longer, and which are lost."""

    extended: int
    lost_ids: tuple[Id, ...]
    lease_expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Released:
    """How many rows were given back, which of them unasked, and which were not ours any more."""

    released: int
    released_ids: tuple[Id, ...]
    lost_ids: tuple[Id, ...]


@dataclass(frozen=True, slots=True)
class OutboxStats:
    """Undelivered rows by situation, each counted once."""

    pending: int
    delayed: int
    in_flight: int
    expired: int
    dead: int
    oldest_pending_age: timedelta | None


@dataclass(frozen=True, slots=True)
class DeadOutboxRow:
    """A row that is out of attempts."""

    row: OutboxRow
    last_error: str
    dead_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadOutboxFilter:
    """Which dead rows; what is set must all hold."""

    error_contains: str = ""
    subject: str = ""
    execution_id: Id | None = None
    dead_before: datetime | None = None
    outbox_ids: tuple[Id, ...] = ()
    shard: int | None = None


class OutboxClient:
    """noetlpb.v1.OutboxService."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._stub = rpc.OutboxServiceStub(line.channel)

    async def enqueue(self, messages: Iterable[OutboxMessage], *, timeout: float | None = None) -> Enqueued:
        """Add messages. Safe to repeat: a message is known by its execution and event."""
        request = pb.EnqueueOutboxRequest(messages=[to_pb(message, pb.OutboxMessage) for message in messages])
        return from_pb(Enqueued, await self._line.call(self._stub.EnqueueOutbox, request, timeout=timeout))

    async def claim(
        self,
        *,
        limit: int = 0,
        lease_seconds: float = 0.0,
        ordered: bool = False,
        max_bytes: int = 0,
        wait_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> Claim:
        """Take due rows for the length of a lease; wait for a first one if told to."""
        request = pb.ClaimOutboxBatchRequest(
            limit=limit,
            lease=duration(lease_seconds),
            ordered=ordered,
            max_bytes=max_bytes,
            wait=duration(wait_seconds),
        )
        answer = await self._line.call(
            self._stub.ClaimOutboxBatch, request, timeout=timeout or wait_seconds + CALL_SECONDS
        )
        return from_pb(Claim, answer)

    async def mark_published(
        self,
        outbox_ids: Sequence[int],
        *,
        claim_token: str = "",
        shard: int | None = None,
        timeout: float | None = None,
    ) -> Marked:
        """Acknowledge rows. With a token only those it still holds; the others are named as stale."""
        request = pb.MarkOutboxPublishedRequest(outbox_ids=outbox_ids, claim_token=claim_token, shard=shard)
        return from_pb(
            Marked, await self._line.call(self._stub.MarkOutboxPublished, request, timeout=timeout)
        )

    async def mark_failed(
        self,
        outbox_id: int,
        *,
        error: str,
        attempts: int = 0,
        max_delay_seconds: int = 0,
        claim_token: str = "",
        shard: int | None = None,
        timeout: float | None = None,
    ) -> Failed:
        """Let a row be tried again later; dead once it is out of attempts."""
        request = pb.MarkOutboxFailedRequest(
            outbox_id=outbox_id,
            error=error,
            attempts=attempts,
            max_delay_seconds=max_delay_seconds,
            claim_token=claim_token,
            shard=shard,
        )
        return from_pb(Failed, await self._line.call(self._stub.MarkOutboxFailed, request, timeout=timeout))

    async def mark_failed_batch(
        self,
        failures: Iterable[OutboxFailure],
        *,
        claim_token: str = "",
        shard: int | None = None,
        timeout: float | None = None,
    ) -> FailedBatch:
        """Many failures of one claim at once; what became of each is in the answer."""
        request = pb.MarkOutboxFailedBatchRequest(
            failures=[to_pb(failure, pb.OutboxFailure) for failure in failures],
            claim_token=claim_token,
            shard=shard,
        )
        answer = await self._line.call(self._stub.MarkOutboxFailedBatch, request, timeout=timeout)
        return from_pb(FailedBatch, answer)

    async def extend(
        self,
        claim_token: str,
        *,
        outbox_ids: Sequence[int] = (),
        lease_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> Extended:
        """Hold rows for longer, from now; all of the claim's unless some are named."""
        request = pb.ExtendOutboxLeaseRequest(
            claim_token=claim_token, outbox_ids=outbox_ids, lease=duration(lease_seconds)
        )
        return from_pb(
            Extended, await self._line.call(self._stub.ExtendOutboxLease, request, timeout=timeout)
        )

    async def release(
        self, claim_token: str, *, outbox_ids: Sequence[int] = (), timeout: float | None = None
    ) -> Released:
        """Give rows back at once, their attempt with them; all of the claim's unless some are named."""
        request = pb.ReleaseOutboxLeaseRequest(claim_token=claim_token, outbox_ids=outbox_ids)
        return from_pb(
            Released, await self._line.call(self._stub.ReleaseOutboxLease, request, timeout=timeout)
        )

    async def count_pending(self, *, timeout: float | None = None) -> int:
        """Rows that could be claimed now."""
        answer = await self._line.call(
            self._stub.CountOutboxPending, pb.CountOutboxPendingRequest(), timeout=timeout
        )
        return answer.pending

    async def stats(self, *, timeout: float | None = None) -> OutboxStats:
        """Undelivered rows by situation."""
        answer = await self._line.call(self._stub.GetOutboxStats, pb.GetOutboxStatsRequest(), timeout=timeout)
        return from_pb(OutboxStats, answer)

    async def dead_rows(
        self,
        filter: DeadOutboxFilter = DeadOutboxFilter(),
        *,
        include_payload: bool = False,
        page_size: int = 0,
    ) -> AsyncIterator[DeadOutboxRow]:
        """Every dead row that the filter lets through, page after page."""
        request = pb.ListDeadOutboxRowsRequest(
            filter=to_pb(filter, pb.DeadOutboxFilter), include_payload=include_payload, page_size=page_size
        )
        async for page in self._line.pages(self._stub.ListDeadOutboxRows, request):
            for row in page.rows:
                yield from_pb(DeadOutboxRow, row)

    async def requeue_dead(
        self,
        filter: DeadOutboxFilter = DeadOutboxFilter(),
        *,
        dry_run: bool = False,
        all: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Make dead rows due again with fresh attempts; returns how many. An empty filter needs `all`."""
        request = pb.RequeueDeadOutboxRowsRequest(
            filter=to_pb(filter, pb.DeadOutboxFilter), dry_run=dry_run, all=all
        )
        answer = await self._line.call(
            self._stub.RequeueDeadOutboxRows, request, timeout=timeout or LONG_CALL_SECONDS
        )
        return answer.requeued

    async def consume(
        self,
        handler: Callable[[OutboxRow], Awaitable[object]],
        *,
        concurrency: int = 16,
        ordered: bool = True,
        lease_seconds: float = 30.0,
        window: int = 0,
        max_bytes: int = 0,
        drain_seconds: float = 10.0,
        ready: Callable[[], Awaitable[object]] | None = None,
        tally: Consumption | None = None,
    ) -> NoReturn:
        """Hand every outgoing row to the handler, until cancelled.

        A handler that returns has published its row. One that raises has failed it, to be tried again later; one that
        raises `Release` gives it back without blame, and everything else that is held with it, until `ready` returns.
        `ordered` hands out the rows of one execution one after the other, those of different ones side by side.
        Leases are renewed while handlers run; a handler whose row was lost to somebody else is cancelled. The server
        may come and go. On cancellation running handlers finish (for `drain_seconds`) and the rest is given back.
        """
        await consume_for_ever(
            lambda: self._stub.ConsumeOutbox(metadata=self._line.metadata()),
            handler,
            to_row=lambda row: from_pb(OutboxRow, row),
            concurrency=concurrency,
            ordered=ordered,
            lease_seconds=lease_seconds,
            window=window or concurrency * 4,
            max_bytes=max_bytes,
            drain_seconds=drain_seconds,
            ready=ready,
            tally=tally or Consumption(),
        )
