-- Few keys: replayed until they expire, then new again, in the place of the expired record.
\set key random(1, 5000)
BEGIN;
SELECT status = 'acquired' AS acquired FROM idem_begin('replay ' || :key, wait => '10s') \gset
\if :acquired
INSERT INTO work (sku, qty) VALUES ('book', 1);
SELECT idem_complete('replay ' || :key, '{"id": "ord_1", "sku": "book"}');
\endif
COMMIT;
