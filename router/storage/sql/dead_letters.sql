-- The dead-letter store. Each statement has a name; Python refers to them by it.

-- name: create_table
-- An id is never used twice: a page of a list may be read long after the one before it.
CREATE TABLE IF NOT EXISTS dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    message_id TEXT,
    pool TEXT,
    target TEXT,
    reason TEXT NOT NULL,
    http_status INTEGER,
    reply BLOB NOT NULL,
    error TEXT NOT NULL,
    requests INTEGER NOT NULL,
    first_seen REAL NOT NULL,
    dead_at REAL NOT NULL,
    body BLOB NOT NULL,
    replayed_at REAL,
    failures INTEGER NOT NULL DEFAULT 0
)

-- name: rename_key
-- From format 1, in place: a copy could need more room than the disk has. Letters of format 1 keep
-- their broker's id as fingerprint, which no new letter has. (Their table keeps UNIQUE (queue,
-- fingerprint).) Their `attempts` were requests; their failures were not counted.
ALTER TABLE dead_letters RENAME COLUMN broker_key TO fingerprint

-- name: rename_attempts
ALTER TABLE dead_letters RENAME COLUMN attempts TO requests

-- name: add_failures
ALTER TABLE dead_letters ADD COLUMN failures INTEGER NOT NULL DEFAULT 0

-- name: create_age_index
CREATE INDEX IF NOT EXISTS dead_letters_by_age ON dead_letters (dead_at)

-- name: create_message_index
CREATE INDEX IF NOT EXISTS dead_letters_by_message ON dead_letters (message_id, id)

-- name: create_fingerprint_index
CREATE INDEX IF NOT EXISTS dead_letters_by_fingerprint ON dead_letters (fingerprint)

-- name: create_order_index
CREATE INDEX IF NOT EXISTS dead_letters_by_order ON dead_letters (first_seen, id)

-- name: first_seen_before
-- Equal fingerprints are not enough to be the same message: the bodies are compared (ID-2).
SELECT min(first_seen) FROM dead_letters WHERE fingerprint = :fingerprint AND body = :body

-- name: supersede
DELETE FROM dead_letters WHERE fingerprint = :fingerprint AND body = :body

-- name: put
INSERT INTO dead_letters (
    queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, body
) VALUES (
    :queue, :fingerprint, :message_id, :pool, :target, :reason, :http_status, :reply, :error,
    :failures, :requests, :first_seen, :dead_at, :body
)

-- name: expire
-- A part of them, of a few megabytes: a letter that arrives meanwhile does not wait for the rest.
DELETE FROM dead_letters WHERE id IN (
    SELECT id FROM (
        SELECT id, sum(size) OVER (ORDER BY dead_at, id) - size AS size_before
        FROM (
            SELECT id, dead_at, length(body) AS size
            FROM dead_letters
            WHERE dead_at < :oldest
            ORDER BY dead_at, id
            LIMIT 500
        )
    )
    WHERE size_before < 4194304
)
RETURNING id

-- name: find
-- Letters from before TARGET_REJECTED are found by it and by CONFIG_ERROR, which they have (DLQ-2).
-- Without the bodies: a page of them could be a hundred megabytes, and nobody is shown one.
SELECT
    id, queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, x'' AS body, replayed_at
FROM dead_letters
WHERE (:queue IS NULL OR queue = :queue)
    AND (:pool IS NULL OR pool = :pool)
    AND (
        :reason IS NULL OR reason = :reason
        OR :reason = 'TARGET_REJECTED' AND reason = 'CONFIG_ERROR'
        AND http_status BETWEEN 400 AND 499 AND http_status NOT IN (401, 403, 404, 405, 407)
    )
    AND (:target IS NULL OR target = :target)
    AND (:since IS NULL OR dead_at >= :since)
    AND (:before IS NULL OR id < :before)
ORDER BY id DESC
LIMIT :limit

-- name: find_in_order
SELECT
    id, queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, x'' AS body, replayed_at
FROM dead_letters
WHERE (first_seen, id) > (:first_seen, :id)
    AND (:queue IS NULL OR queue = :queue)
    AND (:pool IS NULL OR pool = :pool)
    AND (
        :reason IS NULL OR reason = :reason
        OR :reason = 'TARGET_REJECTED' AND reason = 'CONFIG_ERROR'
        AND http_status BETWEEN 400 AND 499 AND http_status NOT IN (401, 403, 404, 405, 407)
    )
    AND (:target IS NULL OR target = :target)
    AND (:since IS NULL OR dead_at >= :since)
    AND id <= :up_to
ORDER BY first_seen, id
LIMIT :limit

-- name: get
SELECT * FROM dead_letters WHERE id = :id

-- name: latest_of
SELECT
    id, queue, fingerprint, message_id, pool, target, reason, http_status, reply, error, failures,
    requests, first_seen, dead_at, x'' AS body, replayed_at
FROM dead_letters
WHERE message_id = :message_id
ORDER BY id DESC
LIMIT 1

-- name: mark_replayed
UPDATE dead_letters SET replayed_at = :at WHERE id = :id

-- name: discard
DELETE FROM dead_letters WHERE id = :id RETURNING id
