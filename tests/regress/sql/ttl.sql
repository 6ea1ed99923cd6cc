-- A completed record counts for its ttl; past it, it behaves as if it were absent, purged or not.
-- There is never more than one row under a key: reusing an expired key removes the old one.
SET ROLE app;
\set VERBOSITY sqlstate

-- By default 24 hours; the setting idem.ttl; the argument. A month is 30 days.
BEGIN;
SELECT count(*) FROM generate_series(1, 5) AS n, idem_begin('ttl-' || n);
SHOW idem.ttl;
SELECT idem_complete('ttl-1');
SET LOCAL idem.ttl = '90s';
SELECT idem_complete('ttl-2');
SELECT idem_complete('ttl-3', ttl => '1 month');
SELECT idem_complete('ttl-4', ttl => '3650 days');
SELECT idem_complete('ttl-5', ttl => '1us');
COMMIT;
SELECT key, expires_at - completed_at AS ttl FROM generate_series(1, 5) AS n, idem_get('ttl-' || n);
-- From completion, not from the start of the transaction.
BEGIN;
SELECT status FROM idem_begin('ttl-6');
SELECT pg_sleep(0.05);
SELECT idem_complete('ttl-6', ttl => '1h');
SELECT completed_at - now() >= '50 ms' AS after_the_start, expires_at - completed_at AS ttl FROM idem_get('ttl-6');
COMMIT;

-- Expired: absent for idem_get, release, extend; begin claims it as the first attempt.
SELECT token AS held FROM idem_begin('ttl-7', lease => '1h') \gset
SELECT idem_complete('ttl-7', '"old"', token => :'held', ttl => '1s');
SELECT status, result FROM idem_begin('ttl-7');
SELECT pg_sleep(1.05);
SELECT count(*) FROM idem_get('ttl-7');
SELECT idem_release('ttl-7', :'held');
SELECT idem_extend('ttl-7', :'held');
SELECT idem_complete('ttl-7', token => '00000000-0000-4000-8000-000000000000');
SELECT token AS second, attempt FROM idem_begin('ttl-7', lease => '1h') \gset
SELECT :attempt AS attempt;
SELECT state, result FROM idem_get('ttl-7');
-- The token of the expired record holds nothing of the new claim.
SELECT idem_complete('ttl-7', '"stale"', token => :'held');
SELECT idem_complete('ttl-7', '"new"', token => :'second');
SELECT state, result FROM idem_get('ttl-7');

-- The attempt starts at 1 again even if the expired record had more.
SELECT token IS NOT NULL AS begun FROM idem_begin('ttl-8', lease => '1us');
SELECT pg_sleep(0.01);
BEGIN;
SELECT attempt FROM idem_begin('ttl-8');
SELECT idem_complete('ttl-8', '"old"', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
BEGIN;
SELECT attempt FROM idem_begin('ttl-8');
SELECT idem_complete('ttl-8', '"new"');
COMMIT;
SELECT result, attempt, created_at <= completed_at AND clock_timestamp() - created_at < '1 min' AS new_age FROM idem_get('ttl-8');

-- Reused within one transaction.
BEGIN;
SELECT status FROM idem_begin('ttl-9');
SELECT idem_complete('ttl-9', '"old"', ttl => '1us');
SELECT pg_sleep(0.01);
SELECT status, attempt FROM idem_begin('ttl-9');
SELECT idem_complete('ttl-9', '"new"');
COMMIT;
SELECT result FROM idem_get('ttl-9');

-- Reused, then rolled back: still expired, still one row.
BEGIN;
SELECT status FROM idem_begin('ttl-5');
SELECT idem_complete('ttl-5', '"rolled back"');
ROLLBACK;
SELECT count(*) FROM idem_get('ttl-5');
-- Reused on a lease, then released: no row at all.
BEGIN;
SELECT status FROM idem_begin('ttl-10');
SELECT idem_complete('ttl-10', '"old"', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
SELECT token AS held FROM idem_begin('ttl-10', lease => '1h') \gset
SELECT idem_release('ttl-10', :'held');
-- Reused ten times.
DO $$
BEGIN
    FOR n IN 1..10 LOOP
        IF (idem_begin('ttl-11')).status = 'acquired' THEN
            PERFORM idem_complete('ttl-11', to_jsonb(n), ttl => '1us');
        END IF;
        COMMIT;
        PERFORM pg_sleep(0.001);
    END LOOP;
END
$$;

-- Physical rows per key over both tables, as an administrator.
RESET ROLE;
SELECT key, count(*) FILTER (WHERE home = 'claims') AS claims, count(*) FILTER (WHERE home <> 'claims') AS completed
FROM (SELECT key, 'claims' AS home FROM idem_claims UNION ALL SELECT key, 'completed' FROM idem_segment_0 UNION ALL SELECT key, 'long' FROM idem_long) AS rows
WHERE key LIKE 'ttl-%' GROUP BY key ORDER BY length(key), key COLLATE "C";
SELECT key, result FROM idem_segment_0 WHERE key = 'ttl-11';
