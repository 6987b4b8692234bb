"""States that were stored a moment ago, so that going on from one needs neither reading nor parsing it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noetl_grpc.core.access import Tenant
from noetl_grpc.core.snapshots import Snapshot

#: What all of them may weigh, by the length of their texts; as Python values they take several times that.
TEXT_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HotState:
    """A snapshot and the version of the row that holds it; only while the row still is that one may it be used."""

    place: str
    snapshot: Snapshot
    text_bytes: int


class HotStates:
    """The last ones used, up to a total weight. Who takes one owns it: a fold changes the state it goes on from."""

    def __init__(self, *, text_bytes_max: int = TEXT_BYTES_MAX) -> None:
        self._text_bytes_max = text_bytes_max
        self._text_bytes = 0
        self._states: dict[tuple[str, str, int], HotState] = {}

    def take(self, tenant: Tenant, execution_ids: Iterable[int]) -> dict[int, HotState]:
        """Those that are there; nobody else gets them until they are put back."""
        taken: dict[int, HotState] = {}
        for execution_id in execution_ids:
            state = self._states.pop(_key(tenant, execution_id), None)
            if state is not None:
                self._text_bytes -= state.text_bytes
                taken[execution_id] = state
        return taken

    def peek(self, tenant: Tenant, execution_id: int) -> HotState | None:
        """One as it is now; it may be taken and changed as soon as somebody else runs."""
        return self._states.get(_key(tenant, execution_id))

    def text_bytes_of(self, tenant: Tenant, execution_id: int) -> int | None:
        """What one weighs, if it is there."""
        state = self.peek(tenant, execution_id)
        return state.text_bytes if state else None

    def put(self, tenant: Tenant, state: HotState) -> None:
        """Keep it, at the cost of those that were used least recently."""
        key = _key(tenant, state.snapshot.execution_id)
        before = self._states.pop(key, None)
        self._text_bytes += state.text_bytes - (before.text_bytes if before else 0)
        self._states[key] = state
        while self._text_bytes > self._text_bytes_max:
            oldest = next(iter(self._states))
            self._text_bytes -= self._states.pop(oldest).text_bytes


def _key(tenant: Tenant, execution_id: int) -> tuple[str, str, int]:
    return tenant.tenant_id, tenant.organization_id, execution_id
