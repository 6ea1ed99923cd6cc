//! Poolers (design section 4, invariant 8): every function works when each transaction runs on another connection, and
//! nothing of idem's is left in `pg_locks` after a transaction. Field case: session locks leaked through PgBouncer.

mod common;

use common::*;
use idem_harness::{TestDb, sqlstate};
use postgres::Client;
use serde_json::json;

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
    fn transaction<T>(&mut self, work: impl FnOnce(&mut Client) -> T) -> T {
        let others = self.connections.len() as u64 - 1;
        self.last = (self.last + 1 + self.random.below(others) as usize) % self.connections.len();
        let connection = &mut self.connections[self.last];
        run(connection, "BEGIN");
        let answer = work(connection);
        run(connection, "COMMIT");
        let left = locks_of(&mut self.admin, pid(connection));
        assert_eq!(left, [""; 0], "left after a transaction");
        assert_eq!(our_locks(&mut self.admin), 0);
        answer
    }
}

#[test]
fn a_leased_flow_works_with_each_transaction_on_another_connection() {
    let db = TestDb::new();
    let mut pool = Pool::new(&db);
    for n in 0..10 {
        let key = &format!("key {n}");
        let token = pool.transaction(|c| acquire(c, key, ", lease => '600s'"));
        assert_eq!(pool.transaction(|c| status(c, key, "")), "in_progress");
        for _ in 0..2 {
            let left: f64 = pool.transaction(|c| {
                c.query_one(
                    "SELECT extract(epoch FROM idem_extend($1, $2, '700s') - clock_timestamp())::float8",
                    &[key, &token],
                )
                .unwrap()
                .get(0)
            });
            assert!((690.0..=700.0).contains(&left), "{left}");
        }
        let state: String = pool
            .transaction(|c| c.query_one("SELECT state FROM idem_get($1)", &[key]).unwrap().get(0));
        assert_eq!(state, "in_progress");
        if n % 2 == 0 {
            pool.transaction(|c| complete(c, key, &json!(n), Some(token)));
            // Repeated by the same token it changes nothing.
            pool.transaction(|c| complete(c, key, &json!("again"), Some(token)));
            assert!(!pool.transaction(|c| release(c, key, Some(token))));
            let replay = pool.transaction(|c| begin(c, key, ""));
            assert_eq!(replay.status, "completed");
            assert_eq!(replay.result, Some(json!(n)));
        } else {
            assert!(pool.transaction(|c| release(c, key, Some(token))));
            assert!(!pool.transaction(|c| release(c, key, Some(token))), "once");
            let again = pool.transaction(|c| begin(c, key, ", lease => '600s'"));
            assert_eq!((&*again.status, again.attempt), ("acquired", Some(1)));
        }
    }
}

#[test]
fn a_claim_of_an_earlier_transaction_is_not_the_connections_own() {
    let db = TestDb::new();
    let (mut app, mut admin) = (db.app(), db.admin());
    let token = acquire(&mut app, "k", ", lease => '600s'");
    // The next client of the pooled connection knows no token, and must not pass as the holder.
    assert_eq!(status(&mut app, "k", ", lease => '600s'"), "in_progress");
    let error = try_complete(&mut app, "k", &json!(1), None).unwrap_err();
    assert_eq!(sqlstate(&error), "ID003", "{error:?}");
    assert!(!release(&mut app, "k", None));
    let error = app.execute("SELECT idem_extend('k')", &[]).unwrap_err();
    assert_eq!(sqlstate(&error), "ID003", "{error:?}");
    assert_eq!(our_locks(&mut admin), 0);
    complete(&mut db.app(), "k", &json!(1), Some(token));
}

#[test]
fn failed_calls_leave_nothing_on_the_connection() {
    let db = TestDb::new();
    let (mut app, mut admin) = (db.app(), db.admin());
    acquire(&mut app, "leased", ", lease => '600s'");
    let stranger = Some(uuid::Uuid::from_u128(7));
    let pid = pid(&mut app);
    for (key, state) in [("leased", "ID003"), ("absent", "ID003"), ("", "22023")] {
        for call in ["SELECT idem_complete($1, token => $2)", "SELECT idem_extend($1, $2)"] {
            let error = app.execute(call, &[&key, &stranger]).unwrap_err();
            assert_eq!(sqlstate(&error), state, "{call}: {error:?}");
            assert_eq!(locks_of(&mut admin, pid), [""; 0]);
        }
    }
    // A transaction's claim in autocommit is refused with its statement.
    let error = try_begin(&mut app, "k", "").unwrap_err();
    assert_eq!(sqlstate(&error), "ID007", "{error:?}");
    assert_eq!(locks_of(&mut admin, pid), [""; 0]);
}
