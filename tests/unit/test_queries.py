from pathlib import Path

import pytest

from noetl_grpc.storage.queries import load, queries


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_a_statement_reaches_to_the_next_name(tmp_path: Path) -> None:
    file = write(
        tmp_path, "a.sql", "-- The family.\n\n-- name: one\n-- Why.\nSELECT 1;\n\n-- name: two\nSELECT 2;\n"
    )

    assert load([file]) == {"one": "-- Why.\nSELECT 1", "two": "SELECT 2"}


def test_a_name_is_unique_across_files(tmp_path: Path) -> None:
    first = write(tmp_path, "a.sql", "-- name: one\nSELECT 1;\n")
    second = write(tmp_path, "b.sql", "-- name: one\nSELECT 2;\n")

    with pytest.raises(ValueError, match=r"b\.sql: 'one' is not a new statement name"):
        load([first, second])


@pytest.mark.parametrize("name", ["", "two words", "kebab-case"])
def test_a_name_is_an_identifier(tmp_path: Path, name: str) -> None:
    file = write(tmp_path, "a.sql", f"-- name: {name}\nSELECT 1;\n")

    with pytest.raises(ValueError, match="is not a new statement name"):
        load([file])


def test_our_statements_are_loaded() -> None:
    assert "existing_columns" in queries
    assert all(statement and not statement.endswith(";") for statement in queries.values())
