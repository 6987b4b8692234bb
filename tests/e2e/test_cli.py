"""Every command that asks a server, as a user types it: tables for people, JSON for machines, exit codes."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc import EventEnvelope, NoetlClient, OutboxMessage
from noetl_grpc.cli.story import Story, stories
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from tests.cli import Cli
from tests.conftest import TOKEN
from tests.subscriptions import add_entry

StartServer = Callable[[Settings], Awaitable[Server]]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    """The command line, told of the server by the environment."""
    return Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN})


async def test_wrong_token_no_token_no_server_bad_arguments_unknown_things(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    (tmp_path / "lines").write_text("two\nlines")
    cases = (
        (cli("outbox", "stats", "--token-file", "wrong", code=4), "--token-file"),
        (cli("outbox", "stats", code=4, NOETL_INTERNAL_API_TOKEN=""), "NOETL_INTERNAL_API_TOKEN"),
        (cli("outbox", "stats", "--address", "127.0.0.1:1", code=3), "noetl-grpc dev"),
        (cli("subscription", "get", "99", code=1), "99"),
        (cli("subscription", "register", "demo/none", code=1), "demo/none"),
        (cli("projection", "get", "99", code=1), "99"),
        (cli("projection", "retry", code=2), "--all"),
        (cli("replay", "7", "--rules", "odd", code=2), "union"),
        (cli("outbox", "stats", "--token-file", "nowhere", code=2), "nowhere"),
        (cli("outbox", "stats", "--token-file", "lines", code=4), "one line"),
        (cli("outbox", "stats", "--tls-ca", "wrong", code=3), "TLS"),
        (cli("replay", 2**63, code=2), "64 bits"),
        (cli("reply", 7, code=2), "Did you mean 'replay'?"),
        (cli("replay", "abc", code=2), "`noetl-grpc replay --help`"),
        (cli("replay", "7", "--json=3", code=2), "--json"),
        (cli("outbox", "dead", "--limit", "-3", code=2), "x>=0"),
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


async def test_dead_rows_are_listed_and_requeued(
    cli: Cli, client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await client.outbox.enqueue(
        OutboxMessage(event_id=n, execution_id=n, subject="orders.late", payload_json='{"n": 1}')
        for n in (1, 2)
    )
    await conn.execute(
        "UPDATE noetl.outbox SET status = 'FAILED', dead_at = now(), available_at = 'infinity', attempts = 20,"
        " last_error = 'timeout ' || event_id"
    )

    listed, table, counted, none = await asyncio.gather(
        cli("outbox", "dead", "--json", "--payload"),
        cli("outbox", "dead", "--error-contains", "timeout 2"),
        cli("outbox", "requeue", "--subject", "orders.late", "--dry-run", "--json"),
        cli("outbox", "dead", "--execution", "9"),
    )
    requeued = await cli("outbox", "requeue", "--all")

    assert [line["row"]["event_id"] for line in listed.lines] == ["1", "2"]
    assert listed.lines[0]["last_error"] == "timeout 1"
    assert "timeout 2" in table.out
    assert "timeout 1" not in table.out
    assert counted.document == {"requeued": 2, "dry_run": True}
    assert none.out == "no dead rows\n"
    assert requeued.out == "2 rows requeued\n"
    assert await client.outbox.count_pending() == 2


async def test_watching_tells_the_present_and_each_change(
    cli: Cli, client: NoetlClient, conn: asyncpg.Connection
) -> None:
    await add_entry(conn, "demo/feed")
    registered = (await client.subscription.register("demo/feed")).subscription
    process = await cli.start("subscription", "watch", "demo/", "--json")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            present = json.loads(await process.stdout.readline())
            await client.subscription.activate(registered.subscription_id)
            change = json.loads(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert (present["initial"], present["subscription"]["state"]) == (True, "REGISTERED")
    assert (change["initial"], change["subscription"]["state"]) == (False, "ACTIVE")
    assert process.returncode == 130
    assert b"Traceback" not in said


@pytest.fixture
async def told(client: NoetlClient, conn: asyncpg.Connection) -> Story:
    """An execution with a loop and a business object, in the log."""
    catalog_id = await add_entry(conn, "demo/order", kind="playbook")
    ids = itertools.count(1000)
    telling = stories(lambda: next(ids), catalog_id=catalog_id, parent_id=1, now=lambda: datetime.now(UTC))
    _, story = itertools.islice(telling, 2)
    await client.projection.project_events(story.events)
    return story


async def test_replay_shows_state_timeline_differences_and_causes(cli: Cli, told: Story) -> None:
    first, last = told.events[0].event_id, told.events[-1].event_id
    state, shown, early, canonical = await asyncio.gather(
        cli("replay", told.execution_id, "--json"),
        cli("replay", told.execution_id),
        cli("replay", told.execution_id, "--as-of", first, "--json"),
        cli("replay", told.execution_id, "--canonical"),
    )
    difference, coloured, causes, nothing = await asyncio.gather(
        cli("replay", told.execution_id, "--diff", first, last, "--json"),
        cli("replay", told.execution_id, "--diff", first, last),
        cli("replay", told.execution_id, "--explain", "/execution/status", "--json"),
        cli("replay", 999_999, code=1),
    )

    assert state.document["execution"]["status"] == "COMPLETED"
    assert state.document["last_event_id"] == str(last)
    assert "reserve" in shown.out
    assert "3 of 3" in shown.out
    assert early.document["execution"]["status"] == "RUNNING"
    assert hashlib.sha256(canonical.out.encode()).hexdigest() == state.document["checksum"]["value"]
    assert "/execution/status" in {change["path"] for change in difference.document["changes"]}
    assert "COMPLETED" in coloured.out
    assert [cause["value_json"] for cause in causes.document["causes"]] == ['"COMPLETED"', '"RUNNING"']
    assert "no events" in nothing.out


async def test_the_read_model_is_advanced_verified_repaired_and_waited_for(
    cli: Cli, told: Story, conn: asyncpg.Connection
) -> None:
    last = told.events[-1].event_id
    missing, late = await asyncio.gather(
        cli("projection", "verify", "--json", code=1),
        cli("projection", "wait", told.execution_id, last, "--timeout", "0.1", "--json", code=1),
    )
    advanced = await cli("projection", "advance", told.execution_id, 99, "--json", code=1)
    found, shown, waited, same = await asyncio.gather(
        cli("projection", "get", told.execution_id, "--json"),
        cli("projection", "get", told.execution_id),
        cli("projection", "wait", told.execution_id, last, "--json"),
        cli("projection", "verify"),
    )
    await conn.execute("UPDATE noetl.projection_snapshot SET checksum = 'x'")
    repaired = await cli("projection", "verify", told.execution_id, "--repair", "--json")

    assert [line["outcome"] for line in missing.lines] == ["MISSING"]
    assert late.document == {"included": False, "version": "0"}
    (one,) = advanced.document["advanced"]
    assert (one["execution_id"], one["version"], one["events"]) == (
        str(told.execution_id),
        str(last),
        len(told.events),
    )
    assert [bad["reason"] for bad in advanced.document["failed"]] == ["NO_EVENTS"]
    assert found.document["state"]["execution"]["status"] == "COMPLETED"
    assert "COMPLETED" in shown.out
    assert waited.document["included"] is True
    assert "1 same" in same.out
    assert [line["repaired"] for line in repaired.lines] == [True]


async def test_parked_events_are_listed_and_tried_again(cli: Cli, client: NoetlClient) -> None:
    await client.projection.project_events(
        [EventEnvelope(execution_id=5, event_id=6, event_type="playbook.initialized")]
    )
    listed, table, retried, bad = await asyncio.gather(
        cli("projection", "dead", "--json", "--payload"),
        cli("projection", "dead"),
        cli("projection", "retry", "5/6", "--json", code=1),
        cli("projection", "retry", "five", code=2),
    )
    purged, counted = await asyncio.gather(
        cli("projection", "purge", "--dry-run", "--json"), cli("projection", "purge", "--outbox-days", "1")
    )

    (event,) = listed.lines
    assert (event["execution_id"], event["event_id"], event["reason"]) == ("5", "6", "CATALOG_UNKNOWN")
    assert "CATALOG_UNKNOWN" in table.out
    assert retried.document["failed"][0]["reason"] == "CATALOG_UNKNOWN"
    assert "EXECUTION/EVENT" in bad.err
    assert purged.document["outbox_purged"] == 0
    assert "deleted" in counted.out


async def test_a_tailer_that_is_off_is_not_waited_for(cli: Cli) -> None:
    answer = await cli("tailer", "status", "--watch", code=1)

    assert "disabled" in answer.out


async def test_top_prints_one_screen_or_lines_of_json(cli: Cli) -> None:
    screen, line = await asyncio.gather(
        cli("top", "--once", "--interval", "0.2"), cli("top", "--once", "--interval", "0.2", "--json")
    )

    assert "OUTBOX" in screen.out
    assert line.document["outbox"]["pending"] == 0
    assert line.document["per_second"]["rpcs"] > 0
    refused = await cli("top", "--once", code=4, NOETL_INTERNAL_API_TOKEN="wrong")
    assert len(refused.err.splitlines()) == 1


async def test_a_subscription_from_registration_to_its_end(cli: Cli, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "demo/feed")

    registered = (await cli("subscription", "register", "demo/feed", "--json")).document
    subscription_id = registered["subscription"]["subscription_id"]
    active = await cli(
        "subscription", "activate", subscription_id, "--actor", "ann", "--reason", "go live", "--json"
    )
    etag = (await cli("subscription", "get", subscription_id, "--json")).document["etag"]
    paused = await cli("subscription", "pause", subscription_id, "--json")
    resumed = await cli("subscription", "resume", subscription_id, "--json")
    draining = await cli("subscription", "drain", subscription_id, "--json")
    illegal = await cli("subscription", "pause", subscription_id, code=1)
    outdated = await cli("subscription", "deactivate", subscription_id, "--etag", etag, code=1)
    ended = await cli("subscription", "deactivate", subscription_id, "--json")
    events, table, living, past, listing = await asyncio.gather(
        cli("subscription", "events", "demo/feed", "--json"),
        cli("subscription", "events", subscription_id),
        cli("subscription", "list", "--state", "active", "--json"),
        cli("subscription", "list", "--state", "deactivated", "--path-prefix", "demo/", "--json"),
        cli("subscription", "list"),
    )

    assert isinstance(subscription_id, str)
    assert registered["created"] is True
    states = [answer.document["state"] for answer in (active, paused, resumed, draining, ended)]
    assert states == ["ACTIVE", "PAUSED", "ACTIVE", "DRAINING", "DEACTIVATED"]
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
    assert living.lines == []
    assert [one["subscription_id"] for one in past.lines] == [subscription_id]
    assert "demo/feed" in listing.out


async def test_a_token_that_was_made_is_let_in_where_its_scope_is_enough(
    settings: Settings, start_server: StartServer, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    made = await Cli(tmp_path)("token", "new", "ops", "--scope", "outbox:read", "--file", file, "--json")
    (tmp_path / "token").write_text(made.document["token"])
    server = await start_server(replace(settings, tokens_file=file))
    cli = Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address})

    known, checked, allowed, denied = await asyncio.gather(
        cli("token", "list", "--file", file, "--json"),
        cli("token", "check", "--file", file, "--token-file", "token", "--json"),
        cli("outbox", "pending", "--token-file", "token", "--json"),
        cli("subscription", "list", "--token-file", "token", "--json", code=4),
    )

    assert [one["name"] for one in known.document["tokens"]] == ["ops"]
    assert checked.document["ok"] is True
    assert allowed.document == {"pending": 0}
    assert "subscription:read" in denied.err
    assert made.document["token"] not in denied.err


async def test_a_check_and_a_bench_tell_their_verdict(cli: Cli, database_url: str) -> None:
    known = await cli("check", "--json")
    verdict = await cli("check", "lifecycle", "--small", "--seed", "7", "--json")
    measured = await cli("bench", "replay", "--quick", "--database-url", database_url, "--json")

    assert "lifecycle" in [one["check"] for one in known.document["checks"]]
    assert (verdict.document["seed"], verdict.document["violations"]) == (7, [])
    assert measured.document["bench"] == "replay"
    assert all({"case", "value", "control", "ratio"} <= set(case) for case in measured.document["cases"])


async def test_bash_completes_commands() -> None:
    program = (
        'set -e; script=$(noetl-grpc --show-completion); eval "$script"\n'
        "COMP_WORDS=(noetl-grpc outbox st); COMP_CWORD=2; _noetl_grpc_completion noetl-grpc\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    process = await asyncio.create_subprocess_exec(
        "bash", "-c", program, stdout=PIPE, env={**os.environ, "PATH": path}
    )
    out, _ = await process.communicate()

    assert out == b"stats\n"
