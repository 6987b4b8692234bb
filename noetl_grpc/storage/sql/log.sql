-- Reading the log of one execution.

-- name: fold_page
-- What the fold reads of the next $7 events, in the order of core.fold.FoldEvent; the whole result would be most of
-- the bytes, and only its reference counts. $1 execution, $2 tenant, $3 organisation, $4 after this event, $5 up to
-- this event, $6 up to this time or NULL.
SELECT
    event_id,
    event_type,
    status,
    node_name,
    meta,
    COALESCE(NULLIF(payload_ref, 'null'::jsonb), NULLIF(result -> 'reference', 'null'::jsonb)) AS reference,
    stage_id::text AS stage_id,
    frame_id::text AS frame_id,
    command_id::text AS command_id,
    worker_id,
    aggregate_type,
    aggregate_id,
    schema_version
FROM noetl.event
WHERE execution_id = $1
    AND tenant_id = $2
    AND organization_id = $3
    AND event_id > $4
    AND event_id <= $5
    AND ($6::timestamptz IS NULL OR event_time <= $6)
ORDER BY event_id
LIMIT $7;

-- name: page_of_ids
-- The next events, at most $7 of them and about $8 bytes as they are stored, but one at least: what to read whole
-- without filling the memory. Arguments as above.
SELECT
    page.event_id,
    page.bytes
FROM (
    SELECT
        part.event_id,
        part.bytes,
        sum(part.bytes) OVER (ORDER BY part.event_id ROWS UNBOUNDED PRECEDING) AS up_to_here
    FROM (
        SELECT
            event_id,
            COALESCE(pg_column_size(context), 0)
            + COALESCE(pg_column_size(result), 0)
            + COALESCE(pg_column_size(meta), 0)
            + COALESCE(pg_column_size(payload_ref), 0)
            + COALESCE(pg_column_size(trace_component), 0)
            + COALESCE(pg_column_size(error), 0)
            + COALESCE(pg_column_size(stack_trace), 0)
            + COALESCE(pg_column_size(current_item), 0)
            + COALESCE(pg_column_size(context_value), 0)
            + 200 AS bytes
        FROM noetl.event
        WHERE execution_id = $1
            AND tenant_id = $2
            AND organization_id = $3
            AND event_id > $4
            AND event_id <= $5
            AND ($6::timestamptz IS NULL OR event_time <= $6)
        ORDER BY event_id
        LIMIT $7
    ) AS part
) AS page
WHERE page.up_to_here - page.bytes < $8
ORDER BY page.event_id;

-- name: page_of_visible_ids
-- The same of what a snapshot ($9) shows. A row of a transaction that is yet to come was brought from another
-- cluster, and is shown too.
SELECT
    page.event_id,
    page.bytes
FROM (
    SELECT
        part.event_id,
        part.bytes,
        sum(part.bytes) OVER (ORDER BY part.event_id ROWS UNBOUNDED PRECEDING) AS up_to_here
    FROM (
        SELECT
            event_id,
            COALESCE(pg_column_size(context), 0)
            + COALESCE(pg_column_size(result), 0)
            + COALESCE(pg_column_size(meta), 0)
            + COALESCE(pg_column_size(payload_ref), 0)
            + COALESCE(pg_column_size(trace_component), 0)
            + COALESCE(pg_column_size(error), 0)
            + COALESCE(pg_column_size(stack_trace), 0)
            + COALESCE(pg_column_size(current_item), 0)
            + COALESCE(pg_column_size(context_value), 0)
            + 200 AS bytes
        FROM noetl.event
        WHERE execution_id = $1
            AND tenant_id = $2
            AND organization_id = $3
            AND event_id > $4
            AND event_id <= $5
            AND ($6::timestamptz IS NULL OR event_time <= $6)
            AND (
                pg_visible_in_snapshot(xact_id, $9::text::pg_snapshot)
                OR xact_id >= pg_snapshot_xmax(pg_current_snapshot())
            )
        ORDER BY event_id
        LIMIT $7
    ) AS part
) AS page
WHERE page.up_to_here - page.bytes < $8
ORDER BY page.event_id;

-- name: events_by_id
-- These events whole ($4), all columns of core.envelope.COLUMNS.
SELECT
    execution_id,
    catalog_id,
    event_id,
    parent_event_id,
    parent_execution_id,
    created_at,
    event_type,
    node_id,
    node_name,
    node_type,
    status,
    duration,
    context,
    result,
    meta,
    error,
    current_index,
    current_item,
    worker_id,
    distributed_state,
    context_key,
    context_value,
    trace_component,
    stack_trace,
    tenant_id,
    organization_id,
    stream_id,
    stream_version,
    aggregate_id,
    aggregate_type,
    schema_name,
    schema_version,
    event_time,
    ingest_time,
    producer,
    causation_id,
    correlation_id,
    idempotency_key,
    payload_ref,
    envelope_checksum,
    prev_event_id,
    command_id,
    stage_id,
    frame_id
FROM noetl.event
WHERE execution_id = $1
    AND tenant_id = $2
    AND organization_id = $3
    AND event_id = ANY ($4::bigint[])
ORDER BY event_id;

-- name: event_times
-- When these events ($4) happened.
SELECT
    event_id,
    event_time
FROM noetl.event
WHERE execution_id = $1
    AND tenant_id = $2
    AND organization_id = $3
    AND event_id = ANY ($4::bigint[]);

-- name: bytes_of_events
-- How much these events ($4) are as they are stored, about.
SELECT
    event_id,
    COALESCE(pg_column_size(context), 0)
    + COALESCE(pg_column_size(result), 0)
    + COALESCE(pg_column_size(meta), 0)
    + COALESCE(pg_column_size(payload_ref), 0)
    + COALESCE(pg_column_size(trace_component), 0)
    + COALESCE(pg_column_size(error), 0)
    + COALESCE(pg_column_size(stack_trace), 0)
    + COALESCE(pg_column_size(current_item), 0)
    + COALESCE(pg_column_size(context_value), 0)
    + 200 AS bytes
FROM noetl.event
WHERE execution_id = $1
    AND tenant_id = $2
    AND organization_id = $3
    AND event_id = ANY ($4::bigint[]);
