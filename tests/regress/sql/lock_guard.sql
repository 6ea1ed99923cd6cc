-- lock_guard returns the fence while its token holds the lock, and else raises ID011 with a DETAIL that says why: the
-- transaction's effects then roll back. (That a guarded lock cannot be taken is shown by isolation specs.)
SET ROLE app;
CREATE TEMP TABLE effects (what text);

-- Held: the fence of the grant, as often as asked, in the taker's transaction too.
SELECT token AS held, fence FROM lock_try('guard-1', ttl => '1h', holder => 'me') \gset
BEGIN;
SELECT lock_guard('guard-1', :'held') = :fence AS fence;
SELECT lock_guard('guard-1', :'held') = :fence AS fence;
INSERT INTO effects VALUES ('held');
COMMIT;
BEGIN;
SELECT token, fence FROM lock_try('guard-2', ttl => '1h') \gset own_
SELECT lock_guard('guard-2', :'own_token') = :own_fence AS fence;
COMMIT;
-- It changes nothing: no new lease, no row version, no xid.
RESET ROLE;
SELECT xmin AS version, expires_at AS ends FROM idem_locks WHERE name = 'guard-1' \gset
SET ROLE app;
BEGIN;
SELECT lock_guard('guard-1', :'held') = :fence AS fence;
SELECT pg_current_xact_id_if_assigned();
COMMIT;
RESET ROLE;
SELECT xmin = :'version' AS same_version, xmax, expires_at = :'ends' AS same_end FROM idem_locks WHERE name = 'guard-1';
SET ROLE app;
-- Extended meanwhile: still held, the same fence.
BEGIN;
SELECT lock_extend('guard-1', :'held', ttl => '2h') IS NOT NULL AS extended;
SELECT lock_guard('guard-1', :'held') = :fence AS fence;
COMMIT;

-- Over: the transaction cannot commit.
SELECT token AS late FROM lock_try('guard-3', ttl => '1us') \gset
BEGIN;
INSERT INTO effects VALUES ('expired');
SELECT lock_guard('guard-3', :'late');
COMMIT;
-- Taken by somebody else since.
SELECT token AS next FROM lock_try('guard-3', ttl => '1h') \gset
BEGIN;
INSERT INTO effects VALUES ('taken over');
SELECT lock_guard('guard-3', :'late');
COMMIT;
SELECT lock_guard('guard-3', :'next') IS NOT NULL AS the_next_holds_it;
-- Unlocked.
SELECT token AS free FROM lock_try('guard-4', ttl => '1h') \gset
SELECT lock_unlock('guard-4', :'free');
SELECT lock_guard('guard-4', :'free');
-- Unlocked in this transaction.
BEGIN;
SELECT lock_unlock('guard-2', :'own_token');
SELECT lock_guard('guard-2', :'own_token');
ROLLBACK;
SELECT lock_guard('guard-2', :'own_token') = :own_fence AS held_again;
-- Never held: another's token, a name that nobody ever took, another scope.
SELECT lock_guard('guard-1', :'next');
SELECT lock_guard('guard-nothing', :'held');
\set VERBOSITY terse
SELECT lock_guard('guard-1', :'held', scope => 'other');
\echo :SQLSTATE
-- A transaction lock of the name is no lease.
BEGIN;
SELECT lock_try_xact('guard-5');
SELECT lock_guard('guard-5', :'held');
ROLLBACK;
SELECT * FROM effects;

-- Refused and caught: nothing stays locked. Held: one lock until the transaction ends, no relation lock.
BEGIN;
DO $$
BEGIN
    PERFORM lock_guard('guard-1', '00000000-0000-0000-0000-000000000000');
EXCEPTION WHEN SQLSTATE 'ID011' THEN
    RAISE NOTICE 'caught';
END
$$;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT lock_guard('guard-1', :'held') IS NOT NULL AS guarded;
SELECT mode, granted FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT count(*) AS relations FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'idem\_locks%';
COMMIT;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
