-- Triggers, rules, row security and foreign keys on the tables do not apply: only the functions
-- write them, and they do it without SQL. (Documented; an administrator who adds them must know.)
\set database :DBNAME
CREATE DATABASE regress_idem_triggers;
\c regress_idem_triggers
CREATE EXTENSION idem;
SELECT idem_grant('app');
CREATE FUNCTION fires() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trigger % fired', TG_NAME; END $$;
CREATE TRIGGER before_row BEFORE INSERT OR UPDATE OR DELETE ON idem_segment_0 FOR EACH ROW EXECUTE FUNCTION fires();
CREATE TRIGGER after_row AFTER INSERT OR UPDATE OR DELETE ON idem_segment_0 FOR EACH ROW EXECUTE FUNCTION fires();
CREATE TRIGGER after_statement AFTER INSERT OR UPDATE OR DELETE ON idem_segment_0 FOR EACH STATEMENT EXECUTE FUNCTION fires();
CREATE TRIGGER before_row BEFORE INSERT OR UPDATE OR DELETE ON idem_claims FOR EACH ROW EXECUTE FUNCTION fires();
CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT OR UPDATE OR DELETE ON idem_claims DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fires();
CREATE RULE nothing AS ON INSERT TO idem_claims DO INSTEAD NOTHING;
ALTER TABLE idem_segment_0 ENABLE ROW LEVEL SECURITY;
ALTER TABLE idem_claims ENABLE ROW LEVEL SECURITY;
-- They do fire for SQL.
\set VERBOSITY terse
INSERT INTO idem_segment_0 DEFAULT VALUES;

SET ROLE app;
BEGIN;
SELECT status FROM idem_begin('triggers-1');
SELECT idem_complete('triggers-1', '1', ttl => '1us');
COMMIT;
SELECT pg_sleep(0.01);
SELECT token AS held FROM idem_begin('triggers-1', lease => '1h') \gset
SELECT idem_extend('triggers-1', :'held') IS NOT NULL AS extended;
SELECT idem_complete('triggers-1', '2', token => :'held');
SELECT status, result FROM idem_begin('triggers-1');
SELECT token AS held FROM idem_begin('triggers-2', lease => '1h') \gset
SELECT idem_release('triggers-2', :'held');
RESET ROLE;
SELECT idem_forget('triggers-1');

\c :database
DROP DATABASE regress_idem_triggers;
