"""How a database differs from what storage/schema/ describes, and whether the service can work with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import asyncpg

from noetl_grpc.errors import SchemaError
from noetl_grpc.storage.catalog import Catalog, read_catalog
from noetl_grpc.storage.ddl import STATEMENTS, Column, Constraint, Kind, Statement
from noetl_grpc.storage.queries import queries
from noetl_grpc.storage.script import PRIVILEGES, grant, index_script

SERVER_VERSION_NUM_MIN: Final = 150_000

_TEXT_TYPES: Final = ("text", "character varying")


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference; `sql` adds what is missing and is None where nothing can simply be added."""

    what: str
    problem: str
    required: bool
    sql: str | None

    def __str__(self) -> str:
        return f"{self.what} {self.problem}"


@dataclass(frozen=True, slots=True)
class Usability:
    """What the service may rely on in a schema that it can work with."""

    #: The log can be followed by snapshots: noetl.event.xact_id is there with its default.
    has_xact_id: bool
    #: ... and looking for what is new uses an index.
    has_xact_index: bool
    optional_drift: tuple[Drift, ...]


async def verify(conn: asyncpg.Connection) -> list[Drift]:
    """List what is missing or different, the required first."""
    return await _find_drift(conn, await read_catalog(conn))


async def require_usable(conn: asyncpg.Connection) -> Usability:
    """Refuse a schema that the service can't work with, naming the command that mends it."""
    await read_rights(conn)
    catalog = await read_catalog(conn)
    drift = await _find_drift(conn, catalog)
    if required := [item for item in drift if item.required]:
        raise SchemaError(await _refusal(conn, required))
    column, index = (
        next(statement for statement in STATEMENTS if statement.title == title)
        for title in ("column noetl.event.xact_id", "index noetl.idx_event_xact_id")
    )
    return Usability(
        has_xact_id=_has_default(catalog, column.columns[0]),
        has_xact_index=catalog.has(index),
        optional_drift=tuple(drift),
    )


async def read_rights(conn: asyncpg.Connection) -> asyncpg.Record:
    """Look at the server and at what the session's role may do; a server that is too old is refused."""
    rights = await conn.fetchrow(queries["rights"])
    if rights["server_version_num"] < SERVER_VERSION_NUM_MIN:
        raise SchemaError(
            f"PostgreSQL {rights['server_version']} is too old: noetl_grpc needs version 15 or newer"
        )
    return rights


def _has_default(catalog: Catalog, column: Column) -> bool:
    found = catalog.columns.get((column.table, column.name))
    return found is not None and (found.type, found.default) == (column.type, column.default)


async def _refusal(conn: asyncpg.Connection, required: Sequence[Drift]) -> str:
    rights = await conn.fetchrow(queries["rights"])
    lines = [f"the schema of database {rights['database_name']} can't be used:"]
    lines += [f"  {item}" for item in required]
    lines.append("Run `noetl-grpc migrate` to add what is missing.")
    if any(item.sql is None for item in required):
        lines.append("What is there and different has to be altered by hand.")
    tables = sorted({statement.table for statement in STATEMENTS})
    if not rights["creates_tables"] or await conn.fetch(queries["not_owned"], tables):
        lines.append("This role may not do all of it. The owner of NoETL's tables can run:")
        lines += [item.sql for item in required if item.sql]
    return "\n".join(lines)


async def _find_drift(conn: asyncpg.Connection, catalog: Catalog) -> list[Drift]:
    drift = [*_compare(catalog), *await _missing_privileges(conn, catalog)]
    return sorted(drift, key=lambda item: not item.required)


def _compare(catalog: Catalog) -> Iterator[Drift]:
    for statement in STATEMENTS:
        is_there = statement.table in catalog.relations
        match statement.kind:
            case Kind.TABLE if is_there:
                for column in statement.columns:
                    yield from _compare_column(catalog, column, required=statement.required)
                for constraint in statement.constraints:
                    yield from _compare_constraint(catalog, constraint)
                yield from _compare_partitioning(catalog, statement)
            case Kind.TABLE:
                yield Drift(statement.title, "is missing", statement.required, _creation(catalog, statement))
            case Kind.COLUMN:
                yield from _compare_column(catalog, statement.columns[0], required=statement.required)
            case Kind.INDEX:
                yield from _compare_index(catalog, statement)
            case Kind.SCHEMA | Kind.FUNCTION | Kind.ROWS:
                if not catalog.has(statement):
                    yield Drift(statement.title, "is missing", statement.required, f"{statement.sql};")
            case Kind.SEQUENCE | Kind.PARTITION | Kind.OWNERSHIP:
                pass  # They come with their table.
            case _:
                assert_never(statement.kind)


