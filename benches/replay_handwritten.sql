\set key random(1, 1000)
INSERT INTO handwritten (key, request_hash) VALUES (:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef') ON CONFLICT DO NOTHING;
SELECT status, result FROM handwritten WHERE key = :key::text;
