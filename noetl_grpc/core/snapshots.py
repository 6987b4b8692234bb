"""A stored state: how it is written down, and whether a fold may go on from it.

A snapshot row holds the state of an execution under the union rules, sealed with a digest of the whole row. JSONB
keeps no order of keys, and the order in which ids were first touched can decide a checksum, so the order is kept
beside the state where they differ. It also makes integers of very large floats; the text of a state that has one is
kept as it was hashed. A seed is used only if it proves to be what we would have folded ourselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import orjson

from noetl_grpc.core.canonical import JsonObject
from noetl_grpc.core.checksums import ALGORITHM, Steps, state_checksum
from noetl_grpc.core.decode import decode_column
from noetl_grpc.core.fold import CHECKSUM_KEYS, FOLD_VERSION, SURFACES, Fold
from noetl_grpc.core.following import is_snapshot
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
    #: Without the seal.
    meta_json: str
    #: Digest of both documents as the database prints them, which it adds when it stores them.
    seal: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row that is sealed, of our shape and our fold version."""

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
    checksum: str
    #: The text that was hashed.
    text: bytes
    log_snapshot: str | None
    warnings: Sequence[FoldWarning]
    warnings_left_out: int

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
    checksum, text = yield from state_checksum(fold.state)
    return Folded(
        execution_id=fold.state["execution_id"],
        state=fold.state,
        checksum=checksum,
        text=text,
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
    }
    keeps_text = _has_odd_number(folded.text)
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
    return SnapshotRow(
        execution_id=folded.execution_id,
        version=folded.version,
        snapshot_json=finished.decode(),
        checksum=folded.checksum,
        meta_json=orjson.dumps(meta).decode(),
    )


def read(row: SnapshotRow) -> Snapshot | SeedOutcome:
    """The snapshot of a row, or why it can't be one of ours."""
    meta, state = (_object(text) for text in (row.meta_json, row.snapshot_json))
    if meta is None or state is None:
        return SeedOutcome.TAMPERED
    if meta.get("projector") != "noetl_grpc" or meta.get("fold_version") != FOLD_VERSION:
        return SeedOutcome.FOLD_VERSION
    sealed = hashlib.sha256(f"{row.snapshot_json}\n{row.meta_json}".encode()).hexdigest()
    event_count, log_snapshot = meta.get("event_count"), meta.get("log_snapshot")
    if (
        sealed != row.seal
        or not isinstance(event_count, int)
        or state.get("checksum") != row.checksum
        or state.get("event_count") != event_count
        or state.get("last_event_id") != row.version
        or state.get("execution_id") != row.execution_id
        or not (log_snapshot is None or (isinstance(log_snapshot, str) and is_snapshot(log_snapshot)))
        or not all(isinstance(state.get(surface), dict) for surface in SURFACES)
        or not isinstance(state.get("execution"), dict)
    ):
        return SeedOutcome.TAMPERED
    try:
        if isinstance(meta.get("text"), str):
            state = json.loads(meta["text"])
        kept = {key: value for key, value in state.items() if key not in CHECKSUM_KEYS}
        for surface, keys in meta.get("order", {}).items():
            kept[surface] = {key: kept[surface][key] for key in keys} | kept[surface]
        warnings = tuple(
            FoldWarning(int(item[0]), str(item[1]), str(item[2])) for item in meta.get("warnings", ())
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return SeedOutcome.TAMPERED
    return Snapshot(
        execution_id=row.execution_id,
        version=row.version,
        event_count=event_count,
        checksum=row.checksum,
        log_snapshot=log_snapshot,
        fold_version=FOLD_VERSION,
        rules=str(meta.get("rules")),
        registry_digest=str(meta.get("upcaster_registry_digest")),
        state=kept,
        warnings=warnings,
        warnings_left_out=int(meta.get("warnings_left_out") or 0),
    )


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


def _object(text: str) -> dict[str, Any] | None:
    problems: list[str] = []
    (value,) = decode_column([text], lambda _, problem: problems.append(problem))
    return value if isinstance(value, dict) and not problems else None


def _is_in_jsonb_order(surface: Mapping[str, Any]) -> bool:
    keys = [(len(key.encode()), key.encode()) for key in surface]
    return all(left < right for left, right in pairwise(keys))
