-- idem_run runs a function once and stores its result; a retry gets what is stored.
CREATE TABLE run_orders (id int GENERATED ALWAYS AS IDENTITY, sku text UNIQUE);
GRANT SELECT, INSERT ON run_orders TO app;
CREATE FUNCTION run_create_order(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    new_id int;
BEGIN
    INSERT INTO run_orders (sku) VALUES (request->>'sku') RETURNING id INTO new_id;
    RETURN jsonb_build_object('id', new_id, 'by', current_user);
END
$$;
SET ROLE app;
SET idem.scope = 'test_run';

SELECT idem_run('run-1', 'run_create_order(jsonb)', '{"sku": "book", "qty": 1}');
-- The same request, spelled differently.
SELECT idem_run('run-1', 'run_create_order(jsonb)', '{"qty": 1.0, "sku": "book"}');
SELECT count(*) FROM run_orders;
-- It is an ordinary record with an ordinary fingerprint.
SELECT status, result FROM idem_begin('run-1', idem_fingerprint_json('{"sku": "book", "qty": 1}'));
SELECT status FROM idem_begin('run-1', idem_fingerprint_json('{"sku": "book", "qty": 2}'));

-- Without a request nothing is compared.
SELECT idem_run('run-1', 'run_create_order(jsonb)');

-- It takes part in the transaction: after a rollback the next call runs.
BEGIN;
SELECT idem_run('run-2', 'run_create_order(jsonb)', '{"sku": "pen"}') ? 'id' AS ran;
ROLLBACK;
SELECT idem_run('run-2', 'run_create_order(jsonb)', '{"sku": "pen"}') ? 'id' AS ran;
SELECT sku FROM run_orders ORDER BY sku;

-- scope and ttl
SELECT idem_run('run-1', 'run_create_order(jsonb)', '{"sku": "lamp"}', scope => 'other') ? 'id' AS ran;
SELECT idem_run('run-3', 'run_create_order(jsonb)', '{"sku": "desk"}', ttl => '1 microsecond') ? 'id' AS ran;
SELECT expires_at - completed_at AS ttl FROM idem_get('run-2');
SELECT count(*) FROM idem_get('run-3');

-- A function that returns NULL has run: the NULL is replayed.
RESET ROLE;
CREATE FUNCTION run_null(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run_orders (sku) VALUES ('null');
    RETURN NULL;
END
$$;
SET ROLE app;
SELECT idem_run('run-4', 'run_null(jsonb)') IS NULL AS null;
SELECT idem_run('run-4', 'run_null(jsonb)') IS NULL AS null;
SELECT count(*) FROM run_orders WHERE sku = 'null';

-- Statements of the function see what they wrote, and so does what follows in the same query.
RESET ROLE;
CREATE FUNCTION run_count(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
    INSERT INTO run_orders (sku) VALUES ('counted');
    SELECT to_jsonb(count(*)) FROM run_orders WHERE sku = 'counted';
$$;
SET ROLE app;
SELECT idem_run('run-5', 'run_count(jsonb)');

RESET ROLE;
DROP FUNCTION run_create_order, run_null, run_count;
DROP TABLE run_orders;
