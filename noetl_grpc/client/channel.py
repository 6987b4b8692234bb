"""The way to the server: one channel, the token, deadlines, retries, and errors as our exceptions."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from noetl_grpc.errors import Internal, NoetlError, Overloaded, Unauthenticated, Unavailable
from noetl_grpc.status import from_rpc_error
from noetl_grpc.tracing import outgoing

Request = TypeVar("Request")
Response = TypeVar("Response")

#: How long an ordinary call may take.
CALL_SECONDS = 30.0
#: How long a call may take that folds, deletes or compares a lot.
LONG_CALL_SECONDS = 600.0

MESSAGE_BYTES_MAX = 64 * 1024 * 1024

#: A second run of these could do harm or lie about the first one, so only the caller may repeat them. gRPC itself still
#: repeats a call that certainly never reached a server.
NOT_REPEATABLE = {
    "noetlpb.v1.OutboxService": {
        "ClaimOutboxBatch",
        "MarkOutboxFailed",
        "MarkOutboxFailedBatch",
        "ConsumeOutbox",
    },
}

#: These may be sent again when a server went away. The lifecycle RPCs are among them because the client always gives
#: them a request_id.
REPEATABLE = {
    "noetlpb.v1.OutboxService": {
        "EnqueueOutbox",
        "MarkOutboxPublished",
        "ExtendOutboxLease",
        "ReleaseOutboxLease",
        "CountOutboxPending",
        "GetOutboxStats",
        "ListDeadOutboxRows",
        "RequeueDeadOutboxRows",
    },
    "noetlpb.v1.SubscriptionService": {
        "RegisterSubscription",
        "ActivateSubscription",
        "PauseSubscription",
        "ResumeSubscription",
        "DrainSubscription",
        "DeactivateSubscription",
        "GetSubscription",
        "ListSubscriptions",
        "ListSubscriptionEvents",
        "WatchSubscriptions",
        "HeartbeatSubscription",
    },
    "noetlpb.v1.ReplayService": {"ReplayState", "StreamEvents", "GetEvent", "DiffReplay", "ExplainReplay"},
    "noetlpb.v1.ProjectionService": {
        "ProjectEvents",
        "MaterializeEvents",
        "AdvanceProjections",
        "GetProjection",
        "WaitForProjection",
        "VerifyProjections",
        "PurgeStale",
        "ListDeadEvents",
        "RetryDeadEvents",
    },
    "noetlpb.v1.OperationsService": {
        "GetServerInfo",
        "GetTailerStatus",
        "GetServerMetrics",
        "ReconcileStream",
    },
}


@dataclass(frozen=True, slots=True)
class Tls:
    """How to trust the server, and how it may trust us. Everything is PEM text."""

    #: Authorities that sign the server's certificate; None is the system's.
    authorities: bytes | None = None
    #: Our own certificate and its key, where the server asks for one.
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    #: The name to expect in the server's certificate when it is not the address's.
    server_name: str = ""


class FileToken:
    """A token in a file. It is read again when the file changes, so that a rotated secret needs no restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._token = ""

    def __call__(self) -> str:
        try:
            status = self._path.stat()
            if (status.st_mtime_ns, status.st_ino) != self._seen:
                self._token = self._path.read_text().strip()
                self._seen = (status.st_mtime_ns, status.st_ino)
        except (OSError, UnicodeDecodeError) as error:
            # One that is just being replaced will be back; until then the token that we have may do.
            if self._seen is None:
                raise Unauthenticated(
                    f"the token file {self._path} can't be read", reason="TOKEN_MISSING"
                ) from error
        return self._token


def service_config() -> str:
    """gRPC's own retries, with its jitter: only where a repeat is harmless, only when the server was away."""
    return json.dumps(
        {
            "loadBalancingConfig": [{"round_robin": {}}],
            "methodConfig": [
                {
                    "name": [
                        {"service": service, "method": method}
                        for service, methods in REPEATABLE.items()
                        for method in sorted(methods)
                    ],
                    "retryPolicy": {
                        "maxAttempts": 5,
                        "initialBackoff": "0.1s",
                        "maxBackoff": "2s",
                        "backoffMultiplier": 2.0,
                        # A server that stops also cancels what it has not begun. Our own cancelling is never retried.
                        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                    },
                }
            ],
        }
    )


