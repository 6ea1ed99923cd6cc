-- idem 0.1.0 to 0.2.0: statistics, views of open claims and locks, a level of privileges for administration.

\echo Use "ALTER EXTENSION idem UPDATE" to load this file. \quit

-- Filters ----------------------------------------------------------------------------------------

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

REVOKE ALL ON TABLE idem_filters FROM PUBLIC;

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

-- Views ----------------------------------------------------------------------------------------

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

-- Privileges -----------------------------------------------------------------------------------

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

CREATE OR REPLACE FUNCTION idem_grant(role regrole) RETURNS void
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

CREATE OR REPLACE FUNCTION idem_revoke(role regrole) RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
BEGIN ATOMIC
    SELECT idem_change_privileges(role, false, ARRAY['application', 'administration']);
END;

COMMENT ON FUNCTION idem_revoke(regrole) IS
    'Takes back what idem_grant and idem_grant_admin gave, but for USAGE on the schema, which may serve others.';

REVOKE ALL ON TABLE idem_overview, lock_leases FROM PUBLIC;
REVOKE ALL ON FUNCTION idem_stats(), idem_stats_reset(), idem_change_privileges(regrole, boolean, text[]), idem_grant_admin(regrole) FROM PUBLIC;

-- Monitoring gets what is only numbers. Keys, names and holders are for whoever is granted them.
GRANT EXECUTE ON FUNCTION idem_stats() TO pg_monitor;
GRANT SELECT ON TABLE idem_overview TO pg_monitor;
