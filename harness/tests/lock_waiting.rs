//! Waiting for a lock (issue 3; design sections 3 and 5): whoever waits gets the lock as soon as it is free, in whatever
//! way; obeys cancel and timeouts, in the queue and asleep; leaves nothing behind; and is in nobody's way.

mod common;
mod lock_common;

use std::thread::sleep;
use std::time::Duration;

use common::*;
use idem_harness::{Server, TestDb, eventually, sqlstate};
use lock_common::*;
use postgres::{Client, NoTls};

/// A lease of a minute or two, which nobody sits out.
const HOLD: &str = "lock_try('n', ttl => '120s', holder => 'holder')";
const NOW: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";
const WAITS: [&str; 2] =
    ["lock_acquire('n', wait => '120s', ttl => '120s')", "lock_acquire_xact('n', wait => '120s')"];

/// A connection that has begun a transaction.
fn begun(db: &TestDb) -> Client {
    let mut client = db.app();
    run(&mut client, "BEGIN");
    client
}

// ------------------------------------------------------------ woken

/// A server of its own, where nobody wakes a sleeping backend by chance: creating and dropping databases, as other tests
/// do meanwhile, wakes all.
fn quiet() -> Server {
    let server = Server::start(&["autovacuum=off"]);
    server.create_database("quiet");
    server
}

#[test]
fn a_waiter_on_a_lease_is_woken_by_unlock_from_another_connection() {
    let server = quiet();
    let mut admin = server.connect("quiet", "postgres");
    let mut other = server.connect("quiet", "app");
    for wait in WAITS {
        let held = granted(&mut other, HOLD);
        let mut client = server.connect("quiet", "app");
        run(&mut client, "BEGIN");
        let waiter = LockWaiter::sleeping(&mut admin, client, wait);
        assert!(unlock(&mut other, "n", held.token));
        let (answer, mut client) = waiter.acquired();
        assert!(answer.fence.is_none_or(|fence| fence > held.fence), "{answer:?}");
        assert!(answer.left.is_none_or(|left| left > 60.0), "a full lease: {answer:?}");
        assert!(!take(&mut other, "lock_try_xact('n')").acquired);
        run(&mut client, "ROLLBACK");
        assert_eq!(our_locks(&mut admin), 0);
    }
}

#[test]
fn an_unlock_counts_from_its_commit_and_one_rolled_back_sends_the_waiter_back_to_sleep() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let held = granted(&mut db.app(), HOLD);
    let waiter = LockWaiter::sleeping(&mut admin, db.app(), WAITS[0]);
    let mut holder = db.app();
    for end in ["ROLLBACK", "ROLLBACK", "COMMIT"] {
        run(&mut holder, "BEGIN");
        assert!(unlock(&mut holder, "n", held.token));
        eventually("the waiter is woken and queues", || queues(&mut admin, waiter.pid));
        assert!(waiter.still_waits());
        run(&mut holder, end);
        if end == "ROLLBACK" {
            eventually("the waiter sleeps again", || sleeps(&mut admin, waiter.pid));
        }
    }
    waiter.acquired();
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn an_unlock_rolled_back_to_a_savepoint_sends_the_waiter_back_to_sleep() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let held = granted(&mut db.app(), HOLD);
    let waiter = LockWaiter::sleeping(&mut admin, db.app(), WAITS[0]);
    let mut holder = begun(&db);
    run(&mut holder, "SAVEPOINT s");
    assert!(unlock(&mut holder, "n", held.token));
    eventually("the waiter is woken and queues", || queues(&mut admin, waiter.pid));
    run(&mut holder, "ROLLBACK TO s");
    eventually("the waiter sleeps again", || sleeps(&mut admin, waiter.pid));
    assert!(unlock(&mut holder, "n", held.token));
    run(&mut holder, "COMMIT");
    waiter.acquired();
}

