"""Watching subscriptions: the present, then every change, none missed and none twice across reconnects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import subscription_pb2 as pb

from noetl_grpc import status
from noetl_grpc.core.lifecycle import Action, State
from noetl_grpc.errors import InvalidRequest, NotFound, Overloaded, ShuttingDown
from noetl_grpc.server import Server
from noetl_grpc.settings import Settings
from noetl_grpc.storage.pool import shard_of
from tests.conftest import AUTHORIZATION, settings_for
from tests.subscriptions import Api, add_entry, add_event, add_subscriptions, outcome_of, state_of

StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]
NewDatabase = Callable[[], Awaitable[str]]
Message = pb.WatchSubscriptionsResponse


@pytest.fixture
def api(channel: grpc.aio.Channel) -> Api:
    return Api(channel)


async def watch(api: Api, **fields: Any) -> AsyncIterator[Message]:
    """The stream; an error is one of our exceptions."""
    call = api.stub.WatchSubscriptions(pb.WatchSubscriptionsRequest(**fields), metadata=AUTHORIZATION)
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        raise status.from_rpc_error(error) from None
    finally:
        call.cancel()


async def take(stream: AsyncIterator[Message], count: int, *, seconds: float = 10) -> list[Message]:
    """The next messages."""
    async with asyncio.timeout(seconds):
        return [await anext(stream) for _ in range(count)]


async def is_silent(stream: AsyncIterator[Message], api: Api, probe_path: str) -> bool:
    """Whether nothing comes before the next change, which this makes."""
    made = (await api.register(probe_path)).subscription
    (message,) = await take(stream, 1)
    return message.subscription.subscription_id == made.subscription_id


def told(messages: list[Message]) -> list[tuple[int, str]]:
    return [(message.subscription.subscription_id, message.subscription.etag) for message in messages]


async def test_first_the_present_then_each_change(api: Api, conn: asyncpg.Connection) -> None:
    ids = []
    for number in range(3):
        await add_entry(conn, f"jobs/{number}")
        ids.append((await api.put_into(State.ACTIVE, f"jobs/{number}")).subscription_id)
    await api.heartbeat(ids[1], "pod-1", in_flight=4)
    present = [await api.get(subscription_id) for subscription_id in ids]

    async with aclosing(watch(api)) as stream:
        first = await take(stream, 3)
        changes = [
            await api.act(Action.PAUSE, ids[1]),
            await api.act(Action.RESUME, ids[1]),
            await api.act(Action.DRAIN, ids[0]),
            await api.act(Action.RESUME, ids[1]),
        ]
        # Neither a heartbeat nor another event of the execution is a change.
        await api.heartbeat(ids[2], "pod-2")
        await add_event(
            conn,
            ids[2],
            int(present[2].etag) + 5,
            catalog_id=present[2].catalog_id,
            event_type="subscription.circuit.opened",
            status="OPEN",
        )
        then = await take(stream, 4)
        await api.heartbeat(ids[0], "pod-3", in_flight=0)
        then += await take(stream, 1)

    assert [message.subscription for message in first] == present
    assert all(message.initial for message in first)
    assert [message.subscription for message in then[:4]] == changes
    assert (then[4].subscription.subscription_id, state_of(then[4].subscription)) == (
        ids[0],
        State.DEACTIVATED,
    )
    assert not any(message.initial for message in then)
    assert len({message.resume_token for message in first + then}) == 8


async def test_a_change_is_told_at_once(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    made = await api.put_into(State.ACTIVE, "jobs/listen")
    clock = asyncio.get_running_loop().time

    async with aclosing(watch(api, subscription_id=made.subscription_id)) as stream:
        await take(stream, 1)
        seconds = []
        for action in (Action.PAUSE, Action.RESUME) * 10:
            began = clock()
            await api.act(action, made.subscription_id)
            await take(stream, 1)
            seconds.append(clock() - began)

    assert sorted(seconds)[10] < 0.5


async def test_targets(api: Api, conn: asyncpg.Connection) -> None:
    for path in ("a/1", "a/2", "a%", "b/1", "probe"):
        await add_entry(conn, path)
    made = {path: (await api.register(path)).subscription for path in ("a/1", "a%", "b/1")}

    async with (
        aclosing(watch(api, subscription_id=made["a/1"].subscription_id)) as one,
        aclosing(watch(api, path_prefix="a/")) as some,
        aclosing(watch(api, path_prefix="")) as everything,
        aclosing(watch(api, path_prefix="z")) as nothing,
    ):
        assert [m.subscription for m in await take(one, 1)] == [made["a/1"]]
        assert [m.subscription for m in await take(some, 1)] == [made["a/1"]]
        assert [m.subscription for m in await take(everything, 3)] == list(made.values())
        quiet = asyncio.create_task(take(nothing, 1))
        for path in ("b/1", "a%"):
            await api.act(Action.ACTIVATE, made[path].subscription_id)
        new = (await api.register("a/2")).subscription
        active = await api.act(Action.ACTIVATE, made["a/1"].subscription_id)

        assert [m.subscription for m in await take(one, 1)] == [active]
        assert [m.subscription for m in await take(some, 2)] == [new, active]
        assert [m.subscription.path for m in await take(everything, 4)] == ["b/1", "a%", "a/2", "a/1"]
        assert not quiet.done()
        quiet.cancel()
        await asyncio.wait([quiet])


async def test_bad_watches_are_refused(api: Api, conn: asyncpg.Connection) -> None:
    (known, other) = await add_subscriptions(conn, 2)
    async with aclosing(watch(api, subscription_id=known)) as stream:
        token = (await take(stream, 1))[0].resume_token
    async with aclosing(watch(api)) as stream:
        token_of_all = (await take(stream, 1))[0].resume_token

    async def refused(**fields: Any) -> Any:
        async with aclosing(watch(api, **fields)) as stream:
            return await outcome_of(take(stream, 1))

    missing = await refused(subscription_id=12345)
    assert isinstance(missing, NotFound)
    assert missing.reason == "SUBSCRIPTION_NOT_FOUND"
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("subscription_id", {"subscription_id": 0}),
        ("subscription_id", {"subscription_id": -1}),
        ("path_prefix", {"path_prefix": "\0"}),
        ("resume_token", {"resume_token": "nonsense"}),
        ("resume_token", {"resume_token": token}),
        ("resume_token", {"resume_token": token, "subscription_id": other}),
        ("resume_token", {"resume_token": token_of_all, "path_prefix": "bulk"}),
    ]
    for field, fields in wrong:
        error = await refused(**fields)
        assert isinstance(error, InvalidRequest), fields
        assert error.violations[0][0] == field


async def test_a_token_of_another_database_is_refused(
    api: Api,
    new_database: NewDatabase,
    start_server: StartServer,
    channel_to: ChannelTo,
    conn: asyncpg.Connection,
) -> None:
    """There its snapshot would seem to show what never happened here."""
    from noetl_grpc.core import watching
    from noetl_grpc.core.following import Position

    await add_subscriptions(conn, 1)
    token = watching.encode(watching.Place((Position("900000000:900000000:"),)), watching.Target())

    async with aclosing(watch(api, resume_token=token)) as stream:
        error = await outcome_of(take(stream, 1))

    assert isinstance(error, InvalidRequest)
    assert "another database" in error.message


async def test_going_on_in_the_middle_of_the_present(api: Api, conn: asyncpg.Connection) -> None:
    """The rest of the present is told as it was, then what changed meanwhile."""
    ids = await add_subscriptions(conn, 7)
    async with aclosing(watch(api, path_prefix="bulk")) as stream:
        first = await take(stream, 3)
    changed = [await api.act(Action.DEACTIVATE, subscription_id) for subscription_id in (ids[0], ids[5])]

    async with aclosing(watch(api, path_prefix="bulk", resume_token=first[-1].resume_token)) as stream:
        rest = await take(stream, 6)

    assert [m.subscription.subscription_id for m in first + rest[:4]] == ids
    assert all(m.initial for m in first + rest[:4])
    assert state_of(rest[2].subscription) is State.REGISTERED
    assert [m.subscription for m in rest[4:]] == changed
    assert not any(m.initial for m in rest[4:])


@pytest.mark.parametrize("seed", [1, 2])
async def test_reconnecting_misses_none_and_repeats_none(
    api: Api, conn: asyncpg.Connection, database_url: str, seed: int
) -> None:
    """Writers of ours and strangers whose transactions end late; a watcher that reconnects all the time."""
    chance = random.Random(seed)
    ids = await add_subscriptions(conn, 4)
    for subscription_id in ids:
        await api.act(Action.ACTIVATE if subscription_id != ids[3] else Action.DEACTIVATE, subscription_id)
    catalog_id = await conn.fetchval("SELECT max(catalog_id) FROM noetl.event")
    stopped = asyncio.Event()

    async def act(subscription_id: int) -> None:
        for _ in range(25):
            await outcome_of(api.act(chance.choice([Action.PAUSE, Action.RESUME]), subscription_id))

    async def write_late(number: int) -> None:
        """Events of a new subscription in one transaction that takes its time."""
        stranger = await asyncpg.connect(database_url)
        async with stranger.transaction():
            for offset, (event_type, word) in enumerate(
                (("registered", "REGISTERED"), ("activated", "ACTIVE"), ("paused", "PAUSED"))
            ):
                await add_event(
                    stranger,
                    9000 + number,
                    # The same ids in every execution, as imports have them.
                    70 + offset,
                    catalog_id=catalog_id,
                    event_type=f"subscription.{event_type}",
                    status=word,
                )
                for _ in range(chance.randrange(4)):
                    await api.get(ids[0])
        await stranger.close()

    async def follow() -> list[Message]:
        messages: list[Message] = []
        token = ""
        while True:
            async with aclosing(watch(api, resume_token=token)) as stream:
                for _ in range(chance.randrange(1, 6)):
                    try:
                        async with asyncio.timeout(1.0 if stopped.is_set() else 20.0):
                            messages.append(await anext(stream))
                    except TimeoutError:
                        return messages
                    token = messages[-1].resume_token

    following = asyncio.create_task(follow())
    async with asyncio.TaskGroup() as group:
        for subscription_id in ids[:3]:
            group.create_task(act(subscription_id))
        for number in range(6):
            group.create_task(write_late(number))
    stopped.set()
    messages = await asyncio.wait_for(following, 15)

    seen: dict[int, list[int]] = {}
    for message in messages:
        seen.setdefault(message.subscription.subscription_id, []).append(int(message.subscription.etag))
    assert seen.keys() == {*ids, *range(9000, 9006)}
    for subscription_id, events in seen.items():
        history = [event.event_id for event in await api.events(subscription_id)]
        # It begins somewhere, and from there on it is the history.
        assert events == history[history.index(events[0]) :]


async def test_what_commits_late_is_told(api: Api, conn: asyncpg.Connection) -> None:
    """An event with a lower id, of an older transaction, of another subscription."""
    await add_entry(conn, "jobs/listen")
    await add_entry(conn, "probe")
    made = await api.put_into(State.ACTIVE, "jobs/listen")

    async with aclosing(watch(api)) as stream:
        await take(stream, 1)
        late = conn.transaction()
        await late.start()
        await add_event(
            conn, 4711, 5, catalog_id=made.catalog_id, event_type="subscription.paused", status="PAUSED"
        )
        paused = await api.act(Action.PAUSE, made.subscription_id)
        (before,) = await take(stream, 1)
        await late.commit()
        (after,) = await take(stream, 1)
    async with aclosing(watch(api, resume_token=before.resume_token)) as again:
        (resumed,) = await take(again, 1)

    assert before.subscription == paused
    assert after.subscription.subscription_id == resumed.subscription.subscription_id == 4711


async def test_an_event_that_comes_too_late_to_matter_is_not_told(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    await add_entry(conn, "probe")
    made = await api.put_into(State.ACTIVE, "jobs/listen")

    async with aclosing(watch(api)) as stream:
        (first,) = await take(stream, 1)
        await add_event(
            conn,
            made.subscription_id,
            int(made.etag) - 1,
            catalog_id=made.catalog_id,
            event_type="subscription.paused",
            status="PAUSED",
        )
        assert await is_silent(stream, api, "probe")
    await api.act(Action.PAUSE, made.subscription_id)
    async with aclosing(watch(api, resume_token=first.resume_token)) as again:
        messages = await take(again, 2)

    assert [state_of(m.subscription) for m in messages] == [State.REGISTERED, State.PAUSED]


async def test_rows_from_another_database_belong_to_the_present(api: Api, conn: asyncpg.Connection) -> None:
    """A restored log names transactions that this database has yet to reach."""
    ids = await add_subscriptions(conn, 3)
    await conn.execute("UPDATE noetl.event SET xact_id = '900000000'::xid8")

    async with aclosing(watch(api)) as stream:
        messages = await take(stream, 3)
        async with aclosing(watch(api, subscription_id=ids[1])) as one:
            await take(one, 1)

    assert [m.subscription.subscription_id for m in messages] == ids


async def test_two_hundred_watchers_share_a_connection(
    conn: asyncpg.Connection, settings: Settings, start_server: StartServer, channel_to: ChannelTo
) -> None:
    await add_entry(conn, "jobs/listen")
    address = (await start_server(replace(settings, pool_size_max=3))).address
    api = Api(await channel_to(address))
    made = await api.put_into(State.ACTIVE, "jobs/listen")
    fields = [{"subscription_id": made.subscription_id}, {"path_prefix": "jobs/"}, {}, {}]
    streams = [watch(api, **fields[number % 4]) for number in range(200)]
    try:
        await asyncio.gather(*(take(stream, 1, seconds=15) for stream in streams))
        expected = [await api.act(action, made.subscription_id) for action in (Action.PAUSE, Action.RESUME)]
        received = await asyncio.gather(*(take(stream, 2, seconds=15) for stream in streams))
        connections = await conn.fetchval(
            """
            SELECT count(*)
            FROM pg_stat_activity
            WHERE application_name = 'noetl_grpc' AND datname = current_database()
            """
        )
    finally:
        await asyncio.gather(*(stream.aclose() for stream in streams))  # type: ignore[attr-defined]

    assert all([m.subscription for m in messages] == expected for messages in received)
    assert connections <= 3


async def test_a_slow_watcher_is_ended_with_its_token_and_goes_on_from_there(
    api: Api, conn: asyncpg.Connection
) -> None:
    catalog_id = await add_entry(conn, "jobs/listen")
    made = await api.put_into(State.ACTIVE, "jobs/listen")
    call = api.stub.WatchSubscriptions(pb.WatchSubscriptionsRequest(), metadata=AUTHORIZATION)
    messages = aiter(call)
    assert (await anext(messages)).initial

    got: list[int] = []
    token, total = "", 0
    error: Any = None
    # Nobody can tell when a reader is too slow; one that keeps up with this much gets more of it.
    while error is None and total < 15_000:
        for _ in range(12):
            await conn.execute(
                """
                INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, node_name, status)
                SELECT $1, $2, $3::bigint + number, 'subscription.paused', 'x/' || repeat('x', 6000), 'PAUSED'
                FROM generate_series($4::int + 1, $4 + 250) AS number
                """,
                made.subscription_id,
                catalog_id,
                int(made.etag),
                total,
            )
            total += 250
        try:
            while len(got) < total:
                message = await anext(messages)
                got.append(int(message.subscription.etag))
                token = message.resume_token
        except grpc.aio.AioRpcError as raised:
            error = status.from_rpc_error(raised)
    assert isinstance(error, Overloaded)
    assert error.metadata["resume_token"] == token
    assert 0 < len(got) < total

    async with aclosing(watch(api, resume_token=error.metadata["resume_token"])) as stream:
        got += [int(m.subscription.etag) for m in await take(stream, total - len(got))]

    assert got == list(range(int(made.etag) + 1, int(made.etag) + total + 1))


async def test_a_server_that_goes_away_tells_where_to_go_on(
    conn: asyncpg.Connection, settings: Settings, start_server: StartServer, channel_to: ChannelTo
) -> None:
    await add_entry(conn, "jobs/listen")
    leaving, staying = await start_server(settings), await start_server(settings)
    api, other = Api(await channel_to(leaving.address)), Api(await channel_to(staying.address))
    async with aclosing(watch(api)) as empty:
        waiting = asyncio.create_task(outcome_of(take(empty, 9)))
        made = (await api.register("jobs/listen")).subscription
        async with aclosing(watch(api)) as stream:
            await take(stream, 1)
            active = await api.act(Action.ACTIVATE, made.subscription_id)
            (last,) = await take(stream, 1)

            await leaving.drain()
            error = await outcome_of(take(stream, 1))
        assert isinstance(await waiting, ShuttingDown)
    changed = await other.act(Action.PAUSE, made.subscription_id)

    assert last.subscription == active
    assert isinstance(error, ShuttingDown)
    async with aclosing(watch(other, resume_token=error.metadata["resume_token"])) as stream:
        (message,) = await take(stream, 1)
    assert message.subscription == changed


async def test_a_lost_database_loses_no_change(api: Api, conn: asyncpg.Connection) -> None:
    await add_entry(conn, "jobs/listen")
    made = await api.put_into(State.ACTIVE, "jobs/listen")
    stream = watch(api)
    messages = await take(stream, 1)

    for action in (Action.PAUSE, Action.RESUME) * 3:
        await conn.execute(
            """
            SELECT pg_terminate_backend(pid, 5000)
            FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()
            """
        )
        async with asyncio.timeout(10):
            while isinstance(await outcome_of(api.act(action, made.subscription_id)), Exception):
                pass
    events = await api.events(made.subscription_id)
    async with asyncio.timeout(15):
        while messages[-1].subscription.etag != str(events[-1].event_id):
            message = await outcome_of(anext(stream))
            if isinstance(message, Exception):
                stream = watch(api, resume_token=messages[-1].resume_token)
            else:
                messages.append(message)
    await stream.aclose()  # type: ignore[attr-defined]

    assert [int(m.subscription.etag) for m in messages] == [event.event_id for event in events[1:]]


async def test_watching_over_shards(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    urls = [await new_database() for _ in range(3)]
    cluster = await asyncpg.connect(urls[0])
    api = Api(await channel_to((await start_server(settings_for(*urls))).address))
    ids: dict[int, int] = {}
    number = 0
    while len(ids) < 3:
        number += 1
        await add_entry(cluster, f"jobs/{number}")
        made = (await api.register(f"jobs/{number}")).subscription
        ids[shard_of(made.subscription_id, 3)] = made.subscription_id
    await cluster.close()
    messages: list[Message] = []
    token = ""

    for step in range(6):
        async with aclosing(watch(api, resume_token=token)) as stream:
            if not step:
                present = await take(stream, number)
                assert sorted(m.subscription.subscription_id for m in present) == [
                    m.subscription.subscription_id for m in present
                ]
                token = present[-1].resume_token
            for _ in range(2):
                changed = await api.act(Action.DEACTIVATE, ids[step % 3])
                messages += await take(stream, 1)
                assert messages[-1].subscription == changed
                token = messages[-1].resume_token
        await api.act(Action.ACTIVATE, ids[(step + 1) % 3])
        async with aclosing(watch(api, resume_token=token)) as stream:
            messages += await take(stream, 1)
            token = messages[-1].resume_token
            assert messages[-1].subscription.subscription_id == ids[(step + 1) % 3]
    async with aclosing(watch(api, subscription_id=ids[2])) as stream:
        await take(stream, 1)
        changed = await api.act(Action.DEACTIVATE, ids[2])
        assert [m.subscription for m in await take(stream, 1)] == [changed]

    assert len(set(told(messages))) == 18


async def test_a_log_without_transaction_ids_can_be_watched(
    conn: asyncpg.Connection, settings: Settings, start_server: StartServer, channel_to: ChannelTo
) -> None:
    """Where another role owns it: then a reconnect begins with the present again."""
    await conn.execute("ALTER TABLE noetl.event DROP COLUMN xact_id")
    await add_entry(conn, "jobs/listen")
    api = Api(await channel_to((await start_server(settings)).address))
    made = await api.put_into(State.ACTIVE, "jobs/listen")

    async with aclosing(watch(api)) as stream:
        (first,) = await take(stream, 1)
        paused = await api.act(Action.PAUSE, made.subscription_id)
        (change,) = await take(stream, 1)
        if change.subscription == made:
            # It was made so shortly before that nobody knows whether it has been told.
            (change,) = await take(stream, 1)
    async with aclosing(watch(api, resume_token=change.resume_token)) as stream:
        (again,) = await take(stream, 1)
    async with aclosing(watch(api, subscription_id=made.subscription_id)) as stream:
        (one,) = await take(stream, 1)
    async with aclosing(watch(api, subscription_id=5)) as stream:
        missing = await outcome_of(take(stream, 1))

    assert (first.subscription, first.initial) == (made, True)
    assert (change.subscription, change.initial) == (paused, False)
    assert (again.subscription, again.initial) == (one.subscription, one.initial) == (paused, True)
    assert isinstance(missing, NotFound)
