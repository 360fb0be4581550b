-- A queue file as version 1 wrote it, with messages in every state, at the instant 1300.
PRAGMA application_id = 1297239633;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE queue_messages (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a lane; never used again
    queue            TEXT    NOT NULL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT    NOT NULL,
    pool             TEXT    NOT NULL,
    group_id         TEXT,                              -- NULL: independent of all others
    group_key        INTEGER,                           -- a hash of pool and group, for the indexes
    high_priority    INTEGER NOT NULL,
    state            TEXT    NOT NULL DEFAULT 'ready'
                     CHECK (state IN ('ready', 'in-flight', 'succeeded', 'failed')),
    -- Whom a claim may hand it to: '' anyone, a worker's id only that one, NULL nobody now.
    -- Of a lane only the first unsettled message is ever offered; the claim walks on from there.
    offered_to       TEXT,
    run_after        REAL,                              -- NULL: due; else the instant it is due
    lease_token      INTEGER,                           -- of the latest hand-over; NULL: given back
    lease_version    INTEGER NOT NULL DEFAULT 0,
    lease_until      REAL,
    worker_id        TEXT,
    deliveries       INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    last_error       TEXT,
    published_at     REAL    NOT NULL,
    first_claimed_at REAL,
    last_claimed_at  REAL,
    finished_at      REAL,                              -- NULL: unsettled
    body             BLOB    NOT NULL                   -- emptied when it is finished
);
INSERT INTO "queue_messages" VALUES(2,'orders','old','old','DEFAULT-POOL',NULL,NULL,0,'succeeded',NULL,NULL,1003,1,NULL,'anna',1,0,0,NULL,1300.0,1300.0,1300.0,1300.0,X'');
INSERT INTO "queue_messages" VALUES(3,'orders','dead','dead','DEFAULT-POOL',NULL,NULL,0,'failed',NULL,NULL,1003,1,NULL,'anna',1,0,0,'HTTP 400',1300.0,1300.0,1300.0,1300.0,X'');
INSERT INTO "queue_messages" VALUES(4,'orders','g1','g1','DEFAULT-POOL','g',-5407672614359594449,0,'ready','',NULL,NULL,1,NULL,'anna',1,1,3,'HTTP 503',1300.0,1300.0,1300.0,NULL,X'6731');
INSERT INTO "queue_messages" VALUES(5,'orders','g2','g2','DEFAULT-POOL','g',-5407672614359594449,0,'succeeded',NULL,NULL,1003,1,NULL,'anna',1,0,0,NULL,1300.0,1300.0,1300.0,1300.0,X'');
INSERT INTO "queue_messages" VALUES(6,'orders','g3','g3','DEFAULT-POOL','g',-5407672614359594449,0,'ready',NULL,NULL,NULL,1,NULL,'anna',1,1,3,'HTTP 503',1300.0,1300.0,1300.0,NULL,X'6733');
INSERT INTO "queue_messages" VALUES(7,'orders','h1','h1','DEFAULT-POOL','h',-3132268655066580697,0,'in-flight',NULL,NULL,1003,1,1330.0,'anna',1,0,0,NULL,1300.0,1300.0,1300.0,NULL,X'6831');
INSERT INTO "queue_messages" VALUES(8,'orders','h2','h2','DEFAULT-POOL','h',-3132268655066580697,0,'ready',NULL,NULL,NULL,1,NULL,'anna',1,0,0,NULL,1300.0,1300.0,1300.0,NULL,X'6832');
INSERT INTO "queue_messages" VALUES(9,'orders','loose','loose','DEFAULT-POOL',NULL,NULL,0,'ready','',NULL,NULL,1,NULL,'anna',1,0,0,NULL,1300.0,1300.0,1300.0,NULL,X'6C6F6F7365');
INSERT INTO "queue_messages" VALUES(10,'orders','late','late','DEFAULT-POOL',NULL,NULL,0,'ready',NULL,1360.0,NULL,1,NULL,'anna',1,2,2,'HTTP 500',1300.0,1300.0,1300.0,NULL,X'6C617465');
INSERT INTO "queue_messages" VALUES(11,'orders','g4','g4','DEFAULT-POOL','g',-5407672614359594449,0,'ready',NULL,NULL,NULL,0,NULL,NULL,0,0,0,NULL,1300.0,NULL,NULL,NULL,X'6734');
INSERT INTO "queue_messages" VALUES(12,'orders','H1','H1','DEFAULT-POOL','h',-3132268655066580697,1,'ready','anna',NULL,NULL,0,NULL,NULL,0,0,0,NULL,1300.0,NULL,NULL,NULL,X'4831');
INSERT INTO "queue_messages" VALUES(13,'orders','H2','H2','DEFAULT-POOL','h',-3132268655066580697,1,'ready',NULL,NULL,NULL,0,NULL,NULL,0,0,0,NULL,1300.0,NULL,NULL,NULL,X'4832');
INSERT INTO "queue_messages" VALUES(14,'orders','fresh','fresh','DEFAULT-POOL',NULL,NULL,0,'ready','',NULL,NULL,0,NULL,NULL,0,0,0,NULL,1300.0,NULL,NULL,NULL,X'6672657368');
INSERT INTO "queue_messages" VALUES(15,'bills','bill','bill','DEFAULT-POOL','g',-5407672614359594449,0,'in-flight',NULL,NULL,1004,1,1330.0,'bert',1,0,0,NULL,1300.0,1300.0,1300.0,NULL,X'62696C6C');
CREATE UNIQUE INDEX by_dedup_key ON queue_messages (queue, dedup_key);
CREATE INDEX offers ON queue_messages (queue, offered_to, high_priority DESC, id)
    WHERE offered_to IS NOT NULL;
CREATE INDEX lanes ON queue_messages (queue, group_key, high_priority, id)
    WHERE group_key IS NOT NULL AND finished_at IS NULL;
CREATE INDEX groups_in_flight ON queue_messages (queue, group_key, high_priority)
    WHERE group_key IS NOT NULL AND state = 'in-flight';
CREATE INDEX leases ON queue_messages (queue, lease_until, lease_token)
    WHERE state = 'in-flight';
CREATE INDEX delays ON queue_messages (queue, run_after)
    WHERE run_after IS NOT NULL;
CREATE INDEX finished ON queue_messages (queue, finished_at)
    WHERE finished_at IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('queue_messages',15);
COMMIT;
