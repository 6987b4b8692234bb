"""ReplayService: the state of an execution as of any event or time, what changed in between, and why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import replay_pb2_grpc as rpc

from noetl_grpc import calls
from noetl_grpc.calls import Context
from noetl_grpc.convert.events import event_to_pb
from noetl_grpc.convert.replay import (
    cause_to_pb,
    change_to_pb,
    cutoff_from_pb,
    projection_from_pb,
    rules_from_pb,
    scope_from_pb,
    state_to_pb,
)
from noetl_grpc.core import resuming
from noetl_grpc.core.checksums import checksums_of
from noetl_grpc.core.cutoff import EVERYTHING, Cutoff, Scope
from noetl_grpc.core.difference import Cause, parse_pointer
from noetl_grpc.core.fold import Fold, Identity
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.core.snapshots import RULES, Snapshot
from noetl_grpc.core.upcast import Registry
from noetl_grpc.errors import InvalidRequest, NotFound, StateTooLarge
from noetl_grpc.follower import Follower
from noetl_grpc.services.comparison import Comparison
from noetl_grpc.services.event_stream import EventStream
from noetl_grpc.services.payloads import PayloadResolver, resolve_payloads
from noetl_grpc.services.seeds import Seeds
from noetl_grpc.storage import log
from noetl_grpc.storage.pool import Connection, Shards
from noetl_grpc.storage.replay import START, fold_log, in_steps


class ReplayServicer(rpc.ReplayServiceServicer):
    """Serves noetlpb.v1.ReplayService from the log."""

    def __init__(
        self,
        shards: Shards,
        followers: Sequence[Follower],
        *,
        folding: asyncio.Semaphore,
        seeds: Seeds,
        registry: Registry,
        resolvers: Sequence[PayloadResolver],
        message_bytes_max: int,
    ) -> None:
        """`folding` bounds how many folds run at a time; the others wait without a connection."""
        self._shards = shards
        self._followers = followers
        self._folding = folding
        self._seeds = seeds
        self._registry = registry
        self._resolvers = resolvers
        self._message_bytes_max = message_bytes_max

    async def ReplayState(self, request: pb.ReplayStateRequest, context: Context) -> pb.ReplayStateResponse:
        scope = scope_from_pb(request)
        cutoff = cutoff_from_pb(request)
        if request.limit < 0:
            raise InvalidRequest("limit", "must not be negative")
        rules, projection = rules_from_pb(request.rules), projection_from_pb(request.projection)
        may_use_seed = request.use_snapshot or not request.HasField("use_snapshot")
        async with self._folding:
            async with self._snapshot(scope) as conn:
                seed = None
                if may_use_seed and rules is RULES and not request.limit:
                    seed = await self._seeds.find(conn, scope, cutoff)
                base = seed.snapshot if seed else None
                fold = self._new_fold(scope, rules, projection, base=base)
                reached = await fold_log(
                    conn,
                    fold,
                    scope,
                    cutoff,
                    self._registry,
                    after_event_id=seed.snapshot.version if seed else START,
                    limit=request.limit,
                )
            checksums = await in_steps(checksums_of(fold.state, keep_text=request.include_canonical_json))
            state = await in_steps(state_to_pb(fold.state, fold.rules, checksums, fold.warnings))
        if seed is not None:
            state.seed.version, state.seed.checksum = seed.snapshot.version, seed.checksum
        if not reached.complete:
            state.complete = False
            state.next_after_event_id = reached.last_event_id
        if request.resolve_payloads:
            report = await resolve_payloads(fold.state, self._resolvers)
            state.payload_resolution_json = report.decode()
        self._budget("ask for one projection").spend(state.ByteSize())
        return pb.ReplayStateResponse(state=state)

    async def StreamEvents(
        self, request: pb.StreamEventsRequest, context: Context
    ) -> AsyncIterator[pb.StreamEventsResponse]:
        scope = scope_from_pb(request)
        cutoff = cutoff_from_pb(request)
        if request.after_event_id < 0:
            raise InvalidRequest("after_event_id", "must not be negative")
        if request.follow and cutoff != EVERYTHING:
            raise InvalidRequest("follow", "can't be combined with a cutoff")
        shard = self._shards.shard_of(scope.execution_id)
        stream = EventStream(
            pool=self._shards.pools[shard],
            follower=self._followers[shard],
            scope=scope,
            cutoff=cutoff,
            after_event_id=request.after_event_id,
            follow=request.follow,
        )
        identity = _identity_of_stream(scope, cutoff, request)
        place = resuming.decode(request.resume_token, identity) if request.resume_token else None
        call = calls.current()
        call.resume_token = request.resume_token
        async with aclosing(stream.batches(place)) as batches:
            async for batch in batches:
                token = resuming.encode(batch.place, identity)
                yield pb.StreamEventsResponse(
                    events=map(event_to_pb, batch.rows), resume_token=token, caught_up=batch.caught_up
                )
                call.resume_token = token

    async def GetEvent(self, request: pb.GetEventRequest, context: Context) -> pb.GetEventResponse:
        scope = scope_from_pb(request)
        if request.event_id <= 0:
            raise InvalidRequest("event_id", "must be above 0")
        async with self._shards.pool_for(scope.execution_id).acquire() as conn:
            rows = await log.events_by_id(conn, scope, [request.event_id])
        if not rows:
            raise NotFound(
                f"execution {scope.execution_id} has no event {request.event_id}",
                reason="EVENT_NOT_FOUND",
                metadata={"execution_id": scope.execution_id, "event_id": request.event_id},
            )
        return pb.GetEventResponse(event=event_to_pb(rows[0]))

    async def DiffReplay(self, request: pb.DiffReplayRequest, context: Context) -> pb.DiffReplayResponse:
        scope = scope_from_pb(request)
        before = cutoff_from_pb(request.from_cutoff, field="from_cutoff")
        after = cutoff_from_pb(request.to_cutoff, field="to_cutoff")
        rules = rules_from_pb(request.rules)
        async with self._folding, self._comparison(scope, rules) as comparison:
            found = await comparison.difference(before, after)
        response = pb.DiffReplayResponse(from_checksum=found.from_checksum, to_checksum=found.to_checksum)
        budget = self._budget("choose cutoffs that are closer together")
        for change in found.changes:
            message = change_to_pb(change, found.event_ids[change.path])
            budget.spend(message.ByteSize())
            response.changes.append(message)
        return response

    async def ExplainReplay(
        self, request: pb.ExplainReplayRequest, context: Context
    ) -> pb.ExplainReplayResponse:
        scope = scope_from_pb(request)
        cutoff = cutoff_from_pb(request)
        path = parse_pointer(request.path)
        rules = rules_from_pb(request.rules)
        causes: list[Cause] = []
        budget = self._budget("choose a longer path or an earlier cutoff")
        async with self._folding, self._comparison(scope, rules) as comparison:
            found = comparison.causes(self._new_fold(scope, rules), cutoff, [path])
            async with aclosing(found):
                async for cause in found:
                    budget.spend(len(cause.value_json or b"") + len(cause.event_type))
                    causes.append(cause)
            times = await log.event_times(comparison.conn, scope, [cause.event_id for cause in causes])
        return pb.ExplainReplayResponse(
            causes=[cause_to_pb(cause, times[cause.event_id]) for cause in reversed(causes)]
        )

    def _new_fold(
        self, scope: Scope, rules: FoldRules, projection: str = "all", base: Fold | Snapshot | None = None
    ) -> Fold:
        identity = Identity(
            scope.execution_id,
            scope.tenant_id,
            scope.organization_id,
            projection,
            self._registry.digest,
        )
        if isinstance(base, Snapshot):
            fold = Fold(identity, rules, base.state, takes_base=True)
            fold.recall_warnings(base.warnings, base.warnings_left_out)
            return fold
        return Fold(identity, rules, None if base is None else base.state)

    @asynccontextmanager
    async def _snapshot(self, scope: Scope) -> AsyncIterator[Connection]:
        """All that is read in the block is of one state of the log."""
        pool = self._shards.pool_for(scope.execution_id)
        async with pool.transaction(isolation="repeatable_read", readonly=True) as conn:
            yield conn

    @asynccontextmanager
    async def _comparison(self, scope: Scope, rules: FoldRules) -> AsyncIterator[Comparison]:
        async with self._snapshot(scope) as conn:
            yield Comparison(
                conn=conn,
                scope=scope,
                registry=self._registry,
                new_fold=lambda base: self._new_fold(scope, rules, base=base),
            )

    def _budget(self, advice: str) -> MessageBudget:
        return MessageBudget(self._message_bytes_max, advice)


class MessageBudget:
    """What may still go into an answer; nothing is left out in silence."""

    # Tags, lengths and ids of a repeated message, generously.
    _OVERHEAD_BYTES = 48

    def __init__(self, limit_bytes: int, advice: str) -> None:
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes
        self._advice = advice

    def spend(self, size_bytes: int) -> None:
        """Count a part in; raises StateTooLarge when the answer would not fit into a message."""
        self._left_bytes -= size_bytes + self._OVERHEAD_BYTES
        if self._left_bytes < 0:
            raise StateTooLarge(
                f"the answer is larger than {self._limit_bytes} bytes; {self._advice}",
                limit_bytes=self._limit_bytes,
            )


def _identity_of_stream(scope: Scope, cutoff: Cutoff, request: pb.StreamEventsRequest) -> dict[str, Any]:
    """What a resume token is bound to."""
    return {
        "tenant_id": scope.tenant_id,
        "organization_id": scope.organization_id,
        "execution_id": scope.execution_id,
        "event_id": cutoff.event_id,
        "time": None if cutoff.time is None else cutoff.time.isoformat(),
        "after_event_id": request.after_event_id,
        "follow": request.follow,
    }
