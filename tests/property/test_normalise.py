from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noetl_grpc.core.envelope import result_fault
from noetl_grpc.core.normalise import NativeEvent, Normalised, normalise, sanitise

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
keys = st.one_of(
    texts,
    st.sampled_from(["password", "token", "tokens_used", "author", "auth", "sha256", "api_key", "context"]),
)
secrets = st.sampled_from(
    [
        "Bearer abc",
        "basic dXNlcjpwYXNz",
        "[REDACTED]",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
        "A1" * 25,
        "0f" * 32,
    ]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(-1e9, 1e9), texts, secrets
)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=20,
)
events = st.builds(
    NativeEvent,
    execution_id=st.integers(1, 2**63 - 1),
    step=texts.filter(bool),
    event_type=texts.filter(bool),
    payload_json=documents.map(json.dumps),
    meta_json=documents.map(json.dumps),
    worker_id=texts,
    result_kind=st.sampled_from(["", "data", "ref", "refs"]),
    result_uri=st.sampled_from(["", "gs://bucket/part", "s3://bucket/part", "file:///part"]),
    event_ids=st.lists(st.integers(1, 2**63 - 1), max_size=3),
    actionable=st.booleans(),
    informative=st.booleans(),
    event_id=st.integers(1, 2**63 - 1),
    status=texts,
)


#: How long an example takes says more about the machine than about the rules.
untimed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@untimed
@given(documents)
def test_sanitising_twice_equals_once(document: object) -> None:
    once = sanitise(document)

    assert sanitise(once) == once


def read_again(event: NativeEvent, row: Normalised) -> NativeEvent:
    """The stored row as if a worker had emitted just that."""
    result: dict[str, Any] = json.loads(row.result_json)
    reference = result.get("reference", {})
    return NativeEvent(
        execution_id=row.execution_id,
        step=row.node_name,
        event_type=row.event_type,
        payload_json=json.dumps(result.get("context")),
        meta_json=row.meta_json,
        worker_id=row.worker_id or "",
        result_kind="ref" if "logical_uri" in reference else "refs" if reference else "data",
        result_uri=reference.get("logical_uri", ""),
        event_ids=reference.get("event_ids", ()),
        actionable=event.actionable,
        informative=event.informative,
        event_id=row.event_id,
        idempotency_key=row.idempotency_key,
        status=row.status,
        created_at=row.created_at,
    )


def meaning(row: Normalised) -> tuple[object, ...]:
    return (
        json.loads(row.result_json),
        json.loads(row.meta_json),
        row.status,
        row.node_name,
        row.worker_id,
        row.event_id,
    )


@untimed
@given(events)
def test_normalising_twice_equals_once(event: NativeEvent) -> None:
    once = normalise(event)
    assert isinstance(once, Normalised)

    twice = normalise(read_again(event, once))

    assert isinstance(twice, Normalised)
    assert meaning(twice) == meaning(once)
    assert result_fault(json.loads(once.result_json)) is None
