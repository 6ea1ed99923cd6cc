\set key random(100000000000000, 999999999999999)
BEGIN;
SELECT pg_advisory_xact_lock(hashtext(:key::text));
SELECT status, result FROM advisory WHERE key = :key::text;
INSERT INTO work (sku, qty) VALUES ('book', 1);
INSERT INTO advisory (key, request_hash, status, result, completed_at) VALUES (:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef', 'completed', '{"id": "ord_1", "sku": "book"}', now());
COMMIT;
