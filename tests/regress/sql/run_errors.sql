-- What idem_run raises: its own errors with their SQLSTATEs, and the function's errors untouched.
CREATE TABLE run_rows (sku text PRIMARY KEY);
GRANT SELECT, INSERT ON run_rows TO app;
CREATE FUNCTION run_insert(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run_rows VALUES (request->>'sku');
    RETURN request;
END
$$;
CREATE FUNCTION run_raise(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'XY123', MESSAGE = 'the message', DETAIL = 'the detail', HINT = 'the hint',
        COLUMN = 'a column', CONSTRAINT = 'a constraint', DATATYPE = 'a type', TABLE = 'a table', SCHEMA = 'a schema';
END
$$;
SET ROLE app;
SET idem.scope = 'test_run_errors';
SELECT idem_run('run-1', 'run_insert(jsonb)', '{"sku": "book"}');

-- ID002
SELECT idem_run('run-1', 'run_insert(jsonb)', '{"sku": "pen"}');
\echo :LAST_ERROR_SQLSTATE
-- ID004
SELECT idem_run('run-2', 'run_insert(jsonb)', '{"sku": "pen"}', owner => 'alice');
SELECT idem_run('run-2', 'run_insert(jsonb)', '{"sku": "pen"}', owner => 'bob');
\echo :LAST_ERROR_SQLSTATE
-- ID001, ID005
SELECT status FROM idem_begin('run-3', lease => '1 hour');
\set VERBOSITY sqlstate
SELECT idem_run('run-3', 'run_insert(jsonb)', '{"sku": "lamp"}');
\set VERBOSITY default
SELECT status FROM idem_begin('run-4', lease => '1 microsecond');
SELECT idem_run('run-4', 'run_insert(jsonb)', '{"sku": "lamp"}', takeover => false);
\echo :LAST_ERROR_SQLSTATE
SELECT idem_run('run-4', 'run_insert(jsonb)', '{"sku": "lamp"}');
SELECT attempt FROM idem_get('run-4');
-- ID001: a transaction that holds the key cannot run it
BEGIN;
SELECT status FROM idem_begin('run-5');
SELECT idem_run('run-5', 'run_insert(jsonb)', '{"sku": "desk"}');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- An error of the function arrives as it is, and nothing is stored.
\set SHOW_CONTEXT never
SELECT idem_run('run-6', 'run_insert(jsonb)', '{"sku": "book"}');
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM idem_get('run-6');
DO $$
DECLARE
    d text; h text; c text; n text; t text; s text; y text; state text; context text;
BEGIN
    PERFORM idem_run('run-7', 'run_raise(jsonb)', '1');
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, d = PG_EXCEPTION_DETAIL, h = PG_EXCEPTION_HINT, c = COLUMN_NAME,
        n = CONSTRAINT_NAME, y = PG_DATATYPE_NAME, t = TABLE_NAME, s = SCHEMA_NAME, context = PG_EXCEPTION_CONTEXT;
    RAISE NOTICE '% % | % | % | % | % | % | % | %', state, SQLERRM, d, h, c, n, y, t, s;
    RAISE NOTICE 'names the function: %', context LIKE '%function run_raise(jsonb)%';
END
$$;
SELECT count(*) FROM idem_get('run-7');
-- Caught within a transaction: the claim is gone with the savepoint, the transaction goes on.
BEGIN;
SAVEPOINT s;
SELECT idem_run('run-7', 'run_raise(jsonb)', '1');
ROLLBACK TO s;
SELECT idem_run('run-7', 'run_insert(jsonb)', '{"sku": "chair"}');
COMMIT;

-- A result that is too large: ID006, and what the function did is undone.
RESET ROLE;
SET idem.max_result_size = 10;
SET ROLE app;
SELECT idem_run('run-8', 'run_insert(jsonb)', '{"sku": "wardrobe"}');
\echo :LAST_ERROR_SQLSTATE
RESET ROLE;
RESET idem.max_result_size;
SELECT sku FROM run_rows ORDER BY sku;
DROP FUNCTION run_insert, run_raise;
DROP TABLE run_rows;
