\set key random(100000000000000, 999999999999999)
BEGIN;
SELECT idem_once(:key::text);
INSERT INTO work (sku, qty) VALUES ('book', 1);
COMMIT;
