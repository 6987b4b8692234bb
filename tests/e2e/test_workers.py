"""The two workers on real servers: what they publish and advance, and what outages cost (nothing)."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import nats as nats_client
import pytest
from nats.js.api import StreamConfig

from noetl_grpc import Consumption, NoetlClient, OutboxMessage, ProjectionCheck
from noetl_grpc.cli.story import Story, stories
from noetl_grpc.dev.catalog import SAMPLE_CATALOG, load_catalog
from noetl_grpc.dev.nats import Nats
from noetl_grpc.server import Server
from noetl_grpc.settings import EventStreamSettings, Settings
from noetl_grpc.workers.projector import Progress, run_projector
from noetl_grpc.workers.publisher import publish_outbox, stream_spec
from tests.cli import Cli
from tests.conftest import TOKEN
from tests.processes import until, until_answered
from tests.subscriptions import add_entry

pytestmark = pytest.mark.timeout(60)

StartServer = Callable[[Settings], Awaitable[Server]]

SPEC = stream_spec(retention_seconds=3600, dedup_seconds=120)


@asynccontextmanager
async def _running(work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _stored(url: str, stream: str) -> list[tuple[str, dict[str, str], Any]]:
    """Subject, headers and body of every message."""
    connection = await nats_client.connect(url)
    try:
        jetstream = connection.jetstream()
        last = (await jetstream.stream_info(stream)).state.last_seq
        messages = [await jetstream.get_msg(stream, number) for number in range(1, last + 1)]
        return [(one.subject or "", dict(one.headers or {}), json.loads(one.data or b"")) for one in messages]
    finally:
        await connection.close()


async def test_a_row_is_published_with_its_subject_headers_and_id(client: NoetlClient, nats: Nats) -> None:
    connection = await nats_client.connect(nats.url)
    await connection.jetstream().add_stream(StreamConfig(name="orders", subjects=["orders.>"]))
    await connection.close()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    ids = await client.outbox.enqueue(
        [
            OutboxMessage(
                event_id=1, execution_id=42, payload_json='{"n": 1}', headers={"traceparent": trace}
            ),
            OutboxMessage(
                event_id=2, payload_json='{"n": 2}', headers={"Nats-Msg-Id": "mine", "tenant": "ä"}
            ),
            OutboxMessage(event_id=3, execution_id=42, subject="orders.created", payload_json='{"n": 3}'),
        ]
    )
    tally = Consumption()

    async with _running(publish_outbox(client, nats_url=nats.url, spec=SPEC, tally=tally)):
        await until(lambda: tally.published == 3)

    first, second, third = ids.outbox_ids
    ours = sorted(await _stored(nats.url, "noetl_outbox"))
    (theirs,) = await _stored(nats.url, "orders")
    assert [(subject, body) for subject, _, body in ours] == [
        ("noetl.outbox.42", {"n": 1}),
        ("noetl.outbox.none", {"n": 2}),
    ]
    assert ours[0][1] == {
        "Content-Type": "application/json",
        "traceparent": trace,
        "Nats-Msg-Id": f"outbox-0-{first}",
    }
    assert ours[1][1]["Nats-Msg-Id"] == f"outbox-0-{second}"
    assert (theirs[0], theirs[1]["Nats-Msg-Id"]) == ("orders.created", f"outbox-0-{third}")


async def test_a_row_that_the_broker_refuses_fails_alone(
    client: NoetlClient, nats: Nats, conn: asyncpg.Connection
) -> None:
    await client.outbox.enqueue(
        [
            OutboxMessage(event_id=1, execution_id=1, subject="nobody.listens", payload_json="{}"),
            OutboxMessage(event_id=2, execution_id=2, subject="not a subject", payload_json="{}"),
            OutboxMessage(event_id=3, execution_id=3, headers={"bad name": "x"}, payload_json="{}"),
            OutboxMessage(event_id=4, execution_id=4, payload_json='"' + "x" * 2_000_000 + '"'),
            OutboxMessage(event_id=5, execution_id=5, payload_json="{}"),
        ]
    )
    tally = Consumption()

    async with _running(publish_outbox(client, nats_url=nats.url, spec=SPEC, tally=tally)):
        await until(lambda: tally.published == 1 and tally.failed >= 4)

    rows = await conn.fetch("SELECT event_id, status, last_error FROM noetl.outbox ORDER BY event_id")
    assert [row["status"] for row in rows] == ["FAILED"] * 4 + ["PUBLISHED"]
    for row, word in zip(rows, ("no stream", "subject", "header", "bytes"), strict=False):
        assert word in row["last_error"]


async def test_while_the_broker_is_away_no_attempt_is_spent(
    client: NoetlClient, nats: Nats, conn: asyncpg.Connection
) -> None:
    tally = Consumption()
    async with _running(publish_outbox(client, nats_url=nats.url, spec=SPEC, tally=tally)):
        await client.outbox.enqueue([OutboxMessage(event_id=1, payload_json="{}")])
        await until(lambda: tally.published == 1)
        await nats.stop()
        await client.outbox.enqueue(
            OutboxMessage(event_id=n, execution_id=n, payload_json="{}") for n in range(2, 302)
        )

        # Whoever had rows when the broker went gives them back with their attempt.
        async def all_wait() -> bool:
            waiting = "SELECT count(*) FROM noetl.outbox WHERE status = 'PENDING' AND attempts = 0"
            return bool(await conn.fetchval(waiting) == 300)

        await until_answered(all_wait)

        await nats.start()
        await until(lambda: tally.published == 301, seconds=20)

    assert tally.failed == 0
    assert await conn.fetchval("SELECT max(attempts) FROM noetl.outbox") == 1
    assert len(await _stored(nats.url, "noetl_outbox")) == 301


async def test_sigterm_ends_the_publisher_with_nothing_held(
    server: Server, client: NoetlClient, nats: Nats, tmp_path: Path, conn: asyncpg.Connection
) -> None:
    cli = Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN})
    await client.outbox.enqueue(
        OutboxMessage(event_id=n, execution_id=n % 50 + 1, payload_json="{}") for n in range(1, 3001)
    )
    process = await cli.start("publish-outbox", "--json", NOETL_NATS_URL=nats.url)
    try:

        async def has_begun() -> bool:
            return (await client.outbox.stats()).pending < 3000

        await until_answered(has_begun, seconds=20)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            told, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 0, said.decode()
    stats = await client.outbox.stats()
    published = await conn.fetchval("SELECT count(*) FROM noetl.outbox WHERE status = 'PUBLISHED'")
    assert json.loads(told) == {"published": published, "failed": 0, "stale": 0, "streams": 1}
    assert (stats.in_flight, stats.delayed, stats.dead) == (0, 0, 0)
    assert stats.pending + published == 3000
    # At most once beyond what was acknowledged: those that were on their way.
    assert len(await _stored(nats.url, "noetl_outbox")) >= published


@pytest.fixture
def streaming(settings: Settings, nats: Nats) -> Settings:
    """A server whose tailer publishes."""
    return replace(settings, nats_url=nats.url, event_stream=EventStreamSettings(enabled=True, backfill=True))


async def _tell(
    client: NoetlClient, conn: asyncpg.Connection, number: int, first_id: int = 1000
) -> list[Story]:
    catalog_id = await add_entry(conn, f"demo/{first_id}", kind="playbook")
    ids = itertools.count(first_id)
    telling = stories(lambda: next(ids), catalog_id=catalog_id, parent_id=1, now=lambda: datetime.now(UTC))
    told = list(itertools.islice(telling, number))
    await client.projection.project_events(event for story in told for event in story.events)
    return told


async def _all_included(client: NoetlClient, told: list[Story]) -> bool:
    waited = await asyncio.gather(
        *(
            client.projection.wait_for_projection(
                story.execution_id, story.events[-1].event_id, wait_seconds=20
            )
            for story in told
        )
    )
    return all(one.included for one in waited)


async def test_events_on_the_stream_advance_the_snapshots(
    streaming: Settings, start_server: StartServer, nats: Nats, conn: asyncpg.Connection
) -> None:
    server = await start_server(streaming)
    progress = Progress()
    async with (
        NoetlClient(server.address, token=TOKEN) as client,
        _running(run_projector(client, nats_url=nats.url, progress=progress)),
        _running(run_projector(client, nats_url=nats.url, progress=progress)),
    ):
        told = await _tell(client, conn, 10)
        assert await _all_included(client, told)
        events = sum(len(story.events) for story in told)
        await until(lambda: progress.acknowledged >= events)

        totals: list[int] = []
        verified = [one async for one in client.projection.verify(page_size=3, on_total=totals.append)]

    assert {one.outcome for one in verified} == {ProjectionCheck.SAME}
    assert len(verified) == 10
    assert totals == [10]


async def test_sigterm_ends_the_projector_and_it_tells_what_it_did(
    streaming: Settings, start_server: StartServer, nats: Nats, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    server = await start_server(streaming)
    cli = Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN})
    process = await cli.start("run-projector", "--json", NOETL_NATS_URL=nats.url)
    try:
        async with NoetlClient(server.address, token=TOKEN) as client:
            assert await _all_included(client, await _tell(client, conn, 2))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            told, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode == 0, said.decode()
    assert b"Traceback" not in said
    done = json.loads(told)
    assert done["advanced"] >= 2
    assert (done["failed"], done["given_up"]) == (0, 0)


async def test_the_projector_outlives_server_and_broker(
    streaming: Settings, start_server: StartServer, nats: Nats, conn: asyncpg.Connection
) -> None:
    server = await start_server(streaming)
    async with (
        NoetlClient(server.address, token=TOKEN) as client,
        _running(run_projector(client, nats_url=nats.url)),
    ):
        assert await _all_included(client, await _tell(client, conn, 2))
        await server.drain()
        server = await start_server(replace(streaming, grpc_port=server.port))
        assert await _all_included(client, await _tell(client, conn, 2, first_id=5000))
        await nats.restart()
        assert await _all_included(client, await _tell(client, conn, 2, first_id=9000))


async def test_messages_that_are_no_events_and_executions_that_are_gone_do_not_stay_for_ever(
    streaming: Settings, start_server: StartServer, nats: Nats, conn: asyncpg.Connection
) -> None:
    server = await start_server(streaming)
    progress = Progress()
    async with NoetlClient(server.address, token=TOKEN) as client:
        connection = await nats_client.connect(nats.url)

        async def is_there() -> bool:
            with suppress(nats_client.js.errors.NotFoundError):
                await connection.jetstream().stream_info("noetl_events")
                return True
            return False

        await until_answered(is_there)
        await connection.jetstream().publish("noetl.events.odd", b"not JSON")
        async with _running(run_projector(client, nats_url=nats.url, progress=progress)):
            assert await _all_included(client, await _tell(client, conn, 1))
            await until(lambda: progress.given_up == 1)
        await connection.close()


async def test_the_demo_flows_through_everything_and_the_tailer_tells(
    streaming: Settings, start_server: StartServer, nats: Nats, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    await load_catalog(conn, SAMPLE_CATALOG)
    server = await start_server(streaming)
    cli = Cli(tmp_path, {"NOETL_GRPC_ADDRESS": server.address, "NOETL_INTERNAL_API_TOKEN": TOKEN})
    async with (
        NoetlClient(server.address, token=TOKEN) as client,
        _running(run_projector(client, nats_url=nats.url)),
        _running(publish_outbox(client, nats_url=nats.url, spec=SPEC)),
    ):
        told = (await cli("demo", "--json")).document
        load, status, table, compared, watched = await asyncio.gather(
            cli("demo", "--rate", "100", "--executions", "10", "--json"),
            cli("tailer", "status", "--json"),
            cli("tailer", "status"),
            cli("tailer", "reconcile", "--dry-run", "--json"),
            cli("tailer", "status", "--watch", "--json"),
        )

    assert (told["in_stream"], told["outbox_empty"]) == (True, True)
    assert [one["in_read_model"] for one in told["executions"]] == [True] * 5
    assert told["stored"] == sum(one["events"] for one in told["executions"])
    assert (load.document["executions"], load.document["rejected"]) == (10, 0)
    assert [shard["mode"] for shard in status.document["shards"]] == ["SNAPSHOT"]
    assert "snapshot" in table.out
    assert [shard["lag_events"] for shard in watched.lines[-1]["shards"]] == [0]
    assert compared.document["missing"] == compared.document["republished"] == 0