def _creation(catalog: Catalog, table: Statement) -> str:
    """The statements that make a table with all that comes with it."""
    needed = [table]
    for item in reversed(STATEMENTS):
        is_named = item.kind in (Kind.SEQUENCE, Kind.FUNCTION) and any(
            item.name in other.sql for other in needed
        )
        if is_named and not catalog.has(item):
            needed.insert(0, item)
    needed += [
        item
        for item in STATEMENTS
        if item.kind in (Kind.PARTITION, Kind.OWNERSHIP) and item.table == table.name
    ]
    return "\n".join(f"{item.sql};" for item in needed)


def _compare_column(catalog: Catalog, column: Column, *, required: bool) -> Iterator[Drift]:
    found = catalog.columns.get((column.table, column.name))
    if found is None:
        sql = f"ALTER TABLE {column.table} ADD COLUMN IF NOT EXISTS {column.sql};"
        addable = column.default is not None or not column.not_null
        yield Drift(column.title, "is missing", required, sql if addable else None)
        return
    if found.type != column.type:
        both_text = all(name.startswith(_TEXT_TYPES) for name in (found.type, column.type))
        yield Drift(column.title, f"is {found.type}, not {column.type}", required and not both_text, None)
    if found.not_null != column.not_null:
        # We may leave a column out or set it to NULL where NoETL's schema lets us.
        word = "refuses NULL" if found.not_null else "accepts NULL"
        yield Drift(column.title, word, required and found.not_null, None)
    if found.default != column.default:
        problem = f"has the default {found.default or 'NULL'}, not {column.default or 'NULL'}"
        yield Drift(column.title, problem, required and column.not_null and found.default is None, None)


def _compare_constraint(catalog: Catalog, constraint: Constraint) -> Iterator[Drift]:
    if catalog.has_constraint(constraint):
        return
    # Our writes name their conflict target, which a unique index serves as well as a constraint.
    kind, _, columns = constraint.definition.partition(" (")
    is_key = kind in ("PRIMARY KEY", "UNIQUE")
    if is_key and any(
        index.table == constraint.table and index.unique and index.definition == f"btree ({columns}"
        for index in catalog.indexes
    ):
        return
    sql = f"ALTER TABLE {constraint.table} ADD CONSTRAINT {constraint.name} {constraint.definition};"
    yield Drift(constraint.title, "is missing", is_key, sql)


def _compare_partitioning(catalog: Catalog, statement: Statement) -> Iterator[Drift]:
    found = catalog.partition_keys.get(statement.name)
    if found != statement.partition_key:
        problem = f"is partitioned by {found or 'nothing'}, not by {statement.partition_key or 'anything'}"
        yield Drift(statement.title, problem, False, None)


def _compare_index(catalog: Catalog, statement: Statement) -> Iterator[Drift]:
    found = catalog.index(statement)
    if found is not None and found.valid:
        return
    namesake = next((index for index in catalog.indexes if index.name == statement.name), None)
    if found is not None:
        problem = "is not valid: its building was interrupted"
    elif namesake is not None:
        problem = f"is {namesake.definition}, not {statement.definition}"
    else:
        problem = "is missing"
    is_partitioned = statement.table in catalog.partition_keys
    sql = None if namesake and not found else index_script(statement, is_partitioned=is_partitioned)
    yield Drift(statement.title, problem, statement.required, sql)


async def _missing_privileges(conn: asyncpg.Connection, catalog: Catalog) -> list[Drift]:
    rights = await read_rights(conn)
    wanted = [
        (relation, privilege, required)
        for relation, levels in PRIVILEGES.items()
        # What the role will make itself it will also own.
        if relation in catalog.relations or not rights["creates_tables"]
        for privileges, required in zip(levels, (True, False), strict=True)
        for privilege in privileges
    ]
    relations, privileges = [item[0] for item in wanted], [item[1] for item in wanted]
    granted = {tuple(row) for row in await conn.fetch(queries["existing_privileges"], relations, privileges)}
    role = await conn.fetchval(queries["role"])
    lacking: dict[tuple[str, bool], tuple[str, ...]] = {}
    for relation, privilege, required in wanted:
        if (relation, privilege) not in granted:
            lacking[relation, required] = (*lacking.get((relation, required), ()), privilege)
    drift = [
        Drift(
            f"privilege {', '.join(words)} on {relation}",
            "is missing",
            required,
            grant(relation, words, role),
        )
        for (relation, required), words in lacking.items()
    ]
    if not rights["uses_schema"]:
        sql = f"GRANT USAGE ON SCHEMA noetl TO {role};"
        drift.insert(0, Drift("privilege USAGE on schema noetl", "is missing", True, sql))
    return drift
