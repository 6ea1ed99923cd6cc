BEGIN;
SELECT pg_try_advisory_xact_lock(hashtext(:client_id::text));
INSERT INTO work (sku, qty) VALUES ('book', 1);
COMMIT;
