-- CREATE EXTENSION takes nothing over: whatever is in its schema already under a name of ours, with whatever owner, makes it fail.
\set database :DBNAME
CREATE DATABASE regress_idem_in_the_way;
\c regress_idem_in_the_way
CREATE EXTENSION idem;
CREATE ROLE regress_idem_squatter;
GRANT CREATE ON SCHEMA public TO regress_idem_squatter;

-- One obstacle for each function, and for each relation one of every kind that could be taken for it.
CREATE TEMP TABLE obstacle AS
    WITH member AS (
        SELECT classid, objid FROM pg_depend
        WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
            AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem'))
    SELECT format('CREATE FUNCTION public.%I(%s) RETURNS text LANGUAGE sql AS $$ SELECT ''taken over'' $$', proname, oidvectortypes(proargtypes)) AS statement
    FROM member JOIN pg_proc ON classid = 'pg_proc'::regclass AND pg_proc.oid = objid
    UNION ALL
    SELECT format(kind, relname)
    FROM member JOIN pg_class ON classid = 'pg_class'::regclass AND pg_class.oid = objid, unnest(ARRAY[
        'CREATE TABLE public.%I ()', 'CREATE VIEW public.%I AS SELECT 1 AS one', 'CREATE SEQUENCE public.%I',
        'CREATE TYPE public.%I AS (a integer)', 'CREATE DOMAIN public.%I AS text']) AS kind;
DROP EXTENSION idem;

DO $$
DECLARE
    obstacle record;
    refused integer := 0;
BEGIN
    FOR obstacle IN SELECT statement FROM obstacle LOOP
        BEGIN
            SET LOCAL ROLE regress_idem_squatter;
            EXECUTE obstacle.statement;
            RESET ROLE;
            CREATE EXTENSION idem;
            RAISE EXCEPTION USING ERRCODE = 'triggered_action_exception'; -- undoes both
        EXCEPTION
            WHEN duplicate_function OR duplicate_table OR duplicate_object THEN
                refused := refused + 1;
            WHEN triggered_action_exception THEN
                RAISE WARNING 'CREATE EXTENSION did not refuse: %', obstacle.statement;
        END;
    END LOOP;
    IF refused = (SELECT count(*) FROM obstacle) AND refused > 30 THEN
        RAISE NOTICE 'every obstacle was refused';
    ELSE
        RAISE WARNING '% were refused', refused;
    END IF;
END $$;

-- Nothing is left of the attempts; without an obstacle it succeeds.
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem\_%';
CREATE EXTENSION idem;

\c :database
DROP DATABASE regress_idem_in_the_way;
DROP ROLE regress_idem_squatter;
