-- The work queue in PostgreSQL, version 1 (SPEC §12): tables, and who may claim what.
--
-- Everything that the router asks for is one call of one function: one statement, one transaction
-- that begins and ends in the server. So nothing is left locked by a client that dies, and no
-- session is needed: a transaction pooler may stand in between.
--
-- Three rules make it safe without a lock around everything:
--   1. Claims of one queue run one after the other, and a message that is ready is changed by
--      claims only. Publishing and settling take no lock but those of their own rows.
--   2. Who settles or publishes leaves the group's key in queue_changes, in the same transaction;
--      the next claim decides anew what that group offers. Between the two, a group offers less
--      than it could, never more.
--   3. A lease is known by its token. An ended lease loses it when a claim notices.
--
-- Functions must be volatile, and transactions "read committed": each statement behind the lock
-- has to see what was committed before it got the lock.

CREATE SCHEMA IF NOT EXISTS message_router;
SET LOCAL search_path = message_router;

CREATE TABLE schema_versions (
    version      integer     PRIMARY KEY,
    installed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row for each queue that has been consumed: its options, and whether to ring.
CREATE TABLE queues (
    queue   text             PRIMARY KEY,
    keep    double precision NOT NULL, -- seconds that a finished message stays
    audit   double precision NOT NULL, -- seconds that its story stays; 0: none is written
    waiting boolean          NOT NULL DEFAULT false -- the last claim found nothing
);

CREATE TABLE queue_messages (
    id               bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- the order of a lane
    queue            text        NOT NULL,
    message_id       text        NOT NULL,
    dedup_key        text,                          -- NULL: the message id
    pool             text        NOT NULL DEFAULT 'DEFAULT-POOL',
    group_id         text,                          -- NULL: independent of all others
    group_key        bigint      GENERATED ALWAYS AS (
        hashtextextended(length(pool)::text || ' ' || pool || ' ' || group_id, 0)
    ) STORED,                                       -- if two groups share one, they share a line
    high_priority    boolean     NOT NULL DEFAULT false,
    state            text        NOT NULL DEFAULT 'ready'
                     CHECK (state IN ('ready', 'in-flight', 'succeeded', 'failed')),
    -- Of a grouped one, whom a claim may hand it to: '' anyone, a worker's id only that one, NULL
    -- nobody now. Only the first unsettled one of a lane is offered; the claim goes on from there.
    offered_to       text,
    run_after        timestamptz,                   -- NULL: due; else the instant it is due
    lease_token      bigint,                        -- of the hand-over that is in flight, or ended it
    lease_version    integer     NOT NULL DEFAULT 0,
    lease_until      timestamptz,
    worker_id        text,
    deliveries       integer     NOT NULL DEFAULT 0,
    attempts         integer     NOT NULL DEFAULT 0,
    posts            integer     NOT NULL DEFAULT 0,
    last_error       text,
    published_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    first_claimed_at timestamptz,
    last_claimed_at  timestamptz,
    finished_at      timestamptz,                   -- NULL: unsettled
    body             bytea       NOT NULL           -- emptied when it is finished
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.2
);

-- Each index can serve the statements that it is for, and no other: the planner has no choice. Its
-- plans are kept, and made while the table may be empty.
CREATE UNIQUE INDEX by_dedup_key ON queue_messages ((coalesce(dedup_key, message_id)), queue);

-- What can be claimed, in claim order, and nothing else: a claim never steps over a blocked row.
CREATE INDEX loose ON queue_messages (queue, high_priority DESC, id)
    WHERE group_key IS NULL AND state = 'ready' AND run_after IS NULL;

CREATE INDEX offers ON queue_messages (queue, offered_to, high_priority DESC, id)
    WHERE offered_to IS NOT NULL;

CREATE INDEX lanes ON queue_messages (queue, group_key, high_priority, id)
    WHERE group_key IS NOT NULL AND finished_at IS NULL;

CREATE INDEX groups_in_flight ON queue_messages (queue, group_key, high_priority)
    WHERE group_key IS NOT NULL AND state = 'in-flight';

CREATE INDEX leases ON queue_messages (queue, lease_until) WHERE lease_until IS NOT NULL;

CREATE INDEX delays ON queue_messages (queue, run_after) WHERE run_after IS NOT NULL;

CREATE INDEX finished ON queue_messages (queue, finished_at) WHERE finished_at IS NOT NULL;

-- Groups to decide about, rule 2.
CREATE TABLE queue_changes (
    queue     text   NOT NULL,
    group_key bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0);

CREATE INDEX changes_of_queue ON queue_changes (queue);

-- What happened, a row for each change of state (WQ-8).
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


-- Publishing. A plain INSERT is enough: the trigger does the rest, as the owner of the tables, so
-- that a producer needs no more than the right to insert.

CREATE FUNCTION published() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = message_router, pg_temp
AS $$
BEGIN
    INSERT INTO queue_changes (queue, group_key)
    SELECT DISTINCT added.queue, added.group_key FROM added WHERE added.group_key IS NOT NULL;

    INSERT INTO queue_audit (id, queue, state)
    SELECT added.id, added.queue, added.state
    FROM added LEFT JOIN queues USING (queue)
    WHERE coalesce(queues.audit, 1) > 0;

    -- Only if someone waits: each NOTIFY makes commits of the whole server queue up.
    PERFORM pg_notify('message_router', queues.queue)
    FROM queues
    WHERE queues.waiting AND queues.queue IN (SELECT added.queue FROM added);
    RETURN NULL;
END
$$;

CREATE TRIGGER published AFTER INSERT ON queue_messages
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION published();

-- Puts them in, in their order. Answers the dedup keys of those that were not there yet.
CREATE FUNCTION publish(
    _queue text, _dedup_window double precision, _message_ids text[], _dedup_keys text[],
    _pools text[], _group_ids text[], _high_priorities boolean[], _bodies bytea[]
) RETURNS SETOF text
LANGUAGE plpgsql
AS $$
BEGIN
    -- Finished messages outside of the dedup window that nobody has pruned yet. The second coalesce
    -- keeps the planner from reading all that is finished.
    DELETE FROM queue_messages
    WHERE queue = _queue AND coalesce(dedup_key, message_id) = ANY (_dedup_keys)
      AND coalesce(finished_at, 'infinity')
          <= clock_timestamp() - make_interval(secs => _dedup_window);

    RETURN QUERY
    INSERT INTO queue_messages (
        queue, message_id, dedup_key, pool, group_id, high_priority, body
    )
    SELECT _queue, item.message_id, item.dedup_key, item.pool, item.group_id, item.high_priority,
           item.body
    FROM unnest(_message_ids, _dedup_keys, _pools, _group_ids, _high_priorities, _bodies)
         WITH ORDINALITY
         AS item (message_id, dedup_key, pool, group_id, high_priority, body, place)
    ORDER BY item.place
    ON CONFLICT DO NOTHING
    RETURNING queue_messages.dedup_key;
END
$$;


-- Claiming.

-- Makes claimable what has waited, or been held, for long enough. Rows that someone is settling at
-- this instant are left alone.
CREATE FUNCTION wake(_queue text, _now timestamptz) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM queue_messages WHERE queue = _queue AND run_after <= _now)
       AND NOT EXISTS (SELECT FROM queue_messages WHERE queue = _queue AND lease_until <= _now)
    THEN
        RETURN;
    END IF;

    WITH waited AS (
        SELECT id FROM queue_messages
        WHERE queue = _queue AND run_after <= _now
        ORDER BY run_after LIMIT 1000 FOR UPDATE SKIP LOCKED
    ), held AS (
        SELECT id FROM queue_messages
        WHERE queue = _queue AND lease_until <= _now
        ORDER BY lease_until LIMIT 1000 FOR UPDATE SKIP LOCKED
    ), woken AS (
        UPDATE queue_messages
        SET state = 'ready', run_after = NULL, lease_token = NULL, lease_until = NULL
        FROM (SELECT id, false AS was_held FROM waited
              UNION ALL SELECT id, true FROM held) AS due
        WHERE queue_messages.id = due.id
        RETURNING queue_messages.id, group_key, worker_id, was_held
    ), noted AS (
        INSERT INTO queue_audit (id, queue, state, worker_id, error)
        SELECT woken.id, _queue, 'ready', woken.worker_id, 'the lease ended'
        FROM woken, queues
        WHERE was_held AND queues.queue = _queue AND queues.audit > 0
    )
    INSERT INTO queue_changes (queue, group_key)
    SELECT DISTINCT _queue, group_key FROM woken WHERE group_key IS NOT NULL;
