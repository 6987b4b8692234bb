"""What health says of each service: the databases are looked at, and the answer follows them by itself.

`""` is the process and stays SERVING until it shuts down. A service is NOT_SERVING while the cluster database or
all shards are out of reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from noetl_grpc.errors import NoetlError, Overloaded
from noetl_grpc.storage.pool import Pool, Shards

logger = logging.getLogger("noetl_grpc.health")

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 2.0

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

#: The name under which the tailer's health is asked for.
TAILER = "tailer"


class Health:
    """The health of every service, kept in step with the databases."""

    def __init__(self, shards: Shards, services: Iterable[str]) -> None:
        self.servicer = health_aio.HealthServicer()
        self._shards = shards
        self._services = tuple(services)
        self._serving: bool | None = None

    async def start(self) -> None:
        """Set every name, so that an early question gets an answer and not NOT_FOUND."""
        await self.servicer.set("", SERVING)
        await self.servicer.set(TAILER, SERVING)
        await self.look()

    async def look(self) -> None:
        """Ask the databases once."""
        cluster, *shards = await asyncio.gather(
            _answers(self._shards.cluster), *(_answers(pool) for pool in self._shards.pools)
        )
        serving = cluster and any(shards)
        if serving == self._serving:
            return
        if self._serving is not None or not serving:
            logger.warning(
                "the database is %s", "back" if serving else "out of reach; services are NOT_SERVING"
            )
        self._serving = serving
        for service in self._services:
            await self.servicer.set(service, SERVING if serving else NOT_SERVING)

    async def set_tailer(self, *, serving: bool) -> None:
        """What the tailer says of itself."""
        await self.servicer.set(TAILER, SERVING if serving else NOT_SERVING)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def shut_down(self) -> None:
        """Everything is NOT_SERVING from now on, for ever."""
        await self.servicer.enter_graceful_shutdown()


async def _answers(pool: Pool) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS), pool.acquire() as conn:
            await conn.fetchval("SELECT 1")
    except Overloaded:
        # A busy pool is not an absent database.
        return True
    except (NoetlError, TimeoutError):
        return False
    return True
