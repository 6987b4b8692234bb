"""Keeps the gauge about snapshots that lag behind near the truth, at a bounded share of the database's time."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from noetl_grpc.errors import NoetlError
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.fanout import all_or_raise, ask_every_shard
from noetl_grpc.storage import cursors, projections
from noetl_grpc.storage.pool import Pool, Shards

logger = logging.getLogger("noetl_grpc")

LOOK_SECONDS = 2.0
ANSWER_SECONDS = 10.0
SHARE_MAX = 0.01
#: A projector works on what is new; to count everything would mean to read everything.
EVENTS = 1000


class ProjectionGauge:
    """Counts executions with recent events that wait for their snapshot."""

    def __init__(self, shards: Shards, metrics: Metrics) -> None:
        self._shards = shards
        self._metrics = metrics

    async def look(self) -> None:
        """Count once. While a shard is out of reach the gauge stays as it is: part of the sum would be a lie."""
        counts = all_or_raise(await ask_every_shard(self._shards, _count, seconds=ANSWER_SECONDS))
        self._metrics.projection_behind.set(sum(counts))

    async def run(self) -> None:
        """Count again and again until cancelled."""
        while True:
            began = monotonic()
            try:
                await self.look()
            except NoetlError as error:
                logger.debug("snapshots behind the log could not be counted: %s", error)
            await asyncio.sleep(max(LOOK_SECONDS, (monotonic() - began) / SHARE_MAX))


async def _count(pool: Pool) -> int:
    async with pool.acquire() as conn:
        if not await cursors.can_follow_snapshots(conn):
            return 0
        return await projections.count_behind(conn, events=EVENTS)
