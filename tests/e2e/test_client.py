"""The typed client against a running server: answers, errors, credentials, and a server that goes away."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc import (
    DeadlineExceeded,
    EventEnvelope,
    InvalidRequest,
    NoetlClient,
    NotFound,
    SubscriptionState,
    Tls,
    Unauthenticated,
    Unavailable,
)
from noetl_grpc.client.operations import TailerMode
from noetl_grpc.errors import IllegalTransition
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.conftest import TOKEN
from tests.processes import until_answered
from tests.subscriptions import add_entry

StartServer = Callable[[Settings], Awaitable[Server]]


async def test_it_knows_the_server(client: NoetlClient) -> None:
    info = await client.operations.server_info()

    assert info.shards == 1
    assert info.limits.batch_items == 10_000
    assert info.tailer_mode is TailerMode.DISABLED
    assert await client.health()
    assert await client.health("noetlpb.v1.OutboxService")


async def test_a_server_whose_streams_may_miss_events_says_so(
    settings: Settings, conn: asyncpg.Connection, start_server: StartServer
) -> None:
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN xact_id")

    server = await start_server(settings)

    async with NoetlClient(server.address, token=TOKEN) as client:
        assert (await client.operations.server_info()).tailer_mode is TailerMode.OVERLAP


async def test_errors_are_ours_with_reason_and_metadata(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await add_entry(conn, "demo/feed")
    registered = await client.subscription.register("demo/feed")

    with pytest.raises(IllegalTransition) as illegal:
        await client.subscription.pause(registered.subscription.subscription_id)
    with pytest.raises(NotFound) as missing:
        await client.subscription.get(99)
    with pytest.raises(InvalidRequest) as invalid:
        await client.subscription.get(-1)

    assert illegal.value.metadata["state"] == "REGISTERED"
    assert missing.value.reason == "SUBSCRIPTION_NOT_FOUND"
    assert [field for field, _ in invalid.value.violations] == ["subscription_id"]


async def test_a_lifecycle_call_leaves_one_event_with_actor_and_request(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await add_entry(conn, "demo/feed")
    registered = await client.subscription.register("demo/feed")
    subscription_id = registered.subscription.subscription_id

    active = await client.subscription.activate(subscription_id, actor="ann", reason="go")

    events = [event async for event in client.subscription.events(subscription_id, page_size=1)]
    assert registered.created
    assert active.state is SubscriptionState.ACTIVE
    assert [event.state for event in events] == [SubscriptionState.REGISTERED, SubscriptionState.ACTIVE]
    assert (events[1].actor, events[1].reason) == ("ann", "go")
    assert events[1].request_id


async def test_events_are_stored_once_and_bad_ones_named(
    client: NoetlClient, conn: asyncpg.Connection
) -> None:
    catalog_id = await add_entry(conn, "demo/hello", kind="playbook")
    events = [
        EventEnvelope(
            execution_id=7, event_id=number, catalog_id=catalog_id, event_type="playbook.initialized"
        )
        for number in (1, 2, 0)
    ]

    first = await client.projection.project_events(events)
    again = await client.projection.project_events(events)

    assert (first.projected, first.duplicates) == (2, 0)
    assert [(bad.index, bad.reason) for bad in first.rejected] == [(2, "FIELD_INVALID")]
    assert (again.projected, again.duplicates) == (0, 2)


async def test_a_token_may_come_from_a_file_and_may_change(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("wrong\n")

    async with NoetlClient(server.address, token_file=file) as client:
        with pytest.raises(Unauthenticated) as refused:
            await client.operations.server_info()
        fresh = tmp_path / "fresh"
        fresh.write_text(TOKEN)
        fresh.replace(file)

        assert (await client.operations.server_info()).version

    assert refused.value.reason == "TOKEN_INVALID"


async def test_a_client_from_the_environment(server: Server) -> None:
    env = {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN}

    async with NoetlClient.from_env(env) as client:
        assert (await client.operations.server_info()).version


async def test_a_server_that_is_not_there_is_unavailable_within_seconds() -> None:
    async with NoetlClient("127.0.0.1:1", token="x") as client, asyncio.timeout(10):
        with pytest.raises(Unavailable):
            await client.operations.server_info()


async def test_a_stream_of_a_server_that_is_not_there_is_an_error_too() -> None:
    async with NoetlClient("127.0.0.1:1", token="x") as client, asyncio.timeout(20):
        with pytest.raises(Unavailable):
            await anext(client.subscription.watch())
        with pytest.raises(Unavailable):
            await anext(client.replay.events(1))


async def test_a_call_has_a_deadline_of_its_own_and_the_clients(
    server: Server, conn: asyncpg.Connection
) -> None:
    async with (
        conn.transaction(),
        NoetlClient(server.address, token=TOKEN, timeout_seconds=0.2) as hasty,
        NoetlClient(server.address, token=TOKEN) as patient,
        asyncio.timeout(10),
    ):
        await conn.execute("LOCK TABLE noetl.outbox")

        with pytest.raises(DeadlineExceeded):
            await hasty.outbox.stats()
        with pytest.raises(DeadlineExceeded):
            await anext(hasty.outbox.dead_rows())
        with pytest.raises(DeadlineExceeded):
            await patient.outbox.stats(timeout=0.2)


async def _watches(client: NoetlClient, number: int) -> bool:
    """Whether so many watches have been opened."""
    found = await client.operations.server_metrics(["grpc_server_started_total"])
    method = "WatchSubscriptions"
    return sum(one.value for one in found.samples if one.labels["grpc_method"] == method) >= number


async def test_a_watch_goes_on_where_it_was_after_a_restart(
    settings: Settings, start_server: StartServer, conn: asyncpg.Connection
) -> None:
    await add_entry(conn, "demo/first")
    await add_entry(conn, "demo/second")
    server = await start_server(settings)
    async with NoetlClient(server.address, token=TOKEN) as client, asyncio.timeout(30):
        first = (await client.subscription.register("demo/first")).subscription
        everything = client.subscription.watch()
        quiet = client.subscription.watch(path_prefix="demo/second")
        present = await anext(everything)
        # It has nothing to tell before the restart.
        waiting = asyncio.ensure_future(anext(quiet))
        await until_answered(lambda: _watches(client, 2))
        await client.subscription.activate(first.subscription_id)
        active = await anext(everything)

        await server.drain()
        await start_server(replace(settings, grpc_port=server.port))
        second = (await client.subscription.register("demo/second")).subscription
        after, found = await anext(everything), await waiting

    assert (present.initial, present.subscription.subscription_id) == (True, first.subscription_id)
    assert (active.initial, active.subscription.state) == (False, SubscriptionState.ACTIVE)
    # Nothing is told again: the next one is what happened since.
    assert (after.initial, after.subscription.subscription_id) == (False, second.subscription_id)
    assert found.subscription.subscription_id == second.subscription_id


async def test_a_safe_call_outlives_a_restart_of_the_server(
    settings: Settings, start_server: StartServer
) -> None:
    first = await start_server(settings)
    async with NoetlClient(first.address, token=TOKEN) as client:
        await client.operations.server_info()
        await first.drain()

        async def come_back() -> None:
            await start_server(replace(settings, grpc_port=first.port))

        back = asyncio.create_task(come_back())
        info = await client.operations.server_info()
        await back

    assert info.version


def _make_certificates(folder: Path) -> dict[str, bytes]:
    """An authority, and a server's and a client's certificate signed by it."""

    def openssl(arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)

    openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority")
    (folder / "names").write_text("subjectAltName=DNS:noetl.test")
    for name in ("server", "client"):
        openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN=noetl.test")
        openssl(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days 2 -extfile names"
        )
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_tls_and_client_certificates(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    pem = await asyncio.to_thread(_make_certificates, tmp_path)
    server = await start_server(
        replace(
            settings,
            tls_certificate=tmp_path / "server.pem",
            tls_key=tmp_path / "server.key",
            tls_client_ca=tmp_path / "ca.pem",
        )
    )
    known = Tls(
        authorities=pem["ca.pem"],
        certificate=pem["client.pem"],
        key=pem["client.key"],
        server_name="noetl.test",
    )
    nameless = Tls(authorities=pem["ca.pem"], server_name="noetl.test")

    async with NoetlClient(server.address, token=TOKEN, tls=known) as client:
        assert (await client.operations.server_info()).version
    for tls in (nameless, None):
        async with NoetlClient(server.address, token=TOKEN, tls=tls) as client:
            with pytest.raises(Unavailable):
                await client.operations.server_info()


async def test_the_server_tells_its_metrics_to_whoever_has_a_token(client: NoetlClient) -> None:
    await client.operations.server_info()

    found = await client.operations.server_metrics(["grpc_server_handled", "noetl_outbox_rows"])

    assert {sample.name for sample in found.samples} == {"grpc_server_handled_total", "noetl_outbox_rows"}
    calls = [sample for sample in found.samples if sample.labels.get("grpc_method") == "GetServerInfo"]
    assert sum(sample.value for sample in calls if sample.labels["grpc_code"] == "OK") >= 1
    with pytest.raises(InvalidRequest):
        await client.operations.server_metrics(["x"] * 101)
