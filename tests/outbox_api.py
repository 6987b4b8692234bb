"""Short words for the calls that tests of the outbox make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from tests.conftest import AUTHORIZATION


class OutboxApi:
    """The service, with a token on every call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = rpc.OutboxServiceStub(channel)

    async def call(self, method: str, request: Any) -> Any:
        return await getattr(self.stub, method)(request, metadata=AUTHORIZATION, timeout=15)

    async def enqueue(self, *messages: pb.OutboxMessage) -> pb.EnqueueOutboxResponse:
        answer: pb.EnqueueOutboxResponse = await self.call(
            "EnqueueOutbox", pb.EnqueueOutboxRequest(messages=messages)
        )
        return answer

    async def claim(self, *, lease: float = 0, wait: float = 0, **fields: Any) -> pb.ClaimOutboxBatchResponse:
        request = pb.ClaimOutboxBatchRequest(lease=duration(lease), wait=duration(wait), **fields)
        answer: pb.ClaimOutboxBatchResponse = await self.call("ClaimOutboxBatch", request)
        return answer

    async def publish(
        self, outbox_ids: Sequence[int], claim_token: str = "", **fields: Any
    ) -> pb.MarkOutboxPublishedResponse:
        request = pb.MarkOutboxPublishedRequest(outbox_ids=outbox_ids, claim_token=claim_token, **fields)
        answer: pb.MarkOutboxPublishedResponse = await self.call("MarkOutboxPublished", request)
        return answer

    async def fail(
        self, outbox_id: int, claim_token: str = "", error: str = "broken", **fields: Any
    ) -> pb.MarkOutboxFailedResponse:
        request = pb.MarkOutboxFailedRequest(
            outbox_id=outbox_id, claim_token=claim_token, error=error, **fields
        )
        answer: pb.MarkOutboxFailedResponse = await self.call("MarkOutboxFailed", request)
        return answer

    async def extend(
        self, claim_token: str, outbox_ids: Sequence[int] = (), *, lease: float = 0
    ) -> pb.ExtendOutboxLeaseResponse:
        request = pb.ExtendOutboxLeaseRequest(
            claim_token=claim_token, outbox_ids=outbox_ids, lease=duration(lease)
        )
        answer: pb.ExtendOutboxLeaseResponse = await self.call("ExtendOutboxLease", request)
        return answer

    async def release(
        self, claim_token: str, outbox_ids: Sequence[int] = ()
    ) -> pb.ReleaseOutboxLeaseResponse:
        request = pb.ReleaseOutboxLeaseRequest(claim_token=claim_token, outbox_ids=outbox_ids)
        answer: pb.ReleaseOutboxLeaseResponse = await self.call("ReleaseOutboxLease", request)
        return answer

    async def dead(
        self, filter: pb.DeadOutboxFilter | None = None, **fields: Any
    ) -> pb.ListDeadOutboxRowsResponse:
        request = pb.ListDeadOutboxRowsRequest(filter=filter, **fields)
        answer: pb.ListDeadOutboxRowsResponse = await self.call("ListDeadOutboxRows", request)
        return answer

    async def requeue(self, filter: pb.DeadOutboxFilter | None = None, **fields: Any) -> int:
        request = pb.RequeueDeadOutboxRowsRequest(filter=filter, **fields)
        answer: pb.RequeueDeadOutboxRowsResponse = await self.call("RequeueDeadOutboxRows", request)
        return answer.requeued

    async def pending(self) -> int:
        answer: pb.CountOutboxPendingResponse = await self.call(
            "CountOutboxPending", pb.CountOutboxPendingRequest()
        )
        return answer.pending

    async def stats(self) -> dict[str, int]:
        answer = await self.call("GetOutboxStats", pb.GetOutboxStatsRequest())
        return {
            name: getattr(answer, name) for name in ("pending", "delayed", "in_flight", "expired", "dead")
        }


def duration(seconds: float) -> Duration | None:
    if not seconds:
        return None
    converted = Duration()
    converted.FromTimedelta(timedelta(seconds=seconds))
    return converted


def message(
    event_id: int, execution_id: int | None = 1, payload_json: str = "{}", **fields: Any
) -> pb.OutboxMessage:
    return pb.OutboxMessage(event_id=event_id, execution_id=execution_id, payload_json=payload_json, **fields)


def ids(answer: Any) -> list[int]:
    return [row.outbox_id for row in answer.rows]


async def rows_of(conn: asyncpg.Connection) -> dict[int, Any]:
    """The whole table, by outbox_id."""
    return {
        row["outbox_id"]: row for row in await conn.fetch("SELECT * FROM noetl.outbox ORDER BY outbox_id")
    }


async def insert(
    conn: asyncpg.Connection, rows: int, *, payload: str = "{}", execution: str = "1", event: str = "n"
) -> None:
    """Rows as another writer would add them; execution and event are SQL over n, which counts from 1."""
    await conn.execute(
        "INSERT INTO noetl.outbox (execution_id, event_id, payload, payload_codec)"
        f" SELECT {execution}, {event}, $2::jsonb, 'json' FROM generate_series(1, $1::int) AS n",
        rows,
        payload,
    )


async def expire(conn: asyncpg.Connection, *outbox_ids: int) -> None:
    """Let the leases of these rows be over, of all rows without any."""
    await conn.execute(
        "UPDATE noetl.outbox SET lease_expires_at = now() - interval '1 ms'"
        " WHERE status = 'IN_FLIGHT' AND (cardinality($1::bigint[]) = 0 OR outbox_id = ANY($1))",
        list(outbox_ids),
    )


async def make_due(conn: asyncpg.Connection) -> None:
    """Let the back-off of every failed row be over."""
    await conn.execute(
        "UPDATE noetl.outbox SET available_at = now() WHERE status = 'FAILED' AND dead_at IS NULL"
    )


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    """How a call failed."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    info = error_details_pb2.ErrorInfo()
    trailers = dict(raised.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.details[0].Unpack(info)
    return raised.value.code(), info


async def refused_field(call: Awaitable[Any]) -> str:
    """Which field was wrong."""
    code, info = await refused(call)
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    return str(info.metadata["field"])


OpenChannel = Callable[[str], Awaitable[grpc.aio.Channel]]
