-- Who looks before claiming; a key that is not there then needs the INSERT all the same.
\set key random(1, 1000)
SELECT status, result, request_hash = '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef' FROM handwritten WHERE key = :key::text;
