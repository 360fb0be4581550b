-- The work queue's statements. Lists (:ids, :keys, …) are JSON arrays.
--
-- Each statement works on any number of messages, and nearly all answer in one row. Every row that
-- Python fetches gives up its global lock once, and a thread beside a busy event loop waits for it.

-- name: file
SELECT incarnation, boot_id, clock_offset FROM queue_file;

-- name: set_clock
UPDATE queue_file SET boot_id = :boot_id, clock_offset = :offset;

-- name: cut_waits
-- For a new boot, whose clock may be behind the one before: no delay or lease lasts longer from now
-- than it was asked for, and nothing was finished in the future. min(NULL, x) is NULL. What waits for
-- its first delivery does so by the calendar, and the file's clock is the wall clock now.
UPDATE queue_progress
SET wakes_at = CASE
        WHEN state = 'in-flight' THEN min(wakes_at, :now + wait_seconds)
        WHEN not_before IS NOT NULL AND deliveries = 0 THEN iif(wakes_at IS NULL, NULL, not_before)
        ELSE min(wakes_at, :now + min(wait_seconds, :longest_delay))
    END,
    finished_at = min(finished_at, :now),
    returned_at = min(returned_at, :now)
FROM queue_entries AS entry
WHERE entry.id = queue_progress.id AND (
    wakes_at IS NOT NULL OR finished_at > :now OR returned_at > :now
);

-- name: cut_audit
UPDATE queue_changes SET at = :now WHERE at > :now;

-- name: cut_batches
UPDATE queue_batches SET callback_at = :now WHERE callback_at > :now;

-- name: forget
-- Messages that succeeded before the dedup window may be published again.
UPDATE queue_entries SET dedup_key = NULL
WHERE queue = :queue AND dedup_key IN (SELECT value FROM json_each(:keys))
  AND (SELECT finished_at FROM queue_progress WHERE id = queue_entries.id) <= :before;

-- name: known
-- Those of the keys that keep a message out, each with the id of the message that has it.
SELECT json_group_object(dedup_key, message_id) FROM queue_entries
WHERE queue = :queue AND dedup_key IN (SELECT value FROM json_each(:keys));

-- name: last_id
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'queue_entries';

-- name: add_groups
-- :rows are the columns of each message, by their positions: names cost 2 µs more for each message.
-- 0 message id, 1 dedup key, 2 pool, 3 group, 4 priority, 5 is kept, 6 payload size, 7 correlation id,
-- 8 not before, 9 id, 10 wakes at, 11 and 12 offset and size of the body.
INSERT INTO queue_groups (queue, pool, group_id)
SELECT :queue, value ->> 2, value ->> 3 FROM json_each(:rows)
WHERE value ->> 3 IS NOT NULL
ON CONFLICT DO NOTHING;

-- name: publish
INSERT INTO queue_entries (
    id, queue, message_id, dedup_key, pool, group_id, published_at, not_before, correlation_id,
    payload_size
)
SELECT
    value ->> 9, :queue, value ->> 0, value ->> 1, value ->> 2, value ->> 3, :now, value ->> 8,
    value ->> 7, value ->> 6
FROM json_each(:rows);

-- name: start_progress
-- What is due and has no group can be claimed at once. What has one is offered by `offer`.
INSERT INTO queue_progress (
    id, queue, group_number, priority, high_priority, size, is_kept, batch, offered_to, wakes_at, room,
    pool_code
)
SELECT
    value ->> 9, :queue,
    (SELECT number FROM queue_groups
     WHERE queue = :queue AND pool = value ->> 2 AND group_id = value ->> 3),
    value ->> 4, value ->> 4 = 9, value ->> 12, value ->> 5, :batch,
    iif(coalesce(value ->> 3, value ->> 10) IS NULL, '', NULL), value ->> 10, zeroblob(:room),
    value ->> 2
FROM json_each(:rows);

-- name: store_bodies
-- They come in one piece, as JSON cannot carry bytes.
INSERT INTO queue_bodies (id, body)
SELECT value ->> 9, coalesce(substr(:bodies, value ->> 11 + 1, value ->> 12), x'')
FROM json_each(:rows);

