"""Registering and moving subscriptions through gRPC, on a real log."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import asyncpg
import grpc
import pytest

from noetl_grpc.core.lifecycle import TRANSITIONS, Action, State
from noetl_grpc.errors import (
    DatabaseUnavailable,
    EtagMismatch,
    IllegalTransition,
    InvalidRequest,
    NotASubscription,
    NotFound,
)
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from noetl_grpc.storage.pool import shard_of
from tests.conftest import settings_for
from tests.processes import REPOSITORY
from tests.subscriptions import WAYS, Api, add_entry, add_event, outcome_of, state_of, taken_away

StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]
NewDatabase = Callable[[], Awaitable[str]]


@pytest.fixture
def api(channel: grpc.aio.Channel) -> Api:
    return Api(channel)


async def count_events(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("SELECT count(*) FROM noetl.event"))


async def test_registering_writes_the_first_event(api: Api, conn: asyncpg.Connection) -> None:
    catalog_id = await add_entry(conn, "jobs/listen")

    before = datetime.now(UTC) - timedelta(seconds=1)
    answer = await api.register("jobs/listen")

    made = answer.subscription
    assert answer.created
    row = await conn.fetchrow("SELECT * FROM noetl.event")
    assert made.subscription_id == row["execution_id"]
    assert made.path == row["node_name"] == "jobs/listen"
    assert made.catalog_id == row["catalog_id"] == catalog_id
    assert state_of(made) is State.REGISTERED
    assert row["status"] == "REGISTERED"
    assert made.last_event_type == row["event_type"] == "subscription.registered"
    assert row["node_id"] == row["node_type"] == "subscription"
    assert made.etag == str(row["event_id"])
    assert not made.HasField("runtime")
    stored_at = row["created_at"].replace(tzinfo=UTC)
    assert made.updated_at.ToDatetime(UTC) == stored_at == row["event_time"] == row["ingest_time"]
    assert before < stored_at < datetime.now(UTC) + timedelta(seconds=1)
    assert json.loads(row["context"]) == {
        "subscription_id": str(made.subscription_id),
        "path": "jobs/listen",
        "catalog_id": str(catalog_id),
    }
    assert json.loads(row["meta"]) == {
        "emitted_at": stored_at.isoformat(),
        "emitter": "control_plane",
        "subscription_lifecycle": True,
    }
    assert await api.get(made.subscription_id) == made


async def test_every_action_in_every_state(api: Api, conn: asyncpg.Connection) -> None:
    """All 5 x 5 pairs: the table decides, an event is written exactly when it allows."""
    for state in State:
        for action in Action:
            path = f"{state.value}/{action.value}"
            catalog_id = await add_entry(conn, path)
            subscription = await api.put_into(state, path)
            events = await count_events(conn)
            transition = TRANSITIONS[action]

            outcome = await outcome_of(
                api.act(action, subscription.subscription_id, actor="ann", reason="why not", request_id="r-1")
            )

            if state in transition.allowed_from:
                assert state_of(outcome) is transition.to
                assert outcome.last_event_type == transition.event_type
                assert await count_events(conn) == events + 1
                row = await conn.fetchrow(
                    "SELECT * FROM noetl.event WHERE execution_id = $1 AND event_id = $2",
                    subscription.subscription_id,
                    int(outcome.etag),
                )
                assert row["event_id"] > int(subscription.etag)
                assert (row["event_type"], row["status"]) == (transition.event_type, transition.to.value)
                assert (row["node_id"], row["node_name"], row["node_type"]) == (
                    "subscription",
                    path,
                    "subscription",
                )
                assert row["catalog_id"] == catalog_id
                assert json.loads(row["context"]) == {
                    "subscription_id": str(subscription.subscription_id),
                    "path": path,
                    "catalog_id": str(catalog_id),
                }
                assert json.loads(row["meta"]) == {
                    "emitted_at": row["created_at"].replace(tzinfo=UTC).isoformat(),
                    "emitter": "control_plane",
                    "subscription_lifecycle": True,
                    "actor": "ann",
                    "reason": "why not",
                    "request_id": "r-1",
                }
                assert await api.get(subscription.subscription_id) == outcome
            else:
                assert isinstance(outcome, IllegalTransition)
                assert outcome.reason == "ILLEGAL_TRANSITION"
                assert outcome.metadata == {
                    "subscription_id": str(subscription.subscription_id),
                    "state": state.value,
                    "action": action.value,
                    "allowed_from": ", ".join(allowed.value for allowed in transition.allowed_from),
                }
                assert await count_events(conn) == events
                assert await api.get(subscription.subscription_id) == subscription


async def test_a_path_that_is_not_deactivated_is_returned_again(api: Api, conn: asyncpg.Connection) -> None:
    for state in State:
        path = f"again/{state.value}"
        await add_entry(conn, path)
        subscription = await api.put_into(state, path)

        again = await api.register(path)

        if state is State.DEACTIVATED:
            assert again.created
            assert again.subscription.subscription_id != subscription.subscription_id
        else:
            assert not again.created
            assert again.subscription == subscription


async def test_registering_needs_a_catalog_entry_of_the_kind(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/book", kind="Playbook")
    old = await add_entry(conn, "jobs/listen", version=1, kind="playbook")
    new = await add_entry(conn, "jobs/listen", version=12, kind="SubScription")
    await add_entry(conn, "jobs/listen", version=3, kind="subscription")

    unknown = await outcome_of(api.register("jobs/none"))
    other = await outcome_of(api.register("jobs/book"))
    newest = await api.register("jobs/listen")

    assert isinstance(unknown, NotFound)
    assert (unknown.reason, unknown.metadata) == ("CATALOG_ENTRY_NOT_FOUND", {"path": "jobs/none"})
    assert isinstance(other, NotASubscription)
    assert other.reason == "NOT_A_SUBSCRIPTION"
    assert other.metadata["kind"] == "Playbook"
    assert newest.subscription.catalog_id == new != old
    assert await count_events(conn) == 1


async def test_bad_requests_name_the_field_and_leave_no_trace(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    subscription_id = (await api.register("jobs/listen")).subscription.subscription_id

    outcomes = {
        "path": [await outcome_of(api.register(path)) for path in ("", "  ", "jobs/\0")],
        "subscription_id": [
            await outcome_of(call)
            for call in (api.act(Action.PAUSE, 0), api.act(Action.DRAIN, -1), api.get(0), api.get(-5))
        ],
        "actor": [
            await outcome_of(api.act(Action.ACTIVATE, subscription_id, actor=actor))
            for actor in ("a" * 257, "a\0b")
        ],
        "reason": [
            await outcome_of(api.act(Action.ACTIVATE, subscription_id, reason=reason))
            for reason in ("a" * 2001, "\0")
        ],
        "request_id": [
            await outcome_of(api.act(Action.ACTIVATE, subscription_id, request_id=request_id))
            for request_id in ("a" * 129, "a\0b")
        ],
    }

    for field, errors in outcomes.items():
        for error in errors:
            assert isinstance(error, InvalidRequest), field
            assert error.violations[0][0] == field
    assert await count_events(conn) == 1
    accepted = await api.act(Action.ACTIVATE, subscription_id, request_id="ä" * 128, reason="'; --\\u0000")
    assert state_of(accepted) is State.ACTIVE


async def test_an_unknown_subscription_is_not_found(api: Api, conn: asyncpg.Connection) -> None:
    await add_event(conn, 77, 78, catalog_id=await add_entry(conn, "p"), event_type="playbook.initialized")

    for call in (api.get(77), api.get(5), *(api.act(action, 77) for action in Action)):
        error = await outcome_of(call)
        assert isinstance(error, NotFound)
        assert error.reason == "SUBSCRIPTION_NOT_FOUND"
    assert await count_events(conn) == 1


async def test_an_old_etag_is_refused_and_writes_nothing(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    registered = (await api.register("jobs/listen")).subscription
    active = await api.act(Action.ACTIVATE, registered.subscription_id, etag=registered.etag)

    for etag in (registered.etag, "nonsense", str(int(active.etag) + 1)):
        error = await outcome_of(api.act(Action.PAUSE, active.subscription_id, etag=etag))
        assert isinstance(error, EtagMismatch)
        assert error.metadata["current_etag"] == active.etag

    assert await count_events(conn) == 2
    paused = await api.act(Action.PAUSE, active.subscription_id, etag=active.etag)
    assert state_of(paused) is State.PAUSED


async def test_of_two_callers_with_one_etag_one_wins(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")

    outcomes = await asyncio.gather(
        *(
            outcome_of(api.act(action, active.subscription_id, etag=active.etag))
            for action in (Action.PAUSE, Action.DRAIN, Action.DEACTIVATE, Action.RESUME) * 3
        )
    )

    assert sum(not isinstance(outcome, EtagMismatch) for outcome in outcomes) == 1
    assert await count_events(conn) == 3


async def test_a_repeated_request_gets_the_earlier_answer(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")
    subscription_id = active.subscription_id
    first = await api.act(Action.PAUSE, subscription_id, etag=active.etag, request_id="r-1")
    await api.act(Action.DEACTIVATE, subscription_id, request_id="r-2")

    # Neither the old etag nor the state, from which nothing can be paused, is looked at.
    repeated = await api.act(Action.PAUSE, subscription_id, etag=active.etag, request_id="r-1")
    misused = await outcome_of(api.act(Action.RESUME, subscription_id, request_id="r-1"))

    assert repeated == first
    assert isinstance(misused, InvalidRequest)
    assert misused.violations[0][0] == "request_id"
    assert await count_events(conn) == 4
    other = await api.put_into(State.ACTIVE, "jobs/listen")
    assert state_of(await api.act(Action.DRAIN, other.subscription_id, request_id="r-1")) is State.DRAINING


async def test_parallel_repeats_of_one_request_write_one_event(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")

    answers = await asyncio.gather(
        *(api.act(Action.PAUSE, active.subscription_id, request_id="r-1") for _ in range(20))
    )

    assert len({answer.etag for answer in answers}) == 1
    assert await count_events(conn) == 3


#: Serves, and dies after a transition has been committed and before it is answered.
DYING_SERVER = """
import asyncio, os, sys
from noetl_grpc import server
from noetl_grpc.services import subscription
from tests.conftest import settings_for

