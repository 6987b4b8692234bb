"""How long a message that failed waits before it is due again."""

from __future__ import annotations

EXPONENT_MAX = 8
MAXIMUM_SECONDS_DEFAULT = 300


def delay_seconds(attempts: int, *, maximum: int = MAXIMUM_SECONDS_DEFAULT) -> int:
    """1, 2, 4 … 256 seconds after the first, second, third … ninth attempt, and never more than the maximum.

    No jitter: NoETL's publishers reckon with exactly these delays.
    """
    exponent = min(max(attempts - 1, 0), EXPONENT_MAX)
    return min(maximum, 1 << exponent)
