-- Savepoints: a claim made inside one that is rolled back is gone at once, lock included; one made
-- before survives; a completion or release rolled back with a savepoint leaves the claim held. The
-- same for PL/pgSQL's exception blocks, and for cursors.
SET ROLE app;
-- What others meet: the key's lock. What this transaction may still do: commit or not.
\set locks 'SELECT count(*) AS locks FROM pg_locks WHERE locktype = ''advisory'' AND objsubid >= 16384 AND pid = pg_backend_pid()'
\set VERBOSITY sqlstate

-- Begin inside, rolled back: gone.
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_begin('sp-1');
:locks;
ROLLBACK TO s;
:locks;
SELECT idem_release('sp-1');
COMMIT;
SELECT count(*) FROM idem_get('sp-1');

-- Begin inside, released: held by the transaction.
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_begin('sp-2');
RELEASE s;
:locks;
SELECT idem_complete('sp-2', '2');
COMMIT;
SELECT result FROM idem_get('sp-2');

-- Begin inside and nothing more: ID007.
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_begin('sp-3');
RELEASE s;
COMMIT;
SELECT count(*) FROM idem_get('sp-3');

-- Begin before, complete inside, rolled back: held again, with the same token; completed anew.
BEGIN;
SELECT token AS held FROM idem_begin('sp-4') \gset
SAVEPOINT s;
SELECT idem_complete('sp-4', '"first"');
SELECT status, result FROM idem_begin('sp-4');
ROLLBACK TO s;
:locks;
SELECT status, token = :'held' AS same_token FROM idem_begin('sp-4');
SELECT count(*) AS stored FROM idem_get('sp-4');
SELECT idem_complete('sp-4', '"second"');
COMMIT;
SELECT result FROM idem_get('sp-4');

-- Begin before, complete inside, released: completed.
BEGIN;
SELECT status FROM idem_begin('sp-5');
SAVEPOINT s;
SELECT idem_complete('sp-5', '5');
RELEASE s;
COMMIT;
SELECT result FROM idem_get('sp-5');

-- Begin before, release inside, rolled back: held again, and COMMIT refuses it.
BEGIN;
SELECT token AS held FROM idem_begin('sp-6') \gset
SAVEPOINT s;
SELECT idem_release('sp-6');
SELECT idem_release('sp-6') AS again;
ROLLBACK TO s;
SELECT status, token = :'held' AS same_token FROM idem_begin('sp-6');
COMMIT;

-- Begin before, release inside, released: free; the lock goes with the transaction.
BEGIN;
SELECT status FROM idem_begin('sp-7');
SAVEPOINT s;
SELECT idem_release('sp-7');
RELEASE s;
COMMIT;
:locks;
SELECT count(*) FROM idem_get('sp-7');

-- Released, then claimed again: another claim; a rollback goes back one claim at a time.
BEGIN;
SELECT token AS first FROM idem_begin('sp-8') \gset
SAVEPOINT one;
SELECT idem_release('sp-8');
SAVEPOINT two;
SELECT token AS second FROM idem_begin('sp-8') \gset
SELECT :'first' <> :'second' AS another;
ROLLBACK TO two;
SELECT idem_release('sp-8') AS nothing_held;
ROLLBACK TO one;
SELECT token = :'first' AS first_again FROM idem_begin('sp-8');
SELECT idem_release('sp-8');
COMMIT;

-- Nested: what a released savepoint did goes with its parent.
BEGIN;
SAVEPOINT outer_one;
SAVEPOINT inner_one;
SELECT status FROM idem_begin('sp-9');
SELECT idem_complete('sp-9', '9');
RELEASE inner_one;
SELECT status FROM idem_begin('sp-9');
ROLLBACK TO outer_one;
:locks;
SELECT count(*) FROM idem_get('sp-9');
COMMIT;

