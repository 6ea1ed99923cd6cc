-- idem_purge: arguments, what it returns, what it removes and what it leaves. Races and crashes: harness/tests/purge.rs.
-- It changes the ring for the whole database: one of its own.
CREATE DATABASE idem_purge;
\c idem_purge
CREATE EXTENSION idem;
SELECT idem_grant('app');
\set VERBOSITY verbose
SELECT idem_purge(0);
SELECT idem_purge(-1);
SELECT idem_purge(NULL);
BEGIN READ ONLY;
SELECT idem_purge();
ROLLBACK;
\set VERBOSITY default
-- Administration only.
SET ROLE app;
SELECT idem_purge();
SELECT * FROM idem_records;
RESET ROLE;
-- Nothing there, nothing to do; the ring is young.
SELECT idem_purge();
SELECT turn, bound - started_at AS lasts FROM idem_ring;
-- Half of the ttl after a turn began, the next one begins.
SET idem.ttl = '1 h';
UPDATE idem_ring SET started_at = started_at - interval '29 min';
SELECT idem_purge(), max(turn) FROM idem_ring;
UPDATE idem_ring SET started_at = started_at - interval '1 min';
SELECT idem_purge();
SELECT turn, bound - started_at AS lasts FROM idem_ring WHERE turn > 0;
-- Records that expired are reclaimed, wherever they are; others stay.
BEGIN;
SELECT status FROM idem_begin('by default');
SELECT idem_complete('by default', '{"n": 1}');
SELECT status FROM idem_begin('short');
SELECT idem_complete('short', ttl => '1 us');
SELECT status FROM idem_begin('long');
SELECT idem_complete('long', '"ü"', body => '\x00ff', ttl => '100 days');
SELECT status FROM idem_begin('leased', owner => 'somebody', lease => '1 h');
SELECT status FROM idem_begin('abandoned', lease => '1 us');
COMMIT;
SELECT scope, key, state, owner, attempt, completed_at IS NOT NULL AS done, result_size FROM idem_records ORDER BY key;
SELECT 'idem_segment_1' AS home, key FROM idem_segment_1 UNION ALL SELECT 'idem_long', key FROM idem_long UNION ALL SELECT 'idem_claims', key FROM idem_claims ORDER BY 1, 2;
-- A segment in which something counts is left alone until it is over.
SELECT idem_purge();
-- An hour later.
UPDATE idem_segment_1 SET expires_at = expires_at - interval '1 h';
UPDATE idem_claims SET expires_at = expires_at - interval '1 h';
SELECT idem_purge();
SELECT key, state FROM idem_records ORDER BY key;
SELECT status, attempt FROM idem_begin('leased', lease => '1 h', owner => 'somebody');
-- Years later.
UPDATE idem_long SET expires_at = expires_at - interval '10 years';
SELECT idem_purge(), count(*) FILTER (WHERE state = 'expired') FROM idem_records;
SELECT key, state FROM idem_records ORDER BY key;
-- A lower ttl has the next turn begin sooner.
UPDATE idem_ring SET started_at = started_at - interval '25 min' WHERE turn = 1;
SELECT idem_purge();
SELECT max(turn) FROM idem_ring;
SET idem.ttl = '50 min';
SELECT idem_purge();
SELECT turn, bound - started_at AS lasts FROM idem_ring WHERE turn > 1;
-- So do records that would outlive the bound, once the ttl is raised.
SET idem.ttl = '2 h';
SELECT idem_purge();
SELECT turn, bound - started_at AS lasts FROM idem_ring WHERE turn > 2;
-- A ring that is full goes on when there is room again; meanwhile records that do not fit go elsewhere.
SET idem.ttl = '4 h';
BEGIN;
SELECT status FROM idem_begin('in the way', lease => '1 h');
SELECT idem_complete('in the way', ttl => '1 h');
COMMIT;
SELECT format('INSERT INTO idem_segment_%s SELECT * FROM idem_segment_3', segment) FROM unnest('{0,1,2,4,5,6,7}'::int[]) AS segment \gexec
SELECT idem_purge();
BEGIN;
SELECT status FROM idem_begin('elsewhere');
SELECT idem_complete('elsewhere', ttl => '4 h');
COMMIT;
SELECT max(turn), (SELECT key FROM idem_long) FROM idem_ring;
DELETE FROM idem_segment_4;
SELECT idem_purge();
SELECT max(turn) FROM idem_ring;
SELECT format('DELETE FROM idem_segment_%s', segment) FROM unnest('{0,1,2,5,6,7}'::int[]) AS segment \gexec
-- Without any turn, everything has a home, and the next purge makes one.
TRUNCATE idem_ring;
ALTER TABLE idem_ring SET (fillfactor = 90);
BEGIN;
SELECT status FROM idem_begin('no ring');
SELECT idem_complete('no ring');
SELECT status FROM idem_begin('in the way');
COMMIT;
SELECT key FROM idem_long ORDER BY key;
SELECT idem_purge();
SELECT turn FROM idem_ring;
SELECT status FROM idem_begin('no ring');
\c idem_regress
DROP DATABASE idem_purge;
