"""Keeping rows, giving them back, and what becomes of those that are dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import UTC, datetime, timedelta

import asyncpg
import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import outbox_pb2 as pb

from noetl_grpc.metrics import Metrics
from noetl_grpc.server import Server
from noetl_grpc.services.chores import Chores
from noetl_grpc.services.outbox_shard import OutboxShard, Terms
from noetl_grpc.storage.pool import create_pool
from tests.outbox_api import OutboxApi, duration, expire, ids, insert, refused_field, rows_of


@pytest.fixture
def api(channel: grpc.aio.Channel) -> OutboxApi:
    return OutboxApi(channel)


async def test_an_extended_lease_keeps_its_rows(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await insert(conn, 4)
    claim = await api.claim(lease=1)

    some = await api.extend(claim.claim_token, [1, 2, 99], lease=3600)
    await expire(conn, 3, 4)
    other = await api.claim()
    rest = await api.extend(claim.claim_token, lease=60)

    assert (some.extended, list(some.lost_ids)) == (2, [99])
    assert some.lease_expires_at.ToDatetime(tzinfo=UTC) - datetime.now(UTC) > timedelta(minutes=58)
    assert ids(other) == [3, 4]
    assert (rest.extended, list(rest.lost_ids)) == (2, [])
    assert (await api.publish([1, 2], claim.claim_token)).marked == 2
    nothing = await api.extend(claim.claim_token)
    assert nothing.extended == 0
    assert not nothing.HasField("lease_expires_at")


async def test_an_expired_lease_can_still_be_renewed(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await insert(conn, 2)
    claim = await api.claim()
    await expire(conn)

    assert (await api.extend(claim.claim_token)).extended == 2
    assert ids(await api.claim()) == []


async def test_released_rows_are_claimable_at_once_with_their_attempt_back(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 4)
    first = await api.claim()
    await api.fail(4, first.claim_token)
    await conn.execute("UPDATE noetl.outbox SET available_at = now() WHERE outbox_id = 4")
    second = await api.claim()
    assert ids(second) == [4]

    one = await api.release(first.claim_token, [2, 4, 77])
    rest = await api.release(first.claim_token)
    again = await api.release(first.claim_token)
    failed_before = await api.release(second.claim_token)

    assert (one.released, list(one.lost_ids), list(one.released_ids)) == (1, [4, 77], [])
    assert (rest.released, again.released, failed_before.released) == (2, 0, 1)
    rows = await rows_of(conn)
    assert [(row["status"], row["attempts"]) for row in rows.values()] == [
        ("PENDING", 0), ("PENDING", 0), ("PENDING", 0), ("FAILED", 1),
    ]  # fmt: skip
    assert {row["claim_token"] for row in rows.values()} == {None}
    claim = await api.claim()
    assert [row.attempts for row in claim.rows] == [1, 1, 1, 2]
    stale = await api.publish([1], first.claim_token)
    assert list(stale.stale_ids) == [1]


BAD_REQUESTS = [
    ("ExtendOutboxLease", pb.ExtendOutboxLeaseRequest(), "claim_token"),
    ("ExtendOutboxLease", pb.ExtendOutboxLeaseRequest(claim_token="nonsense"), "claim_token"),
    ("ReleaseOutboxLease", pb.ReleaseOutboxLeaseRequest(), "claim_token"),
    ("ReleaseOutboxLease", pb.ReleaseOutboxLeaseRequest(outbox_ids=range(10_001)), "outbox_ids"),
    ("ExtendOutboxLease", pb.ExtendOutboxLeaseRequest(lease=duration(3601)), "lease"),
    ("ListDeadOutboxRows", pb.ListDeadOutboxRowsRequest(page_size=-1), "page_size"),
    ("ListDeadOutboxRows", pb.ListDeadOutboxRowsRequest(page_token="x"), "page_token"),
    ("RequeueDeadOutboxRows", pb.RequeueDeadOutboxRowsRequest(), "filter"),
    ("RequeueDeadOutboxRows", pb.RequeueDeadOutboxRowsRequest(filter=pb.DeadOutboxFilter()), "filter"),
    (
        "RequeueDeadOutboxRows",
        pb.RequeueDeadOutboxRowsRequest(filter=pb.DeadOutboxFilter(error_contains="\0")),
        "filter.error_contains",
    ),
    (
        "ListDeadOutboxRows",
        pb.ListDeadOutboxRowsRequest(filter=pb.DeadOutboxFilter(execution_id=0)),
        "filter.execution_id",
    ),
    ("ListDeadOutboxRows", pb.ListDeadOutboxRowsRequest(filter=pb.DeadOutboxFilter(shard=1)), "filter.shard"),
    (
        "ListDeadOutboxRows",
        pb.ListDeadOutboxRowsRequest(filter=pb.DeadOutboxFilter(dead_before=Timestamp(nanos=-1))),
        "filter.dead_before",
    ),
]


async def test_bad_requests_name_their_field(api: OutboxApi) -> None:
    named = [await refused_field(api.call(method, request)) for method, request, _ in BAD_REQUESTS]

    assert named == [field for _, _, field in BAD_REQUESTS]


async def _make_dead(conn: asyncpg.Connection, rows: int) -> None:
    await conn.execute(
        "INSERT INTO noetl.outbox (execution_id, event_id, subject, payload, status, attempts, available_at,"
        " dead_at, last_error)"
        " SELECT n % 3 + 1, n, 's' || n % 2, to_jsonb(repeat('x', 100)), 'FAILED', 20, 'infinity',"
        " now() - n * interval '1 hour', 'error % ' || n % 5 FROM generate_series(1, $1::int) AS n",
        rows,
    )


async def test_dead_rows_are_listed_page_by_page_without_their_bodies(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await _make_dead(conn, 120)
    await insert(conn, 10, execution="100")

    seen: list[int] = []
    token = ""
    while True:
        page = await api.dead(page_size=50, page_token=token)
        seen += [dead.row.outbox_id for dead in page.rows]
        assert {dead.row.payload_json for dead in page.rows} == {""}
        token = page.next_page_token
        if not token:
            break

    assert seen == list(range(1, 121))
    first = (await api.dead(page_size=1, include_payload=True)).rows[0]
    assert json.loads(first.row.payload_json) == "x" * 100
    assert (first.row.execution_id, first.row.subject, first.row.attempts) == (2, "s1", 20)
    assert first.last_error == "error % 1"
    assert first.dead_at.ToDatetime(tzinfo=UTC) < datetime.now(UTC) - timedelta(minutes=59)


async def test_a_page_token_is_for_one_filter(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await _make_dead(conn, 5)
    token = (await api.dead(page_size=2)).next_page_token

    other = api.dead(pb.DeadOutboxFilter(subject="s1"), page_size=2, page_token=token)

    assert await refused_field(other) == "page_token"


@pytest.mark.parametrize("with_payload", [False, True])
async def test_pages_end_early_where_bodies_are_large(
    api: OutboxApi, conn: asyncpg.Connection, with_payload: bool
) -> None:
    await _make_dead(conn, 6)
    await conn.execute(
        "UPDATE noetl.outbox SET payload = to_jsonb(repeat('x', 15 * 1024 * 1024)) WHERE outbox_id IN (1, 2, 3, 5)"
    )

    pages: list[list[int]] = []
    token = ""
    while True:
        page = await api.dead(include_payload=with_payload, page_token=token)
        pages.append([dead.row.outbox_id for dead in page.rows])
        assert all(bool(dead.row.payload_json) is with_payload for dead in page.rows)
        token = page.next_page_token
        if not token:
            break

    assert pages == ([[1, 2], [3, 4, 5, 6]] if with_payload else [[1, 2, 3, 4, 5, 6]])


def _before(hours: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromDatetime(datetime.now(UTC) - timedelta(hours=hours))
    return timestamp


async def test_dead_rows_are_found_by_filter_and_requeued(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await _make_dead(conn, 30)
    filters = {
        "error": (pb.DeadOutboxFilter(error_contains="% 3"), [n for n in range(1, 31) if n % 5 == 3]),
        "case": (pb.DeadOutboxFilter(error_contains="ERROR"), []),
        "subject": (pb.DeadOutboxFilter(subject="s0"), [n for n in range(1, 31) if n % 2 == 0]),
        "execution": (pb.DeadOutboxFilter(execution_id=2), [n for n in range(1, 31) if n % 3 == 1]),
        "time": (pb.DeadOutboxFilter(dead_before=_before(20.5)), list(range(21, 31))),
        "ids": (pb.DeadOutboxFilter(outbox_ids=[7, 9, 500]), [7, 9]),
        "several": (pb.DeadOutboxFilter(subject="s1", execution_id=1), [3, 9, 15, 21, 27]),
    }
    for dead, expected in filters.values():
        assert [row.row.outbox_id for row in (await api.dead(dead)).rows] == expected
        assert await api.requeue(dead, dry_run=True) == len(expected)
    assert (await api.stats())["dead"] == 30

    assert await api.requeue(filters["several"][0]) == 5
    assert await api.requeue(filters["several"][0]) == 0
    assert (await api.stats())["dead"] == 25
    claim = await api.claim()
    assert ids(claim) == [3, 9, 15, 21, 27]
    assert {row.attempts for row in claim.rows} == {1}

    assert await api.requeue(all=True, dry_run=True) == 25
    assert await api.requeue(all=True) == 25
    assert await api.stats() == {"pending": 25, "delayed": 0, "in_flight": 5, "expired": 0, "dead": 0}


async def test_a_dead_row_can_be_marked_published_by_hand(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await _make_dead(conn, 2)

    assert (await api.publish([1])).marked == 1
    assert (await api.fail(2)).dead

    assert [dead.row.outbox_id for dead in (await api.dead()).rows] == [2]
    assert (await rows_of(conn))[1]["dead_at"] is None


CLAIMER = """
import asyncio, sys, grpc
from google.protobuf.duration_pb2 import Duration
from noetlpb.v1 import outbox_pb2 as pb, outbox_pb2_grpc as rpc

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        answer = await rpc.OutboxServiceStub(channel).ClaimOutboxBatch(
            pb.ClaimOutboxBatchRequest(limit=10, lease=Duration(seconds=1)),
            metadata=(("authorization", sys.argv[2]),),
        )
        print(answer.claim_token, *(row.outbox_id for row in answer.rows), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_rows_of_a_killed_claimer_come_back_by_themselves(
    server: Server, api: OutboxApi, conn: asyncpg.Connection
) -> None:
    from tests.conftest import AUTHORIZATION

    await insert(conn, 10)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLAIMER, server.address, AUTHORIZATION[0][1], stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    token, *claimed = (await process.stdout.readline()).decode().split()
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert claimed == [str(number) for number in range(1, 11)]
    assert ids(await api.claim()) == []

    # Several wait for the lease's end: each row goes to one of them.
    claims = await asyncio.gather(*(api.claim(limit=3, wait=5) for _ in range(4)))

    assert sorted(outbox_id for claim in claims for outbox_id in ids(claim)) == list(range(1, 11))
    assert {row.attempts for claim in claims for row in claim.rows} == {2}
    stale = await api.publish(range(1, 11), token)
    assert (stale.marked, sorted(stale.stale_ids)) == (0, list(range(1, 11)))


async def test_no_row_is_held_twice_however_many_claim_at_once(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 2000, execution="n % 50 + 1")

    claims = await asyncio.gather(*(api.claim(limit=60) for _ in range(20)))
    ordered = await asyncio.gather(*(api.claim(limit=60, ordered=True) for _ in range(20)))

    held = [outbox_id for claim in (*claims, *ordered) for outbox_id in ids(claim)]
    assert len(held) == len(set(held))
    assert len([outbox_id for claim in claims for outbox_id in ids(claim)]) == 1200


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_claim_that_is_cancelled_at_any_moment_keeps_nothing(
    database_url: str, conn: asyncpg.Connection, ordered: bool
) -> None:
    await insert(conn, 100, execution="n % 7 + 1")
    pool = await create_pool(database_url, name="0")
    chores = Chores()
    shard = OutboxShard(0, pool, attempts_max=20, metrics=Metrics(), chores=chores)
    terms = Terms(limit=10, bytes_max=1_000_000, lease=timedelta(hours=1), ordered=ordered)
    outcomes = set()

    for steps in range(60):
        task = asyncio.create_task(shard.claim(terms))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        try:
            claim = await task
        except asyncio.CancelledError:
            claim = None
        outcomes.add(claim is None)
        if claim is not None:
            await shard.release(claim.token, [])
        await chores.finish()

        assert await conn.fetchval("SELECT count(*) FROM noetl.outbox WHERE status = 'PENDING'") == 100
        assert await conn.fetchval("SELECT max(attempts) FROM noetl.outbox") == 0

    assert True in outcomes
    await pool.close()
