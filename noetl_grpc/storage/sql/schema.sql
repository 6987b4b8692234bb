-- What the database's catalogs say about the schema, and the statements that depend on which partitions exist.
-- DDL takes no parameters, so PostgreSQL itself spells those statements out (format()), and we run what it returns.

-- name: existing_relations
SELECT n.nspname || '.' || c.relname AS name,
    c.relkind::text AS kind,
    pg_get_partkeydef(c.oid) AS partition_key
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'noetl' AND c.relkind IN ('r', 'p', 'S', 'v') AND NOT c.relispartition;

-- name: existing_functions
SELECT n.nspname || '.' || p.proname AS name
FROM pg_proc AS p
JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = 'noetl';

-- name: existing_columns
SELECT n.nspname || '.' || c.relname AS table_name,
    a.attname::text AS name,
    format_type(a.atttypid, a.atttypmod) AS type,
    a.attnotnull AS not_null,
    pg_get_expr(d.adbin, d.adrelid) AS default_value
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE n.nspname = 'noetl' AND c.relkind IN ('r', 'p') AND NOT c.relispartition;

-- name: existing_indexes
SELECT n.nspname || '.' || t.relname AS table_name,
    c.relname::text AS name,
    i.indisunique AS is_unique,
    i.indisvalid AS is_valid,
    substring(pg_get_indexdef(i.indexrelid) FROM ' USING (.*)$') AS definition
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
JOIN pg_namespace AS n ON n.oid = t.relnamespace
WHERE n.nspname = 'noetl' AND NOT t.relispartition;

-- name: existing_constraints
-- A constraint that was added NOT VALID still holds for what is written from then on.
SELECT n.nspname || '.' || t.relname AS table_name,
    regexp_replace(pg_get_constraintdef(k.oid), ' NOT VALID$', '') AS definition
FROM pg_constraint AS k
JOIN pg_class AS t ON t.oid = k.conrelid
JOIN pg_namespace AS n ON n.oid = t.relnamespace
WHERE n.nspname = 'noetl' AND NOT t.relispartition AND k.contype IN ('p', 'u', 'f', 'c');

-- name: existing_resources
SELECT name::text FROM noetl.resource WHERE name = ANY($1::text[]) LIMIT 100;

-- name: existing_privileges
-- Which of these privileges the session's role has; pairs of table and privilege.
SELECT wanted.table_name,
    wanted.privilege
FROM unnest($1::text[], $2::text[]) AS wanted (table_name, privilege)
JOIN pg_class AS c ON c.relname = split_part(wanted.table_name, '.', 2)
JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = split_part(wanted.table_name, '.', 1)
WHERE CASE
    WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, wanted.privilege)
    ELSE has_table_privilege(c.oid, wanted.privilege)
END;

-- name: rights
-- The server, and what the session's role may do at all; where there is no schema yet, in one of its own.
SELECT coalesce(
        has_schema_privilege(to_regnamespace('noetl')::oid, 'USAGE'),
        has_database_privilege(current_database(), 'CREATE')
    ) AS uses_schema,
    coalesce(
        has_schema_privilege(to_regnamespace('noetl')::oid, 'CREATE'),
        has_database_privilege(current_database(), 'CREATE')
    ) AS creates_tables,
    current_setting('server_version_num')::int AS server_version_num,
    current_setting('server_version') AS server_version,
    current_database()::text AS database_name,
    pg_is_in_recovery() AS is_standby;

-- name: role
SELECT quote_ident(current_user);

-- name: not_owned
-- Of these tables, the ones that the session's role does not own, itself or through membership.
SELECT n.nspname || '.' || c.relname AS name
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY($1::text[]) AND NOT pg_has_role(c.relowner, 'USAGE')
LIMIT 1000;

-- name: old_holders
-- Who holds a lock on the table or a partition of it for longer than a writer does. Autovacuum is left out:
-- PostgreSQL cancels it when it is in the way.
SELECT l.pid,
    a.application_name,
    extract(epoch FROM now() - min(a.xact_start))::float8 AS age_seconds
FROM pg_locks AS l
JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.granted
    AND l.pid <> pg_backend_pid()
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.relation IN (
        SELECT to_regclass($1::text)::oid
        UNION ALL
        SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass($1::text)
    )
    AND a.backend_type = 'client backend'
    AND a.xact_start < now() - interval '1 second'
GROUP BY l.pid, a.application_name
ORDER BY age_seconds DESC
LIMIT 5;

-- name: drops_of_unfinished_indexes
-- One statement for each index that an interrupted CREATE INDEX CONCURRENTLY left invalid: the one named $2 of
-- table $1, or those of its partitions. One that somebody is building just now is left alone.
SELECT format('DROP INDEX CONCURRENTLY IF EXISTS %I.%I', n.nspname, c.relname) AS statement
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits AS h ON h.inhrelid = t.oid
WHERE NOT i.indisvalid
    AND t.relkind = 'r'
    AND NOT c.relispartition
    AND (
        (t.oid = to_regclass($1::text) AND c.relname = $2::text)
        OR (h.inhparent = to_regclass($1::text) AND c.relname = left(t.relname || '_' || $2::text, 63))
    )
    AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index AS p WHERE p.index_relid = i.indexrelid)
ORDER BY 1;

-- name: builds_of_partition_indexes
-- One statement for each partition of table $1 that has no index like the one named $2, whose definition is $3.
SELECT format(
        'CREATE INDEX CONCURRENTLY IF NOT EXISTS %I ON %I.%I USING %s',
        left(t.relname || '_' || $2::text, 63), n.nspname, t.relname, $3::text
    ) AS statement
