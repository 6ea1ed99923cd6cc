-- Complete repeated with the token that completed the key changes nothing and succeeds, so that a
-- client that lost the answer can ask again. Any other token is refused.
SET ROLE app;

-- In the transaction that completed it: with the token, and without.
BEGIN;
SELECT token AS held FROM idem_begin('again-1') \gset
SELECT idem_complete('again-1', '"first"', '\x01');
SELECT idem_complete('again-1', '"second"', '\x02');
SELECT idem_complete('again-1', '"third"', token => :'held', ttl => '1us');
COMMIT;
SELECT result, body, expires_at AS ends FROM idem_get('again-1') \gset
SELECT :'result' AS result, :'body' AS body;

-- Afterwards, with the token.
SELECT idem_complete('again-1', '"fourth"', '\x04', token => :'held', ttl => '1us');
SELECT result, body, expires_at = :'ends' AS same_end FROM idem_get('again-1');
-- Without it: this transaction holds no claim.
SELECT idem_complete('again-1', '"fifth"');
SELECT result FROM idem_get('again-1');

-- The same for a claim on a lease.
SELECT token AS leased FROM idem_begin('again-2', lease => '1h') \gset
SELECT idem_complete('again-2', '"first"', token => :'leased');
SELECT idem_complete('again-2', '"second"', token => :'leased');
BEGIN;
SELECT idem_complete('again-2', '"third"', token => :'leased');
SELECT idem_complete('again-2', '"fourth"', token => :'leased');
COMMIT;
SELECT result FROM idem_get('again-2');

\set VERBOSITY sqlstate
-- The token of another key, a token that never was, an unknown key: ID003.
SELECT idem_complete('again-2', '"other"', token => :'held');
SELECT idem_complete('again-2', '"other"', token => '00000000-0000-4000-8000-000000000000');
SELECT idem_complete('again-unknown', '"other"', token => :'leased');
SELECT idem_complete('again-unknown', '"other"');
SELECT result FROM idem_get('again-2');
SELECT count(*) FROM idem_get('again-unknown');
-- In the transaction that completed it as well.
BEGIN;
SELECT status FROM idem_begin('again-3');
SELECT idem_complete('again-3', '3');
SAVEPOINT s;
SELECT idem_complete('again-3', '"other"', token => :'held');
ROLLBACK TO s;
COMMIT;
SELECT result FROM idem_get('again-3');

-- Limits are checked before it is looked whether there is anything to do.
SELECT idem_complete('again-1', ttl => '0', token => :'held');

-- A repetition leaves nothing locked.
BEGIN;
SELECT idem_complete('again-2', '"fifth"', token => :'leased');
SELECT count(*) AS locks FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation::regclass::text LIKE '%idem%');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;

-- After a completion that was rolled back the token holds the claim as before.
SELECT token AS leased FROM idem_begin('again-4', lease => '1h') \gset
BEGIN;
SELECT idem_complete('again-4', '"rolled back"', token => :'leased');
ROLLBACK;
SELECT state FROM idem_get('again-4');
SELECT idem_complete('again-4', '"kept"', token => :'leased');
SELECT state, result FROM idem_get('again-4');
-- One without a lease went with its transaction.
BEGIN;
SELECT token AS held FROM idem_begin('again-5') \gset
SELECT idem_complete('again-5', '"rolled back"');
ROLLBACK;
SELECT idem_complete('again-5', '"other"', token => :'held');

-- One row each (looked at as an administrator).
RESET ROLE;
SELECT key, count(*) FROM idem_segment_0 WHERE key LIKE 'again-%' GROUP BY key ORDER BY key COLLATE "C";
SELECT count(*) FROM idem_claims WHERE key LIKE 'again-%';
-- What an administrator removed is not there to be completed again: neither in the same transaction
-- nor later does complete say that all is well.
BEGIN;
SELECT token AS held FROM idem_begin('again-6') \gset
SELECT idem_complete('again-6', '6');
SELECT idem_forget('again-6');
SAVEPOINT s;
SELECT idem_complete('again-6', '6', token => :'held');
ROLLBACK TO s;
COMMIT;
SELECT idem_complete('again-6', '6', token => :'held');
