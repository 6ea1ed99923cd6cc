//! `in_progress` is never said of a key that nobody holds (design section 4, invariant 4): not beside replays, not beside
//! callers who only look (a stale worker's release, complete or extend), not right after the holder has ended, however
//! slow those others are.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::scope;

use common::*;
use idem_harness::{TestDb, eventually, sqlstate};
use postgres::Client;
use serde_json::json;
use uuid::Uuid;

#[test]
fn replays_at_once_never_disturb_each_other() {
    let db = TestDb::new();
    let mut app = db.app();
    run(&mut app, "BEGIN");
    acquire(&mut app, "done", "");
    complete(&mut app, "done", &json!(1), None);
    run(&mut app, "COMMIT");
    scope(|threads| {
        for _ in 0..12 {
            threads.spawn(|| {
                let mut app = db.app();
                for _ in 0..400 {
                    let replay = begin(&mut app, "done", "");
                    assert_eq!(replay.status, "completed");
                    assert_eq!(replay.result, Some(json!(1)));
                }
            });
        }
    });
}

/// What people do to a key without ever holding it: each takes its lock for a moment.
fn probe(client: &mut Client, key: &str, n: usize) {
    // A token that nobody was given.
    let stale = Some(Uuid::from_u128(n as u128));
    match n % 3 {
        0 => assert!(!release(client, key, stale)),
        1 => {
            let lost = try_complete(client, key, &json!(1), stale).unwrap_err();
            assert_eq!(sqlstate(&lost), "ID003", "{lost:?}");
        }
        _ => {
            let lost = client.execute("SELECT idem_extend($1, $2)", &[&key, &stale]).unwrap_err();
            assert_eq!(sqlstate(&lost), "ID003", "{lost:?}");
        }
    }
}

/// Enough to keep two processors busy, so that now and then one is interrupted in the middle of its look.
const PROBES: usize = 8;

/// Runs `judge` once per key while others probe the key that is its turn.
fn beside_probes(db: &TestDb, keys: usize, mut judge: impl FnMut(&str)) {
    let (turn, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    scope(|threads| {
        for _ in 0..PROBES {
            threads.spawn(|| {
                let mut app = db.app();
                let mut n = 0;
                while !done.load(Ordering::Relaxed) {
                    n += 1;
                    probe(&mut app, &format!("key-{}", turn.load(Ordering::Relaxed)), n);
                }
            });
        }
        // A failure must end the probes too, or the scope would wait for them for ever.
        let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for key in 0..keys {
                turn.store(key, Ordering::Relaxed);
                judge(&format!("key-{key}"));
            }
        }));
        done.store(true, Ordering::Relaxed);
        if let Err(failure) = judged {
            std::panic::resume_unwind(failure);
        }
    });
}

/// Nobody ever holds the keys; however long the caller would wait, it gets each.
fn free_keys_are_acquired_beside_probes(options: &str) {
    let db = TestDb::new();
    let mut app = db.app();
    beside_probes(&db, 500, |key| {
        run(&mut app, "BEGIN");
        let begun = begin(&mut app, key, options);
        assert_eq!(begun.status, "acquired", "{key}, never held by anybody");
        run(&mut app, "ROLLBACK");
    });
}

#[test]
fn a_free_key_is_acquired_beside_callers_who_only_look() {
    free_keys_are_acquired_beside_probes("");
}

#[test]
fn a_free_key_is_acquired_beside_callers_who_only_look_however_short_the_wait() {
    free_keys_are_acquired_beside_probes(", wait => '1ms'");
}

#[test]
fn a_key_is_free_for_the_next_as_soon_as_rollback_or_release_has_returned() {
    let db = TestDb::new();
    let (mut first, mut second) = (db.app(), db.app());
    for n in 0..300 {
        let key = format!("key-{n}");
        run(&mut first, "BEGIN");
        acquire(&mut first, &key, "");
        match n % 3 {
            0 => run(&mut first, "ROLLBACK"),
            1 => {
                assert!(release(&mut first, &key, None));
                run(&mut first, "COMMIT");
            }
            _ => {
                run(&mut first, "SAVEPOINT s");
                run(&mut first, "ROLLBACK");
            }
        }
        let begun = begin(&mut second, &key, ", lease => '60s'");
        assert_eq!((&*begun.status, begun.attempt), ("acquired", Some(1)));
        assert!(release(&mut second, &key, begun.token));
        let again = begin(&mut first, &key, ", lease => '60s'");
        assert_eq!((&*again.status, again.attempt), ("acquired", Some(1)));
    }
}

#[test]
fn once_commit_has_returned_every_other_connection_is_told_completed() {
    let db = TestDb::new();
    let (mut holder, mut other) = (db.app(), db.app());
    beside_probes(&db, 300, |key| {
        let lease = if key.ends_with('1') { ", lease => '60s'" } else { "" };
        // The probes may be looking at this very moment: wait for them here, that is another test's matter.
        run(&mut holder, "BEGIN");
        let token = acquire(&mut holder, key, &format!("{lease}{LONG}"));
        complete(&mut holder, key, &json!(key), Some(token));
        run(&mut holder, "COMMIT");
        let told = begin(&mut other, key, "");
        assert_eq!(told.status, "completed", "{key}");
        assert_eq!(told.result, Some(json!(key)));
    });
}