END
$$;

-- Decides anew about the first unsettled message of each lane of these groups. A lane with a message
-- in flight, or whose first has to wait, offers nothing; a group of which a worker holds some offers
-- only to that worker.
CREATE FUNCTION reoffer(_queue text, _groups bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE queue_messages
    SET offered_to = decision.worker
    FROM (
        SELECT head.id, CASE
            WHEN head.run_after IS NOT NULL THEN NULL
            WHEN (
                SELECT true FROM queue_messages AS held
                WHERE held.state = 'in-flight' AND held.queue = _queue
                  AND held.group_key = changed.group_key AND held.high_priority = tier.high
                LIMIT 1
            ) THEN NULL
            ELSE coalesce((
                SELECT held.worker_id FROM queue_messages AS held
                WHERE held.state = 'in-flight' AND held.queue = _queue
                  AND held.group_key = changed.group_key
                LIMIT 1
            ), '')
        END AS worker
        FROM unnest(_groups) AS changed (group_key)
        CROSS JOIN (VALUES (false), (true)) AS tier (high)
        CROSS JOIN LATERAL (
            SELECT first.id, first.state, first.run_after FROM queue_messages AS first
            WHERE first.queue = _queue AND first.group_key = changed.group_key
              AND first.high_priority = tier.high AND first.finished_at IS NULL
            ORDER BY first.id LIMIT 1
        ) AS head
        WHERE head.state = 'ready'
    ) AS decision
    WHERE queue_messages.id = decision.id
      AND queue_messages.offered_to IS DISTINCT FROM decision.worker;
END
$$;

-- Decides about the groups that were changed since (rule 2).
CREATE FUNCTION sort_in(_queue text) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _groups bigint[];
BEGIN
    WITH changes AS (
        DELETE FROM queue_changes
        WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM queue_changes WHERE queue = _queue LIMIT 5000
        ))
        RETURNING group_key
    )
    SELECT array_agg(DISTINCT group_key) INTO _groups FROM changes;
    IF _groups IS NOT NULL THEN
        PERFORM reoffer(_queue, _groups);
    END IF;
