-- What an attacker would plant. `make regress` runs this once, puts the schema evil before everything else on the search_path of the
-- whole database, and runs the tests of hostile_schedule again: their output must be what it is without all this.
--
-- The tests themselves use what is planted all the time, so it does what the real things do; but it raises when it is called
-- from anything else than the test's own statement, such as SQL that a function of ours runs.
\set ON_ERROR_STOP on

CREATE SCHEMA evil;
GRANT USAGE, CREATE ON SCHEMA evil TO PUBLIC; -- the tests create theirs here now

CREATE FUNCTION evil.caught() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    context text;
BEGIN
    GET DIAGNOSTICS context = PG_CONTEXT;
    -- This function, the statement that calls it, and the planted function that runs the statement.
    IF pg_catalog.array_length(pg_catalog.string_to_array(context, E'\n'), 1) OPERATOR(pg_catalog.>) 3 THEN
        RAISE EXCEPTION 'a planted object was used' USING DETAIL = context;
    END IF;
END $$;

-- A view of each of our names, which a look or a write by name would meet.
SELECT pg_catalog.format('CREATE VIEW evil.%I AS SELECT * FROM public.%I', relname, relname)
FROM pg_extension AS e
JOIN pg_depend AS d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid AND d.classid = 'pg_class'::regclass AND d.deptype = 'e'
JOIN pg_class AS c ON c.oid = d.objid
WHERE e.extname = 'idem' \gexec
-- Where idem_grant would find no function.
CREATE VIEW evil.pg_extension AS SELECT * FROM pg_catalog.pg_extension WHERE false;

-- Comparisons of every type that our SQL could compare.
DO $plant$
DECLARE
    type text;
    name text;
    operator text;
BEGIN
    FOREACH type IN ARRAY ARRAY['text', 'uuid', 'oid', 'name', '"char"', 'timestamptz', 'interval', 'bytea', 'jsonb', 'int4', 'int8', 'bool'] LOOP
        FOR name, operator IN VALUES ('eq', '='), ('ne', '<>'), ('lt', '<'), ('le', '<='), ('gt', '>'), ('ge', '>=') LOOP
            EXECUTE format(
                'CREATE FUNCTION evil.%1$s(a pg_catalog.%2$s, b pg_catalog.%2$s) RETURNS boolean LANGUAGE plpgsql STRICT AS $$
                     BEGIN PERFORM evil.caught(); RETURN a OPERATOR(pg_catalog.%3$s) b; END $$;
                 CREATE OPERATOR evil.%3$s (FUNCTION = evil.%1$s, LEFTARG = pg_catalog.%2$s, RIGHTARG = pg_catalog.%2$s)',
                name, type, operator);
        END LOOP;
    END LOOP;
END $plant$;

-- Functions that are called like PostgreSQL's, with arguments that fit as well or better.
CREATE FUNCTION evil.format(text, regprocedure, regrole) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.format($1, $2, $3); END $$;
CREATE FUNCTION evil.format(text, regnamespace, regrole) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.format($1, $2, $3); END $$;
CREATE FUNCTION evil.has_schema_privilege(regrole, regnamespace, text) RETURNS boolean LANGUAGE plpgsql AS
    $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.has_schema_privilege($1::oid, $2::oid, $3); END $$;
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.clock_timestamp(); END $$;
CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.now(); END $$;
CREATE FUNCTION evil.gen_random_uuid() RETURNS uuid LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.gen_random_uuid(); END $$;
CREATE FUNCTION evil.sha256(bytea) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.sha256($1); END $$;
CREATE FUNCTION evil.uuid_eq(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.uuid_eq($1, $2); END $$;

-- Casts that a superuser was talked into, where PostgreSQL would else use a type's text form.
CREATE FUNCTION evil.as_text(regrole) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.regroleout($1); END $$;
CREATE CAST (regrole AS text) WITH FUNCTION evil.as_text(regrole) AS IMPLICIT;
CREATE FUNCTION evil.as_text(regprocedure) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.caught(); RETURN pg_catalog.regprocedureout($1); END $$;
CREATE CAST (regprocedure AS text) WITH FUNCTION evil.as_text(regprocedure) AS IMPLICIT;

SELECT pg_catalog.format('ALTER DATABASE %I SET search_path = evil, pg_temp, pg_catalog, public', pg_catalog.current_database()) \gexec

-- Whoever administers it has the same path.
SET search_path = evil, pg_temp, pg_catalog, public;
SELECT idem_revoke('app');
SELECT idem_grant('app');
