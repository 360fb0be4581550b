-- The work queue's file, version 1. One transaction, harmless when another process was faster.
BEGIN IMMEDIATE;

CREATE TABLE IF NOT EXISTS queue_messages (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a lane; never used again
    queue            TEXT    NOT NULL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT    NOT NULL,
    pool             TEXT    NOT NULL,
    group_id         TEXT,                              -- NULL: independent of all others
    group_key        INTEGER,                           -- a hash of pool and group, for the indexes
    high_priority    INTEGER NOT NULL,
    state            TEXT    NOT NULL DEFAULT 'ready'
                     CHECK (state IN ('ready', 'in-flight', 'succeeded', 'failed')),
    -- Whom a claim may hand it to: '' anyone, a worker's id only that one, NULL nobody now.
    -- Of a lane only the first unsettled message is ever offered; the claim walks on from there.
    offered_to       TEXT,
    run_after        REAL,                              -- NULL: due; else the instant it is due
    lease_token      INTEGER,                           -- of the latest hand-over; NULL: given back
    lease_version    INTEGER NOT NULL DEFAULT 0,
    lease_until      REAL,
    worker_id        TEXT,
    deliveries       INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    last_error       TEXT,
    published_at     REAL    NOT NULL,
    first_claimed_at REAL,
    last_claimed_at  REAL,
    finished_at      REAL,                              -- NULL: unsettled
    body             BLOB    NOT NULL                   -- emptied when it is finished
);

CREATE UNIQUE INDEX IF NOT EXISTS by_dedup_key ON queue_messages (queue, dedup_key);

-- What can be claimed, in claim order, and nothing else: a claim never steps over a blocked row.
CREATE INDEX IF NOT EXISTS offers ON queue_messages (queue, offered_to, high_priority DESC, id)
    WHERE offered_to IS NOT NULL;

CREATE INDEX IF NOT EXISTS lanes ON queue_messages (queue, group_key, high_priority, id)
    WHERE group_key IS NOT NULL AND finished_at IS NULL;

CREATE INDEX IF NOT EXISTS groups_in_flight ON queue_messages (queue, group_key, high_priority)
    WHERE group_key IS NOT NULL AND state = 'in-flight';

CREATE INDEX IF NOT EXISTS leases ON queue_messages (queue, lease_until, lease_token)
    WHERE state = 'in-flight';

CREATE INDEX IF NOT EXISTS delays ON queue_messages (queue, run_after)
    WHERE run_after IS NOT NULL;

CREATE INDEX IF NOT EXISTS finished ON queue_messages (queue, finished_at)
    WHERE finished_at IS NOT NULL;

PRAGMA application_id = 1297239633; -- "MRQQ"
PRAGMA user_version = 1;
COMMIT;
