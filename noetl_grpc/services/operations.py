"""OperationsService: what an operator asks about the server itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from noetlpb.v1 import operations_pb2 as pb
from noetlpb.v1 import operations_pb2_grpc as rpc

from noetl_grpc.calls import Context


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

    def __init__(self, facts: ServerFacts) -> None:
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
