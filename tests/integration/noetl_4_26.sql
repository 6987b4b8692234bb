-- An existing NoETL 4.26 installation: every table, index and partition of its schema, as PostgreSQL reports them.

CREATE SCHEMA noetl;

CREATE SEQUENCE noetl.snowflake_seq;

CREATE FUNCTION noetl.snowflake_id() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT ((extract(epoch FROM clock_timestamp()) * 1000)::bigint - 1704067200000) << 23
        | 262144 | nextval('noetl.snowflake_seq') % 1024
$$;

CREATE SEQUENCE noetl.catalog_version_seq AS smallint;

CREATE SEQUENCE noetl.outbox_outbox_id_seq;

CREATE TABLE noetl.resource (
    name character varying NOT NULL,
    meta jsonb,
    CONSTRAINT resource_pkey PRIMARY KEY (name)
);

CREATE TABLE noetl.catalog (
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

CREATE TABLE noetl.event (
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
    CONSTRAINT chk_event_result_shape CHECK (((result IS NULL) OR ((jsonb_typeof(result) = 'object'::text) AND (result ? 'status'::text) AND (jsonb_typeof((result -> 'status'::text)) = 'string'::text) AND ((((result - 'status'::text) - 'reference'::text) - 'context'::text) = '{}'::jsonb) AND ((NOT (result ? 'reference'::text)) OR (jsonb_typeof((result -> 'reference'::text)) = 'object'::text)) AND ((NOT (result ? 'context'::text)) OR (jsonb_typeof((result -> 'context'::text)) = 'object'::text)))))
) PARTITION BY RANGE (execution_id);

CREATE TABLE noetl.event_2026_gke PARTITION OF noetl.event FOR VALUES FROM ('569000000000000000') TO ('600000000000000000');
CREATE TABLE noetl.event_2026_q1 PARTITION OF noetl.event FOR VALUES FROM ('264905529753600000') TO ('297520437657600000');
CREATE TABLE noetl.event_2026_q1_standard PARTITION OF noetl.event FOR VALUES FROM ('529811059507200000') TO ('569000000000000000');
CREATE TABLE noetl.event_2026_q2 PARTITION OF noetl.event FOR VALUES FROM ('297520437657600000') TO ('330497733427200000');
CREATE TABLE noetl.event_2026_q2_standard PARTITION OF noetl.event FOR VALUES FROM ('600000000000000000') TO ('660995466854400000');
CREATE TABLE noetl.event_2026_q3 PARTITION OF noetl.event FOR VALUES FROM ('330497733427200000') TO ('363837417062400000');
CREATE TABLE noetl.event_2026_q3_standard PARTITION OF noetl.event FOR VALUES FROM ('660995466854400000') TO ('727674834124800000');
CREATE TABLE noetl.event_2026_q4 PARTITION OF noetl.event FOR VALUES FROM ('363837417062400000') TO ('397177100697600000');
CREATE TABLE noetl.event_2026_q4_standard PARTITION OF noetl.event FOR VALUES FROM ('727674834124800000') TO ('794354201395200000');
CREATE TABLE noetl.event_2027_h1 PARTITION OF noetl.event FOR VALUES FROM ('397177100697600000') TO ('462769304371200000');
CREATE TABLE noetl.event_2027_h1_standard PARTITION OF noetl.event FOR VALUES FROM ('794354201395200000') TO ('925538608742400000');
CREATE TABLE noetl.event_2027_h2 PARTITION OF noetl.event FOR VALUES FROM ('462769304371200000') TO ('529448671641600000');
CREATE TABLE noetl.event_2027_h2_standard PARTITION OF noetl.event FOR VALUES FROM ('925538608742400000') TO ('1058897343283200000');
CREATE TABLE noetl.event_2028_q1_standard PARTITION OF noetl.event FOR VALUES FROM ('1058897343283200000') TO ('1124137159091200000');
CREATE TABLE noetl.event_default PARTITION OF noetl.event DEFAULT;
CREATE TABLE noetl.event_pre_2026 PARTITION OF noetl.event FOR VALUES FROM (MINVALUE) TO ('264905529753600000');

CREATE INDEX idx_event_aggregate_event_id ON noetl.event USING btree (tenant_id, organization_id, aggregate_type, aggregate_id, event_id DESC) WHERE (aggregate_id IS NOT NULL);
CREATE INDEX idx_event_batch_request_event_id_desc ON noetl.event USING btree (((meta ->> 'batch_request_id'::text)), event_id DESC) WHERE (meta ? 'batch_request_id'::text);
CREATE INDEX idx_event_catalog_id ON noetl.event USING btree (catalog_id);
CREATE INDEX idx_event_command_id ON noetl.event USING btree (command_id) WHERE (command_id IS NOT NULL);
CREATE INDEX idx_event_command_issued_created_event_id_desc ON noetl.event USING btree (created_at DESC, event_id DESC, execution_id, ((meta ->> 'command_id'::text))) WHERE (((event_type)::text = 'command.issued'::text) AND (meta ? 'command_id'::text));
CREATE INDEX idx_event_created_at ON noetl.event USING btree (created_at);
CREATE INDEX idx_event_exec_frame_event_id_desc ON noetl.event USING btree (execution_id, frame_id, event_id DESC) WHERE (frame_id IS NOT NULL);
CREATE INDEX idx_event_exec_id_event_id_desc ON noetl.event USING btree (execution_id, event_id DESC);
CREATE INDEX idx_event_exec_stage_event_id_desc ON noetl.event USING btree (execution_id, stage_id, event_id DESC) WHERE (stage_id IS NOT NULL);
CREATE INDEX idx_event_exec_type ON noetl.event USING btree (execution_id, event_type, event_id DESC);
CREATE INDEX idx_event_exec_type_command_id_event_id_desc ON noetl.event USING btree (execution_id, event_type, command_id, event_id DESC) WHERE (command_id IS NOT NULL);
CREATE INDEX idx_event_exec_type_meta_command_id_event_id_desc ON noetl.event USING btree (execution_id, event_type, ((meta ->> 'command_id'::text)), event_id DESC) WHERE (meta ? 'command_id'::text);
CREATE INDEX idx_event_execution_id ON noetl.event USING btree (execution_id);
CREATE INDEX idx_event_frame_id ON noetl.event USING btree (frame_id, event_id DESC) WHERE (frame_id IS NOT NULL);
CREATE INDEX idx_event_idempotency_key ON noetl.event USING btree (execution_id, ((meta ->> 'idempotency_key'::text))) WHERE (meta ? 'idempotency_key'::text);
CREATE INDEX idx_event_idempotency_key_column ON noetl.event USING btree (tenant_id, organization_id, idempotency_key) WHERE (idempotency_key IS NOT NULL);
CREATE INDEX idx_event_loop_epoch_coalesce ON noetl.event USING btree (execution_id, node_name, COALESCE((meta ->> 'loop_event_id'::text), (meta ->> '__loop_epoch_id'::text))) WHERE (COALESCE((meta ->> 'loop_event_id'::text), (meta ->> '__loop_epoch_id'::text)) IS NOT NULL);
CREATE INDEX idx_event_loop_epoch_id ON noetl.event USING btree (execution_id, node_name, ((meta ->> '__loop_epoch_id'::text))) WHERE (meta ? '__loop_epoch_id'::text);
CREATE INDEX idx_event_loop_event_id ON noetl.event USING btree (execution_id, node_name, ((meta ->> 'loop_event_id'::text))) WHERE (meta ? 'loop_event_id'::text);
CREATE INDEX idx_event_node_name ON noetl.event USING btree (node_name);
CREATE INDEX idx_event_parent_event_id ON noetl.event USING btree (parent_event_id);
CREATE INDEX idx_event_parent_execution_id ON noetl.event USING btree (parent_execution_id);
CREATE INDEX idx_event_playbook_init_event_id_desc ON noetl.event USING btree (event_id DESC) INCLUDE (execution_id, catalog_id, parent_execution_id, created_at) WHERE ((event_type)::text = 'playbook.initialized'::text);
CREATE INDEX idx_event_prev_event_id ON noetl.event USING btree (execution_id, prev_event_id) WHERE (prev_event_id IS NOT NULL);
CREATE INDEX idx_event_result_reference_record_id ON noetl.event USING btree ((((result -> 'reference'::text) ->> 'record_id'::text))) WHERE ((result -> 'reference'::text) ? 'record_id'::text);
CREATE INDEX idx_event_result_reference_type ON noetl.event USING btree ((((result -> 'reference'::text) ->> 'type'::text))) WHERE (result ? 'reference'::text);
CREATE INDEX idx_event_stage_id ON noetl.event USING btree (stage_id, event_id DESC) WHERE (stage_id IS NOT NULL);
CREATE INDEX idx_event_status ON noetl.event USING btree (status);
CREATE INDEX idx_event_stream_version ON noetl.event USING btree (tenant_id, organization_id, stream_id, stream_version) WHERE (stream_id IS NOT NULL);
CREATE INDEX idx_event_tenant_org_execution_event_id ON noetl.event USING btree (tenant_id, organization_id, execution_id, event_id DESC);
CREATE INDEX idx_event_type ON noetl.event USING btree (event_type);

CREATE TABLE noetl.outbox (
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

CREATE INDEX idx_outbox_execution_event ON noetl.outbox USING btree (execution_id, event_id);
CREATE INDEX idx_outbox_ready ON noetl.outbox USING btree (status, available_at, outbox_id) WHERE (status = ANY (ARRAY['PENDING'::text, 'FAILED'::text]));

CREATE TABLE noetl.command (
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

CREATE TABLE noetl.command_p00 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 0);
CREATE TABLE noetl.command_p01 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 1);
CREATE TABLE noetl.command_p02 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 2);
CREATE TABLE noetl.command_p03 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 3);
CREATE TABLE noetl.command_p04 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 4);
CREATE TABLE noetl.command_p05 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 5);
CREATE TABLE noetl.command_p06 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 6);
CREATE TABLE noetl.command_p07 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 7);
CREATE TABLE noetl.command_p08 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 8);
CREATE TABLE noetl.command_p09 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 9);
CREATE TABLE noetl.command_p10 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 10);
CREATE TABLE noetl.command_p11 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 11);
CREATE TABLE noetl.command_p12 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 12);
CREATE TABLE noetl.command_p13 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 13);
CREATE TABLE noetl.command_p14 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 14);
CREATE TABLE noetl.command_p15 PARTITION OF noetl.command FOR VALUES WITH (modulus 16, remainder 15);

