"""What the outbox decides: how much a claim may take, what a claim token says, and what becomes of a failed row."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from noetl_grpc.core import backoff
from noetl_grpc.errors import InvalidRequest

CLAIM_ROWS_DEFAULT = 100
CLAIM_ROWS_MAX = 1000
CLAIM_BYTES_DEFAULT = 16 * 1024 * 1024
CLAIM_BYTES_MAX = 32 * 1024 * 1024
#: A single row may be larger than a claim's bytes; above this it fits into no answer at all.
ROW_BYTES_MAX = 60 * 1024 * 1024
WAIT_SECONDS_MAX = 60
BATCH_ITEMS_MAX = 10_000
ERROR_CHARACTERS_MAX = 2000
CODEC_DEFAULT = "json"

_TOKEN = struct.Struct(">BHq16s")
_TOKEN_VERSION = 1
_TOKEN_RULE = "is not the claim_token of a claim"


# More than 16383 digits behind the point are refused by PostgreSQL, however they are written.
_TINY_NUMBER = re.compile(r"[eE]-0*[1-9][0-9]{3}|[0-9]{16000}")


class Status(Enum):
    """The words of the table's status column."""

    PENDING = "PENDING"
    IN_FLIGHT = "IN_FLIGHT"
    PUBLISHED = "PUBLISHED"
    FAILED = "FAILED"


class Outcome(Enum):
    """What became of a row that was reported as failed."""

    FAILED = "FAILED"
    DEAD = "DEAD"
    STALE = "STALE"
    UNKNOWN = "UNKNOWN"
    ALREADY_PUBLISHED = "ALREADY_PUBLISHED"


class ClaimedRow(NamedTuple):
    """A row as a claim hands it out, in the order of the statement's columns."""

    outbox_id: int
    event_id: int
    execution_id: int | None
    subject: str | None
    payload_json: str
    headers_json: str | None
    #: This claim included.
    attempts: int
    lease_expires_at: datetime


class DeadRow(NamedTuple):
    """A dead row, in the order of the statement's columns."""

    outbox_id: int
    event_id: int
    execution_id: int | None
    subject: str | None
    #: None when it was not asked for.
    payload_json: str | None
    headers_json: str | None
    attempts: int
    last_error: str
    dead_at: datetime
    #: How many bytes it brings into an answer.
    size: int


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Which dead rows; what is set must all hold."""

    error_contains: str = ""
    subject: str = ""
    execution_id: int | None = None
    dead_before: datetime | None = None
    outbox_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heads:
    """The oldest undelivered rows of some executions, locked, and how far the walk for them came."""

    execution_ids: Sequence[int]
    outbox_ids: Sequence[int]
    walked_from: int | None
    walked_to: int | None
    #: There is no execution behind `walked_to`.
    at_end: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A message to enqueue."""

    event_id: int
    execution_id: int | None
    subject: str | None
    payload_json: str
    payload_codec: str
    headers_json: str | None
    #: None is now, by the database's clock.
    available_at: datetime | None

    @property
    def is_suspect(self) -> bool:
        """Whether its body may hold a number with more digits behind the point than PostgreSQL can store."""
        return _TINY_NUMBER.search(self.payload_json) is not None

    @property
    def key(self) -> tuple[int | None, int]:
        """What makes it the same message as another."""
        return self.execution_id, self.event_id


@dataclass(frozen=True, slots=True)
class HeldRow:
    """What a decision about a row needs to know."""

    outbox_id: int
    execution_id: int | None
    status: Status
    claim: UUID | None
    attempts: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as it was reported."""

    outbox_id: int
    error: str
    #: What the delay is reckoned by; 0 is the row's own attempts.
    attempts: int
    delay_seconds_max: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one failure."""

    outbox_id: int
    outcome: Outcome
    #: 0 unless the row waits for another attempt.
    delay_seconds: int = 0

    @property
    def is_marked(self) -> bool:
        """Whether the row is changed."""
        return self.outcome in (Outcome.FAILED, Outcome.DEAD)


@dataclass(frozen=True, slots=True)
class Stats:
    """Undelivered rows by situation; every row is counted once."""

    pending: int = 0
    delayed: int = 0
    in_flight: int = 0
    expired: int = 0
    dead: int = 0
    oldest_pending_age: timedelta | None = None

    def __add__(self, other: Stats) -> Stats:
        ages = [age for age in (self.oldest_pending_age, other.oldest_pending_age) if age is not None]
        return Stats(
            pending=self.pending + other.pending,
            delayed=self.delayed + other.delayed,
            in_flight=self.in_flight + other.in_flight,
            expired=self.expired + other.expired,
            dead=self.dead + other.dead,
            oldest_pending_age=max(ages, default=None),
        )


@dataclass(frozen=True, slots=True)
class ClaimToken:
    """Names a claim: its shard, when it was made by the database's clock, and its key in the rows."""

    shard: int
    claimed_at: datetime
    claim: UUID

    def encode(self) -> str:
        """The token as callers carry it."""
        microseconds = (self.claimed_at - _EPOCH) // _MICROSECOND
        packed = _TOKEN.pack(_TOKEN_VERSION, self.shard, microseconds, self.claim.bytes)
        return base64.urlsafe_b64encode(packed).decode()

    @classmethod
    def decode(cls, text: str, *, shards: int, field: str = "claim_token") -> ClaimToken:
        """A token that was handed out by a server with these shards; anything else is refused."""
        try:
            version, shard, microseconds, claim = _TOKEN.unpack(
                base64.b64decode(text.encode("ascii"), b"-_", validate=True)
            )
            claimed_at = _EPOCH + timedelta(microseconds=microseconds)
        except (binascii.Error, ValueError, OverflowError, struct.error):
            raise InvalidRequest(field, _TOKEN_RULE) from None
        if version != _TOKEN_VERSION or shard >= shards:
            raise InvalidRequest(field, _TOKEN_RULE)
        return cls(shard, claimed_at, UUID(bytes=claim))


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
_MICROSECOND = timedelta(microseconds=1)


