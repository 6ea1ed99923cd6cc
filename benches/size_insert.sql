\set key random(100000000000000, 999999999999999)
BEGIN;
SELECT 1;
INSERT INTO work (sku, qty) VALUES ('book', 1);
INSERT INTO finished SELECT gen_random_uuid(), gen_random_uuid(), clock_timestamp(), clock_timestamp(), clock_timestamp() + interval '24h', 1, '', :key::text, NULL, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef', (SELECT result FROM payload WHERE size = :size), NULL;
COMMIT;
