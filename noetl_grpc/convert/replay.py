"""Requests and answers of ReplayService, and the replayed state that ProjectionService speaks too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from google.protobuf.timestamp_pb2 import Timestamp
from noetlpb.v1 import replay_pb2 as pb
from noetlpb.v1 import state_pb2

from noetl_grpc.convert.moments import timestamp_to_pb
from noetl_grpc.core.access import tenant_named
from noetl_grpc.core.canonical import Json, JsonObject, canonical_json
from noetl_grpc.core.checksums import ALGORITHM, Checksums, Steps
from noetl_grpc.core.cutoff import EVERYTHING, Cutoff, Scope
from noetl_grpc.core.difference import Cause, Change, Missing, pointer
from noetl_grpc.core.envelope import instant
from noetl_grpc.core.numbers import FoldWarning
from noetl_grpc.core.payloads import no_summary
from noetl_grpc.core.rules import FoldRules
from noetl_grpc.errors import InvalidRequest

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_ENTRIES_PER_STEP = 100

_NO_SUMMARY = no_summary()
_NO_SUMMARY_TEXT = canonical_json(_NO_SUMMARY).decode()

_RULES = {
    state_pb2.FOLD_RULES_UNSPECIFIED: FoldRules.UNION,
    state_pb2.FOLD_RULES_UNION: FoldRules.UNION,
    state_pb2.FOLD_RULES_PYTHON_4_26: FoldRules.PYTHON_4_26,
}
_RULES_TO_PB = {
    FoldRules.UNION: state_pb2.FOLD_RULES_UNION,
    FoldRules.PYTHON_4_26: state_pb2.FOLD_RULES_PYTHON_4_26,
}
_PROJECTIONS = {
    state_pb2.REPLAY_PROJECTION_UNSPECIFIED: "all",
    state_pb2.REPLAY_PROJECTION_ALL: "all",
    state_pb2.REPLAY_PROJECTION_EXECUTION: "execution",
    state_pb2.REPLAY_PROJECTION_STAGE: "stage",
    state_pb2.REPLAY_PROJECTION_FRAME: "frame",
    state_pb2.REPLAY_PROJECTION_COMMAND: "command",
    state_pb2.REPLAY_PROJECTION_BUSINESS_OBJECT: "business_object",
    state_pb2.REPLAY_PROJECTION_LOOP: "loop",
}
_PROJECTIONS_TO_PB = {name: number for number, name in _PROJECTIONS.items()}


class ScopedRequest(Protocol):
    """A request that names an execution of a tenant."""

    tenant_id: str
    organization_id: str
    execution_id: int


def scope_from_pb(request: ScopedRequest) -> Scope:
    if request.execution_id <= 0:
        raise InvalidRequest("execution_id", "must be above 0")
    tenant = tenant_named(request.tenant_id, request.organization_id)
    for name, value in (("tenant_id", tenant.tenant_id), ("organization_id", tenant.organization_id)):
        if "\0" in value:
            raise InvalidRequest(name, "must not hold the character NUL")
    return Scope(tenant.tenant_id, tenant.organization_id, request.execution_id)


def cutoff_from_pb(message: Any, *, field: str = "") -> Cutoff:
    """From a message with `oneof cutoff`; `field` is where it stands in its request."""
    name = message.WhichOneof("cutoff")
    if name is None:
        return EVERYTHING
    value = getattr(message, name)
    where = f"{field}.{name}" if field else name
    if name == "as_of_time":
        return Cutoff(time=_moment(value, where))
    if value < 0:
        raise InvalidRequest(where, "must not be negative")
    return Cutoff(event_id=value)


def rules_from_pb(number: int) -> FoldRules:
    try:
        return _RULES[number]  # type: ignore[index]  # an unknown number is a plain int
    except KeyError:
        raise InvalidRequest("rules", "must be a known FoldRules") from None


def projection_from_pb(number: int) -> str:
    """The projection's name, as it enters the checksums."""
    try:
        return _PROJECTIONS[number]  # type: ignore[index]  # an unknown number is a plain int
    except KeyError:
        raise InvalidRequest("projection", "must be a known ReplayProjection") from None


def _moment(value: Timestamp, where: str) -> datetime:
    found = instant((value.seconds, value.nanos))
    if found is None:
        raise InvalidRequest(where, "must be a valid timestamp between the years 1 and 9999")
    return found.replace(tzinfo=UTC)


def state_to_pb(
    state: Mapping[str, Any], rules: FoldRules, checksums: Checksums, warnings: Iterable[FoldWarning]
) -> Steps[state_pb2.ReplayedState]:
    """A whole fold; its projection says which surfaces are filled. `complete` is true."""
    message = state_pb2.ReplayedState(
        tenant_id=state["tenant_id"],
        organization_id=state["organization_id"],
        execution_id=state["execution_id"],
        projection=_PROJECTIONS_TO_PB[state["projection"]],
        rules=_RULES_TO_PB[rules],
        event_count=state["event_count"],
        last_event_id=state["last_event_id"],
        last_event_type=state["last_event_type"],
        checksum=state_pb2.Checksum(algorithm=ALGORITHM, value=checksums.value),
        projection_checksums=checksums.surfaces,
        upcaster_registry_digest=state["upcaster_registry_digest"] or "",
        complete=True,
    )
    if checksums.canonical_json is not None:
        message.canonical_json = checksums.canonical_json.decode()
    numbers = _Numbers()
    shown = state["projection"]
    if shown in ("all", "execution"):
        yield from _fill_execution(message.execution, state["execution"])
    for projection, surface, to_pb in _SURFACES:
        if shown in ("all", projection):
            entries = getattr(message, surface)
            for count, (key, entry) in enumerate(state[surface].items()):
                numbers.where = surface, key, entry["last_event_id"]
                entries[key].CopyFrom(to_pb(entry, numbers))
                if count % _ENTRIES_PER_STEP == 0:
                    yield
    for warning in (*warnings, *numbers.warnings):
        message.warnings.add(event_id=warning.event_id, path=warning.path, problem=warning.problem)
    return message


