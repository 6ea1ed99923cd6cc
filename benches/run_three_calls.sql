\set key random(100000000000000, 999999999999999)
BEGIN;
SELECT status, result FROM idem_begin(:key::text, idem_fingerprint_json('{"sku": "book", "qty": 1}'));
SELECT work('{"sku": "book", "qty": 1}');
SELECT idem_complete(:key::text, '{"id": "ord_1", "sku": "book"}');
COMMIT;
