-- The work queue in PostgreSQL (WQ-1 to WQ-12): the tables, and what an INSERT does. What routers call is
-- in functions.sql. Run both in one transaction.
--
-- Every call of the router is one call of one function: one statement, one transaction that begins
-- and ends in the server. So a client that dies leaves nothing locked, and no session is needed: a
-- transaction pooler may stand in between.
--
-- Three rules make it safe without a lock around everything:
--   1. Claims of one queue run one after the other, and only claims change a message that is ready.
--      Publishing and settling lock only their own rows.
--   2. Settling and publishing add the group's key to queue_changes, in the same transaction.
--      The next claim decides again what that group offers. Between the two, a group offers less
--      than it could, never more.
--   3. A lease is known by its token. A lease that has ended loses its token when a claim notices.
--
-- Functions must be volatile, and transactions "read committed": each statement after the lock has
-- to see what was committed before the lock was granted.

-- Whoever may not create schemas may have been given an empty one.
DO $$
BEGIN
    IF to_regnamespace('message_router') IS NULL THEN
        CREATE SCHEMA message_router;
    END IF;
END
$$;
SET LOCAL search_path = message_router;

CREATE TABLE schema_versions (
    version      integer     PRIMARY KEY, -- routers that know another one refuse the schema
    installed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    incarnation  text,       -- random: with it, the id of a row names one message
    revision     integer     NOT NULL DEFAULT 0 -- routers that know only an older one work as well
);

-- One row for each queue that has been consumed: its options, and whether to notify.
CREATE TABLE queues (
    queue   text             PRIMARY KEY,
    keep    double precision NOT NULL, -- seconds that a finished message stays
    keep_results double precision NOT NULL, -- the same for one with a payload, result, reply or batch
    audit   double precision NOT NULL, -- seconds that its audit rows stay; 0: none are written
    waiting boolean          NOT NULL DEFAULT false, -- the last claim found nothing
    clock   timestamptz                -- when a claim last asked the clock; a few seconds late
);

CREATE TABLE queue_messages (
    id               bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- the order of a lane
    queue            text        NOT NULL,
    message_id       text        NOT NULL,
    dedup_key        text,                          -- the explicit one, if there is any
    identity         text,                          -- NULL: it may be published again (WQ-1)
    pool             text        NOT NULL DEFAULT 'DEFAULT-POOL',
    group_id         text,                          -- NULL: independent of all others
    group_key        bigint      GENERATED ALWAYS AS (
        hashtextextended(length(pool)::text || ' ' || pool || ' ' || group_id, 0)
    ) STORED,                                       -- groups that share one wait for each other
    priority         smallint    NOT NULL DEFAULT 0 CHECK (priority BETWEEN 0 AND 9),
    high_priority    boolean     NOT NULL DEFAULT false, -- priority 9: those have an own lane
    state            text        NOT NULL DEFAULT 'ready'
                     CHECK (state IN ('ready', 'in-flight', 'succeeded', 'failed', 'cancelled')),
    -- Who may claim a message of a group now: '' any worker, an id only that worker, NULL nobody.
    -- Of a lane, only the first unsettled message is offered; a claim goes on from there.
    offered_to       text,
    run_after        timestamptz,                   -- NULL: due
    lease_token      bigint,                        -- stays when the message is finished
    lease_version    integer     NOT NULL DEFAULT 0,
    lease_until      timestamptz,
    worker_id        text,
    deliveries       integer     NOT NULL DEFAULT 0,
    attempts         integer     NOT NULL DEFAULT 0,
    posts            integer     NOT NULL DEFAULT 0,
    last_error       text,                          -- of its last failed attempt; likewise:
    error_code       text,
    http_status      integer,
    published_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    first_claimed_at timestamptz,
    last_claimed_at  timestamptz,
    returned_at      timestamptz,                   -- when it last went back, or its lease ended
    is_cancelled     boolean,                       -- it is to be cancelled by who holds it (CMD-13)
    stored_bytes     integer,                       -- of its body, in an order store (ORD-4)
    finished_at      timestamptz,                   -- NULL: unsettled
    not_before       timestamptz,                   -- run_after is made of it (CMD-5)
    is_kept          boolean     NOT NULL DEFAULT false, -- for the retention of results (CMD-2)
    correlation_id   text,
    payload_size     integer,                       -- in bytes
    batch            bigint,                        -- in queue_batches (CMD-4)
    result           bytea,                         -- JSON
    result_omitted   boolean,                       -- it was too long
    body             bytea       NOT NULL,          -- emptied when it is finished
    -- Of a message in a queue of PGMQ (CMD-7): the row has no body, and knows what PGMQ does not.
    pgmq_id          bigint,                        -- its msg_id; its enqueued_at is published_at
    pgmq_group       text,                          -- PGMQ keeps the order: group_id is NULL
    pgmq_digest      bytea                          -- of what was handed out
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.2
);

