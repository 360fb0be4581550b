-- From revision 1 of the schema to 2: a row keeps the error of each failed attempt, and when it last went
-- back. Run functions.sql after it, in the same transaction. Routers of the version before go on working.

SET LOCAL search_path = message_router;
SET LOCAL lock_timeout = '5s'; -- as in upgrade_0.sql

ALTER TABLE queue_messages ADD COLUMN returned_at timestamptz;

-- functions.sql makes it with more arguments.
DROP FUNCTION nack(bigint, bigint, double precision, integer, integer, text);

UPDATE schema_versions SET revision = 2;