-- name: offer
-- Decides what these groups offer: of each lane the first message, unless it has to wait or one of the
-- lane is in flight. While a worker holds a message of the group, the other lane is offered only to
-- that worker (WQ-2). Claims go through a lane in order: behind a message that was never claimed, none
-- is in flight.
WITH changed (group_number, regular_holder, high_holder) AS MATERIALIZED (
    SELECT
        value,
        (
            SELECT iif(state = 'in-flight', worker_id, NULL) FROM queue_progress INDEXED BY lanes
            WHERE group_number = value AND high_priority = 0 AND queue = :queue
              AND finished_at IS NULL AND (state = 'in-flight' OR deliveries = 0)
            ORDER BY id LIMIT 1
        ),
        (
            SELECT iif(state = 'in-flight', worker_id, NULL) FROM queue_progress INDEXED BY lanes
            WHERE group_number = value AND high_priority = 1 AND queue = :queue
              AND finished_at IS NULL AND (state = 'in-flight' OR deliveries = 0)
            ORDER BY id LIMIT 1
        )
    FROM json_each(:groups)
),
decision (id, worker_id) AS MATERIALIZED (
    SELECT
        (
            SELECT first.id FROM queue_progress AS first INDEXED BY lanes
            WHERE first.group_number = changed.group_number AND first.high_priority = tier.value
              AND first.queue = :queue AND first.finished_at IS NULL
            ORDER BY first.id LIMIT 1
        ),
        iif(
            iif(tier.value, high_holder, regular_holder) IS NULL,
            coalesce(regular_holder, high_holder, ''),
            NULL
        )
    FROM changed CROSS JOIN (SELECT 0 AS value UNION ALL SELECT 1) AS tier
)
UPDATE queue_progress SET offered_to = decision.worker_id
FROM decision
WHERE queue_progress.id = decision.id AND wakes_at IS NULL
  AND offered_to IS NOT decision.worker_id;

-- name: next_wake
SELECT min(wakes_at) FROM queue_progress INDEXED BY wakes WHERE wakes_at IS NOT NULL;

-- name: groups_of
SELECT json_group_array(DISTINCT group_number) FROM queue_progress
WHERE id IN (SELECT value FROM json_each(:ids)) AND group_number IS NOT NULL;

-- name: to_wake
-- Those whose delay or lease has ended.
SELECT queue, state, json_group_array(id) FROM (
    SELECT queue, state, id FROM queue_progress INDEXED BY wakes
    WHERE wakes_at <= :now ORDER BY wakes_at LIMIT :at_most
) GROUP BY queue, state;

-- name: leases_of
-- What these workers hold, in all queues of the file.
SELECT queue, state, json_group_array(id) FROM queue_progress INDEXED BY wakes
WHERE wakes_at IS NOT NULL AND state = 'in-flight'
  AND worker_id IN (SELECT value FROM json_each(:worker_ids))
GROUP BY queue;

-- name: release
UPDATE queue_progress
SET returned_at = iif(state = 'in-flight', :now, returned_at),
    state = 'ready',
    wakes_at = NULL,
    lease_token = NULL,
    offered_to = iif(group_number IS NULL, '', NULL)
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: choose
-- The next messages for this worker, in claim order: by priority, then by id.
--
-- A merge of lanes. It starts with what is offered; whenever a message is taken, the next one of its
-- lane joins, unless that one has to wait. It does not count more than what is in front of it. ORDER
-- BY makes the recursion's queue a priority queue. If enough is offered, nothing joins that would come
-- after the last one of it: with many groups that saves 1 µs for each message.
WITH RECURSIVE head (priority, id, group_number) AS (
    SELECT * FROM (
        SELECT priority, id, group_number FROM queue_progress INDEXED BY offers
        WHERE queue = :queue AND offered_to = ''
        ORDER BY priority DESC, id LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT priority, id, group_number FROM queue_progress INDEXED BY offers
        WHERE queue = :queue AND offered_to = :worker_id
        ORDER BY priority DESC, id LIMIT :limit
    )
),
last_head (priority, id) AS MATERIALIZED (
    SELECT priority, id FROM queue_progress INDEXED BY offers
    WHERE queue = :queue AND offered_to = ''
    ORDER BY priority DESC, id LIMIT 1 OFFSET :limit - 1
),
taken (priority, id, group_number) AS (
    SELECT * FROM head
    UNION ALL
    SELECT min(next.priority, taken.priority), next.id, next.group_number
    FROM taken CROSS JOIN queue_progress AS next ON next.id = (
        SELECT mate.id FROM queue_progress AS mate INDEXED BY lanes
        WHERE mate.group_number = taken.group_number
          AND mate.high_priority = (taken.priority = 9) AND mate.queue = :queue
          AND mate.id > taken.id
          AND mate.id < ifnull(
              (SELECT id FROM last_head WHERE priority = taken.priority), 9223372036854775807
          )
          AND mate.finished_at IS NULL
        ORDER BY mate.id LIMIT 1
    )
    WHERE next.wakes_at IS NULL
    ORDER BY 1 DESC, 2
)
SELECT json_group_array(
    json_array(
        message.id, :token, message.group_number, message.high_priority, size, deliveries,
        attempts, posts, batch IS NOT NULL, is_cancelled IS NOT NULL
    )
)
FROM (SELECT id FROM taken LIMIT :limit) AS winner
    CROSS JOIN queue_progress AS message ON message.id = winner.id;

