-- Events into the log, and what becomes of those that can't go there. Arguments that hold a column are arrays, one
-- value per event; an array that would hold only NULLs is NULL itself, which costs PostgreSQL nothing.

-- name: insert_events
-- Store what is not stored yet, and say what that was. The rows come sorted by key, so that two batches with the same
-- events wait for each other instead of deadlocking. Times that were not given are the database's own.
INSERT INTO noetl.event (
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
)
SELECT
    i.execution_id,
    i.catalog_id,
    i.event_id,
    i.parent_event_id,
    i.parent_execution_id,
    COALESCE(i.created_at, now() AT TIME ZONE 'UTC'),
    i.event_type,
    i.node_id,
    i.node_name,
    i.node_type,
    i.status,
    i.duration,
    i.context::jsonb,
    i.result::jsonb,
    i.meta::jsonb,
    i.error,
    i.current_index,
    i.current_item,
    i.worker_id,
    i.distributed_state,
    i.context_key,
    i.context_value,
    i.trace_component::jsonb,
    i.stack_trace,
    i.tenant_id,
    i.organization_id,
    i.stream_id,
    i.stream_version,
    i.aggregate_id,
    i.aggregate_type,
    i.schema_name,
    i.schema_version,
    COALESCE(i.event_time, i.created_at AT TIME ZONE 'UTC', now()),
    COALESCE(i.ingest_time, now()),
    i.producer,
    i.causation_id,
    i.correlation_id,
    i.idempotency_key,
    i.payload_ref::jsonb,
    i.envelope_checksum,
    i.prev_event_id,
    i.command_id,
    i.stage_id,
    i.frame_id
FROM unnest(
    $1::bigint[],
    $2::bigint[],
    $3::bigint[],
    $4::bigint[],
    $5::bigint[],
    $6::timestamp[],
    $7::text[],
    $8::text[],
    $9::text[],
    $10::text[],
    $11::text[],
    $12::double precision[],
    $13::text[],
    $14::text[],
    $15::text[],
    $16::text[],
    $17::integer[],
    $18::text[],
    $19::text[],
    $20::text[],
    $21::text[],
    $22::text[],
    $23::text[],
    $24::text[],
    $25::text[],
    $26::text[],
    $27::text[],
    $28::bigint[],
    $29::text[],
    $30::text[],
    $31::text[],
    $32::integer[],
    $33::timestamptz[],
    $34::timestamptz[],
    $35::text[],
    $36::text[],
    $37::text[],
    $38::text[],
    $39::text[],
    $40::text[],
    $41::bigint[],
    $42::bigint[],
    $43::bigint[],
    $44::bigint[]
) AS i(
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
)
ON CONFLICT DO NOTHING
RETURNING execution_id, event_id;

-- name: enqueue_events
-- An outbox row with subject $3 for each of these stored events. The payload is the body that the tailer publishes; the
-- header traceparent is the event's own, as the tailer sends it, else the caller's $4.
INSERT INTO noetl.outbox (execution_id, event_id, subject, payload, payload_codec, headers)
SELECT
    e.execution_id,
    e.event_id,
    $3::text,
    e.body,
    'json',
    CASE WHEN t.traceparent IS NOT NULL THEN jsonb_build_object('traceparent', t.traceparent) END
FROM unnest($1::bigint[], $2::bigint[]) AS i(execution_id, event_id)
CROSS JOIN LATERAL (
    SELECT
        stored.execution_id,
        stored.event_id,
        to_jsonb(stored) - 'xact_id' AS body,
        coalesce(stored.trace_component ->> 'traceparent', stored.meta ->> 'traceparent') AS traceparent
    FROM noetl.event AS stored
    WHERE stored.execution_id = i.execution_id AND stored.event_id = i.event_id
    LIMIT 1
) AS e
CROSS JOIN LATERAL (
    SELECT coalesce(
        substring(e.traceparent from '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$'), $4::text
    ) AS traceparent
) AS t
ORDER BY e.execution_id, e.event_id
ON CONFLICT DO NOTHING;

