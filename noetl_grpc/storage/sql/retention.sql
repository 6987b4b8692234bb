-- Deleting what is old: rows in pages by key, so that no statement is long and none is looked at twice; events by
-- whole partitions.

-- name: purge_commands
-- Delete the finished commands older than $1 among the $4 that follow ($2, $3); the key to go on from is NULL behind
-- the last. A finished command without completed_at is as old as its last change.
WITH page AS MATERIALIZED (
    SELECT c.execution_id,
        c.command_id,
        COALESCE(
            c.completed_at,
            CASE WHEN c.status IN ('COMPLETED', 'FAILED', 'CANCELLED') THEN c.updated_at END
        ) < $1::timestamptz AS is_old
    FROM noetl.command AS c
    WHERE (c.execution_id, c.command_id) > ($2::bigint, $3::bigint)
    ORDER BY c.execution_id, c.command_id
    LIMIT $4
), victim AS MATERIALIZED (
    SELECT c.execution_id, c.command_id
    FROM noetl.command AS c
    JOIN page AS p USING (execution_id, command_id)
    WHERE p.is_old
    FOR UPDATE OF c SKIP LOCKED
), gone AS (
    DELETE FROM noetl.command AS c
    USING victim AS v
    WHERE c.execution_id = v.execution_id AND c.command_id = v.command_id
    RETURNING c.command_id
)
SELECT (SELECT count(*) FROM gone) AS purged,
    last.execution_id,
    last.command_id
FROM (SELECT 1) AS one
LEFT JOIN LATERAL (
    SELECT p.execution_id, p.command_id
    FROM page AS p
    ORDER BY p.execution_id DESC, p.command_id DESC
    LIMIT 1
) AS last ON true;

-- name: count_old_commands
SELECT count(*)
FROM noetl.command AS c
WHERE COALESCE(
    c.completed_at,
    CASE WHEN c.status IN ('COMPLETED', 'FAILED', 'CANCELLED') THEN c.updated_at END
) < $1::timestamptz;

-- name: purge_outbox
-- The same for rows published before $1, among the $3 behind outbox_id $2.
WITH page AS MATERIALIZED (
    SELECT o.outbox_id,
        o.status = 'PUBLISHED' AND COALESCE(o.published_at, o.updated_at) < $1::timestamptz AS is_old
    FROM noetl.outbox AS o
    WHERE o.outbox_id > $2::bigint
    ORDER BY o.outbox_id
    LIMIT $3
), victim AS MATERIALIZED (
    SELECT o.outbox_id
    FROM noetl.outbox AS o
    JOIN page AS p USING (outbox_id)
    WHERE p.is_old
    FOR UPDATE OF o SKIP LOCKED
), gone AS (
    DELETE FROM noetl.outbox AS o
    USING victim AS v
    WHERE o.outbox_id = v.outbox_id
    RETURNING o.outbox_id
)
SELECT (SELECT count(*) FROM gone) AS purged, (SELECT max(p.outbox_id) FROM page AS p) AS outbox_id;

-- name: count_old_outbox_rows
SELECT count(*)
FROM noetl.outbox AS o
WHERE o.status = 'PUBLISHED' AND COALESCE(o.published_at, o.updated_at) < $1::timestamptz;

-- name: purge_runtimes
-- Delete worker pools without a heartbeat since $1, at most $2 of them.
DELETE FROM noetl.runtime AS r
WHERE r.runtime_id = ANY(ARRAY(
    SELECT s.runtime_id
    FROM noetl.runtime AS s
    WHERE s.kind = 'worker_pool' AND s.heartbeat < $1::timestamptz
    LIMIT $2
    FOR UPDATE SKIP LOCKED
));

-- name: count_stale_runtimes
SELECT count(*)
FROM noetl.runtime AS r
WHERE r.kind = 'worker_pool' AND r.heartbeat < $1::timestamptz;

