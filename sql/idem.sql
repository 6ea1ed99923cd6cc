-- idem: idempotency keys and locks.
--
-- This script is the public face of the extension: every object, what it promises, who may use it.
-- Parameter names and their order never change. No function is STRICT: a NULL key is an error, never
-- a NULL row that a caller could take for "go".
--
-- SQLSTATEs of its own: ID001 in progress, ID002 fingerprint mismatch, ID003 claim lost, ID004 owner
-- mismatch, ID005 abandoned, ID006 result too large, ID007 claim open at COMMIT, ID011 lock lost.
-- All writers raise 22023 or 22004 for a bad or NULL argument and 25006 in a read-only transaction.

\echo Use "CREATE EXTENSION idem" to load this file. \quit

-- Tables -----------------------------------------------------------------------------------------
--
-- Written by the functions only, without SQL: triggers, rules and row security on them have no
-- effect. The digest is computed from scope and key (docs: core/src/identity.rs).

CREATE TABLE idem_claims (
    digest      uuid        PRIMARY KEY,
    token       uuid        NOT NULL,
    created_at  timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    lease       interval    NOT NULL,
    attempt     integer     NOT NULL,
    scope       text        NOT NULL,
    key         text        NOT NULL,
    owner       text,
    fingerprint bytea,
    checkpoint  jsonb
) WITH (fillfactor = 50);

COMMENT ON TABLE idem_claims IS
    'Open claims on a lease: one row a key, updated in place, gone when the claim is completed or released.';
COMMENT ON COLUMN idem_claims.digest IS 'First 16 bytes of SHA-256 over scope and key.';
COMMENT ON COLUMN idem_claims.token IS 'Proves the claim; given to the holder only.';
COMMENT ON COLUMN idem_claims.created_at IS 'When the key was first claimed; a takeover keeps it.';
COMMENT ON COLUMN idem_claims.expires_at IS 'End of the lease; from then on anyone may take over.';
COMMENT ON COLUMN idem_claims.lease IS 'The lease as given; idem_extend repeats it.';
COMMENT ON COLUMN idem_claims.attempt IS '1 for the first holder, 1 more with each takeover.';
COMMENT ON COLUMN idem_claims.owner IS 'Whose claim it is; NULL: anybody''s.';
COMMENT ON COLUMN idem_claims.fingerprint IS 'SHA-256 of the fingerprint given to idem_begin.';
COMMENT ON COLUMN idem_claims.checkpoint IS 'How far the work has come, for the next attempt.';

-- Finished records: a ring of segments, insert only. One of them is the current one; each is emptied as a
-- whole when its bound has passed, so vacuum is not told of inserts. idem_long has the records that outlive the bound.

CREATE TABLE idem_segment_0 (
    digest       uuid        PRIMARY KEY,
    token        uuid        NOT NULL,
    created_at   timestamptz NOT NULL,
    completed_at timestamptz NOT NULL,
    expires_at   timestamptz NOT NULL,
    attempt      integer     NOT NULL,
    scope        text        NOT NULL,
    key          text        NOT NULL,
    owner        text,
    fingerprint  bytea,
    result       jsonb,
    body         bytea
) WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

COMMENT ON COLUMN idem_segment_0.digest IS 'First 16 bytes of SHA-256 over scope and key.';
COMMENT ON COLUMN idem_segment_0.token IS 'Token of the claim that completed the key.';
COMMENT ON COLUMN idem_segment_0.created_at IS 'When the key was first claimed.';
COMMENT ON COLUMN idem_segment_0.expires_at IS 'End of the ttl; from then on the record counts as absent.';
COMMENT ON COLUMN idem_segment_0.attempt IS 'Number of the attempt that finished.';
COMMENT ON COLUMN idem_segment_0.owner IS 'Whose record it is; NULL: anybody''s.';
COMMENT ON COLUMN idem_segment_0.fingerprint IS 'SHA-256 of the fingerprint given to idem_begin.';

CREATE TABLE idem_segment_1 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE idem_segment_2 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE idem_segment_3 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE idem_segment_4 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE idem_segment_5 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE idem_segment_6 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE idem_segment_7 (LIKE idem_segment_0 INCLUDING ALL)
    WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1);

CREATE TABLE idem_long (LIKE idem_segment_0 INCLUDING ALL);
CREATE INDEX idem_long_expires_at ON idem_long (expires_at);

COMMENT ON TABLE idem_segment_0 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_1 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_2 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_3 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_4 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_5 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_6 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_segment_7 IS
    'Finished records, insert only: one row a key, counting until expires_at; emptied as a whole.';
