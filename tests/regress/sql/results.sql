-- A result is stored and replayed as given: body byte for byte, result as an equal jsonb. A result
-- over idem.max_result_size raises ID006 before anything is written.
SET ROLE app;
-- In a new session, before the library is loaded, the limit cannot be raised either.
SET idem.max_result_size = '1GB';
SELECT status FROM idem_begin('results-first', lease => '1h');
SHOW idem.max_result_size;

-- Every byte of body; jsonb of every kind, JSON's null and SQL's NULL apart.
CREATE TEMP TABLE given (name text, result jsonb, body bytea);
INSERT INTO given
    SELECT 'all-bytes', NULL, string_agg(decode(lpad(to_hex(n), 2, '0'), 'hex'), '' ORDER BY n) FROM generate_series(0, 255) AS n;
INSERT INTO given VALUES
    ('empty-body', NULL, ''), ('zero-bytes', NULL, '\x000000'), ('not-utf8', NULL, '\xfffec0'), ('json-text', NULL, '{"b":1, "a" :1.0}'),
    ('nothing', NULL, NULL), ('null', 'null', NULL), ('both', '{"a": [1, 2, {"b": null}]}', '\x00'), ('text', '"\u00e9\n\\"', NULL),
    ('number', '1.10', NULL), ('huge', '123456789012345678901234567890.000000000000000001', NULL), ('empty', '{}', NULL),
    ('unicode', '{"😀": "é"}', 'é😀');
-- Large values: compressed, and stored outside the row; just short of the limit.
INSERT INTO given VALUES
    ('compressible', to_jsonb(repeat('x', 500000)), decode(repeat('00', 500000), 'hex'));
INSERT INTO given
    SELECT 'incompressible', NULL, string_agg(sha256(n::text::bytea), '' ORDER BY n) FROM generate_series(1, 32768) AS n;
INSERT INTO given
    SELECT 'incompressible-json', jsonb_agg(encode(sha256(n::text::bytea), 'hex') ORDER BY n), NULL FROM generate_series(1, 10000) AS n;

BEGIN;
SELECT count(*) FROM given, idem_begin('results-' || name) AS b WHERE b.status = 'acquired';
SELECT count(*) FROM given, idem_complete('results-' || name, result, body);
-- Replayed in the same transaction, afterwards, and by idem_get.
SELECT count(*) FROM given, idem_begin('results-' || name) AS b
WHERE b.status = 'completed' AND b.body IS NOT DISTINCT FROM given.body AND b.result IS NOT DISTINCT FROM given.result;
COMMIT;
SELECT name, b.status, octet_length(b.body) AS body, octet_length(b.result::text) AS result,
    b.body IS NOT DISTINCT FROM given.body AS same_body,
    b.result IS NOT DISTINCT FROM given.result AS same_result, b.result::text IS NOT DISTINCT FROM given.result::text AS same_text
FROM given, idem_begin('results-' || name) AS b ORDER BY name COLLATE "C";
SELECT count(*) FROM given, idem_get('results-' || name) AS g
WHERE g.state = 'completed' AND g.body IS NOT DISTINCT FROM given.body AND g.result IS NOT DISTINCT FROM given.result;
-- The same through a claim on a lease.
CREATE TEMP TABLE leased AS SELECT given.*, token FROM given, idem_begin('results-lease-' || name, lease => '1h');
SELECT count(*) FROM leased, idem_complete('results-lease-' || name, result, body, token => token);
SELECT count(*) FROM given, idem_begin('results-lease-' || name) AS b
WHERE b.status = 'completed' AND b.body IS NOT DISTINCT FROM given.body AND b.result IS NOT DISTINCT FROM given.result;

-- Given from a table's TOAST, and outliving it.
CREATE TEMP TABLE source AS SELECT body FROM given WHERE name = 'incompressible';
BEGIN;
SELECT status FROM idem_begin('results-toast');
SELECT idem_complete('results-toast', NULL, body) FROM source;
COMMIT;
DROP TABLE source;
SELECT b.body = given.body AS same_body FROM given, idem_begin('results-toast') AS b WHERE name = 'incompressible';

-- The limit counts octets of body plus octets of result::text. The default is 1 MB: exactly that is stored.
BEGIN;
SELECT status FROM idem_begin('results-limit-1');
SELECT idem_complete('results-limit-1', NULL, decode(repeat('00', 1048576), 'hex'));
COMMIT;
SELECT octet_length(body) FROM idem_get('results-limit-1');
BEGIN;
SELECT status FROM idem_begin('results-limit-2');
SAVEPOINT s;
SELECT idem_complete('results-limit-2', NULL, decode(repeat('00', 1048577), 'hex'));
ROLLBACK TO s;
-- Nothing was written; the claim is still held and can be completed with less.
SELECT pg_current_xact_id_if_assigned() IS NULL AS nothing_written;
SELECT idem_complete('results-limit-2', '"see elsewhere"');
COMMIT;
SELECT result FROM idem_get('results-limit-2');

-- Both together, at a small limit: {"é": 1} has 9 octets.
RESET ROLE;
SET idem.max_result_size = 12;
SET ROLE app;
\set VERBOSITY sqlstate
BEGIN;
SELECT status FROM idem_begin('results-limit-3');
SAVEPOINT s;
SELECT idem_complete('results-limit-3', '{"é":1}', '\x01020304');
ROLLBACK TO s;
SELECT idem_complete('results-limit-3', '{"éé":1 }', '\x0102');
ROLLBACK TO s;
SELECT idem_complete('results-limit-3', '"12345678901"');
ROLLBACK TO s;
SELECT idem_complete('results-limit-3', '  {"é":1}', '\x010203');
COMMIT;
SELECT result, body FROM idem_get('results-limit-3');
SELECT token AS held FROM idem_begin('results-limit-4', lease => '1h') \gset
SELECT idem_complete('results-limit-4', NULL, '\x01020304050607080910111213', token => :'held');
SELECT state FROM idem_get('results-limit-4');
SELECT idem_complete('results-limit-4', NULL, '\x010203040506070809101112', token => :'held');
SELECT state, body FROM idem_get('results-limit-4');
-- What is stored already is replayed whatever the limit is now.
SELECT status, octet_length(body) FROM idem_begin('results-limit-1');
-- A limit of 0 allows completions without a result.
RESET ROLE;
SET idem.max_result_size = 0;
SET ROLE app;
BEGIN;
SELECT status FROM idem_begin('results-limit-5');
SELECT idem_complete('results-limit-5', NULL, '');
COMMIT;
-- An ordinary role cannot change it.
SET idem.max_result_size = '1GB';
SELECT set_config('idem.max_result_size', '1GB', false);
BEGIN;
SET LOCAL idem.max_result_size = '1GB';
ROLLBACK;
SHOW idem.max_result_size;

-- A result over the limit leaves no row behind (looked at as an administrator).
RESET ROLE;
SELECT key, result IS NOT NULL AS result, body IS NOT NULL AS body FROM idem_segment_0 WHERE key LIKE 'results-limit-%' ORDER BY key;
SELECT count(*) FROM idem_claims WHERE key LIKE 'results-limit-%';
