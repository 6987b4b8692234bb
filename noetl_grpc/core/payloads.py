"""Payload references: which one an event has, their summary and locator, and the report of resolving them.

The body of a payload never enters a state; what does is the reference as it was recorded. Resolving is an
extra that stands outside every checksum of the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noetl_grpc.core.canonical import Json, JsonObject, canonical_json, checksum, sha256_hex

NO_LOCATOR = "payload reference has no resolvable locator"


def reference_of(payload_ref: Json, result: Json) -> Json:
    """The event's payload reference: the column, else what its result refers to."""
    if payload_ref is not None:
        return payload_ref
    return result.get("reference") if isinstance(result, dict) else None


def no_summary() -> JsonObject:
    return {"sha256": None, "schema_digest": None, "row_count": None, "media_type": None, "ref": None}


def summarise(reference: Json) -> JsonObject:
    """The five facts that checksums take from a reference."""
    if not isinstance(reference, dict):
        return no_summary()
    get = reference.get
    rows_ref = get("rows_ref")
    if not isinstance(rows_ref, dict):
        return {
            "sha256": get("sha256") or get("digest"),
            "schema_digest": get("schema_digest") or None,
            "row_count": get("row_count") or None,
            "media_type": get("media_type") or None,
            "ref": get("ref") or get("uri"),
        }
    meta = _object(rows_ref.get("meta")).get
    ipc = _object(rows_ref.get("ipc")).get
    return {
        "sha256": get("sha256") or meta("sha256") or ipc("sha256") or get("digest"),
        "schema_digest": get("schema_digest") or meta("schema_digest") or ipc("schema_digest"),
        "row_count": get("row_count") or meta("row_count") or ipc("row_count"),
        "media_type": get("media_type") or meta("media_type") or ipc("media_type"),
        "ref": get("ref") or rows_ref.get("ref") or get("uri"),
    }


def locator_of(reference: Json) -> Json:
    """Where the payload can be fetched, or None."""
    if isinstance(reference, str):
        return reference
    if not isinstance(reference, dict):
        return None
    if reference.get("kind") == "payload_store":
        stored = reference.get("uri") or reference.get("sha256")
        if stored:
            return stored
    return _first_locator(reference) or _first_locator(_object(reference.get("rows_ref"))) or None


@dataclass(frozen=True, slots=True)
class PayloadUse:
    """One place of a state that refers to a payload."""

    labels: JsonObject
    reference: Json

    @property
    def key(self) -> str:
        """Uses with the same key are resolved once."""
        locator = locator_of(self.reference)
        return str(locator) if locator else canonical_json(self.reference).decode()


def payload_uses(state: Mapping[str, Any]) -> Iterator[PayloadUse]:
    """Every reference in a state: the execution's, then the frames', then the business objects'."""
    for entry in state["execution"]["payload_refs"]:
        if entry["reference"] is not None:
            yield PayloadUse({"scope": "execution", "event_id": entry["event_id"]}, entry["reference"])
    for frame_id, frame in state["frames"].items():
        if frame["output_ref"] is not None:
            labels = {"scope": "frame", "frame_id": frame_id, "event_id": frame["terminal_event_id"]}
            yield PayloadUse(labels, frame["output_ref"])
    for object_key, business_object in state["business_objects"].items():
        for entry in business_object["payload_refs"]:
            labels = {"scope": "business_object", "object_key": object_key, "event_id": entry["event_id"]}
            yield PayloadUse(labels, entry["reference"])


def unresolved(reference: Json, error: str) -> JsonObject:
    return _resolution(str(locator_of(reference) or ""), resolved=False, error=error)


def resolved(reference: Json, payload: Json) -> JsonObject:
    """The resolution of a payload that was fetched and checked."""
    if isinstance(payload, bytes):
        payload = payload.hex()
        value_type = "bytes"
    else:
        value_type = type(payload).__name__
    text = canonical_json(payload)
    return _resolution(
        str(locator_of(reference)),
        resolved=True,
        checksum=sha256_hex(text),
        size_bytes=len(text),
        row_count=_row_count(payload),
        value_type=value_type,
    )


def resolution_row(use: PayloadUse, resolution: JsonObject) -> JsonObject:
    return {**use.labels, "reference_summary": summarise(use.reference), "resolution": resolution}


def resolution_summary(rows: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Counts over all rows, and a checksum that covers the rows too."""
    resolutions = [row["resolution"] for row in rows]
    done = sum(1 for resolution in resolutions if resolution.get("resolved") is True)
    references = sorted({resolution["ref"] for resolution in resolutions if resolution.get("ref")})
    summary: JsonObject = {
        "total": len(rows),
        "resolved": done,
        "unresolved": len(rows) - done,
        "unique_refs": len(references),
        "all_resolved": done == len(rows),
    }
    return {**summary, "checksum": checksum({**summary, "unique_refs": references, "rows": list(rows)})}


def _object(value: Json) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _first_locator(reference: JsonObject) -> Json:
    return reference.get("ref") or reference.get("uri") or reference.get("locator")


def _row_count(payload: Json) -> int | None:
    if isinstance(payload, dict):
        payload = payload.get("rows")
    return len(payload) if isinstance(payload, list) else None


def _resolution(
    ref: str,
    *,
    resolved: bool,
    checksum: str | None = None,
    size_bytes: int | None = None,
    row_count: int | None = None,
    value_type: str | None = None,
    error: str | None = None,
) -> JsonObject:
    return {
        "ref": ref,
        "resolved": resolved,
        "checksum": checksum,
        "size_bytes": size_bytes,
        "row_count": row_count,
        "value_type": value_type,
        "error": error,
    }
