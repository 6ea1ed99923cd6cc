-- Release gives a claim up and says whether the caller held it. It never raises for a claim that is
-- not the caller's, and never touches a completed record: safe to call always.
SET ROLE app;
\set nobody '''00000000-0000-4000-8000-000000000000'''
\set VERBOSITY sqlstate

-- Nothing there.
SELECT idem_release('release-1') AS without_token, idem_release('release-1', :nobody) AS with_token;

-- The open claim of this transaction: with its token, without, and with another's.
BEGIN;
SELECT token AS held FROM idem_begin('release-1') \gset
SELECT idem_release('release-1', :nobody) AS other_token;
SELECT idem_release('release-1', :'held') AS own_token;
SELECT idem_release('release-1', :'held') AS own_token_again, idem_release('release-1') AS without_token;
-- Released: it cannot be completed any more, but it can be claimed anew.
SAVEPOINT s;
SELECT idem_complete('release-1', '1');
ROLLBACK TO s;
SELECT idem_complete('release-1', '1', token => :'held');
ROLLBACK TO s;
SELECT status, attempt, token <> :'held' AS new_token FROM idem_begin('release-1');
SELECT idem_release('release-1', :'held') AS old_token;
SELECT idem_release('release-1') AS without_token;
COMMIT;
SELECT count(*) FROM idem_get('release-1');

-- Released and claimed again with a lease in the same transaction.
BEGIN;
SELECT status FROM idem_begin('release-2');
SELECT idem_release('release-2');
SELECT status FROM idem_begin('release-2', lease => '1h');
COMMIT;
SELECT state, attempt FROM idem_get('release-2');

-- A claim on a lease: only its token, from any transaction.
SELECT token AS held FROM idem_begin('release-3', lease => '1h') \gset
SELECT idem_release('release-3') AS without_token;
SELECT idem_release('release-3', :nobody) AS other_token;
SELECT state FROM idem_get('release-3');
BEGIN;
SELECT idem_release('release-3', :'held') AS own_token;
SELECT count(*) FROM idem_get('release-3');
ROLLBACK;
-- It counts from its commit.
SELECT state FROM idem_get('release-3');
SELECT idem_release('release-3', :'held') AS own_token;
SELECT idem_release('release-3', :'held') AS own_token_again;
SELECT count(*) FROM idem_get('release-3');
-- In its own transaction without the token.
BEGIN;
SELECT status FROM idem_begin('release-4', lease => '1h');
SELECT idem_release('release-4');
COMMIT;
SELECT count(*) FROM idem_get('release-4');
-- A lease that is over is released all the same, by its token only.
SELECT token AS held FROM idem_begin('release-5', lease => '1us') \gset
SELECT pg_sleep(0.01);
SELECT idem_release('release-5') AS without_token, idem_release('release-5', :nobody) AS other_token;
SELECT state FROM idem_get('release-5');
SELECT idem_release('release-5', :'held') AS own_token;

-- Completed: false, and the record stays. In the same transaction, and afterwards.
BEGIN;
SELECT token AS held FROM idem_begin('release-6') \gset
SELECT idem_complete('release-6', '6');
SELECT idem_release('release-6') AS without_token, idem_release('release-6', :'held') AS own_token;
COMMIT;
SELECT idem_release('release-6') AS without_token, idem_release('release-6', :'held') AS own_token, idem_release('release-6', :nobody) AS other_token;
SELECT state, result FROM idem_get('release-6');
SELECT token AS held FROM idem_begin('release-7', lease => '1h') \gset
SELECT idem_complete('release-7', '7', token => :'held');
SELECT idem_release('release-7', :'held') AS own_token;
SELECT state, result FROM idem_get('release-7');

-- Expired: false as well.
BEGIN;
SELECT token AS held FROM idem_begin('release-8') \gset
SELECT idem_complete('release-8', '8', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
SELECT idem_release('release-8') AS without_token, idem_release('release-8', :'held') AS own_token;
-- A claim on the expired key is released: the key is absent as before.
BEGIN;
SELECT status, attempt FROM idem_begin('release-8');
SELECT idem_release('release-8');
COMMIT;
SELECT count(*) FROM idem_get('release-8');

-- A release that found nothing leaves no lock, xid or row behind.
BEGIN;
SELECT idem_release('release-9', :nobody);
SELECT count(*) AS locks FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation::regclass::text LIKE '%idem%');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;

-- What is left of all this (looked at as an administrator).
RESET ROLE;
SELECT key FROM idem_claims WHERE key LIKE 'release-%' ORDER BY key;
SELECT key FROM idem_segment_0 WHERE key LIKE 'release-%' ORDER BY key;
