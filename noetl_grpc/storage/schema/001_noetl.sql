-- NoETL's own tables, as far as this service touches them, for a database that has none of them. Where a table
-- exists already it is left as it is; only columns and indexes that it lacks are added.
--
-- Everything is spelt the way PostgreSQL itself prints it (types, defaults, constraints, indexes): `migrate` and
-- `migrate --verify` compare these lines with the catalogs. One column or constraint per line; a deeper indented
-- line goes on with the one above it. "-- optional" says that the service can do without the statement below.

CREATE SCHEMA IF NOT EXISTS noetl;

CREATE SEQUENCE IF NOT EXISTS noetl.snowflake_seq;

-- Ids for hand-written SQL: milliseconds since 2024 << 23, shard 1 << 18, a counter below 1024. The service and
-- NoETL's own servers mint theirs in another layout (milliseconds << 22): the two are not comparable.
-- optional
CREATE OR REPLACE FUNCTION noetl.snowflake_id() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT ((floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - 1704067200000) << 23)
        | (1::bigint << 18)
        | (nextval('noetl.snowflake_seq') % 1024)
$$;

CREATE TABLE IF NOT EXISTS noetl.resource (
    name character varying NOT NULL,
    meta jsonb,
    CONSTRAINT resource_pkey PRIMARY KEY (name)
);

-- optional
INSERT INTO noetl.resource (name)
VALUES ('playbook'), ('credential'), ('mcp'), ('agent'), ('memory'), ('subscription')
ON CONFLICT (name) DO NOTHING;

CREATE SEQUENCE IF NOT EXISTS noetl.catalog_version_seq AS smallint;

CREATE TABLE IF NOT EXISTS noetl.catalog (
    catalog_id bigint NOT NULL DEFAULT noetl.snowflake_id(),
    path text NOT NULL,
    version smallint NOT NULL DEFAULT nextval('noetl.catalog_version_seq'::regclass),
    kind character varying NOT NULL,
    content text,
    layout jsonb,
    payload jsonb,
    meta jsonb,
    created_at timestamp without time zone NOT NULL DEFAULT CURRENT_TIMESTAMP,
    credential_id integer,
    CONSTRAINT catalog_path_version_key UNIQUE (path, version),
    CONSTRAINT catalog_pkey PRIMARY KEY (catalog_id),
    CONSTRAINT catalog_kind_fkey FOREIGN KEY (kind) REFERENCES noetl.resource(name)
);

ALTER SEQUENCE noetl.catalog_version_seq OWNED BY noetl.catalog.version;

CREATE TABLE IF NOT EXISTS noetl.event (
    execution_id bigint NOT NULL,
    catalog_id bigint NOT NULL,
    event_id bigint NOT NULL,
    parent_event_id bigint,
    parent_execution_id bigint,
    created_at timestamp without time zone NOT NULL DEFAULT CURRENT_TIMESTAMP,
    event_type character varying,
    node_id character varying,
    node_name character varying,
    node_type character varying,
    status character varying,
    duration double precision,
    context jsonb,
    result jsonb,
    meta jsonb,
    error text,
    current_index integer,
    current_item text,
    worker_id character varying,
    distributed_state character varying,
    context_key character varying,
    context_value text,
    trace_component jsonb,
    stack_trace text,
    tenant_id text NOT NULL DEFAULT 'default'::text,
    organization_id text NOT NULL DEFAULT 'default'::text,
    stream_id text,
    stream_version bigint,
    aggregate_id text,
    aggregate_type text,
    schema_name text,
    schema_version integer NOT NULL DEFAULT 1,
    event_time timestamp with time zone NOT NULL DEFAULT now(),
    ingest_time timestamp with time zone NOT NULL DEFAULT now(),
    producer text,
    causation_id text,
    correlation_id text,
    idempotency_key text,
    payload_ref jsonb,
    envelope_checksum text,
    prev_event_id bigint,
    command_id bigint,
    stage_id bigint,
    frame_id bigint,
    CONSTRAINT event_pkey PRIMARY KEY (execution_id, event_id),
    CONSTRAINT event_catalog_id_fkey FOREIGN KEY (catalog_id) REFERENCES noetl.catalog(catalog_id),
    CONSTRAINT chk_event_result_shape
        CHECK (((result IS NULL)
        OR ((jsonb_typeof(result) = 'object'::text)
        AND (result ? 'status'::text)
        AND (jsonb_typeof((result -> 'status'::text)) = 'string'::text)
        AND ((((result - 'status'::text) - 'reference'::text) - 'context'::text) = '{}'::jsonb)
        AND ((NOT (result ? 'reference'::text)) OR (jsonb_typeof((result -> 'reference'::text)) = 'object'::text))
        AND ((NOT (result ? 'context'::text)) OR (jsonb_typeof((result -> 'context'::text)) = 'object'::text)))))
) PARTITION BY RANGE (execution_id);

