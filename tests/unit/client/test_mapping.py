"""Every message that the client gives or takes has a dataclass with the same fields."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from noetlpb.v1 import (
    event_pb2,
    operations_pb2,
    outbox_pb2,
    projection_pb2,
    replay_pb2,
    state_pb2,
    subscription_pb2,
)

from noetl_grpc.client import events, operations, outbox, projection, replay, state, subscription
from noetl_grpc.client.mapping import enum_prefix, from_pb, number_of, to_document, to_pb
from noetl_grpc.errors import InvalidRequest

PAIRS: list[tuple[type, Any]] = [
    (events.EventEnvelope, event_pb2.EventEnvelope),
    (events.NativeEvent, event_pb2.NativeEvent),
    (operations.MetricSample, operations_pb2.MetricSample),
    (operations.Reconciled, operations_pb2.ReconcileStreamResponse),
    (operations.ServerInfo, operations_pb2.GetServerInfoResponse),
    (operations.ServerLimits, operations_pb2.ServerLimits),
    (operations.ServerMetrics, operations_pb2.GetServerMetricsResponse),
    (operations.TailerShardStatus, operations_pb2.TailerShardStatus),
    (outbox.Claim, outbox_pb2.ClaimOutboxBatchResponse),
    (outbox.DeadOutboxFilter, outbox_pb2.DeadOutboxFilter),
    (outbox.DeadOutboxRow, outbox_pb2.DeadOutboxRow),
    (outbox.Enqueued, outbox_pb2.EnqueueOutboxResponse),
    (outbox.Extended, outbox_pb2.ExtendOutboxLeaseResponse),
    (outbox.Failed, outbox_pb2.MarkOutboxFailedResponse),
    (outbox.FailedBatch, outbox_pb2.MarkOutboxFailedBatchResponse),
    (outbox.Marked, outbox_pb2.MarkOutboxPublishedResponse),
    (outbox.OutboxFailure, outbox_pb2.OutboxFailure),
    (outbox.OutboxFailureOutcome, outbox_pb2.OutboxFailureOutcome),
    (outbox.OutboxMessage, outbox_pb2.OutboxMessage),
    (outbox.OutboxRow, outbox_pb2.OutboxRow),
    (outbox.OutboxStats, outbox_pb2.GetOutboxStatsResponse),
    (outbox.Released, outbox_pb2.ReleaseOutboxLeaseResponse),
    (projection.Advanced, projection_pb2.AdvanceProjectionsResponse),
    (projection.AdvancedProjection, projection_pb2.AdvancedProjection),
    (projection.DeadEvent, projection_pb2.DeadEvent),
    (projection.EventConflict, projection_pb2.EventConflict),
    (projection.EventKey, projection_pb2.EventKey),
    (projection.FailedAdvance, projection_pb2.FailedAdvance),
    (projection.FailedRetry, projection_pb2.FailedRetry),
    (projection.KeptPartition, projection_pb2.KeptPartition),
    (projection.Materialized, projection_pb2.MaterializeEventsResponse),
    (projection.Projected, projection_pb2.ProjectEventsResponse),
    (projection.Projection, projection_pb2.GetProjectionResponse),
    (projection.ProjectionVerification, projection_pb2.ProjectionVerification),
    (projection.PurgePolicy, projection_pb2.PurgePolicy),
    (projection.Purged, projection_pb2.PurgeStaleResponse),
    (projection.RejectedEvent, projection_pb2.RejectedEvent),
    (projection.Retried, projection_pb2.RetryDeadEventsResponse),
    (projection.Waited, projection_pb2.WaitForProjectionResponse),
    (replay.EventBatch, replay_pb2.StreamEventsResponse),
    (replay.ReplayDiff, replay_pb2.DiffReplayResponse),
    (replay.StateCause, replay_pb2.StateCause),
    (replay.StateChange, replay_pb2.StateChange),
    (state.BusinessObjectState, state_pb2.BusinessObjectState),
    (state.Checksum, state_pb2.Checksum),
    (state.CommandState, state_pb2.CommandState),
    (state.ExecutionState, state_pb2.ExecutionState),
    (state.FrameState, state_pb2.FrameState),
    (state.LoopState, state_pb2.LoopState),
    (state.PayloadRef, state_pb2.PayloadRef),
    (state.ReplayWarning, state_pb2.Warning),
    (state.ReplayedState, state_pb2.ReplayedState),
    (state.Seed, state_pb2.Seed),
    (state.StageState, state_pb2.StageState),
    (subscription.Heartbeat, subscription_pb2.HeartbeatSubscriptionResponse),
    (subscription.Registration, subscription_pb2.RegisterSubscriptionResponse),
    (subscription.Subscription, subscription_pb2.Subscription),
    (subscription.SubscriptionChange, subscription_pb2.WatchSubscriptionsResponse),
    (subscription.SubscriptionEvent, subscription_pb2.SubscriptionEvent),
    (subscription.SubscriptionRuntime, subscription_pb2.SubscriptionRuntime),
]

ENUMS = [
    (operations.TailerMode, operations_pb2.TailerMode),
    (outbox.OutboxOutcome, outbox_pb2.OutboxOutcome),
    (projection.ProjectionCheck, projection_pb2.ProjectionCheck),
    (state.FoldRules, state_pb2.FoldRules),
    (state.ReplayProjection, state_pb2.ReplayProjection),
    (subscription.SubscriptionState, subscription_pb2.SubscriptionState),
]


@pytest.mark.parametrize(("cls", "message_type"), PAIRS, ids=lambda item: item.__name__)
def test_a_class_has_the_fields_of_its_message(cls: type, message_type: Any) -> None:
    assert {item.name for item in fields(cls)} == set(message_type.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(("cls", "message_type"), PAIRS, ids=lambda item: item.__name__)
def test_what_may_be_absent_on_the_wire_may_be_none(cls: type, message_type: Any) -> None:
    value = from_pb(cls, message_type())

    for descriptor in message_type.DESCRIPTOR.fields:
        is_optional_scalar = descriptor.has_presence and descriptor.type != FieldDescriptor.TYPE_MESSAGE
        if is_optional_scalar:
            assert getattr(value, descriptor.name) is None, descriptor.name


@pytest.mark.parametrize(("cls", "enum_type"), ENUMS, ids=lambda item: getattr(item, "__name__", None))
def test_an_enum_has_the_words_of_the_wire(cls: Any, enum_type: Any) -> None:
    prefix = enum_prefix(enum_type.DESCRIPTOR.name)

    assert {prefix + member.value for member in cls} == set(enum_type.keys())
    assert all(enum_type.Name(number_of(member, enum_type)) == prefix + member.value for member in cls)


def test_a_value_survives_the_way_there_and_back() -> None:
    at = datetime(2026, 3, 1, 12, 0, 0, 123_456, tzinfo=timezone(timedelta(hours=2)))
    message = outbox.OutboxMessage(
        event_id=2**62, payload_json='{"a":1}', execution_id=7, available_at=at, headers={"k": "v"}
    )

    assert from_pb(outbox.OutboxMessage, to_pb(message, outbox_pb2.OutboxMessage)) == message


def test_none_stays_absent_and_zero_does_not() -> None:
    policy = to_pb(projection.PurgePolicy(event_retention_days=0), projection_pb2.PurgePolicy)

    assert policy.HasField("event_retention_days")
    assert not policy.HasField("command_retention_days")


def test_instants_before_1970_are_exact() -> None:
    at = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    key = events.EventEnvelope(execution_id=1, event_id=2, event_time=at)

    assert from_pb(events.EventEnvelope, to_pb(key, event_pb2.EventEnvelope)).event_time == at


def test_a_time_without_a_zone_is_refused() -> None:
    naive = datetime(2026, 3, 1)

    with pytest.raises(InvalidRequest, match="available_at must have a time zone"):
        to_pb(
            outbox.OutboxMessage(event_id=1, payload_json="{}", available_at=naive), outbox_pb2.OutboxMessage
        )


def test_a_word_of_a_newer_server_is_unspecified() -> None:
    answer = subscription_pb2.SubscriptionEvent(event_id=1)
    answer.state = 99  # type: ignore[assignment]  # a number that this version does not know

    assert from_pb(subscription.SubscriptionEvent, answer).state is subscription.SubscriptionState.UNSPECIFIED


def test_a_document_has_ids_as_texts_and_counts_as_numbers() -> None:
    row = outbox_pb2.OutboxRow(outbox_id=2**60, event_id=5, payload_json="{}", attempts=3, headers={"a": "b"})
    dead = outbox_pb2.DeadOutboxRow(row=row, last_error="no")
    dead.dead_at.seconds = 1_700_000_000

    assert to_document(from_pb(outbox.DeadOutboxRow, dead)) == {
        "row": {
            "outbox_id": "1152921504606846976",
            "event_id": "5",
            "execution_id": None,
            "subject": None,
            "payload_json": "{}",
            "payload_codec": "",
            "headers": {"a": "b"},
            "attempts": 3,
            "shard": 0,
        },
        "last_error": "no",
        "dead_at": "2023-11-14T22:13:20Z",
    }


def test_a_span_of_time_is_seconds_in_a_document() -> None:
    stats = outbox_pb2.GetOutboxStatsResponse(pending=2)
    stats.oldest_pending_age.FromMilliseconds(1500)

    document = to_document(from_pb(outbox.OutboxStats, stats))

    assert document["oldest_pending_age"] == 1.5
    assert document["pending"] == 2
