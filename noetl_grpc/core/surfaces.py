"""What one event does to one entry of a surface: stages, frames, commands, business objects, loops.

Entries are plain JSON objects, because they are hashed, stored and sent as such. Every function creates the
entry if this is its first touch and then applies the event, the creating one included. `x or y` is the
rule "first truthy": the last operand stands if none is.
"""

from __future__ import annotations

from typing import Any

from noetl_grpc.core.canonical import Json, JsonObject
from noetl_grpc.core.numbers import Numbers
from noetl_grpc.core.payloads import no_summary, summarise

Surface = dict[str, JsonObject]

_COMMAND_STEPS = {
    "command.issued": ("PENDING", "issued_event_id"),
    "command.claimed": ("CLAIMED", "claimed_event_id"),
    "command.started": ("RUNNING", "started_event_id"),
    "command.completed": ("COMPLETED", "terminal_event_id"),
    "command.failed": ("FAILED", "terminal_event_id"),
    "command.cancelled": ("CANCELLED", "terminal_event_id"),
}
_STAGE_COUNTERS = ("frame_count", "row_count", "events_emitted", "failed_count")
_COMMAND_OBJECTS = ("locality", "source_locality", "placement", "fanout_reduce")
_TOPOLOGY = frozenset({*_COMMAND_OBJECTS, "parent_command_id", "worker_locator"})
_STATUS_BY_SUFFIX = {
    "deleted": "DELETED",
    "removed": "DELETED",
    "created": "ACTIVE",
    "updated": "ACTIVE",
    "upserted": "ACTIVE",
}


def touch_stage(
    stages: Surface,
    stage_id: str,
    event_id: int | None,
    event_type: str,
    status: Json,
    node_name: Json,
    meta: JsonObject,
    loop_id: str | None,
    numbers: Numbers,
) -> None:
    stage = stages.get(stage_id)
    if stage is None:
        stages[stage_id] = stage = {
            "stage_id": stage_id,
            "status": "UNKNOWN",
            "kind": meta.get("kind"),
            "step_name": node_name or meta.get("step_name"),
            "parent_stage_id": None,
            "loop_event_id": None,
            "opened_event_id": None,
            "closed_event_id": None,
            "frame_count": 0,
            "row_count": 0,
            "events_emitted": 0,
            "failed_count": 0,
            "last_event_id": None,
        }
    if "parent_stage_id" in meta and (parent := meta["parent_stage_id"]) is not None:
        stage["parent_stage_id"] = str(parent)
    if loop_id:
        stage["loop_event_id"] = loop_id
    if event_type == "stage.opened":
        stage["status"] = "OPEN"
        stage["opened_event_id"] = event_id
    elif event_type == "stage.closed":
        stage["status"] = status or "CLOSED"
        stage["closed_event_id"] = event_id
        for name in _STAGE_COUNTERS:
            stage[name] = numbers.counter(event_id, f"meta.{name}", meta.get(name), stage[name])
    elif status:
        stage["status"] = str(status)
    stage["last_event_id"] = event_id


def touch_frame(
    frames: Surface,
    frame_id: str,
    event_id: int | None,
    event_type: str,
    status: Json,
    meta: JsonObject,
    reference: Json,
    stage_id: str | None,
    command_id: str | None,
    numbers: Numbers,
) -> None:
    frame = frames.get(frame_id)
    if frame is None:
        frames[frame_id] = frame = {
            "frame_id": frame_id,
            "stage_id": None,
            "parent_frame_id": None,
            "command_id": None,
            "claimed_event_id": None,
            "terminal_event_id": None,
            "status": "UNKNOWN",
            "row_count": 0,
            "attempts": 0,
            "last_event_id": None,
            "output_ref": None,
            "output_ref_summary": no_summary(),
            "cursor": {},
            "events_emitted": 0,
        }
    if stage_id is not None:
        frame["stage_id"] = stage_id
    if command_id:
        frame["command_id"] = command_id
    if "parent_frame_id" in meta and (parent := meta["parent_frame_id"]) is not None:
        frame["parent_frame_id"] = str(parent)
    if event_type == "frame.dispatched":
        frame["status"] = "CLAIMED"
        frame["claimed_event_id"] = event_id
        frame["attempts"] = max(frame["attempts"], numbers.attempt(event_id, meta.get("attempt", 1)))
    elif event_type == "frame.started":
        frame["status"] = "RUNNING"
    elif event_type == "frame.abandoned":
        frame["status"] = status or "ABANDONED"
    elif event_type == "frame.committed":
        frame["row_count"] = numbers.counter(
            event_id, "meta.row_count", meta.get("row_count"), frame["row_count"]
        )
        _end_frame(frame, event_id, status or "COMPLETED", meta, reference, numbers)
    elif event_type == "frame.failed":
        _end_frame(frame, event_id, status or "FAILED", meta, reference, numbers)
    elif status:
        frame["status"] = str(status)
    frame["last_event_id"] = event_id


def _end_frame(
    frame: JsonObject, event_id: int | None, status: Json, meta: JsonObject, reference: Json, numbers: Numbers
) -> None:
    frame["status"] = status
    frame["terminal_event_id"] = event_id
    frame["output_ref"] = reference
    frame["output_ref_summary"] = summarise(reference)
    frame["cursor"] = meta.get("cursor") or frame["cursor"] or {}
    frame["events_emitted"] = numbers.counter(
        event_id, "meta.events_emitted", meta.get("events_emitted"), frame["events_emitted"]
    )


