-- A queue file of version 3, with messages in every state, at the instant 1300.
PRAGMA application_id = 1297239633;
PRAGMA user_version = 3;
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
    has_bodies       INTEGER,                           -- whether those finished still have theirs
    ids              TEXT    NOT NULL                   -- JSON
);
INSERT INTO "queue_changes" VALUES(1,'orders',900.0,'ready','anna',NULL,NULL,NULL,NULL,NULL,'[1]');
INSERT INTO "queue_changes" VALUES(2,'orders',900.0,'in-flight','anna',NULL,0,NULL,NULL,NULL,'[1]');
INSERT INTO "queue_changes" VALUES(3,'orders',900.0,'succeeded','anna',NULL,NULL,NULL,NULL,NULL,'[1]');
INSERT INTO "queue_changes" VALUES(4,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,NULL,'[2,3,4,5,6,7,8,9,10]');
INSERT INTO "queue_changes" VALUES(5,'orders',1300.0,'in-flight','anna',NULL,1,1330.0,NULL,NULL,'[2,3,4,5,6,7,8,9,10]');
INSERT INTO "queue_changes" VALUES(6,'orders',1300.0,'succeeded','anna',NULL,NULL,NULL,1300.0,0,'[2]');
INSERT INTO "queue_changes" VALUES(7,'orders',1300.0,'failed','anna','HTTP 400',NULL,NULL,1300.0,0,'[3]');
INSERT INTO "queue_changes" VALUES(8,'orders',1300.0,'succeeded','anna',NULL,NULL,NULL,1300.0,0,'[5]');
INSERT INTO "queue_changes" VALUES(9,'orders',1300.0,'ready','anna','HTTP 503',NULL,NULL,NULL,NULL,'[6]');
INSERT INTO "queue_changes" VALUES(10,'orders',1300.0,'ready','anna','HTTP 503',NULL,NULL,NULL,NULL,'[4]');
INSERT INTO "queue_changes" VALUES(11,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,NULL,'[8]');
INSERT INTO "queue_changes" VALUES(12,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,NULL,'[9]');
INSERT INTO "queue_changes" VALUES(13,'orders',1300.0,'ready','anna','HTTP 500',NULL,NULL,NULL,NULL,'[10]');
INSERT INTO "queue_changes" VALUES(14,'orders',1300.0,'ready','anna',NULL,NULL,NULL,NULL,NULL,'[11,12,13,14]');
INSERT INTO "queue_changes" VALUES(15,'bills',1300.0,'ready','bert',NULL,NULL,NULL,NULL,NULL,'[15]');
INSERT INTO "queue_changes" VALUES(16,'bills',1300.0,'in-flight','bert',NULL,1,1330.0,NULL,NULL,'[15]');
CREATE TABLE queue_entries (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a lane; never used again
    queue            TEXT    NOT NULL,
    high_priority    INTEGER NOT NULL,
    lane             INTEGER,                           -- NULL: independent of all others
    next_id          INTEGER,                           -- the one behind it in its lane
    published_at     REAL    NOT NULL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT,                              -- NULL: finished, and free to come again
    pool             TEXT    NOT NULL,
    group_id         TEXT,
    body             BLOB    NOT NULL                   -- emptied soon after it is finished
);
INSERT INTO "queue_entries" VALUES(2,'orders',0,NULL,NULL,1300.0,'old','old','DEFAULT-POOL',NULL,X'');
INSERT INTO "queue_entries" VALUES(3,'orders',0,NULL,NULL,1300.0,'dead','dead','DEFAULT-POOL',NULL,X'');
INSERT INTO "queue_entries" VALUES(4,'orders',0,1,5,1300.0,'g1','g1','DEFAULT-POOL','g',X'6731');
INSERT INTO "queue_entries" VALUES(5,'orders',0,1,6,1300.0,'g2','g2','DEFAULT-POOL','g',X'');
INSERT INTO "queue_entries" VALUES(6,'orders',0,1,11,1300.0,'g3','g3','DEFAULT-POOL','g',X'6733');
INSERT INTO "queue_entries" VALUES(7,'orders',0,2,8,1300.0,'h1','h1','DEFAULT-POOL','h',X'6831');
INSERT INTO "queue_entries" VALUES(8,'orders',0,2,NULL,1300.0,'h2','h2','DEFAULT-POOL','h',X'6832');
INSERT INTO "queue_entries" VALUES(9,'orders',0,NULL,NULL,1300.0,'loose','loose','DEFAULT-POOL',NULL,X'6C6F6F7365');
INSERT INTO "queue_entries" VALUES(10,'orders',0,NULL,NULL,1300.0,'late','late','DEFAULT-POOL',NULL,X'6C617465');
INSERT INTO "queue_entries" VALUES(11,'orders',0,1,NULL,1300.0,'g4','g4','DEFAULT-POOL','g',X'6734');
INSERT INTO "queue_entries" VALUES(12,'orders',1,-2,13,1300.0,'H1','H1','DEFAULT-POOL','h',X'4831');
INSERT INTO "queue_entries" VALUES(13,'orders',1,-2,NULL,1300.0,'H2','H2','DEFAULT-POOL','h',X'4832');
INSERT INTO "queue_entries" VALUES(14,'orders',0,NULL,NULL,1300.0,'fresh','fresh','DEFAULT-POOL',NULL,X'6672657368');
INSERT INTO "queue_entries" VALUES(15,'bills',0,3,NULL,1300.0,'bill','bill','DEFAULT-POOL','g',X'62696C6C');
CREATE TABLE queue_lanes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    group_key        INTEGER NOT NULL,                  -- a hash of pool and group
    high_priority    INTEGER NOT NULL,
    first_id         INTEGER,                           -- NULL: all are settled
    last_id          INTEGER NOT NULL,
    -- Whom the first one was offered to, when that was last decided: '' anyone, a worker's id only
    -- that one, NULL nobody. A claim takes the offer, and does not tell the lane.
    offered_to       TEXT
);
INSERT INTO "queue_lanes" VALUES(-2,'orders',-3132268655066580697,1,12,13,'anna');
INSERT INTO "queue_lanes" VALUES(1,'orders',-5407672614359594449,0,4,11,'');
INSERT INTO "queue_lanes" VALUES(2,'orders',-3132268655066580697,0,7,8,NULL);
INSERT INTO "queue_lanes" VALUES(3,'bills',-5407672614359594449,0,15,15,NULL);
CREATE TABLE queue_offers (
    queue            TEXT    NOT NULL,
    offered_to       TEXT    NOT NULL,                  -- '': anyone
    place            INTEGER NOT NULL,
    PRIMARY KEY (queue, offered_to, place)
) WITHOUT ROWID;
INSERT INTO "queue_offers" VALUES('orders','',4);
INSERT INTO "queue_offers" VALUES('orders','',9);
INSERT INTO "queue_offers" VALUES('orders','',14);
INSERT INTO "queue_offers" VALUES('orders','anna',-4611686018427387892);
CREATE TABLE queue_progress (
    id               INTEGER PRIMARY KEY,
    lease_token      INTEGER,                           -- of the hand-over that holds or ended it
    lease_until      REAL,                              -- NULL: not in flight
    finished_at      REAL,                              -- NULL: unsettled
    has_failed       INTEGER NOT NULL DEFAULT 0,        -- if it is finished
    run_after        REAL,                              -- NULL: due; else the instant it is due
    deliveries       INTEGER NOT NULL DEFAULT 1,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    first_claimed_at REAL    NOT NULL,
    last_claimed_at  REAL,                              -- NULL: it was claimed once
    worker_id        TEXT    NOT NULL,
    last_error       TEXT
);
INSERT INTO "queue_progress" VALUES(2,5,NULL,1300.0,0,NULL,1,0,0,1300.0,1300.0,'anna',NULL);
INSERT INTO "queue_progress" VALUES(3,5,NULL,1300.0,1,NULL,1,0,0,1300.0,1300.0,'anna','HTTP 400');
INSERT INTO "queue_progress" VALUES(4,NULL,NULL,NULL,0,NULL,1,1,3,1300.0,1300.0,'anna','HTTP 503');
INSERT INTO "queue_progress" VALUES(5,5,NULL,1300.0,0,NULL,1,0,0,1300.0,1300.0,'anna',NULL);
INSERT INTO "queue_progress" VALUES(6,NULL,NULL,NULL,0,NULL,1,1,3,1300.0,1300.0,'anna','HTTP 503');
INSERT INTO "queue_progress" VALUES(7,5,1330.0,NULL,0,NULL,1,0,0,1300.0,1300.0,'anna',NULL);
INSERT INTO "queue_progress" VALUES(8,NULL,NULL,NULL,0,NULL,1,0,0,1300.0,1300.0,'anna',NULL);
INSERT INTO "queue_progress" VALUES(9,NULL,NULL,NULL,0,NULL,1,0,0,1300.0,1300.0,'anna',NULL);
INSERT INTO "queue_progress" VALUES(10,NULL,NULL,NULL,0,1360.0,1,2,2,1300.0,1300.0,'anna','HTTP 500');
INSERT INTO "queue_progress" VALUES(15,16,1330.0,NULL,0,NULL,1,0,0,1300.0,1300.0,'bert',NULL);
CREATE TABLE queue_sizes (
    queue            TEXT    PRIMARY KEY,
    unsettled        INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "queue_sizes" VALUES('bills',1);
INSERT INTO "queue_sizes" VALUES('orders',10);
CREATE UNIQUE INDEX by_dedup_key ON queue_entries (queue, dedup_key);
CREATE INDEX delays ON queue_progress (run_after)
    WHERE run_after IS NOT NULL;
CREATE VIEW queue_messages AS
SELECT
    entry.id, queue, message_id, dedup_key, pool, group_id, high_priority, lane,
    CASE
        WHEN finished_at IS NOT NULL THEN iif(has_failed, 'failed', 'succeeded')
        WHEN lease_until IS NOT NULL THEN 'in-flight'
        ELSE 'ready'
    END AS state,
    run_after, lease_token, coalesce(deliveries, 0) AS lease_version, lease_until, worker_id,
    coalesce(deliveries, 0) AS deliveries, coalesce(attempts, 0) AS attempts,
    coalesce(posts, 0) AS posts, last_error, published_at, first_claimed_at,
    coalesce(last_claimed_at, first_claimed_at) AS last_claimed_at, finished_at, body
FROM queue_entries AS entry LEFT JOIN queue_progress USING (id);
CREATE INDEX lanes_of_group ON queue_lanes (queue, group_key);
CREATE INDEX hand_overs ON queue_changes (look_at)
    WHERE look_at IS NOT NULL;
CREATE INDEX to_prune ON queue_changes (has_bodies, prune_from)
    WHERE prune_from IS NOT NULL;
CREATE VIEW queue_audit AS
SELECT message.value AS id, queue, at, state, worker_id, error
FROM queue_changes, json_each(ids) AS message;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('queue_entries',15);
COMMIT;
