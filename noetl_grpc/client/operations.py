"""What operators ask the server itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.client.channel import LONG_CALL_SECONDS, Line
from noetl_grpc.client.mapping import from_pb, timestamp


class TailerMode(StrEnum):
    """How the tailer finds what is new in the log."""

    UNSPECIFIED = "UNSPECIFIED"
    DISABLED = "DISABLED"
    SNAPSHOT = "SNAPSHOT"
    OVERLAP = "OVERLAP"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What requests are held to."""

    batch_items: int
    execution_ids: int
    claim_rows: int
    page_size: int
    request_bytes: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Versions, shards and limits of a server."""

    version: str
    api_version: str
    fold_version: str
    shards: int
    tailer_mode: TailerMode
    limits: ServerLimits


@dataclass(frozen=True, slots=True)
class TailerShardStatus:
    """The tailer of one shard."""

    shard: int
    mode: TailerMode
    #: Whether the very process that answered leads.
    leader: bool
    cursor: str
    lag_events: int
    lag_seconds: float
    in_flight: int
    parked: int
    last_error: str
    last_published_at: datetime | None


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One number that a server counts or measures."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """What one process counts; numbers of two instances do not belong together."""

    instance: str
    samples: tuple[MetricSample, ...]


@dataclass(frozen=True, slots=True)
class Reconciled:
    """How the stream compared with the log."""

    checked: int
    missing: int
    republished: int


class OperationsClient:
    """noetlpb.v1.OperationsService."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._stub = rpc.OperationsServiceStub(line.channel)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Versions, shards and limits."""
        answer = await self._line.call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout=timeout)
        return from_pb(ServerInfo, answer)

    async def tailer_status(self, *, timeout: float | None = None) -> tuple[TailerShardStatus, ...]:
        """Where the tailer stands, shard by shard."""
        answer = await self._line.call(
            self._stub.GetTailerStatus, pb.GetTailerStatusRequest(), timeout=timeout
        )
        return tuple(from_pb(TailerShardStatus, shard) for shard in answer.shards)

    async def server_metrics(
        self, name_prefixes: Iterable[str] = (), *, timeout: float | None = None
    ) -> ServerMetrics:
        """What the process that answers counts and measures."""
        request = pb.GetServerMetricsRequest(name_prefixes=name_prefixes)
        answer = await self._line.call(self._stub.GetServerMetrics, request, timeout=timeout)
        return from_pb(ServerMetrics, answer)

    async def reconcile_stream(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> Reconciled:
        """Compare the log with the broker's stream and publish again what the broker lost."""
        request = pb.ReconcileStreamRequest(
            since=None if since is None else timestamp(since, field="since"),
            until=None if until is None else timestamp(until, field="until"),
            dry_run=dry_run,
        )
        answer = await self._line.call(
            self._stub.ReconcileStream, request, timeout=timeout or LONG_CALL_SECONDS
        )
        return from_pb(Reconciled, answer)
