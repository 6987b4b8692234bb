"""The gRPC service in front of NoETL's event log; this is what a program that calls it imports."""

from noetl_grpc.client import Consumption, NoetlClient, Release, Tls
from noetl_grpc.client.events import EventEnvelope, NativeEvent
from noetl_grpc.client.outbox import DeadOutboxFilter, OutboxFailure, OutboxMessage, OutboxOutcome, OutboxRow
from noetl_grpc.client.projection import EventKey, ProjectionCheck, PurgePolicy
from noetl_grpc.client.replay import Cutoff
from noetl_grpc.client.state import FoldRules, ReplayedState, ReplayProjection
from noetl_grpc.client.subscription import Subscription, SubscriptionState
from noetl_grpc.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    NoetlError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "Aborted",
    "Consumption",
    "Cutoff",
    "DeadOutboxFilter",
    "DeadlineExceeded",
    "EventEnvelope",
    "EventKey",
    "FailedPrecondition",
    "FoldRules",
    "Internal",
    "InvalidRequest",
    "NativeEvent",
    "NoetlClient",
    "NoetlError",
    "NotFound",
    "OutboxFailure",
    "OutboxMessage",
    "OutboxOutcome",
    "OutboxRow",
    "PermissionDenied",
    "ProjectionCheck",
    "PurgePolicy",
    "Release",
    "ReplayProjection",
    "ReplayedState",
    "ResourceExhausted",
    "Subscription",
    "SubscriptionState",
    "Tls",
    "Unauthenticated",
    "Unavailable",
]
