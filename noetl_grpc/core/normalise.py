"""A worker's own event → the event that is stored.

The rules are NoETL's, odd ones included (a status is guessed from the letters of the event type, so
`command.abandoned` is COMPLETED), because what its servers write directly and what is written through us must
be alike. Only the sanitiser differs: it looks at the words of a key instead of its letters, knows a digest
from a secret, and has no depth below which secrets pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import orjson

from noetl_grpc.core.envelope import Moment, Problem, Reason, json_fault

REDACTED = "[REDACTED]"
DEPTH_MAX = 200

_COMPLETED = ("done", "exit", "completed")
_FAILED = ("error", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeEvent:
    """An event as a worker emits it; empty texts are absent."""

    execution_id: int
    step: str
    event_type: str
    payload_json: str = ""
    meta_json: str = ""
    worker_id: str = ""
    result_kind: str = "data"
    result_uri: str = ""
    event_ids: Sequence[int] = ()
    actionable: bool = True
    informative: bool = True
    event_id: int | None = None
    idempotency_key: str | None = None
    status: str = ""
    created_at: Moment | None = None


@dataclass(frozen=True, slots=True)
class Normalised:
    """What is stored of a native event; ids, catalog and time columns that were not given come later."""

    execution_id: int
    event_id: int | None
    event_type: str
    node_name: str
    status: str
    result_json: str
    meta_json: str
    worker_id: str | None
    idempotency_key: str | None
    created_at: Moment | None


def normalise(event: NativeEvent, *, request_id: str = "", index: int = 0) -> Normalised | Problem:
    """The event to store, or why it can't be."""
    if (fault := _field_fault(event)) is not None:
        return Problem(Reason.FIELD_INVALID, fault)
    key = event.idempotency_key or None
    if event.event_id is None and key is None:
        if not request_id:
            return Problem(Reason.FIELD_INVALID, "event_id, idempotency_key or request_id must be set")
        key = f"{request_id}/{index}"
    try:
        payload = _read(event.payload_json, "payload_json")
        meta = _read(event.meta_json, "meta_json")
    except _UnreadableError as error:
        return Problem(Reason.JSON_INVALID, str(error))
    status = event.status or derive_status(event.event_type)
    return Normalised(
        execution_id=event.execution_id,
        event_id=event.event_id,
        event_type=event.event_type,
        node_name=event.step,
        status=status,
        result_json=_write(sanitise(result_envelope(event, status=status, payload=payload))),
        meta_json=_write(sanitise(full_meta(event, meta))),
        worker_id=event.worker_id or None,
        idempotency_key=key,
        created_at=event.created_at,
    )


def derive_status(event_type: str) -> str:
    """The status that an event type's letters suggest; upper case is not looked at."""
    if any(word in event_type for word in _COMPLETED):
        return "COMPLETED"
    if any(word in event_type for word in _FAILED):
        return "FAILED"
    return "RUNNING"


def result_envelope(event: NativeEvent, *, status: str, payload: object) -> dict[str, Any]:
    """Always an object that the table accepts; a payload that is not an object has no place in it."""
    if event.result_kind == "ref" and event.result_uri:
        reference = {"store_tier": _store_tier(event.result_uri), "logical_uri": event.result_uri}
        return {"status": status, "reference": reference}
    if event.result_kind == "refs" and event.event_ids:
        parts = list(event.event_ids)
        return {"status": status, "reference": {"event_ids": parts, "total_parts": len(parts)}}
    if isinstance(payload, dict):
        return {"status": status, "context": payload}
    return {"status": status}


def full_meta(event: NativeEvent, meta: object) -> object:
    """The meta with the event's flags; one that is not an object stays as it is."""
    if meta is None:
        meta = {}
    if not isinstance(meta, dict):
        return meta
    flags: dict[str, Any] = {"actionable": event.actionable, "informative": event.informative}
    if event.worker_id:
        flags["worker_id"] = event.worker_id
    return {**meta, **flags}


def sanitise(value: object, *, key: str = "") -> Any:
    """The value without its secrets: what stands under a telling key, and any text that is one by itself."""
    if is_sensitive(key, value):
        return REDACTED
    if isinstance(value, dict):
        return {name: sanitise(part, key=name) for name, part in value.items()}
    if isinstance(value, list):
        # The items of a list are what its key says, so a list of checksums stays.
        return [sanitise(part, key=key) for part in value]
    if isinstance(value, str) and is_secret(value, key=key):
        return REDACTED
    return value


#: Words that make a key sensitive wherever they stand in it.
_ALWAYS = frozenset(
    {"password", "passwd", "pwd", "secret", "bearer", "credential", "passphrase", "sshkey", "pem"}
    | {"apikey", "privatekey", "secretkey", "clientsecret", "connectionstring"}
)
#: Neighbouring words that do.
_PAIRS = frozenset(
    (first, "key")
    for first in (
        "api",
        "access",
        "private",
        "secret",
        "ssh",
        "gcp",
        "azure",
        "encryption",
        "decrypt",
        "decryption",
    )
) | {
    ("master", "key"),
    ("signing", "key"),
    ("connection", "string"),
    ("auth", "header"),
    ("authorization", "header"),
}
#: Letters that no innocent word contains, for keys written in one piece such as `dbpassword`.
_INSIDE = (
    "password",
    "passwd",
    "passphrase",
    "apikey",
    "privatekey",
    "secretkey",
    "clientsecret",
    "connectionstring",
)
#: Words that make a key sensitive only at its end: `access_token` is a secret, `token_count` is not.
_AT_THE_END = ("token", "auth", "authorization", "cert", "certificate")
#: A key that ends so tells what its value is, however random that looks.
_INNOCENT_ENDS = frozenset(
    {
        "sha",
        "sha1",
        "sha224",
        "sha256",
        "sha384",
        "sha512",
        "md5",
        "checksum",
        "digest",
        "hash",
        "etag",
        "fingerprint",
    }
    | {"signature", "id", "uri", "url", "path", "ref", "reference", "base64"}
)

