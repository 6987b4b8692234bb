"""Events between the wire and the log: messages by column for writing, rows as messages for reading."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import event_pb2 as pb

from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.core.envelope import COLUMNS, Batch, Kind, Moment
from noetl_grpc.core.normalise import NativeEvent, Normalised

_TIMES = (Kind.NAIVE, Kind.INSTANT)
_TIME_FIELDS = frozenset({"timestamp", *(column.field for column in COLUMNS if column.kind in _TIMES)})


def batch_from_pb(messages: Sequence[pb.EventEnvelope]) -> tuple[Batch, list[Moment | None]]:
    """The messages by column, and their `timestamp`, as `core.envelope.examine` takes them."""
    messages = list(messages)
    present = _fields_in_use(messages)
    batch: Batch = {}
    for column in COLUMNS:
        if column.nullable or column.kind in _TIMES:
            batch[column.name] = _values(messages, column.field, present)
        else:
            batch[column.name] = list(map(attrgetter(column.field), messages))
    return batch, _values(messages, "timestamp", present)


def _fields_in_use(messages: Sequence[pb.EventEnvelope]) -> set[str]:
    """The fields that any of the messages sets.

    Most columns are unset in a whole batch. Messages one after the other are all of them merged, so one look at
    that replaces forty at each message.
    """
    union = pb.EventEnvelope()
    for message in messages:
        union.MergeFromString(message.SerializeToString())
    return {field.name for field, _ in union.ListFields()}


def _values(messages: Sequence[pb.EventEnvelope], field: Any, present: Collection[str]) -> list[Any]:
    if field not in present:
        return [None] * len(messages)
    read = attrgetter(field)
    if field in _TIME_FIELDS:
        return [
            (read(message).seconds, read(message).nanos) if message.HasField(field) else None
            for message in messages
        ]
    return [value if (value := read(message)) or message.HasField(field) else None for message in messages]


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
