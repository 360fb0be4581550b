-- The work queue's file, version 2.

CREATE TABLE queue_messages (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a lane; never used again
    queue            TEXT    NOT NULL,
    -- ready, in-flight, succeeded, failed: checking that would double the cost of each change.
    state            TEXT    NOT NULL DEFAULT 'ready',
    high_priority    INTEGER NOT NULL,
    lane             INTEGER,                           -- NULL: independent of all others
    next_id          INTEGER,                           -- the one behind it in its lane
    deliveries       INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    run_after        REAL,                              -- NULL: due; else the instant it is due
    lease_token      INTEGER,                           -- of the hand-over that holds or ended it
    lease_version    INTEGER AS (deliveries),
    lease_until      REAL,
    finished_at      REAL,                              -- NULL: unsettled
    worker_id        TEXT,
    published_at     REAL    NOT NULL,
    first_claimed_at REAL,
    last_claimed_at  REAL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT,                              -- NULL: finished, and free to come again
    pool             TEXT    NOT NULL,
    group_id         TEXT,
    last_error       TEXT,
    body             BLOB    NOT NULL                   -- emptied when it is finished
);

CREATE UNIQUE INDEX by_dedup_key ON queue_messages (queue, dedup_key);

-- What can be claimed and has no group, in claim order.
CREATE INDEX loose ON queue_messages (queue, high_priority DESC, id)
    WHERE lane IS NULL AND state = 'ready' AND run_after IS NULL;

CREATE INDEX delays ON queue_messages (queue, run_after)
    WHERE run_after IS NOT NULL;

-- One row for each lane that has unsettled messages: a list of them, by `next_id`, in the order of
-- their ids. Those that have been claimed before stand in front; finished ones among them stay in
-- the list until they are its first. The high-priority lane of a group has the number of its regular
-- one, negative.
--
-- Claiming and settling touch the lane and the message, both close to those that came with them. An
-- index of messages by group would be another page to write for each group.
CREATE TABLE queue_lanes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    group_key        INTEGER NOT NULL,                  -- a hash of pool and group
    high_priority    INTEGER NOT NULL,
    first_id         INTEGER,                           -- NULL: all are settled
    last_id          INTEGER NOT NULL,
    -- Whom a claim may hand the first one to: '' anyone, a worker's id only that one, NULL nobody now.
    offered_to       TEXT
);

CREATE INDEX lanes_of_group ON queue_lanes (queue, group_key);

-- What can be claimed and has a group: a claim never steps over a blocked lane.
CREATE INDEX offers ON queue_lanes (queue, offered_to, high_priority DESC, first_id)
    WHERE offered_to IS NOT NULL;

-- What happened to messages, a row for all to which it happened at once (WQ-8). The number of the
-- row that tells of a claim is the token of its leases: never used again, as the last row stays.
CREATE TABLE queue_changes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    at               REAL    NOT NULL,
    state            TEXT    NOT NULL,                  -- that they came to
    worker_id        TEXT,
    error            TEXT,
    in_flight        INTEGER,                           -- of those claimed, how many still are
    look_at          REAL,                              -- while any is: no lease ends before
    prune_from       REAL,                              -- of those finished, while any is still here
    ids              TEXT    NOT NULL                   -- JSON
);

CREATE INDEX hand_overs ON queue_changes (look_at)
    WHERE look_at IS NOT NULL;

CREATE INDEX to_prune ON queue_changes (prune_from)
    WHERE prune_from IS NOT NULL;

-- The same, a row for each message.
CREATE VIEW queue_audit AS
SELECT message.value AS id, queue, at, state, worker_id, error
FROM queue_changes, json_each(ids) AS message;

CREATE TABLE queue_sizes (
    queue            TEXT    PRIMARY KEY,
    unsettled        INTEGER NOT NULL
) WITHOUT ROWID;

-- "MRQQ"
PRAGMA application_id = 1297239633;
PRAGMA user_version = 2;