-- The bounds are NoETL's: snowflakes of dates in both id layouts. Later ranges are made when they draw near.
CREATE TABLE IF NOT EXISTS noetl.event_2026_gke PARTITION OF noetl.event
    FOR VALUES FROM ('569000000000000000') TO ('600000000000000000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q1 PARTITION OF noetl.event
    FOR VALUES FROM ('264905529753600000') TO ('297520437657600000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q1_standard PARTITION OF noetl.event
    FOR VALUES FROM ('529811059507200000') TO ('569000000000000000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q2 PARTITION OF noetl.event
    FOR VALUES FROM ('297520437657600000') TO ('330497733427200000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q2_standard PARTITION OF noetl.event
    FOR VALUES FROM ('600000000000000000') TO ('660995466854400000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q3 PARTITION OF noetl.event
    FOR VALUES FROM ('330497733427200000') TO ('363837417062400000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q3_standard PARTITION OF noetl.event
    FOR VALUES FROM ('660995466854400000') TO ('727674834124800000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q4 PARTITION OF noetl.event
    FOR VALUES FROM ('363837417062400000') TO ('397177100697600000');
CREATE TABLE IF NOT EXISTS noetl.event_2026_q4_standard PARTITION OF noetl.event
    FOR VALUES FROM ('727674834124800000') TO ('794354201395200000');
CREATE TABLE IF NOT EXISTS noetl.event_2027_h1 PARTITION OF noetl.event
    FOR VALUES FROM ('397177100697600000') TO ('462769304371200000');
CREATE TABLE IF NOT EXISTS noetl.event_2027_h1_standard PARTITION OF noetl.event
    FOR VALUES FROM ('794354201395200000') TO ('925538608742400000');
CREATE TABLE IF NOT EXISTS noetl.event_2027_h2 PARTITION OF noetl.event
    FOR VALUES FROM ('462769304371200000') TO ('529448671641600000');
CREATE TABLE IF NOT EXISTS noetl.event_2027_h2_standard PARTITION OF noetl.event
    FOR VALUES FROM ('925538608742400000') TO ('1058897343283200000');
CREATE TABLE IF NOT EXISTS noetl.event_2028_q1_standard PARTITION OF noetl.event
    FOR VALUES FROM ('1058897343283200000') TO ('1124137159091200000');
CREATE TABLE IF NOT EXISTS noetl.event_default PARTITION OF noetl.event DEFAULT;
CREATE TABLE IF NOT EXISTS noetl.event_pre_2026 PARTITION OF noetl.event
    FOR VALUES FROM (MINVALUE) TO ('264905529753600000');

-- Of NoETL's 34 indexes these serve its readers' and our lookups; the rest repeats the primary key or belongs to
-- its engine, whose own set-up adds what it wants.
-- optional
CREATE INDEX IF NOT EXISTS idx_event_catalog_id ON noetl.event USING btree (catalog_id);
-- optional
CREATE INDEX IF NOT EXISTS idx_event_created_at ON noetl.event USING btree (created_at);
-- optional
CREATE INDEX IF NOT EXISTS idx_event_exec_type ON noetl.event
    USING btree (execution_id, event_type, event_id DESC);
-- optional
CREATE INDEX IF NOT EXISTS idx_event_idempotency_key_column ON noetl.event
    USING btree (tenant_id, organization_id, idempotency_key)
    WHERE (idempotency_key IS NOT NULL);
-- optional
CREATE INDEX IF NOT EXISTS idx_event_parent_execution_id ON noetl.event USING btree (parent_execution_id);
-- optional
CREATE INDEX IF NOT EXISTS idx_event_playbook_init_event_id_desc ON noetl.event
    USING btree (event_id DESC)
    INCLUDE (execution_id, catalog_id, parent_execution_id, created_at)
    WHERE ((event_type)::text = 'playbook.initialized'::text);

CREATE SEQUENCE IF NOT EXISTS noetl.outbox_outbox_id_seq;

CREATE TABLE IF NOT EXISTS noetl.outbox (
    outbox_id bigint NOT NULL DEFAULT nextval('noetl.outbox_outbox_id_seq'::regclass),
    execution_id bigint,
    event_id bigint NOT NULL,
    subject text,
    payload jsonb NOT NULL,
    payload_bytes bytea,
    payload_codec text NOT NULL DEFAULT 'arrow-feather'::text,
    status text NOT NULL DEFAULT 'PENDING'::text,
    attempts integer NOT NULL DEFAULT 0,
    available_at timestamp with time zone NOT NULL DEFAULT now(),
    locked_at timestamp with time zone,
    published_at timestamp with time zone,
    last_error text,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT outbox_execution_id_event_id_key UNIQUE (execution_id, event_id),
    CONSTRAINT outbox_pkey PRIMARY KEY (outbox_id),
    CONSTRAINT outbox_status_check CHECK ((status = ANY (ARRAY['PENDING'::text, 'IN_FLIGHT'::text, 'PUBLISHED'::text, 'FAILED'::text])))
);

ALTER SEQUENCE noetl.outbox_outbox_id_seq OWNED BY noetl.outbox.outbox_id;

CREATE TABLE IF NOT EXISTS noetl.command (
    command_id bigint NOT NULL,
    event_id bigint NOT NULL,
    execution_id bigint NOT NULL,
    catalog_id bigint NOT NULL,
    parent_execution_id bigint,
    parent_command_id bigint,
    step_name text NOT NULL,
    tool_kind text,
    status text NOT NULL DEFAULT 'PENDING'::text,
    worker_id text,
    claimed_at timestamp with time zone,
    started_at timestamp with time zone,
    completed_at timestamp with time zone,
    attempt integer NOT NULL DEFAULT 1,
    context jsonb,
    context_key text,
    loop_event_id text,
    iter_index integer,
    meta jsonb,
    result jsonb,
    error text,
    latest_event_id bigint,
    prev_event_id bigint,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    stage_id bigint,
    frame_id bigint,
    CONSTRAINT command_pkey PRIMARY KEY (execution_id, command_id)
) PARTITION BY HASH (execution_id);

CREATE TABLE IF NOT EXISTS noetl.command_p00 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 0);
CREATE TABLE IF NOT EXISTS noetl.command_p01 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 1);
CREATE TABLE IF NOT EXISTS noetl.command_p02 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 2);
CREATE TABLE IF NOT EXISTS noetl.command_p03 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 3);
CREATE TABLE IF NOT EXISTS noetl.command_p04 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 4);
CREATE TABLE IF NOT EXISTS noetl.command_p05 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 5);
CREATE TABLE IF NOT EXISTS noetl.command_p06 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 6);
CREATE TABLE IF NOT EXISTS noetl.command_p07 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 7);
CREATE TABLE IF NOT EXISTS noetl.command_p08 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 8);
CREATE TABLE IF NOT EXISTS noetl.command_p09 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 9);
CREATE TABLE IF NOT EXISTS noetl.command_p10 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 10);
CREATE TABLE IF NOT EXISTS noetl.command_p11 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 11);
CREATE TABLE IF NOT EXISTS noetl.command_p12 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 12);
CREATE TABLE IF NOT EXISTS noetl.command_p13 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 13);
CREATE TABLE IF NOT EXISTS noetl.command_p14 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 14);
CREATE TABLE IF NOT EXISTS noetl.command_p15 PARTITION OF noetl.command
    FOR VALUES WITH (modulus 16, remainder 15);

