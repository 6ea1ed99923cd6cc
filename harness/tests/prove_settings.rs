//! One battery of what idem promises, under every setting that a user may have: of the session, the database, the server,
//! its encoding; with objects that an administrator adds; with timeouts at the worst moments; and with a full disk.

mod common;
mod lock_common;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::scope;

use common::*;
use idem_harness::{Server, TestDb, eventually, major, rounds, skipped, sqlstate};
use lock_common::*;
use postgres::Client;
use serde_json::json;

/// Where the battery runs: how the application and the administrator get in.
struct Place<'a> {
    name: &'a str,
    app: &'a dyn Fn() -> Client,
}

/// One row of one boolean column, which must be true.
#[track_caller]
fn holds(client: &mut Client, place: &Place, sql: &str) {
    let outcome = client.query_one(sql, &[]);
    let row = outcome.unwrap_or_else(|error| panic!("{}: {sql}: {error:?}", place.name));
    assert_eq!(row.get::<_, Option<bool>>(0), Some(true), "{}: {sql}", place.name);
}

#[track_caller]
fn fails(client: &mut Client, place: &Place, state: &str, sql: &str) {
    let error = client.batch_execute(sql).expect_err(place.name);
    assert_eq!(sqlstate(&error), state, "{}: {sql}: {error:?}", place.name);
}