END
$$;

-- Forgets in small steps what is old, about twice as fast as it can come.
CREATE FUNCTION prune(_queue text, _now timestamptz, _at_most integer) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    DELETE FROM queue_messages
    WHERE id = ANY (ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND finished_at <= _now - make_interval(secs => (
            SELECT keep FROM queues WHERE queue = _queue
        ))
        ORDER BY finished_at LIMIT 2 * _at_most
    ));
    DELETE FROM queue_audit
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM queue_audit
        WHERE queue = _queue AND at <= _now - make_interval(secs => (
            SELECT audit FROM queues WHERE queue = _queue
        ))
        ORDER BY at LIMIT 6 * _at_most
    ));
END
$$;

-- The next messages for this worker: high priority first, then by id; of a lane, a run from its
-- first. No run goes beyond the last head, as nothing behind that can be among the first _limit.
CREATE FUNCTION pick(_queue text, _worker text, _limit integer) RETURNS bigint[]
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN (
        WITH alone AS (
            SELECT id, high_priority FROM queue_messages
            WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
            ORDER BY high_priority DESC, id LIMIT _limit FOR UPDATE SKIP LOCKED
        ), offered AS (
            SELECT first.* FROM (VALUES (''), (_worker)) AS offer (whom)
            CROSS JOIN LATERAL (
                SELECT id, high_priority, group_key FROM queue_messages AS head
                WHERE queue = _queue AND offered_to = offer.whom AND id = (
                    SELECT early.id FROM queue_messages AS early -- perhaps committed later
                    WHERE early.queue = _queue AND early.group_key = head.group_key
                      AND early.high_priority = head.high_priority AND early.finished_at IS NULL
                    ORDER BY early.id LIMIT 1
                )
                ORDER BY high_priority DESC, id LIMIT _limit FOR UPDATE SKIP LOCKED
            ) AS first
        ), heads AS MATERIALIZED (
            SELECT id, high_priority, NULL::bigint AS group_key FROM alone
            UNION ALL SELECT id, high_priority, group_key FROM offered
            ORDER BY high_priority DESC, id LIMIT _limit
        ), last AS (
            SELECT id, high_priority FROM heads
            ORDER BY high_priority DESC, id OFFSET _limit - 1
        ), candidates AS (
            SELECT id, high_priority FROM heads WHERE group_key IS NULL
            UNION ALL
            SELECT run.id, heads.high_priority
            FROM heads LEFT JOIN last ON last.high_priority = heads.high_priority
            CROSS JOIN LATERAL (
                SELECT near.id, bool_and(near.is_due) OVER (ORDER BY near.id) AS is_due
                FROM (
                    SELECT mate.id, mate.state = 'ready' AND mate.run_after IS NULL AS is_due
                    FROM queue_messages AS mate
                    WHERE mate.queue = _queue AND mate.group_key = heads.group_key
                      AND mate.high_priority = heads.high_priority AND mate.finished_at IS NULL
                      AND mate.id BETWEEN heads.id AND coalesce(last.id, 9223372036854775807)
                    ORDER BY mate.id LIMIT _limit
                ) AS near
            ) AS run
            WHERE heads.group_key IS NOT NULL AND run.is_due
        )
        SELECT array_agg(id) FROM (
            SELECT id FROM candidates ORDER BY high_priority DESC, id LIMIT _limit
        ) AS chosen
    );
