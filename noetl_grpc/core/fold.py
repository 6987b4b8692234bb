"""Events in, state out: the fold that turns an execution's log into what the log says.

A fold is a plain value that goes on from where it stands, so a log can be folded page by page, or from a
stored state, with the same result. Nothing here waits, looks at a clock or knows protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from noetl_grpc.core.canonical import Json, JsonObject, copy_json
from noetl_grpc.core.decode import decode_column
from noetl_grpc.core.numbers import FoldWarning, Numbers, all_warnings
from noetl_grpc.core.payloads import reference_of
from noetl_grpc.core.rules import TERMINAL, UNKNOWN, FoldRules
from noetl_grpc.core.surfaces import (
    Surface,
    business_identity,
    touch_business_object,
    touch_command,
    touch_frame,
    touch_loop,
    touch_stage,
)

#: Counts up whenever the same log could give another state; a snapshot of another version is not continued.
FOLD_VERSION = "1"

SURFACES = ("stages", "frames", "commands", "business_objects", "loops")
#: Keys that a finished state carries beside what is hashed.
CHECKSUM_KEYS = ("checksum_algorithm", "checksum", "projection_checksums")

_JSON_COLUMNS = ((4, "meta"), (5, "payload_ref"))


class FoldEvent(NamedTuple):
    """An event as the fold reads it."""

    event_id: int | None
    event_type: str | None
    status: Json
    node_name: Json
    #: anything that is not an object counts as empty
    meta: Json
    #: the payload reference: the event's own, else its result's
    reference: Json
    #: ids of columns are text
    stage_id: str | None = None
    frame_id: str | None = None
    command_id: str | None = None
    worker_id: Json = None
    aggregate_type: Json = None
    aggregate_id: Json = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> FoldEvent:
        """From columns by name; those that are missing are null."""
        get = event.get
        return cls(
            _event_id(get("event_id")),
            get("event_type"),
            get("status"),
            get("node_name"),
            get("meta"),
            reference_of(get("payload_ref"), get("result")),
            _text(get("stage_id")),
            _text(get("frame_id")),
            _text(get("command_id")),
            get("worker_id"),
            get("aggregate_type"),
            get("aggregate_id"),
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state it is; all of it is part of the state and of its checksum."""

    execution_id: int
    tenant_id: str = "default"
    organization_id: str = "default"
    projection: str = "all"
    upcaster_registry_digest: str | None = None