CREATE INDEX idx_command_command_id ON noetl.command USING btree (command_id);
CREATE INDEX idx_command_execution_id ON noetl.command USING btree (execution_id);
CREATE INDEX idx_command_execution_status ON noetl.command USING btree (execution_id, status) WHERE (status = ANY (ARRAY['PENDING'::text, 'CLAIMED'::text, 'RUNNING'::text]));
CREATE INDEX idx_command_execution_step ON noetl.command USING btree (execution_id, step_name);
CREATE INDEX idx_command_frame ON noetl.command USING btree (execution_id, frame_id) WHERE (frame_id IS NOT NULL);
CREATE INDEX idx_command_loop ON noetl.command USING btree (execution_id, loop_event_id, status) WHERE (loop_event_id IS NOT NULL);
CREATE INDEX idx_command_loop_step_status ON noetl.command USING btree (execution_id, step_name, loop_event_id, status, iter_index) WHERE (loop_event_id IS NOT NULL);
CREATE INDEX idx_command_pending_loop_step_created ON noetl.command USING btree (execution_id, step_name, loop_event_id, created_at, iter_index) WHERE ((status = 'PENDING'::text) AND (iter_index IS NOT NULL));
CREATE INDEX idx_command_stage ON noetl.command USING btree (execution_id, stage_id, status) WHERE (stage_id IS NOT NULL);
CREATE INDEX idx_command_stage_worker_slot ON noetl.command USING btree (execution_id, stage_id, ((meta ->> 'worker_slot_id'::text))) WHERE ((stage_id IS NOT NULL) AND (meta ? 'worker_slot_id'::text));
CREATE INDEX idx_command_status ON noetl.command USING btree (status) WHERE (status = ANY (ARRAY['PENDING'::text, 'CLAIMED'::text]));
CREATE INDEX idx_command_worker ON noetl.command USING btree (worker_id, updated_at) WHERE (status = 'CLAIMED'::text);

