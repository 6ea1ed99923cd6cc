//! Waiting (design section 3, `wait`; section 4, invariant 4): a waiter wakes as soon as the holder ends, in whatever
//! way; it obeys cancel, `statement_timeout` and `lock_timeout`, and leaves nothing behind. A lease that it gets is a full
//! one. (Waiting for a lease: waking.rs.) Field cases: the holder rolls back or is killed while a duplicate waits; a lease
//! written from `now()` after a wait was already over when returned.

mod common;

use common::*;
use idem_harness::{Server, TestDb, eventually, sqlstate};
use postgres::Client;
use serde_json::json;

/// A holder on a lease of a minute or two, which nobody sits out.
const LEASE: &str = ", lease => '120s'";

// ------------------------------------------------------------ for an open transaction

#[test]
fn a_waiter_gets_the_result_when_the_holder_commits() {
    let db = TestDb::new();
    let (mut admin, mut holder) = (db.admin(), db.app());
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "k", "");
    let waiter = Waiter::queueing(&mut admin, db.app(), "k", LONG);
    complete(&mut holder, "k", &json!({"id": 1}), None);
    assert!(waiter.still_waits(), "completed is not yet committed");
    run(&mut holder, "COMMIT");
    let (answer, _client) = waiter.answer();
    assert_eq!(answer.status, "completed");
    assert_eq!(answer.result, Some(json!({"id": 1})));
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_waiter_gets_the_key_when_the_holder_rolls_back_releases_or_undoes_its_savepoint() {
    let db = TestDb::new();
    let (mut admin, mut holder) = (db.admin(), db.app());
    for end in ["ROLLBACK", "SELECT idem_release('k'); COMMIT", "ROLLBACK TO s; SELECT 1"] {
        run(&mut holder, "BEGIN; SAVEPOINT s");
        acquire(&mut holder, "k", "");
        let mut client = db.app();
        run(&mut client, "BEGIN");
        let waiter = Waiter::queueing(&mut admin, client, "k", LONG);
        run(&mut holder, end);
        let (answer, mut client) = waiter.answer();
        assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(1)), "{end}");
        run(&mut client, "ROLLBACK");
        run(&mut holder, "ROLLBACK");
    }
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_waiter_gets_the_key_when_the_holders_backend_is_terminated() {
    let db = TestDb::new();
    let (mut admin, mut holder, mut client) = (db.admin(), db.app(), db.app());
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "k", "");
    complete(&mut holder, "k", &json!(1), None);
    run(&mut client, "BEGIN");
    let waiter = Waiter::queueing(&mut admin, client, "k", LONG);
    let holder = pid(&mut holder);
    terminate(&mut admin, holder);
    let (answer, _client) = waiter.answer();
    assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(1)));
}

#[test]
fn several_waiters_get_the_key_one_after_the_other() {
    let db = TestDb::new();
    let (mut admin, mut holder) = (db.admin(), db.app());
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "k", "");
    let mut waiters: Vec<_> = (0..4)
        .map(|_| {
            let mut client = db.app();
            run(&mut client, "BEGIN");
            Waiter::queueing(&mut admin, client, "k", LONG)
        })
        .collect();
    run(&mut holder, "ROLLBACK");
    while !waiters.is_empty() {
        eventually("one of the waiters has the key", || {
            waiters.iter().any(|waiter| !waiter.still_waits())
        });
        let next = waiters.iter().position(|waiter| !waiter.still_waits());
        let (answer, mut client) = waiters.remove(next.unwrap()).answer();
        assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(1)));
        for waiter in &waiters {
            assert!(waiter.still_waits(), "only one holds the key");
        }
        run(&mut client, "ROLLBACK");
    }
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_waiters_server_process_that_is_killed_takes_no_record_with_it() {
    let server = Server::start(&["fsync=on"]);
    server.create_database("shop");
    let (mut admin, mut holder) =
        (server.connect("shop", "postgres"), server.connect("shop", "app"));
    acquire(&mut holder, "leased", LEASE);
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "open", "");
    let on_open = Waiter::queueing(&mut admin, server.connect("shop", "app"), "open", LONG);
    let on_lease = Waiter::sleeping(&mut admin, server.connect("shop", "app"), "leased", LONG);

    // A killed process takes the others down: all get an error, nobody hangs, nobody believes to hold the key.
    kill9(on_lease.pid);
    for waiter in [on_open, on_lease] {
        assert!(waiter.end().0.is_err());
    }
    let mut app = connect_again(server.dir(), "shop", "app");
    let begun = begin(&mut app, "open", ", lease => '60s'");
    assert_eq!((&*begun.status, begun.attempt), ("acquired", Some(1)));
    assert_eq!(status(&mut app, "leased", ""), "in_progress");
}

