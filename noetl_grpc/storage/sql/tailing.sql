-- The tailer: who leads, how far the log has been published, what an event's message holds, what is parked.

-- name: database_facts
-- What a tailer must know of a database before it reads its log. Where NoETL's own tailer has run here, its position
-- can be asked for by the statement returned; elsewhere that table does not exist.
SELECT
    pg_is_in_recovery() AS in_recovery,
    (SELECT system_identifier FROM pg_control_system()) AS system_identifier,
    CASE WHEN to_regclass('noetl.stream_cursor') IS NOT NULL THEN
        $$SELECT position FROM noetl.stream_cursor WHERE name = 'event_stream_tailer'$$
    END AS seed_cursor_statement;

-- name: try_to_lead
-- The session that holds this lock publishes; it is free again when the session ends, however it ends.
SELECT pg_try_advisory_lock($1::integer, $2::integer);

-- name: take_cursor
-- Begin an epoch, in which nobody who led before can move the cursor any more.
UPDATE noetl.log_cursor
SET epoch = epoch + 1
WHERE name = $1 AND shard = $2
RETURNING
    epoch,
    seen::text AS seen,
    target::text AS target,
    at_xact,
    at_event,
    system_identifier,
    seen_at,
    restored_at,
    created_at,
    updated_at;

-- name: read_cursor
-- The same without taking it.
SELECT
    epoch,
    seen::text AS seen,
    target::text AS target,
    at_xact,
    at_event,
    system_identifier,
    seen_at,
    restored_at,
    created_at,
    updated_at
FROM noetl.log_cursor
WHERE name = $1 AND shard = $2;

-- name: start_cursor
-- The very first start.
INSERT INTO noetl.log_cursor (name, shard, epoch)
VALUES ($1, $2, 0)
ON CONFLICT (name, shard) DO NOTHING;

-- name: save_cursor
-- Move the cursor, unless another epoch has begun. $11 is when it got there, null for now.
UPDATE noetl.log_cursor
SET seen = $4::text::pg_snapshot,
    target = $5::text::pg_snapshot,
    at_xact = $6::xid8,
    at_event = $7,
    system_identifier = $8,
    seen_at = $9,
    restored_at = $10,
    updated_at = coalesce($11::timestamptz, clock_timestamp())
WHERE name = $1 AND shard = $2 AND epoch = $3
RETURNING epoch;

-- name: history_keys
-- One page of everything there is behind the place $1, $2, for a first start and for a restored log. $6 rows.
-- What this cluster wrote counts if the snapshot $3 shows it. A row that it did not write (older than the column, or
-- restored) names a transaction that means nothing here: it counts unless it was shown by $5, a snapshot of the cluster
-- that it comes from. Nothing at or below the event id $4 counts, nor what was made before $7.
SELECT
    e.xact_id,
    e.event_id,
    e.execution_id,
    e.event_type
FROM noetl.event AS e
WHERE (e.xact_id, e.event_id) > ($1::xid8, $2::bigint)
    AND e.event_id > $4
    AND e.created_at >= $7::timestamp
    AND CASE
        WHEN e.xmin = e.xact_id::xid THEN pg_visible_in_snapshot(e.xact_id, $3::text::pg_snapshot)
        ELSE $5::text IS NULL OR NOT pg_visible_in_snapshot(e.xact_id, $5::text::pg_snapshot)
    END
ORDER BY e.xact_id, e.event_id
FETCH FIRST $6 ROWS WITH TIES;

-- name: restored_keys
-- Which of these events came with a log that was restored before $3. They have been taken care of, although the ids of
-- the transactions that they name come up here only now.
SELECT k.execution_id, k.event_id
FROM unnest($1::bigint[], $2::bigint[]) AS k(execution_id, event_id)
CROSS JOIN LATERAL (
    SELECT
    FROM noetl.event AS e
    WHERE e.execution_id = k.execution_id
        AND e.event_id = k.event_id
        AND e.xmin <> e.xact_id::xid
        AND e.ingest_time < $3
    OFFSET 0
) AS e;

-- name: look_at_time
-- Overlap mode: what is visible now, and what time it is there.
SELECT
    pg_current_snapshot()::text AS snapshot,
    pg_is_in_recovery() AS in_recovery,
    (clock_timestamp() AT TIME ZONE 'UTC') AS now;

-- name: moments
-- Overlap mode: one page of what was made at or after $1 by its own time, behind the place $2, $3, $4. Nothing counts that
-- was made before $5 and has an event id at or below $6. $7 rows.
SELECT
    e.created_at,
    e.event_id,
    e.execution_id,
    e.event_type
FROM noetl.event AS e
WHERE e.created_at >= $1::timestamp
    AND (e.created_at, e.event_id, e.execution_id) > ($2::timestamp, $3::bigint, $4::bigint)
    AND (e.created_at >= $5::timestamp OR e.event_id > $6)
ORDER BY e.created_at, e.event_id, e.execution_id
LIMIT $7;

-- name: count_moments
-- Overlap mode: how many events were made after $1.
SELECT count(*)
FROM noetl.event AS e
WHERE e.created_at > $1::timestamp;