/// The core of the contract. The answers are compared in the server, so that nothing hides in how the driver reads them.
fn battery(place: &Place) {
    static RUN: AtomicU64 = AtomicU64::new(0);
    let s = format!("run {}", RUN.fetch_add(1, Ordering::Relaxed));
    let (mut a, mut b) = ((place.app)(), (place.app)());
    let begin = |key: &str, rest: &str| format!("idem_begin('{key}', scope => '{s}'{rest})");

    // In a transaction: claimed, busy for others, rolled back with a savepoint, completed, replayed, of another request.
    run(&mut a, "BEGIN; CREATE TEMP TABLE IF NOT EXISTS effects (n int); SAVEPOINT s");
    let fresh = "status = 'acquired' AND attempt = 1 AND token IS NOT NULL AND result IS NULL AND expires_at IS NULL";
    let fingerprint = ", fingerprint => decode('00ff27', 'hex'), owner => 'o'";
    holds(&mut a, place, &format!("SELECT {fresh} FROM {}", begin("k", fingerprint)));
    run(&mut a, "ROLLBACK TO s");
    holds(&mut a, place, &format!("SELECT {fresh} FROM {}", begin("k", fingerprint)));
    let busy = "status = 'in_progress' AND token IS NULL AND retry_after IS NULL";
    holds(&mut b, place, &format!("SELECT {busy} FROM {}", begin("k", "")));
    run(&mut a, "SAVEPOINT s");
    run(&mut a, &format!("SELECT idem_complete('k', '0', scope => '{s}')"));
    run(&mut a, "ROLLBACK TO s");
    run(
        &mut a,
        &format!(
            "SELECT idem_complete('k', jsonb_build_object('n', 1.10, 't', 'x'), decode('00ff', 'hex'), scope => '{s}', ttl => '25 hours')"
        ),
    );
    run(&mut a, "COMMIT");
    for client in [&mut a, &mut b] {
        let replayed = "status = 'completed' AND result::text = '{\"n\": 1.10, \"t\": \"x\"}' AND encode(body, 'hex') = '00ff'
            AND token IS NULL AND completed_at <= clock_timestamp() AND completed_at > clock_timestamp() - interval '1' hour
            AND extract(epoch FROM expires_at - completed_at) = 90000";
        holds(client, place, &format!("SELECT {replayed} FROM {}", begin("k", fingerprint)));
        let other =
            "status = 'mismatch' AND result IS NULL AND body IS NULL AND completed_at IS NULL";
        holds(
            client,
            place,
            &format!(
                "SELECT {other} FROM {}",
                begin("k", ", fingerprint => 'x'::bytea, owner => 'o'")
            ),
        );
        holds(
            client,
            place,
            &format!(
                "SELECT status = 'denied' AND result IS NULL FROM {}",
                begin("k", ", owner => 'p'")
            ),
        );
        holds(
            client,
            place,
            &format!(
                "SELECT state = 'completed' AND key = 'k' AND owner = 'o' FROM idem_get('k', '{s}')"
            ),
        );
        fails(client, place, "ID003", &format!("SELECT idem_complete('k', scope => '{s}')"));
    }
    holds(
        &mut a,
        place,
        &format!("SELECT status = 'acquired' FROM {}", begin("K", ", lease => '1h'")),
    );
    fails(&mut a, place, "ID007", &format!("SELECT {}", begin("open", "")));
    fails(&mut a, place, "22023", &format!("SELECT {}", begin("", "")));

    // On a lease: live for others, extended, with a checkpoint, over, taken over; the stale token changes nothing.
    let token = |client: &mut Client, call: &str| -> uuid::Uuid {
        let row = client.query_one(&format!("SELECT status, token FROM {call} OFFSET 0"), &[]);
        let row = row.unwrap_or_else(|error| panic!("{}: {call}: {error:?}", place.name));
        assert_eq!(row.get::<_, &str>(0), "acquired", "{}: {call}", place.name);
        row.get(1)
    };
    let first = token(&mut a, &begin("l", ", lease => '1 day 2:03:04.5'"));
    let live =
        "status = 'in_progress' AND extract(epoch FROM retry_after) BETWEEN 93000 AND 93784.5
        AND expires_at > clock_timestamp()";
    holds(&mut b, place, &format!("SELECT {live} FROM {}", begin("l", "")));
    holds(
        &mut a,
        place,
        &format!(
            "SELECT extract(epoch FROM idem_extend('l', '{first}', scope => '{s}') - clock_timestamp()) BETWEEN 93000 AND 93784.5"
        ),
    );
    run(
        &mut a,
        &format!(
            "SELECT idem_checkpoint('l', '{{\"step\": 2}}', '{first}', '1 microsecond', '{s}')"
        ),
    );
    let over = "status = 'abandoned' AND attempt = 1 AND (checkpoint->>'step')::int = 2";
    holds(&mut b, place, &format!("SELECT {over} FROM {}", begin("l", ", takeover => false")));
    let second = token(&mut b, &begin("l", ", lease => '1h'"));
    fails(
        &mut a,
        place,
        "ID003",
        &format!("SELECT idem_complete('l', '1', token => '{first}', scope => '{s}')"),
    );
    holds(&mut a, place, &format!("SELECT NOT idem_release('l', '{first}', '{s}')"));
    holds(
        &mut a,
        place,
        &format!("SELECT state = 'in_progress' AND attempt = 2 FROM idem_get('l', '{s}')"),
    );
    holds(&mut b, place, &format!("SELECT idem_release('l', '{second}', '{s}')"));
    let third = token(&mut a, &begin("l", ", lease => '1h'"));
    run(
        &mut b,
        &format!(
            "SELECT idem_complete('l', 'null', token => '{third}', scope => '{s}', ttl => '1 microsecond')"
        ),
    );
    holds(&mut b, place, &format!("SELECT count(*) = 0 FROM idem_get('l', '{s}')"));
    token(&mut b, &begin("l", ", lease => '1h'"));

    // In one call.
    for client in [&mut a, &mut b] {
        run(
            client,
            "CREATE FUNCTION pg_temp.echo(request jsonb) RETURNS jsonb LANGUAGE sql RETURN request",
        );
    }
    holds(
        &mut a,
        place,
        &format!(
            "SELECT idem_run('r', 'pg_temp.echo(jsonb)', '{{\"a\": 1}}', '{s}') = '{{\"a\": 1}}'"
        ),
    );
    holds(
        &mut b,
        place,
        &format!(
            "SELECT idem_run('r', 'pg_temp.echo(jsonb)', '{{\"a\": 1e0}}', '{s}') = '{{\"a\": 1}}'"
        ),
    );
    fails(
        &mut b,
        place,
        "ID002",
        &format!("SELECT idem_run('r', 'pg_temp.echo(jsonb)', '1', '{s}')"),
    );
    holds(&mut a, place, &format!("SELECT idem_once('o', '{s}')"));
    holds(&mut b, place, &format!("SELECT NOT idem_once('o', '{s}')"));
    holds(
        &mut a,
        place,
        "SELECT encode(idem_fingerprint('a:b', 'c'), 'hex') = 'fc22bcffa2f0f2917c0a00e4bed093dd0a22857b5eb52a9bc5eeac055ebcdc6c'
            AND encode(idem_fingerprint_json('-120.50'), 'hex') = 'a90fb69256de383c1912506c04fb692d377232b2f3a2996f35507c1ae4e65b6a'
            AND idem_compose_key('a:b', 'c') <> idem_compose_key('a', 'b:c')",
    );

    // Locks.
    let grant =
        granted(&mut a, &format!("lock_try('n', ttl => '1 day', scope => '{s}', holder => 'me')"));
    let told = is_busy(&mut b, &format!("lock_try('n', scope => '{s}')"));
    assert_eq!(told.held_by.as_deref(), Some("me"), "{}", place.name);
    assert!(told.retry_after.is_some_and(|left| (86000.0..=86400.0).contains(&left)), "{told:?}");
    holds(&mut b, place, &format!("SELECT NOT lock_try_xact('n', '{s}')"));
    run(&mut a, "BEGIN");
    holds(
        &mut a,
        place,
        &format!("SELECT lock_guard('n', '{}', '{s}') = {}", grant.token, grant.fence),
    );
    run(&mut a, "COMMIT");
    holds(
        &mut b,
        place,
        &format!(
            "SELECT lock_extend('n', '{}', '2h', '{s}') > clock_timestamp() + interval '1' hour",
            grant.token
        ),
    );
    holds(&mut b, place, &format!("SELECT lock_unlock('n', '{}', '{s}')", grant.token));
    fails(&mut a, place, "ID011", &format!("SELECT lock_guard('n', '{}', '{s}')", grant.token));
    let next = granted(&mut b, &format!("lock_acquire('n', ttl => '1us', scope => '{s}')"));
    assert!(next.fence > grant.fence, "{}", place.name);
    run(&mut a, "BEGIN");
    holds(&mut a, place, &format!("SELECT lock_acquire_xact('n', scope => '{s}')"));
    is_busy(&mut b, &format!("lock_try('n', scope => '{s}')"));
    run(&mut a, "ROLLBACK");

    // A waiter gets the stored result as soon as the holder commits.
    run(&mut a, "BEGIN");
    holds(&mut a, place, &format!("SELECT status = 'acquired' FROM {}", begin("w", "")));
    let waiter = Waiter::start(b, "w", &format!(", scope => '{s}'{LONG}"));
    let mut other = (place.app)();
    eventually("it waits", || queues(&mut other, waiter.pid));
    run(&mut a, &format!("SELECT idem_complete('w', '\"done\"', scope => '{s}')"));
    run(&mut a, "COMMIT");
    assert_eq!(waiter.answer().0.result, Some(json!("done")), "{}", place.name);
    assert_eq!(our_locks(&mut other), 0, "{}", place.name);
}

