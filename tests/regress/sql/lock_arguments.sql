-- Bad arguments of the lock functions are refused with the SQLSTATE of the contract, whatever the state of the lock, and
-- nothing has changed afterwards.
SET ROLE app;
\set nobody '''00000000-0000-4000-8000-000000000000'''
SELECT token AS held FROM lock_try('lock-args', ttl => '1h', holder => 'me') \gset

-- What a user reads: message, DETAIL, HINT.
SELECT lock_try(NULL);
SELECT lock_try('');
SELECT lock_try(repeat('n', 1025));
SELECT lock_try('lock-args-1', scope => repeat('s', 1025));
SELECT lock_try('lock-args-1', holder => repeat('h', 1025));
SELECT lock_try('lock-args-1', ttl => '0');
SELECT lock_acquire('lock-args-1', wait => '-1s');
SELECT lock_unlock('lock-args', NULL);

\set VERBOSITY sqlstate
-- Names: NULL is 22004, empty and longer than 1,024 bytes 22023.
SELECT lock_acquire(NULL);
SELECT lock_acquire('');
SELECT lock_acquire(repeat('n', 1025));
SELECT lock_extend(NULL, :'held');
SELECT lock_extend('', :'held');
SELECT lock_extend(repeat('n', 1025), :'held');
SELECT lock_unlock(NULL, :'held');
SELECT lock_unlock('', :'held');
SELECT lock_unlock(repeat('n', 1025), :'held');
SELECT lock_guard(NULL, :'held');
SELECT lock_guard('', :'held');
SELECT lock_guard(repeat('n', 1025), :'held');
SELECT lock_try_xact(NULL);
SELECT lock_try_xact('');
SELECT lock_try_xact(repeat('n', 1025));
SELECT lock_acquire_xact(NULL);
SELECT lock_acquire_xact('');
SELECT lock_acquire_xact(repeat('n', 1025));
-- Tokens: NULL is 22004, held or not; there is no "lock of this transaction".
SELECT lock_extend('lock-args', NULL);
SELECT lock_extend('lock-args-1', NULL);
SELECT lock_unlock('lock-args', NULL);
SELECT lock_unlock('lock-args-1', NULL);
SELECT lock_guard('lock-args', NULL);
SELECT lock_guard('lock-args-1', NULL);
BEGIN;
SELECT acquired FROM lock_try('lock-args-1', ttl => '1h');
SELECT lock_unlock('lock-args-1', NULL);
ROLLBACK;

-- Lengths are bytes, not characters. 1,024 are allowed, for holders too.
SELECT length(name) AS characters, acquired
FROM unnest(ARRAY[repeat('n', 1024), repeat('é', 512), repeat('😀', 256)]) AS name, lock_try(name, ttl => '1us', scope => repeat('é', 512), holder => name);
SELECT lock_try(repeat('é', 512) || 'n');
SELECT lock_try_xact(repeat('é', 512));
SELECT lock_try_xact(repeat('é', 512) || 'n');
SELECT lock_acquire('lock-args-1', holder => repeat('é', 512) || 'h');
SELECT acquired FROM lock_try('lock-args-holder', ttl => '1h', holder => repeat('é', 512));
SELECT acquired, held_by = repeat('é', 512) AS held_by FROM lock_try('lock-args-holder');
SELECT lock_acquire('lock-args-1', scope => repeat('s', 1025));
SELECT lock_extend('lock-args', :'held', scope => repeat('s', 1025));
SELECT lock_unlock('lock-args', :'held', scope => repeat('s', 1025));
SELECT lock_guard('lock-args', :'held', scope => repeat('s', 1025));
SELECT lock_try_xact('lock-args-1', scope => repeat('s', 1025));
SELECT lock_acquire_xact('lock-args-1', scope => repeat('s', 1025));
BEGIN;
SELECT set_config('idem.scope', repeat('s', 1025), true) IS NOT NULL AS set;
SELECT lock_try_xact('lock-args-1');
ROLLBACK;

-- A ttl is above 0 and at most 3,650 days, whether or not the lock is free.
SELECT lock_try('lock-args-1', ttl => '-1us');
SELECT lock_try('lock-args-1', ttl => '3650 days 1us');
SELECT lock_try('lock-args-1', ttl => '178000000 years');
SELECT lock_try('lock-args-1', ttl => '-178000000 years');
SELECT lock_try('lock-args', ttl => '0');
SELECT lock_acquire('lock-args-1', ttl => '0');
SELECT lock_acquire('lock-args-1', ttl => '-1 day');
SELECT lock_acquire('lock-args', ttl => '3651 days');
SELECT lock_extend('lock-args', :'held', ttl => '0');
SELECT lock_extend('lock-args', :'held', ttl => '-1us');
SELECT lock_extend('lock-args', :'held', ttl => '3650 days 1us');
SELECT lock_extend('lock-args-1', :nobody, ttl => '0');
SELECT acquired, expires_at - clock_timestamp() BETWEEN '3649 days 23:59' AND '3650 days' AS long FROM lock_try('lock-args-long', ttl => '3650 days');
SELECT acquired, expires_at - clock_timestamp() BETWEEN '59 days 23:59' AND '60 days' AS a_month_is_30_days FROM lock_try('lock-args-month', ttl => '2 months');
-- A NULL ttl is the setting, as if it were not given.
SELECT acquired, expires_at > clock_timestamp() AS runs FROM lock_try('lock-args-null', ttl => NULL);
SET idem.lock_ttl = 0;
SET idem.lock_ttl = -1;

-- A wait is from 0 to 3,650 days; NULL waits until the lock is taken.
SELECT lock_acquire('lock-args-1', wait => '-1us');
SELECT lock_acquire('lock-args', wait => '3650 days 1us');
SELECT lock_acquire_xact('lock-args-1', wait => '-1us');
SELECT lock_acquire_xact('lock-args-1', wait => '-1 month 29 days');
SELECT lock_acquire_xact('lock-args', wait => '3650 days 1us');
SELECT lock_acquire_xact('lock-args-1', wait => '3650 days');
SELECT lock_acquire_xact('lock-args-1', wait => NULL);
SELECT lock_acquire_xact('lock-args', wait => '1us');

\set VERBOSITY terse
-- Infinity (PostgreSQL 17 and later know it; earlier it is no interval at all).
DO $$
DECLARE
    call text;
BEGIN
    FOREACH call IN ARRAY ARRAY[
        'lock_try(''lock-args-1'', ttl => ''infinity'')', 'lock_try(''lock-args-1'', ttl => ''-infinity'')',
        'lock_acquire(''lock-args-1'', ttl => ''infinity'')', 'lock_acquire(''lock-args-1'', wait => ''infinity'')',
        'lock_acquire(''lock-args-1'', wait => ''-infinity'')', 'lock_acquire_xact(''lock-args-1'', wait => ''infinity'')',
        'lock_extend(''lock-args'', gen_random_uuid(), ttl => ''infinity'')']
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

-- Nothing is there of what was refused, and what was held is as it was.
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT lock_guard('lock-args', :'held') IS NOT NULL AS held;
RESET ROLE;
SELECT name, holder, ttl, expires_at - acquired_at AS length FROM idem_locks WHERE name IN ('lock-args', 'lock-args-1') OR octet_length(name) > 1024;