-- name: adopt
-- A router of the version before may publish to this file, too. It does not note the pool here.
UPDATE queue_progress
SET pool_code = (SELECT pool FROM queue_entries WHERE queue_entries.id = queue_progress.id)
WHERE id IN (
    SELECT id FROM queue_progress INDEXED BY offers_of_pool
    WHERE queue = :queue AND offered_to IN ('', :worker_id) AND pool_code IS NULL
    LIMIT :at_most
);

-- name: choose_of_pools
-- As `choose`, but only from these pools; if :excludes is 1, from all but these.
--
-- A merge of pools, and in it of lanes. It starts with the first offer of each pool, and whenever an
-- offer is taken, the next one of its pool joins. To find the pools that have anything on offer takes
-- a seek for each (1 µs), however much they have.
WITH RECURSIVE reader (whom) AS (
    SELECT '' UNION ALL SELECT :worker_id
),
stocked (whom, code) AS (
    SELECT whom, (
        SELECT pool_code FROM queue_progress INDEXED BY offers_of_pool
        WHERE queue = :queue AND offered_to = reader.whom AND pool_code >= ''
        ORDER BY pool_code LIMIT 1
    )
    FROM reader WHERE :excludes
    UNION ALL
    SELECT whom, (
        SELECT pool_code FROM queue_progress INDEXED BY offers_of_pool
        WHERE queue = :queue AND offered_to = stocked.whom AND pool_code > stocked.code
        ORDER BY pool_code LIMIT 1
    )
    FROM stocked WHERE code IS NOT NULL
),
wanted (whom, code) AS (
    SELECT whom, code FROM stocked WHERE code NOT IN (SELECT value FROM json_each(:pools))
    UNION ALL
    SELECT whom, value FROM json_each(:pools) CROSS JOIN reader WHERE NOT :excludes
),
taken (priority, id, group_number, whom, code) AS (
    SELECT first.priority, first.id, first.group_number, whom, code
    FROM wanted CROSS JOIN queue_progress AS first ON first.id = (
        SELECT id FROM queue_progress INDEXED BY offers_of_pool
        WHERE queue = :queue AND offered_to = wanted.whom AND pool_code = wanted.code
        ORDER BY priority DESC, id LIMIT 1
    )
    UNION ALL
    SELECT next.priority, next.id, next.group_number, whom, code
    FROM taken CROSS JOIN queue_progress AS next ON next.id = coalesce(
        (
            SELECT id FROM queue_progress INDEXED BY offers_of_pool
            WHERE queue = :queue AND offered_to = taken.whom AND pool_code = taken.code
              AND priority = taken.priority AND id > taken.id
            ORDER BY id LIMIT 1
        ),
        (
            SELECT id FROM queue_progress INDEXED BY offers_of_pool
            WHERE queue = :queue AND offered_to = taken.whom AND pool_code = taken.code
              AND priority < taken.priority
            ORDER BY priority DESC, id LIMIT 1
        )
    )
    UNION ALL
    SELECT min(next.priority, taken.priority), next.id, next.group_number, NULL, NULL
    FROM taken CROSS JOIN queue_progress AS next ON next.id = (
        SELECT mate.id FROM queue_progress AS mate INDEXED BY lanes
        WHERE mate.group_number = taken.group_number
          AND mate.high_priority = (taken.priority = 9) AND mate.queue = :queue
          AND mate.id > taken.id AND mate.finished_at IS NULL
        ORDER BY mate.id LIMIT 1
    )
    WHERE next.wakes_at IS NULL
    ORDER BY 1 DESC, 2
)
SELECT json_group_array(
    json_array(
        message.id, :token, message.group_number, message.high_priority, size, deliveries,
        attempts, posts, batch IS NOT NULL, is_cancelled IS NOT NULL
    )
)
FROM (SELECT id FROM taken LIMIT :limit) AS winner
    CROSS JOIN queue_progress AS message ON message.id = winner.id;

