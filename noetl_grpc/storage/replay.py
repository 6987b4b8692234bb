"""Folds straight from the log, page by page, and lets others run between the pages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from noetl_grpc.core.checksums import Steps
from noetl_grpc.core.cutoff import Cutoff, Scope
from noetl_grpc.core.envelope import JSON_COLUMNS
from noetl_grpc.core.fold import Fold, FoldEvent
from noetl_grpc.core.upcast import Registry, upcast_event
from noetl_grpc.storage import log
from noetl_grpc.storage.pool import Connection

T = TypeVar("T")

#: Before the first event, whatever its id.
START = -(2**63)
PAGE_ROWS_MAX = 2000
#: Rows folded at a stretch: about a millisecond.
PART_ROWS = 250
PAGE_ROWS_FIRST = 250
#: How long computing goes on before others get a turn, and how long they get.
TURN_SECONDS = 0.005
PAUSE_SECONDS = 0.001
#: What a page should hold at most, judged by the page before it.
PAGE_BYTES = 4 * 1024 * 1024
_schema_version = itemgetter(len(FoldEvent._fields))


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a fold came: `complete` is false when the limit cut it short."""

    complete: bool
    last_event_id: int


async def fold_log(
    conn: Connection,
    fold: Fold,
    scope: Scope,
    cutoff: Cutoff,
    registry: Registry,
    *,
    after_event_id: int = START,
    limit: int = 0,
) -> Reached:
    """Go on with a fold to the cutoff, or by `limit` events (0 is no limit).

    Open a REPEATABLE READ transaction around it, so that all pages are of one state of the log.
    """
    last_event_id, folded = after_event_id, 0
    pages = event_pages(conn, fold, scope, cutoff, registry, after_event_id=after_event_id, limit=limit)
    async with aclosing(pages):
        async for page in pages:
            for events in page.parts:
                async with turn():
                    fold.apply(events())
            last_event_id, folded = page.last_event_id, folded + page.size
    if limit and folded >= limit:
        more = await log.fold_page(conn, scope, cutoff, after_event_id=last_event_id, limit=1)
        return Reached(not more, last_event_id)
    return Reached(True, last_event_id)


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events as they were read. Each part decodes its own when it is called, and is what one turn can do."""

    parts: Sequence[Callable[[], Iterable[tuple[Any, ...]]]]
    size: int
    last_event_id: int


async def event_pages(
    conn: Connection,
    fold: Fold,
    scope: Scope,
    cutoff: Cutoff,
    registry: Registry,
    *,
    after_event_id: int = START,
    limit: int = 0,
) -> AsyncGenerator[EventPage, None]:
    """The events of a log as the fold takes them. The next page is on its way while one is being folded."""
    if registry.upcasters:
        async for page in _upcast_pages(conn, fold, scope, cutoff, registry, after_event_id, limit):
            yield page
        return
    left = limit or 2**62
    rows_wanted = min(PAGE_ROWS_FIRST, left)
    rows = await log.fold_page(conn, scope, cutoff, after_event_id=after_event_id, limit=rows_wanted)
    while rows:
        last_event_id = rows[-1][0]
        left -= len(rows)
        coming = None
        if left and len(rows) == rows_wanted:
            rows_wanted = min(_rows_for_next(rows), left)
            coming = asyncio.ensure_future(
                log.fold_page(conn, scope, cutoff, after_event_id=last_event_id, limit=rows_wanted)
            )
            # Let the request leave before this page keeps the loop busy.
            await asyncio.sleep(0)
        try:
            _check_versions(rows, registry)
            starts = range(0, len(rows), PART_ROWS)
            parts = [partial(fold.decode, rows[start : start + PART_ROWS]) for start in starts]
            yield EventPage(parts, len(rows), last_event_id)
        except BaseException:
            if coming is not None:
                coming.cancel()
                await asyncio.wait([coming])
            raise
        rows = [] if coming is None else await coming


async def in_steps(steps: Steps[T]) -> T:
    """Drive long work to its end without keeping others waiting."""
    loop = asyncio.get_running_loop()
    while True:
        async with turn():
            due = loop.time() + TURN_SECONDS
            try:
                while loop.time() < due:
                    next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result


class _Turns:
    """How much this loop has computed since it was last free."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0
        self.computed_seconds = 0.0


@asynccontextmanager
async def turn() -> AsyncGenerator[None, None]:
    """A block of computing, without await inside. One runs at a time, and now and then the loop is free.

    Taking a new call in costs the loop a round; with several folds computing in every round, calls would wait
    for seconds.
    """
    loop = asyncio.get_running_loop()
    turns = _turns.setdefault(loop, _Turns())
    turns.waiting += 1
    try:
        await turns.lock.acquire()
    finally:
        turns.waiting -= 1
    try:
        began = loop.time()
        with collector_held():
            yield
        turns.computed_seconds += loop.time() - began
        if turns.computed_seconds >= TURN_SECONDS:
            turns.computed_seconds = 0.0
            await asyncio.sleep(PAUSE_SECONDS if turns.waiting else 0)
    finally:
        turns.lock.release()


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()


@contextmanager
def collector_held() -> Iterator[None]:
    """Keep the garbage collector from walking the thousands of values that a page is decoded into."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _upcast_pages(
    conn: Connection,
    fold: Fold,
    scope: Scope,
    cutoff: Cutoff,
    registry: Registry,
    after_event_id: int,
    limit: int,
) -> AsyncGenerator[EventPage, None]:
    left = limit or 2**62
    while left:
        ids = await log.page_of_ids(
            conn,
            scope,
            cutoff,
            after_event_id=after_event_id,
            limit=min(PAGE_ROWS_MAX, left),
            bytes_max=PAGE_BYTES,
        )
        if not ids:
            return
        rows = await log.events_by_id(conn, scope, ids)
        documents = fold.decode_documents(rows, [column.name for column in JSON_COLUMNS])
        events = [FoldEvent.of(upcast_event(registry, event)) for event in documents]
        left, after_event_id = left - len(ids), ids[-1]
        yield EventPage([partial(iter, events)], len(ids), after_event_id)


def _rows_for_next(rows: list[Any]) -> int:
    sample = rows[:: max(1, len(rows) // 64)]
    weight = sum(len(row[4] or "") + len(row[5] or "") for row in sample)
    by_weight = PAGE_BYTES * len(sample) // max(weight, 1)
    return max(1, min(by_weight, PAGE_ROWS_MAX))


def _check_versions(rows: list[Any], registry: Registry) -> None:
    if min(map(_schema_version, rows)) >= 1:
        return
    for row in rows:
        if _schema_version(row) < 1:
            upcast_event(registry, {"event_id": row[0], "schema_version": _schema_version(row)})
