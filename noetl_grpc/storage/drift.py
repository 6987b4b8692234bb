"""How a database differs from what storage/schema/ describes, and whether the service can work with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
    catalog = await read_catalog(conn)
    drift = [*_compare(catalog), *await _missing_privileges(conn, catalog)]
    return sorted(drift, key=lambda item: not item.required)


async def require_usable(conn: asyncpg.Connection) -> Usability:
    """Refuse a schema that the service can't work with, naming the command that mends it."""
    rights = await read_rights(conn)
    drift = await verify(conn)
    if required := [item for item in drift if item.required]:
        raise SchemaError(await _refusal(conn, rights["database_name"], required))
    catalog = await read_catalog(conn)
    column, index = (
        next(statement for statement in STATEMENTS if statement.title == title)
        for title in ("column noetl.event.xact_id", "index noetl.idx_event_xact_id")
    )
    return Usability(
        has_xact_id=not list(_compare_column(catalog, column.columns[0], required=False)),
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


async def _refusal(conn: asyncpg.Connection, database: str, required: Sequence[Drift]) -> str:
    lines = [f"the schema of database {database} can't be used:"]
    lines += [f"  {item}" for item in required]
    lines.append("Run `noetl-grpc migrate` to add what is missing.")
    tables = sorted({statement.table for statement in STATEMENTS})
    foreign = {row["name"] for row in await conn.fetch(queries["not_owned"], tables)}
    rights = await conn.fetchrow(queries["rights"])
    if foreign or not rights["creates_tables"]:
        lines.append("This role may not do all of it. Somebody who owns these tables can run:")
        lines += [item.sql for item in required if item.sql]
    return "\n".join(lines)


def _compare(catalog: Catalog) -> Iterator[Drift]:
    for statement in STATEMENTS:
        if statement.kind is Kind.TABLE and catalog.has(statement):
            for column in statement.columns:
                yield from _compare_column(catalog, column, required=statement.required)
            for constraint in statement.constraints:
                yield from _compare_constraint(catalog, constraint)
            yield from _compare_partitioning(catalog, statement)
        elif statement.kind is Kind.COLUMN and statement.table in catalog.relations:
            yield from _compare_column(catalog, statement.columns[0], required=statement.required)
        elif statement.kind is Kind.INDEX and statement.table in catalog.relations:
            yield from _compare_index(catalog, statement)
        elif statement.kind not in (Kind.SEQUENCE, Kind.PARTITION, Kind.OWNERSHIP) and not catalog.has(
            statement
        ):
            yield Drift(statement.title, "is missing", statement.required, f"{statement.sql};")


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
    wanted = [
        (relation, privilege, required)
        for relation, levels in PRIVILEGES.items()
        if relation in catalog.relations
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
    return [
        Drift(
            f"privilege {', '.join(words)} on {relation}",
            "is missing",
            required,
            grant(relation, words, role),
        )
        for (relation, required), words in lacking.items()
    ]
