"""The columns of an event, and which events may be stored.

A batch is kept by column, as the database takes it: one list per column, None for SQL NULL. `examine` finds
what PostgreSQL would refuse before it is asked, so that one bad event costs its batch nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Any, TypeAlias

import orjson

DEFAULT_TENANT = "default"


class Reason(StrEnum):
    """Why an event was not stored."""

    FIELD_INVALID = "FIELD_INVALID"
    CATALOG_UNKNOWN = "CATALOG_UNKNOWN"
    RESULT_SHAPE = "RESULT_SHAPE"
    JSON_INVALID = "JSON_INVALID"
    TIME_INVALID = "TIME_INVALID"
    STORE_REFUSED = "STORE_REFUSED"
    #: Not the event's fault: it is never parked, and a repeat may succeed.
    SHARD_UNAVAILABLE = "SHARD_UNAVAILABLE"
    #: Only for a retry of an event that is not parked.
    EVENT_NOT_FOUND = "EVENT_NOT_FOUND"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one event; the detail names the field."""

    reason: Reason
    detail: str


class Kind(Enum):
    """What a column holds. NAIVE is a UTC instant in a column without a zone."""

    BIGINT = "bigint"
    INTEGER = "integer"
    DOUBLE = "double precision"
    TEXT = "text"
    JSON = "jsonb"
    NAIVE = "timestamp"
    INSTANT = "timestamptz"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of noetl.event."""

    name: str
    kind: Kind
    nullable: bool = True

    @property
    def field(self) -> str:
        """The column's name on the wire."""
        return f"{self.name}_json" if self.kind is Kind.JSON else self.name


#: Every column that a writer sets, in the order of the insert statements' arguments.
COLUMNS: tuple[Column, ...] = (
    Column("execution_id", Kind.BIGINT, nullable=False),
    Column("catalog_id", Kind.BIGINT, nullable=False),
    Column("event_id", Kind.BIGINT, nullable=False),
    Column("parent_event_id", Kind.BIGINT),
    Column("parent_execution_id", Kind.BIGINT),
    Column("created_at", Kind.NAIVE, nullable=False),
    Column("event_type", Kind.TEXT),
    Column("node_id", Kind.TEXT),
    Column("node_name", Kind.TEXT),
    Column("node_type", Kind.TEXT),
    Column("status", Kind.TEXT),
    Column("duration", Kind.DOUBLE),
    Column("context", Kind.JSON),
    Column("result", Kind.JSON),
    Column("meta", Kind.JSON),
    Column("error", Kind.TEXT),
    Column("current_index", Kind.INTEGER),
    Column("current_item", Kind.TEXT),
    Column("worker_id", Kind.TEXT),
    Column("distributed_state", Kind.TEXT),
    Column("context_key", Kind.TEXT),
    Column("context_value", Kind.TEXT),
    Column("trace_component", Kind.JSON),
    Column("stack_trace", Kind.TEXT),
    Column("tenant_id", Kind.TEXT, nullable=False),
    Column("organization_id", Kind.TEXT, nullable=False),
    Column("stream_id", Kind.TEXT),
    Column("stream_version", Kind.BIGINT),
    Column("aggregate_id", Kind.TEXT),
    Column("aggregate_type", Kind.TEXT),
    Column("schema_name", Kind.TEXT),
    Column("schema_version", Kind.INTEGER, nullable=False),
    Column("event_time", Kind.INSTANT, nullable=False),
    Column("ingest_time", Kind.INSTANT, nullable=False),
    Column("producer", Kind.TEXT),
    Column("causation_id", Kind.TEXT),
    Column("correlation_id", Kind.TEXT),
    Column("idempotency_key", Kind.TEXT),
    Column("payload_ref", Kind.JSON),
    Column("envelope_checksum", Kind.TEXT),
    Column("prev_event_id", Kind.BIGINT),
    Column("command_id", Kind.BIGINT),
    Column("stage_id", Kind.BIGINT),
    Column("frame_id", Kind.BIGINT),
)

