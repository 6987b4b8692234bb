-- Snapshots of replayed states: one row per execution, aggregate type `replay_state`.

-- name: read_snapshots
-- $1 tenant, $2 organisation, $3 keys.
SELECT
    aggregate_id,
    version,
    snapshot::text AS snapshot_json,
    checksum,
    meta::text AS meta_json,
    updated_at
FROM noetl.projection_snapshot
WHERE tenant_id = $1
    AND organization_id = $2
    AND aggregate_type = 'replay_state'
    AND aggregate_id = ANY($3::text[]);

-- name: read_places
-- Which version of its row each snapshot is: whoever writes to a row, by whatever means, makes another one. And what the
-- transaction sees of the log, NULL where rows do not carry the transaction that wrote them, or where that can't be
-- looked up by an index. $3 keys.
SELECT
    (
        SELECT pg_current_snapshot()::text
        WHERE EXISTS (
            SELECT 1
            FROM pg_attribute AS a
            JOIN pg_index AS i ON i.indrelid = a.attrelid AND i.indkey[0] = a.attnum AND i.indisvalid
            WHERE a.attrelid = to_regclass('noetl.event') AND a.attname = 'xact_id' AND a.atthasdef
        )
    ) AS log_snapshot,
    ARRAY(
        SELECT ARRAY[aggregate_id, xmin::text || ctid::text || checksum]
        FROM noetl.projection_snapshot
        WHERE tenant_id = $1
            AND organization_id = $2
            AND aggregate_type = 'replay_state'
            AND aggregate_id = ANY($3::text[])
    ) AS places;

-- name: save_snapshots
-- Store what covers at least as many events as what is there; an older fold never replaces a newer one. Visible sets of
-- events only grow, so equal counts mean equal events. The keys come sorted, so that two callers wait for each other
-- instead of deadlocking. Arrays from $3: keys, versions, documents, checksums, metas. A row whose document is NULL is
-- stored around the one of its version and checksum, and not at all where that is gone. Returns what `read_places` would.
INSERT INTO noetl.projection_snapshot AS stored (
    tenant_id,
    organization_id,
    aggregate_type,
    aggregate_id,
    version,
    snapshot,
    checksum,
    meta
)
SELECT
    $1,
    $2,
    'replay_state',
    new.aggregate_id,
    new.version,
    new.snapshot,
    new.checksum,
    new.meta
FROM (
    SELECT
        given.aggregate_id,
        given.version,
        -- Cast here, because PostgreSQL reads an array of texts much faster than one of documents.
        CASE
            WHEN given.snapshot IS NOT NULL THEN given.snapshot::jsonb
            ELSE (
                SELECT s.snapshot
                FROM noetl.projection_snapshot AS s
                WHERE s.tenant_id = $1
                    AND s.organization_id = $2
                    AND s.aggregate_type = 'replay_state'
                    AND s.aggregate_id = given.aggregate_id
                    AND s.version = given.version
                    AND s.checksum = given.checksum
            )
        END AS snapshot,
        given.checksum,
        given.meta::jsonb AS meta
    FROM unnest($3::text[], $4::bigint[], $5::text[], $6::text[], $7::text[])
        AS given (aggregate_id, version, snapshot, checksum, meta)
    OFFSET 0
) AS new
WHERE new.snapshot IS NOT NULL
ON CONFLICT (tenant_id, organization_id, aggregate_type, aggregate_id) DO UPDATE
SET version = excluded.version,
    -- The very value that is there is not compressed and written once more.
    snapshot = CASE WHEN excluded.meta ? 'gains' THEN stored.snapshot ELSE excluded.snapshot END,
    checksum = excluded.checksum,
    meta = excluded.meta,
    updated_at = now()
WHERE CASE
        WHEN jsonb_typeof(stored.meta -> 'event_count') = 'number' THEN (stored.meta ->> 'event_count')::numeric
        ELSE -1
    END <= (excluded.meta ->> 'event_count')::numeric
    AND (
        NOT excluded.meta ? 'gains'
        OR stored.version = excluded.version AND stored.checksum = excluded.checksum
    )
RETURNING stored.aggregate_id, stored.xmin::text || stored.ctid::text || stored.checksum AS place;

-- name: repair_snapshot
-- Replace the very row that was found to differ, whatever it claims to cover. $4 what its checksum was, with its meta $5;
-- a row that changed meanwhile is left to its new owner.
UPDATE noetl.projection_snapshot
SET version = $6,
    snapshot = $7::jsonb,
    checksum = $8,
    meta = $9::jsonb,
    updated_at = now()
WHERE tenant_id = $1
    AND organization_id = $2
    AND aggregate_type = 'replay_state'
    AND aggregate_id = $3
    AND checksum = $4
    AND meta = $5::jsonb
RETURNING aggregate_id;

