SELECT token FROM lock_try(:client_id::text) \gset
SELECT lock_unlock(:client_id::text, :token::uuid);
