"""Writing events, the read model, and what could not be stored."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from noetlpb.v1 import event_pb2
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc

from noetl_grpc.client.channel import CALL_SECONDS, LONG_CALL_SECONDS, Line
from noetl_grpc.client.events import EventEnvelope, NativeEvent
from noetl_grpc.client.mapping import Id, duration, from_pb, to_pb
from noetl_grpc.client.state import ReplayedState

#: The longest that one WaitForProjection may take; longer waits ask again.
WAIT_SECONDS_MAX = 60.0


class ProjectionCheck(StrEnum):
    """How a snapshot compares with the log."""

    UNSPECIFIED = "UNSPECIFIED"
    SAME = "SAME"
    DIFFERENT = "DIFFERENT"
    MISSING = "MISSING"
    STALE = "STALE"


@dataclass(frozen=True, slots=True)
class RejectedEvent:
    """An event that was not stored, and why."""

    index: int
    event_id: Id
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class EventConflict:
    """An event whose key is stored already with other content."""

    index: int
    event_id: Id


@dataclass(frozen=True, slots=True)
class Projected:
    """What became of a batch of events."""

    projected: int
    duplicates: int
    rejected: tuple[RejectedEvent, ...]
    conflicts: tuple[EventConflict, ...]


@dataclass(frozen=True, slots=True)
class Materialized:
    """What became of a batch of workers' events."""

    materialized: int
    duplicates: int
    rejected: tuple[RejectedEvent, ...]


@dataclass(frozen=True, slots=True)
class AdvancedProjection:
    """An execution whose snapshot is up to date."""

    execution_id: Id
    #: The highest event_id folded.
    version: Id
    events: int
    changed: bool
    rebuilt: bool


@dataclass(frozen=True, slots=True)
class FailedAdvance:
    """An execution that could not be advanced."""

    execution_id: Id
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Advanced:
    """Every execution that was asked for is in one of the two."""

    advanced: tuple[AdvancedProjection, ...]
    failed: tuple[FailedAdvance, ...]


@dataclass(frozen=True, slots=True)
class Projection:
    """The saved snapshot of an execution."""

    state: ReplayedState
    #: The highest event_id folded.
    version: Id
    event_count: int
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Waited:
    """Whether that very event is in the snapshot."""

    included: bool
    #: The snapshot's version; 0 when there is none.
    version: Id


@dataclass(frozen=True, slots=True)
class ProjectionVerification:
    """How one execution's snapshot was found, before any repair."""

    execution_id: Id
    outcome: ProjectionCheck
    stored_checksum: str
    log_checksum: str
    repaired: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgePolicy:
    """What counts as old. None takes the server's default, 0 or less skips."""

    command_retention_days: int | None = None
    runtime_stale_minutes: int | None = None
    event_retention_days: int | None = None
    outbox_retention_days: int | None = None


@dataclass(frozen=True, slots=True)
class KeptPartition:
    """A partition of events that stays, and why."""

    partition: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Purged:
    """What was deleted; of a dry run, what would be."""

    commands_purged: int
    runtime_purged: int
    outbox_purged: int
    #: Partitions, not events.
    events_purged: int
    event_partitions_dropped: tuple[str, ...]
    partitions_kept: tuple[KeptPartition, ...]


@dataclass(frozen=True, slots=True)
class DeadEvent:
    """An event that is parked."""

    execution_id: Id
    event_id: Id
    catalog_id: Id | None
    event_type: str | None
    node_name: str | None
    reason: str
    attempts: int
    last_error: str | None
    parked_by: str
    parked_at: datetime
    payload_json: str | None


@dataclass(frozen=True, slots=True)
class EventKey:
    """The key of an event."""

    execution_id: Id
    event_id: Id


