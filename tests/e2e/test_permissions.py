"""Every RPC of every service, walked from the descriptors, so that a new one can't be forgotten."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import orjson
import pytest
from noetlpb.v1 import projection_pb2, projection_pb2_grpc

from noetl_grpc.core import access
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.conftest import AUTHORIZATION, CHANNEL_OPTIONS
from tests.factories import EVENT_ID, EXECUTION_ID, add_catalog_entry, make_event
from tests.rpcs import Answer, Rpc, call, every_rpc, fields_named

DENIED = grpc.StatusCode.PERMISSION_DENIED

#: A stream that was let in goes on; this long is enough to see that it was not denied.
LET_IN_SECONDS = 0.5

#: What only the other tenant's events hold.
MARK = "globex-4242-secret"
OWN = {"tenant_id": "acme", "organization_id": "labs"}
FOREIGN = {"tenant_id": "globex", "organization_id": "labs"}


def _entry(name: str, *scopes: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
        "scopes": list(scopes),
        **more,
    }


@pytest.fixture
async def channel(
    settings: Settings, start_server: Callable[[Settings], Awaitable[Server]], tmp_path: Path
) -> AsyncIterator[grpc.aio.Channel]:
    """A server with a token per scope (`only outbox:read`), one that lacks each, and one bound to acme/labs."""
    file = tmp_path / "tokens.json"
    entries = [_entry(f"only {scope}", scope) for scope in access.SCOPES]
    entries += [_entry(f"all but {scope}", *(access.SCOPES - {scope})) for scope in access.SCOPES]
    entries += [_entry("bound", *access.SCOPES, tenants=[OWN]), _entry("none")]
    file.write_bytes(orjson.dumps({"tokens": entries}))
    server = await start_server(replace(settings, tokens_file=file))
    async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as opened:
        yield opened


async def _answers(calls: dict[Any, Callable[[], Awaitable[Answer]]]) -> dict[Any, Answer]:
    """All of them, a few at a time."""
    width = asyncio.Semaphore(32)

    async def one(make: Callable[[], Awaitable[Answer]]) -> Answer:
        async with width:
            return await make()

    return dict(zip(calls, await asyncio.gather(*map(one, calls.values())), strict=True))


async def test_an_rpc_needs_its_scope_and_no_other(channel: grpc.aio.Channel) -> None:
    calls: dict[Any, Callable[[], Awaitable[Answer]]] = {}
    for rpc in every_rpc():
        needed = access.scope_of(rpc.path)
        for token in (f"only {needed}", f"all but {needed}", "none"):
            calls[rpc, token] = lambda rpc=rpc, token=token: call(  # type: ignore[misc]  # mypy#4226
                channel, rpc, rpc.request_type(), token=token, seconds=LET_IN_SECONDS
            )

    for (rpc, token), answer in (await _answers(calls)).items():
        if token.startswith("only"):
            assert answer.code is not DENIED, f"{rpc} with {token}"
            assert answer.code is not grpc.StatusCode.UNAUTHENTICATED, f"{rpc} with {token}"
        else:
            assert answer.code is DENIED, f"{rpc} with {token}: {answer}"
            assert answer.reason == "SCOPE_MISSING"
            assert answer.metadata == {"token": token, "scope": access.scope_of(rpc.path)}


def _request(rpc: Rpc, tenant: dict[str, str]) -> Any:
    """One that names the tenant wherever it can, and the marked execution and event."""
    request = rpc.request_type()
    _fill(request, tenant)
    return request


def _fill(message: Any, tenant: dict[str, str]) -> None:
    values = {**tenant, "execution_id": EXECUTION_ID, "event_id": EVENT_ID, "event_type": "x", "limit": 0}
    for field in message.DESCRIPTOR.fields:
        if field.name in values:
            setattr(message, field.name, values[field.name])
        elif field.name == "execution_ids":
            message.execution_ids.append(EXECUTION_ID)
        elif field.name == "events":
            _fill(message.events.add(), tenant)
        elif field.name == "timeout":
            message.timeout.FromMilliseconds(50)


@pytest.fixture
async def marked_execution(channel: grpc.aio.Channel, conn: asyncpg.Connection) -> None:
    """An execution of globex with its snapshot."""
    await add_catalog_entry(conn)
    stub = projection_pb2_grpc.ProjectionServiceStub(channel)
    events = [
        make_event(
            number,
            **FOREIGN,
            node_name=MARK,
            meta_json=orjson.dumps({"stage_id": MARK}).decode(),
            result_json=orjson.dumps({"status": "ok", "context": {"note": MARK}}).decode(),
        )
        for number in range(3)
    ]
    stored = await stub.ProjectEvents(
        projection_pb2.ProjectEventsRequest(events=events), metadata=AUTHORIZATION
    )
    assert stored.projected == 3
    advanced = await stub.AdvanceProjections(
        projection_pb2.AdvanceProjectionsRequest(execution_ids=[EXECUTION_ID], **FOREIGN),
        metadata=AUTHORIZATION,
    )
    assert len(advanced.advanced) == 1


async def _belongings(conn: asyncpg.Connection) -> list[Any]:
    """Everything that globex has."""
    events = await conn.fetch(
        "SELECT * FROM noetl.event WHERE tenant_id = 'globex' ORDER BY execution_id, event_id"
    )
    snapshots = await conn.fetch(
        "SELECT * FROM noetl.projection_snapshot WHERE tenant_id = 'globex' ORDER BY aggregate_type, aggregate_id"
    )
    return [tuple(row) for row in (*events, *snapshots)]


def _speaks_of_tenants(rpc: Rpc) -> bool:
    return any(fields_named(rpc.request_type.DESCRIPTOR, "tenant_id"))


async def test_a_bound_token_neither_reads_nor_writes_what_is_another_tenants(
    channel: grpc.aio.Channel, conn: asyncpg.Connection, marked_execution: None
) -> None:
    before = await _belongings(conn)
    calls: dict[Any, Callable[[], Awaitable[Answer]]] = {}
    for rpc in every_rpc():
        for name, tenant in (("own", OWN), ("foreign", FOREIGN), ("default", {})):
            calls[rpc, name] = lambda rpc=rpc, tenant=tenant: call(  # type: ignore[misc]  # mypy#4226
                channel, rpc, _request(rpc, tenant), token="bound", seconds=1.5
            )

    answers = await _answers(calls)

    for (rpc, name), answer in answers.items():
        if _speaks_of_tenants(rpc) and name == "own":
            assert answer.code is not DENIED, f"{rpc}: {answer}"
        else:
            assert (answer.code, answer.reason) == (DENIED, "TENANT_DENIED"), f"{rpc}, {name}: {answer}"
        told = b"".join(answer.messages) + repr(answer.metadata).encode()
        assert MARK.encode() not in told, f"{rpc}, {name}"
    assert len(before) >= 3
    assert await _belongings(conn) == before


async def test_one_foreign_event_denies_the_whole_batch(
    channel: grpc.aio.Channel, conn: asyncpg.Connection
) -> None:
    await add_catalog_entry(conn)
    project = next(rpc for rpc in every_rpc() if rpc.path.endswith("/ProjectEvents"))
    batch = [make_event(number, **(FOREIGN if number == 7 else OWN)) for number in range(10)]

    answer = await call(channel, project, projection_pb2.ProjectEventsRequest(events=batch), token="bound")

    assert (answer.code, answer.reason) == (DENIED, "TENANT_DENIED")
    assert await conn.fetchval("SELECT count(*) FROM noetl.event") == 0


async def test_a_token_is_taken_away_and_given_without_a_restart(
    settings: Settings,
    start_server: Callable[[Settings], Awaitable[Server]],
    tmp_path: Path,
    channel_to: Callable[[str], Awaitable[grpc.aio.Channel]],
) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(orjson.dumps({"tokens": [_entry("first", "operations:read")]}))
    server = await start_server(replace(settings, tokens_file=file))
    channel = await channel_to(server.address)
    info = next(rpc for rpc in every_rpc() if rpc.path.endswith("/GetServerInfo"))

    async def ask(token: str) -> grpc.StatusCode:
        return (await call(channel, info, info.request_type(), token=token)).code

    assert await ask("first") is grpc.StatusCode.OK
    assert await ask("second") is grpc.StatusCode.UNAUTHENTICATED

    file.write_bytes(orjson.dumps({"tokens": [_entry("second", "operations:read")]}))
    async with asyncio.timeout(10):
        while await ask("second") is not grpc.StatusCode.OK:
            pass  # the file is looked at once a second

    assert await ask("first") is grpc.StatusCode.UNAUTHENTICATED
