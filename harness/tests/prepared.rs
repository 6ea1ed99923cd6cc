//! PREPARE TRANSACTION (design section 4, invariant 8): completions and leased claims go with it, an open claim without
//! a lease is refused (ID007); others are told `in_progress` until the end, whatever restarts meanwhile.

mod common;

use common::*;
use idem_harness::{Server, TestDb, sqlstate};
use postgres::Client;
use serde_json::json;

/// A global transaction id, which belongs to the whole server.
fn gid(db: &TestDb, name: &str) -> String {
    format!("{}_{name}", db.name)
}

fn payments(admin: &mut Client) -> i64 {
    number(admin, "SELECT count(*) FROM payments")
}

fn shop() -> TestDb {
    let db = TestDb::new();
    run(&mut db.admin(), "CREATE TABLE payments (key text); GRANT INSERT ON payments TO app");
    db
}

#[test]
fn prepare_with_an_open_claim_is_refused_and_leaves_nothing() {
    let db = shop();
    let mut app = db.app();
    run(&mut app, "BEGIN; INSERT INTO payments VALUES ('k')");
    acquire(&mut app, "k", "");
    let error = app.batch_execute(&format!("PREPARE TRANSACTION '{}'", gid(&db, "x"))).unwrap_err();
    assert_eq!(sqlstate(&error), "ID007", "{error:?}");
    assert!(error.as_db_error().unwrap().hint().is_some());
    run(&mut app, "ROLLBACK");
    let mut admin = db.admin();
    assert_eq!(
        number(
            &mut admin,
            "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        ),
        0
    );
    assert_eq!(our_locks(&mut admin), 0);
    assert_eq!(payments(&mut admin), 0);
    assert_eq!(status(&mut app, "k", ", lease => '1ms'"), "acquired");
}

#[test]
fn a_prepared_completion_counts_from_commit_prepared() {
    let db = shop();
    let (mut app, mut other, mut admin) = (db.app(), db.app(), db.admin());
    let gid = gid(&db, "x");
    run(&mut app, "BEGIN; INSERT INTO payments VALUES ('k')");
    acquire(&mut app, "k", "");
    complete(&mut app, "k", &json!({"id": 1}), None);
    run(&mut app, &format!("PREPARE TRANSACTION '{gid}'"));

    // The same session is like any other now: the key is busy, and it can work with others.
    for client in [&mut app, &mut other] {
        assert_eq!(status(client, "k", ""), "in_progress");
        assert_eq!(status(client, "k", ", wait => '200ms'"), "in_progress");
        assert!(!release(client, "k", None));
        assert_eq!(sqlstate(&try_complete(client, "k", &json!(2), None).unwrap_err()), "ID003");
    }
    run(&mut app, "BEGIN");
    acquire(&mut app, "another", "");
    complete(&mut app, "another", &json!(1), None);
    run(&mut app, "COMMIT");
    assert_eq!(our_locks(&mut admin), 1);
    assert_eq!(payments(&mut admin), 0);

    let waiter = Waiter::queueing(&mut admin, db.app(), "k", LONG);
    run(&mut other, &format!("COMMIT PREPARED '{gid}'"));
    let (answer, _) = waiter.answer();
    assert_eq!(answer.status, "completed");
    assert_eq!(answer.result, Some(json!({"id": 1})));
    assert_eq!(status(&mut app, "k", ""), "completed");
    assert_eq!(our_locks(&mut admin), 0);
    assert_eq!(payments(&mut admin), 1);
}

#[test]
fn rollback_prepared_frees_the_key() {
    let db = shop();
    let (mut app, mut other, mut admin) = (db.app(), db.app(), db.admin());
    let gid = gid(&db, "x");
    run(&mut app, "BEGIN; INSERT INTO payments VALUES ('k')");
    acquire(&mut app, "k", "");
    complete(&mut app, "k", &json!(1), None);
    run(&mut app, &format!("PREPARE TRANSACTION '{gid}'"));
    let mut client = db.app();
    run(&mut client, "BEGIN");
    let waiter = Waiter::queueing(&mut admin, client, "k", LONG);
    run(&mut other, &format!("ROLLBACK PREPARED '{gid}'"));
    let (answer, mut client) = waiter.answer();
    assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(1)));
    run(&mut client, "ROLLBACK");
    assert_eq!(our_locks(&mut admin), 0);
    assert_eq!(payments(&mut admin), 0);
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_segment_0"), 0);
}

