"""What KEDA's trigger asks for, and how far its metric is counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from noetl_grpc.errors import InvalidRequest

TARGET = 100.0
TARGET_MAX = 1e15

#: More than this many replicas' worth is not counted, so that the cost does not follow the backlog.
REPLICAS_COUNTED_MAX = 100
#: Where counting ends; a few sizes only, so that triggers share their looks at the database.
ROWS_COUNTED = (1000, 10_000, 100_000)


class Metric(Enum):
    """What can be scaled by."""

    OUTBOX_PENDING = "outbox_pending"
    OUTBOX_OLDEST_SECONDS = "outbox_oldest_seconds"
    TAILER_LAG_EVENTS = "tailer_lag_events"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A metric and how much of it one replica should carry."""

    metric: Metric
    target: float

    @property
    def target_size(self) -> int:
        """The target for a KEDA that knows whole numbers only; 0 would divide by zero there."""
        return max(1, math.ceil(self.target))

    @property
    def rows_counted_max(self) -> int:
        """Rows that are counted; more replicas than they call for are not asked for."""
        wanted = self.target * REPLICAS_COUNTED_MAX
        return next((rows for rows in ROWS_COUNTED if rows >= wanted), ROWS_COUNTED[-1])


def parse_trigger(metadata: Mapping[str, str]) -> Trigger:
    """The trigger of a ScaledObject; keys that are KEDA's own are ignored."""
    try:
        metric = Metric(metadata.get("metric", "").strip() or Metric.OUTBOX_PENDING.value)
    except ValueError:
        names = ", ".join(metric.value for metric in Metric)
        raise InvalidRequest("scalerMetadata.metric", f"must be one of {names}") from None
    return Trigger(metric, _parse_target(metadata.get("target", "").strip()))


def _parse_target(text: str) -> float:
    if not text:
        return TARGET
    try:
        target = float(text)
    except ValueError:
        target = 0.0
    if not 0 < target <= TARGET_MAX:  # also refuses NaN
        raise InvalidRequest(
            "scalerMetadata.target", f"must be a number above 0 and at most {TARGET_MAX:.0f}"
        )
    return target
