-- What makes the log cheap and safe to follow. All of it is optional: in most installations another role owns
-- noetl.event, and without these the service works, the tailer in overlap mode.

-- The transaction that wrote a row; writers name their columns and never set it. The default is STABLE, so the
-- rows already there share one value and nothing is rewritten.
-- optional
ALTER TABLE noetl.event ADD COLUMN IF NOT EXISTS xact_id xid8 DEFAULT pg_current_xact_id();

-- optional
CREATE INDEX IF NOT EXISTS idx_event_xact_id ON noetl.event USING btree (xact_id, event_id);

-- Subscriptions have no table: their state is the last of six kinds of events. A query must name the six as
-- literals for PostgreSQL to see that these apply.
-- optional
CREATE INDEX IF NOT EXISTS idx_event_subscription_state ON noetl.event
    USING btree (execution_id, event_id DESC)
    WHERE ((event_type)::text = ANY (ARRAY['subscription.registered'::text, 'subscription.activated'::text,
        'subscription.paused'::text, 'subscription.resumed'::text, 'subscription.draining'::text,
        'subscription.deactivated'::text]));

-- optional
CREATE INDEX IF NOT EXISTS idx_event_subscription_path ON noetl.event
    USING btree (node_name, execution_id, event_id DESC)
    WHERE ((event_type)::text = ANY (ARRAY['subscription.registered'::text, 'subscription.activated'::text,
        'subscription.paused'::text, 'subscription.resumed'::text, 'subscription.draining'::text,
        'subscription.deactivated'::text]));