-- name: covered_versions
-- How far stored snapshots reach, whoever wrote them: `meta` tells it where that is beyond the document. $3 keys.
SELECT
    aggregate_id,
    CASE
        WHEN jsonb_typeof(meta -> 'version') = 'number'
            THEN GREATEST(0, LEAST((meta ->> 'version')::numeric, 9223372036854775807))::bigint
        ELSE version
    END AS version,
    CASE WHEN jsonb_typeof(meta -> 'event_count') = 'number' THEN (meta ->> 'event_count')::bigint ELSE 0 END
        AS event_count
FROM noetl.projection_snapshot
WHERE tenant_id = $1
    AND organization_id = $2
    AND aggregate_type = 'replay_state'
    AND aggregate_id = ANY($3::text[]);

-- name: has_straggler
-- Whether an event at or below the version became visible after the snapshot was folded. With the snapshot given as a
-- parameter the planner knows how few transactions came after it. $3 execution, $4 version, $5 database snapshot.
SELECT EXISTS (
    SELECT 1
    FROM noetl.event AS e
    WHERE e.execution_id = $3
        AND e.event_id <= $4
        AND e.xact_id >= pg_snapshot_xmin($5::text::pg_snapshot)
        AND NOT pg_visible_in_snapshot(e.xact_id, $5::text::pg_snapshot)
        AND e.tenant_id = $1
        AND e.organization_id = $2
);

-- name: executions_with_stragglers
-- The same for many executions at once. Arrays from $3: executions, versions, database snapshots; $6 the lowest xmin,
-- $7 the highest version: by these two the index alone tells most new events from stragglers.
SELECT wanted.execution_id
FROM unnest($3::bigint[], $4::bigint[], $5::text[]) AS wanted (execution_id, version, folded_from)
WHERE EXISTS (
    SELECT 1
    FROM noetl.event AS e
    WHERE e.execution_id = wanted.execution_id
        AND e.event_id <= wanted.version
        AND e.xact_id >= $6::xid8
        AND e.event_id <= $7
        AND NOT pg_visible_in_snapshot(e.xact_id, wanted.folded_from::pg_snapshot)
        AND e.tenant_id = $1
        AND e.organization_id = $2
);

-- name: reaches_past
-- Whether an event at or below the version happened after a moment. $3 execution, $4 version, $5 moment.
SELECT EXISTS (
    SELECT 1
    FROM noetl.event AS e
    WHERE e.execution_id = $3
        AND e.event_id <= $4
        AND e.event_time > $5
        AND e.tenant_id = $1
        AND e.organization_id = $2
);

-- name: count_events_up_to
-- How many events there are at or below a version, where the log has no xact_id. Arrays from $3: executions, versions.
SELECT wanted.execution_id, counted.events
FROM unnest($3::bigint[], $4::bigint[]) AS wanted (execution_id, version)
CROSS JOIN LATERAL (
    SELECT count(*) AS events
    FROM noetl.event AS e
    WHERE e.execution_id = wanted.execution_id
        AND e.event_id <= wanted.version
        AND e.tenant_id = $1
        AND e.organization_id = $2
) AS counted;

-- name: included_events
-- Which of these events are in the snapshot of their execution. Arrays: tenants, organisations, keys, executions, events.
SELECT
    wanted.place::integer AS place,
    CASE
        WHEN jsonb_typeof(s.meta -> 'version') = 'number'
            THEN GREATEST(0, LEAST((s.meta ->> 'version')::numeric, 9223372036854775807))::bigint
        ELSE s.version
    END AS version,
    e.event_id IS NOT NULL AS is_included
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[])
    WITH ORDINALITY AS wanted (tenant_id, organization_id, aggregate_id, execution_id, event_id, place)
JOIN noetl.projection_snapshot AS s
    ON s.tenant_id = wanted.tenant_id
    AND s.organization_id = wanted.organization_id
    AND s.aggregate_type = 'replay_state'
    AND s.aggregate_id = wanted.aggregate_id
LEFT JOIN noetl.event AS e
    ON e.execution_id = wanted.execution_id
    AND e.event_id = wanted.event_id
    AND e.tenant_id = wanted.tenant_id
    AND e.organization_id = wanted.organization_id
    AND s.meta ->> 'log_snapshot' IS NOT NULL
    AND pg_visible_in_snapshot(e.xact_id, (s.meta ->> 'log_snapshot')::pg_snapshot);

-- name: included_events_by_count
-- The same where the log has no xact_id: an event at or below the version is in a snapshot that missed none below it.
SELECT
    wanted.place::integer AS place,
    reached.version,
    e.event_id IS NOT NULL AND reached.version >= wanted.event_id AND counted.events = (
        CASE WHEN jsonb_typeof(s.meta -> 'event_count') = 'number' THEN (s.meta ->> 'event_count')::numeric END
    ) AS is_included
FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[])
    WITH ORDINALITY AS wanted (tenant_id, organization_id, aggregate_id, execution_id, event_id, place)
JOIN noetl.projection_snapshot AS s
    ON s.tenant_id = wanted.tenant_id
    AND s.organization_id = wanted.organization_id
    AND s.aggregate_type = 'replay_state'
    AND s.aggregate_id = wanted.aggregate_id
