-- All clients ask for one key, which changes every 50 ms; its work takes 2 ms. Even replays take turns.
SELECT 'storm-' || floor(extract(epoch FROM clock_timestamp()) * 20) AS key \gset
BEGIN;
SELECT pg_advisory_xact_lock(hashtext(:key::text));
SELECT count(*) = 0 AS acquired FROM advisory WHERE key = :key::text \gset
\if :acquired
\sleep 2 ms
INSERT INTO work (sku, qty) VALUES (:key::text, 1);
INSERT INTO advisory (key, status, result, completed_at) VALUES (:key::text, 'completed', '{"id": "ord_1", "sku": "book"}', now());
\endif
COMMIT;