#[test]
fn a_live_lease_is_told_with_its_end_also_while_somebody_looks() {
    let db = TestDb::new();
    let (mut holder, mut other) = (db.app(), db.app());
    beside_probes(&db, 300, |key| {
        acquire(&mut holder, key, &format!(", lease => '60s'{LONG}"));
        let told = begin(&mut other, key, "");
        assert_eq!(told.status, "in_progress");
        assert!(told.retry_after.is_some_and(|after| after > 0.0), "{told:?}");
        assert!(told.left.is_some(), "{told:?}");
    });
}

/// A server process that the operating system does not let run until this is dropped.
struct Stopped(i32);

impl Stopped {
    fn new(pid: i32) -> Stopped {
        signal("-STOP", pid);
        eventually("the process has stopped", || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit(") ").next().unwrap().starts_with('T')
        });
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal("-CONT", self.0);
    }
}

/// Whether any backend has been granted, or waits for, the key's lock in `mode`. There is one key in the database.
fn key_locks(admin: &mut Client, mode: &str, granted: bool) -> i64 {
    admin
        .query_one(
            "SELECT count(*) FROM pg_locks
             WHERE locktype = 'advisory' AND objsubid BETWEEN 16384 AND 32767 AND mode = $1 AND granted = $2
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            &[&mode, &granted],
        )
        .unwrap()
        .get(0)
}

#[test]
fn a_free_key_is_acquired_though_somebody_queues_behind_a_slow_look() {
    let db = TestDb::new();
    let (mut admin, mut looker) = (db.admin(), db.app());
    // A stale worker in the middle of its look, and then it is interrupted there.
    run(&mut admin, "BEGIN; LOCK TABLE idem_claims IN ACCESS EXCLUSIVE MODE");
    let looks = pid(&mut looker);
    scope(|threads| {
        threads.spawn(move || assert!(!release(&mut looker, "k", Some(Uuid::from_u128(1)))));
        let mut other = db.admin();
        eventually("it looks", || queues(&mut other, looks));
        let stopped = Stopped::new(looks);
        run(&mut admin, "COMMIT");
        assert_eq!(key_locks(&mut admin, "ShareLock", true), 1);
        // Who queues does not hold the key.
        let waiter = Waiter::queueing(&mut admin, db.app(), "k", LONG);
        // It asks for no wait, so no timeout of waits is its concern.
        let mut begins = db.app();
        run(&mut begins, "SET lock_timeout = '1ms'");
        let beginner = Waiter::start(begins, "k", ", lease => '60s'");
        eventually("the beginner queues", || {
            queues(&mut admin, beginner.pid) || !beginner.still_waits()
        });
        admin.execute("SELECT pg_cancel_backend($1)", &[&waiter.pid]).unwrap();
        assert_eq!(sqlstate(&waiter.end().0.unwrap_err()), "57014");
        drop(stopped);
        assert_eq!(beginner.answer().0.status, "acquired", "nobody holds it");
    });
}

/// Two end the same claim; both have seen it, and one is the first. The other, interrupted as it waits, holds nothing.
fn free_after_two_ends(end: impl Fn(&mut Client, Uuid) -> bool + Sync) {
    let db = TestDb::new();
    let mut admin = db.admin();
    let token = acquire(&mut db.app(), "k", ", lease => '60s'");
    run(&mut admin, "BEGIN; LOCK TABLE idem_claims IN ACCESS EXCLUSIVE MODE");
    let clients = [db.admin(), db.admin()];
    let (done, first) = std::sync::mpsc::channel();
    scope(|threads| {
        let (end, mut pids) = (&end, Vec::new());
        for mut client in clients {
            let pid = pid(&mut client);
            pids.push(pid);
            let done = done.clone();
            threads.spawn(move || {
                run(&mut client, "BEGIN");
                let ended = end(&mut client, token);
                done.send((pid, ended, client)).unwrap();
            });
        }
        let mut other = db.admin();
        eventually("both look", || pids.iter().all(|pid| queues(&mut other, *pid)));
        run(&mut admin, "COMMIT");
        let (winner, ended, mut client) = first.recv().unwrap();
        assert!(ended);
        let loser = pids.into_iter().find(|pid| *pid != winner).unwrap();
        eventually("the other waits", || queues(&mut admin, loser));
        let stopped = Stopped::new(loser);
        run(&mut client, "COMMIT");
        let beginner = Waiter::start(db.app(), "k", ", lease => '60s'");
        eventually("the beginner queues", || {
            queues(&mut admin, beginner.pid) || !beginner.still_waits()
        });
        drop(stopped);
        assert_eq!(beginner.answer().0.status, "acquired", "nobody holds it");
        let (_, ended, _) = first.recv().unwrap();
        assert!(!ended);
    });
}

#[test]
fn a_key_is_free_once_released_though_another_was_about_to_release_it() {
    free_after_two_ends(|client, token| release(client, "k", Some(token)));
}

#[test]
fn a_key_is_free_once_forgotten_though_another_was_about_to_forget_it() {
    free_after_two_ends(|client, _| {
        client.query_one("SELECT idem_forget('k')", &[]).unwrap().get(0)
    });
}