-- name: claim
UPDATE queue_progress
SET state = 'in-flight',
    offered_to = NULL,
    lease_token = :token,
    wakes_at = :now + :lease,
    wait_seconds = :lease,
    worker_id = :worker_id,
    deliveries = deliveries + 1,
    first_claimed_at = coalesce(first_claimed_at, :now),
    last_claimed_at = :now,
    room = NULL
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: bodies
-- A row each: to join them to one piece costs more if they are larger than a few hundred bytes.
SELECT stored.id, body
FROM json_each(:ids) AS wanted CROSS JOIN queue_bodies AS stored ON stored.id = wanted.value;

-- name: publications
-- When each was published, in Unix time.
SELECT id, published_at + :unix FROM queue_entries
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: tokens
-- For each message, in order: the token of its lease; negative if that has ended; null if there is none.
SELECT json_group_array(iif(wakes_at > :now, lease_token, -lease_token))
FROM json_each(:ids) AS wanted LEFT JOIN queue_progress AS message ON message.id = wanted.value;

-- name: finish
-- The token stays: an acknowledgement that is sent twice is no error.
UPDATE queue_progress
SET state = 'succeeded', wakes_at = NULL, finished_at = :now, posts = posts + 1
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: finish_as
-- As `finish`, and keeps how each ended.
UPDATE queue_progress
SET state = value ->> 1,
    wakes_at = NULL,
    finished_at = :now,
    attempts = coalesce(value ->> 4, attempts),
    posts = coalesce(value ->> 5, posts + (value ->> 1 = 'succeeded')),
    last_error = coalesce(value ->> 6, last_error)
FROM json_each(:endings)
WHERE queue_progress.id = value ->> 0;

-- name: keep_endings
-- The results only of messages that are kept for them.
-- Without the dedup key: SQLite would write its index again, a page for each message.
UPDATE queue_entries
SET result = iif(is_kept, CAST(value ->> 2 AS BLOB), NULL), -- the size of a blob is quickly known
    result_omitted = iif(is_kept, value ->> 3, 0),
    error_code = value ->> 7,
    http_status = value ->> 8
FROM json_each(:endings) JOIN queue_progress AS progress ON progress.id = value ->> 0
WHERE queue_entries.id = progress.id
  AND (is_kept AND (value ->> 2 IS NOT NULL OR value ->> 3) OR value ->> 7 IS NOT NULL);

-- name: free_keys
-- Of messages that failed: they may come again.
UPDATE queue_entries SET dedup_key = NULL WHERE id IN (SELECT value FROM json_each(:ids));

-- name: cancel
UPDATE queue_progress
SET state = 'cancelled', offered_to = NULL, wakes_at = NULL, finished_at = :now
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: ask_to_end
-- Notes that a message is to be cancelled that is in flight.
UPDATE queue_progress SET is_cancelled = 1 WHERE id = :id;

-- name: asked_to_end
-- Those of these messages that are to be cancelled.
SELECT json_group_array(id) FROM queue_progress
WHERE id IN (SELECT value FROM json_each(:ids)) AND is_cancelled;

-- name: cancellable
-- The messages of that id: how many, and of those that are unsettled how many, and which.
SELECT count(*), count(iif(finished_at IS NULL, 1, NULL)), max(iif(finished_at IS NULL, id, NULL)),
       max(iif(finished_at IS NULL, iif(not_before = :held_until, 'failed', state), NULL))
