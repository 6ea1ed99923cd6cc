-- Each client guards one of the locks that the setup took; their tokens are in the table lease.
BEGIN;
SELECT lock_guard(:client_id::text, (SELECT token FROM lease WHERE name = :client_id::text));
INSERT INTO work (sku, qty) VALUES ('book', 1);
COMMIT;
