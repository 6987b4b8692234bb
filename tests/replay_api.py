"""Short words for the calls that tests of replay make."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2, state_pb2
from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import replay_pb2_grpc as rpc

from noetl_grpc.status import from_rpc_error
from tests.conftest import AUTHORIZATION

STRICT = state_pb2.FOLD_RULES_PYTHON_4_26
UNION = state_pb2.FOLD_RULES_UNION


class ReplayApi:
    """The service with a token on every call; failures are our exceptions."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = rpc.ReplayServiceStub(channel)

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, metadata=AUTHORIZATION, timeout=15)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def state(self, execution_id: int, **fields: Any) -> state_pb2.ReplayedState:
        request = pb.ReplayStateRequest(execution_id=execution_id, **fields)
        answer: pb.ReplayStateResponse = await self.call("ReplayState", request)
        return answer.state

    async def canonical(self, execution_id: int, **fields: Any) -> dict[str, Any]:
        """The state as it was hashed."""
        state = await self.state(execution_id, include_canonical_json=True, **fields)
        document: dict[str, Any] = json.loads(state.canonical_json)
        return document

    async def event(self, execution_id: int, event_id: int, **fields: Any) -> event_pb2.EventEnvelope:
        request = pb.GetEventRequest(execution_id=execution_id, event_id=event_id, **fields)
        answer: pb.GetEventResponse = await self.call("GetEvent", request)
        return answer.event

    async def diff(
        self, execution_id: int, start: state_pb2.Cutoff, end: state_pb2.Cutoff, **fields: Any
    ) -> pb.DiffReplayResponse:
        request = pb.DiffReplayRequest(execution_id=execution_id, from_cutoff=start, to_cutoff=end, **fields)
        answer: pb.DiffReplayResponse = await self.call("DiffReplay", request)
        return answer

    async def explain(self, execution_id: int, path: str, **fields: Any) -> list[pb.StateCause]:
        request = pb.ExplainReplayRequest(execution_id=execution_id, path=path, **fields)
        answer: pb.ExplainReplayResponse = await self.call("ExplainReplay", request)
        return list(answer.causes)

    @asynccontextmanager
    async def stream(
        self, execution_id: int, *, timeout: float = 15, **fields: Any
    ) -> AsyncIterator[AsyncIterator[pb.StreamEventsResponse]]:
        """The messages; the call is cancelled at the end of the block."""
        request = pb.StreamEventsRequest(execution_id=execution_id, **fields)
        call: Any = self.stub.StreamEvents(request, metadata=AUTHORIZATION, timeout=timeout)

        async def messages() -> AsyncIterator[pb.StreamEventsResponse]:
            try:
                async for message in call:
                    yield message
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None

        try:
            yield messages()
        finally:
            call.cancel()

    async def all_events(self, execution_id: int, **fields: Any) -> list[pb.StreamEventsResponse]:
        async with self.stream(execution_id, **fields) as messages:
            return [message async for message in messages]


def timestamp(moment: datetime) -> Timestamp:
    made = Timestamp()
    made.FromDatetime(moment)
    return made


def at_event(event_id: int) -> state_pb2.Cutoff:
    return state_pb2.Cutoff(as_of_event_id=event_id)


def at_time(moment: datetime) -> state_pb2.Cutoff:
    return state_pb2.Cutoff(as_of_time=timestamp(moment))
