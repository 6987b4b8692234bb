"""Answers of ProjectionService."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from noetlpb.v1 import projection_pb2 as pb

from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.convert.replay import state_to_pb
from noetl_grpc.core.access import Tenant, tenant_named
from noetl_grpc.core.checksums import Steps
from noetl_grpc.core.envelope import Problem
from noetl_grpc.core.numbers import all_warnings
from noetl_grpc.core.parking import DeadEvent
from noetl_grpc.core.projections import Advanced, Check, NotAdvanced, Projection, Verified
from noetl_grpc.core.retention import Policy, make_policy
from noetl_grpc.core.snapshots import RULES
from noetl_grpc.errors import InvalidRequest

WAIT_SECONDS_DEFAULT = 30.0
WAIT_SECONDS_MAX = 60

_CHECKS = {
    Check.SAME: pb.PROJECTION_CHECK_SAME,
    Check.DIFFERENT: pb.PROJECTION_CHECK_DIFFERENT,
    Check.MISSING: pb.PROJECTION_CHECK_MISSING,
    Check.STALE: pb.PROJECTION_CHECK_STALE,
}


def rejected_to_pb(problems: Mapping[int, Problem], event_ids: Sequence[int]) -> list[pb.RejectedEvent]:
    """The events that were not stored, by their place in the request."""
    return [
        pb.RejectedEvent(index=row, event_id=event_ids[row], reason=problem.reason, detail=problem.detail)
        for row, problem in sorted(problems.items())
    ]


def policy_from_pb(message: pb.PurgePolicy) -> Policy:
    """What counts as old; raises InvalidRequest."""
    return make_policy(**{field.name: value for field, value in message.ListFields()})


def dead_event_to_pb(event: DeadEvent) -> pb.DeadEvent:
    """A parked event."""
    return pb.DeadEvent(
        execution_id=event.execution_id,
        event_id=event.event_id,
        catalog_id=event.catalog_id,
        event_type=event.event_type,
        node_name=event.node_name,
        reason=event.reason,
        attempts=event.attempts,
        last_error=event.last_error,
        parked_by=event.parked_by,
        parked_at=timestamp_to_pb(event.parked_at),
        payload_json=event.payload_json,
    )


class TenantRequest(Protocol):
    """A request that names a tenant."""

    tenant_id: str
    organization_id: str


def tenant_from_pb(request: TenantRequest) -> Tenant:
    """The tenant that a request means."""
    tenant = tenant_named(request.tenant_id, request.organization_id)
    for name, value in (("tenant_id", tenant.tenant_id), ("organization_id", tenant.organization_id)):
        if "\0" in value:
            raise InvalidRequest(name, "must not hold the character NUL")
    return tenant


def wait_seconds_from_pb(request: pb.WaitForProjectionRequest) -> float:
    """How long a caller wants to wait; unset and 0 are the default."""
    seconds = request.timeout.seconds + request.timeout.nanos / 1e9
    if not 0 <= seconds <= WAIT_SECONDS_MAX:
        raise InvalidRequest("timeout", f"must be from 0 to {WAIT_SECONDS_MAX} s")
    return seconds or WAIT_SECONDS_DEFAULT


def advance_to_pb(outcomes: Iterable[Advanced | NotAdvanced]) -> pb.AdvanceProjectionsResponse:
    """Both lists, each in the order of the request."""
    response = pb.AdvanceProjectionsResponse()
    for outcome in outcomes:
        if isinstance(outcome, Advanced):
            response.advanced.add(
                execution_id=outcome.execution_id,
                version=outcome.version,
                events=outcome.events,
                changed=outcome.changed,
                rebuilt=outcome.rebuilt,
            )
        else:
            response.failed.add(
                execution_id=outcome.execution_id, reason=outcome.reason, detail=outcome.detail
            )
    return response


def projection_to_pb(projection: Projection) -> Steps[pb.GetProjectionResponse]:
    """A stored state as a replay would answer it."""
    snapshot = projection.snapshot
    warnings = all_warnings(snapshot.warnings, snapshot.warnings_left_out)
    state = yield from state_to_pb(snapshot.state, RULES, projection.checksums, warnings)
    return pb.GetProjectionResponse(
        state=state,
        version=snapshot.version,
        event_count=snapshot.event_count,
        updated_at=timestamp_to_pb(projection.updated_at),
    )


def verified_to_pb(results: Iterable[Verified]) -> pb.VerifyProjectionsResponse:
    """What each comparison found."""
    return pb.VerifyProjectionsResponse(
        results=[
            pb.ProjectionVerification(
                execution_id=result.execution_id,
                outcome=_CHECKS[result.outcome],
                stored_checksum=result.stored_checksum,
                log_checksum=result.log_checksum,
                repaired=result.repaired,
            )
            for result in results
        ]
    )