fn in_database(name: &str, db: &TestDb) {
    println!("under {name}");
    battery(&Place { name, app: &|| db.app() });
}

/// `name = value`, set for the database, so before idem's library is loaded.
const SESSION: &[&str] = &[
    "TimeZone = 'Pacific/Apia'",
    "TimeZone = 'America/St_Johns'",
    "TimeZone = '<+1559>-15:59'",
    "DateStyle = 'German, DMY'",
    "DateStyle = 'SQL, MDY'",
    "DateStyle = 'Postgres, YMD'",
    "IntervalStyle = sql_standard",
    "IntervalStyle = iso_8601",
    "IntervalStyle = postgres_verbose",
    "standard_conforming_strings = off",
    "bytea_output = escape",
    "extra_float_digits = -15",
    "array_nulls = off",
    "transform_null_equals = on",
    "quote_all_identifiers = on",
    "default_transaction_isolation = 'repeatable read'",
    "default_transaction_isolation = serializable",
    "default_transaction_deferrable = on",
    "session_replication_role = replica",
    "row_security = off",
    "synchronous_commit = off",
    "synchronous_commit = local",
    "client_min_messages = debug5",
    "client_min_messages = error",
    "log_min_messages = debug5",
    "log_statement = 'all'",
    "log_parameter_max_length_on_error = -1",
    "log_executor_stats = on",
    "plan_cache_mode = force_generic_plan",
    "plan_cache_mode = force_custom_plan",
    "enable_indexscan = off",
    "enable_seqscan = off",
    "jit_above_cost = 0",
    "from_collapse_limit = 1",
    "work_mem = '64kB'",
    "temp_file_limit = 0",
    "temp_buffers = 100",
    "default_toast_compression = lz4",
    "default_statistics_target = 1",
    "check_function_bodies = off",
    "lock_timeout = '1min'",
    "statement_timeout = '1min'",
    "idle_in_transaction_session_timeout = '1min'",
    "vacuum_freeze_min_age = 0",
    "track_functions = 'all'",
    "track_activities = on",
    "exit_on_error = off",
    "commit_siblings = 0",
    "idem.ttl = '2h'",
    "idem.wait = '1ms'",
    "idem.lock_ttl = '1min'",
    "session_preload_libraries = idem",
];

