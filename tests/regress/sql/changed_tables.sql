-- An administrator may add columns and indexes, and rewrite or reindex the tables; they are kept
-- right. Columns that are missing are a clear error, not a crash.
\set database :DBNAME
CREATE DATABASE regress_idem_changed;
\c regress_idem_changed
CREATE EXTENSION idem;
SELECT idem_grant('app');
SELECT status FROM idem_begin('changed-0', lease => '1h');

-- Indexes on an expression, partial, unique, BRIN, including columns.
CREATE INDEX completed_upper ON idem_segment_0 (upper(key), (result ->> 'id'));
CREATE INDEX completed_partial ON idem_segment_0 (key) WHERE result IS NOT NULL;
CREATE INDEX completed_brin ON idem_segment_0 USING brin (completed_at);
CREATE UNIQUE INDEX completed_order ON idem_segment_0 ((result ->> 'order')) INCLUDE (key);
CREATE INDEX claims_end ON idem_claims (expires_at);
CREATE INDEX claims_partial ON idem_claims (upper(key)) WHERE attempt > 1;
CREATE INDEX claims_brin ON idem_claims USING brin (expires_at);

SET ROLE app;
BEGIN;
SELECT count(*) FROM generate_series(1, 6) AS n, idem_begin('changed-' || n);
SELECT count(*) FROM generate_series(1, 3) AS n, idem_complete('changed-' || n, jsonb_build_object('id', n, 'order', n));
SELECT count(*) FROM generate_series(4, 6) AS n, idem_complete('changed-' || n);
COMMIT;
SELECT token AS held FROM idem_begin('changed-lease', lease => '1us') \gset
SELECT idem_extend('changed-lease', :'held', lease => '1us') IS NOT NULL AS extended;
SELECT pg_sleep(0.01);
SELECT token AS held FROM idem_begin('changed-lease', lease => '1us') \gset
SELECT pg_sleep(0.01);
BEGIN;
SAVEPOINT s;
SELECT attempt FROM idem_begin('changed-lease', lease => '1h');
SELECT idem_extend('changed-lease', lease => '2h') IS NOT NULL AS extended;
ROLLBACK TO s;
COMMIT;
SELECT idem_extend('changed-lease', :'held', lease => '1h') IS NOT NULL AS extended;
-- A unique index of the administrator's refuses a second order; all rolls back.
\set VERBOSITY terse
BEGIN;
SELECT status FROM idem_begin('changed-7');
SELECT idem_complete('changed-7', '{"order": 3}');
\echo :SQLSTATE
ROLLBACK;
SELECT count(*) FROM idem_get('changed-7');
RESET ROLE;

