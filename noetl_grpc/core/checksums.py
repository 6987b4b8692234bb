"""The checksums of a state: one over all of it, and one per surface over its normalised rows.

Both go through a large state in pieces and yield between them, so that whoever drives them can let others
run; `finish` drives them to the end at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any, TypeVar

from noetl_grpc.core.canonical import Json, JsonObject, canonical_json, contains_float
from noetl_grpc.core.fold import SURFACES
from noetl_grpc.core.payloads import no_summary, summarise

ALGORITHM = "sha256"

T = TypeVar("T")
#: Yields after each piece of work and returns the result.
Steps = Generator[None, None, T]

# About a millisecond of encoding, or less.
_ENTRIES_PER_PIECE = 200
_NO_FLOATS: Mapping[str, bool] = dict.fromkeys(SURFACES, False)


@dataclass(frozen=True, slots=True)
class Checksums:
    value: str
    #: by bundle key: execution, stages, frames, commands, business_objects, loops
    surfaces: dict[str, str]
    #: the text that was hashed, if it was asked for
    canonical_json: bytes | None = None


@dataclass(frozen=True, slots=True)
class Hashed:
    """A checksum over all of a state, and the text that was hashed."""

    checksum: str
    text: bytes
    holds_float: bool


def hash_state(state: Mapping[str, Any], *, may_hold_float: bool = True) -> Steps[Hashed]:
    """The checksum over all of it. Who knows that there is no float in it saves looking for one."""
    floats: Mapping[str, bool] = _NO_FLOATS
    holds_float = False
    if may_hold_float:
        floats = yield from _floats_of(state)
        holds_float = any(floats.values()) or _rest_holds_float(state)
    if sum(map(len, map(state.__getitem__, SURFACES))) <= _ENTRIES_PER_PIECE:
        text = canonical_json(state, holds_float=holds_float)
    else:
        text = yield from _state_text(state, floats)
    return Hashed(hashlib.sha256(text).hexdigest(), text, holds_float)


def checksums_of(state: Mapping[str, Any], *, keep_text: bool = False) -> Steps[Checksums]:
    digest = hashlib.sha256()
    pieces: list[bytes] = []
    floats = yield from _floats_of(state)
    for piece in _state_pieces(state, floats):
        digest.update(piece)
        if keep_text:
            pieces.append(piece)
        yield
    surfaces = {"execution": _hash_rows("executions", [_execution_row(state)])}
    for surface in SURFACES:
        surfaces[surface] = yield from _surface_checksum(surface, state[surface], floats[surface])
    return Checksums(digest.hexdigest(), surfaces, b"".join(pieces) if keep_text else None)


def finish(steps: Steps[T]) -> T:
    """Drive steps to their end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


def _floats_of(state: Mapping[str, Any]) -> Steps[Mapping[str, bool]]:
    floats: dict[str, bool] = {}
    for surface in SURFACES:
        entries = state[surface]
        floats[surface] = bool(entries) and (yield from _surface_holds_float(surface, entries))
    return floats


def _state_text(state: Mapping[str, Any], floats: Mapping[str, bool]) -> Steps[bytes]:
    pieces: list[bytes] = []
    for piece in _state_pieces(state, floats):
        pieces.append(piece)
        yield
    return b"".join(pieces)


def _surface_holds_float(surface: str, entries: Mapping[str, JsonObject]) -> Steps[bool]:
    """Whether there is a float among the fields that hold what an event brought along; others can't."""
    raw_of = _RAW_FIELDS[surface]
    for piece in _pieces(entries.values()):
        for value in filter(None, chain.from_iterable(map(raw_of, piece))):
            if value.__class__ is not str and contains_float(value):
                return True
        yield
    return False


def _rest_holds_float(state: Mapping[str, Any]) -> bool:
    return contains_float({key: value for key, value in state.items() if key not in SURFACES})


def _state_pieces(state: Mapping[str, Any], floats: Mapping[str, bool]) -> Iterator[bytes]:
    before = b"{"
    for key in sorted(state):
        yield before + canonical_json(key) + b":"
        before = b","
        if key in SURFACES:
            yield b"{"
            yield from _members(state[key], holds_float=floats[key])
            yield b"}"
        else:
            yield canonical_json(state[key])
    yield b"}"


