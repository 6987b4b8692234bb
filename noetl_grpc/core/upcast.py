"""Upcasters: lift an event of an old schema version to the present one before it is folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from noetl_grpc.core.canonical import checksum
from noetl_grpc.errors import EventMalformed

DEFAULT_SCHEMA = "noetl.event"

#: Takes a copy of the event (column name → value) and returns the event in a newer version.
Upcaster = Callable[[dict[str, Any]], Mapping[str, Any]]
#: schema name, version it takes, the function
Registration = tuple[str, int, Upcaster]

# Two upcasters that rename an event back and forth would otherwise never end.
_STEPS_MAX = 1000


class UpcastError(ValueError):
    """An upcaster can't be registered, or an event can't be lifted."""


@dataclass(frozen=True, slots=True)
class Registry:
    """Upcasters by schema name and version. Its digest is part of every state's checksum."""

    upcasters: Mapping[tuple[str, int], Upcaster]
    digest: str

    @classmethod
    def of(cls, registrations: Iterable[Registration] = ()) -> Registry:
        upcasters: dict[tuple[str, int], Upcaster] = {}
        for schema_name, from_version, upcaster in registrations:
            if not schema_name:
                raise UpcastError("schema_name is required")
            if from_version < 1:
                raise UpcastError("from_version must be >= 1")
            if (schema_name, from_version) in upcasters:
                raise UpcastError(f"upcaster already registered for {schema_name} v{from_version}")
            upcasters[schema_name, from_version] = upcaster
        keys = [{"from_version": version, "schema_name": name} for name, version in sorted(upcasters)]
        return cls(MappingProxyType(upcasters), checksum(keys))

    def upcast(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The event in the newest version this registry knows; the given one is left as it is."""
        lifted = dict(event)
        name, version = lifted.get("schema_name") or DEFAULT_SCHEMA, schema_version_of(lifted)
        for _ in range(_STEPS_MAX):
            upcaster = self.upcasters.get((name, version))
            if upcaster is None:
                return {**lifted, "schema_name": name, "schema_version": version}
            lifted = dict(upcaster({**lifted, "schema_name": name, "schema_version": version}))
            before = name, version
            name, version = lifted.get("schema_name") or name, schema_version_of(lifted)
            if name == before[0] and version <= before[1]:
                raise UpcastError(f"upcaster for {before[0]} v{before[1]} did not advance schema_version")
        raise UpcastError(f"upcasters of {name} v{version} rename the event in a circle")


def schema_version_of(event: Mapping[str, Any]) -> int:
    given = event.get("schema_version")
    if given is None:
        return 1
    try:
        version = int(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise UpcastError(f"invalid schema_version: {given!r}") from error
    if version < 1:
        raise UpcastError("schema_version must be >= 1")
    return version


def upcast_event(registry: Registry, event: Mapping[str, Any]) -> dict[str, Any]:
    """Lift one event of a log; whatever an upcaster raises becomes an error that names the event."""
    try:
        return registry.upcast(event)
    except Exception as error:
        event_id = event.get("event_id") or 0
        raise EventMalformed(
            f"event {event_id} can't be upcast: {error}", event_id=event_id, path="schema_version"
        ) from error
