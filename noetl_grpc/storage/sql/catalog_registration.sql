-- NoETL's own catalog (noetl.catalog): what `noetl-grpc dev` registers there, having no catalog service.

-- name: lock_catalog
-- Against other registrars, whoever they are; readers and writers of events go on.
LOCK TABLE noetl.catalog IN SHARE ROW EXCLUSIVE MODE;

-- name: add_resource_kind
INSERT INTO noetl.resource (name)
VALUES ($1)
ON CONFLICT (name) DO NOTHING;

-- name: register_catalog_entry
-- The next version of $1, unless the newest one has the same content; returns the version, or no row.
INSERT INTO noetl.catalog (path, version, kind, content, layout, payload, meta)
SELECT $1::text,
    coalesce(max(c.version), 0) + 1,
    $2::text,
    $3::text,
    $4::jsonb,
    $5::jsonb,
    $6::jsonb
FROM noetl.catalog AS c
WHERE c.path = $1
HAVING NOT coalesce((array_agg(c.content ORDER BY c.version DESC))[1] = $3, false)
RETURNING version;
