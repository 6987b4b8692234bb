"""What is said of an execution's snapshot after it was advanced or verified."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from noetl_grpc.core.checksums import Checksums
from noetl_grpc.core.snapshots import Snapshot


@dataclass(frozen=True, slots=True)
class Advanced:
    """An execution whose snapshot is up to date."""

    execution_id: int
    version: int
    events: int
    changed: bool
    rebuilt: bool


@dataclass(frozen=True, slots=True)
class NotAdvanced:
    """An execution whose snapshot could not be brought up to date."""

    execution_id: int
    reason: str
    detail: str


class Check(Enum):
    """What a comparison of a snapshot with the log found."""

    SAME = "SAME"
    DIFFERENT = "DIFFERENT"
    MISSING = "MISSING"
    STALE = "STALE"


@dataclass(frozen=True, slots=True)
class Verified:
    """One comparison."""

    execution_id: int
    outcome: Check
    stored_checksum: str
    log_checksum: str
    repaired: bool


@dataclass(frozen=True, slots=True)
class Projection:
    """A stored snapshot, its checksums, and when it was written."""

    snapshot: Snapshot
    checksums: Checksums
    updated_at: datetime
