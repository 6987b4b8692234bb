-- Catalog entries. They belong to the cluster database; a shard needs a copy of each that its events refer to.

-- name: known_catalog_ids
SELECT c.catalog_id
FROM noetl.catalog AS c
WHERE c.catalog_id = ANY($1::bigint[]);

-- name: read_catalog_entries
SELECT c.catalog_id,
    c.path,
    c.version,
    c.kind,
    c.content,
    c.layout,
    c.payload,
    c.meta,
    c.created_at,
    c.credential_id,
    r.meta AS resource_meta
FROM noetl.catalog AS c
JOIN noetl.resource AS r ON r.name = c.kind
WHERE c.catalog_id = ANY($1::bigint[]);

-- name: copy_catalog_resource
INSERT INTO noetl.resource (name, meta)
VALUES ($1, $2::jsonb)
ON CONFLICT DO NOTHING;

-- name: copy_catalog_entry
INSERT INTO noetl.catalog (catalog_id, path, version, kind, content, layout, payload, meta, created_at, credential_id)
VALUES ($1, $2, $3, $4, $5, $6::jsonb, $7::jsonb, $8::jsonb, $9, $10)
ON CONFLICT DO NOTHING;