END
$$;

-- Seconds until time alone may change what a claim finds; NULL: it will not.
CREATE FUNCTION time_to_change(_queue text) RETURNS double precision
LANGUAGE plpgsql
AS $$
BEGIN
    IF EXISTS (SELECT FROM queue_changes WHERE queue = _queue) THEN
        RETURN 0;
    END IF;
    RETURN extract(epoch FROM least(
        (SELECT run_after FROM queue_messages
         WHERE queue = _queue AND run_after IS NOT NULL ORDER BY run_after LIMIT 1),
        (SELECT lease_until FROM queue_messages
         WHERE queue = _queue AND lease_until IS NOT NULL ORDER BY lease_until LIMIT 1)
    ) - clock_timestamp());
END
$$;

-- Takes the next messages (WQ-2), after ending what is due to end. Nothing found: one row that only
-- tells how long to wait.
CREATE FUNCTION claim(
    _queue text, _worker text, _token bigint, _limit integer, _lease double precision
) RETURNS TABLE (
    id bigint, grouped boolean, high_priority boolean, deliveries integer, attempts integer,
    posts integer, body bytea, wait double precision
)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    _now     timestamptz;
    _options queues;
    _taken   bigint[];
    _pairs   bigint[]; -- groups of which a message of high priority was taken
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('message_router claim ' || _queue, 0));
    _now := clock_timestamp();
    SELECT * INTO _options FROM queues WHERE queue = _queue;
    PERFORM wake(_queue, _now);
    PERFORM sort_in(_queue);
    _taken := pick(_queue, _worker, _limit);

    -- A message that someone has waited for need not wait for this as well.
    IF _taken IS NULL OR NOT _options.waiting THEN
        PERFORM prune(_queue, _now, _limit);
    END IF;
    IF _options.waiting IS DISTINCT FROM (_taken IS NULL) THEN
        UPDATE queues SET waiting = (_taken IS NULL) WHERE queue = _queue;
    END IF;
    IF _taken IS NULL THEN
        RETURN QUERY SELECT NULL::bigint, NULL::boolean, NULL::boolean, NULL::integer,
                            NULL::integer, NULL::integer, NULL::bytea, time_to_change(_queue);
        RETURN;
    END IF;

    RETURN QUERY
    WITH taken AS (
        UPDATE queue_messages
        SET state = 'in-flight',
            offered_to = NULL,
            lease_token = _token,
            lease_version = lease_version + 1,
            lease_until = _now + make_interval(secs => _lease),
            worker_id = _worker,
            deliveries = deliveries + 1,
            first_claimed_at = coalesce(first_claimed_at, _now),
            last_claimed_at = _now
        WHERE queue_messages.id = ANY (_taken)
        RETURNING queue_messages.id, group_key IS NOT NULL, high_priority, deliveries, attempts,
                  posts, body, 0::double precision
    )
    SELECT * FROM taken ORDER BY high_priority DESC, id;

    IF _options.audit > 0 THEN
        INSERT INTO queue_audit (id, queue, state, worker_id)
        SELECT unnest(_taken), _queue, 'in-flight', _worker;
    END IF;

    -- A group's other lane is for this worker alone now. Only the regular lane of a high one can
    -- still be on offer: before a regular one is taken, all high ones are.
    SELECT array_agg(DISTINCT group_key) INTO _pairs FROM queue_messages
    WHERE queue_messages.id = ANY (_taken) AND high_priority AND group_key IS NOT NULL;
    IF _pairs IS NOT NULL THEN
        PERFORM reoffer(_queue, _pairs);
    END IF;
