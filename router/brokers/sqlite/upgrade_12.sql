-- From schema version 12 to 13: what is in flight can be cancelled.
ALTER TABLE queue_progress ADD COLUMN is_cancelled INTEGER;

PRAGMA user_version = 13;
