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


_COLUMNS = (
    "event_id",
    "event_type",
    "status",
    "node_name",
    "result",
    "meta",
    "payload_ref",
    "stage_id",
    "frame_id",
    "command_id",
    "worker_id",
    "aggregate_type",
    "aggregate_id",
)


async def copy_log(conn: asyncpg.Connection, log: Mapping[str, Any]) -> None:
    """All events of a log at once; a log is what the vectors have as `input`."""
    tenant, organization = log.get("tenant_id", "default"), log.get("organization_id", "default")
    await conn.copy_records_to_table(
        "event",
        schema_name="noetl",
        columns=["execution_id", "catalog_id", "tenant_id", "organization_id", *_COLUMNS],
        records=[
            (
                log["execution_id"],
                CATALOG_ID,
                tenant,
                organization,
                *(_cell(event, name) for name in _COLUMNS),
            )
            for event in log["events"]
        ],
    )


def _cell(event: Mapping[str, Any], name: str) -> Any:
    value = event.get(name)
    if name == "event_id":
        return int(event["event_id"])
    return json.dumps(value) if name in _JSON and value is not None else value
