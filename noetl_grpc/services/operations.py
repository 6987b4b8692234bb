"""OperationsService: what an operator asks about the server itself."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.calls import Context
from noetl_grpc.core.envelope import TIME_RULE, instant
from noetl_grpc.core.tailing import Mode, Reconciled, ShardStatus
from noetl_grpc.errors import InvalidRequest
from noetl_grpc.metrics import Metrics

PREFIXES_MAX = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds every caller must know; one place, so that what is said is what is enforced."""

    batch_items: int = 10_000
    execution_ids: int = 1000
    claim_rows: int = 1000
    page_size: int = 1000
    request_bytes: int = 32 * 1024 * 1024
    message_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What does not change while the process lives."""

    version: str
    api_version: str
    fold_version: str
    shards: int
    limits: Limits


class TailerDesk(Protocol):
    """Whom an operator's questions about the tailer go to."""

    @property
    def mode(self) -> Mode: ...

    async def status(self) -> Sequence[ShardStatus]: ...


class ReconcilerDesk(Protocol):
    """Who mends the stream."""

    async def reconcile(
        self, *, since: datetime | None, until: datetime | None, dry_run: bool
    ) -> Reconciled: ...


class DisabledTailer:
    """Answers where this process has no tailer."""

    mode = Mode.DISABLED

    def __init__(self, shards: int) -> None:
        self._shards = shards

    async def status(self) -> Sequence[ShardStatus]:
        """Every shard is listed, and none is tailed."""
        return [ShardStatus(shard=shard, mode=self.mode) for shard in range(self._shards)]


_MODES = {
    Mode.DISABLED: pb.TAILER_MODE_DISABLED,
    Mode.SNAPSHOT: pb.TAILER_MODE_SNAPSHOT,
    Mode.OVERLAP: pb.TAILER_MODE_OVERLAP,
}


class OperationsServicer(rpc.OperationsServiceServicer):
    """Serves noetlpb.v1.OperationsService."""

    def __init__(
        self,
        facts: ServerFacts,
        metrics: Metrics,
        *,
        tailer: TailerDesk,
        misses_late_commits: Callable[[], bool],
        reconciler: ReconcilerDesk,
    ) -> None:
        """`misses_late_commits` tells whether streams of events follow a log without xact_id."""
        self._metrics = metrics
        self._misses_late_commits = misses_late_commits
        self._tailer = tailer
        self._reconciler = reconciler
        self._instance = uuid.uuid4().hex
        self._info = pb.GetServerInfoResponse(
            version=facts.version,
            api_version=facts.api_version,
            fold_version=facts.fold_version,
            shards=facts.shards,
            limits=pb.ServerLimits(**asdict(facts.limits)),
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        # A server without a tailer has streams too, and whoever reads them must know.
        mode = Mode.OVERLAP if self._misses_late_commits() else self._tailer.mode
        self._info.tailer_mode = _MODES[mode]
        return self._info

    async def GetServerMetrics(
        self, request: pb.GetServerMetricsRequest, context: Context
    ) -> pb.GetServerMetricsResponse:
        if len(request.name_prefixes) > PREFIXES_MAX:
            raise InvalidRequest("name_prefixes", f"must be at most {PREFIXES_MAX}")
        prefixes = tuple(request.name_prefixes) or ("",)

        def read() -> pb.GetServerMetricsResponse:
            return pb.GetServerMetricsResponse(
                instance=self._instance,
                samples=[
                    pb.MetricSample(name=name, labels=labels, value=value)
                    for name, labels, value in self._metrics.samples()
                    if name.startswith(prefixes) and not name.endswith(("_bucket", "_created"))
                ],
            )

        # Thousands of series take a while, and other calls must not wait for them.
        return await asyncio.to_thread(read)

    async def GetTailerStatus(
        self, request: pb.GetTailerStatusRequest, context: Context
    ) -> pb.GetTailerStatusResponse:
        return pb.GetTailerStatusResponse(shards=map(_status_to_pb, await self._tailer.status()))

    async def ReconcileStream(
        self, request: pb.ReconcileStreamRequest, context: Context
    ) -> pb.ReconcileStreamResponse:
        since = _moment(request, "since")
        until = _moment(request, "until")
        if since is not None and until is not None and until < since:
            raise InvalidRequest("until", "must not be before since")
        found = await self._reconciler.reconcile(since=since, until=until, dry_run=request.dry_run)
        return pb.ReconcileStreamResponse(
            checked=found.checked, missing=found.missing, republished=found.republished
        )


def _moment(request: pb.ReconcileStreamRequest, field: Literal["since", "until"]) -> datetime | None:
    if not request.HasField(field):
        return None
    stamp = getattr(request, field)
    moment = instant((stamp.seconds, stamp.nanos))
    if moment is None:
        raise InvalidRequest(field, TIME_RULE)
    return moment.replace(tzinfo=UTC)


def _status_to_pb(status: ShardStatus) -> pb.TailerShardStatus:
    message = pb.TailerShardStatus(
        shard=status.shard,
        mode=_MODES[status.mode],
        leader=status.leader,
        cursor=status.cursor,
        lag_events=status.lag_events,
        lag_seconds=status.lag_seconds,
        in_flight=status.in_flight,
        parked=status.parked,
        last_error=status.last_error,
    )
    if status.last_published_at is not None:
        message.last_published_at.FromDatetime(status.last_published_at)
    return message
