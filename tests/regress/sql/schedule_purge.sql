-- Without pg_cron, idem_schedule_purge says what to do. With it: harness/tests/cron.rs.
\set SHOW_CONTEXT never
SELECT idem_schedule_purge(NULL);
\echo :SQLSTATE
SELECT idem_schedule_purge();
\echo :SQLSTATE
-- Nothing is scheduled.
SELECT idem_unschedule_purge();

-- In a database whose name, and with the extension in a schema whose name, needs quotes.
\set database :DBNAME
CREATE DATABASE "regress idem's";
\c "regress idem's"
CREATE SCHEMA "Idem Schema";
CREATE EXTENSION idem SCHEMA "Idem Schema";
SELECT "Idem Schema".idem_schedule_purge();
-- A schema of the name is not pg_cron, and nothing of it is used.
CREATE SCHEMA cron;
CREATE FUNCTION cron.schedule(text, text, text) RETURNS bigint LANGUAGE sql RETURN 666;
CREATE TABLE cron.job AS SELECT 1 AS jobid, 'idem_purge in regress idem''s' AS jobname;
\set VERBOSITY terse
SELECT "Idem Schema".idem_schedule_purge();
SELECT "Idem Schema".idem_unschedule_purge();
\c :database
DROP DATABASE "regress idem's";

-- For administrators only.
SET ROLE app;
SELECT idem_schedule_purge();
SELECT idem_unschedule_purge();
RESET ROLE;
