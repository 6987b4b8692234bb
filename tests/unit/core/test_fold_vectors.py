"""States and checksums to the byte: what NoETL's Python server gives for the same logs."""

from typing import Any

import pytest

from noetl_grpc.core.fold import Identity, fold
from noetl_grpc.core.rules import FoldRules
from tests.logs import (
    EMPTY_REGISTRY,
    GOLDEN,
    GOLDEN_CHECKSUMS,
    NO_BUSINESS_OBJECTS,
    NO_COMMANDS,
    NO_FRAMES,
    NO_LOOPS,
    NO_STAGES,
    checksums,
    event,
    identity_of,
    vectors,
)

STRICT = FoldRules.PYTHON_4_26
UNION = FoldRules.UNION


def finished(log: dict[str, Any], rules: FoldRules = STRICT) -> dict[str, Any]:
    folded = fold(log["events"], identity_of(log), rules)
    hashes = checksums(folded.state)
    return {
        **folded.state,
        "checksum_algorithm": "sha256",
        "checksum": hashes.value,
        "projection_checksums": hashes.surfaces,
    }


@pytest.mark.parametrize(
    ("name", "rules", "count"),
    [
        ("replay-python-4.26", STRICT, 200),
        ("replay-python-4.26-edges", STRICT, 200),
        ("replay-union", UNION, 120),
    ],
)
def test_every_vector_gives_its_state_and_checksums(name: str, rules: FoldRules, count: int) -> None:
    cases = list(vectors(name))

    different = [case["case"] for case in cases if finished(case["input"], rules) != case["expected"]]

    assert different == []
    assert len(cases) == count


@pytest.mark.parametrize("rules", FoldRules)
def test_the_golden_log_has_its_pinned_checksums_under_both_rules(rules: FoldRules) -> None:
    state = finished(GOLDEN, rules)

    assert {"checksum": state["checksum"], **state["projection_checksums"]} == GOLDEN_CHECKSUMS
    assert state["execution"]["status"] == "COMPLETED"
    assert state["stages"]["10"]["closed_event_id"] == 6
    assert state["frames"]["100"]["row_count"] == 50


ADA = event(
    21,
    "patient.created",
    aggregate_type="business_object",
    aggregate_id="patient/p-1",
    status="ACTIVE",
    meta={"business_object": {"state": {"name": "Ada", "risk": "low"}, "version": 3}},
)
FRAME_42 = {"aggregate_type": "frame", "aggregate_id": "frame/42", "stage_id": 7}
STAGE_7 = {"aggregate_type": "stage", "aggregate_id": "stage/7", "node_name": "loop_step"}
COMMAND_900 = {"command_id": 900, "stage_id": 7}

