-- Subscriptions: what the log tells of them, and what their runtimes report.
--
-- An event counts when its type is one of the six and its status one of the five; both are spelt out in every
-- statement, because PostgreSQL sees only from literals that the partial indexes apply. The path is the event's
-- node_name, else that of its catalog entry, which the foreign key keeps in the same database.

-- name: lock_subscription_path
-- Registering a path: one at a time. Released when the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended('noetl_grpc/subscription_path/' || $1::text, 0));

-- name: lock_subscription
-- Changing a subscription: one at a time. A statement of its own, so that the next one sees what was committed
-- by whoever held the lock before. Released when the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended('noetl_grpc/subscription/' || $1::bigint, 0));

-- name: check_lock_connection
-- Fails if the connection, and with it its locks, is gone.
SELECT 1;

-- name: read_clock
SELECT clock_timestamp();

-- name: newest_catalog_entry
SELECT c.catalog_id,
    c.kind,
    c.version
FROM noetl.catalog AS c
WHERE c.path = $1
ORDER BY c.version DESC
LIMIT 1;

-- name: read_subscription
SELECT e.execution_id AS subscription_id,
    COALESCE(
        NULLIF(e.node_name, ''),
        (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
        ''
    ) AS path,
    e.catalog_id,
    e.status AS state,
    e.event_type,
    e.event_id,
    e.created_at,
    r.runtime_id,
    r.last_heartbeat_at,
    r.lease_expires_at,
    r.lease_expires_at > clock_timestamp() AS alive,
    r.in_flight,
    r.backlog,
    clock_timestamp() AS now
FROM noetl.event AS e
LEFT JOIN noetl.subscription_runtime AS r ON r.subscription_id = e.execution_id
WHERE e.execution_id = $1
    AND e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
    AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
ORDER BY e.event_id DESC
LIMIT 1;

-- name: live_subscriptions_of_path
-- Those of the path that are not DEACTIVATED, newest change first. Their state is that of their last event whatever
-- path that one names, so the ids are collected first.
SELECT s.subscription_id,
    s.path,
    s.catalog_id,
    s.state,
    s.event_type,
    s.event_id,
    s.created_at,
    r.runtime_id,
    r.last_heartbeat_at,
    r.lease_expires_at,
    r.lease_expires_at > clock_timestamp() AS alive,
    r.in_flight,
    r.backlog
FROM (
    SELECT e.execution_id
    FROM noetl.event AS e
    WHERE e.node_name = $1
        AND e.event_type IN (
            'subscription.registered', 'subscription.activated', 'subscription.paused',
            'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
        )
    UNION
    SELECT e.execution_id
    FROM noetl.event AS e
    JOIN noetl.catalog AS c ON c.catalog_id = e.catalog_id
    WHERE e.node_name IS NULL
        AND c.path = $1
        AND e.event_type IN (
            'subscription.registered', 'subscription.activated', 'subscription.paused',
            'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
        )
    UNION
    SELECT e.execution_id
    FROM noetl.event AS e
    JOIN noetl.catalog AS c ON c.catalog_id = e.catalog_id
    WHERE e.node_name = ''
        AND c.path = $1
        AND e.event_type IN (
            'subscription.registered', 'subscription.activated', 'subscription.paused',
            'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
        )
) AS named
CROSS JOIN LATERAL (
    SELECT e.execution_id AS subscription_id,
        COALESCE(
            NULLIF(e.node_name, ''),
            (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
            ''
        ) AS path,
        e.catalog_id,
        e.status AS state,
        e.event_type,
        e.event_id,
        e.created_at
    FROM noetl.event AS e
    WHERE e.execution_id = named.execution_id
        AND e.event_type IN (
            'subscription.registered', 'subscription.activated', 'subscription.paused',
            'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
        )
        AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
    ORDER BY e.event_id DESC
    LIMIT 1
) AS s
LEFT JOIN noetl.subscription_runtime AS r ON r.subscription_id = s.subscription_id
WHERE s.path = $1 AND s.state <> 'DEACTIVATED'
ORDER BY s.event_id DESC;

-- name: draining_since
-- When the subscription entered the state it is in: the first event after the last one of another state.
SELECT min(e.created_at)
FROM noetl.event AS e
WHERE e.execution_id = $1
    AND e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
    AND e.status = 'DRAINING'
    AND e.event_id > COALESCE((
        SELECT max(other.event_id)
        FROM noetl.event AS other
        WHERE other.execution_id = $1
            AND other.event_type IN (
            'subscription.registered', 'subscription.activated', 'subscription.paused',
            'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
        )
            AND other.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DEACTIVATED')
    ), 0);

-- name: lifecycle_event_of_request
-- The event that a request wrote, if it has been here before. $2 request id.
SELECT e.execution_id AS subscription_id,
    COALESCE(
        NULLIF(e.node_name, ''),
        (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
        ''
    ) AS path,
    e.catalog_id,
    e.status AS state,
    e.event_type,
    e.event_id,
    e.created_at,
    e.meta ->> 'actor' AS actor,
    e.meta ->> 'reason' AS reason,
    e.meta ->> 'request_id' AS request_id
FROM noetl.event AS e
WHERE e.execution_id = $1
    AND e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
    AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
    AND e.meta ->> 'request_id' = $2
ORDER BY e.event_id
LIMIT 1;

-- name: append_lifecycle_event
-- No row comes back when another event of the execution has that id. $9 is an instant; all times of the event are it.
INSERT INTO noetl.event (
    execution_id,
    catalog_id,
    event_id,
    event_type,
    node_id,
    node_name,
    node_type,
    status,
    context,
    meta,
    created_at,
    event_time,
    ingest_time
)
VALUES (
    $1, $2, $3, $4, 'subscription', $5, 'subscription', $6, $7::jsonb, $8::jsonb,
    $9::timestamptz AT TIME ZONE 'UTC', $9::timestamptz, $9::timestamptz
)
ON CONFLICT (execution_id, event_id) DO NOTHING
RETURNING event_id;

-- name: save_runtime
INSERT INTO noetl.subscription_runtime (
    subscription_id,
    runtime_id,
    in_flight,
    backlog,
    last_heartbeat_at,
    lease_expires_at
)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (subscription_id) DO UPDATE
SET runtime_id = excluded.runtime_id,
    in_flight = excluded.in_flight,
    backlog = excluded.backlog,
    last_heartbeat_at = excluded.last_heartbeat_at,
    lease_expires_at = excluded.lease_expires_at;

-- name: walk_lifecycle_index
-- For this transaction. A page is a short walk along the index, but the planner would rather collect and sort all that
-- lies behind its beginning; and planning for every partition costs more than the walk. Without the index there is
-- nothing to walk along, and the planner is right.
SELECT set_config('enable_sort', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('max_parallel_workers_per_gather', '0', true),
    set_config('plan_cache_mode', 'force_generic_plan', true)
FROM pg_index AS i
WHERE i.indexrelid = to_regclass('noetl.idx_event_subscription_state') AND i.indisvalid;

-- name: list_subscriptions
-- A page of subscriptions behind an id. $1 the id, $2 states (null: all), $3 the beginning of the path (empty: any),
-- $4 how many. After `walk_lifecycle_index`.
SELECT page.subscription_id,
    page.path,
    page.catalog_id,
    page.state,
    page.event_type,
    page.event_id,
    page.created_at,
    r.runtime_id,
    r.last_heartbeat_at,
    r.lease_expires_at,
    r.lease_expires_at > clock_timestamp() AS alive,
    r.in_flight,
    r.backlog
FROM (
    SELECT s.subscription_id,
        s.path,
        s.catalog_id,
        s.state,
        s.event_type,
        s.event_id,
        s.created_at
    FROM (
        SELECT DISTINCT ON (e.execution_id) e.execution_id AS subscription_id,
            COALESCE(
                NULLIF(e.node_name, ''),
                (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
                ''
            ) AS path,
            e.catalog_id,
            e.status AS state,
            e.event_type,
            e.event_id,
            e.created_at
        FROM noetl.event AS e
        WHERE e.execution_id > $1
            AND e.event_type IN (
                'subscription.registered', 'subscription.activated', 'subscription.paused',
                'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
            )
            AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
        ORDER BY e.execution_id, e.event_id DESC
    ) AS s
    WHERE ($2::text[] IS NULL OR s.state = ANY($2::text[]))
        AND ($3::text = '' OR starts_with(s.path, $3::text))
    ORDER BY s.subscription_id
    LIMIT $4
) AS page
LEFT JOIN noetl.subscription_runtime AS r ON r.subscription_id = page.subscription_id
ORDER BY page.subscription_id;

-- name: list_subscriptions_seen
-- The same as `list_subscriptions` without states, as a snapshot ($4) showed it; $3 how many. A row of a transaction
-- that is yet to come was brought from another database and has always been there. After `walk_lifecycle_index`.
SELECT page.subscription_id,
    page.path,
    page.catalog_id,
    page.state,
    page.event_type,
    page.event_id,
    page.created_at,
    r.runtime_id,
    r.last_heartbeat_at,
    r.lease_expires_at,
    r.lease_expires_at > clock_timestamp() AS alive,
    r.in_flight,
    r.backlog
FROM (
    SELECT s.subscription_id,
        s.path,
        s.catalog_id,
        s.state,
        s.event_type,
        s.event_id,
        s.created_at
    FROM (
        SELECT DISTINCT ON (e.execution_id) e.execution_id AS subscription_id,
            COALESCE(
                NULLIF(e.node_name, ''),
                (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
                ''
            ) AS path,
            e.catalog_id,
            e.status AS state,
            e.event_type,
            e.event_id,
            e.created_at
        FROM noetl.event AS e
        WHERE e.execution_id > $1
            AND e.event_type IN (
                'subscription.registered', 'subscription.activated', 'subscription.paused',
                'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
            )
            AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
            AND (
                pg_visible_in_snapshot(e.xact_id, $4::text::pg_snapshot)
                OR e.xact_id >= pg_snapshot_xmax(pg_current_snapshot())
            )
        ORDER BY e.execution_id, e.event_id DESC
    ) AS s
    WHERE $2::text = '' OR starts_with(s.path, $2::text)
    ORDER BY s.subscription_id
    LIMIT $3
) AS page
LEFT JOIN noetl.subscription_runtime AS r ON r.subscription_id = page.subscription_id
ORDER BY page.subscription_id;

-- name: read_subscription_seen
-- One subscription as a snapshot ($2) showed it.
SELECT e.execution_id AS subscription_id,
    COALESCE(
        NULLIF(e.node_name, ''),
        (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
        ''
    ) AS path,
    e.catalog_id,
    e.status AS state,
    e.event_type,
    e.event_id,
    e.created_at,
    r.runtime_id,
    r.last_heartbeat_at,
    r.lease_expires_at,
    r.lease_expires_at > clock_timestamp() AS alive,
    r.in_flight,
    r.backlog
FROM noetl.event AS e
LEFT JOIN noetl.subscription_runtime AS r ON r.subscription_id = e.execution_id
WHERE e.execution_id = $1
    AND e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
    AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
    AND (
        pg_visible_in_snapshot(e.xact_id, $2::text::pg_snapshot)
        OR e.xact_id >= pg_snapshot_xmax(pg_current_snapshot())
    )
ORDER BY e.event_id DESC
LIMIT 1;

-- name: plan_by_values
-- For this transaction. Whether a gap is short or long decides how it is best read.
SELECT set_config('plan_cache_mode', 'force_custom_plan', true);

-- name: lifecycle_gap_keys
-- One page of a gap, as `gap_keys` reads it, of lifecycle events alone. $1 seen, $2 target, $3 and $4 the place, $5 rows.
-- Collected before they are ordered: else the planner would walk over all other events of the gap to find a few.
-- After `plan_by_values`.
WITH gap AS MATERIALIZED (
    SELECT e.xact_id,
        e.event_id,
        e.execution_id,
        e.event_type
    FROM noetl.event AS e
    WHERE e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
        AND e.xact_id >= pg_snapshot_xmin($1::text::pg_snapshot)
        AND NOT pg_visible_in_snapshot(e.xact_id, $1::text::pg_snapshot)
        AND pg_visible_in_snapshot(e.xact_id, $2::text::pg_snapshot)
        AND (e.xact_id, e.event_id) > ($3::xid8, $4::bigint)
)
SELECT gap.xact_id,
    gap.event_id,
    gap.execution_id,
    gap.event_type
FROM gap
ORDER BY gap.xact_id, gap.event_id
FETCH FIRST $5 ROWS WITH TIES;

-- name: read_changes
-- Subscriptions as of some of their events. $1 subscriptions and $2 events.
SELECT e.execution_id AS subscription_id,
    COALESCE(
        NULLIF(e.node_name, ''),
        (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
        ''
    ) AS path,
    e.catalog_id,
    e.status AS state,
    e.event_type,
    e.event_id,
    e.created_at,
    r.runtime_id,
    r.last_heartbeat_at,
    r.lease_expires_at,
    r.lease_expires_at > clock_timestamp() AS alive,
    r.in_flight,
    r.backlog
FROM unnest($1::bigint[], $2::bigint[]) AS told (execution_id, event_id)
JOIN noetl.event AS e ON e.execution_id = told.execution_id AND e.event_id = told.event_id
LEFT JOIN noetl.subscription_runtime AS r ON r.subscription_id = e.execution_id
WHERE e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
    AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED');

-- name: last_events_before
-- The last lifecycle event of each subscription ($1) for somebody who has read a gap ($2 seen, $3 target) up to the place
-- ($4, $5).
SELECT asked.execution_id,
    (
        SELECT e.event_id
        FROM noetl.event AS e
        WHERE e.execution_id = asked.execution_id
            AND e.event_type IN (
                'subscription.registered', 'subscription.activated', 'subscription.paused',
                'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
            )
            AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
            AND (
                pg_visible_in_snapshot(e.xact_id, $2::text::pg_snapshot)
                OR (e.xact_id, e.event_id) <= ($4::xid8, $5::bigint)
                AND pg_visible_in_snapshot(e.xact_id, $3::text::pg_snapshot)
            )
        ORDER BY e.event_id DESC
        LIMIT 1
    ) AS event_id
FROM unnest($1::bigint[]) AS asked (execution_id);

-- name: list_lifecycle_events
-- A page of a subscription's lifecycle behind an event. $1 the subscription, $2 the event, $3 how many.
SELECT e.execution_id AS subscription_id,
    COALESCE(
        NULLIF(e.node_name, ''),
        (SELECT c.path FROM noetl.catalog AS c WHERE c.catalog_id = e.catalog_id),
        ''
    ) AS path,
    e.catalog_id,
    e.status AS state,
    e.event_type,
    e.event_id,
    e.created_at,
    e.meta ->> 'actor' AS actor,
    e.meta ->> 'reason' AS reason,
    e.meta ->> 'request_id' AS request_id
FROM noetl.event AS e
WHERE e.execution_id = $1
    AND e.event_id > $2
    AND e.event_type IN (
        'subscription.registered', 'subscription.activated', 'subscription.paused',
        'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
    )
    AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
ORDER BY e.event_id
LIMIT $3;

-- name: count_subscriptions
-- How many there are in each state, and how many of those still need a runtime whose lease has expired.
SELECT s.state,
    count(*) AS subscriptions,
    count(*) FILTER (WHERE r.lease_expires_at <= clock_timestamp()) AS runtimes_dead
FROM (
    SELECT DISTINCT ON (e.execution_id) e.execution_id AS subscription_id,
        e.status AS state
    FROM noetl.event AS e
    WHERE e.event_type IN (
            'subscription.registered', 'subscription.activated', 'subscription.paused',
            'subscription.resumed', 'subscription.draining', 'subscription.deactivated'
        )
        AND e.status IN ('REGISTERED', 'ACTIVE', 'PAUSED', 'DRAINING', 'DEACTIVATED')
    ORDER BY e.execution_id, e.event_id DESC
) AS s
LEFT JOIN noetl.subscription_runtime AS r
    ON r.subscription_id = s.subscription_id AND s.state <> 'DEACTIVATED'
GROUP BY s.state;
