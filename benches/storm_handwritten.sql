-- All clients ask for one key, which changes every 50 ms; its work takes 2 ms. Who meets the open claim waits for it.
SELECT 'storm-' || floor(extract(epoch FROM clock_timestamp()) * 20) AS key \gset
BEGIN;
WITH claim AS (INSERT INTO handwritten (key) VALUES (:key::text) ON CONFLICT DO NOTHING RETURNING 1) SELECT count(*) = 1 AS acquired FROM claim \gset
\if :acquired
\sleep 2 ms
INSERT INTO work (sku, qty) VALUES (:key::text, 1);
UPDATE handwritten SET status = 'completed', result = '{"id": "ord_1", "sku": "book"}', completed_at = now() WHERE key = :key::text;
\else
SELECT status, result FROM handwritten WHERE key = :key::text;
\endif
COMMIT;