#[test]
fn all_waiters_are_woken_and_served_one_after_the_other() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let mut held = granted(&mut db.app(), HOLD);
    let mut waiters: Vec<_> =
        (0..6).map(|_| LockWaiter::sleeping(&mut admin, db.app(), WAITS[0])).collect();
    while !waiters.is_empty() {
        assert!(unlock(&mut db.app(), "n", held.token));
        eventually("one of them has the lock", || {
            waiters.iter().any(|waiter| !waiter.still_waits())
        });
        let next = waiters.iter().position(|waiter| !waiter.still_waits()).unwrap();
        let (answer, _) = waiters.remove(next).acquired();
        assert!(answer.fence.unwrap() > held.fence);
        held = Grant { token: answer.token.unwrap(), fence: answer.fence.unwrap() };
        for waiter in &waiters {
            eventually("the others sleep on", || sleeps(&mut admin, waiter.pid));
            assert!(waiter.still_waits(), "only one holds it");
        }
    }
    // Transaction locks in autocommit: all are served by one unlock.
    let waiters: Vec<_> =
        (0..6).map(|_| LockWaiter::sleeping(&mut admin, db.app(), WAITS[1])).collect();
    assert!(unlock(&mut db.app(), "n", held.token));
    for waiter in waiters {
        waiter.acquired();
    }
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_waiter_gets_the_lock_when_an_open_takers_backend_is_terminated() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for taken in [HOLD, "lock_try_xact('n')"] {
        for wait in WAITS {
            let mut holder = begun(&db);
            assert!(take(&mut holder, taken).acquired);
            let waiter = LockWaiter::queueing(&mut admin, begun(&db), wait);
            let holder = pid(&mut holder);
            terminate(&mut admin, holder);
            waiter.acquired();
        }
    }
    eventually("nothing is left", || our_locks(&mut admin) == 0);
}

#[test]
fn a_lease_outlives_its_takers_backend_and_the_waiter_has_the_lock_at_its_end() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for wait in WAITS {
        let mut holder = db.app();
        let taken = take(&mut holder, "lock_try('n', ttl => '2s')");
        let held = Grant { token: taken.token.unwrap(), fence: taken.fence.unwrap() };
        let end = taken.expires_at.unwrap();
        let holder = pid(&mut holder);
        terminate(&mut admin, holder);
        is_busy(&mut db.app(), "lock_try('n')");
        let (answer, mut client) = LockWaiter::start(begun(&db), wait).acquired();
        assert!(number(&mut client, NOW) >= end, "not before");
        assert!(answer.fence.is_none_or(|fence| fence > held.fence));
        run(&mut client, "ROLLBACK");
        assert!(!unlock(&mut db.app(), "n", held.token), "the lease is over");
    }
}

#[test]
fn a_guard_that_is_terminated_lets_the_lock_go_when_its_lease_is_over() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let held = granted(&mut db.app(), "lock_try('n', ttl => '2s')");
    let mut worker = begun(&db);
    guard(&mut worker, "n", held.token);
    let waiter = LockWaiter::start(db.app(), WAITS[0]);
    eventually("the lease is over, and the waiter queues behind the guard", || {
        queues(&mut admin, waiter.pid)
    });
    assert!(waiter.still_waits());
    let worker = pid(&mut worker);
    terminate(&mut admin, worker);
    let (answer, _) = waiter.acquired();
    assert!(answer.fence.unwrap() > held.fence);
}

// ------------------------------------------------------------ extended