#[test]
fn the_battery_under_every_setting_of_a_session() {
    let db = TestDb::new();
    in_database("defaults", &db);
    let parallel = match major() {
        15 => "force_parallel_mode = on",
        _ => "debug_parallel_query = on",
    };
    let newer: &[&str] = match major() {
        15 | 16 => &[],
        _ => &["transaction_timeout = '1min'"],
    };
    let mut admin = db.admin();
    for setting in SESSION.iter().chain([&parallel]).chain(newer) {
        run(&mut admin, &format!("ALTER DATABASE {} SET {setting}", db.name));
        in_database(setting, &db);
        run(&mut admin, &format!("ALTER DATABASE {} RESET ALL", db.name));
    }
}

/// What an administrator may do to idem's own tables (`%I` is each), to the database, to the server around it.
const OBJECTS: &[(&str, &str)] = &[
    (
        "row security forced",
        "ALTER TABLE %I ENABLE ROW LEVEL SECURITY; ALTER TABLE %1$I FORCE ROW LEVEL SECURITY",
    ),
    (
        "triggers that refuse",
        "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON %I FOR EACH ROW EXECUTE FUNCTION refuse()",
    ),
    ("rules", "CREATE RULE nothing AS ON INSERT TO %I DO INSTEAD NOTHING"),
    ("a hash index", "CREATE INDEX ON %I USING hash (digest)"),
    (
        "an index on an expression and a part",
        "CREATE INDEX ON %I ((digest::text)) WHERE digest IS NOT NULL",
    ),
    ("a publication with full identity", "ALTER TABLE %I REPLICA IDENTITY FULL"),
    ("extended statistics", "ANALYZE %I"),
    (
        "autovacuum at every change",
        "ALTER TABLE %I SET (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0)",
    ),
    ("an added column", "ALTER TABLE %I ADD COLUMN note text"),
    ("a cluster order", "CLUSTER %I USING %2$I"),
];

#[test]
fn the_battery_with_what_an_administrator_adds() {
    let db = TestDb::bare();
    let mut admin = db.admin();
    // Event triggers are there before idem is.
    run(
        &mut admin,
        "CREATE FUNCTION watch() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM 1; END $$;
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
         CREATE EVENT TRIGGER e1 ON ddl_command_start EXECUTE FUNCTION watch();
         CREATE EVENT TRIGGER e2 ON ddl_command_end EXECUTE FUNCTION watch();
         CREATE EVENT TRIGGER e3 ON sql_drop EXECUTE FUNCTION watch();
         CREATE EVENT TRIGGER e4 ON table_rewrite EXECUTE FUNCTION watch();
         CREATE PUBLICATION everything FOR ALL TABLES",
    );
    if major() >= 17 {
        run(
            &mut admin,
            "CREATE EVENT TRIGGER e5 ON login EXECUTE FUNCTION watch(); ALTER EVENT TRIGGER e5 ENABLE ALWAYS",
        );
    }
    run(
        &mut admin,
        "DO $$ BEGIN CREATE ROLE app LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
         CREATE EXTENSION idem; SELECT idem_grant('app')",
    );
    in_database("event triggers, a publication", &db);
    for (name, statement) in OBJECTS {
        // Whatever tables there are that records are kept in.
        let tables = admin
            .query(
                "SELECT format($1, c.relname, i.relname)
                 FROM pg_depend AS d
                 JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
                 JOIN pg_class AS c ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
                 JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = 'digest'
                 JOIN pg_index AS x ON x.indrelid = c.oid AND x.indisprimary
                 JOIN pg_class AS i ON i.oid = x.indexrelid
                 WHERE e.extname = 'idem' AND c.relkind = 'r'",
                &[&statement],
            )
            .unwrap();
        assert!(!tables.is_empty());
        for table in tables {
            run(&mut admin, table.get(0));
        }
        in_database(name, &db);
    }
    for command in ["VACUUM FULL".to_string(), format!("REINDEX DATABASE {}", db.name)] {
        run(&mut admin, &command);
    }
    in_database("after VACUUM FULL and REINDEX", &db);
}

