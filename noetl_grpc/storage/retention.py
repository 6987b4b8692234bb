"""Purges what is old. Rows go in short pages and events by whole partitions, so that writers hardly notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import asyncpg

from noetl_grpc.core.retention import Content, Keep, KeepReason, Newest, Policy, decide
from noetl_grpc.errors import Conflict
from noetl_grpc.storage.partitions import Partition, ensure_partitions, read_partitions
from noetl_grpc.storage.pool import Connection, Pool, Shards
from noetl_grpc.storage.queries import queries

PAGE_ROWS = 1000
#: While we wait for the log every writer waits behind us, and while we wait for the partition too: the log, which
#: must be locked first because writers come that way, is ours already.
LOG_LOCK_WAIT = "200ms"
PARTITION_LOCK_WAIT = "100ms"
LOCK_TRIES = 5
LOCK_PAUSE_SECONDS = 0.5

_ID_MIN = -(2**63)

#: Told of a table, and how many of its rows (of events: partitions) have just gone.
Count = Callable[[str, int], None]


@dataclass(slots=True)
class Purged:
    """What was purged; in a dry run, what would be."""

    commands: int = 0
    runtimes: int = 0
    outbox_rows: int = 0
    dropped: list[str] = field(default_factory=list)
    kept: list[tuple[str, Keep]] = field(default_factory=list)


async def purge(shards: Shards, policy: Policy, *, is_dry_run: bool, count: Count) -> Purged:
    """Purge every shard, and the runtimes of the cluster database. Each page is counted when it is gone."""
    async with shards.cluster.acquire() as conn:
        now: datetime = await conn.fetchval(queries["present"])
    purged = Purged()
    if policy.runtime_staleness is not None:
        purged.runtimes = await _purge_runtimes(
            shards.cluster, now - policy.runtime_staleness, is_dry_run, count
        )
    for shard, pool in enumerate(shards.pools):
        if policy.command_retention is not None:
            purged.commands += await _purge_commands(pool, now - policy.command_retention, is_dry_run, count)
        if policy.outbox_retention is not None:
            purged.outbox_rows += await _purge_outbox(pool, now - policy.outbox_retention, is_dry_run, count)
        if policy.event_retention is not None:
            suffix = f"@{shard}" if len(shards) > 1 else ""
            await _purge_events(
                pool, now - policy.event_retention, purged, suffix=suffix, is_dry_run=is_dry_run, count=count
            )
        if not is_dry_run:
            async with pool.acquire() as conn:
                await ensure_partitions(conn, now=now)
    return purged


async def _purge_runtimes(pool: Pool, cutoff: datetime, is_dry_run: bool, count: Count) -> int:
    if is_dry_run:
        return await _count_rows(pool, "count_stale_runtimes", cutoff)
    total = 0
    while True:
        async with pool.acquire() as conn:
            purged = int((await conn.execute(queries["purge_runtimes"], cutoff, PAGE_ROWS)).split()[-1])
        count("runtime", purged)
        total += purged
        if purged < PAGE_ROWS:
            return total


async def _purge_commands(pool: Pool, cutoff: datetime, is_dry_run: bool, count: Count) -> int:
    if is_dry_run:
        return await _count_rows(pool, "count_old_commands", cutoff)
    total, place = 0, (_ID_MIN, _ID_MIN)
    while True:
        async with pool.transaction() as conn:
            await conn.execute(queries["prefer_index_joins"])
            page = await conn.fetchrow(queries["purge_commands"], cutoff, *place, PAGE_ROWS)
        count("command", page["purged"])
        total += int(page["purged"])
        if page["command_id"] is None:
            return total
        place = (page["execution_id"], page["command_id"])


async def _purge_outbox(pool: Pool, cutoff: datetime, is_dry_run: bool, count: Count) -> int:
    if is_dry_run:
        return await _count_rows(pool, "count_old_outbox_rows", cutoff)
    total, place = 0, _ID_MIN
    while True:
        async with pool.transaction() as conn:
            await conn.execute(queries["prefer_index_joins"])
            page = await conn.fetchrow(queries["purge_outbox"], cutoff, place, PAGE_ROWS)
        count("outbox", page["purged"])
        total += int(page["purged"])
        if page["outbox_id"] is None:
            return total
        place = page["outbox_id"]


async def _count_rows(pool: Pool, query: str, cutoff: datetime) -> int:
    async with pool.acquire() as conn:
        return int(await conn.fetchval(queries[query], cutoff))


async def _purge_events(
    pool: Pool, cutoff: datetime, purged: Purged, *, suffix: str, is_dry_run: bool, count: Count
) -> None:
    async with pool.acquire() as conn:
        partitions = await read_partitions(conn)
    for partition in partitions:
        try:
            keep = await _purge_partition(pool, partition, cutoff, is_dry_run=is_dry_run)
        except asyncpg.UndefinedTableError:
            # Another purge has dropped it.
            continue
        if keep is None:
            if not is_dry_run:
                count("event", 1)
            purged.dropped.append(partition.name + suffix)
        else:
            purged.kept.append((partition.name + suffix, keep))


async def _purge_partition(
    pool: Pool, partition: Partition, cutoff: datetime, *, is_dry_run: bool
) -> Keep | None:
    """Why a partition stays; None when it is gone."""
    if partition.upper is None:
        return decide(None, Content(None, None, False), cutoff=cutoff)
    for number in range(1, LOCK_TRIES + 1):
        try:
            async with pool.transaction() as conn:
                keep = await _drop(conn, partition, cutoff, is_dry_run=is_dry_run)
        except _StaysError as error:
            return error.keep
        except asyncpg.InsufficientPrivilegeError:
            return Keep(KeepReason.NOT_OWNER, "this role may not drop it")
        except Conflict as error:
            if not isinstance(
                error.__cause__, (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)
            ):
                raise
            if number < LOCK_TRIES:
                await asyncio.sleep(LOCK_PAUSE_SECONDS)
        else:
            if keep is None and not is_dry_run:
                await _sweep(pool, partition)
            return keep
    return Keep(KeepReason.LOCK_TIMEOUT, "somebody's transaction has it locked; the next purge tries again")


class _StaysError(Exception):
    """Ends the transaction without a trace, because the partition must stay."""

    def __init__(self, keep: Keep) -> None:
        super().__init__(keep.detail)
        self.keep = keep


async def _drop(conn: Connection, partition: Partition, cutoff: datetime, *, is_dry_run: bool) -> Keep | None:
    """Drop a partition unless something in it forbids that, and its executions' snapshots with it."""
    statements = await conn.fetchrow(queries["statements_for_partition"], partition.name)
    if statements is None:
        raise asyncpg.UndefinedTableError(partition.name)
    if not statements["is_owned"]:
        # Nor may we look inside; the bounds alone say whether it could go at all.
        keep = decide(partition.upper, Content(None, None, False), cutoff=cutoff)
        return keep or Keep(KeepReason.NOT_OWNER, "this role does not own it")
    keep = decide(partition.upper, await _content(conn, statements["content"]), cutoff=cutoff)
    if keep is not None or is_dry_run:
        return keep
    await _delete_snapshots(conn, partition)
    await conn.fetchval(queries["limit_lock_wait"], LOG_LOCK_WAIT)
    await conn.execute(statements["locking_log"])
    await conn.fetchval(queries["limit_lock_wait"], PARTITION_LOCK_WAIT)
    await conn.execute(statements["locking"])
    # Whoever wrote to it meanwhile has committed by now.
    keep = decide(partition.upper, await _content(conn, statements["content"]), cutoff=cutoff)
    if keep is not None:
        raise _StaysError(keep)
    await conn.execute(statements["dropping"])
    return None


async def _content(conn: Connection, statement: str) -> Content:
    row = await conn.fetchrow(statement)
    newest = None
    if row["event_id"] is not None:
        newest = Newest(row["event_id"], row["created_at"].replace(tzinfo=UTC))
    return Content(newest, row["live_subscription_id"], row["has_unpublished"])


async def _delete_snapshots(conn: Connection, partition: Partition) -> None:
    lower = _ID_MIN if partition.lower is None else partition.lower
    await conn.execute(queries["delete_snapshots_between"], lower, partition.upper)


async def _sweep(pool: Pool, partition: Partition) -> None:
    """Delete the snapshots that were saved between our looking at them and the lock."""
    async with pool.acquire() as conn:
        await _delete_snapshots(conn, partition)
