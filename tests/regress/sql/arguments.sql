-- Bad arguments are refused with the SQLSTATE of the contract, and nothing has changed afterwards.
SET ROLE app;
\set token '''00000000-0000-4000-8000-000000000000'''

-- What a user reads: message, DETAIL, HINT.
SELECT idem_begin(NULL);
SELECT idem_begin('');
SELECT idem_begin(repeat('k', 1025));
SELECT idem_begin('args-1', scope => repeat('s', 1025));
SELECT idem_begin('args-1', lease => '0');
SELECT idem_begin('args-1', wait => '-1s');
SELECT idem_begin('args-1', owner => repeat('o', 1025));
SELECT idem_begin('args-1', takeover => NULL);
SELECT idem_complete('args-1', ttl => '-1 day');

\set VERBOSITY sqlstate
-- NULL, empty and overlong keys: every function.
SELECT idem_complete(NULL);
SELECT idem_complete('');
SELECT idem_complete(repeat('k', 1025));
SELECT idem_release(NULL);
SELECT idem_release('');
SELECT idem_release(repeat('k', 1025));
SELECT idem_extend(NULL);
SELECT idem_extend('');
SELECT idem_extend(repeat('k', 1025));
SELECT * FROM idem_get(NULL);
SELECT * FROM idem_get('');
SELECT * FROM idem_get(repeat('k', 1025));

-- Lengths are bytes, not characters. 1,024 are allowed.
SELECT length(key) AS characters, octet_length(key) AS bytes, status
FROM unnest(ARRAY[repeat('k', 1024), repeat('é', 512), repeat('😀', 256)]) AS key, idem_begin(key, lease => '1us');
SELECT idem_begin(repeat('é', 512) || 'x');
SELECT idem_begin(repeat('😀', 256) || 'x');
SELECT status FROM idem_begin('args-scope', scope => repeat('é', 512), lease => '1us');
SELECT idem_begin('args-1', scope => repeat('é', 512) || 'x');
SELECT idem_complete('args-1', scope => repeat('s', 1025));
SELECT idem_release('args-1', scope => repeat('s', 1025));
SELECT idem_extend('args-1', scope => repeat('s', 1025));
SELECT * FROM idem_get('args-1', scope => repeat('s', 1025));
-- A setting that is too long is refused where it is used.
BEGIN;
SELECT set_config('idem.scope', repeat('s', 1025), true) IS NOT NULL AS set;
SELECT idem_begin('args-1');
ROLLBACK;

-- A lease is above 0 and at most 3,650 days; a month is 30 days.
SELECT idem_begin('args-1', lease => '-1us');
SELECT idem_begin('args-1', lease => '1 month -30 days');
SELECT idem_begin('args-1', lease => '3650 days 1us');
SELECT idem_begin('args-1', lease => '122 months');
SELECT idem_begin('args-1', lease => '178000000 years');
SELECT idem_begin('args-1', lease => '-178000000 years');
SELECT idem_begin('args-1', lease => interval '2147483647 months 2147483647 days 2562047788:00:54.775807');
SELECT status, expires_at - clock_timestamp() BETWEEN '3649 days 23:59' AND '3650 days' AS long FROM idem_begin('args-lease-1', lease => '3650 days');
SELECT status, expires_at - clock_timestamp() BETWEEN '59 days 23:59' AND '60 days' AS long FROM idem_begin('args-lease-2', lease => '2 months');
SELECT status FROM idem_begin('args-lease-3', lease => '1us');
SELECT token AS lease_token FROM idem_begin('args-lease-4', lease => '1h') \gset
SELECT idem_extend('args-lease-4', :'lease_token', lease => '0');
SELECT idem_extend('args-lease-4', :'lease_token', lease => '-1us');
SELECT idem_extend('args-lease-4', :'lease_token', lease => '3650 days 1us');

