//! The server's log and the errors that clients get: nothing of a key, scope, fingerprint, result or token is in them
//! (they end up where many can read them), and no Rust backtrace, also with `RUST_BACKTRACE=1` in the environment.

mod common;

use std::process::Command;

use common::*;
use idem_harness::{Server, eventually, major, sqlstate};
use postgres::{Client, Error};
use serde_json::json;
use uuid::Uuid;

const KEY: &str = "secret-key-4711";
const OTHER_KEY: &str = "secret-key-0815";
const SCOPE: &str = "secret-scope-4712";
const FINGERPRINT: &str = "secret-fingerprint-4713";
const RESULT: &str = "secret-result-4714";
const OWNER: &str = "secret-owner-4715";

/// Starts the server again with `RUST_BACKTRACE=1`.
fn with_backtraces(server: &Server) {
    server.stop("fast");
    let started = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/pg"))
        .env("RUST_BACKTRACE", "1")
        .args(["start", &major().to_string(), server.dir()])
        .output()
        .expect("scripts/pg can be run");
    assert!(started.status.success(), "{started:?}");
    let pid_file = std::fs::read_to_string(format!("{}/data/postmaster.pid", server.dir()));
    let pid = pid_file.unwrap().lines().next().unwrap().to_string();
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    assert!(
        environment.split(|byte| *byte == 0).any(|entry| entry == b"RUST_BACKTRACE=1"),
        "the server runs with it"
    );
}

/// Everything that the client is told of an error.
fn told(error: &Error) -> String {
    let db = error.as_db_error().unwrap_or_else(|| panic!("not the server's: {error:?}"));
    format!("{db:?}")
}

