-- A file of version 1 becomes one of version 2: around the new schema, in one transaction.

-- name: before
DROP INDEX by_dedup_key;
DROP INDEX offers;
DROP INDEX lanes;
DROP INDEX groups_in_flight;
DROP INDEX leases;
DROP INDEX delays;
DROP INDEX finished;
ALTER TABLE queue_messages RENAME TO queue_messages_1;

-- name: after
INSERT INTO queue_lanes (id, queue, group_key, high_priority, first_id, last_id)
SELECT
    dense_rank() OVER (ORDER BY queue, group_key) * iif(high_priority, -1, 1),
    queue, group_key, high_priority, min(id), max(id)
FROM queue_messages_1
WHERE group_key IS NOT NULL AND finished_at IS NULL
GROUP BY queue, group_key, high_priority;

INSERT INTO queue_messages (
    id, queue, state, high_priority, lane, next_id, deliveries, attempts, posts, run_after,
    lease_token, lease_until, finished_at, worker_id, published_at, first_claimed_at,
    last_claimed_at, message_id, dedup_key, pool, group_id, last_error, body
)
SELECT
    old.id, old.queue, state, old.high_priority, lane.id,
    CASE WHEN lane.id IS NOT NULL THEN lead(old.id) OVER (PARTITION BY lane.id ORDER BY old.id) END,
    deliveries, attempts, posts, run_after,
    lease_token, lease_until, finished_at, worker_id,
    published_at, first_claimed_at, last_claimed_at, message_id, dedup_key, pool, group_id,
    last_error, body
FROM queue_messages_1 AS old LEFT JOIN queue_lanes AS lane
    ON lane.queue = old.queue AND lane.group_key = old.group_key
    AND lane.high_priority = old.high_priority AND old.finished_at IS NULL;

INSERT INTO queue_changes (id, queue, at, state, worker_id, in_flight, look_at, ids)
SELECT
    lease_token, queue, max(last_claimed_at), state, worker_id, count(*), min(lease_until),
    json_group_array(id)
FROM queue_messages WHERE state = 'in-flight'
GROUP BY lease_token;

INSERT INTO queue_changes (queue, at, state, worker_id, error, ids, prune_from)
SELECT queue, finished_at, state, worker_id, last_error, json_group_array(id), finished_at
FROM queue_messages WHERE finished_at IS NOT NULL
GROUP BY queue, finished_at, state, worker_id, last_error;

INSERT INTO queue_sizes (queue, unsettled)
SELECT queue, count(*) FROM queue_messages WHERE finished_at IS NULL GROUP BY queue;

-- Ids are never used again, not even those of messages that are gone.
DELETE FROM sqlite_sequence WHERE name = 'queue_messages';
UPDATE sqlite_sequence SET name = 'queue_messages' WHERE name = 'queue_messages_1';
DROP TABLE queue_messages_1;
