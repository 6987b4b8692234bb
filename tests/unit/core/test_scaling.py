"""What a trigger's metadata means."""

from __future__ import annotations

import pytest

from noetl_grpc.core.scaling import Metric, Trigger, parse_trigger
from noetl_grpc.errors import InvalidRequest


def test_without_metadata_it_is_a_hundred_pending_rows_per_replica() -> None:
    assert parse_trigger({}) == Trigger(Metric.OUTBOX_PENDING, 100.0)
    assert parse_trigger({"metric": " ", "target": ""}) == Trigger(Metric.OUTBOX_PENDING, 100.0)


def test_keys_of_keda_are_ignored() -> None:
    given = {"scalerAddress": "noetl:50052", "metric": "outbox_oldest_seconds", "target": "2.5"}

    assert parse_trigger(given) == Trigger(Metric.OUTBOX_OLDEST_SECONDS, 2.5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("metric", "outbox"),
        ("target", "0"),
        ("target", "-1"),
        ("target", "nan"),
        ("target", "inf"),
        ("target", "1e16"),
        ("target", "many"),
    ],
)
def test_what_cannot_be_used_is_named(key: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_trigger({key: value})

    assert raised.value.violations[0][0] == f"scalerMetadata.{key}"


@pytest.mark.parametrize(
    ("target", "size", "rows"),
    [(0.001, 1, 1000), (10, 10, 1000), (10.5, 11, 10_000), (100, 100, 10_000), (1e15, 10**15, 100_000)],
)
def test_counting_ends_where_a_hundred_replicas_have_enough(target: float, size: int, rows: int) -> None:
    trigger = Trigger(Metric.OUTBOX_PENDING, target)

    assert (trigger.target_size, trigger.rows_counted_max) == (size, rows)
