"""A stored state: how it is written down, and whether a fold may go on from it.

A snapshot row holds the state of an execution under the union rules with its checksum, and what belongs to it under a
seal. JSONB keeps no order of keys, and the order in which ids were first touched can decide a checksum, so the order is
kept beside the state where they differ. It also makes integers of very large floats; the text of a state that has one
is kept as it was hashed. A seed is used only if it proves to be what we would have folded ourselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from noetl_grpc.core.canonical import JsonObject, canonical_json, sha256_hex
from noetl_grpc.core.checksums import ALGORITHM, Hashed, Steps, hash_state
from noetl_grpc.core.decode import decode_object
from noetl_grpc.core.fold import CHECKSUM_KEYS, FOLD_VERSION, SURFACES, Fold
from noetl_grpc.core.numbers import FoldWarning
from noetl_grpc.core.rules import FoldRules

AGGREGATE_TYPE = "replay_state"
RULES = FoldRules.UNION


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
    version: int
    snapshot_json: str
    checksum: str
    meta_json: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row that is what it says, of our shape and our fold version."""

    execution_id: int
    #: Highest event id folded.
    version: int
    event_count: int
    checksum: str
    #: The database snapshot it was folded from; None where the log has no xact_id.
    log_snapshot: str | None
    fold_version: str
    rules: str
    registry_digest: str
    state: JsonObject
    warnings: tuple[FoldWarning, ...]
    warnings_left_out: int


@dataclass(frozen=True, slots=True)
class Folded:
    """A state to be stored."""

    execution_id: int
    state: JsonObject
    hashed: Hashed
    log_snapshot: str | None
    warnings: Sequence[FoldWarning]
    warnings_left_out: int

    @property
    def checksum(self) -> str:
        """Over all of the state."""
        return self.hashed.checksum

    @property
    def text(self) -> bytes:
        """What was hashed."""
        return self.hashed.text

    @property
    def version(self) -> int:
        """The highest event id folded."""
        return int(self.state["last_event_id"] or 0)

    @property
    def event_count(self) -> int:
        """How many events the state covers."""
        return int(self.state["event_count"])


def aggregate_id(execution_id: int) -> str:
    """The key of an execution's snapshot, as NoETL's own servers write it."""
    return f"execution/{execution_id}/all"


def execution_id_of(aggregate: str) -> int | None:
    """The execution of such a key; None for a key of somebody else."""
    parts = aggregate.split("/")
    if len(parts) != 3 or parts[0] != "execution" or parts[2] != "all" or not parts[1].isdecimal():
        return None
    return int(parts[1])


def folded_of(fold: Fold, *, log_snapshot: str | None) -> Steps[Folded]:
    """What a finished fold leaves to be stored."""
    return Folded(
        execution_id=fold.state["execution_id"],
        state=fold.state,
        hashed=(yield from hash_state(fold.state)),
        log_snapshot=log_snapshot,
        warnings=fold.noted_warnings,
        warnings_left_out=fold.warnings_left_out,
    )


def write(folded: Folded) -> SnapshotRow:
    """The row of a state; the checksums of its surfaces are left to whoever reads it."""
    state = folded.state
    finished = b'%s,"checksum":"%s","checksum_algorithm":"%s"}' % (
        folded.text[:-1],
        folded.checksum.encode(),
        ALGORITHM.encode(),
    )
    meta: dict[str, Any] = {
        "projector": "noetl_grpc",
        "fold_version": FOLD_VERSION,
        "rules": RULES.value.name,
        "upcaster_registry_digest": state["upcaster_registry_digest"],
        "event_count": folded.event_count,
        "log_snapshot": folded.log_snapshot,
        "holds_float": folded.hashed.holds_float,
    }
    keeps_text = folded.hashed.holds_float and _has_odd_number(folded.text)
    if keeps_text:
        meta["text"] = folded.text.decode()
    order = {
        surface: list(state[surface])
        for surface in SURFACES
        if keeps_text or not _is_in_jsonb_order(state[surface])
    }
    if order:
        meta["order"] = order
    if folded.warnings:
        meta["warnings"] = [[item.event_id, item.path, item.problem] for item in folded.warnings]
        meta["warnings_left_out"] = folded.warnings_left_out
    told = canonical_json(meta, holds_float=False)
    return SnapshotRow(
        execution_id=folded.execution_id,
        version=folded.version,
        snapshot_json=finished.decode(),
        checksum=folded.checksum,
        meta_json=f'{told[:-1].decode()},"sha256":"{_seal(folded.checksum, told)}"}}',
    )


def snapshot_of(folded: Folded) -> Snapshot:
    """What reading the row of a state would give; they share it."""
    return Snapshot(
        execution_id=folded.execution_id,
        version=folded.version,
        event_count=folded.event_count,
        checksum=folded.checksum,
        log_snapshot=folded.log_snapshot,
        fold_version=FOLD_VERSION,
        rules=RULES.value.name,
        registry_digest=str(folded.state["upcaster_registry_digest"]),
        state=folded.state,
        warnings=tuple(folded.warnings),
        warnings_left_out=folded.warnings_left_out,
    )


def read(row: SnapshotRow) -> Snapshot | SeedOutcome:
    """The snapshot of a row, or why it can't be one of ours."""
    meta, stored = decode_object(row.meta_json), decode_object(row.snapshot_json)
    if meta is None or stored is None:
        return SeedOutcome.TAMPERED
    if meta.get("projector") != "noetl_grpc" or meta.get("fold_version") != FOLD_VERSION:
        return SeedOutcome.FOLD_VERSION
    if meta.pop("sha256", None) != _seal(row.checksum, canonical_json(meta, holds_float=False)):
        return SeedOutcome.TAMPERED
    # What the seal covers is as we wrote it; the state proves itself by its checksum.
    try:
        state = _restored(stored, meta)
        checksum = sha256_hex(canonical_json(state, holds_float=meta["holds_float"]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return SeedOutcome.TAMPERED
    if (
        not checksum == stored.get("checksum") == row.checksum
        or state["last_event_id"] != row.version
        or state["execution_id"] != row.execution_id
    ):
        return SeedOutcome.TAMPERED
    return Snapshot(
        execution_id=row.execution_id,
        version=row.version,
        event_count=meta["event_count"],
        checksum=row.checksum,
        log_snapshot=meta["log_snapshot"],
        fold_version=FOLD_VERSION,
        rules=meta["rules"],
        registry_digest=str(meta["upcaster_registry_digest"]),
        state=state,
        warnings=tuple(FoldWarning(*item) for item in meta.get("warnings", ())),
        warnings_left_out=meta.get("warnings_left_out", 0),
    )


def _restored(stored: JsonObject, meta: JsonObject) -> JsonObject:
    """The state as it was before it went through JSONB."""
    state = {key: value for key, value in stored.items() if key not in CHECKSUM_KEYS}
    if "text" in meta:
        told, state = state, json.loads(meta["text"])
        if not _agree(told, state):
            raise ValueError("the stored state is not that of the text")
    for surface, keys in meta.get("order", {}).items():
        state[surface] = {key: state[surface][key] for key in keys} | state[surface]
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
    if len(surface) < 2:
        return True
    keys = [*map(str.encode, surface)]
    return keys == sorted(sorted(keys), key=len)
