"""Reading catalog entries from YAML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from noetl_grpc.dev.catalog import SAMPLE_CATALOG, CatalogError, read_catalog


def test_every_sample_can_be_read() -> None:
    entries = read_catalog(SAMPLE_CATALOG)

    assert {entry.path: entry.kind for entry in entries.values()} == {
        "demo/hello": "playbook",
        "demo/order": "playbook",
        "demo/order_events": "subscription",
    }


def test_only_yaml_files_are_entries_and_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    text = "kind: Note\nmetadata: {name: a}\n"
    (tmp_path / "a.yml").write_text("\ufeff" + text)
    (tmp_path / "notes.txt").write_text("not: [yaml")

    [entry] = read_catalog(tmp_path).values()

    assert (entry.path, entry.content) == ("a", text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kind: [", "is not YAML"),
        ("- a\n- b\n", "the document must be a mapping"),
        ("", "the document must be a mapping"),
        ("kind: Playbook\n", "metadata must be a mapping"),
        ("kind: Playbook\nmetadata: {}\n", "metadata.path, or else metadata.name, must be a text"),
        ("kind: Playbook\nmetadata: {path: 7}\n", "metadata.path, or else metadata.name, must be a text"),
        ("metadata: {path: a}\n", "kind must be a text"),
        ("kind: A\nmetadata: {path: a}\n---\nkind: B\n", "is not YAML: expected a single document"),
        ("kind: A\nmetadata: {path: a}\nworkload: !!binary aGk=\n", "workload can't be written as JSON"),
        ("kind: A\nmetadata: {path: a}\nworkload: &x [*x]\n", "workload can't be written as JSON"),
        ("kind: A\nmetadata: {path: first}\n", r"metadata.path first is also that of .*/a\.yaml"),
    ],
)
def test_a_bad_file_is_named_with_the_rule(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "a.yaml").write_text("kind: A\nmetadata: {path: first}\n")
    (tmp_path / "b.yaml").write_text(text)

    with pytest.raises(CatalogError, match=rf"/b\.yaml: {rule}"):
        read_catalog(tmp_path)


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"kind: \xff")

    with pytest.raises(CatalogError, match=r"/a\.yaml: can't be read"):
        read_catalog(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=f"{tmp_path}/none: no such folder"):
        read_catalog(tmp_path / "none")
