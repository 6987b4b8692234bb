"""What spans of messages are called, whose children they are, and what they say of a failure."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from noetl_grpc.client.outbox import OutboxRow
from noetl_grpc.core.messages import Destination
from noetl_grpc.core.tailing import DESTINATION
from noetl_grpc.spans import LINKS_MAX, Spans
from noetl_grpc.workers.publisher import destination_of, message_of
from tests.traces import OTHER_TRACEPARENT, TRACE, TRACEPARENT

SIBLING = f"00-{TRACE}-00000000000000aa-01"


class Kept:
    """Spans that stay here when they end."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = Spans(provider.get_tracer("test"))

    @property
    def last(self) -> ReadableSpan:
        return self._exporter.get_finished_spans()[-1]

    @property
    def parent(self) -> str | None:
        return None if self.last.parent is None else _traceparent(self.last.parent)

    @property
    def links(self) -> list[str]:
        return [_traceparent(link.context) for link in self.last.links]


def _traceparent(context: Any) -> str:
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-01"


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.mark.parametrize(
    ("origins", "parent", "links"),
    [
        ([], None, []),
        ([None, "nonsense"], None, []),
        ([TRACEPARENT, None, TRACEPARENT], TRACEPARENT, []),
        ([TRACEPARENT, SIBLING], SIBLING, [TRACEPARENT]),
        ([TRACEPARENT, OTHER_TRACEPARENT, TRACEPARENT], None, [TRACEPARENT, OTHER_TRACEPARENT]),
    ],
)
def test_a_batch_is_a_child_of_its_trace_and_linked_with_several(
    kept: Kept, origins: list[str | None], parent: str | None, links: list[str]
) -> None:
    with kept.spans.process(DESTINATION, origins, count=3, group="g"):
        pass

    assert (kept.parent, kept.links) == (parent, links)
    assert dict(kept.last.attributes or {}) == {
        "messaging.system": "nats",
        "messaging.destination.name": "noetl_events",
        "messaging.destination.template": "noetl.events.{event_type}",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "g",
        "messaging.batch.message_count": 3,
    }


def test_links_have_a_bound(kept: Kept) -> None:
    origins = [f"00-{number:032x}-00000000000000aa-01" for number in range(1, 1000)]

    with kept.spans.publish(DESTINATION, origins, count=999):
        pass

    assert kept.links == origins[-LINKS_MAX:]


def test_a_failure_names_its_kind_and_not_its_text(kept: Kept) -> None:
    with pytest.raises(ValueError), kept.spans.publish(Destination("orders.7"), [], message_id="outbox-0-1"):  # noqa: PT011 (it is ours)
        raise ValueError("secret")

    assert (kept.last.name, kept.last.status.status_code) == ("publish", StatusCode.ERROR)
    assert (kept.last.attributes or {})["error.type"] == "ValueError"
    assert "secret" not in kept.last.to_json()


def test_the_trace_of_a_row_is_replaced_whatever_its_case() -> None:
    row = OutboxRow(
        outbox_id=1,
        event_id=2,
        execution_id=3,
        subject=None,
        payload_json="{}",
        payload_codec="json",
        headers={"Traceparent": OTHER_TRACEPARENT, "k": "v"},
        attempts=1,
        shard=0,
    )

    assert OTHER_TRACEPARENT.encode() in message_of(row).headers
    replaced = message_of(row, traceparent=TRACEPARENT).headers
    assert f"traceparent: {TRACEPARENT}".encode() in replaced
    assert OTHER_TRACEPARENT.encode() not in replaced
    assert destination_of(row) == Destination("noetl_outbox", "noetl.outbox.{execution_id}")
