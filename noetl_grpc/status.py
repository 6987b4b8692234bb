"""The error ↔ gRPC status table. The server reads it forwards, the client backwards.

An answer carries `google.rpc` details: ErrorInfo always, BadRequest with each field violation, RetryInfo where
a retry can help. It never carries SQL, host names, tokens or tracebacks.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from noetl_grpc import errors

DOMAIN = "noetl_grpc"

#: Trailing metadata keys are limited in size by most peers, so the text of an error is too.
MESSAGE_CHARACTERS_MAX = 2000
TOKEN_CHARACTERS_MAX = 4000

CODES: dict[type[errors.NoetlError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IllegalTransition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotASubscription: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EventMalformed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.EtagMismatch: grpc.StatusCode.ABORTED,
    errors.LeaseLost: grpc.StatusCode.ABORTED,
    errors.LeaseHeld: grpc.StatusCode.ABORTED,
    errors.Conflict: grpc.StatusCode.ABORTED,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StateTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DatabaseUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.BrokerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.AuthNotConfigured: grpc.StatusCode.UNAVAILABLE,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}

#: Which class a client raises: by reason where it names one, else by code.
_CLASS_OF_REASON: dict[str, type[errors.NoetlError]] = {cls.reason: cls for cls in CODES}
_CLASS_OF_CODE: dict[grpc.StatusCode, type[errors.NoetlError]] = {}
for _cls, _code in CODES.items():
    _CLASS_OF_CODE.setdefault(_code, _cls)


def code_of(error: errors.NoetlError) -> grpc.StatusCode:
    """The status code that answers this error."""
    return CODES[type(error)]


def to_status(error: errors.NoetlError) -> status_pb2.Status:
    """The whole answer: code, text and details."""
    message = error.message[:MESSAGE_CHARACTERS_MAX]
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in error.metadata.items():
        if key != "resume_token":
            info.metadata[key] = value[:MESSAGE_CHARACTERS_MAX]
        elif len(value) <= TOKEN_CHARACTERS_MAX:
            # Whole or not at all; the caller has the one of its last message too.
            info.metadata[key] = value
    _pack(status, info)
    if isinstance(error, errors.InvalidRequest):
        _pack(
            status,
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=field, description=rule)
                    for field, rule in error.violations[:100]
                ]
            ),
        )
    if error.retry_after_seconds is not None:
        _pack(status, error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_seconds)))
    return status


def from_rpc_error(rpc_error: grpc.aio.AioRpcError) -> errors.NoetlError:
    """What a server of ours (or the channel itself) said, as one of our exceptions."""
    message = rpc_error.details() or rpc_error.code().name.lower().replace("_", " ")
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    status = _status_of(rpc_error)
    has_retry = False
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            has_retry = detail.Unpack(retry)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
    by_code = _CLASS_OF_CODE.get(rpc_error.code(), errors.NoetlError)
    cls = _CLASS_OF_REASON.get(info.reason, by_code)
    if CODES.get(cls) is not rpc_error.code():
        cls = by_code
    error = cls.__new__(cls)
    errors.NoetlError.__init__(
        error,
        message,
        reason=info.reason or rpc_error.code().name,
        metadata=dict(info.metadata),
        retry_after_seconds=retry.retry_delay.ToTimedelta().total_seconds() if has_retry else None,
    )
    if isinstance(error, errors.InvalidRequest):
        error.violations = tuple((v.field, v.description) for v in bad_request.field_violations)
    if isinstance(error, errors.EventMalformed):
        error.event_id = int(info.metadata.get("event_id", "0"))
        error.path = info.metadata.get("path", "")
    return error


def _status_of(rpc_error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in rpc_error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return None


def details_metadata(status: status_pb2.Status) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata in which the details travel."""
    return tuple(
        (key, value if isinstance(value, bytes) else value.encode())
        for key, value in rpc_status.to_status(status).trailing_metadata
    )


def _pack(
    status: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