CREATE TABLE noetl.runtime (
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

CREATE INDEX idx_runtime_kind ON noetl.runtime USING btree (kind);
CREATE UNIQUE INDEX idx_runtime_kind_name ON noetl.runtime USING btree (kind, name);
CREATE INDEX idx_runtime_status ON noetl.runtime USING btree (status);

CREATE TABLE noetl.projection (
    projection_id text NOT NULL,
    projection_type text NOT NULL,
    tenant_id text NOT NULL DEFAULT 'default'::text,
    organization_id text NOT NULL DEFAULT 'default'::text,
    execution_id bigint,
    version bigint NOT NULL,
    source_event_id bigint,
    state jsonb NOT NULL,
    checksum text NOT NULL,
    meta jsonb NOT NULL DEFAULT '{}'::jsonb,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT projection_pkey PRIMARY KEY (projection_id)
);

CREATE INDEX idx_projection_execution ON noetl.projection USING btree (execution_id, projection_type) WHERE (execution_id IS NOT NULL);
CREATE INDEX idx_projection_tenant_type ON noetl.projection USING btree (tenant_id, organization_id, projection_type);

CREATE TABLE noetl.projection_snapshot (
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

CREATE INDEX idx_projection_snapshot_type ON noetl.projection_snapshot USING btree (tenant_id, organization_id, aggregate_type, version DESC);

CREATE TABLE noetl.execution (
    execution_id bigint NOT NULL,
    catalog_id bigint NOT NULL,
    status character varying NOT NULL,
    start_time timestamp with time zone,
    end_time timestamp with time zone,
    error text,
    created_at timestamp with time zone NOT NULL DEFAULT CURRENT_TIMESTAMP,
    updated_at timestamp with time zone NOT NULL DEFAULT CURRENT_TIMESTAMP,
    parent_execution_id bigint,
    last_event_type character varying,
    last_node_name character varying,
    last_event_id bigint,
    state jsonb,
    CONSTRAINT execution_pkey PRIMARY KEY (execution_id),
    CONSTRAINT execution_catalog_id_fkey FOREIGN KEY (catalog_id) REFERENCES noetl.catalog(catalog_id)
);

CREATE INDEX idx_execution_catalog_id ON noetl.execution USING btree (catalog_id);
CREATE INDEX idx_execution_created_at ON noetl.execution USING btree (created_at DESC);
CREATE INDEX idx_execution_list_page ON noetl.execution USING btree (COALESCE(start_time, created_at) DESC NULLS LAST, execution_id DESC) INCLUDE (catalog_id, parent_execution_id, status, last_event_type, last_node_name, last_event_id, end_time, error);
CREATE INDEX idx_execution_start_time ON noetl.execution USING btree (start_time DESC);
CREATE INDEX idx_execution_status ON noetl.execution USING btree (status);

CREATE TABLE noetl.stage (
    stage_id bigint NOT NULL,
    execution_id bigint NOT NULL,
    parent_event_id bigint,
    parent_stage_id bigint,
    loop_event_id text,
    opened_event_id bigint,
    closed_event_id bigint,
    kind text NOT NULL,
    step_name text NOT NULL,
    dsl_ref text NOT NULL,
    status text NOT NULL DEFAULT 'OPEN'::text,
    frame_policy jsonb NOT NULL DEFAULT '{}'::jsonb,
    tenant_id text NOT NULL DEFAULT 'default'::text,
    organization_id text NOT NULL DEFAULT 'default'::text,
    started_at timestamp with time zone NOT NULL DEFAULT now(),
    ended_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT stage_pkey PRIMARY KEY (stage_id),
    CONSTRAINT stage_execution_id_fkey FOREIGN KEY (execution_id) REFERENCES noetl.execution(execution_id),
    CONSTRAINT stage_parent_stage_id_fkey FOREIGN KEY (parent_stage_id) REFERENCES noetl.stage(stage_id),
    CONSTRAINT stage_kind_check CHECK ((kind = ANY (ARRAY['loop'::text, 'fanout'::text, 'reduce'::text])))
);

CREATE INDEX idx_stage_closed_event ON noetl.stage USING btree (closed_event_id) WHERE (closed_event_id IS NOT NULL);
CREATE INDEX idx_stage_execution_status ON noetl.stage USING btree (execution_id, status, stage_id);
CREATE INDEX idx_stage_execution_step_loop ON noetl.stage USING btree (execution_id, step_name, loop_event_id) WHERE (loop_event_id IS NOT NULL);
CREATE INDEX idx_stage_opened_event ON noetl.stage USING btree (opened_event_id) WHERE (opened_event_id IS NOT NULL);
CREATE INDEX idx_stage_parent_stage ON noetl.stage USING btree (parent_stage_id) WHERE (parent_stage_id IS NOT NULL);
CREATE INDEX idx_stage_tenant_org_execution ON noetl.stage USING btree (tenant_id, organization_id, execution_id, stage_id);

CREATE TABLE noetl.frame (
    frame_id bigint NOT NULL,
    stage_id bigint NOT NULL,
    execution_id bigint NOT NULL,
    parent_frame_id bigint,
    command_id bigint,
    claimed_event_id bigint,
    terminal_event_id bigint,
    cursor jsonb NOT NULL DEFAULT '{}'::jsonb,
    row_count integer NOT NULL DEFAULT 0,
    status text NOT NULL DEFAULT 'PENDING'::text,
    owner_worker text,
    lease_until timestamp with time zone,
    output_ref jsonb,
    events_emitted integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    tenant_id text NOT NULL DEFAULT 'default'::text,
    organization_id text NOT NULL DEFAULT 'default'::text,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    completed_at timestamp with time zone,
    CONSTRAINT frame_pkey PRIMARY KEY (frame_id),
    CONSTRAINT frame_execution_id_fkey FOREIGN KEY (execution_id) REFERENCES noetl.execution(execution_id),
    CONSTRAINT frame_parent_frame_id_fkey FOREIGN KEY (parent_frame_id) REFERENCES noetl.frame(frame_id),
    CONSTRAINT frame_stage_id_fkey FOREIGN KEY (stage_id) REFERENCES noetl.stage(stage_id)
);

CREATE INDEX frame_open_idx ON noetl.frame USING btree (stage_id, status, lease_until) WHERE (status = ANY (ARRAY['PENDING'::text, 'CLAIMED'::text, 'RUNNING'::text]));
CREATE UNIQUE INDEX idx_frame_claim_key_unique ON noetl.frame USING btree (stage_id, ((cursor ->> 'worker_slot_id'::text)), ((cursor ->> 'frame_index'::text))) WHERE ((cursor ? 'worker_slot_id'::text) AND (cursor ? 'frame_index'::text));
CREATE INDEX idx_frame_claimed_event ON noetl.frame USING btree (claimed_event_id) WHERE (claimed_event_id IS NOT NULL);
CREATE INDEX idx_frame_command ON noetl.frame USING btree (command_id) WHERE (command_id IS NOT NULL);
CREATE INDEX idx_frame_execution_status ON noetl.frame USING btree (execution_id, status, frame_id);
CREATE INDEX idx_frame_idempotent_claim ON noetl.frame USING btree (stage_id, command_id, owner_worker, ((cursor ->> 'worker_slot_id'::text)), ((cursor ->> 'frame_index'::text)), frame_id) WHERE (status = ANY (ARRAY['CLAIMED'::text, 'RUNNING'::text]));
CREATE INDEX idx_frame_parent_frame ON noetl.frame USING btree (parent_frame_id) WHERE (parent_frame_id IS NOT NULL);
CREATE INDEX idx_frame_stage_cursor_slot_index ON noetl.frame USING btree (stage_id, ((cursor ->> 'worker_slot_id'::text)), ((cursor ->> 'frame_index'::text)), frame_id);
CREATE INDEX idx_frame_stage_frame ON noetl.frame USING btree (stage_id, frame_id);
CREATE INDEX idx_frame_tenant_org_execution ON noetl.frame USING btree (tenant_id, organization_id, execution_id, frame_id);
CREATE INDEX idx_frame_terminal_event ON noetl.frame USING btree (terminal_event_id) WHERE (terminal_event_id IS NOT NULL);

ALTER SEQUENCE noetl.catalog_version_seq OWNED BY noetl.catalog.version;

ALTER SEQUENCE noetl.outbox_outbox_id_seq OWNED BY noetl.outbox.outbox_id;

CREATE VIEW noetl.event_log AS SELECT * FROM noetl.event;

INSERT INTO noetl.resource (name) VALUES ('playbook'), ('credential'), ('mcp'), ('agent'), ('memory');
