-- CREATE EXTENSION idem SCHEMA s works: idem_grant gives USAGE on the schema where it is needed, and
-- nothing depends on the search_path.
\set database :DBNAME
CREATE DATABASE regress_idem_schema;
\c regress_idem_schema
CREATE SCHEMA "Idem Schema";
CREATE EXTENSION idem SCHEMA "Idem Schema";
CREATE ROLE regress_idem_schema;
SELECT "Idem Schema".idem_grant('regress_idem_schema');
SELECT count(*) AS elsewhere FROM pg_class WHERE relname LIKE 'idem\_%' AND relnamespace <> '"Idem Schema"'::regnamespace;
SET ROLE regress_idem_schema;
-- Without the schema on the search_path.
BEGIN;
SELECT status FROM "Idem Schema".idem_begin('schema-1');
SELECT "Idem Schema".idem_complete('schema-1', '1');
COMMIT;
SET search_path = '';
SELECT status, result FROM "Idem Schema".idem_begin('schema-1');
SELECT token AS held FROM "Idem Schema".idem_begin('schema-2', lease => '1h') \gset
SELECT "Idem Schema".idem_extend('schema-2', :'held') IS NOT NULL AS extended;
SELECT "Idem Schema".idem_complete('schema-2', '2', token => :'held');
SELECT key, state, result FROM "Idem Schema".idem_get('schema-2');
-- With it.
SET search_path = "Idem Schema";
SELECT status, result FROM idem_begin('schema-1');
RESET search_path;
RESET ROLE;
SELECT key FROM "Idem Schema".idem_segment_0 ORDER BY key;
-- Revoked: USAGE stays, since it may serve others.
SELECT "Idem Schema".idem_revoke('regress_idem_schema');
SET ROLE regress_idem_schema;
\set VERBOSITY terse
SELECT "Idem Schema".idem_begin('schema-1');
\c :database
DROP DATABASE regress_idem_schema;
DROP ROLE regress_idem_schema;
