-- The administrator may name a function that decides who else than its owner may see a record.
CREATE SCHEMA auth;
GRANT USAGE ON SCHEMA auth TO app;
CREATE FUNCTION auth.may_see(caller text, owner text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE NOTICE '% asks for a record of %, as %', caller, owner, current_user;
    RETURN CASE caller WHEN 'support' THEN true WHEN 'bob' THEN false WHEN 'broken' THEN 1 / (length(caller) - 6) = 1 END;
END
$$;
SET ROLE app;
SET idem.scope = 'test_authorizer';
-- Ordinary roles do not set it: not before the library is loaded, and not after.
\set VERBOSITY terse
SET idem.authorizer = 'auth.may_see';
SET idem.max_result_size = '2MB';
SELECT idem_once('load');
SHOW idem.authorizer;
SHOW idem.max_result_size;
SET idem.authorizer = 'auth.may_see';
\set VERBOSITY default
RESET ROLE;
SET idem.authorizer = 'auth.may_see';
SET ROLE app;
BEGIN;
SELECT status FROM idem_begin('seen', 'request', owner => 'alice');
SELECT idem_complete('seen', '"result"');
COMMIT;

-- It is asked when both owners are given and differ.
SELECT status, result FROM idem_begin('seen', 'request', owner => 'alice');
SELECT status, result FROM idem_begin('seen', 'request');
SELECT status, result FROM idem_begin('seen', 'request', owner => 'support');
SELECT status, result FROM idem_begin('seen', 'another', owner => 'support');
SELECT status, result FROM idem_begin('seen', 'request', owner => 'bob');
SELECT count(*) FROM idem_get('seen', owner => 'support');
SELECT count(*) FROM idem_get('seen', owner => 'bob');
-- NULL is no.
SELECT status, result FROM idem_begin('seen', 'request', owner => 'carol');
-- Its error arrives as it is.
SELECT status, result FROM idem_begin('seen', 'request', owner => 'broken');
\echo :LAST_ERROR_SQLSTATE
-- It lets nobody take over: only the record's own owner goes on with its work.
SELECT status FROM idem_begin('going', owner => 'alice', lease => '1 microsecond');
SELECT status FROM idem_begin('going', owner => 'support');
SELECT status FROM idem_begin('going', owner => 'support', takeover => false);
-- Nor is it asked of a record that has expired.
BEGIN;
SELECT status FROM idem_begin('expired', owner => 'alice');
SELECT idem_complete('expired', ttl => '1 microsecond');
COMMIT;
SELECT status FROM idem_begin('expired', owner => 'bob', lease => '1 h');

-- Who may not execute it, and names that lead nowhere: an error, never a record shown.
RESET ROLE;
REVOKE ALL ON FUNCTION auth.may_see FROM PUBLIC;
SET ROLE app;
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
RESET ROLE;
CREATE FUNCTION auth.text_result(text, text) RETURNS text LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION auth.one_argument(text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
SET search_path = auth, public;
SET idem.authorizer = 'may_see';
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
SET idem.authorizer = 'auth.no_such_function';
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
SET idem.authorizer = 'auth.one_argument';
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
SET idem.authorizer = 'auth.text_result';
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
SET idem.authorizer = 'not (a name';
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
RESET idem.authorizer;
SELECT status FROM idem_begin('seen', 'request', owner => 'support');
SET client_min_messages = warning;
DROP SCHEMA auth CASCADE;
