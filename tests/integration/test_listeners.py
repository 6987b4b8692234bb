"""Who may connect where: TLS, client certificates, renewed files, and the listener for probes and KEDA."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from externalscaler import externalscaler_pb2, externalscaler_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from noetlpb.v1 import operations_pb2, operations_pb2_grpc

from noetl_grpc.errors import SettingsError
from noetl_grpc.server import SERVICE_NAMES, Server
from noetl_grpc.settings import Settings
from tests.certificates import Authority, Pair
from tests.conftest import AUTHORIZATION, CHANNEL_OPTIONS

StartServer = Callable[[Settings], Awaitable[Server]]

SERVING = health_pb2.HealthCheckResponse.SERVING


def _tls(settings: Settings, folder: Path, pair: Pair, *, client_ca: bytes | None = None) -> Settings:
    certificate, key = pair.write(folder, "server")
    if client_ca is None:
        return replace(settings, tls_certificate=certificate, tls_key=key)
    (folder / "clients.crt").write_bytes(client_ca)
    return replace(settings, tls_certificate=certificate, tls_key=key, tls_client_ca=folder / "clients.crt")


@asynccontextmanager
async def _secure(address: str, ca: bytes, pair: Pair | None = None) -> AsyncIterator[grpc.aio.Channel]:
    credentials = grpc.ssl_channel_credentials(
        ca, pair.key if pair else None, pair.certificate if pair else None
    )
    async with grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS) as channel:
        yield channel


async def _ask(channel: grpc.aio.Channel) -> grpc.StatusCode:
    call = operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
        operations_pb2.GetServerInfoRequest(), metadata=AUTHORIZATION, timeout=5
    )
    return await call.code()


async def test_with_tls_only_those_who_trust_the_certificate_speak_it(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    authority, stranger = Authority(), Authority("stranger")
    server = await start_server(_tls(settings, tmp_path, authority.issue()))

    async with _secure(server.address, authority.certificate) as channel:
        assert await _ask(channel) is grpc.StatusCode.OK
    async with _secure(server.address, stranger.certificate) as channel:
        assert await _ask(channel) is grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        assert await _ask(channel) is grpc.StatusCode.UNAVAILABLE


async def test_with_a_client_authority_a_certificate_of_its_is_needed(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    authority, clients, stranger = Authority(), Authority("clients"), Authority("stranger")
    server = await start_server(_tls(settings, tmp_path, authority.issue(), client_ca=clients.certificate))

    answers = {}
    for name, pair in (("none", None), ("stranger", stranger.issue("x")), ("known", clients.issue("x"))):
        async with _secure(server.address, authority.certificate, pair) as channel:
            answers[name] = await _ask(channel)

    assert answers == {
        "none": grpc.StatusCode.UNAVAILABLE,
        "stranger": grpc.StatusCode.UNAVAILABLE,
        "known": grpc.StatusCode.OK,
    }


def _replace(pair: Pair, settings: Settings) -> None:
    """As an operator does: each file whole, one after the other."""
    assert settings.tls_certificate is not None
    assert settings.tls_key is not None
    for path, content in ((settings.tls_certificate, pair.certificate), (settings.tls_key, pair.key)):
        path.with_suffix(".new").write_bytes(content)
        os.replace(path.with_suffix(".new"), path)


async def test_a_renewed_certificate_is_used_without_a_restart(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    before, after = Authority(), Authority("the next")
    settings = _tls(settings, tmp_path, before.issue())
    server = await start_server(settings)

    async with _secure(server.address, before.certificate) as old:
        assert await _ask(old) is grpc.StatusCode.OK

        _replace(after.issue(), settings)

        async with asyncio.timeout(10):
            answer = None
            while answer is not grpc.StatusCode.OK:  # the files are looked at once a second
                async with _secure(server.address, after.certificate) as channel:
                    answer = await _ask(channel)
        assert await _ask(old) is grpc.StatusCode.OK  # an open connection goes on


async def test_files_that_do_not_fit_leave_the_last_good_ones(
    settings: Settings,
    start_server: StartServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = Authority()
    settings = _tls(settings, tmp_path, authority.issue())
    server = await start_server(settings)

    _replace(Pair(key=authority.issue().key, certificate=authority.issue().certificate), settings)

    async with asyncio.timeout(10):
        while "do not fit" not in caplog.text:
            async with _secure(server.address, authority.certificate) as channel:
                assert await _ask(channel) is grpc.StatusCode.OK


async def test_files_that_do_not_fit_stop_the_start(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    authority = Authority()
    mixed = Pair(key=authority.issue().key, certificate=authority.issue().certificate)

    with pytest.raises(SettingsError, match=r"server\.key and server\.crt do not fit"):
        await start_server(_tls(settings, tmp_path, mixed))


async def test_the_operations_listener_serves_probes_and_keda_without_token_or_tls(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    with_tls = _tls(settings, tmp_path, Authority().issue())
    server = await start_server(replace(with_tls, ops_address=("127.0.0.1", 0)))

    async with grpc.aio.insecure_channel(server.ops_address, options=CHANNEL_OPTIONS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert {name: one.status for name, one in listed.items()} == dict.fromkeys(
            ("", "tailer", *SERVICE_NAMES), SERVING
        )
        watch = health.Watch(health_pb2.HealthCheckRequest(service="noetlpb.v1.OutboxService"))
        assert (await watch.read()).status == SERVING
        keda = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        assert not (await keda.IsActive(externalscaler_pb2.ScaledObjectRef())).result
        # Nothing else is served there, with or without a token.
        assert await _ask(channel) is grpc.StatusCode.UNIMPLEMENTED
        nothing = operations_pb2_grpc.OperationsServiceStub(channel).GetServerInfo(
            operations_pb2.GetServerInfoRequest()
        )
        assert await nothing.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_on_the_main_port_keda_needs_a_token(settings: Settings, start_server: StartServer) -> None:
    server = await start_server(replace(settings, ops_address=("127.0.0.1", 0)))

    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        keda = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        asked = keda.IsActive(externalscaler_pb2.ScaledObjectRef())
        assert await asked.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_taken_operations_port_is_named(settings: Settings, start_server: StartServer) -> None:
    server = await start_server(settings)

    with pytest.raises(SettingsError, match="NOETL_OPS_ADDR"):
        await start_server(replace(settings, ops_address=("127.0.0.1", server.port)))


async def test_streams_of_the_operations_listener_end_with_the_server(
    settings: Settings, start_server: StartServer
) -> None:
    server = await start_server(replace(settings, ops_address=("127.0.0.1", 0), grace_seconds=60.0))

    async with grpc.aio.insecure_channel(server.ops_address, options=CHANNEL_OPTIONS) as channel:
        stream = externalscaler_pb2_grpc.ExternalScalerStub(channel).StreamIsActive(
            externalscaler_pb2.ScaledObjectRef()
        )
        await stream.read()
        async with asyncio.timeout(10):
            await server.drain()
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
