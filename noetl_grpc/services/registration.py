"""Registering a path: one id and one event, however many ask at once, on whatever shard.

The path's lock is taken in the cluster database and held until the event is committed in its shard, so whoever gets
the lock next sees it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

from noetl_grpc.core import lifecycle
from noetl_grpc.core.lifecycle import Action, Cause, State, Subscription
from noetl_grpc.errors import NotASubscription, NotFound
from noetl_grpc.services.fanout import all_or_raise, ask_every_shard
from noetl_grpc.services.turns import Turns
from noetl_grpc.storage import catalog_entries, subscriptions
from noetl_grpc.storage.pool import Connection, Pool, Shards

DRAIN_TIMEOUT = Cause(actor=lifecycle.OURSELVES, reason="drain timeout")


class Registrar:
    """Finds the subscription of a path, or makes it."""

    def __init__(
        self,
        shards: Shards,
        next_id: Callable[[], int],
        *,
        drain_timeout: timedelta,
        on_stored: Callable[[int], None],
    ) -> None:
        self._shards = shards
        self._on_stored = on_stored
        self._next_id = next_id
        self._drain_timeout = drain_timeout
        self._turns = Turns()

    async def register(self, path: str) -> tuple[Subscription, bool]:
        """The subscription of the path, and whether this call made it."""
        subscription, created = await self._find_or_create(path)
        if created:
            self._on_stored(self._shards.shard_of(subscription.subscription_id))
        return subscription, created

    async def _find_or_create(self, path: str) -> tuple[Subscription, bool]:
        async with self._turns.turn(path), self._shards.cluster.transaction() as cluster:
            await subscriptions.lock_path(cluster, path)
            entry = await self._entry(cluster, path)
            for found in await self._live(cluster, path):
                kept = found if found.state is not State.DRAINING else await self._unwedge(cluster, found)
                if kept is not None:
                    return kept, False
            return await self._create(cluster, path, entry), True

    async def _entry(self, cluster: Connection, path: str) -> subscriptions.CatalogEntry:
        entry = await subscriptions.newest_catalog_entry(cluster, path)
        if entry is None:
            raise NotFound(
                f"the catalog has no entry {path}", reason="CATALOG_ENTRY_NOT_FOUND", metadata={"path": path}
            )
        if entry.kind.lower() != lifecycle.CATALOG_KIND:
            raise NotASubscription(
                f"catalog entry {path} is of kind {entry.kind}, not {lifecycle.CATALOG_KIND}",
                metadata={"path": path, "kind": entry.kind, "version": entry.version},
            )
        return entry

    async def _live(self, cluster: Connection, path: str) -> list[Subscription]:
        """All of the path that are not DEACTIVATED, newest change first; there may be several in an old log."""

        async def ask(pool: Pool) -> list[Subscription]:
            if pool is self._shards.cluster:
                return await subscriptions.live_of_path(cluster, path)
            async with pool.acquire() as conn:
                return await subscriptions.live_of_path(conn, path)

        answers = all_or_raise(await ask_every_shard(self._shards, ask))
        found = [subscription for answer in answers for subscription in answer]
        return sorted(found, key=lambda subscription: subscription.last_event_id, reverse=True)

    async def _unwedge(self, cluster: Connection, found: Subscription) -> Subscription | None:
        """The subscription, unless it is over: nobody is left to end its draining, so we do."""
        subscription_id = found.subscription_id
        async with self._writing(self._shards.pool_for(subscription_id), cluster) as conn:
            await subscriptions.lock(conn, subscription_id)
            present = await subscriptions.read(conn, subscription_id)
            if present is None or present[0].state is State.DEACTIVATED:
                return None
            current, now = present
            since = await subscriptions.draining_since(conn, subscription_id) or now
            if not lifecycle.is_wedged(
                current, draining_since=since, drain_timeout=self._drain_timeout, now=now
            ):
                return current
            event = lifecycle.advance(
                current, Action.DEACTIVATE, event_id=self._next_id(), now=now, cause=DRAIN_TIMEOUT
            )
            await subscriptions.append(conn, event)
            return None

    async def _create(
        self, cluster: Connection, path: str, entry: subscriptions.CatalogEntry
    ) -> Subscription:
        subscription_id = self._next_id()
        async with self._writing(self._shards.pool_for(subscription_id), cluster) as conn:
            if conn is not cluster and not await catalog_entries.known_ids(conn, [entry.catalog_id]):
                await catalog_entries.copy(conn, await catalog_entries.read(cluster, [entry.catalog_id]))
            event = lifecycle.register(
                subscription_id=subscription_id,
                event_id=self._next_id(),
                path=path,
                catalog_id=entry.catalog_id,
                now=await subscriptions.read_clock(conn),
            )
            return lifecycle.subscription_at(await subscriptions.append(conn, event))

    @asynccontextmanager
    async def _writing(self, pool: Pool, cluster: Connection) -> AsyncIterator[Connection]:
        """A transaction in a shard. In the cluster's own database it is the one with the lock: a second connection
        of that pool might never come free while others hold theirs and wait for the lock."""
        if pool is self._shards.cluster:
            yield cluster
            return
        async with pool.transaction() as conn:
            yield conn
            # If the lock went with its connection, somebody else may be at it already.
            await subscriptions.check_lock_connection(cluster)
