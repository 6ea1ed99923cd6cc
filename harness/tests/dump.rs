//! A restored or upgraded database keeps the promises of the one it was made from: what was completed is replayed, claims and locks
//! belong to their tokens, attempts and fences go on rising, roles may do what they were granted, and settings of the database hold.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::*;
use idem_harness::{Server, TestDb, installed, major, skipped};
use postgres::Client;
use serde_json::json;
use uuid::Uuid;

/// What the callers of the old database know, and come back with.
struct Known {
    claim: Uuid,
    lock: Uuid,
    fence: i64,
    freed_fence: i64,
    rows: Vec<String>,
}

/// Every row of every table of the extension, as text.
fn rows(admin: &mut Client) -> Vec<String> {
    let tables = admin
        .query(
            "SELECT objid::regclass::text FROM pg_depend JOIN pg_class ON pg_class.oid = objid
             WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_extension'::regclass AND deptype = 'e' AND relkind = 'r'
                 AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
             ORDER BY 1",
            &[],
        )
        .unwrap();
    let mut found = Vec::new();
    for table in tables {
        // Made anew by CREATE EXTENSION, with the time of it.
        let table: String = table.get(0);
        // One notation for times, whatever the session.
        let rows = admin
            .query(&format!("SELECT to_jsonb(t)::text FROM {table} AS t WHERE to_jsonb(t)->>'turn' IS DISTINCT FROM '0' ORDER BY 1"), &[])
            .unwrap();
        found.extend(rows.iter().map(|row| format!("{table}: {}", row.get::<_, String>(0))));
    }
    found
}

/// Leaves a record of every kind.
fn fill(app: &mut Client, admin: &mut Client) -> Known {
    run(app, "SELECT idem_once('seen')");
    // The ring turns, since this ttl is beyond its bound: the next records are written to another segment.
    run(admin, "SET idem.ttl = '30d'; SELECT idem_purge(); RESET idem.ttl");
    run(
        app,
        "SET idem.ttl = '30d';
         BEGIN;
         SELECT idem_begin('done', '\\x01', scope => 'tenant', owner => 'alice');
         SELECT idem_complete('done', '{\"id\": 1}', '\\x00ff', scope => 'tenant');
         COMMIT;
         SELECT idem_once('long', ttl => '100 days');",
    );
    let claim = acquire(app, "claimed", ", lease => '1h'");
    run(app, &format!("SELECT idem_checkpoint('claimed', '{{\"step\": 1}}', token => '{claim}')"));
    // Its lease is over before anybody can look.
    let dead = acquire(app, "died", ", lease => '1h'");
    run(
        app,
        &format!(
            "SELECT idem_checkpoint('died', '{{\"step\": 2}}', token => '{dead}', lease => '1us')"
        ),
    );
    let row = app.query_one("SELECT token, fence FROM lock_try('held', ttl => '1h')", &[]).unwrap();
    let (lock, fence) = (row.get(0), row.get(1));
    let row = app.query_one("SELECT token, fence FROM lock_try('freed')", &[]).unwrap();
    let (freed, freed_fence): (Uuid, i64) = (row.get(0), row.get(1));
    app.execute("SELECT lock_unlock('freed', $1)", &[&freed]).unwrap();
    let rows = rows(admin);
    for home in ["segment_0", "segment_1", "long", "claims", "locks", "ring"] {
        assert!(
            rows.iter().any(|row| row.starts_with(&format!("idem_{home}:"))),
            "{home}: {rows:?}"
        );
    }
    Known { claim, lock, fence, freed_fence, rows }
}

