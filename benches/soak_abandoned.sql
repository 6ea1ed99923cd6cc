-- A claim whose holder never comes back.
\set key random(100000000000000, 999999999999999)
SELECT status FROM idem_begin(:key::text, lease => '1s');
