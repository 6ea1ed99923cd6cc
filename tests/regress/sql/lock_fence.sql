-- The fence of a name rises with every grant: after unlock, expiry and deletion of the row by an administrator, within
-- one transaction, and if the last one is ahead of the clock. (Crash, restart and restore: harness/tests/lock_crash.rs.)
SET ROLE app;
CREATE TEMP TABLE grants (n serial, name text, how text, fence bigint);
CREATE FUNCTION pg_temp.take(name text, how text, ttl interval = '1h') RETURNS uuid LANGUAGE sql AS $$
    WITH taken AS (SELECT * FROM lock_try(name, ttl)), noted AS (INSERT INTO grants (name, how, fence) SELECT $1, how, fence FROM taken)
    SELECT token FROM taken
$$;

SELECT pg_temp.take('fence-1', 'first') AS token \gset
SELECT lock_unlock('fence-1', :'token');
SELECT pg_temp.take('fence-1', 'after unlock', '1us') IS NOT NULL AS taken;
SELECT pg_temp.take('fence-1', 'after expiry', '1us') IS NOT NULL AS taken;
BEGIN;
SELECT pg_temp.take('fence-1', 'rolled back') IS NOT NULL AS taken;
ROLLBACK;
SELECT pg_temp.take('fence-1', 'after rollback') AS token \gset
SELECT lock_extend('fence-1', :'token') IS NOT NULL AS extended;
SELECT lock_unlock('fence-1', :'token');
-- In one transaction, again and again.
DO $$
BEGIN
    FOR n IN 1..200 LOOP
        PERFORM lock_unlock('fence-1', pg_temp.take('fence-1', 'in a loop'));
    END LOOP;
END
$$;
-- Other names have fences of their own.
SELECT pg_temp.take('fence-2', 'other name') IS NOT NULL AS taken;

-- An administrator removes the row.
RESET ROLE;
DELETE FROM idem_locks WHERE name = 'fence-1';
SET ROLE app;
SELECT pg_temp.take('fence-1', 'after deletion', '1us') IS NOT NULL AS taken;
RESET ROLE;
SELECT count(*) AS rows FROM idem_locks WHERE name = 'fence-1';
DELETE FROM idem_locks WHERE name = 'fence-1';
SET ROLE app;
SELECT pg_temp.take('fence-1', 'after deletion of an expired one', '1us') IS NOT NULL AS taken;

-- Every one higher than the one before.
SELECT count(*) AS grants, count(fence) AS fences, bool_and(fence > before) AS rising
FROM (SELECT fence, lag(fence, 1, 0::bigint) OVER (ORDER BY n) AS before FROM grants WHERE name = 'fence-1') AS g;

-- The clock was set back, or a dump came from a server ahead: the last fence plus 1, never the clock.
RESET ROLE;
UPDATE idem_locks SET fence = 9000000000000000000 WHERE name = 'fence-1';
SET ROLE app;
SELECT token, fence FROM lock_try('fence-1', ttl => '1us') \gset
SELECT :fence AS after_expiry;
SELECT token, fence FROM lock_try('fence-1', ttl => '1h') \gset
SELECT :fence AS once_more, lock_guard('fence-1', :'token') AS guarded;
SELECT lock_extend('fence-1', :'token') IS NOT NULL AS extended, lock_unlock('fence-1', :'token') AS unlocked;
SELECT fence AS after_unlock FROM lock_acquire('fence-1', ttl => '1us');
