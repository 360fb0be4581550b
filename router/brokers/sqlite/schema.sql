-- The work queue's file. All instants are seconds by the clock of the file (queue_file).

-- One row: which file this is, and its clock.
CREATE TABLE queue_file (
    incarnation      TEXT    NOT NULL,      -- random: no other file has it
    boot_id          TEXT    NOT NULL,
    clock_offset     REAL    NOT NULL       -- the file's clock is the machine's uptime + offset
);

-- The groups that have unsettled messages. Their numbers keep the messages of groups that are busy at
-- the same time on the same pages of the index `lanes`: with a hash instead, receive and ACK of 50
-- messages of 50 groups cost 11 µs more for each message.
CREATE TABLE queue_groups (
    number           INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    pool             TEXT    NOT NULL,
    group_id         TEXT    NOT NULL,
    UNIQUE (queue, pool, group_id)
);

-- What was published, and what it ended with. A row hardly ever changes.
CREATE TABLE queue_entries (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a group; never used again
    queue            TEXT    NOT NULL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT,                  -- NULL: it may be published again
    pool             TEXT    NOT NULL,
    group_id         TEXT,                  -- NULL: independent of all other messages
    published_at     REAL    NOT NULL,
    not_before       REAL,                  -- Unix seconds (CMD-5)
    correlation_id   TEXT,
    payload_size     INTEGER,               -- in bytes
    result           TEXT,                  -- JSON
    result_omitted   INTEGER,               -- 1: it was too long
    error_code       TEXT,                  -- of the last failed attempt
    http_status      INTEGER
);

CREATE UNIQUE INDEX by_dedup_key ON queue_entries (queue, dedup_key);

CREATE INDEX by_message_id ON queue_entries (message_id);

-- Where each message stands: what claims and settling read and write. Apart from the entries, because
-- SQLite reads and writes a whole row when a part of it changes: in one table, receive and ACK of a
-- message cost 3 µs more.
CREATE TABLE queue_progress (
    id               INTEGER PRIMARY KEY,   -- in queue_entries
    queue            TEXT    NOT NULL,
    group_number     INTEGER,               -- in queue_groups, while it is unsettled
    priority         INTEGER NOT NULL,      -- 0 to 9
    high_priority    INTEGER NOT NULL,      -- whether that is 9: those have a lane of their own
    size             INTEGER NOT NULL,      -- of the body, in bytes
    is_kept          INTEGER NOT NULL,      -- 1: it stays for the retention of results (CMD-2)
    batch            INTEGER,               -- in queue_batches (CMD-4)
    state            TEXT    NOT NULL DEFAULT 'ready', -- in-flight, succeeded, failed, cancelled
    -- Who may claim it now: '' any worker, an id only that worker, NULL nobody. Of a lane (the
    -- messages of one group and tier), only the first one is offered; a claim goes on from there.
    offered_to       TEXT,
    wakes_at         REAL,                  -- when its delay ends, or its lease if it is in flight
    wait_seconds     REAL,                  -- how long that was to last
    lease_token      INTEGER,               -- stays when the message is finished
    worker_id        TEXT,                  -- of the last claim
    deliveries       INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    first_claimed_at REAL,
    last_claimed_at  REAL,
    finished_at      REAL,                  -- NULL: unsettled
    last_error       TEXT,                  -- of its last failed attempt, as the error in queue_entries
    -- As many bytes as the first claim will add to the row, which then stays where it is: without,
    -- claims move rows to other pages, which takes 1 µs more for each message.
    room             BLOB,
    pool_code        TEXT,                  -- as in queue_entries; NULL: look there (see `adopt`)
    returned_at      REAL,                  -- when it last went back, or its lease ended
    is_cancelled     INTEGER,               -- 1: it is to be cancelled by who holds it (CMD-13)
    stored_bytes     INTEGER                -- the size of what was put into an order store (ORD-4)
);

-- What can be claimed, in claim order. A claim never steps over a blocked message.
CREATE INDEX offers ON queue_progress (queue, offered_to, priority DESC, id)
    WHERE offered_to IS NOT NULL;

