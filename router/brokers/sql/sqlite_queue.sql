-- The work queue's statements, each under its name. Times are seconds by the clock of the file, which
-- all processes that share it go by.
--
-- Each statement takes any number of rows as a JSON array and answers in at most one row. Every row
-- fetched gives up Python's lock once, and under load it takes a millisecond to get it back.

-- name: forget
-- What may be published again: messages that died, or were finished before the dedup window.
UPDATE queue_entries SET dedup_key = NULL
WHERE queue = :queue AND dedup_key IN (SELECT value FROM json_each(:keys)) AND EXISTS (
    SELECT 1 FROM queue_progress
    WHERE queue_progress.id = queue_entries.id AND (has_failed OR finished_at <= :before)
);

-- name: known
SELECT json_group_array(dedup_key) FROM queue_entries
WHERE queue = :queue AND dedup_key IN (SELECT value FROM json_each(:keys));

-- name: last_numbers
-- The highest number given to a message, and to a group.
SELECT
    coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'queue_entries'), 0),
    max(coalesce((SELECT max(id) FROM queue_lanes), 0), -coalesce((SELECT min(id) FROM queue_lanes), 0));

-- name: lanes
SELECT json_group_array(json_array(id, group_key, last_id))
FROM queue_lanes INDEXED BY lanes_of_group
WHERE queue = :queue AND group_key IN (SELECT value FROM json_each(:groups));

-- name: publish
-- The bodies come in one piece, as JSON cannot carry bytes.
INSERT INTO queue_entries (
    id, queue, message_id, dedup_key, pool, group_id, high_priority, lane, next_id, body, published_at
)
SELECT
    json_extract(value, '$[0]'),
    :queue,
    json_extract(value, '$[1]'),
    json_extract(value, '$[2]'),
    json_extract(value, '$[3]'),
    json_extract(value, '$[4]'),
    json_extract(value, '$[5]'),
    json_extract(value, '$[6]'),
    json_extract(value, '$[7]'),
    coalesce(substr(:bodies, json_extract(value, '$[8]') + 1, json_extract(value, '$[9]')), x''),
    :now
FROM json_each(:rows)
ORDER BY key;

-- name: offer_loose
-- Those of them that have no lane.
INSERT INTO queue_offers (queue, offered_to, place)
SELECT queue, '', id - (high_priority << 62) FROM queue_entries
WHERE id IN (SELECT value FROM json_each(:ids)) AND lane IS NULL;

-- name: link
-- Behind the last one of its lane so far stands a new one now.
UPDATE queue_entries SET next_id = json_extract(added.value, '$[3]')
FROM json_each(:lanes) AS added
WHERE queue_entries.id = json_extract(added.value, '$[2]');

-- name: lengthen
INSERT INTO queue_lanes (id, queue, group_key, high_priority, first_id, last_id)
SELECT
    json_extract(value, '$[0]'),
    :queue,
    json_extract(value, '$[1]'),
    json_extract(value, '$[0]') < 0,
    json_extract(value, '$[3]'),
    json_extract(value, '$[4]')
FROM json_each(:lanes)
WHERE true
ON CONFLICT (id) DO UPDATE SET last_id = excluded.last_id;

-- name: resize
INSERT INTO queue_sizes (queue, unsettled) VALUES (:queue, :more)
ON CONFLICT (queue) DO UPDATE SET unsettled = unsettled + excluded.unsettled;

-- name: next_change
-- When a claim may find what it cannot find now, if nobody does anything until then.
SELECT min(at) FROM (
    SELECT min(run_after) AS at FROM queue_progress INDEXED BY delays WHERE run_after IS NOT NULL
    UNION ALL
    SELECT min(look_at) FROM queue_changes INDEXED BY hand_overs WHERE look_at IS NOT NULL
);

-- name: due
-- Whose delay has ended, of any queue, and their lanes.
SELECT json_group_array(id), json_group_array(lane) FILTER (WHERE lane IS NOT NULL) FROM (
    SELECT entry.id, lane
    FROM queue_progress INDEXED BY delays
        CROSS JOIN queue_entries AS entry ON entry.id = queue_progress.id
    WHERE run_after <= :now
    ORDER BY run_after LIMIT :at_most
);

