"""The gRPC service in front of NoETL's event log; this is what a program that calls it imports.

A name is loaded when it is first asked for: the command line lives in this package too, and should start at once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noetl_grpc.client import (
        Consumption,
        Cutoff,
        DeadOutboxFilter,
        EventEnvelope,
        EventKey,
        FoldRules,
        NativeEvent,
        NoetlClient,
        OutboxFailure,
        OutboxMessage,
        OutboxOutcome,
        OutboxRow,
        ProjectionCheck,
        PurgePolicy,
        Release,
        ReplayedState,
        ReplayProjection,
        Subscription,
        SubscriptionState,
        Tls,
    )
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
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from noetl_grpc import client, errors

        return getattr(client if hasattr(client, name) else errors, name)

    def __dir__() -> list[str]:
        return [*globals(), *__all__]


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
