-- A hot name costs no index entries: thousands of take, extend and unlock are HOT updates of one row, and neither table
-- nor index grows. In a database of its own, where nobody's snapshot keeps the old versions, but for that of an autovacuum
-- worker who analyzes a catalogue at this very time: a few pages more, then.
\set database :DBNAME
CREATE DATABASE regress_idem_lock_hot;
\c regress_idem_lock_hot
CREATE EXTENSION idem;
SELECT idem_grant('app');
ALTER TABLE idem_locks SET (autovacuum_enabled = false);
SET ROLE app;
SELECT acquired FROM lock_try('hot', ttl => '1us');
RESET ROLE;
SELECT pg_relation_size('idem_locks_pkey') AS size \gset before_
SET ROLE app;
DO $$
DECLARE
    given uuid;
BEGIN
    FOR n IN 1..3000 LOOP
        SELECT token INTO STRICT given FROM lock_try('hot', ttl => '1h', holder => 'worker ' || n) WHERE acquired;
        COMMIT;
        IF n % 3 = 0 THEN
            PERFORM lock_extend('hot', given);
            COMMIT;
        END IF;
        IF NOT lock_unlock('hot', given) THEN
            RAISE 'not unlocked';
        END IF;
        COMMIT;
    END LOOP;
END
$$;
RESET ROLE;
SELECT pg_stat_force_next_flush();
SELECT n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_hot_upd > 6500 AS hot, n_tup_del AS deleted FROM pg_stat_user_tables WHERE relname = 'idem_locks';
SELECT pg_relation_size('idem_locks_pkey') = :before_size AS index_did_not_grow, pg_relation_size('idem_locks') / current_setting('block_size')::int < 100 AS table_did_not_grow;
\c :database
DROP DATABASE regress_idem_lock_hot;
