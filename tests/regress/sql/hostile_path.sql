-- Nobody's search_path changes anything: functions, operators, tables, types and temporary objects
-- planted where they come before ours and PostgreSQL's own are never used.
\set database :DBNAME
CREATE DATABASE regress_idem_hostile;
\c regress_idem_hostile
CREATE EXTENSION idem;
-- Every name that could be met.
CREATE TABLE member AS
    SELECT relname FROM pg_depend JOIN pg_class ON pg_class.oid = objid
    WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_extension'::regclass AND deptype = 'e'
        AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem');
GRANT SELECT ON member TO PUBLIC;
CREATE ROLE regress_idem_hostile;
CREATE ROLE regress_idem_victim;
SELECT idem_grant('regress_idem_hostile');
GRANT CREATE, TEMPORARY ON DATABASE regress_idem_hostile TO regress_idem_hostile;

SET ROLE regress_idem_hostile;
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
-- Tables like ours; a look or a write that went there would show.
CREATE TABLE evil.idem_claims (digest uuid PRIMARY KEY, token uuid, created_at timestamptz, expires_at timestamptz, lease interval,
    attempt integer, scope text, key text, owner text, fingerprint bytea, checkpoint jsonb);
CREATE TABLE evil.idem_segment_0 (digest uuid PRIMARY KEY, token uuid, created_at timestamptz, completed_at timestamptz,
    expires_at timestamptz, attempt integer, scope text, key text, owner text, fingerprint bytea, result jsonb, body bytea);
INSERT INTO evil.idem_segment_0
    SELECT uuid 'b98e9326-c737-b541-ce3b-0951f4bb8b74', gen_random_uuid(), now(), now(), now() + interval '1 day', 1, '', 'a', NULL, NULL, '"planted"', NULL;
CREATE TEMP TABLE idem_segment_0 AS SELECT * FROM evil.idem_segment_0;
CREATE TEMP TABLE idem_claims AS SELECT * FROM evil.idem_claims;
-- Empty ones for all others, also where temporary objects come first.
DO $$
DECLARE
    place text;
    name text;
BEGIN
    FOR place, name IN SELECT place.place, relname FROM member, unnest(ARRAY['evil', 'pg_temp']) AS place (place) LOOP
        IF to_regclass(format('%s.%I', place, name)) IS NULL THEN
            EXECUTE format('CREATE TABLE %s.%I (one integer PRIMARY KEY)', place, name);
        END IF;
    END LOOP;