def claim_key(noise: UUID, *, ordered: bool) -> UUID:
    """The key of a new claim. Its last bit says whether the claim keeps order, so that every row under it tells."""
    return UUID(int=noise.int & ~1 | ordered)


def keeps_order(claim: UUID) -> bool:
    """Whether the rows of this claim must leave in order."""
    return bool(claim.int & 1)


def claim_limit(asked: int) -> int:
    """How many rows a claim may take."""
    if asked < 0:
        raise InvalidRequest("limit", "must not be negative; 0 means 100")
    return min(asked or CLAIM_ROWS_DEFAULT, CLAIM_ROWS_MAX)


def claim_bytes(asked: int, *, field: str = "max_bytes") -> int:
    """How many bytes the rows of a claim may have together."""
    if asked < 0:
        raise InvalidRequest(field, "must not be negative; 0 means 16 MiB")
    return min(asked or CLAIM_BYTES_DEFAULT, CLAIM_BYTES_MAX)


def wait_seconds(*, seconds: int, nanos: int) -> float:
    """How long a claim waits for its first row."""
    waited = seconds + nanos / 1e9
    if not 0 <= waited <= WAIT_SECONDS_MAX:
        raise InvalidRequest("wait", f"must be between 0 and {WAIT_SECONDS_MAX} s")
    return waited


def weight_of(row: ClaimedRow) -> int:
    """How many bytes a row brings into an answer."""
    return sum(_bytes_of(text) for text in (row.payload_json, row.subject, row.headers_json) if text)


def is_undeliverable(row: ClaimedRow) -> bool:
    """Whether a row fits into no answer."""
    return weight_of(row) > ROW_BYTES_MAX


def split_by_weight(rows: Sequence[ClaimedRow], *, bytes_max: int, at_least_one: bool) -> int:
    """How many of these rows, from the first on, fit into this many bytes."""
    # A character has at most four bytes, so most batches need not be measured.
    if (
        sum(len(row.payload_json) + len(row.subject or "") + len(row.headers_json or "") for row in rows) * 4
        <= bytes_max
    ):
        return len(rows)
    left = bytes_max
    for place, row in enumerate(rows):
        left -= weight_of(row)
        if left < 0 and not (place == 0 and at_least_one):
            return place
    return len(rows)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def judge(failure: Failure, row: HeldRow | None, *, claim: UUID | None, attempts_max: int) -> Verdict:
    """What a reported failure does to its row. With a claim only to a row that it holds; 0 attempts is never dead."""
    if row is None:
        return Verdict(failure.outbox_id, Outcome.UNKNOWN)
    if row.status is Status.PUBLISHED:
        is_mine = claim is None or row.claim == claim
        return Verdict(failure.outbox_id, Outcome.ALREADY_PUBLISHED if is_mine else Outcome.STALE)
    if claim is not None and (row.status is not Status.IN_FLIGHT or row.claim != claim):
        return Verdict(failure.outbox_id, Outcome.STALE)
    if row.dead or is_exhausted(row.attempts, attempts_max=attempts_max):
        return Verdict(failure.outbox_id, Outcome.DEAD)
    delay = backoff.delay_seconds(failure.attempts or row.attempts, maximum=failure.delay_seconds_max)
    return Verdict(failure.outbox_id, Outcome.FAILED, delay)


def is_exhausted(attempts: int, *, attempts_max: int) -> bool:
    """Whether a row that failed after so many attempts gets no other."""
    return 0 < attempts_max <= attempts


def heads_of_failures(rows: Mapping[int, HeldRow], verdicts: Sequence[Verdict]) -> list[HeldRow]:
    """The failed rows whose claim keeps order: what it holds behind them must go back, or it would overtake them."""
    oldest: dict[tuple[int, UUID], HeldRow] = {}
    for verdict in verdicts:
        row = rows.get(verdict.outbox_id)
        if row is None or not verdict.is_marked:
            continue
        if row.execution_id is None or row.claim is None or not keeps_order(row.claim):
            continue
        known = oldest.get((row.execution_id, row.claim))
        if known is None or row.outbox_id < known.outbox_id:
            oldest[row.execution_id, row.claim] = row
    return list(oldest.values())


def oldest_of_each(claim: UUID, executions: Mapping[int, int | None]) -> list[HeldRow]:
    """Of rows that an ordered claim gave back, by execution, those behind which everything else must go back too."""
    if not keeps_order(claim):
        return []
    oldest: dict[int, int] = {}
    for outbox_id, execution_id in executions.items():
        if execution_id is not None:
            oldest[execution_id] = min(outbox_id, oldest.get(execution_id, outbox_id))
    return [
        HeldRow(outbox_id, execution_id, Status.PENDING, claim, attempts=0, dead=False)
        for execution_id, outbox_id in oldest.items()
    ]
