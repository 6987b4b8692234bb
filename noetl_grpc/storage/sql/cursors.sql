-- Reading what became visible in the log since a snapshot. A gap is what is visible in `target` and was not in
-- `seen`; it is read in pages behind a place (xact_id, event_id). Rows that share the last place of a page come
-- with it, because event ids are unique within an execution only.

-- name: look_at_log
-- What is visible now. On a standby a snapshot lists no running transaction, so following would lose events there.
SELECT
    pg_current_snapshot()::text AS snapshot,
    pg_is_in_recovery() AS in_recovery;

-- name: can_follow_snapshots
-- Whether rows carry the transaction that wrote them, and it can be looked up by an index.
SELECT EXISTS (
    SELECT 1
    FROM pg_attribute AS a
    JOIN pg_index AS i ON i.indrelid = a.attrelid AND i.indkey[0] = a.attnum AND i.indisvalid
    WHERE a.attrelid = to_regclass('noetl.event') AND a.attname = 'xact_id' AND a.atthasdef
);

-- name: prefer_generic_plans
-- For this transaction. A gap is read from every partition, and planning that costs more than reading it.
SELECT set_config('plan_cache_mode', 'force_generic_plan', true);

-- name: gap_keys
-- One page of a gap: which events, not what is in them. $1 seen, $2 target, $3 and $4 the place, $5 rows.
-- What was not visible in `seen` either began later, or is one of those that were running then: two short index
-- scans, where the plain condition would walk the index from the oldest transaction that is still running.
SELECT
    gap.xact_id,
    gap.event_id,
    gap.execution_id,
    gap.event_type
FROM (
    (
        SELECT e.xact_id, e.event_id, e.execution_id, e.event_type
        FROM noetl.event AS e
        WHERE e.xact_id = ANY (ARRAY(SELECT pg_snapshot_xip($1::text::pg_snapshot)))
            AND pg_visible_in_snapshot(e.xact_id, $2::text::pg_snapshot)
            AND (e.xact_id, e.event_id) > ($3::xid8, $4::bigint)
        ORDER BY e.xact_id, e.event_id
        FETCH FIRST $5 ROWS WITH TIES
    )
    UNION ALL
    (
        SELECT e.xact_id, e.event_id, e.execution_id, e.event_type
        FROM noetl.event AS e
        WHERE e.xact_id >= pg_snapshot_xmax($1::text::pg_snapshot)
            AND e.xact_id < pg_snapshot_xmax($2::text::pg_snapshot)
            AND pg_visible_in_snapshot(e.xact_id, $2::text::pg_snapshot)
            AND (e.xact_id, e.event_id) > ($3::xid8, $4::bigint)
        ORDER BY e.xact_id, e.event_id
        FETCH FIRST $5 ROWS WITH TIES
    )
) AS gap
ORDER BY gap.xact_id, gap.event_id
FETCH FIRST $5 ROWS WITH TIES;

-- name: gap_keys_of_execution
-- The same for one execution, which is cheap both by its own key and by transaction. $6 execution.
SELECT
    e.xact_id,
    e.event_id,
    e.execution_id,
    e.event_type
FROM noetl.event AS e
WHERE e.execution_id = $6
    AND e.xact_id >= pg_snapshot_xmin($1::text::pg_snapshot)
    AND NOT pg_visible_in_snapshot(e.xact_id, $1::text::pg_snapshot)
    AND pg_visible_in_snapshot(e.xact_id, $2::text::pg_snapshot)
    AND (e.xact_id, e.event_id) > ($3::xid8, $4::bigint)
ORDER BY e.xact_id, e.event_id
FETCH FIRST $5 ROWS WITH TIES;

-- name: recent_keys
-- Overlap mode, without xact_id: what was made in the last $1 seconds by its own time, the youngest $2 of it.
-- An event that commits later than that is missed.
SELECT
    e.event_id,
    e.execution_id,
    e.event_type
FROM noetl.event AS e
WHERE e.created_at >= (now() AT TIME ZONE 'UTC') - make_interval(secs => $1::double precision)
ORDER BY e.created_at DESC
LIMIT $2;
