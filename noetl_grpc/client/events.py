"""Events as they are written and read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from noetl_grpc.client.mapping import Id


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEnvelope:
    """One event of the log: a field per column. JSON columns hold JSON text; None is SQL NULL."""

    execution_id: Id
    event_id: Id
    #: 0 takes it from the execution's other events.
    catalog_id: Id = 0
    event_type: str | None = None
    node_id: str | None = None
    node_name: str | None = None
    node_type: str | None = None
    status: str | None = None
    duration: float | None = None
    context_json: str | None = None
    result_json: str | None = None
    meta_json: str | None = None
    error: str | None = None
    parent_event_id: Id | None = None
    parent_execution_id: Id | None = None
    prev_event_id: Id | None = None
    command_id: Id | None = None
    stage_id: Id | None = None
    frame_id: Id | None = None
    current_index: int | None = None
    current_item: str | None = None
    worker_id: str | None = None
    distributed_state: str | None = None
    context_key: str | None = None
    context_value: str | None = None
    trace_component_json: str | None = None
    stack_trace: str | None = None
    tenant_id: str = ""
    organization_id: str = ""
    stream_id: str | None = None
    stream_version: int | None = None
    aggregate_id: str | None = None
    aggregate_type: str | None = None
    schema_name: str | None = None
    schema_version: int = 0
    created_at: datetime | None = None
    event_time: datetime | None = None
    ingest_time: datetime | None = None
    #: On writing it wins over `created_at`; None when read.
    timestamp: datetime | None = None
    producer: str | None = None
    causation_id: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    payload_ref_json: str | None = None
    envelope_checksum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeEvent:
    """An event as NoETL's workers emit it."""

    execution_id: Id
    step: str
    event_type: str
    payload_json: str = ""
    meta_json: str = ""
    worker_id: str = ""
    result_kind: str = ""
    result_uri: str = ""
    event_ids: tuple[Id, ...] = ()
    actionable: bool | None = None
    informative: bool | None = None
    event_id: Id | None = None
    idempotency_key: str | None = None
    status: str = ""
    created_at: datetime | None = None
