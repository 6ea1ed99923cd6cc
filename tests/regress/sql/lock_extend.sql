-- lock_extend gives the holder's lock a new lease from now on: the given one, or its own again. It never revives a
-- lease that is over, and refuses whoever does not hold the lock: ID011.
SET ROLE app;
SELECT token AS held, fence FROM lock_try('extend-1', ttl => '1h', holder => 'me') \gset
SELECT expires_at AS ends FROM lock_try('extend-1') \gset

-- Its own ttl again; another; from then on that.
SELECT lock_extend('extend-1', :'held') AS extended \gset
SELECT :'extended'::timestamptz > :'ends' AS later, :'extended'::timestamptz - clock_timestamp() BETWEEN '59 minutes' AND '1h' AS own;
SELECT lock_extend('extend-1', :'held', ttl => '2h') - clock_timestamp() BETWEEN '119 minutes' AND '2h' AS other;
SELECT lock_extend('extend-1', :'held') - clock_timestamp() BETWEEN '119 minutes' AND '2h' AS repeated;
SELECT lock_extend('extend-1', :'held', ttl => '10 minutes') - clock_timestamp() BETWEEN '9 minutes' AND '10 minutes' AS shorter;
-- Others are told; holder, token and fence are the same.
SELECT acquired, held_by, retry_after BETWEEN '9 minutes' AND '10 minutes' AS retry_after FROM lock_try('extend-1');
SELECT lock_guard('extend-1', :'held') = :fence AS same_fence;
-- idem.lock_ttl does not matter to it.
SET idem.lock_ttl = '5h';
SELECT lock_extend('extend-1', :'held') - clock_timestamp() BETWEEN '9 minutes' AND '10 minutes' AS own;
RESET idem.lock_ttl;

-- In the transaction that took it; the repeated grant knows the new end.
BEGIN;
SELECT token FROM lock_try('extend-2', ttl => '1h') \gset
SELECT lock_extend('extend-2', :'token', ttl => '3h') AS extended \gset
SELECT token = :'token' AS token, expires_at = :'extended' AS expires_at FROM lock_try('extend-2');
COMMIT;
-- Late in a long transaction: from the call on.
BEGIN;
SELECT pg_sleep(0.1);
SELECT lock_extend('extend-2', :'token', ttl => '1h') >= statement_timestamp() + interval '1h' AS counted_from_the_call;
COMMIT;
-- Rolled back: as before.
BEGIN;
SELECT lock_extend('extend-2', :'token', ttl => '9h') IS NOT NULL AS extended;
ROLLBACK;
SELECT retry_after BETWEEN '59 minutes' AND '1h' AS retry_after FROM lock_try('extend-2');

-- Over: ID011, with and without a ttl, and the lock is as free as before.
SELECT token AS late FROM lock_try('extend-3', ttl => '1us') \gset
SELECT lock_extend('extend-3', :'late', ttl => '1h');
\set VERBOSITY terse
SELECT lock_extend('extend-3', :'late');
\echo :SQLSTATE
SELECT acquired FROM lock_try('extend-3', ttl => '1h');
-- Also in the transaction that took it.
BEGIN;
SELECT token AS late FROM lock_try('extend-4', ttl => '1us') \gset
SELECT pg_sleep(0.01);
SELECT lock_extend('extend-4', :'late', ttl => '1h');
ROLLBACK;
\set VERBOSITY default

-- Taken by somebody else, unlocked, never held.
SELECT lock_extend('extend-3', :'late', ttl => '1h');
SELECT token AS free FROM lock_try('extend-5', ttl => '1h') \gset
SELECT lock_unlock('extend-5', :'free');
SELECT lock_extend('extend-5', :'free');
SELECT lock_extend('extend-nothing', :'free');
\set VERBOSITY terse
SELECT lock_extend('extend-1', :'free');
SELECT lock_extend('extend-1', :'held', scope => 'other');
\echo :SQLSTATE
SELECT acquired, retry_after BETWEEN '9 minutes' AND '10 minutes' AS as_before FROM lock_try('extend-1');
SELECT acquired FROM lock_try('extend-5', ttl => '1h');

-- A caught ID011 leaves nothing locked and the transaction alive.
BEGIN;
DO $$
BEGIN
    PERFORM lock_extend('extend-1', '00000000-0000-0000-0000-000000000000');
EXCEPTION WHEN SQLSTATE 'ID011' THEN
    RAISE NOTICE 'caught';
END
$$;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT lock_extend('extend-1', :'held') IS NOT NULL AS extended;
COMMIT;
