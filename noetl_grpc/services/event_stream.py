"""The events of one execution as a stream: what is there by id, then what becomes visible, each once.

No connection is held while the client thinks, and no more is read than fits into a few messages.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from noetl_grpc.core.cutoff import Cutoff, Scope
from noetl_grpc.core.following import Page, Position, is_ahead
from noetl_grpc.core.resuming import Following, Place, Reading
from noetl_grpc.errors import DatabaseUnavailable, InvalidRequest
from noetl_grpc.follower import Follower, Subscription
from noetl_grpc.storage import cursors, log
from noetl_grpc.storage.pool import Pool
from noetl_grpc.storage.replay import START

#: A message holds at most this many events, and about this much; one event may be larger.
MESSAGE_EVENTS = 500
MESSAGE_BYTES = 1024 * 1024
CATCH_UP_KEYS = 2000
#: Events that wait for a reader before it is too slow.
CAPACITY = 10_000


@dataclass(frozen=True, slots=True)
class Batch:
    """One message: rows of noetl.event, and where to go on behind them."""

    rows: Sequence[Any]
    place: Place
    caught_up: bool


Batches = AsyncGenerator[Batch, None]
#: An event, and where to go on behind it.
Stop = tuple[int, Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """One stream; a cutoff and `follow` exclude each other."""

    pool: Pool
    follower: Follower
    scope: Scope
    cutoff: Cutoff
    after_event_id: int
    follow: bool

    async def batches(self, place: Place | None) -> Batches:
        """From the beginning, or behind a place that an earlier stream came to."""
        if place is None:
            place = Reading(self.after_event_id or START, await self._snapshot() if self.follow else "")
        else:
            await self._check(place)
        if isinstance(place, Reading):
            async for batch in self._read(place, caught_up=False):
                place = batch.place
                yield batch
        if not self.follow:
            yield Batch((), place, True)
            return
        if isinstance(place, Reading) and place.snapshot:
            place = Following(Position(place.snapshot))
        if isinstance(place, Following) and place.position is not None:
            stream = self._follow(place.position)
        else:
            stream = self._follow_recent(place.after_event_id)
        async for batch in stream:
            yield batch

    async def _snapshot(self) -> str:
        async with self.pool.acquire() as conn:
            return (
                _primary(await cursors.look_at_log(conn)) if await cursors.can_follow_snapshots(conn) else ""
            )

    async def _check(self, place: Place) -> None:
        """Refuse a place in another database's history, where everything would look as if it had been seen."""
        match place:
            case Reading(_, snapshot):
                latest = snapshot
            case Following(Position(seen, target)):
                latest = target or seen
            case _:
                latest = ""
        if latest:
            async with self.pool.acquire() as conn:
                now = _primary(await cursors.look_at_log(conn))
            if is_ahead(latest, now):
                raise InvalidRequest("resume_token", "is of another database; begin the stream anew")

    async def _read(self, place: Reading, *, caught_up: bool) -> Batches:
        """What is there, by event id."""
        after_event_id = place.after_event_id
        while True:
            async with self.pool.acquire() as conn:
                ids = await log.page_of_ids(
                    conn,
                    self.scope,
                    self.cutoff,
                    after_event_id=after_event_id,
                    limit=MESSAGE_EVENTS,
                    bytes_max=MESSAGE_BYTES,
                    snapshot=place.snapshot,
                )
            if not ids:
                return
            stops = [(event_id, Reading(event_id, place.snapshot)) for event_id in ids]
            async for batch in self._load(stops, caught_up=caught_up):
                yield batch
            after_event_id = ids[-1]

    async def _follow(self, position: Position) -> Batches:
        """What becomes visible behind a position: first up to where the follower is, then with it."""
        async with self._subscribe() as (subscription, snapshot):
            async for batch in self._catch_up(position, snapshot):
                yield batch
            yield Batch((), Following(Position(snapshot)), True)
            while True:
                page = await subscription.next_page()
                async for batch in self._load_keys(page, caught_up=True):
                    yield batch

    def _subscribe(self) -> AbstractAsyncContextManager[tuple[Subscription, str]]:
        return self.follower.subscribe(execution_id=self.scope.execution_id, capacity=CAPACITY)

    async def _catch_up(self, position: Position, snapshot: str) -> Batches:
        """The rest of the gap that a resumed stream was in, and the gap from there to a snapshot."""
        if position.target is None:
            position = position.towards(snapshot)
        while True:
            while position.target is not None:
                async with self.pool.acquire() as conn:
                    keys, after = await cursors.gap_keys_of_execution(
                        conn, position, execution_id=self.scope.execution_id, limit=CATCH_UP_KEYS
                    )
                async for batch in self._load_keys(Page(keys, position, after), caught_up=False):
                    yield batch
                position = after
            if position.seen == snapshot:
                return
            position = position.towards(snapshot)

    async def _follow_recent(self, after_event_id: int) -> Batches:
        """Without snapshots: what is above the highest id, then what the follower finds, late or not."""
        async with self._subscribe() as (subscription, _):
            sent: set[int] = set()
            async for batch in self._read(Reading(after_event_id), caught_up=False):
                sent.update(row["event_id"] for row in batch.rows)
                after_event_id = batch.rows[-1]["event_id"]
                yield Batch(batch.rows, Following(None, after_event_id), False)
            yield Batch((), Following(None, after_event_id), True)
            while True:
                page = await subscription.next_page()
                new = [key.event_id for key in page.keys if key.event_id not in sent]
                sent.difference_update(key.event_id for key in page.keys)
                after_event_id = max([after_event_id, *new])
                stops = [(event_id, Following(None, after_event_id)) for event_id in self._wanted(new)]
                for some in await self._slices(stops):
                    async for batch in self._load(some, caught_up=True):
                        yield batch

    async def _load_keys(self, page: Page, *, caught_up: bool) -> Batches:
        stops: list[Stop] = [(key.event_id, Following(page.behind(key))) for key in page.keys]
        if stops:
            stops[-1] = stops[-1][0], Following(page.after)
        wanted = set(self._wanted(key.event_id for key in page.keys))
        for some in await self._slices([stop for stop in stops if stop[0] in wanted]):
            async for batch in self._load(some, caught_up=caught_up):
                yield batch

    async def _slices(self, stops: Sequence[Stop]) -> list[list[Stop]]:
        """So many at a time that they can be read whole."""
        if not stops:
            return []
        async with self.pool.acquire() as conn:
            weights = await log.bytes_of_events(conn, self.scope, [event_id for event_id, _ in stops])
        return list(_cut(stops, weights))

    async def _load(self, stops: Sequence[Stop], *, caught_up: bool) -> Batches:
        """These events whole, in their order, in messages that are not too large."""
        async with self.pool.acquire() as conn:
            found = await log.events_by_id(conn, self.scope, [event_id for event_id, _ in stops])
        rows = {row["event_id"]: row for row in found}
        stops = [stop for stop in stops if stop[0] in rows]
        weights = {event_id: _weight(row) for event_id, row in rows.items()}
        for part in _cut(stops, weights):
            yield Batch([rows[event_id] for event_id, _ in part], part[-1][1], caught_up)

    def _wanted(self, event_ids: Iterator[int] | Sequence[int]) -> list[int]:
        return [event_id for event_id in event_ids if event_id > (self.after_event_id or START)]


def _cut(stops: Sequence[Stop], weights: Mapping[int, int]) -> Iterator[list[Stop]]:
    """Parts of at most MESSAGE_EVENTS and about MESSAGE_BYTES, but never an empty one."""
    part: list[Stop] = []
    weight = 0
    for stop in stops:
        own = weights.get(stop[0], 0)
        if part and (len(part) >= MESSAGE_EVENTS or weight + own > MESSAGE_BYTES):
            yield part
            part, weight = [], 0
        part.append(stop)
        weight += own
    if part:
        yield part


def _weight(row: Any) -> int:
    return sum(len(value) for value in row if value.__class__ is str)


def _primary(snapshot: str | None) -> str:
    if snapshot is None:
        raise DatabaseUnavailable("the database is a standby, where the log can't be followed")
    return snapshot
