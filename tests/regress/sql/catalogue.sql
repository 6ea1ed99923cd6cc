-- Every object of the extension, also those that will come: an ungranted role can execute and read nothing, even where the administrator's default privileges are
-- generous; what is not C, and what runs with its owner's rights, pins its search_path.
\set database :DBNAME
CREATE DATABASE regress_idem_catalogue;
\c regress_idem_catalogue
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON ROUTINES TO PUBLIC;
CREATE EXTENSION idem;
CREATE ROLE regress_idem_nobody;

CREATE TABLE member AS
    SELECT classid, objid FROM pg_depend
    WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
        AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem');
GRANT SELECT ON member TO regress_idem_nobody;
-- Kinds of object that this test knows how to try. Another one must be added to it.
SELECT DISTINCT pg_describe_object(classid, objid, 0) AS unknown_kind FROM member
WHERE classid NOT IN ('pg_proc'::regclass, 'pg_class'::regclass, 'pg_type'::regclass)
    OR EXISTS (SELECT FROM pg_class WHERE oid = objid AND classid = 'pg_class'::regclass AND relkind NOT IN ('r', 'v', 'S'));

-- What the catalogue says.
SELECT pg_describe_object(classid, objid, 0) AS open_to_nobody FROM member
WHERE classid = 'pg_proc'::regclass AND has_function_privilege('regress_idem_nobody', objid, 'EXECUTE');
SELECT pg_describe_object(classid, objid, 0) AS open_to_nobody, privilege
FROM member JOIN pg_class ON classid = 'pg_class'::regclass AND pg_class.oid = objid AND relkind <> 'S',
    unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege
WHERE has_table_privilege('regress_idem_nobody', objid, privilege)
    OR (privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES') AND has_any_column_privilege('regress_idem_nobody', objid, privilege));
SELECT pg_describe_object(classid, objid, 0) AS open_to_nobody, privilege
FROM member JOIN pg_class ON classid = 'pg_class'::regclass AND pg_class.oid = objid AND relkind = 'S',
    unnest(ARRAY['SELECT', 'USAGE', 'UPDATE']) AS privilege
WHERE has_sequence_privilege('regress_idem_nobody', objid, privilege);

-- What happens when it tries: each function with NULLs, each relation.
SET ROLE regress_idem_nobody;
DO $$
DECLARE
    attempt text;
    refused integer := 0;
BEGIN
    FOR attempt IN
        SELECT format('SELECT * FROM %s(%s)', p.oid::regproc,
            (SELECT string_agg(CASE WHEN p.provariadic <> 0 AND n = p.pronargs THEN 'VARIADIC ' ELSE '' END || format('NULL::%s', type::regtype), ', ' ORDER BY n)
             FROM unnest(p.proargtypes) WITH ORDINALITY AS argument (type, n)))
        FROM member JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND p.oid = objid
        UNION ALL
        SELECT format('SELECT * FROM %s', objid::regclass) FROM member WHERE classid = 'pg_class'::regclass
    LOOP
        BEGIN
            EXECUTE attempt;
            RAISE WARNING 'done by nobody: %', attempt;
        EXCEPTION
            WHEN insufficient_privilege THEN refused := refused + 1;
            WHEN OTHERS THEN RAISE WARNING 'not refused but %: %', SQLSTATE, attempt;
        END;
    END LOOP;
    IF refused = (SELECT count(*) FROM member WHERE classid <> 'pg_type'::regclass) AND refused > 20 THEN
        RAISE NOTICE 'every attempt was refused';
    ELSE
        RAISE WARNING '% of the attempts were refused', refused;
    END IF;
END $$;
RESET ROLE;

-- Functions whose names are looked up when they run (all but C and SQL-standard bodies), and all that run with
-- their owner's rights, have a path that nobody can plant anything on.
SELECT objid::regprocedure AS path_not_pinned, prosecdef, proconfig
FROM member JOIN pg_proc ON classid = 'pg_proc'::regclass AND pg_proc.oid = objid JOIN pg_language ON pg_language.oid = prolang
WHERE (prosecdef OR (lanname NOT IN ('c', 'internal') AND prosqlbody IS NULL))
    AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false);
\c :database
DROP DATABASE regress_idem_catalogue;
DROP ROLE regress_idem_nobody;
