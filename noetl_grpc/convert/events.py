"""Events between the wire and the log: messages by column for writing, rows as messages for reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2 as pb

from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.core.envelope import COLUMNS, Batch, Kind, Moment
from noetl_grpc.core.normalise import NativeEvent, Normalised

_TIMES = (Kind.NAIVE, Kind.INSTANT)


def batch_from_pb(messages: Sequence[pb.EventEnvelope]) -> tuple[Batch, list[Moment | None]]:
    """The messages by column, and their `timestamp`, as `core.envelope.examine` takes them."""
    batch: Batch = {}
    for column in COLUMNS:
        if column.kind in _TIMES:
            batch[column.name] = _moments(messages, column.field)
        elif column.nullable:
            batch[column.name] = _optional(messages, column.field, attrgetter(column.field))
        else:
            batch[column.name] = list(map(attrgetter(column.field), messages))
    return batch, _moments(messages, "timestamp")


def _optional(messages: Sequence[pb.EventEnvelope], field: Any, read: Callable[[Any], Any]) -> list[Any]:
    # Most columns are unset in the whole batch or set in all of it; asking is cheaper than reading.
    present = [message.HasField(field) for message in messages]
    if not any(present):
        return [None] * len(messages)
    if all(present):
        return list(map(read, messages))
    return [read(message) if is_set else None for message, is_set in zip(messages, present, strict=True)]


def _moments(messages: Sequence[pb.EventEnvelope], field: str) -> list[Moment | None]:
    times = _optional(messages, field, attrgetter(field))
    return [time and (time.seconds, time.nanos) for time in times]


def event_to_pb(row: Mapping[str, Any]) -> pb.EventEnvelope:
    """A row of noetl.event as a message; JSON columns come as text."""
    message = pb.EventEnvelope()
    for column in COLUMNS:
        value = row[column.name]
        if value is None:
            continue
        if column.kind in _TIMES:
            getattr(message, column.field).CopyFrom(timestamp_to_pb(value))
        else:
            setattr(message, column.field, value)
    return message


def normalised_to_pb(row: Normalised, *, tenant_id: str, organization_id: str) -> pb.EventEnvelope:
    """A worker's event as it is stored; its event_id must be known."""
    message = pb.EventEnvelope(
        execution_id=row.execution_id,
        event_id=row.event_id or 0,
        event_type=row.event_type,
        node_id=row.node_name,
        node_name=row.node_name,
        status=row.status,
        result_json=row.result_json,
        meta_json=row.meta_json,
        worker_id=row.worker_id,
        idempotency_key=row.idempotency_key,
        tenant_id=tenant_id,
        organization_id=organization_id,
    )
    if row.created_at is not None:
        seconds, nanos = row.created_at
        message.created_at.CopyFrom(Timestamp(seconds=seconds, nanos=nanos))
    return message


def unfit_to_pb(message: pb.NativeEvent) -> pb.EventEnvelope:
    """A worker's event that can't be normalised: only what it is known by."""
    return pb.EventEnvelope(
        execution_id=message.execution_id,
        event_id=message.event_id,
        event_type=message.event_type,
        node_name=message.step,
    )


def native_from_pb(message: pb.NativeEvent) -> NativeEvent:
    """A worker's event as a value."""
    time = message.created_at if message.HasField("created_at") else None
    return NativeEvent(
        execution_id=message.execution_id,
        step=message.step,
        event_type=message.event_type,
        payload_json=message.payload_json,
        meta_json=message.meta_json,
        worker_id=message.worker_id,
        result_kind=message.result_kind or "data",
        result_uri=message.result_uri,
        event_ids=tuple(message.event_ids),
        actionable=message.actionable if message.HasField("actionable") else True,
        informative=message.informative if message.HasField("informative") else True,
        event_id=message.event_id if message.HasField("event_id") else None,
        idempotency_key=message.idempotency_key if message.HasField("idempotency_key") else None,
        status=message.status,
        created_at=None if time is None else (time.seconds, time.nanos),
    )