#[test]
fn the_full_lease_remains_after_a_long_wait_in_an_old_transaction() {
    let db = TestDb::new();
    let (mut admin, mut holder, mut client) = (db.admin(), db.app(), db.app());
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "k", "");
    run(&mut client, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1");
    let waiter = Waiter::queueing(&mut admin, client, "k", &format!("{LONG}, lease => '3s'"));
    // The waiter's transaction and statement are older than its lease will be long.
    eventually("the waiter's statement is 3.2 s old", || {
        admin
            .query_one(
                "SELECT clock_timestamp() > query_start + interval '3200ms' FROM pg_stat_activity WHERE pid = $1",
                &[&waiter.pid],
            )
            .unwrap()
            .get(0)
    });
    run(&mut holder, "ROLLBACK");
    let (answer, _client) = waiter.answer();
    assert_eq!(answer.status, "acquired");
    let left = answer.left.unwrap();
    assert!((2.0..=3.0).contains(&left), "{left} s of 3 are left");
}

// ------------------------------------------------------------ giving up

/// Somebody holds `busy`: an open transaction or a lease.
fn busy(db: &TestDb, leased: bool) -> Client {
    let mut holder = db.app();
    if leased {
        acquire(&mut holder, "busy", LEASE);
    } else {
        run(&mut holder, "BEGIN");
        acquire(&mut holder, "busy", "");
    }
    holder
}

fn waiting(db: &TestDb, leased: bool, client: Client, options: &str) -> Waiter {
    let start = if leased { Waiter::sleeping } else { Waiter::queueing };
    start(&mut db.admin(), client, "busy", options)
}

#[test]
fn a_wait_that_runs_out_answers_in_progress_and_leaves_nothing() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for leased in [false, true] {
        let _holder = busy(&db, leased);
        let mut client = db.app();
        run(&mut client, "BEGIN");
        let pid = pid(&mut client);
        let answer = begin(&mut client, "busy", ", wait => '300ms'");
        assert_eq!(answer.status, "in_progress");
        assert_eq!(answer.retry_after.is_some(), leased, "{answer:?}");
        assert_eq!(answer.left.is_some(), leased, "{answer:?}");
        assert_eq!(locks_of(&mut admin, pid), [""; 0]);

        // The setting is the default, its zero means not to wait, and an argument wins.
        run(&mut client, "SET LOCAL idem.wait = '200ms'");
        assert_eq!(status(&mut client, "busy", ""), "in_progress");
        assert_eq!(status(&mut client, "busy", ", wait => '0'"), "in_progress");
        assert_eq!(locks_of(&mut admin, pid), [""; 0]);
        run(&mut client, "COMMIT");
        run(&mut admin, "DELETE FROM idem_claims");
    }
}

#[test]
fn a_waiter_obeys_cancel_and_timeouts_and_its_connection_stays_usable() {
    let db = TestDb::new();
    for leased in [false, true] {
        let holder = busy(&db, leased);
        for (setting, state) in [
            ("", "57014"),
            ("SET statement_timeout = '300ms'", "57014"),
            ("SET lock_timeout = '300ms'", "55P03"),
        ] {
            let mut client = db.app();
            run(&mut client, setting);
            let waiter = if setting.is_empty() {
                let waiter = waiting(&db, leased, client, LONG);
                db.admin().execute("SELECT pg_cancel_backend($1)", &[&waiter.pid]).unwrap();
                waiter
            } else {
                Waiter::start(client, "busy", LONG)
            };
            let pid = waiter.pid;
            let (error, mut client) = waiter.end();
            let error = error.expect_err("it must give up");
            assert_eq!(sqlstate(&error), state, "leased {leased}, {setting}: {error:?}");
            // The error is sent first, then the transaction is rolled back.
            eventually("its locks are gone", || locks_of(&mut db.admin(), pid).is_empty());
            run(&mut client, "RESET statement_timeout; RESET lock_timeout");
            assert_eq!(status(&mut client, "busy", ""), "in_progress");
            assert_eq!(status(&mut client, "another", ", lease => '1ms'"), "acquired");
            run(&mut db.admin(), "SELECT idem_forget('another')");
        }
        drop(holder);
        run(&mut db.admin(), "DELETE FROM idem_claims");
        eventually("the holder is gone", || our_locks(&mut db.admin()) == 0);
    }
}

#[test]
fn after_a_failed_wait_a_savepoint_brings_the_transaction_back_with_its_claims() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for leased in [false, true] {
        let holder = busy(&db, leased);
        for (setting, state) in [
            ("SELECT 1", "57014"),
            ("SET LOCAL statement_timeout = '300ms'", "57014"),
            ("SET LOCAL lock_timeout = '300ms'", "55P03"),
        ] {
            let mut client = db.app();
            run(&mut client, "BEGIN");
            acquire(&mut client, "mine", "");
            run(&mut client, "SAVEPOINT s");
            acquire(&mut client, "undone", "");
            run(&mut client, setting);
            let waiter = if setting == "SELECT 1" {
                let waiter = waiting(&db, leased, client, LONG);
                admin.execute("SELECT pg_cancel_backend($1)", &[&waiter.pid]).unwrap();
                waiter
            } else {
                Waiter::start(client, "busy", LONG)
            };
            let pid = waiter.pid;
            let (error, mut client) = waiter.end();
            assert_eq!(sqlstate(&error.expect_err("it must give up")), state);

            run(&mut client, "ROLLBACK TO s");
            let advisory = |admin: &mut Client| {
                let mut locks = locks_of(admin, pid);
                locks.retain(|lock| lock.starts_with("advisory"));
                locks
            };
            assert_eq!(
                advisory(&mut admin),
                ["advisory ExclusiveLock t"],
                "leased {leased}, {setting}: its own claim and nothing else"
            );
            let mut other = db.app();
            assert_eq!(status(&mut other, "mine", ""), "in_progress");
            let undone = begin(&mut other, "undone", ", lease => '1ms'");
            assert_eq!(undone.status, "acquired");
            release(&mut other, "undone", undone.token);

            complete(&mut client, "mine", &json!(1), None);
            run(&mut client, "COMMIT");
            assert_eq!(status(&mut other, "mine", ""), "completed");
            run(&mut admin, "SELECT idem_forget('mine')");
        }
        drop(holder);
        run(&mut admin, "DELETE FROM idem_claims");
        eventually("the holder is gone", || our_locks(&mut admin) == 0);
    }
}