CREATE TABLE IF NOT EXISTS noetl.runtime (
    runtime_id bigint NOT NULL,
    name text NOT NULL,
    kind text NOT NULL,
    uri text,
    status text NOT NULL,
    labels jsonb,
    capabilities jsonb,
    capacity integer,
    runtime jsonb,
    heartbeat timestamp with time zone NOT NULL DEFAULT now(),
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT runtime_pkey PRIMARY KEY (runtime_id),
    CONSTRAINT runtime_kind_check CHECK ((kind = ANY (ARRAY['worker_pool'::text, 'server_api'::text, 'broker'::text])))
);

-- optional
CREATE UNIQUE INDEX IF NOT EXISTS idx_runtime_kind_name ON noetl.runtime USING btree (kind, name);

CREATE TABLE IF NOT EXISTS noetl.projection_snapshot (
    aggregate_id text NOT NULL,
    aggregate_type text NOT NULL,
    tenant_id text NOT NULL DEFAULT 'default'::text,
    organization_id text NOT NULL DEFAULT 'default'::text,
    version bigint NOT NULL,
    snapshot jsonb NOT NULL,
    checksum text NOT NULL,
    meta jsonb NOT NULL DEFAULT '{}'::jsonb,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT projection_snapshot_pkey PRIMARY KEY (tenant_id, organization_id, aggregate_type, aggregate_id)
);
