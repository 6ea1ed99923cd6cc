BEGIN;
SELECT (SELECT token FROM lease WHERE name = :client_id::text);
INSERT INTO work (sku, qty) VALUES ('book', 1);
COMMIT;
