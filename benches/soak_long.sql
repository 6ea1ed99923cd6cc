-- A record that outlives its segment.
\set key random(100000000000000, 999999999999999)
BEGIN;
SELECT status FROM idem_begin(:key::text);
INSERT INTO work (sku, qty) VALUES ('book', 1);
SELECT idem_complete(:key::text, '{"id": "ord_1", "sku": "book"}', ttl => '2 minutes');
COMMIT;
