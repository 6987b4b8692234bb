"""A stored state: how it is written down, and whether a fold may go on from it.

A snapshot row holds the state of an execution under the union rules with its checksum, and what belongs to it under a
seal. JSONB keeps no order of keys, and the order in which ids were first touched can decide a checksum, so the order is
kept beside the state where they differ. It also makes integers of very large floats; the text of a state that has one
is kept as it was hashed. A seed is used only if it proves to be what we would have folded ourselves.

A row holds one state whole, its document, and a later state as what it has gained since: a few new events then cost a
few entries, written and hashed, instead of the whole state. The document is proven by its checksum and the gains by the
seal, so together they prove the later state. Who knows the document alone reads an older state that is right as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from noetl_grpc.core.canonical import JsonObject, canonical_json, contains_float, sha256_hex
from noetl_grpc.core.checksums import ALGORITHM, Hashed, Steps, hash_state
from noetl_grpc.core.decode import decode_object
from noetl_grpc.core.fold import CHECKSUM_KEYS, FOLD_VERSION, SURFACES, Fold
from noetl_grpc.core.gains import bring_forward, gains_since
from noetl_grpc.core.numbers import FoldWarning
from noetl_grpc.core.rules import FoldRules

AGGREGATE_TYPE = "replay_state"
RULES = FoldRules.UNION
#: The document is written anew when what is kept beside it is half as large, or all that was ever written there is this
#: many times as large: the one keeps reading cheap, the other writing, however large the state is.
DOCUMENTS_BESIDE_MAX = 4


class SeedOutcome(StrEnum):
    """What became of a stored snapshot when a fold looked for one; the label of its metric."""

    USED = "used"
    ABSENT = "absent"
    TAMPERED = "tampered"
    FOLD_VERSION = "fold_version"
    REGISTRY_DIGEST = "registry_digest"
    STRAGGLER = "straggler"


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A row as it is stored; nothing of it is believed yet."""

    execution_id: int
    #: The document's, as its checksum.
    version: int
    #: None in a row that is to be stored around the document that is there.
    snapshot_json: str | None
    checksum: str
    meta_json: str