F1 = [
    event(1, "playbook.initialized", status="RUNNING", node_name="start"),
    event(2, "frame.dispatched", **FRAME_42, command_id=99, meta={"attempt": 1}),
    event(
        3, "frame.abandoned", **FRAME_42, command_id=99, status="ABANDONED", meta={"reason": "lease_expired"}
    ),
    event(4, "frame.dispatched", **FRAME_42, command_id=100, meta={"attempt": 2}),
    event(
        5,
        "frame.committed",
        **FRAME_42,
        status="COMPLETED",
        payload_ref={"uri": "noetl://payloads/sha256/abc", "sha256": "abc"},
        meta={"row_count": 50},
    ),
    event(6, "stage.opened", **STAGE_7, status="OPEN", meta={"loop_event_id": "loop-1"}),
    event(7, "command.completed", node_name="loop_step", meta={"loop_id": "loop-1"}),
    event(8, "loop.done", node_name="loop_step", meta={"loop_id": "loop-1"}),
    event(
        9,
        "stage.closed",
        **STAGE_7,
        status="COMPLETED",
        meta={
            "loop_event_id": "loop-1",
            "frame_count": 1,
            "row_count": 50,
            "events_emitted": 3,
            "failed_count": 0,
        },
    ),
    event(10, "playbook.completed", status="COMPLETED", node_name="end"),
]
F2 = [
    event(
        11,
        "command.issued",
        **COMMAND_900,
        status="PENDING",
        node_name="fetch",
        meta={
            "parent_command_id": "899",
            "fanout_reduce": {
                "planner_version": 1,
                "fanout_step": "start",
                "fanout_targets": ["fetch", "transform"],
                "target_step": "fetch",
                "target_index": 0,
                "reduce_steps": ["join"],
            },
        },
    ),
    event(
        12,
        "command.claimed",
        **COMMAND_900,
        status="CLAIMED",
        worker_id="worker-a",
        meta={
            "worker_locator": "noetl://tenant/tenant-a/org/org-a/node/node-a/worker/worker-cpu-01",
            "locality": {"node_id": "node-a", "worker_pool": "worker-cpu-01"},
            "source_locality": {"node_id": "node-a"},
            "placement": {"distance": "node", "max_distance": "node", "within_max_distance": True},
        },
    ),
    event(13, "command.started", **COMMAND_900, status="RUNNING"),
    event(14, "command.completed", **COMMAND_900, status="COMPLETED"),
]
F3 = [
    ADA,
    event(
        22,
        "patient.updated",
        meta={
            "business_object_type": "patient",
            "business_object_id": "p-1",
            "business_object": {"patch": {"risk": "high"}},
        },
        payload_ref={
            "uri": "noetl://tenant/tenant-a/org/org-a/payloads/sha256/patient",
            "sha256": "patient",
        },
    ),
    event(
        23, "patient.deleted", aggregate_type="business_object", aggregate_id="business_object/patient/p-1"
    ),
]
F4_BASE = [
    event(1, "playbook.initialized", status="RUNNING", node_name="start"),
    event(
        2,
        "frame.committed",
        aggregate_type="frame",
        aggregate_id="frame/10",
        status="COMPLETED",
        meta={"row_count": 3},
    ),
]
F16 = [
    event(1, "execution.started", status="RUNNING"),
    event(
        2, "stage.opened", aggregate_type="stage", aggregate_id="stage/7", status="OPEN", node_name="stage"
    ),
    event(3, "frame.dispatched", aggregate_type="frame", aggregate_id="frame/9", stage_id=7, command_id=11),
    event(4, "command.claimed", command_id=11, stage_id=7, worker_id="worker-a"),
    event(
        5,
        "patient.created",
        aggregate_type="business_object",
        aggregate_id="patient/p-1",
        meta={"business_object": {"state": {"risk": "low"}}},
    ),
    event(6, "loop.done", node_name="stage", meta={"loop_id": "loop-1"}),
]


def tenant_a(digest: str | None) -> Identity:
    return Identity(123, "tenant-a", "org-a", "all", digest)


@pytest.mark.parametrize(
    ("events", "digest", "rules", "expected"),
    [
        (F1, "abc123", STRICT, "bd00955c90ccc3db764b84acec759c07f2b273fc06cea897be850397763c9fab"),
        (F2, None, STRICT, "30ed0b96c00c4b1e1154a7cc514beaa86f3f08e7dd849d87b16344d3b92f1f24"),
        (F2, None, UNION, "193066df10702c03dafb9d31c481800576a68bbe054bf83c9080e6eeb000c064"),
        (F3, None, STRICT, "301830b609e94ed9f097aa5498adf4e61e2ce20296676e744b8cc8c5b791858d"),
        (F4_BASE, "digest-a", STRICT, "009db422a7ac473e175acdf092112961c371cd6c6afbacaeed7b0f76fa12afff"),
        (F4_BASE, "digest-a", UNION, "20d0b4d148537d052a680db9216646db6e024d91d1feb9ec67a124421143c768"),
        (F16, None, STRICT, "65875ef19999cf4619f41f5d552a0dcb7c08bd766102be6dc8f46fd6f97f5706"),
    ],
    ids=["F1", "F2", "F2-union", "F3", "F4", "F4-union", "F16"],
)
def test_route_examples_have_their_recorded_checksum(
    events: list[dict[str, Any]], digest: str | None, rules: FoldRules, expected: str
) -> None:
    state = fold(events, tenant_a(digest), rules).state

    assert checksums(state).value == expected


