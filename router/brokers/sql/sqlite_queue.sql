-- The work queue's statements, each under its name. Times are seconds by the machine's clock, which
-- all processes that share the file share too.
--
-- Each statement takes any number of rows as a JSON array and answers in at most one row. Every row
-- fetched gives up Python's lock once, and under load it takes a millisecond to get it back.

-- name: forget
-- Finished messages outside of the dedup window that nobody has pruned yet.
DELETE FROM queue_messages
WHERE queue = :queue AND finished_at <= :before
  AND dedup_key IN (SELECT value FROM json_each(:keys));

-- name: known
SELECT json_group_array(dedup_key) FROM queue_messages
WHERE queue = :queue AND dedup_key IN (SELECT value FROM json_each(:keys));

-- name: publish
-- The bodies come in one piece, as JSON cannot carry bytes. Grouped ones are offered by `reoffer`.
INSERT INTO queue_messages (
    queue, message_id, dedup_key, pool, group_id, group_key, high_priority, offered_to, body,
    published_at
)
SELECT
    :queue,
    json_extract(value, '$[0]'),
    json_extract(value, '$[1]'),
    json_extract(value, '$[2]'),
    json_extract(value, '$[3]'),
    json_extract(value, '$[4]'),
    json_extract(value, '$[5]'),
    CASE WHEN json_extract(value, '$[4]') IS NULL THEN '' END,
    coalesce(substr(:bodies, json_extract(value, '$[6]') + 1, json_extract(value, '$[7]')), x''),
    :now
FROM json_each(:rows)
ORDER BY key;

-- name: due
-- Whose delay, or whose lease, has ended.
SELECT json_group_array(id) FROM (
    SELECT id FROM (
        SELECT id FROM queue_messages INDEXED BY delays
        WHERE queue = :queue AND run_after <= :now
        ORDER BY run_after LIMIT :at_most
    )
    UNION ALL
    SELECT id FROM (
        SELECT id FROM queue_messages INDEXED BY leases
        WHERE queue = :queue AND state = 'in-flight' AND lease_until <= :now
        ORDER BY lease_until LIMIT :at_most
    )
);

-- name: wake
-- The token stays: whoever held it may still settle it, until the next claim takes it over.
UPDATE queue_messages
SET state = 'ready',
    run_after = NULL,
    lease_until = NULL,
    offered_to = CASE WHEN group_key IS NULL THEN '' END
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: claim
-- A merge of lanes: start with the first of each offered lane, and whenever one is taken, the next
-- of its lane joins the race, unless that one is not due. An ORDER BY in a recursive query makes its
-- queue a priority queue, so the first `limit` rows out of it are the ones to take.
WITH RECURSIVE taken (high_priority, id, queue, group_key) AS (
    SELECT * FROM (
        SELECT high_priority, id, queue, group_key FROM queue_messages INDEXED BY offers
        WHERE queue = :queue AND offered_to = ''
        ORDER BY high_priority DESC, id LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT high_priority, id, queue, group_key FROM queue_messages INDEXED BY offers
        WHERE queue = :queue AND offered_to = :worker_id
        ORDER BY high_priority DESC, id LIMIT :limit
    )
    UNION ALL
    SELECT next.high_priority, next.id, next.queue, next.group_key
    FROM taken JOIN queue_messages AS next ON next.id = (
        SELECT min(behind.id) FROM queue_messages AS behind INDEXED BY lanes
        WHERE behind.queue = taken.queue AND behind.group_key = taken.group_key
          AND behind.high_priority = taken.high_priority
          AND behind.id > taken.id AND behind.finished_at IS NULL
    )
    WHERE next.state = 'ready' AND next.run_after IS NULL
    ORDER BY 1 DESC, 2
    LIMIT :limit
)
UPDATE queue_messages
SET state = 'in-flight',
    offered_to = NULL,
    lease_token = :token,
    lease_version = lease_version + 1,
    lease_until = :lease_until,
    worker_id = :worker_id,
    deliveries = deliveries + 1,
    first_claimed_at = coalesce(first_claimed_at, :now),
    last_claimed_at = :now
WHERE id IN (SELECT id FROM taken);

-- name: claimed
-- What the claim has taken; the bodies in one piece, in the order of the rows.
SELECT
    json_group_array(json_array(
        id, group_key IS NOT NULL, high_priority, deliveries, attempts, posts, length(body)
    )),
    coalesce(CAST(group_concat(body, '') AS BLOB), x'')
FROM queue_messages INDEXED BY leases
WHERE queue = :queue AND state = 'in-flight' AND lease_until = :lease_until
  AND lease_token = :token;

-- name: reoffer
-- After the messages :ids changed: decide anew about the first unsettled one of each lane of their
-- groups. A lane with a message in flight, or whose first has to wait, offers nothing; a group of
-- which a worker holds some offers only to that worker. One in flight itself needs no decision.
UPDATE queue_messages AS first
SET offered_to = CASE
    WHEN first.run_after IS NOT NULL THEN NULL
    WHEN EXISTS (
        SELECT 1 FROM queue_messages AS held INDEXED BY groups_in_flight
        WHERE held.state = 'in-flight' AND held.queue = first.queue
          AND held.group_key = first.group_key AND held.high_priority = first.high_priority
    ) THEN NULL
    ELSE coalesce((
        SELECT held.worker_id FROM queue_messages AS held INDEXED BY groups_in_flight
        WHERE held.state = 'in-flight' AND held.queue = first.queue
          AND held.group_key = first.group_key
        LIMIT 1
    ), '')