#[test]
fn heartbeats_run_beside_a_guard_while_somebody_waits() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let mut heart = db.app();
    run(&mut heart, "SET lock_timeout = '30s'");
    for (guard_first, wait) in
        [(true, WAITS[0]), (true, WAITS[1]), (false, WAITS[0]), (false, WAITS[1])]
    {
        let held = granted(&mut db.app(), HOLD);
        let mut worker = begun(&db);
        if guard_first {
            guard(&mut worker, "n", held.token);
        }
        let waiter = LockWaiter::sleeping(&mut admin, db.app(), wait);
        if !guard_first {
            guard(&mut worker, "n", held.token);
        }
        for _ in 0..20 {
            extend(&mut heart, "n", held.token, "110s");
        }
        // Others guard, and the worker itself extends, too.
        assert_eq!(guard(&mut heart, "n", held.token), held.fence);
        extend(&mut worker, "n", held.token, "120s");
        assert!(waiter.still_waits());
        eventually("the waiter sleeps", || sleeps(&mut admin, waiter.pid));
        run(&mut worker, "COMMIT");
        assert!(waiter.still_waits());
        assert!(unlock(&mut heart, "n", held.token));
        let (answer, mut client) = waiter.acquired();
        if let Some(token) = answer.token {
            assert!(unlock(&mut client, "n", token));
        }
    }
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn a_lease_that_heartbeats_keep_alive_is_not_taken_over_before_they_stop() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let held = granted(&mut db.app(), "lock_try('n', ttl => '2s')");
    let waiter = LockWaiter::sleeping(&mut admin, db.app(), WAITS[0]);
    let mut heart = db.app();
    let mut end = 0;
    for _ in 0..10 {
        sleep(Duration::from_millis(300));
        end = extend(&mut heart, "n", held.token, "2s");
        assert!(waiter.still_waits());
    }
    let (answer, _) = waiter.acquired();
    let taken = answer.expires_at.unwrap() - 120_000_000;
    assert!(taken >= end, "taken over {} us before the lease was over", end - taken);
    assert!(answer.fence.unwrap() > held.fence);
}

#[test]
fn a_waiter_takes_over_at_the_end_of_a_lease_that_was_made_shorter() {
    let server = quiet();
    let mut admin = server.connect("quiet", "postgres");
    let mut other = server.connect("quiet", "app");
    for wait in WAITS {
        let held = granted(&mut other, HOLD);
        let waiter = LockWaiter::sleeping(&mut admin, server.connect("quiet", "app"), wait);
        let end = extend(&mut other, "n", held.token, "1s");
        let (answer, mut client) = waiter.acquired();
        if let Some(expires_at) = answer.expires_at {
            assert!(expires_at - 120_000_000 >= end, "not before");
            assert!(unlock(&mut client, "n", answer.token.unwrap()));
        }
    }
    assert_eq!(our_locks(&mut admin), 0);
}

// ------------------------------------------------------------ ended

/// In a queue or asleep: who is in the way, on its own connection.
fn in_the_way(db: &TestDb, open: bool) -> (Client, Option<Grant>) {
    let mut holder = db.app();
    if open {
        run(&mut holder, "BEGIN");
    }
    let held = granted(&mut holder, HOLD);
    (holder, (!open).then_some(held))
}

/// Whether a waiter that failed left nothing: neither in pg_locks nor on its connection.
#[track_caller]
fn nothing_is_left(admin: &mut Client, client: &mut Client, pid: i32, open: bool) {
    let _ = client.batch_execute("ROLLBACK");
    assert_eq!(locks_of(admin, pid), [""; 0]);
    assert_eq!(our_locks(admin), i64::from(open), "the holder's only");
    assert_eq!(number(client, "SELECT 1::bigint"), 1);
    run(client, "RESET statement_timeout; RESET lock_timeout");
}

#[test]
fn a_waiter_obeys_cancel_in_the_queue_and_asleep() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for open in [true, false] {
        let (mut holder, held) = in_the_way(&db, open);
        for wait in [WAITS[0], WAITS[1], "lock_acquire('n')", "lock_acquire_xact('n')"] {
            let start = if open { LockWaiter::queueing } else { LockWaiter::sleeping };
            let waiter = start(&mut admin, begun(&db), wait);
            let pid = waiter.pid;
            waiter.cancel.cancel_query(NoTls).unwrap();
            let (answer, mut client) = waiter.end();
            let error = answer.expect_err("canceled");
            assert_eq!(sqlstate(&error), "57014", "{wait}: {error:?}");
            nothing_is_left(&mut admin, &mut client, pid, open);
        }
        run(&mut holder, "ROLLBACK");
        if let Some(held) = held {
            assert!(unlock(&mut holder, "n", held.token));
        }
    }
}

