"""The schema as a psql script, for a DBA who does not let services alter tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

from noetl_grpc.storage.ddl import FILES, STATEMENTS, Kind, Statement
from noetl_grpc.storage.queries import queries

#: Who waits for a lock on a table makes every later writer wait behind it, so nobody waits for longer. It is
#: a little above deadlock_timeout, when PostgreSQL cancels an autovacuum that is in the way.
LOCK_TIMEOUT_MS: Final = 1200
#: For all the locks of one statement together: the partitions are locked one by one.
STATEMENT_TIMEOUT_MS: Final = 1600
IMPATIENT: Final = f"SET lock_timeout = {LOCK_TIMEOUT_MS}; SET statement_timeout = {STATEMENT_TIMEOUT_MS};"
PATIENT: Final = "SET lock_timeout = 0; SET statement_timeout = 0;"

_HEADER: Final = """\
-- The schema that noetl_grpc needs, as a psql script:
--
--     psql -f schema.sql DATABASE
--     psql -f schema.sql -v service_role=NAME DATABASE    also grants that role what the service does
--
-- Run it as the owner of NoETL's tables. It only adds, and may be run again; when it stops with a lock
-- timeout somebody's transaction was in the way, and the next run goes on from there.
\\set ON_ERROR_STOP on
"""

#: What the service does to each relation: always, and only when it purges or fills another shard.
PRIVILEGES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "noetl.resource": ((), ("SELECT", "INSERT")),
    "noetl.catalog": (("SELECT",), ("INSERT",)),
    "noetl.event": (("SELECT", "INSERT"), ()),
    "noetl.outbox": (("SELECT", "INSERT", "UPDATE"), ("DELETE",)),
    "noetl.outbox_outbox_id_seq": (("USAGE",), ()),
    "noetl.command": ((), ("SELECT", "DELETE")),
    "noetl.runtime": ((), ("SELECT", "DELETE")),
    "noetl.projection_snapshot": (("SELECT", "INSERT", "UPDATE"), ("DELETE",)),
    "noetl.log_cursor": (("SELECT", "INSERT", "UPDATE"), ("DELETE",)),
    "noetl.subscription_runtime": (("SELECT", "INSERT", "UPDATE"), ("DELETE",)),
    "noetl.machine_lease": (("SELECT", "INSERT", "UPDATE"), ("DELETE",)),
    "noetl.event_dead_letter": (("SELECT", "INSERT", "UPDATE"), ("DELETE",)),
    "noetl.schema_version": (("SELECT",), ()),
}


def grant(relation: str, privileges: tuple[str, ...], role: str) -> str:
    kind = "SEQUENCE " if relation.endswith("_seq") else ""
    return f"GRANT {', '.join(privileges)} ON {kind}{relation} TO {role};"


def render_sql() -> str:
    """The whole schema, always the same text."""
    return "\n".join([_HEADER, *_guards(), IMPATIENT, *_statements(), *_grants(), ""])


def concurrently(statement: Statement) -> str:
    """The index statement in the form that lets writers go on."""
    return statement.sql.replace("INDEX IF NOT EXISTS", "INDEX CONCURRENTLY IF NOT EXISTS", 1)


def only_parent(statement: Statement) -> str:
    """The index statement for a partitioned table alone; its partitions are indexed one by one."""
    return statement.sql.replace(f" ON {statement.table}", f" ON ONLY {statement.table}", 1)


def index_script(statement: Statement, *, is_partitioned: bool) -> str:
    """What a DBA runs to add an index to a table that is in use; ends with short lock timeouts set."""
    if not is_partitioned:
        return "\n".join([PATIENT, f"{concurrently(statement)};", IMPATIENT])
    values = tuple(map(_quoted, (statement.table, statement.name, statement.definition)))
    return "\n".join(
        [
            IMPATIENT,
            f"{only_parent(statement)};",
            PATIENT,
            f"{_inlined(queries['drops_of_unfinished_indexes'], *values)} \\gexec",
            f"{_inlined(queries['builds_of_partition_indexes'], *values)} \\gexec",
            IMPATIENT,
            f"{_inlined(queries['attachments_of_partition_indexes'], *values)} \\gexec",
        ]
    )


def _inlined(query: str, *values: str) -> str:
    """A query of ours with literals in place of its parameters, without its comment."""
    text = "\n".join(line for line in query.splitlines() if not line.startswith("--"))
    for number, value in enumerate(values, start=1):
        text = text.replace(f"${number}", value)
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _guards() -> Iterator[str]:
    """Ask before anything is made what is new: partitions and the like come only with a new table."""
    lines = [f"{probe}('{name}') IS NULL AS {_guard(name)}" for name, probe in _guarded().items()]
    yield "SELECT " + ",\n    ".join(lines) + " \\gset"


def _guarded() -> dict[str, str]:
    return {
        name: "to_regproc" if statement.kind is Kind.FUNCTION else "to_regclass"
        for statement in STATEMENTS
        if (name := _comes_with(statement))
    }


def _comes_with(statement: Statement) -> str | None:
    """The new thing without which the statement must not run."""
    match statement.kind:
        case Kind.PARTITION | Kind.OWNERSHIP:
            return statement.table
        case Kind.FUNCTION:
            return statement.name
        case _:
            return None


def _guard(name: str) -> str:
    return f"{name.removeprefix('noetl.')}_is_new"


def _statements() -> Iterator[str]:
    partitioned = {statement.name for statement in STATEMENTS if statement.partition_key}
    guarded = _guarded()
    for name, group in groupby(STATEMENTS, key=_comes_with):
        if name:
            yield f"\\if :{_guard(name)}"
        for statement in group:
            if statement.kind is Kind.TABLE and statement.name in guarded:
                # Never leave a table without its partitions: the next run would take it for an old one.
                yield "BEGIN;"
            if statement.kind is Kind.INDEX:
                yield index_script(statement, is_partitioned=statement.table in partitioned)
            else:
                yield f"{statement.sql};"
        if name:
            yield "\\endif"
            if guarded[name] == "to_regclass":
                yield "COMMIT;"
    for file in FILES:
        yield f"{_inlined(queries['record_version'], str(file.version), _quoted(file.name))};"


def _grants() -> Iterator[str]:
    yield "\\if :{?service_role}"
    yield 'GRANT USAGE ON SCHEMA noetl TO :"service_role";'
    for relation, (always, sometimes) in PRIVILEGES.items():
        yield grant(relation, always + sometimes, ':"service_role"')
    yield "\\endif"
