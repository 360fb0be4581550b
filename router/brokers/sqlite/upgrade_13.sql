-- From schema version 13 to 14: how much an order store has is known without counting it.
ALTER TABLE queue_progress ADD COLUMN stored_bytes INTEGER;

UPDATE queue_progress SET stored_bytes = size WHERE finished_at IS NULL AND queue GLOB 'order:*';

CREATE INDEX stored ON queue_progress (queue) WHERE stored_bytes IS NOT NULL AND finished_at IS NULL;

CREATE TABLE order_sizes (
    queue            TEXT    PRIMARY KEY,
    messages         INTEGER NOT NULL,
    bytes            INTEGER NOT NULL
) WITHOUT ROWID;

INSERT INTO order_sizes SELECT queue, count(*), sum(stored_bytes) FROM queue_progress
WHERE stored_bytes IS NOT NULL AND finished_at IS NULL GROUP BY queue;

CREATE TRIGGER stored_ended AFTER UPDATE OF finished_at ON queue_progress
WHEN OLD.stored_bytes IS NOT NULL AND OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL
BEGIN UPDATE order_sizes SET messages = messages - 1, bytes = bytes - OLD.stored_bytes WHERE queue = OLD.queue; END;

PRAGMA user_version = 14;
