-- What was taken inside a savepoint or an exception block that is rolled back is free at once, its lock included; what
-- was taken before stays. An unlock that is rolled back leaves the lock held, an extend its old lease.
SET ROLE app;
\set locks 'SELECT count(*) AS locks FROM pg_locks WHERE locktype = ''advisory'' AND objsubid >= 16384 AND pid = pg_backend_pid()'

-- A lease lock taken inside, rolled back; taken again: another grant.
BEGIN;
SAVEPOINT s;
SELECT token FROM lock_try('sp-lock-1', ttl => '1h') \gset first_
:locks;
ROLLBACK TO s;
:locks;
SELECT acquired, token <> :'first_token' AS another FROM lock_try('sp-lock-1', ttl => '1h');
COMMIT;
\set VERBOSITY terse
SELECT lock_guard('sp-lock-1', :'first_token');
\set VERBOSITY default
BEGIN;
SAVEPOINT s;
SELECT acquired FROM lock_try('sp-lock-2', ttl => '1h');
ROLLBACK TO s;
COMMIT;
SELECT lock_try_xact('sp-lock-2') AS free;

-- Taken inside, released: the transaction's; the same grant before and after.
BEGIN;
SAVEPOINT s;
SELECT token FROM lock_try('sp-lock-3', ttl => '1h') \gset
RELEASE s;
SELECT token = :'token' AS same_grant FROM lock_try('sp-lock-3');
COMMIT;
SELECT acquired FROM lock_try('sp-lock-3');
SELECT lock_guard('sp-lock-3', :'token') IS NOT NULL AS held;

-- Taken before: a rollback inside takes nothing away.
BEGIN;
SELECT token FROM lock_try('sp-lock-4', ttl => '1h') \gset
SAVEPOINT s;
SELECT token = :'token' AS same_grant FROM lock_try('sp-lock-4');
SELECT lock_try_xact('sp-lock-4');
ROLLBACK TO s;
:locks;
SELECT token = :'token' AS same_grant FROM lock_try('sp-lock-4');
COMMIT;
SELECT lock_guard('sp-lock-4', :'token') IS NOT NULL AS held;

-- Transaction locks.
BEGIN;
SELECT lock_try_xact('sp-lock-5a');
SAVEPOINT s;
SELECT lock_try_xact('sp-lock-5b'), lock_try_xact('sp-lock-5a');
:locks;
ROLLBACK TO s;
:locks;
SAVEPOINT t;
SELECT lock_acquire_xact('sp-lock-5c', wait => '1s'), lock_acquire_xact('sp-lock-5d');
RELEASE t;
:locks;
COMMIT;
:locks;
-- A transaction lock outside, a lease inside that is rolled back: the transaction lock stays, the lease never was.
BEGIN;
SELECT lock_try_xact('sp-lock-6');
SAVEPOINT s;
SELECT acquired FROM lock_try('sp-lock-6', ttl => '1h');
ROLLBACK TO s;
:locks;
SELECT lock_try_xact('sp-lock-6');
COMMIT;
SELECT lock_try_xact('sp-lock-6') AS free;

-- Unlocked inside, rolled back: held, and nothing of it stays locked.
BEGIN;
SAVEPOINT s;
SELECT lock_unlock('sp-lock-4', :'token');
:locks;
ROLLBACK TO s;
:locks;
SELECT lock_guard('sp-lock-4', :'token') IS NOT NULL AS held;
COMMIT;
SELECT acquired FROM lock_try('sp-lock-4');
-- In the transaction that took it.
BEGIN;
SELECT token FROM lock_try('sp-lock-7', ttl => '1h') \gset
SAVEPOINT s;
SELECT lock_unlock('sp-lock-7', :'token');
SELECT token <> :'token' AS another FROM lock_try('sp-lock-7', ttl => '1h');
ROLLBACK TO s;
SELECT token = :'token' AS same_grant FROM lock_try('sp-lock-7');
COMMIT;
SELECT lock_unlock('sp-lock-7', :'token');
-- Unlocked inside, released: free with the transaction.
SELECT token FROM lock_try('sp-lock-8', ttl => '1h') \gset
BEGIN;
SAVEPOINT s;
SELECT lock_unlock('sp-lock-8', :'token');
RELEASE s;
COMMIT;
SELECT acquired FROM lock_try('sp-lock-8', ttl => '1h');

