"""Payloads go everywhere, and none into a log line, an error or a span. The check itself runs around every test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncpg
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from noetl_grpc import status
from noetl_grpc.errors import NotFound
from noetl_grpc.server import Server, serving
from noetl_grpc.settings import Settings, TracingSettings
from tests import leaks
from tests.collector import Collector, collecting
from tests.conftest import TOKEN
from tests.factories import CATALOG_ID, EVENT_ID, EXECUTION_ID, add_catalog_entry
from tests.rpcs import call, every_rpc

DOCUMENTS = (
    f'{{"status": "ok", "context": {{"secret": "{leaks.PAYLOAD}"}}}}',
    f'{{"secret": "{leaks.PAYLOAD}"',
    f'["{leaks.PAYLOAD}"]',
    f'"\\u0000{leaks.PAYLOAD}"',
)


def _fill(message: Any, document: str, depth: int = 3) -> None:
    """Valid ids, and the document wherever one may stand."""
    ids = {"execution_id": EXECUTION_ID, "event_id": EVENT_ID, "catalog_id": CATALOG_ID, "event_type": "x"}
    for field in message.DESCRIPTOR.fields:
        if field.name in ids:
            setattr(message, field.name, ids[field.name])
        elif field.name.endswith("_json") and field.type == field.TYPE_STRING:
            setattr(message, field.name, document)
        elif field.message_type is not None and field.name in ("events", "messages", "failures") and depth:
            _fill(getattr(message, field.name).add(), document, depth - 1)


@pytest.mark.parametrize("document", DOCUMENTS)
async def test_payloads_reach_every_rpc_and_no_log_or_error(
    channel: grpc.aio.Channel, conn: asyncpg.Connection, document: str
) -> None:
    await add_catalog_entry(conn)
    await _send_everywhere(channel, document)


async def _send_everywhere(channel: grpc.aio.Channel, document: str) -> None:
    async def send(rpc: Any) -> None:
        request = rpc.request_type()
        _fill(request, document)
        await call(channel, rpc, request, token=TOKEN, seconds=1.0)
        await call(channel, rpc, request, token="wrong", seconds=1.0)

    async with asyncio.timeout(15):
        await asyncio.gather(*map(send, every_rpc()))


async def test_payloads_reach_every_rpc_and_no_span(
    settings: Settings, conn: asyncpg.Connection, channel_to: Callable[[str], Awaitable[grpc.aio.Channel]]
) -> None:
    await add_catalog_entry(conn)

    # That nothing leaked is checked by the collector; a server that ends has sent it everything.
    async with collecting() as collector:
        traced = replace(settings, tracing=TracingSettings(collector=collector.endpoint))
        async with serving(traced) as server:
            await _send_everywhere(await channel_to(server.address), DOCUMENTS[0])

        assert {rpc.path[1:] for rpc in every_rpc()} <= {span.name for span in collector.spans}


def test_a_leak_would_be_seen(no_leaks: list[str]) -> None:
    with leaks.watched() as found:
        logging.getLogger("noetl_grpc.x").debug("innocent", extra={"field": f"… {leaks.PASSWORD} …"})
        logging.getLogger("asyncio").warning(leaks.TOKEN)
        status.to_status(NotFound(leaks.PAYLOAD))

    assert [leak.partition(":")[0] for leak in found] == ["logged", "logged", "answered"]
    assert len(no_leaks) == 3
    no_leaks.clear()


async def test_a_leak_in_a_span_would_be_seen() -> None:
    collector = Collector()
    leaking = trace_pb2.Span(name=f"SELECT '{leaks.PAYLOAD}'")
    scope = trace_pb2.ScopeSpans(spans=[leaking])
    resource = resource_pb2.Resource(attributes=[common_pb2.KeyValue(key="service.name")])

    await collector.Export(
        trace_service_pb2.ExportTraceServiceRequest(
            resource_spans=[trace_pb2.ResourceSpans(resource=resource, scope_spans=[scope])]
        ),
        None,
    )

    assert len(collector.leaks) == 1


async def test_a_server_does_not_show_its_secrets(server: Server, settings: Any) -> None:
    shown = repr(settings)

    assert not any(mark in shown for mark in leaks.MARKS)
