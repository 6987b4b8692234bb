"""OutboxService: outgoing messages are handed out under a lease, acknowledged, and retried until they are dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from uuid import UUID

from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc import calls
from noetl_grpc.calls import Context
from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.convert.outbox import (
    add_rows,
    check_batch,
    dead_filter_from_pb,
    dead_row_to_pb,
    duration_to_pb,
    failure_from_pb,
    failures_from_pb,
    lease_from_pb,
    messages_from_pb,
    outcomes_to_pb,
)
from noetl_grpc.core.outbox import (
    CLAIM_BYTES_MAX,
    ClaimToken,
    DeadFilter,
    DeadRow,
    Message,
    Outcome,
    Stats,
    claim_bytes,
    claim_limit,
    wait_seconds,
)
from noetl_grpc.core.paging import decode_token, encode_token, page_size
from noetl_grpc.errors import InvalidRequest, LeaseLost, NoetlError, NotFound, Unavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.chores import Chores
from noetl_grpc.services.outbox_shard import Claim, OutboxShard, Terms
from noetl_grpc.services.outbox_stream import OutboxStream
from noetl_grpc.services.outbox_waiting import Waiter
from noetl_grpc.storage.pool import Shards


class Outbox:
    """The outboxes of all shards."""

    def __init__(self, shards: Shards, *, attempts_max: int, metrics: Metrics) -> None:
        self._shards = shards
        self.chores = Chores()
        self.parts = tuple(
            OutboxShard(number, pool, attempts_max=attempts_max, metrics=metrics, chores=self.chores)
            for number, pool in enumerate(shards.pools)
        )
        self._waitings = tuple(part.waiting for part in self.parts)
        self._turn = 0

    async def close(self) -> None:
        """Finish what was begun for callers who are gone."""
        for waiting in self._waitings:
            await waiting.close()
        await self.chores.finish()

    def holder(self, token: str, *, field: str = "claim_token") -> tuple[OutboxShard, ClaimToken]:
        """The shard that a token names, and what else it says."""
        decoded = ClaimToken.decode(token, shards=len(self.parts), field=field)
        return self.parts[decoded.shard], decoded

    def part_of(self, token: str, shard: int | None) -> tuple[OutboxShard, UUID | None]:
        """Where the rows of an acknowledgement are, and by which claim they are held; none without a token."""
        if token:
            part, decoded = self.holder(token)
            return part, decoded.claim
        return self.part(shard), None

    def part(self, shard: int | None, *, field: str = "shard") -> OutboxShard:
        """A shard by its number, which may be left out when there is only one."""
        if shard is None:
            if len(self.parts) > 1:
                raise InvalidRequest(
                    field, "is required without a claim_token, because there are several shards"
                )
            return self.parts[0]
        if not 0 <= shard < len(self.parts):
            raise InvalidRequest(field, f"must be between 0 and {len(self.parts) - 1}")
        return self.parts[shard]

    async def enqueue(self, messages: Sequence[Message]) -> tuple[int, list[int]]:
        """Add messages, those of one shard in one transaction; how many are new, and the outbox_id of each."""
        await self._refuse_unstorable(messages)
        places: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            # A message without execution must always meet its duplicates, so it goes where its event_id says.
            key = message.event_id if message.execution_id is None else message.execution_id
            places.setdefault(self._shards.shard_of(key), []).append(place)
        answers = await asyncio.gather(
            *(
                self.parts[shard].enqueue([messages[place] for place in theirs])
                for shard, theirs in places.items()
            )
        )
        outbox_ids = [0] * len(messages)
        for theirs, (_, ids) in zip(places.values(), answers, strict=True):
            for place, outbox_id in zip(theirs, ids, strict=True):
                outbox_ids[place] = outbox_id
        return sum(added for added, _ in answers), outbox_ids

    async def _refuse_unstorable(self, messages: Sequence[Message]) -> None:
        suspects = [place for place, message in enumerate(messages) if message.is_suspect]
        if suspects:
            bad = await self.parts[0].find_unstorable([messages[place].payload_json for place in suspects])
            if bad is not None:
                raise InvalidRequest(
                    f"messages[{suspects[bad]}].payload_json", "holds a number that PostgreSQL can't store"
                )

    async def claim(self, terms: Terms, *, first: int | None = None) -> Claim | None:
        """Rows of the first shard that has some; each call begins with another one unless it is told which."""
        if first is None:
            first = self._turn = (self._turn + 1) % len(self.parts)
        failed: NoetlError | None = None
        for part in (*self.parts[first:], *self.parts[:first]):
            try:
                claim = await part.claim(terms)
            except Unavailable as error:
                failed = error
                continue
            if claim is not None:
                return claim
        # Nothing found is only true if everybody was asked.
        if failed is not None:
            raise failed
        return None

    async def claim_within(self, terms: Terms, *, seconds: float) -> Claim | None:
        """As `claim`, but wait for a row; no connection is held meanwhile."""
        deadline = time.monotonic() + seconds
        claim = await self.claim(terms)
        while claim is None and (left := deadline - time.monotonic()) > 0:
            waiter = Waiter(ordered=terms.ordered)
            await waiter.wait(self._waitings, seconds=left)
            first = self._waitings.index(waiter.woken_by) if waiter.woken_by is not None else None
            claim = await self.claim(terms, first=first)
            if claim is not None:
                # One waiter is woken at a time; where there was something there may be more.
                self._waitings[claim.token.shard].wake_next(ordered=terms.ordered)
        return claim

    def notify(self, shard: int) -> None:
        """Rows were written to this shard's outbox by somebody else in this process."""
        self.parts[shard].waiting.notify()

    async def list_dead(
        self, dead: DeadFilter, *, shard: int | None, place: tuple[int, int], limit: int, with_payload: bool
    ) -> tuple[list[tuple[int, DeadRow]], tuple[int, int] | None]:
        """Dead rows by shard and id behind a place, and the place of the next page."""
        rows: list[tuple[int, DeadRow]] = []
        number, after = place
        bytes_left = CLAIM_BYTES_MAX
        for part in self.parts[number:] if shard is None else (self.part(shard),):
            # One more than wanted tells whether there is another page.
            page = await part.list_dead(
                dead,
                after=after if part.number == number else 0,
                limit=limit - len(rows) + 1,
                bytes_max=bytes_left,
                with_payload=with_payload,
            )
            for row in page:
                bytes_left -= row.size
                if len(rows) == limit or (rows and bytes_left < 0):
                    last_shard, last = rows[-1]
                    return rows, (last_shard, last.outbox_id)
                rows.append((part.number, row))
            if bytes_left <= 0:
                return rows, (part.number, rows[-1][1].outbox_id)
        return rows, None

    async def count_dead(self, dead: DeadFilter, *, shard: int | None) -> int:
        """How many dead rows there are."""
        parts = self.parts if shard is None else (self.part(shard),)
        return sum(await asyncio.gather(*(part.count_dead(dead) for part in parts)))

    async def requeue(self, dead: DeadFilter, *, shard: int | None) -> int:
        """Make dead rows due again; how many."""
        parts = self.parts if shard is None else (self.part(shard),)
        return sum([await part.requeue(dead) for part in parts])

    async def count_pending(self) -> int:
        """How many rows a claim without limit would get."""
        return sum(await asyncio.gather(*(part.count_pending() for part in self.parts)))

    async def stats(self) -> Stats:
        """Undelivered rows by situation."""
        return sum(await asyncio.gather(*(part.stats() for part in self.parts)), Stats())