-- name: wake
UPDATE queue_progress SET run_after = NULL WHERE id IN (SELECT value FROM json_each(:ids));

-- name: to_look_at
-- A hand-over, of any queue, of which a lease may have ended.
SELECT id, queue FROM queue_changes INDEXED BY hand_overs
WHERE look_at <= :now
ORDER BY look_at LIMIT 1;

-- name: held_by
-- A hand-over to that worker, of any queue.
SELECT id, queue FROM queue_changes INDEXED BY hand_overs
WHERE look_at IS NOT NULL AND worker_id = :worker_id
LIMIT 1;

-- name: ended
-- What of a hand-over was held until then at the longest, and the lanes of that.
SELECT json_group_array(entry.id), json_group_array(lane) FILTER (WHERE lane IS NOT NULL)
FROM queue_changes AS hand_over
    CROSS JOIN json_each(hand_over.ids) AS handed
    CROSS JOIN queue_progress AS held ON held.id = handed.value
    CROSS JOIN queue_entries AS entry ON entry.id = handed.value
WHERE hand_over.id = :token AND lease_token = :token AND lease_until <= :until;

-- name: let_go
UPDATE queue_progress SET lease_token = NULL, lease_until = NULL
WHERE id IN (SELECT value FROM json_each(:ids));

-- name: look_again
UPDATE queue_changes
SET look_at = (
    SELECT min(lease_until)
    FROM json_each(queue_changes.ids) AS handed
        CROSS JOIN queue_progress AS held ON held.id = handed.value
    WHERE lease_token = :token
)
WHERE id = :token;

-- name: body
-- Of one that was left out because it is big.
SELECT body FROM queue_entries WHERE id = :id;

-- name: choose_heads
-- The short way for many lanes: the first ones of as many as are wanted, unless the second one of
-- any of them, or one kept for this worker, might come before the last of them, or a delay or a lease
-- is due to end. In the limit that is asked once, and not for each lane.
WITH heads (place) AS (
    SELECT place FROM queue_offers
    WHERE queue = :queue AND offered_to = ''
    ORDER BY place
    LIMIT iif(
        EXISTS (
            SELECT 1 FROM queue_offers WHERE queue = :queue AND offered_to = :worker_id
        ) OR EXISTS (
            SELECT 1 FROM queue_progress INDEXED BY delays WHERE run_after <= :now
        ) OR EXISTS (
            SELECT 1 FROM queue_changes INDEXED BY hand_overs WHERE look_at <= :now
        ),
        0, :limit
    )
)
SELECT
    json_group_array(entry.id),
    json_group_array(coalesce(lane, 0)),
    json_group_array(length(body)),
    CAST(group_concat(iif(length(body) > :big, x'', body), '') AS BLOB),
    max(place)
FROM heads CROSS JOIN queue_entries AS entry ON entry.id = place + ((place < 0) << 62)
HAVING count(*) = :limit AND (max(place) < 0 OR min(place) > 0)
   AND (min(next_id) IS NULL OR min(next_id) > max(entry.id));

-- name: choose
-- The next to be claimed, in claim order: their ids, lanes and sizes, all bodies in one piece but for
-- the big ones, and the place of the last.
--
-- A merge of lanes: start with what is on offer, and whenever one is taken, the next of its lane joins
-- the race, unless that one is not due. An ORDER BY in a recursive query makes its queue a priority
-- queue. Where there are heads enough, none behind the last of them can win.
WITH RECURSIVE heads (place, id, next_id) AS MATERIALIZED (
    SELECT * FROM (
        SELECT place, entry.id, next_id
        FROM queue_offers CROSS JOIN queue_entries AS entry ON entry.id = place + ((place < 0) << 62)
        WHERE queue_offers.queue = :queue AND offered_to = ''
        ORDER BY place LIMIT :limit
    )
    UNION ALL
    SELECT * FROM (
        SELECT place, entry.id, next_id
        FROM queue_offers CROSS JOIN queue_entries AS entry ON entry.id = place + ((place < 0) << 62)
        WHERE queue_offers.queue = :queue AND offered_to = :worker_id
        ORDER BY place LIMIT :limit
    )
),
last_head (place) AS MATERIALIZED (
    SELECT place FROM heads ORDER BY place LIMIT 1 OFFSET :limit - 1
),
race (place, id, next_id, is_ready) AS (
    SELECT place, id, next_id, true FROM heads
    UNION ALL
    SELECT
        next.id - (next.high_priority << 62), next.id, next.next_id, past.finished_at IS NULL
    FROM race
        CROSS JOIN queue_entries AS next ON next.id = race.next_id
        LEFT JOIN queue_progress AS past ON past.id = next.id
    WHERE past.run_after IS NULL
      AND race.next_id - race.id + race.place < coalesce((SELECT place FROM last_head), 1 << 62)
    ORDER BY 1
)
SELECT
    json_group_array(entry.id),
    json_group_array(coalesce(lane, 0)),
    json_group_array(length(body)),
    CAST(group_concat(iif(length(body) > :big, x'', body), '') AS BLOB),
    max(place)
