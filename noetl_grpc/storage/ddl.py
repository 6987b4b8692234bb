"""The numbered files of storage/schema/ as values: which object each statement makes, and what it looks like.

The files stay plain SQL that psql can run. They are ours, written in the few forms matched here; another form
is an error at import, so nothing can be skipped unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

SCHEMA_FOLDER: Final = Path(__file__).with_name("schema")


class Kind(Enum):
    """What a statement makes; the value is the word for it in reports."""

    SCHEMA = "schema"
    SEQUENCE = "sequence"
    FUNCTION = "function"
    TABLE = "table"
    PARTITION = "partition"
    OWNERSHIP = "ownership of sequence"
    COLUMN = "column"
    INDEX = "index"
    ROWS = "rows of"


@dataclass(frozen=True, slots=True)
class Column:
    """A column as its line declares it."""

    table: str
    name: str
    type: str
    not_null: bool
    default: str | None
    sql: str

    @property
    def title(self) -> str:
        return f"column {self.table}.{self.name}"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A named constraint of a table; `definition` as pg_get_constraintdef() prints it."""

    table: str
    name: str
    definition: str

    @property
    def title(self) -> str:
        return f"constraint {self.name} of {self.table}"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a schema file."""

    version: int
    kind: Kind
    #: Qualified, but for an index: NoETL's names are unique anyway.
    name: str
    #: The table it belongs to; the thing itself where it is a table or belongs to none.
    table: str
    sql: str
    required: bool
    #: Of an index: what follows USING.
    definition: str = ""
    unique: bool = False
    #: Of a table or an added column.
    columns: tuple[Column, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    partition_key: str | None = None
    #: Of rows: their keys.
    keys: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        match self.kind:
            case Kind.COLUMN:
                return self.columns[0].title
            case Kind.INDEX:
                return f"index noetl.{self.name}"
            case _:
                return f"{self.kind.value} {self.name}"


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """A numbered file and its statements, in order."""

    version: int
    name: str
    text: str
    statements: tuple[Statement, ...]


_FORMS: Final = {
    kind: re.compile(form, re.DOTALL)
    for kind, form in {
        Kind.SCHEMA: r"CREATE SCHEMA IF NOT EXISTS (?P<name>\w+)",
        Kind.SEQUENCE: r"CREATE SEQUENCE IF NOT EXISTS (?P<name>[\w.]+)(?: AS \w+)?",
        Kind.FUNCTION: r"CREATE OR REPLACE FUNCTION (?P<name>[\w.]+)\(\) .+",
        Kind.PARTITION: r"CREATE TABLE IF NOT EXISTS (?P<name>[\w.]+) PARTITION OF (?P<table>[\w.]+)\s.+",
        Kind.TABLE: r"CREATE TABLE IF NOT EXISTS (?P<name>[\w.]+) \(\n(?P<body>.+)\n\)"
        r"(?: PARTITION BY (?P<key>.+))?",
        Kind.OWNERSHIP: r"ALTER SEQUENCE (?P<name>[\w.]+) OWNED BY (?P<table>\w+\.\w+)\.\w+",
        Kind.COLUMN: r"ALTER TABLE (?P<table>[\w.]+) ADD COLUMN IF NOT EXISTS (?P<name>.+)",
        Kind.INDEX: r"CREATE (?P<unique>UNIQUE )?INDEX IF NOT EXISTS (?P<name>\w+) ON (?P<table>[\w.]+)"
        r"\s+USING (?P<definition>.+)",
        Kind.ROWS: r"INSERT INTO (?P<name>[\w.]+) \(name\)\nVALUES (?P<keys>.+)\nON CONFLICT .+",
    }.items()
}
_COLUMN: Final = re.compile(
    r"(?P<name>\w+) (?P<type>.+?)(?P<not_null> NOT NULL)?(?: DEFAULT (?P<default>.+))?"
)
_CONSTRAINT: Final = re.compile(r"CONSTRAINT (?P<name>\w+) (?P<definition>.+)")
_OPTIONAL: Final = re.compile(r"^-- optional$", re.MULTILINE)
_COMMENTS: Final = re.compile(r"(?:--[^\n]*\n|\s)*")


def parse(version: int, text: str) -> Iterator[Statement]:
    """Yield the statements of a schema file."""
    for chunk in re.split(r";(?:\n|$)", text):
        lead = _COMMENTS.match(chunk)
        sql = chunk[lead.end() if lead else 0 :].rstrip()
        if sql:
            yield _statement(version, sql, required=not _OPTIONAL.search(chunk[: -len(sql)]))


def _statement(version: int, sql: str, *, required: bool) -> Statement:
    for kind, form in _FORMS.items():
        if match := form.fullmatch(sql):
            found = match.groupdict()
            table = found.get("table") or found["name"]
            columns, constraints = _body(table, found.get("body") or "")
            if kind is Kind.COLUMN:
                columns = (_column(table, found["name"]),)
            return Statement(
                version=version,
                kind=kind,
                name=columns[0].name if kind is Kind.COLUMN else found["name"],
                table=table,
                sql=sql,
                required=required,
                definition=" ".join((found.get("definition") or "").split()),
                unique=bool(found.get("unique")),
                columns=columns,
                constraints=constraints,
                partition_key=found.get("key"),
                keys=tuple(re.findall(r"'(\w+)'", found.get("keys") or "")),
            )
    raise ValueError(f"schema file {version}: a statement of no known form: {sql[:80]!r}")


def _body(table: str, body: str) -> tuple[tuple[Column, ...], tuple[Constraint, ...]]:
    columns, constraints = [], []
    for entry in re.split(r",\n {4}(?! )", body.removeprefix("    ")) if body else ():
        line = " ".join(entry.split())
        if match := _CONSTRAINT.fullmatch(line):
            # A line break became a blank; PostgreSQL prints none after a parenthesis.
            constraints.append(Constraint(table, match["name"], match["definition"].replace("( ", "(")))
        else:
            columns.append(_column(table, line))
    return tuple(columns), tuple(constraints)


def _column(table: str, line: str) -> Column:
    match = _COLUMN.fullmatch(line)
    if match is None:
        raise ValueError(f"{table}: not a column: {line!r}")
    return Column(table, match["name"], match["type"], bool(match["not_null"]), match["default"], line)


def load() -> tuple[SchemaFile, ...]:
    """Read storage/schema/ in order; the files are numbered from 1 without a gap."""
    files = []
    for version, path in enumerate(sorted(SCHEMA_FOLDER.glob("*.sql")), start=1):
        if not path.name.startswith(f"{version:03}_"):
            raise ValueError(f"schema file {version} is called {path.name}")
        text = path.read_text(encoding="utf-8")
        files.append(SchemaFile(version, path.stem, text, tuple(parse(version, text))))
    return tuple(files)


FILES: Final = load()
STATEMENTS: Final = tuple(statement for file in FILES for statement in file.statements)
