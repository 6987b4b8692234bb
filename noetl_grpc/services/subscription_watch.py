"""Watching subscriptions: first the present, as of a snapshot, then every change that this snapshot did not show.

However many watch, the log is looked at once, by the follower, and each change is read once. No connection is held
while a caller thinks, and nothing is buffered for one who does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from noetl_grpc.core import watching
from noetl_grpc.core.following import Key, Page, Position, is_ahead
from noetl_grpc.core.lifecycle import EVENT_TYPES, Subscription
from noetl_grpc.core.watching import Place, Target, positions_behind
from noetl_grpc.errors import DatabaseUnavailable, InvalidRequest
from noetl_grpc.follower import Follower
from noetl_grpc.follower import Subscription as Told
from noetl_grpc.services.subscription_answers import merge, subscription_not_found
from noetl_grpc.storage import cursors, subscriptions
from noetl_grpc.storage.pool import Pool

LIFECYCLE = frozenset(EVENT_TYPES)
#: Changes that wait for one caller before it is too slow.
CAPACITY = 1000
PRESENT_ROWS = 200
CATCH_UP_KEYS = 500
#: Changes that are kept for callers who have yet to come to them.
KEPT_MAX = 2 * CAPACITY


@dataclass(frozen=True, slots=True)
class Step:
    """How far a watch has come, with what it tells there, if anything."""

    place: Place
    subscription: Subscription | None = None
    initial: bool = False


class Feed:
    """What all watches of one shard share."""

    def __init__(self, pool: Pool, follower: Follower) -> None:
        self.pool = pool
        self.follower = follower
        #: Held while the database is asked, so that all watches together use one connection.
        self.reading = asyncio.Lock()
        self._kept: dict[tuple[Position, Key], Subscription | None] = {}

    async def read(self, page: Page) -> list[Subscription | None]:
        """The subscriptions as of a page's events; None for what changed nothing."""
        async with self.reading:
            if any((page.before, key) not in self._kept for key in page.keys):
                async with self.pool.transaction(readonly=True) as conn:
                    await cursors.prefer_generic_plans(conn)
                    last_event_ids = await subscriptions.last_events_before(conn, page)
                    found = watching.changes(
                        page, await subscriptions.read_changes(conn, page), last_event_ids
                    )
                self._kept.update(zip(((page.before, key) for key in page.keys), found, strict=True))
            changes = [self._kept[page.before, key] for key in page.keys]
            while len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]
        return changes


