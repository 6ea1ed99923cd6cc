-- lock_unlock frees a lock for the token that holds it, and only then says true; it takes effect at COMMIT. For any
-- other token, once more, or when the lease is over it says false and changes nothing.
SET ROLE app;
SELECT token AS held FROM lock_try('unlock-1', ttl => '1h', holder => 'me') \gset
SELECT token AS stranger FROM lock_try('unlock-other', ttl => '1h') \gset

-- Another's lock, another scope, another name: false.
SELECT lock_unlock('unlock-1', :'stranger');
SELECT lock_unlock('unlock-1', '00000000-0000-0000-0000-000000000000');
SELECT lock_unlock('unlock-1', :'held', scope => 'other');
SELECT lock_unlock('unlock-1', :'stranger', scope => '');
SELECT lock_unlock('unlock-nothing', :'held');
SELECT acquired, held_by FROM lock_try('unlock-1');
SELECT lock_guard('unlock-1', :'held') IS NOT NULL AS still_held;

-- One's own: true; from another transaction than the taker's, and free at once afterwards.
SELECT lock_unlock('unlock-1', :'held');
SELECT acquired, token <> :'held' AS other_token FROM lock_try('unlock-1', ttl => '1h') \gset
\echo :acquired :other_token
-- Again: false, whoever has it now.
SELECT lock_unlock('unlock-1', :'held');
SELECT acquired FROM lock_try('unlock-1');
SELECT token AS held FROM lock_try('unlock-2', ttl => '1h') \gset
SELECT lock_unlock('unlock-2', :'held');
SELECT lock_unlock('unlock-2', :'held');

-- Expired: false, whether or not somebody took it.
SELECT token AS late FROM lock_try('unlock-3', ttl => '1us') \gset
SELECT lock_unlock('unlock-3', :'late');
SELECT acquired FROM lock_try('unlock-3', ttl => '1h', holder => 'next');
SELECT lock_unlock('unlock-3', :'late');
SELECT acquired, held_by FROM lock_try('unlock-3');

-- In the transaction that took it: free for this one, which may take it again with a higher fence.
BEGIN;
SELECT token, fence FROM lock_try('unlock-4', ttl => '1h') \gset first_
SELECT lock_unlock('unlock-4', :'first_token');
SELECT lock_unlock('unlock-4', :'first_token') AS again;
SELECT acquired, token <> :'first_token' AS other_token, fence > :first_fence AS higher FROM lock_try('unlock-4', ttl => '1h');
SELECT lock_unlock('unlock-4', :'first_token') AS with_the_first;
COMMIT;
SELECT acquired FROM lock_try('unlock-4');
BEGIN;
SELECT token FROM lock_try('unlock-5', ttl => '1h') \gset
SELECT lock_unlock('unlock-5', :'token');
COMMIT;
SELECT acquired FROM lock_try('unlock-5');

-- Rolled back: still held, with its token.
SELECT token AS held FROM lock_try('unlock-6', ttl => '1h') \gset
BEGIN;
SELECT lock_unlock('unlock-6', :'held');
ROLLBACK;
SELECT acquired FROM lock_try('unlock-6');
SELECT lock_unlock('unlock-6', :'held');

-- A free lock keeps its row, for its fence; nothing of the holder is left in it.
RESET ROLE;
SELECT name, token, holder, fence > 0 AS fence FROM idem_locks WHERE name = 'unlock-2' OR name = 'unlock-6' ORDER BY name COLLATE "C";
-- One that says false leaves no lock behind.
SET ROLE app;
BEGIN;
SELECT lock_unlock('unlock-4', :'held');
SELECT count(*) AS advisory FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT count(*) AS relations FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text LIKE 'idem\_locks%';
COMMIT;
