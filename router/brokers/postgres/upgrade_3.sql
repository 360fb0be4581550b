-- From revision 3 of the schema to 4: rows for the messages in queues of PGMQ. Run functions.sql after it, in
-- the same transaction. Routers of the version before go on working.

SET LOCAL search_path = message_router;
SET LOCAL lock_timeout = '5s'; -- as in upgrade_0.sql

ALTER TABLE queue_messages
    ADD COLUMN pgmq_id bigint, ADD COLUMN pgmq_group text, ADD COLUMN pgmq_digest bytea;

CREATE UNIQUE INDEX by_pgmq_id ON queue_messages (queue, pgmq_id, published_at)
    WHERE pgmq_id IS NOT NULL;

UPDATE schema_versions SET revision = 4;
