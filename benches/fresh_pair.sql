\set key random(100000000000000, 999999999999999)
BEGIN;
SELECT status, result FROM pair_begin(:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef');
INSERT INTO work (sku, qty) VALUES ('book', 1);
SELECT pair_complete(:key::text, '{"id": "ord_1", "sku": "book"}');
COMMIT;
