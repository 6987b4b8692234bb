"""Listing subscriptions and their events: complete, paged, and at a cost that does not grow with the rows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import subscription_pb2 as pb

from noetl_grpc.core.lifecycle import EVENT_TYPES, Action, State
from noetl_grpc.errors import DatabaseUnavailable, InvalidRequest, NotFound
from noetl_grpc.follower import Follower
from noetl_grpc.metrics import Metrics
from noetl_grpc.server import Server
from noetl_grpc.services.subscription import SubscriptionServicer
from noetl_grpc.services.subscription_gauges import SubscriptionGauges
from noetl_grpc.settings import Settings
from noetl_grpc.storage.pool import open_shards, shard_of
from noetl_grpc.storage.queries import queries
from tests.conftest import settings_for
from tests.subscriptions import Api, add_entry, add_event, add_subscriptions, outcome_of, state_of, taken_away

StartServer = Callable[[Settings], Awaitable[Server]]
ChannelTo = Callable[[str], Awaitable[grpc.aio.Channel]]
NewDatabase = Callable[[], Awaitable[str]]


@pytest.fixture
def api(channel: grpc.aio.Channel) -> Api:
    return Api(channel)


async def test_an_empty_log_lists_nothing(api: Api) -> None:
    pages = [page async for page in api.list_pages()]

    assert pages == [pb.ListSubscriptionsResponse()]


async def test_five_thousand_subscriptions_under_change(api: Api, conn: asyncpg.Connection) -> None:
    """None twice, and none missed that was there all the time."""
    there = await add_subscriptions(conn, 5000)
    for number in range(30):
        await add_entry(conn, f"new/{number}")
    listed: list[int] = []
    token = ""
    pages = 0

    while token or not pages:
        request = pb.ListSubscriptionsRequest(page_size=240, page_token=token)
        page, *_ = await asyncio.gather(
            api.call("ListSubscriptions", request),
            *(api.act(Action.DEACTIVATE, there[(pages * 371 + step * 997) % 5000]) for step in range(5)),
            api.register(f"new/{pages}"),
        )
        listed += [subscription.subscription_id for subscription in page.subscriptions]
        token = page.next_page_token
        pages += 1

    assert pages >= 21
    assert set(there) <= set(listed)
    assert max(Counter(listed).values()) == 1
    assert listed == sorted(listed)


async def test_pages_have_the_size_asked_for(api: Api, conn: asyncpg.Connection) -> None:
    ids = await add_subscriptions(conn, 1205)

    sizes = {
        asked: [len(page.subscriptions) async for page in api.list_pages(page_size=asked)]
        for asked in (0, 1000, 5000, 1205, 241)
    }

    assert sizes[0] == [50] * 24 + [5]
    assert sizes[1000] == sizes[5000] == sizes[1205] == [1000, 205]
    assert sizes[241] == [241] * 5
    assert await api.list_ids(page_size=100) == ids


async def test_filters_by_state_and_path(api: Api, conn: asyncpg.Connection) -> None:
    ids = await add_subscriptions(conn, 100, path="team_%/job")
    catalog_id = await add_entry(conn, "team_%/job/nameless")
    await add_event(conn, 5, 6, catalog_id=catalog_id, event_type="subscription.paused", status="PAUSED")

    paused = await api.list_ids(states=[pb.SUBSCRIPTION_STATE_PAUSED], page_size=7)
    two = await api.list_ids(states=[pb.SUBSCRIPTION_STATE_ACTIVE, pb.SUBSCRIPTION_STATE_REGISTERED] * 2)
    prefixed = await api.list_ids(path_prefix="team_%/job1")
    both = await api.list_ids(path_prefix="team_%/job", states=[pb.SUBSCRIPTION_STATE_PAUSED])

    assert paused == both == [5, *ids[2::5]]
    assert two == sorted([*ids[0::5], *ids[1::5]])
    assert prefixed == sorted([ids[1], *ids[10:20]])
    assert await api.list_ids(path_prefix="Team") == await api.list_ids(path_prefix="team__") == []
    assert await api.list_ids(path_prefix="team_%/job/") == [5]


async def test_what_is_listed_is_what_is_got(api: Api, conn: asyncpg.Connection) -> None:
    for state in State:
        await add_entry(conn, f"x/{state.value}")
        made = await api.put_into(state, f"x/{state.value}")
        await api.heartbeat(made.subscription_id, "runtime-1", in_flight=2, backlog=5)

    (page,) = [page async for page in api.list_pages()]

    assert {state_of(listed) for listed in page.subscriptions} == set(State)
    for listed in page.subscriptions:
        assert listed == await api.get(listed.subscription_id)
        assert listed.runtime.runtime_id == "runtime-1"


async def test_bad_list_requests_name_the_field(api: Api) -> None:
    wrong: list[tuple[str, Any]] = [
        ("page_size", -1),
        ("states", [0]),
        ("states", [pb.SUBSCRIPTION_STATE_ACTIVE, 77]),
        ("path_prefix", "a\0"),
        ("page_token", "garbage"),
        ("page_token", "ü"),
    ]
    for field, value in wrong:
        request = pb.ListSubscriptionsRequest(**{field: value})

        error = await outcome_of(api.call("ListSubscriptions", request))

        assert isinstance(error, InvalidRequest), (field, value)
        assert error.violations[0][0] == field


async def test_a_page_token_belongs_to_its_filters(api: Api, conn: asyncpg.Connection) -> None:
    first, second = (await add_subscriptions(conn, 20))[:2]
    page = await api.call(
        "ListSubscriptions", pb.ListSubscriptionsRequest(page_size=1, states=[1, 2], path_prefix="bulk")
    )

    def with_token(**fields: Any) -> Awaitable[Any]:
        request = pb.ListSubscriptionsRequest(page_token=page.next_page_token, page_size=1, **fields)
        return outcome_of(api.call("ListSubscriptions", request))

    same = await with_token(states=[2, 1, 1], path_prefix="bulk")
    for fields in ({}, {"states": [1]}, {"states": [1, 2], "path_prefix": "bul"}):
        assert isinstance(await with_token(**fields), InvalidRequest)
    events = await outcome_of(
        api.call(
            "ListSubscriptionEvents",
            pb.ListSubscriptionEventsRequest(subscription_id=first, page_token=page.next_page_token),
        )
    )

    assert isinstance(events, InvalidRequest)
    assert [listed.subscription_id for listed in same.subscriptions] == [second]


class _Context:
    """What ListSubscriptions asks of gRPC's context."""

    def time_remaining(self) -> float | None:
        return None


