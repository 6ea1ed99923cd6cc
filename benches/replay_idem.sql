\set key random(1, 1000)
SELECT status, result FROM idem_begin(:key::text, '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef');
