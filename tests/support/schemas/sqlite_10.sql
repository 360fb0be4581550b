-- A queue file of schema version 10, as commit ec404bd made it: a few messages of each kind. Not to be
-- changed. Made with sqlite3's iterdump, which leaves the last two lines out.
BEGIN TRANSACTION;
CREATE TABLE queue_batch_members (
    batch            INTEGER NOT NULL,
    message_id       TEXT    NOT NULL,
    digest           TEXT    NOT NULL,      -- of the body
    PRIMARY KEY (batch, message_id, digest)
) WITHOUT ROWID;
INSERT INTO "queue_batch_members" VALUES(1,'member-1','7f3d31b993fe78647e27bfbb15cff4ba');
INSERT INTO "queue_batch_members" VALUES(1,'member-2','4a1fcb9c0a0ef3a5a39aa841209adf8e');
CREATE TABLE queue_batches (
    number           INTEGER PRIMARY KEY AUTOINCREMENT,
    queue            TEXT    NOT NULL,
    batch_id         TEXT    NOT NULL,
    size             INTEGER NOT NULL,
    total            INTEGER NOT NULL DEFAULT 0, -- members so far
    succeeded        INTEGER NOT NULL DEFAULT 0,
    failed           INTEGER NOT NULL DEFAULT 0,
    cancelled        INTEGER NOT NULL DEFAULT 0,
    callback         TEXT    NOT NULL,      -- its columns, as JSON
    callback_body    BLOB    NOT NULL,      -- up to the value of its payload
    callback_at      REAL,                  -- when it was published: the batch is complete
    UNIQUE (queue, batch_id)
);
INSERT INTO "queue_batches" VALUES(1,'orders','batch',2,2,1,0,0,'["done",null,"FAST",null,0,true,null,null,null,0,null,0,0]',X'7B226964223A22646F6E65222C227061796C6F6164223A',NULL);
CREATE TABLE queue_bodies (
    id               INTEGER PRIMARY KEY,
    body             BLOB    NOT NULL
);
INSERT INTO "queue_bodies" VALUES(4,X'666C79696E67');
INSERT INTO "queue_bodies" VALUES(5,X'626568696E642D666C79696E67');
INSERT INTO "queue_bodies" VALUES(6,X'616761696E');
INSERT INTO "queue_bodies" VALUES(7,X'626568696E642D616761696E');
INSERT INTO "queue_bodies" VALUES(8,X'6C61746572');
INSERT INTO "queue_bodies" VALUES(10,X'6D656D6265722D32');
INSERT INTO "queue_bodies" VALUES(11,X'7331');
INSERT INTO "queue_bodies" VALUES(12,X'7332');
INSERT INTO "queue_bodies" VALUES(13,X'7333');
INSERT INTO "queue_bodies" VALUES(14,X'7334');
INSERT INTO "queue_bodies" VALUES(15,X'6631');
INSERT INTO "queue_bodies" VALUES(16,X'6632');
INSERT INTO "queue_bodies" VALUES(17,X'6633');
INSERT INTO "queue_bodies" VALUES(18,X'6431');
INSERT INTO "queue_bodies" VALUES(19,X'6432');
INSERT INTO "queue_bodies" VALUES(20,X'6634');
INSERT INTO "queue_bodies" VALUES(21,X'7469636B');
CREATE TABLE queue_changes (
    id               INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    at               REAL    NOT NULL,
    state            TEXT    NOT NULL,      -- the new one
    worker_id        TEXT    NOT NULL,      -- who changed it
    error            TEXT,
    message_ids      TEXT    NOT NULL       -- a JSON array
);
INSERT INTO "queue_changes" VALUES(1,'orders',1700000000.0,'ready','old',NULL,'[1,2,3]');
INSERT INTO "queue_changes" VALUES(2,'orders',1700000000.0,'in-flight','old',NULL,'[1,2,3]');
INSERT INTO "queue_changes" VALUES(3,'orders',1700000000.0,'succeeded','old',NULL,'[1]');
INSERT INTO "queue_changes" VALUES(4,'orders',1700000000.0,'failed','old','it failed','[2]');
INSERT INTO "queue_changes" VALUES(5,'orders',1700000000.0,'succeeded','old',NULL,'[3]');
INSERT INTO "queue_changes" VALUES(6,'orders',1700000000.0,'ready','old',NULL,'[4,5]');
INSERT INTO "queue_changes" VALUES(7,'orders',1700000000.0,'in-flight','old',NULL,'[4]');
INSERT INTO "queue_changes" VALUES(8,'orders',1700000000.0,'ready','old',NULL,'[6]');
INSERT INTO "queue_changes" VALUES(9,'orders',1700000000.0,'in-flight','old',NULL,'[6]');
INSERT INTO "queue_changes" VALUES(10,'orders',1700000000.0,'ready','old','busy','[6]');
INSERT INTO "queue_changes" VALUES(11,'orders',1700000000.0,'ready','old',NULL,'[7,8]');
INSERT INTO "queue_changes" VALUES(12,'orders',1700000000.0,'ready','old',NULL,'[9]');
INSERT INTO "queue_changes" VALUES(13,'orders',1700000000.0,'in-flight','old',NULL,'[9]');
INSERT INTO "queue_changes" VALUES(14,'orders',1700000000.0,'succeeded','old',NULL,'[9]');
INSERT INTO "queue_changes" VALUES(15,'orders',1700000000.0,'ready','old',NULL,'[10]');
INSERT INTO "queue_changes" VALUES(16,'orders',1700000000.0,'ready','old',NULL,'[11,12,13,14,15,16,17,18,19,20]');
INSERT INTO "queue_changes" VALUES(17,'orders',1700000000.0,'ready','old',NULL,'[21]');
CREATE TABLE queue_entries (
    id               INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of a group; never used again
    queue            TEXT    NOT NULL,
    message_id       TEXT    NOT NULL,
    dedup_key        TEXT,                  -- NULL: it may be published again
    pool             TEXT    NOT NULL,
    group_id         TEXT,                  -- NULL: independent of all other messages
    published_at     REAL    NOT NULL,
    not_before       REAL,                  -- Unix seconds (CMD-5)
    correlation_id   TEXT,
    payload_size     INTEGER,               -- in bytes
    result           TEXT,                  -- JSON
    result_omitted   INTEGER,               -- 1: it was too long
    error_code       TEXT,
    http_status      INTEGER
);
INSERT INTO "queue_entries" VALUES(1,'orders','succeeded','=succeeded','DEFAULT-POOL',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(2,'orders','failed',NULL,'DEFAULT-POOL',NULL,1700000000.0,NULL,NULL,NULL,NULL,0,'E',500);
INSERT INTO "queue_entries" VALUES(3,'orders','result','9a0af8c54b85ba4d2769356f9606970f:result','DEFAULT-POOL',NULL,1700000000.0,NULL,NULL,1,'{"total":7}',0,NULL,NULL);
INSERT INTO "queue_entries" VALUES(4,'orders','flying','9648a70f557cba7995d10fb118301e78:flying','SLOW','f',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(5,'orders','behind-flying','ae5a8b12d86829eda9354893b1ea8a75:behind-flying','SLOW','f',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(6,'orders','again','1438c2c043ceb9cb2963ca9f4e175b79:again','FAST','d',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(7,'orders','behind-again','6daa11c3ecfa2ce67191f0aeaeeabfcc:behind-again','FAST','d',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(8,'orders','later','7587d05e60a751d24e926e906ee2600d:later','SLOW',NULL,1700000000.0,4000000000.0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(9,'orders','member-1',NULL,'FAST',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(10,'orders','member-2',NULL,'FAST',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(11,'orders','s1','540daf00197767d024e1aee3c7b9cfdf:s1','SLOW',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(12,'orders','s2','5bf869ff0287a43352bfa5713396b6bb:s2','SLOW','g',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(13,'orders','s3','39c1a0edcdd305b504050d9ea05bdda4:s3','SLOW','g',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(14,'orders','s4','40185f767a685ccb83266357d73de41c:s4','SLOW','g',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(15,'orders','f1','2a6af2ff667c054f530a8b46d0038438:f1','FAST',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(16,'orders','f2','07530be40bdd289c48724a0110eff054:f2','FAST','h',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(17,'orders','f3','a56824a3c935e8ba9c205821a2cd92b9:f3','FAST','h',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(18,'orders','d1','70216ddf1d2e2c57a587dfaad501dc76:d1','DEFAULT-POOL',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(19,'orders','d2','1c7e135266bc8481dd81e93788f0e2bd:d2','DEFAULT-POOL','i',1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(20,'orders','f4','e0e202e5729924e220168704dc7a3b49:f4','FAST',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "queue_entries" VALUES(21,'orders','tick','be6803d4f53004d60a1b44112d15bb08:tick','SLOW',NULL,1700000000.0,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE queue_file (
    incarnation      TEXT    NOT NULL,      -- random: no other file has it
    boot_id          TEXT    NOT NULL,
    clock_offset     REAL    NOT NULL       -- the file's clock is the machine's uptime + offset
);
INSERT INTO "queue_file" VALUES('f05e55d04fceb290','boot',1699999000.0);
CREATE TABLE queue_groups (
    number           INTEGER PRIMARY KEY,
    queue            TEXT    NOT NULL,
    pool             TEXT    NOT NULL,
    group_id         TEXT    NOT NULL,
    UNIQUE (queue, pool, group_id)
);
INSERT INTO "queue_groups" VALUES(1,'orders','SLOW','f');
INSERT INTO "queue_groups" VALUES(2,'orders','FAST','d');
INSERT INTO "queue_groups" VALUES(3,'orders','SLOW','g');
INSERT INTO "queue_groups" VALUES(4,'orders','FAST','h');
INSERT INTO "queue_groups" VALUES(5,'orders','DEFAULT-POOL','i');
CREATE TABLE queue_progress (
    id               INTEGER PRIMARY KEY,   -- in queue_entries
    queue            TEXT    NOT NULL,
    group_number     INTEGER,               -- in queue_groups, while it is unsettled
    priority         INTEGER NOT NULL,      -- 0 to 9
    high_priority    INTEGER NOT NULL,      -- whether that is 9: those have a lane of their own
    size             INTEGER NOT NULL,      -- of the body, in bytes
    is_kept          INTEGER NOT NULL,      -- 1: it stays for the retention of results (CMD-2)
    batch            INTEGER,               -- in queue_batches (CMD-4)
    state            TEXT    NOT NULL DEFAULT 'ready', -- in-flight, succeeded, failed, cancelled
    -- Who may claim it now: '' any worker, an id only that worker, NULL nobody. Of a lane (the
    -- messages of one group and tier), only the first one is offered; a claim goes on from there.
    offered_to       TEXT,
    wakes_at         REAL,                  -- when its delay ends, or its lease if it is in flight
    wait_seconds     REAL,                  -- how long that was to last
    lease_token      INTEGER,               -- stays when the message is finished
    worker_id        TEXT,                  -- of the last claim
    deliveries       INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    posts            INTEGER NOT NULL DEFAULT 0,
    first_claimed_at REAL,
    last_claimed_at  REAL,
    finished_at      REAL,                  -- NULL: unsettled
    last_error       TEXT,
    -- As many bytes as the first claim will add to the row, which then stays where it is: without,
    -- claims move rows to other pages, which takes 1 µs more for each message.
    room             BLOB
);
INSERT INTO "queue_progress" VALUES(1,'orders',NULL,0,0,9,0,NULL,'succeeded',NULL,NULL,30.0,6446414435254893408,'old',1,0,1,1700000000.0,1700000000.0,1700000000.0,NULL,NULL);
INSERT INTO "queue_progress" VALUES(2,'orders',NULL,0,0,6,0,NULL,'failed',NULL,NULL,30.0,6446414435254893408,'old',1,0,0,1700000000.0,1700000000.0,1700000000.0,'it failed',NULL);
INSERT INTO "queue_progress" VALUES(3,'orders',NULL,0,0,6,1,NULL,'succeeded',NULL,NULL,30.0,6446414435254893408,'old',1,0,1,1700000000.0,1700000000.0,1700000000.0,NULL,NULL);
INSERT INTO "queue_progress" VALUES(4,'orders',1,0,0,6,0,NULL,'in-flight',NULL,1700000030.0,30.0,4672288651306551759,'old',1,0,0,1700000000.0,1700000000.0,NULL,NULL,NULL);
INSERT INTO "queue_progress" VALUES(5,'orders',1,0,0,13,0,NULL,'ready',NULL,NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(6,'orders',2,0,0,5,0,NULL,'ready',NULL,1700000060.0,60.0,NULL,'old',1,1,3,1700000000.0,1700000000.0,NULL,'busy',NULL);
INSERT INTO "queue_progress" VALUES(7,'orders',2,0,0,12,0,NULL,'ready',NULL,NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(8,'orders',NULL,0,0,5,0,NULL,'ready',NULL,4000000000.0,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(9,'orders',NULL,0,0,8,1,1,'succeeded',NULL,NULL,30.0,1063930630547942255,'old',1,0,1,1700000000.0,1700000000.0,1700000000.0,NULL,NULL);
INSERT INTO "queue_progress" VALUES(10,'orders',NULL,0,0,8,1,1,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(11,'orders',NULL,0,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(12,'orders',3,0,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(13,'orders',3,0,0,2,0,NULL,'ready',NULL,NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(14,'orders',3,9,1,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(15,'orders',NULL,0,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(16,'orders',4,0,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(17,'orders',4,0,0,2,0,NULL,'ready',NULL,NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(18,'orders',NULL,0,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(19,'orders',5,0,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(20,'orders',NULL,5,0,2,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "queue_progress" VALUES(21,'orders',NULL,0,0,4,0,NULL,'ready','',NULL,NULL,NULL,NULL,0,0,0,NULL,NULL,NULL,NULL,X'0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000');
CREATE TABLE queue_ticks (
    queue            TEXT    NOT NULL,
    schedule         TEXT    NOT NULL,
    tick             INTEGER NOT NULL,
    PRIMARY KEY (queue, schedule)
) WITHOUT ROWID;
INSERT INTO "queue_ticks" VALUES('orders','nightly',42);
CREATE UNIQUE INDEX by_dedup_key ON queue_entries (queue, dedup_key);
CREATE INDEX by_message_id ON queue_entries (message_id);
CREATE INDEX offers ON queue_progress (queue, offered_to, priority DESC, id)
    WHERE offered_to IS NOT NULL;
CREATE INDEX lanes ON queue_progress (group_number, high_priority, queue)
    WHERE finished_at IS NULL;
CREATE INDEX wakes ON queue_progress (wakes_at) WHERE wakes_at IS NOT NULL;
CREATE VIEW queue_messages AS
SELECT *, deliveries AS lease_version, iif(state = 'ready', wakes_at, NULL) AS run_after,
       iif(state = 'in-flight', wakes_at, NULL) AS lease_until
FROM queue_entries JOIN queue_progress USING (id, queue);
CREATE VIEW queue_audit AS
SELECT message.value AS id, queue, at, state, worker_id, error
FROM queue_changes CROSS JOIN json_each(message_ids) AS message;
CREATE INDEX complete ON queue_batches (callback_at) WHERE callback_at IS NOT NULL;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('queue_entries',21);
INSERT INTO "sqlite_sequence" VALUES('queue_batches',1);
COMMIT;
PRAGMA application_id = 1297239633;
PRAGMA user_version = 10;
