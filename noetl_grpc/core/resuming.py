"""The resume token of a stream: where it stands, and a digest of the request it belongs to."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from noetl_grpc.core.canonical import checksum
from noetl_grpc.core.following import Position, is_snapshot
from noetl_grpc.errors import InvalidRequest

_RULE = "is not a resume_token of this stream with the same request"


@dataclass(frozen=True, slots=True)
class Reading:
    """On the way through what was there, by event id; what `snapshot` does not show comes later."""

    after_event_id: int
    #: empty where the log can't be followed by snapshots
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class Following:
    """Behind `caught_up`. Without snapshots only the highest event id seen is known."""

    position: Position | None
    after_event_id: int = 0


Place = Reading | Following


def encode(place: Place, request: Mapping[str, Any]) -> str:
    match place:
        case Reading(after_event_id, snapshot):
            values: list[Any] = ["r", after_event_id, snapshot]
        case Following(position, after_event_id):
            values = ["f", after_event_id, None if position is None else position.as_list()]
    text = orjson.dumps([checksum(dict(request))[:16], *values])
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def decode(token: str, request: Mapping[str, Any]) -> Place:
    try:
        values = orjson.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise InvalidRequest("resume_token", _RULE) from None
    match values:
        case [digest, "r", int(after_event_id), str(snapshot)] if not snapshot or is_snapshot(snapshot):
            place: Place = Reading(after_event_id, snapshot)
        case [digest, "f", int(after_event_id), None]:
            place = Following(None, after_event_id)
        case [digest, "f", int(after_event_id), list(listed)] if position := Position.from_list(listed):
            place = Following(position, after_event_id)
        case _:
            raise InvalidRequest("resume_token", _RULE)
    if digest != checksum(dict(request))[:16] or not -(2**63) <= after_event_id < 2**63:
        raise InvalidRequest("resume_token", _RULE)
    return place
