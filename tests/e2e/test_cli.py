"""Every command that asks a server, as a user types it: tables for people, JSON for machines, exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc import NoetlClient, OutboxMessage
from noetl_grpc.server import Server
from tests.cli import Cli
from tests.conftest import TOKEN
from tests.subscriptions import add_entry

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    """The command line, told of the server by the environment."""
    return Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN})


async def test_wrong_token_no_token_no_server_bad_arguments_unknown_things(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    cases = (
        (cli("outbox", "stats", "--token-file", "wrong", code=4), "--token-file"),
        (cli("outbox", "stats", code=4, NOETL_INTERNAL_API_TOKEN=""), "NOETL_INTERNAL_API_TOKEN"),
        (cli("outbox", "stats", "--address", "127.0.0.1:1", code=3), "noetl-grpc dev"),
        (cli("subscription", "get", "99", code=1), "99"),
        (cli("subscription", "register", "demo/none", code=1), "demo/none"),
        (cli("outbox", "requeue", code=2), "--all"),
        (cli("outbox", "dead", "--dead-before", "soon", code=2), "--dead-before"),
        (cli("subscription", "list", "--state", "odd", code=2), "active"),
        (cli("outbox", "stats", "--token-file", "nowhere", code=2), "nowhere"),
        (cli("outbox", "stats", code=2, NOETL_GRPC_TLS="maybe"), "NOETL_GRPC_TLS"),
    )

    for answer, word in [(await asking, word) for asking, word in cases]:
        assert answer.out == ""
        assert word in answer.err
        assert len(answer.err.splitlines()) == 1, answer.err


async def test_a_development_server_in_the_folder_is_found(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".noetl").mkdir()
    (tmp_path / ".noetl/ready.json").write_text(json.dumps({"address": server.address, "token": TOKEN}))

    answer = await Cli(tmp_path)("outbox", "pending")

    assert answer.out == "0\n"


async def test_outbox_counts(cli: Cli, client: NoetlClient) -> None:
    await client.outbox.enqueue(OutboxMessage(event_id=n, payload_json="{}") for n in (1, 2, 3))
    claim = await client.outbox.claim(limit=1)
    await client.outbox.mark_published([claim.rows[0].outbox_id], claim_token=claim.claim_token)

    pending, stats, table = await asyncio.gather(
        cli("outbox", "pending", "--json"), cli("outbox", "stats", "--json"), cli("outbox", "stats")
    )

    assert pending.document == {"pending": 2}
    age = stats.document.pop("oldest_pending_age")
    assert stats.document | {"oldest_pending_age": None} == {
        "pending": 2,
        "delayed": 0,
        "in_flight": 0,
        "expired": 0,
        "dead": 0,
        "oldest_pending_age": None,
    }
    assert age is None or age >= 0
    assert "pending" in table.out


async def test_a_subscription_from_registration_to_its_end(cli: Cli, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "demo/feed")

    registered = (await cli("subscription", "register", "demo/feed", "--json")).document
    subscription_id = registered["subscription"]["subscription_id"]
    await cli("subscription", "activate", subscription_id, "--actor", "ann", "--reason", "go live")
    etag = (await cli("subscription", "get", subscription_id, "--json")).document["etag"]
    states = [
        (await cli("subscription", action, subscription_id, "--json")).document["state"]
        for action in ("pause", "resume", "drain")
    ]
    illegal = await cli("subscription", "pause", subscription_id, code=1)
    outdated = await cli("subscription", "deactivate", subscription_id, "--etag", etag, code=1)
    await cli("subscription", "deactivate", subscription_id)
    events, table = await asyncio.gather(
        cli("subscription", "events", subscription_id, "--json"),
        cli("subscription", "events", subscription_id),
    )

    assert isinstance(subscription_id, str)
    assert registered["created"] is True
    assert states == ["PAUSED", "ACTIVE", "DRAINING"]
    assert "DRAINING" in illegal.err
    assert "etag" in outdated.err
    assert [event["state"] for event in events.lines] == [
        "REGISTERED",
        "ACTIVE",
        "PAUSED",
        "ACTIVE",
        "DRAINING",
        "DEACTIVATED",
    ]
    assert "go live" in table.out
