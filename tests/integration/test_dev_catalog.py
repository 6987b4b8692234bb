"""Filling the catalog from YAML files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from noetl_grpc.dev.catalog import SAMPLE_CATALOG, CatalogError, load_catalog

PLAYBOOK = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata:
  name: nightly
  path: reports/nightly
  labels: {team: finance, 7: seven}
workload:
  day: 2026-01-31
workflow:
  - step: start
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files of the catalog directory and returns the directory."""

    def write(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / "catalog" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".yaml").write_text(text)
        return tmp_path / "catalog"

    return write


async def test_the_sample_catalog_has_playbooks_and_a_subscription(conn: asyncpg.Connection) -> None:
    assert await load_catalog(conn, SAMPLE_CATALOG) == ["demo/hello", "demo/order", "demo/order_events"]

    rows = await conn.fetch("SELECT path, version, kind FROM noetl.catalog ORDER BY path")
    assert [tuple(row) for row in rows] == [
        ("demo/hello", 1, "playbook"),
        ("demo/order", 1, "playbook"),
        ("demo/order_events", 1, "subscription"),
    ]


async def test_an_entry_is_stored_as_the_register_endpoint_would(
    conn: asyncpg.Connection, write: Write
) -> None:
    await load_catalog(conn, write(nightly=PLAYBOOK))

    row = await conn.fetchrow("SELECT * FROM noetl.catalog")
    assert row["path"] == "reports/nightly"
    assert row["kind"] == "playbook"
    assert row["content"] == PLAYBOOK
    assert json.loads(row["payload"]) == {"day": "2026-01-31"}
    assert json.loads(row["layout"]) == [{"step": "start"}]
    assert json.loads(row["meta"]) == {"team": "finance", "7": "seven"}
    assert row["catalog_id"] > 0


async def test_only_a_change_makes_a_new_version(conn: asyncpg.Connection, write: Write) -> None:
    changed = PLAYBOOK + "  - step: end\n"

    assert await load_catalog(conn, write(nightly=PLAYBOOK)) == ["reports/nightly"]
    assert await load_catalog(conn, write(nightly=PLAYBOOK)) == []
    assert await load_catalog(conn, write(nightly=changed)) == ["reports/nightly"]
    assert await load_catalog(conn, write(nightly=changed)) == []
    assert await load_catalog(conn, write(nightly=PLAYBOOK)) == ["reports/nightly"]

    versions = await conn.fetch("SELECT version, content FROM noetl.catalog ORDER BY version")
    assert [tuple(row) for row in versions] == [(1, PLAYBOOK), (2, changed), (3, PLAYBOOK)]


async def test_many_loaders_at_once_make_one_version(
    conn: asyncpg.Connection, database_url: str, write: Write
) -> None:
    directory = write(one=PLAYBOOK, two="kind: Note\nmetadata: {name: two}\n")

    async def load() -> list[str]:
        other = await asyncpg.connect(database_url)
        try:
            return await load_catalog(other, directory)
        finally:
            await other.close()

    loaded = await asyncio.gather(*(load() for _ in range(8)))

    assert sorted(map(len, loaded)) == [0, 0, 0, 0, 0, 0, 0, 2]
    assert await conn.fetchval("SELECT count(*) FROM noetl.catalog") == 2
    assert await conn.fetchval("SELECT count(*) FROM noetl.resource WHERE name = 'note'") == 1


async def test_a_kind_of_ones_own_and_a_name_instead_of_a_path_are_fine(
    conn: asyncpg.Connection, write: Write
) -> None:
    directory = write(deep__below__note="kind: Note\nmetadata:\n  name: remember\n")

    assert await load_catalog(conn, directory) == ["remember"]

    row = await conn.fetchrow("SELECT kind, layout, payload, meta FROM noetl.catalog")
    assert tuple(row) == ("note", None, None, None)


async def test_one_bad_file_keeps_the_others_out(conn: asyncpg.Connection, write: Write) -> None:
    directory = write(a=PLAYBOOK, b='kind: Note\nmetadata: {name: b}\nworkload: "\\0"\n')

    with pytest.raises(CatalogError, match=r"catalog/b\.yaml: PostgreSQL can't store it"):
        await load_catalog(conn, directory)

    assert await conn.fetchval("SELECT count(*) FROM noetl.catalog") == 0
