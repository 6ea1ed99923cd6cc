\set key random(100000000000000, 999999999999999)
BEGIN;
INSERT INTO handwritten (key, request_hash) VALUES (:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef') ON CONFLICT DO NOTHING;
INSERT INTO work (sku, qty) VALUES ('book', 1);
UPDATE handwritten SET status = 'completed', result = '{"id": "ord_1", "sku": "book"}', completed_at = now() WHERE key = :key::text;
COMMIT;
