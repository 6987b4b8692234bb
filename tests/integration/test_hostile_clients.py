"""Clients that mean no good, or just behave badly: the others keep being served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from noetlpb.v1 import operations_pb2, operations_pb2_grpc, outbox_pb2, outbox_pb2_grpc

from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.certificates import Authority
from tests.conftest import AUTHORIZATION, CHANNEL_OPTIONS
from tests.rpcs import info_of

#: What begins an HTTP/2 connection.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def _assert_served(channel: grpc.aio.Channel) -> None:
    stub = operations_pb2_grpc.OperationsServiceStub(channel)
    for _ in range(20):
        answer = await stub.GetServerInfo(
            operations_pb2.GetServerInfoRequest(), metadata=AUTHORIZATION, timeout=5
        )
        assert answer.version


@asynccontextmanager
async def _sockets(address: str, count: int, first: bytes) -> AsyncIterator[list[Any]]:
    """Connections that say this much and nothing more; dropped all at once."""
    host, _, port = address.rpartition(":")
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        writers.append(writer)
    try:
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize("first", [b"", PREFACE, PREFACE[:7], b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100])
async def test_idle_connections_opened_and_dropped_at_once(
    server: Server, channel: grpc.aio.Channel, first: bytes
) -> None:
    async with _sockets(server.address, 100, first):
        await _assert_served(channel)

    await _assert_served(channel)


async def test_five_hundred_idle_connections(server: Server, channel: grpc.aio.Channel) -> None:
    async with _sockets(server.address, 500, PREFACE):
        await _assert_served(channel)

    await _assert_served(channel)


async def test_streams_that_say_nothing(
    settings: Settings,
    start_server: Callable[[Settings], Awaitable[Server]],
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    server = await start_server(settings)
    loris, other = await channel_to(server.address), await channel_to(server.address)
    silent = [
        loris.stream_stream("/noetlpb.v1.OutboxService/ConsumeOutbox")(metadata=AUTHORIZATION)
        for _ in range(200)
    ]
    silent += [
        loris.stream_unary("/noetlpb.v1.OutboxService/EnqueueOutbox")(metadata=AUTHORIZATION)
        for _ in range(200)
    ]

    await _assert_served(other)

    for call in silent:
        call.cancel()
    await _assert_served(other)


async def test_messages_above_the_limits_are_refused_by_name(
    server: Server, channel: grpc.aio.Channel
) -> None:
    options = (*CHANNEL_OPTIONS[2:], ("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(server.address, options=options) as generous:
        stub = outbox_pb2_grpc.OutboxServiceStub(generous)
        for megabytes, reason in ((33, "REQUEST_TOO_LARGE"), (65, "")):
            message = outbox_pb2.OutboxMessage(event_id=1, payload_json="x" * (megabytes << 20))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.EnqueueOutbox(
                    outbox_pb2.EnqueueOutboxRequest(messages=[message]), metadata=AUTHORIZATION
                )
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert info_of(raised.value)[0] == reason
            await _assert_served(channel)


async def test_unfinished_tls_handshakes(
    settings: Settings, start_server: Callable[[Settings], Awaitable[Server]], tmp_path: Path
) -> None:
    authority = Authority()
    certificate, key = authority.issue().write(tmp_path, "server")
    server = await start_server(replace(settings, tls_certificate=certificate, tls_key=key))
    credentials = grpc.ssl_channel_credentials(authority.certificate)

    async with AsyncExitStack() as stack:
        # Nothing at all, and the beginning of a ClientHello.
        for first in (b"", b"\x16\x03\x01\x02\x00\x01"):
            await stack.enter_async_context(_sockets(server.address, 50, first))
        async with grpc.aio.secure_channel(server.address, credentials, options=CHANNEL_OPTIONS) as channel:
            await _assert_served(channel)
