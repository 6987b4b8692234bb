"""Fills NoETL's catalog from YAML files, for a development server that has no catalog service beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import asyncpg
import orjson
import yaml

from noetl_grpc.dev.process import LaunchError
from noetl_grpc.storage.catalog_registration import NewEntry, lock_catalog, register_catalog_entry

#: Two playbooks and a subscription, `demo/…`.
SAMPLE_CATALOG = Path(__file__).with_name("sample_catalog")


class CatalogError(LaunchError):
    """A file that is no catalog entry; the text names it and the rule."""


async def load_catalog(conn: asyncpg.Connection, directory: Path) -> list[str]:
    """Register every entry under the directory whose text is new; returns their paths.

    All or nothing: each file is read before the first row is written.
    """
    entries = read_catalog(directory)
    registered = []
    async with conn.transaction():
        await lock_catalog(conn)
        for file, entry in entries.items():
            try:
                version = await register_catalog_entry(conn, entry)
            except asyncpg.DataError as error:
                raise CatalogError(f"{file}: PostgreSQL can't store it: {error}") from error
            if version is not None:
                registered.append(entry.path)
    return registered


def read_catalog(directory: Path) -> dict[Path, NewEntry]:
    """The entries of all YAML files under the directory, by file."""
    if not directory.is_dir():
        raise CatalogError(f"{directory}: no such folder")
    entries: dict[Path, NewEntry] = {}
    found: dict[str, Path] = {}
    for file in sorted(_yaml_files(directory)):
        entry = read_entry(file)
        if entry.path in found:
            raise CatalogError(f"{file}: metadata.path {entry.path} is also that of {found[entry.path]}")
        found[entry.path] = file
        entries[file] = entry
    return entries


def _yaml_files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*.y*ml") if path.suffix in (".yaml", ".yml") and path.is_file())


def read_entry(file: Path) -> NewEntry:
    """One catalog entry; the file holds one YAML document."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        document = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"{file}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise CatalogError(f"{file}: is not YAML: {error}") from error
    document = _mapping(file, document, "the document")
    metadata = _mapping(file, document.get("metadata"), "metadata")
    path = metadata.get("path") or metadata.get("name")
    kind = document.get("kind")
    if not isinstance(path, str) or not path.strip():
        raise CatalogError(f"{file}: metadata.path, or else metadata.name, must be a text")
    if not isinstance(kind, str) or not kind.strip():
        raise CatalogError(f"{file}: kind must be a text, such as Playbook or Subscription")
    return NewEntry(
        path=path.strip(),
        kind=kind.strip().lower(),
        content=text,
        layout_json=_json(file, document, "workflow"),
        payload_json=_json(file, document, "workload"),
        meta_json=_json(file, metadata, "labels"),
    )


def _mapping(file: Path, value: object, name: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise CatalogError(f"{file}: {name} must be a mapping")
    return value


def _json(file: Path, holder: dict[object, object], name: str) -> str | None:
    """The value as JSON text; what YAML has and JSON has not (dates, keys that are numbers) becomes text."""
    value = holder.get(name)
    if value is None:
        return None
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError as error:
        raise CatalogError(f"{file}: {name} can't be written as JSON: {error}") from error