FROM queue_entries INDEXED BY by_message_id CROSS JOIN queue_progress USING (id, queue)
WHERE message_id = :message_id AND queue = :queue;

-- name: find
SELECT state, attempts, posts, pool, group_id, published_at + :unix AS published_at, not_before,
       wakes_at IS NOT NULL AS is_delayed, wakes_at + :unix AS due_at,
       max(
           published_at, ifnull(last_claimed_at, 0), ifnull(returned_at, 0), ifnull(finished_at, 0)
       ) + :unix AS updated_at,
       first_claimed_at + :unix AS first_claimed_at,
       finished_at + :unix AS finished_at, worker_id, correlation_id, batch_id, payload_size,
       last_error, CAST(result AS BLOB) AS result, result_omitted, error_code, http_status
FROM queue_entries AS entry INDEXED BY by_message_id
    CROSS JOIN queue_progress AS progress ON progress.id = entry.id
    LEFT JOIN queue_batches ON number = batch
WHERE message_id = :name AND entry.queue = :queue
ORDER BY entry.id DESC LIMIT 1;

-- name: page
-- Of the newest :rows messages before that one, of all queues, those that fit. Each row says how far the
-- query has looked, if there is more to look at: not if all that it looked at is too old.
WITH looked_at AS MATERIALIZED (
    SELECT entry.id, entry.queue, message_id, state, attempts, posts, pool, group_id, published_at,
           not_before, wakes_at, first_claimed_at, last_claimed_at, returned_at, finished_at,
           worker_id, correlation_id, batch, payload_size, last_error, error_code, http_status
    FROM queue_entries AS entry CROSS JOIN queue_progress AS progress ON progress.id = entry.id
    WHERE entry.id < :before
    ORDER BY entry.id DESC LIMIT :rows
),
fitting AS (
    SELECT looked_at.*, batch_id
    FROM looked_at LEFT JOIN queue_batches ON number = batch
    WHERE looked_at.queue = :queue
      AND (:state IS NULL OR iif(not_before = :held_until, 'failed', state) = :state)
      AND (:is_scheduled IS NULL OR :is_scheduled = (
          wakes_at IS NOT NULL AND not_before IS NOT NULL AND first_claimed_at IS NULL
      ))
      AND (:group IS NULL OR group_id = :group)
      AND (:since IS NULL OR published_at + :unix >= :since)
    ORDER BY id DESC LIMIT :limit
)
SELECT looked_to, id, message_id, state, attempts, posts, pool, group_id,
       published_at + :unix AS published_at, not_before, wakes_at IS NOT NULL AS is_delayed,
       wakes_at + :unix AS due_at,
       max(
           published_at, ifnull(last_claimed_at, 0), ifnull(returned_at, 0), ifnull(finished_at, 0)
       ) + :unix AS updated_at,
       first_claimed_at + :unix AS first_claimed_at, finished_at + :unix AS finished_at, worker_id,
       correlation_id, batch_id, payload_size, last_error, NULL AS result, 0 AS result_omitted,
       error_code, http_status
FROM (
    SELECT iif(
        count(*) = :rows AND coalesce(max(published_at) + :unix >= :since, true), min(id), NULL
    ) AS looked_to
    FROM looked_at
) LEFT JOIN fitting ON true
ORDER BY id DESC;

-- name: delete_bodies
DELETE FROM queue_bodies WHERE id IN (SELECT value FROM json_each(:ids));

-- name: nack
-- What is to be cancelled comes again at once.
UPDATE queue_progress
SET state = 'ready',
    wakes_at = iif(:delay > 0 AND is_cancelled IS NULL, :now + :delay, NULL),
    wait_seconds = :delay,
    lease_token = NULL,
    offered_to = iif(group_number IS NULL AND (:delay <= 0 OR is_cancelled), '', NULL),
    attempts = :attempts,
    posts = :posts,
    returned_at = :now,
    last_error = coalesce(:error, last_error)
WHERE id = :id AND lease_token = :token AND state = 'in-flight';

-- name: keep_failure
-- Of an attempt that is not the last one.
UPDATE queue_entries SET error_code = :code, http_status = :http_status WHERE id = :id;