def channel_options() -> list[tuple[str, Any]]:
    """What gRPC's core is told. It ignores a name that it does not know."""
    return [
        ("grpc.service_config", service_config()),
        ("grpc.enable_retries", 1),
        # A batch must fit, or gRPC gives up the right to send it again.
        ("grpc.per_rpc_retry_buffer_size", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # Clients of one process would otherwise share a connection and each other's back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel that keeps itself alive through load balancers and finds a restarted server soon."""
    options = channel_options()
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.authorities, private_key=tls.key, certificate_chain=tls.certificate
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


class Line:
    """What every service's client calls through."""

    def __init__(
        self, channel: grpc.aio.Channel, *, token: Callable[[], str], timeout_seconds: float
    ) -> None:
        self.channel = channel
        self._token = token
        self._timeout_seconds = timeout_seconds

    def metadata(self) -> Sequence[tuple[str, str]]:
        """What goes with every call."""
        token = self._token()
        if not (token.isascii() and token.isprintable()):
            # gRPC would fail on it without a word about the token.
            raise Unauthenticated(
                "the token has characters that can't be sent; expected one line of printable ASCII",
                reason="TOKEN_MALFORMED",
            )
        return (*((("authorization", f"Bearer {token}"),) if token else ()), *outgoing())

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout: float | None = None,
    ) -> Response:
        """One question, one answer, within the deadline."""
        try:
            return await method(request, timeout=timeout or self._timeout_seconds, metadata=self.metadata())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def pages(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Any, Any],
        request: Any,
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[Any]:
        """Every page of a list."""
        while True:
            page = await self.call(method, request, timeout=timeout)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        opened: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Response]:
        """The answers of one stream, until it ends; `opened` is called when a server has taken it up."""
        call = method(request, metadata=self.metadata())
        try:
            await call.wait_for_connection()
            opened()
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def resumed(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Any, Any],
        request: Any,
        *,
        until_end: bool = False,
    ) -> AsyncIterator[Any]:
        """The answers of a stream that is opened again, where it was left, for as long as the server can come back.

        Goes on for ever, or until the server ends it well if that is how such a stream ends. A server that was never
        there is an error, as it is for a call.
        """
        pause = Pause()
        reached = asyncio.Event()
        while True:
            try:
                async for response in self.stream(method, request, reached.set):
                    yield response
                    request.resume_token = response.resume_token
                    pause.reset()
                if until_end:
                    return
            except NoetlError as error:
                if not reached.is_set() or not can_come_back(error):
                    raise
                request.resume_token = error.metadata.get("resume_token", request.resume_token)
            await pause.wait()


class Pause:
    """Ever longer waits between tries, each of them with jitter so that clients do not come back all at once."""

    def __init__(self, *, first_seconds: float = 0.1, longest_seconds: float = 5.0) -> None:
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._next_seconds = first_seconds

    def reset(self) -> None:
        """All is well again."""
        self._next_seconds = self._first_seconds

    async def wait(self) -> None:
        await asyncio.sleep(self._next_seconds * random.uniform(0.5, 1.0))
        self._next_seconds = min(self._next_seconds * 2, self._longest_seconds)


def can_come_back(error: NoetlError) -> bool:
    """Whether trying again later may help: the server is away, going away or overloaded."""
    if isinstance(error, Unavailable):
        return error.reason != "AUTH_NOT_CONFIGURED"
    if isinstance(error, Internal):
        # Ours names an entry of the server's log. Without that gRPC itself says that a connection broke oddly, as when
        # a message is written just while the other side ends the stream.
        return not error.metadata
    return isinstance(error, Overloaded)
