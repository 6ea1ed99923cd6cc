-- A transaction may hold thousands of keys with default settings. Past the server's lock table it
-- gets PostgreSQL's 53200 with its hint, and nothing is half done.
-- (Runs alone: for a moment it takes the whole lock table of the server.)
SET ROLE app;
BEGIN;
SELECT count(*) FROM generate_series(1, 5000) AS n, idem_begin('many-' || n) AS b WHERE b.status = 'acquired';
SELECT count(*) FROM generate_series(1, 5000) AS n, idem_complete('many-' || n, to_jsonb(n));
COMMIT;
SELECT count(*), sum(result::int) FROM generate_series(1, 5000) AS n, idem_begin('many-' || n) AS b WHERE b.status = 'completed';

BEGIN;
SELECT status FROM idem_begin('many-kept');
SELECT idem_complete('many-kept', '1');
DO $$
DECLARE
    hint text;
BEGIN
    PERFORM idem_begin('many-' || n) FROM generate_series(5001, 1000000) AS n;
EXCEPTION WHEN out_of_memory THEN
    GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
    RAISE NOTICE '%: %', SQLSTATE, regexp_replace(hint, '.*(max_locks_per_transaction).*', '\1');
END
$$;
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
COMMIT;
SELECT result FROM idem_get('many-kept');
SELECT count(*) FROM generate_series(5001, 10000) AS n, idem_get('many-' || n);
SELECT count(*) FROM generate_series(5001, 9000) AS n, idem_begin('many-' || n, lease => '1us') AS b WHERE b.status = 'acquired';
