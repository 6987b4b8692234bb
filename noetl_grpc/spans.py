"""The spans we make, by OpenTelemetry's conventions. Loaded only where tracing is on: it needs the extra `otel`.

A span holds names and numbers: never a token, a payload, an argument of a statement, an address or an error's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from types import TracebackType
from typing import Final, Self

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from noetl_grpc.core.messages import Destination
from noetl_grpc.core.traceparent import HEADER, is_traceparent, trace_id

#: Where other systems note what else they know of a trace.
STATE_HEADER: Final = "tracestate"
STATE_CHARACTERS_MAX: Final = 512

#: What a batch is linked with, at most; more is dropped by OpenTelemetry itself.
LINKS_MAX: Final = 128

#: Codes by which a server says that it failed; by the others it says that its caller did.
FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NOTHING: Final = nullcontext()
_ERROR: Final = Status(StatusCode.ERROR)


class CallSpan:
    """A call that is being served; what its task does until the end belongs to it."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """What it hands on."""
        return _traceparent(self._span)

    def end(self, code: grpc.StatusCode, *, reason: str) -> None:
        """How it was answered, once."""
        self._span.set_attribute("rpc.response.status_code", code.name)
        if reason:
            self._span.set_attribute("noetl.reason", reason)
        if code in FAULTS:
            self._span.set_attribute("error.type", code.name)
            self._span.set_status(_ERROR)
        self._span.end()


class Block:
    """A span for the length of a block, and the current one inside it. What is raised there fails it."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """What it hands on."""
        return _traceparent(self._span)

    def __enter__(self) -> Self:
        self._token = contexts.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        contexts.detach(self._token)
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            sqlstate = getattr(error, "sqlstate", None)
            if isinstance(sqlstate, str):
                self._span.set_attribute("db.response.status_code", sqlstate)
            self._span.set_status(_ERROR)
        self._span.end()


class Spans:
    """Begins every span of this process."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin_call(self, method: str, *, traceparent: str | None, tracestate: str = "") -> CallSpan:
        """A call of `package.Service/Method` in the caller's trace; the running task is inside it from now on."""
        parent = _parent(traceparent, tracestate)
        span = self._tracer.start_span(
            method,
            parent,
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
        )
        # The task is the call's own, so there is nothing to go back to.
        contexts.attach(trace.set_span_in_context(span, parent))
        return CallSpan(span)

    def statement(self, name: str, *, database: str) -> AbstractContextManager[object]:
        """A statement by its name. What no recorded span asks for, such as our own polling, makes none."""
        if not trace.get_current_span().is_recording():
            return _NOTHING
        span = self._tracer.start_span(
            name,
            kind=SpanKind.CLIENT,
            attributes={
                "db.system.name": "postgresql",
                "db.query.summary": name,
                "noetl.database": database,
            },
        )
        return Block(span)

    def publish(
        self,
        destination: Destination,
        origins: Iterable[str | None],
        *,
        count: int | None = None,
        message_id: str = "",
    ) -> Block:
        """Messages on their way to the broker, made by these traces: `count` of them, or one."""
        attributes = {"messaging.operation.name": "publish", "messaging.operation.type": "send"}
        if message_id:
            attributes["messaging.message.id"] = message_id
        return self._messages(SpanKind.PRODUCER, destination, attributes, origins, count)

    def process(
        self, destination: Destination, origins: Iterable[str | None], *, count: int, group: str
    ) -> Block:
        """Messages that a consumer of that group works on together, made by these traces."""
        attributes = {
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.consumer.group.name": group,
        }
        return self._messages(SpanKind.CONSUMER, destination, attributes, origins, count)

    def _messages(
        self,
        kind: SpanKind,
        destination: Destination,
        attributes: Mapping[str, str],
        origins: Iterable[str | None],
        count: int | None,
    ) -> Block:
        parent, links = _origin(origins)
        name = attributes["messaging.operation.name"]
        span = self._tracer.start_span(
            # There may be any number of subjects, so only a stream names a span.
            f"{name} {destination.name}" if destination.template else name,
            parent,
            kind=kind,
            attributes={
                "messaging.system": "nats",
                "messaging.destination.name": destination.name,
                **attributes,
            },
            links=links,
        )
        if destination.template:
            span.set_attribute("messaging.destination.template", destination.template)
        if count is not None:
            span.set_attribute("messaging.batch.message_count", count)
        return Block(span)


def _origin(origins: Iterable[str | None]) -> tuple[Context, list[Link]]:
    """Whose child the work on some messages is: of the last one's maker if all are of one trace.

    With several traces it is nobody's child. It is linked with all whose child it is not.
    """
    distinct = list(dict.fromkeys(one for one in origins if one and is_traceparent(one)))
    parent = Context()
    if len({trace_id(one) for one in distinct}) == 1:
        parent = _parent(distinct.pop())
    return parent, [
        Link(trace.get_current_span(_parent(one)).get_span_context()) for one in distinct[-LINKS_MAX:]
    ]


def _parent(traceparent: str | None, tracestate: str = "") -> Context:
    if traceparent is None:
        return Context()
    carrier = {HEADER: traceparent}
    if tracestate and len(tracestate) <= STATE_CHARACTERS_MAX:
        carrier[STATE_HEADER] = tracestate
    return _PROPAGATOR.extract(carrier, Context())


def _traceparent(span: Span) -> str:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier[HEADER]


class Export:
    """Spans and the thread that sends them."""

    def __init__(self, exporter: OTLPSpanExporter, *, service: str) -> None:
        resource = Resource.create({"service.version": version("noetl-grpc")})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        self._exporter = exporter
        # Ended by us, with a bound; its own way waits as long as it takes.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.spans = Spans(self._provider.get_tracer("noetl_grpc", version("noetl-grpc")))

    def close(self) -> None:
        """Send what is left and end; blocks."""
        self._provider.shutdown()

    def give_up(self) -> None:
        """Drop what could not be sent."""
        self._exporter.shutdown()


def open_export(endpoint: str, *, service: str) -> Export:
    """Begin to export. Everything but the endpoint is as OpenTelemetry's own variables say."""
    return Export(OTLPSpanExporter(endpoint=endpoint), service=service)
