-- Version 2: which messages are the same (ID-1, WQ-1), dead workers (WQ-10), clocks that are set back
-- (WQ-11).

SET LOCAL search_path = message_router;

-- Names this schema among all that ever were: with it, the id of a row names one message.
ALTER TABLE schema_versions ADD COLUMN incarnation text;


-- What a message is known by: its explicit key, else its body and id. NULL: it may come again.
ALTER TABLE queue_messages ADD COLUMN identity text;

CREATE FUNCTION identity_of(_dedup_key text, _message_id text, _body bytea) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN coalesce(
    '=' || _dedup_key, left(encode(sha256(_body), 'hex'), 32) || ':' || _message_id
);

-- Of what version 1 has finished, the body is gone.
UPDATE queue_messages
SET identity = identity_of(nullif(dedup_key, message_id), message_id, body)
WHERE finished_at IS NULL OR state = 'succeeded' AND dedup_key <> message_id;

DROP INDEX by_dedup_key;
CREATE UNIQUE INDEX by_identity ON queue_messages (identity, queue);

-- For those who publish by SQL.
CREATE FUNCTION identify() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = message_router, pg_temp
AS $$
BEGIN
    NEW.identity := identity_of(NEW.dedup_key, NEW.message_id, NEW.body);
    RETURN NEW;
END
$$;

CREATE TRIGGER identify BEFORE INSERT ON queue_messages
    FOR EACH ROW WHEN (NEW.identity IS NULL) EXECUTE FUNCTION identify();

-- Puts them in, in their order. Answers the identities of those that were not there yet. The
-- parameter is called as in version 1, whose routers may still call this.
CREATE OR REPLACE FUNCTION publish(
    _queue text, _dedup_window double precision, _message_ids text[], _dedup_keys text[],
    _pools text[], _group_ids text[], _high_priorities boolean[], _bodies bytea[]
) RETURNS SETOF text
LANGUAGE plpgsql
AS $$
BEGIN
    -- Finished messages outside of the dedup window. If the clock was set back, they may be in the
    -- future. The coalesce keeps the planner from reading all that is finished.
    UPDATE queue_messages SET identity = NULL
    WHERE queue = _queue AND identity = ANY (_dedup_keys)
      AND coalesce(finished_at, clock_timestamp())
          NOT BETWEEN clock_timestamp() - make_interval(secs => _dedup_window)
              AND clock_timestamp() + make_interval(secs => _dedup_window);

    RETURN QUERY
    INSERT INTO queue_messages (
        queue, message_id, identity, pool, group_id, high_priority, body
    )
    SELECT _queue, item.message_id, item.identity, item.pool, item.group_id, item.high_priority,
           item.body
    FROM unnest(_message_ids, _dedup_keys, _pools, _group_ids, _high_priorities, _bodies)
         WITH ORDINALITY
         AS item (message_id, identity, pool, group_id, high_priority, body, place)
    ORDER BY item.place
    ON CONFLICT DO NOTHING
    RETURNING queue_messages.identity;
END
$$;

-- As before; what has died may be published again at once.
CREATE OR REPLACE FUNCTION finish(_ids bigint[], _tokens bigint[], _error text)
RETURNS SETOF integer
LANGUAGE plpgsql
AS $$
DECLARE
    _finished integer;
BEGIN
    WITH done AS (
        UPDATE queue_messages AS message
        SET state = CASE WHEN _error = '' THEN 'succeeded' ELSE 'failed' END,
            identity = CASE WHEN _error = '' THEN message.identity END,
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


-- Ends the leases of workers that are certainly dead, in one queue.
CREATE FUNCTION end_leases(_queue text, _workers text[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    WITH ended AS (
        UPDATE queue_messages
        SET state = 'ready', lease_token = NULL, lease_until = NULL
        WHERE queue = _queue AND lease_until IS NOT NULL AND worker_id = ANY (_workers)
        RETURNING id, group_key, worker_id
    ), noted AS (
        INSERT INTO queue_audit (id, queue, state, worker_id, error)
        SELECT ended.id, _queue, 'ready', ended.worker_id, 'the worker died'
        FROM ended, queues
        WHERE queues.queue = _queue AND queues.audit > 0
    )
    INSERT INTO queue_changes (queue, group_key)
    SELECT DISTINCT _queue, group_key FROM ended WHERE group_key IS NOT NULL;
END
$$;


-- When a claim last asked the clock; a few seconds late.
ALTER TABLE queues ADD COLUMN clock timestamptz;

-- Delays of version 1 that were written with a wrong clock.
UPDATE queue_messages SET run_after = clock_timestamp() + interval '12 hours'
WHERE deliveries > 0 AND run_after > clock_timestamp() + interval '12 hours';

-- Notices that the server's clock was set back, and lets leases and delays end as if it were not.
-- A message that was never delivered has its run_after from whoever published it: that one is meant
-- by the calendar.
CREATE FUNCTION check_clock(_queue text, _now timestamptz) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _clock timestamptz := (SELECT clock FROM queues WHERE queue = _queue);
BEGIN
    IF _clock BETWEEN _now - interval '5 seconds' AND _now THEN
        RETURN;
    END IF;
    UPDATE queues SET clock = _now WHERE queue = _queue;
    IF _clock > _now THEN
        UPDATE queue_messages
        SET run_after = least(run_after - (_clock - _now), _now + interval '12 hours')
        WHERE queue = _queue AND run_after IS NOT NULL AND deliveries > 0;
        UPDATE queue_messages
        SET lease_until = lease_until - (_clock - _now)
        WHERE queue = _queue AND lease_until IS NOT NULL;
    END IF;
END
$$;

-- As before, after a look at the clock.
CREATE OR REPLACE FUNCTION wake(_queue text, _now timestamptz) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM check_clock(_queue, _now);
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

-- As before; also what was finished by a clock that was far ahead.
CREATE OR REPLACE FUNCTION prune(_queue text, _now timestamptz, _at_most integer) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _keep interval := (SELECT make_interval(secs => keep) FROM queues WHERE queue = _queue);
BEGIN
    DELETE FROM queue_messages
    WHERE id = ANY (ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND finished_at <= _now - _keep
        ORDER BY finished_at LIMIT 2 * _at_most
    ) || ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND finished_at > _now + _keep
        ORDER BY finished_at DESC LIMIT 2 * _at_most
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

DO $$
DECLARE
    _function regprocedure;
BEGIN
    FOR _function IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = 'message_router'::regnamespace
          AND proname IN ('publish', 'finish', 'end_leases')
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

INSERT INTO schema_versions (version, incarnation)
VALUES (2, left(replace(gen_random_uuid()::text, '-', ''), 16));
