"""Claiming and acknowledging, one caller at a time."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import outbox_pb2 as pb

from tests.outbox_api import (
    OutboxApi,
    duration,
    expire,
    ids,
    insert,
    make_due,
    message,
    refused,
    refused_field,
    rows_of,
)


@pytest.fixture
def api(channel: grpc.aio.Channel) -> OutboxApi:
    return OutboxApi(channel)


async def test_a_message_is_handed_out_as_it_was_enqueued(api: OutboxApi) -> None:
    payload = {"event_id": 7123456789012345678, "text": "é😀", "list": [1.5, None, True]}
    await api.enqueue(
        message(
            5, 9, json.dumps(payload), subject="noetl.events.x", headers={"traceparent": "00-ab", "k": ""}
        ),
        message(6, None, "null"),
    )

    claim = await api.claim()

    first, second = claim.rows
    assert json.loads(first.payload_json) == payload
    assert (first.event_id, first.execution_id, first.subject) == (5, 9, "noetl.events.x")
    assert dict(first.headers) == {"traceparent": "00-ab", "k": ""}
    assert (first.payload_codec, first.attempts, first.shard) == ("json", 1, 0)
    assert not second.HasField("execution_id")
    assert not second.HasField("subject")
    assert second.payload_json == "null"
    assert claim.claimed == 2


async def test_the_codec_tells_what_is_delivered_and_the_table_keeps_the_word(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(message(1, payload_codec="arrow-feather"), message(2))

    claim = await api.claim()

    assert {row.payload_codec for row in claim.rows} == {"json"}
    assert [row["payload_codec"] for row in (await rows_of(conn)).values()] == ["arrow-feather", "json"]


async def test_enqueueing_again_changes_nothing_and_names_the_rows(api: OutboxApi) -> None:
    first = await api.enqueue(message(1, 1), message(1, None), message(2, 1))
    again = await api.enqueue(message(3, 1), message(1, None), message(1, 1), message(3, 1), message(1, 2))

    assert (first.enqueued, first.duplicates) == (3, 0)
    assert list(first.outbox_ids) == [1, 2, 3]
    assert (again.enqueued, again.duplicates) == (2, 3)
    new, without_execution, with_execution, twice, other_execution = again.outbox_ids
    assert (without_execution, with_execution) == (2, 1)
    assert new == twice
    assert other_execution > new > 3
    assert await api.pending() == 5


async def test_rows_get_their_ids_in_the_order_of_the_request(api: OutboxApi) -> None:
    answer = await api.enqueue(*(message(event_id, event_id % 7 + 1) for event_id in range(500, 0, -1)))

    assert list(answer.outbox_ids) == list(range(1, 501))
    claim = await api.claim(limit=1000)
    assert [row.event_id for row in claim.rows] == list(range(500, 0, -1))


async def test_a_claim_takes_the_oldest_rows_up_to_its_limit(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 2600)

    taken = [ids(await api.claim(limit=limit)) for limit in (0, 1, 250, 1000, 5000)]

    assert [len(batch) for batch in taken] == [100, 1, 250, 1000, 1000]
    assert [outbox_id for batch in taken for outbox_id in batch] == list(range(1, 2352))


async def test_nothing_due_is_an_empty_answer(api: OutboxApi) -> None:
    claim = await api.claim()

    assert (list(claim.rows), claim.claimed, claim.claim_token) == ([], 0, "")
    assert not claim.HasField("lease_expires_at")


async def test_a_message_is_not_due_before_its_time(api: OutboxApi, conn: asyncpg.Connection) -> None:
    later = Timestamp()
    later.FromDatetime(datetime.now(UTC) + timedelta(hours=1))
    await api.enqueue(message(1, available_at=later), message(2))

    assert ids(await api.claim()) == [2]
    assert await api.pending() == 0
    assert (await api.stats())["delayed"] == 1

    await conn.execute("UPDATE noetl.outbox SET available_at = now() WHERE outbox_id = 1")
    assert ids(await api.claim()) == [1]


async def test_a_lease_counts_by_the_databases_clock(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(message(1))

    before = await conn.fetchval("SELECT now()")
    claim = await api.claim(lease=90)
    after = await conn.fetchval("SELECT now()")

    expires_at = claim.lease_expires_at.ToDatetime(tzinfo=UTC)
    assert before + timedelta(seconds=90) <= expires_at <= after + timedelta(seconds=90)
    row = (await rows_of(conn))[1]
    assert (row["status"], row["attempts"], row["lease_expires_at"]) == ("IN_FLIGHT", 1, expires_at)
    assert row["locked_at"] is not None


async def test_published_rows_are_counted_once_and_stamped_once(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(message(1), message(2))
    claim = await api.claim()

    assert (await api.publish([1, 2, 1], claim.claim_token)).marked == 2
    stamped = [row["published_at"] for row in (await rows_of(conn)).values()]
    again = await api.publish([1, 2], claim.claim_token)
    by_anyone = await api.publish([1, 2])

    assert (again.marked, list(again.stale_ids), list(again.unknown_ids)) == (0, [], [])
    assert (by_anyone.marked, list(by_anyone.stale_ids)) == (0, [])
    rows = await rows_of(conn)
    assert [row["published_at"] for row in rows.values()] == stamped
    assert {row["status"] for row in rows.values()} == {"PUBLISHED"}
    assert ids(await api.claim()) == []


async def test_an_expired_lease_takes_nothing_away_until_another_claim_comes(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(message(1), message(2))
    claim = await api.claim()
    await expire(conn)

    published = await api.publish([1], claim.claim_token)
    failed = await api.fail(2, claim.claim_token)

    assert published.marked == 1
    assert failed.marked


async def test_whoever_lost_a_row_can_do_nothing_to_it(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(message(1), message(2))
    lost = await api.claim()
    await expire(conn)
    holder = await api.claim(limit=1)
    assert [row.attempts for row in holder.rows] == [2]
    before = await rows_of(conn)

    published = await api.publish([1, 2, 77], lost.claim_token)
    code, info = await refused(api.fail(1, lost.claim_token))

    assert published.marked == 1
    assert list(published.stale_ids) == [1]
    assert list(published.unknown_ids) == [77]
    assert (code, info.reason) == (grpc.StatusCode.ABORTED, "LEASE_LOST")
    assert info.metadata["outbox_id"] == "1"
    assert (await rows_of(conn))[1] == before[1]
    assert (await api.publish([1], holder.claim_token)).marked == 1


async def test_a_stale_failure_never_revives_a_published_row(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(message(1))
    lost = await api.claim()
    await expire(conn)
    holder = await api.claim()
    await api.publish([1], holder.claim_token)

    code, info = await refused(api.fail(1, lost.claim_token))
    mine = await api.fail(1, holder.claim_token)
    by_anyone = await api.fail(1)

    assert (code, info.reason) == (grpc.StatusCode.ABORTED, "LEASE_LOST")
    for answer in (mine, by_anyone):
        assert (answer.marked, answer.available_at_in, answer.dead) == (False, 0, False)
    assert (await rows_of(conn))[1]["status"] == "PUBLISHED"


async def test_without_a_token_rows_are_marked_whoever_holds_them(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(message(1), message(2), message(3))
    held = await api.claim(limit=2)

    published = await api.publish([1, 3, 99])
    failed = await api.fail(2)

    assert (published.marked, list(published.unknown_ids)) == (2, [99])
    assert failed.marked
    stale = await api.publish([1, 2], held.claim_token)
    assert (stale.marked, list(stale.stale_ids)) == (0, [2])
    assert [row["status"] for row in (await rows_of(conn)).values()] == ["PUBLISHED", "FAILED", "PUBLISHED"]


async def test_a_failed_row_waits_longer_each_time(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(message(1))
    delays = []
    for _ in range(4):
        claim = await api.claim()
        failed = await api.fail(1, claim.claim_token, error="x" * 5000)
        delays.append(failed.available_at_in)
        row = (await rows_of(conn))[1]
        waits = row["available_at"] - row["updated_at"]
        assert waits == timedelta(seconds=failed.available_at_in)
        assert row["last_error"] == "x" * 2000
        assert ids(await api.claim()) == []
        await make_due(conn)

    assert delays == [1, 2, 4, 8]
    claim = await api.claim()
    assert [row.attempts for row in claim.rows] == [5]
    await api.publish([1], claim.claim_token)
    assert (await rows_of(conn))[1]["last_error"] is None


async def test_a_caller_may_set_the_delay(api: OutboxApi) -> None:
    await api.enqueue(message(1), message(2))
    token = (await api.claim()).claim_token

    assert (await api.fail(1, token, attempts=5)).available_at_in == 16
    assert (await api.fail(2, token, attempts=9, max_delay_seconds=10)).available_at_in == 10


async def test_a_row_without_attempts_left_is_dead_and_never_seen_again(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await api.enqueue(message(1))
    await conn.execute("UPDATE noetl.outbox SET attempts = 19")
    claim = await api.claim()

    failed = await api.fail(1, claim.claim_token, attempts=1)

    assert (failed.marked, failed.dead, failed.available_at_in) == (True, True, 0)
    assert ids(await api.claim()) == []
    assert await api.stats() == {"pending": 0, "delayed": 0, "in_flight": 0, "expired": 0, "dead": 1}
    assert await _claim_as_noetl_does(conn) == []
    row = (await rows_of(conn))[1]
    assert (row["status"], row["last_error"], row["claim_token"]) == ("FAILED", "broken", None)
    assert row["dead_at"] is not None


async def _claim_as_noetl_does(conn: asyncpg.Connection) -> list[Any]:
    """What NoETL's own servers execute on the same table."""
    rows: list[Any] = await conn.fetch(
        """
        WITH ready AS (
            SELECT outbox_id FROM noetl.outbox
            WHERE status IN ('PENDING', 'FAILED') AND available_at <= now()
            ORDER BY outbox_id LIMIT 1000 FOR UPDATE SKIP LOCKED
        )
        UPDATE noetl.outbox o SET status = 'IN_FLIGHT', attempts = attempts + 1, locked_at = now(), updated_at = now()
        FROM ready WHERE o.outbox_id = ready.outbox_id
        RETURNING o.outbox_id
        """
    )
    return rows


