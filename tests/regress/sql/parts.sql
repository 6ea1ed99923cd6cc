-- idem_fingerprint and idem_compose_key: several texts as one, injective and frozen.
SET ROLE app;
SET idem.scope = 'test_parts';
-- Frozen vectors, computed with another implementation of the documented encoding.
SELECT parts, encode(idem_fingerprint(VARIADIC parts), 'hex') = print AS same
FROM (VALUES
    (ARRAY[]::text[], '084fed08b978af4d7d196a7446a86b58009e636b611db16211b65a9aadff29c5'),
    (ARRAY['']::text[], 'a665e6b115dd56fd3e0c89be631e6eda8e9666b822e0bd7026bf0822c4bbc68f'),
    (ARRAY['a']::text[], '3ee06b24a0dedfe179e79e45ce55946858c9d58d1d4719bc40b1656f9cc064be'),
    (ARRAY['a:b', 'c']::text[], 'fc22bcffa2f0f2917c0a00e4bed093dd0a22857b5eb52a9bc5eeac055ebcdc6c'),
    (ARRAY['é中', 'x']::text[], '4ed8c6b287cee5831c3212d7ee74e749628a73b016bad15d375384614f99f046')
) AS vector (parts, print);
SELECT idem_compose_key('a'), idem_compose_key('order', '7f3a'), idem_compose_key('', ''), idem_compose_key('a\', 'b');

-- Boundaries count.
SELECT idem_fingerprint('a', 'bc') = idem_fingerprint('ab', 'c') AS same_fingerprint,
       idem_compose_key('a:b', 'c') = idem_compose_key('a', 'b:c') AS same_key,
       idem_compose_key('a\', ':b') = idem_compose_key('a', '\:b') AS same_key;
SELECT idem_compose_key('a:b', 'c') AS one, idem_compose_key('a', 'b:c') AS other;

-- Up to three parts over the characters that matter: 258 lists, 258 keys, 258 fingerprints.
WITH RECURSIVE texts (t) AS (VALUES (''), (':'), ('\'), ('a'), ('\:'), (':\')),
lists (parts) AS (
    SELECT ARRAY[t] FROM texts UNION ALL SELECT ARRAY[a.t, b.t] FROM texts a, texts b
    UNION ALL SELECT ARRAY[a.t, b.t, c.t] FROM texts a, texts b, texts c
)
SELECT count(*), count(DISTINCT idem_compose_key(VARIADIC parts)), count(DISTINCT idem_fingerprint(VARIADIC parts)) FROM lists;

-- A composed key is a key like any other.
SELECT idem_once(idem_compose_key('order', '7:1', 'refund'));
SELECT key FROM idem_get('order:7\:1:refund');

SELECT proname, provolatile, proparallel FROM pg_proc WHERE proname IN ('idem_fingerprint', 'idem_compose_key') ORDER BY 1;
SELECT idem_fingerprint('a', NULL);
SELECT idem_fingerprint(VARIADIC NULL);
SELECT idem_compose_key('a', NULL);
SELECT idem_compose_key(VARIADIC NULL);
SELECT idem_compose_key(VARIADIC '{}');