#[test]
fn the_battery_in_every_encoding_and_collation() {
    let mut options: Vec<String> = ["UTF8", "LATIN1", "SQL_ASCII", "EUC_JP"]
        .iter()
        .map(|encoding| format!("ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"))
        .collect();
    let shared = TestDb::new();
    let mut admin = shared.admin();
    let icu =
        admin.batch_execute("CREATE COLLATION with_icu (provider = icu, locale = 'und')").is_ok();
    if icu {
        options.push(
            "ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level1' LOCALE 'C'".into(),
        );
    } else {
        skipped("this server is built without ICU: no nondeterministic collation");
    }
    if major() >= 17 {
        options.push(
            "ENCODING 'UTF8' LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8' LOCALE 'C'".into(),
        );
    }
    for (n, option) in options.iter().enumerate() {
        let db = TestDb { name: format!("{}_{n}", shared.name) };
        run(&mut admin, &format!("CREATE DATABASE {} TEMPLATE template0 {option}", db.name));
        run(&mut db.admin(), "CREATE EXTENSION idem; SELECT idem_grant('app')");
        in_database(option, &db);
        let mut client = db.admin();
        let mut equal = 1;
        let mut column = "text";
        if icu && option.contains("UTF8") {
            run(
                &mut client,
                "CREATE COLLATION anyhow (provider = icu, locale = 'und-u-ks-level1', deterministic = false)",
            );
            (column, equal) = ("text COLLATE anyhow", 2);
        }
        // Perhaps equal for the collation of the column they come from; two for idem.
        run(
            &mut client,
            &format!(
                "CREATE TABLE words (word {column}); INSERT INTO words VALUES ('key'), ('KEY');
                 SELECT FROM idem_begin('owned', lease => '1h', owner => 'key')"
            ),
        );
        assert_eq!(number(&mut client, "SELECT count(*) FROM words WHERE word = 'key'"), equal);
        for (call, answer) in [
            ("idem_begin(word, lease => '1h')", "status = 'acquired'"),
            ("idem_begin('k', scope => word, lease => '1h')", "status = 'acquired'"),
            ("idem_get(word)", "key = word COLLATE \"C\""),
            ("lock_try(word, ttl => '1h')", "acquired"),
            ("lock_try('l', scope => word, ttl => '1h')", "acquired"),
        ] {
            let sql = format!("SELECT count(*) FROM words, {call} WHERE {answer}");
            assert_eq!(number(&mut client, &sql), 2, "{option}: {sql}");
        }
        let denied = "SELECT string_agg(word, '') FROM words, idem_begin('owned', owner => word) WHERE status = 'denied'";
        assert_eq!(client.query_one(denied, &[]).unwrap().get::<_, &str>(0), "KEY", "{option}");
    }
}

/// Settings of a server.
const SERVERS: &[&[&str]] = &[
    &["wal_level=minimal", "max_wal_senders=0", "fsync=on", "full_page_writes=off"],
    &[
        "max_locks_per_transaction=10",
        "max_connections=15",
        "max_prepared_transactions=0",
        "superuser_reserved_connections=1",
    ],
    &["track_commit_timestamp=on", "wal_level=logical", "wal_compression=on", "wal_init_zero=off"],
    &[
        "shared_preload_libraries=idem",
        "max_pred_locks_per_transaction=10",
        "huge_pages=off",
        "shared_buffers=1MB",
    ],
    &[
        "default_transaction_isolation=serializable",
        "max_pred_locks_per_page=0",
        "max_pred_locks_per_relation=1",
    ],
];

