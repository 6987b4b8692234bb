-- Words used below. A row is *live* while it is neither PUBLISHED nor dead (the predicate of idx_outbox_undelivered);
-- it is *due* when it may be handed out: not claimed and its time has come, or claimed and the lease over.
-- Where rows are named by their ids, CASE hides the status from the planner: statistics from a moment when nothing was in
-- flight make the index of leases look tiny, and while an old snapshot is held it keeps an entry of every row ever claimed.
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
-- Take up to $1 due rows of at most $2 bytes, the oldest first (of more expired ones than that, those whose lease ended
-- first), for the claim $3 and the time $4; $5 allows one row that is too large. Only rows from $6 on are looked at, and
-- expired leases only with $7; $8 asks for exact sizes. SKIP LOCKED lets claimers work side by side; ANY(ARRAY(…)) keeps the
-- plan good when it is generic. Rows are ranked only where they might not all fit, which is rare.
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
WHERE o.outbox_id = ANY(
    CASE
        WHEN NOT EXISTS (SELECT 1 FROM expired) AND (SELECT sum(size) FROM waiting) <= $2
        THEN ARRAY(SELECT outbox_id FROM waiting)
        ELSE ARRAY(SELECT outbox_id FROM fitting)
    END
)
RETURNING o.outbox_id, o.event_id, o.execution_id, o.subject, o.payload, o.headers, o.attempts, o.lease_expires_at;

-- name: lock_heads
-- Lock the oldest live row of up to $1 executions where it is due. The walk jumps from execution to execution over
-- idx_outbox_undelivered, begins behind $2 and looks at $3 executions at most; one with many rows costs no more than one with
-- a single row. Whoever holds an execution's head owns the execution until the transaction ends.
WITH RECURSIVE lane (execution_id, outbox_id, is_due, walked, found) AS (
    (
        SELECT o.execution_id, o.outbox_id, due.now_, 1, due.now_::integer
        FROM noetl.outbox AS o
        CROSS JOIN LATERAL (
            SELECT CASE WHEN o.status = 'IN_FLIGHT' THEN o.lease_expires_at ELSE o.available_at END <= now() IS TRUE
        ) AS due (now_)
        WHERE o.status IN ('PENDING', 'FAILED', 'IN_FLIGHT') AND o.dead_at IS NULL AND o.execution_id > $2::bigint
        ORDER BY o.execution_id, o.outbox_id
        LIMIT 1
    )
    UNION ALL
    SELECT head.execution_id, head.outbox_id, head.is_due, lane.walked + 1, lane.found + head.is_due::integer
    FROM lane
    CROSS JOIN LATERAL (
        SELECT o.execution_id,
               o.outbox_id,
               CASE WHEN o.status = 'IN_FLIGHT' THEN o.lease_expires_at ELSE o.available_at END <= now() IS TRUE AS is_due
        FROM noetl.outbox AS o
        WHERE o.status IN ('PENDING', 'FAILED', 'IN_FLIGHT') AND o.dead_at IS NULL
          AND o.execution_id > lane.execution_id
        ORDER BY o.execution_id, o.outbox_id
        LIMIT 1
    ) AS head
    WHERE lane.walked < $3::integer AND lane.found < $1::integer
),
walk AS MATERIALIZED (
    SELECT execution_id, outbox_id, is_due, walked, found
    FROM lane
),
head AS MATERIALIZED (
    SELECT o.execution_id, o.outbox_id
    FROM noetl.outbox AS o
    WHERE o.outbox_id = ANY(ARRAY(SELECT outbox_id FROM walk WHERE is_due))
      AND CASE o.status
              WHEN 'IN_FLIGHT' THEN o.lease_expires_at
              WHEN 'PUBLISHED' THEN NULL
              ELSE o.available_at
          END <= now()
      AND o.dead_at IS NULL
    FOR UPDATE SKIP LOCKED
)
SELECT coalesce((SELECT array_agg(execution_id ORDER BY outbox_id) FROM head), '{}') AS execution_ids,
       coalesce((SELECT array_agg(outbox_id ORDER BY outbox_id) FROM head), '{}') AS outbox_ids,
       (SELECT min(execution_id) FROM walk) AS walked_from,
       (SELECT max(execution_id) FROM walk) AS walked_to,
       coalesce((SELECT max(walked) < $3 AND max(found) < $1 FROM walk), true) AS at_end;