-- name: statements_for_partition
-- What is asked of the partition $1 and done to it. Asked of the partition itself, not of the log, so that each answer
-- comes from an index of its own; spelled out by PostgreSQL because a table's name can't be an argument. Cursors other
-- than by snapshot tell an event they have passed by its id, or by the time they last moved.
SELECT pg_has_role(c.relowner, 'USAGE') AS is_owned,
    format(
        $statement$
        SELECT n.event_id,
            n.created_at,
            (
                SELECT s.execution_id
                FROM (
                    SELECT DISTINCT ON (e.execution_id) e.execution_id, e.status
                    FROM %1$s AS e
                    WHERE (e.event_type)::text = ANY (ARRAY['subscription.registered'::text,
                        'subscription.activated'::text, 'subscription.paused'::text, 'subscription.resumed'::text,
                        'subscription.draining'::text, 'subscription.deactivated'::text])
                        AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
                    ORDER BY e.execution_id, e.event_id DESC
                ) AS s
                WHERE s.status <> 'DEACTIVATED'
                LIMIT 1
            ) AS live_subscription_id,
            EXISTS (
                SELECT
                FROM noetl.log_cursor AS k
                CROSS JOIN LATERAL (SELECT FROM %1$s AS e WHERE %2$s LIMIT 1) AS unread
            ) AS has_unpublished
        FROM (SELECT 1) AS one
        LEFT JOIN LATERAL (
            SELECT e.event_id, e.created_at
            FROM %1$s AS e
            ORDER BY e.created_at DESC
            LIMIT 1
        ) AS n ON true
        $statement$,
        c.oid::regclass,
        concat_ws(
            ' OR ',
            CASE WHEN EXISTS (
                SELECT
                FROM pg_attribute AS a
                WHERE a.attrelid = c.oid AND a.attname = 'xact_id' AND NOT a.attisdropped
            ) THEN
                $condition$
                (k.seen IS NOT NULL
                    AND e.xact_id >= pg_snapshot_xmin(k.seen)
                    AND NOT pg_visible_in_snapshot(e.xact_id, k.seen)
                    AND NOT COALESCE(
                        pg_visible_in_snapshot(e.xact_id, k.target)
                            AND (e.xact_id, e.event_id) <= (k.at_xact, k.at_event),
                        false
                    ))
                $condition$
            END,
            '(k.seen IS NULL AND k.at_event IS NOT NULL AND e.event_id > k.at_event)',
            '(k.seen IS NULL AND k.at_event IS NULL AND e.ingest_time > k.updated_at)'
        )
    ) AS content,
    'LOCK TABLE ONLY noetl.event IN ACCESS EXCLUSIVE MODE' AS locking_log,
    format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', c.oid::regclass) AS locking,
    format('DROP TABLE %s', c.oid::regclass) AS dropping
FROM pg_class AS c
WHERE c.oid = to_regclass(format('noetl.%I', $1::text));

-- name: delete_snapshots_between
-- The snapshots of executions from $1 up to and without $2: ours and those of NoETL's orchestrator.
DELETE FROM noetl.projection_snapshot AS s
WHERE CASE
        WHEN s.aggregate_type = 'replay_state' AND s.aggregate_id ~ '^execution/[0-9]+/'
            THEN split_part(s.aggregate_id, '/', 2)::numeric
        WHEN s.aggregate_type = 'orchestrator_workflow_state' AND s.aggregate_id ~ '^[0-9]+$'
            THEN s.aggregate_id::numeric
    END BETWEEN $1::bigint AND $2::bigint - 1;

-- name: prefer_index_joins
-- For the rest of the transaction. A page is small, and the planner, who can't know that, would read the whole table.
SELECT set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true),
    set_config('enable_seqscan', 'off', true);

-- name: limit_lock_wait
-- For the rest of the transaction.
SELECT set_config('lock_timeout', $1::text, true);

-- name: present
SELECT now();