async def test_the_number_of_statements_does_not_depend_on_the_rows(
    conn: asyncpg.Connection, database_url: str
) -> None:
    shards = await open_shards([database_url], cluster_url=database_url, size_max=1)
    servicer = SubscriptionServicer(
        shards, [Follower(pool) for pool in shards.pools], next_id=lambda: 1, drain_timeout=timedelta(0)
    )
    statements: list[str] = []

    async def count(page_size: int) -> int:
        statements.clear()
        request = pb.ListSubscriptionsRequest(page_size=page_size)
        answer = await servicer.ListSubscriptions(request, _Context())  # type: ignore[arg-type]
        assert len(answer.subscriptions) == page_size
        return len(statements)

    try:
        await add_subscriptions(conn, 1000)
        async with shards.pools[0].acquire() as used:
            used.add_query_logger(lambda record: statements.append(record.query))
        counts = [await count(page_size) for page_size in (1, 10, 1000)]
    finally:
        await shards.close()

    assert counts[0] == counts[1] == counts[2] <= 4


async def test_a_page_costs_its_own_size(conn: asyncpg.Connection) -> None:
    """In a long log of other events, and with many more subscriptions behind it."""
    ids = await add_subscriptions(conn, 3000)
    catalog_id = await add_entry(conn, "other")
    await conn.execute(
        """
        INSERT INTO noetl.event (execution_id, catalog_id, event_id, event_type, status)
        SELECT $1::bigint + number, $2, number, 'command.completed', 'COMPLETED'
        FROM generate_series(1, 20000) AS number
        """,
        ids[0],
        catalog_id,
    )
    await conn.execute("ANALYZE noetl.event")

    async with conn.transaction():
        await conn.execute(queries["walk_lifecycle_index"])
        page = await _blocks(conn, "list_subscriptions", ids[1000], None, "", 21)
    one = await _blocks(conn, "read_subscription", ids[5])
    path = await _blocks(conn, "live_subscriptions_of_path", "bulk/7")

    assert page < 200
    assert one < 20
    assert path < 100