-- name: extend
UPDATE queue_progress SET wakes_at = :now + :lease, wait_seconds = :lease
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: audit
INSERT INTO queue_changes (queue, at, state, worker_id, error, message_ids)
VALUES (:queue, :now, :state, :worker_id, nullif(:error, ''), :ids);

-- name: to_prune
-- Of the next messages, those that may be forgotten; then the last of them all, and their number.
-- An index of what was finished, by time, would cost 1 µs for each message.
SELECT
    json_group_array(id) FILTER (WHERE finished_at <= iif(is_kept, :kept_before, :before)),
    max(id),
    count(*)
FROM (
    SELECT id, is_kept, finished_at FROM queue_progress WHERE id > :after ORDER BY id LIMIT :at_most
);

-- name: drop_groups
-- Of the groups of these messages, those that have no unsettled message.
DELETE FROM queue_groups
WHERE number IN (
    SELECT group_number FROM queue_progress WHERE id IN (SELECT value FROM json_each(:ids))
) AND NOT EXISTS (
    SELECT 1 FROM queue_progress INDEXED BY lanes
    WHERE group_number = number AND finished_at IS NULL
);

-- name: prune
DELETE FROM queue_entries WHERE id IN (SELECT value FROM json_each(:ids));

-- name: prune_progress
DELETE FROM queue_progress WHERE id IN (SELECT value FROM json_each(:ids));

-- name: prune_audit
-- The rows are in the order of their age: if the first one is not old enough, none is.
DELETE FROM queue_changes
WHERE at <= :before AND id IN (
    SELECT id FROM queue_changes ORDER BY id
    LIMIT iif((SELECT at FROM queue_changes ORDER BY id LIMIT 1) <= :before, :at_most, 0)
);

-- name: batch
SELECT number, size, total, succeeded, failed, cancelled, callback_body,
       callback_at + :unix AS callback_at
FROM queue_batches WHERE queue = :queue AND batch_id = :name;

-- name: open_batch
INSERT INTO queue_batches (queue, batch_id, size, callback, callback_body)
VALUES (:queue, :batch_id, :size, :callback, :callback_body);

-- name: add_members
-- Answers the digests of those that the batch did not have already.
INSERT INTO queue_batch_members (batch, message_id, digest)
SELECT :batch, value ->> 0, value ->> 1 FROM json_each(:members)
WHERE true  -- else ON CONFLICT could belong to a join
ON CONFLICT DO NOTHING
RETURNING digest;

-- name: grow_batch
UPDATE queue_batches SET total = total + :added, size = max(size, :size) WHERE number = :batch;

-- name: count_ended
-- Counts these messages, which have just ended, in their batches.
UPDATE queue_batches
SET succeeded = queue_batches.succeeded + ended.succeeded,
    failed = queue_batches.failed + ended.failed,
    cancelled = queue_batches.cancelled + ended.cancelled
FROM (
    SELECT batch, sum(state = 'succeeded') AS succeeded, sum(state = 'failed') AS failed,
           sum(state = 'cancelled') AS cancelled
    FROM queue_progress
    WHERE id IN (SELECT value FROM json_each(:ids)) AND batch IS NOT NULL
    GROUP BY batch
) AS ended
WHERE number = ended.batch
RETURNING number;

-- name: complete
-- Marks a batch as complete if it is, once. Answers what its callback is made of.
UPDATE queue_batches SET callback_at = :now
WHERE number = :batch AND callback_at IS NULL AND succeeded + failed + cancelled >= size
RETURNING queue, callback, callback_body, json_object(
    'batchId', batch_id, 'total', total, 'succeeded', succeeded, 'failed', failed,
    'cancelled', cancelled
);

-- name: prune_members
-- Of a batch that was complete before.
DELETE FROM queue_batch_members
WHERE (batch, message_id, digest) IN (
    SELECT batch, message_id, digest FROM queue_batch_members
    WHERE batch = (
        SELECT number FROM queue_batches INDEXED BY complete
        WHERE callback_at <= :before ORDER BY callback_at LIMIT 1
    )
    LIMIT :at_most
);

-- name: prune_batch
DELETE FROM queue_batches
WHERE number = (
    SELECT number FROM queue_batches INDEXED BY complete
    WHERE callback_at <= :before ORDER BY callback_at LIMIT 1
) AND NOT EXISTS (SELECT 1 FROM queue_batch_members WHERE batch = number);