FROM pg_inherits AS h
JOIN pg_class AS t ON t.oid = h.inhrelid
JOIN pg_namespace AS n ON n.oid = t.relnamespace
WHERE h.inhparent = to_regclass($1::text)
    AND NOT EXISTS (
        SELECT FROM pg_index AS i
        WHERE i.indrelid = t.oid
            AND i.indisvalid
            AND substring(pg_get_indexdef(i.indexrelid) FROM ' USING (.*)$') = $3::text
    )
ORDER BY t.relname;

-- name: attachments_of_partition_indexes
-- One statement for each partition of table $1 whose index is not yet a part of the index named $2. The last one
-- makes that index valid.
SELECT DISTINCT ON (t.relname)
    format('ALTER INDEX %I.%I ATTACH PARTITION %I.%I', n.nspname, parent.relname, cn.nspname, c.relname) AS statement
FROM pg_class AS parent
JOIN pg_namespace AS n ON n.oid = parent.relnamespace
JOIN pg_index AS pi ON pi.indexrelid = parent.oid
JOIN pg_inherits AS h ON h.inhparent = pi.indrelid
JOIN pg_class AS t ON t.oid = h.inhrelid
JOIN pg_index AS i ON i.indrelid = t.oid AND i.indisvalid
JOIN pg_class AS c ON c.oid = i.indexrelid AND NOT c.relispartition
JOIN pg_namespace AS cn ON cn.oid = c.relnamespace
WHERE pi.indrelid = to_regclass($1::text)
    AND parent.relname = $2::text
    AND substring(pg_get_indexdef(i.indexrelid) FROM ' USING (.*)$') = $3::text
    AND NOT EXISTS (
        SELECT FROM pg_inherits AS attached
        JOIN pg_index AS ai ON ai.indexrelid = attached.inhrelid
        WHERE attached.inhparent = parent.oid AND ai.indrelid = t.oid
    )
ORDER BY t.relname, c.relname;

-- name: applied_versions
SELECT version FROM noetl.schema_version ORDER BY version LIMIT 1000;

-- name: record_version
INSERT INTO noetl.schema_version (version, name)
VALUES ($1, $2)
ON CONFLICT (version) DO NOTHING;

-- name: event_partitions
-- The bounds of a range are NULL where there is none; the default partition has neither.
SELECT c.relname::text AS name,
    pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT' AS is_default,
    substring(pg_get_expr(c.relpartbound, c.oid) FROM 'FROM \(''?(-?\d+)''?\)')::bigint AS lower,
    substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?(-?\d+)''?\)')::bigint AS upper
FROM pg_inherits AS h
JOIN pg_class AS c ON c.oid = h.inhrelid
WHERE h.inhparent = to_regclass('noetl.event')
ORDER BY lower NULLS FIRST;

-- name: event_ownership
-- Whether noetl.event is partitioned by ranges, and whether the session's role owns it.
SELECT p.partstrat = 'r' AS is_by_range,
    pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE') AS is_owned
FROM pg_class AS c
JOIN pg_partitioned_table AS p ON p.partrelid = c.oid
WHERE c.oid = to_regclass('noetl.event');

-- name: addition_of_partition
-- The statements that add the partition $1 for ids from $2 up to $3. Attaching a table locks the log only against
-- other DDL, where CREATE TABLE … PARTITION OF would lock out every reader and writer. The owner of the log also
-- owns the partition, whoever makes it.
SELECT concat_ws(
        E';\n',
        format(
            'CREATE TABLE noetl.%I (LIKE noetl.event INCLUDING DEFAULTS INCLUDING CONSTRAINTS'
            ' INCLUDING STORAGE INCLUDING COMPRESSION)',
            $1::text
        ),
        format('ALTER TABLE noetl.%I OWNER TO %I', $1::text, pg_get_userbyid(c.relowner)),
        format(
            'ALTER TABLE noetl.event ATTACH PARTITION noetl.%I FOR VALUES FROM (%s) TO (%s)',
            $1::text, $2::bigint, $3::bigint
        )
    ) AS statements
FROM pg_class AS c
WHERE c.oid = to_regclass('noetl.event');

-- name: addition_of_filled_partition
-- The same where the default partition $4 holds events of that range: they move in the same transaction.
SELECT concat_ws(
        E';\n',
        'BEGIN',
        'LOCK TABLE noetl.event IN ACCESS EXCLUSIVE MODE',
        format(
            'CREATE TABLE noetl.%I (LIKE noetl.event INCLUDING DEFAULTS INCLUDING CONSTRAINTS'
            ' INCLUDING STORAGE INCLUDING COMPRESSION)',
            $1::text
        ),
        format('ALTER TABLE noetl.%I OWNER TO %I', $1::text, pg_get_userbyid(c.relowner)),
        format(
            E'WITH moved AS (\n    DELETE FROM noetl.%I WHERE execution_id >= %s AND execution_id < %s RETURNING *\n)'
            '\nINSERT INTO noetl.%I (%s)\nSELECT %s FROM moved',
            $4::text, $2::bigint, $3::bigint, $1::text, a.names, a.names
        ),
        format(
            'ALTER TABLE noetl.event ATTACH PARTITION noetl.%I FOR VALUES FROM (%s) TO (%s)',
            $1::text, $2::bigint, $3::bigint
        ),
        'COMMIT;'
    ) AS statements
FROM pg_class AS c
CROSS JOIN LATERAL (
    SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) AS names
    FROM pg_attribute
    WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
) AS a
WHERE c.oid = to_regclass('noetl.event');

-- name: holds_events_outside_partitions
-- Whether events that belong into a range have gone to where no partition was.
SELECT EXISTS (
    SELECT FROM noetl.event
    WHERE execution_id >= $1 AND execution_id < $2
);