END
WHERE first.state = 'ready' AND first.id IN (
    SELECT (
        SELECT min(id) FROM queue_messages INDEXED BY lanes
        WHERE queue = changed.queue AND group_key = changed.group_key
          AND high_priority = tier.column1 AND finished_at IS NULL
    )
    FROM (
        SELECT DISTINCT queue, group_key FROM queue_messages
        WHERE id IN (SELECT value FROM json_each(:ids)) AND group_key IS NOT NULL
    ) AS changed, (VALUES (0), (1)) AS tier
);

-- name: next_change
-- When a claim may find what it cannot find now, if nobody does anything until then.
SELECT min(at) FROM (
    SELECT min(run_after) AS at FROM queue_messages INDEXED BY delays
    WHERE queue = :queue AND run_after IS NOT NULL
    UNION ALL
    SELECT min(lease_until) FROM queue_messages INDEXED BY leases
    WHERE queue = :queue AND state = 'in-flight'
);

-- name: finish
-- The token stays, so that an acknowledgement sent twice is no complaint.
UPDATE queue_messages
SET state = CASE WHEN :error = '' THEN 'succeeded' ELSE 'failed' END,
    last_error = CASE WHEN :error = '' THEN last_error ELSE :error END,
    offered_to = NULL,
    run_after = NULL,
    lease_until = NULL,
    finished_at = :now,
    body = x''
FROM json_each(:leases) AS lease
WHERE queue_messages.id = json_extract(lease.value, '$[0]')
  AND lease_token = json_extract(lease.value, '$[1]')
  AND finished_at IS NULL;

-- name: not_finished
-- Which of the leases did not finish their message.
SELECT json_group_array(lease.key) FROM json_each(:leases) AS lease
WHERE NOT EXISTS (
    SELECT 1 FROM queue_messages
    WHERE id = json_extract(lease.value, '$[0]')
      AND lease_token = json_extract(lease.value, '$[1]')
      AND finished_at IS NOT NULL
);

-- name: give_back
UPDATE queue_messages
SET state = 'ready',
    run_after = :run_after,
    offered_to = CASE WHEN group_key IS NULL AND :run_after IS NULL THEN '' END,
    lease_token = NULL,
    lease_until = NULL,
    attempts = :attempts,
    posts = :posts,
    last_error = CASE WHEN :error = '' THEN last_error ELSE :error END
WHERE id = :id AND lease_token = :token AND finished_at IS NULL;

-- name: held
SELECT json_group_array(id) FROM queue_messages INDEXED BY leases
WHERE queue = :queue AND state = 'in-flight' AND worker_id = :worker_id;

-- name: let_go
UPDATE queue_messages
SET state = 'ready',
    offered_to = CASE WHEN group_key IS NULL THEN '' END,
    lease_token = NULL,
    lease_until = NULL
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: extend
UPDATE queue_messages
SET lease_until = :lease_until
FROM json_each(:leases) AS lease
WHERE queue_messages.id = json_extract(lease.value, '$[0]')
  AND lease_token = json_extract(lease.value, '$[1]')
  AND state = 'in-flight' AND lease_until > :now;

-- name: not_held
-- Which of the leases are lost.
SELECT json_group_array(lease.key) FROM json_each(:leases) AS lease
WHERE NOT EXISTS (
    SELECT 1 FROM queue_messages
    WHERE id = json_extract(lease.value, '$[0]')
      AND lease_token = json_extract(lease.value, '$[1]')
      AND state = 'in-flight' AND lease_until > :now
);

-- name: prune
DELETE FROM queue_messages
WHERE id IN (
    SELECT id FROM queue_messages INDEXED BY finished
    WHERE queue = :queue AND finished_at <= :before
    ORDER BY finished_at LIMIT :at_most
);

-- name: depth
-- Counts over indexes alone: all, finished, in flight; and what stands first in its lane and could be
-- handed to this worker now, counting also what only waits for a claim to notice that it is due.
SELECT
    (SELECT count(*) FROM queue_messages INDEXED BY by_dedup_key WHERE queue = :queue),
    (SELECT count(*) FROM queue_messages INDEXED BY finished
     WHERE queue = :queue AND finished_at IS NOT NULL),
    (SELECT count(*) FROM queue_messages INDEXED BY leases
     WHERE queue = :queue AND state = 'in-flight'),
    (SELECT count(*) FROM queue_messages INDEXED BY offers
     WHERE queue = :queue AND offered_to IN ('', :worker_id))
    + (SELECT count(*) FROM queue_messages INDEXED BY delays
       WHERE queue = :queue AND run_after <= :now)
    + (SELECT count(*) FROM queue_messages INDEXED BY leases
       WHERE queue = :queue AND state = 'in-flight' AND lease_until <= :now);