#[test]
fn the_battery_under_settings_of_the_server() {
    for settings in SERVERS {
        let server = Server::start(settings);
        server.create_database("shop");
        let decoding = settings.contains(&"wal_level=logical");
        let mut admin = server.connect("shop", "postgres");
        if decoding {
            run(&mut admin, "SELECT pg_create_logical_replication_slot('slot', 'test_decoding')");
        }
        println!("under {settings:?}");
        battery(&Place { name: settings[0], app: &|| server.connect("shop", "app") });
        if decoding {
            // Every commit of the battery can be decoded; its records are rows like any other.
            let rows = "SELECT count(*) FROM pg_logical_slot_get_changes('slot', NULL, NULL) WHERE data LIKE 'table %: INSERT:%'";
            assert!(number(&mut admin, rows) >= 8);
        }
    }
}

#[test]
fn read_only_by_default_refuses_everything_but_a_look() {
    let db = TestDb::new();
    let mut app = db.app();
    run(&mut app, "BEGIN");
    acquire(&mut app, "k", "");
    complete(&mut app, "k", &json!(1), None);
    run(&mut app, "COMMIT");
    let mut admin = db.admin();
    run(&mut admin, &format!("ALTER DATABASE {} SET default_transaction_read_only = on", db.name));
    let place = Place { name: "read only", app: &|| db.app() };
    let mut app = db.app();
    for call in [
        "idem_begin('k')",
        "idem_complete('k')",
        "idem_release('k')",
        "idem_once('k')",
        "lock_try('n')",
        "lock_try_xact('n')",
    ] {
        fails(&mut app, &place, "25006", &format!("SELECT {call}"));
    }
    holds(&mut app, &place, "SELECT state = 'completed' FROM idem_get('k')");
    // It is a default, not a boundary.
    run(&mut app, "BEGIN READ WRITE");
    assert_eq!(status(&mut app, "k", ""), "completed");
    run(&mut app, "COMMIT");
    assert_eq!(our_locks(&mut db.admin()), 0);
}

#[test]
fn too_many_keys_for_the_lock_table_fail_clean() {
    let server = Server::start(&[
        "max_locks_per_transaction=10",
        "max_connections=15",
        "max_prepared_transactions=0",
        "superuser_reserved_connections=1",
    ]);
    server.create_database("shop");
    let mut app = server.connect("shop", "app");
    let error = app
        .batch_execute(
            "SELECT count(*) FROM generate_series(1, 100000) AS n WHERE idem_once('key ' || n)",
        )
        .unwrap_err();
    assert_eq!(sqlstate(&error), "53200", "{error:?}");
    run(&mut app, "SELECT 1"); // the error arrives before all the locks are given back
    let mut admin = server.connect("shop", "postgres");
    assert_eq!(our_locks(&mut admin), 0);
    // All or nothing: none of them counts.
    let after = "SELECT count(*) FROM generate_series(1, 200) AS n WHERE idem_once('key ' || n)";
    assert_eq!(number(&mut app, after), 200);
    battery(&Place { name: "after 53200", app: &|| server.connect("shop", "app") });
}

