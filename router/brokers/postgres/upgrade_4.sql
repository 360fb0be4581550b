-- From revision 4 of the schema to 5: how much an order store has is known without counting it. Run
-- functions.sql after it, in the same transaction. Routers of the version before go on working; what they
-- store is not counted.

SET LOCAL search_path = message_router;
SET LOCAL lock_timeout = '5s'; -- as in upgrade_0.sql

ALTER TABLE queue_messages ADD COLUMN stored_bytes integer;

UPDATE queue_messages SET stored_bytes = length(body)
WHERE finished_at IS NULL AND starts_with(queue, 'order:');

CREATE INDEX stored ON queue_messages (queue, id)
    WHERE stored_bytes IS NOT NULL AND finished_at IS NULL;

CREATE TABLE order_sizes (
    queue     text    NOT NULL,
    messages  bigint  NOT NULL,
    bytes     bigint  NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE INDEX sizes_of_queue ON order_sizes (queue);

-- Who may use the other tables may use this one, too: `finish` writes to it.
DO $$
DECLARE
    _given record;
BEGIN
    FOR _given IN
        SELECT privilege_type AS what,
               CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END AS whom
        FROM pg_class, aclexplode(relacl) WHERE oid = 'queue_changes'::regclass
    LOOP
        EXECUTE format('GRANT %s ON order_sizes TO %s', _given.what, _given.whom);
    END LOOP;
END
$$;

INSERT INTO order_sizes
SELECT queue, count(*), sum(stored_bytes) FROM queue_messages
WHERE stored_bytes IS NOT NULL AND finished_at IS NULL GROUP BY queue;

UPDATE schema_versions SET revision = 5;