END $$;
-- Types, functions and operators like PostgreSQL's.
CREATE FUNCTION evil.planted_bool(anyelement, anyelement) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE FUNCTION evil.planted(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE FUNCTION evil.planted(oid, oid) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE FUNCTION evil.planted(name, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE FUNCTION evil.planted(name, name) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE FUNCTION evil.planted("char", "char") RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE FUNCTION evil.planted(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted operator'; END $$;
CREATE OPERATOR evil.= (FUNCTION = evil.planted_bool, LEFTARG = anyelement, RIGHTARG = anyelement);
CREATE OPERATOR evil.= (FUNCTION = evil.planted, LEFTARG = uuid, RIGHTARG = uuid);
CREATE OPERATOR evil.= (FUNCTION = evil.planted, LEFTARG = oid, RIGHTARG = oid);
CREATE OPERATOR evil.= (FUNCTION = evil.planted, LEFTARG = name, RIGHTARG = text);
CREATE OPERATOR evil.= (FUNCTION = evil.planted, LEFTARG = name, RIGHTARG = name);
CREATE OPERATOR evil.= (FUNCTION = evil.planted, LEFTARG = "char", RIGHTARG = "char");
CREATE OPERATOR evil.= (FUNCTION = evil.planted, LEFTARG = text, RIGHTARG = text);
CREATE FUNCTION evil.format(text, regprocedure, regrole) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted function'; END $$;
CREATE FUNCTION evil.format(text, regnamespace, regrole) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted function'; END $$;
CREATE FUNCTION evil.has_schema_privilege(regrole, regnamespace, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted function'; END $$;
CREATE FUNCTION evil.uuid_eq(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted function'; END $$;
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted function'; END $$;
CREATE FUNCTION evil.sha256(bytea) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'planted function'; END $$;
CREATE DOMAIN evil.uuid AS text;
CREATE DOMAIN evil.jsonb AS text;
CREATE DOMAIN evil.regrole AS text;
CREATE VIEW evil.pg_extension AS SELECT 'planted' AS extname;
CREATE VIEW evil.pg_depend AS SELECT 'planted' AS deptype;
CREATE VIEW evil.pg_proc AS SELECT 'planted' AS proname;
CREATE TEMP VIEW pg_proc AS SELECT 'planted' AS proname;

-- An ordinary role whose path starts with them.
SET search_path = evil, pg_temp, pg_catalog, public;
BEGIN;
SELECT status, attempt, result FROM public.idem_begin('a', '\x01');
SELECT public.idem_complete('a', '"real"');
COMMIT;
SELECT status, result FROM public.idem_begin('a', '\x01');
SELECT status, result FROM public.idem_begin('a', '\x02');
SELECT token AS held FROM public.idem_begin('hostile-lease', lease => '1us') \gset
SELECT pg_catalog.pg_sleep(0.01);
SELECT public.idem_extend('hostile-lease', :'held', lease => '1us') IS NOT NULL AS extended;
SELECT pg_catalog.pg_sleep(0.01);
SELECT status, attempt FROM public.idem_begin('hostile-lease', lease => '1h');
SELECT public.idem_release('hostile-lease', :'held');
SELECT state, result FROM public.idem_get('a');
SELECT state, result FROM public.idem_get('hostile-lease');
SELECT public.idem_once('hostile-once'), public.idem_once('hostile-once');
SELECT token AS held FROM public.idem_begin('hostile-checkpoint', lease => '1h') \gset
SELECT public.idem_checkpoint('hostile-checkpoint', '{"step": 1}', token => :'held');
SELECT public.idem_complete('hostile-checkpoint', '1', token => :'held', ttl => '365 days');
SELECT state, result FROM public.idem_get('hostile-checkpoint');
CREATE FUNCTION evil.work(pg_catalog.jsonb) RETURNS pg_catalog.jsonb LANGUAGE sql RETURN $1;
SELECT public.idem_run('hostile-run', 'evil.work(pg_catalog.jsonb)', '{"a": 1}'), public.idem_run('hostile-run', 'evil.work(pg_catalog.jsonb)', '{"a": 1.0}');
SELECT acquired, token AS held FROM public.lock_try('hostile-lock', ttl => '1h') \gset
SELECT public.lock_guard('hostile-lock', :'held') IS NOT NULL AS guarded, public.lock_extend('hostile-lock', :'held') IS NOT NULL AS extended;
SELECT public.lock_unlock('hostile-lock', :'held'), public.lock_try_xact('hostile-xact'), public.lock_acquire_xact('hostile-xact');
SELECT (public.lock_acquire('hostile-lock')).acquired;

-- An administrator with the same path.
RESET ROLE;
SELECT public.idem_grant('regress_idem_victim');
SELECT pg_catalog.has_function_privilege('regress_idem_victim', 'public.idem_extend(pg_catalog.text,pg_catalog.uuid,pg_catalog.interval,pg_catalog.text)', 'EXECUTE') AS granted;
SELECT public.idem_revoke('regress_idem_victim');
SELECT pg_catalog.has_function_privilege('regress_idem_victim', 'public.idem_extend(pg_catalog.text,pg_catalog.uuid,pg_catalog.interval,pg_catalog.text)', 'EXECUTE') AS granted;
SELECT public.idem_forget('hostile-lease');
SELECT in_progress FROM public.idem_overview;
SELECT name FROM public.lock_leases;
SELECT public.idem_purge();
SELECT key, state, result_size FROM public.idem_records ORDER BY pg_catalog.length(key), state, result_size;

-- The planted tables are as they were, the records are in ours.
RESET search_path;
SELECT result FROM evil.idem_segment_0;
SELECT count(*) FROM evil.idem_claims;
SELECT key, result FROM public.idem_segment_0;
SELECT count(*) FROM public.idem_claims;

-- No search_path at all.
SET search_path = '';
SET ROLE regress_idem_hostile;
SELECT status, result FROM public.idem_begin('a', '\x01');

\c :database
DROP DATABASE regress_idem_hostile;
DROP ROLE regress_idem_hostile, regress_idem_victim;
