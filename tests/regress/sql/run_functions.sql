-- What idem_run will not run is refused before anything runs, and nothing is claimed.
CREATE FUNCTION run_ok(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION run_strict(jsonb) RETURNS jsonb LANGUAGE sql STRICT AS 'SELECT $1';
CREATE FUNCTION run_two(jsonb, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION run_none() RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION run_text(jsonb) RETURNS text LANGUAGE sql AS 'SELECT NULL::text';
CREATE FUNCTION run_from_text(text) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION run_set(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
CREATE PROCEDURE run_procedure(jsonb) LANGUAGE sql AS 'SELECT $1';
CREATE AGGREGATE run_aggregate(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
CREATE FUNCTION run_secret(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
REVOKE ALL ON FUNCTION run_secret FROM PUBLIC;
CREATE FUNCTION run_again(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT idem_run('again', 'run_again(jsonb)') $$;
CREATE FUNCTION run_release(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(idem_release('ends-itself')) $$;
CREATE FUNCTION run_complete(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT to_jsonb(idem_complete('ends-itself', '1')::text) $$;
SET ROLE app;
SET idem.scope = 'test_run_functions';

SELECT idem_run('k', NULL);
SELECT idem_run('k', 'run_strict(jsonb)');
SELECT idem_run('k', 'run_two(jsonb, jsonb)', '1');
SELECT idem_run('k', 'run_procedure(jsonb)', '1');
\set VERBOSITY sqlstate
SELECT idem_run('k', 'run_none()', '1');
SELECT idem_run('k', 'run_text(jsonb)', '1');
SELECT idem_run('k', 'run_from_text(text)', '1');
SELECT idem_run('k', 'run_set(jsonb)', '1');
SELECT idem_run('k', 'run_aggregate(jsonb)', '1');
SELECT idem_run('k', 'run_secret(jsonb)', '1');
SELECT idem_run('k', 'no_such_function(jsonb)', '1');
SELECT idem_run(NULL, 'run_ok(jsonb)', '1');
SELECT idem_run('', 'run_ok(jsonb)', '1');
SELECT idem_run('k', 'run_ok(jsonb)', '1', takeover => NULL);
SELECT idem_run('k', 'run_ok(jsonb)', '1', wait => '-1 s');
SELECT idem_run('k', 'run_ok(jsonb)', '1', ttl => '0');
\set VERBOSITY default
-- Nothing of all that has touched the key.
SELECT idem_run('k', 'run_strict(jsonb)', '"ran"');

-- A dropped function: the prepared statement still has its OID.
PREPARE dropped AS SELECT idem_run('dropped', 'run_ok(jsonb)', '1');
RESET ROLE;
DROP FUNCTION run_ok;
SET ROLE app;
\set VERBOSITY sqlstate
EXECUTE dropped;
\set VERBOSITY default

-- A run within itself, and a function that ends the claim it runs under.
SELECT idem_run('again', 'run_again(jsonb)');
SELECT idem_run('ends-itself', 'run_release(jsonb)');
SELECT idem_run('ends-itself', 'run_complete(jsonb)');
SELECT count(*) FROM idem_get('ends-itself');

RESET ROLE;
DROP FUNCTION run_strict, run_two, run_none, run_text, run_from_text, run_set, run_secret, run_again, run_release, run_complete;
DROP PROCEDURE run_procedure;
DROP AGGREGATE run_aggregate(jsonb);