def test_continuing_with_the_seed_inside_the_state_gives_the_recorded_checksum() -> None:
    base = fold(F4_BASE, tenant_a("digest-a"), STRICT).state
    seed = {
        "aggregate_id": "execution/123/all",
        "aggregate_type": "replay_state",
        "version": 2,
        "checksum": checksums(base).value,
        "meta": {"projection_code_version": "test"},
    }

    tail = [event(3, "playbook.completed", status="COMPLETED", node_name="end")]
    resumed = fold(tail, tenant_a("digest-a"), STRICT, base={**base, "replay_snapshot": seed})

    assert (
        checksums(resumed.state).value == "cfa2d7cf8c59a9fe2f09181daae723310529588b0e280ebe71aa937f9362d953"
    )
    assert resumed.state["event_count"] == 3


V2 = {
    "execution_id": 500,
    "tenant_id": "acme",
    "organization_id": "east",
    "events": [
        event(11, "execution.started", node_name="begin"),
        event(
            12,
            "call.done",
            node_name="fetch",
            result={
                "status": "ok",
                "reference": {
                    "ref": "noetl://execution/500/result/fetch/1",
                    "sha256": "cafe",
                    "row_count": 3,
                    "media_type": "application/json",
                },
            },
        ),
        event(13, "execution.completed"),
    ],
}
V3 = {
    "execution_id": 77,
    "events": [
        event(1, "playbook.initialized", node_name="start", status="RUNNING"),
        event(
            2,
            "stage.opened",
            stage_id=20,
            node_name="load",
            status="OPEN",
            meta={"kind": "loop", "parent_stage_id": 19, "loop_event_id": "lp-1", "total": 2},
        ),
        event(
            3,
            "command.issued",
            command_id=900,
            stage_id=20,
            node_name="load",
            meta={"parent_command_id": 899, "fanout_reduce": {"planner_version": 1, "target_index": 0}},
        ),
        event(
            4,
            "frame.dispatched",
            frame_id=300,
            stage_id=20,
            command_id=900,
            node_name="load",
            status="CLAIMED",
            meta={
                "attempt": 2,
                "worker_id": "w-1",
                "worker_locator": "noetl://w/1",
                "locality": {"node_id": "n1"},
            },
        ),
        event(5, "frame.started", frame_id=300, stage_id=20, node_name="load", status="RUNNING"),
        event(
            6,
            "frame.committed",
            frame_id=300,
            stage_id=20,
            node_name="load",
            status="COMPLETED",
            payload_ref={
                "uri": "s3://bk/k1",
                "sha256": "beef",
                "media_type": "application/vnd.apache.arrow.stream",
                "rows_ref": {"meta": {"row_count": 40}},
            },
            meta={"row_count": 40, "events_emitted": 4, "cursor": {"last_id": 40}},
        ),
        event(
            7, "command.completed", command_id=900, stage_id=20, node_name="load", meta={"loop_id": "lp-1"}
        ),
        event(8, "loop.done", node_name="load", meta={"loop_id": "lp-1"}),
        event(
            9,
            "invoice.created",
            node_name="emit",
            meta={
                "business_object": {
                    "type": "invoice",
                    "id": "i-9",
                    "state": {"total": 12.5, "note": "caf\u00e9"},
                }
            },
        ),
        event(
            10,
            "stage.closed",
            stage_id=20,
            node_name="load",
            status="COMPLETED",
            meta={"frame_count": 1, "row_count": 40, "events_emitted": 4, "failed_count": 0},
        ),
        event(11, "playbook.completed", node_name="end", status="COMPLETED"),
    ],
}
V3_CHECKSUMS = {
    "checksum": "7f131945e31592d1c8773017abf036eaac564dcd843e34f11ddbf924e54248e0",
    "execution": "efcaed3177bba637a8caf10193304829bf6e6a4840dfabb15c674c1ad829431b",
    "stages": "7c9003af729182434abd064aa75dec2ac36f219983e074721a44ddd4e67982c6",
    "frames": "5dc364eb2c66997b329e447f60be67f9b2dbc65f1a0ff860d0a16f6691ebfa10",
    "commands": "3370d476d945c671ff93efdd13502d0cfca11ea6bee7e035ac1c171e13961257",
    "business_objects": "9a15a89d7b2829dff854da98a374abf672ebbe98e69e31f895da184b7998b862",
    "loops": "b50c5254b9c32cae8f0079c0a99f4ff7be8d7c99ab0e35f149a660d7d5d8f599",
}
V8A_CHECKSUMS = {
    "checksum": "7786cc5d347d7045758ad6caa9b70d1804b8fad14bc5418d84447949ae59007e",
    "execution": "47586694931833c7a542bfb722369f93fa639b589c5f37f0d90ce140607290cd",
    "stages": "22f5fb2bfd3834c6f0945c14ecc81b47a5089f4817cfc6999a58abf97f10ba6f",
    "frames": V3_CHECKSUMS["frames"],
    "commands": "ec65efe83ae29836dac33553b1d0b7b0abc9e0feb1b5ca638f838d7b6c630f07",
    "business_objects": NO_BUSINESS_OBJECTS,
    "loops": "b58d05fc0274c764c9476855a40de4a27c783b1b7d44f0038bcd2adb45bef08a",
}
V4 = {
    "execution_id": 8,
    "events": [
        event(
            1,
            "thing.upserted",
            meta={
                "business_object": {
                    "object_type": "thing",
                    "object_id": "\u00fc/1",
                    "version": "7",
                    "attributes": {
                        "a": 1.0,
                        "b": 1e16,
                        "c": 1e-07,
                        "d": -0.0,
                        "e": 12345678901234567890123,
                        "f": True,
                        "g": None,
                        "h": '\u007f\n"\\/\U0001f600',
                        "Z": [2, {"y": 1, "x": 2}],
                    },
                }
            },
        )
    ],
}
V5 = {
    "execution_id": 9,
    "events": [
        *(
            event(index, "stage.opened", stage_id=stage)
            for index, stage in enumerate(["10", "9", "b-2", "b-10"], 1)
        ),
        event(5, meta={"loop_id": "10"}),
        event(6, meta={"loop_id": "9"}),
    ],
}
V6 = {
    "execution_id": 10,
    "events": [
        event(1, "stage.opened", stage_id=1),
        event(2, "frame.committed", stage_id=1, frame_id=2, status="COMPLETED"),
        event(3, "command.completed", stage_id=1, frame_id=2, command_id=3, status="success"),
        event(4, "command.heartbeat", command_id=3, status="RUNNING"),
    ],
}
V7 = {
    "execution_id": 11,
    "events": [
        event("30", "playbook.completed", node_name="end"),
        event(20, "command.failed", command_id=5, node_name="x", meta={"__loop_epoch_id": 77}),
        event(10, "playbook.initialized"),
    ],
}


