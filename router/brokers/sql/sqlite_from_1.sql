-- A file of version 1 gets the tables of version 2, as far as the step from there reads them.

DROP INDEX by_dedup_key;
DROP INDEX offers;
DROP INDEX lanes;
DROP INDEX groups_in_flight;
DROP INDEX leases;
DROP INDEX delays;
DROP INDEX finished;

CREATE TABLE queue_lanes AS
SELECT
    dense_rank() OVER (ORDER BY queue, group_key) * iif(high_priority, -1, 1) AS id,
    queue, group_key, high_priority, min(id) AS first_id, max(id) AS last_id
FROM queue_messages
WHERE group_key IS NOT NULL AND finished_at IS NULL
GROUP BY queue, group_key, high_priority;

ALTER TABLE queue_messages ADD COLUMN lane INTEGER;
ALTER TABLE queue_messages ADD COLUMN next_id INTEGER;

UPDATE queue_messages SET lane = place.lane, next_id = place.next_id
FROM (
    SELECT
        message.id, lane.id AS lane,
        lead(message.id) OVER (PARTITION BY lane.id ORDER BY message.id) AS next_id
    FROM queue_messages AS message JOIN queue_lanes AS lane USING (queue, group_key, high_priority)
    WHERE finished_at IS NULL
) AS place
WHERE queue_messages.id = place.id;

CREATE TABLE queue_changes AS
SELECT
    lease_token AS id, queue, max(last_claimed_at) AS at, state, worker_id, NULL AS error,
    count(*) AS in_flight, min(lease_until) AS look_at, NULL AS prune_from,
    json_group_array(id) AS ids
FROM queue_messages WHERE state = 'in-flight'
GROUP BY lease_token;

INSERT INTO queue_changes (queue, at, state, worker_id, error, prune_from, ids)
SELECT queue, finished_at, state, worker_id, last_error, finished_at, json_group_array(id)
FROM queue_messages WHERE finished_at IS NOT NULL
GROUP BY queue, finished_at, state, worker_id, last_error;

CREATE TABLE queue_sizes AS
SELECT queue, count(*) AS unsettled FROM queue_messages WHERE finished_at IS NULL GROUP BY queue;
