"""Parked events: a message as a JSON document that any jsonb column takes and people can read, and back again.

NoETL's own servers park events in the same table, as rows with plain JSON columns; those are understood too.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2 as pb

from noetl_grpc.core.envelope import JSON_COLUMNS, Problem, Reason, has_nul

#: Under this key stands the message itself when the document can't hold all of it.
_WHOLE = "protobuf_base64"
_NATIVE = "native_event"
_JSON_FIELDS = {column.name: column.field for column in JSON_COLUMNS}
_TIME_FIELDS = frozenset({"timestamp", "created_at", "event_time", "ingest_time"})
_Event = TypeVar("_Event", pb.EventEnvelope, pb.NativeEvent)
_ZONE = re.compile(r"(?:[zZ]|[+-]\d\d:?\d\d)$")


def event_to_json(message: pb.EventEnvelope) -> str:
    """The document of an event that is parked."""
    return orjson.dumps(_document(message)).decode()


def native_to_json(message: pb.NativeEvent, *, tenant_id: str, organization_id: str) -> str:
    """The document of a worker's event that could not be normalised."""
    document = {_NATIVE: _document(message), "tenant_id": tenant_id, "organization_id": organization_id}
    return orjson.dumps(document).decode()


@dataclass(frozen=True, slots=True)
class Native:
    """A worker's event, and whose it is."""

    message: pb.NativeEvent
    tenant_id: str
    organization_id: str


def event_from_json(text: str, *, execution_id: int, event_id: int) -> pb.EventEnvelope | Native | Problem:
    """The event in a document, under the key that it is parked under."""
    try:
        document = orjson.loads(text)
        if _NATIVE in document:
            native = _parse(document[_NATIVE], pb.NativeEvent())
            native.execution_id, native.event_id = execution_id, event_id
            return Native(native, document["tenant_id"], document["organization_id"])
        fields = {_JSON_FIELDS.get(name, name): _text(name, value) for name, value in document.items()}
        event = _parse(fields, pb.EventEnvelope())
    except (ParseError, DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return Problem(Reason.FIELD_INVALID, "the parked payload is not an event")
    event.execution_id, event.event_id = execution_id, event_id
    return event


def _document(message: Message) -> dict[str, Any]:
    document = {field.name: _plain(value) for field, value in message.ListFields()}
    if has_nul(document):
        document = {name: _visible(value) for name, value in document.items()}
        document[_WHOLE] = base64.b64encode(message.SerializeToString()).decode()
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, Timestamp):
        try:
            return value.ToJsonString()
        except ValueError:
            return {"seconds": value.seconds, "nanos": value.nanos}
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if isinstance(value, (int, str)) else list(value)


def _visible(value: Any) -> Any:
    return value.replace("\0", "␀") if isinstance(value, str) else value


def _parse(document: dict[str, Any], message: _Event) -> _Event:
    if _WHOLE in document:
        message.ParseFromString(base64.b64decode(document[_WHOLE]))
        return message
    fields = {name: _zoned(value) if name in _TIME_FIELDS else value for name, value in document.items()}
    plain = {name: value for name, value in fields.items() if not isinstance(value, dict)}
    ParseDict(plain, message, ignore_unknown_fields=True)
    for name in _TIME_FIELDS.intersection(document):
        if isinstance(fields[name], dict):
            getattr(message, name).CopyFrom(Timestamp(**fields[name]))
    return message


def _text(name: str, value: Any) -> Any:
    return orjson.dumps(value).decode() if name in _JSON_FIELDS else value


def _zoned(value: Any) -> Any:
    """A row's created_at has no zone and may have a blank for the T; it is UTC."""
    if not isinstance(value, str):
        return value
    value = value.replace(" ", "T", 1)
    return value if _ZONE.search(value) else f"{value}Z"