async def test_many_failures_at_once_are_told_apart(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(*(message(number) for number in range(1, 7)))
    lost = await api.claim(limit=2)
    await expire(conn)
    mine = await api.claim(limit=5)
    await api.publish([3], mine.claim_token)
    await conn.execute("UPDATE noetl.outbox SET attempts = 20 WHERE outbox_id = 4")

    answer = await api.call(
        "MarkOutboxFailedBatch",
        pb.MarkOutboxFailedBatchRequest(
            failures=[pb.OutboxFailure(outbox_id=number, error="no") for number in (99, 1, 3, 4, 6)],
            claim_token=mine.claim_token,
        ),
    )
    stale = await api.call(
        "MarkOutboxFailedBatch",
        pb.MarkOutboxFailedBatchRequest(
            failures=[pb.OutboxFailure(outbox_id=2, error="no")], claim_token=lost.claim_token
        ),
    )

    assert [(outcome.outbox_id, outcome.outcome, outcome.available_at_in) for outcome in answer.outcomes] == [
        (99, pb.OUTBOX_OUTCOME_UNKNOWN, 0),
        (1, pb.OUTBOX_OUTCOME_FAILED, 2),
        (3, pb.OUTBOX_OUTCOME_ALREADY_PUBLISHED, 0),
        (4, pb.OUTBOX_OUTCOME_DEAD, 0),
        (6, pb.OUTBOX_OUTCOME_STALE, 0),
    ]
    assert [outcome.outcome for outcome in stale.outcomes] == [pb.OUTBOX_OUTCOME_STALE]
    assert [row["status"] for row in (await rows_of(conn)).values()] == [
        "FAILED", "IN_FLIGHT", "PUBLISHED", "FAILED", "IN_FLIGHT", "PENDING",
    ]  # fmt: skip


async def test_an_unknown_row_can_not_fail(api: OutboxApi) -> None:
    code, info = await refused(api.fail(12345))

    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "OUTBOX_ROW_NOT_FOUND")
    assert info.metadata["outbox_id"] == "12345"