TEXT_COLUMNS = tuple(column for column in COLUMNS if column.kind is Kind.TEXT)
JSON_COLUMNS = tuple(column for column in COLUMNS if column.kind is Kind.JSON)

#: A moment as protobuf has it: seconds since 1970 and nanoseconds within.
Moment: TypeAlias = tuple[int, int]
#: Row → key.
Keys: TypeAlias = Sequence[Hashable] | Mapping[int, Hashable]
#: Column name → its values, one per event.
Batch: TypeAlias = dict[str, list[Any]]

_EPOCH = datetime(1970, 1, 1)  # naive, like the column it is for
_SECONDS_MIN = -62_135_596_800  # 0001-01-01T00:00:00Z
_SECONDS_MAX = 253_402_300_799  # 9999-12-31T23:59:59Z
_NANOS_MAX = 999_999_999
TIME_RULE = (
    "must lie between 0001-01-01T00:00:00Z and 9999-12-31T23:59:59.999999999Z, with nanos from 0 to 999999999"
)


def examine(batch: Batch, timestamps: Sequence[Moment | None]) -> dict[int, Problem]:
    """Put a batch as it was sent into the form that is stored; say for each event that can't be stored why.

    Time columns come in as moments and leave as datetimes cut to microseconds; `timestamps` win over
    created_at. A time that was not given stays None: the database fills in its own clock. What stands in the
    columns for an event with a problem means nothing.
    """
    problems: dict[int, Problem] = {}
    _check_ids(batch, problems)
    _set_times(batch, timestamps, problems)
    _check_numbers(batch["duration"], problems)
    for column in TEXT_COLUMNS:
        _check_text(column.name, batch[column.name], problems)
    for column in JSON_COLUMNS:
        texts = batch[column.name]
        batch[column.name] = _json_texts(column.field, texts, problems, is_result=column.name == "result")
    for name in ("tenant_id", "organization_id"):
        batch[name] = [value if value and not value.isspace() else DEFAULT_TENANT for value in batch[name]]
    batch["schema_version"] = [version or 1 for version in batch["schema_version"]]
    return problems


def pick(batch: Batch, rows: Sequence[int]) -> Batch:
    """The same columns with only these rows, in this order."""
    if list(rows) == list(range(len(batch["event_id"]))):
        return batch
    return {name: [values[row] for row in rows] for name, values in batch.items()}


