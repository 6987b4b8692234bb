"""ConsumeOutbox: rows by credit, acknowledgements on the same stream, and what its end leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import grpc
import pytest
from noetlpb.v1 import outbox_pb2 as pb
from noetlpb.v1 import outbox_pb2_grpc as rpc

from noetl_grpc.server import Server
from tests.conftest import AUTHORIZATION, settings_for
from tests.outbox_api import (
    OpenChannel,
    OutboxApi,
    duration,
    expire,
    ids,
    insert,
    message,
    refused_field,
    rows_of,
)

Request = pb.ConsumeOutboxRequest
StartServer = Callable[[Any], Awaitable[Server]]


@pytest.fixture
def api(channel: grpc.aio.Channel) -> OutboxApi:
    return OutboxApi(channel)


class Consumer:
    """One stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = rpc.OutboxServiceStub(channel).ConsumeOutbox(metadata=AUTHORIZATION)
        self.aside: list[pb.ConsumeOutboxResponse.Batch] = []

    async def start(self, credit: int = 0, **start: Any) -> Consumer:
        await self.call.write(Request(start=Request.Start(**start)))
        if credit:
            await self.credit(credit)
        return self

    async def credit(self, rows: int) -> None:
        await self.call.write(Request(credit=Request.Credit(rows=rows)))

    async def read(self) -> pb.ConsumeOutboxResponse:
        async with asyncio.timeout(10):
            response = await self.call.read()
        assert isinstance(response, pb.ConsumeOutboxResponse)
        return response

    async def batch(self) -> pb.ConsumeOutboxResponse.Batch:
        response = await self.read()
        assert response.HasField("batch")
        return response.batch

    async def rows(self, count: int) -> list[pb.ConsumeOutboxResponse.Batch]:
        """Batches until there are so many rows."""
        batches: list[pb.ConsumeOutboxResponse.Batch] = []
        while sum(len(batch.rows) for batch in batches) < count:
            batches.append(await self.batch())
        return batches

    async def result(self) -> pb.ConsumeOutboxResponse.Result:
        """The next answer; batches that come before it are put aside."""
        while True:
            response = await self.read()
            if response.HasField("result"):
                return response.result
            self.aside.append(response.batch)

    async def published(self, token: str, *outbox_ids: int) -> pb.ConsumeOutboxResponse.Result:
        await self.call.write(Request(published=Request.Published(claim_token=token, outbox_ids=outbox_ids)))
        return await self.result()

    async def failed(self, token: str, *outbox_ids: int) -> pb.ConsumeOutboxResponse.Result:
        failures = [pb.OutboxFailure(outbox_id=outbox_id, error="no") for outbox_id in outbox_ids]
        await self.call.write(Request(failed=Request.Failed(claim_token=token, failures=failures)))
        return await self.result()

    async def extended(self, token: str) -> pb.ConsumeOutboxResponse.Result:
        await self.call.write(Request(extend=Request.Extend(claim_token=token)))
        return await self.result()


@pytest.fixture
def consumer(channel: grpc.aio.Channel) -> Consumer:
    return Consumer(channel)


async def test_rows_come_as_far_as_the_credit_reaches(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 50)
    await consumer.start(10)

    batches = await consumer.rows(10)

    assert [row.outbox_id for batch in batches for row in batch.rows] == list(range(1, 11))
    assert (await api.stats())["in_flight"] == 10

    token = batches[0].claim_token
    first = batches[0].rows[0].outbox_id
    result = await consumer.published(token, first)
    assert (result.claim_token, result.marked, list(result.stale_ids)) == (token, 1, [])
    more = consumer.aside or [await consumer.batch()]
    assert [row.outbox_id for batch in more for row in batch.rows] == [11]
    assert (await api.stats())["in_flight"] == 10


async def test_credit_adds_up_and_is_never_exceeded(consumer: Consumer, conn: asyncpg.Connection) -> None:
    await insert(conn, 3000, execution="n % 40 + 1")
    await consumer.start(7)
    await consumer.credit(13)
    out: dict[int, str] = {}
    seen: set[int] = set()
    pending_results = 0
    while len(seen) < 1000:
        response = await consumer.read()
        if response.HasField("result"):
            pending_results -= 1
            continue
        for row in response.batch.rows:
            assert row.outbox_id not in seen
            out[row.outbox_id] = response.batch.claim_token
            seen.add(row.outbox_id)
        assert len(out) <= 20
        token = response.batch.claim_token
        mine = [outbox_id for outbox_id, holder in out.items() if holder == token]
        for outbox_id in mine:
            del out[outbox_id]
        await consumer.call.write(Request(published=Request.Published(claim_token=token, outbox_ids=mine)))
        pending_results += 1
    assert pending_results <= 2


