"""Ordered claims: per execution rows leave in the order of their ids."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import asyncpg
import grpc
import pytest
from noetlpb.v1 import outbox_pb2 as pb

from tests.outbox_api import OutboxApi, expire, ids, insert, make_due, message, rows_of


@pytest.fixture
def api(channel: grpc.aio.Channel) -> OutboxApi:
    return OutboxApi(channel)


def runs(claim: pb.ClaimOutboxBatchResponse) -> dict[int, list[int]]:
    """The ids of a claim by execution."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in claim.rows:
        found[row.execution_id].append(row.outbox_id)
    return dict(found)


async def test_nobody_gets_a_row_of_an_execution_that_another_claim_works_on(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, number % 2 + 1) for number in range(1, 9)))

    first = await api.claim(limit=3, ordered=True)
    second = await api.claim(ordered=True)

    assert ids(first) == [1, 2, 3]
    assert ids(second) == []

    await api.publish([1], first.claim_token)
    assert ids(await api.claim(ordered=True)) == []
    await api.publish([2], first.claim_token)
    assert ids(await api.claim(ordered=True)) == [4, 6, 8]
    await api.publish([3], first.claim_token)
    assert ids(await api.claim(ordered=True)) == [5, 7]


async def test_a_failed_row_takes_the_younger_rows_of_its_execution_back(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(*(message(number, number % 2 + 1) for number in range(1, 11)))
    claim = await api.claim(ordered=True)
    assert ids(claim) == list(range(1, 11))
    await api.publish([1], claim.claim_token)

    failed = await api.fail(3, claim.claim_token)

    assert list(failed.released_ids) == [5, 7, 9]
    published = await api.publish([2, 5, 7], claim.claim_token)
    assert (published.marked, sorted(published.stale_ids)) == (1, [5, 7])
    rows = await rows_of(conn)
    assert [(rows[number]["status"], rows[number]["attempts"]) for number in (3, 5, 7, 9)] == [
        ("FAILED", 1), ("PENDING", 0), ("PENDING", 0), ("PENDING", 0),
    ]  # fmt: skip

    # The failed row blocks its own execution only, and only until it is due.
    assert ids(await api.claim(ordered=True)) == []
    await api.enqueue(message(100, 7))
    assert len(ids(await api.claim(ordered=True))) == 1
    await make_due(conn)
    assert ids(await api.claim(ordered=True)) == [3, 5, 7, 9]


async def test_rows_named_in_a_batch_of_failures_fail_and_only_the_others_go_back(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(*(message(number, 1) for number in range(1, 7)))
    claim = await api.claim(ordered=True)

    answer = await api.call(
        "MarkOutboxFailedBatch",
        pb.MarkOutboxFailedBatchRequest(
            failures=[pb.OutboxFailure(outbox_id=number, error="no") for number in (5, 2, 3)],
            claim_token=claim.claim_token,
        ),
    )

    assert [outcome.outcome for outcome in answer.outcomes] == [pb.OUTBOX_OUTCOME_FAILED] * 3
    assert list(answer.released_ids) == [4, 6]
    assert [row["status"] for row in (await rows_of(conn)).values()] == [
        "IN_FLIGHT", "FAILED", "FAILED", "PENDING", "FAILED", "PENDING",
    ]  # fmt: skip


async def test_a_released_row_takes_the_younger_ones_along(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, number % 2 + 1) for number in range(1, 9)))
    claim = await api.claim(ordered=True)

    released = await api.release(claim.claim_token, [4, 5])

    assert (released.released, list(released.released_ids)) == (5, [6, 7, 8])
    assert ids(await api.claim(ordered=True)) == []
    await api.publish([1, 2, 3], claim.claim_token)
    assert ids(await api.claim(ordered=True)) == [4, 5, 6, 7, 8]


async def test_an_unordered_claim_gives_nothing_else_back(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, 1) for number in range(1, 5)))
    claim = await api.claim()

    failed = await api.fail(1, claim.claim_token)
    released = await api.release(claim.claim_token, [2])

    assert list(failed.released_ids) == []
    assert (released.released, list(released.released_ids)) == (1, [])
    assert (await api.publish([3, 4], claim.claim_token)).marked == 2


async def test_a_failure_without_a_token_also_keeps_the_order_of_the_claim(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, 1) for number in range(1, 4)))
    claim = await api.claim(ordered=True)

    failed = await api.fail(2)

    assert list(failed.released_ids) == [3]
    assert (await api.publish([1], claim.claim_token)).marked == 1


