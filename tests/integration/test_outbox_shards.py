"""Two shards on two databases: every RPC finds its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import outbox_pb2 as pb

from noetl_grpc.dev.databases import create_database
from noetl_grpc.dev.postgres import Postgres
from noetl_grpc.server import Server
from noetl_grpc.storage.pool import shard_of
from tests.conftest import AUTHORIZATION, settings_for
from tests.outbox_api import OpenChannel, OutboxApi, ids, message, refused, refused_field

StartServer = Callable[[Any], Awaitable[Server]]

Request = pb.ConsumeOutboxRequest


@pytest.fixture
async def urls(new_database: Callable[[], Awaitable[str]]) -> list[str]:
    return [await new_database(), await new_database()]


@pytest.fixture
async def api(urls: list[str], start_server: StartServer, channel_to: OpenChannel) -> OutboxApi:
    server = await start_server(settings_for(*urls, outbox_attempts_max=1))
    return OutboxApi(await channel_to(server.address))


async def _execute(url: str, statement: str) -> list[Any]:
    conn = await asyncpg.connect(url)
    try:
        rows: list[Any] = await conn.fetch(statement)
        return rows
    finally:
        await conn.close()


async def test_messages_go_to_the_shard_of_their_execution(api: OutboxApi, urls: list[str]) -> None:
    messages = [message(number, number % 5 + 1) for number in range(1, 21)]
    messages += [message(number, None) for number in range(1, 9)]

    first = await api.enqueue(*messages)
    again = await api.enqueue(*reversed(messages))

    assert (first.enqueued, again.enqueued, again.duplicates) == (28, 0, 28)
    assert list(again.outbox_ids) == list(reversed(first.outbox_ids))
    for shard, url in enumerate(urls):
        rows = await _execute(url, "SELECT outbox_id, execution_id, event_id FROM noetl.outbox")
        assert rows
        for row in rows:
            assert shard_of(row["execution_id"] or row["event_id"], 2) == shard
    assert await api.pending() == 28
    assert (await api.stats())["pending"] == 28


async def test_a_claim_is_of_one_shard_and_its_token_finds_the_way_back(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, number) for number in range(1, 101)))

    claims = [await api.claim(limit=10, ordered=number % 2 == 0) for number in range(6)]

    shards = [{row.shard for row in claim.rows} for claim in claims]
    assert all(len(shard) == 1 for shard in shards)
    assert {shard for found in shards for shard in found} == {0, 1}
    for claim in claims:
        for row in claim.rows:
            assert shard_of(row.execution_id, 2) == row.shard
        token, (first, second, *rest) = claim.claim_token, ids(claim)
        assert (await api.extend(token)).extended == len(claim.rows)
        assert (await api.release(token, [first])).released == 1
        assert (await api.fail(second, token)).dead
        answer = await api.publish(rest, token)
        assert (answer.marked, list(answer.stale_ids), list(answer.unknown_ids)) == (len(rest), [], [])
    assert (await api.stats())["dead"] == 6


async def test_without_a_token_the_shard_must_be_said(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, number) for number in range(1, 11)))
    rows = [row for _ in range(2) for row in (await api.claim()).rows]
    here = [row.outbox_id for row in rows if row.shard == 1]

    assert await refused_field(api.publish(here)) == "shard"
    assert await refused_field(api.fail(1)) == "shard"
    assert await refused_field(api.publish(here, shard=2)) == "shard"
    assert (await api.publish(here, shard=1)).marked == len(here)
    assert (await api.fail(1, shard=0)).dead


async def test_dead_rows_of_all_shards_are_listed_and_requeued(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, number) for number in range(1, 31)))
    while (claim := await api.claim()).rows:
        for row in claim.rows:
            await api.fail(row.outbox_id, claim.claim_token)

    listed: list[tuple[int, int]] = []
    token = ""
    while True:
        page = await api.dead(page_size=4, page_token=token)
        listed += [(dead.row.shard, dead.row.outbox_id) for dead in page.rows]
        token = page.next_page_token
        if not token:
            break
    here = [outbox_id for shard, outbox_id in listed if shard == 1]

    assert listed == sorted(listed)
    assert len(set(listed)) == 30
    some = pb.DeadOutboxFilter(outbox_ids=here[:2])
    assert await refused_field(api.requeue(some)) == "filter.shard"
    some.shard = 1
    assert await api.requeue(some) == 2
    assert await api.requeue(pb.DeadOutboxFilter(shard=1), dry_run=True) == len(here) - 2
    assert len((await api.dead(pb.DeadOutboxFilter(shard=0))).rows) == 30 - len(here)
    assert await api.requeue(all=True) == 28


async def test_waiting_and_streaming_claims_hear_of_every_shard(api: OutboxApi) -> None:
    call = api.stub.ConsumeOutbox(metadata=AUTHORIZATION)
    await call.write(Request(start=Request.Start()))
    await call.write(Request(credit=Request.Credit(rows=1)))
    shards = set()
    for number in range(1, 9):
        await api.enqueue(message(number, number))
        async with asyncio.timeout(5):
            batch = (await call.read()).batch
        shards.add(batch.rows[0].shard)
        await call.write(
            Request(published=Request.Published(claim_token=batch.claim_token, outbox_ids=ids(batch)))
        )
        assert (await call.read()).result.marked == 1
    call.cancel()

    for number in range(11, 19):
        waiting = asyncio.create_task(api.claim(wait=10))
        await api.stats()
        await api.enqueue(message(number, number))
        shards.add((await waiting).rows[0].shard + 10)
    assert shards == {0, 1, 10, 11}


async def test_a_shard_out_of_reach_hides_nobody_elses_rows(
    start_server: StartServer, channel_to: OpenChannel
) -> None:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(Postgres(durable=False))
        there = await stack.enter_async_context(Postgres(durable=False))
        server = await start_server(
            settings_for(await create_database(here, "noetl"), await create_database(there, "noetl"))
        )
        api = OutboxApi(await channel_to(server.address))
        await api.enqueue(*(message(number, number) for number in range(1, 21)))
        await there.stop(mode="immediate")

        claim = await api.claim()
        code, info = await refused(api.claim())
        counted = await refused(api.pending())

        assert {row.shard for row in claim.rows} == {0}
        assert (await api.publish(ids(claim), claim.claim_token)).marked == len(claim.rows)
        assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")
        assert counted[0] == grpc.StatusCode.UNAVAILABLE

        await there.start()
        async with asyncio.timeout(10):
            while True:
                try:
                    rest = await api.claim()
                    break
                except grpc.aio.AioRpcError:
                    continue
        assert {row.shard for row in rest.rows} == {1}
