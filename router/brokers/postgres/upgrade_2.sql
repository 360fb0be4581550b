-- From revision 2 of the schema to 3: what is in flight can be cancelled. Run functions.sql after it, in the
-- same transaction. Routers of the version before go on working; they deliver what is to be cancelled.

SET LOCAL search_path = message_router;
SET LOCAL lock_timeout = '5s'; -- as in upgrade_0.sql

ALTER TABLE queue_messages ADD COLUMN is_cancelled boolean;

CREATE INDEX to_be_cancelled ON queue_messages (id) WHERE is_cancelled;

-- functions.sql makes it with one more argument.
DROP FUNCTION finish(
    bigint[], bigint[], bytea[], boolean[], text[], text[], integer[], integer[], integer[],
    double precision, integer[], text[], text[], text[], text[], text[], smallint[], bytea[], boolean[],
    double precision[], text[], integer[]
);

UPDATE schema_versions SET revision = 3;
