-- idem_overview and lock_leases: what the tables tell those who look after them, without tokens and contents.
\set database :DBNAME
CREATE DATABASE regress_idem_overview;
\c regress_idem_overview
CREATE EXTENSION idem;
CREATE ROLE regress_idem_overview;
SELECT idem_grant_admin('regress_idem_overview');

-- Nothing yet.
SET ROLE regress_idem_overview;
SELECT in_progress, oldest_in_progress, abandoned, oldest_abandoned, locks_held, completed_estimate, purgeable_estimate, oldest_purgeable
FROM idem_overview;
SELECT * FROM lock_leases;
SELECT total_bytes AS bytes FROM idem_overview \gset empty_
RESET ROLE;

-- Two claims in progress, the first taken over once; two abandoned; one completed; one of a transaction.
SELECT status FROM idem_begin('overview-1', lease => '1us');
SELECT clock_timestamp() AS first_claimed \gset
SELECT status, attempt FROM idem_begin('overview-1', lease => '1h');
SELECT status FROM idem_begin('overview-2', lease => '1h');
SELECT status FROM idem_begin('overview-3', lease => '1us');
SELECT clock_timestamp() AS first_abandoned \gset
SELECT status FROM idem_begin('overview-4', lease => '1us');
SELECT idem_once('overview-5');
SELECT pg_stat_force_next_flush();
SELECT completed_estimate, purgeable_estimate FROM idem_overview;
BEGIN;
SELECT status FROM idem_begin('overview-6');
SET LOCAL ROLE regress_idem_overview;
SELECT in_progress, oldest_in_progress < :'first_claimed' AS oldest_was_first, abandoned,
    oldest_abandoned BETWEEN :'first_claimed' AND :'first_abandoned' AS oldest_was_third, locks_held
FROM idem_overview;
-- The server's clock, not the transaction's: what runs out meanwhile has run out.
RESET ROLE;
SELECT status FROM idem_begin('overview-7', lease => '1us');
SET LOCAL ROLE regress_idem_overview;
SELECT in_progress, abandoned FROM idem_overview;
RESET ROLE;
ROLLBACK;

-- A lock that is held, one whose lease is over, one that was unlocked, one of a transaction.
SELECT acquired FROM lock_try('overview-held', ttl => '1h', scope => 'tenant', holder => 'host-1');
BEGIN;
SELECT acquired FROM lock_try('overview-expired', ttl => '1us', holder => 'host-2');
SET LOCAL ROLE regress_idem_overview;
SELECT name, state FROM lock_leases WHERE name = 'overview-expired';
RESET ROLE;
COMMIT;
SELECT token FROM lock_try('overview-free', holder => 'host-3') \gset
SELECT lock_unlock('overview-free', :'token');
BEGIN;
SELECT lock_try_xact('overview-transaction');
SET LOCAL ROLE regress_idem_overview;
SELECT scope, name, state, holder, fence > 0 AS fence, acquired_at <= clock_timestamp() AS acquired, expires_at > acquired_at AS expires
FROM lock_leases ORDER BY name;
SELECT locks_held FROM idem_overview;
COMMIT;

-- What a purge would remove: what has expired in idem_long, and the records of segments that are over. Here the segment is put
-- back, because nobody waits for its end.
SELECT idem_once('overview-8', ttl => '300 days');
SELECT pg_stat_force_next_flush();
SELECT completed_estimate, purgeable_estimate, oldest_purgeable FROM idem_overview;
UPDATE idem_long SET expires_at = timestamptz '2001-02-03 04:05:06Z';
SELECT purgeable_estimate, oldest_purgeable = '2001-02-03 04:05:06Z' AS oldest FROM idem_overview;
UPDATE idem_ring SET bound = timestamptz '2001-01-01 00:00:00Z';
SELECT purgeable_estimate, oldest_purgeable = '2001-01-01 00:00:00Z' AS oldest FROM idem_overview;
SELECT idem_purge();
SELECT pg_stat_force_next_flush();
SELECT completed_estimate, purgeable_estimate, oldest_purgeable FROM idem_overview;

-- All tables, indexes and TOAST.
SELECT total_bytes > :empty_bytes AS grows, total_bytes = (
    SELECT sum(pg_relation_size(c.oid, fork)) FROM pg_class AS c, unnest(ARRAY['main', 'fsm', 'vm', 'init']) AS fork
    WHERE c.relname LIKE 'idem\_%' AND c.relkind IN ('r', 'i')
        OR c.oid IN (SELECT unnest(ARRAY[t.oid, i.indexrelid]) FROM pg_class AS t JOIN pg_index AS i ON i.indrelid = t.oid
            WHERE t.oid IN (SELECT reltoastrelid FROM pg_class WHERE relname LIKE 'idem\_%'))) AS whole
FROM idem_overview;

-- No column of a view shows what only a holder may know.
SELECT attrelid::regclass, attname FROM pg_attribute
WHERE attrelid IN (SELECT oid FROM pg_class WHERE relkind = 'v' AND relname ~ '^(idem|lock)_')
    AND attname ~ 'token|result$|body|fingerprint|checkpoint|digest';
-- They cannot be written through.
\set VERBOSITY terse
SET ROLE regress_idem_overview;
DELETE FROM lock_leases;
UPDATE lock_leases SET fence = 0;

\c :database
DROP DATABASE regress_idem_overview;
DROP ROLE regress_idem_overview;
