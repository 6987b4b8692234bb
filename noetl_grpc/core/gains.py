"""What a state has gained since a version: all of it that later events have touched."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from noetl_grpc.core.canonical import Json, JsonObject
from noetl_grpc.core.fold import SURFACES

_COUNTERS = ("event_count", "last_event_id", "last_event_type")


def gains_since(state: Mapping[str, Any], version: int) -> JsonObject:
    """What events behind the version have left; every one of them is in the state, and none at or below came later."""
    execution = state["execution"]
    gains: JsonObject = {name: state[name] for name in _COUNTERS}
    gains["execution"] = {**execution, "payload_refs": _refs_since(execution["payload_refs"], version)}
    for surface in SURFACES:
        entries = state[surface]
        if entries:
            touched = {key: entry for key, entry in entries.items() if entry["last_event_id"] > version}
            if touched:
                gains[surface] = touched
    return gains


def bring_forward(state: JsonObject, gains: Mapping[str, Any]) -> None:
    """Turn the state of that version into the one that gained this. What is new comes last in its surface."""
    refs = state["execution"]["payload_refs"]
    for key, value in gains.items():
        state[key] = state[key] | value if key in SURFACES else value
    state["execution"]["payload_refs"] = refs + gains["execution"]["payload_refs"]


def _refs_since(refs: list[Json], version: int) -> list[Json]:
    return refs[bisect_right(refs, version, key=itemgetter("event_id")) :]
