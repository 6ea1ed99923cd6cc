-- In a read-only transaction every lock function raises 25006, before it looks: whether the lock is free or held.
SET ROLE app;
SELECT token AS held FROM lock_try('lock-ro', ttl => '1h') \gset
START TRANSACTION READ ONLY;
SELECT lock_try('lock-ro-free');
ROLLBACK;
\set VERBOSITY sqlstate
SET default_transaction_read_only = on;
SELECT lock_try('lock-ro-free');
SELECT lock_try('lock-ro');
SELECT lock_acquire('lock-ro-free');
SELECT lock_acquire('lock-ro');
SELECT lock_extend('lock-ro', :'held');
SELECT lock_extend('lock-ro-free', :'held');
SELECT lock_unlock('lock-ro', :'held');
SELECT lock_unlock('lock-ro-free', :'held');
SELECT lock_guard('lock-ro', :'held');
SELECT lock_guard('lock-ro-free', :'held');
SELECT lock_try_xact('lock-ro-free');
SELECT lock_try_xact('lock-ro');
SELECT lock_acquire_xact('lock-ro-free');
SELECT lock_acquire_xact('lock-ro');
SET default_transaction_read_only = off;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();

-- What was taken before the transaction became read-only is committed.
BEGIN;
SELECT token AS later FROM lock_try('lock-ro-later', ttl => '1h') \gset
SET TRANSACTION READ ONLY;
SAVEPOINT s;
SELECT lock_try('lock-ro-later');
ROLLBACK TO s;
SELECT lock_unlock('lock-ro-later', :'later');
ROLLBACK TO s;
COMMIT;
SELECT lock_unlock('lock-ro', :'held'), lock_unlock('lock-ro-later', :'later');
SELECT acquired FROM lock_try('lock-ro-free', ttl => '1us');
