\set key random(1, 1000)
SELECT status FROM idem_begin(:key::text);