def touch_command(
    commands: Surface,
    command_id: str,
    event_id: int | None,
    event_type: str,
    status: Json,
    meta: JsonObject,
    worker_id: Json,
    stage_id: str | None,
    frame_id: str | None,
) -> None:
    command = commands.get(command_id)
    if command is None:
        commands[command_id] = command = {
            "command_id": command_id,
            "stage_id": None,
            "frame_id": frame_id,
            "parent_command_id": None,
            "worker_id": None,
            "worker_locator": None,
            "locality": {},
            "source_locality": {},
            "placement": {},
            "fanout_reduce": {},
            "status": "UNKNOWN",
            "issued_event_id": None,
            "claimed_event_id": None,
            "started_event_id": None,
            "terminal_event_id": None,
            "last_event_id": None,
        }
    if stage_id is not None:
        command["stage_id"] = stage_id
    if frame_id:
        command["frame_id"] = frame_id
    worker = worker_id or meta.get("worker_id")
    if worker is not None:
        command["worker_id"] = str(worker)
    if not _TOPOLOGY.isdisjoint(meta):
        _note_topology(command, meta)
    step = _COMMAND_STEPS.get(event_type)
    if step is not None:
        command["status"] = status or step[0]
        command[step[1]] = event_id
    elif status and event_type.startswith("command."):
        command["status"] = str(status)
    command["last_event_id"] = event_id


def _note_topology(command: JsonObject, meta: JsonObject) -> None:
    if "parent_command_id" in meta and (parent := meta["parent_command_id"]) is not None:
        command["parent_command_id"] = str(parent)
    if "worker_locator" in meta and (locator := meta["worker_locator"]) is not None:
        command["worker_locator"] = str(locator)
    for name in _COMMAND_OBJECTS:
        if name in meta and isinstance(meta[name], dict):
            command[name] = meta[name]


def touch_loop(
    loops: Surface,
    loop_id: str,
    event_id: int | None,
    event_type: str,
    node_name: Json,
    meta: JsonObject,
    numbers: Numbers,
) -> None:
    loop = loops.get(loop_id)
    if loop is None:
        loops[loop_id] = loop = {
            "loop_id": loop_id,
            "step_name": node_name,
            "total": numbers.total(event_id, meta.get("collection_size"), meta.get("total")),
            "done": 0,
            "failed": 0,
            "completed": False,
            "last_event_id": None,
        }
    if event_type in ("command.completed", "loop.shard.done"):
        loop["done"] += 1
    elif event_type in ("command.failed", "loop.shard.failed"):
        loop["failed"] += 1
    elif event_type in ("loop.done", "loop.fanin.completed"):
        loop["completed"] = True
    loop["last_event_id"] = event_id


def business_identity(meta: JsonObject, aggregate_type: Json, aggregate_id: Json) -> tuple[str, str] | None:
    """Type and id of the business object an event speaks of, or None."""
    named = meta.get("business_object")
    named = named.get if isinstance(named, dict) else _nothing
    kind = (
        named("object_type") or named("type") or meta.get("business_object_type") or meta.get("object_type")
    )
    identity = named("object_id") or named("id") or meta.get("business_object_id") or meta.get("object_id")
    if aggregate_type == "business_object" and aggregate_id is not None:
        parts = [part for part in str(aggregate_id).split("/") if part]
        if parts and parts[0] == "business_object":
            del parts[0]
        if len(parts) >= 2:
            kind, identity = kind or parts[0], identity or "/".join(parts[1:])
        else:
            kind, identity = kind or "business_object", identity or aggregate_id
    if kind is None or identity is None:
        return None
    return str(kind), str(identity)


def touch_business_object(
    business_objects: Surface,
    identity: tuple[str, str],
    event_id: int | None,
    event_type: str,
    status: Json,
    meta: JsonObject,
    reference: Json,
    numbers: Numbers,
) -> None:
    """`status` is the column's, or None where the rules say that it does not count."""
    object_key = "/".join(identity)
    entry = business_objects.get(object_key)
    if entry is None:
        business_objects[object_key] = entry = {
            "object_key": object_key,
            "object_type": identity[0],
            "object_id": identity[1],
            "status": "UNKNOWN",
            "version": 0,
            "event_count": 0,
            "first_event_id": event_id,
            "last_event_id": None,
            "deleted_event_id": None,
            "last_event_type": None,
            "last_payload_ref": None,
            "payload_refs": [],
            "attributes": {},
        }
    entry["last_event_id"] = event_id
    entry["last_event_type"] = event_type
    entry["event_count"] += 1
    named = meta.get("business_object")
    if not isinstance(named, dict):
        named = {}
    entry["version"] = numbers.first(
        event_id,
        (
            ("meta.business_object.version", named.get("version")),
            ("meta.business_object_version", meta.get("business_object_version")),
        ),
        entry["event_count"],
    )
    candidate = status if status is not None else _status_by_type(event_type)
    if candidate:
        entry["status"] = candidate
        if candidate == "DELETED":
            entry["deleted_event_id"] = event_id
    if isinstance(named.get("state"), dict):
        entry["attributes"] = dict(named["state"])
    patch = named.get("patch") or named.get("attributes")
    if isinstance(patch, dict):
        entry["attributes"] |= patch
    if reference is not None:
        noted = {"event_id": event_id, "reference": reference, "summary": summarise(reference)}
        entry["payload_refs"].append(noted)
        entry["last_payload_ref"] = noted


def _status_by_type(event_type: str) -> str | None:
    return _STATUS_BY_SUFFIX.get(event_type.lower().rpartition(".")[2]) if "." in event_type else None


def _nothing(_key: str) -> Any:
    return None
