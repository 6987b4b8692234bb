"""Events that could not be stored, as they are kept until somebody mends the cause."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDeadEvent:
    """An event to park."""

    execution_id: int
    event_id: int
    catalog_id: int | None
    event_type: str | None
    node_name: str | None
    reason: str
    last_error: str
    payload_json: str


@dataclass(frozen=True, slots=True)
class DeadEvent:
    """An event that is parked."""

    execution_id: int
    event_id: int
    catalog_id: int | None
    event_type: str | None
    node_name: str | None
    reason: str
    attempts: int
    last_error: str | None
    parked_by: str
    parked_at: datetime
    #: Only where it was asked for.
    payload_json: str | None
