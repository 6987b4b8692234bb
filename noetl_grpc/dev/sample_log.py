"""Long logs that touch every surface of a replay, for benches and checks."""

from __future__ import annotations

from typing import Any

CATALOG_ID = 7_000_003

#: Twenty events are one frame with two commands; ten frames are one stage and one loop; a few business objects
#: are touched again and again; a stage has two payloads. About 460 bytes of JSON each. $1 execution, $2 catalog entry,
#: $3 first event, $4 last event, $5 events that one stage has.
_WRITE = """
INSERT INTO noetl.event (
    execution_id, catalog_id, event_id, event_type, node_name, status,
    stage_id, frame_id, command_id, worker_id, meta, result, payload_ref
)
SELECT
    $1::bigint,
    $2::bigint,
    n,
    CASE
        WHEN n = 1 THEN 'playbook.initialized'
        WHEN n % $5 = 2 THEN 'stage.opened'
        WHEN n % $5 = 0 THEN 'stage.closed'
        ELSE (ARRAY[
            'frame.dispatched', 'command.issued', 'command.claimed', 'command.started', 'frame.started',
            'frame.heartbeat', 'call.done', 'command.completed', 'invoice.updated', 'frame.committed'
        ])[1 + n % 10]
    END,
    'step_' || n / $5 % 50,
    CASE WHEN n % 10 IN (6, 8) THEN NULL ELSE 'RUNNING' END,
    1 + n / $5,
    CASE WHEN n % 10 IN (1, 2, 3, 7, 8) THEN NULL ELSE 1 + n / ($5 / 10) END,
    CASE WHEN n % 10 IN (4, 5, 8, 9) THEN NULL ELSE 1 + n / ($5 / 20) END,
    CASE WHEN n % 10 = 2 THEN 'worker-' || n % 16 END,
    jsonb_build_object(
        'trace', md5(n::text) || md5((n + 1)::text),
        'tags', jsonb_build_array('a', 'b', n % 7),
        'note', repeat('x', 120),
        'attempt', 1
    ) || CASE n % 10
        WHEN 1 THEN jsonb_build_object(
            'parent_command_id', n / 100, 'fanout_reduce', jsonb_build_object('index', n % 9))
        WHEN 2 THEN jsonb_build_object(
            'locality', jsonb_build_object('node_id', 'n-' || n % 4), 'worker_locator', 'noetl://w')
        WHEN 7 THEN jsonb_build_object('loop_id', 'loop-' || n / $5, 'total', 10)
        WHEN 8 THEN jsonb_build_object('business_object', jsonb_build_object(
            'type', 'invoice', 'id', 'i-' || n % 199, 'patch', jsonb_build_object('total', n, 'state', 'open')))
        WHEN 9 THEN jsonb_build_object('row_count', 40, 'events_emitted', 4, 'cursor', jsonb_build_object('last_id', n))
        ELSE '{}'::jsonb
    END,
    CASE WHEN n % 3 = 0 THEN
        jsonb_build_object('status', 'ok', 'context', jsonb_build_object('rows', n, 'text', repeat('y', 150)))
    END,
    CASE WHEN n % ($5 / 2) = 9 THEN
        jsonb_build_object('uri', 's3://bucket/' || n, 'sha256', md5(n::text), 'media_type', 'application/json')
    END
FROM generate_series($3::bigint, $4::bigint) AS n
"""


async def write_sample_log(
    conn: Any, execution_id: int, *, last: int, first: int = 1, events_per_stage: int = 200
) -> None:
    """Events first…last of one execution; the more events a stage has, the smaller is the state."""
    await conn.execute(
        "INSERT INTO noetl.catalog (catalog_id, path, version, kind) VALUES ($1, 'sample/log', 1, 'playbook')"
        " ON CONFLICT DO NOTHING",
        CATALOG_ID,
    )
    for start in range(first, last + 1, 50_000):
        end = min(start + 49_999, last)
        await conn.execute(_WRITE, execution_id, CATALOG_ID, start, end, events_per_stage, timeout=120)