/// What must be so wherever the records have come to.
fn check(app: &mut Client, admin: &mut Client, known: &Known) {
    assert_eq!(rows(admin), known.rows);

    let row = app
        .query_one(
            "SELECT status, result, body FROM idem_begin('done', '\\x01', scope => 'tenant', owner => 'alice')",
            &[],
        )
        .unwrap();
    assert_eq!(row.get::<_, &str>(0), "completed");
    assert_eq!(row.get::<_, serde_json::Value>(1), json!({"id": 1}));
    assert_eq!(row.get::<_, &[u8]>(2), [0x00, 0xff]);
    assert_eq!(status(app, "done", ", '\\x02', scope => 'tenant', owner => 'alice'"), "mismatch");
    assert_eq!(status(app, "done", ", '\\x01', scope => 'tenant', owner => 'bob'"), "denied");
    for key in ["seen", "long"] {
        let first: bool = app.query_one("SELECT idem_once($1)", &[&key]).unwrap().get(0);
        assert!(!first, "{key} was done again");
    }

    assert_eq!(status(app, "claimed", ""), "in_progress");
    complete(app, "claimed", &json!("done"), Some(known.claim));
    assert_eq!(begin(app, "claimed", "").result, Some(json!("done")));
    let row = app
        .query_one("SELECT status, attempt, checkpoint FROM idem_begin('died', lease => '1h')", &[])
        .unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i32>(1)), ("acquired", 2));
    assert_eq!(row.get::<_, serde_json::Value>(2), json!({"step": 2}));

    let acquired: bool =
        app.query_one("SELECT acquired FROM lock_try('held')", &[]).unwrap().get(0);
    assert!(!acquired, "a lock that is held was taken");
    let fence: i64 = app.query_one("SELECT lock_guard('held', $1)", &[&known.lock]).unwrap().get(0);
    assert_eq!(fence, known.fence);
    app.execute("SELECT lock_unlock('held', $1)", &[&known.lock]).unwrap();
    for (name, last) in [("held", known.fence), ("freed", known.freed_fence)] {
        let fence: i64 = app.query_one("SELECT fence FROM lock_try($1)", &[&name]).unwrap().get(0);
        assert!(fence > last, "the fence of {name} fell from {last} to {fence}");
    }

    // Purging finds nothing that is over, also by what it knows of the ring.
    run(admin, "SELECT idem_purge()");
    assert_eq!(status(app, "claimed", ""), "completed");
    let first: bool = app.query_one("SELECT idem_once('seen')", &[]).unwrap().get(0);
    assert!(!first, "a purge removed what counts");

    // Fresh keys and expiry work as ever, and nobody got more privileges on the way.
    run(app, "BEGIN; SELECT idem_begin('fresh'); SELECT idem_complete('fresh', '1'); COMMIT");
    assert_eq!(status(app, "fresh", ""), "completed");
    for forbidden in ["SELECT idem_forget('done')", "SELECT FROM idem_claims"] {
        let error = app.batch_execute(forbidden).expect_err(forbidden);
        assert_eq!(idem_harness::sqlstate(&error), "42501");
    }
}

/// A file that is removed at the end; anybody may write it.
struct File(PathBuf);

