"""What a server does when there is too much: it refuses at once, and goes on with the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncpg
import grpc
import pytest
from externalscaler import externalscaler_pb2, externalscaler_pb2_grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from noetlpb.v1 import operations_pb2, operations_pb2_grpc, outbox_pb2, outbox_pb2_grpc

from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.conftest import AUTHORIZATION, CHANNEL_OPTIONS

StartServer = Callable[[Settings], Awaitable[Server]]
OpenChannel = Callable[[str], Awaitable[grpc.aio.Channel]]


async def _info(channel: grpc.aio.Channel) -> Any:
    return await operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
        operations_pb2.GetServerInfoRequest(), metadata=AUTHORIZATION, timeout=5
    )


def _details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    trailing = dict(error.trailing_metadata() or ())
    found = {}
    for detail in status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            unpacked = kind()
            if detail.Unpack(unpacked):
                found[kind.__name__] = unpacked
    return found


def _assert_overloaded(error: grpc.aio.AioRpcError, limit: int) -> None:
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = _details(error)
    assert details["ErrorInfo"].reason == "OVERLOADED"
    assert details["ErrorInfo"].metadata["limit"] == str(limit)
    assert details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0


async def _assert_healthy(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_calls_above_the_limit_are_refused_while_health_and_streams_answer(
    settings: Settings, start_server: StartServer, channel_to: OpenChannel, conn: asyncpg.Connection
) -> None:
    server = await start_server(replace(settings, calls_max=3))
    channel = await channel_to(server.address)
    outbox = outbox_pb2_grpc.OutboxServiceStub(channel)
    held = conn.transaction()
    await held.start()
    await conn.execute("LOCK TABLE noetl.outbox")
    count = outbox_pb2.CountOutboxPendingRequest()
    waiting = [outbox.CountOutboxPending(count, metadata=AUTHORIZATION) for _ in range(3)]

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _until_refused(channel)

    _assert_overloaded(raised.value, limit=3)
    await _assert_healthy(channel)
    stream = externalscaler_pb2_grpc.ExternalScalerStub(channel).StreamMetricSpec(
        externalscaler_pb2.ScaledObjectRef(), metadata=AUTHORIZATION
    )
    assert (await stream.read()).metricSpecs

    await held.rollback()
    for call in waiting:
        assert (await call).pending == 0
    assert (await _info(channel)).version


async def _until_refused(channel: grpc.aio.Channel) -> None:
    """The calls that fill the room may still be on their way."""
    async with asyncio.timeout(10):
        while True:
            await _info(channel)


async def test_streams_above_the_limit_are_refused_while_calls_are_served(
    settings: Settings, start_server: StartServer, channel_to: OpenChannel
) -> None:
    server = await start_server(replace(settings, streams_max=2))
    channel = await channel_to(server.address)
    scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)
    streams = [
        scaler.StreamIsActive(externalscaler_pb2.ScaledObjectRef(), metadata=AUTHORIZATION) for _ in range(2)
    ]
    for stream in streams:
        await stream.read()

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await scaler.StreamIsActive(externalscaler_pb2.ScaledObjectRef(), metadata=AUTHORIZATION).read()

    _assert_overloaded(raised.value, limit=2)
    assert (await _info(channel)).version
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_call_that_never_sends_its_message_takes_room_until_it_is_gone(
    settings: Settings, start_server: StartServer, channel_to: OpenChannel
) -> None:
    server = await start_server(replace(settings, calls_max=1))
    channel = await channel_to(server.address)
    loris = channel.stream_unary("/noetlpb.v1.OperationsService/GetServerInfo")(metadata=AUTHORIZATION)
    await loris.wait_for_connection()

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _until_refused(channel)
    _assert_overloaded(raised.value, limit=1)

    loris.cancel()
    async with asyncio.timeout(10):
        while await _code(channel) is not grpc.StatusCode.OK:
            pass  # the server learns of it a moment later


async def _code(channel: grpc.aio.Channel) -> grpc.StatusCode:
    call = operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
        operations_pb2.GetServerInfoRequest(), metadata=AUTHORIZATION, timeout=5
    )
    return await call.code()


async def test_who_has_no_token_takes_no_room(
    settings: Settings, start_server: StartServer, channel_to: OpenChannel
) -> None:
    server = await start_server(replace(settings, calls_max=1, streams_max=1))
    stranger = await channel_to(server.address)
    for _ in range(20):
        stranger.stream_unary("/noetlpb.v1.OperationsService/GetServerInfo")()
        stranger.stream_stream("/noetlpb.v1.OutboxService/ConsumeOutbox")()
        health_pb2_grpc.HealthStub(stranger).Watch(health_pb2.HealthCheckRequest())

    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        for _ in range(5):
            assert (await _info(channel)).version
