-- idem_fingerprint_json: the same for equal JSON values, another for others; frozen.
SET ROLE app;
SET idem.scope = 'test_fingerprint_json';
-- Frozen vectors, computed with another implementation of the documented encoding.
SELECT json, encode(idem_fingerprint_json(json::jsonb), 'hex') = print AS same
FROM (VALUES
    ('null', '2ea1df8b5e9839643411aecc9b1e02f00cbd821ef722d3385463dee9ee431411'),
    ('true', '50d6b501ffbdf52225272c88c2009e7169e6d479f39d41b07b6c4e181e3416f0'),
    ('false', 'eae14b1bf39b39adc8946cba6356a8578a75c0a6c211ef84d3e27a0ee4c97151'),
    ('0', 'd9b92ca3ceeabd0fe9b6bd8f3675baa9d31939192814ad550f7425613255bbb8'),
    ('1.0', '0ae9cc4db649421f139316d61f8d38ee6800c4a04d2b315e639dfb96b58595de'),
    ('-120.50', 'a90fb69256de383c1912506c04fb692d377232b2f3a2996f35507c1ae4e65b6a'),
    ('123456789012345678901234567890.5', '8cb2d8f944000d254c80c8c6f9a00f9c8bc1d609f7761176a6530bdaab1c58ed'),
    ('""', '5d48ba639b2d3178e65b0cd30c9e1d4521990870572e9a6c4344e810c11a044f'),
    ('"é中"', '6f81c0127e9f258a1feb9a650deab08a9add9619d6c07978cbbb7ab470bc8c2d'),
    ('[]', 'c0013accd0a9fb5e6c39b20de376e6aaf6a9efd0577e26186b277c528c8ec4bd'),
    ('{}', 'c613f4fe935c6acc5561777121e8d26d1bb53290228f32c1dc55bcbb8ebc9f1d'),
    ('[1,[2,null],{"a":"b"}]', 'baede04cf32c184f1a0bbe7193369ebfd25cb334059f365b29fca7dfc69dcdda'),
    ('{"sku":"book","qty":1,"":[],"z":{"y":false}}', 'dc3ddb5c51dac63165c4e343c2869532d61ef946a87642b733b4ad4c1ae8e5c6')
) AS vector (json, print);

-- Spelling does not count.
SELECT a, b, idem_fingerprint_json(a::jsonb) = idem_fingerprint_json(b::jsonb) AS same
FROM (VALUES
    ('1', '1.0'), ('1', '1e0'), ('100', '1E2'), ('0.001', '1e-3'), ('0', '-0.0'), ('0', '0e9'),
    ('{"a": 1, "bb": 2}', '{"bb":2,"a":1}'), ('{"a": 1, "a": 2}', '{"a": 2}'), ('"\u00e9"', '"é"'), (' [ 1 ] ', '[1]'),
    ('123456789012345678901234567890123456789', '1.23456789012345678901234567890123456789e38')
) AS equal (a, b);

-- Content does.
SELECT a, b, idem_fingerprint_json(a::jsonb) = idem_fingerprint_json(b::jsonb) AS same
FROM (VALUES
    ('1', '-1'), ('1', '"1"'), ('1', '[1]'), ('[1,2]', '[2,1]'), ('[[1],2]', '[[1,2]]'), ('{}', '[]'), ('null', '"null"'),
    ('{"a": null}', '{}'), ('{"a": {"b": 1}}', '{"a": {}, "b": 1}'), ('"é"', '"e\u0301"'), ('""', '" "'),
    ('9007199254740993', '9007199254740992'), ('0.1', '0.1000000000000000000000001'), ('true', 'false')
) AS different (a, b);

SELECT octet_length(idem_fingerprint_json('{}')), provolatile, proparallel
FROM pg_proc WHERE proname = 'idem_fingerprint_json';
SELECT idem_fingerprint_json(NULL);

-- Thousands of levels: no stack is used for them beyond what jsonb itself needs.
SELECT octet_length(idem_fingerprint_json((repeat('[', 5000) || repeat(']', 5000))::jsonb));
-- Numbers at the ends of what jsonb can hold.
SELECT idem_fingerprint_json(('1e100000')::jsonb) = idem_fingerprint_json(('10e99999')::jsonb) AS large,
       idem_fingerprint_json(('1e-16000')::jsonb) = idem_fingerprint_json(('0.1e-15999')::jsonb) AS small;
