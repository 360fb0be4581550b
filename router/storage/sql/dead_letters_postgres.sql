-- The dead-letter store in PostgreSQL. Each statement has a name; Python refers to them by it. It
-- has its own schema: dropping the one of the work queue keeps the dead letters.

-- name: is_there
-- Asked first: to create what exists needs rights that a router may not have.
SELECT to_regclass('message_router_letters.store') IS NOT NULL AS is_there

-- name: version
SELECT version FROM message_router_letters.store

-- name: install
DO $install$ BEGIN
PERFORM pg_advisory_xact_lock(hashtextextended('message_router_letters schema', 0));
-- A query, which sees what was committed while it waited; to_regclass does not.
IF EXISTS (SELECT FROM pg_tables WHERE schemaname = 'message_router_letters') THEN
    RETURN; -- another router was first
END IF;
CREATE SCHEMA IF NOT EXISTS message_router_letters;
CREATE TABLE message_router_letters.dead_letters (
    id            bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue         text             NOT NULL,
    fingerprint   text             NOT NULL,
    message_id    text,
    pool          text,
    target        text,
    reason        text             NOT NULL,
    http_status   integer,
    reply         bytea            NOT NULL,
    error         text             NOT NULL,
    failures      bigint           NOT NULL,
    requests      bigint           NOT NULL,
    first_seen    double precision NOT NULL, -- Unix seconds, by the router's clock
    dead_at       double precision NOT NULL,
    body          bytea            NOT NULL,
    replayed_at   double precision,
    claim         bigint,                    -- of the router that replays it now
    claimed_until timestamptz,               -- by the server's clock
    size          bigint           GENERATED ALWAYS AS (
        octet_length(body) + octet_length(reply) + octet_length(error) + 1024
    ) STORED                                 -- in bytes, with its place in the table and the indexes
);
CREATE INDEX dead_letters_by_age ON message_router_letters.dead_letters (dead_at);
CREATE INDEX dead_letters_by_message ON message_router_letters.dead_letters (message_id, id);
CREATE INDEX dead_letters_by_fingerprint ON message_router_letters.dead_letters (fingerprint);
CREATE INDEX dead_letters_by_order ON message_router_letters.dead_letters (first_seen, id);

-- One row. Adding and removing letters lock it: one at a time, so its count is exact.
CREATE TABLE message_router_letters.store (
    version integer NOT NULL,
    bytes   bigint  NOT NULL -- of all letters
);
INSERT INTO message_router_letters.store VALUES (1, 0);

CREATE FUNCTION message_router_letters.count_added() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE message_router_letters.store
    SET bytes = bytes + (SELECT coalesce(sum(size), 0) FROM added);
    RETURN NULL;
END $$;
CREATE FUNCTION message_router_letters.count_removed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE message_router_letters.store
    SET bytes = bytes - (SELECT coalesce(sum(size), 0) FROM removed);
    RETURN NULL;
END $$;
CREATE FUNCTION message_router_letters.count_none() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE message_router_letters.store SET bytes = 0;
    RETURN NULL;
END $$;
CREATE TRIGGER count_added AFTER INSERT ON message_router_letters.dead_letters
    REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION message_router_letters.count_added();
CREATE TRIGGER count_removed AFTER DELETE ON message_router_letters.dead_letters
    REFERENCING OLD TABLE AS removed
    FOR EACH STATEMENT EXECUTE FUNCTION message_router_letters.count_removed();
CREATE TRIGGER count_none AFTER TRUNCATE ON message_router_letters.dead_letters
    FOR EACH STATEMENT EXECUTE FUNCTION message_router_letters.count_none();

-- Return false if it is full. Statements after the lock see what was committed before it.
CREATE FUNCTION message_router_letters.put(
    max_bytes bigint, new message_router_letters.dead_letters
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    used   bigint;
    before double precision;
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true); -- the ACK follows, however it is set up
    SELECT bytes INTO STRICT used FROM message_router_letters.store FOR UPDATE;
    -- Equal fingerprints are not enough to be the same message: the bodies are compared (ID-2).
    SELECT min(first_seen) INTO before FROM message_router_letters.dead_letters
    WHERE fingerprint = new.fingerprint AND body = new.body;
    IF before IS NOT NULL THEN
        DELETE FROM message_router_letters.dead_letters
        WHERE fingerprint = new.fingerprint AND body = new.body;
    ELSIF used + octet_length(new.body) + octet_length(new.reply) + octet_length(new.error) + 1024
        > max_bytes THEN
        RETURN false;
    END IF;
    INSERT INTO message_router_letters.dead_letters (
        queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
        requests, first_seen, dead_at, body
    ) VALUES (
        new.queue, new.fingerprint, new.message_id, new.pool, new.target, new.reason,
        new.http_status, new.reply, new.error, new.failures, new.requests,
        least(before, new.first_seen), new.dead_at, new.body
    );
    RETURN true;