async def test_every_undelivered_row_is_counted_once(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(*(message(number) for number in range(1, 11)))
    await api.claim(limit=2)
    await expire(conn)
    kept = await api.claim(limit=1)
    other = await api.claim(limit=4)
    await api.fail(3, other.claim_token)
    await conn.execute("UPDATE noetl.outbox SET attempts = 20 WHERE outbox_id = 4")
    await api.fail(4, other.claim_token)
    await api.publish([5], other.claim_token)
    await expire(conn, *ids(kept))

    stats = await api.stats()

    assert stats == {"pending": 5, "delayed": 1, "in_flight": 1, "expired": 1, "dead": 1}
    assert await api.pending() == 6


async def test_the_age_of_the_oldest_row_counts_from_when_it_was_due(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    empty = await api.call("GetOutboxStats", pb.GetOutboxStatsRequest())
    await api.enqueue(message(1), message(2))
    await conn.execute(
        "UPDATE noetl.outbox SET available_at = now() - interval '1 hour', status = 'FAILED' WHERE outbox_id = 2"
    )
    answer = await api.call("GetOutboxStats", pb.GetOutboxStatsRequest())

    assert not empty.HasField("oldest_pending_age")
    assert 3600 <= answer.oldest_pending_age.seconds < 3660


BAD_REQUESTS: list[tuple[str, Any, str]] = [
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(limit=-1), "limit"),
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(max_bytes=-1), "max_bytes"),
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(lease=duration(0.5)), "lease"),
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(lease=duration(365 * 86400)), "lease"),
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(lease=duration(-1)), "lease"),
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(wait=duration(61)), "wait"),
    ("ClaimOutboxBatch", pb.ClaimOutboxBatchRequest(wait=duration(-1)), "wait"),
    ("MarkOutboxPublished", pb.MarkOutboxPublishedRequest(), "outbox_ids"),
    ("MarkOutboxPublished", pb.MarkOutboxPublishedRequest(outbox_ids=range(10_001)), "outbox_ids"),
    (
        "MarkOutboxPublished",
        pb.MarkOutboxPublishedRequest(outbox_ids=[1], claim_token="x"),
        "claim_token",
    ),
    ("MarkOutboxPublished", pb.MarkOutboxPublishedRequest(outbox_ids=[1], shard=1), "shard"),
    ("MarkOutboxPublished", pb.MarkOutboxPublishedRequest(outbox_ids=[1], shard=-1), "shard"),
    ("MarkOutboxFailed", pb.MarkOutboxFailedRequest(error="x"), "outbox_id"),
    ("MarkOutboxFailed", pb.MarkOutboxFailedRequest(outbox_id=1), "error"),
    ("MarkOutboxFailed", pb.MarkOutboxFailedRequest(outbox_id=1, error="a\0b"), "error"),
    ("MarkOutboxFailed", pb.MarkOutboxFailedRequest(outbox_id=1, error="x", attempts=-1), "attempts"),
    (
        "MarkOutboxFailed",
        pb.MarkOutboxFailedRequest(outbox_id=1, error="x", max_delay_seconds=-1),
        "max_delay_seconds",
    ),
    ("MarkOutboxFailedBatch", pb.MarkOutboxFailedBatchRequest(), "failures"),
    (
        "MarkOutboxFailedBatch",
        pb.MarkOutboxFailedBatchRequest(failures=[pb.OutboxFailure(outbox_id=1, error="x")] * 2),
        "failures[1].outbox_id",
    ),
    ("EnqueueOutbox", pb.EnqueueOutboxRequest(), "messages"),
    ("EnqueueOutbox", pb.EnqueueOutboxRequest(messages=[message(1)] * 10_001), "messages"),
]