_WORD = re.compile(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+)[0-9]*|[0-9]+")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
_SCHEME = re.compile(r"(?i:bearer\s+\S+|basic\s+[A-Za-z0-9+/=_-]+)\s*")
_RANDOM = re.compile(r"[A-Za-z0-9+/=]{40,}")
_HEX = re.compile(r"[0-9a-fA-F]+")
_JWT_LENGTH_MIN = 51


class Telling(Enum):
    """What a key says about its value."""

    NOTHING = 0
    #: Not a secret, however random it looks.
    INNOCENT = 1
    #: A secret, unless it is a number or a flag: `token: 17` counts something.
    SECRET_TEXT = 2
    SECRET = 3


@lru_cache(maxsize=4096)
def telling(key: str) -> Telling:
    """What a key says, by its words in any spelling: `clientSecret2` is client, secret."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words:
        return Telling.NOTHING
    bare = [word.rstrip("0123456789").removesuffix("s") for word in words]
    if not _ALWAYS.isdisjoint(bare) or not _PAIRS.isdisjoint(pairwise(bare)):
        return Telling.SECRET
    if bare[-1].endswith("secret") or any(part in word for word in bare for part in _INSIDE):
        return Telling.SECRET
    last = words[-1].rstrip("0123456789")
    if last in _AT_THE_END or last.endswith("token"):
        return Telling.SECRET_TEXT
    if words[-1] in _INNOCENT_ENDS or bare[-1] in _INNOCENT_ENDS:
        return Telling.INNOCENT
    return Telling.NOTHING


def is_sensitive(key: str, value: object) -> bool:
    """Whether the whole value under this key is to be masked."""
    match telling(key):
        case Telling.SECRET:
            return True
        case Telling.SECRET_TEXT:
            return isinstance(value, (str, dict, list))
        case Telling.NOTHING | Telling.INNOCENT:
            return False


def is_secret(text: str, *, key: str = "") -> bool:
    """Whether a text gives itself away as a secret."""
    if text.startswith("eyJ") and text.count(".") == 2 and len(text) >= _JWT_LENGTH_MIN:
        return True
    if _SCHEME.fullmatch(text) or _PRIVATE_KEY.search(text):
        return True
    return bool(_RANDOM.fullmatch(text)) and _looks_random(text) and telling(key) is not Telling.INNOCENT


def _looks_random(text: str) -> bool:
    """Neither a digest in hex, nor a path, nor a long word."""
    if _HEX.fullmatch(text) or not any(letter.isdigit() for letter in text):
        return False
    return not ("/" in text and text.lower() == text)


class Number:
    """A number that Python or the JSON writer would change; it keeps its digits."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _UnreadableError(ValueError):
    """A field that does not hold JSON we can store."""


def _field_fault(event: NativeEvent) -> str | None:
    if event.execution_id < 1:
        return "execution_id must be above 0"
    if event.event_id is not None and event.event_id < 1:
        return "event_id must be above 0"
    for name, text in (("step", event.step), ("event_type", event.event_type)):
        if not text:
            return f"{name} must be set"
    for name in ("step", "event_type", "worker_id", "result_uri", "status", "idempotency_key"):
        if "\0" in (getattr(event, name) or ""):
            return f"{name} must not hold the character NUL"
    return None


def _read(text: str, field: str) -> Any:
    """The JSON value with every number exactly as it was written."""
    if not text:
        return None
    value, fault = json_fault(text)
    if fault is not None:
        raise _UnreadableError(f"{field} {fault}")
    if _is_deep(value):
        raise _UnreadableError(f"{field} is nested deeper than {DEPTH_MAX} levels")
    return json.loads(text, parse_float=Number, parse_int=_whole)


def _whole(text: str) -> int | Number:
    # The writer knows 64 bits.
    return int(text) if len(text) <= 18 else Number(text)


def _is_deep(value: object) -> bool:
    """Whether a value is nested deeper than our own recursion and the writer's go."""
    level: list[object] = [value]
    for _ in range(DEPTH_MAX):
        level = [
            part
            for outer in level
            if isinstance(outer, (dict, list))
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return False
    return True


def _write(value: object) -> str:
    return orjson.dumps(value, default=_digits).decode()


def _digits(value: object) -> orjson.Fragment:
    if isinstance(value, Number):
        return orjson.Fragment(value.text)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _store_tier(uri: str) -> str:
    if uri.startswith("gs://"):
        return "gcs"
    if uri.startswith("s3://"):
        return "s3"
    return "artifact"