#[test]
fn errors_and_the_log_tell_no_secret_and_no_backtrace() {
    let server = Server::start(&[]);
    server.create_database("shop");
    with_backtraces(&server);
    let mut admin = server.connect("shop", "postgres");
    let mut app = server.connect("shop", "app");
    let fingerprint = FINGERPRINT.as_bytes();
    let result = json!({ "text": RESULT });
    let mut tokens: Vec<Uuid> = vec![Uuid::from_u128(0x5ec2_e700_4abc_4def_8123_4567_89ab_cdef)];
    let stranger = tokens[0];
    let mut errors: Vec<(String, String)> = Vec::new();
    let mut note = |state: &str, outcome: Result<(), Error>| {
        let error = outcome.expect_err("this must fail");
        assert_eq!(sqlstate(&error), state, "{error:?}");
        errors.push((state.to_string(), told(&error)));
    };

    // A claim on a lease, one completed, one open in a transaction.
    let begin_sql = "SELECT token FROM idem_begin($1, $2, $3, lease => $4::text::interval)";
    let lease = |client: &mut Client, key: &str, lease: &str| -> Result<Uuid, Error> {
        client.query_one(begin_sql, &[&key, &fingerprint, &SCOPE, &lease]).map(|row| row.get(0))
    };
    let token = lease(&mut app, KEY, "600s").unwrap();
    let done = lease(&mut app, OTHER_KEY, "600s").unwrap();
    tokens.extend([token, done]);
    let complete_sql = "SELECT idem_complete($1, $2, token => $3, scope => $4)";
    app.execute(complete_sql, &[&OTHER_KEY, &result, &done, &SCOPE]).unwrap();

    // ID003, in every way.
    let absent = "secret-key-absent";
    for (key, token) in [(KEY, stranger), (OTHER_KEY, stranger), (absent, stranger)] {
        note("ID003", app.execute(complete_sql, &[&key, &result, &token, &SCOPE]).map(drop));
        note(
            "ID003",
            app.execute("SELECT idem_extend($1, $2, scope => $3)", &[&key, &token, &SCOPE])
                .map(drop),
        );
    }
    note("ID003", app.execute(complete_sql, &[&KEY, &result, &None::<Uuid>, &SCOPE]).map(drop));
    note(
        "ID003",
        app.execute("SELECT idem_extend($1, $2, scope => $3)", &[&OTHER_KEY, &done, &SCOPE])
            .map(drop),
    );
    // ID006
    let large = json!(RESULT.repeat(100_000));
    note("ID006", app.execute(complete_sql, &[&KEY, &large, &token, &SCOPE]).map(drop));
    // ID007: in autocommit, at COMMIT, at PREPARE.
    let plain = "SELECT status FROM idem_begin($1, $2, $3)";
    let claim = |client: &mut Client, key: &str| {
        client.query_one(plain, &[&key, &fingerprint, &SCOPE]).map(drop)
    };
    note("ID007", claim(&mut app, absent));
    for end in ["COMMIT", "PREPARE TRANSACTION 'x'"] {
        run(&mut app, "BEGIN");
        claim(&mut app, absent).unwrap();
        note("ID007", app.batch_execute(end));
        run(&mut app, "ROLLBACK");
    }
    // 22023, 22004, 25006
    let long = KEY.repeat(100);
    note("22023", claim(&mut app, &long));
    note("22023", claim(&mut app, ""));
    note("22023", app.query_one(plain, &[&KEY, &fingerprint, &long]).map(drop));
    note("22023", lease(&mut app, KEY, "-1s").map(drop));
    note("22004", app.query_one(plain, &[&None::<&str>, &fingerprint, &SCOPE]).map(drop));
    // ID004
    let owned = "owned by somebody";
    run(&mut app, "BEGIN");
    app.query_one("SELECT idem_begin($1, owner => $2)", &[&owned, &OWNER]).unwrap();
    app.execute("SELECT idem_complete($1)", &[&owned]).unwrap();
    run(&mut app, "COMMIT");
    run(&mut app, "SET idem.owner = 'somebody else'");
    note("ID004", app.query_one("SELECT idem_once($1)", &[&owned]).map(drop));
    run(&mut app, "RESET idem.owner");
    run(&mut app, "BEGIN READ ONLY");
    note("25006", claim(&mut app, KEY));
    run(&mut app, "ROLLBACK; BEGIN");
    tokens.push(lease(&mut app, absent, "600s").unwrap());
    note("22023", lease(&mut app, absent, "5s").map(drop));
    run(&mut app, "ROLLBACK; BEGIN");
    claim(&mut app, absent).unwrap();
    note("22023", app.execute("SELECT idem_extend($1, scope => $2)", &[&absent, &SCOPE]).map(drop));
    run(&mut app, "ROLLBACK");

    // Waiting: cancelled, timed out, for a lease and for a transaction; a deadlock, which PostgreSQL itself logs.
    let waits = "SELECT status FROM idem_begin($1, $2, $3, wait => '120s')";
    let wait = |client: &mut Client, key: &str| {
        client.query_one(waits, &[&key, &fingerprint, &SCOPE]).map(drop)
    };
    let mut holder = server.connect("shop", "app");
    run(&mut holder, "BEGIN");
    claim(&mut holder, absent).unwrap();
    for key in [KEY, absent] {
        for (setting, state) in [("statement_timeout", "57014"), ("lock_timeout", "55P03")] {
            run(&mut app, &format!("SET {setting} = '100ms'"));
            note(state, wait(&mut app, key));
            run(&mut app, &format!("RESET {setting}"));
        }
    }
    run(&mut app, "BEGIN");
    claim(&mut app, "secret-key-second").unwrap();
    let other = pid(&mut holder);
    let deadlock = std::thread::scope(|threads| {
        let second = threads.spawn(|| wait(&mut holder, "secret-key-second"));
        eventually("the holder waits", || queues(&mut admin, other));
        let first = wait(&mut app, absent);
        let _ = app.batch_execute("ROLLBACK");
        [first, second.join().unwrap()]
    });
    let failed = deadlock.into_iter().filter(|outcome| outcome.is_err());
    note("40P01", failed.last().expect("one of the two fails"));
    run(&mut holder, "ROLLBACK");

    // What was told to clients.
    let mut secrets: Vec<String> = [KEY, OTHER_KEY, "secret-", SCOPE, FINGERPRINT, RESULT, OWNER]
        .iter()
        .map(|secret| secret.to_string())
        .collect();
    for token in &tokens {
        secrets.extend([token.to_string(), token.simple().to_string()]);
    }
    let betrays = |text: &str| {
        let text = text.to_lowercase();
        let found = secrets.iter().find(|secret| text.contains(secret.as_str())).cloned();
        // What a backtrace is made of.
        let trace = ["backtrace", "panicked", "rust_begin_unwind", ".rs:", "idem::", "pgrx"];
        found.or_else(|| {
            trace.iter().find(|part| text.contains(**part)).map(|part| part.to_string())
        })
    };
    assert_eq!(errors.len(), 26);
    for (state, text) in &errors {
        assert_eq!(betrays(text), None, "{state}: {text}");
    }

    // What was logged.
    let log = server.log();
    let begun = log.find("ERROR:").expect("errors are logged");
    for line in log[begun..].lines() {
        assert_eq!(betrays(line), None, "{line}");
    }
    // It is the log of these errors, with the statements as they were sent.
    assert!(log.matches("ERROR:").count() >= errors.len(), "{log}");
    for (statement, count) in [(complete_sql, 5), (plain, 5), (waits, 5)] {
        let found = log.matches(&format!("STATEMENT:  {statement}")).count();
        assert!(found >= count, "{found} times: {statement}");
    }
}
