-- The functions of the work queue in PostgreSQL, which are all that routers call. Run it after schema.sql
-- or after an upgrade, in the same transaction. Routers of the version before call them, too: a new
-- argument needs a default, and a function that takes other arguments needs another name.

SET LOCAL search_path = message_router;


-- What an INSERT does.

-- The members of a batch are new to it, whatever else was published: they have no identity. PGMQ takes
-- whatever is sent.
CREATE OR REPLACE TRIGGER identify BEFORE INSERT ON queue_messages
    FOR EACH ROW WHEN (NEW.identity IS NULL AND NEW.batch IS NULL AND NEW.pgmq_id IS NULL)
    EXECUTE FUNCTION identify();

CREATE OR REPLACE FUNCTION published() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = message_router, pg_temp
AS $$
BEGIN
    INSERT INTO queue_changes (queue, group_key)
    SELECT DISTINCT added.queue, added.group_key FROM added WHERE added.group_key IS NOT NULL;

    INSERT INTO queue_audit (id, queue, state)
    SELECT added.id, added.queue, added.state
    FROM added LEFT JOIN queues USING (queue)
    WHERE coalesce(queues.audit, 1) > 0 AND added.pgmq_id IS NULL;

    -- Only if someone waits: each NOTIFY makes all commits of the server wait for each other.
    PERFORM pg_notify('message_router', queues.queue)
    FROM queues
    WHERE queues.waiting AND queues.queue IN (SELECT added.queue FROM added);
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER published AFTER INSERT ON queue_messages
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION published();

-- A row for a queue of PGMQ is sent there: members of batches, their callbacks, ticks. What the router
-- has sent itself comes with its pgmq_id.
CREATE OR REPLACE FUNCTION send_to_pgmq() RETURNS trigger
LANGUAGE plpgsql
AS $$
DECLARE
    _name  text := substr(NEW.queue, length('pgmq:') + 1);
    _body  jsonb[] := ARRAY[convert_from(NEW.body, 'UTF8')::jsonb];
    _group text := coalesce(NEW.group_id, gen_random_uuid()::text); -- one for itself
    _delay integer := coalesce(
        greatest(ceil(extract(epoch FROM NEW.not_before - clock_timestamp())), 0), 0
    );
BEGIN
    IF NEW.identity IS NOT NULL AND EXISTS (
        SELECT FROM message_router.queue_messages AS known
        WHERE known.identity = NEW.identity AND known.queue = NEW.queue
    ) THEN
        RETURN NULL;
    END IF;
    IF to_regprocedure('pgmq.send_batch(text, jsonb[], jsonb[], integer)') IS NULL THEN
        SELECT msg_id INTO STRICT NEW.pgmq_id FROM pgmq.send_batch(_name, _body, _delay) AS msg_id;
    ELSE
        SELECT msg_id INTO STRICT NEW.pgmq_id FROM pgmq.send_batch(
            _name, _body, ARRAY[jsonb_build_object('x-pgmq-group', _group)], _delay
        ) AS msg_id;
    END IF;
    NEW.pgmq_group := NEW.group_id;
    NEW.group_id := NULL;
    NEW.published_at := now(); -- as PGMQ does
    NEW.state := 'in-flight'; -- the lease token says whether it is
    NEW.body := '';
    RETURN NEW;
END
$$;

CREATE OR REPLACE TRIGGER send_to_pgmq BEFORE INSERT ON queue_messages
    FOR EACH ROW WHEN (NEW.pgmq_id IS NULL AND starts_with(NEW.queue, 'pgmq:'))
    EXECUTE FUNCTION send_to_pgmq();


-- Publishing.

-- Adds the messages in their order. Returns the identities of those that were not there yet. Of the
-- arrays _kept to _payload_sizes, each is NULL if no message has any of these. With _done, it adds
-- only those whose place is among them.
CREATE OR REPLACE FUNCTION publish(
    _dedup_window double precision, _queues text[], _message_ids text[], _identities text[],
    _pools text[], _group_ids text[], _priorities smallint[], _bodies bytea[], _kept boolean[],
    _not_befores double precision[], _correlation_ids text[], _payload_sizes integer[],
    _places integer[] DEFAULT NULL, _done integer[] DEFAULT NULL
) RETURNS SETOF text
LANGUAGE plpgsql
AS $$
BEGIN
    -- Finished messages outside of the dedup window may come again. If the clock was set back, they
    -- may be in the future. The coalesce keeps the planner from reading all that is finished.
    UPDATE queue_messages AS message SET identity = NULL
    FROM unnest(_queues, _identities) AS item (queue, identity)
    WHERE message.queue = item.queue AND message.identity = item.identity
      AND coalesce(finished_at, clock_timestamp())
          NOT BETWEEN clock_timestamp() - make_interval(secs => _dedup_window)
              AND clock_timestamp() + make_interval(secs => _dedup_window);

    -- By queue, so that no two calls wait for each other.
    RETURN QUERY
    INSERT INTO queue_messages (
        queue, message_id, identity, pool, group_id, priority, high_priority, body, is_kept,
        not_before, correlation_id, payload_size
    )
    SELECT item.queue, item.message_id, item.identity, item.pool, item.group_id, item.priority,
           item.priority = 9, item.body, coalesce(item.is_kept, false),
           to_timestamp(item.not_before), item.correlation_id, item.payload_size
    FROM unnest(
             _queues, _message_ids, _identities, _pools, _group_ids, _priorities, _bodies, _kept,
             _not_befores, _correlation_ids, _payload_sizes, _places
         ) WITH ORDINALITY
         AS item (
             queue, message_id, identity, pool, group_id, priority, body, is_kept, not_before,
             correlation_id, payload_size, place, number
         )
    WHERE _done IS NULL OR item.place = ANY (_done)
    ORDER BY item.queue, item.number
    ON CONFLICT DO NOTHING
    RETURNING queue_messages.identity;
