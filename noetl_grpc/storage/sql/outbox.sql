-- Words used below. A row is *live* while it is neither PUBLISHED nor dead (the predicate of idx_outbox_undelivered);
-- it is *due* when it may be handed out: not claimed and its time has come, or claimed and the lease over.
-- `size` is what a row weighs in an answer: exact if asked for or where the stored form may be far smaller, else near.

-- name: enqueue_messages
-- Insert messages in their order and return the new rows; a message whose row exists already gives none.
INSERT INTO noetl.outbox (execution_id, event_id, subject, payload, payload_codec, headers, available_at)
SELECT message.execution_id,
       message.event_id,
       message.subject,
       message.payload::jsonb,
       message.payload_codec,
       message.headers::jsonb,
       coalesce(message.available_at, now())
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::timestamptz[])
    WITH ORDINALITY AS message (
        execution_id, event_id, subject, payload, payload_codec, headers, available_at, place
    )
ORDER BY message.place
ON CONFLICT DO NOTHING
RETURNING outbox_id, execution_id, event_id;

-- name: parse_json
-- Fails when one of the texts is no JSON that can be stored.
SELECT max(length(text::jsonb::text))
FROM unnest($1::text[]) AS text;

-- name: find_messages
-- The rows of these messages, however old; each branch has a unique index of its own.
SELECT o.outbox_id, o.execution_id, o.event_id
FROM unnest($1::bigint[], $2::bigint[]) AS message (execution_id, event_id)
JOIN noetl.outbox AS o ON o.execution_id = message.execution_id AND o.event_id = message.event_id
UNION ALL
SELECT o.outbox_id, o.execution_id, o.event_id
FROM noetl.outbox AS o
WHERE o.execution_id IS NULL AND o.event_id = ANY($3::bigint[]);

-- name: claim_rows
-- Take up to $1 due rows of at most $2 bytes, the oldest first, for the claim $3 and the time $4; $5 allows one row that is
-- too large. Only rows from $6 on are looked at, and expired leases only with $7; $8 asks for exact sizes. SKIP LOCKED lets
-- claimers work side by side; ANY(ARRAY(…)) keeps the plan good when it is generic.
WITH expired AS MATERIALIZED (
    SELECT outbox_id,
           CASE
               WHEN NOT $8::boolean AND pg_column_size(payload) < 8192 AND pg_column_compression(payload) IS NULL
               THEN pg_column_size(payload)
               ELSE octet_length(payload::text)
           END + coalesce(octet_length(subject), 0) + coalesce(octet_length(headers::text), 0) AS size
    FROM noetl.outbox
    WHERE $7::boolean AND status = 'IN_FLIGHT' AND lease_expires_at <= now()
    ORDER BY lease_expires_at
    LIMIT $1
    FOR UPDATE SKIP LOCKED
),
waiting AS MATERIALIZED (
    SELECT outbox_id,
           CASE
               WHEN NOT $8::boolean AND pg_column_size(payload) < 8192 AND pg_column_compression(payload) IS NULL
               THEN pg_column_size(payload)
               ELSE octet_length(payload::text)
           END + coalesce(octet_length(subject), 0) + coalesce(octet_length(headers::text), 0) AS size
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL AND available_at <= now() AND outbox_id >= $6::bigint
    ORDER BY outbox_id
    LIMIT $1
    FOR UPDATE SKIP LOCKED
),
fitting AS (
    SELECT outbox_id
    FROM (
        SELECT outbox_id, row_number() OVER oldest_first AS place, sum(size) OVER oldest_first AS bytes
        FROM (SELECT outbox_id, size FROM expired UNION ALL SELECT outbox_id, size FROM waiting) AS due
        WINDOW oldest_first AS (ORDER BY outbox_id)
    ) AS measured
    WHERE place <= $1 AND (bytes <= $2::bigint OR (place = 1 AND $5::boolean))
)
UPDATE noetl.outbox AS o
SET status = 'IN_FLIGHT',
    attempts = o.attempts + 1,
    claim_token = $3::uuid,
    lease_expires_at = now() + $4::interval,
    locked_at = now(),
    updated_at = now()