FROM (SELECT place, id FROM race WHERE is_ready LIMIT :limit) AS winner
    CROSS JOIN queue_entries AS entry ON entry.id = winner.id;

-- name: claim
-- Those that were never handed out before.
INSERT INTO queue_progress (id, lease_token, lease_until, first_claimed_at, worker_id)
SELECT value, :token, :lease_until, :now, :worker_id FROM json_each(:ids)
WHERE true
ON CONFLICT (id) DO NOTHING;

-- name: claim_again
-- The others.
UPDATE queue_progress
SET lease_token = :token,
    lease_until = :lease_until,
    deliveries = deliveries + 1,
    last_claimed_at = :now,
    worker_id = :worker_id
WHERE id IN (SELECT value FROM json_each(:ids)) AND lease_until IS NULL;

-- name: past
-- What those were through that have been handed out before.
SELECT json_group_array(json_array(id, deliveries, attempts, posts)) FROM queue_progress
WHERE id IN (SELECT value FROM json_each(:ids)) AND deliveries > 1;

-- name: take
-- All that were on offer up to there have been chosen.
DELETE FROM queue_offers
WHERE queue = :queue AND offered_to IN ('', :worker_id) AND place <= :last_place;

-- name: finish
-- The token stays, so that an acknowledgement sent twice is no complaint.
UPDATE queue_progress
SET lease_until = NULL,
    finished_at = :now,
    has_failed = :has_failed,
    last_error = coalesce(:error, last_error)
WHERE id IN (SELECT value FROM json_each(:ids)) AND lease_token = :token
  AND lease_until IS NOT NULL;

-- name: finished
-- Which of them were finished with this token at that instant.
SELECT json_group_array(id) FROM queue_progress
WHERE id IN (SELECT value FROM json_each(:ids)) AND lease_token = :token AND finished_at = :now;

-- name: not_finished
-- Which of the leases did not finish their message.
SELECT json_group_array(lease.key) FROM json_each(:leases) AS lease
WHERE NOT EXISTS (
    SELECT 1 FROM queue_progress
    WHERE id = json_extract(lease.value, '$[0]')
      AND lease_token = json_extract(lease.value, '$[1]')
      AND finished_at IS NOT NULL
);

-- name: give_back
UPDATE queue_progress
SET lease_token = NULL,
    lease_until = NULL,
    run_after = :run_after,
    attempts = :attempts,
    posts = :posts,
    last_error = iif(:error = '', last_error, :error)
WHERE id = :id AND lease_token = :token AND lease_until IS NOT NULL;

-- name: settle
-- So many of a hand-over are not in flight any more.
UPDATE queue_changes
SET in_flight = in_flight - :ended, look_at = iif(in_flight > :ended, look_at, NULL)
WHERE id = :token;

-- name: extend
-- The hand-over is looked at when it would have ended, and then again.
UPDATE queue_progress
SET lease_until = :lease_until
WHERE id IN (SELECT value FROM json_each(:ids)) AND lease_token = :token AND lease_until > :now;

-- name: not_held
-- Which of the leases are lost.
SELECT json_group_array(lease.key) FROM json_each(:leases) AS lease
WHERE NOT EXISTS (
    SELECT 1 FROM queue_progress
    WHERE id = json_extract(lease.value, '$[0]')
      AND lease_token = json_extract(lease.value, '$[1]')
      AND lease_until > :now
);

