-- A claim without a lease can never be committed unfinished: COMMIT raises ID007, so that a
-- forgotten idem_complete does not become a duplicate. The whole transaction is rolled back.
SET ROLE app;
CREATE TEMP TABLE business (what text);

BEGIN;
SELECT status FROM idem_begin('open-1');
INSERT INTO business VALUES ('open-1');
COMMIT;
SELECT count(*) AS business FROM business;
-- Rolled back, so a retry runs.
BEGIN;
SELECT status, attempt FROM idem_begin('open-1');
ROLLBACK;

-- In autocommit the hint says what is missing.
SELECT status FROM idem_begin('open-2');

-- DETAIL counts the claims; those completed, released or on a lease do not.
BEGIN;
SELECT count(*) FROM generate_series(1, 5) AS n, idem_begin('open-3-' || n);
SELECT status FROM idem_begin('open-3-lease', lease => '1h');
SELECT idem_complete('open-3-1', '1');
SELECT idem_release('open-3-2');
COMMIT;
SELECT count(*) AS left_over FROM generate_series(1, 5) AS n, idem_get('open-3-' || n);
SELECT count(*) AS left_over FROM idem_get('open-3-lease');

\set VERBOSITY sqlstate
-- PREPARE TRANSACTION.
BEGIN;
SELECT status FROM idem_begin('open-4');
PREPARE TRANSACTION 'regress_idem_open';
ROLLBACK PREPARED 'regress_idem_open'; -- there is none

-- COMMIT AND CHAIN.
BEGIN;
SELECT status FROM idem_begin('open-5');
COMMIT AND CHAIN;
-- No transaction was chained, and ID007 is not raised a second time.
ROLLBACK;
BEGIN;
COMMIT;

-- Implicit transactions of several statements, DO, CALL.
SELECT status FROM idem_begin('open-6')\; SELECT 1 AS one;
DO $$ BEGIN PERFORM idem_begin('open-6'); END $$;
SELECT status FROM idem_begin('open-6')\; SELECT idem_complete('open-6', '6');
DO $$ BEGIN PERFORM idem_begin('open-7'); PERFORM idem_complete('open-7', '7'); END $$;
SELECT key, result FROM (VALUES ('open-6'), ('open-7')) AS keys (k), idem_get(k);

-- COMMIT inside a procedure.
CREATE PROCEDURE pg_temp.forgets() LANGUAGE plpgsql AS $$
BEGIN
    PERFORM idem_begin('open-8');
    COMMIT;
END
$$;
CALL pg_temp.forgets();
CREATE PROCEDURE pg_temp.finishes() LANGUAGE plpgsql AS $$
BEGIN
    FOR n IN 1..3 LOOP
        PERFORM idem_begin('open-9-' || n);
        PERFORM idem_complete('open-9-' || n, to_jsonb(n));
        COMMIT;
        PERFORM idem_begin('open-9-' || n || '-rolled-back');
        ROLLBACK;
    END LOOP;
END
$$;
CALL pg_temp.finishes();
SELECT key, result FROM generate_series(1, 3) AS n, idem_get('open-9-' || n);
SELECT count(*) FROM generate_series(1, 3) AS n, idem_get('open-9-' || n || '-rolled-back');

-- Work that is deferred to COMMIT may still complete the claim, or make one too late.
CREATE TEMP TABLE deferred (key text, complete boolean);
CREATE FUNCTION pg_temp.at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.complete THEN
        PERFORM idem_complete(NEW.key, '"deferred"');
    ELSE
        PERFORM idem_begin(NEW.key);
    END IF;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION pg_temp.at_commit();
BEGIN;
SELECT status FROM idem_begin('open-10');
INSERT INTO deferred VALUES ('open-10', true);
COMMIT;
SELECT state, result FROM idem_get('open-10');
BEGIN;
INSERT INTO deferred VALUES ('open-11', false);
COMMIT;
SELECT count(*) FROM idem_get('open-11');

-- A lease makes the claim outlive its transaction: no ID007.
BEGIN;
SELECT status FROM idem_begin('open-12', lease => '1h');
COMMIT;
SELECT state FROM idem_get('open-12');

-- A claim that was rolled back with its savepoint is no open claim; one that is open again is.
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_begin('open-13');
ROLLBACK TO s;
COMMIT;
BEGIN;
SELECT status FROM idem_begin('open-13');
SAVEPOINT s;
SELECT idem_complete('open-13', '1');
ROLLBACK TO s;
COMMIT;
SELECT count(*) FROM idem_get('open-13');

-- The session works on as ever, and nothing is left locked.
BEGIN;
SELECT status FROM idem_begin('open-14');
SELECT idem_complete('open-14', '1');
COMMIT;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