WHERE o.outbox_id = ANY(ARRAY(SELECT outbox_id FROM fitting))
RETURNING o.outbox_id, o.event_id, o.execution_id, o.subject, o.payload, o.headers, o.attempts, o.lease_expires_at;

-- name: mark_published
-- Publish the rows $1 that the claim $2 holds. The token stays, so that a repeated mark is known to be one.
UPDATE noetl.outbox
SET status = 'PUBLISHED',
    published_at = now(),
    updated_at = now(),
    last_error = NULL,
    lease_expires_at = NULL
WHERE outbox_id = ANY($1::bigint[]) AND status = 'IN_FLIGHT' AND claim_token = $2::uuid;

-- name: mark_published_by_anyone
-- Publish the rows $1 whoever holds them, dead ones too, unless they are published already.
UPDATE noetl.outbox
SET status = 'PUBLISHED',
    published_at = now(),
    updated_at = now(),
    last_error = NULL,
    lease_expires_at = NULL,
    dead_at = NULL
WHERE outbox_id = ANY($1::bigint[]) AND status <> 'PUBLISHED';

-- name: read_holders
-- Who holds the rows $1, or held them when they were published.
SELECT outbox_id, status, claim_token
FROM noetl.outbox
WHERE outbox_id = ANY($1::bigint[]);

-- name: lock_for_failure
-- The rows $1 as they are now, locked in one order so that two callers never wait for each other.
SELECT outbox_id, execution_id, status, claim_token, attempts, dead_at IS NOT NULL AS dead
FROM noetl.outbox
WHERE outbox_id = ANY($1::bigint[])
ORDER BY outbox_id
FOR UPDATE;

-- name: fail_rows
-- Write failures down: when each row is due again, or that it is dead.
UPDATE noetl.outbox AS o
SET status = 'FAILED',
    available_at = CASE WHEN failure.dead THEN 'infinity' ELSE now() + make_interval(secs => failure.delay_seconds) END,
    dead_at = CASE WHEN failure.dead THEN coalesce(o.dead_at, now()) END,
    last_error = failure.error,
    claim_token = NULL,
    lease_expires_at = NULL,
    updated_at = now()
FROM unnest($1::bigint[], $2::text[], $3::integer[], $4::boolean[]) AS failure (outbox_id, error, delay_seconds, dead)
WHERE o.outbox_id = failure.outbox_id;

-- name: release_younger
-- Give back what the claims $3 hold of the executions $1 behind the rows $2, but not the rows $4.
UPDATE noetl.outbox AS o
SET status = CASE WHEN o.last_error IS NULL THEN 'PENDING' ELSE 'FAILED' END,
    attempts = greatest(o.attempts - 1, 0),
    claim_token = NULL,
    lease_expires_at = NULL,
    updated_at = now()
WHERE o.outbox_id = ANY(ARRAY(
    SELECT younger.outbox_id
    FROM unnest($1::bigint[], $2::bigint[], $3::uuid[]) AS older (execution_id, outbox_id, claim_token)
    CROSS JOIN LATERAL (
        SELECT y.outbox_id, y.claim_token
        FROM noetl.outbox AS y
        WHERE y.execution_id = older.execution_id
          AND y.outbox_id > older.outbox_id
          AND y.status IN ('PENDING', 'FAILED', 'IN_FLIGHT')
          AND y.dead_at IS NULL
          AND y.claim_token = older.claim_token
        ORDER BY y.execution_id, y.outbox_id
        FOR UPDATE
    ) AS younger
    WHERE NOT younger.outbox_id = ANY($4::bigint[])
))
AND o.status = 'IN_FLIGHT'
RETURNING o.outbox_id;

-- name: extend_rows
-- Hold the rows $1 of the claim $2 for the time $3 from now on.
UPDATE noetl.outbox
SET lease_expires_at = now() + $3::interval,
    updated_at = now()
WHERE outbox_id = ANY($1::bigint[]) AND status = 'IN_FLIGHT' AND claim_token = $2::uuid
RETURNING outbox_id, lease_expires_at;

-- name: extend_claim
-- Hold all rows of the claim $1 for the time $2 from now on. No lease of a claim ends before the claim was made ($3), which
-- keeps the walk over the leases short.
UPDATE noetl.outbox
SET lease_expires_at = now() + $2::interval,
    updated_at = now()
