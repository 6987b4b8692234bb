"""Whose log is read, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

EVENT_ID_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Scope:
    """One execution of one tenant."""

    tenant_id: str
    organization_id: str
    execution_id: int


@dataclass(frozen=True, slots=True)
class Cutoff:
    """Inclusive; by event id, or by event_time, or neither."""

    event_id: int = EVENT_ID_MAX
    time: datetime | None = None

    def precedes(self, other: Cutoff) -> bool:
        """Whether what this one lets through is a prefix of what the other does, in any log."""
        return self.time is None and other.time is None and self.event_id <= other.event_id


EVERYTHING = Cutoff()