-- name: differing_events
-- The places (from 1) of events that are stored with other content. What was not given is not compared, nor is
-- ingest_time, which belongs to a delivery and not to the event. So does a trace that we noted for a caller: it differs
-- from one delivery of an event to the next.
SELECT i.place
FROM unnest(
    $1::bigint[],
    $2::bigint[],
    $3::bigint[],
    $4::bigint[],
    $5::bigint[],
    $6::timestamp[],
    $7::text[],
    $8::text[],
    $9::text[],
    $10::text[],
    $11::text[],
    $12::double precision[],
    $13::text[],
    $14::text[],
    $15::text[],
    $16::text[],
    $17::integer[],
    $18::text[],
    $19::text[],
    $20::text[],
    $21::text[],
    $22::text[],
    $23::text[],
    $24::text[],
    $25::text[],
    $26::text[],
    $27::text[],
    $28::bigint[],
    $29::text[],
    $30::text[],
    $31::text[],
    $32::integer[],
    $33::timestamptz[],
    $34::timestamptz[],
    $35::text[],
    $36::text[],
    $37::text[],
    $38::text[],
    $39::text[],
    $40::text[],
    $41::bigint[],
    $42::bigint[],
    $43::bigint[],
    $44::bigint[]
) WITH ORDINALITY AS i(
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
    frame_id,
    place
)
JOIN noetl.event AS e ON e.execution_id = i.execution_id AND e.event_id = i.event_id
WHERE i.catalog_id <> e.catalog_id
    OR i.parent_event_id IS DISTINCT FROM e.parent_event_id
    OR i.parent_execution_id IS DISTINCT FROM e.parent_execution_id
    OR i.created_at <> e.created_at
    OR i.event_type IS DISTINCT FROM e.event_type
    OR i.node_id IS DISTINCT FROM e.node_id
    OR i.node_name IS DISTINCT FROM e.node_name
    OR i.node_type IS DISTINCT FROM e.node_type
    OR i.status IS DISTINCT FROM e.status
    OR i.duration IS DISTINCT FROM e.duration
    OR i.context::jsonb IS DISTINCT FROM e.context
    OR i.result::jsonb IS DISTINCT FROM e.result
    OR i.meta::jsonb IS DISTINCT FROM e.meta
    OR i.error IS DISTINCT FROM e.error
    OR i.current_index IS DISTINCT FROM e.current_index
    OR i.current_item IS DISTINCT FROM e.current_item
    OR i.worker_id IS DISTINCT FROM e.worker_id
    OR i.distributed_state IS DISTINCT FROM e.distributed_state
    OR i.context_key IS DISTINCT FROM e.context_key
    OR i.context_value IS DISTINCT FROM e.context_value
    OR i.trace_component::jsonb IS DISTINCT FROM e.trace_component
        AND (
            i.trace_component IS NOT NULL
            OR e.trace_component <> jsonb_build_object('traceparent', e.trace_component -> 'traceparent')
        )
    OR i.stack_trace IS DISTINCT FROM e.stack_trace
    OR i.tenant_id IS DISTINCT FROM e.tenant_id
    OR i.organization_id IS DISTINCT FROM e.organization_id
    OR i.stream_id IS DISTINCT FROM e.stream_id
    OR i.stream_version IS DISTINCT FROM e.stream_version
    OR i.aggregate_id IS DISTINCT FROM e.aggregate_id
    OR i.aggregate_type IS DISTINCT FROM e.aggregate_type
    OR i.schema_name IS DISTINCT FROM e.schema_name
    OR i.schema_version IS DISTINCT FROM e.schema_version
    OR i.event_time <> e.event_time
    OR i.producer IS DISTINCT FROM e.producer
    OR i.causation_id IS DISTINCT FROM e.causation_id
    OR i.correlation_id IS DISTINCT FROM e.correlation_id
    OR i.idempotency_key IS DISTINCT FROM e.idempotency_key
    OR i.payload_ref::jsonb IS DISTINCT FROM e.payload_ref
    OR i.envelope_checksum IS DISTINCT FROM e.envelope_checksum
    OR i.prev_event_id IS DISTINCT FROM e.prev_event_id
    OR i.command_id IS DISTINCT FROM e.command_id
    OR i.stage_id IS DISTINCT FROM e.stage_id
    OR i.frame_id IS DISTINCT FROM e.frame_id
ORDER BY i.place;

-- name: catalogs_of_executions
-- The catalog entry of each execution: of its first event, else of its first command.
SELECT x.execution_id, COALESCE(event.catalog_id, command.catalog_id) AS catalog_id
FROM unnest($1::bigint[]) AS x(execution_id)
LEFT JOIN LATERAL (
    SELECT e.catalog_id
    FROM noetl.event AS e
    WHERE e.execution_id = x.execution_id
    ORDER BY e.event_id
    LIMIT 1
) AS event ON true
LEFT JOIN LATERAL (
    SELECT c.catalog_id
    FROM noetl.command AS c
    WHERE c.execution_id = x.execution_id AND event.catalog_id IS NULL
    ORDER BY c.command_id
    LIMIT 1
) AS command ON true
WHERE COALESCE(event.catalog_id, command.catalog_id) IS NOT NULL;

-- name: lock_executions
-- Serialise writers that look for idempotency keys. The stripes come sorted: everybody locks in the same order.
SELECT count(pg_advisory_xact_lock($1::integer, s.stripe))
FROM unnest($2::integer[]) AS s(stripe);

