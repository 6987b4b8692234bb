"""Brings a database's schema up to what storage/schema/ describes; only ever adds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import asyncpg

from noetl_grpc.errors import SchemaError
from noetl_grpc.storage.catalog import read_catalog
from noetl_grpc.storage.ddl import STATEMENTS, Statement

#: Held by the session that migrates this database.
_MIGRATION_LOCK: Final = 0x6E6F65746C01
_LOCK_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that this role may not or can't add, and what somebody else could run."""

    what: str
    reason: str
    sql: str
    required: bool


@dataclass(slots=True)
class Report:
    """What a migration did, and what it had to leave."""

    applied: list[str] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return not any(item.required for item in self.missing)


async def migrate(conn: asyncpg.Connection, *, progress: Callable[[str], None] | None = None) -> Report:
    """Create or complete the schema; a second run changes nothing."""
    report = Report()
    async with _only_migrator(conn, progress or _silent):
        catalog = await read_catalog(conn)
        wanted = [statement for statement in STATEMENTS if not catalog.has(statement)]
        if wanted:
            await _run_together(conn, wanted)
        report.applied += [statement.title for statement in wanted]
    return report


async def require_usable(conn: asyncpg.Connection) -> None:
    """Refuse a database that lacks what the service needs."""
    if await conn.fetchval("SELECT to_regclass('noetl.schema_version')") is None:
        raise SchemaError("the database lacks the schema of this service; run `noetl-grpc migrate`")


def _silent(_: str) -> None: ...


async def _run_together(conn: asyncpg.Connection, statements: Sequence[Statement]) -> None:
    async with conn.transaction():
        await conn.execute(";\n".join(statement.sql for statement in statements))


@asynccontextmanager
async def _only_migrator(conn: asyncpg.Connection, progress: Callable[[str], None]) -> AsyncIterator[None]:
    """Wait until nobody else migrates this database.

    Polled outside a transaction: a session that waited inside one would hold a snapshot, and the CREATE INDEX
    CONCURRENTLY of the other migrator waits for all of those.
    """
    waiting = False
    while not await conn.fetchval("SELECT pg_try_advisory_lock($1)", _MIGRATION_LOCK):
        if not waiting:
            progress("waiting for another migration of this database to end")
        waiting = True
        await asyncio.sleep(_LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        await conn.execute("SELECT pg_advisory_unlock($1)", _MIGRATION_LOCK)
