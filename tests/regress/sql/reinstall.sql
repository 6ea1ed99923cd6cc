-- DROP EXTENSION and CREATE EXTENSION again, and ALTER EXTENSION SET SCHEMA, in a session that has
-- used it before and goes on using it.
\set database :DBNAME
CREATE DATABASE regress_idem_reinstall;
\c regress_idem_reinstall
CREATE EXTENSION idem;
PREPARE begin(text) AS SELECT status, attempt, result FROM idem_begin($1);
BEGIN;
EXECUTE begin('reinstall-1');
SELECT idem_complete('reinstall-1', '"first"');
COMMIT;
EXECUTE begin('reinstall-1');
SELECT status FROM idem_begin('reinstall-2', lease => '1h');

-- Dropped: the functions are gone.
DROP EXTENSION idem;
SELECT idem_begin('reinstall-1');
EXECUTE begin('reinstall-1');

-- Created again: it works, and nothing is remembered.
CREATE EXTENSION idem;
BEGIN;
EXECUTE begin('reinstall-1');
SELECT idem_complete('reinstall-1', '"second"');
COMMIT;
EXECUTE begin('reinstall-1');
SELECT status, attempt FROM idem_begin('reinstall-2', lease => '1h');

-- Dropped and created within a transaction that has used it, rolled back and committed.
BEGIN;
SELECT status FROM idem_begin('reinstall-3');
SELECT idem_complete('reinstall-3', '3');
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT status FROM idem_begin('reinstall-1');
SELECT idem_complete('reinstall-1', '"third"');
ROLLBACK;
SELECT status, result FROM idem_begin('reinstall-1');
SELECT count(*) FROM idem_get('reinstall-3');
BEGIN;
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT status FROM idem_begin('reinstall-1');
SELECT idem_complete('reinstall-1', '"third"');
COMMIT;
SELECT status, result FROM idem_begin('reinstall-1');

-- Dropped under an open claim: still no commit without completing it.
BEGIN;
SELECT status FROM idem_begin('reinstall-4');
DROP EXTENSION idem;
COMMIT;
SELECT status, result FROM idem_begin('reinstall-1');
-- And with a new installation it can be completed.
BEGIN;
SELECT status FROM idem_begin('reinstall-4');
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT idem_complete('reinstall-4', '4');
COMMIT;
SELECT status, result FROM idem_begin('reinstall-4');

-- Moved to another schema while a claim is open.
CREATE SCHEMA elsewhere;
BEGIN;
SELECT status FROM idem_begin('reinstall-5');
SELECT status FROM idem_begin('reinstall-6', lease => '1h');
ALTER EXTENSION idem SET SCHEMA elsewhere;
SELECT elsewhere.idem_complete('reinstall-5', '5');
SELECT elsewhere.idem_extend('reinstall-6') IS NOT NULL AS extended;
COMMIT;
SELECT status, result FROM elsewhere.idem_begin('reinstall-4');
SELECT status, result FROM elsewhere.idem_begin('reinstall-5');
SELECT key, state FROM elsewhere.idem_get('reinstall-6');
SELECT count(*) AS rows FROM elsewhere.idem_segment_0;
-- A table of the same name in the old schema is not taken for it.
CREATE TABLE idem_segment_0 (LIKE elsewhere.idem_segment_0 INCLUDING ALL);
SELECT status, result FROM elsewhere.idem_begin('reinstall-4');
BEGIN;
SELECT status FROM elsewhere.idem_begin('reinstall-7');
SELECT elsewhere.idem_complete('reinstall-7', '7');
COMMIT;
SELECT count(*) FROM idem_segment_0;
DROP TABLE idem_segment_0;
-- idem_grant finds it in its new place.
CREATE ROLE regress_idem_reinstall;
SELECT elsewhere.idem_grant('regress_idem_reinstall');
SET ROLE regress_idem_reinstall;
SELECT status, result FROM elsewhere.idem_begin('reinstall-5');
RESET ROLE;
-- And back again.
ALTER EXTENSION idem SET SCHEMA public;
SELECT status, result FROM idem_begin('reinstall-5');
EXECUTE begin('reinstall-5');
BEGIN;
ALTER EXTENSION idem SET SCHEMA elsewhere;
SELECT status, result FROM elsewhere.idem_begin('reinstall-5');
ROLLBACK;
SELECT status, result FROM idem_begin('reinstall-5');

-- The database can be dropped and the roles too: nothing is left behind.
DROP EXTENSION idem;
SELECT proname FROM pg_proc WHERE proname LIKE 'idem\_%';
SELECT relname FROM pg_class WHERE relname LIKE 'idem\_%';
\c :database
DROP DATABASE regress_idem_reinstall;
DROP ROLE regress_idem_reinstall;
