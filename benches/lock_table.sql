SELECT gen_random_uuid() AS token \gset
INSERT INTO lease AS l VALUES (:client_id::text, :token::uuid, now() + interval '30s') ON CONFLICT (name) DO UPDATE SET token = excluded.token, expires_at = excluded.expires_at WHERE l.token IS NULL OR l.expires_at < now();
UPDATE lease SET token = NULL WHERE name = :client_id::text AND token = :token::uuid;