async def test_an_expired_run_is_taken_over_from_its_head(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(*(message(number, 1) for number in range(1, 6)))
    lost = await api.claim(limit=4, ordered=True)
    await api.publish([1], lost.claim_token)
    await expire(conn)

    claim = await api.claim(ordered=True)

    assert ids(claim) == [2, 3, 4, 5]
    assert [row.attempts for row in claim.rows] == [2, 2, 2, 1]


async def test_a_run_ends_at_a_row_that_is_not_due(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(*(message(number, 1) for number in range(1, 8)))
    await conn.execute("UPDATE noetl.outbox SET available_at = now() + interval '1 hour' WHERE outbox_id = 3")
    other = await api.claim(limit=1, ordered=True)
    await api.publish(ids(other), other.claim_token)

    assert ids(other) == [1]
    assert ids(await api.claim(ordered=True)) == [2]


async def test_a_dead_row_lets_its_execution_flow_on(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(*(message(number, 1) for number in range(1, 4)))
    await conn.execute("UPDATE noetl.outbox SET attempts = 19 WHERE outbox_id = 1")
    claim = await api.claim(limit=1, ordered=True)

    assert (await api.fail(1, claim.claim_token)).dead

    assert ids(await api.claim(ordered=True)) == [2, 3]


async def test_rows_without_execution_have_no_order_and_starve_nobody(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 50, execution="NULL")
    await insert(conn, 50, execution="n % 10 + 1", event="n + 100")

    first = await api.claim(limit=20, ordered=True)
    await api.publish(ids(first), first.claim_token)
    second = await api.claim(limit=20, ordered=True)
    await api.publish(ids(second), second.claim_token)
    single = [await api.claim(limit=1, ordered=True) for _ in range(4)]
    rest = await api.claim(limit=1000, ordered=True)

    for claim in (first, second):
        loose = sum(not row.HasField("execution_id") for row in claim.rows)
        assert len(claim.rows) == 20
        assert 5 <= loose <= 15
    assert {claim.rows[0].HasField("execution_id") for claim in single} == {True, False}
    held = [
        *ids(first),
        *ids(second),
        *(outbox_id for claim in single for outbox_id in ids(claim)),
        *ids(rest),
    ]
    assert len(held) == len(set(held))
    assert set(range(1, 51)) <= set(held)


async def test_expired_rows_without_execution_come_back_too(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await insert(conn, 3, execution="NULL")
    await api.claim(ordered=True)
    await expire(conn, 2)

    assert ids(await api.claim(ordered=True)) == [2]


async def test_one_execution_with_many_rows_gives_room_to_the_others(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 500, execution="1")
    await insert(conn, 60, execution="n % 20 + 2", event="n + 1000")

    claim = runs(await api.claim(limit=100, ordered=True))

    assert len(claim) > 1
    assert len(claim[1]) <= 100

    # Alone it may take the whole batch.
    await conn.execute(
        "UPDATE noetl.outbox SET status = 'PUBLISHED' WHERE execution_id > 1 OR status = 'IN_FLIGHT'"
    )
    alone = await api.claim(limit=100, ordered=True)
    assert len(alone.rows) == 100


async def test_every_execution_is_found_past_any_number_of_blocked_ones(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 3000, execution="n")
    await conn.execute(
        "UPDATE noetl.outbox SET available_at = now() + interval '1 hour'"
        " WHERE execution_id NOT IN (1, 1500, 3000)"
    )

    found: list[int] = []
    for _ in range(3):
        found += runs(await api.claim(limit=1, ordered=True))

    assert sorted(found) == [1, 1500, 3000]


async def test_a_late_commit_below_the_head_neither_deadlocks_nor_is_overtaken_again(
    api: OutboxApi, conn: asyncpg.Connection, database_url: str
) -> None:
    late = await asyncpg.connect(database_url)
    transaction = late.transaction()
    await transaction.start()
    await insert(late, 1, execution="1", event="1000")
    await insert(conn, 3, execution="1")

    claim = await api.claim(limit=1, ordered=True)
    assert ids(claim) == [2]
    await transaction.commit()
    await late.close()
    below = await api.claim(ordered=True)

    assert ids(below) == [1]
    await api.publish([2], claim.claim_token)
    assert ids(await api.claim(ordered=True)) == []
    await api.publish([1], below.claim_token)
    assert ids(await api.claim(ordered=True)) == [3, 4]


async def test_a_row_locked_by_somebody_else_ends_a_run(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await insert(conn, 4)

    async with conn.transaction():
        await conn.execute("SELECT 1 FROM noetl.outbox WHERE outbox_id = 3 FOR UPDATE")
        async with asyncio.timeout(5):
            claim = await api.claim(ordered=True)

    assert ids(claim) == [1, 2]


async def test_max_bytes_cuts_runs_at_their_end(api: OutboxApi) -> None:
    await api.enqueue(*(message(number, number % 3 + 1, '"' + "x" * 98 + '"') for number in range(1, 31)))

    claim = await api.claim(limit=30, ordered=True, max_bytes=1000)

    assert len(claim.rows) == 10
    for execution, run in runs(claim).items():
        assert run == [number for number in range(1, 31) if number % 3 + 1 == execution][: len(run)]
