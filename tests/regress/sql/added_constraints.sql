-- An administrator's NOT NULL, CHECK or generated column on our tables is never silently broken: either
-- the writer fails and all rolls back, or the row obeys. (A row that breaks one could not be restored
-- from a dump.)
\set database :DBNAME
CREATE DATABASE regress_idem_constraints;
\c regress_idem_constraints
CREATE EXTENSION idem;
SELECT idem_grant('app');
-- Completes a key, or claims one on a lease, whatever comes of it.
CREATE FUNCTION try(key text, lease interval) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM idem_begin(key, lease => lease);
    IF lease IS NULL THEN
        PERFORM idem_complete(key, '1');
    END IF;
EXCEPTION WHEN OTHERS THEN
END
$$;

SET ROLE app;
SELECT try('constraints-1', NULL), try('constraints-2', '1h');
RESET ROLE;
ALTER TABLE idem_segment_0 ADD COLUMN note text NOT NULL DEFAULT 'none', ADD COLUMN twice int GENERATED ALWAYS AS (attempt * 2) STORED,
    ADD CHECK (key <> 'constraints-4');
ALTER TABLE idem_claims ADD COLUMN note text NOT NULL DEFAULT 'none', ADD CHECK (key <> 'constraints-6');
SET ROLE app;
SELECT try('constraints-3', NULL), try('constraints-4', NULL), try('constraints-5', '1h'), try('constraints-6', '1h');
-- What was stored before is replayed, extended as ever.
SELECT status, result FROM idem_begin('constraints-1');
RESET ROLE;
SELECT key, note, twice FROM idem_segment_0 WHERE note IS NULL OR twice IS NULL OR key = 'constraints-4';
SELECT key, note FROM idem_claims WHERE note IS NULL OR key = 'constraints-6';

\c :database
DROP DATABASE regress_idem_constraints;