-- name: is_this_clusters_log
-- Whether the youngest events that the snapshot $1 shows were written by this very cluster, and not restored into it. Rows
-- older than the column, which share the lowest transaction id, tell nothing.
SELECT coalesce(bool_and(r.is_native), false)
FROM (
    SELECT e.xmin = e.xact_id::xid AS is_native, e.xact_id
    FROM noetl.event AS e
    WHERE e.xact_id < pg_snapshot_xmax($1::text::pg_snapshot)
    ORDER BY e.xact_id DESC, e.event_id DESC
    LIMIT 1000
) AS r
WHERE r.xact_id > (SELECT e.xact_id FROM noetl.event AS e ORDER BY e.xact_id, e.event_id LIMIT 1);

-- name: event_bodies
-- What is sent for these events, in their order: the row as JSON, rendered here because PostgreSQL can spell out
-- every value that it can hold, and as bytes, so that nobody decodes it in order to encode it again. A body above $3
-- bytes is left out; one above $4 is described by its digest.
SELECT
    k.place,
    e.event_type,
    e.tenant_id,
    e.organization_id,
    e.traceparent,
    octet_length(e.body) AS byte_length,
    CASE WHEN octet_length(e.body) <= $3 THEN e.body END AS body,
    CASE WHEN octet_length(e.body) > $4 THEN encode(sha256(e.body), 'hex') END AS sha256
FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS k(execution_id, event_id, place)
-- OFFSET 0 keeps the rows looked up one by one, whatever the planner thinks of how many there are, and each body
-- rendered once.
CROSS JOIN LATERAL (
    SELECT
        e.event_type,
        e.tenant_id,
        e.organization_id,
        coalesce(e.trace_component ->> 'traceparent', e.meta ->> 'traceparent') AS traceparent,
        convert_to((SELECT row_to_json(b) FROM (SELECT
            e.execution_id,
            e.catalog_id,
            e.event_id,
            e.parent_event_id,
            e.parent_execution_id,
            e.created_at,
            e.event_type,
            e.node_id,
            e.node_name,
            e.node_type,
            e.status,
            e.duration,
            e.context,
            e.result,
            e.meta,
            e.error,
            e.current_index,
            e.current_item,
            e.worker_id,
            e.distributed_state,
            e.context_key,
            e.context_value,
            e.trace_component,
            e.stack_trace,
            e.tenant_id,
            e.organization_id,
            e.stream_id,
            e.stream_version,
            e.aggregate_id,
            e.aggregate_type,
            e.schema_name,
            e.schema_version,
            e.event_time,
            e.ingest_time,
            e.producer,
            e.causation_id,
            e.correlation_id,
            e.idempotency_key,
            e.payload_ref,
            e.envelope_checksum,
            e.prev_event_id,
            e.command_id,
            e.stage_id,
            e.frame_id
        ) AS b)::text, 'UTF8') AS body
    FROM noetl.event AS e
    WHERE e.execution_id = k.execution_id AND e.event_id = k.event_id
    OFFSET 0
) AS e
ORDER BY k.place;

-- name: park_published_event
-- Keep an event that the broker refuses for good. It is in the log; what is parked is its publication.
INSERT INTO noetl.event_dead_letter AS d (
    execution_id,
    event_id,
    catalog_id,
    event_type,
    node_name,
    reason,
    payload,
    parked_by,
    last_error
)
SELECT e.execution_id, e.event_id, e.catalog_id, e.event_type, e.node_name, $3, to_jsonb(e) - 'xact_id', 'tailer', $4
FROM noetl.event AS e
WHERE e.execution_id = $1 AND e.event_id = $2
ON CONFLICT (execution_id, event_id) DO UPDATE
SET reason = excluded.reason,
    payload = excluded.payload,
    parked_by = excluded.parked_by,
    last_error = excluded.last_error,
    attempts = CASE WHEN d.parked_by = 'tailer' THEN d.attempts + 1 ELSE 1 END,
    parked_at = CASE WHEN d.resolved_at IS NULL THEN d.parked_at ELSE now() END,
    resolved_at = NULL;

-- name: count_parked_publications
SELECT count(*)
FROM noetl.event_dead_letter
WHERE parked_by = 'tailer' AND resolved_at IS NULL;

-- name: count_gap
-- How many events are visible now ($5) and not yet published. $1 seen, $2 target, $3 and $4 the place.
SELECT count(*)
FROM (
    SELECT e.xact_id, e.event_id
    FROM noetl.event AS e
    WHERE e.xact_id = ANY (ARRAY(SELECT pg_snapshot_xip($1::text::pg_snapshot)))
        AND pg_visible_in_snapshot(e.xact_id, $5::text::pg_snapshot)
    UNION ALL
    SELECT e.xact_id, e.event_id
    FROM noetl.event AS e
    WHERE e.xact_id >= pg_snapshot_xmax($1::text::pg_snapshot)
        AND e.xact_id < pg_snapshot_xmax($5::text::pg_snapshot)
        AND pg_visible_in_snapshot(e.xact_id, $5::text::pg_snapshot)
) AS gap
WHERE NOT coalesce(
    pg_visible_in_snapshot(gap.xact_id, $2::text::pg_snapshot)
        AND (gap.xact_id, gap.event_id) <= ($3::xid8, $4::bigint),
    false
);