def die(subscription):
    os._exit(9)

async def main():
    async with server.serving(settings_for(sys.argv[1])) as running:
        subscription.subscription_to_pb = die
        print(running.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_request_repeated_after_a_crash_between_commit_and_answer_is_one_event(
    api: Api, conn: asyncpg.Connection, database_url: str, channel_to: ChannelTo
) -> None:
    await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")
    dying = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DYING_SERVER, database_url, stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    try:
        assert dying.stdout is not None
        address = (await asyncio.wait_for(dying.stdout.readline(), 15)).decode().strip()
        dying_api = Api(await channel_to(address))
        with pytest.raises(Exception, match=r".") as lost:
            await dying_api.act(Action.PAUSE, active.subscription_id, request_id="r-1")
        assert await asyncio.wait_for(dying.wait(), 10) == 9
    finally:
        if dying.returncode is None:
            dying.kill()
        await dying.communicate()
    assert "UNAVAILABLE" in type(lost.value).__name__.upper()
    assert await count_events(conn) == 3

    answer = await api.act(Action.PAUSE, active.subscription_id, request_id="r-1")

    assert state_of(answer) is State.PAUSED
    assert await count_events(conn) == 3


async def test_fifty_parallel_registrations_give_one_id(
    api: Api, conn: asyncpg.Connection, settings: Settings, start_server: StartServer, channel_to: ChannelTo
) -> None:
    await add_entry(conn, "jobs/listen")
    second = Api(await channel_to((await start_server(settings)).address))

    answers = await asyncio.gather(*(one.register("jobs/listen") for one in [api, second] * 25))

    assert len({answer.subscription.subscription_id for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1
    assert await count_events(conn) == 1


async def test_many_registrations_leave_connections_for_others(
    conn: asyncpg.Connection, settings: Settings, start_server: StartServer, channel_to: ChannelTo
) -> None:
    """Callers who wait for the lock of a path hold no connection of the pool."""
    await add_entry(conn, "jobs/listen")
    api = Api(
        await channel_to(
            (await start_server(replace(settings, pool_size_max=2, pool_wait_seconds=1))).address
        )
    )
    other = await api.register("jobs/listen")
    lock = "SELECT pg_advisory_lock(hashtextextended('noetl_grpc/subscription_path/jobs/listen', 0))"
    await conn.execute(lock)

    waiting = [asyncio.create_task(api.register("jobs/listen")) for _ in range(10)]
    try:
        async with asyncio.timeout(10):
            while not await conn.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110 (nobody sets an event for it)
                await asyncio.sleep(0.005)
        for _ in range(20):
            assert await api.get(other.subscription.subscription_id) == other.subscription
    finally:
        await conn.execute(lock.replace("lock(", "unlock("))
    assert not any(answer.created for answer in await asyncio.gather(*waiting))


async def test_events_that_are_no_lifecycle_change_nothing(api: Api, conn: asyncpg.Connection) -> None:
    catalog_id = await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")
    later = int(active.etag) + 10
    for offset, columns in enumerate(
        (
            {"event_type": "subscription.circuit.opened", "status": "OPEN"},
            {"event_type": "subscription.message.spooled", "status": "DEACTIVATED"},
            {"event_type": "subscription.rate_limited", "status": None},
            {"event_type": "subscription.paused", "status": None},
            {"event_type": "subscription.paused", "status": "BROKEN"},
            {"event_type": "subscription.paused", "status": "paused"},
            {"event_type": "subscription.paused", "status": ""},
            {"event_type": None, "status": "PAUSED"},
            {"event_type": "command.completed", "status": "PAUSED", "node_name": "jobs/listen"},
        )
    ):
        await add_event(conn, active.subscription_id, later + offset, catalog_id=catalog_id, **columns)

    assert await api.get(active.subscription_id) == active
    assert (await api.register("jobs/listen")).subscription == active
    paused = await api.act(Action.PAUSE, active.subscription_id, etag=active.etag)
    assert state_of(paused) is State.PAUSED
    assert await api.get(active.subscription_id) == paused
    assert [event.event_type for event in await api.events(active.subscription_id)] == [
        "subscription.registered",
        "subscription.activated",
        "subscription.paused",
    ]


async def test_the_path_is_the_node_name_else_the_catalogs(api: Api, conn: asyncpg.Connection) -> None:
    catalog_id = await add_entry(conn, "jobs/listen")
    for subscription_id, node_name in ((1001, None), (1002, ""), (1003, "jobs/moved")):
        await add_event(
            conn,
            subscription_id,
            5,
            catalog_id=catalog_id,
            event_type="subscription.activated",
            status="ACTIVE",
            node_name=node_name,
        )

    paths = {number: (await api.get(number)).path for number in (1001, 1002, 1003)}
    found = await api.register("jobs/listen")
    await api.act(Action.DEACTIVATE, 1001)
    await api.act(Action.DEACTIVATE, 1002)

    assert paths == {1001: "jobs/listen", 1002: "jobs/listen", 1003: "jobs/moved"}
    assert not found.created
    assert found.subscription.subscription_id in (1001, 1002)
    assert (await api.register("jobs/listen")).created


async def test_ids_that_others_use_already_are_passed_over(api: Api, conn: asyncpg.Connection) -> None:
    """A lifecycle event far in the future, and others right behind it, as by a clock that runs ahead."""
    catalog_id = await add_entry(conn, "jobs/listen")
    active = await api.put_into(State.ACTIVE, "jobs/listen")
    far = int(active.etag) + (3_600_000 << 22)
    for offset, event_type in enumerate(
        ("subscription.paused", "subscription.circuit.opened", "subscription.circuit.closed")
    ):
        await add_event(
            conn,
            active.subscription_id,
            far + offset,
            catalog_id=catalog_id,
            event_type=event_type,
            status="PAUSED",
            node_name="jobs/listen",
        )

    resumed = await api.act(Action.RESUME, active.subscription_id)

    assert state_of(resumed) is State.ACTIVE
    assert int(resumed.etag) == far + 3
    assert await api.get(active.subscription_id) == resumed


async def test_times_are_what_was_stored_whatever_the_zone(
    conn: asyncpg.Connection,
    database_url: str,
    settings: Settings,
    start_server: StartServer,
    channel_to: ChannelTo,
) -> None:
    database = database_url.rpartition("/")[2]
    await conn.execute(f"ALTER DATABASE {database} SET timezone = 'Asia/Kathmandu'")
    catalog_id = await add_entry(conn, "jobs/listen")
    api = Api(await channel_to((await start_server(settings)).address))

    made = (await api.register("jobs/listen")).subscription
    stored = await conn.fetchval("SELECT created_at FROM noetl.event")
    await add_event(
        conn,
        50,
        51,
        catalog_id=catalog_id,
        event_type="subscription.paused",
        status="PAUSED",
        created_at=datetime(2020, 2, 29, 23, 59, 59, 999999),
    )

    assert made.updated_at.ToDatetime() == stored
    assert abs(stored.replace(tzinfo=UTC) - datetime.now(UTC)) < timedelta(seconds=30)
    assert (await api.get(50)).updated_at.ToJsonString() == "2020-02-29T23:59:59.999999Z"


@pytest.fixture(params=["cluster is shard 0", "cluster of its own"])
async def sharded(
    request: pytest.FixtureRequest, new_database: NewDatabase
) -> AsyncIterator[tuple[Settings, list[asyncpg.Connection]]]:
    """Three shards and where their cluster is: settings, and connections to [cluster, shard 0, 1, 2]."""
    urls = [await new_database() for _ in range(3)]
    cluster = urls[0] if request.param == "cluster is shard 0" else await new_database()
    opened = [await asyncpg.connect(url) for url in (cluster, *urls)]
    try:
        yield settings_for(*urls, cluster_url=cluster), opened
    finally:
        for connection in opened:
            await connection.close()


async def test_registering_over_shards(
    sharded: tuple[Settings, list[asyncpg.Connection]], start_server: StartServer, channel_to: ChannelTo
) -> None:
    settings, (cluster, *shards) = sharded
    apis = [Api(await channel_to((await start_server(settings)).address)) for _ in range(2)]
    paths = [f"jobs/{number}" for number in range(30)]  # fewer would now and then leave a shard out
    for path in paths:
        await add_entry(cluster, path)

    answers = {path: await asyncio.gather(*(api.register(path) for api in apis * 5)) for path in paths}

    used = set()
    for path, given in answers.items():
        assert len({answer.subscription.subscription_id for answer in given}) == 1
        assert sum(answer.created for answer in given) == 1
        subscription = given[0].subscription
        shard = shard_of(subscription.subscription_id, 3)
        used.add(shard)
        for number, conn in enumerate(shards):
            found = await conn.fetch("SELECT execution_id FROM noetl.event WHERE node_name = $1", path)
            expected = [(subscription.subscription_id,)] if number == shard else []
            assert [tuple(row) for row in found] == expected
        moved = await apis[0].act(Action.ACTIVATE, subscription.subscription_id)
        assert await apis[1].get(subscription.subscription_id) == moved
        await apis[1].act(Action.DEACTIVATE, subscription.subscription_id)
        assert (await apis[0].register(path)).created
    assert used == {0, 1, 2}


async def test_a_path_whose_shards_do_not_all_answer_is_not_registered(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    """It may be registered there already, so a second id would be a guess."""
    urls = [await new_database() for _ in range(2)]
    cluster = await asyncpg.connect(urls[0])
    await add_entry(cluster, "jobs/listen")
    api = Api(await channel_to((await start_server(settings_for(*urls))).address))

    async with taken_away(cluster, urls[1]):
        outcome = await outcome_of(api.register("jobs/listen"))

    assert isinstance(outcome, DatabaseUnavailable)
    assert await count_events(cluster) == 0
    assert (await api.register("jobs/listen")).created
    await cluster.close()


@pytest.mark.parametrize("seconds", [0, 300])
async def test_a_path_left_draining_without_a_runtime_is_freed_after_the_timeout(
    conn: asyncpg.Connection,
    settings: Settings,
    start_server: StartServer,
    channel_to: ChannelTo,
    seconds: int,
) -> None:
    await add_entry(conn, "jobs/listen")
    changed = replace(settings, subscription_drain_timeout_seconds=seconds)
    api = Api(await channel_to((await start_server(changed)).address))
    draining = await api.put_into(State.DRAINING, "jobs/listen")
    if seconds:
        assert (await api.register("jobs/listen")).subscription == draining
        # It began that long ago, and was asked to drain again only now.
        await conn.execute("UPDATE noetl.event SET created_at = created_at - interval '301 s'")
        await api.act(Action.DRAIN, draining.subscription_id)

    answer = await api.register("jobs/listen")

    assert answer.created
    assert answer.subscription.subscription_id != draining.subscription_id
    old = await api.get(draining.subscription_id)
    assert state_of(old) is State.DEACTIVATED
    last = (await api.events(draining.subscription_id))[-1]
    assert (last.actor, last.reason) == ("noetl_grpc", "drain timeout")
    assert (await api.register("jobs/listen")).subscription == answer.subscription


def test_the_ways_lead_where_they_say() -> None:
    for state, actions in WAYS.items():
        reached = State.REGISTERED
        for action in actions:
            assert reached in TRANSITIONS[action].allowed_from
            reached = TRANSITIONS[action].to
        assert reached is state
