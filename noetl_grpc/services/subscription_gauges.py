"""Keeps the gauges about subscriptions near the truth, at a bounded share of the database's time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from time import monotonic

from noetl_grpc.core.lifecycle import State
from noetl_grpc.errors import NoetlError
from noetl_grpc.metrics import Metrics
from noetl_grpc.services.fanout import all_or_raise, ask_every_shard
from noetl_grpc.storage import subscriptions
from noetl_grpc.storage.pool import Pool, Shards

logger = logging.getLogger("noetl_grpc")

LOOK_SECONDS = 10.0
ANSWER_SECONDS = 60.0
#: Counting walks over all lifecycle events, so a long log is counted less often.
SHARE_MAX = 0.02


class SubscriptionGauges:
    """Counts subscriptions by state, and runtimes that stopped reporting."""

    def __init__(self, shards: Shards, metrics: Metrics) -> None:
        self._shards = shards
        self._metrics = metrics

    async def look(self) -> None:
        """Count once. While a shard is out of reach the gauges stay as they are: part of the sum would be a lie."""
        subscriptions_by_state: Counter[State] = Counter()
        runtimes_dead = 0
        for counts in all_or_raise(await ask_every_shard(self._shards, _count, seconds=ANSWER_SECONDS)):
            for found in counts:
                subscriptions_by_state[found.state] += found.subscriptions
                runtimes_dead += found.runtimes_dead
        for state in State:
            self._metrics.subscriptions.labels(state.value).set(subscriptions_by_state[state])
        self._metrics.subscription_runtimes_dead.set(runtimes_dead)

    async def run(self) -> None:
        """Count again and again until cancelled."""
        while True:
            began = monotonic()
            try:
                await self.look()
            except NoetlError as error:
                logger.debug("subscriptions could not be counted: %s", error)
            await asyncio.sleep(max(LOOK_SECONDS, (monotonic() - began) / SHARE_MAX))


async def _count(pool: Pool) -> list[subscriptions.StateCount]:
    async with pool.acquire() as conn:
        return await subscriptions.count(conn)
