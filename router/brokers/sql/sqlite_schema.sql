-- The work queue's file, version 4.
--
-- A claim or a finish costs what it writes, a page at a time. So what changes often stands close
-- together, in narrow rows, apart from the messages: those are written when they are published, and
-- once more, many at a time, to empty the bodies of finished ones.

-- One row: which file this is, and what its clock goes by.
CREATE TABLE queue_file (
    incarnation      TEXT    NOT NULL,                  -- random: another file has other messages
    boot_id          TEXT    NOT NULL,
    clock_offset     REAL    NOT NULL                   -- all instants are uptime + offset
);

-- What was published.
CREATE TABLE queue_entries (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a lane; never used again
    queue            TEXT    NOT NULL,
    high_priority    INTEGER NOT NULL,
    lane             INTEGER,                           -- NULL: independent of all others
    next_id          INTEGER,                           -- the one behind it in its lane
    published_at     REAL    NOT NULL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT,                              -- NULL: finished, and free to come again
    pool             TEXT    NOT NULL,
    group_id         TEXT,
    body             BLOB    NOT NULL                   -- emptied soon after it is finished
);

CREATE UNIQUE INDEX by_dedup_key ON queue_entries (queue, dedup_key);

-- What became of it, from its first hand-over on.
CREATE TABLE queue_progress (
    id               INTEGER PRIMARY KEY,
    lease_token      INTEGER,                           -- of the hand-over that holds or ended it
    lease_until      REAL,                              -- NULL: not in flight
    finished_at      REAL,                              -- NULL: unsettled
    has_failed       INTEGER NOT NULL DEFAULT 0,        -- if it is finished
    run_after        REAL,                              -- NULL: due; else the instant it is due
    deliveries       INTEGER NOT NULL DEFAULT 1,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    first_claimed_at REAL    NOT NULL,
    last_claimed_at  REAL,                              -- NULL: it was claimed once
    worker_id        TEXT    NOT NULL,
    last_error       TEXT
);

CREATE INDEX delays ON queue_progress (run_after)
    WHERE run_after IS NOT NULL;

-- Both together, for people.
CREATE VIEW queue_messages AS
SELECT
    entry.id, queue, message_id, dedup_key, pool, group_id, high_priority, lane,
    CASE
        WHEN finished_at IS NOT NULL THEN iif(has_failed, 'failed', 'succeeded')
        WHEN lease_until IS NOT NULL THEN 'in-flight'
        ELSE 'ready'
    END AS state,
    run_after, lease_token, coalesce(deliveries, 0) AS lease_version, lease_until, worker_id,
    coalesce(deliveries, 0) AS deliveries, coalesce(attempts, 0) AS attempts,
    coalesce(posts, 0) AS posts, last_error, published_at, first_claimed_at,
    coalesce(last_claimed_at, first_claimed_at) AS last_claimed_at, finished_at, body
FROM queue_entries AS entry LEFT JOIN queue_progress USING (id);

-- One row for each lane that has unsettled messages: a list of them, by `next_id`, in the order of
-- their ids. Those that have been claimed before stand in front; finished ones among them stay in
-- the list until they are its first. The high-priority lane of a group has the number of its regular
-- one, negative.
--
-- Settling touches the lane and the progress, both close to those that came with them. An index of
-- messages by group would be another page to write for each group.
CREATE TABLE queue_lanes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    group_key        INTEGER NOT NULL,                  -- a hash of pool and group
    high_priority    INTEGER NOT NULL,
    first_id         INTEGER,                           -- NULL: all are settled
    last_id          INTEGER NOT NULL,
    -- Whom the first one was offered to, when that was last decided: '' anyone, a worker's id only
    -- that one, NULL nobody. A claim takes the offer, and does not tell the lane.
    offered_to       TEXT
);

CREATE INDEX lanes_of_group ON queue_lanes (queue, group_key);

-- What can be claimed, in claim order: the first ones of lanes, and those without a lane. A claim
-- never steps over a blocked lane. The place is the id, 2 to the 62nd less for high priority.
CREATE TABLE queue_offers (
    queue            TEXT    NOT NULL,
    offered_to       TEXT    NOT NULL,                  -- '': anyone
    place            INTEGER NOT NULL,
    PRIMARY KEY (queue, offered_to, place)
) WITHOUT ROWID;

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
    lease            REAL,                              -- of those claimed: seconds
    prune_from       REAL,                              -- of those finished, while any is still here
    has_bodies       INTEGER,                           -- whether those finished still have theirs
    ids              TEXT    NOT NULL                   -- JSON
);

CREATE INDEX hand_overs ON queue_changes (look_at)
    WHERE look_at IS NOT NULL;

CREATE INDEX to_prune ON queue_changes (has_bodies, prune_from)
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
PRAGMA user_version = 4;