-- name: stored_keys
-- Which of these keys their executions have already.
SELECT i.execution_id, i.idempotency_key
FROM unnest($3::bigint[], $4::text[]) AS i(execution_id, idempotency_key)
CROSS JOIN LATERAL (
    SELECT
    FROM noetl.event AS e
    WHERE e.tenant_id = $1
        AND e.organization_id = $2
        AND e.execution_id = i.execution_id
        AND e.idempotency_key = i.idempotency_key
    LIMIT 1
) AS stored;

-- name: park_events
-- Keep events that can't be stored, with the reason. Parking the same event for the same reason again changes
-- nothing; a row of the tailer's is about publishing a stored event and stays.
INSERT INTO noetl.event_dead_letter AS d (
    execution_id,
    event_id,
    catalog_id,
    event_type,
    node_name,
    reason,
    last_error,
    payload,
    parked_by
)
SELECT i.execution_id, i.event_id, i.catalog_id, i.event_type, i.node_name, i.reason, i.last_error, i.payload::jsonb, $9
FROM unnest(
    $1::bigint[],
    $2::bigint[],
    $3::bigint[],
    $4::text[],
    $5::text[],
    $6::text[],
    $7::text[],
    $8::text[]
) AS i(execution_id, event_id, catalog_id, event_type, node_name, reason, last_error, payload)
ORDER BY i.execution_id, i.event_id
ON CONFLICT (execution_id, event_id) DO UPDATE
SET catalog_id = EXCLUDED.catalog_id,
    event_type = EXCLUDED.event_type,
    node_name = EXCLUDED.node_name,
    reason = EXCLUDED.reason,
    last_error = EXCLUDED.last_error,
    payload = EXCLUDED.payload,
    parked_by = EXCLUDED.parked_by,
    attempts = CASE WHEN d.resolved_at IS NULL THEN d.attempts ELSE 1 END,
    parked_at = CASE WHEN d.resolved_at IS NULL THEN d.parked_at ELSE now() END,
    resolved_at = NULL
WHERE d.resolved_at IS NOT NULL
    OR d.parked_by IS DISTINCT FROM 'tailer'
    AND (d.reason, d.last_error, d.payload) IS DISTINCT FROM (EXCLUDED.reason, EXCLUDED.last_error, EXCLUDED.payload);

-- name: list_dead_events
-- Unresolved ones after ($1, $2), at most $3; the payload only if $4.
SELECT d.execution_id,
    d.event_id,
    d.catalog_id,
    d.event_type,
    d.node_name,
    d.reason,
    d.attempts,
    d.last_error,
    COALESCE(d.parked_by, '') AS parked_by,
    d.parked_at,
    CASE WHEN $4::boolean THEN d.payload END AS payload
FROM noetl.event_dead_letter AS d
WHERE d.resolved_at IS NULL AND (d.execution_id, d.event_id) > ($1::bigint, $2::bigint)
ORDER BY d.execution_id, d.event_id
LIMIT $3;

-- name: retryable_dead_events
-- The keys after ($1, $2) that a retry may touch, at most $3.
SELECT d.execution_id, d.event_id
FROM noetl.event_dead_letter AS d
WHERE d.resolved_at IS NULL
    AND d.parked_by IS DISTINCT FROM 'tailer'
    AND (d.execution_id, d.event_id) > ($1::bigint, $2::bigint)
ORDER BY d.execution_id, d.event_id
LIMIT $3;

-- name: read_dead_events
-- These parked events, resolved or not.
SELECT d.execution_id, d.event_id, d.parked_by, d.resolved_at IS NOT NULL AS is_resolved, d.payload
FROM unnest($1::bigint[], $2::bigint[]) AS i(execution_id, event_id)
JOIN noetl.event_dead_letter AS d USING (execution_id, event_id);

-- name: lock_dead_events
-- Those that are unresolved when the lock is ours. Everybody locks in the order of the key.
SELECT d.execution_id, d.event_id
FROM noetl.event_dead_letter AS d
WHERE (d.execution_id, d.event_id) IN (
        SELECT k.execution_id, k.event_id
        FROM unnest($1::bigint[], $2::bigint[]) AS k(execution_id, event_id)
    )
    AND d.resolved_at IS NULL
ORDER BY d.execution_id, d.event_id
FOR UPDATE;

-- name: resolve_dead_events
UPDATE noetl.event_dead_letter AS d
SET resolved_at = now(),
    attempts = d.attempts + 1
FROM unnest($1::bigint[], $2::bigint[]) AS i(execution_id, event_id)
WHERE d.execution_id = i.execution_id AND d.event_id = i.event_id AND d.resolved_at IS NULL;

-- name: note_failed_retries
UPDATE noetl.event_dead_letter AS d
SET attempts = d.attempts + 1,
    reason = i.reason,
    last_error = i.last_error
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[]) AS i(execution_id, event_id, reason, last_error)
WHERE d.execution_id = i.execution_id AND d.event_id = i.event_id AND d.resolved_at IS NULL;