def hashes_of(state: dict[str, Any]) -> dict[str, str]:
    return {"checksum": state["checksum"], **state["projection_checksums"]}


EMPTY = {
    "stages": NO_STAGES,
    "frames": NO_FRAMES,
    "commands": NO_COMMANDS,
    "business_objects": NO_BUSINESS_OBJECTS,
    "loops": NO_LOOPS,
}


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            {"execution_id": 1, "events": []},
            {
                **EMPTY,
                "checksum": "249eabf600e917d6031a1c70d35823cfaec1cfcda22b48dfee57ffd18d4cb6a6",
                "execution": "d9fd8f8baf7a8259e805427d2c48659f68a36135de3ba3afd212a174f26e13cc",
            },
        ),
        (
            V2,
            {
                **EMPTY,
                "checksum": "a777fc16d6cc834666f8eef2bc089f7e6d9906f238db1cb5319d4c23051195a2",
                "execution": "4cb6e41b98ec0457ef34b751a492e64a215d75ae550e76de52a52d74c8b2777d",
            },
        ),
        (V3, V3_CHECKSUMS),
        (
            V4,
            {
                **EMPTY,
                "checksum": "cca7e8f59f95b8de362a79c782d4dd5f695f42c7079443fb8121be366e7fc59b",
                "execution": "1398452a3935caf86da0e4a9319f89985e7ce94c3c437fb06e6ae1e9d8b53fd1",
                "business_objects": "1a0ee9cd1f90eed7a863cef9ca59ee6cad4aacaff359956e9020f787cd88f189",
            },
        ),
        (
            V5,
            {
                **EMPTY,
                "checksum": "fc908ea9fc6f40600c04adf57127857ffb94925bf021530134e53a72764fa037",
                "execution": "6761d67cd066b766a0c81654423e9b0d9bb7055c0ad95bfc1e15a2fb0b61193b",
                "stages": "16d40c2687a7a77b4d51f76056ed9bb5fc0fcc031ba53b944275314a21ddc77a",
                "loops": "bde6fd20d1151c38c868d9083c5c8b627934a664ec91d6ea9d92af309f29a1f3",
            },
        ),
        (
            V6,
            {
                **EMPTY,
                "checksum": "daeba2f9bcf344d8836046be7e697af417be379bdb449ac46921ca109ee03927",
                "execution": "8ccf56fa77b846755d035df34d7fc0bf0cea9f971cd9d35e5390d899d35221ca",
                "stages": "0237ed7ce5fb0ecf84c0182ca24fb63880e06b8b31eefd1c1b4a6d04a5820a2e",
                "frames": "454b0e942029586727e3a56a056d5d58e114c6c011c5ea1b4ce9b0a45d99a745",
                "commands": "c1852a6649ed6c358fb31e1b59e34b2f7c5b3933fe339627da0656ce5a937968",
            },
        ),
        (
            V7,
            {
                **EMPTY,
                "checksum": "5167d5b1babef3bfb0c4ce67c2a945abe82cfa30532bff998d2294aafec0e839",
                "execution": "eb00f9a5e283d561b023dd79bb0d72a5dd1cb3c024889fc68dd4f5b2a9e9d7a2",
                "commands": "caff55f8724f56388c6ea9a1ac30976f3dc333af57c83ebaeddd47460072b1b9",
                "loops": "24141b3cbd5c82762cb7bd51609a596679720ceb65945892c2253c6c13c03149",
            },
        ),
        ({**V3, "events": V3["events"][:6]}, V8A_CHECKSUMS),
    ],
    ids=["V1", "V2", "V3", "V4", "V5", "V6", "V7", "V8a"],
)
def test_appendix_vectors(log: dict[str, Any], expected: dict[str, str]) -> None:
    assert hashes_of(finished(log)) == expected