@dataclass(frozen=True, slots=True)
class FailedRetry:
    """A parked event that still can't be stored."""

    execution_id: Id
    event_id: Id
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of parked events."""

    stored: int
    duplicates: int
    failed: tuple[FailedRetry, ...]


class ProjectionClient:
    """noetlpb.v1.ProjectionService."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._stub = rpc.ProjectionServiceStub(line.channel)

    async def project_events(
        self,
        events: Iterable[EventEnvelope],
        *,
        enqueue_subject: str | None = None,
        timeout: float | None = None,
    ) -> Projected:
        """Store events; safe to repeat. Look at `rejected`: one bad event does not stop the others.

        With `enqueue_subject` (empty leaves it to the publisher) what is stored also becomes outbox rows.
        """
        enqueue = None if enqueue_subject is None else pb.EnqueueOptions(subject=enqueue_subject)
        request = pb.ProjectEventsRequest(
            events=[to_pb(event, event_pb2.EventEnvelope) for event in events], enqueue=enqueue
        )
        return from_pb(Projected, await self._line.call(self._stub.ProjectEvents, request, timeout=timeout))

    async def materialize_events(
        self,
        events: Iterable[NativeEvent],
        *,
        request_id: str = "",
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> Materialized:
        """Normalise and store workers' own events. Give a `request_id` to be able to repeat the call later."""
        request = pb.MaterializeEventsRequest(
            events=[to_pb(event, event_pb2.NativeEvent) for event in events],
            # Without one gRPC's own retry would store events without ids twice.
            request_id=request_id or uuid.uuid4().hex,
            tenant_id=tenant_id,
            organization_id=organization_id,
        )
        answer = await self._line.call(self._stub.MaterializeEvents, request, timeout=timeout)
        return from_pb(Materialized, answer)

    async def advance(
        self,
        execution_ids: Iterable[int],
        *,
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> Advanced:
        """Fold new events and save the snapshots."""
        request = pb.AdvanceProjectionsRequest(
            execution_ids=execution_ids, tenant_id=tenant_id, organization_id=organization_id
        )
        answer = await self._line.call(
            self._stub.AdvanceProjections, request, timeout=timeout or LONG_CALL_SECONDS
        )
        return from_pb(Advanced, answer)

    async def get(
        self,
        execution_id: int,
        *,
        tenant_id: str = "",
        organization_id: str = "",
        timeout: float | None = None,
    ) -> Projection:
        """The saved snapshot of an execution."""
        request = pb.GetProjectionRequest(
            execution_id=execution_id, tenant_id=tenant_id, organization_id=organization_id
        )
        return from_pb(Projection, await self._line.call(self._stub.GetProjection, request, timeout=timeout))

    async def wait_for_projection(
        self,
        execution_id: int,
        event_id: int,
        *,
        wait_seconds: float = 30.0,
        tenant_id: str = "",
        organization_id: str = "",
    ) -> Waited:
        """Wait until the snapshot includes a certain event: read your own writes."""
        clock = asyncio.get_running_loop().time
        end = clock() + wait_seconds
        while True:
            part_seconds = max(0.001, min(WAIT_SECONDS_MAX, end - clock()))
            request = pb.WaitForProjectionRequest(
                execution_id=execution_id,
                event_id=event_id,
                timeout=duration(part_seconds),
                tenant_id=tenant_id,
                organization_id=organization_id,
            )
            answer = await self._line.call(
                self._stub.WaitForProjection, request, timeout=part_seconds + CALL_SECONDS
            )
            if answer.included or clock() >= end:
                return from_pb(Waited, answer)

    async def verify(
        self,
        execution_ids: Iterable[int] = (),
        *,
        repair: bool = False,
        page_size: int = 0,
        tenant_id: str = "",
        organization_id: str = "",
        on_total: Callable[[int], None] | None = None,
    ) -> AsyncIterator[ProjectionVerification]:
        """Compare snapshots with the log, of all executions unless some are named; with `repair` mend them.

        `on_total` is told, once and before the first result, how many executions there are.
        """
        wanted = list(execution_ids)
        request = pb.VerifyProjectionsRequest(
            execution_ids=wanted,
            repair=repair,
            page_size=page_size,
            tenant_id=tenant_id,
            organization_id=organization_id,
            count_executions=on_total is not None and not wanted,
        )
        async for page in self._line.pages(self._stub.VerifyProjections, request, timeout=LONG_CALL_SECONDS):
            if on_total is not None:
                on_total(page.executions if page.HasField("executions") else len(page.results))
                on_total, request.count_executions = None, False
            for result in page.results:
                yield from_pb(ProjectionVerification, result)

    async def purge(
        self, policy: PurgePolicy = PurgePolicy(), *, dry_run: bool = False, timeout: float | None = None
    ) -> Purged:
        """Delete what is older than the policy."""
        request = pb.PurgeStaleRequest(policy=to_pb(policy, pb.PurgePolicy), dry_run=dry_run)
        answer = await self._line.call(self._stub.PurgeStale, request, timeout=timeout or LONG_CALL_SECONDS)
        return from_pb(Purged, answer)

    async def dead_events(
        self, *, include_payload: bool = False, page_size: int = 0
    ) -> AsyncIterator[DeadEvent]:
        """Every parked event that is not resolved yet, page after page."""
        request = pb.ListDeadEventsRequest(include_payload=include_payload, page_size=page_size)
        async for page in self._line.pages(self._stub.ListDeadEvents, request):
            for event in page.events:
                yield from_pb(DeadEvent, event)

    async def retry_dead(
        self, keys: Iterable[EventKey] = (), *, all: bool = False, timeout: float | None = None
    ) -> Retried:
        """Try to store parked events again: those named, or `all`."""
        request = pb.RetryDeadEventsRequest(keys=[to_pb(key, pb.EventKey) for key in keys], all=all)
        answer = await self._line.call(
            self._stub.RetryDeadEvents, request, timeout=timeout or LONG_CALL_SECONDS
        )
        return from_pb(Retried, answer)
