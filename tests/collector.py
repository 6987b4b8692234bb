"""An OTLP collector on loopback that keeps what it gets, and looks for what no span may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests import leaks

Kind = trace_pb2.Span.SpanKind
ERROR = trace_pb2.Status.STATUS_CODE_ERROR


class Received:
    """A span as it came."""

    def __init__(self, service: str, span: Any) -> None:
        self.service = service
        self.name: str = span.name
        self.kind = span.kind
        self.trace: str = span.trace_id.hex()
        self.id: str = span.span_id.hex()
        self.parent: str = span.parent_span_id.hex()
        self.links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        self.failed: bool = span.status.code == ERROR
        self.attributes = {
            one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
        }

    def __repr__(self) -> str:
        return f"<{self.service}: {self.name} {self.trace} {self.parent}>{self.id} {self.attributes}>"


class Collector(rpc.TraceServiceServicer):
    """Takes spans; a test waits for those that it expects."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Received] = []
        self.leaks: list[str] = []
        self._came = asyncio.Condition()

    async def Export(self, request: Any, context: Any) -> Any:
        if any(mark.encode() in request.SerializeToString() for mark in leaks.MARKS):
            self.leaks.append(str(request))
        for resource in request.resource_spans:
            service = next(
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.spans += [Received(service, span) for span in scope.spans]
        async with self._came:
            self._came.notify_all()
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Received]:
        """By the name, or by its end behind a slash."""
        return [span for span in self.spans if span.name == name or span.name.endswith(f"/{name}")]

    async def wait(
        self, name: str, *, where: Callable[[Received], bool] = lambda span: True, seconds: float = 15.0
    ) -> Received:
        """The first such span, once it has come."""
        async with asyncio.timeout(seconds), self._came:
            while not (found := [span for span in self.named(name) if where(span)]):
                await self._came.wait()
        return found[0]


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A running collector; that nothing leaked is checked at its end."""
    collector = Collector()
    server = grpc.aio.server()
    rpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
    assert collector.leaks == []