COMMENT ON TABLE idem_long IS
    'Finished records that outlive the current segment, deleted one by one.';

CREATE TABLE idem_ring (
    turn       bigint      PRIMARY KEY,
    started_at timestamptz NOT NULL,
    bound      timestamptz NOT NULL
);

COMMENT ON TABLE idem_ring IS
    'Which segment is written to: the one of the highest turn, turn modulo 8. Written by idem_purge.';
COMMENT ON COLUMN idem_ring.turn IS 'Number of the turn; its segment is idem_segment_(turn modulo 8).';
COMMENT ON COLUMN idem_ring.started_at IS 'When the segment became the current one.';
COMMENT ON COLUMN idem_ring.bound IS 'What is written to the segment expires by then; it is emptied afterwards.';

-- As idem_purge would, with the default of idem.ttl. Other turns are dumped, this one is made anew.
INSERT INTO idem_ring SELECT 0, t, t OPERATOR(pg_catalog.+) interval '42 hours' FROM pg_catalog.clock_timestamp() AS t;

CREATE TABLE idem_locks (
    digest      uuid        PRIMARY KEY,
    token       uuid,
    fence       bigint      NOT NULL,
    acquired_at timestamptz NOT NULL,
    expires_at  timestamptz NOT NULL,
    ttl         interval    NOT NULL,
    scope       text        NOT NULL,
    name        text        NOT NULL,
    holder      text
) WITH (fillfactor = 50);

COMMENT ON TABLE idem_locks IS
    'Lease locks: one row a name, updated in place, kept while the lock is free because it carries the fence.';
COMMENT ON COLUMN idem_locks.digest IS 'First 16 bytes of SHA-256 over scope and name.';
COMMENT ON COLUMN idem_locks.token IS 'Proves the holder; NULL when the lock is unlocked.';
COMMENT ON COLUMN idem_locks.fence IS 'Number of the last grant, rising with each.';
COMMENT ON COLUMN idem_locks.acquired_at IS 'When the lock was last taken.';
COMMENT ON COLUMN idem_locks.expires_at IS 'End of the last lease, or when it was unlocked; from then on the lock is free.';
COMMENT ON COLUMN idem_locks.ttl IS 'The ttl as given; lock_extend repeats it.';
COMMENT ON COLUMN idem_locks.holder IS 'What the holder calls itself.';

CREATE TABLE idem_floors (
    fence     bigint      PRIMARY KEY,
    purged_at timestamptz NOT NULL
);

COMMENT ON TABLE idem_floors IS
    'What is left of purged rows of idem_locks: no fence is given at or below the highest of these.';
COMMENT ON COLUMN idem_floors.fence IS 'The highest fence of the rows that a purge removed.';
COMMENT ON COLUMN idem_floors.purged_at IS 'When it did.';

CREATE TABLE idem_filters (
    segment integer PRIMARY KEY,
    memory  bigint NOT NULL,
    file    bigint NOT NULL,
    blocks  bigint NOT NULL,
    written bigint NOT NULL
);

COMMENT ON TABLE idem_filters IS
    'Where this server has filters in shared memory, which tell new keys apart without a look into the segment. Written by idem_purge.';
COMMENT ON COLUMN idem_filters.segment IS 'The n of idem_segment_n.';
COMMENT ON COLUMN idem_filters.memory IS 'Name of the piece of dynamic shared memory; it is gone after a restart.';
COMMENT ON COLUMN idem_filters.file IS 'Number of the segment''s file when the filter was made.';
COMMENT ON COLUMN idem_filters.blocks IS 'How many blocks the segment had.';
COMMENT ON COLUMN idem_filters.written IS 'How many rows the statistics had counted in it.';

