"""The typed client: dataclasses out, our errors raised; knows nothing of server, storage or services."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from noetl_grpc.client.channel import CALL_SECONDS, FileToken, Line, Tls, open_channel
from noetl_grpc.client.consume import Consumption, Release
from noetl_grpc.client.events import EventEnvelope, NativeEvent
from noetl_grpc.client.operations import OperationsClient
from noetl_grpc.client.outbox import (
    DeadOutboxFilter,
    OutboxClient,
    OutboxFailure,
    OutboxMessage,
    OutboxOutcome,
    OutboxRow,
)
from noetl_grpc.client.projection import EventKey, ProjectionCheck, ProjectionClient, PurgePolicy
from noetl_grpc.client.replay import Cutoff, ReplayClient
from noetl_grpc.client.state import FoldRules, ReplayedState, ReplayProjection
from noetl_grpc.client.subscription import Subscription, SubscriptionClient, SubscriptionState
from noetl_grpc.settings import ClientSettings

__all__ = [
    "Consumption",
    "Cutoff",
    "DeadOutboxFilter",
    "EventEnvelope",
    "EventKey",
    "FoldRules",
    "NativeEvent",
    "NoetlClient",
    "OutboxFailure",
    "OutboxMessage",
    "OutboxOutcome",
    "OutboxRow",
    "ProjectionCheck",
    "PurgePolicy",
    "Release",
    "ReplayProjection",
    "ReplayedState",
    "Subscription",
    "SubscriptionState",
    "Tls",
]


class NoetlClient:
    """A connection to a server, with one object per service. Make it inside a coroutine; `async with` closes it.

    Every call has a deadline. A call that may safely be repeated is, for a few seconds, while the server is away.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | Callable[[], str] = "",
        token_file: Path | None = None,
        tls: Tls | None = None,
        timeout_seconds: float = CALL_SECONDS,
    ) -> None:
        self.address = address
        read_token = FileToken(token_file) if token_file is not None else token
        self._channel = open_channel(address, tls)
        self._line = Line(
            self._channel,
            token=read_token if callable(read_token) else lambda: read_token,
            timeout_seconds=timeout_seconds,
        )
        self.outbox = OutboxClient(self._line)
        self.subscription = SubscriptionClient(self._line)
        self.replay = ReplayClient(self._line)
        self.projection = ProjectionClient(self._line)
        self.operations = OperationsClient(self._line)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """As the environment says (NOETL_GRPC_ADDRESS, NOETL_INTERNAL_API_TOKEN, NOETL_GRPC_TLS_…).

        Where it says nothing, the server that `noetl-grpc dev` runs from this folder.
        """
        return cls.from_settings(ClientSettings.from_env() if env is None else ClientSettings.from_env(env))

    @classmethod
    def from_settings(cls, settings: ClientSettings, *, token_file: Path | None = None) -> Self:
        """As the settings say; a token file wins over their token."""
        return cls(settings.address, token=settings.token, token_file=token_file, tls=_tls(settings))

    async def health(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Whether a service is SERVING: the process itself, a full service name, or `tailer`. Needs no token."""
        request = health_pb2.HealthCheckRequest(service=service)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        answer = await self._line.call(stub.Check, request, timeout=timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """End the connection; calls that are under way are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _tls(settings: ClientSettings) -> Tls | None:
    if not settings.uses_tls:
        return None
    files = (settings.tls_authorities, settings.tls_certificate, settings.tls_key)
    authorities, certificate, key = (None if file is None else file.read_bytes() for file in files)
    return Tls(authorities=authorities, certificate=certificate, key=key)
