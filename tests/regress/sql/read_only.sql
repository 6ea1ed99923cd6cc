-- In a read-only transaction nothing is ever acquired: every writer raises 25006 before it looks,
-- even for a completed key. idem_get works.
SET ROLE app;
BEGIN;
SELECT status FROM idem_begin('readonly-done');
SELECT idem_complete('readonly-done', '1');
COMMIT;
SELECT token AS held FROM idem_begin('readonly-lease', lease => '1h') \gset

START TRANSACTION READ ONLY;
SELECT idem_begin('readonly-new');
ROLLBACK;
\set VERBOSITY sqlstate
SET default_transaction_read_only = on;
SELECT idem_begin('readonly-new', lease => '1h');
SELECT idem_begin('readonly-done');
SELECT idem_begin('readonly-lease');
SELECT idem_complete('readonly-done', '1', token => :'held');
SELECT idem_complete('readonly-lease', '1', token => :'held');
SELECT idem_release('readonly-lease', :'held');
SELECT idem_release('readonly-done');
SELECT idem_extend('readonly-lease', :'held');
SELECT key, state, result FROM (VALUES ('readonly-done'), ('readonly-lease'), ('readonly-new')) AS keys (k), idem_get(k);
RESET ROLE;
SELECT idem_forget('readonly-done');
SELECT idem_forget('readonly-new');
SET default_transaction_read_only = off;

-- A claim made before the transaction became read-only: neither completed nor released, so not committed.
SET ROLE app;
BEGIN;
SELECT status FROM idem_begin('readonly-later');
SET TRANSACTION READ ONLY;
SAVEPOINT s;
SELECT idem_complete('readonly-later', '1');
ROLLBACK TO s;
COMMIT;
SELECT key, state FROM (VALUES ('readonly-done'), ('readonly-lease'), ('readonly-new'), ('readonly-later')) AS keys (k), idem_get(k);
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
