"""Canonical JSON and its SHA-256: the same value gives the same bytes on any machine.

Keys sorted by code point, no blanks, ASCII only, numbers as Python writes them. The checksums of NoETL's
Python server are taken over exactly this text.
"""

from __future__ import annotations

import hashlib
import json
import marshal
from datetime import UTC, datetime
from typing import Any

import orjson

#: A JSON value as the standard decoder gives it: None, bool, int, float, str, list, dict.
Json = Any
JsonObject = dict[str, Any]

_FAST = (
    orjson.OPT_SORT_KEYS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def canonical_json(value: Json, *, holds_float: bool | None = None) -> bytes:
    """The canonical text of a value. Who already knows whether it holds a float may say so."""
    # orjson is seven times faster and agrees wherever no float and nothing but printable ASCII occurs;
    # it refuses integers beyond 64 bits.
    if not (contains_float(value) if holds_float is None else holds_float):
        try:
            text = orjson.dumps(value, option=_FAST)
        except TypeError:
            return _exact(value)
        if text.isascii() and b"\x7f" not in text:
            return text
    return _exact(value)


def sha256_hex(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def checksum(value: Json) -> str:
    """SHA-256 of the canonical text, as 64 lower-case hex digits."""
    return sha256_hex(canonical_json(value))


def copy_json(value: Json) -> Json:
    """A copy that shares no container with the original. As in a deepcopy, one thing in two places may stay one."""
    try:
        # Twice as fast as walking the value, and as exact: it keeps order, large integers and the bits of floats.
        return marshal.loads(marshal.dumps(value))
    except ValueError:
        return _walk_copy(value)


def _walk_copy(value: Json) -> Json:
    """The same for values that an upcaster made of more than JSON."""
    if isinstance(value, dict):
        return {key: _walk_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk_copy(item) for item in value]
    return value


def contains_float(value: Json) -> bool:
    """Whether there is a float in the value, at any depth."""
    kind = value.__class__
    if kind is dict:
        items = value.values()
    elif kind is list:
        items = value
    else:
        return kind is float
    for item in items:
        kind = item.__class__
        if kind is float or ((kind is dict or kind is list) and item and contains_float(item)):
            return True
    return False


def _text_of(value: object) -> str:
    if isinstance(value, datetime):
        zoned = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        return zoned.isoformat().replace("+00:00", "Z")
    return str(value)


_exact_text = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), check_circular=False, default=_text_of
).encode


def _exact(value: Json) -> bytes:
    return _exact_text(value).encode("ascii")
