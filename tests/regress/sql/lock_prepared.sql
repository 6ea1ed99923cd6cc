-- PREPARE TRANSACTION takes a lease lock, a transaction lock and a guard along: others are told that the lock is taken,
-- by an open transaction, until COMMIT PREPARED or ROLLBACK PREPARED; a prepared unlock counts from COMMIT PREPARED.
SET ROLE app;
\set row 'acquired, expires_at IS NOT NULL AS expires_at, held_by, retry_after IS NOT NULL AS retry_after'

-- A lease lock, committed: from then on a lease.
BEGIN;
SELECT token, fence FROM lock_try('prep-1', ttl => '1h', holder => 'me') \gset
PREPARE TRANSACTION 'regress_idem_lock_1';
SELECT :row FROM lock_try('prep-1');
SELECT lock_try_xact('prep-1'), lock_acquire_xact('prep-1', wait => '10 ms');
SELECT :row FROM lock_acquire('prep-1', wait => '10 ms');
COMMIT PREPARED 'regress_idem_lock_1';
SELECT :row FROM lock_try('prep-1');
SELECT lock_guard('prep-1', :'token') = :fence AS held, lock_unlock('prep-1', :'token') AS unlocked;

-- Rolled back: it never was.
BEGIN;
SELECT acquired FROM lock_try('prep-2', ttl => '1h');
PREPARE TRANSACTION 'regress_idem_lock_2';
SELECT :row FROM lock_try('prep-2');
ROLLBACK PREPARED 'regress_idem_lock_2';
SELECT lock_try_xact('prep-2') AS free;

-- A transaction lock, either way.
BEGIN;
SELECT lock_try_xact('prep-3'), lock_acquire_xact('prep-4', wait => '1s');
PREPARE TRANSACTION 'regress_idem_lock_3';
SELECT lock_try_xact('prep-3'), lock_acquire_xact('prep-4', wait => '10 ms');
SELECT :row FROM lock_try('prep-3');
COMMIT PREPARED 'regress_idem_lock_3';
SELECT lock_try_xact('prep-3') AS free, lock_try_xact('prep-4') AS free;
BEGIN;
SELECT lock_try_xact('prep-3');
PREPARE TRANSACTION 'regress_idem_lock_3';
SELECT lock_try_xact('prep-3');
ROLLBACK PREPARED 'regress_idem_lock_3';
SELECT lock_try_xact('prep-3') AS free;

-- A guard: the lease may be extended meanwhile, unlocked or taken over it may not be, even when it is over.
SELECT token FROM lock_try('prep-5', ttl => '3s') \gset
BEGIN;
SELECT lock_guard('prep-5', :'token') IS NOT NULL AS guarded;
PREPARE TRANSACTION 'regress_idem_lock_5';
SELECT lock_extend('prep-5', :'token') IS NOT NULL AS extended;
SET lock_timeout = '10 ms';
\set VERBOSITY sqlstate
SELECT lock_unlock('prep-5', :'token');
\set VERBOSITY default
RESET lock_timeout;
SELECT pg_sleep(3.1);
SELECT :row FROM lock_try('prep-5', ttl => '1h');
SELECT :row FROM lock_acquire('prep-5', wait => '10 ms', ttl => '1h');
COMMIT PREPARED 'regress_idem_lock_5';
SELECT :row FROM lock_try('prep-5', ttl => '1h');

-- An unlock: rolled back it never was, committed the lock is free.
SELECT token FROM lock_try('prep-6', ttl => '1h', holder => 'me') \gset
BEGIN;
SELECT lock_unlock('prep-6', :'token');
PREPARE TRANSACTION 'regress_idem_lock_6';
SELECT acquired FROM lock_try('prep-6');
ROLLBACK PREPARED 'regress_idem_lock_6';
SELECT :row FROM lock_try('prep-6');
BEGIN;
SELECT lock_unlock('prep-6', :'token');
PREPARE TRANSACTION 'regress_idem_lock_6';
SELECT acquired FROM lock_try('prep-6');
COMMIT PREPARED 'regress_idem_lock_6';
SELECT acquired FROM lock_try('prep-6', ttl => '1h');

-- An extension, committed.
SELECT token FROM lock_try('prep-7', ttl => '1h') \gset
BEGIN;
SELECT lock_extend('prep-7', :'token', ttl => '5h') IS NOT NULL AS extended;
PREPARE TRANSACTION 'regress_idem_lock_7';
SELECT acquired FROM lock_try('prep-7');
COMMIT PREPARED 'regress_idem_lock_7';
SELECT acquired, retry_after > '4h' AS extended FROM lock_try('prep-7');
SELECT count(*) AS prepared FROM pg_prepared_xacts WHERE gid LIKE 'regress\_idem\_lock\_%';