-- name: claim_runs
-- Take the due runs of the executions $1 from their locked heads $2 on, at most $4 rows and $6 bytes, $5 rows of one
-- execution, for the claim $3 and the time $7; $8 allows one row that is too large, $9 asks for exact sizes. It must be a
-- statement of its own behind lock_heads: its snapshot is younger than the locks. A row that somebody else has locked ends
-- its run, and so does a head that is no longer the first. It never waits for a lock, so it can't deadlock.
WITH candidate AS MATERIALIZED (
    SELECT lane.execution_id, lane.head, live.outbox_id
    FROM unnest($1::bigint[], $2::bigint[]) AS lane (execution_id, head)
    CROSS JOIN LATERAL (
        SELECT o.outbox_id
        FROM noetl.outbox AS o
        WHERE o.status IN ('PENDING', 'FAILED', 'IN_FLIGHT') AND o.dead_at IS NULL
          AND o.execution_id = lane.execution_id
        ORDER BY o.execution_id, o.outbox_id
        LIMIT $5
    ) AS live
),
due AS MATERIALIZED (
    SELECT o.outbox_id,
           CASE
               WHEN NOT $9::boolean AND pg_column_size(payload) < 8192 AND pg_column_compression(payload) IS NULL
               THEN pg_column_size(payload)
               ELSE octet_length(payload::text)
           END + coalesce(octet_length(subject), 0) + coalesce(octet_length(headers::text), 0) AS size
    FROM noetl.outbox AS o
    WHERE o.outbox_id = ANY(ARRAY(SELECT outbox_id FROM candidate))
      AND CASE o.status
              WHEN 'IN_FLIGHT' THEN o.lease_expires_at
              WHEN 'PUBLISHED' THEN NULL
              ELSE o.available_at
          END <= now()
      AND o.dead_at IS NULL
    FOR UPDATE SKIP LOCKED
),
run AS (
    SELECT candidate.outbox_id,
           due.size,
           bool_and(due.outbox_id IS NOT NULL) OVER oldest_first
           AND first_value(candidate.outbox_id) OVER oldest_first = candidate.head AS is_gapless
    FROM candidate
    LEFT JOIN due ON due.outbox_id = candidate.outbox_id
    WINDOW oldest_first AS (PARTITION BY candidate.execution_id ORDER BY candidate.outbox_id)
),
fitting AS (
    SELECT outbox_id
    FROM (
        SELECT outbox_id, row_number() OVER oldest_first AS place, sum(size) OVER oldest_first AS bytes
        FROM run
        WHERE is_gapless
        WINDOW oldest_first AS (ORDER BY outbox_id)
    ) AS measured
    WHERE place <= $4 AND (bytes <= $6::bigint OR (place = 1 AND $8::boolean))
)
UPDATE noetl.outbox AS o
SET status = 'IN_FLIGHT',
    attempts = o.attempts + 1,
    claim_token = $3::uuid,
    lease_expires_at = now() + $7::interval,
    locked_at = now(),
    updated_at = now()
WHERE o.outbox_id = ANY(ARRAY(SELECT outbox_id FROM fitting))
RETURNING o.outbox_id, o.event_id, o.execution_id, o.subject, o.payload, o.headers, o.attempts, o.lease_expires_at;

