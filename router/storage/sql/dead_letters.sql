-- The dead-letter store. Each statement has a name; Python refers to them by it.

-- name: create_table
-- An id is never used twice: a page of a list may be read long after the one before it.
CREATE TABLE IF NOT EXISTS dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    broker_key TEXT NOT NULL,
    message_id TEXT,
    pool TEXT,
    target TEXT,
    reason TEXT NOT NULL,
    http_status INTEGER,
    reply BLOB NOT NULL,
    error TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    first_seen REAL NOT NULL,
    dead_at REAL NOT NULL,
    body BLOB NOT NULL,
    replayed_at REAL,
    UNIQUE (queue, broker_key)
)

-- name: create_age_index
CREATE INDEX IF NOT EXISTS dead_letters_by_age ON dead_letters (dead_at)

-- name: create_message_index
CREATE INDEX IF NOT EXISTS dead_letters_by_message ON dead_letters (message_id, id)

-- name: put
-- A second death of the same message is a new letter, not yet replayed, in the place of the first.
INSERT OR REPLACE INTO dead_letters (
    queue, broker_key, message_id, pool, target, reason, http_status, reply, error, attempts,
    first_seen, dead_at, body
) VALUES (
    :queue, :broker_key, :message_id, :pool, :target, :reason, :http_status, :reply, :error,
    :attempts, :first_seen, :dead_at, :body
)

-- name: forget
DELETE FROM dead_letters WHERE dead_at < :oldest

-- name: find
-- Without the bodies: a page of them could be a hundred megabytes, and nobody is shown one.
SELECT
    id, queue, broker_key, message_id, pool, target, reason, http_status, reply, error, attempts,
    first_seen, dead_at, x'' AS body, replayed_at
FROM dead_letters
WHERE (:queue IS NULL OR queue = :queue)
    AND (:pool IS NULL OR pool = :pool)
    AND (:reason IS NULL OR reason = :reason)
    AND (:target IS NULL OR target = :target)
    AND (:since IS NULL OR dead_at >= :since)
    AND (:before IS NULL OR id < :before)
ORDER BY id DESC
LIMIT :limit

-- name: get
SELECT
    id, queue, broker_key, message_id, pool, target, reason, http_status, reply, error, attempts,
    first_seen, dead_at, body, replayed_at
FROM dead_letters
WHERE id = :id

-- name: latest_of
SELECT
    id, queue, broker_key, message_id, pool, target, reason, http_status, reply, error, attempts,
    first_seen, dead_at, x'' AS body, replayed_at
FROM dead_letters
WHERE message_id = :message_id
ORDER BY id DESC
LIMIT 1

-- name: mark_replayed
UPDATE dead_letters SET replayed_at = :at WHERE id = :id

-- name: discard
DELETE FROM dead_letters WHERE id = :id
