-- The scope is a part of the key of its own: no key reaches another scope, whatever bytes it holds.
SET ROLE app;

-- One key, three scopes: three records.
BEGIN;
SELECT scope, status FROM unnest(ARRAY['', 'scopes-a', 'scopes-b']) AS scope, idem_begin('scopes-1', scope => scope);
SELECT count(*) FROM unnest(ARRAY['', 'scopes-a', 'scopes-b']) AS scope, idem_complete('scopes-1', to_jsonb(scope), scope => scope);
COMMIT;
SELECT scope, status, result FROM unnest(ARRAY['', 'scopes-a', 'scopes-b']) AS scope, idem_begin('scopes-1', scope => scope);
SELECT scope, status FROM unnest(ARRAY['scopes-c', 'scopes-A', ' scopes-a', 'scopes-a ']) AS scope,
    idem_begin('scopes-1', scope => scope, lease => '1h');

-- NULL means the setting idem.scope, which is empty by default: '' and NULL are the same then.
SHOW idem.scope;
SELECT status, result FROM idem_begin('scopes-1', scope => NULL);
SET idem.scope = 'scopes-a';
SELECT status, result FROM idem_begin('scopes-1');
SELECT status, result FROM idem_begin('scopes-1', scope => NULL);
-- The empty scope is still there, and an argument comes before the setting.
SELECT status, result FROM idem_begin('scopes-1', scope => '');
SELECT status, result FROM idem_begin('scopes-1', scope => 'scopes-b');
RESET idem.scope;

-- Every function takes the setting: begin, get, extend, complete, release.
BEGIN;
SET LOCAL idem.scope = 'scopes-set';
SELECT token AS set_token FROM idem_begin('scopes-2', lease => '1h') \gset
SELECT idem_extend('scopes-2') IS NOT NULL AS extended;
SELECT scope, key, state FROM idem_get('scopes-2');
COMMIT;
SELECT scope, key, state FROM idem_get('scopes-2');
SELECT scope, key, state FROM idem_get('scopes-2', scope => 'scopes-set');
\set VERBOSITY sqlstate
SELECT idem_complete('scopes-2', '1', token => :'set_token');
SELECT idem_extend('scopes-2', :'set_token');
SELECT idem_release('scopes-2', :'set_token');
SELECT idem_release('scopes-2', :'set_token', scope => 'scopes-other');
SELECT idem_extend('scopes-2', :'set_token', scope => 'scopes-set') IS NOT NULL AS extended;
SELECT idem_complete('scopes-2', '2', token => :'set_token', scope => 'scopes-set');
SELECT scope, key, state, result FROM idem_get('scopes-2', scope => 'scopes-set');

-- The claim of a transaction belongs to its scope.
BEGIN;
SELECT status FROM idem_begin('scopes-3', scope => 'scopes-a');
SAVEPOINT s;
SELECT idem_complete('scopes-3', '1');
ROLLBACK TO s;
SELECT idem_release('scopes-3', scope => 'scopes-b');
SELECT idem_complete('scopes-3', '1', scope => 'scopes-a');
COMMIT;
SELECT state FROM idem_get('scopes-3');

-- The border between scope and key counts, and so does every byte.
BEGIN;
SELECT scope, key, status
FROM (VALUES ('scopes', '-x'), ('scopes-', 'x'), ('', 'scopes-x'), ('scopes-x', ' '), ('scopes', 'x'), ('scopes', ' x'),
             ('scopes', 'x '), ('scopes', 'X'), (E'scopes\n', 'x'), ('scopes:', 'x'), ('scopes', ':x'), ('scopes', E'\tx'),
             ('scopes', 'é'), ('scopes', E'e\u0301')) AS pairs (scope, key),
    idem_begin(key, scope => scope);
ROLLBACK;

-- As an administrator: stored under the scope that was meant.
RESET ROLE;
SELECT scope, key, result FROM idem_segment_0 WHERE key LIKE 'scopes-%' ORDER BY key COLLATE "C", scope COLLATE "C";
SELECT idem_forget('scopes-1', scope => 'scopes-nowhere') AS forgotten, count(*) FROM idem_segment_0 WHERE key = 'scopes-1';
SELECT idem_forget('scopes-1', scope => 'scopes-a');
SELECT scope FROM idem_segment_0 WHERE key = 'scopes-1' ORDER BY scope COLLATE "C";