END
$$;


-- Settling: each by id and token, whatever else happens to the queue meanwhile.

-- Removes them. Answers the places (from 0) of those that are not ours to remove. An acknowledgement
-- that is sent twice is no complaint.
CREATE FUNCTION finish(_ids bigint[], _tokens bigint[], _error text) RETURNS SETOF integer
LANGUAGE plpgsql
AS $$
DECLARE
    _finished integer;
BEGIN
    WITH done AS (
        UPDATE queue_messages AS message
        SET state = CASE WHEN _error = '' THEN 'succeeded' ELSE 'failed' END,
            last_error = CASE WHEN _error = '' THEN message.last_error ELSE _error END,
            lease_until = NULL,
            finished_at = clock_timestamp(),
            body = ''
        FROM unnest(_ids, _tokens) AS lease (id, token)
        WHERE message.id = lease.id AND message.lease_token = lease.token
          AND message.finished_at IS NULL
        RETURNING message.id, message.queue, message.group_key, message.state, message.worker_id
    ), changed AS (
        INSERT INTO queue_changes (queue, group_key)
        SELECT DISTINCT done.queue, done.group_key FROM done WHERE done.group_key IS NOT NULL
    ), noted AS (
        INSERT INTO queue_audit (id, queue, state, worker_id, error)
        SELECT done.id, done.queue, done.state, done.worker_id, nullif(_error, '')
        FROM done JOIN queues USING (queue) WHERE queues.audit > 0
    )
    SELECT count(*) INTO _finished FROM done;

    IF _finished < cardinality(_ids) THEN
        RETURN QUERY
        SELECT lease.place::integer - 1
        FROM unnest(_ids, _tokens) WITH ORDINALITY AS lease (id, token, place)
        WHERE NOT EXISTS (
            SELECT FROM queue_messages AS message
            WHERE message.id = lease.id AND message.lease_token = lease.token
              AND message.finished_at IS NOT NULL
        )
        ORDER BY lease.place;
    END IF;
END
$$;

-- Makes it claimable again after _delay seconds. False: it is not ours any more.
CREATE FUNCTION give_back(
    _id bigint, _token bigint, _delay double precision, _attempts integer, _posts integer,
    _error text
) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    _ours boolean;
BEGIN
    WITH done AS (
        UPDATE queue_messages
        SET state = 'ready',
            run_after = CASE WHEN _delay > 0 THEN clock_timestamp() + make_interval(secs => _delay) END,
            lease_token = NULL,
            lease_until = NULL,
            attempts = _attempts,
            posts = _posts,
            last_error = CASE WHEN _error = '' THEN last_error ELSE _error END
        WHERE id = _id AND lease_token = _token AND finished_at IS NULL
        RETURNING id, queue, group_key, worker_id
    ), changed AS (
        INSERT INTO queue_changes (queue, group_key)
        SELECT queue, group_key FROM done WHERE group_key IS NOT NULL
    ), noted AS (
        INSERT INTO queue_audit (id, queue, state, worker_id, error)
        SELECT done.id, done.queue, 'ready', done.worker_id, nullif(_error, '')
        FROM done JOIN queues USING (queue) WHERE queues.audit > 0
    )
    SELECT count(*) = 1 INTO _ours FROM done;
    RETURN _ours;
END
$$;