class Pages:
    """The pages of several shards as they come."""

    def __init__(self, told: Sequence[Told]) -> None:
        self._waiting = {asyncio.ensure_future(one.next_page()): number for number, one in enumerate(told)}
        self._told = told

    async def next(self) -> tuple[int, Page]:
        """A page, and the number of the shard it is from."""
        await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        task = next(task for task in self._waiting if task.done())
        page = task.result()
        number = self._waiting.pop(task)
        # Put behind the others, so that a busy shard does not keep a quiet one from being heard.
        self._waiting[asyncio.ensure_future(self._told[number].next_page())] = number
        return number, page

    async def close(self) -> None:
        """Wait no more."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)


class Watch:
    """One caller's stream."""

    def __init__(self, feeds: Sequence[Feed], target: Target) -> None:
        #: Those of the shards that may hold what is watched.
        self._feeds = feeds
        self._target = target

    async def steps(self, place: Place | None) -> AsyncGenerator[Step, None]:
        """From the present, or behind a place that an earlier watch came to."""
        now = await self._positions(place)
        async with AsyncExitStack() as stack:
            if now:
                is_new = place is None or not place.positions
                if place is None or not place.positions:
                    place = Place(now, told=0)
                yield Step(place)
                async for step in self._present(place, must_exist=is_new):
                    yield step
                place = replace(place, told=None)
                yield Step(place)
            joined = await self._join(stack)
            if now and all(snapshot for _, snapshot in joined):
                assert place is not None
                for number, (_, snapshot) in enumerate(joined):
                    async for step in self._catch_up(number, place, snapshot):
                        place = step.place
                        yield step
            else:
                # Without snapshots the present is read after joining: told twice does less harm than missed.
                place = Place(())
                async for step in self._present(replace(place, told=0), must_exist=True):
                    yield replace(step, place=place)
            pages = Pages([told for told, _ in joined])
            stack.push_async_callback(pages.close)
            while True:
                number, page = await pages.next()
                async for step in self._tell(number, place, page):
                    place = step.place
                    yield step

    async def _positions(self, place: Place | None) -> tuple[Position, ...]:
        """Where each shard's log is now; nothing where one can't be followed by snapshots."""
        positions = []
        for number, feed in enumerate(self._feeds):
            async with feed.pool.acquire() as conn:
                if not await cursors.can_follow_snapshots(conn):
                    return ()
                snapshot = await cursors.look_at_log(conn)
            if snapshot is None:
                raise DatabaseUnavailable("the database is a standby, where the log can't be followed")
            if place is not None and place.positions:
                position = place.positions[number]
                if is_ahead(position.target or position.seen, snapshot):
                    raise InvalidRequest("resume_token", "is of another database; begin the watch anew")
            positions.append(Position(snapshot))
        return tuple(positions)

    async def _join(self, stack: AsyncExitStack) -> list[tuple[Told, str]]:
        return [
            await stack.enter_async_context(
                feed.follower.subscribe(
                    execution_id=self._target.subscription_id, event_types=LIFECYCLE, capacity=CAPACITY
                )
            )
            for feed in self._feeds
        ]

    async def _present(self, place: Place, *, must_exist: bool) -> AsyncGenerator[Step, None]:
        """What is there, by id, behind what has been told."""
        while place.told is not None:
            page, more = merge(
                await asyncio.gather(
                    *(self._page(number, feed, place) for number, feed in enumerate(self._feeds))
                ),
                PRESENT_ROWS,
            )
            if not page and must_exist and self._target.subscription_id is not None:
                raise subscription_not_found(self._target.subscription_id)
            for subscription in page:
                place = replace(place, told=subscription.subscription_id)
                yield Step(place, subscription, initial=True)
            if not more:
                return

    async def _page(self, number: int, feed: Feed, place: Place) -> list[Subscription]:
        after, one = place.told or 0, self._target.subscription_id
        snapshot = place.positions[number].seen if place.positions else None
        if one is not None and one <= after:
            return []
        async with feed.reading, feed.pool.transaction(readonly=True) as conn:
            if one is not None:
                found = await subscriptions.read_as_of(conn, one, snapshot=snapshot)
                return [] if found is None else [found]
            return await subscriptions.list_as_of(
                conn,
                after=after,
                path_prefix=self._target.path_prefix,
                snapshot=snapshot,
                limit=PRESENT_ROWS + 1,
            )

    async def _catch_up(self, number: int, place: Place, snapshot: str) -> AsyncGenerator[Step, None]:
        """The rest of the gap that an earlier watch was in, and the gap from there to a snapshot."""
        position = place.positions[number]
        while position.target is not None or position.seen != snapshot:
            if position.target is None:
                position = position.towards(snapshot)
            page = await self._gap_page(self._feeds[number], position)
            async for step in self._tell(number, place, page):
                place = step.place
                yield step
            position = page.after

    async def _gap_page(self, feed: Feed, position: Position) -> Page:
        one = self._target.subscription_id
        async with feed.reading, feed.pool.transaction(readonly=True) as conn:
            if one is None:
                keys, after = await subscriptions.gap_keys(conn, position, limit=CATCH_UP_KEYS)
            else:
                keys, after = await cursors.gap_keys_of_execution(
                    conn, position, execution_id=one, limit=CATCH_UP_KEYS
                )
        return Page([key for key in keys if key.event_type in LIFECYCLE], position, after)

    async def _tell(self, number: int, place: Place, page: Page) -> AsyncGenerator[Step, None]:
        """A page's events one by one, and where to go on behind each."""
        changes = await self._feeds[number].read(page) if page.keys else []
        for change, position in zip(changes, positions_behind(page), strict=True):
            if change is not None and self._target.includes(change):
                yield Step(self._moved(place, number, position), change)
        yield Step(self._moved(place, number, page.after))

    def _moved(self, place: Place, number: int, position: Position) -> Place:
        return place.moved(number, position) if place.positions else place