async def test_a_consumer_is_woken_by_new_rows(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await consumer.start(100)

    await api.enqueue(message(1))
    mine = await consumer.batch()
    await insert(conn, 1, event="2")
    theirs = await consumer.batch()

    assert (ids(mine), ids(theirs)) == ([1], [2])


async def test_failures_and_extensions_are_answered(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 6)
    await consumer.start(6, ordered=True, lease=duration(1))
    batch = await consumer.batch()
    assert ids(batch) == [1, 2, 3, 4, 5, 6]

    extended = await consumer.extended(batch.claim_token)
    failed = await consumer.failed(batch.claim_token, 3)
    stale = await consumer.published(batch.claim_token, 1, 4, 77)

    assert extended.marked == 6
    assert extended.lease_expires_at.ToDatetime() > batch.lease_expires_at.ToDatetime()
    assert failed.marked == 1
    assert [(outcome.outbox_id, outcome.outcome) for outcome in failed.outcomes] == [
        (3, pb.OUTBOX_OUTCOME_FAILED)
    ]
    assert list(failed.released_ids) == [4, 5, 6]
    assert (stale.marked, list(stale.stale_ids)) == (1, [4, 77])


async def test_lost_rows_leave_the_window(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 8)
    await consumer.start(4)
    batch = await consumer.batch()
    assert ids(batch) == [1, 2, 3, 4]
    await expire(conn, 1, 2, 3)
    thief = await api.claim(limit=2)
    assert ids(thief) == [1, 2]

    extended = await consumer.extended(batch.claim_token)

    assert (extended.marked, list(extended.lost_ids)) == (2, [1, 2])
    more = consumer.aside or [await consumer.batch()]
    assert [row.outbox_id for batch in more for row in batch.rows] == [5, 6]


async def test_closing_ones_side_gives_the_rest_back_with_its_attempt(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 10)
    await consumer.start(5)
    batch = (await consumer.rows(5))[0]
    await consumer.call.write(
        Request(published=Request.Published(claim_token=batch.claim_token, outbox_ids=[1]))
    )
    await consumer.call.done_writing()

    assert (await consumer.result()).marked == 1
    assert await consumer.call.read() is grpc.aio.EOF
    assert await consumer.call.code() == grpc.StatusCode.OK
    rows = await rows_of(conn)
    assert [row["status"] for row in rows.values()] == ["PUBLISHED"] + ["PENDING"] * 9
    assert [row["attempts"] for row in rows.values()] == [1] + [0] * 9


async def test_a_broken_stream_gives_everything_back_with_the_attempt_counted(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 4)
    await conn.execute("UPDATE noetl.outbox SET attempts = 19 WHERE outbox_id = 2")
    await consumer.start(10, lease=duration(3600))
    assert ids(await consumer.batch()) == [1, 2, 3, 4]

    consumer.call.cancel()
    claim = await api.claim(wait=5)

    assert ids(claim) == [1, 3, 4]
    assert [row.attempts for row in claim.rows] == [2, 2, 2]
    dead = await api.dead()
    assert [row.row.outbox_id for row in dead.rows] == [2]
    assert "stream broke" in dead.rows[0].last_error


CONSUMER = """
import asyncio, sys, grpc
from noetlpb.v1 import outbox_pb2 as pb, outbox_pb2_grpc as rpc

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        call = rpc.OutboxServiceStub(channel).ConsumeOutbox(metadata=(("authorization", sys.argv[2]),))
        await call.write(pb.ConsumeOutboxRequest(start=pb.ConsumeOutboxRequest.Start()))
        await call.write(pb.ConsumeOutboxRequest(credit=pb.ConsumeOutboxRequest.Credit(rows=10)))
        response = await call.read()
        print(*(row.outbox_id for row in response.batch.rows), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_rows_of_a_killed_consumer_are_claimable_at_once_and_their_attempt_counts(
    server: Server, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 3)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, server.address, AUTHORIZATION[0][1], stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert (await process.stdout.readline()).split() == [b"1", b"2", b"3"]

    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    claim = await api.claim(wait=10)

    assert ids(claim) == [1, 2, 3]
    assert [row.attempts for row in claim.rows] == [2, 2, 2]


async def test_a_server_that_goes_away_takes_the_attempt_back(
    new_database: Callable[[], Awaitable[str]], start_server: StartServer, channel_to: OpenChannel
) -> None:
    url = await new_database()
    server = await start_server(settings_for(url))
    api = OutboxApi(await channel_to(server.address))
    await api.enqueue(*(message(number) for number in range(1, 4)))
    consumer = await Consumer(await channel_to(server.address)).start(10)
    assert ids(await consumer.batch()) == [1, 2, 3]

    await server.drain()

    assert await consumer.call.code() == grpc.StatusCode.UNAVAILABLE
    conn = await asyncpg.connect(url)
    rows = await rows_of(conn)
    await conn.close()
    assert [(row["status"], row["attempts"]) for row in rows.values()] == [("PENDING", 0)] * 3


async def test_a_message_out_of_turn_ends_the_stream_and_names_what_was_wrong(
    channel: grpc.aio.Channel, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    start = Request(start=Request.Start())
    bad: list[tuple[list[Request], str]] = [
        ([Request()], "start"),
        ([Request(credit=Request.Credit(rows=1))], "start"),
        ([], "start"),
        ([start, start], "start"),
        ([start, Request()], "message"),
        ([start, Request(credit=Request.Credit(rows=0))], "credit.rows"),
        ([start, Request(credit=Request.Credit(rows=-5))], "credit.rows"),
        ([start, Request(published=Request.Published(outbox_ids=[1]))], "published.claim_token"),
        ([start, Request(published=Request.Published(claim_token="x"))], "published.outbox_ids"),
        ([start, Request(failed=Request.Failed(claim_token="x"))], "failed.failures"),
        ([start, Request(extend=Request.Extend(claim_token="x"))], "extend.claim_token"),
        ([Request(start=Request.Start(lease=duration(86400)))], "start.lease"),
        ([Request(start=Request.Start(max_bytes=-1))], "start.max_bytes"),
    ]
    named = []
    for requests, _ in bad:

        async def send(requests: list[Request] = requests) -> AsyncIterator[Request]:
            for request in requests:
                yield request

        async def consume(send: Any = send) -> None:
            call = rpc.OutboxServiceStub(channel).ConsumeOutbox(send(), metadata=AUTHORIZATION, timeout=10)
            async for _ in call:
                pass

        named.append(await refused_field(consume()))

    assert named == [field for _, field in bad]

    # Whatever the stream held comes back, and its attempt too: it was not the rows' fault.
    await insert(conn, 3)
    consumer = await Consumer(channel).start(3)
    await consumer.batch()
    await consumer.credit(-1)
    await consumer.call.code()
    assert [row["attempts"] for row in (await rows_of(conn)).values()] == [0, 0, 0]


async def test_a_consumer_that_does_not_read_is_not_fed(
    consumer: Consumer, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 400, payload='"' + "x" * 200_000 + '"')
    await consumer.start(100_000, max_bytes=4_000_000)

    counts: list[int] = []
    async with asyncio.timeout(15):
        while len(counts) < 100 or 0 in counts[-100:] or len(set(counts[-100:])) > 1:  # until it stands still
            counts.append((await api.stats())["in_flight"])

    # What is on its way: batches in the transport's window, and the two that wait.
    assert 19 <= counts[-1] <= 120
    consumer.call.cancel()


async def test_ordered_streams_share_the_work_and_keep_the_order(
    channel: grpc.aio.Channel, conn: asyncpg.Connection
) -> None:
    await insert(conn, 600, execution="n % 30 + 1")
    last: dict[int, int] = {}
    done: set[int] = set()

    async def consume() -> None:
        consumer = await Consumer(channel).start(20, ordered=True)
        while len(done) < 600:
            response = await consumer.read()
            if not response.HasField("batch"):
                continue
            for row in response.batch.rows:
                assert row.outbox_id > last.get(row.execution_id, 0)
                last[row.execution_id] = row.outbox_id
            done.update(ids(response.batch))
            await consumer.call.write(
                Request(
                    published=Request.Published(
                        claim_token=response.batch.claim_token, outbox_ids=ids(response.batch)
                    )
                )
            )
        finished.set()
        consumer.call.cancel()

    finished = asyncio.Event()
    async with asyncio.timeout(15):
        tasks = [asyncio.create_task(consume()) for _ in range(4)]
        await finished.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == set(range(1, 601))
