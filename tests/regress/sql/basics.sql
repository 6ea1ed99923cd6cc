-- A key is claimed, completed and replayed; idem_begin fills exactly the columns that the contract
-- names for the status it reports.
SET ROLE app;
\set row 'status, token IS NOT NULL AS token, result, body, attempt, checkpoint, retry_after IS NOT NULL AS retry_after, completed_at IS NOT NULL AS completed_at, expires_at IS NOT NULL AS expires_at'

-- acquired without a lease: token and attempt, no end.
BEGIN;
SELECT :row FROM idem_begin('basics-order', '\x01');
-- Repeated in the same transaction: the same claim.
SELECT token AS first FROM idem_begin('basics-order') \gset
SELECT status, token = :'first' AS same_token, attempt FROM idem_begin('basics-order', '\x01');
SELECT idem_complete('basics-order', '{"id": "ord_1"}', '\x00ff00');
-- From then on it is a replay, in this transaction as well.
SELECT :row FROM idem_begin('basics-order', '\x01');
COMMIT;

-- completed: what was given to complete and both times; no token and no attempt. As often as asked.
SELECT :row FROM idem_begin('basics-order', '\x01');
SELECT :row FROM idem_begin('basics-order', '\x01');
SELECT :row FROM idem_begin('basics-order', '\x01', lease => '30s');
SELECT expires_at - completed_at AS ttl, clock_timestamp() - completed_at < '1 minute' AS just_now
FROM idem_begin('basics-order');

-- mismatch: nothing of the record.
SELECT :row FROM idem_begin('basics-order', '\x02');

-- acquired with a lease: its end as well.
SELECT :row FROM idem_begin('basics-lease', '\x01', lease => '1h');
-- in_progress with a lease: its end, and how long until then.
SELECT :row FROM idem_begin('basics-lease', '\x01');
SELECT retry_after > '59 minutes' AND retry_after <= '1h' AS retry_after,
       expires_at - clock_timestamp() > '59 minutes' AND expires_at - clock_timestamp() <= '1h' AS expires_at
FROM idem_begin('basics-lease');
SELECT :row FROM idem_begin('basics-lease', '\x02');

-- All columns NULL may be a result too.
BEGIN;
SELECT status FROM idem_begin('basics-nothing');
SELECT idem_complete('basics-nothing');
COMMIT;
SELECT :row FROM idem_begin('basics-nothing');

-- (f()).* calls the function once per column: still one claim, still one row.
BEGIN;
SELECT status, token IS NOT NULL AS token, attempt FROM (SELECT (idem_begin('basics-star')).* OFFSET 0) AS answer;
SELECT idem_release('basics-star');
COMMIT;

-- A token is a random UUID (version 4), a new one for each claim.
SELECT token AS one FROM idem_begin('basics-token-1', lease => '1h') \gset
SELECT token AS two FROM idem_begin('basics-token-2', lease => '1h') \gset
SELECT substr(:'one', 15, 1) AS version, substr(:'one', 20, 1) IN ('8', '9', 'a', 'b') AS variant, :'one' <> :'two' AS differ;

-- A rolled back transaction leaves nothing: the key is free again.
BEGIN;
SELECT status FROM idem_begin('basics-rollback');
SELECT idem_complete('basics-rollback', '1');
ROLLBACK;
BEGIN;
SELECT status, attempt FROM idem_begin('basics-rollback');
ROLLBACK;

-- Several keys in one transaction, a statement for many rows.
BEGIN;
SELECT n, status FROM generate_series(1, 3) AS n, idem_begin('basics-many-' || n);
SELECT count(*) FROM generate_series(1, 3) AS n, idem_complete('basics-many-' || n, to_jsonb(n));
COMMIT;
SELECT n, status, result FROM generate_series(1, 4) AS n, idem_begin('basics-many-' || n, lease => '1h');

-- Positional and named arguments: names and order of the contract.
SELECT p.oid::regprocedure AS function, array_to_string(proargnames, ', ') AS arguments
FROM pg_proc AS p
WHERE proname IN ('idem_begin', 'idem_complete', 'idem_release', 'idem_extend', 'idem_get', 'idem_forget')
ORDER BY proname COLLATE "C";
-- All writers and idem_get are VOLATILE, PARALLEL UNSAFE and not STRICT.
SELECT proname
FROM pg_proc
WHERE proname IN ('idem_begin', 'idem_complete', 'idem_release', 'idem_extend', 'idem_get', 'idem_forget')
    AND NOT (provolatile = 'v' AND proparallel = 'u' AND NOT proisstrict);
