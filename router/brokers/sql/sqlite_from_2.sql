-- A file of version 2 gets the tables of version 4: around the new schema, in one transaction.

-- name: before
DROP VIEW IF EXISTS queue_audit;
DROP INDEX IF EXISTS by_dedup_key;
DROP INDEX IF EXISTS loose;
DROP INDEX IF EXISTS delays;
DROP INDEX IF EXISTS lanes_of_group;
DROP INDEX IF EXISTS offers;
DROP INDEX IF EXISTS hand_overs;
DROP INDEX IF EXISTS to_prune;
ALTER TABLE queue_messages RENAME TO queue_messages_2;
ALTER TABLE queue_lanes RENAME TO queue_lanes_2;
ALTER TABLE queue_changes RENAME TO queue_changes_2;
ALTER TABLE queue_sizes RENAME TO queue_sizes_2;

-- name: after
INSERT INTO queue_entries (
    id, queue, high_priority, lane, next_id, published_at, message_id, dedup_key, pool, group_id, body
)
SELECT
    id, queue, high_priority, lane, next_id, published_at, message_id, dedup_key, pool, group_id, body
FROM queue_messages_2;

INSERT INTO queue_progress (
    id, lease_token, lease_until, finished_at, has_failed, run_after, deliveries, attempts, posts,
    first_claimed_at, last_claimed_at, worker_id, last_error
)
SELECT
    id, lease_token, lease_until, finished_at, state = 'failed', run_after, deliveries, attempts, posts,
    first_claimed_at, last_claimed_at, worker_id, last_error
FROM queue_messages_2 WHERE deliveries > 0;

INSERT INTO queue_offers (queue, offered_to, place)
SELECT queue, '', id - (high_priority << 62) FROM queue_messages_2
WHERE lane IS NULL AND state = 'ready' AND run_after IS NULL;

INSERT INTO queue_lanes (id, queue, group_key, high_priority, first_id, last_id)
SELECT id, queue, group_key, high_priority, first_id, last_id FROM queue_lanes_2;

INSERT INTO queue_changes (
    id, queue, at, state, worker_id, error, in_flight, look_at, prune_from, has_bodies, ids
)
SELECT
    id, queue, at, state, worker_id, error, in_flight, look_at, prune_from,
    iif(prune_from IS NULL, NULL, false), ids
FROM queue_changes_2
ORDER BY id NULLS LAST;

INSERT INTO queue_sizes (queue, unsettled) SELECT queue, unsettled FROM queue_sizes_2;

-- Ids are never used again, not even those of messages that are gone.
DELETE FROM sqlite_sequence WHERE name = 'queue_entries';
UPDATE sqlite_sequence SET name = 'queue_entries' WHERE name = 'queue_messages_2';
DROP TABLE queue_messages_2;
DROP TABLE queue_lanes_2;
DROP TABLE queue_changes_2;
DROP TABLE queue_sizes_2;