def _members(surface: Mapping[str, Any], *, holds_float: bool) -> Iterator[bytes]:
    """The members of an object, without its braces."""
    before = b""
    for keys in _pieces(sorted(surface)):
        members = canonical_json({key: surface[key] for key in keys}, holds_float=holds_float)
        yield before + members[1:-1]
        before = b","


def _surface_checksum(surface: str, entries: Mapping[str, JsonObject], holds_float: bool) -> Steps[str]:
    row_of, order = _ROWS[surface]
    digest = hashlib.sha256(b'{"%s":[' % surface.encode())
    before = b""
    for piece in _pieces(sorted(entries.values(), key=order)):
        rows = canonical_json([row_of(entry) for entry in piece], holds_float=holds_float)
        digest.update(before + rows[1:-1])
        before = b","
        yield
    digest.update(b"]}")
    return digest.hexdigest()


def _pieces(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while piece := list(islice(rest, _ENTRIES_PER_PIECE)):
        yield piece


def _hash_rows(name: str, rows: list[JsonObject]) -> str:
    return hashlib.sha256(canonical_json({name: rows})).hexdigest()


def id_order(identity: Json) -> tuple[int, int, str]:
    """Numbers first, by value; then everything else, as text."""
    try:
        return 0, int(identity), ""
    except (TypeError, ValueError, OverflowError):
        return 1, 0, "" if identity is None else str(identity)


def _execution_row(state: Mapping[str, Any]) -> JsonObject:
    execution = state["execution"]
    payload_refs = execution["payload_refs"]
    summary = summarise(payload_refs[-1]["reference"]) if payload_refs else no_summary()
    return {
        "execution_id": state["execution_id"],
        "tenant_id": state["tenant_id"] or "default",
        "organization_id": state["organization_id"] or "default",
        "projection": state["projection"] or "all",
        "status": execution["status"],
        "last_node_name": execution["last_node_name"],
        "event_count": state["event_count"],
        "last_event_id": state["last_event_id"],
        "last_event_type": state["last_event_type"],
        "payload_ref_count": len(payload_refs),
        "last_payload_ref_summary": summary,
        "upcaster_registry_digest": state["upcaster_registry_digest"],
    }


def _stage_row(stage: JsonObject) -> JsonObject:
    return stage


def _frame_row(frame: JsonObject) -> JsonObject:
    row = frame.copy()
    del row["attempts"], row["last_event_id"], row["output_ref"]
    return row


def _command_row(command: JsonObject) -> JsonObject:
    row = command.copy()
    del row["last_event_id"]
    return row


def _business_object_row(entry: JsonObject) -> JsonObject:
    row = entry.copy()
    payload_refs = row.pop("payload_refs")
    last = row.pop("last_payload_ref")
    row["payload_ref_count"] = len(payload_refs)
    row["last_payload_ref_summary"] = no_summary() if last is None else summarise(last["reference"])
    return row


def _loop_row(loop: JsonObject) -> JsonObject:
    total = loop["total"]
    return {**loop, "total": None if total is None else int(total)}


_RAW_FIELDS: dict[str, Callable[[JsonObject], tuple[Json, ...]]] = {
    "stages": itemgetter("kind", "step_name", "status"),
    "frames": itemgetter("cursor", "output_ref", "status"),
    "commands": itemgetter("locality", "source_locality", "placement", "fanout_reduce", "status"),
    "business_objects": itemgetter("attributes", "payload_refs", "status"),
    "loops": itemgetter("total", "step_name"),
}
_ROWS: dict[str, tuple[Callable[[JsonObject], JsonObject], Callable[[JsonObject], Any]]] = {
    "stages": (_stage_row, lambda row: id_order(row["stage_id"])),
    "frames": (_frame_row, lambda row: id_order(row["frame_id"])),
    "commands": (_command_row, lambda row: id_order(row["command_id"])),
    "business_objects": (_business_object_row, lambda row: row["object_key"]),
    "loops": (_loop_row, lambda row: row["loop_id"]),
}
