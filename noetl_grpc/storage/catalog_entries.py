"""Catalog entries: events refer to them in their own shard, and the cluster database has them all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


async def known_ids(conn: Connection, catalog_ids: Collection[int]) -> set[int]:
    """Those of the entries that this database has."""
    rows = await conn.fetch(queries["known_catalog_ids"], list(catalog_ids))
    return {row["catalog_id"] for row in rows}


async def read(conn: Connection, catalog_ids: Collection[int]) -> Sequence[Any]:
    """The entries as rows, for `copy`."""
    entries: Sequence[Any] = await conn.fetch(queries["read_catalog_entries"], list(catalog_ids))
    return entries


async def copy(conn: Connection, entries: Sequence[Any]) -> None:
    """Give this database the entries that it lacks, each with the kind that it is of."""
    for entry in entries:
        *columns, resource_meta = entry
        await conn.execute(queries["copy_catalog_resource"], entry["kind"], resource_meta)
        await conn.execute(queries["copy_catalog_entry"], *columns)
