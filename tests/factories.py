"""Valid things by default; a test says only what matters to it."""

from __future__ import annotations

from typing import Any

import asyncpg
from noetlpb.v1 import event_pb2

CATALOG_ID = 7_000_001
#: In the application's id layout, of November 2026.
EXECUTION_ID = 381_000_000_000_000_000
EVENT_ID = 381_000_000_000_000_001


async def add_catalog_entry(
    conn: asyncpg.Connection,
    catalog_id: int = CATALOG_ID,
    *,
    path: str = "demo/fetch",
    kind: str = "playbook",
) -> int:
    """A catalog entry that events may refer to."""
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, $2, 1, $3)",
        catalog_id,
        f"{path}-{catalog_id}",
        kind,
    )
    return catalog_id


def make_event(index: int = 0, **overrides: Any) -> event_pb2.EventEnvelope:
    """The index-th event of one execution."""
    fields: dict[str, Any] = {
        "execution_id": EXECUTION_ID,
        "event_id": EVENT_ID + index,
        "catalog_id": CATALOG_ID,
        "event_type": "command.completed",
        "node_name": "fetch",
        "status": "COMPLETED",
    }
    return event_pb2.EventEnvelope(**{**fields, **overrides})


def make_native(index: int = 0, **overrides: Any) -> event_pb2.NativeEvent:
    """The index-th event of one execution, as a worker emits it."""
    fields: dict[str, Any] = {
        "execution_id": EXECUTION_ID,
        "event_id": EVENT_ID + index,
        "step": "fetch",
        "event_type": "command.completed",
        "payload_json": '{"rows": 3}',
    }
    merged = {**fields, **overrides}
    return event_pb2.NativeEvent(**{name: value for name, value in merged.items() if value is not None})
