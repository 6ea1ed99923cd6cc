-- idem_forget is administration: it removes whatever is under a key, so that it can run again.
-- False, and nothing left behind, if there is nothing. An ordinary role may not call it.
SET ROLE app;
SELECT idem_forget('forget-0');
BEGIN;
SELECT count(*) FROM generate_series(1, 3) AS n, idem_begin('forget-' || n);
SELECT count(*) FROM generate_series(1, 3) AS n, idem_complete('forget-' || n, to_jsonb(n));
COMMIT;
SELECT token AS held FROM idem_begin('forget-lease', lease => '1h') \gset
SELECT token AS late FROM idem_begin('forget-late', lease => '1us') \gset
BEGIN;
SELECT status FROM idem_begin('forget-expired');
SELECT idem_complete('forget-expired', '1', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);

RESET ROLE;
\set VERBOSITY sqlstate
-- Nothing there: false, no xid, no lock.
BEGIN;
SELECT idem_forget('forget-0');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
SELECT count(*) AS locks FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation::regclass::text LIKE '%idem\_c%');
COMMIT;

-- A completed record: gone, only this one, and only once.
SELECT idem_forget('forget-1');
SELECT idem_forget('forget-1') AS again;
SELECT key, state FROM generate_series(1, 3) AS n, idem_get('forget-' || n);
BEGIN;
SELECT status, attempt FROM idem_begin('forget-1');
SELECT idem_complete('forget-1', '"again"');
COMMIT;
SELECT status, result FROM idem_begin('forget-1');
-- It counts from its commit.
BEGIN;
SELECT idem_forget('forget-2');
SELECT count(*) FROM idem_get('forget-2');
ROLLBACK;
SELECT state FROM idem_get('forget-2');

-- A claim on a lease: its holder has lost it, and the next one starts at attempt 1.
SELECT idem_forget('forget-lease');
SELECT idem_complete('forget-lease', token => :'held');
SELECT idem_extend('forget-lease', :'held');
SELECT idem_release('forget-lease', :'held');
SELECT status, attempt FROM idem_begin('forget-lease', lease => '1h');
SELECT idem_forget('forget-late');
SELECT idem_complete('forget-late', token => :'late');

-- An expired record is as good as none, purged or not.
SELECT idem_forget('forget-expired');
SELECT idem_forget('forget-expired') AS again;

-- Claims of the own transaction.
BEGIN;
SELECT status FROM idem_begin('forget-own');
SELECT idem_forget('forget-own');
SELECT idem_release('forget-own');
COMMIT;
BEGIN;
SELECT token AS held FROM idem_begin('forget-own', lease => '1h') \gset
SELECT idem_forget('forget-own');
SAVEPOINT s;
SELECT idem_extend('forget-own', :'held');
ROLLBACK TO s;
COMMIT;
SELECT count(*) FROM idem_get('forget-own');
-- A forget that is rolled back leaves the claim open.
BEGIN;
SELECT token AS held FROM idem_begin('forget-own') \gset
SAVEPOINT s;
SELECT idem_forget('forget-own');
ROLLBACK TO s;
SELECT token = :'held' AS same_token FROM idem_begin('forget-own');
COMMIT;
-- A record completed in the own transaction; the key can be used anew at once.
BEGIN;
SELECT status FROM idem_begin('forget-own');
SELECT idem_complete('forget-own', '1');
SELECT idem_forget('forget-own');
SELECT count(*) FROM idem_get('forget-own');
SELECT status, attempt FROM idem_begin('forget-own');
SELECT idem_complete('forget-own', '2');
COMMIT;
SELECT result FROM idem_get('forget-own');

SELECT key FROM idem_claims WHERE key LIKE 'forget-%';
SELECT key, result FROM idem_segment_0 WHERE key LIKE 'forget-%' ORDER BY key;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
