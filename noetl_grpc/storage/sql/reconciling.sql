-- Comparing the log with what the broker's stream holds. Both sides go into tables of the session, so that no amount of
-- either has to fit into our memory.

-- name: try_to_reconcile
-- One comparison at a time: two would both publish what is missing.
SELECT pg_try_advisory_lock($1::integer, $2::integer);

-- name: make_streamed
-- What the stream holds.
CREATE TEMP TABLE streamed (execution_id bigint NOT NULL, event_id bigint NOT NULL);

-- name: make_passed
-- What it should hold.
CREATE TEMP TABLE passed (
    xact_id bigint NOT NULL,
    event_id bigint NOT NULL,
    execution_id bigint NOT NULL,
    event_type text
);

-- name: gather_passed
-- Events ingested from $1 to $2 that the tailer has passed: what its snapshot $3 shows, what a restored log brought along
-- before $4, and of the gap up to $5 what is not behind the place $6, $7.
INSERT INTO pg_temp.passed (xact_id, event_id, execution_id, event_type)
SELECT e.xact_id::text::bigint, e.event_id, e.execution_id, e.event_type
FROM noetl.event AS e
WHERE e.ingest_time BETWEEN $1::timestamptz AND $2::timestamptz
    AND (
        pg_visible_in_snapshot(e.xact_id, $3::text::pg_snapshot)
        OR e.ingest_time < $4::timestamptz
        OR (
            pg_visible_in_snapshot(e.xact_id, $5::text::pg_snapshot)
            AND (e.xact_id, e.event_id) <= ($6::xid8, $7::bigint)
        )
    );

-- name: gather_passed_by_time
-- The same without xact_id: what was made by $3.
INSERT INTO pg_temp.passed (xact_id, event_id, execution_id, event_type)
SELECT 0, e.event_id, e.execution_id, e.event_type
FROM noetl.event AS e
WHERE e.ingest_time BETWEEN $1::timestamptz AND $2::timestamptz AND e.created_at <= $3::timestamp;

-- name: gather_parked
-- Events that the broker refused, ingested from $1 to $2, unless they are there already.
INSERT INTO pg_temp.passed (xact_id, event_id, execution_id, event_type)
SELECT 0, e.event_id, e.execution_id, e.event_type
FROM noetl.event_dead_letter AS d
JOIN noetl.event AS e USING (execution_id, event_id)
WHERE d.parked_by = 'tailer'
    AND d.resolved_at IS NULL
    AND e.ingest_time BETWEEN $1::timestamptz AND $2::timestamptz
    AND NOT EXISTS (
        SELECT
        FROM pg_temp.passed AS p
        WHERE p.execution_id = e.execution_id AND p.event_id = e.event_id
    );

-- name: count_passed
SELECT count(*) FROM pg_temp.passed;

-- name: keep_missing
-- Leave only what the stream does not hold.
DELETE FROM pg_temp.passed AS p
USING pg_temp.streamed AS s
WHERE s.execution_id = p.execution_id AND s.event_id = p.event_id;

-- name: index_missing
CREATE INDEX ON pg_temp.passed (xact_id, event_id, execution_id);

-- name: missing_keys
-- One page of what is missing, behind the place $1, $2, $3.
SELECT p.xact_id, p.event_id, p.execution_id, p.event_type
FROM pg_temp.passed AS p
WHERE (p.xact_id, p.event_id, p.execution_id) > ($1::bigint, $2::bigint, $3::bigint)
ORDER BY p.xact_id, p.event_id, p.execution_id
LIMIT $4;

-- name: resolve_parked
-- These events are in the stream now.
UPDATE noetl.event_dead_letter AS d
SET resolved_at = now()
FROM unnest($1::bigint[], $2::bigint[]) AS k(execution_id, event_id)
WHERE d.execution_id = k.execution_id
    AND d.event_id = k.event_id
    AND d.parked_by = 'tailer'
    AND d.resolved_at IS NULL;
