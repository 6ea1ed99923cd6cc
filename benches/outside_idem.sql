-- The claim lives on a lease: its commit waits for the disk.
\set key random(100000000000000, 999999999999999)
SELECT status, token FROM idem_begin(:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef', lease => '30s') \gset
BEGIN;
INSERT INTO work (sku, qty) VALUES ('book', 1);
SELECT idem_complete(:key::text, '{"id": "ord_1", "sku": "book"}', token => :token::uuid);
COMMIT;