-- Each index fits only the statements that it is for: the planner has no choice. Its plans are kept,
-- and may be made while the table is empty.
CREATE UNIQUE INDEX by_identity ON queue_messages (identity, queue);

-- What can be claimed, in claim order. A claim never steps over a blocked row.
CREATE INDEX loose ON queue_messages (queue, priority DESC, id)
    WHERE group_key IS NULL AND state = 'ready' AND run_after IS NULL;

CREATE INDEX offers ON queue_messages (queue, offered_to, priority DESC, id)
    WHERE offered_to IS NOT NULL;

-- The same for claims that ask for some pools only: what waits for the others is not stepped over. The
-- conditions on the pool are always true: they tell the planner which claims these indexes are for.
CREATE INDEX loose_of_pool ON queue_messages (queue, pool, priority DESC, id)
    WHERE group_key IS NULL AND state = 'ready' AND run_after IS NULL AND pool IS NOT NULL;

CREATE INDEX offers_of_pool ON queue_messages (queue, offered_to, pool, priority DESC, id)
    WHERE offered_to IS NOT NULL AND pool IS NOT NULL;

CREATE INDEX lanes ON queue_messages (queue, group_key, high_priority, id)
    WHERE group_key IS NOT NULL AND finished_at IS NULL;

CREATE INDEX groups_in_flight ON queue_messages (queue, group_key, high_priority)
    WHERE group_key IS NOT NULL AND state = 'in-flight';

CREATE INDEX leases ON queue_messages (queue, lease_until) WHERE lease_until IS NOT NULL;

CREATE INDEX delays ON queue_messages (queue, run_after) WHERE run_after IS NOT NULL;

CREATE INDEX finished ON queue_messages (queue, finished_at)
    WHERE finished_at IS NOT NULL AND NOT is_kept;

CREATE INDEX kept ON queue_messages (queue, finished_at) WHERE finished_at IS NOT NULL AND is_kept;

-- Hardly ever is one among what was claimed: to find that out costs a look into an empty index.
CREATE INDEX to_be_cancelled ON queue_messages (id) WHERE is_cancelled;

-- What order stores have: who measures one reads its first message.
CREATE INDEX stored ON queue_messages (queue, id)
    WHERE stored_bytes IS NOT NULL AND finished_at IS NULL;

CREATE INDEX by_message_id ON queue_messages (message_id, id);

CREATE UNIQUE INDEX by_pgmq_id ON queue_messages (queue, pgmq_id, published_at)
    WHERE pgmq_id IS NOT NULL;

