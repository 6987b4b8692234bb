"""Reads the log of one execution. The caller owns the transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from noetl_grpc.core.cutoff import Cutoff, Scope
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


async def fold_page(
    conn: Connection, scope: Scope, cutoff: Cutoff, *, after_event_id: int, limit: int
) -> list[Any]:
    """What the fold reads of the next events, and their schema_version behind it."""
    rows: list[Any] = await conn.fetch(
        queries["fold_page"], *_where(scope), after_event_id, cutoff.event_id, cutoff.time, limit
    )
    return rows


async def page_of_ids(
    conn: Connection,
    scope: Scope,
    cutoff: Cutoff,
    *,
    after_event_id: int,
    limit: int,
    bytes_max: int,
    snapshot: str = "",
) -> list[int]:
    """The next events by id, so many that they can be read whole; with a snapshot those that it shows."""
    arguments = [*_where(scope), after_event_id, cutoff.event_id, cutoff.time, limit, bytes_max]
    if snapshot:
        rows = await conn.fetch(queries["page_of_visible_ids"], *arguments, snapshot)
    else:
        rows = await conn.fetch(queries["page_of_ids"], *arguments)
    return [row["event_id"] for row in rows]


async def events_by_id(conn: Connection, scope: Scope, event_ids: Sequence[int]) -> list[Any]:
    """Whole events by ascending id; those of another tenant are not there."""
    rows: list[Any] = await conn.fetch(queries["events_by_id"], *_where(scope), event_ids)
    return rows


async def bytes_of_events(conn: Connection, scope: Scope, event_ids: Sequence[int]) -> dict[int, int]:
    """How much these events are as they are stored; those of another tenant are not there."""
    rows = await conn.fetch(queries["bytes_of_events"], *_where(scope), event_ids)
    return {row["event_id"]: row["bytes"] for row in rows}


async def event_times(conn: Connection, scope: Scope, event_ids: Sequence[int]) -> dict[int, datetime]:
    """When these events happened."""
    rows = await conn.fetch(queries["event_times"], *_where(scope), event_ids)
    return {row["event_id"]: row["event_time"] for row in rows}


def _where(scope: Scope) -> tuple[int, str, str]:
    return scope.execution_id, scope.tenant_id, scope.organization_id
