"""The launcher of NATS: JetStream works, what it stored survives, and the process ends with its owner."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import nats
import pytest
from nats.js.errors import ServiceUnavailableError

from noetl_grpc.dev.nats import Nats
from noetl_grpc.dev.process import AlreadyRunning, LaunchError, PortTaken
from tests.processes import is_alive, owner, until


async def stored(server: Nats) -> int:
    """How many messages the stream of this test holds."""
    connection = await nats.connect(server.url, allow_reconnect=False)
    try:
        return (await connection.jetstream().stream_info("kept")).state.messages
    finally:
        await connection.close()


async def store(server: Nats) -> None:
    connection = await nats.connect(server.url, allow_reconnect=False)
    try:
        jetstream = connection.jetstream()
        await jetstream.add_stream(name="kept", subjects=["kept.>"])
        await jetstream.publish("kept.one", b"1")
    finally:
        await connection.close()


async def test_what_jetstream_stored_survives_restart_stop_and_kill() -> None:
    async with Nats() as server:
        port, folder = server.port, server.store_dir
        await store(server)

        await server.restart()
        assert (server.port, await stored(server)) == (port, 1)

        await server.stop()
        assert server.pid == 0
        await server.start()
        await store(server)

        pid = server.pid
        server.kill()
        assert not is_alive(pid)
        await server.start()
        assert (server.port, await stored(server)) == (port, 2)

    assert not folder.exists()


async def test_a_folder_of_ones_own_keeps_its_store_and_has_one_user(tmp_path: Path) -> None:
    async with Nats(tmp_path / "nats") as server:
        await store(server)
        with pytest.raises(AlreadyRunning, match=f"{tmp_path}/nats is already run by process {os.getpid()}$"):
            await Nats(tmp_path / "nats").start()

    async with Nats(tmp_path / "nats") as server:
        assert await stored(server) == 1


async def test_after_the_owner_was_killed_its_store_can_be_used_at_once(tmp_path: Path) -> None:
    async with owner(None, tmp_path / "nats") as (process, told):
        process.kill()

        async with Nats(tmp_path / "nats") as server:
            await store(server)
        await until(lambda: not any(map(is_alive, told["pids"])))


async def test_the_size_of_a_message_is_limited_as_asked() -> None:
    async with Nats(max_payload=1000) as server:
        connection = await nats.connect(server.url)
        assert connection.max_payload == 1000
        await connection.close()


async def test_jetstream_can_be_left_out() -> None:
    async with Nats(jetstream=False) as server:
        connection = await nats.connect(server.url)
        with pytest.raises(ServiceUnavailableError):
            await connection.jetstream().account_info()
        await connection.close()


async def test_further_configuration_is_used() -> None:
    accounts = 'authorization { users: [ { user: "a", password: "b" } ] }'
    async with Nats(config=accounts) as server:
        connection = await nats.connect(server.url, user="a", password="b")
        await connection.close()

        stranger = nats.NATS()
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await stranger.connect(server.url, user="a", password="wrong", allow_reconnect=False)
        await stranger.close()


async def test_a_bad_configuration_fails_with_the_words_of_the_server() -> None:
    with pytest.raises(LaunchError, match="unknown field"):
        async with Nats(config="no_such_thing: 1"):
            pass


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(PortTaken):
        async with Nats(port=listener.getsockname()[1]):
            pass