-- name: tick
-- Remembers a tick if it is newer than the last one.
INSERT INTO queue_ticks (queue, schedule, tick) VALUES (:queue, :schedule, :tick)
ON CONFLICT DO UPDATE SET tick = excluded.tick WHERE tick < excluded.tick;

-- name: result_bytes
SELECT coalesce(sum(length(result)), 0) FROM queue_entries;

-- name: oldest_results
-- As many as take up the excess.
SELECT json_group_array(id), coalesce(sum(size), 0), coalesce(max(id), 0)
FROM (
    SELECT id, length(result) AS size, sum(length(result)) OVER (ORDER BY id) AS size_up_to
    FROM (
        SELECT id, result FROM queue_entries
        WHERE id > :after AND result IS NOT NULL ORDER BY id LIMIT :at_most
    )
) WHERE size_up_to - size < :excess;

-- name: drop_results
UPDATE queue_entries SET result = NULL, result_omitted = 1
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: keep_tallies
-- Of messages that come from another queue, with what was tried there (ORD-6).
UPDATE queue_progress
SET attempts = value ->> 1,
    posts = value ->> 2,
    wait_seconds = value ->> 3,
    last_error = nullif(value ->> 4, ''),
    stored_bytes = size
FROM json_each(:tallies)
WHERE queue_progress.id = value ->> 0;

-- name: count_added
INSERT INTO order_sizes VALUES (:queue, :messages, :bytes)
ON CONFLICT DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes;

-- name: hold
-- These messages were given up, and stay in front of their groups (ORD-11). The negative token says that
-- they were settled with this lease.
UPDATE queue_progress
SET state = 'ready',
    wakes_at = :held_until,
    wait_seconds = NULL,
    lease_token = -lease_token,
    offered_to = NULL,
    is_cancelled = NULL,
    deliveries = 0,
    attempts = coalesce(value ->> 4, attempts),
    posts = coalesce(value ->> 5, posts),
    last_error = value ->> 6
FROM json_each(:endings)
WHERE queue_progress.id = value ->> 0;

-- name: keep_held
UPDATE queue_entries SET not_before = :held_until, error_code = value ->> 7, http_status = value ->> 8
FROM json_each(:endings)
WHERE queue_entries.id = value ->> 0;

-- name: held_letter
-- Of a group, the message that holds it: id and message id. It is the first one of its lane.
SELECT entry.id, message_id
FROM queue_groups CROSS JOIN (SELECT 0 AS value UNION ALL SELECT 1) AS tier
    CROSS JOIN queue_entries AS entry ON entry.id = (
        SELECT progress.id FROM queue_progress AS progress INDEXED BY lanes
        WHERE group_number = number AND high_priority = tier.value
          AND progress.queue = :queue AND finished_at IS NULL
        ORDER BY progress.id LIMIT 1
    )
WHERE queue_groups.queue = :queue AND queue_groups.pool = :pool AND queue_groups.group_id = :group
  AND not_before = :held_until
LIMIT 1;

-- name: count_held
SELECT count(*) FROM queue_progress AS held INDEXED BY wakes
    CROSS JOIN queue_entries AS entry ON entry.id = held.id
WHERE wakes_at > :held_from AND held.queue = :queue AND not_before = :held_until;

-- name: count_stored
SELECT queue, messages FROM order_sizes
WHERE queue >= :first AND queue < :last AND messages > 0;

-- name: list_groups
-- Groups and what is in front of their lanes; of one group if :pool is given.
SELECT known.pool, known.group_id, message_id, entry.published_at + :unix AS since, state, not_before,
       wakes_at + :unix AS wakes_at, attempts, last_error, (
           SELECT count(*) FROM queue_progress INDEXED BY lanes
           WHERE group_number = number AND finished_at IS NULL
       ) AS messages
FROM queue_groups AS known CROSS JOIN (SELECT 0 AS value UNION ALL SELECT 1) AS tier
    CROSS JOIN queue_progress AS first ON first.id = (
        SELECT progress.id FROM queue_progress AS progress INDEXED BY lanes
        WHERE group_number = number AND high_priority = tier.value
          AND progress.queue = :queue AND finished_at IS NULL
        ORDER BY progress.id LIMIT 1
    )
    CROSS JOIN queue_entries AS entry ON entry.id = first.id
