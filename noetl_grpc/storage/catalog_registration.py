"""Registers entries in NoETL's catalog, as its own register endpoint does."""

from __future__ import annotations

from dataclasses import dataclass

from noetl_grpc.storage.pool import Connection
from noetl_grpc.storage.queries import queries


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """What a row of noetl.catalog is made from; the JSON columns as text."""

    path: str
    #: In lower case, as the catalog stores it.
    kind: str
    #: The YAML text itself.
    content: str
    layout_json: str | None
    payload_json: str | None
    meta_json: str | None


async def lock_catalog(conn: Connection) -> None:
    """Until the end of the transaction nobody else registers anything."""
    await conn.execute(queries["lock_catalog"])


async def register_catalog_entry(conn: Connection, entry: NewEntry) -> int | None:
    """The version that the entry has got, or None: the newest one says the same. Under `lock_catalog`."""
    await conn.execute(queries["add_resource_kind"], entry.kind)
    version: int | None = await conn.fetchval(
        queries["register_catalog_entry"],
        entry.path,
        entry.kind,
        entry.content,
        entry.layout_json,
        entry.payload_json,
        entry.meta_json,
    )
    return version