-- pg_dump takes the rows along: a restored database replays what the dumped one had completed.
SELECT pg_catalog.pg_extension_config_dump('idem_claims', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_0', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_1', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_2', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_3', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_4', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_5', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_6', '');
SELECT pg_catalog.pg_extension_config_dump('idem_segment_7', '');
SELECT pg_catalog.pg_extension_config_dump('idem_long', '');
SELECT pg_catalog.pg_extension_config_dump('idem_ring', 'WHERE turn > 0');
SELECT pg_catalog.pg_extension_config_dump('idem_locks', '');
SELECT pg_catalog.pg_extension_config_dump('idem_floors', '');

-- Idempotency keys -------------------------------------------------------------------------------

CREATE FUNCTION idem_begin(
    key text,
    fingerprint bytea = NULL,
    scope text = NULL,
    owner text = NULL,
    lease interval = NULL,
    wait interval = NULL,
    takeover boolean = true,
    OUT status text,
    OUT token uuid,
    OUT result jsonb,
    OUT body bytea,
    OUT attempt integer,
    OUT checkpoint jsonb,
    OUT retry_after interval,
    OUT completed_at timestamptz,
    OUT expires_at timestamptz
)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_begin';

COMMENT ON FUNCTION idem_begin(text, bytea, text, text, interval, interval, boolean) IS
    'Claims a key. status: acquired (run the work, then idem_complete), completed (answer with result, body), in_progress (retry later), mismatch (the key belongs to another request), denied (it belongs to another owner), abandoned (a lease ran out, and takeover is false). Without a lease the claim belongs to the transaction and must end before COMMIT; with one it is a row of its own. Never blocks unless given a wait (default: setting idem.wait).';

CREATE FUNCTION idem_complete(
    key text,
    result jsonb = NULL,
    body bytea = NULL,
    token uuid = NULL,
    scope text = NULL,
    ttl interval = NULL
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_complete';

COMMENT ON FUNCTION idem_complete(text, jsonb, bytea, uuid, text, interval) IS
    'Completes a claim and stores its result for ttl (default: setting idem.ttl); takes effect with COMMIT. Without a token: the claim of this transaction. ID003 if the token does not hold the key, ID006 if the result is too large. Repeating it changes nothing.';

CREATE FUNCTION idem_release(
    key text,
    token uuid = NULL,
    scope text = NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_release';

COMMENT ON FUNCTION idem_release(text, uuid, text) IS
    'Gives a claim up, so that the next caller may run. False if the token (without one: this transaction) does not hold the key. Never touches a completed record; safe to call always.';

CREATE FUNCTION idem_extend(
    key text,
    token uuid = NULL,
    lease interval = NULL,
    scope text = NULL
) RETURNS timestamptz
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_extend';

COMMENT ON FUNCTION idem_extend(text, uuid, interval, text) IS
    'Gives a claim a new lease from now on (default: its own again) and returns its end. ID003 if the token does not hold the key, 22023 for a claim without a lease.';

CREATE FUNCTION idem_checkpoint(
    key text,
    checkpoint jsonb,
    token uuid = NULL,
    lease interval = NULL,
    scope text = NULL
) RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_checkpoint';

COMMENT ON FUNCTION idem_checkpoint(text, jsonb, uuid, interval, text) IS
    'Saves how far the work on a claim has come and prolongs its lease, as idem_extend does; a takeover gets it from idem_begin. ID003 if the token does not hold the key, 22023 for a claim without a lease.';

CREATE FUNCTION idem_run(
    key text,
    func regprocedure,
    request jsonb = NULL,
    scope text = NULL,
    owner text = NULL,
    wait interval = NULL,
    ttl interval = NULL,
    takeover boolean = true
) RETURNS jsonb
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME', 'idem_run';

COMMENT ON FUNCTION idem_run(text, regprocedure, jsonb, text, text, interval, interval, boolean) IS
    'Runs func(request) once, with the rights of the caller, and stores its result; a retry gets what is stored. Raises ID001 (in progress), ID002 (another request), ID004 (another owner), ID005 (abandoned); an error of func arrives as it is, and nothing is stored.';

CREATE FUNCTION idem_once(
    key text,
    scope text = NULL,
    wait interval = NULL,
    ttl interval = NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000
AS 'MODULE_PATHNAME', 'idem_once';

COMMENT ON FUNCTION idem_once(text, text, interval, interval) IS
    'True the first time, then false until ttl has passed. Waits for a running duplicate until its outcome is known, or up to wait: then ID001. ID004 for a key of another owner.';

CREATE FUNCTION idem_get(
    key text,
    scope text = NULL,
    owner text = NULL
) RETURNS TABLE (
    scope text,
    key text,
    state text,
    owner text,
    attempt integer,
    checkpoint jsonb,
    result jsonb,
    body bytea,
    created_at timestamptz,
    completed_at timestamptz,
    expires_at timestamptz
)
LANGUAGE c VOLATILE PARALLEL UNSAFE ROWS 1
AS 'MODULE_PATHNAME', 'idem_get';

COMMENT ON FUNCTION idem_get(text, text, text) IS
    'The record under a key: state is in_progress, abandoned (its lease is over) or completed. No row if there is none or it has expired. Reads only; works on a standby.';

CREATE FUNCTION idem_forget(
    key text,
    scope text = NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_forget';

COMMENT ON FUNCTION idem_forget(text, text) IS
    'Administration: removes whatever is under a key, completed or not, so that it can run again. False if there is nothing.';

CREATE FUNCTION idem_purge(max_rows integer = 10000) RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_purge';

COMMENT ON FUNCTION idem_purge(integer) IS
    'Administration: removes expired records, claims abandoned and locks idle for idem.ttl: segments of records as a whole, and at most max_rows rows one by one. Returns how many rows were reclaimed. Waits for nobody; what is in use is left for the next call. Call it in a transaction of its own, every minute or so.';

-- Purging by pg_cron. It keeps its jobs in one database of the server, which its setting cron.database_name names. The setting is
-- NULL if pg_cron is not loaded, and for a role that may not see it; for that one, the extension being here decides.

CREATE FUNCTION idem_schedule_purge(schedule text = '* * * * *') RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    here text = pg_catalog.current_database();
    job pg_catalog.name = pg_catalog.format('idem_purge in %s', here);
    command text;
    home text;
BEGIN
    IF schedule IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'schedule must not be NULL';
    END IF;
    SELECT pg_catalog.format('SELECT %s.idem_purge()', e.extnamespace::pg_catalog.regnamespace) INTO command
    FROM pg_catalog.pg_extension AS e WHERE e.extname OPERATOR(pg_catalog.=) 'idem';
    SELECT s.setting INTO home FROM pg_catalog.pg_settings AS s WHERE s.name OPERATOR(pg_catalog.=) 'cron.database_name';

    IF home OPERATOR(pg_catalog.<>) here THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'pg_cron keeps its jobs in another database',
            DETAIL = pg_catalog.format('Its setting cron.database_name is "%s".', home),
            HINT = pg_catalog.format('In that database, run: SELECT cron.schedule_in_database(%L, %L, %L, %L);', job, schedule, command, here);
    END IF;
    PERFORM FROM pg_catalog.pg_extension AS e WHERE e.extname OPERATOR(pg_catalog.=) 'pg_cron';
    IF NOT FOUND OR home IS NULL AND pg_catalog.pg_has_role('pg_read_all_settings', 'USAGE') THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'pg_cron does not run in this database',
            HINT = CASE WHEN home IS NULL
                THEN pg_catalog.format('Put pg_cron into shared_preload_libraries, set cron.database_name to %L, restart, and run CREATE EXTENSION pg_cron. Or have another scheduler run: %s;', here, command)
                ELSE 'Run: CREATE EXTENSION pg_cron;'
            END;
    END IF;

    -- The caller's active job is changed; jobs of other roles, where they can be seen, and one switched off are replaced.
    PERFORM cron.unschedule(j.jobid) FROM cron.job AS j
    WHERE j.jobname OPERATOR(pg_catalog.=) job
        AND NOT (j.active AND j.username OPERATOR(pg_catalog.=) current_user::pg_catalog.text);
    RETURN cron.schedule(job, schedule, command);
END
$$;

COMMENT ON FUNCTION idem_schedule_purge(text) IS
    'Administration: has pg_cron call idem_purge on this schedule (default: every minute), as the caller, and returns the job''s id. A database has one such job: called again, it changes the schedule, and takes the place of another role''s job if it can see it. 55000 if pg_cron is missing or keeps its jobs in another database; the HINT says what to run.';

CREATE FUNCTION idem_unschedule_purge() RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    here text = pg_catalog.current_database();
    job pg_catalog.name = pg_catalog.format('idem_purge in %s', here);
    home text;
BEGIN
    SELECT s.setting INTO home FROM pg_catalog.pg_settings AS s WHERE s.name OPERATOR(pg_catalog.=) 'cron.database_name';
    IF home OPERATOR(pg_catalog.<>) here THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'pg_cron keeps its jobs in another database',
            DETAIL = pg_catalog.format('Its setting cron.database_name is "%s".', home),
            HINT = pg_catalog.format('In that database, run: SELECT cron.unschedule(%L);', job);
    END IF;
    PERFORM FROM pg_catalog.pg_extension AS e WHERE e.extname OPERATOR(pg_catalog.=) 'pg_cron';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM cron.unschedule(j.jobid) FROM cron.job AS j WHERE j.jobname OPERATOR(pg_catalog.=) job;
    RETURN FOUND;
END
$$;

COMMENT ON FUNCTION idem_unschedule_purge() IS
    'Administration: removes the job of idem_schedule_purge, and those of other roles that the caller can see. False if there is none. To be called before DROP EXTENSION. 55000 if pg_cron keeps its jobs in another database; the HINT says what to run there.';

-- Keys and fingerprints of several parts. Their encodings are frozen: stored records depend on them.

CREATE FUNCTION idem_fingerprint(VARIADIC parts text[]) RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_fingerprint';

COMMENT ON FUNCTION idem_fingerprint(text[]) IS
    'Fingerprint of a list of texts, 32 bytes. Parts are length-prefixed: other boundaries, another fingerprint. A NULL part is 22004.';

CREATE FUNCTION idem_fingerprint_json(request jsonb) RETURNS bytea
LANGUAGE c IMMUTABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_fingerprint_json';

COMMENT ON FUNCTION idem_fingerprint_json(jsonb) IS
    'Fingerprint of a JSON value, 32 bytes: the same for equal values, however keys are ordered and numbers spelled (1, 1.0, 1e0). NULL is 22004.';

CREATE FUNCTION idem_compose_key(VARIADIC parts text[]) RETURNS text
LANGUAGE c IMMUTABLE PARALLEL SAFE
AS 'MODULE_PATHNAME', 'idem_compose_key';

COMMENT ON FUNCTION idem_compose_key(text[]) IS
    'One key of one or more parts, joined by a colon; colons and backslashes in them are escaped, so that different parts never make the same key. A NULL part is 22004.';

-- Locks ------------------------------------------------------------------------------------------
--
-- One name (and scope) is one lock: lease locks and transaction locks of a name exclude each other.

CREATE FUNCTION lock_try(
    name text,
    ttl interval = NULL,
    scope text = NULL,
    holder text = NULL,
    OUT acquired boolean,
    OUT token uuid,
    OUT fence bigint,
    OUT expires_at timestamptz,
    OUT held_by text,
    OUT retry_after interval
)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_try';

COMMENT ON FUNCTION lock_try(text, interval, text, text) IS
    'Takes a lock on a lease of ttl (default: setting idem.lock_ttl) that outlives the transaction, or says at once who has it. token proves the holder, fence rises with every grant of the name; neither means anything before COMMIT has returned.';

CREATE FUNCTION lock_acquire(
    name text,
    wait interval = NULL,
    ttl interval = NULL,
    scope text = NULL,
    holder text = NULL,
    OUT acquired boolean,
    OUT token uuid,
    OUT fence bigint,
    OUT expires_at timestamptz,
    OUT held_by text,
    OUT retry_after interval
)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_acquire';

COMMENT ON FUNCTION lock_acquire(text, interval, interval, text, text) IS
    'As lock_try, but waits up to wait (NULL: until the lock is taken). lock_timeout and statement_timeout act.';

CREATE FUNCTION lock_extend(
    name text,
    token uuid,
    ttl interval = NULL,
    scope text = NULL
) RETURNS timestamptz
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_extend';

COMMENT ON FUNCTION lock_extend(text, uuid, interval, text) IS
    'Gives a lock a new lease from now on (default: its own ttl again) and returns its end. ID011 if the token does not hold the lock; a lease that is over is never revived.';

CREATE FUNCTION lock_unlock(
    name text,
    token uuid,
    scope text = NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_unlock';

COMMENT ON FUNCTION lock_unlock(text, uuid, text) IS
    'Frees a lock at COMMIT. False, and nothing changed, if the token does not hold it.';

CREATE FUNCTION lock_guard(
    name text,
    token uuid,
    scope text = NULL
) RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_guard';

COMMENT ON FUNCTION lock_guard(text, uuid, text) IS
    'Raises ID011 unless the token holds the lock now; then nobody can take it before this transaction ends, even if the lease runs out meanwhile. Returns the fence.';

CREATE FUNCTION lock_try_xact(
    name text,
    scope text = NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_try_xact';

COMMENT ON FUNCTION lock_try_xact(text, text) IS
    'Takes a lock that ends with the transaction, or returns false at once. No row, no token.';

CREATE FUNCTION lock_acquire_xact(
    name text,
    wait interval = NULL,
    scope text = NULL
) RETURNS boolean
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'lock_acquire_xact';

COMMENT ON FUNCTION lock_acquire_xact(text, interval, text) IS
    'As lock_try_xact, but waits up to wait (NULL: until the lock is taken).';

-- Statistics -------------------------------------------------------------------------------------
--
-- Counted in shared memory for each database, from the first use after the server's start. Before
-- PostgreSQL 17 only if idem is in shared_preload_libraries; else NULLs and a NOTICE that says so.

CREATE FUNCTION idem_stats(
    OUT executed bigint,
    OUT replayed bigint,
    OUT in_progress bigint,
    OUT mismatch bigint,
    OUT denied bigint,
    OUT taken_over bigint,
    OUT released bigint,
    OUT claims_lost bigint,
    OUT locks_acquired bigint,
    OUT locks_busy bigint,
    OUT locks_lost bigint,
    OUT since timestamptz
)
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_stats';

COMMENT ON FUNCTION idem_stats() IS
    'How often what happened in this database since the given moment. executed, taken_over, released and locks_acquired count at COMMIT or PREPARE TRANSACTION, all others at once, whatever becomes of their transaction. Alert on claims_lost (ID003): work was done twice or by somebody who was too late. NULLs if nothing is counted.';

CREATE FUNCTION idem_stats_reset() RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'idem_stats_reset';

COMMENT ON FUNCTION idem_stats_reset() IS
    'Administration: has the numbers of idem_stats for this database start from 0, now.';

-- Views ------------------------------------------------------------------------------------------
--
-- What the tables tell, without tokens, results, bodies, fingerprints and checkpoints. They read with
-- the rights of the extension's owner: nobody who may see them needs a privilege on the tables.

CREATE VIEW idem_records AS
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'in_progress' ELSE 'abandoned' END AS state, owner,
    attempt, created_at, NULL::pg_catalog.timestamptz AS completed_at, expires_at, NULL::bigint AS result_size
FROM idem_claims
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_0
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_1
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_2
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_3
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_4
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_5
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_6
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_segment_7
UNION ALL
SELECT scope, key, CASE WHEN expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 'completed' ELSE 'expired' END, owner,
    attempt, created_at, completed_at, expires_at,
    coalesce(pg_catalog.octet_length(body), 0)::bigint OPERATOR(pg_catalog.+) coalesce(pg_catalog.octet_length(result::pg_catalog.text), 0)
FROM idem_long;

COMMENT ON VIEW idem_records IS
    'All records, wherever they are kept: state is in_progress, abandoned (its lease is over), completed or expired (not purged yet); result_size is the bytes of result::text plus body. Claims of open transactions are not records yet.';

CREATE VIEW idem_overview AS
WITH clock AS MATERIALIZED (
    SELECT pg_catalog.clock_timestamp() AS now
),
tables AS (
    SELECT c.oid, c.relname
    FROM pg_catalog.pg_extension AS e
    JOIN pg_catalog.pg_depend AS d
        ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass AND d.refobjid OPERATOR(pg_catalog.=) e.oid
        AND d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype OPERATOR(pg_catalog.=) 'e'
    JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) d.objid AND c.relkind OPERATOR(pg_catalog.=) 'r'
    WHERE e.extname OPERATOR(pg_catalog.=) 'idem'
),
-- What idem_purge would remove now: segments that are over and not empty, and the rows of idem_long that are.
purgeable AS (
    SELECT pg_catalog.pg_stat_get_live_tuples(t.oid) AS records, turn.bound AS since
    FROM (SELECT DISTINCT ON (segment) turn OPERATOR(pg_catalog.%) bigint '8' AS segment, bound FROM idem_ring ORDER BY segment, turn DESC) AS turn
    JOIN tables AS t ON t.relname OPERATOR(pg_catalog.=) pg_catalog.format('idem_segment_%s', turn.segment)
    WHERE turn.bound OPERATOR(pg_catalog.<=) (SELECT now FROM clock) AND pg_catalog.pg_relation_size(t.oid::pg_catalog.regclass) OPERATOR(pg_catalog.>) 0
    UNION ALL
    SELECT pg_catalog.count(*), pg_catalog.min(expires_at) FROM idem_long WHERE expires_at OPERATOR(pg_catalog.<=) (SELECT now FROM clock)
)
SELECT claims.*, locks.*, records.*, purge.*, size.*
FROM
    clock,
    LATERAL (
        SELECT
            pg_catalog.count(*) FILTER (WHERE expires_at OPERATOR(pg_catalog.>) clock.now) AS in_progress,
            pg_catalog.min(created_at) FILTER (WHERE expires_at OPERATOR(pg_catalog.>) clock.now) AS oldest_in_progress,
            pg_catalog.count(*) FILTER (WHERE expires_at OPERATOR(pg_catalog.<=) clock.now) AS abandoned,
            pg_catalog.min(expires_at) FILTER (WHERE expires_at OPERATOR(pg_catalog.<=) clock.now) AS oldest_abandoned
        FROM idem_claims
    ) AS claims,
    LATERAL (
        SELECT pg_catalog.count(*) AS locks_held FROM idem_locks WHERE token IS NOT NULL AND expires_at OPERATOR(pg_catalog.>) clock.now
    ) AS locks,
    (
        SELECT pg_catalog.sum(pg_catalog.pg_stat_get_live_tuples(oid))::bigint AS completed_estimate
        FROM tables WHERE relname OPERATOR(pg_catalog.~) '^idem_(segment_[0-7]|long)$'
    ) AS records,
    (
        SELECT pg_catalog.sum(records)::bigint AS purgeable_estimate, pg_catalog.min(since) AS oldest_purgeable FROM purgeable
    ) AS purge,
    (
        SELECT pg_catalog.sum(pg_catalog.pg_total_relation_size(oid::pg_catalog.regclass))::bigint AS total_bytes FROM tables
    ) AS size;

COMMENT ON VIEW idem_overview IS
    'One row: claims on a lease, how many and how old; held locks; completed records, and those that a purge would remove; size.';
COMMENT ON COLUMN idem_overview.in_progress IS 'Claims whose lease is running. A claim without a lease has no row.';
COMMENT ON COLUMN idem_overview.oldest_in_progress IS 'When the key of the oldest of them was first claimed.';
COMMENT ON COLUMN idem_overview.abandoned IS 'Claims whose lease is over and that nobody has taken over yet.';
COMMENT ON COLUMN idem_overview.oldest_abandoned IS 'When the first of their leases ended.';
COMMENT ON COLUMN idem_overview.locks_held IS 'Locks whose lease is running. A transaction lock has no row.';
COMMENT ON COLUMN idem_overview.completed_estimate IS 'Completed records, expired ones included, as PostgreSQL''s own statistics have them.';
COMMENT ON COLUMN idem_overview.purgeable_estimate IS 'Those of them that the next purge removes.';
COMMENT ON COLUMN idem_overview.oldest_purgeable IS 'Since when the first of these could have been removed.';
COMMENT ON COLUMN idem_overview.total_bytes IS 'All tables of idem with their indexes and TOAST.';

CREATE VIEW lock_leases AS
SELECT
    scope,
    name,
    CASE
        WHEN token IS NULL THEN 'free'
        WHEN expires_at OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp() THEN 'expired'
        ELSE 'held'
    END AS state,
    holder,
    fence,
    acquired_at,
    expires_at
FROM idem_locks;

COMMENT ON VIEW lock_leases IS
    'Lease locks: state is held, expired (not unlocked in time; anybody may take it) or free. The times are of the last grant.';

-- Privileges -------------------------------------------------------------------------------------
--
-- PUBLIC gets nothing. There are two levels: the application uses keys and locks, the administration
-- looks at all of them and cleans up. The functions read and write the tables themselves, so a granted
-- role needs no privilege on them, and gets none.

CREATE FUNCTION idem_change_privileges(role regrole, granting boolean, levels text[]) RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    application CONSTANT text[] := ARRAY[
        'idem_begin', 'idem_complete', 'idem_release', 'idem_extend', 'idem_checkpoint', 'idem_run', 'idem_once', 'idem_get',
        'idem_fingerprint', 'idem_fingerprint_json', 'idem_compose_key',
        'lock_try', 'lock_acquire', 'lock_extend', 'lock_unlock', 'lock_guard', 'lock_try_xact', 'lock_acquire_xact'
    ];
    administration CONSTANT text[] := ARRAY[
        'idem_forget', 'idem_purge', 'idem_schedule_purge', 'idem_unschedule_purge', 'idem_stats', 'idem_stats_reset', 'idem_records', 'idem_overview', 'lock_leases'
    ];
    names text[] := '{}';
    schema regnamespace;
    privilege text;
BEGIN
    IF role IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'role must not be NULL';
    END IF;
    IF 'application' OPERATOR(pg_catalog.=) ANY (levels) THEN
        names := names OPERATOR(pg_catalog.||) application;
    END IF;
    IF 'administration' OPERATOR(pg_catalog.=) ANY (levels) THEN
        names := names OPERATOR(pg_catalog.||) administration;
    END IF;
    FOR schema, privilege IN
        SELECT
            e.extnamespace,
            CASE
                WHEN p.oid IS NULL THEN pg_catalog.format('SELECT ON TABLE %s', c.oid::pg_catalog.regclass)
                ELSE pg_catalog.format('EXECUTE ON FUNCTION %s', p.oid::pg_catalog.regprocedure)
            END
        FROM pg_catalog.pg_extension AS e
        JOIN pg_catalog.pg_depend AS d
            ON d.refclassid OPERATOR(pg_catalog.=) 'pg_catalog.pg_extension'::pg_catalog.regclass
            AND d.refobjid OPERATOR(pg_catalog.=) e.oid
            AND d.deptype OPERATOR(pg_catalog.=) 'e'
        LEFT JOIN pg_catalog.pg_proc AS p
            ON d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
            AND p.oid OPERATOR(pg_catalog.=) d.objid
        LEFT JOIN pg_catalog.pg_class AS c
            ON d.classid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass
            AND c.oid OPERATOR(pg_catalog.=) d.objid
        WHERE e.extname OPERATOR(pg_catalog.=) 'idem'
            AND COALESCE(p.proname, c.relname) OPERATOR(pg_catalog.=) ANY (names)
    LOOP
        IF granting THEN
            EXECUTE pg_catalog.format('GRANT %s TO %s', privilege, role);
        ELSE
            EXECUTE pg_catalog.format('REVOKE %s FROM %s', privilege, role);
        END IF;
    END LOOP;
    IF granting AND NOT pg_catalog.has_schema_privilege(role, schema, 'USAGE') THEN
        EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %s TO %s', schema, role);
    END IF;
END
$$;

COMMENT ON FUNCTION idem_change_privileges(regrole, boolean, text[]) IS
    'Internal: what idem_grant, idem_grant_admin and idem_revoke share.';

CREATE FUNCTION idem_grant(role regrole) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
BEGIN ATOMIC
    SELECT idem_change_privileges(role, true, ARRAY['application']);
END;

COMMENT ON FUNCTION idem_grant(regrole) IS
    'Lets a role use idempotency keys and locks: EXECUTE on their functions, and USAGE on their schema if it is needed.';

CREATE FUNCTION idem_grant_admin(role regrole) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
BEGIN ATOMIC
    SELECT idem_change_privileges(role, true, ARRAY['administration']);
END;

COMMENT ON FUNCTION idem_grant_admin(regrole) IS
    'Lets a role look after idem: idem_forget, idem_purge and its scheduling, idem_stats, idem_stats_reset and the views, and USAGE on their schema if it is needed. Does not include what idem_grant gives.';

CREATE FUNCTION idem_revoke(role regrole) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
BEGIN ATOMIC
    SELECT idem_change_privileges(role, false, ARRAY['application', 'administration']);
END;

COMMENT ON FUNCTION idem_revoke(regrole) IS
    'Takes back what idem_grant and idem_grant_admin gave, but for USAGE on the schema, which may serve others.';

REVOKE ALL ON TABLE
    idem_claims, idem_segment_0, idem_segment_1, idem_segment_2, idem_segment_3, idem_segment_4, idem_segment_5, idem_segment_6, idem_segment_7, idem_long, idem_ring,
    idem_filters, idem_locks, idem_floors, idem_records, idem_overview, lock_leases
FROM PUBLIC;
REVOKE ALL ON FUNCTION
    idem_begin(text, bytea, text, text, interval, interval, boolean),
    idem_complete(text, jsonb, bytea, uuid, text, interval),
    idem_release(text, uuid, text),
    idem_extend(text, uuid, interval, text),
    idem_checkpoint(text, jsonb, uuid, interval, text),
    idem_run(text, regprocedure, jsonb, text, text, interval, interval, boolean),
    idem_once(text, text, interval, interval),
    idem_get(text, text, text),
    idem_forget(text, text),
    idem_purge(integer),
    idem_schedule_purge(text),
    idem_unschedule_purge(),
    idem_fingerprint(text[]),
    idem_fingerprint_json(jsonb),
    idem_compose_key(text[]),
    lock_try(text, interval, text, text),
    lock_acquire(text, interval, interval, text, text),
    lock_extend(text, uuid, interval, text),
    lock_unlock(text, uuid, text),
    lock_guard(text, uuid, text),
    lock_try_xact(text, text),
    lock_acquire_xact(text, interval, text),
    idem_stats(),
    idem_stats_reset(),
    idem_change_privileges(regrole, boolean, text[]),
    idem_grant(regrole),
    idem_grant_admin(regrole),
    idem_revoke(regrole)
FROM PUBLIC;

-- Monitoring gets what is only numbers. Keys, names and holders are for whoever is granted them.
GRANT EXECUTE ON FUNCTION idem_stats() TO pg_monitor;
GRANT SELECT ON TABLE idem_overview TO pg_monitor;
