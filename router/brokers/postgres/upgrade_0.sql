-- From revision 0 of the schema to 1: a claim can ask for some pools only. Run functions.sql after it, in
-- the same transaction. Routers of the version before go on working, and wait meanwhile.

SET LOCAL search_path = message_router;

-- Everybody waits behind this transaction while it waits for another one that has published. Better to
-- try again later.
SET LOCAL lock_timeout = '5s';

CREATE INDEX loose_of_pool ON queue_messages (queue, pool, priority DESC, id)
    WHERE group_key IS NULL AND state = 'ready' AND run_after IS NULL AND pool IS NOT NULL;

CREATE INDEX offers_of_pool ON queue_messages (queue, offered_to, pool, priority DESC, id)
    WHERE offered_to IS NOT NULL AND pool IS NOT NULL;

-- functions.sql makes them with more arguments.
DROP FUNCTION claim(text, text, bigint, integer, double precision);
DROP FUNCTION pick(text, text, integer);

ALTER TABLE schema_versions ADD COLUMN revision integer NOT NULL DEFAULT 0;
UPDATE schema_versions SET revision = 1;
