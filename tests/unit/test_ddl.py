import pytest

from noetl_grpc.storage.ddl import FILES, STATEMENTS, Kind, parse
from noetl_grpc.storage.script import render_sql


def test_files_are_numbered_and_every_statement_is_understood() -> None:
    assert [file.name for file in FILES] == ["001_noetl", "002_service", "003_event_log"]
    assert {statement.kind for statement in STATEMENTS} == set(Kind)
    assert len({statement.title for statement in STATEMENTS}) == len(STATEMENTS)


def test_a_table_is_read_line_by_line() -> None:
    text = """
-- What it is for.
CREATE TABLE IF NOT EXISTS noetl.thing (
    thing_id bigint NOT NULL DEFAULT nextval('noetl.thing_seq'::regclass),
    noted timestamp with time zone,
    CONSTRAINT thing_pkey PRIMARY KEY (thing_id),
    CONSTRAINT thing_check
        CHECK (((noted IS NULL)
        OR (thing_id > 0)))
) PARTITION BY RANGE (thing_id);
"""

    (table,) = parse(7, text)

    assert (table.version, table.kind, table.name, table.required) == (7, Kind.TABLE, "noetl.thing", True)
    assert [(column.name, column.type, column.not_null, column.default) for column in table.columns] == [
        ("thing_id", "bigint", True, "nextval('noetl.thing_seq'::regclass)"),
        ("noted", "timestamp with time zone", False, None),
    ]
    assert [constraint.definition for constraint in table.constraints] == [
        "PRIMARY KEY (thing_id)",
        "CHECK (((noted IS NULL) OR (thing_id > 0)))",
    ]
    assert table.partition_key == "RANGE (thing_id)"


def test_a_statement_is_optional_when_the_line_above_says_so() -> None:
    text = """
-- optional
CREATE INDEX IF NOT EXISTS idx_a ON noetl.thing USING btree (a);
CREATE UNIQUE INDEX IF NOT EXISTS idx_b ON noetl.thing
    USING btree (b)
    WHERE (b IS NOT NULL);
"""

    first, second = parse(1, text)

    assert (first.required, first.unique, first.definition) == (False, False, "btree (a)")
    assert (second.required, second.unique, second.definition) == (
        True,
        True,
        "btree (b) WHERE (b IS NOT NULL)",
    )


@pytest.mark.parametrize("sql", ["DROP TABLE noetl.event;", "UPDATE noetl.event SET xact_id = NULL;"])
def test_a_statement_that_is_not_an_addition_is_an_error(sql: str) -> None:
    with pytest.raises(ValueError, match="a statement of no known form"):
        list(parse(1, sql))


def test_the_script_is_always_the_same() -> None:
    assert render_sql() == render_sql()
    assert "ADD COLUMN IF NOT EXISTS xact_id xid8 DEFAULT pg_current_xact_id()" in render_sql()