-- name: advance
-- The short way for most lanes: their first one is finished and the next was never handed out, so
-- nothing of the group is. Two lanes of one group take the long way.
UPDATE queue_lanes
SET first_id = (SELECT next_id FROM queue_entries WHERE id = first_id), offered_to = ''
WHERE id IN (SELECT value FROM json_each(:lanes))
  AND EXISTS (SELECT 1 FROM queue_progress WHERE id = first_id AND finished_at IS NOT NULL)
  AND EXISTS (
      SELECT 1 FROM queue_entries AS first LEFT JOIN queue_progress AS next ON next.id = next_id
      WHERE first.id = first_id AND next_id IS NOT NULL AND next.id IS NULL
  )
  AND NOT EXISTS (SELECT 1 FROM queue_lanes AS other WHERE other.id = -queue_lanes.id);

-- name: withdraw
DELETE FROM queue_offers
WHERE (queue, offered_to, place) IN (
    SELECT queue, offered_to, first_id - (high_priority << 62) FROM queue_lanes
    WHERE id IN (SELECT value FROM json_each(:lanes))
);

-- name: offer
INSERT INTO queue_offers (queue, offered_to, place)
SELECT queue, offered_to, first_id - (high_priority << 62) FROM queue_lanes
WHERE id IN (SELECT value FROM json_each(:lanes)) AND offered_to IS NOT NULL;

-- name: reoffer
-- The long way: find the first unsettled message of these lanes, which are whole groups, and decide
-- anew whom they offer it to. A lane with a message in flight, or whose first has
-- to wait, offers nothing; a group of which a worker holds some offers only to that worker.
--
-- What is in flight was claimed, and all in front of it in its lane: no need to look behind the first
-- one that never was.
WITH RECURSIVE walk (lane, id, next_id, is_open, holder, goes_on) AS (
    SELECT
        queue_lanes.id, entry.id, next_id, finished_at IS NULL,
        iif(lease_until IS NULL, NULL, worker_id), past.id IS NOT NULL AND lease_until IS NULL
    FROM queue_lanes
        CROSS JOIN queue_entries AS entry ON entry.id = first_id
        LEFT JOIN queue_progress AS past ON past.id = entry.id
    WHERE queue_lanes.id IN (SELECT value FROM json_each(:lanes))
    UNION ALL
    SELECT
        walk.lane, entry.id, entry.next_id, finished_at IS NULL,
        iif(lease_until IS NULL, NULL, worker_id), past.id IS NOT NULL AND lease_until IS NULL
    FROM walk
        CROSS JOIN queue_entries AS entry ON entry.id = walk.next_id
        LEFT JOIN queue_progress AS past ON past.id = entry.id
    WHERE goes_on
),
seen (lane, first_id, holder) AS MATERIALIZED (
    SELECT lane, min(id) FILTER (WHERE is_open), max(holder) FROM walk GROUP BY lane
)
UPDATE queue_lanes
SET first_id = seen.first_id,
    offered_to = CASE
        WHEN seen.first_id IS NULL OR seen.holder IS NOT NULL THEN NULL
        WHEN (SELECT run_after FROM queue_progress WHERE id = seen.first_id) IS NOT NULL THEN NULL
        ELSE coalesce((SELECT holder FROM seen AS other WHERE other.lane = -seen.lane), '')
    END
FROM seen
WHERE queue_lanes.id = seen.lane;

-- name: drop_empty
DELETE FROM queue_lanes
WHERE id IN (SELECT value FROM json_each(:lanes)) AND first_id IS NULL;

-- name: write
INSERT INTO queue_changes (
    queue, at, state, worker_id, error, in_flight, look_at, lease, prune_from, has_bodies, ids
)
VALUES (
    :queue, :at, :state, :worker_id, nullif(:error, ''),
    iif(:look_at IS NULL, NULL, json_array_length(:ids)), :look_at, :look_at - :at,
    :prune_from, iif(:prune_from IS NULL, NULL, true), :ids
);