-- Extended inside, rolled back: the old lease. Guarded inside, rolled back: no longer guarded.
SELECT token FROM lock_try('sp-lock-9', ttl => '1h') \gset
BEGIN;
SAVEPOINT s;
SELECT lock_extend('sp-lock-9', :'token', ttl => '5h') IS NOT NULL AS extended;
ROLLBACK TO s;
:locks;
SELECT lock_guard('sp-lock-9', :'token') IS NOT NULL AS guarded;
:locks;
ROLLBACK TO s;
:locks;
COMMIT;
SELECT retry_after <= '1h' AS old_lease FROM lock_try('sp-lock-9');
-- Taken over inside, rolled back: the last holder's row is back, and still over.
SELECT token, fence FROM lock_try('sp-lock-10', ttl => '1us') \gset
BEGIN;
SAVEPOINT s;
SELECT fence AS second FROM lock_try('sp-lock-10', ttl => '1h') \gset
ROLLBACK TO s;
SELECT fence > :fence AS higher FROM lock_try('sp-lock-10', ttl => '1h');
COMMIT;

-- PL/pgSQL: a caught exception undoes what its block took.
BEGIN;
DO $$
BEGIN
    PERFORM lock_try('sp-lock-11', ttl => '1h');
    BEGIN
        PERFORM lock_try('sp-lock-12', ttl => '1h'), lock_try_xact('sp-lock-13'), lock_acquire('sp-lock-14', wait => '1s', ttl => '1h');
        PERFORM 1 / 0;
    EXCEPTION WHEN division_by_zero THEN
        RAISE NOTICE 'caught';
    END;
END
$$;
:locks;
COMMIT;
SELECT name, lock_try_xact(name) AS free FROM unnest(ARRAY['sp-lock-11', 'sp-lock-12', 'sp-lock-13', 'sp-lock-14']) AS name;
-- Errors of locks are caught like any other, and what was taken before stays.
DO $$
DECLARE
    given uuid;
BEGIN
    SELECT token INTO given FROM lock_try('sp-lock-15', ttl => '1h');
    BEGIN
        PERFORM lock_unlock('sp-lock-15', given);
        PERFORM lock_guard('sp-lock-15', given);
    EXCEPTION WHEN SQLSTATE 'ID011' THEN
        RAISE NOTICE 'caught: %', SQLERRM;
    END;
    RAISE NOTICE 'held: %', lock_guard('sp-lock-15', given) IS NOT NULL;
END
$$;
SELECT acquired FROM lock_try('sp-lock-15');

-- Many names over many savepoints: each third one is rolled back.
BEGIN;
DO $$
BEGIN
    FOR n IN 1..60 LOOP
        BEGIN
            IF n % 2 = 0 THEN
                PERFORM lock_try('sp-lock-many-' || n, ttl => '1h');
            ELSE
                PERFORM lock_try_xact('sp-lock-many-' || n);
            END IF;
            IF n % 3 = 0 THEN
                RAISE EXCEPTION 'back';
            END IF;
        EXCEPTION WHEN raise_exception THEN
        END;
    END LOOP;
END
$$;
:locks;
COMMIT;
SELECT count(*) FILTER (WHERE NOT lock_try_xact('sp-lock-many-' || n)) AS leases FROM generate_series(1, 60) AS n;

-- A cursor whose FETCH fails inside a savepoint: a lock taken in the main transaction's cursor before stays locked.
BEGIN;
DECLARE c CURSOR FOR SELECT acquired, 1 / (2 - n) AS quotient FROM generate_series(1, 3) AS n, lock_try('sp-lock-cursor-' || n, ttl => '1h') OFFSET 0;
FETCH c;
:locks;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
:locks;
SELECT n, lock_try_xact('sp-lock-cursor-' || n) FROM generate_series(1, 2) AS n;
COMMIT;
SELECT n, acquired FROM generate_series(1, 2) AS n, lock_try('sp-lock-cursor-' || n, ttl => '1h');
