"""Every RPC there is, from the descriptors, and what a call of one comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.rpc import error_details_pb2, status_pb2

from noetl_grpc.server import SERVICES


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method of one service."""

    path: str
    request_type: Any
    takes_stream: bool

    def __str__(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended, or that it went on."""

    code: grpc.StatusCode
    reason: str = ""
    metadata: dict[str, str] | None = None
    messages: tuple[bytes, ...] = ()


def every_rpc() -> list[Rpc]:
    """All methods of all services."""
    return [
        Rpc(
            f"/{service.full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            bool(method.client_streaming),
        )
        for service in SERVICES
        for method in service.methods
    ]


async def call(
    channel: grpc.aio.Channel, rpc: Rpc, request: Any, *, token: str, seconds: float = 5.0
) -> Answer:
    """Send one request and collect what comes back; a stream that goes on ends as DEADLINE_EXCEEDED."""
    metadata = (("authorization", f"Bearer {token}"),)
    raw = request.SerializeToString()
    messages: list[bytes] = []
    try:
        if rpc.takes_stream:
            stream: Any = channel.stream_stream(rpc.path)(_once(raw), metadata=metadata, timeout=seconds)
        else:
            # Read as a stream in any case: a unary answer is a stream of one.
            stream = channel.unary_stream(rpc.path)(raw, metadata=metadata, timeout=seconds)
        async for message in stream:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        reason, values = info_of(error)
        return Answer(error.code(), reason, values, tuple(messages))
    return Answer(grpc.StatusCode.OK, messages=tuple(messages))


def info_of(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str]]:
    """Reason and metadata of an answer of ours; empty where it is not ours."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            info = error_details_pb2.ErrorInfo()
            status_pb2.Status.FromString(value).details[0].Unpack(info)
            return info.reason, dict(info.metadata)
    return "", {}


async def _once(raw: bytes) -> Any:
    yield raw


def fields_named(message_type: Any, name: str, depth: int = 4) -> Iterator[Any]:
    """Descriptors of the fields of that name, in the message or in those inside it."""
    for field in message_type.fields:
        if field.name == name:
            yield field
        if field.message_type is not None and depth:
            yield from fields_named(field.message_type, name, depth - 1)
