-- What the service itself needs: claims with a lease on the outbox, and tables of its own.

-- Who holds a row and until when. A dead row stays FAILED (NoETL's CHECK knows no other word) with dead_at set and
-- available_at at infinity, so that NoETL's own claim passes it by.
ALTER TABLE noetl.outbox ADD COLUMN IF NOT EXISTS claim_token uuid;
ALTER TABLE noetl.outbox ADD COLUMN IF NOT EXISTS lease_expires_at timestamp with time zone;
ALTER TABLE noetl.outbox ADD COLUMN IF NOT EXISTS dead_at timestamp with time zone;
ALTER TABLE noetl.outbox ADD COLUMN IF NOT EXISTS headers jsonb;

-- UNIQUE (execution_id, event_id) lets duplicates in where there is no execution.
CREATE UNIQUE INDEX IF NOT EXISTS idx_outbox_event_alone ON noetl.outbox
    USING btree (event_id)
    WHERE (execution_id IS NULL);

-- The claim walks these in order and never meets a PUBLISHED row.
-- optional
CREATE INDEX IF NOT EXISTS idx_outbox_claimable ON noetl.outbox
    USING btree (outbox_id)
    WHERE ((status = ANY (ARRAY['PENDING'::text, 'FAILED'::text])) AND (dead_at IS NULL));

-- optional
CREATE INDEX IF NOT EXISTS idx_outbox_leased ON noetl.outbox
    USING btree (lease_expires_at)
    WHERE (status = 'IN_FLIGHT'::text);

-- Ordered claims look for the oldest undelivered row of each execution.
-- optional
CREATE INDEX IF NOT EXISTS idx_outbox_undelivered ON noetl.outbox
    USING btree (execution_id, outbox_id)
    WHERE ((status = ANY (ARRAY['PENDING'::text, 'FAILED'::text, 'IN_FLIGHT'::text])) AND (dead_at IS NULL));

-- optional
CREATE INDEX IF NOT EXISTS idx_outbox_dead ON noetl.outbox
    USING btree (dead_at)
    WHERE (dead_at IS NOT NULL);

-- How far a follower of the log has come: what was visible when the last gap was finished, what the gap being read
-- reaches to, and the place in it. created_at is the follower's first start, seen_at the time of `seen`; restored_at
-- is when rows with another cluster's transaction ids were taken care of.
CREATE TABLE IF NOT EXISTS noetl.log_cursor (
    name text NOT NULL,
    shard integer NOT NULL DEFAULT 0,
    epoch bigint NOT NULL DEFAULT 0,
    seen pg_snapshot,
    target pg_snapshot,
    at_xact xid8,
    at_event bigint,
    system_identifier bigint,
    seen_at timestamp with time zone,
    restored_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL DEFAULT now(),
    updated_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT log_cursor_pkey PRIMARY KEY (name, shard)
);

CREATE TABLE IF NOT EXISTS noetl.subscription_runtime (
    subscription_id bigint NOT NULL,
    runtime_id text NOT NULL,
    in_flight bigint,
    backlog bigint,
    last_heartbeat_at timestamp with time zone NOT NULL DEFAULT now(),
    lease_expires_at timestamp with time zone NOT NULL,
    CONSTRAINT subscription_runtime_pkey PRIMARY KEY (subscription_id)
);

-- One holder per machine id. used_until_ms is written ahead of the ids minted, so that no clock repeats one.
CREATE TABLE IF NOT EXISTS noetl.machine_lease (
    machine_id integer NOT NULL,
    holder text NOT NULL,
    valid_until timestamp with time zone NOT NULL,
    used_until_ms bigint NOT NULL DEFAULT 0,
    CONSTRAINT machine_lease_pkey PRIMARY KEY (machine_id),
    CONSTRAINT machine_lease_machine_id_check CHECK (((machine_id >= 0) AND (machine_id <= 1023)))
);

-- Events that can't be stored or published, with the reason. NoETL's newer servers make the same table.
CREATE TABLE IF NOT EXISTS noetl.event_dead_letter (
    execution_id bigint NOT NULL,
    event_id bigint NOT NULL,
    catalog_id bigint,
    event_type text,
    node_name text,
    reason text NOT NULL,
    payload jsonb NOT NULL,
    parked_by text,
    parked_at timestamp with time zone NOT NULL DEFAULT now(),
    resolved_at timestamp with time zone,
    CONSTRAINT event_dead_letter_pkey PRIMARY KEY (execution_id, event_id)
);

ALTER TABLE noetl.event_dead_letter ADD COLUMN IF NOT EXISTS attempts integer NOT NULL DEFAULT 1;
ALTER TABLE noetl.event_dead_letter ADD COLUMN IF NOT EXISTS last_error text;

-- optional
CREATE INDEX IF NOT EXISTS idx_event_dead_letter_unresolved ON noetl.event_dead_letter
    USING btree (parked_at)
    WHERE (resolved_at IS NULL);

-- Which of these files have been applied here.
CREATE TABLE IF NOT EXISTS noetl.schema_version (
    version integer NOT NULL,
    name text NOT NULL,
    applied_at timestamp with time zone NOT NULL DEFAULT now(),
    CONSTRAINT schema_version_pkey PRIMARY KEY (version)
);
