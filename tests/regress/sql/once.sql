-- idem_once is true the first time, then false until its ttl has passed.
SET ROLE app;
SET idem.scope = 'test_once';
SELECT idem_once('once-1'), idem_once('once-1'), idem_once('once-1');
SELECT idem_once('once-1', scope => 'other');
SELECT idem_once(NULL);
SELECT idem_once('');

-- A rollback, of the transaction or of a savepoint: it was not done.
BEGIN;
SELECT idem_once('once-2');
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT idem_once('once-2');
ROLLBACK TO s;
SELECT idem_once('once-2');
COMMIT;
SELECT idem_once('once-2');

-- The inbox of a consumer: a batch with duplicates, redelivered with one more.
CREATE TEMP TABLE inbox_done (id text);
INSERT INTO inbox_done
SELECT id FROM (SELECT id FROM unnest(ARRAY['m3', 'm1', 'm2', 'm1']) AS id ORDER BY id) AS batch WHERE idem_once(id, 'inbox');
INSERT INTO inbox_done
SELECT id FROM (SELECT id FROM unnest(ARRAY['m4', 'm3', 'm1', 'm2']) AS id ORDER BY id) AS batch WHERE idem_once(id, 'inbox');
SELECT id FROM inbox_done ORDER BY id;

-- In PL/pgSQL
DO $$
BEGIN
    FOR i IN 1..3 LOOP
        IF idem_once('once-3') THEN
            RAISE NOTICE 'done in round %', i;
        END IF;
    END LOOP;
END
$$;

-- ttl
SELECT idem_once('once-4', ttl => '1 microsecond');
SELECT idem_once('once-4', ttl => '1 day');
SELECT idem_once('once-4');
SELECT expires_at - completed_at AS ttl FROM idem_get('once-4');

-- A key on a lease, live and over; a key of the transaction itself; another owner's.
SELECT status FROM idem_begin('once-5', lease => '1 hour');
\set VERBOSITY sqlstate
SELECT idem_once('once-5', wait => '0');
SELECT idem_once('once-5', wait => '10 ms');
SET lock_timeout = '10ms';
SELECT idem_once('once-5');
RESET lock_timeout;
SET statement_timeout = '10ms';
SELECT idem_once('once-5');
RESET statement_timeout;
\set VERBOSITY default
SELECT status FROM idem_begin('once-6', lease => '1 microsecond');
SELECT idem_once('once-6');
SELECT attempt, result FROM idem_get('once-6');
BEGIN;
SELECT status FROM idem_begin('once-7');
SELECT idem_once('once-7');
ROLLBACK;
SET idem.owner = 'alice';
SELECT idem_once('once-8');
SET idem.owner = 'bob';
SELECT idem_once('once-8');
\echo :LAST_ERROR_SQLSTATE
