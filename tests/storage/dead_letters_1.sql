-- The dead-letter store as its first version made it: format 1. Not to be changed.
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
);
CREATE INDEX IF NOT EXISTS dead_letters_by_age ON dead_letters (dead_at);
CREATE INDEX IF NOT EXISTS dead_letters_by_message ON dead_letters (message_id, id);
PRAGMA user_version = 1;
