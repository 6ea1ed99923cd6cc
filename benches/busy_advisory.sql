\set key random(1, 1000)
SELECT pg_try_advisory_xact_lock(hashtext(:key::text));
