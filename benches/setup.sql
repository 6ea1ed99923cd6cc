-- What the contenders need beside idem: the business table, and the tables and functions that people write.

CREATE TABLE work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sku text, qty integer);

CREATE FUNCTION work(request jsonb) RETURNS jsonb LANGUAGE sql BEGIN ATOMIC
    INSERT INTO work (sku, qty) VALUES (request->>'sku', (request->>'qty')::integer) RETURNING to_jsonb(work);
END;

-- The floor: the row that idem writes, in a table like idem's.
CREATE TABLE finished (LIKE idem_segment_0 INCLUDING ALL);

-- Hand-written SQL.
CREATE TABLE handwritten (
    key          text PRIMARY KEY,
    request_hash bytea,
    status       text NOT NULL DEFAULT 'in_progress',
    result       jsonb,
    created_at   timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz
);

-- The usual pair of functions.
CREATE TABLE pair (LIKE handwritten INCLUDING ALL);

CREATE FUNCTION pair_begin(k text, hash bytea, OUT status text, OUT result jsonb) LANGUAGE plpgsql AS $$
DECLARE
    found_hash bytea;
BEGIN
    INSERT INTO pair (key, request_hash) VALUES (k, hash) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        status := 'acquired';
        RETURN;
    END IF;
    SELECT p.status, p.result, p.request_hash INTO status, result, found_hash FROM pair AS p WHERE key = k;
    IF found_hash <> hash THEN
        status := 'mismatch';
        result := NULL;
    END IF;
END
$$;

CREATE FUNCTION pair_complete(k text, r jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE pair SET status = 'completed', result = r, completed_at = now() WHERE key = k;
END
$$;

-- An advisory lock and a table of what is finished.
CREATE TABLE advisory (LIKE handwritten INCLUDING ALL);

-- What client libraries with a PostgreSQL store keep: claimed in one transaction, completed in another.
CREATE TABLE library (LIKE handwritten INCLUDING ALL, locked_until timestamptz);

-- A lock in a table, with a lease.
CREATE TABLE lease (name text PRIMARY KEY, token uuid, expires_at timestamptz NOT NULL);

-- Results of some sizes. Incompressible: compression would make the large ones small.
CREATE TABLE payload (size integer PRIMARY KEY, result jsonb);
INSERT INTO payload
SELECT size, CASE WHEN size > 0 THEN to_jsonb(left(hex, size - 2)) END
FROM unnest('{0,100,10000,1000000}'::integer[]) AS size
CROSS JOIN (SELECT string_agg(encode(sha256(i::text::bytea), 'base64'), '') AS hex FROM generate_series(1, 23000) AS i) AS random;

GRANT ALL ON work, finished, handwritten, pair, advisory, library, lease, payload TO app;
