-- A lease lock outlives the transaction that took it: until it is unlocked or its lease is over, everybody else is told
-- at once that it is taken, by whom and for how long; repeated by its taker's transaction, lock_try and lock_acquire
-- return the same grant.
SET ROLE app;
\set row 'acquired, token IS NOT NULL AS token, fence > 0 AS fence, expires_at IS NOT NULL AS expires_at, held_by, retry_after IS NOT NULL AS retry_after'

-- Taken: token, fence and end of the lease. The lease is given or idem.lock_ttl, counted from the call.
SELECT :row FROM lock_try('lease-1', ttl => '1h', holder => 'worker 7');
SELECT expires_at - clock_timestamp() BETWEEN '59 minutes' AND '1h' AS given FROM lock_try('lease-given', ttl => '1h');
SHOW idem.lock_ttl;
SELECT expires_at - clock_timestamp() BETWEEN '20 seconds' AND '30 seconds' AS by_default FROM lock_try('lease-default');
BEGIN;
SET LOCAL idem.lock_ttl = '2h';
SELECT expires_at - clock_timestamp() BETWEEN '119 minutes' AND '2h' AS as_set FROM lock_try('lease-set');
COMMIT;
BEGIN;
SELECT pg_sleep(0.1);
SELECT expires_at >= statement_timestamp() + interval '1h' AS counted_from_the_call FROM lock_try('lease-late', ttl => '1h');
COMMIT;

-- Busy: no token and no fence; who has it and how long it may last. In this session too, whatever is asked.
SELECT :row FROM lock_try('lease-1');
SELECT :row FROM lock_try('lease-1', ttl => '2h', holder => 'worker 7');
SELECT :row FROM lock_acquire('lease-1', wait => '0');
SELECT :row FROM lock_acquire('lease-1', wait => '10 ms', holder => 'worker 8');
SELECT retry_after BETWEEN '59 minutes' AND '1h' AS retry_after,
    expires_at - clock_timestamp() BETWEEN '59 minutes' AND '1h' AS expires_at
FROM lock_try('lease-1');
-- A holder that gave no name, or an empty one.
SELECT :row FROM lock_try('lease-given');
SELECT acquired FROM lock_try('lease-empty', ttl => '1h', holder => '');
SELECT acquired, held_by = '' AS empty_name FROM lock_try('lease-empty');
-- Being refused changed nothing.
RESET ROLE;
SELECT holder, ttl, expires_at - acquired_at AS length FROM idem_locks WHERE name = 'lease-1';
SET ROLE app;

-- Repeated in the taker's transaction: the same grant, whatever is asked, once per column and on another path too.
BEGIN;
SELECT token, fence, expires_at FROM lock_try('lease-2', ttl => '1h') \gset first_
SELECT token = :'first_token' AS token, fence = :first_fence AS fence, expires_at = :'first_expires_at' AS expires_at, acquired, held_by, retry_after
FROM lock_try('lease-2', ttl => '2h', holder => 'other');
SELECT token = :'first_token' AS token, fence = :first_fence AS fence, expires_at = :'first_expires_at' AS expires_at, acquired
FROM lock_acquire('lease-2');
SELECT acquired, token = :'first_token' AS token FROM (SELECT (lock_try('lease-2')).* OFFSET 0) AS answer;
SAVEPOINT s;
SELECT token = :'first_token' AS token FROM lock_try('lease-2');
RELEASE s;
COMMIT;
-- From then on it is another transaction: busy.
SELECT :row FROM lock_try('lease-2');
BEGIN;
SELECT :row FROM lock_try('lease-2');
SELECT :row FROM lock_acquire('lease-2', wait => '1 ms');
COMMIT;
-- Also in a transaction that extends it or guards it.
BEGIN;
SELECT lock_guard('lease-2', :'first_token') = :first_fence AS guarded;
SELECT lock_extend('lease-2', :'first_token') IS NOT NULL AS extended;
SELECT acquired FROM lock_try('lease-2');
COMMIT;

-- Over: anybody takes it, with another token and a higher fence; nothing of the last holder is left.
SELECT token, fence FROM lock_try('lease-3', ttl => '1us', holder => 'stalled') \gset first_
SELECT acquired, token <> :'first_token' AS other_token, fence > :first_fence AS higher, held_by FROM lock_try('lease-3', ttl => '1h');
SELECT acquired, held_by FROM lock_try('lease-3');
SELECT token, fence FROM lock_acquire('lease-4', ttl => '1us') \gset first_
SELECT acquired, token <> :'first_token' AS other_token, fence > :first_fence AS higher FROM lock_acquire('lease-4', wait => '0');
-- In the same transaction as well: a lease that is over is not returned as a grant.
BEGIN;
SELECT token, fence FROM lock_try('lease-5', ttl => '1us') \gset first_
SELECT pg_sleep(0.01);
SELECT acquired, token <> :'first_token' AS other_token, fence > :first_fence AS higher, expires_at > clock_timestamp() AS runs
FROM lock_try('lease-5', ttl => '1h');
COMMIT;
SELECT acquired FROM lock_try('lease-5');

-- Rolled back: it never was.
BEGIN;
SELECT acquired FROM lock_try('lease-6', ttl => '1h');
ROLLBACK;
BEGIN;
SELECT acquired FROM lock_try('lease-6', ttl => '1h');
ROLLBACK;

-- Scopes are apart: an argument, or the setting idem.scope.
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h', scope => 'a');
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h', scope => 'b');
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h');
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h', scope => 'a');
BEGIN;
SET LOCAL idem.scope = 'b';
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h');
SELECT acquired AS empty_scope FROM lock_try('lease-scoped', ttl => '1h', scope => '');
SET LOCAL idem.scope = 'c';
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h');
COMMIT;
SELECT acquired FROM lock_try('lease-scoped', ttl => '1h', scope => 'c');
-- Names are bytes: case and white space count, and no scope is reached by a name.
SELECT acquired FROM unnest(ARRAY['lease-b', 'Lease-b', ' lease-b', 'lease-b ']) AS name, lock_try(name, ttl => '1h');

-- A token is a random UUID (version 4).
SELECT substr(token::text, 15, 1) AS version, substr(token::text, 20, 1) IN ('8', '9', 'a', 'b') AS variant FROM lock_try('lease-7');

-- Names and order of the arguments are the contract; all are VOLATILE, PARALLEL UNSAFE and not STRICT.
SELECT oid::regprocedure AS function, array_to_string(proargnames, ', ') AS arguments, provolatile, proparallel, proisstrict
FROM pg_proc WHERE proname LIKE 'lock\_%' AND pronamespace = 'public'::regnamespace ORDER BY proname COLLATE "C";
