-- A key's lock is an advisory lock in a tag space of its own: never one that an application's
-- pg_advisory_lock can name. The tag is computed from scope and key and frozen: a server of another
-- version, or a prepared transaction from before an upgrade, must exclude the same key.
SET ROLE app;
CREATE TEMP VIEW key_locks AS
    SELECT classid, objid, objsubid, mode, granted FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- Frozen: computed with another implementation of SHA-256 (core/src/identity_vectors.in has them too).
BEGIN;
SELECT status FROM idem_begin('a');
SELECT * FROM key_locks;
ROLLBACK;
BEGIN;
SELECT status FROM idem_begin('order-7f3a', scope => 'tenant-42');
SELECT * FROM key_locks;
ROLLBACK;
BEGIN;
SELECT status FROM idem_begin('é中');
SELECT * FROM key_locks;
ROLLBACK;

-- Always between 0x4000 and 0x7FFF, where the application's locks have 1 or 2.
BEGIN;
SELECT count(*) FROM generate_series(1, 300) AS n, idem_begin('key-locks-' || n);
SELECT count(*), count(DISTINCT (classid, objid, objsubid)), bool_and(objsubid BETWEEN 16384 AND 32767) AS own_space,
    max(objsubid) - min(objsubid) > 10000 AS spread
FROM key_locks;
ROLLBACK;

-- The application's own lock with the same numbers, in both forms, is another lock.
-- (That it does not wait for ours is shown by the isolation spec advisory-locks.)
BEGIN;
SELECT status FROM idem_begin('a');
SELECT pg_try_advisory_xact_lock((classid::bigint << 32) | objid::bigint) AS one_key,
    pg_try_advisory_xact_lock((classid::bigint)::bit(32)::int, (objid::bigint)::bit(32)::int) AS two_keys
FROM key_locks;
SELECT * FROM key_locks ORDER BY objsubid;
ROLLBACK;

-- What keeps the lock until the transaction ends: whatever took or changed the key.
SELECT token AS held FROM idem_begin('key-locks-lease', lease => '1h') \gset
\set locks 'SELECT objsubid, mode, granted FROM key_locks'
BEGIN;
SELECT status FROM idem_begin('a', lease => '1h');
:locks;
ROLLBACK;
BEGIN;
SELECT status FROM idem_begin('a');
SELECT idem_complete('a', '1');
:locks;
ROLLBACK;
BEGIN;
SELECT idem_extend('key-locks-lease', :'held') IS NOT NULL AS extended;
SELECT count(*), min(mode) AS mode FROM key_locks;
ROLLBACK;
BEGIN;
SELECT idem_complete('key-locks-lease', '1', token => :'held');
SELECT count(*), min(mode) AS mode FROM key_locks;
ROLLBACK;
BEGIN;
SELECT idem_release('key-locks-lease', :'held');
SELECT count(*), min(mode) AS mode FROM key_locks;
ROLLBACK;

BEGIN;
SELECT status FROM idem_begin('key-locks-done', '\x01');
SELECT idem_complete('key-locks-done', '1');
COMMIT;

-- What found nothing to claim gives it back at once, and leaves no relation locked.
BEGIN;
SELECT status FROM idem_begin('key-locks-lease');
SELECT status FROM idem_begin('key-locks-lease', wait => '10 ms');
SELECT status FROM idem_begin('key-locks-lease', wait => '0');
SELECT status FROM idem_begin('key-locks-done', '\x01');
SELECT status FROM idem_begin('key-locks-done', '\x02');
SELECT idem_release('key-locks-nothing');
SELECT idem_release('key-locks-nothing', :'held');
SELECT idem_release('key-locks-lease');
SELECT count(*) FROM idem_get('key-locks-lease');
SELECT count(*) FROM key_locks;
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE '%idem\_c%';
ROLLBACK;

-- pg_advisory_unlock_all, and unlocking by number, do not touch a claim.
BEGIN;
SELECT status FROM idem_begin('a');
SELECT pg_advisory_unlock_all();
SELECT pg_advisory_unlock((3113128742::bigint << 32) | 3342316865);
SELECT * FROM key_locks;
SELECT status FROM idem_begin('a');
ROLLBACK;
DISCARD ALL;
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
