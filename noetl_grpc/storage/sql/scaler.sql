-- What an autoscaler asks of the outbox, at a cost that does not follow the backlog.

-- name: count_waiting
-- How many rows a claim would get now and how long the first of them has waited, counted up to $1 rows.
-- The index holds no due time, so rows that are not due yet must be looked at to be passed by. Hence a bounded look
-- at the oldest and, where those do not suffice, at the youngest. Where rows between them were left unseen, the
-- answer is never 0: nobody may be scaled away from a backlog.
WITH oldest AS MATERIALIZED (
    SELECT outbox_id, available_at
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL
    ORDER BY outbox_id
    LIMIT $1
),
youngest AS MATERIALIZED (
    SELECT available_at
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL
        AND outbox_id > (SELECT max(outbox_id) FROM oldest)
        AND (SELECT count(*) FROM oldest) = $1
        AND (SELECT count(*) FROM oldest WHERE available_at <= now()) < $1
    ORDER BY outbox_id DESC
    LIMIT $1
),
expired AS MATERIALIZED (
    SELECT lease_expires_at
    FROM noetl.outbox
    WHERE status = 'IN_FLIGHT' AND lease_expires_at <= now()
    ORDER BY lease_expires_at
    LIMIT $1
),
waiting AS (
    SELECT available_at AS since
    FROM oldest
    WHERE available_at <= now()
    UNION ALL
    SELECT available_at
    FROM youngest
    WHERE available_at <= now()
    UNION ALL
    SELECT lease_expires_at
    FROM expired
)
SELECT
    greatest(
        least(count(*), $1),
        CASE WHEN (SELECT count(*) FROM youngest) = $1 THEN 1 ELSE 0 END
    ) AS rows_waiting,
    coalesce(greatest(extract(epoch FROM now() - min(since)), 0), 0)::double precision AS oldest_seconds
FROM waiting;