-- Nested: rolled back inside, kept outside; and the other way round.
BEGIN;
SAVEPOINT outer_one;
SELECT status FROM idem_begin('sp-10');
SAVEPOINT inner_one;
SELECT idem_complete('sp-10', '"inner"');
ROLLBACK TO inner_one;
RELEASE inner_one;
SELECT idem_complete('sp-10', '"outer"');
RELEASE outer_one;
COMMIT;
SELECT result FROM idem_get('sp-10');

-- Rolled back to the same savepoint again and again.
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_begin('sp-11');
ROLLBACK TO s;
SELECT status FROM idem_begin('sp-11');
SELECT idem_complete('sp-11', '"second"');
ROLLBACK TO s;
SELECT status FROM idem_begin('sp-11');
SELECT idem_complete('sp-11', '"third"');
COMMIT;
SELECT result FROM idem_get('sp-11');

-- Many keys over many savepoints: each third one is rolled back.
BEGIN;
DO $$
BEGIN
    FOR n IN 1..60 LOOP
        BEGIN
            PERFORM idem_begin('sp-many-' || n);
            IF n % 2 = 0 THEN
                PERFORM idem_complete('sp-many-' || n, to_jsonb(n));
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
SELECT count(*) FILTER (WHERE state = 'completed') AS completed FROM generate_series(1, 60) AS n, idem_get('sp-many-' || n);
SELECT count(*) FILTER (WHERE released) AS released FROM generate_series(1, 60) AS n, idem_release('sp-many-' || n) AS released;
COMMIT;
SELECT count(*) FROM generate_series(1, 60) AS n, idem_get('sp-many-' || n);

-- A claim on a lease: its row goes with the savepoint and stays with the transaction.
BEGIN;
SELECT token AS kept FROM idem_begin('sp-lease-1', lease => '1h') \gset
SAVEPOINT s;
SELECT status FROM idem_begin('sp-lease-2', lease => '1h');
SELECT idem_extend('sp-lease-1', lease => '2h') > clock_timestamp() + '110 minutes' AS extended;
SELECT idem_complete('sp-lease-1', '1');
ROLLBACK TO s;
SELECT key, state, expires_at < clock_timestamp() + '61 minutes' AS own_lease
FROM (VALUES ('sp-lease-1'), ('sp-lease-2')) AS keys (k), idem_get(k);
COMMIT;
SELECT idem_complete('sp-lease-1', '"done"', token => :'kept');
SELECT state, result FROM idem_get('sp-lease-1');
-- Completed with its token inside a savepoint by another transaction, rolled back: the claim is as before.
SELECT token AS kept FROM idem_begin('sp-lease-3', lease => '1h') \gset
BEGIN;
SAVEPOINT s;
SELECT idem_complete('sp-lease-3', '1', token => :'kept');
ROLLBACK TO s;
:locks;
SELECT idem_release('sp-lease-3', token => :'kept');
ROLLBACK TO s;
:locks;
SELECT idem_extend('sp-lease-3', token => :'kept') IS NOT NULL AS extended;
ROLLBACK TO s;
:locks;
COMMIT;
SELECT state FROM idem_get('sp-lease-3');
SELECT idem_complete('sp-lease-3', '3', token => :'kept');