def test_v2_differs_under_union_only_by_the_kept_node_name() -> None:
    state = finished(V2, UNION)

    assert state["checksum"] == "65057f9f9a715045264d72ccadb5dd8f6e370743ea73409c64cc91d47cddf08f"
    assert state["execution"]["last_node_name"] == "fetch"


@pytest.mark.parametrize("with_seed", [False, True], ids=["V8b", "V8c"])
def test_v8_continued_from_its_base(with_seed: bool) -> None:
    base = finished({**V3, "events": V3["events"][:6]})
    if with_seed:
        base["replay_snapshot"] = {
            "aggregate_id": "execution/77/all",
            "aggregate_type": "replay_state",
            "version": 6,
            "checksum": base["checksum"],
            "meta": {},
        }

    continued = checksums(fold(V3["events"][6:], identity_of(V3), STRICT, base).state)

    seeded = "875f1c68db94cd4418d1a9beeba2f9c21a411dcd9348dab091a85afdb3111e12"
    assert continued.value == (seeded if with_seed else V3_CHECKSUMS["checksum"])
    assert {"checksum": V3_CHECKSUMS["checksum"], **continued.surfaces} == V3_CHECKSUMS


def test_the_empty_log_has_the_documented_text() -> None:
    text = checksums(
        fold([], Identity(1, upcaster_registry_digest=EMPTY_REGISTRY), UNION).state
    ).canonical_json

    assert text == (
        b'{"business_objects":{},"commands":{},"event_count":0,"execution":{"last_node_name":null,'
        b'"payload_refs":[],"status":"UNKNOWN"},"execution_id":1,"frames":{},"last_event_id":null,'
        b'"last_event_type":null,"loops":{},"organization_id":"default","projection":"all","stages":{},'
        b'"tenant_id":"default","upcaster_registry_digest":'
        b'"4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"}'
    )
