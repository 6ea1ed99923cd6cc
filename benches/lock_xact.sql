BEGIN;
SELECT lock_try_xact(:client_id::text);
INSERT INTO work (sku, qty) VALUES ('book', 1);
COMMIT;
