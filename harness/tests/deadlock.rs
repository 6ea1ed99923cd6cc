//! Deadlocks (design section 3, `wait`; field case: two transactions take two keys in opposite order and wait): one of
//! them gets 40P01, the other goes on, and nothing is left held.

mod common;

use common::*;
use idem_harness::{TestDb, eventually, sqlstate};
use postgres::{Client, Error};
use serde_json::json;

/// Two transactions that hold `a` and `b` and then wait for each other's. The loser rolls back (to its savepoint, if it
/// has one, and then completes its own key), the survivor goes on: the loser's error, both connections, the survivor's
/// answer and its own key.
struct Crossed {
    error: Error,
    loser: Client,
    answer: Begun,
    survivor: Client,
    survivors_key: &'static str,
}

fn cross(db: &TestDb, savepoint: bool) -> Crossed {
    let (mut first, mut second, mut admin) = (db.app(), db.app(), db.admin());
    for (client, key) in [(&mut first, "a"), (&mut second, "b")] {
        run(client, "BEGIN");
        acquire(client, key, "");
        if savepoint {
            run(client, "SAVEPOINT s");
        }
    }
    let first = Waiter::queueing(&mut admin, first, "b", LONG);
    let second = Waiter::start(second, "a", LONG);
    eventually("one of the two is told", || !first.still_waits() || !second.still_waits());
    // Without a savepoint the loser's whole transaction is undone with the error, and both may be through by now.
    let (one, other) = if first.still_waits() {
        ((second, "b"), (first, "a"))
    } else {
        ((first, "a"), (second, "b"))
    };
    let ((told, mut client), one_key) = (one.0.end(), one.1);
    let (loser, survivor, survivors_key) = match told {
        Err(_) if savepoint => {
            assert!(other.0.still_waits(), "only one of the two is told");
            run(&mut client, "ROLLBACK TO s");
            complete(&mut client, one_key, &json!("kept"), None);
            run(&mut client, "COMMIT");
            ((told, client), other.0.end(), other.1)
        }
        Err(_) => ((told, client), other.0.end(), other.1),
        Ok(_) => (other.0.end(), (told, client), one_key),
    };
    let (error, mut loser) = loser;
    run(&mut loser, "ROLLBACK");
    let (answer, survivor) = survivor;
    Crossed {
        error: error.expect_err("one must lose"),
        loser,
        answer: answer.expect("the other goes on"),
        survivor,
        survivors_key,
    }
}

#[test]
fn two_keys_in_opposite_order_end_with_40p01_for_one_and_the_key_for_the_other() {
    let db = TestDb::new();
    let mut crossed = cross(&db, false);
    assert_eq!(sqlstate(&crossed.error), "40P01", "{:?}", crossed.error);
    assert_eq!(crossed.answer.status, "acquired");
    for key in ["a", "b"] {
        complete(&mut crossed.survivor, key, &json!(1), None);
    }
    run(&mut crossed.survivor, "COMMIT");
    assert_eq!(our_locks(&mut db.admin()), 0);
    for key in ["a", "b"] {
        assert_eq!(status(&mut crossed.loser, key, ""), "completed");
    }
}

#[test]
fn the_loser_that_rolls_back_to_a_savepoint_keeps_its_earlier_key() {
    let db = TestDb::new();
    let mut crossed = cross(&db, true);
    assert_eq!(sqlstate(&crossed.error), "40P01", "{:?}", crossed.error);
    assert_eq!(crossed.answer.status, "completed");
    assert_eq!(crossed.answer.result, Some(json!("kept")));
    complete(&mut crossed.survivor, crossed.survivors_key, &json!(1), None);
    run(&mut crossed.survivor, "COMMIT");
    assert_eq!(our_locks(&mut db.admin()), 0);
}

#[test]
fn a_key_and_a_row_lock_of_the_application_are_one_deadlock_too() {
    let db = TestDb::new();
    let mut admin = db.admin();
    run(
        &mut admin,
        "CREATE TABLE stock (item int PRIMARY KEY, n int); INSERT INTO stock VALUES (1, 10);
         GRANT SELECT, UPDATE ON stock TO app",
    );
    let (mut holder, mut seller) = (db.app(), db.app());
    run(&mut holder, "BEGIN");
    acquire(&mut holder, "a", "");
    run(&mut seller, "BEGIN; UPDATE stock SET n = n - 1 WHERE item = 1");
    let seller = Waiter::queueing(&mut admin, seller, "a", LONG);

    let update = holder.batch_execute("UPDATE stock SET n = n - 1 WHERE item = 1");
    match update {
        Err(error) => {
            assert_eq!(sqlstate(&error), "40P01", "{error:?}");
            run(&mut holder, "ROLLBACK");
            let (answer, mut seller) = seller.answer();
            assert_eq!(answer.status, "acquired");
            complete(&mut seller, "a", &json!(1), None);
            run(&mut seller, "COMMIT");
        }
        Ok(()) => {
            let (error, mut seller) = seller.end();
            let error = error.expect_err("one of the two must lose");
            assert_eq!(sqlstate(&error), "40P01", "{error:?}");
            run(&mut seller, "ROLLBACK");
            complete(&mut holder, "a", &json!(1), None);
            run(&mut holder, "COMMIT");
        }
    }
    assert_eq!(our_locks(&mut admin), 0);
    assert_eq!(number(&mut admin, "SELECT n::bigint FROM stock"), 9, "one of the two sold");
}