END
$$;

-- Publishes a tick of a schedule, unless it is not newer than the last one (CMD-10).
CREATE OR REPLACE FUNCTION publish_tick(
    _schedule text, _tick bigint,
    _dedup_window double precision, _queues text[], _message_ids text[], _identities text[],
    _pools text[], _group_ids text[], _priorities smallint[], _bodies bytea[], _kept boolean[],
    _not_befores double precision[], _correlation_ids text[], _payload_sizes integer[]
) RETURNS boolean
LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO queue_ticks AS last (queue, schedule, tick) VALUES (_queues[1], _schedule, _tick)
    ON CONFLICT (queue, schedule) DO UPDATE SET tick = excluded.tick
    WHERE last.tick < excluded.tick;
    IF FOUND THEN
        PERFORM publish(
            _dedup_window, _queues, _message_ids, _identities, _pools, _group_ids, _priorities,
            _bodies, _kept, _not_befores, _correlation_ids, _payload_sizes
        );
        RETURN true;
    END IF;
    RETURN false;
END
$$;


-- Claiming.

-- Notices that the server's clock was set back, and moves the ends of leases and delays with it. The
-- run_after of a message that was never delivered is the publisher's, and meant by the calendar.
CREATE OR REPLACE FUNCTION check_clock(_queue text, _now timestamptz) RETURNS void
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

-- Makes messages claimable whose delay or lease has ended. Rows that someone is settling at this
-- instant are left alone.
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
        SET state = 'ready', run_after = NULL, lease_token = NULL, lease_until = NULL,
            returned_at = CASE WHEN was_held THEN _now ELSE returned_at END
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

-- Decides about the first unsettled message of each lane of these groups. A lane that has a message in
-- flight, or whose first message has to wait, offers nothing. A group of which a worker holds a
-- message offers only to that worker.
--
-- Groups are compared as rows: if most messages are of one group, the planner would look for the first
-- message of another one by id, and step over all of them.
CREATE OR REPLACE FUNCTION reoffer(_queue text, _groups bigint[]) RETURNS void
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
            WHERE first.queue = _queue AND first.group_key IS NOT NULL AND first.finished_at IS NULL
              AND (first.group_key, first.high_priority) >= (changed.group_key, tier.high)
              AND (first.group_key, first.high_priority) <= (changed.group_key, tier.high)
            ORDER BY first.group_key, first.high_priority, first.id LIMIT 1
        ) AS head
        WHERE head.state = 'ready'
    ) AS decision
    WHERE queue_messages.id = decision.id
      AND queue_messages.offered_to IS DISTINCT FROM decision.worker;
END
$$;

-- Forgets old rows in small steps, about twice as fast as new ones can come; also messages that were
-- finished by a clock that was far ahead.
CREATE OR REPLACE FUNCTION prune(_queue text, _now timestamptz, _at_most integer) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _options queues;
    _keep    interval;
    _results interval;
    _batch   bigint;
BEGIN
    SELECT * INTO _options FROM queues WHERE queue = _queue;
    _keep := make_interval(secs => _options.keep);
    _results := make_interval(secs => _options.keep_results);
    DELETE FROM queue_messages
    WHERE id = ANY (ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND NOT is_kept AND finished_at <= _now - _keep
        ORDER BY finished_at LIMIT 2 * _at_most
    ) || ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND NOT is_kept AND finished_at > _now + _keep
        ORDER BY finished_at DESC LIMIT 2 * _at_most
    ) || ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND is_kept AND finished_at <= _now - _results
        ORDER BY finished_at LIMIT 2 * _at_most
    ) || ARRAY(
        SELECT id FROM queue_messages
        WHERE queue = _queue AND is_kept AND finished_at > _now + _results
        ORDER BY finished_at DESC LIMIT 2 * _at_most
    ));
    SELECT number INTO _batch FROM queue_batches
    WHERE queue = _queue AND callback_at <= _now - interval '7 days'
    ORDER BY callback_at LIMIT 1;
    IF FOUND THEN
        DELETE FROM queue_batch_members
        WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM queue_batch_members WHERE batch = _batch LIMIT 20 * _at_most
        ));
        DELETE FROM queue_batches
        WHERE number = _batch
          AND NOT EXISTS (SELECT FROM queue_batch_members WHERE batch = _batch);
    END IF;
    DELETE FROM queue_audit
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM queue_audit
        WHERE queue = _queue AND at <= _now - make_interval(secs => _options.audit)
        ORDER BY at LIMIT 6 * _at_most
    ));
END
$$;

