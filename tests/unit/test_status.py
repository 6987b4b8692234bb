import grpc
import pytest
from google.rpc import error_details_pb2

from noetl_grpc import errors, status


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(child) for child in cls.__subclasses__()))


def test_every_error_has_its_status() -> None:
    assert _subclasses(errors.NoetlError) - {errors.NoetlError} == set(status.CODES)


def _received(error: errors.NoetlError) -> grpc.aio.AioRpcError:
    sent = status.to_status(error)
    return grpc.aio.AioRpcError(
        status.code_of(error),
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", sent.SerializeToString())),
        details=sent.message,
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("limit", "must not be negative", ("lease", "is too long")),
        errors.NotFound(
            "subscription 4 is unknown", reason="SUBSCRIPTION_NOT_FOUND", metadata={"subscription_id": 4}
        ),
        errors.LeaseLost("the lease of row 7 is lost", metadata={"outbox_id": 7}),
        errors.Conflict("retry"),
        errors.EventMalformed("bad event", event_id=5, path="/meta"),
        errors.RequestTooLarge("too large", limit_bytes=9),
        errors.AuthNotConfigured("no token"),
        errors.ShuttingDown("bye"),
        errors.Unauthenticated("no token", reason="TOKEN_MISSING"),
    ],
)
def test_what_the_server_says_arrives_at_the_client(error: errors.NoetlError) -> None:
    received = status.from_rpc_error(_received(error))

    assert type(received) is type(error)
    assert (received.message, received.reason) == (error.message, error.reason)
    assert received.metadata == error.metadata
    assert received.retry_after_seconds == error.retry_after_seconds
    if isinstance(error, errors.InvalidRequest):
        assert isinstance(received, errors.InvalidRequest)
        assert received.violations == error.violations


def test_the_domain_is_ours() -> None:
    info = error_details_pb2.ErrorInfo()
    status.to_status(errors.Conflict("x")).details[0].Unpack(info)

    assert (info.domain, info.reason) == ("noetl_grpc", "CONFLICT")


def test_a_failure_of_the_channel_itself_is_one_of_ours_too() -> None:
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="failed to connect"
    )

    received = status.from_rpc_error(lost)

    assert isinstance(received, errors.Unavailable)
    assert received.reason == "UNAVAILABLE"


def test_a_resume_token_is_sent_whole_or_not_at_all() -> None:
    for characters in (3000, 5000):
        error = errors.Overloaded(
            "too slow", metadata={"resume_token": "t" * characters, "other": "o" * 3000}
        )

        received = status.from_rpc_error(_received(error))

        assert received.metadata.get("resume_token") == ("t" * 3000 if characters == 3000 else None)
        assert len(received.metadata["other"]) == 2000
