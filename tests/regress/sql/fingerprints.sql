-- A key belongs to the request whose fingerprint it was first used with: another one is a mismatch
-- in every state of the key. A NULL on either side is not compared.
SET ROLE app;
CREATE TEMP TABLE stored (s bytea, name text);
INSERT INTO stored VALUES (NULL, 'none'), ('\x01', 'one');
CREATE TEMP TABLE given (g bytea);
INSERT INTO given VALUES (NULL), ('\x01'), ('\x02'), ('');

-- The open claim of this transaction.
BEGIN;
SELECT name, status FROM stored, idem_begin('fp-open-' || name, s);
SELECT s AS stored, g AS given, status FROM stored, given, idem_begin('fp-open-' || name, g) ORDER BY s NULLS FIRST, g NULLS FIRST;
ROLLBACK;

-- The same of a claim on a lease.
BEGIN;
SELECT name, status FROM stored, idem_begin('fp-own-' || name, s, lease => '1h');
SELECT s AS stored, g AS given, status FROM stored, given, idem_begin('fp-own-' || name, g, lease => '1h') ORDER BY s NULLS FIRST, g NULLS FIRST;
ROLLBACK;

-- A live claim of another transaction, on a lease.
SELECT name, status FROM stored, idem_begin('fp-live-' || name, s, lease => '1h');
SELECT s AS stored, g AS given, status FROM stored, given, idem_begin('fp-live-' || name, g) ORDER BY s NULLS FIRST, g NULLS FIRST;
SELECT s AS stored, g AS given, status FROM stored, given, idem_begin('fp-live-' || name, g, lease => '1h', wait => '1ms') ORDER BY s NULLS FIRST, g NULLS FIRST;

-- A lease that is over: a takeover only by the same request. Each pair has a key of its own, because
-- a takeover changes the record.
SELECT count(*) FROM stored, given, idem_begin(format('fp-over-%s-%s', name, g), s, lease => '1us');
SELECT pg_sleep(0.01);
SELECT s AS stored, g AS given, status, attempt
FROM stored, given, idem_begin(format('fp-over-%s-%s', name, g), g, lease => '1h') ORDER BY s NULLS FIRST, g NULLS FIRST;
-- A takeover without a fingerprint goes on with the stored one; one with a fingerprint brings it in.
SELECT status FROM idem_begin('fp-over-one-', '\x02');
SELECT status FROM idem_begin('fp-over-one-', '\x01');
SELECT status FROM idem_begin('fp-over-none-\x01', '\x02');
SELECT status FROM idem_begin('fp-over-none-\x01', '\x01');
-- The same for a takeover without a lease.
SELECT count(*) FROM stored, idem_begin('fp-over-tx-' || name, s, lease => '1us');
SELECT pg_sleep(0.01);
BEGIN;
SELECT status FROM idem_begin('fp-over-tx-one', '\x02');
SELECT status FROM idem_begin('fp-over-tx-one');
SELECT idem_complete('fp-over-tx-one', '1');
SELECT status FROM idem_begin('fp-over-tx-none', '\x01');
SELECT idem_complete('fp-over-tx-none', '1');
COMMIT;
SELECT name, g AS given, status FROM stored, given, idem_begin('fp-over-tx-' || name, g) ORDER BY name, g NULLS FIRST;

-- Completed.
BEGIN;
SELECT name, status FROM stored, idem_begin('fp-done-' || name, s);
SELECT count(*) FROM stored, idem_complete('fp-done-' || name, '1');
COMMIT;
SELECT s AS stored, g AS given, status, result FROM stored, given, idem_begin('fp-done-' || name, g) ORDER BY s NULLS FIRST, g NULLS FIRST;
-- Completed from a lease.
CREATE TEMP TABLE leased AS SELECT name, token FROM stored, idem_begin('fp-lease-' || name, s, lease => '1h');
SELECT count(*) FROM leased, idem_complete('fp-lease-' || name, '1', token => token);
SELECT s AS stored, g AS given, status, result FROM stored, given, idem_begin('fp-lease-' || name, g) ORDER BY s NULLS FIRST, g NULLS FIRST;

-- A record past its ttl counts as absent, whatever its fingerprint was.
BEGIN;
SELECT count(*) FROM stored, given, idem_begin(format('fp-gone-%s-%s', name, g), s);
SELECT count(*) FROM stored, given, idem_complete(format('fp-gone-%s-%s', name, g), '1', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
SELECT s AS stored, g AS given, status, attempt
FROM stored, given, idem_begin(format('fp-gone-%s-%s', name, g), g, lease => '1h') ORDER BY s NULLS FIRST, g NULLS FIRST;
-- The new claim has the new fingerprint, not the expired record's.
SELECT status FROM idem_begin('fp-gone-one-\x02', '\x01');
SELECT status FROM idem_begin('fp-gone-one-', '\x02');

-- Long fingerprints count to the last byte.
SELECT status FROM idem_begin('fp-long', decode(repeat('ab', 100000), 'hex'), lease => '1h');
SELECT status FROM idem_begin('fp-long', decode(repeat('ab', 100000), 'hex'));
SELECT status FROM idem_begin('fp-long', decode(repeat('ab', 99999) || 'ac', 'hex'));

-- Stored hashed, never as given (looked at as an administrator).
RESET ROLE;
SELECT key, fingerprint = sha256('\x01') AS hashed FROM idem_claims WHERE key IN ('fp-live-none', 'fp-live-one') ORDER BY key COLLATE "C";
SELECT key, fingerprint = sha256('\x01') AS hashed FROM idem_segment_0 WHERE key IN ('fp-done-none', 'fp-done-one') ORDER BY key COLLATE "C";
