\set key random(100000000000000, 999999999999999)
BEGIN;
INSERT INTO handwritten (key) VALUES (:key::text) ON CONFLICT DO NOTHING;
INSERT INTO work (sku, qty) VALUES ('book', 1);
COMMIT;
