-- All clients ask for one key, which changes every 50 ms; its work takes 2 ms.
SELECT 'storm-' || floor(extract(epoch FROM clock_timestamp()) * 20) AS key \gset
BEGIN;
SELECT status = 'acquired' AS acquired FROM idem_begin(:key::text) \gset
\if :acquired
\sleep 2 ms
INSERT INTO work (sku, qty) VALUES (:key::text, 1);
SELECT idem_complete(:key::text, '{"id": "ord_1", "sku": "book"}');
\endif
COMMIT;