#[test]
fn a_released_claim_can_be_prepared() {
    let db = shop();
    let (mut app, mut admin) = (db.app(), db.admin());
    let gid = gid(&db, "x");
    run(&mut app, "BEGIN; INSERT INTO payments VALUES ('k')");
    acquire(&mut app, "k", "");
    assert!(release(&mut app, "k", None));
    run(&mut app, &format!("PREPARE TRANSACTION '{gid}'"));
    assert_eq!(status(&mut app, "k", ""), "in_progress", "a release counts from its commit");
    run(&mut app, &format!("COMMIT PREPARED '{gid}'"));
    assert_eq!(status(&mut app, "k", ", lease => '60s'"), "acquired");
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_leased_claim_made_in_a_prepared_transaction_holds_from_its_commit() {
    let db = shop();
    let (mut app, mut other, mut admin) = (db.app(), db.app(), db.admin());
    for (end, attempt) in [("ROLLBACK", None), ("COMMIT", Some(1))] {
        let gid = gid(&db, end);
        run(&mut app, "BEGIN");
        let token = acquire(&mut app, "k", ", lease => '600s'");
        run(&mut app, &format!("PREPARE TRANSACTION '{gid}'"));
        let told = begin(&mut other, "k", "");
        assert_eq!(told.status, "in_progress");
        assert_eq!(told.retry_after, None, "an open transaction holds it");
        run(&mut other, &format!("{end} PREPARED '{gid}'"));
        assert_eq!(our_locks(&mut admin), 0);

        let told = begin(&mut other, "k", ", lease => '1ms'");
        if attempt.is_some() {
            assert_eq!(told.status, "in_progress");
            assert!(told.retry_after.is_some());
            complete(&mut other, "k", &json!(1), Some(token));
            assert_eq!(status(&mut app, "k", ""), "completed");
        } else {
            assert_eq!((&*told.status, told.attempt), ("acquired", Some(1)));
            release(&mut other, "k", told.token);
        }
    }
}

#[test]
fn a_lease_completed_in_a_prepared_transaction_is_held_until_its_end() {
    let db = shop();
    let (mut app, mut other, mut admin) = (db.app(), db.app(), db.admin());
    for end in ["ROLLBACK", "COMMIT"] {
        let gid = gid(&db, end);
        let token = acquire(&mut app, "k", ", lease => '600s'");
        let waiter = Waiter::sleeping(&mut admin, db.app(), "k", LONG);
        run(&mut app, "BEGIN; INSERT INTO payments VALUES ('k')");
        complete(&mut app, "k", &json!(1), Some(token));
        run(&mut app, &format!("PREPARE TRANSACTION '{gid}'"));
        assert_eq!(status(&mut other, "k", ""), "in_progress");
        idem_harness::eventually("the waiter was woken and queues", || {
            queues(&mut admin, waiter.pid)
        });
        run(&mut other, &format!("{end} PREPARED '{gid}'"));
        if end == "ROLLBACK" {
            idem_harness::eventually("the lease is back, the waiter sleeps", || {
                sleeps(&mut admin, waiter.pid)
            });
            assert_eq!(payments(&mut admin), 0);
            complete(&mut other, "k", &json!(2), Some(token));
            assert_eq!(waiter.answer().0.result, Some(json!(2)));
            run(&mut admin, "SELECT idem_forget('k')");
        } else {
            assert_eq!(waiter.answer().0.result, Some(json!(1)));
            assert_eq!(payments(&mut admin), 1);
        }
    }
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn the_end_of_the_lease_does_not_end_a_prepared_completion() {
    let db = shop();
    let (mut app, mut other, mut admin) = (db.app(), db.app(), db.admin());
    let gid = gid(&db, "x");
    let token = acquire(&mut app, "k", ", lease => '1ms'");
    run(&mut app, "BEGIN; INSERT INTO payments VALUES ('k')");
    complete(&mut app, "k", &json!(1), Some(token));
    run(&mut app, &format!("PREPARE TRANSACTION '{gid}'"));
    assert_eq!(
        status(&mut other, "k", ", wait => '200ms'"),
        "in_progress",
        "the lease is over, but the completion is on its way"
    );
    run(&mut other, &format!("COMMIT PREPARED '{gid}'"));
    assert_eq!(status(&mut other, "k", ""), "completed");
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn prepared_transactions_survive_a_killed_server() {
    let server = Server::start(&["fsync=on"]);
    server.create_database("shop");
    let mut admin = server.connect("shop", "postgres");
    run(&mut admin, "CREATE TABLE payments (key text); GRANT INSERT ON payments TO app");
    let mut app = server.connect("shop", "app");
    for key in ["kept", "undone"] {
        run(&mut app, "BEGIN");
        acquire(&mut app, key, "");
        app.execute("INSERT INTO payments VALUES ($1)", &[&key]).unwrap();
        complete(&mut app, key, &json!(key), None);
        run(&mut app, &format!("PREPARE TRANSACTION '{key}'"));
    }
    run(&mut app, "BEGIN");
    let token = acquire(&mut app, "leased", ", lease => '600s'");
    run(&mut app, "PREPARE TRANSACTION 'leased'");

    for restart in [Server::kill9, |server: &Server| server.stop("fast")] {
        restart(&server);
        server.start_again();
        let mut app = server.connect("shop", "app");
        for key in ["kept", "undone", "leased"] {
            assert_eq!(status(&mut app, key, ""), "in_progress", "{key}");
        }
        assert_eq!(our_locks(&mut server.connect("shop", "postgres")), 3);
    }

    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    let waiter = Waiter::queueing(&mut admin, server.connect("shop", "app"), "kept", LONG);
    run(&mut app, "COMMIT PREPARED 'kept'");
    assert_eq!(waiter.answer().0.result, Some(json!("kept")));
    run(&mut app, "ROLLBACK PREPARED 'undone'");
    assert_eq!(status(&mut app, "undone", ", lease => '60s'"), "acquired");
    run(&mut app, "COMMIT PREPARED 'leased'");
    complete(&mut app, "leased", &json!(1), Some(token));
    assert_eq!(payments(&mut admin), 1);
    assert_eq!(our_locks(&mut admin), 0);
}
