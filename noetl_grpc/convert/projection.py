"""Answers of ProjectionService."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from noetlpb.v1 import projection_pb2 as pb

from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.core.envelope import Problem
from noetl_grpc.core.parking import DeadEvent
from noetl_grpc.core.retention import Policy, make_policy


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
