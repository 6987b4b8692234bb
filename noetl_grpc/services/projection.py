"""ProjectionService: events into the log, those that could not go there, and what is old out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized

from noetlpb.v1 import event_pb2
from noetlpb.v1 import projection_pb2 as pb
from noetlpb.v1 import projection_pb2_grpc as rpc

from noetl_grpc import calls
from noetl_grpc.calls import Context
from noetl_grpc.convert.events import batch_from_pb, native_from_pb, normalised_to_pb, unfit_to_pb
from noetl_grpc.convert.parked import event_to_json, native_to_json
from noetl_grpc.convert.projection import (
    advance_to_pb,
    dead_event_to_pb,
    policy_from_pb,
    projection_to_pb,
    rejected_to_pb,
    tenant_from_pb,
    verified_to_pb,
    wait_seconds_from_pb,
)
from noetl_grpc.convert.replay import scope_from_pb
from noetl_grpc.core.envelope import Batch, Problem, examine
from noetl_grpc.core.normalise import normalise
from noetl_grpc.core.paging import decode_token, encode_token, page_size
from noetl_grpc.errors import InvalidRequest
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.budget import Budget
from noetl_grpc.services.intake import Delivery, Intake, Outcome
from noetl_grpc.services.parked import START, ParkedEvents
from noetl_grpc.services.readmodel import ReadModel
from noetl_grpc.services.waiters import Waiters
from noetl_grpc.storage.pool import Shards
from noetl_grpc.storage.projections import Awaited
from noetl_grpc.storage.replay import in_steps
from noetl_grpc.storage.retention import purge

BATCH_ITEMS_MAX = 10_000
EXECUTION_IDS_MAX = 1000
REQUEST_ID_CHARACTERS_MAX = 128
#: Events that are read before other calls get a turn.
SLICE_ROWS = 500
#: What the batches being written may weigh together: their bytes, and something for each event beside them.
WEIGHT_TOTAL = 64 * 1024 * 1024
EVENT_WEIGHT = 1024


class ProjectionServicer(rpc.ProjectionServiceServicer):
    """Serves noetlpb.v1.ProjectionService."""

    def __init__(
        self,
        shards: Shards,
        *,
        intake: Intake,
        read_model: ReadModel,
        waiters: Waiters,
        next_id: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        self._shards = shards
        self._intake = intake
        self._parked = ParkedEvents(shards, intake)
        self._read_model = read_model
        self._waiters = waiters
        self._next_id = next_id
        self._metrics = metrics
        self._budget = Budget(WEIGHT_TOTAL)

    async def ProjectEvents(
        self, request: pb.ProjectEventsRequest, context: Context
    ) -> pb.ProjectEventsResponse:
        if not request.events:
            raise InvalidRequest("events", "must not be empty")
        _check_batch(request.events)
        _check_text("enqueue.subject", request.enqueue.subject)
        async with self._budget.spend(request.ByteSize() + EVENT_WEIGHT * len(request.events)):
            batch, problems = await _read(request.events)
            outcome = await self._intake.take(
                Delivery(
                    batch=batch,
                    problems=problems,
                    payload_of=lambda row: event_to_json(request.events[row]),
                    parked_by="project",
                    enqueues=request.HasField("enqueue"),
                    subject=request.enqueue.subject or None,
                    traceparent=calls.current().traceparent,
                    compares=True,
                )
            )
        self._metrics.events_projected.inc(outcome.stored)
        self._metrics.events_projected_duplicates.inc(outcome.duplicates)
        self._metrics.outbox_enqueued.inc(outcome.enqueued)
        self._count_rejected(outcome)
        event_ids = batch["event_id"]
        return pb.ProjectEventsResponse(
            projected=outcome.stored,
            duplicates=outcome.duplicates,
            rejected=rejected_to_pb(outcome.rejected, event_ids),
            conflicts=[pb.EventConflict(index=row, event_id=event_ids[row]) for row in outcome.conflicts],
        )

    async def MaterializeEvents(
        self, request: pb.MaterializeEventsRequest, context: Context
    ) -> pb.MaterializeEventsResponse:
        _check_batch(request.events)
        _check_text("request_id", request.request_id, length_max=REQUEST_ID_CHARACTERS_MAX)
        _check_text("tenant_id", request.tenant_id)
        _check_text("organization_id", request.organization_id)
        if not request.events:
            return pb.MaterializeEventsResponse()
        async with self._budget.spend(request.ByteSize() + EVENT_WEIGHT * len(request.events)):
            messages, unfit = await self._normalise(request)
            batch, problems = await _read(messages)
            outcome = await self._intake.take(
                Delivery(
                    batch=batch,
                    problems={**problems, **unfit},
                    payload_of=lambda row: (
                        _parked_json(request, row) if row in unfit else event_to_json(messages[row])
                    ),
                    parked_by="materialize",
                    traceparent=calls.current().traceparent,
                    keys={
                        row: messages[row].idempotency_key
                        for row, event in enumerate(request.events)
                        if not event.HasField("event_id")
                    },
                )
            )
        self._metrics.events_materialized.inc(outcome.stored)
        self._count_rejected(outcome)
        event_ids = [event.event_id for event in request.events]
        return pb.MaterializeEventsResponse(
            materialized=outcome.stored,
            duplicates=outcome.duplicates,
            rejected=rejected_to_pb(outcome.rejected, event_ids),
        )

    async def AdvanceProjections(
        self, request: pb.AdvanceProjectionsRequest, context: Context
    ) -> pb.AdvanceProjectionsResponse:
        tenant = tenant_from_pb(request)
        _check_executions(request.execution_ids)
        outcomes = await self._read_model.advance(tenant, request.execution_ids)
        self._waiters.wake()
        return advance_to_pb(outcomes)

    async def GetProjection(
        self, request: pb.GetProjectionRequest, context: Context
    ) -> pb.GetProjectionResponse:
        scope = scope_from_pb(request)
        projection = await self._read_model.get(tenant_from_pb(request), scope.execution_id)
        return await in_steps(projection_to_pb(projection))

    async def WaitForProjection(
        self, request: pb.WaitForProjectionRequest, context: Context
    ) -> pb.WaitForProjectionResponse:
        scope = scope_from_pb(request)
        if request.event_id <= 0:
            raise InvalidRequest("event_id", "must be above 0")
        seconds = wait_seconds_from_pb(request)
        tenant = tenant_from_pb(request)
        version = await self._waiters.wait(
            Awaited(tenant, scope.execution_id, request.event_id), seconds=seconds
        )
        if version is not None:
            return pb.WaitForProjectionResponse(included=True, version=version)
        return pb.WaitForProjectionResponse(
            version=await self._read_model.stored_version(tenant, scope.execution_id)
        )

    async def VerifyProjections(
        self, request: pb.VerifyProjectionsRequest, context: Context
    ) -> pb.VerifyProjectionsResponse:
        tenant = tenant_from_pb(request)
        _check_executions(request.execution_ids)
        size = page_size(request.page_size)
        if request.execution_ids:
            if request.page_token:
                raise InvalidRequest("page_token", "can't be combined with execution_ids")
            if request.count_executions:
                raise InvalidRequest("count_executions", "can't be combined with execution_ids")
            results = await self._read_model.verify(tenant, request.execution_ids, repair=request.repair)
            return verified_to_pb(results)
        filters = {"tenant": [tenant.tenant_id, tenant.organization_id], "repair": request.repair}
        place = decode_token(request.page_token, filters, shape=(int,)) or [0]
        ids = await self._read_model.executions_behind(tenant, behind=place[0], limit=size)
        results = await self._read_model.verify(tenant, ids, repair=request.repair)
        response = verified_to_pb(results)
        if request.count_executions:
            response.executions = await self._read_model.count_behind(tenant, behind=place[0])
        if len(ids) == size:
            response.next_page_token = encode_token([ids[-1]], filters)
        return response

    async def ListDeadEvents(
        self, request: pb.ListDeadEventsRequest, context: Context
    ) -> pb.ListDeadEventsResponse:
        filters = {"include_payload": request.include_payload}
        size = page_size(request.page_size)
        place = decode_token(request.page_token, filters, shape=(int, int, int)) or START
        shard, execution_id, event_id = place
        events, after = await self._parked.page(
            (shard, execution_id, event_id), size=size, with_payload=request.include_payload
        )
        return pb.ListDeadEventsResponse(
            events=[dead_event_to_pb(event) for event in events],
            next_page_token=encode_token(after, filters) if after else "",
        )

    async def RetryDeadEvents(
        self, request: pb.RetryDeadEventsRequest, context: Context
    ) -> pb.RetryDeadEventsResponse:
        if bool(request.keys) == request.all:
            raise InvalidRequest("keys", "or all must be given, and not both")
        _check_batch(request.keys, field="keys")
        for index, key in enumerate(request.keys):
            if key.execution_id < 1 or key.event_id < 1:
                raise InvalidRequest(f"keys[{index}]", "must have an execution_id and an event_id above 0")
        if request.all:
            retried = await self._parked.retry_all()
        else:
            retried = await self._parked.retry([(key.execution_id, key.event_id) for key in request.keys])
        return pb.RetryDeadEventsResponse(
            stored=retried.stored,
            duplicates=retried.duplicates,
            failed=[
                pb.FailedRetry(
                    execution_id=execution_id, event_id=event_id, reason=problem.reason, detail=problem.detail
                )
                for (execution_id, event_id), problem in sorted(retried.failed.items())
            ],
        )

    async def PurgeStale(self, request: pb.PurgeStaleRequest, context: Context) -> pb.PurgeStaleResponse:
        purged = await purge(
            self._shards,
            policy_from_pb(request.policy),
            is_dry_run=request.dry_run,
            count=lambda table, amount: self._metrics.cleanup_rows_purged.labels(table).inc(amount),
        )
        return pb.PurgeStaleResponse(
            commands_purged=purged.commands,
            runtime_purged=purged.runtimes,
            outbox_purged=purged.outbox_rows,
            events_purged=len(purged.dropped),
            event_partitions_dropped=purged.dropped,
            partitions_kept=[
                pb.KeptPartition(partition=name, reason=keep.reason, detail=keep.detail)
                for name, keep in purged.kept
            ],
        )

    async def _normalise(
        self, request: pb.MaterializeEventsRequest
    ) -> tuple[list[event_pb2.EventEnvelope], dict[int, Problem]]:
        """The events as they are stored, with a new id where they have none; and what can't be normalised."""
        messages: list[event_pb2.EventEnvelope] = []
        unfit: dict[int, Problem] = {}
        for row, event in enumerate(request.events):
            if row % SLICE_ROWS == 0:
                await asyncio.sleep(0)
            normalised = normalise(native_from_pb(event), request_id=request.request_id, index=row)
            if isinstance(normalised, Problem):
                unfit[row] = normalised
                messages.append(unfit_to_pb(event))
                continue
            message = normalised_to_pb(
                normalised, tenant_id=request.tenant_id, organization_id=request.organization_id
            )
            # In the order of the batch, because replay folds by id.
            message.event_id = message.event_id or self._next_id()
            messages.append(message)
        return messages, unfit

    def _count_rejected(self, outcome: Outcome) -> None:
        self._metrics.events_rejected.inc(len(outcome.rejected))
        self._metrics.events_parked.inc(outcome.parked)


