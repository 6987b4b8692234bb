"""The rim of the service: who gets in, what errors look like, and how it starts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import asyncpg
import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from noetlpb.v1 import operations_pb2, operations_pb2_grpc

from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.errors import SchemaError, SettingsError
from noetl_grpc.server import SERVICE_NAMES, SERVICES, Server
from noetl_grpc.settings import Settings
from tests.conftest import AUTHORIZATION, CHANNEL_OPTIONS, TOKEN, settings_for

StartServer = Callable[[Settings], Awaitable[Server]]

INFO = operations_pb2.GetServerInfoRequest()


def _reason(error: grpc.aio.AioRpcError) -> str:
    details = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(details["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "noetl_grpc"
    return str(info.reason)


async def _info(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> str:
    """OK, or code and reason."""
    try:
        await operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(INFO, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {_reason(error)}"
    return "OK"


async def test_the_server_tells_about_itself(channel: grpc.aio.Channel) -> None:
    info = await operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
        INFO, metadata=AUTHORIZATION
    )

    assert info.api_version == "noetlpb.v1"
    assert info.shards == 1
    assert info.limits.request_bytes == 32 * 1024 * 1024
    assert info.limits.batch_items == 10_000


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((), "UNAUTHENTICATED TOKEN_MISSING"),
        (("",), "UNAUTHENTICATED TOKEN_MALFORMED"),
        (("Bearer",), "UNAUTHENTICATED TOKEN_MALFORMED"),
        (("Bearer  ",), "UNAUTHENTICATED TOKEN_MALFORMED"),
        ((f"Basic {TOKEN}",), "UNAUTHENTICATED TOKEN_MALFORMED"),
        ((TOKEN,), "UNAUTHENTICATED TOKEN_MALFORMED"),
        (("Bearer wrong",), "UNAUTHENTICATED TOKEN_INVALID"),
        ((f"Bearer {TOKEN}x",), "UNAUTHENTICATED TOKEN_INVALID"),
        ((f"Bearer {TOKEN}", f"Bearer {TOKEN}"), "UNAUTHENTICATED TOKEN_MALFORMED"),
        ((f"Bearer {TOKEN}",), "OK"),
        ((f"bearer {TOKEN}",), "OK"),
        ((f"BEARER   {TOKEN} ",), "OK"),
    ],
)
async def test_only_the_right_header_gets_in(
    channel: grpc.aio.Channel, headers: tuple[str, ...], expected: str
) -> None:
    assert await _info(channel, tuple(("authorization", header) for header in headers)) == expected


@pytest.mark.parametrize("blank", ["", "  \n"])
@pytest.mark.parametrize("headers", [(), AUTHORIZATION, (("authorization", "Basic x"),)])
async def test_a_server_without_a_token_lets_nobody_in(
    settings: Settings, start_server: StartServer, blank: str, headers: tuple[tuple[str, str], ...]
) -> None:
    server = await start_server(replace(settings, api_token=blank))

    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        assert await _info(channel, headers) == "UNAVAILABLE AUTH_NOT_CONFIGURED"


async def test_blanks_around_the_configured_token_do_not_count(
    settings: Settings, start_server: StartServer
) -> None:
    server = await start_server(replace(settings, api_token=f" {TOKEN}\n"))

    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        assert await _info(channel, AUTHORIZATION) == "OK"


async def test_every_rpc_of_every_service_needs_a_token(channel: grpc.aio.Channel) -> None:
    answers = {}
    for service in SERVICES:
        for method in service.methods:
            call = channel.stream_stream(f"/{service.full_name}/{method.name}")()
            answers[f"{service.name}.{method.name}"] = await call.code()

    assert len(answers) > 40
    assert set(answers.values()) == {grpc.StatusCode.UNAUTHENTICATED}


async def test_an_unknown_rpc_needs_a_token_too(channel: grpc.aio.Channel) -> None:
    unknown = channel.unary_unary("/noetlpb.v1.OutboxService/Nonsense")

    assert await unknown(b"").code() == grpc.StatusCode.UNAUTHENTICATED
    assert await unknown(b"", metadata=AUTHORIZATION).code() == grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_lists_every_service_without_a_token(server: Server) -> None:
    def list_services() -> set[str]:
        with grpc.insecure_channel(server.address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    services = await asyncio.to_thread(list_services)

    assert services >= {*SERVICE_NAMES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_reflection_can_be_switched_off(settings: Settings, start_server: StartServer) -> None:
    server = await start_server(replace(settings, reflection=False))

    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_are_an_invalid_argument(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary("/noetlpb.v1.OperationsService/GetServerInfo")

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(b"\xff\xff\xff", metadata=AUTHORIZATION)

    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert _reason(raised.value) == "FIELD_INVALID"


async def test_a_request_above_the_limit_is_told_the_limit(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary("/noetlpb.v1.OperationsService/GetServerInfo")

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(b"\x00" * (32 * 1024 * 1024 + 1), metadata=AUTHORIZATION)

    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert _reason(raised.value) == "REQUEST_TOO_LARGE"
    assert str(32 * 1024 * 1024) in (raised.value.details() or "")


async def _health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def _until_health(channel: grpc.aio.Channel, service: str, wanted: int) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(10):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
            if answer.status == wanted:
                return


async def test_health_answers_for_each_service(channel: grpc.aio.Channel) -> None:
    for name in ("", "tailer", *SERVICE_NAMES):
        assert await _health(channel, name) == health_pb2.HealthCheckResponse.SERVING

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _health(channel, "nobody")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_health_follows_the_database_and_calls_recover(
    start_server: StartServer, channel_to: Callable[[str], Awaitable[grpc.aio.Channel]]
) -> None:
    async with Postgres(durable=False) as postgres:
        server = await start_server(settings_for(await create_database(postgres, "noetl")))
        channel = await channel_to(server.address)
        name = "noetlpb.v1.OutboxService"
        assert await _health(channel, name) == health_pb2.HealthCheckResponse.SERVING

        await postgres.stop()
        await _until_health(channel, name, health_pb2.HealthCheckResponse.NOT_SERVING)
        for other in SERVICE_NAMES:
            assert await _health(channel, other) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await _health(channel, "") == health_pb2.HealthCheckResponse.SERVING

        await postgres.start()
        await _until_health(channel, name, health_pb2.HealthCheckResponse.SERVING)


async def test_a_service_that_is_not_built_is_unimplemented(channel: grpc.aio.Channel) -> None:
    scaler = channel.unary_unary("/externalscaler.ExternalScaler/Nonsense")

    assert await scaler(b"", metadata=AUTHORIZATION).code() == grpc.StatusCode.UNIMPLEMENTED


async def test_stopping_ends_open_watches_and_refuses_new_calls(
    settings: Settings, start_server: StartServer, channel_to: Callable[[str], Awaitable[grpc.aio.Channel]]
) -> None:
    server = await start_server(replace(settings, grace_seconds=15.0))
    channel = await channel_to(server.address)
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

    async with asyncio.timeout(5):  # far less than the grace
        await server.drain()

    assert await watch.code() == grpc.StatusCode.UNAVAILABLE
    stub = operations_pb2_grpc.OperationsServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GetServerInfo(INFO, metadata=AUTHORIZATION, timeout=1)
    assert raised.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_server_without_a_database_says_what_to_set() -> None:
    from noetl_grpc.server import serving

    with pytest.raises(SettingsError, match="NOETL_DATABASE_URL"):
        async with serving(Settings(metrics_address=None)):
            pass


async def test_a_server_refuses_an_empty_database_and_names_the_cure(
    postgres: Postgres, start_server: StartServer
) -> None:
    conn = await asyncpg.connect(postgres.url())
    await conn.execute("CREATE DATABASE empty_one")
    await conn.close()

    with pytest.raises(SchemaError, match="noetl-grpc migrate"):
        await start_server(settings_for(postgres.url("empty_one")))


async def test_a_port_that_is_taken_is_named(
    settings: Settings, server: Server, start_server: StartServer
) -> None:
    with pytest.raises(SettingsError, match="NOETL_GRPC_PORT"):
        await start_server(replace(settings, grpc_port=server.port))