class Fold:
    """The state of one execution so far."""

    def __init__(
        self,
        identity: Identity,
        rules: FoldRules,
        base: Mapping[str, Any] | None = None,
        *,
        takes_base: bool = False,
    ) -> None:
        """Start from nothing, or go on from the state of an earlier fold, which is copied unless it is given away."""
        self.rules = rules
        self._numbers = Numbers(rules.value)
        kept: JsonObject = {} if base is None else {**base}
        for key in CHECKSUM_KEYS:
            kept.pop(key, None)
        #: what is hashed; read it, never change it
        self.state: JsonObject = kept if takes_base else copy_json(kept)
        if not kept.keys() >= _INITIAL_KEYS:
            self.state = _initial() | self.state
        self.state |= {
            "tenant_id": identity.tenant_id,
            "organization_id": identity.organization_id,
            "execution_id": identity.execution_id,
            "projection": identity.projection,
            "upcaster_registry_digest": identity.upcaster_registry_digest,
        }

    @property
    def noted_warnings(self) -> list[FoldWarning]:
        """What was passed over, as far as it was noted."""
        return self._numbers.warnings

    @property
    def warnings_left_out(self) -> int:
        """How much more was passed over."""
        return self._numbers.warnings_left_out

    def recall_warnings(self, warnings: Iterable[FoldWarning], left_out: int) -> None:
        """Take over what the fold of the base passed over, so that going on tells as much as starting anew."""
        self._numbers.warnings[:0] = warnings
        self._numbers.warnings_left_out += left_out

    @property
    def warnings(self) -> list[FoldWarning]:
        """What was passed over, at most WARNINGS_MAX of it, and then how much is not listed."""
        return all_warnings(self.noted_warnings, self.warnings_left_out)

    def apply_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Fold a page of rows, see `decode`."""
        self.apply(self.decode(rows))

    def decode(self, rows: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
        """Rows that begin with FoldEvent's columns in its order, meta and reference as JSON text, as events."""
        if not rows:
            return ()
        columns: list[Sequence[Any]] = [*zip(*rows, strict=True)]
        return _decode_columns(columns, partial(self._undecodable, columns[0]))

    def decode_documents(self, rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[JsonObject]:
        """Rows by column name, with the JSON columns of these names as values."""
        events = [dict(row) for row in rows]
        event_ids = [event["event_id"] for event in events]
        for name in names:
            texts = [event[name] for event in events]
            values = decode_column(texts, partial(self._undecodable, event_ids, name))
            for event, value in zip(events, values, strict=True):
                event[name] = value
        return events

    def note_problem(self, event_id: int, path: str, problem: str) -> None:
        """Something in an event was passed over."""
        self._numbers.problem(event_id, path, problem)

    def _undecodable(self, event_ids: Sequence[int], name: str, row: int, problem: str) -> None:
        self.note_problem(event_ids[row], name, problem)

    def apply(self, events: Iterable[FoldEvent | tuple[Any, ...]]) -> None:
        """Fold events that come in order; see `in_order`."""
        state = self.state
        execution = state["execution"]
        payload_refs = execution["payload_refs"]
        stages: Surface = state["stages"]
        frames: Surface = state["frames"]
        commands: Surface = state["commands"]
        business_objects: Surface = state["business_objects"]
        loops: Surface = state["loops"]
        numbers = self._numbers
        rules = self.rules.value
        statuses = rules.statuses
        null_clears_node_name = rules.null_clears_node_name
        node_name_now = execution["last_node_name"]
        event_id, event_type = state["last_event_id"], state["last_event_type"]
        event_count = state["event_count"]
        for (
            event_id,
            event_type,
            status,
            node_name,
            meta,
            reference,
            stage_id,
            frame_id,
            command_id,
            worker_id,
            aggregate_type,
            aggregate_id,
        ) in events:
            if event_type is None:
                event_type = ""
            if meta.__class__ is not dict:
                meta = {}
            if node_name is not None or null_clears_node_name:
                node_name_now = node_name
            if event_type in statuses:
                self._change_status(execution, statuses[event_type])
            if reference is not None:
                payload_refs.append({"event_id": event_id, "reference": reference})

            # The first source that is present decides, even if it gives an empty id. `in` before a subscript,
            # because most keys are absent from most events and this line runs for each of them.
            if stage_id is None:
                if aggregate_type == "stage" and aggregate_id:
                    stage_id = str(aggregate_id).removeprefix("stage/")
                elif "stage_id" in meta:
                    stage_id = _text(meta["stage_id"])
            if frame_id is None:
                if aggregate_type == "frame" and aggregate_id:
                    frame_id = str(aggregate_id).removeprefix("frame/")
                elif "frame_id" in meta:
                    frame_id = _text(meta["frame_id"])
            if command_id is None and "command_id" in meta:
                command_id = _text(meta["command_id"])
            if "loop_id" in meta or "loop_event_id" in meta or "__loop_epoch_id" in meta:
                loop_id = _loop_id(meta)
            else:
                loop_id = None
            if stage_id:
                touch_stage(stages, stage_id, event_id, event_type, status, node_name, meta, loop_id, numbers)
            if frame_id:
                touch_frame(
                    frames,
                    frame_id,
                    event_id,
                    event_type,
                    status,
                    meta,
                    reference,
                    stage_id,
                    command_id,
                    numbers,
                )
            if command_id:
                touch_command(
                    commands, command_id, event_id, event_type, status, meta, worker_id, stage_id, frame_id
                )
            if (
                "business_object" in meta
                or "object_type" in meta
                or "business_object_type" in meta
                or aggregate_type == "business_object"
            ):
                identity = business_identity(meta, aggregate_type, aggregate_id)
                if identity is not None:
                    touch_business_object(
                        business_objects,
                        identity,
                        event_id,
                        event_type,
                        status if status or rules.empty_status_counts else None,
                        meta,
                        reference,
                        numbers,
                    )
            if loop_id:
                touch_loop(loops, loop_id, event_id, event_type, node_name, meta, numbers)
            event_count += 1
        execution["last_node_name"] = node_name_now
        state["event_count"] = event_count
        state["last_event_id"] = event_id
        state["last_event_type"] = event_type

    def _change_status(self, execution: JsonObject, status: str) -> None:
        restarts = status == "RUNNING" and execution["status"] in TERMINAL
        if not restarts or self.rules.value.terminal_can_restart:
            execution["status"] = status


def apply_to_each(folds: Mapping[int, Fold], rows: Sequence[Sequence[Any]]) -> None:
    """Fold a page of rows of several executions; each begins with its execution and goes on as in `Fold.decode`."""
    if not rows:
        return
    columns: list[Sequence[Any]] = [*zip(*rows, strict=True)]
    executions = columns.pop(0)

    def undecodable(name: str, row: int, problem: str) -> None:
        folds[executions[row]].note_problem(columns[0][row], name, problem)

    events = zip(executions, _decode_columns(columns, undecodable), strict=True)
    for execution_id, group in groupby(events, key=itemgetter(0)):
        folds[execution_id].apply(map(itemgetter(1), group))


def _decode_columns(
    columns: list[Sequence[Any]], on_malformed: Callable[[str, int, str], None]
) -> Iterable[tuple[Any, ...]]:
    del columns[len(FoldEvent._fields) :]
    for index, name in _JSON_COLUMNS:
        columns[index] = decode_column(columns[index], partial(on_malformed, name))
    return zip(*columns, strict=True)


def in_order(events: Iterable[FoldEvent]) -> list[FoldEvent]:
    """Events by id, those without one first; equal ids keep their order."""
    return sorted(events, key=lambda event: event.event_id or 0)


def fold(
    events: Iterable[Mapping[str, Any]],
    identity: Identity,
    rules: FoldRules,
    base: Mapping[str, Any] | None = None,
) -> Fold:
    """Fold events given as columns by name, in whatever order they come."""
    folded = Fold(identity, rules, base)
    folded.apply(in_order(FoldEvent.of(event) for event in events))
    return folded


def _initial() -> JsonObject:
    return {
        "event_count": 0,
        "last_event_id": None,
        "last_event_type": None,
        "execution": {"status": UNKNOWN, "last_node_name": None, "payload_refs": []},
        **{surface: {} for surface in SURFACES},
    }


_INITIAL_KEYS = _initial().keys()


def _text(value: Json) -> str | None:
    return None if value is None else str(value)


def _loop_id(meta: JsonObject) -> str | None:
    for key in ("loop_id", "loop_event_id", "__loop_epoch_id"):
        if (value := meta.get(key)) is not None:
            return str(value)
    return None


def _event_id(value: Json) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
