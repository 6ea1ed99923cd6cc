-- A transaction lock has no row and no token: it is held until its transaction ends, and never longer. It excludes, and
-- is excluded by, a lease lock of the same name, but not in its own transaction.
SET ROLE app;
\set locks 'SELECT mode, granted FROM pg_locks WHERE locktype = ''advisory'' AND objsubid >= 16384 AND pid = pg_backend_pid()'

-- Held to the end of the transaction, as often as asked; gone with COMMIT and with ROLLBACK.
BEGIN;
SELECT lock_try_xact('xact-1');
SELECT lock_try_xact('xact-1');
SELECT lock_acquire_xact('xact-1');
SELECT lock_acquire_xact('xact-1', wait => '0');
:locks;
SELECT pg_current_xact_id_if_assigned() AS xid;
COMMIT;
:locks;
BEGIN;
SELECT lock_acquire_xact('xact-1', wait => '1s');
:locks;
ROLLBACK;
:locks;
-- In autocommit it ends with its statement.
SELECT lock_try_xact('xact-1');
:locks;

-- A live lease is in the way: false at once or when the wait is over, and nothing stays locked.
SELECT token AS held FROM lock_try('xact-2', ttl => '1h') \gset
BEGIN;
SELECT lock_try_xact('xact-2');
SELECT lock_acquire_xact('xact-2', wait => '0');
SELECT lock_acquire_xact('xact-2', wait => '10 ms');
:locks;
SELECT count(*) AS relations FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'idem\_locks%';
COMMIT;
-- Also for the transaction that guards or extends the lease.
BEGIN;
SELECT lock_guard('xact-2', :'held') IS NOT NULL AS guarded;
SELECT lock_try_xact('xact-2');
COMMIT;
-- A lease that is over, or unlocked, is not.
SELECT lock_unlock('xact-2', :'held');
SELECT lock_try_xact('xact-2');
SELECT acquired FROM lock_try('xact-3', ttl => '1us');
SELECT lock_try_xact('xact-3');

-- A transaction does not exclude itself: transaction lock, then lease lock of the same name, and the other way round.
BEGIN;
SELECT lock_try_xact('xact-4');
SELECT token AS held FROM lock_try('xact-4', ttl => '1h') \gset
SELECT lock_try_xact('xact-4');
SELECT token = :'held' AS same_grant FROM lock_try('xact-4');
COMMIT;
SELECT lock_try_xact('xact-4') AS lease_goes_on;
SELECT lock_guard('xact-4', :'held') IS NOT NULL AS held;
BEGIN;
SELECT token AS held FROM lock_acquire('xact-5', ttl => '1h') \gset
SELECT lock_acquire_xact('xact-5');
-- Unlocked, and still excluded by the transaction lock: taken anew, it is another grant.
SELECT lock_unlock('xact-5', :'held');
SELECT lock_try_xact('xact-5');
SELECT token <> :'held' AS another FROM lock_try('xact-5', ttl => '1us');
COMMIT;
SELECT lock_try_xact('xact-5');

-- Scopes are apart.
BEGIN;
SELECT lock_try_xact('xact-6', scope => 'a'), lock_acquire_xact('xact-6', scope => 'b'), lock_try_xact('xact-6');
SET LOCAL idem.scope = 'a';
SELECT lock_try_xact('xact-6');
SELECT count(DISTINCT (classid, objid, objsubid)) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
COMMIT;

-- Many in one transaction.
BEGIN;
SELECT count(*) FILTER (WHERE lock_try_xact('xact-many-' || n)) FROM generate_series(1, 1000) AS n;
COMMIT;
:locks;

-- No row.
RESET ROLE;
SELECT name FROM idem_locks WHERE name LIKE 'xact-%' ORDER BY name COLLATE "C";
