-- A file of version 3 becomes one of version 4.

-- name: tables
CREATE TABLE queue_file (
    incarnation      TEXT    NOT NULL,                  -- random: another file has other messages
    boot_id          TEXT    NOT NULL,
    clock_offset     REAL    NOT NULL                   -- all instants are uptime + offset
);
ALTER TABLE queue_changes ADD COLUMN lease REAL;
PRAGMA user_version = 4;

-- name: rekey
-- Before version 4 the id was the key. Of a finished message the body is gone: it may come again.
UPDATE queue_entries
SET dedup_key = CASE
    WHEN dedup_key <> message_id THEN dedup_key_of(dedup_key, message_id, body)
    WHEN NOT EXISTS (
        SELECT 1 FROM queue_progress
        WHERE queue_progress.id = queue_entries.id AND finished_at IS NOT NULL
    ) THEN dedup_key_of(NULL, message_id, body)
END
WHERE dedup_key IS NOT NULL;
