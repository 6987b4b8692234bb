"""Event logs for tests of the fold: the vectors, the pinned examples, and random ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from noetl_grpc.core.checksums import Checksums, checksums_of, finish
from noetl_grpc.core.fold import Fold, Identity, fold
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.core.upcast import Registry

VECTORS = Path(__file__).parent / "vectors"
EMPTY_REGISTRY = Registry.of().digest

Event = dict[str, Any]


def vectors(name: str) -> Iterator[dict[str, Any]]:
    """Cases of one file: case, input, expected."""
    with (VECTORS / f"{name}.jsonl").open() as lines:
        for line in lines:
            yield json.loads(line)


def identity_of(log: Mapping[str, Any]) -> Identity:
    return Identity(
        log["execution_id"],
        log.get("tenant_id", "default"),
        log.get("organization_id", "default"),
        upcaster_registry_digest=EMPTY_REGISTRY,
    )


def event(event_id: Any, event_type: str | None = "note", /, **columns: Any) -> Event:
    return {"event_id": event_id, "event_type": event_type, **columns}


def fold_events(*events: Event, rules: FoldRules = FoldRules.UNION) -> Fold:
    return fold(events, Identity(1, upcaster_registry_digest=EMPTY_REGISTRY), rules)


def checksums(state: Mapping[str, Any]) -> Checksums:
    return finish(checksums_of(state, keep_text=True))


GOLDEN = {
    "execution_id": 9001,
    "events": [
        event(1, "playbook.initialized", status="RUNNING", node_name="start"),
        event(
            2,
            "stage.opened",
            aggregate_type="stage",
            aggregate_id="stage/10",
            node_name="fetch_patients",
            meta={"kind": "loop", "step_name": "fetch_patients"},
        ),
        event(
            3,
            "frame.dispatched",
            aggregate_type="frame",
            aggregate_id="frame/100",
            meta={"stage_id": "10", "attempt": 1},
        ),
        event(
            4,
            "frame.started",
            aggregate_type="frame",
            aggregate_id="frame/100",
            status="RUNNING",
            meta={"stage_id": "10"},
        ),
        event(
            5,
            "frame.committed",
            aggregate_type="frame",
            aggregate_id="frame/100",
            status="COMPLETED",
            payload_ref={
                "uri": "noetl://tenant/default/org/default/payloads/sha256/golden",
                "sha256": "golden",
                "media_type": "application/vnd.apache.arrow.stream",
            },
            meta={"stage_id": "10", "row_count": 50},
        ),
        event(
            6,
            "stage.closed",
            aggregate_type="stage",
            aggregate_id="stage/10",
            status="COMPLETED",
            meta={"stage_id": "10"},
        ),
        event(7, "playbook.completed", status="COMPLETED", node_name="end"),
    ],
}

NO_STAGES = "a6fe3f2921edcece5f4978137ccd3109d72e5d5411367c42f3bf629372187879"
NO_FRAMES = "2ac0a74c84218685193184e7b18963e5ff2b14ac42146d8b70282e7d6e23110f"
NO_COMMANDS = "a9c3a7631d2a488d1a25c667c554f206b08ddd4ed9f3f6b3c9a4bec2e7f3bd84"
NO_BUSINESS_OBJECTS = "ebbff5b72abdea9d0b0d43ec2d3886826f04b313f48535e210120869c16d1a13"
NO_LOOPS = "68c1d1020e5737344e10a59610494db939837977ba662211649a238d5d30561b"

GOLDEN_CHECKSUMS = {
    "checksum": "af23cf75931cf94a536184f58301592a2ee227cc52dadead2bf051cb100b85fb",
    "execution": "8b15e0b97eb3ee60e69d01229f250aa5347ca3322c7258586f4900d01c62c6f8",
    "stages": "8a97fc5a5d69672bc627c064c8c672b49814c6e64ace3096fe4f2fe144ad0cdc",
    "frames": "2ee5a2db92349c9546b04ad39ccbe52351f37e0de5b56532e7ebfb617ef645ec",
    "commands": NO_COMMANDS,
    "business_objects": NO_BUSINESS_OBJECTS,
    "loops": NO_LOOPS,
}


EVENT_TYPES = (
    "playbook.initialized",
    "playbook.completed",
    "playbook.failed",
    "playbook.cancelled",
    "playbook_completed",
    "execution.started",
    "execution.failed",
    "workflow.completed",
    "step.enter",
    "step_started",
    "command.issued",
    "command.claimed",
    "command.started",
    "command.completed",
    "command.failed",
    "command.heartbeat",
    "stage.opened",
    "stage.closed",
    "frame.dispatched",
    "frame.started",
    "frame.heartbeat",
    "frame.committed",
    "frame.failed",
    "frame.abandoned",
    "loop.done",
    "loop.shard.done",
    "loop.shard.failed",
    "call.done",
    "thing.created",
    "thing.updated",
    "thing.deleted",
    "note",
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, 1.0, 2.5, 1e-7, 12345678901234567890123]),
    st.sampled_from(["", "a", "b", "7", " 1_0 ", "5x", "é", "DELETED", "\x7f"]),
)
documents = st.dictionaries(st.sampled_from(["a", "b", "payload_refs", "x/y", "~"]), scalars, max_size=3)
lists = st.lists(st.integers(0, 2), max_size=3)
references = st.one_of(
    st.none(), scalars, st.fixed_dictionaries({"uri": st.sampled_from(["s3://a", "s3://b"])}), documents
)
business_objects = st.fixed_dictionaries(
    {"type": st.sampled_from(["t", "u"]), "id": st.integers(0, 2)},
    optional={
        "state": st.dictionaries(st.sampled_from("abc"), st.one_of(scalars, lists), max_size=2),
        "patch": st.dictionaries(st.sampled_from("abc"), st.one_of(scalars, lists), max_size=2),
        "version": scalars,
    },
)
metas = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "stage_id": scalars,
            "frame_id": st.integers(0, 2),
            "command_id": st.integers(0, 2),
            "loop_id": st.sampled_from(["l", "", None]),
            "loop_event_id": st.integers(0, 1),
            "business_object": business_objects,
            "row_count": scalars,
            "events_emitted": scalars,
            "attempt": scalars,
            "total": scalars,
            "collection_size": scalars,
            "cursor": documents,
            "locality": documents,
            "worker_id": scalars,
            "parent_frame_id": scalars,
            "kind": scalars,
        },
    ),
    scalars,
)


small_ids = st.sampled_from([None, None, 0, 1, 2])
columns = st.fixed_dictionaries(
    {
        "event_type": st.sampled_from([None, *EVENT_TYPES]),
        "status": st.sampled_from([None, "", "RUNNING", "COMPLETED", "success"]),
        "node_name": st.sampled_from([None, "", "n1", "n2"]),
        "meta": metas,
        "payload_ref": references,
        "stage_id": small_ids,
        "frame_id": small_ids,
        "command_id": small_ids,
        "worker_id": st.sampled_from([None, "w1"]),
        "aggregate_type": st.sampled_from([None, "stage", "frame", "business_object"]),
        "aggregate_id": st.sampled_from([None, "", "stage/5", "frame/6", "t/0", "business_object/t/1"]),
    }
)


def logs(max_size: int = 10) -> st.SearchStrategy[list[Event]]:
    """Events with distinct ids, as a database could hold them, in id order."""
    return st.lists(columns, max_size=max_size).map(
        lambda events: [{"event_id": 7 * index, **event} for index, event in enumerate(events, 1)]
    )