END $$;
END $install$

-- name: touch
-- A store that cannot be written is to be noticed at the start, not at a death.
UPDATE message_router_letters.store SET bytes = bytes

-- name: put
-- The values are the fields of DeadLetter, in their order.
SELECT message_router_letters.put($1, ROW(
    0, $2::text, $3::text, $4::text, $5::text, $6::text, $7::text, $8::int, $9::bytea, $10::text,
    $11::bigint, $12::bigint, $13::float8, $14::float8, $15::bytea, NULL, NULL, NULL, NULL
)::message_router_letters.dead_letters) AS is_kept

-- name: expire
-- A part of them, of a few megabytes: a letter that arrives meanwhile does not wait for the rest.
WITH locked AS MATERIALIZED (
    SELECT bytes FROM message_router_letters.store FOR UPDATE
), oldest AS (
    SELECT id, dead_at, size FROM message_router_letters.dead_letters, locked
    WHERE dead_at < $1
    ORDER BY dead_at, id
    LIMIT 500
), part AS (
    SELECT id FROM (
        SELECT id, sum(size) OVER (ORDER BY dead_at, id) - size AS size_before FROM oldest
    ) AS summed
    WHERE size_before < 4194304
)
DELETE FROM message_router_letters.dead_letters WHERE id IN (SELECT id FROM part) RETURNING 1 AS one

-- name: find
-- Letters from before TARGET_REJECTED are found by it and by CONFIG_ERROR, which they have (DLQ-2).
-- Without the bodies: a page of them could be a hundred megabytes, and nobody is shown one.
SELECT
    id, queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, ''::bytea AS body, replayed_at
FROM message_router_letters.dead_letters
WHERE ($1::text IS NULL OR queue = $1)
    AND ($2::text IS NULL OR pool = $2)
    AND (
        $3::text IS NULL OR reason = $3
        OR $3 = 'TARGET_REJECTED' AND reason = 'CONFIG_ERROR'
        AND http_status BETWEEN 400 AND 499 AND http_status NOT IN (401, 403, 404, 405, 407)
    )
    AND ($4::text IS NULL OR target = $4)
    AND ($5::float8 IS NULL OR dead_at >= $5)
    AND ($6::bigint IS NULL OR id < $6)
ORDER BY id DESC
LIMIT $7

-- name: find_in_order
SELECT
    id, queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, ''::bytea AS body, replayed_at
FROM message_router_letters.dead_letters
WHERE ($1::text IS NULL OR queue = $1)
    AND ($2::text IS NULL OR pool = $2)
    AND (
        $3::text IS NULL OR reason = $3
        OR $3 = 'TARGET_REJECTED' AND reason = 'CONFIG_ERROR'
        AND http_status BETWEEN 400 AND 499 AND http_status NOT IN (401, 403, 404, 405, 407)
    )
    AND ($4::text IS NULL OR target = $4)
    AND ($5::float8 IS NULL OR dead_at >= $5)
    AND (first_seen, id) > ($6::float8, $7::bigint)
    AND id <= $8
ORDER BY first_seen, id
LIMIT $9

-- name: get
SELECT * FROM message_router_letters.dead_letters WHERE id = $1

-- name: latest_of
SELECT
    id, queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, ''::bytea AS body, replayed_at
FROM message_router_letters.dead_letters
WHERE message_id = $1
ORDER BY id DESC
LIMIT 1

-- name: claim
-- A claim that its router did not release ends by itself.
UPDATE message_router_letters.dead_letters
SET claim = $2, claimed_until = clock_timestamp() + make_interval(secs => $3)
WHERE id = $1 AND (claimed_until IS NULL OR claimed_until <= clock_timestamp())
RETURNING id

-- name: release
UPDATE message_router_letters.dead_letters SET claim = NULL, claimed_until = NULL
WHERE id = $1 AND claim = $2

-- name: mark_replayed
UPDATE message_router_letters.dead_letters SET replayed_at = $2 WHERE id = $1

-- name: discard
-- It locks the store first, as all do, so two that give up the same message cannot deadlock.
WITH locked AS MATERIALIZED (
    SELECT bytes FROM message_router_letters.store FOR UPDATE
)
DELETE FROM message_router_letters.dead_letters USING locked WHERE id = $1 RETURNING id
