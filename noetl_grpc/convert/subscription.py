"""Subscriptions between protobuf and the core."""

from __future__ import annotations

from noetlpb.v1 import subscription_pb2

from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.core import lifecycle
from noetl_grpc.errors import InvalidRequest

_STATE_PREFIX = "SUBSCRIPTION_STATE_"


def subscription_state_to_pb(state: lifecycle.State) -> subscription_pb2.SubscriptionState.ValueType:
    """A state's number on the wire."""
    return subscription_pb2.SubscriptionState.Value(_STATE_PREFIX + state.value)


def subscription_state_from_pb(number: int, field: str) -> lifecycle.State:
    """The state that a caller means; UNSPECIFIED and unknown numbers mean none."""
    name = subscription_pb2.SubscriptionState.DESCRIPTOR.values_by_number.get(number)
    if number == subscription_pb2.SUBSCRIPTION_STATE_UNSPECIFIED or name is None:
        raise InvalidRequest(field, f"holds {number}, which is no state of a subscription")
    return lifecycle.State(name.name.removeprefix(_STATE_PREFIX))


def subscription_to_pb(subscription: lifecycle.Subscription) -> subscription_pb2.Subscription:
    """A subscription with what is known of its runtime."""
    return subscription_pb2.Subscription(
        subscription_id=subscription.subscription_id,
        path=subscription.path,
        catalog_id=subscription.catalog_id,
        state=subscription_state_to_pb(subscription.state),
        last_event_type=subscription.last_event_type,
        updated_at=timestamp_to_pb(subscription.updated_at),
        etag=subscription.etag,
        runtime=None if subscription.runtime is None else _runtime_to_pb(subscription.runtime),
    )


def _runtime_to_pb(runtime: lifecycle.Runtime) -> subscription_pb2.SubscriptionRuntime:
    return subscription_pb2.SubscriptionRuntime(
        runtime_id=runtime.runtime_id,
        last_heartbeat_at=timestamp_to_pb(runtime.last_heartbeat_at),
        lease_expires_at=timestamp_to_pb(runtime.lease_expires_at),
        alive=runtime.alive,
        in_flight=runtime.in_flight,
        backlog=runtime.backlog,
    )


def subscription_event_to_pb(event: lifecycle.LifecycleEvent) -> subscription_pb2.SubscriptionEvent:
    """A lifecycle event: what, when, who and why."""
    return subscription_pb2.SubscriptionEvent(
        event_id=event.event_id,
        event_type=event.event_type,
        state=subscription_state_to_pb(event.state),
        created_at=timestamp_to_pb(event.created_at),
        actor=event.cause.actor,
        reason=event.cause.reason,
        request_id=event.cause.request_id,
    )
