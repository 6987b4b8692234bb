"""Our exceptions. What a caller should do decides the class; the reason says which case it was.

NoetlError
├── InvalidRequest         fix the request
├── Unauthenticated        fix the credentials
├── PermissionDenied       use another token
├── NotFound               stop
├── FailedPrecondition     look at the state
│   ├── IllegalTransition
│   ├── NotASubscription
│   └── EventMalformed
├── Aborted                read again, then retry the whole operation
│   ├── EtagMismatch
│   ├── LeaseLost
│   ├── LeaseHeld
│   └── Conflict
├── ResourceExhausted      send less, or later
│   ├── Overloaded
│   ├── RequestTooLarge
│   └── StateTooLarge
├── Unavailable            retry with back-off
│   ├── DatabaseUnavailable
│   ├── BrokerUnavailable
│   ├── AuthNotConfigured
│   └── ShuttingDown
├── DeadlineExceeded       allow more time
└── Internal               report it: a bug

SettingsError and SchemaError stop the process before it serves anything; they have no status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class NoetlError(Exception):
    """Something a caller can be told, with a machine-readable reason and every value the text mentions."""

    reason: str = "INTERNAL"
    #: How long a caller should wait before it tries again; None where a retry can't help.
    retry_after_seconds: float | None = None

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, object] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        if retry_after_seconds is not None:
            self.retry_after_seconds = retry_after_seconds
        self.metadata: dict[str, str] = {key: str(value) for key, value in (metadata or {}).items()}


class InvalidRequest(NoetlError):
    """A field is missing, malformed or out of bounds."""

    reason = "FIELD_INVALID"

    def __init__(self, field: str, rule: str, *more: tuple[str, str]) -> None:
        self.violations: Sequence[tuple[str, str]] = ((field, rule), *more)
        super().__init__(
            "; ".join(f"{name} {text}" for name, text in self.violations),
            metadata={"field": field, "rule": rule},
        )


class Unauthenticated(NoetlError):
    """The token is absent, malformed or unknown."""

    reason = "TOKEN_INVALID"


class PermissionDenied(NoetlError):
    """The token is known and not allowed here."""

    reason = "SCOPE_MISSING"


class NotFound(NoetlError):
    """The thing that was asked for does not exist; the reason names its kind."""

    reason = "NOT_FOUND"


class FailedPrecondition(NoetlError):
    """The present state forbids the operation."""

    reason = "FAILED_PRECONDITION"


class IllegalTransition(FailedPrecondition):
    """The lifecycle forbids the action in this state."""

    reason = "ILLEGAL_TRANSITION"


class NotASubscription(FailedPrecondition):
    """The catalog entry is of another kind."""

    reason = "NOT_A_SUBSCRIPTION"


class EventMalformed(FailedPrecondition):
    """An event can't be folded under the rules that were asked for."""

    reason = "EVENT_MALFORMED"

    def __init__(self, message: str, *, event_id: int, path: str) -> None:
        super().__init__(message, metadata={"event_id": event_id, "path": path})
        self.event_id = event_id
        self.path = path


class Aborted(NoetlError):
    """Somebody else was faster."""

    reason = "CONFLICT"


class EtagMismatch(Aborted):
    """The resource has changed since it was read."""

    reason = "ETAG_MISMATCH"


class LeaseLost(Aborted):
    """The claim token no longer holds the row."""

    reason = "LEASE_LOST"


class LeaseHeld(Aborted):
    """Another holder's lease is still alive."""

    reason = "LEASE_HELD"


class Conflict(Aborted):
    """A serialization failure or a deadlock that our own retries did not cure."""

    reason = "CONFLICT"
    retry_after_seconds = 0.1


class ResourceExhausted(NoetlError):
    """A limit was reached."""

    reason = "OVERLOADED"


class Overloaded(ResourceExhausted):
    """No connection in time, too many streams, or a reader that is too slow."""

    reason = "OVERLOADED"
    retry_after_seconds = 1.0


class RequestTooLarge(ResourceExhausted):
    """The request is above the limit."""

    reason = "REQUEST_TOO_LARGE"

    def __init__(self, message: str, *, limit_bytes: int) -> None:
        super().__init__(message, metadata={"limit_bytes": limit_bytes})


class StateTooLarge(ResourceExhausted):
    """The state does not fit into one message."""

    reason = "STATE_TOO_LARGE"

    def __init__(self, message: str, *, limit_bytes: int) -> None:
        super().__init__(message, metadata={"limit_bytes": limit_bytes})


class Unavailable(NoetlError):
    """Something we need is out of reach just now."""

    reason = "UNAVAILABLE"
    retry_after_seconds: float | None = 1.0


class DatabaseUnavailable(Unavailable):
    """The database is out of reach."""

    reason = "DATABASE_UNAVAILABLE"


class BrokerUnavailable(Unavailable):
    """The broker is out of reach."""

    reason = "BROKER_UNAVAILABLE"


class AuthNotConfigured(Unavailable):
    """The server has neither an internal token nor a tokens file, so it lets nobody in."""

    reason = "AUTH_NOT_CONFIGURED"
    retry_after_seconds = None


class ShuttingDown(Unavailable):
    """The server is going away; another one may take the call."""

    reason = "SHUTTING_DOWN"


class DeadlineExceeded(NoetlError):
    """The caller's deadline passed first."""

    reason = "DEADLINE_EXCEEDED"


class Internal(NoetlError):
    """A bug; the id in the metadata stands beside the traceback in the server's log."""

    reason = "INTERNAL"


class SettingsError(Exception):
    """A setting that can't be used; names the variable and what is accepted."""

    exit_code: ClassVar[int] = 2


class SchemaError(Exception):
    """The database's schema can't be worked with; says which command mends it."""
