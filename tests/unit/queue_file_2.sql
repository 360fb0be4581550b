-- A queue file as version 2 wrote it, with messages in every state, at the instant 1300.
PRAGMA application_id = 1297239633;
PRAGMA user_version = 2;
BEGIN TRANSACTION;
CREATE TABLE queue_changes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    at               REAL    NOT NULL,
    state            TEXT    NOT NULL,                  -- that they came to
    worker_id        TEXT,
    error            TEXT,
    in_flight        INTEGER,                           -- of those claimed, how many still are
    look_at          REAL,                              -- while any is: no lease ends before
    prune_from       REAL,                              -- of those finished, while any is still here
    ids              TEXT    NOT NULL                   -- JSON
);
INSERT INTO "queue_changes" VALUES(1,'orders',900.0,'ready','anna',NULL,NULL,NULL,NULL,'[1]');
INSERT INTO "queue_changes" VALUES(2,'orders',900.0,'in-flight','anna',NULL,0,NULL,NULL,'[1]');
INSERT INTO "queue_changes" VALUES(3,'orders',900.0,'succeeded','anna',NULL,NULL,NULL,NULL,'[1]');
INSERT INTO "queue_changes" VALUES(4,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,'[2,3,4,5,6,7,8,9,10]');
INSERT INTO "queue_changes" VALUES(5,'orders',1300.0,'in-flight','anna',NULL,1,1330.0,NULL,'[2,3,4,5,6,7,8,9,10]');
INSERT INTO "queue_changes" VALUES(6,'orders',1300.0,'succeeded','anna',NULL,NULL,NULL,1300.0,'[2]');
INSERT INTO "queue_changes" VALUES(7,'orders',1300.0,'failed','anna','HTTP 400',NULL,NULL,1300.0,'[3]');
INSERT INTO "queue_changes" VALUES(8,'orders',1300.0,'succeeded','anna',NULL,NULL,NULL,1300.0,'[5]');
INSERT INTO "queue_changes" VALUES(9,'orders',1300.0,'ready','anna','HTTP 503',NULL,NULL,NULL,'[6]');
INSERT INTO "queue_changes" VALUES(10,'orders',1300.0,'ready','anna','HTTP 503',NULL,NULL,NULL,'[4]');
INSERT INTO "queue_changes" VALUES(11,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,'[8]');
INSERT INTO "queue_changes" VALUES(12,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,'[9]');
INSERT INTO "queue_changes" VALUES(13,'orders',1300.0,'ready','anna','HTTP 500',NULL,NULL,NULL,'[10]');
INSERT INTO "queue_changes" VALUES(14,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,'[11,12,13,14]');
INSERT INTO "queue_changes" VALUES(15,'bills',1300.0,'ready','bert',NULL,NULL,NULL,NULL,'[15]');
INSERT INTO "queue_changes" VALUES(16,'bills',1300.0,'in-flight','bert',NULL,1,1330.0,NULL,'[15]');
CREATE TABLE queue_lanes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    group_key        INTEGER NOT NULL,                  -- a hash of pool and group
    high_priority    INTEGER NOT NULL,
    first_id         INTEGER,                           -- NULL: all are settled
    last_id          INTEGER NOT NULL,
    -- Whom a claim may hand the first one to: '' anyone, a worker's id only that one, NULL nobody now.
    offered_to       TEXT
);
INSERT INTO "queue_lanes" VALUES(-2,'orders',-3132268655066580697,1,12,13,'anna');
INSERT INTO "queue_lanes" VALUES(1,'orders',-5407672614359594449,0,4,11,'');
INSERT INTO "queue_lanes" VALUES(2,'orders',-3132268655066580697,0,7,8,NULL);
INSERT INTO "queue_lanes" VALUES(3,'bills',-5407672614359594449,0,15,15,NULL);
CREATE TABLE queue_messages (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a lane; never used again
    queue            TEXT    NOT NULL,
    -- ready, in-flight, succeeded, failed: checking that would double the cost of each change.
    state            TEXT    NOT NULL DEFAULT 'ready',
    high_priority    INTEGER NOT NULL,
    lane             INTEGER,                           -- NULL: independent of all others
    next_id          INTEGER,                           -- the one behind it in its lane
    deliveries       INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    run_after        REAL,                              -- NULL: due; else the instant it is due
    lease_token      INTEGER,                           -- of the hand-over that holds or ended it
    lease_version    INTEGER AS (deliveries),
    lease_until      REAL,
    finished_at      REAL,                              -- NULL: unsettled
    worker_id        TEXT,
    published_at     REAL    NOT NULL,
    first_claimed_at REAL,
    last_claimed_at  REAL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT,                              -- NULL: finished, and free to come again
    pool             TEXT    NOT NULL,
    group_id         TEXT,
    last_error       TEXT,
    body             BLOB    NOT NULL                   -- emptied when it is finished
);
INSERT INTO "queue_messages" VALUES(2,'orders','succeeded',0,NULL,NULL,1,0,0,NULL,5,NULL,1300.0,'anna',1300.0,1300.0,1300.0,'old','old','DEFAULT-POOL',NULL,NULL,X'');
INSERT INTO "queue_messages" VALUES(3,'orders','failed',0,NULL,NULL,1,0,0,NULL,5,NULL,1300.0,'anna',1300.0,1300.0,1300.0,'dead','dead','DEFAULT-POOL',NULL,'HTTP 400',X'');
INSERT INTO "queue_messages" VALUES(4,'orders','ready',0,1,5,1,1,3,NULL,NULL,NULL,NULL,'anna',1300.0,1300.0,1300.0,'g1','g1','DEFAULT-POOL','g','HTTP 503',X'6731');
INSERT INTO "queue_messages" VALUES(5,'orders','succeeded',0,1,6,1,0,0,NULL,5,NULL,1300.0,'anna',1300.0,1300.0,1300.0,'g2','g2','DEFAULT-POOL','g',NULL,X'');
INSERT INTO "queue_messages" VALUES(6,'orders','ready',0,1,11,1,1,3,NULL,NULL,NULL,NULL,'anna',1300.0,1300.0,1300.0,'g3','g3','DEFAULT-POOL','g','HTTP 503',X'6733');
INSERT INTO "queue_messages" VALUES(7,'orders','in-flight',0,2,8,1,0,0,NULL,5,1330.0,NULL,'anna',1300.0,1300.0,1300.0,'h1','h1','DEFAULT-POOL','h',NULL,X'6831');
INSERT INTO "queue_messages" VALUES(8,'orders','ready',0,2,NULL,1,0,0,NULL,NULL,NULL,NULL,'anna',1300.0,1300.0,1300.0,'h2','h2','DEFAULT-POOL','h',NULL,X'6832');
INSERT INTO "queue_messages" VALUES(9,'orders','ready',0,NULL,NULL,1,0,0,NULL,NULL,NULL,NULL,'anna',1300.0,1300.0,1300.0,'loose','loose','DEFAULT-POOL',NULL,NULL,X'6C6F6F7365');
INSERT INTO "queue_messages" VALUES(10,'orders','ready',0,NULL,NULL,1,2,2,1360.0,NULL,NULL,NULL,'anna',1300.0,1300.0,1300.0,'late','late','DEFAULT-POOL',NULL,'HTTP 500',X'6C617465');
INSERT INTO "queue_messages" VALUES(11,'orders','ready',0,1,NULL,0,0,0,NULL,NULL,NULL,NULL,NULL,1300.0,NULL,NULL,'g4','g4','DEFAULT-POOL','g',NULL,X'6734');
INSERT INTO "queue_messages" VALUES(12,'orders','ready',1,-2,13,0,0,0,NULL,NULL,NULL,NULL,NULL,1300.0,NULL,NULL,'H1','H1','DEFAULT-POOL','h',NULL,X'4831');
INSERT INTO "queue_messages" VALUES(13,'orders','ready',1,-2,NULL,0,0,0,NULL,NULL,NULL,NULL,NULL,1300.0,NULL,NULL,'H2','H2','DEFAULT-POOL','h',NULL,X'4832');
INSERT INTO "queue_messages" VALUES(14,'orders','ready',0,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,NULL,1300.0,NULL,NULL,'fresh','fresh','DEFAULT-POOL',NULL,NULL,X'6672657368');
INSERT INTO "queue_messages" VALUES(15,'bills','in-flight',0,3,NULL,1,0,0,NULL,16,1330.0,NULL,'bert',1300.0,1300.0,1300.0,'bill','bill','DEFAULT-POOL','g',NULL,X'62696C6C');
CREATE TABLE queue_sizes (
    queue            TEXT    PRIMARY KEY,
    unsettled        INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "queue_sizes" VALUES('bills',1);
INSERT INTO "queue_sizes" VALUES('orders',10);
CREATE UNIQUE INDEX by_dedup_key ON queue_messages (queue, dedup_key);
CREATE INDEX loose ON queue_messages (queue, high_priority DESC, id)
    WHERE lane IS NULL AND state = 'ready' AND run_after IS NULL;
CREATE INDEX delays ON queue_messages (queue, run_after)
    WHERE run_after IS NOT NULL;
CREATE INDEX lanes_of_group ON queue_lanes (queue, group_key);
CREATE INDEX offers ON queue_lanes (queue, offered_to, high_priority DESC, first_id)
    WHERE offered_to IS NOT NULL;
CREATE INDEX hand_overs ON queue_changes (look_at)
    WHERE look_at IS NOT NULL;
CREATE INDEX to_prune ON queue_changes (prune_from)
    WHERE prune_from IS NOT NULL;
CREATE VIEW queue_audit AS
SELECT message.value AS id, queue, at, state, worker_id, error
FROM queue_changes, json_each(ids) AS message;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('queue_messages',15);
COMMIT;
