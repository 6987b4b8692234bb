"""Folds straight from the log, page by page, and lets others run between the pages."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
#: Rows folded before others get a turn: about ten milliseconds.
PAGE_ROWS_MAX = 2000
PAGE_ROWS_FIRST = 100
#: How long other work goes on before others get a turn.
TURN_SECONDS = 0.005
#: What a page should hold at most, judged by the page before it.
PAGE_BYTES = 4 * 1024 * 1024
_EVENT_COLUMNS = len(FoldEvent._fields)


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
            with collector_held():
                fold.apply(page.events())
            last_event_id, folded = page.last_event_id, folded + page.size
            await asyncio.sleep(0)
    if limit and folded >= limit:
        more = await log.fold_page(conn, scope, cutoff, after_event_id=last_event_id, limit=1)
        return Reached(not more, last_event_id)
    return Reached(True, last_event_id)


@dataclass(frozen=True, slots=True)
class EventPage:
    #: Decodes them; once.
    events: Callable[[], Iterable[tuple[Any, ...]]]
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
            yield EventPage(partial(fold.decode, rows), len(rows), last_event_id)
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
        due = loop.time() + TURN_SECONDS
        with collector_held():
            try:
                while loop.time() < due:
                    next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
        await asyncio.sleep(0)


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
        yield EventPage(partial(iter, events), len(ids), after_event_id)


def _rows_for_next(rows: list[Any]) -> int:
    sample = rows[:: max(1, len(rows) // 64)]
    weight = sum(len(row[4] or "") + len(row[5] or "") for row in sample)
    by_weight = PAGE_BYTES * len(sample) // max(weight, 1)
    return max(1, min(by_weight, PAGE_ROWS_MAX))


def _check_versions(rows: list[Any], registry: Registry) -> None:
    for row in rows:
        if row[_EVENT_COLUMNS] < 1:
            upcast_event(registry, {"event_id": row[0], "schema_version": row[_EVENT_COLUMNS]})