impl File {
    fn new() -> File {
        File(std::env::temp_dir().join(format!("idem-dump-{}", Uuid::new_v4())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a client program of the major that is tested; its output of errors, if it fails.
fn program(name: &str, host: Option<&str>, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(name);
    if let Some(host) = host {
        command.env("PGHOST", host);
    }
    let output = command.args(arguments).output().unwrap_or_else(|error| panic!("{name}: {error}"));
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[track_caller]
fn succeeds(name: &str, host: Option<&str>, arguments: &[&str]) {
    if let Err(error) = program(name, host, arguments) {
        panic!("{name} {}: {error}", arguments.join(" "));
    }
}

#[test]
fn plain_and_custom_dumps_restore() {
    let db = TestDb::new();
    let known = fill(&mut db.app(), &mut db.admin());
    for format in ["plain", "custom", "inserts"] {
        let file = File::new();
        let how = match format {
            "inserts" => "--inserts".to_string(),
            _ => format!("--format={format}"),
        };
        succeeds("pg_dump", None, &[&how, "-f", file.path(), &db.name]);
        let restored = TestDb::bare();
        match format {
            "custom" => {
                succeeds("pg_restore", None, &["-e", "-1", "-d", &restored.name, file.path()]);
            }
            _ => succeeds(
                "psql",
                None,
                &[
                    "-qX1",
                    "-v",
                    "ON_ERROR_STOP=1",
                    "-d",
                    &restored.name,
                    "-o",
                    "/dev/null",
                    "-f",
                    file.path(),
                ],
            ),
        }
        check(&mut restored.app(), &mut restored.admin(), &known);
    }
    // The database that was dumped is as it was.
    check(&mut db.app(), &mut db.admin(), &known);
}

/// What a role needs to dump: SELECT on the tables, or membership in pg_read_all_data. Without it, it leaves idem's rows out.
#[test]
fn who_can_dump() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let known = fill(&mut db.app(), &mut admin);
    let file = File::new();
    let dump = |options: &[&str]| {
        let mut arguments = vec!["-Fc", "-f", file.path(), "-U", "app"];
        arguments.extend(options);
        arguments.push(&db.name);
        program("pg_dump", None, &arguments)
    };
    let error = dump(&[]).expect_err("the application may not read the tables");
    assert!(error.contains("permission denied for table idem_"), "{error}");
    dump(&["--exclude-table=idem_*"]).expect("without idem's rows it needs no privilege on them");

    run(&mut admin, "CREATE ROLE regress_dumper LOGIN IN ROLE pg_read_all_data");
    let arguments = ["-Fc", "-f", file.path(), "-U", "regress_dumper", &db.name];
    let dumped = program("pg_dump", None, &arguments);
    run(&mut admin, "DROP ROLE regress_dumper");
    assert_eq!(dumped, Ok(()));
    let restored = TestDb::bare();
    succeeds("pg_restore", None, &["-e", "-1", "-d", &restored.name, file.path()]);
    check(&mut restored.app(), &mut restored.admin(), &known);
}

/// The oldest major that is set up with this idem, if it is older than the one that is tested.
fn older() -> Option<u32> {
    let found = (15..major()).find(|older| installed(*older).is_some());
    if found.is_none() && major() > 15 {
        skipped("no older PostgreSQL with this idem is there: scripts/pg install 15");
    }
    found
}

/// A server of the older major with a filled database `shop` that has settings of its own.
fn old_shop(major: u32) -> (Server, Known) {
    let old = Server::start_major(major, &[]);
    old.create_database("shop");
    let mut admin = old.connect("shop", "postgres");
    run(
        &mut admin,
        "ALTER DATABASE shop SET idem.lock_ttl = '5s'; ALTER DATABASE shop SET idem.max_result_size = '2MB'",
    );
    let known = fill(&mut old.connect("shop", "app"), &mut admin);
    (old, known)
}

fn check_shop(server: &Server, known: &Known) {
    let mut app = server.connect("shop", "app");
    check(&mut app, &mut server.connect("shop", "postgres"), known);
    for (setting, value) in [("idem.lock_ttl", "5s"), ("idem.max_result_size", "2MB")] {
        let row = app.query_one(&format!("SHOW {setting}"), &[]).unwrap();
        assert_eq!(row.get::<_, &str>(0), value, "{setting}");
    }
}

#[test]
fn restores_into_a_newer_major() {
    let Some(older) = older() else { return };
    let (old, known) = old_shop(older);
    let new = Server::start(&[]);
    run(&mut new.connect("postgres", "postgres"), "CREATE ROLE app LOGIN");
    let file = File::new();
    // As PostgreSQL recommends: the newer version's programs. --create takes the settings along.
    succeeds("pg_dump", Some(old.dir()), &["-Fc", "--create", "-f", file.path(), "shop"]);
    succeeds("pg_restore", Some(new.dir()), &["-e", "--create", "-d", "postgres", file.path()]);
    check_shop(&new, &known);
}

#[test]
fn pg_upgrade_keeps_everything() {
    let Some(older) = older() else { return };
    let (old, known) = old_shop(older);
    let new = old.upgrade(major());
    assert!(Path::new(new.dir()).join("data/PG_VERSION").exists());
    check_shop(&new, &known);
}