#[test]
fn a_waiter_obeys_the_timeouts_in_the_queue_and_asleep() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for open in [true, false] {
        let (mut holder, held) = in_the_way(&db, open);
        let mut client = db.app();
        let pid = pid(&mut client);
        for wait in [WAITS[0], WAITS[1], "lock_acquire('n')", "lock_acquire_xact('n')"] {
            for (setting, state) in [("statement_timeout", "57014"), ("lock_timeout", "55P03")] {
                run(&mut client, &format!("BEGIN; SET LOCAL {setting} = '50ms'"));
                let error = try_take(&mut client, wait).expect_err("timed out");
                assert_eq!(sqlstate(&error), state, "{wait}: {error:?}");
                nothing_is_left(&mut admin, &mut client, pid, open);
            }
        }
        // Its own wait is over first: told so, and the transaction goes on, with what it had.
        for wait in ["lock_acquire('n', wait => '50ms')", "lock_acquire_xact('n', wait => '50ms')"]
        {
            run(&mut client, "SET lock_timeout = '100s'; SET statement_timeout = '100s'; BEGIN");
            assert!(take(&mut client, "lock_try_xact('mine')").acquired);
            assert!(!take(&mut client, wait).acquired);
            assert_eq!(our_locks(&mut admin), 1 + i64::from(open));
            assert!(!take(&mut db.app(), "lock_try_xact('mine')").acquired);
            run(&mut client, "COMMIT");
            nothing_is_left(&mut admin, &mut client, pid, open);
        }
        run(&mut holder, "ROLLBACK");
        if let Some(held) = held {
            assert!(unlock(&mut holder, "n", held.token));
        }
    }
}

#[test]
fn a_waiter_that_is_terminated_leaves_nothing() {
    let db = TestDb::new();
    let mut admin = db.admin();
    for open in [true, false] {
        let (mut holder, held) = in_the_way(&db, open);
        for wait in WAITS {
            let start = if open { LockWaiter::queueing } else { LockWaiter::sleeping };
            let waiter = start(&mut admin, begun(&db), wait);
            terminate(&mut admin, waiter.pid);
            assert!(waiter.end().0.is_err());
            assert_eq!(our_locks(&mut admin), i64::from(open));
        }
        run(&mut holder, "ROLLBACK");
        if let Some(held) = held {
            assert!(unlock(&mut holder, "n", held.token));
        }
    }
}

#[test]
fn a_sleeping_waiter_has_one_lock_in_the_space_of_idem_and_keeps_no_table_locked() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let held = granted(&mut db.app(), "lock_try('a', ttl => '120s')");
    let waiter = LockWaiter::sleeping(
        &mut admin,
        begun(&db),
        "lock_acquire('a', wait => '120s', ttl => '120s')",
    );
    assert_eq!(locks_of(&mut admin, waiter.pid), ["advisory ShareLock t"]);
    // The wake tag is frozen, as the lock's own (core/src/identity_vectors.in).
    let tag = admin
        .query_one(
            "SELECT format('%s %s %s', classid, objid, objsubid) FROM pg_locks WHERE pid = $1 AND locktype = 'advisory'",
            &[&waiter.pid],
        )
        .unwrap();
    assert_eq!(tag.get::<_, String>(0), "542867924 2440298407 26044");
    assert!(unlock(&mut db.app(), "a", held.token));
    let (_, mut client) = waiter.acquired();
    let pid = pid(&mut client);
    let locks = locks_of(&mut admin, pid);
    let advisory: Vec<_> = locks.iter().filter(|lock| lock.starts_with("advisory")).collect();
    assert_eq!(advisory, ["advisory ExclusiveLock t"], "the wake tag is given back");
}
