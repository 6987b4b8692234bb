"""Snapshots and what they are folded from. One function per statement; the caller owns the transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from noetl_grpc.core.access import Tenant
from noetl_grpc.core.snapshots import Snapshot, SnapshotRow, aggregate_id
from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A snapshot row and when it was written."""

    row: SnapshotRow
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Awaited:
    """An event that somebody wants to see in its snapshot."""

    tenant: Tenant
    execution_id: int
    event_id: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far a stored snapshot reaches."""

    version: int
    event_count: int


async def read_snapshots(
    conn: Connection, tenant: Tenant, execution_ids: Sequence[int]
) -> dict[int, StoredRow]:
    """The stored rows by execution."""
    by_key = _by_key(execution_ids)
    rows = await conn.fetch(queries["read_snapshots"], tenant.tenant_id, tenant.organization_id, [*by_key])
    return {
        (execution_id := by_key[row["aggregate_id"]]): StoredRow(
            SnapshotRow(
                execution_id,
                row["version"],
                row["snapshot_json"],
                row["checksum"],
                row["meta_json"],
            ),
            row["updated_at"],
        )
        for row in rows
    }


async def read_places(
    conn: Connection, tenant: Tenant, execution_ids: Sequence[int]
) -> tuple[str | None, dict[int, str]]:
    """What the transaction sees of the log, if the log can tell that later, and which version of its row each is."""
    by_key = _by_key(execution_ids)
    log_snapshot, places = await conn.fetchrow(
        queries["read_places"], tenant.tenant_id, tenant.organization_id, [*by_key]
    )
    return log_snapshot, {by_key[key]: place for key, place in places}


async def save_snapshots(conn: Connection, tenant: Tenant, rows: Iterable[SnapshotRow]) -> dict[int, str]:
    """Store rows that cover at least as much as what is there; the places of those that were, by execution."""
    by_key = {aggregate_id(row.execution_id): row for row in rows}
    keys = sorted(by_key)
    in_order = [by_key[key] for key in keys]
    written = await conn.fetch(
        queries["save_snapshots"],
        tenant.tenant_id,
        tenant.organization_id,
        keys,
        [row.version for row in in_order],
        [row.snapshot_json for row in in_order],
        [row.checksum for row in in_order],
        [row.meta_json for row in in_order],
    )
    return {by_key[key].execution_id: place for key, place in written}


def _by_key(execution_ids: Iterable[int]) -> dict[str, int]:
    return {aggregate_id(execution_id): execution_id for execution_id in execution_ids}


async def repair_snapshot(
    conn: Connection, tenant: Tenant, *, found: SnapshotRow, mended: SnapshotRow
) -> bool:
    """Replace a row that was found to differ; False if it changed meanwhile."""
    replaced = await conn.fetchval(
        queries["repair_snapshot"],
        tenant.tenant_id,
        tenant.organization_id,
        aggregate_id(found.execution_id),
        found.checksum,
        found.meta_json,
        mended.version,
        mended.snapshot_json,
        mended.checksum,
        mended.meta_json,
    )
    return replaced is not None


async def covered_versions(
    conn: Connection, tenant: Tenant, execution_ids: Sequence[int]
) -> dict[int, Coverage]:
    """How far the stored snapshots reach."""
    by_key = _by_key(execution_ids)
    rows = await conn.fetch(queries["covered_versions"], tenant.tenant_id, tenant.organization_id, [*by_key])
    return {by_key[row["aggregate_id"]]: Coverage(row["version"], row["event_count"]) for row in rows}


async def count_behind(conn: Connection, *, events: int) -> int:
    """How many executions of the last so many events wait for their snapshot; needs a log with xact_id."""
    number: int = await conn.fetchval(queries["count_behind"], events)
    return number


async def executions_with_stragglers(
    conn: Connection, tenant: Tenant, snapshots: Sequence[Snapshot], *, has_xact_id: bool
) -> set[int]:
    """Those whose log holds an event at or below the snapshot's version that the snapshot has not folded."""
    if not snapshots:
        return set()
    ids = [snapshot.execution_id for snapshot in snapshots]
    versions = [snapshot.version for snapshot in snapshots]
    if not has_xact_id or any(snapshot.log_snapshot is None for snapshot in snapshots):
        rows = await conn.fetch(
            queries["count_events_up_to"], tenant.tenant_id, tenant.organization_id, ids, versions
        )
        counts = {row["execution_id"]: row["events"] for row in rows}
        return {item.execution_id for item in snapshots if counts.get(item.execution_id) != item.event_count}
    folded_from = [str(snapshot.log_snapshot) for snapshot in snapshots]
    if len(snapshots) == 1:
        has_one = await conn.fetchval(
            queries["has_straggler"],
            tenant.tenant_id,
            tenant.organization_id,
            ids[0],
            versions[0],
            folded_from[0],
        )
        return set(ids) if has_one else set()
    lowest = min(int(text.partition(":")[0]) for text in folded_from)
    rows = await conn.fetch(
        queries["executions_with_stragglers"],
        tenant.tenant_id,
        tenant.organization_id,
        ids,
        versions,
        folded_from,
        lowest,
        max(versions),
    )
    return {row["execution_id"] for row in rows}


async def reaches_past(
    conn: Connection, tenant: Tenant, execution_id: int, *, version: int, moment: datetime
) -> bool:
    """Whether an event at or below the version happened after a moment."""
    past: bool = await conn.fetchval(
        queries["reaches_past"], tenant.tenant_id, tenant.organization_id, execution_id, version, moment
    )
    return past


async def events_to_fold(
    conn: Connection, tenant: Tenant, behind: Mapping[int, int], *, page_size: int
) -> AsyncIterator[list[Any]]:
    """Pages of rows: the execution, then the columns in the fold's order. Needs a transaction."""
    left = dict(behind)
    while left:
        page = await conn.fetch(
            queries["events_to_fold"],
            tenant.tenant_id,
            tenant.organization_id,
            [*left],
            [*left.values()],
            page_size,
        )
        if page:
            yield page
        if len(page) < page_size:
            return
        last_execution, last_event = page[-1][:2]
        ids = [*left]
        left = {item: left[item] for item in ids[ids.index(last_execution) :]} | {last_execution: last_event}


async def included_events(
    conn: Connection, awaited: Sequence[Awaited], *, has_xact_id: bool
) -> dict[int, tuple[bool, int]]:
    """Whether each is in its snapshot, and that snapshot's version, by place; absent where there is no snapshot."""
    rows = await conn.fetch(
        queries["included_events" if has_xact_id else "included_events_by_count"],
        [item.tenant.tenant_id for item in awaited],
        [item.tenant.organization_id for item in awaited],
        [aggregate_id(item.execution_id) for item in awaited],
        [item.execution_id for item in awaited],
        [item.event_id for item in awaited],
    )
    return {row["place"] - 1: (bool(row["is_included"]), row["version"]) for row in rows}


async def next_executions(conn: Connection, tenant: Tenant, *, behind: int, limit: int) -> list[int]:
    """The executions that have events, in order."""
    rows = await conn.fetch(
        queries["next_executions"], tenant.tenant_id, tenant.organization_id, behind, limit
    )
    return [row["execution_id"] for row in rows]


async def count_executions(conn: Connection, tenant: Tenant, *, behind: int, limit: int) -> int:
    """How many executions have events; counting ends at the limit."""
    number: int = await conn.fetchval(
        queries["count_executions"], tenant.tenant_id, tenant.organization_id, behind, limit
    )
    return number
