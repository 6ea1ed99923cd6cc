-- PUBLIC can do nothing until granted; a granted role can call the functions but touch no table.
CREATE ROLE regress_idem_ungranted;
CREATE ROLE regress_idem_granted;
SELECT idem_grant('regress_idem_granted');

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
    has_function_privilege('regress_idem_granted', p.oid, 'EXECUTE') AS granted
FROM member AS m JOIN pg_proc AS p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid ORDER BY p.proname COLLATE "C";
SELECT c.relname, role, privilege, has_table_privilege(role, c.oid, privilege) AS may
FROM member AS m JOIN pg_class AS c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid,
    unnest(ARRAY['regress_idem_ungranted', 'regress_idem_granted']) AS role,
    unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege
WHERE has_table_privilege(role, c.oid, privilege) OR has_any_column_privilege(role, c.oid, 'SELECT');

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
SELECT * FROM idem_claims;
SELECT * FROM idem_segment_0;
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
SELECT idem_revoke('regress_idem_granted');
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
