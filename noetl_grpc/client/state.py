"""An execution's state after its events were folded. Raw JSON of the events travels as JSON text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from noetl_grpc.client.mapping import Id


class ReplayProjection(StrEnum):
    """Which surfaces of a state are returned."""

    UNSPECIFIED = "UNSPECIFIED"
    ALL = "ALL"
    EXECUTION = "EXECUTION"
    STAGE = "STAGE"
    FRAME = "FRAME"
    COMMAND = "COMMAND"
    BUSINESS_OBJECT = "BUSINESS_OBJECT"
    LOOP = "LOOP"


class FoldRules(StrEnum):
    """The rules by which events become state."""

    UNSPECIFIED = "UNSPECIFIED"
    UNION = "UNION"
    PYTHON_4_26 = "PYTHON_4_26"


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """A reference to a payload that is kept elsewhere."""

    event_id: Id
    reference_json: str
    summary_json: str | None


@dataclass(frozen=True, slots=True)
class ExecutionState:
    """The execution itself."""

    status: str
    last_node_name: str | None
    payload_refs: tuple[PayloadRef, ...]


@dataclass(frozen=True, slots=True)
class StageState:
    """A loop, fan-out or reduce of the execution."""

    stage_id: str
    status: str
    kind_json: str | None
    step_name: str | None
    parent_stage_id: str | None
    loop_event_id: str | None
    opened_event_id: Id | None
    closed_event_id: Id | None
    frame_count: int
    row_count: int
    events_emitted: int
    failed_count: int
    last_event_id: Id | None


@dataclass(frozen=True, slots=True)
class FrameState:
    """A slice of a stage's work."""

    frame_id: str
    stage_id: str | None
    parent_frame_id: str | None
    command_id: str | None
    claimed_event_id: Id | None
    terminal_event_id: Id | None
    status: str
    row_count: int
    attempts: int
    last_event_id: Id | None
    output_ref_json: str | None
    output_ref_summary_json: str
    cursor_json: str
    events_emitted: int


@dataclass(frozen=True, slots=True)
class CommandState:
    """One piece of work for one worker."""

    command_id: str
    stage_id: str | None
    frame_id: str | None
    parent_command_id: str | None
    worker_id: str | None
    worker_locator: str | None
    locality_json: str
    source_locality_json: str
    placement_json: str
    fanout_reduce_json: str
    status: str
    issued_event_id: Id | None
    claimed_event_id: Id | None
    started_event_id: Id | None
    terminal_event_id: Id | None
    last_event_id: Id | None


@dataclass(frozen=True, slots=True)
class BusinessObjectState:
    """A business object that events tell about."""

    object_key: str
    object_type: str
    object_id: str
    status: str
    version: int
    event_count: int
    first_event_id: Id | None
    last_event_id: Id | None
    deleted_event_id: Id | None
    last_event_type: str | None
    last_payload_ref_json: str | None
    payload_refs: tuple[PayloadRef, ...]
    attributes_json: str


@dataclass(frozen=True, slots=True)
class LoopState:
    """A loop and its progress."""

    loop_id: str
    step_name: str | None
    total_json: str | None
    done: int
    failed: int
    completed: bool
    last_event_id: Id | None


@dataclass(frozen=True, slots=True)
class Checksum:
    """A digest of canonical JSON."""

    algorithm: str
    value: str


@dataclass(frozen=True, slots=True)
class Seed:
    """The snapshot that a fold started from."""

    version: Id
    checksum: str


@dataclass(frozen=True, slots=True)
class ReplayWarning:
    """Something in an event that counted as absent."""

    event_id: Id
    path: str
    problem: str


@dataclass(frozen=True, slots=True)
class ReplayedState:
    """The same log always gives the same state and the same checksums."""

    tenant_id: str
    organization_id: str
    execution_id: Id
    projection: ReplayProjection
    rules: FoldRules
    event_count: int
    last_event_id: Id | None
    last_event_type: str | None
    execution: ExecutionState | None
    stages: Mapping[str, StageState]
    frames: Mapping[str, FrameState]
    commands: Mapping[str, CommandState]
    business_objects: Mapping[str, BusinessObjectState]
    loops: Mapping[str, LoopState]
    checksum: Checksum
    projection_checksums: Mapping[str, str]
    upcaster_registry_digest: str
    #: False only when a limit cut the fold short.
    complete: bool
    next_after_event_id: Id | None
    seed: Seed | None
    warnings: tuple[ReplayWarning, ...]
    canonical_json: str | None
    payload_resolution_json: str | None
