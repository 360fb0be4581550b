-- From schema version 11 to 12: a row knows when it last went back.
ALTER TABLE queue_progress ADD COLUMN returned_at REAL;

PRAGMA user_version = 12;
