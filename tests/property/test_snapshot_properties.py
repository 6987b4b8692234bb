"""A stored state, whole or as what it has gained since, is the state: through JSONB, at any cut, however often."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from noetl_grpc.core import snapshots
from noetl_grpc.core.canonical import copy_json
from noetl_grpc.core.checksums import finish
from noetl_grpc.core.fold import CHECKSUM_KEYS, Fold, FoldEvent, Identity, in_order
from noetl_grpc.core.gains import bring_forward, gains_since
from noetl_grpc.core.snapshots import DOCUMENTS_BESIDE_MAX, Folded, SeedOutcome, Snapshot, SnapshotRow
from tests.logs import Event, checksums, logs

HERE = Identity(1, upcaster_registry_digest="d")

few = settings(max_examples=60, deadline=None)


def through_jsonb(text: str) -> str:
    """What PostgreSQL gives back: keys by length, then by bytes; no large exponents, and zero without a sign."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
            return {key: ordered(value[key]) for key in keys}
        return [*map(ordered, value)] if isinstance(value, list) else value

    def number(text: str) -> Any:
        value = float(text)
        return int(value) if "e+" in text else value or 0.0

    return json.dumps(ordered(json.loads(text, parse_float=number)))


def stored(row: SnapshotRow, before: SnapshotRow | None) -> SnapshotRow:
    """The row as it is read after it was saved over the one before."""
    document = row.snapshot_json
    if document is None:
        assert before is not None
        assert (row.version, row.checksum) == (before.version, before.checksum)
        document = before.snapshot_json
    assert document is not None
    return replace(row, snapshot_json=through_jsonb(document), meta_json=through_jsonb(row.meta_json))


def read(row: SnapshotRow) -> Snapshot:
    snapshot = snapshots.read(row)
    assert isinstance(snapshot, Snapshot)
    return snapshot


def saved(fold: Fold, *, since: Snapshot | None = None) -> Folded:
    return finish(snapshots.folded_of(fold, log_snapshot="1:2:", since=since))


def cuts_of(log: list[Event], data: st.DataObject) -> list[list[Event]]:
    """The log in a few parts; equal ids stay together, as a log holds none twice."""
    ids = sorted({event["event_id"] for event in log})
    places = sorted(data.draw(st.lists(st.sampled_from(ids), max_size=6, unique=True))) if ids else []
    bounds = [min(ids, default=0) - 1, *places, max(ids, default=0)]
    return [[event for event in log if low < event["event_id"] <= high] for low, high in pairwise(bounds)]


@few
@given(logs(), st.data())
def test_going_on_from_what_is_stored_equals_folding_all(log: list[Event], data: st.DataObject) -> None:
    row: SnapshotRow | None = None
    snapshot: Snapshot | None = None
    done: list[Event] = []
    for part in cuts_of(log, data):
        if not part:
            continue
        done += part
        fold = Fold(HERE, snapshots.RULES, snapshot.state if snapshot else None)
        fold.apply(in_order(map(FoldEvent.of, part)))
        folded = saved(fold, since=snapshot)
        row = stored(snapshots.write(folded), row)
        snapshot = read(row)

        whole = Fold(HERE, snapshots.RULES)
        whole.apply(in_order(map(FoldEvent.of, done)))
        assert finish(snapshots.checksum_of(snapshot)) == checksums(whole.state).value
        assert checksums(snapshot.state) == checksums(whole.state)
        assert [*map(list, surfaces(snapshot.state))] == [*map(list, surfaces(whole.state))]
        assert snapshot.document == replace(folded.snapshot.document, text_bytes=snapshot.document.text_bytes)


def surfaces(state: Any) -> list[Any]:
    return [state[name] for name in ("stages", "frames", "commands", "business_objects", "loops")]


@few
@given(logs(), st.data())
def test_gains_bring_the_older_state_forward(log: list[Event], data: st.DataObject) -> None:
    for first in cuts_of(log, data)[:1]:
        fold = Fold(HERE, snapshots.RULES)
        fold.apply(in_order(map(FoldEvent.of, first)))
        older = copy_json(fold.state)
        version = older["last_event_id"] or -1

        fold.apply(in_order(map(FoldEvent.of, [event for event in log if event["event_id"] > version])))
        bring_forward(older, gains_since(fold.state, version))

        assert older == fold.state


def test_the_document_is_written_anew_before_what_stands_beside_it_grows_large() -> None:
    """Events that all touch the same entry, and events that each make a new one."""
    for entries in (1, 10_000):
        snapshot: Snapshot | None = None
        row: SnapshotRow | None = None
        documents: list[int] = []
        written = 0
        for event_id in range(1, 401):
            fold = Fold(HERE, snapshots.RULES, snapshot.state if snapshot else None)
            metas = [{"command_id": f"c{number}"} for number in range(20)] if event_id == 1 else []
            metas.append({"command_id": f"n{event_id % entries}"})
            fold.apply(
                [FoldEvent(event_id, "command.started", "RUNNING", "step", meta, None) for meta in metas]
            )
            new = snapshots.write(saved(fold, since=snapshot))
            if new.snapshot_json:
                documents.append(event_id)
            written += len(new.snapshot_json or "") + len(new.meta_json)
            row = stored(new, row)
            snapshot = read(row)
            assert row.snapshot_json
            assert len(new.meta_json) < 0.75 * len(row.snapshot_json)
            assert snapshot.document.beside_bytes <= DOCUMENTS_BESIDE_MAX * len(row.snapshot_json)
        assert 1 < len(documents) < 40
        assert row
        assert row.snapshot_json
        assert written < 400 * len(row.snapshot_json) / 3


def test_a_row_that_was_changed_proves_nothing() -> None:
    fold = Fold(HERE, snapshots.RULES)
    fold.apply(
        [
            FoldEvent(n, "command.started", "RUNNING", "step", {"command_id": f"c{n}"}, None)
            for n in range(1, 9)
        ]
    )
    first = stored(snapshots.write(saved(fold)), None)
    snapshot = read(first)
    fold.apply([FoldEvent(9, "command.completed", "COMPLETED", "step", {"command_id": "c3"}, None)])
    row = stored(snapshots.write(saved(fold, since=snapshot)), first)
    meta, document = json.loads(row.meta_json), json.loads(row.snapshot_json or "")
    assert read(row).version == 9
    assert row.version == 8

    # What the latest state no longer shows counts as well: others read the document alone.
    overwritten = {**document, "commands": {**document["commands"], "c3": {}}}
    for changed in (
        replace(row, version=9),
        replace(row, checksum=row.checksum[::-1]),
        replace(row, snapshot_json=json.dumps(overwritten)),
        replace(row, snapshot_json=json.dumps({**document, "checksum": row.checksum[::-1]})),
        *(
            replace(row, meta_json=json.dumps({**meta, key: value}))
            for key, value in (("gains", "{}"), ("gains", 7), ("version", 8), ("event_count", 8))
        ),
        *(
            replace(row, meta_json=json.dumps({name: value for name, value in meta.items() if name != key}))
            for key in ("gains", "version", "beside_bytes", "sha256")
        ),
    ):
        assert snapshots.read(changed) is SeedOutcome.TAMPERED
    assert {*CHECKSUM_KEYS} & {*document} == {"checksum", "checksum_algorithm"}
