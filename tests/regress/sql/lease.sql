-- A claim on a lease is a row at once and outlives its transaction: its token extends, completes or
-- releases it from any transaction, and the end of the lease only permits a takeover.
SET ROLE app;

-- Written at once, in full from now: also late in a long transaction.
BEGIN;
SELECT pg_sleep(0.1);
SELECT clock_timestamp() AS before \gset
SELECT expires_at BETWEEN :'before'::timestamptz + '1h' AND clock_timestamp() + '1h' AS full_lease
FROM idem_begin('lease-1', lease => '1h');
COMMIT;
SELECT state, attempt, created_at <= clock_timestamp() AS created, completed_at, result, body FROM idem_get('lease-1');

-- Extend from elsewhere: the claim's own lease again, or another one, which it repeats from then on.
SELECT token AS held, expires_at AS ends FROM idem_begin('lease-2', lease => '1h') \gset
SELECT idem_extend('lease-2', :'held') AS extended \gset
SELECT :'extended'::timestamptz > :'ends' AS later, :'extended'::timestamptz - clock_timestamp() BETWEEN '59 min' AND '1h' AS own_lease;
SELECT idem_extend('lease-2', :'held', lease => '2h') - clock_timestamp() BETWEEN '119 min' AND '2h' AS other_lease;
SELECT idem_extend('lease-2', :'held') - clock_timestamp() BETWEEN '119 min' AND '2h' AS repeated;
SELECT idem_extend('lease-2', :'held', lease => '10 min') - clock_timestamp() BETWEEN '9 min' AND '10 min' AS shorter;
SELECT attempt, expires_at - clock_timestamp() BETWEEN '9 min' AND '10 min' AS shorter FROM idem_get('lease-2');
-- Extend in the transaction that claims, without a token.
BEGIN;
SELECT status FROM idem_begin('lease-3', lease => '1h');
SELECT idem_extend('lease-3', lease => '2h') - clock_timestamp() BETWEEN '119 min' AND '2h' AS extended;
COMMIT;

-- Complete with the token, from another transaction; in its own one without it.
SELECT idem_complete('lease-2', '{"charge": "ch_1"}', '\x0001', token => :'held');
SELECT state, attempt, result, body FROM idem_get('lease-2');
BEGIN;
SELECT status FROM idem_begin('lease-4', lease => '1h');
SELECT idem_complete('lease-4', '4');
COMMIT;
SELECT state, result FROM idem_get('lease-4');

-- Release with the token: free at once, and starts again at attempt 1.
SELECT token AS held FROM idem_begin('lease-5', lease => '1h') \gset
SELECT idem_release('lease-5', :'held');
SELECT idem_release('lease-5', :'held') AS again;
SELECT token AS second FROM idem_begin('lease-5', lease => '1h') \gset
SELECT attempt FROM idem_get('lease-5');
-- The old token holds nothing of the new claim.
SELECT idem_release('lease-5', :'held');
SELECT idem_extend('lease-5', :'held');
SELECT idem_complete('lease-5', token => :'held');
SELECT state, attempt FROM idem_get('lease-5');

-- The lease is over: abandoned, until somebody takes over; attempt grows, the record's age stays.
SELECT token AS first FROM idem_begin('lease-6', lease => '1us') \gset
SELECT created_at AS created FROM idem_get('lease-6') \gset
SELECT pg_sleep(0.01);
SELECT state FROM idem_get('lease-6');
SELECT token AS second FROM idem_begin('lease-6', lease => '1us') \gset
SELECT pg_sleep(0.01);
SELECT status, attempt, token NOT IN (:'first', :'second') AS new_token, expires_at > clock_timestamp() AS live, token AS third
FROM idem_begin('lease-6', lease => '1h') \gset third_
SELECT :'third_status' AS status, :'third_attempt' AS attempt, :'third_new_token' AS new_token, :'third_live' AS live;
SELECT state, attempt, created_at = :'created' AS age_kept FROM idem_get('lease-6');
-- Taken over: nothing that the earlier holders do changes it.
SELECT idem_complete('lease-6', '"stale"', token => :'first');
SELECT idem_extend('lease-6', :'second');
SELECT idem_release('lease-6', :'second');
SELECT state, attempt FROM idem_get('lease-6');
SELECT idem_complete('lease-6', '"third"', token => :'third_third');
-- Finished by another claim.
SELECT idem_complete('lease-6', '"stale"', token => :'first');
SELECT idem_extend('lease-6', :'first');
SELECT idem_release('lease-6', :'first');
-- Finished by this one.
SELECT idem_extend('lease-6', :'third_third');
SELECT idem_release('lease-6', :'third_third');
SELECT result FROM idem_get('lease-6');
-- Nothing is stored.
SELECT idem_complete('lease-nothing', token => :'first');
SELECT idem_extend('lease-nothing', :'first');
-- No token, and no claim of this transaction: of an earlier one of the same session neither.
SELECT idem_complete('lease-1');
SELECT idem_extend('lease-1');
SELECT idem_release('lease-1');

