"""Brings a database's schema up to what storage/schema/ describes. It only ever adds.

What is new is made in one transaction. What is added to a table in use waits for no lock longer than writers
can bear, builds its indexes beside them, and goes on where an interrupted run stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import asyncpg

from noetl_grpc.errors import SchemaError
from noetl_grpc.storage.catalog import Catalog, read_catalog
from noetl_grpc.storage.ddl import FILES, STATEMENTS, Kind, Statement
from noetl_grpc.storage.drift import Drift, Usability, read_rights, require_usable, verify
from noetl_grpc.storage.locks import LockedOut, with_short_locks
from noetl_grpc.storage.partitions import PartitionReport, ensure_partitions
from noetl_grpc.storage.queries import queries
from noetl_grpc.storage.script import concurrently, only_parent, render_sql

__all__ = [
    "Drift",
    "PartitionReport",
    "Report",
    "Usability",
    "ensure_partitions",
    "migrate",
    "render_sql",
    "require_usable",
    "verify",
]

#: Held by the session that migrates this database.
_MIGRATION_LOCK: Final = 0x6E6F65746C01
_MIGRATION_POLL_SECONDS: Final = 0.1
_BUILD_TRIES_MAX: Final = 3
_LOST: Final = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)
#: The client's limit for a statement that may take as long as it likes.
_BUILD_SECONDS_MAX: Final = 7 * 86_400.0


@dataclass(slots=True)
class Report:
    """What a migration did, and what it had to leave: in `missing` with the reason and the SQL."""

    applied: list[str] = field(default_factory=list)
    missing: list[Drift] = field(default_factory=list)
    partitions: PartitionReport = field(default_factory=PartitionReport)

    @property
    def is_usable(self) -> bool:
        return not any(item.required for item in self.missing)


async def migrate(
    conn: asyncpg.Connection,
    *,
    progress: Callable[[str], None] | None = None,
    lock_patience_seconds: float = 300.0,
) -> Report:
    """Create or complete the schema; a second run changes nothing.

    What the role may not do, and what stays locked for `lock_patience_seconds`, is reported and no error.
    """
    rights = await read_rights(conn)
    if rights["is_standby"]:
        raise SchemaError(
            f"database {rights['database_name']} is a standby: run `noetl-grpc migrate` on its primary"
        )
    migration = _Migration(conn, progress or (lambda _: None), lock_patience_seconds)
    async with _only_migrator(conn, migration.say):
        catalog = await read_catalog(conn)
        await migration.create_what_is_new(catalog)
        await migration.complete_tables(catalog)
        await migration.build_indexes(catalog)
        partitions = await ensure_partitions(conn, now=datetime.now(UTC))
        missing = [migration.explained(item) for item in await verify(conn)]
        report = Report(migration.applied + partitions.created, missing, partitions)
        if report.is_usable:
            await _record_versions(conn)
    return report


@dataclass(frozen=True, slots=True)
class _Addition:
    """What is added together or not at all."""

    titles: tuple[str, ...]
    sql: str

    @classmethod
    def of(cls, *statements: Statement) -> _Addition:
        return cls(tuple(item.title for item in statements), ";\n".join(item.sql for item in statements))


@dataclass(slots=True)
class _Migration:
    """One run: what it has added and what refused to be added."""

    conn: asyncpg.Connection
    say: Callable[[str], None]
    lock_patience_seconds: float
    applied: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    async def create_what_is_new(self, catalog: Catalog) -> None:
        """Make the tables that are not there: all of them, else each with all that belongs to it or not at all."""
        tables = {item.name for item in STATEMENTS if item.kind is Kind.TABLE and not catalog.has(item)}
        new = [
            item
            for item in STATEMENTS
            if item.table in tables or (item.kind in (Kind.SCHEMA, Kind.FUNCTION) and not catalog.has(item))
        ]
        text = "\n".join(item.sql for item in new)
        sequences = [
            item
            for item in STATEMENTS
            if item.kind is Kind.SEQUENCE and not catalog.has(item) and item.name in text
        ]
        wanted = [item for item in STATEMENTS if item in new or item in sequences]
        together = {item.table: [other for other in wanted if other.table == item.table] for item in wanted}
        await self._add([_Addition.of(*group) for group in together.values()], table=None)

    async def complete_tables(self, catalog: Catalog) -> None:
        """Add columns and rows, and indexes of partitioned tables without their parts, to what was there."""
        for table in dict.fromkeys(item.table for item in STATEMENTS if item.table in catalog.relations):
            belonging = [item for item in STATEMENTS if item.table == table]
            additions = [
                _Addition((column.title,), f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column.sql}")
                for item in belonging
                for column in item.columns
                if not catalog.has_column(column)
            ]
            if table in catalog.partition_keys:
                additions += [
                    _Addition((item.title,), only_parent(item))
                    for item in belonging
                    if item.kind is Kind.INDEX and catalog.index(item) is None
                ]
            await self._add(additions, table=table)
            for item in belonging:
                if item.kind is Kind.ROWS and not catalog.has(item):
                    await self._add([_Addition.of(item)], table=table)

    async def build_indexes(self, catalog: Catalog) -> None:
        """Build what indexes are lacking or were left unfinished, while writers go on."""
        for item in STATEMENTS:
            is_wanted = item.kind is Kind.INDEX and item.table in catalog.relations and not catalog.has(item)
            if not is_wanted or item.title in self.failures:
                continue
            try:
                if item.table in catalog.partition_keys:
                    await self._build_by_partition(item)
                else:
                    await self._build(item, concurrently(item))
            except (asyncpg.PostgresError, LockedOut) as error:
                self._note_failure([item.title], error)
            else:
                self._note_success([item.title])

    def explained(self, item: Drift) -> Drift:
        reason = self.failures.get(item.what)
        return replace(item, problem=f"{item.problem}: {reason}") if reason else item

    async def _add(self, additions: Sequence[_Addition], *, table: str | None) -> None:
        """Run these in one transaction; if one of them is refused, one by one."""
        if not additions:
            return
        titles = [title for item in additions for title in item.titles]
        self.say(f"adding {', '.join(titles)}" if table else "creating tables")
        try:
            await with_short_locks(
                self.conn,
                ";\n".join(item.sql for item in additions),
                table=table,
                patience_seconds=self.lock_patience_seconds,
                say=self.say,
            )
        except LockedOut as error:
            self._note_failure(titles, error)
        except asyncpg.PostgresError as error:
            if len(additions) == 1 or self._is_lost(error):
                self._note_failure(titles, error)
            else:
                for item in additions:
                    await self._add([item], table=table)
        else:
            self._note_success(titles)

    async def _build_by_partition(self, index: Statement) -> None:
        values = (index.table, index.name, index.definition)
        for build in await self.conn.fetch(queries["builds_of_partition_indexes"], *values):
            try:
                await self._build(index, build["statement"])
            except asyncpg.UndefinedTableError:
                self.say("a partition was dropped meanwhile")
        for attachment in await self.conn.fetch(queries["attachments_of_partition_indexes"], *values):
            await with_short_locks(
                self.conn,
                attachment["statement"],
                table=index.table,
                patience_seconds=self.lock_patience_seconds,
                say=self.say,
            )

    async def _build(self, index: Statement, statement: str) -> None:
        self.say(f"{statement} (waits for transactions that are open now)")
        # It keeps no writer waiting, so it may wait itself; what it waits for is a lock to PostgreSQL too.
        patience_ms = max(1, round(self.lock_patience_seconds * 1000))
        await self.conn.execute(f"SET lock_timeout = {patience_ms}")
        for attempt in range(1, _BUILD_TRIES_MAX + 1):
            await self._drop_unfinished(index)
            try:
                await self.conn.execute(statement, timeout=_BUILD_SECONDS_MAX)
            except asyncpg.DeadlockDetectedError:
                if attempt == _BUILD_TRIES_MAX:
                    raise
            except asyncpg.UniqueViolationError:
                # What is left of it would cost every write and serve no read.
                await self._drop_unfinished(index)
                raise
            else:
                return

    async def _drop_unfinished(self, index: Statement) -> None:
        for drop in await self.conn.fetch(queries["drops_of_unfinished_indexes"], index.table, index.name):
            self.say(drop["statement"])
            await self.conn.execute(drop["statement"], timeout=_BUILD_SECONDS_MAX)

    def _note_success(self, titles: Sequence[str]) -> None:
        self.applied += [title for title in titles if title not in self.applied]

    def _note_failure(self, titles: Sequence[str], error: Exception) -> None:
        if self._is_lost(error):
            raise error
        detail = getattr(error, "detail", None)
        for title in titles:
            self.failures[title] = f"{error} ({detail})" if detail else str(error)
            self.say(f"{title}: {self.failures[title]}")

    def _is_lost(self, error: Exception) -> bool:
        """Whether the session has ended, or is about to."""
        return self.conn.is_closed() or isinstance(error, _LOST)


async def _record_versions(conn: asyncpg.Connection) -> None:
    """Note which files this database has; nothing depends on it, so a role that may not is not stopped."""
    try:
        applied = {row["version"] for row in await conn.fetch(queries["applied_versions"])}
        for file in FILES:
            if file.version not in applied:
                await conn.execute(queries["record_version"], file.version, file.name)
    except asyncpg.InsufficientPrivilegeError:
        return


@asynccontextmanager
async def _only_migrator(conn: asyncpg.Connection, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Wait until nobody else migrates this database, and lift the session's own time limits.

    Polled outside a transaction: a session that waited inside one would hold a snapshot, and the CREATE INDEX
    CONCURRENTLY of the other migrator waits for all of those.
    """
    is_waiting = False
    while not await conn.fetchval("SELECT pg_try_advisory_lock($1)", _MIGRATION_LOCK):
        if not is_waiting:
            say("waiting for another migration of this database to end")
        is_waiting = True
        await asyncio.sleep(_MIGRATION_POLL_SECONDS)
    try:
        await conn.execute("SET lock_timeout = 0; SET statement_timeout = 0")
        yield
    finally:
        # A session that is lost gives the lock back by itself.
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await conn.execute("RESET lock_timeout; RESET statement_timeout")
            await conn.execute("SELECT pg_advisory_unlock($1)", _MIGRATION_LOCK)