async def _read(messages: Sequence[event_pb2.EventEnvelope]) -> tuple[Batch, dict[int, Problem]]:
    """The events by column, checked; in slices, so that a large batch does not hold up everybody else."""
    batch: Batch = {}
    problems: dict[int, Problem] = {}
    for start in range(0, len(messages), SLICE_ROWS):
        columns, timestamps = batch_from_pb(messages[start : start + SLICE_ROWS])
        problems |= {start + row: problem for row, problem in examine(columns, timestamps).items()}
        for name, values in columns.items():
            batch.setdefault(name, []).extend(values)
        await asyncio.sleep(0)
    return batch, problems


def _parked_json(request: pb.MaterializeEventsRequest, row: int) -> str:
    return native_to_json(
        request.events[row], tenant_id=request.tenant_id, organization_id=request.organization_id
    )


def _check_batch(items: Sized, *, field: str = "events") -> None:
    if len(items) > BATCH_ITEMS_MAX:
        raise InvalidRequest(
            field, f"must not hold more than {BATCH_ITEMS_MAX} items, and holds {len(items)}"
        )


def _check_executions(execution_ids: Sequence[int]) -> None:
    if len(execution_ids) > EXECUTION_IDS_MAX:
        raise InvalidRequest(
            "execution_ids", f"must not hold more than {EXECUTION_IDS_MAX}, and holds {len(execution_ids)}"
        )
    for index, execution_id in enumerate(execution_ids):
        if execution_id <= 0:
            raise InvalidRequest(f"execution_ids[{index}]", "must be above 0")


def _check_text(field: str, text: str, *, length_max: int | None = None) -> None:
    if "\0" in text:
        raise InvalidRequest(field, "must not hold the character NUL")
    if length_max is not None and len(text) > length_max:
        raise InvalidRequest(field, f"must not be longer than {length_max} characters")