-- The first messages that this worker may claim of these pools, or of all but these: those without a
-- group, and the first ones of lanes, in claim order.
--
-- To find the pools that have anything to claim takes one look into an index for each of them, and one
-- for each gap between two excluded ones, however much they have. A look with both ends given costs a
-- third of one that is open, which reads a whole page. Of the pools found, the _limit ones whose first
-- messages come first have all that can be among the first _limit. Pools are compared as ranges: for an
-- equality, the planner may choose to read `loose` or `offers`, and step over all that is of others.
CREATE OR REPLACE FUNCTION heads_of_pools(
    _queue text, _worker text, _limit integer, _pools text[], _excludes boolean
) RETURNS TABLE (id bigint, priority smallint, group_key bigint)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE gaps (after, before) AS MATERIALIZED ( -- no pool has an empty code
        SELECT code, lead(code) OVER (ORDER BY code)
        FROM (SELECT '' UNION ALL SELECT unnest(_pools)) AS excluded (code) WHERE _excludes
    ), loose_stock (pool, priority, id, before) AS (
        (
            SELECT first.*, before FROM gaps CROSS JOIN LATERAL (
                SELECT pool, priority, id FROM queue_messages
                WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
                  AND pool > after AND pool < before
                ORDER BY pool, priority DESC, id LIMIT 1
            ) AS first
            WHERE before IS NOT NULL AND EXISTS (
                SELECT FROM queue_messages
                WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
            )
            UNION ALL
            SELECT first.*, before FROM gaps CROSS JOIN LATERAL (
                SELECT pool, priority, id FROM queue_messages
                WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
                  AND pool > after
                ORDER BY pool, priority DESC, id LIMIT 1
            ) AS first
            WHERE before IS NULL
        )
        UNION ALL
        SELECT next.*, before FROM loose_stock CROSS JOIN LATERAL (
            SELECT message.pool, message.priority, message.id FROM queue_messages AS message
            WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
              AND message.pool > loose_stock.pool
            ORDER BY message.pool, message.priority DESC, message.id LIMIT 1
        ) AS next
        WHERE before IS NULL OR next.pool < before
    ), offered_stock (pool, priority, id, before) AS (
        (
            SELECT first.*, before FROM gaps CROSS JOIN LATERAL (
                SELECT pool, priority, id FROM queue_messages
                WHERE queue = _queue AND offered_to = '' AND pool > after AND pool < before
                ORDER BY pool, priority DESC, id LIMIT 1
            ) AS first
            WHERE before IS NOT NULL
              AND EXISTS (SELECT FROM queue_messages WHERE queue = _queue AND offered_to = '')
            UNION ALL
            SELECT first.*, before FROM gaps CROSS JOIN LATERAL (
                SELECT pool, priority, id FROM queue_messages
                WHERE queue = _queue AND offered_to = '' AND pool > after
                ORDER BY pool, priority DESC, id LIMIT 1
            ) AS first
            WHERE before IS NULL
        )
        UNION ALL
        SELECT next.*, before FROM offered_stock CROSS JOIN LATERAL (
            SELECT message.pool, message.priority, message.id FROM queue_messages AS message
            WHERE queue = _queue AND offered_to = '' AND message.pool > offered_stock.pool
            ORDER BY message.pool, message.priority DESC, message.id LIMIT 1
        ) AS next
        WHERE before IS NULL OR next.pool < before
    ), loose_pools (code) AS (
        (SELECT pool FROM loose_stock ORDER BY priority DESC, id LIMIT _limit)
        UNION ALL SELECT unnest(_pools) WHERE NOT _excludes
    ), offered_pools (code) AS (
        (SELECT pool FROM offered_stock ORDER BY priority DESC, id LIMIT _limit)
        UNION ALL SELECT unnest(_pools) WHERE NOT _excludes
    ), alone AS (
        SELECT first.id, first.priority FROM loose_pools CROSS JOIN LATERAL (
            SELECT message.id, message.priority FROM queue_messages AS message
            WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
              AND pool BETWEEN loose_pools.code AND loose_pools.code
            ORDER BY pool, message.priority DESC, message.id LIMIT _limit
        ) AS first
    ), offered AS (
        SELECT first.* FROM offered_pools CROSS JOIN LATERAL (
            SELECT head.id, head.priority, head.group_key FROM queue_messages AS head
            WHERE queue = _queue AND offered_to = ''
              AND pool BETWEEN offered_pools.code AND offered_pools.code AND head.id = (
                SELECT early.id FROM queue_messages AS early -- perhaps committed later
                WHERE early.queue = _queue AND early.group_key IS NOT NULL AND early.finished_at IS NULL
                  AND (early.group_key, early.high_priority) >= (head.group_key, head.high_priority)
                  AND (early.group_key, early.high_priority) <= (head.group_key, head.high_priority)
                ORDER BY early.group_key, early.high_priority, early.id LIMIT 1
            )
            ORDER BY pool, head.priority DESC, head.id LIMIT _limit
        ) AS first
    ), offered_to_us AS ( -- no more than the groups of which this worker holds a message
        SELECT head.id, head.priority, head.group_key FROM queue_messages AS head
        WHERE queue = _queue AND offered_to = _worker AND (pool = ANY (_pools)) <> _excludes
          AND head.id = (
            SELECT early.id FROM queue_messages AS early
            WHERE early.queue = _queue AND early.group_key IS NOT NULL AND early.finished_at IS NULL
              AND (early.group_key, early.high_priority) >= (head.group_key, head.high_priority)
              AND (early.group_key, early.high_priority) <= (head.group_key, head.high_priority)
            ORDER BY early.group_key, early.high_priority, early.id LIMIT 1
        )
    ), first_ones AS MATERIALIZED (
        SELECT alone.id, alone.priority FROM alone
        UNION ALL SELECT offered.id, offered.priority FROM offered
        UNION ALL SELECT offered_to_us.id, offered_to_us.priority FROM offered_to_us
        ORDER BY 2 DESC, 1 LIMIT _limit
    )
    SELECT message.id, message.priority, message.group_key
    FROM first_ones JOIN queue_messages AS message ON message.id = first_ones.id
    WHERE message.state = 'ready'
    ORDER BY message.priority DESC, message.id FOR UPDATE OF message SKIP LOCKED;
END
$$;

