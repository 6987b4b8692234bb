"""What differs between two states, and which event is to blame for a value.

Paths are JSON Pointers (RFC 6901) into the hashed state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from noetl_grpc.core.canonical import Json, JsonObject, canonical_json
from noetl_grpc.core.checksums import Steps
from noetl_grpc.core.fold import SURFACES, Fold
from noetl_grpc.errors import InvalidRequest

Path = tuple[str, ...]

_ENTRIES_PER_STEP = 50


class Missing:
    """The value of a path that leads nowhere."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()


@dataclass(frozen=True, slots=True)
class Change:
    """`before` and `after` are MISSING where the path does not exist."""

    path: Path
    before: Json | Missing
    after: Json | Missing


@dataclass(frozen=True, slots=True)
class Cause:
    """An event that changed the value at a path, and the canonical text of what it was changed to."""

    path: Path
    event_id: int
    event_type: str
    value_json: bytes | None


def parse_pointer(text: str) -> Path:
    if text and not text.startswith("/"):
        raise InvalidRequest("path", "must be a JSON Pointer: empty, or starting with /")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def pointer(path: Path) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def lookup(document: Json, path: Path) -> Json | Missing:
    for part in path:
        if isinstance(document, dict) and part in document:
            document = document[part]
        elif isinstance(document, list) and _is_index(part) and int(part) < len(document):
            document = document[int(part)]
        else:
            return MISSING
    return document


def differences(before: Json, after: Json, path: Path = ()) -> Iterator[Change]:
    """The changes that lead from one value to the other when they are made in this order.

    Objects are compared member by member. A list that only grew or shrank at its end changes element by
    element (the last one goes first); any other list is replaced whole.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in after:
                yield Change((*path, key), before[key], MISSING)
            elif key not in before:
                yield Change((*path, key), MISSING, after[key])
            else:
                yield from differences(before[key], after[key], (*path, key))
    elif not is_same(before, after):
        if isinstance(before, list) and isinstance(after, list) and _share_start(before, after):
            for index in range(len(before), len(after)):
                yield Change((*path, str(index)), MISSING, after[index])
            for index in reversed(range(len(after), len(before))):
                yield Change((*path, str(index)), before[index], MISSING)
        else:
            yield Change(path, before, after)


def difference_steps(before: JsonObject, after: JsonObject) -> Steps[list[Change]]:
    """The differences of two states, with a pause after every few entries."""
    changes: list[Change] = []
    for key in sorted(before.keys() | after.keys()):
        if key not in SURFACES:
            some = {name: {key: state[key]} for name, state in (("b", before), ("a", after)) if key in state}
            changes += differences(some.get("b", {}), some.get("a", {}))
            continue
        for count, entry in enumerate(sorted(before[key].keys() | after[key].keys())):
            old = {entry: before[key][entry]} if entry in before[key] else {}
            new = {entry: after[key][entry]} if entry in after[key] else {}
            changes += differences(old, new, (key,))
            if count % _ENTRIES_PER_STEP == 0:
                yield
    return changes


def is_same(one: Json, other: Json) -> bool:
    """Whether two values have the same canonical text; to Python 1, 1.0 and True are equal, here not."""
    if one.__class__ is not other.__class__:
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and _share_start(one, other)
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)


def noted_event_id(change: Change) -> int | None:
    """The event of a change that carries its own: lists of payload references only ever grow."""
    match change.path:
        case ("execution", "payload_refs", _) | ("business_objects", _, "payload_refs", _):
            pass
        case _:
            return None
    entry = change.before if isinstance(change.after, Missing) else change.after
    return entry["event_id"] if isinstance(entry, dict) else None


class Blame:
    """Goes on with a fold event by event and tells when the value at a watched path changed."""

    def __init__(self, fold: Fold, paths: Iterable[Path]) -> None:
        self._fold = fold
        self._always: list[Path] = []
        self._by_surface: dict[str, list[Path]] = {}
        self._by_entry: dict[tuple[str, str], list[Path]] = {}
        self._texts: dict[Path, bytes | None] = {}
        for path in paths:
            self._watch(path)
        self._touched: set[tuple[str, str]] = set()
        for surface in SURFACES:
            fold.state[surface] = _Recording(fold.state[surface], surface, self._touched)

    def apply(self, events: Iterable[tuple[Any, ...]]) -> Iterator[Cause]:
        for event in events:
            self._touched.clear()
            self._fold.apply((event,))
            for path in self._affected():
                text = self._text(path)
                if text != self._texts[path]:
                    self._texts[path] = text
                    yield Cause(path, event[0], event[1] or "", text)

    def _watch(self, path: Path) -> None:
        self._texts[path] = self._text(path)
        if not path or path[0] not in SURFACES:
            self._always.append(path)
        elif len(path) == 1:
            self._by_surface.setdefault(path[0], []).append(path)
        else:
            self._by_entry.setdefault((path[0], path[1]), []).append(path)

    def _affected(self) -> Iterator[Path]:
        yield from self._always
        for surface in {surface for surface, _ in self._touched}:
            yield from self._by_surface.get(surface, ())
        for entry in self._touched:
            yield from self._by_entry.get(entry, ())

    def _text(self, path: Path) -> bytes | None:
        value = lookup(self._fold.state, path)
        return None if isinstance(value, Missing) else canonical_json(value)


class _Recording(dict[str, JsonObject]):
    """A surface that notes which entries are asked for: the fold asks for an entry before it touches it."""

    def __init__(
        self, entries: Mapping[str, JsonObject], surface: str, touched: set[tuple[str, str]]
    ) -> None:
        super().__init__(entries)
        self._surface = surface
        self._touched = touched

    def get(self, key: str, default: Any = None) -> Any:
        self._touched.add((self._surface, key))
        return super().get(key, default)


def _share_start(one: list[Json], other: list[Json]) -> bool:
    return all(is_same(left, right) for left, right in zip(one, other, strict=False))


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and (part == "0" or part[0] != "0")
