//! Killed holders (design section 4, invariants 2 and 3): with its backend or its client a transaction's claim is gone at
//! once, and its business rows with it; a claim on a lease survives and is taken over when the lease ends.

mod common;

use std::io::Write;
use std::process::{Child, Command, Stdio};

use common::*;
use idem_harness::{TestDb, eventually, sqlstate};
use serde_json::json;

fn shop() -> TestDb {
    let db = TestDb::new();
    run(
        &mut db.admin(),
        "CREATE TABLE payments (key text); GRANT INSERT, SELECT ON payments TO app",
    );
    db
}

fn payments(db: &TestDb) -> i64 {
    number(&mut db.admin(), "SELECT count(*) FROM payments")
}

/// The retry that follows: it runs, as the first, and pays.
#[track_caller]
fn retry_pays_once(db: &TestDb) {
    let mut app = db.app();
    run(&mut app, "BEGIN");
    let begun = begin(&mut app, "k", "");
    assert_eq!((&*begun.status, begun.attempt), ("acquired", Some(1)));
    run(&mut app, "INSERT INTO payments VALUES ('k')");
    complete(&mut app, "k", &json!(1), None);
    run(&mut app, "COMMIT");
    assert_eq!(payments(db), 1);
    assert_eq!(status(&mut app, "k", ""), "completed");
}

#[test]
fn a_terminated_backend_leaves_neither_claim_nor_business_rows() {
    for completed in [false, true] {
        let db = shop();
        let (mut admin, mut holder) = (db.admin(), db.app());
        run(&mut holder, "BEGIN");
        acquire(&mut holder, "k", "");
        run(&mut holder, "INSERT INTO payments VALUES ('k')");
        if completed {
            complete(&mut holder, "k", &json!("never"), None);
        }
        let backend = pid(&mut holder);
        terminate(&mut admin, backend);
        assert!(holder.batch_execute("COMMIT").is_err());
        assert_eq!(payments(&db), 0);
        assert_eq!(our_locks(&mut admin), 0);
        retry_pays_once(&db);
    }
}

#[test]
fn a_lease_outlives_its_backend_and_is_taken_over_at_its_end() {
    let db = shop();
    let (mut admin, mut holder, mut other) = (db.admin(), db.app(), db.app());
    let token = acquire(&mut holder, "k", ", lease => '3s'");
    run(&mut holder, "BEGIN; INSERT INTO payments VALUES ('k')");
    complete(&mut holder, "k", &json!("never"), Some(token));
    let backend = pid(&mut holder);
    terminate(&mut admin, backend);

    let told = begin(&mut other, "k", "");
    assert_eq!(told.status, "in_progress", "the lease runs on");
    assert!(told.retry_after.is_some_and(|after| after <= 3.0), "{told:?}");
    assert_eq!(payments(&db), 0);

    run(&mut other, "BEGIN");
    let taken = begin(&mut other, "k", LONG);
    assert_eq!((&*taken.status, taken.attempt), ("acquired", Some(2)));
    run(&mut other, "INSERT INTO payments VALUES ('k')");
    complete(&mut other, "k", &json!("second"), None);
    run(&mut other, "COMMIT");

    // The first worker was only cut off: it comes back with its token, too late.
    let mut late = db.app();
    run(&mut late, "BEGIN; INSERT INTO payments VALUES ('k')");
    let lost = try_complete(&mut late, "k", &json!("late"), Some(token)).unwrap_err();
    assert_eq!(sqlstate(&lost), "ID003", "{lost:?}");
    run(&mut late, "ROLLBACK");
    assert_eq!(payments(&db), 1);
    assert_eq!(begin(&mut late, "k", "").result, Some(json!("second")));
}

#[test]
fn a_lease_is_not_there_if_its_backend_dies_before_its_commit() {
    let db = shop();
    let (mut admin, mut holder) = (db.admin(), db.app());
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "k", ", lease => '120s'");
    let backend = pid(&mut holder);
    terminate(&mut admin, backend);
    retry_pays_once(&db);
}

/// psql in the middle of a transaction that has begun `k`, as a process that can be killed.
fn psql_in_transaction(db: &TestDb) -> Child {
    let mut psql = Command::new("psql")
        .args(["-qX", "-U", "app", "-d", &db.name])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("psql is on the PATH");
    let script = "BEGIN; SELECT status FROM idem_begin('k'); INSERT INTO payments VALUES ('k');
                  SELECT idem_complete('k', '\"never\"'); SET application_name = 'in the middle';\n";
    psql.stdin.as_mut().expect("piped").write_all(script.as_bytes()).expect("psql reads");
    let mut admin = db.admin();
    eventually("psql is in the middle of its transaction", || {
        number(
            &mut admin,
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name = 'in the middle'
               AND state = 'idle in transaction'",
        ) == 1
    });
    psql
}

#[test]
fn a_client_that_dies_in_the_middle_leaves_nothing_and_the_retry_pays_once() {
    let db = shop();
    let mut admin = db.admin();
    let mut psql = psql_in_transaction(&db);
    assert_eq!(status(&mut db.app(), "k", ""), "in_progress");
    psql.kill().unwrap();
    psql.wait().unwrap();
    eventually("the server notices that the client is gone", || our_locks(&mut admin) == 0);
    assert_eq!(payments(&db), 0);
    retry_pays_once(&db);
}

#[test]
fn a_waiter_goes_on_when_the_holders_client_dies() {
    let db = shop();
    let mut admin = db.admin();
    let mut psql = psql_in_transaction(&db);
    let mut client = db.app();
    run(&mut client, "BEGIN");
    let waiter = Waiter::queueing(&mut admin, client, "k", LONG);
    psql.kill().unwrap();
    psql.wait().unwrap();
    let (answer, mut client) = waiter.answer();
    assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(1)));
    run(&mut client, "ROLLBACK");
    assert_eq!(payments(&db), 0);
}

#[test]
fn a_terminated_waiter_leaves_no_trace() {
    let db = shop();
    let mut admin = db.admin();
    let mut holder = db.app();
    acquire(&mut holder, "leased", ", lease => '120s'");
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "k", "");
    let queued = Waiter::queueing(&mut admin, db.app(), "k", LONG);
    let asleep = Waiter::sleeping(&mut admin, db.app(), "leased", LONG);
    for waiter in [queued, asleep] {
        terminate(&mut admin, waiter.pid);
        // The client library may see the end of the connection before it has read why.
        let error = waiter.end().0.unwrap_err();
        assert!(["57P01", ""].contains(&sqlstate(&error)), "{error:?}");
    }
    assert_eq!(our_locks(&mut admin), 1, "the holder's own");
    run(&mut holder, "ROLLBACK");
    retry_pays_once(&db);
}