LEFT JOIN noetl.event AS e
    ON e.execution_id = wanted.execution_id
    AND e.event_id = wanted.event_id
    AND e.tenant_id = wanted.tenant_id
    AND e.organization_id = wanted.organization_id
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN jsonb_typeof(s.meta -> 'version') = 'number'
            THEN GREATEST(0, LEAST((s.meta ->> 'version')::numeric, 9223372036854775807))::bigint
        ELSE s.version
    END AS version
) AS reached
CROSS JOIN LATERAL (
    SELECT count(*) AS events
    FROM noetl.event AS b
    WHERE b.execution_id = wanted.execution_id
        AND b.event_id <= reached.version
        AND b.tenant_id = wanted.tenant_id
        AND b.organization_id = wanted.organization_id
) AS counted;

-- name: events_to_fold
-- The next $5 events as the fold reads them, of many executions, each behind its own place, in the order in which they
-- are folded. JSON columns as text; the reference is the event's own, else its result's. Arrays from $3: executions, the
-- places.
SELECT
    wanted.execution_id,
    e.event_id,
    e.event_type,
    e.status,
    e.node_name,
    e.meta,
    e.reference,
    e.stage_id::text AS stage_id,
    e.frame_id::text AS frame_id,
    e.command_id::text AS command_id,
    e.worker_id,
    e.aggregate_type,
    e.aggregate_id
FROM unnest($3::bigint[], $4::bigint[]) WITH ORDINALITY AS wanted (execution_id, behind, place)
CROSS JOIN LATERAL (
    SELECT
        b.event_id,
        b.event_type,
        b.status,
        b.node_name,
        b.meta,
        COALESCE(NULLIF(b.payload_ref, 'null'::jsonb), NULLIF(b.result -> 'reference', 'null'::jsonb)) AS reference,
        b.stage_id,
        b.frame_id,
        b.command_id,
        b.worker_id,
        b.aggregate_type,
        b.aggregate_id
    FROM noetl.event AS b
    WHERE b.execution_id = wanted.execution_id
        AND b.event_id > wanted.behind
        AND b.tenant_id = $1
        AND b.organization_id = $2
    ORDER BY b.event_id
) AS e
LIMIT $5;

-- name: next_executions
-- The executions that have events, behind one, found by hopping over the index instead of reading every event.
-- $3 behind this execution, $4 at most.
WITH RECURSIVE walk (execution_id, steps) AS (
    (
        SELECT e.execution_id, 1
        FROM noetl.event AS e
        WHERE e.tenant_id = $1 AND e.organization_id = $2 AND e.execution_id > $3
        ORDER BY e.execution_id
        LIMIT 1
    )
    UNION ALL
    (
        SELECT hop.execution_id, walk.steps + 1
        FROM walk
        CROSS JOIN LATERAL (
            SELECT e.execution_id
            FROM noetl.event AS e
            WHERE e.tenant_id = $1 AND e.organization_id = $2 AND e.execution_id > walk.execution_id
            ORDER BY e.execution_id
            LIMIT 1
        ) AS hop
        WHERE walk.steps < $4
    )
)
SELECT execution_id
FROM walk
ORDER BY execution_id;

-- name: count_executions
-- How many executions `next_executions` would give.
WITH RECURSIVE walk (execution_id, steps) AS (
    (
        SELECT e.execution_id, 1
        FROM noetl.event AS e
        WHERE e.tenant_id = $1 AND e.organization_id = $2 AND e.execution_id > $3
        ORDER BY e.execution_id
        LIMIT 1
    )
    UNION ALL
    (
        SELECT hop.execution_id, walk.steps + 1
        FROM walk
        CROSS JOIN LATERAL (
            SELECT e.execution_id
            FROM noetl.event AS e
            WHERE e.tenant_id = $1 AND e.organization_id = $2 AND e.execution_id > walk.execution_id
            ORDER BY e.execution_id
            LIMIT 1
        ) AS hop
        WHERE walk.steps < $4
    )
)
SELECT count(*)
FROM walk;

-- name: count_behind
-- Of the executions that the last $1 events belong to, those whose snapshot is missing or does not reach their newest one.
SELECT count(*)
FROM (
    SELECT tenant_id, organization_id, execution_id, max(event_id) AS newest
    FROM (
        SELECT tenant_id, organization_id, execution_id, event_id
        FROM noetl.event
        ORDER BY xact_id DESC, event_id DESC
        LIMIT $1
    ) AS last_events
    GROUP BY tenant_id, organization_id, execution_id
) AS recent
LEFT JOIN noetl.projection_snapshot AS s
    ON s.tenant_id = recent.tenant_id
    AND s.organization_id = recent.organization_id
    AND s.aggregate_type = 'replay_state'
    AND s.aggregate_id = 'execution/' || recent.execution_id || '/all'
WHERE s.version IS NULL
    OR CASE
        WHEN jsonb_typeof(s.meta -> 'version') = 'number'
            THEN GREATEST(0, LEAST((s.meta ->> 'version')::numeric, 9223372036854775807))::bigint
        ELSE s.version
    END < recent.newest;