-- A wait is from 0 to 3,650 days; NULL is the setting idem.wait.
SELECT status FROM idem_begin('args-lease-4', wait => '0');
SELECT status FROM idem_begin('args-lease-4', wait => NULL);
SELECT status FROM idem_begin('args-lease-4', wait => '1us');
SELECT idem_begin('args-lease-4', wait => '-1us');
SELECT idem_begin('args-lease-4', wait => '3650 days 1us');
SELECT status FROM idem_begin('args-lease-5', wait => '3650 days', lease => '1us');

-- A ttl is above 0 and at most 3,650 days, whether or not there is something to complete.
SELECT idem_complete('args-lease-4', ttl => '0', token => :'lease_token');
SELECT idem_complete('args-lease-4', ttl => '-1us', token => :'lease_token');
SELECT idem_complete('args-lease-4', ttl => '3650 days 1us', token => :'lease_token');
SELECT idem_complete('args-1', ttl => '0', token => :token);

\set VERBOSITY terse
-- Infinity (PostgreSQL 17 and later know it; earlier it is no interval at all).
DO $$
DECLARE
    call text;
BEGIN
    FOREACH call IN ARRAY ARRAY[
        'idem_begin(''args-1'', lease => ''infinity'')', 'idem_begin(''args-1'', lease => ''-infinity'')',
        'idem_begin(''args-1'', wait => ''infinity'')', 'idem_begin(''args-1'', wait => ''-infinity'')',
        'idem_complete(''args-1'', ttl => ''infinity'')', 'idem_extend(''args-1'', lease => ''infinity'')']
    LOOP
        BEGIN
            EXECUTE 'SELECT ' || call;
            RAISE NOTICE '% is allowed', call;
        EXCEPTION WHEN invalid_parameter_value OR invalid_datetime_format THEN
            RAISE NOTICE '% is refused', call;
        END;
    END LOOP;
END
$$;

\set VERBOSITY sqlstate
-- An owner has at most 1,024 bytes.
SELECT status FROM idem_begin('args-owner', owner => repeat('é', 512), lease => '1us');
SELECT idem_begin('args-1', owner => repeat('é', 512) || 'x');
SELECT * FROM idem_get('args-1', owner => repeat('o', 1025));

-- Unknown keys and wrong tokens.
SELECT idem_complete('args-1');
SELECT idem_complete('args-1', token => :token);
SELECT idem_extend('args-1');
SELECT idem_extend('args-1', token => :token);
SELECT idem_release('args-1');
SELECT idem_release('args-1', token => :token);
SELECT count(*) FROM idem_get('args-1');

-- A refused call inside a transaction leaves its claim as it was.
BEGIN;
SELECT token AS held FROM idem_begin('args-2') \gset
SAVEPOINT s;
SELECT idem_complete('args-2', ttl => '0');
ROLLBACK TO s;
SELECT idem_begin('args-2', owner => repeat('o', 1025));
ROLLBACK TO s;
SELECT idem_complete('args-2', token => :token);
ROLLBACK TO s;
SELECT status, token = :'held' AS same_token FROM idem_begin('args-2');
SELECT idem_release('args-2');
COMMIT;

-- Settings have the same ranges, and only known ones can be set.
SET idem.ttl = 0;
SET idem.ttl = -1;
SET idem.ttl = '3651d';
SET idem.wait = -1;
SET idem.nonsense = 1;
SHOW idem.ttl;
SHOW idem.wait;
SHOW idem.scope;
SHOW idem.max_result_size;

-- As an administrator: idem_forget refuses the same, and nothing is there of what was refused.
RESET ROLE;
SELECT idem_forget(NULL);
SELECT idem_forget('');
SELECT idem_forget(repeat('k', 1025));
SELECT idem_forget('args-1', scope => repeat('s', 1025));
SELECT idem_grant(NULL);
SELECT idem_revoke(NULL);
SELECT key, attempt FROM idem_claims WHERE key LIKE 'args-%' ORDER BY key COLLATE "C";
SELECT key FROM idem_segment_0 WHERE key LIKE 'args-%';
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