async def test_bad_requests_name_their_field(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await api.enqueue(message(1))
    before = await rows_of(conn)

    named = [await refused_field(api.call(method, request)) for method, request, _ in BAD_REQUESTS]

    assert named == [field for _, _, field in BAD_REQUESTS]
    assert await rows_of(conn) == before


BAD_MESSAGES: list[tuple[pb.OutboxMessage, str]] = [
    (message(0), "event_id"),
    (message(-5), "event_id"),
    (message(1, 0), "execution_id"),
    (message(1, -1), "execution_id"),
    (message(1, payload_json=""), "payload_json"),
    (message(1, payload_json="{"), "payload_json"),
    (message(1, payload_json="NaN"), "payload_json"),
    (message(1, payload_json='"\\u0000"'), "payload_json"),
    (message(1, payload_json='{"a\\u0000": 1}'), "payload_json"),
    (message(1, payload_json='"\\ud800"'), "payload_json"),
    (message(1, payload_json="1e-20000"), "payload_json"),
    (message(1, payload_json="1e999999"), "payload_json"),
    (message(1, payload_json="[" * 5000 + "]" * 5000), "payload_json"),
    (message(1, subject="a\0"), "subject"),
    (message(1, payload_codec="\0"), "payload_codec"),
    (message(1, headers={"": "x"}), "headers"),
    (message(1, headers={"a": "\0"}), "headers"),
    (message(1, headers={"\0": "a"}), "headers"),
    (message(1, available_at=Timestamp(seconds=253_402_300_800)), "available_at"),
    (message(1, available_at=Timestamp(nanos=-1)), "available_at"),
]


async def test_one_bad_message_keeps_its_whole_batch_out(api: OutboxApi, conn: asyncpg.Connection) -> None:
    named = [await refused_field(api.enqueue(message(77), bad, message(78))) for bad, _ in BAD_MESSAGES]

    assert named == [f"messages[1].{field}" for _, field in BAD_MESSAGES]
    assert await rows_of(conn) == {}


async def test_an_escaped_backslash_is_no_nul(api: OutboxApi) -> None:
    await api.enqueue(message(1, payload_json='"\\\\u0000"'))

    assert json.loads((await api.claim()).rows[0].payload_json) == "\\u0000"


async def test_eight_megabytes_pass_and_max_bytes_bounds_a_claim(api: OutboxApi) -> None:
    large = json.dumps("x" * (8 * 1024 * 1024))
    for number in range(1, 4):
        await api.enqueue(message(number, payload_json=large))
    await api.enqueue(*(message(number, payload_json="[1, 2]") for number in range(4, 8)))

    default = await api.claim()
    one = await api.claim(max_bytes=1)
    rest = await api.claim(max_bytes=18)

    assert ids(default) == [1]
    assert len(default.rows[0].payload_json) == 8 * 1024 * 1024 + 2
    assert ids(one) == [2]
    assert ids(rest) == [3]
    assert ids(await api.claim(max_bytes=18)) == [4, 5, 6]
    assert ids(await api.claim(max_bytes=18)) == [7]


async def test_compressed_and_swollen_texts_count_as_they_are_sent(api: OutboxApi) -> None:
    # A repetitive text is stored in a few bytes; a number with an exponent is sent with all its digits.
    swollen = "[" + ",".join(["1e300"] * 100) + "]"
    await api.enqueue(*(message(number, payload_json=swollen) for number in range(1, 11)))
    await api.enqueue(*(message(number, payload_json=json.dumps("a" * 20_000)) for number in range(11, 21)))

    first = await api.claim(max_bytes=100_000)
    await api.publish(range(1, 11))
    second = await api.claim(max_bytes=100_000)

    assert ids(first) == [1, 2, 3]
    assert ids(second) == [11, 12, 13, 14]
    assert await api.stats() == {"pending": 6, "delayed": 0, "in_flight": 4, "expired": 0, "dead": 0}


async def test_a_row_that_fits_into_no_answer_is_dead_and_blocks_nobody(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await conn.execute(
        "INSERT INTO noetl.outbox (event_id, payload) VALUES (1, to_jsonb(repeat('a', 63 * 1024 * 1024)))"
    )
    await api.enqueue(message(2))

    claim = await api.claim()

    assert ids(claim) == [2]
    row = await conn.fetchrow("SELECT dead_at, last_error FROM noetl.outbox WHERE outbox_id = 1")
    assert row["dead_at"] is not None
    assert "can't be delivered" in row["last_error"]


async def test_a_request_above_the_limit_is_told_the_limit(api: OutboxApi, conn: asyncpg.Connection) -> None:
    code, info = await refused(api.enqueue(message(1, payload_json=json.dumps("x" * (33 * 1024 * 1024)))))

    assert (code, info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE")
    assert info.metadata["limit_bytes"] == str(32 * 1024 * 1024)
    assert await rows_of(conn) == {}


async def test_rows_of_other_writers_are_delivered_too(api: OutboxApi, conn: asyncpg.Connection) -> None:
    await conn.execute(
        "INSERT INTO noetl.outbox (event_id, payload, payload_bytes, headers)"
        " VALUES (1, '{\"a\": 1}', 'xyz', '{\"n\": 1, \"s\": \"t\"}'), (2, '[]', NULL, '[1]')"
    )

    claim = await api.claim()

    assert [row.payload_json for row in claim.rows] == ['{"a": 1}', "[]"]
    assert [dict(row.headers) for row in claim.rows] == [{"n": "1", "s": "t"}, {}]
    assert {row.payload_codec for row in claim.rows} == {"json"}


async def test_the_oldest_row_comes_first_also_when_it_came_back(
    api: OutboxApi, conn: asyncpg.Connection
) -> None:
    await insert(conn, 300)
    first = await api.claim(limit=100)
    await api.claim(limit=100)
    await expire(conn, *ids(first))

    # Rows below the place where the last claim ended are found within the time of a full look.
    found = ids(await api.claim(limit=50)) + ids(await api.claim(limit=300))

    assert sorted(found) == [*range(1, 101), *range(201, 301)]


async def test_what_is_counted(settings: Any, start_server: Any, channel_to: Any) -> None:
    from dataclasses import replace
    from urllib.request import urlopen

    server = await start_server(replace(settings, metrics_address=("127.0.0.1", 0), outbox_attempts_max=1))
    api = OutboxApi(await channel_to(server.address))
    await api.enqueue(message(1), message(2), message(3), message(3))
    claim = await api.claim()
    await api.publish([1, 2], claim.claim_token)
    await api.fail(3, claim.claim_token)
    await refused(api.fail(3, claim.claim_token))

    import asyncio

    text = (await asyncio.to_thread(lambda: urlopen(server.metrics_url).read())).decode()
    counted = {
        line.split()[0].removeprefix("noetl_outbox_").removesuffix("_total"): float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("noetl_outbox_") and "_total" in line
    }
    assert counted == {"enqueued": 3, "claimed": 3, "published": 2, "failed": 1, "dead": 1, "stale": 1}