-- The same for claims that ask for some pools only: what waits for the others is not stepped over. It costs
-- each message 1 µs.
CREATE INDEX offers_of_pool ON queue_progress (queue, offered_to, pool_code, priority DESC, id)
    WHERE offered_to IS NOT NULL;

-- The queue is for counting what is unsettled: a group is of one queue.
CREATE INDEX lanes ON queue_progress (group_number, high_priority, queue)
    WHERE finished_at IS NULL;

-- The delays and leases, by their ends.
CREATE INDEX wakes ON queue_progress (wakes_at) WHERE wakes_at IS NOT NULL;

-- What order stores have, in its order, and how much that is. Nothing of another queue is counted.
CREATE INDEX stored ON queue_progress (queue) WHERE stored_bytes IS NOT NULL AND finished_at IS NULL;

CREATE TABLE order_sizes (
    queue            TEXT    PRIMARY KEY,
    messages         INTEGER NOT NULL,
    bytes            INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TRIGGER stored_ended AFTER UPDATE OF finished_at ON queue_progress
WHEN OLD.stored_bytes IS NOT NULL AND OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL
BEGIN UPDATE order_sizes SET messages = messages - 1, bytes = bytes - OLD.stored_bytes WHERE queue = OLD.queue; END;

-- For people: the whole of a message.
CREATE VIEW queue_messages AS
SELECT *, deliveries AS lease_version, iif(state = 'ready', wakes_at, NULL) AS run_after,
       iif(state = 'in-flight', wakes_at, NULL) AS lease_until
FROM queue_entries JOIN queue_progress USING (id, queue);

-- Bodies hold tokens: a body is deleted when its message is finished. They are apart from the
-- messages because SQLite writes a whole row whenever a part of it changes.
CREATE TABLE queue_bodies (
    id               INTEGER PRIMARY KEY,
    body             BLOB    NOT NULL
);

-- The changes of state (WQ-8), a row for all messages that one call has changed. A row for each
-- message costs 1.3 µs more for receive and ACK.
CREATE TABLE queue_changes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    at               REAL    NOT NULL,
    state            TEXT    NOT NULL,      -- the new one
    worker_id        TEXT    NOT NULL,      -- who changed it
    error            TEXT,
    message_ids      TEXT    NOT NULL       -- a JSON array
);

-- The same, a row for each message.
CREATE VIEW queue_audit AS
SELECT message.value AS id, queue, at, state, worker_id, error
FROM queue_changes CROSS JOIN json_each(message_ids) AS message;

-- Batches (CMD-4). A batch is complete when as many members as its size have ended.
CREATE TABLE queue_batches (
    number           INTEGER PRIMARY KEY AUTOINCREMENT,
    queue            TEXT    NOT NULL,
    batch_id         TEXT    NOT NULL,
    size             INTEGER NOT NULL,
    total            INTEGER NOT NULL DEFAULT 0, -- members so far
    succeeded        INTEGER NOT NULL DEFAULT 0,
    failed           INTEGER NOT NULL DEFAULT 0,
    cancelled        INTEGER NOT NULL DEFAULT 0,
    callback         TEXT    NOT NULL,      -- its columns, as JSON
    callback_body    BLOB    NOT NULL,      -- up to the value of its payload
    callback_at      REAL,                  -- when it was published: the batch is complete
    UNIQUE (queue, batch_id)
);

CREATE INDEX complete ON queue_batches (callback_at) WHERE callback_at IS NOT NULL;

-- The members of a batch, as long as it is kept: a member's row goes sooner.
CREATE TABLE queue_batch_members (
    batch            INTEGER NOT NULL,
    message_id       TEXT    NOT NULL,
    digest           TEXT    NOT NULL,      -- of the body
    PRIMARY KEY (batch, message_id, digest)
) WITHOUT ROWID;

-- The last tick of each schedule that was published (CMD-10).
CREATE TABLE queue_ticks (
    queue            TEXT    NOT NULL,
    schedule         TEXT    NOT NULL,
    tick             INTEGER NOT NULL,
    PRIMARY KEY (queue, schedule)
) WITHOUT ROWID;

-- "MRQQ": marks the file as a work queue.
PRAGMA application_id = 1297239633;
PRAGMA user_version = 14;
