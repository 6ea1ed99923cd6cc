//! Waiting for a lease (design section 3, `wait`): its waiter sleeps, is woken by complete, release and forget long before
//! the lease ends, and takes over when it does, with a full lease of its own.

mod common;

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use common::*;
use idem_harness::{TestDb, eventually, major, sqlstate};
use serde_json::json;
use uuid::Uuid;

/// One test at a time, and nothing else meanwhile: PostgreSQL wakes every process when a database is created or dropped, which
/// other tests do, and a waiter that nobody else wakes would seem to be woken.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A claim on a lease by a connection of its own, and somebody who sleeps because of it.
fn asleep(db: &TestDb, options: &str) -> (Uuid, Waiter) {
    let token = acquire(&mut db.app(), "k", ", lease => '120s'");
    let waiter = Waiter::sleeping(&mut db.admin(), db.app(), "k", &format!("{LONG}{options}"));
    (token, waiter)
}

#[test]
fn a_waiter_on_a_lease_is_woken_by_complete_from_another_connection() {
    let _alone = alone();
    let db = TestDb::new();
    let (token, waiter) = asleep(&db, "");
    complete(&mut db.app(), "k", &json!({"id": 1}), Some(token));
    let (answer, _client) = waiter.answer();
    assert_eq!(answer.status, "completed");
    assert_eq!(answer.result, Some(json!({"id": 1})));
    assert_eq!(our_locks(&mut db.admin()), 0);
}

#[test]
fn a_waiter_on_a_lease_is_woken_by_release_and_by_forget() {
    let _alone = alone();
    let db = TestDb::new();
    for forget in [false, true] {
        let (token, waiter) = asleep(&db, ", lease => '60s'");
        if forget {
            assert_eq!(number(&mut db.admin(), "SELECT idem_forget('k')::int::bigint"), 1);
        } else {
            assert!(release(&mut db.app(), "k", Some(token)));
        }
        let (answer, _client) = waiter.answer();
        assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(1)));
        assert!(release(&mut db.app(), "k", answer.token));
    }
    assert_eq!(our_locks(&mut db.admin()), 0);
}

#[test]
fn a_release_that_is_rolled_back_sends_the_waiter_back_to_sleep() {
    let _alone = alone();
    let db = TestDb::new();
    let mut admin = db.admin();
    let (token, waiter) = asleep(&db, "");
    let mut worker = db.app();
    run(&mut worker, "BEGIN");
    assert!(release(&mut worker, "k", Some(token)));
    eventually("the waiter is woken and queues", || queues(&mut admin, waiter.pid));
    run(&mut worker, "ROLLBACK");
    eventually("the waiter sleeps again", || sleeps(&mut admin, waiter.pid));
    complete(&mut worker, "k", &json!(1), Some(token));
    assert_eq!(waiter.answer().0.status, "completed");
}

#[test]
fn all_waiters_on_a_lease_are_woken() {
    let _alone = alone();
    let db = TestDb::new();
    let mut admin = db.admin();
    let (token, first) = asleep(&db, "");
    let mut waiters = vec![first];
    for _ in 0..5 {
        waiters.push(Waiter::sleeping(&mut admin, db.app(), "k", LONG));
    }
    complete(&mut db.app(), "k", &json!(1), Some(token));
    for waiter in waiters {
        assert_eq!(waiter.answer().0.status, "completed");
    }
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_waiter_takes_over_at_the_end_of_the_lease_with_a_full_lease_of_its_own() {
    let _alone = alone();
    let db = TestDb::new();
    acquire(&mut db.app(), "k", ", lease => '1500ms'");
    let over = || {
        number(
            &mut db.admin(),
            "SELECT count(*) FROM idem_claims WHERE clock_timestamp() >= created_at + interval '1500ms'",
        ) == 1
    };
    let waiter = Waiter::start(db.app(), "k", &format!("{LONG}, lease => '77s'"));
    let (answer, _client) = waiter.answer();
    assert_eq!((&*answer.status, answer.attempt), ("acquired", Some(2)));
    assert!(over(), "not before the first lease was over");
    let left = answer.left.unwrap();
    assert!((70.0..=77.0).contains(&left), "{left} s are left");
}

#[test]
fn no_waiter_takes_over_before_an_extended_lease_ends() {
    let _alone = alone();
    let db = TestDb::new();
    let (mut admin, mut holder) = (db.admin(), db.app());
    let token = acquire(&mut holder, "k", ", lease => '2s'");
    let waiter = Waiter::sleeping(&mut admin, db.app(), "k", LONG);
    holder.execute("SELECT idem_extend('k', $1, '120s')", &[&token]).unwrap();
    // Past the first end the waiter has looked again, and sleeps on.
    eventually("the first end is past", || {
        number(
            &mut admin,
            "SELECT count(*) FROM idem_claims WHERE clock_timestamp() > created_at + interval '2300ms'",
        ) == 1
    });
    eventually("the waiter sleeps", || sleeps(&mut admin, waiter.pid));
    assert!(waiter.still_waits());
    complete(&mut holder, "k", &json!(1), Some(token));
    assert_eq!(waiter.answer().0.status, "completed");
}

#[test]
fn a_sleeping_waiter_burns_nothing_and_says_what_it_waits_for() {
    let _alone = alone();
    let db = TestDb::new();
    let mut admin = db.admin();
    let (token, waiter) = asleep(&db, "");
    let event: String = admin
        .query_one("SELECT wait_event FROM pg_stat_activity WHERE pid = $1", &[&waiter.pid])
        .unwrap()
        .get(0);
    assert_eq!(event, if major() >= 17 { "IdemLease" } else { "Extension" });
    assert_eq!(
        locks_of(&mut admin, waiter.pid),
        ["advisory ShareLock t"],
        "the wake tag and nothing else"
    );
    // A loop that looks again and again, even every 50 ms, would show.
    let switches = || -> u64 {
        std::fs::read_to_string(format!("/proc/{}/status", waiter.pid))
            .unwrap()
            .lines()
            .filter(|line| line.contains("ctxt_switches"))
            .map(|line| line.split_whitespace().last().unwrap().parse::<u64>().unwrap())
            .sum()
    };
    let before = switches();
    std::thread::sleep(Duration::from_millis(600));
    let after = switches();
    assert!(after - before <= 5, "it ran {} times", after - before);
    release(&mut db.app(), "k", Some(token));
    let (answer, _) = waiter.end();
    assert_eq!(sqlstate(&answer.unwrap_err()), "ID007", "it got the key in autocommit");
}
