"""What the tailer sends for an event, and how far a batch has come. Values in, values out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Final

import orjson

from noetl_grpc.core.following import Key, Position
from noetl_grpc.core.messages import Destination, Message, encode_headers
from noetl_grpc.core.traceparent import is_traceparent

STREAM: Final = "noetl_events"
SUBJECTS: Final = "noetl.events.>"
DESTINATION: Final = Destination(STREAM, "noetl.events.{event_type}")
_SUBJECT_PREFIX: Final = "noetl.events."
_UNKNOWN_TYPE: Final = "unknown"
_SUBJECT_BYTES_MAX: Final = 200

#: A body above this goes by reference even where the server would take it, so that consumers may rely on it.
BODY_BYTES_MAX: Final = 900 * 1024
#: JetStream keeps a message's headers in 64 KiB; the type is the only one that can be long.
_TYPE_BYTES_MAX: Final = 48 * 1024
_REFERENCE: Final = b"Noetl-Payload: reference\r\n\r\n"

_MESSAGE_ID: Final = re.compile(r"(-?[0-9]{1,19})-(-?[0-9]{1,19})(?:-r[0-9]+)?")


class Mode(Enum):
    """How the tailer finds what is new. OVERLAP can miss an event that commits late: the log has no xact_id."""

    DISABLED = "disabled"
    SNAPSHOT = "snapshot"
    OVERLAP = "overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far the log of one shard has been published."""

    #: Counted up by each leader; only the last one may move the cursor.
    epoch: int
    #: None before the very first start, and where the log has no xact_id.
    position: Position | None
    #: Of the cluster whose transactions the position speaks of.
    system_identifier: int | None
    #: When `position.seen` was taken.
    seen_at: datetime | None
    #: When rows with another cluster's transaction ids were taken care of.
    restored_at: datetime | None
    #: The very first start.
    created_at: datetime
    updated_at: datetime

    def __str__(self) -> str:
        position = self.position
        if position is None:
            return f"epoch {self.epoch}, events made before {self.updated_at:%Y-%m-%dT%H:%M:%SZ}"
        text = f"epoch {self.epoch}, seen {position.seen}"
        if position.target is not None:
            text += f", up to {position.target} at {position.at_xact}/{position.at_event}"
        return text


@dataclass(frozen=True, slots=True)
class Event:
    """A committed event with the body that its consumers get."""

    execution_id: int
    event_id: int
    event_type: str | None
    tenant_id: str
    organization_id: str
    traceparent: str | None
    #: The row as JSON, in UTF-8; None where it is so large that it was left in the database.
    body: bytes | None
    byte_length: int
    #: Of the body, in hex; only where the body is None.
    sha256: str | None = None


@lru_cache(maxsize=1024)
def subject_of(event_type: str | None) -> str:
    """The subject of an event type: the type itself with whatever NATS does not take in a token replaced."""
    if not event_type:
        return _SUBJECT_PREFIX + _UNKNOWN_TYPE
    text = ".".join(_legal(token) for token in event_type.split("."))
    encoded = text.encode()
    if len(encoded) > _SUBJECT_BYTES_MAX:
        kept = encoded[:_SUBJECT_BYTES_MAX].decode(errors="ignore").rstrip(".")
        text = f"{kept}-{hashlib.sha256(event_type.encode()).hexdigest()[:16]}"
    return _SUBJECT_PREFIX + text


def _legal(token: str) -> str:
    return (
        "".join("_" if char in "*>" or not char.isprintable() or char == " " else char for char in token)
        or "_"
    )


def message_id(execution_id: int, event_id: int) -> str:
    """What the broker recognises a repeat by. An event id alone is unique nowhere."""
    return f"{execution_id}-{event_id}"


def repair_id(execution_id: int, event_id: int, *, now_ms: int) -> str:
    """The id under which a lost message goes out again: the broker may still remember the first one."""
    return f"{execution_id}-{event_id}-r{now_ms}"


def key_of(identifier: str) -> tuple[int, int] | None:
    """Execution and event of a message by its id, repaired or not; None if it is not one of ours."""
    match = _MESSAGE_ID.fullmatch(identifier)
    return (int(match[1]), int(match[2])) if match else None


def message_of(event: Event, *, identifier: str, message_bytes_max: int) -> Message:
    """The message for an event: its body, or a reference where that is too large for the stream."""
    headers = _headers(event, identifier)
    subject = subject_of(event.event_type)
    if event.body is not None and event.byte_length <= BODY_BYTES_MAX:
        message = Message(subject, headers, event.body)
        if message.byte_length <= message_bytes_max:
            return message
    return Message(subject, headers[:-2] + _REFERENCE, _reference(event))


def is_reference(message: Message) -> bool:
    """Whether a message only points to its event."""
    return message.headers.endswith(_REFERENCE)


def _headers(event: Event, identifier: str) -> bytes:
    trace = event.traceparent
    if trace is not None and not is_traceparent(trace):
        trace = None
    # Written out, because this is done for every event; the type is the only text that is not made of digits.
    return (
        b"NATS/1.0\r\nNats-Msg-Id: %b\r\nNoetl-Event-Id: %d\r\n" % (identifier.encode(), event.event_id)
        + _type_header(event.event_type)
        + (b"traceparent: %b\r\n\r\n" % trace.encode() if trace is not None else b"\r\n")
    )


@lru_cache(maxsize=1024)
def _type_header(event_type: str | None) -> bytes:
    """A header is one line and ends somewhere; the body has the type to the letter."""
    if event_type is None:
        return b""
    text = event_type.encode()[:_TYPE_BYTES_MAX].decode(errors="ignore")
    return encode_headers({"Noetl-Event-Type": text}).removeprefix(b"NATS/1.0\r\n").removesuffix(b"\r\n")


def _reference(event: Event) -> bytes:
    digest = event.sha256
    if digest is None:
        assert event.body is not None
        digest = hashlib.sha256(event.body).hexdigest()
    return orjson.dumps(
        {
            "event_id": event.event_id,
            "execution_id": event.execution_id,
            "tenant_id": event.tenant_id,
            "organization_id": event.organization_id,
            "event_type": event.event_type,
            "sha256": digest,
            "byte_length": event.byte_length,
        }
    )


def settled(page: Sequence[Key], done: Collection[int]) -> int:
    """How many keys at the front of a page are done, so that a cursor may stand behind them.

    A cursor names a transaction and an event id, so keys that share both are passed together or not at all.
    """
    count = next((index for index in range(len(page)) if index not in done), len(page))
    while 0 < count < len(page) and _place(page[count]) == _place(page[count - 1]):
        count -= 1
    return count


def fitting(page: Sequence[Key], sizes: Sequence[int], *, bytes_max: int) -> int:
    """How many keys at the front of a page may be taken at once: at least one, and all of those that share a place."""
    if sum(sizes) <= bytes_max:
        return len(page)
    total = count = 0
    while count < len(page):
        end = count + 1
        while end < len(page) and _place(page[end]) == _place(page[count]):
            end += 1
        total += sum(sizes[count:end])
        if count and total > bytes_max:
            break
        count = end
    return count


def _place(key: Key) -> tuple[int, int]:
    return key.xact_id, key.event_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """Where the tailer of one shard stands."""

    shard: int
    mode: Mode
    leader: bool = False
    cursor: str = ""
    lag_events: int = 0
    lag_seconds: float = 0.0
    in_flight: int = 0
    parked: int = 0
    last_error: str = ""
    last_published_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a comparison of the log with the stream found and did."""

    checked: int
    missing: int
    republished: int
