-- A record belongs to an owner: others get denied and learn nothing, not even whether the request is the same.
SET ROLE app;
SET idem.scope = 'test_owners';
-- Completed
BEGIN;
SELECT status FROM idem_begin('owned', 'request', owner => 'alice');
SELECT idem_complete('owned', '{"secret": 1}');
COMMIT;
SELECT status, result, body, completed_at, expires_at FROM idem_begin('owned', 'request', owner => 'bob');
SELECT status FROM idem_begin('owned', 'another request', owner => 'bob');
SELECT status FROM idem_begin('owned', 'another request', owner => 'alice');
SELECT status, result FROM idem_begin('owned', 'request', owner => 'alice');
SELECT status, result FROM idem_begin('owned', 'request');
SELECT count(*) AS bob FROM idem_get('owned', owner => 'bob');
SELECT owner, result FROM idem_get('owned', owner => 'alice');
SELECT owner, result FROM idem_get('owned');
-- An empty owner given as an argument is an owner like any other.
SELECT status FROM idem_begin('owned', 'request', owner => '');

-- The setting, overruled by the argument
SET idem.owner = 'bob';
SELECT status FROM idem_begin('owned', 'request');
SELECT count(*) AS bob FROM idem_get('owned');
SELECT status FROM idem_begin('owned', 'request', owner => 'alice');
RESET idem.owner;

-- A record without an owner is anybody's.
SELECT idem_once('nobodys');
SELECT status FROM idem_begin('nobodys', owner => 'bob');

-- On a lease, live and over: only its own owner takes over.
SELECT token FROM idem_begin('leased', owner => 'alice', lease => '1 hour') \gset
SELECT status, retry_after FROM idem_begin('leased', owner => 'bob');
SELECT status, retry_after IS NOT NULL AS retry FROM idem_begin('leased', owner => 'alice');
SELECT count(*) AS bob FROM idem_get('leased', owner => 'bob');
SELECT idem_extend('leased', :'token', '1 microsecond') IS NOT NULL AS extended;
SELECT status, attempt FROM idem_begin('leased', owner => 'bob');
SELECT status, attempt FROM idem_begin('leased', owner => 'bob', takeover => false);
SELECT status, attempt FROM idem_begin('leased', owner => 'alice', lease => '1 microsecond');
-- A takeover that names no owner leaves it alice's.
SELECT status, attempt, token FROM idem_begin('leased', lease => '1 hour') \gset
SELECT :'status' AS status, :attempt AS attempt;
SELECT status FROM idem_begin('leased', owner => 'bob');
SELECT idem_complete('leased', token => :'token');
SELECT owner, attempt FROM idem_get('leased');

-- Within the holder's own transaction owners are compared as ever.
BEGIN;
SELECT status FROM idem_begin('mine', owner => 'alice');
SELECT status FROM idem_begin('mine', owner => 'bob');
SELECT status FROM idem_begin('mine', owner => 'alice');
SELECT status FROM idem_begin('mine');
ROLLBACK;

-- Expired: anybody's again, and then the new owner's.
BEGIN;
SELECT status FROM idem_begin('short', owner => 'alice');
SELECT idem_complete('short', ttl => '1 microsecond');
COMMIT;
BEGIN;
SELECT status FROM idem_begin('short', owner => 'bob');
SELECT idem_complete('short');
COMMIT;
SELECT owner FROM idem_get('short');

SELECT idem_begin('long', owner => repeat('o', 1025));
SELECT status FROM idem_begin('long', owner => repeat('o', 1024), lease => '1 h');
