"""The series: all there, at 0, from the start."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from noetl_grpc.interceptors.access import Observers
from noetl_grpc.metrics import EVENT_TYPES_MAX, GRPC_CODES, OTHER_EVENT_TYPE, Metrics

NAMES = [
    "grpc_server_started_total",
    "grpc_server_handled_total",
    "grpc_server_handling_seconds_bucket",
    "noetl_outbox_rows",
    "noetl_outbox_oldest_pending_seconds",
    "noetl_outbox_enqueued_total",
    "noetl_outbox_claimed_total",
    "noetl_outbox_published_total",
    "noetl_outbox_failed_total",
    "noetl_outbox_dead_total",
    "noetl_outbox_stale_total",
    "noetl_events_projected_total",
    "noetl_events_projected_duplicates_total",
    "noetl_events_materialized_total",
    "noetl_events_rejected_total",
    "noetl_events_parked_total",
    "noetl_projection_advanced_total",
    "noetl_projection_rebuilt_total",
    "noetl_replay_seed_total",
    "noetl_event_stream_published_total",
    "noetl_event_stream_referenced_total",
    "noetl_event_stream_parked_total",
    "noetl_event_stream_republished_total",
    "noetl_event_stream_lag_events",
    "noetl_event_stream_lag_seconds",
    "noetl_event_stream_leader",
    "noetl_event_stream_mode",
    "noetl_subscriptions",
    "noetl_subscription_runtimes_dead",
    "noetl_cleanup_rows_purged_total",
    "noetl_pool_connections",
    "noetl_build_info",
]


def _samples(metrics: Metrics) -> dict[str, list[Any]]:
    text = generate_latest(metrics.registry).decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(shards=2)
    Observers(made, [("noetlpb.v1.OutboxService", "ClaimOutboxBatch", "unary")])
    return made


@pytest.mark.parametrize("name", NAMES)
def test_every_series_is_there_at_zero_from_the_start(metrics: Metrics, name: str) -> None:
    samples = _samples(metrics)[name]

    assert samples
    if name != "noetl_build_info":
        assert {sample.value for sample in samples} == {0.0}


def test_codes_have_their_numbers() -> None:
    for code in grpc.StatusCode:
        words = re.findall("OK|[A-Z][a-z]*", GRPC_CODES[code.value[0]])
        assert "_".join(words).upper().replace("CANCELED", "CANCELLED") == code.name


def test_calls_are_counted_by_code_and_time() -> None:
    metrics = Metrics()
    series = metrics.rpc.of(kind="unary", service="s", method="m")
    series.started += 3
    series.finish(0, 0.0004)
    series.finish(0, 0.003)
    series.finish(5, 100.0)

    samples = _samples(metrics)
    handled = {s.labels["grpc_code"]: s.value for s in samples["grpc_server_handled_total"] if s.value}
    below = {s.labels["le"]: s.value for s in samples["grpc_server_handling_seconds_bucket"]}
    (total,) = samples["grpc_server_handling_seconds_sum"]
    (count,) = samples["grpc_server_handling_seconds_count"]

    assert handled == {"OK": 2, "NotFound": 1}
    assert (below["0.0005"], below["0.0025"], below["0.005"], below["60.0"], below["+Inf"]) == (1, 1, 2, 2, 3)
    assert (round(total.value, 4), count.value) == (100.0034, 3)


def test_event_types_are_capped() -> None:
    metrics = Metrics()
    labels = {metrics.event_type_label(f"type.{number}") for number in range(EVENT_TYPES_MAX * 2)}

    assert len(labels) == EVENT_TYPES_MAX
    assert OTHER_EVENT_TYPE in labels