-- The next messages for this worker: by priority, then by id; of a lane, a run from its first message,
-- in which none counts more than what is in front of it. No run goes beyond the last head, as nothing
-- behind that can be among the first _limit. _pools are the only ones, or with _excludes all but these;
-- NULL: all. That is the default for claims that began before an upgrade.
CREATE OR REPLACE FUNCTION pick(
    _queue text, _worker text, _limit integer, _pools text[] DEFAULT NULL,
    _excludes boolean DEFAULT false
) RETURNS bigint[]
LANGUAGE plpgsql
AS $$
DECLARE
    _heads      bigint[]; -- the first messages of lanes, in claim order …
    _priorities smallint[];
    _keys       bigint[]; -- … and their groups
BEGIN
    IF _pools IS NULL THEN
        WITH alone AS (
            SELECT id, priority FROM queue_messages
            WHERE queue = _queue AND group_key IS NULL AND state = 'ready' AND run_after IS NULL
            ORDER BY priority DESC, id LIMIT _limit FOR UPDATE SKIP LOCKED
        ), offered AS (
            SELECT first.* FROM (VALUES (''), (_worker)) AS offer (whom)
            CROSS JOIN LATERAL (
                SELECT id, priority, group_key FROM queue_messages AS head
                WHERE queue = _queue AND offered_to = offer.whom AND id = (
                    SELECT early.id FROM queue_messages AS early -- perhaps committed later
                    WHERE early.queue = _queue AND early.group_key IS NOT NULL AND early.finished_at IS NULL
                      AND (early.group_key, early.high_priority) >= (head.group_key, head.high_priority)
                      AND (early.group_key, early.high_priority) <= (head.group_key, head.high_priority)
                    ORDER BY early.group_key, early.high_priority, early.id LIMIT 1
                )
                ORDER BY priority DESC, id LIMIT _limit FOR UPDATE SKIP LOCKED
            ) AS first
        )
        SELECT array_agg(id), array_agg(priority), array_agg(group_key)
        INTO _heads, _priorities, _keys
        FROM (
            SELECT id, priority, NULL::bigint AS group_key FROM alone
            UNION ALL SELECT id, priority, group_key FROM offered
            ORDER BY priority DESC, id LIMIT _limit
        ) AS head;
    ELSE
        SELECT array_agg(id), array_agg(priority), array_agg(group_key)
        INTO _heads, _priorities, _keys
        FROM heads_of_pools(_queue, _worker, _limit, _pools, _excludes);
    END IF;
    RETURN (
        WITH heads AS MATERIALIZED (
            SELECT * FROM unnest(_heads, _priorities, _keys) AS head (id, priority, group_key)
        ), last AS (
            SELECT id, priority FROM heads
            ORDER BY priority DESC, id OFFSET _limit - 1
        ), candidates AS (
            SELECT id, priority FROM heads WHERE group_key IS NULL
            UNION ALL
            SELECT run.id, run.priority
            FROM heads LEFT JOIN last ON last.priority = heads.priority
            CROSS JOIN LATERAL (
                SELECT near.id, bool_and(near.is_due) OVER (ORDER BY near.id) AS is_due,
                       min(near.priority) OVER (ORDER BY near.id) AS priority
                FROM (
                    SELECT mate.id, mate.priority, mate.state = 'ready' AND mate.run_after IS NULL AS is_due
                    FROM queue_messages AS mate
                    WHERE mate.queue = _queue AND mate.group_key IS NOT NULL
                      AND mate.finished_at IS NULL
                      AND (mate.group_key, mate.high_priority, mate.id)
                          >= (heads.group_key, heads.priority = 9, heads.id)
                      AND (mate.group_key, mate.high_priority, mate.id) <= (
                          heads.group_key, heads.priority = 9,
                          coalesce(last.id, 9223372036854775807)
                      )
                    ORDER BY mate.group_key, mate.high_priority, mate.id LIMIT _limit
                ) AS near
            ) AS run
            WHERE heads.group_key IS NOT NULL AND run.is_due
        )
        SELECT array_agg(id) FROM (
            SELECT id FROM candidates ORDER BY priority DESC, id LIMIT _limit
        ) AS chosen
    );
END
$$;

-- Seconds until a delay or a lease ends; NULL: there is none.
CREATE OR REPLACE FUNCTION time_to_change(_queue text) RETURNS double precision
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

-- Takes the next messages (WQ-2), after ending the delays and leases that are due. If there are none,
-- it returns one row that only says how long to wait. _pools: see `pick`.
CREATE OR REPLACE FUNCTION claim(
    _queue text, _worker text, _token bigint, _limit integer, _lease double precision,
    _pools text[] DEFAULT NULL, _excludes boolean DEFAULT false
) RETURNS TABLE (
    id bigint, grouped boolean, deliveries integer, attempts integer, posts integer, body bytea,
    wait double precision
)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    _now     timestamptz;
    _options queues;
    _groups  bigint[];
    _taken   bigint[];
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('message_router claim ' || _queue, 0));
    _now := clock_timestamp();
    SELECT * INTO _options FROM queues WHERE queue = _queue;
    PERFORM wake(_queue, _now);

    -- What the groups offer that were changed since the last claim (rule 2).
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
    _taken := pick(_queue, _worker, _limit, _pools, _excludes);

    -- A message that someone waits for does not wait for this as well.
    IF _taken IS NULL OR NOT _options.waiting THEN
        PERFORM prune(_queue, _now, _limit);
    END IF;
    IF _options.waiting IS DISTINCT FROM (_taken IS NULL) THEN
        UPDATE queues SET waiting = (_taken IS NULL) WHERE queue = _queue;
    END IF;
    IF _taken IS NULL THEN
        RETURN QUERY SELECT NULL::bigint, NULL::boolean, NULL::integer, NULL::integer,
                            NULL::integer, NULL::bytea, time_to_change(_queue);
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
        RETURNING queue_messages.id, group_key IS NOT NULL, deliveries, attempts, posts, body,
                  0::double precision
    )
    SELECT * FROM taken ORDER BY array_position(_taken, id);

    IF _options.audit > 0 THEN
        INSERT INTO queue_audit (id, queue, state, worker_id)
        SELECT unnest(_taken), _queue, 'in-flight', _worker;
    END IF;

    -- A group's other lane is for this worker alone now. Only the regular lane of a high one can
    -- still be on offer: before a regular one is taken, all high ones are.
    SELECT array_agg(DISTINCT group_key) INTO _groups FROM queue_messages
    WHERE queue_messages.id = ANY (_taken) AND high_priority AND group_key IS NOT NULL;
    IF _groups IS NOT NULL THEN
        PERFORM reoffer(_queue, _groups);
    END IF;
