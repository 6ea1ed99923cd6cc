-- idem_get shows the record under a key: one row, or none if there is nothing or it has expired.
-- It reads only, and never shows a token or a fingerprint.
SET ROLE app;
\set VERBOSITY sqlstate
\set row 'scope, key, state, owner, attempt, checkpoint, result, body, created_at IS NOT NULL AS created_at, completed_at IS NOT NULL AS completed_at, expires_at IS NOT NULL AS expires_at'

-- The columns of the contract.
SELECT proargnames[4:] AS columns FROM pg_proc WHERE oid = 'idem_get'::regproc;

-- Absent.
SELECT :row FROM idem_get('get-nothing');
-- The open claim of this transaction is stored nowhere yet.
BEGIN;
SELECT status FROM idem_begin('get-open');
SELECT :row FROM idem_get('get-open');
ROLLBACK;

-- in_progress, abandoned.
SELECT status FROM idem_begin('get-live', '\x01', scope => 'get-scope', lease => '1h');
SELECT :row FROM idem_get('get-live', scope => 'get-scope');
SELECT expires_at - created_at = '1h' AS lease FROM idem_get('get-live', scope => 'get-scope');
SELECT status FROM idem_begin('get-late', lease => '1us');
SELECT pg_sleep(0.01);
SELECT :row FROM idem_get('get-late');
-- Taken over.
SELECT status FROM idem_begin('get-late', lease => '1h');
SELECT :row FROM idem_get('get-late');

-- completed.
BEGIN;
SELECT status FROM idem_begin('get-done', '\x01');
SELECT idem_complete('get-done', '{"id": 1}', '\x0001', ttl => '1h');
SELECT :row FROM idem_get('get-done');
COMMIT;
SELECT :row FROM idem_get('get-done');
SELECT created_at <= completed_at AS in_order, expires_at - completed_at AS ttl FROM idem_get('get-done');

-- Expired.
BEGIN;
SELECT status FROM idem_begin('get-expired');
SELECT idem_complete('get-expired', '1', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
SELECT :row FROM idem_get('get-expired');

-- In a target list and beside other rows: a row per call at the most.
SELECT n, (idem_get('get-' || n)).state FROM unnest(ARRAY['done', 'nothing', 'late']) AS n;
SELECT n, state FROM unnest(ARRAY['done', 'nothing', 'late']) AS n LEFT JOIN LATERAL idem_get('get-' || n) ON true;
SELECT idem_get('get-nothing') IS NULL AS never;
SELECT count(*) FROM (SELECT idem_get('get-done') FROM generate_series(1, 3)) AS three;

-- It sees what is committed now, also behind a snapshot of the transaction, and locks nothing.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT state FROM idem_get('get-done');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
SELECT count(*) AS locks FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation::regclass::text LIKE '%idem\_c%');
COMMIT;