-- name: claim_rows_without_execution
-- As claim_rows, for rows that belong to no execution and so to no order; they stand at the end of idx_outbox_undelivered.
WITH due AS MATERIALIZED (
    SELECT outbox_id,
           CASE
               WHEN NOT $7::boolean AND pg_column_size(payload) < 8192 AND pg_column_compression(payload) IS NULL
               THEN pg_column_size(payload)
               ELSE octet_length(payload::text)
           END + coalesce(octet_length(subject), 0) + coalesce(octet_length(headers::text), 0) AS size
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED', 'IN_FLIGHT') AND dead_at IS NULL
      AND execution_id IS NULL AND outbox_id >= $6::bigint
      AND CASE WHEN status = 'IN_FLIGHT' THEN lease_expires_at ELSE available_at END <= now()
    ORDER BY execution_id, outbox_id
    LIMIT $1
    FOR UPDATE SKIP LOCKED
),
fitting AS (
    SELECT outbox_id
    FROM (
        SELECT outbox_id, row_number() OVER oldest_first AS place, sum(size) OVER oldest_first AS bytes
        FROM due
        WINDOW oldest_first AS (ORDER BY outbox_id)
    ) AS measured
    WHERE bytes <= $2::bigint OR (place = 1 AND $5::boolean)
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

-- name: look_for_due
-- How long until the next row above $1 is due, not above zero if one is, NULL when none waits; expired leases count only
-- with $1 = 0. And the highest id of a waiting row, which is where the next look may begin.
SELECT extract(epoch FROM least(
           (
               SELECT min(available_at)
               FROM noetl.outbox
               WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL AND outbox_id > $1::bigint
           ),
           (SELECT min(lease_expires_at) FROM noetl.outbox WHERE status = 'IN_FLIGHT' AND $1 = 0)
       ) - now())::double precision AS seconds,
       (
           SELECT max(outbox_id)
           FROM noetl.outbox
           WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL
       ) AS highest;

-- name: mark_published
-- Publish the rows $1 that the claim $2 holds. The token stays, so that a repeated mark is known to be one.
UPDATE noetl.outbox
SET status = 'PUBLISHED',
    published_at = now(),
    updated_at = now(),
    last_error = NULL,
    lease_expires_at = NULL
WHERE outbox_id = ANY($1::bigint[]) AND CASE WHEN status = 'IN_FLIGHT' THEN claim_token = $2::uuid END;

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
AND CASE WHEN o.status = 'IN_FLIGHT' THEN true END
RETURNING o.outbox_id;

-- name: extend_rows
-- Hold the rows $1 of the claim $2 for the time $3 from now on.
UPDATE noetl.outbox
SET lease_expires_at = now() + $3::interval,
    updated_at = now()
WHERE outbox_id = ANY($1::bigint[]) AND CASE WHEN status = 'IN_FLIGHT' THEN claim_token = $2::uuid END
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
WHERE outbox_id = ANY($1::bigint[]) AND CASE WHEN status = 'IN_FLIGHT' THEN claim_token = $2::uuid END
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
WHERE outbox_id = ANY($1::bigint[]) AND CASE WHEN status = 'IN_FLIGHT' THEN claim_token = $2::uuid END
RETURNING outbox_id, dead_at IS NOT NULL AS dead;

-- name: count_pending
-- How many rows a claim without limit would get.
SELECT (
    SELECT count(*)
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL AND available_at <= now()
) + (
    SELECT count(*)
    FROM noetl.outbox
    WHERE status = 'IN_FLIGHT' AND lease_expires_at <= now()
) AS pending;

-- name: read_stats
-- Every undelivered row, counted once; each part reads an index that holds no published row.
SELECT waiting.pending,
       waiting.delayed,
       claimed.in_flight,
       claimed.expired,
       (
           SELECT count(*)
           FROM noetl.outbox
           WHERE dead_at IS NOT NULL
       ) AS dead,
       CASE WHEN waiting.pending > 0 THEN now() - waiting.due_first END AS oldest_pending_age
FROM (
    SELECT count(*) FILTER (WHERE available_at <= now()) AS pending,
           count(*) FILTER (WHERE available_at > now()) AS delayed,
           min(available_at) AS due_first
    FROM noetl.outbox
    WHERE status IN ('PENDING', 'FAILED') AND dead_at IS NULL
) AS waiting
CROSS JOIN (
    SELECT count(*) FILTER (WHERE lease_expires_at <= now()) AS expired,
           count(*) FILTER (WHERE lease_expires_at <= now() IS NOT TRUE) AS in_flight
    FROM noetl.outbox
    WHERE status = 'IN_FLIGHT'
) AS claimed;

-- name: list_dead_rows
-- Dead rows behind $6 that the filter ($1 to $5) lets through, up to $7 rows and $8 bytes, and without its body the first
-- that does not fit, because it tells that there are more. Bodies come with $9, unless no answer can hold one ($10).
SELECT outbox_id,
       event_id,
       execution_id,
       subject,
       CASE WHEN body_bytes <= $10::bigint AND (place = 1 OR bytes <= $8::bigint) THEN payload END AS payload,
       headers,
       attempts,
       coalesce(last_error, '') AS last_error,
       dead_at,
       size
FROM (
    SELECT o.*, sum(size) OVER oldest_first AS bytes, row_number() OVER oldest_first AS place
    FROM (
        SELECT outbox_id,
               event_id,
               execution_id,
               subject,
               payload,
               headers,
               attempts,
               last_error,
               dead_at,
               body.bytes AS body_bytes,
               coalesce(body.bytes, 0) + coalesce(octet_length(subject), 0) + coalesce(octet_length(headers::text), 0)
               + coalesce(octet_length(last_error), 0) AS size
        FROM noetl.outbox
        CROSS JOIN LATERAL (SELECT CASE WHEN $9::boolean THEN octet_length(payload::text) END) AS body (bytes)
        WHERE dead_at IS NOT NULL
          AND ($1::text = '' OR strpos(last_error, $1) > 0)
          AND ($2::text = '' OR subject = $2)
          AND ($3::bigint IS NULL OR execution_id = $3)
          AND ($4::timestamptz IS NULL OR dead_at < $4)
          AND (cardinality($5::bigint[]) = 0 OR outbox_id = ANY($5))
          AND outbox_id > $6::bigint
        ORDER BY outbox_id
        LIMIT $7
    ) AS o
    WINDOW oldest_first AS (ORDER BY outbox_id)
) AS page
WHERE place = 1 OR bytes - size <= $8
ORDER BY outbox_id;

-- name: count_dead_rows
-- How many dead rows the filter lets through.
SELECT count(*)
FROM noetl.outbox
WHERE dead_at IS NOT NULL
  AND ($1::text = '' OR strpos(last_error, $1) > 0)
  AND ($2::text = '' OR subject = $2)
  AND ($3::bigint IS NULL OR execution_id = $3)
  AND ($4::timestamptz IS NULL OR dead_at < $4)
  AND (cardinality($5::bigint[]) = 0 OR outbox_id = ANY($5));

-- name: requeue_dead_rows
-- Make up to $7 dead rows behind $6 that the filter lets through due again, as if they were new; the last error stays.
UPDATE noetl.outbox AS o
SET status = 'PENDING',
    attempts = 0,
    available_at = now(),
    dead_at = NULL,
    updated_at = now()
WHERE o.outbox_id = ANY(ARRAY(
    SELECT outbox_id
    FROM noetl.outbox
    WHERE dead_at IS NOT NULL
      AND ($1::text = '' OR strpos(last_error, $1) > 0)
      AND ($2::text = '' OR subject = $2)
      AND ($3::bigint IS NULL OR execution_id = $3)
      AND ($4::timestamptz IS NULL OR dead_at < $4)
      AND (cardinality($5::bigint[]) = 0 OR outbox_id = ANY($5))
      AND outbox_id > $6::bigint
    ORDER BY outbox_id
    LIMIT $7
    FOR UPDATE
))
RETURNING o.outbox_id;
