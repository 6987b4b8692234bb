"""Callers who wait for an event to be in its snapshot: one look per shard for all, so none holds a connection."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from noetl_grpc.errors import NoetlError
from noetl_grpc.storage import cursors, projections
from noetl_grpc.storage.pool import Pool, Shards
from noetl_grpc.storage.projections import Awaited

logger = logging.getLogger("noetl_grpc.waiters")

#: How often the snapshots are looked at while somebody waits; what this process advances is looked at at once.
LOOK_SECONDS = 0.02
LOOK_SECONDS_AFTER_FAILURE = 0.5
#: Waiters that one statement asks for.
BATCH_WAITERS = 1000


class _ShardWaiters:
    """The waiters of one shard. It looks only while there are some."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: dict[asyncio.Future[int], Awaited] = {}
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, awaited: Awaited, *, seconds: float) -> int | None:
        """The version of the snapshot that holds the event; None when the time is over."""
        included: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[included] = awaited
        self._news.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_awaited())
        try:
            async with asyncio.timeout(seconds):
                return await included
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(included, None)

    def wake(self) -> None:
        """Look at once."""
        self._news.set()

    async def close(self) -> None:
        """Stop looking."""
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    async def _look_while_awaited(self) -> None:
        while self._waiting:
            self._news.clear()
            pause_seconds = LOOK_SECONDS
            try:
                await self._look()
            except NoetlError as error:
                logger.warning("could not look at the snapshots: %s", error)
                pause_seconds = LOOK_SECONDS_AFTER_FAILURE
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await self._news.wait()

    async def _look(self) -> None:
        everybody = list(self._waiting.items())
        async with self._pool.acquire() as conn:
            has_xact_id = await cursors.can_follow_snapshots(conn)
            for start in range(0, len(everybody), BATCH_WAITERS):
                batch = everybody[start : start + BATCH_WAITERS]
                found = await projections.included_events(
                    conn, [awaited for _, awaited in batch], has_xact_id=has_xact_id
                )
                for place, (is_included, version) in found.items():
                    future = batch[place][0]
                    if is_included and not future.done():
                        future.set_result(version)


class Waiters:
    """The waiters of all shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._by_shard = [_ShardWaiters(pool) for pool in shards.pools]

    async def wait(self, awaited: Awaited, *, seconds: float) -> int | None:
        """The version of the snapshot that holds the event; None when the time is over."""
        return await self._by_shard[self._shards.shard_of(awaited.execution_id)].wait(
            awaited, seconds=seconds
        )

    def wake(self) -> None:
        """Somebody in this process has advanced snapshots."""
        for waiters in self._by_shard:
            waiters.wake()

    async def close(self) -> None:
        """Stop looking."""
        for waiters in self._by_shard:
            await waiters.close()
