"""What the outbox decides without a database."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from noetl_grpc.core.outbox import (
    ClaimedRow,
    ClaimToken,
    Failure,
    HeldRow,
    Message,
    Outcome,
    Status,
    Verdict,
    claim_bytes,
    claim_key,
    claim_limit,
    heads_of_failures,
    is_undeliverable,
    judge,
    keeps_order,
    split_by_weight,
    wait_seconds,
    weight_of,
)
from noetl_grpc.errors import InvalidRequest

NOW = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
MINE = claim_key(UUID(int=1 << 100), ordered=True)
OTHERS = claim_key(UUID(int=1 << 101), ordered=True)


def claimed(outbox_id: int = 1, payload_json: str = "{}", **changes: object) -> ClaimedRow:
    row = ClaimedRow(outbox_id, 1, None, None, payload_json, None, 1, NOW)
    return row._replace(**changes)  # type: ignore[arg-type]


def held(outbox_id: int = 1, **changes: object) -> HeldRow:
    values = {
        "execution_id": 7, "status": Status.IN_FLIGHT, "claim": MINE, "attempts": 1, "dead": False,
    } | changes  # fmt: skip
    return HeldRow(outbox_id, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "given"), [(0, 100), (1, 1), (100, 100), (1000, 1000), (5000, 1000)])
def test_a_claim_is_bounded(asked: int, given: int) -> None:
    assert claim_limit(asked) == given


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        claim_limit(-1)
    with pytest.raises(InvalidRequest, match="max_bytes"):
        claim_bytes(-1)


@pytest.mark.parametrize(("seconds", "nanos"), [(-1, 0), (0, -1), (60, 1), (61, 0), (2**62, 0)])
def test_a_wait_has_bounds(seconds: int, nanos: int) -> None:
    with pytest.raises(InvalidRequest, match="wait"):
        wait_seconds(seconds=seconds, nanos=nanos)


def test_a_token_comes_back_as_it_was() -> None:
    token = ClaimToken(shard=3, claimed_at=NOW, claim=MINE)

    assert ClaimToken.decode(token.encode(), shards=4) == token


@pytest.mark.parametrize(
    "text", ["", "x", "é", "AAAA", "A" * 36, "!" * 36, ClaimToken(9, NOW, MINE).encode(), "B" * 5000]
)
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="claim_token"):
        ClaimToken.decode(text, shards=4)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_key_tells_whether_its_claim_keeps_order(ordered: bool) -> None:
    keys = {claim_key(uuid4(), ordered=ordered) for _ in range(50)}

    assert {keeps_order(key) for key in keys} == {ordered}
    assert len(keys) == 50


@pytest.mark.parametrize(
    ("row", "claim", "expected"),
    [
        (None, MINE, Verdict(1, Outcome.UNKNOWN)),
        (held(), MINE, Verdict(1, Outcome.FAILED, 1)),
        (held(attempts=4), MINE, Verdict(1, Outcome.FAILED, 8)),
        (held(attempts=5), MINE, Verdict(1, Outcome.DEAD)),
        (held(attempts=9), MINE, Verdict(1, Outcome.DEAD)),
        (held(claim=OTHERS), MINE, Verdict(1, Outcome.STALE)),
        (held(status=Status.FAILED), MINE, Verdict(1, Outcome.STALE)),
        (held(status=Status.PENDING, claim=None), MINE, Verdict(1, Outcome.STALE)),
        (held(status=Status.PUBLISHED), MINE, Verdict(1, Outcome.ALREADY_PUBLISHED)),
        (held(status=Status.PUBLISHED, claim=OTHERS), MINE, Verdict(1, Outcome.STALE)),
        (held(status=Status.PUBLISHED), None, Verdict(1, Outcome.ALREADY_PUBLISHED)),
        (held(claim=OTHERS), None, Verdict(1, Outcome.FAILED, 1)),
        (held(status=Status.PENDING, claim=None, attempts=0), None, Verdict(1, Outcome.FAILED, 1)),
        (held(status=Status.FAILED, claim=None, attempts=2, dead=True), None, Verdict(1, Outcome.DEAD)),
    ],
)
def test_what_becomes_of_a_failure(row: HeldRow | None, claim: UUID | None, expected: Verdict) -> None:
    failure = Failure(1, "broken", attempts=0, delay_seconds_max=300)

    assert judge(failure, row, claim=claim, attempts_max=5) == expected


def test_the_callers_attempts_only_set_the_delay() -> None:
    failure = Failure(1, "broken", attempts=9, delay_seconds_max=100)

    assert judge(failure, held(attempts=1), claim=MINE, attempts_max=5) == Verdict(1, Outcome.FAILED, 100)


def test_without_a_maximum_no_row_dies() -> None:
    failure = Failure(1, "broken", attempts=0, delay_seconds_max=300)

    assert judge(failure, held(attempts=10**6), claim=MINE, attempts_max=0) == Verdict(1, Outcome.FAILED, 256)


def test_only_the_oldest_failure_of_an_ordered_claim_gives_back_what_is_behind_it() -> None:
    unordered = claim_key(uuid4(), ordered=False)
    rows = {
        1: held(1), 2: held(2), 3: held(3, execution_id=8), 4: held(4, execution_id=9, claim=unordered),
        5: held(5, execution_id=None), 6: held(6, execution_id=10, status=Status.PUBLISHED),
    }  # fmt: skip
    verdicts = [Verdict(number, Outcome.FAILED, 1) for number in (2, 1, 3, 4, 5)] + [
        Verdict(6, Outcome.ALREADY_PUBLISHED)
    ]

    assert {row.outbox_id for row in heads_of_failures(rows, verdicts)} == {1, 3}


def test_rows_are_weighed_in_bytes() -> None:
    assert weight_of(claimed(payload_json='"é"', subject="ab", headers_json="{}")) == 4 + 2 + 2


@pytest.mark.parametrize(
    ("bytes_max", "fitting"), [(100, 3), (30, 3), (29, 2), (20, 2), (10, 1), (9, 1), (0, 1)]
)
def test_rows_are_taken_until_they_are_too_heavy(bytes_max: int, fitting: int) -> None:
    rows = [claimed(number, "x" * 10) for number in range(3)]

    assert split_by_weight(rows, bytes_max=bytes_max, at_least_one=True) == fitting


def test_nothing_need_fit_when_there_are_rows_already() -> None:
    assert split_by_weight([claimed(payload_json="xx")], bytes_max=1, at_least_one=False) == 0


def test_what_no_answer_can_hold_is_undeliverable() -> None:
    assert is_undeliverable(claimed(payload_json="x" * (60 * 1024 * 1024 + 1)))
    assert not is_undeliverable(claimed(payload_json="x" * (48 * 1024 * 1024)))


@pytest.mark.parametrize(
    ("payload", "suspect"),
    [
        ("1e-1000", True),
        ("[2E-0016384]", True),
        ("0." + "0" * 16383 + "1", True),
        ("1e-999", False),
        ("1e308", False),
    ],
)
def test_numbers_with_very_many_digits_are_looked_at(payload: str, suspect: bool) -> None:
    assert Message(1, None, None, payload, "json", None, None).is_suspect is suspect
