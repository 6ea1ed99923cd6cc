-- A lock's tag in the lock manager is computed from scope and name and frozen, so that servers of different versions
-- exclude each other; it lies in a space where neither an application's pg_advisory_lock nor an idempotency key of the
-- same name has its tag. (That the application's locks never wait for ours: isolation spec lock-advisory.)
SET ROLE app;
CREATE TEMP VIEW our_locks AS
    SELECT classid, objid, objsubid, mode, granted FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND database = (SELECT oid FROM pg_database WHERE datname = current_database());
-- The tag as it is documented, computed with PostgreSQL's own SHA-256.
CREATE FUNCTION pg_temp.tag(scope text, name text) RETURNS text LANGUAGE sql AS $$
    SELECT format('%s %s %s', ('x' || encode(substr(hash, 1, 4), 'hex'))::bit(32)::bigint & 4294967295,
        ('x' || encode(substr(hash, 5, 4), 'hex'))::bit(32)::bigint & 4294967295,
        (get_byte(hash, 8) << 8 | get_byte(hash, 9)) & 16383 | 16384)
    FROM (SELECT sha256('\x02'::bytea || int4send(octet_length(scope)) || convert_to(scope, 'UTF8')
        || int4send(octet_length(name)) || convert_to(name, 'UTF8')) AS hash) AS h
$$;

-- Frozen: computed with another implementation (core/src/identity_vectors.in has them too).
BEGIN;
SELECT lock_try_xact('a');
SELECT * FROM our_locks;
ROLLBACK;
BEGIN;
SELECT lock_try_xact('nightly-report', scope => 'tenant-42');
SELECT * FROM our_locks;
ROLLBACK;
-- The same tag whatever takes it.
BEGIN;
SELECT acquired FROM lock_try('nightly-report', ttl => '1h', scope => 'tenant-42');
SELECT * FROM our_locks;
ROLLBACK;
BEGIN;
SELECT acquired FROM lock_acquire('nightly-report', ttl => '1h', scope => 'tenant-42');
SELECT lock_acquire_xact('nightly-report', wait => '1s', scope => 'tenant-42');
SELECT * FROM our_locks;
ROLLBACK;
SELECT token FROM lock_try('nightly-report', ttl => '1h', scope => 'tenant-42') \gset
BEGIN;
SELECT lock_guard('nightly-report', :'token', scope => 'tenant-42') IS NOT NULL AS guarded;
SELECT lock_extend('nightly-report', :'token', scope => 'tenant-42') IS NOT NULL AS extended;
SELECT * FROM our_locks ORDER BY mode COLLATE "C";
ROLLBACK;
BEGIN;
SELECT lock_unlock('nightly-report', :'token', scope => 'tenant-42');
SELECT * FROM our_locks;
COMMIT;
-- For any scope and name: always between 0x4000 and 0x7FFF, where the application's locks have 1 or 2.
BEGIN;
SELECT count(*) FILTER (WHERE lock_try_xact(name, scope)) AS taken
FROM (SELECT repeat('é中x', n) AS name, CASE n % 3 WHEN 0 THEN '' ELSE 'scope ' || n END AS scope FROM generate_series(1, 100) AS n) AS s;
SELECT count(*), bool_and(objsubid BETWEEN 16384 AND 32767) AS own_space, max(objsubid) - min(objsubid) > 8000 AS spread FROM our_locks;
SELECT count(*) AS as_documented
FROM (SELECT pg_temp.tag(CASE n % 3 WHEN 0 THEN '' ELSE 'scope ' || n END, repeat('é中x', n)) AS tag FROM generate_series(1, 100) AS n) AS s
JOIN our_locks ON tag = format('%s %s %s', classid, objid, objsubid);
ROLLBACK;
-- The boundary between scope and name counts.
BEGIN;
SELECT lock_try_xact('b', scope => 'a'), lock_try_xact('ab'), lock_try_xact('ab', scope => ''), lock_try_xact('a', scope => 'b');
SELECT count(*) FROM our_locks;
ROLLBACK;

-- The application's own lock with the same numbers, in both forms, is another lock; its unlocking does not touch ours.
BEGIN;
SELECT lock_try_xact('a');
SELECT pg_try_advisory_xact_lock((2997257824::bigint << 32) | 2182814409) AS one_key,
    pg_try_advisory_xact_lock(2997257824::bit(32)::int, 2182814409::bit(32)::int) AS two_keys;
SELECT * FROM our_locks ORDER BY objsubid;
SELECT pg_advisory_unlock_all();
SELECT pg_advisory_unlock((2997257824::bigint << 32) | 2182814409);
SELECT * FROM our_locks ORDER BY objsubid;
ROLLBACK;

-- A key and a lock of the same name and scope are different things.
SELECT token AS key_token FROM idem_begin('same-name', lease => '1h') \gset
SELECT acquired, token AS lock_token FROM lock_try('same-name', ttl => '1h') \gset
\echo :acquired
SELECT lock_unlock('same-name', :'key_token'), idem_release('same-name', :'lock_token');
BEGIN;
SELECT status FROM idem_begin('same-name-2');
SELECT lock_try_xact('same-name-2');
SELECT count(*), count(DISTINCT (classid, objid, objsubid)) AS distinct FROM our_locks;
ROLLBACK;
