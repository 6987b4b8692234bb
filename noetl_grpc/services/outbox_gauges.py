"""Keeps the gauges about the outbox near the truth, at a bounded share of the database's time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from noetl_grpc.core.outbox import Stats
from noetl_grpc.errors import NoetlError
from noetl_grpc.metrics import OUTBOX_STATES, Metrics

logger = logging.getLogger("noetl_grpc")

LOOK_SECONDS = 10.0
ANSWER_SECONDS = 60.0
#: Counting takes longer the more rows wait, so a long backlog is counted less often.
SHARE_MAX = 0.02


class OutboxGauges:
    """Counts rows by state, and how long the oldest has been due."""

    def __init__(self, stats: Callable[[], Awaitable[Stats]], metrics: Metrics) -> None:
        self._stats = stats
        self._metrics = metrics

    async def look(self) -> None:
        """Count once. While a shard is out of reach the gauges stay as they are: part of the sum would be a lie."""
        async with asyncio.timeout(ANSWER_SECONDS):
            stats = await self._stats()
        for state in OUTBOX_STATES:
            self._metrics.outbox_rows.labels(state).set(getattr(stats, state))
        age = stats.oldest_pending_age
        self._metrics.outbox_oldest_pending_seconds.set(age.total_seconds() if age else 0)

    async def run(self) -> None:
        """Count again and again until cancelled."""
        while True:
            began = monotonic()
            try:
                await self.look()
            except (NoetlError, TimeoutError) as error:
                logger.debug("the outbox could not be counted: %s", error)
            await asyncio.sleep(max(LOOK_SECONDS, (monotonic() - began) / SHARE_MAX))
