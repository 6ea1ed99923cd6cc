//! No wake-up is lost: a lock that is handed to and fro between waiters, thousands of times, on leases so long that a
//! waiter who missed its wake-up would sleep until its patience is over.

use std::thread::scope;

use idem_harness::TestDb;

#[test]
fn a_waiter_never_sleeps_through_an_unlock() {
    const WORKERS: usize = 3;
    const ROUNDS: usize = 400;
    let db = TestDb::new();
    scope(|threads| {
        for _ in 0..WORKERS {
            threads.spawn(|| {
                let mut app = db.app();
                for round in 0..ROUNDS {
                    let row = app
                        .query_one(
                            "SELECT acquired, token FROM lock_acquire('n', wait => '30s', ttl => '1h')",
                            &[],
                        )
                        .unwrap();
                    assert!(row.get::<_, bool>("acquired"), "slept for its whole wait in round {round}");
                    let token: uuid::Uuid = row.get("token");
                    let unlocked: bool =
                        app.query_one("SELECT lock_unlock('n', $1)", &[&token]).unwrap().get(0);
                    assert!(unlocked);
                }
            });
        }
    });
}

#[test]
fn a_waiter_never_sleeps_through_a_release_or_a_completion() {
    const WORKERS: usize = 3;
    const ROUNDS: usize = 300;
    let db = TestDb::new();
    scope(|threads| {
        for worker in 0..WORKERS {
            let db = &db;
            threads.spawn(move || {
                let mut app = db.app();
                for round in 0..ROUNDS {
                    // A completed key is done with; the next round is another key.
                    let key = format!("key-{}", round / 10);
                    let row = app
                        .query_one(
                            "SELECT status, token FROM idem_begin($1, lease => '1h', wait => '30s')",
                            &[&key],
                        )
                        .unwrap();
                    match row.get::<_, &str>("status") {
                        "completed" => continue,
                        "acquired" => {}
                        status => panic!("slept for its whole wait in round {round}: {status}"),
                    }
                    let token: uuid::Uuid = row.get("token");
                    let end = match round % 10 == 9 && worker == 0 {
                        true => "SELECT idem_complete($1, token => $2)",
                        false => "SELECT idem_release($1, $2)",
                    };
                    app.execute(end, &[&key, &token]).unwrap();
                }
            });
        }
    });
}
