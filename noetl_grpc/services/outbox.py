"""OutboxService: outgoing messages are handed out under a lease, acknowledged, and retried until they are dead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc.calls import Context
from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.convert.outbox import (
    add_rows,
    check_batch,
    duration_to_pb,
    failure_from_pb,
    failures_from_pb,
    lease_from_pb,
    messages_from_pb,
    outcomes_to_pb,
)
from noetl_grpc.core.outbox import (
    ClaimToken,
    Message,
    Outcome,
    Stats,
    claim_bytes,
    claim_limit,
    wait_seconds,
)
from noetl_grpc.errors import InvalidRequest, LeaseLost, NoetlError, NotFound, Unavailable
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.outbox_shard import Claim, OutboxShard, Terms
from noetl_grpc.storage.pool import Shards


class Outbox:
    """The outboxes of all shards."""

    def __init__(self, shards: Shards, *, attempts_max: int, metrics: Metrics) -> None:
        self._shards = shards
        self.parts = tuple(
            OutboxShard(number, pool, attempts_max=attempts_max, metrics=metrics)
            for number, pool in enumerate(shards.pools)
        )
        self._turn = 0

    async def close(self) -> None:
        """Finish what was begun for callers who are gone."""
        for part in self.parts:
            await part.close()

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

    def part(self, shard: int | None) -> OutboxShard:
        """A shard by its number, which may be left out when there is only one."""
        if shard is None:
            if len(self.parts) > 1:
                raise InvalidRequest(
                    "shard", "is required without a claim_token, because there are several shards"
                )
            return self.parts[0]
        if not 0 <= shard < len(self.parts):
            raise InvalidRequest("shard", f"must be between 0 and {len(self.parts) - 1}")
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

    async def claim(self, terms: Terms) -> Claim | None:
        """Rows of the first shard that has some; each call begins with another one."""
        self._turn = (self._turn + 1) % len(self.parts)
        failed: NoetlError | None = None
        for part in (*self.parts[self._turn :], *self.parts[: self._turn]):
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
        messages = messages_from_pb(request.messages)
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
        wait_seconds(seconds=request.wait.seconds, nanos=request.wait.nanos)
        claim = await self._outbox.claim(terms)
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


def _shard_of(
    request: pb.MarkOutboxPublishedRequest | pb.MarkOutboxFailedRequest | pb.MarkOutboxFailedBatchRequest,
) -> int | None:
    return request.shard if request.HasField("shard") else None