def instant(moment: Moment) -> datetime | None:
    """The UTC instant without a zone, cut to microseconds; None when it is no valid moment."""
    seconds, nanos = moment
    if not (_SECONDS_MIN <= seconds <= _SECONDS_MAX and 0 <= nanos <= _NANOS_MAX):
        return None
    return _EPOCH + timedelta(0, seconds, nanos // 1000)


def result_fault(value: object) -> str | None:
    """How a result breaks the table's rule about its shape; None when it keeps it."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return "must be an object"
    if not isinstance(value.get("status"), str):
        return "must have a text `status`"
    for key, part in value.items():
        if key in ("reference", "context"):
            if not isinstance(part, dict):
                return f"must have an object as `{key}`"
        elif key != "status":
            return f"may hold only status, reference and context, not {_shorten(key)}"
    return None


def has_nul(value: object) -> bool:
    """Whether a text or key anywhere in a JSON value holds the character that PostgreSQL can't store."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            if "\0" in part:
                return True
        elif isinstance(part, dict):
            pending.extend(part)
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
    return False


def json_fault(text: str) -> tuple[Any, str | None]:
    """The parsed value, or what keeps the text out of a jsonb column."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return None, f"is not JSON: {error}"
    # The escape may itself be escaped, so the text alone does not tell.
    if "\\u0000" in text and has_nul(value):
        return None, "holds the character NUL, which PostgreSQL can't store"
    return value, None


def _check_ids(batch: Batch, problems: dict[int, Problem]) -> None:
    for name, least, rule in (
        ("execution_id", 1, "must be above 0"),
        ("event_id", 1, "must be above 0"),
        ("catalog_id", 0, "must not be negative"),
    ):
        for row, value in enumerate(batch[name]):
            if value < least:
                problems.setdefault(row, Problem(Reason.FIELD_INVALID, f"{name} {rule}"))


def _set_times(batch: Batch, timestamps: Sequence[Moment | None], problems: dict[int, Problem]) -> None:
    """created_at: the timestamp wins over the field, and both must be moments."""
    given = _instants("timestamp", timestamps, problems)
    created = _instants("created_at", batch["created_at"], problems)
    batch["created_at"] = [mine or theirs for mine, theirs in zip(given, created, strict=True)]
    for name in ("event_time", "ingest_time"):
        batch[name] = [
            value and value.replace(tzinfo=UTC) for value in _instants(name, batch[name], problems)
        ]


def _instants(
    name: str, moments: Sequence[Moment | None], problems: dict[int, Problem]
) -> list[datetime | None]:
    values = [moment and instant(moment) for moment in moments]
    if values.count(None) != moments.count(None):
        for row, moment in enumerate(moments):
            if moment is not None and values[row] is None:
                problems.setdefault(row, Problem(Reason.TIME_INVALID, f"{name} {TIME_RULE}"))
    return values


def _check_numbers(durations: Sequence[float | None], problems: dict[int, Problem]) -> None:
    for row, value in enumerate(durations):
        if value is not None and not math.isfinite(value):
            problems.setdefault(row, Problem(Reason.FIELD_INVALID, "duration must be a finite number"))


def _check_text(name: str, values: Sequence[str | None], problems: dict[int, Problem]) -> None:
    # One look at the whole column is several times cheaper than one per value.
    if "\0" in "".join(filter(None, values)):
        for row, value in enumerate(values):
            if value is not None and "\0" in value:
                detail = f"{name} must not hold the character NUL"
                problems.setdefault(row, Problem(Reason.FIELD_INVALID, detail))


def _json_texts(
    field: str,
    texts: Sequence[str | None],
    problems: dict[int, Problem],
    *,
    is_result: bool,
) -> list[str | None]:
    """The texts as they were sent (numbers keep their digits), with SQL NULL for what means nothing."""
    stored: list[str | None] = []
    for row, text in enumerate(texts):
        if not text:
            stored.append(None)
            continue
        value, trouble = json_fault(text)
        if trouble is not None:
            problems.setdefault(row, Problem(Reason.JSON_INVALID, f"{field} {trouble}"))
        elif is_result and (trouble := result_fault(value)) is not None:
            problems.setdefault(row, Problem(Reason.RESULT_SHAPE, f"{field} {trouble}"))
        stored.append(None if value is None else text)
    return stored


def _shorten(text: str, length_max: int = 40) -> str:
    return repr(text if len(text) <= length_max else text[:length_max] + "…")


def first_of_each(keys: Keys, rows: Iterable[int]) -> tuple[list[int], list[int]]:
    """Rows whose key comes for the first time, and rows that repeat an earlier one, each in their order."""
    seen: set[Hashable] = set()
    first: list[int] = []
    repeated: list[int] = []
    for row in rows:
        (repeated if keys[row] in seen else first).append(row)
        seen.add(keys[row])
    return first, repeated


def resolve_catalogs(batch: Batch, rows: Iterable[int], known: Mapping[int, int]) -> list[int]:
    """Fill in a catalog_id of 0 from the execution's stored events, else from the batch; rows that stay 0."""
    rows = list(rows)
    execution_ids, catalog_ids = batch["execution_id"], batch["catalog_id"]
    others: dict[int, int] = {}
    for row in rows:
        if catalog_ids[row]:
            others.setdefault(execution_ids[row], catalog_ids[row])
    unresolved: list[int] = []
    for row in rows:
        if not catalog_ids[row]:
            found = known.get(execution_ids[row]) or others.get(execution_ids[row])
            if found:
                catalog_ids[row] = found
            else:
                unresolved.append(row)
    return unresolved
