-- A role without a grant gets 42501 from every lock function, also when it asks for nothing; a granted one uses them and
-- touches no table.
CREATE ROLE regress_idem_lock;
\set VERBOSITY terse
\set nobody '''00000000-0000-4000-8000-000000000000'''
SET ROLE regress_idem_lock;
SELECT lock_try('lock-priv');
SELECT lock_acquire('lock-priv');
SELECT lock_extend('lock-priv', :nobody);
SELECT lock_unlock('lock-priv', :nobody);
SELECT lock_guard('lock-priv', :nobody);
SELECT lock_try_xact('lock-priv');
SELECT lock_acquire_xact('lock-priv');
SELECT lock_try(NULL);
\echo :SQLSTATE
SELECT * FROM idem_locks;

RESET ROLE;
SELECT idem_grant('regress_idem_lock');
SET ROLE regress_idem_lock;
SELECT token, acquired FROM lock_try('lock-priv', ttl => '1h') \gset
SELECT acquired FROM lock_acquire('lock-priv', wait => '0');
SELECT lock_guard('lock-priv', :'token') IS NOT NULL AS guarded, lock_extend('lock-priv', :'token') IS NOT NULL AS extended;
SELECT lock_unlock('lock-priv', :'token');
SELECT lock_try_xact('lock-priv'), lock_acquire_xact('lock-priv');
SELECT * FROM idem_locks;
SELECT token FROM idem_locks;
INSERT INTO idem_locks DEFAULT VALUES;
UPDATE idem_locks SET fence = 0;
DELETE FROM idem_locks;
TRUNCATE idem_locks;
BEGIN;
LOCK TABLE idem_locks IN ACCESS SHARE MODE;
ROLLBACK;
RESET ROLE;
SELECT idem_revoke('regress_idem_lock');
SET ROLE regress_idem_lock;
SELECT lock_try('lock-priv');
RESET ROLE;
DROP ROLE regress_idem_lock;