/// Calls that have to wait, with the timeouts of the caller so short that they hit at any moment: before, in and after the wait,
/// while the record is read, while it is written. The work of a holder takes 2 ms.
#[test]
fn timeouts_at_the_worst_moments_leave_all_or_nothing() {
    let db = TestDb::new();
    run(&mut db.admin(), "CREATE TABLE payments (key text); GRANT ALL ON payments TO app");
    let mut random = Random::replayable();
    let keys = 40;
    let requests = rounds(400, 20_000);
    let hits: u64 = scope(|threads| {
        let clients: Vec<_> = (0..6)
            .map(|_| {
                let mut random = Random::seeded(random.next());
                let db = &db;
                threads.spawn(move || {
                    let mut client = db.app();
                    let mut hits = 0;
                    for _ in 0..requests {
                        let key = format!("key {}", random.below(keys));
                        let (statement, lock) = (1 + random.below(6), 1 + random.below(6));
                        run(
                            &mut client,
                            &format!("SET statement_timeout = 0; SET lock_timeout = {}", lock * random.below(2)),
                        );
                        let work = match random.below(4) {
                            0 => format!(
                                "DO $$ BEGIN
                                     IF (SELECT status FROM idem_begin('{key}', wait => '1s')) = 'acquired' THEN
                                         PERFORM pg_sleep(0.002);
                                         INSERT INTO payments VALUES ('{key}');
                                         PERFORM idem_complete('{key}', '1');
                                     END IF;
                                 END $$"
                            ),
                            1 => format!(
                                "DO $$ BEGIN IF idem_once('{key}') THEN INSERT INTO payments VALUES ('{key}'); END IF; END $$"
                            ),
                            2 => format!(
                                "DO $$ DECLARE l record; BEGIN
                                     l := lock_acquire('{key}', wait => '1s', ttl => '2ms');
                                     IF l.acquired THEN PERFORM lock_guard('{key}', l.token), pg_sleep(0.002), lock_unlock('{key}', l.token); END IF;
                                 END $$"
                            ),
                            _ => format!(
                                "DO $$ DECLARE b record; BEGIN
                                     b := idem_begin('{key}', lease => '1us', wait => '1s');
                                     IF b.status = 'acquired' THEN PERFORM idem_release('{key}', b.token); END IF;
                                 END $$"
                            ),
                        };
                        let limit = statement * random.below(2);
                        let outcome = client.batch_execute(&format!("SET statement_timeout = {limit}"));
                        match outcome.and_then(|()| client.batch_execute(&work)) {
                            Ok(()) => {}
                            Err(error) => {
                                let state = sqlstate(&error);
                                // The last: a lease of 2 ms was over before it was guarded.
                                assert!(["57014", "55P03", "ID011"].contains(&state), "{error:?}");
                                hits += u64::from(state != "ID011");
                            }
                        }
                        let _ = client.batch_execute("SET statement_timeout = 0");
                    }
                    hits
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    println!("{hits} of {} requests were cut off", 6 * requests);
    assert!(hits > 0, "no timeout hit: the test proves nothing");
    let mut admin = db.admin();
    assert_eq!(our_locks(&mut admin), 0);
    let wrong = format!(
        "SELECT count(*) FROM generate_series(0, {keys} - 1) AS n
         LEFT JOIN LATERAL idem_get('key ' || n) AS r ON true
         CROSS JOIN LATERAL (SELECT count(*) AS n FROM payments WHERE key = 'key ' || n.n) AS p
         WHERE (r.state IS NOT DISTINCT FROM 'completed') <> (p.n = 1) OR p.n > 1"
    );
    assert_eq!(number(&mut admin, &wrong), 0);
}

/// A small file system of its own, gone with the test.
struct Disk(String);

impl Disk {
    /// None where that is not allowed.
    fn mount(path: String, owner: &Path) -> Option<Disk> {
        use std::os::unix::fs::MetadataExt;
        std::fs::create_dir(&path).ok()?;
        let owner = std::fs::metadata(owner).ok()?;
        let options = format!("size=16M,mode=700,uid={},gid={}", owner.uid(), owner.gid());
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "idem", &path])
            .output()
            .ok()?;
        mounted.status.success().then_some(Disk(path))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", &self.0]).status();
    }
}

#[test]
fn a_full_disk_fails_clean_and_all_works_when_there_is_room_again() {
    let server = Server::start(&["autovacuum=off"]);
    let path = format!("{}/small", server.dir());
    let Some(disk) = Disk::mount(path, Path::new(server.dir())) else {
        skipped("a file system can be mounted by root only");
        return;
    };
    run(
        &mut server.connect("postgres", "postgres"),
        &format!("CREATE TABLESPACE small LOCATION '{}'", disk.0),
    );
    server.create_database("shop");
    run(&mut server.connect("postgres", "postgres"), "ALTER DATABASE shop SET TABLESPACE small");
    let mut admin = server.connect("shop", "postgres");
    run(
        &mut admin,
        "CREATE TABLE payments (key text); GRANT ALL ON payments TO app; CREATE TABLE filler (t text)",
    );
    run(&mut admin, "ALTER TABLE filler ALTER COLUMN t SET STORAGE plain");
    let fill = |admin: &mut Client| {
        // To the last block.
        for size in [100, 10, 1] {
            loop {
                let rows = format!(
                    "INSERT INTO filler SELECT repeat('x', 7000) FROM generate_series(1, {size})"
                );
                match admin.batch_execute(&rows) {
                    Ok(()) => {}
                    Err(error) => {
                        assert_eq!(sqlstate(&error), "53100", "{error:?}");
                        break;
                    }
                }
            }
        }
    };
    let mut app = server.connect("shop", "app");
    // A claim from before; it must be there afterwards.
    let held = acquire(&mut app, "held", ", lease => '600s'");
    let grant = granted(&mut app, "lock_try('held', ttl => '600s')");
    fill(&mut admin);
    // Keys with long results, until there is no room for one; claims and locks the same.
    let long: String = (0..3000).map(|n| char::from(b'a' + (n * n % 26) as u8)).collect();
    let mut paid = Vec::new();
    let mut refused = 0;
    for n in 0..2000 {
        let key = format!("key {n}");
        let attempt = (|| {
            let mut work = app.transaction()?;
            assert_eq!(try_begin(&mut work, &key, "")?.status, "acquired");
            work.execute("INSERT INTO payments VALUES ($1)", &[&key])?;
            try_complete(&mut work, &key, &json!(long), None)?;
            work.commit()
        })();
        match attempt {
            Ok(()) => paid.push(key),
            Err(error) => {
                assert_eq!(sqlstate(&error), "53100", "{error:?}");
                refused += 1;
                if refused > 20 {
                    break;
                }
            }
        }
    }
    assert!(refused > 20, "the disk was never full: the test proves nothing");
    let mut leases = Vec::new();
    for call in ["idem_begin('{}', lease => '600s')", "lock_try('{}', ttl => '600s')"] {
        let mut refused = false;
        for n in 0..2000 {
            let name = format!("{n} {}", &long[..900]);
            match app.batch_execute(&format!("SELECT {}", call.replace("{}", &name))) {
                Ok(()) => leases.push((call, name)),
                Err(error) => {
                    assert_eq!(sqlstate(&error), "53100", "{error:?}");
                    refused = true;
                    break;
                }
            }
        }
        assert!(refused, "{call}: the disk was never full");
    }
    assert_eq!(our_locks(&mut admin), 0);
    // What was stored is still answered.
    for key in &paid {
        assert_eq!(status(&mut app, key, ""), "completed");
    }
    run(&mut admin, "DROP TABLE filler; CHECKPOINT");
    eventually("there is room again", || {
        admin.batch_execute("CREATE TABLE IF NOT EXISTS room (t text)").is_ok()
    });
    for (call, name) in &leases {
        let told: String = app
            .query_one(
                &format!("SELECT to_jsonb(t)::text FROM {} AS t", call.replace("{}", name)),
                &[],
            )
            .unwrap()
            .get(0);
        assert!(told.contains("in_progress") || told.contains("\"acquired\": false"), "{told}");
    }
    for n in 0..200 {
        let key = format!("key {n}");
        let expected = if paid.contains(&key) { "completed" } else { "acquired" };
        run(&mut app, "BEGIN");
        assert_eq!(status(&mut app, &key, ""), expected, "{key}");
        run(&mut app, "ROLLBACK");
        let row = admin.query_one("SELECT count(*) FROM payments WHERE key = $1", &[&key]).unwrap();
        assert_eq!(row.get::<_, i64>(0), i64::from(paid.contains(&key)), "{key}");
    }
    complete(&mut app, "held", &json!(1), Some(held));
    assert!(unlock(&mut app, "held", grant.token));
    battery(&Place { name: "after a full disk", app: &|| server.connect("shop", "app") });
    drop((app, admin));
    server.stop("immediate");
    drop(disk);
}
