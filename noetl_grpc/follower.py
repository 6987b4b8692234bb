"""Tells the streams of this process which events became visible in a shard's log, each once, however late.

One look at the log serves all of them. Subscribers get keys, not rows: they read what they need themselves. A
subscriber that does not keep up is ended; nothing is buffered without bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum
from time import monotonic

from noetl_grpc.core.following import Key, Page, Position
from noetl_grpc.errors import DatabaseUnavailable, NoetlError, Overloaded
from noetl_grpc.storage import cursors
from noetl_grpc.storage.pool import Connection, Pool

logger = logging.getLogger("noetl_grpc")

POLL_SECONDS = 0.01
PAGE_SIZE = 2000
#: Keys that wait for one subscriber.
CAPACITY = 10_000
#: A look may take this part of one connection's time at most, however slow the database is.
SHARE_MAX = 0.25
RETRY_SECONDS_MAX = 1.0
#: How far back overlap mode looks, by the events' own time.
OVERLAP_SECONDS = 30.0
OVERLAP_KEYS_MAX = 20_000


class Mode(Enum):
    """How the log is followed. OVERLAP can miss an event that commits late: the log has no xact_id."""

    SNAPSHOT = "snapshot"
    OVERLAP = "overlap"


class Subscription:
    """What one subscriber has yet to see."""

    def __init__(
        self, *, execution_id: int | None, event_types: frozenset[str] | None, capacity: int
    ) -> None:
        self.execution_id = execution_id
        self.event_types = event_types
        self._capacity = capacity
        self._pages: deque[Page] = deque()
        self._waiting = 0
        self._arrived = asyncio.Event()
        self._ended: NoetlError | None = None

    async def next_page(self) -> Page:
        """Some events in the order they became visible.

        Raises Overloaded once everything has been taken that was kept before this subscriber fell behind.
        """
        while not self._pages:
            if self._ended is not None:
                raise self._ended
            self._arrived.clear()
            await self._arrived.wait()
        page = self._pages.popleft()
        self._waiting -= len(page.keys)
        return page

    def put(self, page: Page) -> None:
        """Add a page that is not empty, or end the subscription if there is no room for it."""
        if self._ended is not None or not page.keys:
            return
        if self._waiting + len(page.keys) > self._capacity and self._pages:
            self.end(Overloaded("the stream is read too slowly; read faster and go on with the resume token"))
            return
        self._pages.append(page)
        self._waiting += len(page.keys)
        self._arrived.set()

    def end(self, error: NoetlError) -> None:
        """Let the subscriber see this once it has taken what is there."""
        self._ended = error
        self._arrived.set()


class Follower:
    """Follows one shard while somebody is interested."""

    def __init__(self, pool: Pool, *, poll_seconds: float = POLL_SECONDS, page_size: int = PAGE_SIZE) -> None:
        self._pool = pool
        self._poll_seconds = poll_seconds
        self._page_size = page_size
        self._position: Position | None = None
        self._recent: dict[Key, None] = {}
        self._joining: dict[Subscription, asyncio.Future[str]] = {}
        self._by_execution: dict[int, set[Subscription]] = {}
        self._of_all: set[Subscription] = set()
        self._needed = asyncio.Event()
        self._woken = asyncio.Event()
        self.mode: Mode | None = None
        #: why the log can't be followed just now, for health
        self.problem: str | None = None

    async def find_mode(self) -> None:
        """Learn how the log can be followed, before anybody asks for it."""
        async with self._pool.acquire() as conn:
            await self._find_mode(conn)

    async def _find_mode(self, conn: Connection) -> None:
        self.mode = Mode.SNAPSHOT if await cursors.can_follow_snapshots(conn) else Mode.OVERLAP

    @property
    def misses_late_commits(self) -> bool:
        """Whether the log has nothing to follow it by but the events' own times."""
        return self.mode is Mode.OVERLAP

    def wake(self) -> None:
        """Look at once: this process has just written events."""
        self._woken.set()

    @asynccontextmanager
    async def subscribe(
        self,
        *,
        execution_id: int | None = None,
        event_types: Collection[str] | None = None,
        capacity: int = CAPACITY,
    ) -> AsyncIterator[tuple[Subscription, str]]:
        """A subscription and the snapshot it begins after: what that did not show will be told.

        In overlap mode the snapshot is empty text.
        """
        types = None if event_types is None else frozenset(event_types)
        subscription = Subscription(execution_id=execution_id, event_types=types, capacity=capacity)
        joined: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._joining[subscription] = joined
        self._needed.set()
        self._woken.set()
        try:
            yield subscription, await joined
        finally:
            self._leave(subscription)

    async def run(self) -> None:
        """Look at the log again and again while there are subscribers. Losing the database loses no event."""
        retry_seconds = self._poll_seconds
        while True:
            if not self._needed.is_set():
                # Nobody misses anything: who comes next begins at a snapshot of then.
                self._position = None
                self._recent = {}
                await self._needed.wait()
            self._woken.clear()
            began = monotonic()
            try:
                await self.run_once()
            except NoetlError as error:
                self._report(error)
                delay_seconds = retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)
            else:
                self.problem = None
                retry_seconds = self._poll_seconds
                took_seconds = monotonic() - began
                delay_seconds = max(self._poll_seconds, took_seconds / SHARE_MAX - took_seconds)
            await self._wait(delay_seconds)

    async def run_once(self) -> None:
        """Tell everybody what became visible since the last time, then take in who waits."""
        async with self._pool.acquire() as conn:
            if self._position is None:
                await self._find_mode(conn)
            elif self._position.target is not None:
                # A failure left this gap unfinished.
                await self._read_gap(conn)
            # Only who waits already: they begin at a snapshot that is not older than their wish.
            joining = list(self._joining)
            snapshot = await self._look(conn)
            if self.mode is Mode.OVERLAP:
                await self._look_at_recent(conn)
                snapshot = ""
            elif self._position is None:
                self._position = Position(snapshot)
            elif snapshot != self._position.seen:
                self._position = self._position.towards(snapshot)
                await self._read_gap(conn)
            self._admit(joining, snapshot)

    async def _read_gap(self, conn: Connection) -> None:
        async with conn.transaction(readonly=True):
            await cursors.prefer_generic_plans(conn)
            while (before := self._position) is not None and before.target is not None:
                keys, self._position = await cursors.gap_keys(conn, before, limit=self._page_size)
                self._publish(Page(keys, before, self._position))

    async def _look(self, conn: Connection) -> str:
        snapshot = await cursors.look_at_log(conn)
        if snapshot is None:
            error = DatabaseUnavailable("the database is a standby, where the log can't be followed")
            for subscription in self._subscriptions():
                subscription.end(error)
            raise error
        return snapshot

    async def _look_at_recent(self, conn: Connection) -> None:
        keys = await cursors.recent_keys(conn, seconds=OVERLAP_SECONDS, limit=OVERLAP_KEYS_MAX)
        if self._position is not None:
            new = [key for key in keys if key not in self._recent]
            self._publish(Page(new, self._position, self._position))
        self._recent = dict.fromkeys(keys)
        self._position = Position("")

    def _admit(self, joining: Iterable[Subscription], snapshot: str) -> None:
        """Take in who waited; between gaps, so that nobody misses the part of one that was told before."""
        for subscription in joining:
            joined = self._joining.pop(subscription, None)
            if joined is None or joined.done():
                continue
            if subscription.execution_id is None:
                self._of_all.add(subscription)
            else:
                self._by_execution.setdefault(subscription.execution_id, set()).add(subscription)
            joined.set_result(snapshot)

    def _publish(self, page: Page) -> None:
        # Many watch the same few types among a flood of others, so each set of types is picked out once.
        picked: dict[frozenset[str] | None, Page] = {}
        for subscription in self._of_all:
            types = subscription.event_types
            if types not in picked:
                picked[types] = _of_types(page, types)
            subscription.put(picked[types])
        of_executions: dict[int, list[Key]] = {}
        for key in page.keys if self._by_execution else ():
            if key.execution_id in self._by_execution:
                of_executions.setdefault(key.execution_id, []).append(key)
        for execution_id, keys in of_executions.items():
            for subscription in self._by_execution[execution_id]:
                subscription.put(_of_types(replace(page, keys=keys), subscription.event_types))

    def _subscriptions(self) -> list[Subscription]:
        return [*self._of_all, *(each for some in self._by_execution.values() for each in some)]

    def _leave(self, subscription: Subscription) -> None:
        self._joining.pop(subscription, None)
        self._of_all.discard(subscription)
        if subscription.execution_id is not None:
            others = self._by_execution.get(subscription.execution_id, set())
            others.discard(subscription)
            if not others:
                self._by_execution.pop(subscription.execution_id, None)
        if not (self._joining or self._of_all or self._by_execution):
            self._needed.clear()

    def _report(self, error: NoetlError) -> None:
        if self.problem != str(error):
            logger.warning("shard %s: the log can't be followed: %s", self._pool.name, error)
        self.problem = str(error)
        for joined in self._joining.values():
            if not joined.done():
                joined.set_exception(error)
        self._joining.clear()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass


def _of_types(page: Page, types: frozenset[str] | None) -> Page:
    if types is None:
        return page
    return replace(page, keys=[key for key in page.keys if key.event_type in types])