-- Keeps them for longer. Answers the places (from 0) of those that are lost.
CREATE FUNCTION extend(_ids bigint[], _tokens bigint[], _seconds double precision)
RETURNS SETOF integer
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY
    WITH asked AS (
        SELECT * FROM unnest(_ids, _tokens) WITH ORDINALITY AS lease (id, token, place)
    ), done AS (
        UPDATE queue_messages AS message
        SET lease_until = clock_timestamp() + make_interval(secs => _seconds)
        FROM asked
        WHERE message.id = asked.id AND message.lease_token = asked.token
          AND message.state = 'in-flight' AND message.lease_until > clock_timestamp()
        RETURNING message.id, asked.token
    )
    SELECT asked.place::integer - 1
    FROM asked LEFT JOIN done USING (id, token) WHERE done.id IS NULL;
END
$$;


-- What is there, counted over indexes. Due is what stands first in its lane and could be handed to
-- this worker now, counting also what only waits for a claim to notice it.
CREATE FUNCTION depth(_queue text, _worker text)
RETURNS TABLE (waiting bigint, in_flight bigint, due bigint)
LANGUAGE plpgsql
AS $$
DECLARE
    _loose   bigint;
    _grouped bigint;
    _delayed bigint; -- of those without a group
    _ended   bigint; -- delays and leases
    _offered bigint;
    _changed bigint;
    _held    bigint;
    _held_in_groups bigint;
BEGIN
    SELECT count(*) INTO _loose FROM queue_messages
    WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL;
    SELECT count(*) INTO _grouped FROM queue_messages
    WHERE queue = _queue AND group_key IS NOT NULL AND finished_at IS NULL;
    SELECT count(*) FILTER (WHERE group_key IS NULL),
           count(*) FILTER (WHERE run_after <= clock_timestamp())
    INTO _delayed, _ended FROM queue_messages
    WHERE queue = _queue AND run_after IS NOT NULL;
    SELECT count(*), count(group_key),
           _ended + count(*) FILTER (WHERE lease_until <= clock_timestamp())
    INTO _held, _held_in_groups, _ended FROM queue_messages
    WHERE queue = _queue AND lease_until IS NOT NULL;
    SELECT count(*) INTO _offered FROM queue_messages
    WHERE queue = _queue AND offered_to IN ('', _worker);
    SELECT count(DISTINCT change.group_key) INTO _changed FROM queue_changes AS change
    WHERE change.queue = _queue AND EXISTS (
        SELECT FROM queue_messages AS message
        WHERE message.queue = _queue AND message.group_key = change.group_key
          AND message.finished_at IS NULL AND message.state = 'ready'
          AND message.run_after IS NULL AND message.offered_to IS NULL
    ) AND NOT EXISTS (
        SELECT FROM queue_messages AS held
        WHERE held.queue = _queue AND held.group_key = change.group_key
          AND held.state = 'in-flight'
    );
    RETURN QUERY SELECT _loose + _delayed + _grouped - _held_in_groups, _held,
                        _loose + _ended + _offered + _changed;
END
$$;

-- Says how long things stay, as the latest consumer wants it.
CREATE FUNCTION configure(_queue text, _keep double precision, _audit double precision)
RETURNS void
LANGUAGE sql
BEGIN ATOMIC
    INSERT INTO queues (queue, keep, audit) VALUES (_queue, _keep, _audit)
    ON CONFLICT (queue) DO UPDATE SET keep = excluded.keep, audit = excluded.audit
    WHERE (queues.keep, queues.audit) IS DISTINCT FROM (excluded.keep, excluded.audit);
END;

DO $$
DECLARE
    _function regprocedure;
BEGIN
    FOR _function IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = 'message_router'::regnamespace
          AND proname IN ('publish', 'claim', 'finish', 'give_back', 'extend', 'depth')
    LOOP
        EXECUTE format(
            'ALTER FUNCTION %s'
            ' SET search_path = message_router, pg_temp'
            ' SET enable_seqscan = off SET enable_bitmapscan = off'
            ' SET enable_hashjoin = off SET enable_mergejoin = off'
            ' SET jit = off SET plan_cache_mode = force_generic_plan',
            _function
        );
    END LOOP;
END
$$;

INSERT INTO schema_versions (version) VALUES (1);
