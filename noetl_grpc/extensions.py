"""What a deployment adds by entry points: upcasters for old events, resolvers for payloads."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import cast

from noetl_grpc.core.upcast import Registration, Registry
from noetl_grpc.errors import SettingsError
from noetl_grpc.services.payloads import PayloadResolver

#: Each entry is a callable without arguments that returns (schema name, from version, function) triples.
UPCASTERS = "noetl_grpc.upcasters"
#: Each entry is a callable without arguments that returns a resolver.
PAYLOAD_RESOLVERS = "noetl_grpc.payload_resolvers"


def load_registry() -> Registry:
    """Every upcaster that is installed."""
    registrations: list[Registration] = []
    for name, made in _load(UPCASTERS):
        try:
            registrations += cast(Iterable[Registration], made)
        except TypeError:
            raise SettingsError(f"entry point {name} of {UPCASTERS} gives no list of upcasters") from None
    try:
        return Registry.of(registrations)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"the upcasters of {UPCASTERS} can't be used: {error}") from None


def load_resolvers() -> list[PayloadResolver]:
    """Every payload resolver that is installed."""
    return [cast(PayloadResolver, made) for _, made in _load(PAYLOAD_RESOLVERS)]


def _load(group: str) -> Iterable[tuple[str, object]]:
    for entry in sorted(entry_points(group=group)):
        try:
            yield entry.name, entry.load()()
        except Exception as error:
            raise SettingsError(f"entry point {entry.name} of {group} can't be loaded: {error}") from error
