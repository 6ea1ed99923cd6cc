-- Every isolation level works: begin, complete, replay, lease, takeover, expiry.
-- (What two sessions see of each other is shown by the isolation specs.)
SET ROLE app;
\set VERBOSITY sqlstate

SET default_transaction_isolation = 'repeatable read';
BEGIN;
SELECT 1 AS snapshot_taken;
SELECT status FROM idem_begin('level-rr');
SELECT idem_complete('level-rr', '1');
SELECT status, result FROM idem_begin('level-rr');
SELECT state FROM idem_get('level-rr');
COMMIT;
SELECT status, result FROM idem_begin('level-rr');
SELECT token AS held FROM idem_begin('level-rr-lease', lease => '1us') \gset
SELECT pg_sleep(0.01);
BEGIN;
SELECT status, attempt FROM idem_begin('level-rr-lease', lease => '1h');
SELECT idem_extend('level-rr-lease') IS NOT NULL AS extended;
SAVEPOINT s;
SELECT idem_complete('level-rr-lease', token => :'held');
ROLLBACK TO s;
SELECT idem_complete('level-rr-lease', '2', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
BEGIN;
SELECT status, attempt FROM idem_begin('level-rr-lease');
SELECT idem_release('level-rr-lease');
COMMIT;
SELECT idem_begin('level-rr-open');

SET default_transaction_isolation = 'serializable';
BEGIN;
SELECT 1 AS snapshot_taken;
SELECT status FROM idem_begin('level-ser');
SELECT idem_complete('level-ser', '1');
SELECT status, result FROM idem_begin('level-ser');
COMMIT;
-- Claims, completions and replays take no predicate locks, so they cannot make others fail.
BEGIN;
SELECT status FROM idem_begin('level-ser');
SELECT status FROM idem_begin('level-ser-2');
SELECT idem_complete('level-ser-2', '2');
SELECT status FROM idem_begin('level-ser-3', lease => '1h');
SELECT idem_extend('level-ser-3') IS NOT NULL AS extended;
SELECT count(*) AS predicate_locks FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid() AND relation::regclass::text LIKE '%idem\_%';
-- idem_get is an ordinary read, and takes them.
SELECT state FROM idem_get('level-ser');
SELECT count(*) > 0 AS predicate_locks FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid() AND relation::regclass::text LIKE '%idem\_%';
COMMIT;
SELECT token AS held FROM idem_begin('level-ser-lease', lease => '1us') \gset
SELECT pg_sleep(0.01);
BEGIN;
SELECT status, attempt FROM idem_begin('level-ser-lease', lease => '1h');
SELECT idem_complete('level-ser-lease', '2');
COMMIT;
SELECT idem_complete('level-ser-lease', token => :'held');
SELECT state, attempt, result FROM idem_get('level-ser-lease');
SELECT idem_begin('level-ser-open');

SET default_transaction_isolation = 'read uncommitted';
BEGIN;
SELECT status FROM idem_begin('level-ru');
SELECT idem_complete('level-ru', '1');
COMMIT;
SELECT status, result FROM idem_begin('level-ru');
