"""Mints ids under a leased machine id.

How far ids may be used is written to the database ahead of use, so neither a backward clock nor a restart
repeats one. Whether the lease still lives is judged by the monotonic clock: without a renewal, minting stops.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from noetl_grpc.core import snowflake
from noetl_grpc.errors import DatabaseUnavailable, NoetlError, Overloaded
from noetl_grpc.storage.pool import Pool
from noetl_grpc.storage.queries import queries

logger = logging.getLogger("noetl_grpc.ids")

LEASE_SECONDS = 30.0
RENEW_SECONDS = 5.0
AHEAD_MS = 15_000
TRIES_MAX = 50


class IdSource:
    """The ids of one process."""

    def __init__(
        self,
        pool: Pool,
        *,
        machine_id: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._configured = machine_id
        self._holder = uuid.uuid4().hex
        self._clock = clock
        self._monotonic = monotonic
        self._place = snowflake.Clock(ms=0)
        self._used_until_ms = 0
        self._lease_ends = float("-inf")
        self.machine_id = -1

    def next_id(self) -> int:
        """A new id, higher than every id of this process before it."""
        if self._monotonic() >= self._lease_ends:
            raise DatabaseUnavailable("no id can be made until the machine lease is renewed; try again later")
        # A clock that jumps ahead of what was written down waits there for the next renewal.
        place = self._place.next(min(int(self._clock() * 1000), self._used_until_ms))
        if place.ms > self._used_until_ms:
            raise Overloaded("ids are made faster than their time goes by; try again later")
        self._place = place
        return snowflake.compose(place, machine_id=self.machine_id)

    async def open(self) -> None:
        """Lease a machine id; nothing can be minted before."""
        for _ in range(TRIES_MAX):
            async with self._pool.acquire() as conn:
                if self._configured is None:
                    row = await conn.fetchrow(queries["take_machine_id"], self._holder, LEASE_SECONDS)
                else:
                    row = await conn.fetchrow(
                        queries["take_this_machine_id"], self._configured, self._holder, LEASE_SECONDS
                    )
            if row is not None:
                break
        else:
            raise Overloaded("all 1024 machine ids are leased; stop a server or wait for a lease to end")
        self.machine_id = row["machine_id"]
        self._place = snowflake.Clock(ms=row["used_until_ms"])
        self._used_until_ms = row["used_until_ms"]
        await self.renew()

    async def renew(self) -> None:
        """Prolong the lease; a lease that somebody else took over is replaced by a new one."""
        began = self._monotonic()
        ahead_ms = max(int(self._clock() * 1000), self._place.ms) + AHEAD_MS
        async with self._pool.acquire() as conn:
            written = await conn.fetchval(
                queries["renew_machine_id"], self.machine_id, self._holder, LEASE_SECONDS, ahead_ms
            )
        if written is not None:
            self._used_until_ms = ahead_ms
            self._lease_ends = began + LEASE_SECONDS
            return
        self._lease_ends = float("-inf")
        if self._configured is not None:
            logger.error(
                "machine id %d was taken over by another process; this one makes no more ids."
                " Give each server its own NOETL_SERVER_MACHINE_ID, or none",
                self._configured,
            )
            return
        logger.warning("the lease of machine id %d was lost; leasing another", self.machine_id)
        await self.open()

    async def run(self) -> None:
        """Renew until cancelled; failures are tried again while the lease still lives and after."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                async with asyncio.timeout(RENEW_SECONDS * 2):
                    await self.renew()
            except (NoetlError, TimeoutError) as error:
                logger.warning("the machine lease could not be renewed: %s", error)

    async def close(self) -> None:
        """Give the machine id back."""
        if self._lease_ends == float("-inf"):
            return
        self._lease_ends = float("-inf")
        try:
            async with self._pool.acquire() as conn:
                await conn.execute(
                    queries["release_machine_id"], self.machine_id, self._holder, self._place.ms
                )
        except NoetlError as error:
            logger.warning("the machine lease could not be given back, it ends by itself: %s", error)