\set VERBOSITY sqlstate
-- Late is not lost: as long as nobody took over, the token still completes, extends and releases.
SELECT token AS late FROM idem_begin('lease-7', lease => '1us') \gset
SELECT pg_sleep(0.01);
SELECT state FROM idem_get('lease-7');
SELECT idem_extend('lease-7', :'late', lease => '1h') > clock_timestamp() AS extended;
SELECT status FROM idem_begin('lease-7');
SELECT token AS late FROM idem_begin('lease-8', lease => '1us') \gset
SELECT pg_sleep(0.01);
SELECT idem_complete('lease-8', '"late"', token => :'late');
SELECT state, result, attempt FROM idem_get('lease-8');
SELECT token AS late FROM idem_begin('lease-9', lease => '1us') \gset
SELECT pg_sleep(0.01);
SELECT idem_release('lease-9', :'late');

-- A takeover without a lease: the row goes when the transaction completes or releases the claim.
SELECT token AS stale FROM idem_begin('lease-10', lease => '1us') \gset
SELECT pg_sleep(0.01);
BEGIN;
SELECT status, attempt, expires_at FROM idem_begin('lease-10');
-- In this transaction the old token holds nothing.
SAVEPOINT s;
SELECT idem_complete('lease-10', '"stale"', token => :'stale');
ROLLBACK TO s;
SELECT idem_extend('lease-10', :'stale');
ROLLBACK TO s;
SELECT idem_release('lease-10', :'stale');
-- Its own claim has no lease to extend.
SELECT idem_extend('lease-10');
ROLLBACK TO s;
SELECT idem_complete('lease-10', '"second"');
COMMIT;
SELECT state, attempt, result FROM idem_get('lease-10');
SELECT token AS stale FROM idem_begin('lease-11', lease => '1us') \gset
SELECT pg_sleep(0.01);
BEGIN;
SELECT status, attempt FROM idem_begin('lease-11');
SELECT idem_release('lease-11');
COMMIT;
SELECT count(*) FROM idem_get('lease-11');
SELECT idem_complete('lease-11', token => :'stale');
-- Rolled back, it did not happen: the old claim is still there, and late is not lost.
SELECT token AS stale FROM idem_begin('lease-12', lease => '1us') \gset
SELECT pg_sleep(0.01);
BEGIN;
SELECT status, attempt FROM idem_begin('lease-12');
ROLLBACK;
SELECT idem_complete('lease-12', '"late"', token => :'stale');

-- Repeated in the holder's transaction: the same claim, its end as it is now.
BEGIN;
SELECT token AS held, expires_at AS ends FROM idem_begin('lease-13', lease => '1h') \gset
SELECT status, attempt, token = :'held' AS same_token, expires_at = :'ends' AS same_end FROM idem_begin('lease-13', lease => '1h');
SELECT idem_extend('lease-13', lease => '3h') AS extended \gset
SELECT status, token = :'held' AS same_token, expires_at = :'extended' AS extended FROM idem_begin('lease-13', lease => '60 min');
ROLLBACK;

-- With another lease than before, or none, or one where there was none: 22023 with a hint.
\set VERBOSITY default
BEGIN;
SELECT status FROM idem_begin('lease-14', lease => '1h');
SAVEPOINT s;
SELECT idem_begin('lease-14', lease => '2h');
ROLLBACK TO s;
\set VERBOSITY sqlstate
SELECT idem_begin('lease-14');
ROLLBACK TO s;
SELECT status FROM idem_begin('lease-15');
SAVEPOINT s;
SELECT idem_begin('lease-15', lease => '1h');
ROLLBACK TO s;
-- A claim without a lease has none to extend: 22023 with a hint.
\set VERBOSITY default
SELECT idem_extend('lease-15', lease => '1h');
ROLLBACK;
\set VERBOSITY sqlstate

-- In any other transaction, of the same session too, the key is busy.
SELECT status FROM idem_begin('lease-1', lease => '1h');

-- A short lease is a lease to its last moment.
SELECT status FROM idem_begin('lease-18', lease => '15 s');
SELECT status, retry_after BETWEEN '1 s' AND '15 s' AS retry_after FROM idem_begin('lease-18', lease => '1h');

-- A wait for a lease ends with the lease, or with the wait.
SELECT status FROM idem_begin('lease-16', lease => '100 ms');
SELECT status, attempt FROM idem_begin('lease-16', lease => '1h', wait => '1 min');
SELECT status, attempt FROM idem_begin('lease-16', lease => '1h', wait => '50 ms');
-- The setting idem.wait in place of the argument.
SELECT status FROM idem_begin('lease-17', lease => '100 ms');
SET idem.wait = '1min';
SELECT status, attempt FROM idem_begin('lease-17', lease => '1h');
SET idem.wait = '50ms';
SELECT status FROM idem_begin('lease-17', lease => '1h');
-- The user's own timeouts count while waiting.
RESET idem.wait;
SET lock_timeout = '50ms';
SELECT status FROM idem_begin('lease-17', wait => '1 min');
RESET lock_timeout;
SET statement_timeout = '50ms';
SELECT status FROM idem_begin('lease-17', wait => '1 min');
RESET statement_timeout;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();

-- One physical row per key, whatever happened to it (looked at as an administrator).
RESET ROLE;
SELECT key, count(*) FROM (SELECT key FROM idem_claims UNION ALL SELECT key FROM idem_segment_0) AS rows
WHERE key LIKE 'lease-%' GROUP BY key HAVING count(*) > 1;
SELECT key, attempt FROM idem_claims WHERE key LIKE 'lease-%' ORDER BY length(key), key COLLATE "C";