END
$$;


-- Settling: each by id and token, whatever else happens to the queue meanwhile.

-- Publishes the callbacks of those of the batches whose members have all ended, once each (CMD-4).
CREATE OR REPLACE FUNCTION complete_batches(_numbers bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _batch   queue_batches;
    _payload bytea;
BEGIN
    FOR _batch IN
        UPDATE queue_batches SET callback_at = clock_timestamp()
        WHERE number = ANY (_numbers) AND callback_at IS NULL
          AND succeeded + failed + cancelled >= size
        RETURNING *
    LOOP
        _payload := convert_to(format(
            '{"batchId":%s,"total":%s,"succeeded":%s,"failed":%s,"cancelled":%s}',
            to_json(_batch.batch_id), _batch.total, _batch.succeeded, _batch.failed,
            _batch.cancelled
        ), 'UTF8');
        INSERT INTO queue_messages (
            queue, message_id, identity, pool, group_id, priority, high_priority, not_before,
            is_kept, correlation_id, payload_size, body
        ) VALUES (
            _batch.queue, _batch.callback_message_id, 'batch ' || _batch.number,
            _batch.callback_pool, _batch.callback_group_id, _batch.callback_priority,
            _batch.callback_priority = 9, _batch.callback_not_before, true,
            _batch.callback_correlation_id, length(_payload),
            _batch.callback_body || _payload || '}'::bytea
        );
    END LOOP;
END
$$;

-- Counts messages, which have just ended, in their batches. Batches are locked in their order, so
-- that nobody waits for each other.
CREATE OR REPLACE FUNCTION count_ended(_ids bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _numbers bigint[] := (
        SELECT array_agg(DISTINCT batch) FROM queue_messages
        WHERE id = ANY (_ids) AND batch IS NOT NULL
    );
BEGIN
    PERFORM FROM queue_batches WHERE number = ANY (_numbers) ORDER BY number FOR UPDATE;
    UPDATE queue_batches
    SET succeeded = queue_batches.succeeded + ended.succeeded,
        failed = queue_batches.failed + ended.failed,
        cancelled = queue_batches.cancelled + ended.cancelled
    FROM (
        SELECT batch,
               count(*) FILTER (WHERE state = 'succeeded') AS succeeded,
               count(*) FILTER (WHERE state = 'failed') AS failed,
               count(*) FILTER (WHERE state = 'cancelled') AS cancelled
        FROM queue_messages WHERE id = ANY (_ids) GROUP BY batch
    ) AS ended
    WHERE number = ended.batch;
    PERFORM complete_batches(_numbers);
END
$$;

-- Adds members to a batch, and opens it first if there is a callback. A size of NULL: it closes with
-- this call. Returns how many were new, or why nothing was done.
CREATE OR REPLACE FUNCTION add_to_batch(
    _queue text, _batch_id text, _size integer,
    _callback_message_id text, _callback_pool text, _callback_group_id text,
    _callback_priority smallint, _callback_not_before double precision,
    _callback_correlation_id text, _callback_body bytea,
    _message_ids text[], _digests text[], _pools text[], _group_ids text[],
    _priorities smallint[], _bodies bytea[], _not_befores double precision[],
    _correlation_ids text[], _payload_sizes integer[]
) RETURNS TABLE (problem text, size integer, total integer, added integer)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    _batch  queue_batches;
    _is_new boolean := false;
    _added  integer;
BEGIN
    IF _callback_body IS NOT NULL THEN
        INSERT INTO queue_batches (
            queue, batch_id, size, callback_message_id, callback_pool, callback_group_id,
            callback_priority, callback_not_before, callback_correlation_id, callback_body
        ) VALUES (
            _queue, _batch_id, coalesce(_size, -1), _callback_message_id, _callback_pool,
            _callback_group_id, _callback_priority, to_timestamp(_callback_not_before),
            _callback_correlation_id, _callback_body
        ) ON CONFLICT DO NOTHING;
        _is_new := FOUND;
    END IF;
    SELECT * INTO _batch FROM queue_batches AS batch
    WHERE batch.queue = _queue AND batch.batch_id = _batch_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'unknown', 0, 0, 0;
        RETURN;
    ELSIF _callback_body <> _batch.callback_body THEN
        RETURN QUERY SELECT 'callback', _batch.size, _batch.total, 0;
        RETURN;
    ELSIF _size <> _batch.size THEN
        RETURN QUERY SELECT 'size', _batch.size, _batch.total, 0;
        RETURN;
    END IF;

    BEGIN
        WITH fresh AS (
            INSERT INTO queue_batch_members (batch, message_id, digest)
            SELECT _batch.number, item.message_id, item.digest
            FROM unnest(_message_ids, _digests) AS item (message_id, digest)
            ON CONFLICT DO NOTHING
            RETURNING message_id, digest
        ), published AS (
            INSERT INTO queue_messages (
                queue, message_id, pool, group_id, priority, high_priority, body, is_kept,
                not_before, correlation_id, payload_size, batch
            )
            SELECT _queue, item.message_id, item.pool, item.group_id, item.priority,
                   item.priority = 9, item.body, true, to_timestamp(item.not_before),
                   item.correlation_id, item.payload_size, _batch.number
            FROM unnest(
                     _message_ids, _digests, _pools, _group_ids, _priorities, _bodies,
                     _not_befores, _correlation_ids, _payload_sizes
                 ) WITH ORDINALITY
                 AS item (
                     message_id, digest, pool, group_id, priority, body, not_before,
                     correlation_id, payload_size, place
                 )
                 JOIN fresh USING (message_id, digest)
            ORDER BY item.place
            RETURNING 1
        )
        SELECT count(*) INTO _added FROM published;
        IF _batch.size >= 0 AND _batch.total + _added > _batch.size THEN
            RAISE SQLSTATE 'MR001'; -- to undo it
        END IF;
    EXCEPTION WHEN SQLSTATE 'MR001' THEN
        IF _is_new THEN
            DELETE FROM queue_batches WHERE number = _batch.number;
        END IF;
        RETURN QUERY SELECT 'room', _batch.size, _batch.total, _added;
        RETURN;
    END;

    UPDATE queue_batches AS batch
    SET total = batch.total + _added,
        size = CASE WHEN batch.size < 0 THEN batch.total + _added ELSE batch.size END
    WHERE number = _batch.number;
    PERFORM complete_batches(ARRAY[_batch.number]);
    RETURN QUERY SELECT NULL, _batch.size, _batch.total, _added;
END
$$;

-- Finishes the messages, and keeps how each ended: with an error code, it failed, and may be published
-- again. Publishes what goes out with those that end now: each item belongs to the message at its
-- place (from 0). The arrays _results to _requests are NULL if all were accepted and have nothing to keep.
-- Returns the positions (from 0) of those whose lease was lost. A message that was
-- finished with the same lease before is not an error.
CREATE OR REPLACE FUNCTION finish(
    _ids bigint[], _tokens bigint[], _results bytea[], _omitted boolean[], _codes text[],
    _errors text[], _statuses integer[], _failures integer[], _requests integer[],
    _dedup_window double precision, _places integer[], _queues text[],
    _message_ids text[], _identities text[], _pools text[], _group_ids text[],
    _priorities smallint[], _bodies bytea[], _kept boolean[], _not_befores double precision[],
    _correlation_ids text[], _payload_sizes integer[], _cancelled boolean[] DEFAULT NULL
) RETURNS SETOF integer
LANGUAGE plpgsql
AS $$
DECLARE
    _done    integer[]; -- places
    _members bigint[];
BEGIN
    WITH done AS (
        UPDATE queue_messages AS message
        SET state = CASE WHEN ending.cancelled THEN 'cancelled'
                         WHEN ending.code IS NULL THEN 'succeeded' ELSE 'failed' END,
            identity = CASE WHEN ending.code IS NULL THEN message.identity END,
            last_error = coalesce(ending.error, message.last_error),
            lease_until = NULL,
            finished_at = clock_timestamp(),
            body = '',
            is_kept = message.is_kept OR ending.result IS NOT NULL
                OR coalesce(ending.omitted, false),
            result = ending.result,
            result_omitted = ending.omitted,
            error_code = CASE WHEN ending.cancelled THEN message.error_code ELSE ending.code END,
            http_status = CASE WHEN ending.cancelled THEN message.http_status ELSE ending.status END,
            attempts = coalesce(ending.failures, message.attempts),
            posts = coalesce(ending.requests, message.posts + (ending.code IS NULL)::integer)
        FROM unnest(
                 _ids, _tokens, _results, _omitted, _codes, _errors, _statuses, _failures, _requests,
                 _cancelled
             ) WITH ORDINALITY
             AS ending (
                 id, token, result, omitted, code, error, status, failures, requests, cancelled, place
             )
        WHERE message.id = ending.id AND message.lease_token = ending.token
          AND message.finished_at IS NULL
        RETURNING message.id, message.queue, message.group_key, message.state, message.worker_id,
                  message.batch, message.stored_bytes, ending.error, ending.place
    ), shrunk AS (
        INSERT INTO order_sizes (queue, messages, bytes)
        SELECT done.queue, -count(*), -sum(done.stored_bytes) FROM done
        WHERE done.stored_bytes IS NOT NULL GROUP BY done.queue
    ), changed AS (
        INSERT INTO queue_changes (queue, group_key)
        SELECT DISTINCT done.queue, done.group_key FROM done WHERE done.group_key IS NOT NULL
    ), noted AS (
        INSERT INTO queue_audit (id, queue, state, worker_id, error)
        SELECT done.id, done.queue, done.state, done.worker_id, done.error
        FROM done JOIN queues USING (queue) WHERE queues.audit > 0
    )
    SELECT array_agg(done.place::integer - 1),
           array_agg(done.id) FILTER (WHERE done.batch IS NOT NULL)
    INTO _done, _members FROM done;

    IF _done IS NOT NULL AND cardinality(_places) > 0 THEN
        PERFORM publish(
            _dedup_window, _queues, _message_ids, _identities, _pools, _group_ids, _priorities,
            _bodies, _kept, _not_befores, _correlation_ids, _payload_sizes, _places, _done
        );
    END IF;
    IF _members IS NOT NULL THEN
        PERFORM count_ended(_members);
    END IF;
    IF coalesce(cardinality(_done), 0) < cardinality(_ids) THEN
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

-- Cancels a message that is ready, if it is the only unsettled one of its id. Returns false if it is
-- not: look again. Claims wait meanwhile (rule 1).
CREATE OR REPLACE FUNCTION cancel(
    _queue text, _message_id text, _id bigint,
    _dedup_window double precision, _places integer[], _queues text[],
    _message_ids text[], _identities text[], _pools text[], _group_ids text[],
    _priorities smallint[], _bodies bytea[], _kept boolean[], _not_befores double precision[],
    _correlation_ids text[], _payload_sizes integer[]
) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    _batch bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('message_router claim ' || _queue, 0));
    WITH done AS (
        UPDATE queue_messages AS message
        SET state = 'cancelled', identity = NULL, offered_to = NULL, run_after = NULL,
            finished_at = clock_timestamp(), body = ''
        WHERE message.id = _id AND message.state = 'ready' AND NOT EXISTS (
            SELECT FROM queue_messages AS other
            WHERE other.message_id = _message_id AND other.queue = _queue AND other.id <> _id
              AND other.finished_at IS NULL
        )
        RETURNING message.group_key, message.batch, message.stored_bytes
    ), shrunk AS (
        INSERT INTO order_sizes (queue, messages, bytes)
        SELECT _queue, -1, -done.stored_bytes FROM done WHERE done.stored_bytes IS NOT NULL
    ), changed AS (
        INSERT INTO queue_changes (queue, group_key)
        SELECT _queue, done.group_key FROM done WHERE done.group_key IS NOT NULL
    ), noted AS (
        INSERT INTO queue_audit (id, queue, state)
        SELECT _id, _queue, 'cancelled' FROM done, queues
        WHERE queues.queue = _queue AND queues.audit > 0
    )
    SELECT done.batch INTO _batch FROM done;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF cardinality(_places) > 0 THEN
        PERFORM publish(
            _dedup_window, _queues, _message_ids, _identities, _pools, _group_ids, _priorities,
            _bodies, _kept, _not_befores, _correlation_ids, _payload_sizes
        );
    END IF;
    IF _batch IS NOT NULL THEN
        PERFORM count_ended(ARRAY[_id]);
    END IF;
    PERFORM pg_notify('message_router', queues.queue)
    FROM queues WHERE queues.waiting AND queues.queue = _queue;
    RETURN true;
END
$$;

-- Makes the message claimable again after _delay seconds, and keeps the error of its failed attempt, if
-- there is one. Returns false if the lease was lost.
CREATE OR REPLACE FUNCTION nack(
    _id bigint, _token bigint, _delay double precision, _attempts integer, _posts integer,
    _error text, _code text DEFAULT NULL, _status integer DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    _ours boolean;
BEGIN
    WITH done AS (
        UPDATE queue_messages
        SET state = 'ready',
            run_after = CASE
                WHEN _delay > 0 AND is_cancelled IS NULL -- else it comes again at once
                THEN clock_timestamp() + make_interval(secs => _delay)
            END,
            lease_token = NULL,
            lease_until = NULL,
            attempts = _attempts,
            posts = _posts,
            returned_at = clock_timestamp(),
            last_error = CASE WHEN _error = '' THEN last_error ELSE _error END,
            error_code = CASE WHEN _error = '' THEN error_code ELSE _code END,
            http_status = CASE WHEN _error = '' THEN http_status ELSE _status END
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

-- Makes the leases end later. Returns the positions (from 0) of those that were lost.
CREATE OR REPLACE FUNCTION extend(_ids bigint[], _tokens bigint[], _seconds double precision)
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

-- Ends the leases of workers that are certainly dead, in one queue (WQ-10).
CREATE OR REPLACE FUNCTION end_leases(_queue text, _workers text[]) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    WITH ended AS (
        UPDATE queue_messages
        SET state = 'ready', lease_token = NULL, lease_until = NULL,
            returned_at = clock_timestamp()
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


-- Counts over indexes. Due is what stands first in its lane and could be handed to this worker now,
-- counting also what only waits for a claim to notice it.
CREATE OR REPLACE FUNCTION depth(_queue text, _worker text)
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

-- Sets how long rows stay, as the latest consumer wants it.
CREATE OR REPLACE FUNCTION configure(
    _queue text, _keep double precision, _audit double precision, _keep_results double precision
) RETURNS void
LANGUAGE sql
BEGIN ATOMIC
    INSERT INTO queues (queue, keep, audit, keep_results)
    VALUES (_queue, _keep, _audit, _keep_results)
    ON CONFLICT (queue) DO UPDATE
    SET keep = excluded.keep, audit = excluded.audit, keep_results = excluded.keep_results
    WHERE (queues.keep, queues.audit, queues.keep_results)
        IS DISTINCT FROM (excluded.keep, excluded.audit, excluded.keep_results);
END;


-- Messages in queues of PGMQ (CMD-7), which come by `pgmq.read`. Their rows are of the queue 'pgmq:<name>'.

-- What a message is compared by: equal for two values that are equal as jsonb. Its text differs only in
-- zeros at the end of fractions.
CREATE OR REPLACE FUNCTION pgmq_digest_of(_message jsonb) RETURNS bytea
LANGUAGE sql IMMUTABLE
RETURN sha256(convert_to(
    CASE WHEN _message::text ~ '\.[0-9]*0[],} ]' THEN regexp_replace(
        _message::text,
        '("(?:[^"\\]|\\.)*")|(\.[0-9]*[1-9])0+(?![0-9])|\.0+(?![0-9])', '\1\2', 'g'
    ) ELSE _message::text END, 'UTF8'
));

-- Notes messages that were just read, each by its msg_id and enqueued_at. A copy of one that succeeded
-- within the dedup window ends as that did, and must not be handed out; one of the same id that differs
-- is handed out. What the router published with a dedup key of its own, or in a batch, is no copy.
CREATE OR REPLACE FUNCTION receive_from_pgmq(
    _queue text, _worker text, _dedup_window double precision, _pgmq_ids bigint[],
    _reads integer[], _enqueued timestamptz[], _message_ids text[], _pools text[],
    _groups text[], _correlation_ids text[], _payload_sizes integer[], _kept boolean[],
    _digests bytea[]
) RETURNS TABLE (
    msg_id bigint, id bigint, is_copy boolean, differs boolean, is_cancelled boolean
)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    _now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH came AS MATERIALIZED (
        SELECT * FROM unnest(
            _pgmq_ids, _reads, _enqueued, _message_ids, _pools, _groups, _correlation_ids,
            _payload_sizes, _kept, _digests
        ) AS item (
            pgmq_id, reads, enqueued, message_id, pool, group_name, correlation_id, payload_size,
            is_kept, digest
        )
    ), ended AS MATERIALIZED (
        SELECT came.pgmq_id, done.pgmq_digest = came.digest AS is_equal, done.result,
               done.result_omitted
        FROM came CROSS JOIN LATERAL ( -- each LIMIT makes it a look into an index
            SELECT earlier.pgmq_digest, earlier.result, earlier.result_omitted
            FROM ( -- no more, as all messages of a publisher may have one id
                SELECT * FROM queue_messages AS alike
                WHERE alike.message_id BETWEEN came.message_id AND came.message_id
                ORDER BY alike.message_id DESC, alike.id DESC LIMIT 1000
            ) AS earlier
            WHERE earlier.queue = _queue AND earlier.state = 'succeeded'
              AND earlier.pgmq_digest IS NOT NULL
              AND earlier.finished_at BETWEEN _now - make_interval(secs => _dedup_window)
                  AND _now + make_interval(secs => _dedup_window)
            ORDER BY earlier.pgmq_digest = came.digest DESC, earlier.id DESC LIMIT 1
        ) AS done LEFT JOIN LATERAL (
            SELECT batch, dedup_key, identity FROM queue_messages
            WHERE queue = _queue AND queue_messages.pgmq_id = came.pgmq_id
              AND published_at = came.enqueued LIMIT 1
        ) AS own ON true
        WHERE own.batch IS NULL AND own.dedup_key IS NULL AND own.identity IS NULL
    ), taken AS (
        INSERT INTO queue_messages AS known (
            queue, message_id, pool, state, worker_id, lease_token, deliveries, published_at,
            first_claimed_at, last_claimed_at, finished_at, is_kept, correlation_id, payload_size,
            result, result_omitted, body, pgmq_id, pgmq_group, pgmq_digest
        )
        SELECT _queue, came.message_id, coalesce(came.pool, 'DEFAULT-POOL'),
               CASE WHEN ended.is_equal THEN 'succeeded' ELSE 'in-flight' END, _worker, came.reads,
               1, came.enqueued, _now, _now, CASE WHEN ended.is_equal THEN _now END, came.is_kept,
               came.correlation_id, came.payload_size,
               CASE WHEN ended.is_equal THEN ended.result END,
               CASE WHEN ended.is_equal THEN ended.result_omitted END, '', came.pgmq_id,
               came.group_name, came.digest
        FROM came LEFT JOIN ended USING (pgmq_id)
        ORDER BY came.pgmq_id
        ON CONFLICT (queue, pgmq_id, published_at) WHERE pgmq_id IS NOT NULL DO UPDATE
        SET state = excluded.state, run_after = NULL, worker_id = excluded.worker_id,
            lease_token = excluded.lease_token, deliveries = known.deliveries + 1,
            first_claimed_at = coalesce(known.first_claimed_at, excluded.first_claimed_at),
            last_claimed_at = excluded.last_claimed_at, finished_at = excluded.finished_at,
            result = excluded.result, result_omitted = excluded.result_omitted,
            pgmq_digest = excluded.pgmq_digest
        RETURNING known.pgmq_id, known.id, known.is_cancelled
    )
    SELECT taken.pgmq_id, taken.id, coalesce(ended.is_equal, false),
           coalesce(NOT ended.is_equal, false), coalesce(taken.is_cancelled, false)
    FROM taken LEFT JOIN ended USING (pgmq_id);
END
$$;

-- Cancels a message that the caller deletes from PGMQ. The rows of _gone are of messages that others have
-- deleted.
CREATE OR REPLACE FUNCTION cancel_in_pgmq(_id bigint, _gone bigint[]) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    _message queue_messages;
BEGIN
    DELETE FROM queue_messages WHERE id = ANY (_gone);
    UPDATE queue_messages SET state = 'cancelled', run_after = NULL, finished_at = clock_timestamp()
    WHERE id = _id RETURNING * INTO STRICT _message;
    IF _message.batch IS NOT NULL THEN
        PERFORM count_ended(ARRAY[_id]);
    END IF;
END
$$;

-- Forgets old rows, as a claim does.
CREATE OR REPLACE FUNCTION prune_pgmq(_queue text, _at_most integer) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM prune(_queue, clock_timestamp(), _at_most);
END
$$;

-- Plans by these indexes only, made once for each connection.
DO $$
DECLARE
    _function regprocedure;
BEGIN
    FOR _function IN
        SELECT oid FROM pg_proc
        WHERE pronamespace = 'message_router'::regnamespace
          AND proname IN (
              'publish', 'claim', 'finish', 'nack', 'extend', 'end_leases', 'depth',
              'cancel', 'publish_tick', 'receive_from_pgmq', 'cancel_in_pgmq',
              'prune_pgmq'
          )
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

-- Its tables are small, or written to by their keys. It joins what it was given.
ALTER FUNCTION add_to_batch SET search_path = message_router, pg_temp;
