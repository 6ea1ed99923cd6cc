-- A replay writes nothing: no xid, no WAL, no lock left. A fresh transaction writes exactly one tuple
-- and leaves no dead one. (Runs alone and in a database of its own: it reads the server's counters.)
\set database :DBNAME
CREATE DATABASE regress_idem_writes;
\c regress_idem_writes
CREATE EXTENSION idem;
SELECT idem_grant('app');
SET ROLE app;
CREATE TEMP TABLE business (what text);

-- What this transaction has written to our tables so far.
CREATE TEMP VIEW written AS
    SELECT relname, n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_del AS deleted
    FROM pg_stat_xact_user_tables WHERE relname IN ('idem_claims', 'idem_segment_0') ORDER BY relname;
-- What lies in our tables as far as the statistics know.
CREATE TEMP VIEW lying AS
    SELECT relname, n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_del AS deleted, n_live_tup AS live, n_dead_tup AS dead
    FROM pg_stat_user_tables WHERE relname IN ('idem_claims', 'idem_segment_0') ORDER BY relname;
-- What this transaction has locked: keys, rows, and our tables with their TOAST tables and indexes.
CREATE TEMP VIEW locked AS
    WITH heaps AS (
        SELECT unnest(ARRAY[oid, reltoastrelid]) AS oid FROM pg_class WHERE relname IN ('idem_claims', 'idem_segment_0')
    )
    SELECT count(*) FROM pg_locks
    WHERE pid = pg_backend_pid() AND (locktype IN ('advisory', 'tuple', 'transactionid')
        OR relation IN (SELECT oid FROM heaps UNION SELECT indexrelid FROM pg_index JOIN heaps ON indrelid = oid));

-- A fresh transaction: nothing is written until complete, then one row.
SELECT pg_stat_force_next_flush();
BEGIN;
SELECT status FROM idem_begin('writes-1', '\x01');
SELECT * FROM written;
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
INSERT INTO business VALUES ('one');
SELECT idem_complete('writes-1', '{"id": 1}', '\x01');
SELECT * FROM written;
SELECT count > 0 AS locked FROM locked;
COMMIT;
SELECT pg_stat_force_next_flush();
SELECT * FROM lying;
-- A large one: its body is stored outside the row.
BEGIN;
SELECT status FROM idem_begin('writes-large');
SELECT idem_complete('writes-large', NULL, (SELECT string_agg(sha256(n::text::bytea), '') FROM generate_series(1, 3000) AS n));
SELECT * FROM written;
COMMIT;

-- Replays, mismatches and in_progress: no xid, no row touched, no lock kept.
SELECT status FROM idem_begin('writes-lease', lease => '1h');
SELECT pg_stat_force_next_flush();
SELECT * FROM lying;
BEGIN;
SELECT status FROM idem_begin('writes-1', '\x01');
SELECT status FROM idem_begin('writes-1', '\x01', wait => '1s');
SELECT status FROM idem_begin('writes-1', '\x02');
SELECT status FROM idem_begin('writes-1', lease => '1h');
SELECT status FROM idem_begin('writes-lease');
SELECT status FROM idem_begin('writes-lease', wait => '1ms');
SELECT status, octet_length(body) FROM idem_begin('writes-large');
SELECT octet_length(body) FROM idem_get('writes-large');
SELECT state FROM idem_get('writes-1');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
SELECT * FROM locked;
COMMIT;
SELECT pg_stat_force_next_flush();
SELECT * FROM lying;

-- A claim given up, and one rolled back, have written nothing either.
BEGIN;
SELECT status FROM idem_begin('writes-2');
SELECT idem_release('writes-2');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;
BEGIN;
SELECT status FROM idem_begin('writes-2');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
ROLLBACK;
SELECT pg_stat_force_next_flush();
SELECT * FROM lying;

-- No WAL. Others write some from time to time (checkpoints, autovacuum), so: the least that was
-- written around 50 calls, of 20 times.
CREATE FUNCTION pg_temp.wal_of(statement text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    before pg_lsn;
    lowest bigint;
BEGIN
    FOR attempt IN 1..20 LOOP
        before := pg_current_wal_insert_lsn();
        FOR n IN 1..50 LOOP
            EXECUTE statement;
        END LOOP;
        lowest := least(lowest, pg_current_wal_insert_lsn() - before);
    END LOOP;
    RETURN lowest;
END
$$;
SELECT pg_temp.wal_of('SELECT 1') AS nothing;
SELECT pg_temp.wal_of('SELECT idem_begin(''writes-1'', ''\x01'')') AS replay;
SELECT pg_temp.wal_of('SELECT idem_begin(''writes-large'')') AS large_replay;
SELECT pg_temp.wal_of('SELECT idem_begin(''writes-1'', ''\x02'')') AS mismatch;
SELECT pg_temp.wal_of('SELECT idem_begin(''writes-lease'')') AS in_progress;
SELECT pg_temp.wal_of('SELECT idem_begin(''writes-2''), idem_release(''writes-2'')') AS released;
SELECT pg_temp.wal_of('SELECT idem_get(''writes-1'')') AS get;
-- The measure does measure.
SELECT pg_temp.wal_of('SELECT idem_begin(''writes-3''), idem_complete(''writes-3'', ttl => ''1us''), pg_sleep(0.0001)') > 50 * 100 AS completed;
-- The same over transactions: their commits write no WAL either.
CREATE PROCEDURE pg_temp.wal_of_transactions(INOUT lowest bigint) LANGUAGE plpgsql AS $$
DECLARE
    before pg_lsn;
BEGIN
    FOR attempt IN 1..20 LOOP
        COMMIT;
        before := pg_current_wal_insert_lsn();
        FOR n IN 1..50 LOOP
            PERFORM idem_begin('writes-1', '\x01');
            COMMIT;
        END LOOP;
        lowest := least(lowest, pg_current_wal_insert_lsn() - before);
    END LOOP;
END
$$;
CALL pg_temp.wal_of_transactions(NULL);

-- A claim on a lease: one row, updated in place, gone when it is completed.
SELECT token AS held FROM idem_begin('writes-4', lease => '1h') \gset
SELECT pg_stat_force_next_flush();
BEGIN;
SELECT idem_extend('writes-4', :'held') IS NOT NULL AS extended;
SELECT * FROM written;
SELECT idem_complete('writes-4', '4', token => :'held');
SELECT * FROM written;
COMMIT;

\c :database
DROP DATABASE regress_idem_writes;