class OutboxServicer(rpc.OutboxServiceServicer):
    """Serves noetlpb.v1.OutboxService."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def EnqueueOutbox(
        self, request: pb.EnqueueOutboxRequest, context: Context
    ) -> pb.EnqueueOutboxResponse:
        messages = messages_from_pb(request.messages, traceparent=calls.current().traceparent)
        enqueued, outbox_ids = await self._outbox.enqueue(messages)
        return pb.EnqueueOutboxResponse(
            enqueued=enqueued, duplicates=len(messages) - enqueued, outbox_ids=outbox_ids
        )

    async def ClaimOutboxBatch(
        self, request: pb.ClaimOutboxBatchRequest, context: Context
    ) -> pb.ClaimOutboxBatchResponse:
        terms = Terms(
            limit=claim_limit(request.limit),
            bytes_max=claim_bytes(request.max_bytes),
            lease=lease_from_pb(request.lease),
            ordered=request.ordered,
        )
        seconds = wait_seconds(seconds=request.wait.seconds, nanos=request.wait.nanos)
        claim = await self._outbox.claim_within(terms, seconds=seconds)
        if claim is None:
            return pb.ClaimOutboxBatchResponse()
        response = pb.ClaimOutboxBatchResponse(
            claimed=len(claim.rows),
            claim_token=claim.token.encode(),
            lease_expires_at=timestamp_to_pb(claim.lease_expires_at),
        )
        add_rows(response.rows.add, claim.rows, shard=claim.token.shard)
        return response

    async def MarkOutboxPublished(
        self, request: pb.MarkOutboxPublishedRequest, context: Context
    ) -> pb.MarkOutboxPublishedResponse:
        check_batch(request.outbox_ids, "outbox_ids")
        part, claim = self._outbox.part_of(request.claim_token, _shard_of(request))
        published = await part.mark_published(request.outbox_ids, claim)
        return pb.MarkOutboxPublishedResponse(
            marked=published.marked, stale_ids=published.stale_ids, unknown_ids=published.unknown_ids
        )

    async def MarkOutboxFailed(
        self, request: pb.MarkOutboxFailedRequest, context: Context
    ) -> pb.MarkOutboxFailedResponse:
        failure = failure_from_pb(request)
        part, claim = self._outbox.part_of(request.claim_token, _shard_of(request))
        (verdict,), released_ids = await part.fail([failure], claim)
        metadata = {"outbox_id": failure.outbox_id, "shard": part.number}
        if verdict.outcome is Outcome.UNKNOWN:
            raise NotFound(
                f"there is no outbox row {failure.outbox_id}",
                reason="OUTBOX_ROW_NOT_FOUND",
                metadata=metadata,
            )
        if verdict.outcome is Outcome.STALE:
            raise LeaseLost(
                f"the claim_token no longer holds outbox row {failure.outbox_id}", metadata=metadata
            )
        return pb.MarkOutboxFailedResponse(
            marked=verdict.is_marked,
            available_at_in=verdict.delay_seconds,
            dead=verdict.outcome is Outcome.DEAD,
            released_ids=released_ids,
        )

    async def MarkOutboxFailedBatch(
        self, request: pb.MarkOutboxFailedBatchRequest, context: Context
    ) -> pb.MarkOutboxFailedBatchResponse:
        failures = failures_from_pb(request.failures, "failures")
        part, claim = self._outbox.part_of(request.claim_token, _shard_of(request))
        verdicts, released_ids = await part.fail(failures, claim)
        return pb.MarkOutboxFailedBatchResponse(outcomes=outcomes_to_pb(verdicts), released_ids=released_ids)

    async def ExtendOutboxLease(
        self, request: pb.ExtendOutboxLeaseRequest, context: Context
    ) -> pb.ExtendOutboxLeaseResponse:
        check_batch(request.outbox_ids, "outbox_ids", may_be_empty=True)
        lease = lease_from_pb(request.lease)
        part, token = self._outbox.holder(request.claim_token)
        extended = await part.extend(token, request.outbox_ids, lease=lease)
        until = extended.lease_expires_at
        return pb.ExtendOutboxLeaseResponse(
            extended=extended.extended,
            lost_ids=extended.lost_ids,
            lease_expires_at=None if until is None else timestamp_to_pb(until),
        )

    async def ReleaseOutboxLease(
        self, request: pb.ReleaseOutboxLeaseRequest, context: Context
    ) -> pb.ReleaseOutboxLeaseResponse:
        check_batch(request.outbox_ids, "outbox_ids", may_be_empty=True)
        part, token = self._outbox.holder(request.claim_token)
        released = await part.release(token, request.outbox_ids)
        return pb.ReleaseOutboxLeaseResponse(
            released=released.rows, released_ids=released.younger_ids, lost_ids=released.lost_ids
        )

    async def CountOutboxPending(
        self, request: pb.CountOutboxPendingRequest, context: Context
    ) -> pb.CountOutboxPendingResponse:
        return pb.CountOutboxPendingResponse(pending=await self._outbox.count_pending())

    async def GetOutboxStats(
        self, request: pb.GetOutboxStatsRequest, context: Context
    ) -> pb.GetOutboxStatsResponse:
        stats = await self._outbox.stats()
        age = stats.oldest_pending_age
        return pb.GetOutboxStatsResponse(
            pending=stats.pending,
            delayed=stats.delayed,
            in_flight=stats.in_flight,
            expired=stats.expired,
            dead=stats.dead,
            oldest_pending_age=None if age is None else duration_to_pb(age),
        )

    def ConsumeOutbox(
        self, request_iterator: AsyncIterator[pb.ConsumeOutboxRequest], context: Context
    ) -> AsyncGenerator[pb.ConsumeOutboxResponse, None]:
        return OutboxStream(self._outbox, is_broken=context.cancelled).serve(request_iterator)

    async def ListDeadOutboxRows(
        self, request: pb.ListDeadOutboxRowsRequest, context: Context
    ) -> pb.ListDeadOutboxRowsResponse:
        size = page_size(request.page_size)
        dead, shard = dead_filter_from_pb(request.filter)
        self._check_filter(dead, shard)
        filters = ["ListDeadOutboxRows", request.filter.SerializeToString(deterministic=True).hex()]
        place = decode_token(request.page_token, filters, shape=(int, int)) or (0, 0)
        rows, next_place = await self._outbox.list_dead(
            dead,
            shard=shard,
            place=(place[0], place[1]),
            limit=size,
            with_payload=request.include_payload,
        )
        return pb.ListDeadOutboxRowsResponse(
            rows=[dead_row_to_pb(row, shard=number) for number, row in rows],
            next_page_token="" if next_place is None else encode_token(next_place, filters),
        )

    async def RequeueDeadOutboxRows(
        self, request: pb.RequeueDeadOutboxRowsRequest, context: Context
    ) -> pb.RequeueDeadOutboxRowsResponse:
        dead, shard = dead_filter_from_pb(request.filter)
        self._check_filter(dead, shard)
        if dead == DeadFilter() and shard is None and not request.all:
            raise InvalidRequest("filter", "must say which rows, or `all` must be set")
        count = self._outbox.count_dead if request.dry_run else self._outbox.requeue
        return pb.RequeueDeadOutboxRowsResponse(requeued=await count(dead, shard=shard))

    def _check_filter(self, dead: DeadFilter, shard: int | None) -> None:
        if shard is not None:
            self._outbox.part(shard, field="filter.shard")
        elif dead.outbox_ids and len(self._outbox.parts) > 1:
            raise InvalidRequest(
                "filter.shard", "is required with outbox_ids, because there are several shards"
            )


def _shard_of(
    request: pb.MarkOutboxPublishedRequest | pb.MarkOutboxFailedRequest | pb.MarkOutboxFailedBatchRequest,
) -> int | None:
    return request.shard if request.HasField("shard") else None