-- Each index finds what a scan of the table finds.
CREATE FUNCTION uses(index text, query text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    line text;
BEGIN
    FOR line IN EXECUTE 'EXPLAIN ' || query LOOP
        IF strpos(line, index || ' ') > 0 THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT uses('completed_upper', $$SELECT key FROM idem_segment_0 WHERE upper(key) = 'CHANGED-2' AND result ->> 'id' = '2'$$);
SELECT key FROM idem_segment_0 WHERE upper(key) = 'CHANGED-2' AND result ->> 'id' = '2';
SELECT count(*) FROM idem_segment_0 WHERE upper(key) LIKE 'CHANGED-%' AND upper(key) > '';
SELECT uses('completed_partial', $$SELECT key FROM idem_segment_0 WHERE result IS NOT NULL ORDER BY key$$);
SELECT key FROM idem_segment_0 WHERE result IS NOT NULL ORDER BY key;
SELECT key FROM idem_segment_0 WHERE result ->> 'order' = '3';
SELECT uses('claims_end', $$SELECT key FROM idem_claims WHERE expires_at > clock_timestamp() ORDER BY expires_at$$);
SELECT key FROM idem_claims WHERE expires_at > now() ORDER BY expires_at;
SELECT uses('claims_partial', $$SELECT key, attempt FROM idem_claims WHERE upper(key) = 'CHANGED-LEASE' AND attempt > 1$$);
SELECT key, attempt FROM idem_claims WHERE upper(key) = 'CHANGED-LEASE' AND attempt > 1;
SET enable_indexscan = off;
SET enable_bitmapscan = on;
SELECT count(*) FROM idem_segment_0 WHERE completed_at > now() - interval '1 day';
SELECT count(*) FROM idem_claims WHERE expires_at > now();
RESET ALL;
CREATE EXTENSION amcheck;
SELECT indexrelid::regclass AS index, bt_index_check(indexrelid, true)
FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid JOIN pg_am ON pg_am.oid = relam AND amname = 'btree'
WHERE indrelid IN ('idem_claims'::regclass, 'idem_segment_0'::regclass) ORDER BY relname COLLATE "C";
DROP INDEX completed_order, claims_end;

-- Columns behind ours.
ALTER TABLE idem_segment_0 ADD COLUMN note text;
ALTER TABLE idem_claims ADD COLUMN note text;
BEGIN;
SELECT status FROM idem_begin('changed-8');
SELECT idem_complete('changed-8', '{"id": 8}', '\x08');
COMMIT;
SELECT status, result, body FROM idem_begin('changed-8');
SELECT status, result FROM idem_begin('changed-1');
SELECT token AS held FROM idem_begin('changed-9', lease => '1h') \gset
SELECT idem_extend('changed-9', :'held') IS NOT NULL AS extended;
SELECT idem_complete('changed-9', '9', token => :'held');
SELECT key, result, note FROM idem_segment_0 WHERE key IN ('changed-8', 'changed-9') ORDER BY key;
ALTER TABLE idem_segment_0 DROP COLUMN note;
SELECT status, result FROM idem_begin('changed-8');
ALTER TABLE idem_segment_0 ADD COLUMN note text;
SELECT status, result FROM idem_begin('changed-8');

-- Rewritten, reindexed, vacuumed, truncated: also in the session that uses them.
VACUUM (FULL, ANALYZE) idem_segment_0;
SELECT status, result FROM idem_begin('changed-8');
REINDEX TABLE CONCURRENTLY idem_segment_0;
REINDEX TABLE idem_claims;
SELECT status, result FROM idem_begin('changed-8');
CLUSTER idem_segment_0 USING idem_segment_0_pkey;
SELECT status, result FROM idem_begin('changed-8');
BEGIN;
SELECT status FROM idem_begin('changed-10');
SELECT idem_complete('changed-10', '10');
TRUNCATE idem_segment_0;
SELECT count(*) FROM idem_get('changed-10');
ROLLBACK;
SELECT status, result FROM idem_begin('changed-8');

-- Not what the library expects: a clear error at every use, and none after the change is undone.
\set VERBOSITY default
BEGIN;
ALTER TABLE idem_segment_0 DROP COLUMN fingerprint;
SELECT idem_begin('changed-8');
ROLLBACK;
\set VERBOSITY sqlstate
BEGIN;
SELECT status FROM idem_begin('changed-11');
ALTER TABLE idem_segment_0 DROP COLUMN fingerprint;
SELECT idem_complete('changed-11', '11');
ROLLBACK;
BEGIN;
ALTER TABLE idem_claims DROP COLUMN checkpoint;
ALTER TABLE idem_claims ADD COLUMN checkpoint jsonb;
SELECT idem_begin('changed-12');
ROLLBACK;
BEGIN;
ALTER TABLE idem_segment_0 ALTER COLUMN fingerprint TYPE text USING NULL;
SELECT * FROM idem_get('changed-8');
ROLLBACK;
BEGIN;
ALTER TABLE idem_segment_0 DROP CONSTRAINT idem_segment_0_pkey;
SELECT idem_begin('changed-8');
ROLLBACK;
BEGIN;
ALTER TABLE idem_segment_0 RENAME TO something_else;
SELECT idem_begin('changed-8');
ROLLBACK;
SELECT status, result, body FROM idem_begin('changed-8');
-- Renamed columns are found by their place.
BEGIN;
ALTER TABLE idem_segment_0 RENAME COLUMN body TO content;
SELECT status, result, body FROM idem_begin('changed-8');
ROLLBACK;

-- A row that is not what its digest says is an error and never somebody else's result.
UPDATE idem_segment_0 SET key = 'changed-other' WHERE key = 'changed-8';
\set VERBOSITY default
SELECT idem_begin('changed-8');
UPDATE idem_segment_0 SET key = 'changed-8', scope = 'other' WHERE key = 'changed-other';
\set VERBOSITY sqlstate
SELECT * FROM idem_get('changed-8');
SELECT idem_forget('changed-8');

\c :database
DROP DATABASE regress_idem_changed;