-- name: is_time_to_tidy
-- Whether there are enough bodies to empty, or messages to prune.
SELECT 1 WHERE coalesce(
    (SELECT 1 FROM queue_changes INDEXED BY to_prune
     WHERE has_bodies = 1 AND prune_from IS NOT NULL
     LIMIT 1 OFFSET :at_least - 1),
    (SELECT 1 FROM queue_changes INDEXED BY to_prune
     WHERE has_bodies = 0 AND prune_from <= :before
     LIMIT 1 OFFSET :at_least - 1)
);

-- name: to_empty
-- The oldest changes, of any queue, whose messages are finished and still have their bodies; and
-- these messages, but for those that are to be pruned at once.
WITH change (id, ids, prune_from) AS MATERIALIZED (
    SELECT id, ids, prune_from FROM queue_changes INDEXED BY to_prune
    WHERE has_bodies = 1 AND prune_from IS NOT NULL
    ORDER BY prune_from LIMIT :at_most
)
SELECT
    (SELECT json_group_array(id) FROM change),
    json_group_array(one.value)
FROM change CROSS JOIN json_each(change.ids) AS one
WHERE prune_from > :before;

-- name: empty
UPDATE queue_entries SET body = x'' WHERE id IN (SELECT value FROM json_each(:ids));

-- name: emptied
UPDATE queue_changes SET has_bodies = 0 WHERE id IN (SELECT value FROM json_each(:changes));

-- name: to_prune
-- The oldest changes, of any queue, whose messages are finished for long enough; how many messages
-- that were; and these, but for those that still stand behind another one in their lane.
WITH change (id, ids) AS MATERIALIZED (
    SELECT id, ids FROM queue_changes INDEXED BY to_prune
    WHERE has_bodies = 0 AND prune_from <= :before
    ORDER BY prune_from LIMIT :at_most
)
SELECT
    (SELECT json_group_array(id) FROM change),
    count(*),
    json_group_array(one.value) FILTER (WHERE queue_lanes.id IS NULL)
FROM change
    CROSS JOIN json_each(change.ids) AS one
    LEFT JOIN queue_entries AS entry ON entry.id = one.value
    LEFT JOIN queue_lanes ON queue_lanes.id = entry.lane AND first_id < entry.id;

-- name: prune
DELETE FROM queue_entries WHERE id IN (SELECT value FROM json_each(:ids));

-- name: prune_progress
DELETE FROM queue_progress WHERE id IN (SELECT value FROM json_each(:ids));

-- name: pruned
UPDATE queue_changes SET prune_from = NULL WHERE id IN (SELECT value FROM json_each(:changes));

-- name: prune_again
-- Those of which some are still there, later.
UPDATE queue_changes SET prune_from = :now, has_bodies = 1
WHERE id IN (SELECT value FROM json_each(:changes)) AND EXISTS (
    SELECT 1 FROM json_each(queue_changes.ids) AS message
        CROSS JOIN queue_entries ON queue_entries.id = message.value
);

-- name: forget_changes
-- The oldest, of any queue, of which nothing has to be done any more.
DELETE FROM queue_changes
WHERE id IN (SELECT id FROM queue_changes ORDER BY id LIMIT :at_most)
  AND at <= :before AND look_at IS NULL AND prune_from IS NULL
  AND id < (SELECT max(id) FROM queue_changes);

-- name: depth
-- Unsettled, in flight; and what stands first in its lane and could be handed to this worker now,
-- counting also what only waits for a claim to notice that it is due.
SELECT
    coalesce((SELECT unsettled FROM queue_sizes WHERE queue = :queue), 0),
    coalesce((SELECT sum(in_flight) FROM queue_changes INDEXED BY hand_overs
              WHERE look_at IS NOT NULL AND queue = :queue), 0),
    (SELECT count(*) FROM queue_offers WHERE queue = :queue AND offered_to IN ('', :worker_id))
    + (SELECT count(*)
       FROM queue_progress AS delayed INDEXED BY delays
           CROSS JOIN queue_entries AS entry ON entry.id = delayed.id
       WHERE run_after <= :now AND queue = :queue)
    + (SELECT count(*)
       FROM queue_changes AS hand_over INDEXED BY hand_overs
           CROSS JOIN json_each(hand_over.ids) AS handed
           CROSS JOIN queue_progress AS held ON held.id = handed.value
       WHERE look_at <= :now AND hand_over.queue = :queue
         AND lease_token = hand_over.id AND lease_until <= :now);