-- Groups to decide about (rule 2).
CREATE TABLE queue_changes (
    queue     text   NOT NULL,
    group_key bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE INDEX changes_of_queue ON queue_changes (queue);

-- How much order stores have: the sum of the rows of a queue. Each call that changes it adds one, so that
-- no call waits for another. Who measures it replaces them by their sum.
CREATE TABLE order_sizes (
    queue     text    NOT NULL,
    messages  bigint  NOT NULL,
    bytes     bigint  NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE INDEX sizes_of_queue ON order_sizes (queue);

-- One row for each change of a message's state (WQ-8).
CREATE TABLE queue_audit (
    id        bigint      NOT NULL, -- of the row in queue_messages
    queue     text        NOT NULL,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    state     text        NOT NULL,
    worker_id text,
    error     text
) WITH (autovacuum_vacuum_scale_factor = 0.02);

CREATE INDEX audit_of_message ON queue_audit (id);
CREATE INDEX audit_by_age ON queue_audit (queue, at);

-- Batches (CMD-4). A batch is complete when as many members as its size have ended.
CREATE TABLE queue_batches (
    number                  bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue                   text        NOT NULL,
    batch_id                text        NOT NULL,
    size                    integer     NOT NULL,
    total                   integer     NOT NULL DEFAULT 0, -- members so far
    succeeded               integer     NOT NULL DEFAULT 0,
    failed                  integer     NOT NULL DEFAULT 0,
    cancelled               integer     NOT NULL DEFAULT 0,
    callback_message_id     text        NOT NULL,
    callback_pool           text        NOT NULL,
    callback_group_id       text,
    callback_priority       smallint    NOT NULL,
    callback_not_before     timestamptz,
    callback_correlation_id text,
    callback_body           bytea       NOT NULL, -- up to the value of its payload
    callback_at             timestamptz,          -- when it was published: the batch is complete
    UNIQUE (queue, batch_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

CREATE INDEX complete ON queue_batches (queue, callback_at) WHERE callback_at IS NOT NULL;

-- The members of a batch, as long as it is kept: a member's row goes sooner.
CREATE TABLE queue_batch_members (
    batch      bigint NOT NULL,
    message_id text   NOT NULL,
    digest     text   NOT NULL, -- of the body
    PRIMARY KEY (batch, message_id, digest)
);

-- The last tick of each schedule that was published (CMD-10).
CREATE TABLE queue_ticks (
    queue    text   NOT NULL,
    schedule text   NOT NULL,
    tick     bigint NOT NULL,
    PRIMARY KEY (queue, schedule)
);


-- Publishing. A plain INSERT is enough: triggers do the rest, as the owner of the tables, so that a
-- producer needs only the right to insert. More of them are in functions.sql.

-- What a message is known by: its explicit key, else its body and id.
CREATE FUNCTION identity_of(_dedup_key text, _message_id text, _body bytea) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN coalesce(
    '=' || _dedup_key, left(encode(sha256(_body), 'hex'), 32) || ':' || _message_id
);

CREATE FUNCTION identify() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = message_router, pg_temp
AS $$
BEGIN
    NEW.identity := identity_of(NEW.dedup_key, NEW.message_id, NEW.body);
    -- A row that was inserted without the router has no size. Keeping it longer does no harm.
    NEW.is_kept := NEW.is_kept OR position('"payload"'::bytea IN NEW.body) > 0
        OR position('"replyTo"'::bytea IN NEW.body) > 0;
    RETURN NEW;
END
$$;

CREATE FUNCTION complete_row() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF NEW.high_priority THEN
        NEW.priority := 9;
    END IF;
    NEW.high_priority := NEW.priority = 9;
    IF NEW.not_before > clock_timestamp() THEN
        NEW.run_after := greatest(NEW.run_after, NEW.not_before);
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER complete_row BEFORE INSERT ON queue_messages
    FOR EACH ROW
    WHEN (NEW.not_before IS NOT NULL OR NEW.high_priority <> (NEW.priority = 9))
    EXECUTE FUNCTION complete_row();

INSERT INTO schema_versions (version, incarnation, revision)
VALUES (6, left(replace(gen_random_uuid()::text, '-', ''), 16), 5);