WHERE status = 'IN_FLIGHT' AND lease_expires_at >= $3::timestamptz AND claim_token = $1::uuid
RETURNING outbox_id, lease_expires_at;

-- name: release_rows
-- Give back the rows $1 of the claim $2 as if they had not been claimed.
UPDATE noetl.outbox
SET status = CASE WHEN last_error IS NULL THEN 'PENDING' ELSE 'FAILED' END,
    attempts = greatest(attempts - 1, 0),
    claim_token = NULL,
    lease_expires_at = NULL,
    updated_at = now()
WHERE outbox_id = ANY($1::bigint[]) AND status = 'IN_FLIGHT' AND claim_token = $2::uuid
RETURNING outbox_id, execution_id;

-- name: release_claim
-- Give back all rows of the claim $1, made at $2, as if they had not been claimed.
UPDATE noetl.outbox
SET status = CASE WHEN last_error IS NULL THEN 'PENDING' ELSE 'FAILED' END,
    attempts = greatest(attempts - 1, 0),
    claim_token = NULL,
    lease_expires_at = NULL,
    updated_at = now()
WHERE status = 'IN_FLIGHT' AND lease_expires_at >= $2::timestamptz AND claim_token = $1::uuid
RETURNING outbox_id;

-- name: abandon_rows
-- Give back the rows $1 of the claim $2 with their attempt kept; those with $3 attempts (0 is never) are dead with the
-- error $4, because they may be what broke their consumer.
UPDATE noetl.outbox
SET status = CASE WHEN last_error IS NULL AND NOT ($3::integer > 0 AND attempts >= $3) THEN 'PENDING' ELSE 'FAILED' END,
    available_at = CASE WHEN $3 > 0 AND attempts >= $3 THEN 'infinity' ELSE available_at END,
    dead_at = CASE WHEN $3 > 0 AND attempts >= $3 THEN now() END,
    last_error = CASE WHEN $3 > 0 AND attempts >= $3 THEN $4::text ELSE last_error END,
    claim_token = NULL,
    lease_expires_at = NULL,
    updated_at = now()
WHERE outbox_id = ANY($1::bigint[]) AND status = 'IN_FLIGHT' AND claim_token = $2::uuid
RETURNING outbox_id, dead_at IS NOT NULL AS dead;

-- name: count_pending
-- How many rows a claim without limit would get, counted up to $1; each branch is an index of its own.
SELECT (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM noetl.outbox
        WHERE status IN ('PENDING', 'FAILED') AND available_at <= now()
        LIMIT $1
    ) AS due
) + (
    SELECT count(*)
    FROM (
        SELECT 1
        FROM noetl.outbox
        WHERE status = 'IN_FLIGHT' AND lease_expires_at <= now()
        LIMIT $1
    ) AS expired
) AS pending;

-- name: read_stats
-- Every undelivered row, counted once. A dead row is due at infinity, so the first branch need not look at dead_at.
SELECT (
           SELECT count(*)
           FROM noetl.outbox
           WHERE status IN ('PENDING', 'FAILED') AND available_at <= now()
       ) AS pending,
       (
           SELECT count(*)
           FROM noetl.outbox
           WHERE status IN ('PENDING', 'FAILED') AND available_at > now() AND dead_at IS NULL
       ) AS delayed,
       claimed.in_flight,
       claimed.expired,
       (
           SELECT count(*)
           FROM noetl.outbox
           WHERE dead_at IS NOT NULL
       ) AS dead,
       now() - least(
           (SELECT min(available_at) FROM noetl.outbox WHERE status = 'PENDING' AND available_at <= now()),
           (SELECT min(available_at) FROM noetl.outbox WHERE status = 'FAILED' AND available_at <= now())
       ) AS oldest_pending_age
FROM (
    SELECT count(*) FILTER (WHERE lease_expires_at <= now()) AS expired,
           count(*) FILTER (WHERE lease_expires_at <= now() IS NOT TRUE) AS in_flight
    FROM noetl.outbox
    WHERE status = 'IN_FLIGHT'
) AS claimed;
