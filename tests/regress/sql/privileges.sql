-- PUBLIC can do nothing until granted; a granted role can call the functions but touch no table; an administrator looks
-- and cleans up.
CREATE ROLE regress_idem_ungranted;
CREATE ROLE regress_idem_granted;
SELECT idem_grant('regress_idem_granted');
CREATE ROLE regress_idem_admin;
SELECT idem_grant_admin('regress_idem_admin');

-- What belongs to the extension.
CREATE TEMP VIEW member AS
    SELECT classid, objid FROM pg_depend
    WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
        AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem');
SELECT count(*) > 0 AS functions FROM member WHERE classid = 'pg_proc'::regclass;
SELECT count(*) > 0 AS tables FROM member WHERE classid = 'pg_class'::regclass;

-- PUBLIC has no privilege on any function or relation of it.
SELECT p.oid::regprocedure AS public_may_execute
FROM member AS m JOIN pg_proc AS p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid,
    aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
WHERE a.grantee = 0;
SELECT c.oid::regclass AS public_may, a.privilege_type
FROM member AS m JOIN pg_class AS c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid,
    aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) AS a
WHERE a.grantee = 0;
-- No function runs with its owner's rights.
SELECT p.oid::regprocedure AS security_definer
FROM member AS m JOIN pg_proc AS p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid WHERE p.prosecdef;

-- What each role may do.
SELECT p.proname AS function, has_function_privilege('regress_idem_ungranted', p.oid, 'EXECUTE') AS ungranted,
    has_function_privilege('regress_idem_granted', p.oid, 'EXECUTE') AS granted,
    has_function_privilege('regress_idem_admin', p.oid, 'EXECUTE') AS admin,
    has_function_privilege('pg_monitor', p.oid, 'EXECUTE') AS monitor
FROM member AS m JOIN pg_proc AS p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid ORDER BY p.proname COLLATE "C";
SELECT c.relname, role, privilege, has_table_privilege(role, c.oid, privilege) AS may
FROM member AS m JOIN pg_class AS c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid,
    unnest(ARRAY['regress_idem_ungranted', 'regress_idem_granted', 'regress_idem_admin', 'pg_monitor']) AS role,
    unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege
WHERE has_table_privilege(role, c.oid, privilege) OR privilege = 'SELECT' AND has_any_column_privilege(role, c.oid, 'SELECT')
ORDER BY c.relname COLLATE "C", role COLLATE "C", privilege COLLATE "C";

\set VERBOSITY terse
-- An ungranted role: 42501 on everything.
SET ROLE regress_idem_ungranted;
SELECT idem_begin('privileges-1');
SELECT idem_complete('privileges-1');
SELECT idem_release('privileges-1');
SELECT idem_extend('privileges-1');
SELECT * FROM idem_get('privileges-1');
SELECT idem_forget('privileges-1');
SELECT idem_grant('regress_idem_ungranted');
SELECT idem_revoke('regress_idem_granted');
SELECT idem_change_privileges('regress_idem_ungranted', true, '{application}');
SELECT idem_stats();
SELECT idem_stats_reset();
SELECT * FROM idem_claims;
SELECT * FROM idem_segment_0;
SELECT * FROM idem_records;
SELECT * FROM idem_overview;
SELECT * FROM lock_leases;
-- Also when it asks for nothing.
SELECT idem_begin(NULL);
\echo :SQLSTATE

-- A granted role uses keys, and neither administers nor touches the tables.
SET ROLE regress_idem_granted;
BEGIN;
SELECT status FROM idem_begin('privileges-1');
SELECT idem_complete('privileges-1', '1');
COMMIT;
SELECT token AS held FROM idem_begin('privileges-2', lease => '1h') \gset
SELECT idem_extend('privileges-2', :'held') IS NOT NULL AS extended;
SELECT idem_release('privileges-2', :'held');
SELECT key, state FROM idem_get('privileges-1');
SELECT idem_forget('privileges-1');
SELECT idem_grant('regress_idem_ungranted');
SELECT idem_grant_admin('regress_idem_granted');
SELECT idem_revoke('regress_idem_granted');
SELECT idem_stats();
SELECT idem_stats_reset();
SELECT * FROM idem_records;
SELECT * FROM idem_overview;
SELECT * FROM lock_leases;
SELECT * FROM idem_claims;
SELECT * FROM idem_segment_0;
INSERT INTO idem_segment_0 DEFAULT VALUES;
UPDATE idem_segment_0 SET result = '2';
DELETE FROM idem_segment_0;
TRUNCATE idem_claims;
BEGIN;
LOCK TABLE idem_segment_0 IN ACCESS SHARE MODE;
ROLLBACK;
ALTER TABLE idem_segment_0 ADD COLUMN x int;
CREATE TRIGGER t AFTER INSERT ON idem_segment_0 FOR EACH STATEMENT EXECUTE FUNCTION suppress_redundant_updates_trigger();
RESET ROLE;

-- An administrator looks and cleans up, and neither uses keys nor touches the tables nor grants.
SET ROLE regress_idem_admin;
SELECT count(*) FROM idem_overview;
SELECT key, state FROM idem_records WHERE key = 'privileges-1';
SELECT count(*) FROM lock_leases WHERE name = 'privileges-1';
SET client_min_messages = warning; -- before PostgreSQL 17 nothing is counted here
SELECT count(*) FROM idem_stats();
SELECT idem_stats_reset();
RESET client_min_messages;
SELECT idem_forget('privileges-nothing');
SELECT idem_begin('privileges-1');
SELECT * FROM idem_get('privileges-1');
SELECT lock_try('privileges-1');
SELECT * FROM idem_segment_0;
SELECT * FROM idem_locks;
SELECT idem_grant_admin('regress_idem_ungranted');
SELECT idem_revoke('regress_idem_granted');
RESET ROLE;
-- Both levels at once; taken back together.
SELECT idem_grant('regress_idem_admin');
SET ROLE regress_idem_admin;
SELECT status FROM idem_begin('privileges-1');
RESET ROLE;
SELECT idem_revoke('regress_idem_admin');
DROP ROLE regress_idem_admin;

-- Granting twice, and revoking twice, are no errors. Revoked: as before.
SELECT idem_grant('regress_idem_granted');
SELECT idem_revoke('regress_idem_granted');
SELECT idem_revoke('regress_idem_granted');
SET ROLE regress_idem_granted;
SELECT idem_begin('privileges-1');
SELECT * FROM idem_get('privileges-1');
RESET ROLE;
-- Nothing is left that would keep the role from being dropped.
DROP ROLE regress_idem_granted;
DROP ROLE regress_idem_ungranted;

-- A role whose name needs quotes; one that does not exist.
CREATE ROLE "regress_idem ""quoted"" Role";
SELECT idem_grant('"regress_idem ""quoted"" Role"');
SET ROLE "regress_idem ""quoted"" Role";
SELECT status FROM idem_begin('privileges-1');
RESET ROLE;
SELECT idem_revoke('"regress_idem ""quoted"" Role"');
DROP ROLE "regress_idem ""quoted"" Role";
SELECT idem_grant('regress_idem_nobody');
-- No role at all.
SELECT idem_grant(NULL);
SELECT idem_grant_admin(NULL);
SELECT idem_revoke(NULL);
\echo :SQLSTATE