def change_to_pb(change: Change, event_id: int) -> pb.StateChange:
    return pb.StateChange(
        path=pointer(change.path),
        before_json=_json_or_none(change.before),
        after_json=_json_or_none(change.after),
        event_id=event_id,
    )


def cause_to_pb(cause: Cause, event_time: datetime) -> pb.StateCause:
    return pb.StateCause(
        event_id=cause.event_id,
        event_type=cause.event_type,
        event_time=timestamp_to_pb(event_time),
        value_json=(cause.value_json or b"").decode(),
    )


def _json_or_none(value: Json | Missing) -> str | None:
    return None if isinstance(value, Missing) else _text(value)


class _Numbers:
    """Puts counts into 64 bits. The state itself keeps them as they are, and says so in a warning."""

    def __init__(self) -> None:
        self.where: tuple[str, str, int | None] = ("", "", None)
        self.warnings: list[FoldWarning] = []

    def fit(self, entry: JsonObject, field: str) -> int:
        value: int = entry[field]
        if _INT64_MIN <= value <= _INT64_MAX:
            return value
        surface, key, event_id = self.where
        self.warnings.append(
            FoldWarning(
                event_id or 0,
                pointer((surface, key, field)),
                "does not fit into 64 bits and is cut; canonical_json is exact",
            )
        )
        return _INT64_MAX if value > 0 else _INT64_MIN


def _fill_execution(message: state_pb2.ExecutionState, execution: JsonObject) -> Iterator[None]:
    message.status = execution["status"]
    if execution["last_node_name"] is not None:
        message.last_node_name = execution["last_node_name"]
    for count, entry in enumerate(execution["payload_refs"]):
        message.payload_refs.add(event_id=entry["event_id"], reference_json=_text(entry["reference"]))
        if count % _ENTRIES_PER_STEP == 0:
            yield


# A message's constructor takes None for an optional field that stays unset.


def _stage_to_pb(stage: JsonObject, numbers: _Numbers) -> state_pb2.StageState:
    fields = stage.copy()
    kind, step_name = fields.pop("kind"), fields["step_name"]
    if kind is not None:
        fields["kind_json"] = _text(kind)
    if step_name is not None and not isinstance(step_name, str):
        fields["step_name"] = _text(step_name)
    for name in ("frame_count", "row_count", "events_emitted", "failed_count"):
        fields[name] = numbers.fit(stage, name)
    return state_pb2.StageState(**fields)


def _frame_to_pb(frame: JsonObject, numbers: _Numbers) -> state_pb2.FrameState:
    fields = frame.copy()
    output_ref, cursor = fields.pop("output_ref"), fields.pop("cursor")
    if output_ref is not None:
        fields["output_ref_json"] = _text(output_ref)
    fields["output_ref_summary_json"] = _text(fields.pop("output_ref_summary"))
    fields["cursor_json"] = _text(cursor)
    for name in ("row_count", "attempts", "events_emitted"):
        fields[name] = numbers.fit(frame, name)
    return state_pb2.FrameState(**fields)


def _command_to_pb(command: JsonObject, numbers: _Numbers) -> state_pb2.CommandState:
    fields = command.copy()
    fields["locality_json"] = _text(fields.pop("locality"))
    fields["source_locality_json"] = _text(fields.pop("source_locality"))
    fields["placement_json"] = _text(fields.pop("placement"))
    fields["fanout_reduce_json"] = _text(fields.pop("fanout_reduce"))
    return state_pb2.CommandState(**fields)


def _business_object_to_pb(entry: JsonObject, numbers: _Numbers) -> state_pb2.BusinessObjectState:
    fields = entry.copy()
    last = fields.pop("last_payload_ref")
    if last is not None:
        fields["last_payload_ref_json"] = _text(last)
    fields["attributes_json"] = _text(fields.pop("attributes"))
    fields["version"] = numbers.fit(entry, "version")
    fields["payload_refs"] = [
        state_pb2.PayloadRef(
            event_id=noted["event_id"],
            reference_json=_text(noted["reference"]),
            summary_json=_text(noted["summary"]),
        )
        for noted in entry["payload_refs"]
    ]
    return state_pb2.BusinessObjectState(**fields)


def _loop_to_pb(loop: JsonObject, numbers: _Numbers) -> state_pb2.LoopState:
    fields = loop.copy()
    total = fields.pop("total")
    if total is not None:
        fields["total_json"] = _text(total)
    return state_pb2.LoopState(**fields)


_SURFACES: tuple[tuple[str, str, Callable[[JsonObject, _Numbers], Any]], ...] = (
    ("stage", "stages", _stage_to_pb),
    ("frame", "frames", _frame_to_pb),
    ("command", "commands", _command_to_pb),
    ("business_object", "business_objects", _business_object_to_pb),
    ("loop", "loops", _loop_to_pb),
)


def _text(value: Json) -> str:
    # Most objects of most entries are empty, most summaries say nothing.
    if value == {}:
        return "{}"
    return _NO_SUMMARY_TEXT if value == _NO_SUMMARY else canonical_json(value).decode()
