//! Poolers (design section 4, invariant 8): a lock's life works with each transaction on another connection, and nothing
//! of idem's is left in `pg_locks` after a transaction, whether it succeeded or failed.

mod common;
mod lock_common;

use common::*;
use idem_harness::{TestDb, sqlstate};
use lock_common::*;
use postgres::Client;

/// Connections that are handed out one transaction at a time.
struct Pool {
    connections: Vec<Client>,
    random: Random,
    last: usize,
    admin: Client,
}

impl Pool {
    fn new(db: &TestDb) -> Pool {
        Pool {
            connections: (0..5).map(|_| db.app()).collect(),
            random: Random::new(),
            last: 0,
            admin: db.admin(),
        }
    }

    /// One transaction on a connection that is never the one before; afterwards nothing is left of it.
    #[track_caller]
    fn transaction<T>(&mut self, end: &str, work: impl FnOnce(&mut Client) -> T) -> T {
        let others = self.connections.len() as u64 - 1;
        self.last = (self.last + 1 + self.random.below(others) as usize) % self.connections.len();
        let connection = &mut self.connections[self.last];
        run(connection, "BEGIN");
        let answer = work(connection);
        run(connection, end);
        let left = locks_of(&mut self.admin, pid(connection));
        assert_eq!(left, [""; 0], "left after a transaction");
        assert_eq!(our_locks(&mut self.admin), 0);
        answer
    }
}

#[test]
fn a_lock_is_taken_extended_guarded_and_unlocked_on_different_connections() {
    let db = TestDb::new();
    let mut pool = Pool::new(&db);
    let mut last = 0;
    for n in 0..10 {
        let held = pool
            .transaction("COMMIT", |c| granted(c, "lock_try('n', ttl => '600s', holder => 'me')"));
        assert!(held.fence > last);
        last = held.fence;
        let told = pool.transaction("COMMIT", |c| is_busy(c, "lock_try('n')"));
        assert_eq!(told.held_by.as_deref(), Some("me"));
        pool.transaction("COMMIT", |c| is_busy(c, "lock_acquire('n', wait => '1ms')"));
        assert!(
            !pool
                .transaction("COMMIT", |c| take(c, "lock_acquire_xact('n', wait => '1ms')"))
                .acquired
        );
        for end in ["COMMIT", "ROLLBACK"] {
            pool.transaction(end, |c| extend(c, "n", held.token, "700s"));
            let fence = pool.transaction(end, |c| {
                let fence = guard(c, "n", held.token);
                extend(c, "n", held.token, "800s");
                fence
            });
            assert_eq!(fence, held.fence);
        }
        assert!(pool.transaction("ROLLBACK", |c| unlock(c, "n", held.token)));
        if n % 2 == 0 {
            assert!(pool.transaction("COMMIT", |c| unlock(c, "n", held.token)));
        } else {
            pool.transaction("COMMIT", |c| {
                assert_eq!(guard(c, "n", held.token), held.fence);
                assert!(unlock(c, "n", held.token));
            });
        }
        assert!(!pool.transaction("COMMIT", |c| unlock(c, "n", held.token)), "once");
        for end in ["COMMIT", "ROLLBACK"] {
            assert!(pool.transaction(end, |c| take(c, "lock_try_xact('n')")).acquired);
            assert!(
                pool.transaction(end, |c| take(c, "lock_acquire_xact('n', wait => '1s')")).acquired
            );
        }
        pool.transaction("ROLLBACK", |c| granted(c, "lock_acquire('n', ttl => '600s')"));
    }
}

#[test]
fn failed_calls_leave_nothing_on_the_connection() {
    let db = TestDb::new();
    let mut pool = Pool::new(&db);
    pool.transaction("COMMIT", |c| granted(c, "lock_try('held', ttl => '600s')"));
    pool.transaction("COMMIT", |c| granted(c, "lock_try('over', ttl => '1us')"));
    let stranger = uuid::Uuid::from_u128(7);
    for (name, state) in [("held", "ID011"), ("over", "ID011"), ("absent", "ID011"), ("", "22023")]
    {
        for call in ["SELECT lock_guard($1, $2)", "SELECT lock_extend($1, $2)"] {
            // In a transaction that fails, and in one that catches the failure in a savepoint.
            for savepoint in [false, true] {
                pool.transaction(if savepoint { "COMMIT" } else { "ROLLBACK" }, |c| {
                    run(c, "SAVEPOINT s");
                    let error = c.execute(call, &[&name, &stranger]).unwrap_err();
                    assert_eq!(sqlstate(&error), state, "{call} of {name}: {error:?}");
                    if savepoint {
                        run(c, "ROLLBACK TO s");
                        let pid = pid(c);
                        assert_eq!(locks_of(&mut db.admin(), pid), [""; 0]);
                    }
                });
            }
        }
    }
    for call in [
        "lock_try('')",
        "lock_try('n', ttl => '0')",
        "lock_acquire('n', wait => '-1s')",
        "lock_try_xact(NULL)",
    ] {
        pool.transaction("ROLLBACK", |c| try_take(c, call).unwrap_err());
    }
}
