\set key random(100000000000000, 999999999999999)
INSERT INTO library (key, request_hash, locked_until) VALUES (:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef', now() + interval '30s') ON CONFLICT DO NOTHING;
BEGIN;
INSERT INTO work (sku, qty) VALUES ('book', 1);
UPDATE library SET status = 'completed', result = '{"id": "ord_1", "sku": "book"}', completed_at = now() WHERE key = :key::text AND status = 'in_progress';
COMMIT;
