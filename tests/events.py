"""Events written straight into the log, as a stranger would."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import asyncpg

CATALOG_ID = 7_000_002
_JSON = ("meta", "result", "payload_ref", "context")


async def add_catalog_entry(conn: asyncpg.Connection) -> None:
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'demo/log', 1, 'playbook')"
        " ON CONFLICT DO NOTHING",
        CATALOG_ID,
    )


async def write_events(
    conn: asyncpg.Connection,
    execution_id: int,
    events: Iterable[Mapping[str, Any]],
    *,
    tenant_id: str = "default",
    organization_id: str = "default",
) -> None:
    """Rows with only these columns set; JSON columns are given as values."""
    for event in events:
        row = {
            "execution_id": execution_id,
            "catalog_id": CATALOG_ID,
            "tenant_id": tenant_id,
            "organization_id": organization_id,
            **{name: json.dumps(value) if name in _JSON else value for name, value in event.items()},
        }
        row = {name: value for name, value in row.items() if value is not None}
        places = ", ".join(f"${number}" for number in range(1, len(row) + 1))
        await conn.execute(f"INSERT INTO noetl.event ({', '.join(row)}) VALUES ({places})", *row.values())
