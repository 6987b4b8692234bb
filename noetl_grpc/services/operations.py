"""OperationsService: what an operator asks about the server itself."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass

from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.calls import Context
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


class OperationsServicer(rpc.OperationsServiceServicer):
    """Serves noetlpb.v1.OperationsService."""

    def __init__(self, facts: ServerFacts, metrics: Metrics) -> None:
        self._metrics = metrics
        self._instance = uuid.uuid4().hex
        self._info = pb.GetServerInfoResponse(
            version=facts.version,
            api_version=facts.api_version,
            fold_version=facts.fold_version,
            shards=facts.shards,
            tailer_mode=pb.TAILER_MODE_DISABLED,
            limits=pb.ServerLimits(**asdict(facts.limits)),
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return self._info

    async def GetServerMetrics(
        self, request: pb.GetServerMetricsRequest, context: Context
    ) -> pb.GetServerMetricsResponse:
        if len(request.name_prefixes) > PREFIXES_MAX:
            raise InvalidRequest("name_prefixes", f"must be at most {PREFIXES_MAX}")
        prefixes = tuple(request.name_prefixes) or ("",)
        return pb.GetServerMetricsResponse(
            instance=self._instance,
            samples=[
                pb.MetricSample(name=name, labels=labels, value=value)
                for name, labels, value in self._metrics.samples()
                if name.startswith(prefixes) and not name.endswith(("_bucket", "_created"))
            ],
        )