WHERE known.queue = :queue AND (:pool IS NULL OR known.pool = :pool AND known.group_id = :group)
  AND (not_before = :held_until OR NOT :only_held)
ORDER BY first.id LIMIT :limit;

-- name: ids_of_group
SELECT message_id
FROM queue_groups CROSS JOIN queue_progress AS progress INDEXED BY lanes ON group_number = number
    CROSS JOIN queue_entries AS entry ON entry.id = progress.id
WHERE queue_groups.queue = :queue AND queue_groups.pool = :pool AND queue_groups.group_id = :group
  AND finished_at IS NULL
ORDER BY high_priority DESC, progress.id LIMIT :limit;

-- name: group_of_message
SELECT entry.pool, entry.group_id
FROM queue_entries AS entry INDEXED BY by_message_id CROSS JOIN queue_progress AS progress
    ON progress.id = entry.id
WHERE message_id = :message_id AND entry.queue = :queue AND finished_at IS NULL
ORDER BY entry.id LIMIT 1;

-- name: retry_letter
UPDATE queue_progress
SET wakes_at = NULL, lease_token = NULL, attempts = 0, posts = 0, last_error = NULL, size = :size
WHERE id = :id;

-- name: forget_letter
UPDATE queue_entries SET not_before = NULL, error_code = NULL, http_status = NULL WHERE id = :id;

-- name: replace_body
UPDATE queue_bodies SET body = :body WHERE id = :id;

-- name: release_letter
UPDATE queue_progress SET state = 'failed', wakes_at = NULL, finished_at = :now WHERE id = :id;

-- name: unsettled_groups
SELECT pool, group_id FROM queue_groups
WHERE queue = :queue AND (pool, group_id) > (:pool, :group) AND EXISTS (
    SELECT 1 FROM queue_progress INDEXED BY lanes
    WHERE group_number = number AND finished_at IS NULL
)
ORDER BY pool, group_id LIMIT :limit;

-- name: stored_groups
-- Those of :groups (pool and group) that have an unsettled message.
SELECT pool, group_id
FROM json_each(:groups) AS wanted CROSS JOIN queue_groups
    ON queue = :queue AND pool = value ->> 0 AND group_id = value ->> 1
WHERE EXISTS (
    SELECT 1 FROM queue_progress INDEXED BY lanes
    WHERE group_number = number AND finished_at IS NULL
);

-- name: stored_size
-- Messages, bytes, and when the first one was stored.
SELECT messages, bytes, (
    SELECT published_at FROM queue_entries WHERE id = (
        SELECT id FROM queue_progress INDEXED BY stored
        WHERE queue = :queue AND stored_bytes IS NOT NULL AND finished_at IS NULL
        ORDER BY id LIMIT 1
    )
) FROM order_sizes WHERE queue = :queue;

-- name: trial
-- Changes nothing, but writes: it fails if the disk is still full.
UPDATE queue_file SET boot_id = boot_id;

-- name: last_tick
SELECT tick FROM queue_ticks WHERE queue = :queue AND schedule = :name;

-- name: forget_tick
DELETE FROM queue_ticks WHERE queue = :queue AND schedule = :schedule AND tick = :tick;

-- name: depth
-- Waiting; in flight; and due: what stands first in its lane and could be handed to this worker now,
-- counting also what only waits for a claim to notice that its delay or lease has ended.
SELECT unsettled - in_flight, in_flight, offered + woken
FROM (
    SELECT count(*) AS unsettled FROM queue_progress INDEXED BY lanes
    WHERE queue = :queue AND finished_at IS NULL
), (
    SELECT count(*) FILTER (WHERE state = 'in-flight') AS in_flight,
           count(*) FILTER (WHERE wakes_at <= :now) AS woken
    FROM queue_progress INDEXED BY wakes
    WHERE queue = :queue AND wakes_at IS NOT NULL
), (
    SELECT count(*) AS offered FROM queue_progress INDEXED BY offers
    WHERE queue = :queue AND offered_to IN ('', :worker_id)
);
