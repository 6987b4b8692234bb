"""What a database's catalogs say about the schema `noetl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import asyncpg

from noetl_grpc.storage.ddl import STATEMENTS, Column, Constraint, Kind, Statement
from noetl_grpc.storage.queries import queries


@dataclass(frozen=True, slots=True)
class Index:
    """An index as it is."""

    table: str
    name: str
    unique: bool
    valid: bool
    definition: str


@dataclass(frozen=True, slots=True)
class Catalog:
    """The schema as it is, without the partitions."""

    schemas: frozenset[str]
    #: Name to kind, as pg_class has it.
    relations: Mapping[str, str]
    partition_keys: Mapping[str, str]
    functions: frozenset[str]
    columns: Mapping[tuple[str, str], Column]
    indexes: tuple[Index, ...]
    constraints: frozenset[tuple[str, str]]
    resources: frozenset[str]

    def has_column(self, column: Column) -> bool:
        return (column.table, column.name) in self.columns

    def has_constraint(self, constraint: Constraint) -> bool:
        return (constraint.table, constraint.definition) in self.constraints

    def index(self, statement: Statement) -> Index | None:
        """The index that does what this statement's would do, under whatever name."""
        same = [
            index
            for index in self.indexes
            if (index.table, index.definition, index.unique)
            == (statement.table, statement.definition, statement.unique)
        ]
        return max(same, key=lambda index: (index.valid, index.name == statement.name), default=None)

    def has(self, statement: Statement) -> bool:
        """Whether what the statement makes is there; what it looks like is another question."""
        match statement.kind:
            case Kind.SCHEMA:
                return statement.name in self.schemas
            case Kind.FUNCTION:
                return statement.name in self.functions
            case Kind.SEQUENCE | Kind.TABLE:
                return statement.name in self.relations
            case Kind.COLUMN:
                return self.has_column(statement.columns[0])
            case Kind.INDEX:
                index = self.index(statement)
                return index is not None and index.valid
            case Kind.ROWS:
                return self.resources.issuperset(statement.keys)
            case Kind.PARTITION | Kind.OWNERSHIP:
                # They come with their table.
                return statement.table in self.relations


async def read_catalog(conn: asyncpg.Connection) -> Catalog:
    """Read the catalogs at one moment, with every name printed qualified."""
    async with conn.transaction(isolation="repeatable_read", readonly=True):
        await conn.execute("SET LOCAL search_path = pg_catalog")
        relations = await conn.fetch(queries["existing_relations"])
        columns = await conn.fetch(queries["existing_columns"])
        indexes = await conn.fetch(queries["existing_indexes"])
        constraints = await conn.fetch(queries["existing_constraints"])
        functions = await conn.fetch(queries["existing_functions"])
        schemas = await conn.fetch("SELECT nspname::text AS name FROM pg_namespace WHERE nspname = 'noetl'")
        names = {row["name"]: row["kind"] for row in relations}
        resources = await _read_resources(conn) if "noetl.resource" in names else frozenset()
    return Catalog(
        schemas=frozenset(row["name"] for row in schemas),
        relations=names,
        partition_keys={row["name"]: row["partition_key"] for row in relations if row["partition_key"]},
        functions=frozenset(row["name"] for row in functions),
        columns={
            (row["table_name"], row["name"]): Column(
                row["table_name"], row["name"], row["type"], row["not_null"], row["default_value"], ""
            )
            for row in columns
        },
        indexes=tuple(Index(*row) for row in indexes),
        constraints=frozenset((row["table_name"], row["definition"]) for row in constraints),
        resources=resources,
    )


async def _read_resources(conn: asyncpg.Connection) -> frozenset[str]:
    keys = [key for statement in STATEMENTS for key in statement.keys]
    try:
        async with conn.transaction():
            return frozenset(row["name"] for row in await conn.fetch(queries["existing_resources"], keys))
    except asyncpg.InsufficientPrivilegeError:
        # Not ours to read, so not ours to judge.
        return frozenset(keys)
