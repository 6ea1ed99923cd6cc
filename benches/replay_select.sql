\set key random(1, 1000)
SELECT 1;
