-- A takeover grows the attempt and gets the checkpoint; takeover => false reports abandoned and changes nothing.
SET ROLE app;
SET idem.scope = 'test_recovery';
SELECT token, attempt, checkpoint IS NULL AS no_checkpoint FROM idem_begin('job', lease => '1 hour') \gset
SELECT :attempt AS attempt, :'no_checkpoint' AS no_checkpoint;
SELECT idem_checkpoint('job', '{"step": 1}', :'token');
SELECT checkpoint, state FROM idem_get('job');
-- Others see that it is in progress, not how far.
SELECT status, checkpoint FROM idem_begin('job');
-- It prolongs the lease as idem_extend does: by its own, or by another from then on.
SELECT expires_at AS before FROM idem_get('job') \gset
SELECT idem_checkpoint('job', '{"step": 2}', token => :'token', lease => '2 hours');
SELECT expires_at > :'before'::timestamptz + '30 min' AS prolonged, checkpoint FROM idem_get('job');
SELECT idem_extend('job', :'token') > clock_timestamp() + '110 min' AS its_own_again;
-- An extension keeps the checkpoint.
SELECT checkpoint FROM idem_get('job');

-- The worker dies: its lease runs out.
SELECT idem_checkpoint('job', '{"step": 3}', :'token', '1 microsecond');
SELECT state, attempt, checkpoint FROM idem_get('job');
SELECT status, attempt, checkpoint, token, retry_after, expires_at < clock_timestamp() AS over FROM idem_begin('job', takeover => false);
SELECT status, attempt FROM idem_begin('job', takeover => false, lease => '1 hour');
SELECT state, attempt FROM idem_get('job');

-- The next attempt, in a transaction without a lease, rolled back: nothing has changed.
BEGIN;
SELECT status, attempt, checkpoint FROM idem_begin('job');
SELECT status, attempt, checkpoint FROM idem_begin('job');
ROLLBACK;
SELECT state, attempt, checkpoint FROM idem_get('job');

-- The next attempt, on a lease
SELECT token AS second, attempt, checkpoint FROM idem_begin('job', lease => '1 hour') \gset
SELECT :attempt AS attempt, :'checkpoint' AS checkpoint;
SELECT idem_checkpoint('job', '{"step": 4}', :'token');
\echo :LAST_ERROR_SQLSTATE
SELECT checkpoint FROM idem_get('job');
-- Completed: the attempt stays with the record, the checkpoint goes.
SELECT idem_complete('job', token => :'second');
SELECT state, attempt, checkpoint FROM idem_get('job');
SELECT idem_checkpoint('job', '1', :'second');
\echo :LAST_ERROR_SQLSTATE

-- A release, and the next starts again at 1 without a checkpoint.
SELECT token FROM idem_begin('other', lease => '1 hour') \gset
SELECT idem_checkpoint('other', '1', :'token', '1 microsecond');
SELECT token, attempt FROM idem_begin('other', lease => '1 hour') \gset
SELECT :attempt AS attempt, idem_release('other', :'token');
SELECT status, attempt, checkpoint FROM idem_begin('other', lease => '1 hour');

-- A takeover by a transaction that releases: gone, too.
SELECT token FROM idem_begin('third', lease => '1 microsecond') \gset
BEGIN;
SELECT status, attempt FROM idem_begin('third');
SELECT idem_release('third');
COMMIT;
SELECT count(*) FROM idem_get('third');

-- takeover => false with nothing to take over is an ordinary begin.
SELECT status, attempt FROM idem_begin('fresh', takeover => false, lease => '1 hour');
SELECT status FROM idem_begin('fresh', takeover => false);

-- A claim without a lease has nothing to recover.
BEGIN;
SELECT status FROM idem_begin('transaction');
SELECT idem_checkpoint('transaction', '1');
ROLLBACK;
SELECT idem_checkpoint('transaction', '1');
\set VERBOSITY sqlstate
SELECT idem_checkpoint('transaction', NULL);
SELECT idem_checkpoint(NULL, '1');
SELECT idem_checkpoint('fresh', '1', gen_random_uuid());
SELECT idem_checkpoint('fresh', '1', lease => '0');
BEGIN READ ONLY;
SELECT idem_checkpoint('fresh', '1');
ROLLBACK;