-- A takeover, and the reuse of an expired key, rolled back with a savepoint: the old row is back.
SELECT token AS stale FROM idem_begin('sp-lease-4', lease => '1us') \gset
BEGIN;
SELECT status FROM idem_begin('sp-expired');
SELECT idem_complete('sp-expired', '"old"', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
BEGIN;
SAVEPOINT s;
SELECT status, attempt FROM idem_begin('sp-lease-4', lease => '1h');
SELECT status FROM idem_begin('sp-expired');
SELECT idem_complete('sp-expired', '"new"');
ROLLBACK TO s;
SELECT status, attempt FROM idem_begin('sp-lease-4');
SELECT idem_complete('sp-lease-4', '4');
SELECT status FROM idem_begin('sp-expired');
ROLLBACK TO s;
COMMIT;
SELECT idem_complete('sp-lease-4', '"late"', token => :'stale');
SELECT result FROM idem_get('sp-lease-4');

\set VERBOSITY terse
-- PL/pgSQL: an exception that is caught undoes what its block did.
DO $$
BEGIN
    PERFORM idem_begin('sp-plpgsql-1');
    BEGIN
        PERFORM idem_begin('sp-plpgsql-2');
        PERFORM idem_complete('sp-plpgsql-1', '"undone"');
        PERFORM 1 / 0;
    EXCEPTION WHEN division_by_zero THEN
        RAISE NOTICE 'caught; first: %, second: %', (idem_begin('sp-plpgsql-1')).status, idem_release('sp-plpgsql-2');
    END;
    PERFORM idem_complete('sp-plpgsql-1', '"done"');
END
$$;
SELECT key, result FROM (VALUES ('sp-plpgsql-1'), ('sp-plpgsql-2')) AS keys (k), idem_get(k);
-- Errors of our own are caught like any other.
DO $$
BEGIN
    PERFORM idem_begin('sp-plpgsql-3');
    BEGIN
        PERFORM idem_complete('sp-plpgsql-3', token => '00000000-0000-4000-8000-000000000000');
    EXCEPTION WHEN SQLSTATE 'ID003' THEN
        RAISE NOTICE 'caught %', SQLSTATE;
    END;
    PERFORM idem_complete('sp-plpgsql-3', '3');
END
$$;
SELECT result FROM idem_get('sp-plpgsql-3');

\set VERBOSITY sqlstate
-- Cursors. The claim and its lock belong to the transaction, not to the cursor: when a FETCH fails
-- inside a savepoint, what it claimed there is gone, and what an earlier FETCH claimed before is kept.
BEGIN;
DECLARE c CURSOR FOR SELECT n, status, 1 / (2 - n) AS fails_at_2 FROM generate_series(1, 3) AS n, idem_begin('sp-cursor-' || n);
FETCH c;
:locks;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
:locks;
SELECT n, status FROM generate_series(1, 2) AS n, idem_release('sp-cursor-' || n) AS status;
ROLLBACK;
BEGIN;
DECLARE c CURSOR FOR SELECT n, status, 1 / (2 - n) AS fails_at_2 FROM generate_series(1, 3) AS n, idem_begin('sp-cursor-' || n);
SAVEPOINT s;
FETCH c;
:locks;
FETCH c;
ROLLBACK TO s;
:locks;
SELECT n, status FROM generate_series(1, 2) AS n, idem_release('sp-cursor-' || n) AS status;
ROLLBACK;
-- A cursor that is closed, or opened inside the savepoint that is rolled back.
BEGIN;
DECLARE c CURSOR FOR SELECT status FROM idem_begin('sp-cursor-1');
FETCH c;
CLOSE c;
:locks;
SAVEPOINT s;
DECLARE d CURSOR FOR SELECT status FROM idem_begin('sp-cursor-2');
FETCH d;
CLOSE d;
:locks;
ROLLBACK TO s;
:locks;
COMMIT;
-- A claim on a lease through a cursor, kept.
BEGIN;
DECLARE c CURSOR FOR SELECT n, status, 1 / (2 - n) AS fails_at_2 FROM generate_series(1, 3) AS n, idem_begin('sp-cursor-lease-' || n, lease => '1h');
FETCH c;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
:locks;
COMMIT;
SELECT key, state FROM generate_series(1, 3) AS n, idem_get('sp-cursor-lease-' || n);
-- A completion in a FETCH that fails: the claim is held again.
BEGIN;
SELECT status FROM idem_begin('sp-cursor-3');
DECLARE c CURSOR FOR SELECT idem_complete('sp-cursor-3', '3'), 1 / (n - 1) FROM generate_series(1, 1) AS n;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
:locks;
COMMIT;
-- A holdable cursor is run at COMMIT at the latest: it cannot smuggle a claim past it.
BEGIN;
DECLARE h CURSOR WITH HOLD FOR SELECT status FROM idem_begin('sp-cursor-4');
COMMIT;
:locks;
SELECT count(*) FROM generate_series(1, 4) AS n, idem_get('sp-cursor-' || n);
