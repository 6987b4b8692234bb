"""What health says of each service: the databases are looked at, and the answer follows them by itself.

`""` is the process and stays SERVING until it shuts down. A service is NOT_SERVING while the cluster database or
all shards are out of reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

from grpc_health.v1 import health_pb2, health_pb2_grpc

from noetl_grpc.calls import Context
from noetl_grpc.errors import NoetlError, NotFound, Overloaded
from noetl_grpc.storage.pool import Pool, Shards

logger = logging.getLogger("noetl_grpc.health")

Status: TypeAlias = Any  # the enum's type has another name in the stubs than in the package

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 2.0

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

#: The name under which the tailer's health is asked for.
TAILER = "tailer"


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Serves grpc.health.v1.Health. Keeps nothing of names that it does not know, as anybody may ask for any."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_final = False

    def set(self, service: str, status: Status) -> None:
        """Tell every watcher what has become of a service."""
        if not self._is_final:
            self._statuses[service] = status
            self._announce()

    def shut_down(self) -> None:
        """Everything is NOT_SERVING, and stays so."""
        self._is_final = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._announce()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def Check(  # noqa: N802  # the name of the protocol
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            raise NotFound("the service is not known here", reason="SERVICE_NOT_FOUND")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:  # noqa: N802  # the name of the protocol
        pb: Any = health_pb2  # the stubs do not know this RPC
        listed = {name: pb.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return pb.HealthListResponse(statuses=listed)

    async def Watch(  # noqa: N802  # the name of the protocol
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.shield(changed)


class Health:
    """The health of every service, kept in step with the databases."""

    def __init__(self, shards: Shards, services: Iterable[str]) -> None:
        self.servicer = HealthServicer()
        self._shards = shards
        self._services = tuple(services)
        self._serving: bool | None = None

    async def start(self) -> None:
        """Set every name, so that an early question gets an answer and not NOT_FOUND."""
        self.servicer.set("", SERVING)
        self.servicer.set(TAILER, SERVING)
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
            self.servicer.set(service, SERVING if serving else NOT_SERVING)

    async def set_tailer(self, *, serving: bool) -> None:
        """What the tailer says of itself."""
        self.servicer.set(TAILER, SERVING if serving else NOT_SERVING)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def shut_down(self) -> None:
        """Everything is NOT_SERVING from now on, for ever."""
        self.servicer.shut_down()


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