async def _blocks(conn: asyncpg.Connection, name: str, *arguments: Any) -> int:
    """How many blocks a statement touches."""
    statement = await conn.prepare(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {queries[name]}")
    plan = json.loads(await statement.fetchval(*arguments))[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def test_lists_work_without_the_index(api: Api, conn: asyncpg.Connection) -> None:
    """Where another role owns the log it may be missing."""
    ids = await add_subscriptions(conn, 30)
    await conn.execute("DROP INDEX noetl.idx_event_subscription_state")
    await conn.execute("DROP INDEX noetl.idx_event_subscription_path")

    assert await api.list_ids(page_size=7) == ids


def test_the_statements_name_the_types_and_states_of_the_core() -> None:
    for name, statement in queries.items():
        if "subscription.registered" in statement:
            for event_type in EVENT_TYPES:
                assert f"'{event_type}'" in statement, name
        if "'REGISTERED'" in statement and name != "draining_since":
            assert all(f"'{state.value}'" in statement for state in State), name


async def test_lists_merge_the_shards_and_name_those_out_of_reach(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    urls = [await new_database() for _ in range(3)]
    conns = [await asyncpg.connect(url) for url in urls]
    by_shard: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number, conn in enumerate(conns):
        by_shard[number] = await add_subscriptions(conn, 40, first_id=400_000_000_000_000_000 + number)
    api = Api(await channel_to((await start_server(settings_for(*urls))).address))
    everything = sorted(chain.from_iterable(by_shard.values()))

    assert await api.list_ids(page_size=7) == everything
    async with taken_away(conns[0], urls[1]):
        pages = [page async for page in api.list_pages(page_size=30)]
        one = await outcome_of(api.get(next(i for i in range(1, 99) if shard_of(i, 3) == 1)))
    assert await api.list_ids() == everything

    assert [list(page.unreachable_shards) for page in pages] == [[1]] * 3
    assert [listed.subscription_id for page in pages for listed in page.subscriptions] == sorted(
        by_shard[0] + by_shard[2]
    )
    assert isinstance(one, DatabaseUnavailable)
    for conn in conns:
        await conn.close()


async def test_without_any_shard_a_list_is_unavailable(
    postgres: Any, new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    url = await new_database()
    admin = await asyncpg.connect(postgres.url())
    api = Api(await channel_to((await start_server(settings_for(url))).address))

    async with taken_away(admin, url):
        outcome = await outcome_of(api.list_ids())

    assert isinstance(outcome, DatabaseUnavailable)
    await admin.close()


async def test_the_history_tells_who_why_and_when(api: Api, conn: asyncpg.Connection) -> None:
    catalog_id = await add_entry(conn, "jobs/listen")
    made = (await api.register("jobs/listen")).subscription
    await api.act(Action.ACTIVATE, made.subscription_id, actor="ann", reason="go live", request_id="r-1")
    await api.act(Action.PAUSE, made.subscription_id, actor="bob")
    last = int((await api.get(made.subscription_id)).etag)
    await add_event(
        conn,
        made.subscription_id,
        last + 1,
        catalog_id=catalog_id,
        event_type="subscription.draining",
        status="DRAINING",
        meta='{"actor": {"odd": 1}, "reason": null}',
        created_at=datetime(2026, 1, 2, 3, 4, 5),
    )
    await add_event(
        conn,
        made.subscription_id,
        last + 2,
        catalog_id=catalog_id,
        event_type="subscription.paused",
        status="PAUSED",
        meta='["no object"]',
    )

    events = await api.events(made.subscription_id)

    assert [(event.event_type, event.actor, event.reason, event.request_id) for event in events] == [
        ("subscription.registered", "", "", ""),
        ("subscription.activated", "ann", "go live", "r-1"),
        ("subscription.paused", "bob", "", ""),
        ("subscription.draining", '{"odd": 1}', "", ""),
        ("subscription.paused", "", "", ""),
    ]
    assert [pb.SubscriptionState.Name(event.state) for event in events] == [
        "SUBSCRIPTION_STATE_REGISTERED",
        "SUBSCRIPTION_STATE_ACTIVE",
        "SUBSCRIPTION_STATE_PAUSED",
        "SUBSCRIPTION_STATE_DRAINING",
        "SUBSCRIPTION_STATE_PAUSED",
    ]
    assert events[3].created_at.ToDatetime() == datetime(2026, 1, 2, 3, 4, 5)
    assert events[0].created_at.ToDatetime(UTC) > datetime.now(UTC) - timedelta(minutes=1)
    assert [event.event_id for event in events] == sorted(event.event_id for event in events)
    assert await api.events(made.subscription_id, page_size=2) == events


async def test_the_history_of_nothing_is_not_found(api: Api, conn: asyncpg.Connection) -> None:
    (known,) = await add_subscriptions(conn, 1)

    unknown = await outcome_of(api.events(known + 1))
    for fields, named in (
        ({"subscription_id": 0}, "subscription_id"),
        ({"subscription_id": known, "page_size": -3}, "page_size"),
        ({"subscription_id": known, "page_token": "x"}, "page_token"),
    ):
        error = await outcome_of(
            api.call("ListSubscriptionEvents", pb.ListSubscriptionEventsRequest(**fields))
        )
        assert isinstance(error, InvalidRequest)
        assert error.violations[0][0] == named

    assert isinstance(unknown, NotFound)
    assert unknown.reason == "SUBSCRIPTION_NOT_FOUND"


async def test_gauges_count_states_and_dead_runtimes(
    new_database: NewDatabase, start_server: StartServer, channel_to: ChannelTo
) -> None:
    urls = [await new_database() for _ in range(2)]
    conns = [await asyncpg.connect(url) for url in urls]
    metrics = Metrics(shards=2)
    shards = await open_shards(urls, cluster_url=urls[0])
    gauges = SubscriptionGauges(shards, metrics)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    try:
        ids = [await add_subscriptions(conn, 10) for conn in conns]
        for conn, known in zip(conns, ids, strict=True):
            for subscription_id, seconds in ((known[1], -5), (known[4], -5), (known[2], 60)):
                await conn.execute(
                    """
                    INSERT INTO noetl.subscription_runtime (subscription_id, runtime_id, lease_expires_at)
                    VALUES ($1, 'r', now() + make_interval(secs => $2))
                    """,
                    subscription_id,
                    seconds,
                )
        await gauges.look()
        counted = {state.value: value("noetl_subscriptions", state=state.value) for state in State}
        dead = value("noetl_subscription_runtimes_dead")

        await add_subscriptions(conns[0], 5, first_id=500_000_000_000_000_000)
        async with taken_away(conns[0], urls[1]):
            with pytest.raises(DatabaseUnavailable):
                await gauges.look()
        kept = value("noetl_subscriptions", state="ACTIVE")
        await gauges.look()
    finally:
        await shards.close()
        for conn in conns:
            await conn.close()

    assert counted == {state.value: 4.0 for state in State}
    assert dead == 2.0, "a deactivated subscription needs no runtime"
    assert kept == 4.0
    assert value("noetl_subscriptions", state="ACTIVE") == 5.0
