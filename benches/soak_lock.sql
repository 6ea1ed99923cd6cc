-- One of many names, which is hardly ever used again.
\set name random(100000000000000, 999999999999999)
SELECT token FROM lock_try(:name::text) \gset
SELECT lock_unlock(:name::text, :token::uuid);
