-- From schema version 10 to 11: a claim can ask for some pools only.
ALTER TABLE queue_progress ADD COLUMN pool_code TEXT;

UPDATE queue_progress
SET pool_code = (SELECT pool FROM queue_entries WHERE queue_entries.id = queue_progress.id)
WHERE finished_at IS NULL;

CREATE INDEX offers_of_pool ON queue_progress (queue, offered_to, pool_code, priority DESC, id)
    WHERE offered_to IS NOT NULL;

PRAGMA user_version = 11;
