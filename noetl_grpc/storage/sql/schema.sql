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