#[test]
fn a_lock_timeout_caught_in_plpgsql_leaves_the_transaction_as_it_was() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for leased in [false, true] {
        let holder = busy(&db, leased);
        let mut client = db.app();
        let pid = pid(&mut client);
        run(&mut client, "BEGIN; SET LOCAL lock_timeout = '200ms'");
        acquire(&mut client, "mine", "");
        run(
            &mut client,
            "DO $$ BEGIN
                 PERFORM idem_begin('undone');
                 PERFORM idem_begin('busy', wait => '120s');
                 RAISE 'not reached';
             EXCEPTION WHEN lock_not_available THEN NULL; END $$",
        );
        let locks = locks_of(&mut admin, pid);
        let advisory = locks.iter().filter(|lock| lock.starts_with("advisory"));
        assert_eq!(advisory.count(), 1, "{locks:?}");
        let timeout: String = client.query_one("SHOW lock_timeout", &[]).unwrap().get(0);
        assert_eq!(timeout, "200ms", "the caller's own is back");
        complete(&mut client, "mine", &json!(1), None);
        run(&mut client, "COMMIT");
        run(&mut admin, "SELECT idem_forget('mine')");
        drop(holder);
        run(&mut admin, "DELETE FROM idem_claims");
        eventually("the holder is gone", || our_locks(&mut admin) == 0);
    }
}

#[test]
fn a_longer_lock_timeout_than_the_wait_does_not_act() {
    let db = TestDb::new();
    for leased in [false, true] {
        let holder = busy(&db, leased);
        let mut client = db.app();
        run(&mut client, "SET lock_timeout = '30s'");
        assert_eq!(status(&mut client, "busy", ", wait => '200ms'"), "in_progress");
        // The deadline was the wait's own: an ordinary lock obeys the caller's setting as before.
        let timeout: String = client.query_one("SHOW lock_timeout", &[]).unwrap().get(0);
        assert_eq!(timeout, "30s");
        drop(holder);
        run(&mut db.admin(), "DELETE FROM idem_claims");
        eventually("the holder is gone", || our_locks(&mut db.admin()) == 0);
    }
}

#[test]
fn a_waiter_whose_client_is_gone_ends_too() {
    // psql is killed while its server process waits; the server looks after its client once it is told to.
    let db = TestDb::new();
    let mut admin = db.admin();
    for leased in [false, true] {
        let holder = busy(&db, leased);
        let mut psql = std::process::Command::new("psql")
            .args(["-qX", "-U", "app", "-d", &db.name])
            .args(["-c", "SET client_connection_check_interval = '100ms'"])
            .args(["-c", "SET application_name = 'killed'"])
            .args(["-c", "SELECT status FROM idem_begin('busy', wait => '120s')"])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("psql is on the PATH");
        let mut backend = None;
        eventually("psql's server process is there", || {
            backend = admin
                .query_opt(
                    "SELECT pid FROM pg_stat_activity WHERE application_name = 'killed'",
                    &[],
                )
                .unwrap()
                .map(|row| row.get::<_, i32>(0));
            backend.is_some()
        });
        let backend = backend.unwrap();
        eventually("it waits", || {
            if leased { sleeps(&mut admin, backend) } else { queues(&mut admin, backend) }
        });
        psql.kill().unwrap();
        psql.wait().unwrap();
        eventually("it notices and ends", || !lives(&mut admin, backend));
        drop(holder);
        run(&mut admin, "DELETE FROM idem_claims");
        eventually("nothing is left held", || our_locks(&mut admin) == 0);
    }
}

#[test]
fn begin_without_a_wait_never_queues_whoever_holds_the_key() {
    let db = TestDb::new();
    for leased in [false, true] {
        let holder = busy(&db, leased);
        let mut client = db.app();
        // Any queueing at all, for a millisecond, would be an error here.
        run(&mut client, "SET lock_timeout = '1ms'");
        for _ in 0..200 {
            assert_eq!(status(&mut client, "busy", ""), "in_progress");
        }
        drop(holder);
        run(&mut db.admin(), "DELETE FROM idem_claims");
        eventually("the holder is gone", || our_locks(&mut db.admin()) == 0);
    }
}