@dataclass(frozen=True, slots=True)
class Document:
    """The state that a row holds whole."""

    version: int
    checksum: str
    #: 0 if it can't be gone on from, because only its text keeps it as it was hashed.
    text_bytes: int
    #: How much was written beside it so far.
    beside_bytes: int = 0

    def beside(self, gains_bytes: int) -> Document | None:
        """The document with so much beside it, or None where it is to be written anew."""
        beside_bytes = self.beside_bytes + gains_bytes
        if 2 * gains_bytes > self.text_bytes or beside_bytes > DOCUMENTS_BESIDE_MAX * self.text_bytes:
            return None
        return Document(self.version, self.checksum, self.text_bytes, beside_bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of our fold version, proven or just folded."""

    execution_id: int
    #: Highest event id folded.
    version: int
    event_count: int
    #: Over all of the state; None where it is kept beside a document and nobody has asked yet, see `checksum_of`.
    checksum: str | None
    #: The database snapshot it was folded from; None where the log has no xact_id.
    log_snapshot: str | None
    rules: str
    registry_digest: str
    state: JsonObject
    #: Whether there may be a float in it or in its document.
    holds_float: bool
    warnings: Sequence[FoldWarning]
    warnings_left_out: int
    #: What its row holds whole: this state, or the one that it is kept beside.
    document: Document


@dataclass(frozen=True, slots=True)
class Folded:
    """A snapshot to be stored."""

    snapshot: Snapshot
    #: The state, or what it has gained since the document that it is kept beside.
    text: bytes
    is_whole: bool

    @property
    def text_bytes(self) -> int:
        """About what the state weighs."""
        return len(self.text) + (0 if self.is_whole else self.snapshot.document.text_bytes)


def aggregate_id(execution_id: int) -> str:
    """The key of an execution's snapshot, as NoETL's own servers write it."""
    return f"execution/{execution_id}/all"


def folded_of(fold: Fold, *, log_snapshot: str | None, since: Snapshot | None = None) -> Steps[Folded]:
    """What a finished fold leaves to be stored: as little of it as `since`, which it went on from, allows."""
    may_hold_float = True
    if since is not None:
        gained = gains_since(fold.state, since.document.version)
        may_hold_float = since.holds_float or contains_float(gained)
        gains = canonical_json(gained, holds_float=may_hold_float)
        document = since.document.beside(len(gains))
        if document is not None:
            return Folded(
                _snapshot_of(fold, log_snapshot, None, may_hold_float, document), gains, is_whole=False
            )
    hashed = yield from hash_state(fold.state, may_hold_float=may_hold_float)
    document = _document_of(fold.state, hashed)
    snapshot = _snapshot_of(fold, log_snapshot, hashed.checksum, hashed.holds_float, document)
    return Folded(snapshot, hashed.text, is_whole=True)


def _snapshot_of(
    fold: Fold, log_snapshot: str | None, checksum: str | None, holds_float: bool, document: Document
) -> Snapshot:
    state = fold.state
    return Snapshot(
        execution_id=state["execution_id"],
        version=_version_of(state),
        event_count=state["event_count"],
        checksum=checksum,
        log_snapshot=log_snapshot,
        rules=RULES.value.name,
        registry_digest=state["upcaster_registry_digest"],
        state=state,
        holds_float=holds_float,
        warnings=fold.noted_warnings,
        warnings_left_out=fold.warnings_left_out,
        document=document,
    )


def _document_of(state: JsonObject, hashed: Hashed) -> Document:
    keeps_text = hashed.holds_float and _has_odd_number(hashed.text)
    return Document(_version_of(state), hashed.checksum, 0 if keeps_text else len(hashed.text))


def _version_of(state: JsonObject) -> int:
    return state["last_event_id"] or 0


def whole(folded: Folded) -> Steps[Folded]:
    """The same with the state as its document, where the one that it was to be kept beside is gone."""
    snapshot = folded.snapshot
    hashed = yield from hash_state(snapshot.state, may_hold_float=snapshot.holds_float)
    document = _document_of(snapshot.state, hashed)
    return Folded(replace(snapshot, checksum=hashed.checksum, document=document), hashed.text, is_whole=True)


def checksum_of(snapshot: Snapshot) -> Steps[str]:
    """Over all of the state."""
    if snapshot.checksum is not None:
        return snapshot.checksum
    return (yield from hash_state(snapshot.state, may_hold_float=snapshot.holds_float)).checksum


def write(folded: Folded) -> SnapshotRow:
    """The row of a state; the checksums of its surfaces are left to whoever reads it."""
    snapshot = folded.snapshot
    state, document = snapshot.state, snapshot.document
    meta: dict[str, Any] = {
        "projector": "noetl_grpc",
        "fold_version": FOLD_VERSION,
        "rules": snapshot.rules,
        "event_count": snapshot.event_count,
        "log_snapshot": snapshot.log_snapshot,
        "holds_float": snapshot.holds_float,
    }
    snapshot_json = None
    if folded.is_whole:
        state_json, end = folded.text[:-1].decode(), f'"checksum_algorithm":"{ALGORITHM}"}}'
        snapshot_json = f'{state_json},"checksum":"{document.checksum}",{end}'
    else:
        meta["version"], meta["gains"] = snapshot.version, folded.text.decode()
        meta["beside_bytes"] = document.beside_bytes
    keeps_text = not document.text_bytes
    if keeps_text:
        meta["text"] = folded.text.decode()
    order = {
        surface: list(state[surface])
        for surface in SURFACES
        if keeps_text or not _is_in_jsonb_order(state[surface])
    }
    if order:
        meta["order"] = order
    if snapshot.warnings:
        meta["warnings"] = [[item.event_id, item.path, item.problem] for item in snapshot.warnings]
        meta["warnings_left_out"] = snapshot.warnings_left_out
    told = canonical_json(meta, holds_float=False)
    return SnapshotRow(
        execution_id=snapshot.execution_id,
        version=document.version,
        snapshot_json=snapshot_json,
        checksum=document.checksum,
        meta_json=f'{told[:-1].decode()},"sha256":"{_seal(document.checksum, told)}"}}',
    )


def read(row: SnapshotRow) -> Snapshot | SeedOutcome:
    """The snapshot of a row, or why it can't be one of ours."""
    meta, stored = decode_object(row.meta_json), decode_object(row.snapshot_json or "")
    if meta is None or stored is None:
        return SeedOutcome.TAMPERED
    if meta.get("projector") != "noetl_grpc" or meta.get("fold_version") != FOLD_VERSION:
        return SeedOutcome.FOLD_VERSION
    if meta.pop("sha256", None) != _seal(row.checksum, canonical_json(meta, holds_float=False)):
        return SeedOutcome.TAMPERED
    # What the seal covers is as we wrote it; the document proves itself by its checksum.
    try:
        state = _document_state(stored, meta)
        text = canonical_json(state, holds_float=meta["holds_float"])
        if not sha256_hex(text) == stored["checksum"] == row.checksum or _version_of(state) != row.version:
            return SeedOutcome.TAMPERED
        if "gains" in meta:
            state = _later_state(state, meta)
        if (state["execution_id"], state["event_count"]) != (row.execution_id, meta["event_count"]):
            return SeedOutcome.TAMPERED
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return SeedOutcome.TAMPERED
    return Snapshot(
        execution_id=row.execution_id,
        version=_version_of(state),
        event_count=meta["event_count"],
        checksum=None if "gains" in meta else row.checksum,
        log_snapshot=meta["log_snapshot"],
        rules=meta["rules"],
        registry_digest=state["upcaster_registry_digest"],
        state=state,
        holds_float=meta["holds_float"],
        warnings=[FoldWarning(*item) for item in meta.get("warnings", ())],
        warnings_left_out=meta.get("warnings_left_out", 0),
        document=Document(
            row.version,
            row.checksum,
            0 if "text" in meta else len(row.snapshot_json or ""),
            meta.get("beside_bytes", 0),
        ),
    )


def _document_state(stored: JsonObject, meta: JsonObject) -> JsonObject:
    """The document as it was before it went through JSONB; the order of its surfaces is that of the latest state."""
    state = {key: value for key, value in stored.items() if key not in CHECKSUM_KEYS}
    if "text" in meta:
        told, state = state, json.loads(meta["text"])
        if not _agree(told, state):
            raise ValueError("the stored state is not that of the text")
    for surface, keys in meta.get("order", {}).items():
        entries = state[surface]
        state[surface] = {key: entries[key] for key in keys if key in entries}
    return state


def _later_state(state: JsonObject, meta: JsonObject) -> JsonObject:
    gains = decode_object(meta["gains"])
    if gains is None:
        raise ValueError("what the state has gained is no object")
    bring_forward(state, gains)
    orders = meta.get("order", {})
    for surface in SURFACES:
        if surface in gains:
            keys = orders.get(surface) or _jsonb_order(state[surface])
            state[surface] = {key: state[surface][key] for key in keys}
    return state


def _agree(told: Any, meant: Any) -> bool:
    """Whether two documents are the same but for the form of their floats."""
    if isinstance(meant, dict):
        return (
            isinstance(told, dict)
            and told.keys() == meant.keys()
            and all(_agree(told[key], value) for key, value in meant.items())
        )
    if isinstance(meant, list):
        return isinstance(told, list) and len(told) == len(meant) and all(map(_agree, told, meant))
    if isinstance(meant, float):
        return isinstance(told, int | float) and float(told) == meant
    return type(told) is type(meant) and bool(told == meant)


def _seal(checksum: str, meta: bytes) -> str:
    return sha256_hex(checksum.encode() + meta)


def usability(snapshot: Snapshot, *, registry_digest: str, rules: FoldRules) -> SeedOutcome:
    """Whether it was folded as we would fold it."""
    if snapshot.rules != rules.value.name:
        return SeedOutcome.FOLD_VERSION
    if snapshot.registry_digest != registry_digest:
        return SeedOutcome.REGISTRY_DIGEST
    return SeedOutcome.USED


def _has_odd_number(text: bytes) -> bool:
    """Whether JSONB may give a number back as another one: 1e+16 as an integer, -0.0 without its sign."""
    return b"e+" in text or b"-0.0" in text


def _is_in_jsonb_order(surface: Mapping[str, Any]) -> bool:
    return len(surface) < 2 or list(surface) == _jsonb_order(surface)


def _jsonb_order(surface: Iterable[str]) -> list[str]:
    keys = sorted(map(str.encode, surface))
    keys.sort(key=len)
    return [*map(bytes.decode, keys)]
