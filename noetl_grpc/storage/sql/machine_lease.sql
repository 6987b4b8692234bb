-- name: take_machine_id
-- Lease the lowest machine id that nobody holds, and learn how far its last holder may have used its time.
-- Two takers at once: one finds the lease renewed and gets no row. $1 holder, $2 seconds.
INSERT INTO noetl.machine_lease AS mine (machine_id, holder, valid_until, used_until_ms)
SELECT free.machine_id, $1::text, clock_timestamp() + make_interval(secs => $2::double precision), 0
FROM generate_series(0, 1023) AS free (machine_id)
WHERE NOT EXISTS (
    SELECT 1
    FROM noetl.machine_lease AS taken
    WHERE taken.machine_id = free.machine_id AND taken.valid_until > clock_timestamp()
)
ORDER BY free.machine_id
LIMIT 1
ON CONFLICT (machine_id) DO UPDATE
SET holder = excluded.holder,
    valid_until = excluded.valid_until
WHERE mine.valid_until <= clock_timestamp()
RETURNING machine_id, used_until_ms;

-- name: count_machine_ids
-- How many machine ids are held.
SELECT count(*)
FROM noetl.machine_lease
WHERE valid_until > clock_timestamp();

-- name: take_this_machine_id
-- Take over a configured machine id, whoever holds it: its previous holder notices at its next renewal and stops.
-- $1 machine id, $2 holder, $3 seconds.
INSERT INTO noetl.machine_lease AS mine (machine_id, holder, valid_until, used_until_ms)
VALUES ($1, $2::text, clock_timestamp() + make_interval(secs => $3::double precision), 0)
ON CONFLICT (machine_id) DO UPDATE
SET holder = excluded.holder,
    valid_until = excluded.valid_until
RETURNING machine_id, used_until_ms;

-- name: renew_machine_id
-- Prolong the lease and write ahead how far ids may be used from now on.
-- $1 machine id, $2 holder, $3 seconds, $4 milliseconds since the Unix epoch.
UPDATE noetl.machine_lease
SET valid_until = clock_timestamp() + make_interval(secs => $3::double precision),
    used_until_ms = greatest(used_until_ms, $4::bigint)
WHERE machine_id = $1 AND holder = $2::text
RETURNING used_until_ms;

-- name: release_machine_id
-- Give the id back, and with it the part of its time that was not used. $3 last millisecond used.
UPDATE noetl.machine_lease
SET valid_until = '-infinity',
    used_until_ms = $3::bigint
WHERE machine_id = $1 AND holder = $2::text;
