//! Thousands of keys in one transaction (field case): 5,000 work with default settings; past the lock table 53200 with
//! PostgreSQL's hint, nothing half done, and the server is as before.

mod common;

use common::*;
use idem_harness::{Server, sqlstate};
use postgres::Client;
use serde_json::json;

/// Default settings: scripts/pg allows prepared transactions, which enlarge the lock table.
fn server() -> Server {
    let server = Server::start(&["max_prepared_transactions=0"]);
    server.create_database("shop");
    let mut admin = server.connect("shop", "postgres");
    for (setting, default) in [("max_locks_per_transaction", "64"), ("max_connections", "100")] {
        let found: String =
            admin.query_one("SELECT current_setting($1)", &[&setting]).unwrap().get(0);
        assert_eq!(found, default, "{setting}");
    }
    server
}

/// Begins `count` keys in one statement; how many were acquired.
fn begin_many(
    client: &mut Client,
    prefix: &str,
    count: i32,
    lease: &str,
) -> Result<i64, postgres::Error> {
    client
        .query_one(
            &format!(
                "SELECT count(*) FROM generate_series(1, $2) AS i,
                 LATERAL (SELECT * FROM idem_begin($1 || i {lease}) OFFSET 0) AS begun
                 WHERE status = 'acquired'"
            ),
            &[&prefix, &count],
        )
        .map(|row| row.get(0))
}

fn complete_many(client: &mut Client, prefix: &str, count: i32) {
    client
        .execute(
            "SELECT idem_complete($1 || i, to_jsonb(i)) FROM generate_series(1, $2) AS i",
            &[&prefix, &count],
        )
        .unwrap();
}

#[test]
fn five_thousand_keys_in_one_transaction_then_far_too_many() {
    let server = server();
    let mut admin = server.connect("shop", "postgres");
    let mut app = server.connect("shop", "app");
    let mut other = server.connect("shop", "app");
    let records = |admin: &mut Client| {
        number(
            admin,
            "SELECT (SELECT count(*) FROM idem_segment_0) + (SELECT count(*) FROM idem_claims)",
        )
    };

    for (prefix, lease) in [("plain ", ""), ("leased ", ", lease => '600s'")] {
        run(&mut app, "BEGIN");
        assert_eq!(begin_many(&mut app, prefix, 5000, lease).unwrap(), 5000);
        assert_eq!(status(&mut other, &format!("{prefix}4321"), ""), "in_progress");
        complete_many(&mut app, prefix, 5000);
        run(&mut app, "COMMIT");
        let replay = begin(&mut other, &format!("{prefix}4321"), "");
        assert_eq!(replay.result, Some(json!(4321)));
    }
    assert_eq!(records(&mut admin), 10_000);
    assert_eq!(our_locks(&mut admin), 0);

    // 5,000 replays in one transaction hold nothing: three times as many fit as well.
    run(&mut app, "BEGIN");
    for _ in 0..3 {
        assert_eq!(begin_many(&mut app, "plain ", 5000, "").unwrap(), 0);
    }
    assert_eq!(our_locks(&mut admin), 0);
    run(&mut app, "COMMIT");

    for lease in ["", ", lease => '600s'"] {
        // The whole transaction goes …
        run(&mut app, "BEGIN");
        acquire(&mut app, "before", "");
        complete(&mut app, "before", &json!(1), None);
        let error = begin_many(&mut app, "too many ", 100_000, lease).unwrap_err();
        assert_eq!(sqlstate(&error), "53200", "{error:?}");
        let hint = error.as_db_error().unwrap().hint().unwrap_or_default();
        assert!(hint.contains("max_locks_per_transaction"), "{hint}");
        run(&mut app, "ROLLBACK");
        assert_eq!(records(&mut admin), 10_000);
        assert_eq!(our_locks(&mut admin), 0);

        // … or what came after a savepoint; the claims made before are held, and can be completed.
        run(&mut app, "BEGIN");
        acquire(&mut app, "before", "");
        run(&mut app, "SAVEPOINT s");
        let error = begin_many(&mut app, "too many ", 100_000, lease).unwrap_err();
        assert_eq!(sqlstate(&error), "53200", "{error:?}");
        run(&mut app, "ROLLBACK TO s");
        assert_eq!(our_locks(&mut admin), 1);
        assert_eq!(status(&mut other, "before", ""), "in_progress");
        assert_eq!(begin_many(&mut other, "too many ", 100, ", lease => '600s'").unwrap(), 100);
        complete(&mut app, "before", &json!(1), None);
        run(&mut app, "COMMIT");
        assert_eq!(status(&mut other, "before", ""), "completed");
        run(
            &mut admin,
            "SELECT idem_forget('before');
             SELECT idem_forget('too many ' || i) FROM generate_series(1, 100) AS i",
        );
        assert_eq!(records(&mut admin), 10_000);
    }

    // Another 5,000 fit as before.
    run(&mut app, "BEGIN");
    assert_eq!(begin_many(&mut app, "after ", 5000, "").unwrap(), 5000);
    complete_many(&mut app, "after ", 5000);
    run(&mut app, "COMMIT");
    assert_eq!(records(&mut admin), 15_000);
    assert_eq!(our_locks(&mut admin), 0);
    assert!(!server.log().contains("PANIC") && !server.log().contains("terminated by signal"));
}
