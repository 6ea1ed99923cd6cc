//! Duplicates at once (design section 4, invariants 1, 2 and 3): while a key is held at most one caller runs, and
//! afterwards everybody gets its result. Field cases: only sequential duplicates were caught; a lease that ran out was
//! taken over by several; zero rows or a NULL status after a wait.

mod common;

use std::sync::{Barrier, Mutex, MutexGuard};
use std::thread::scope;

use common::*;
use idem_harness::{TestDb, sqlstate};
use postgres::Client;
use serde_json::{Value, json};

const CLIENTS: usize = 64;

/// The tests here take most of the server's connections: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn shop() -> (TestDb, Vec<Client>) {
    let db = TestDb::new();
    run(
        &mut db.admin(),
        "CREATE TABLE payments (key text, who int); GRANT INSERT, SELECT ON payments TO app",
    );
    let clients = (0..CLIENTS).map(|_| db.app()).collect();
    (db, clients)
}

/// All clients begin at the same moment, each in a transaction of its own; whoever gets the key pays and completes it.
/// What they were told: status, attempt, result.
fn all_at_once(
    clients: &mut [Client],
    key: &str,
    options: &str,
) -> Vec<(String, Option<i32>, Option<Value>)> {
    let start = Barrier::new(clients.len());
    scope(|threads| {
        let attempts: Vec<_> = clients
            .iter_mut()
            .enumerate()
            .map(|(who, client)| {
                let start = &start;
                let mut work = client.transaction().unwrap();
                threads.spawn(move || {
                    start.wait();
                    let begun = begin(&mut work, key, options);
                    if begun.status == "acquired" {
                        work.execute(
                            "INSERT INTO payments VALUES ($1, $2)",
                            &[&key, &(who as i32)],
                        )
                        .unwrap();
                        complete(&mut work, key, &json!({ "who": who }), begun.token);
                    }
                    work.commit().unwrap();
                    (begun.status, begun.attempt, begun.result)
                })
            })
            .collect();
        attempts.into_iter().map(|attempt| attempt.join().unwrap()).collect()
    })
}

/// Exactly one ran, as `attempt`; everybody else was told so, and is answered with its result now.
#[track_caller]
fn one_ran(
    db: &TestDb,
    key: &str,
    answers: &[(String, Option<i32>, Option<Value>)],
    attempt: i32,
    others: &[&str],
) {
    let payments = db.admin().query("SELECT who FROM payments WHERE key = $1", &[&key]).unwrap();
    assert_eq!(payments.len(), 1, "{key} is paid once");
    let who: i32 = payments[0].get(0);
    let winner = &answers[who as usize];
    assert_eq!((&*winner.0, winner.1), ("acquired", Some(attempt)), "{key}");
    for (i, (status, _, result)) in answers.iter().enumerate().filter(|(i, _)| *i != who as usize) {
        assert!(others.contains(&&**status), "client {i} was told {status}");
        let expected = (status == "completed").then(|| json!({ "who": who }));
        assert_eq!(*result, expected, "client {i}, {status}");
    }
    let replay = begin(&mut db.app(), key, "");
    assert_eq!(replay.status, "completed");
    assert_eq!(replay.result, Some(json!({ "who": who })));
    assert_eq!(our_locks(&mut db.admin()), 0);
}

/// Leaves a claim whose lease is over.
fn abandoned(db: &TestDb, key: &str) {
    acquire(&mut db.app(), key, ", lease => '1ms'");
    idem_harness::eventually("the lease is over", || {
        db.app().query_one("SELECT state = 'abandoned' FROM idem_get($1)", &[&key]).unwrap().get(0)
    });
}

/// Leaves a completed record that has expired.
fn expired(db: &TestDb, key: &str) {
    let mut app = db.app();
    let mut work = app.transaction().unwrap();
    acquire(&mut work, key, "");
    work.execute("SELECT idem_complete($1, '\"old\"', ttl => '1ms')", &[&key]).unwrap();
    work.commit().unwrap();
    idem_harness::eventually("the record has expired", || {
        app.query("SELECT FROM idem_get($1)", &[&key]).unwrap().is_empty()
    });
}

#[test]
fn of_64_duplicates_at_once_exactly_one_runs() {
    let _alone = alone();
    let (db, mut clients) = shop();
    for round in 0..5 {
        let key = format!("new-{round}");
        let answers = all_at_once(&mut clients, &key, "");
        one_ran(&db, &key, &answers, 1, &["in_progress", "completed"]);
    }
}

#[test]
fn duplicates_that_wait_all_get_the_same_result() {
    let _alone = alone();
    let (db, mut clients) = shop();
    for round in 0..3 {
        let key = format!("new-{round}");
        let answers = all_at_once(&mut clients, &key, LONG);
        one_ran(&db, &key, &answers, 1, &["completed"]);
    }
}

#[test]
fn a_lease_that_is_over_is_taken_over_once() {
    let _alone = alone();
    let (db, mut clients) = shop();
    for (round, options) in ["", ", lease => '60s'"].into_iter().enumerate() {
        for again in 0..2 {
            let key = format!("abandoned-{round}-{again}");
            abandoned(&db, &key);
            let answers = all_at_once(&mut clients, &key, options);
            one_ran(&db, &key, &answers, 2, &["in_progress", "completed"]);

            let key = format!("waited-for-{round}-{again}");
            abandoned(&db, &key);
            let answers = all_at_once(&mut clients, &key, &format!("{options}{LONG}"));
            one_ran(&db, &key, &answers, 2, &["completed"]);
        }
    }
}

#[test]
fn an_expired_result_is_replaced_once() {
    let _alone = alone();
    let (db, mut clients) = shop();
    for (round, options) in ["", ", lease => '60s'"].into_iter().enumerate() {
        for again in 0..2 {
            let key = format!("expired-{round}-{again}");
            expired(&db, &key);
            let answers = all_at_once(&mut clients, &key, options);
            one_ran(&db, &key, &answers, 1, &["in_progress", "completed"]);

            let key = format!("waited-for-{round}-{again}");
            expired(&db, &key);
            let answers = all_at_once(&mut clients, &key, &format!("{options}{LONG}"));
            one_ran(&db, &key, &answers, 1, &["completed"]);
        }
    }
    assert_eq!(
        number(&mut db.admin(), "SELECT count(*) FROM idem_segment_0"),
        8,
        "what had expired is gone"
    );
}

/// One visit of a client to a key; returns whether the key is completed now.
fn visit(client: &mut Client, key: &str, nonce: i64, random: &mut Random) -> bool {
    let pay = |client: &mut Client| {
        client.execute("INSERT INTO attempts VALUES ($1, $2)", &[&key, &nonce]).unwrap();
    };
    let result = json!({ "nonce": nonce });
    let wait = if random.below(2) == 0 { "" } else { ", wait => '5s'" };

    // One in four on a lease, which may be over before the work is.
    if random.below(4) == 0 {
        let lease = ["1ms", "3ms", "60s"][random.below(3) as usize];
        let begun = begin(client, key, &format!("{wait}, lease => '{lease}'"));
        match &*begun.status {
            "completed" => return true,
            "in_progress" => return false,
            "acquired" => {}
            other => panic!("told {other}"),
        }
        // A long lease must not be left: nobody would wait for it.
        match random.below(if lease == "60s" { 3 } else { 4 }) {
            0 => {
                run(client, "BEGIN");
                pay(client);
                match try_complete(client, key, &result, begun.token) {
                    Ok(()) => {
                        run(client, "COMMIT");
                        return true;
                    }
                    Err(lost) => assert_eq!(sqlstate(&lost), "ID003", "{lost:?}"),
                }
                run(client, "ROLLBACK");
            }
            1 => {
                release(client, key, begun.token);
            }
            2 => {
                run(client, "BEGIN");
                release(client, key, begun.token);
                run(client, "ROLLBACK");
                release(client, key, begun.token);
            }
            _ => {}
        }
        return false;
    }

    run(client, "BEGIN");
    if random.below(4) == 0 {
        // Claimed inside a savepoint that is rolled back: nothing remains.
        run(client, "SAVEPOINT s");
        let begun = begin(client, key, wait);
        if begun.status == "acquired" {
            pay(client);
            if random.below(2) == 0 {
                complete(client, key, &result, None);
            }
        }
        run(client, "ROLLBACK TO s; COMMIT");
        return begun.status == "completed";
    }
    let begun = begin(client, key, wait);
    match &*begun.status {
        "acquired" => {}
        told @ ("completed" | "in_progress") => {
            run(client, "COMMIT");
            return told == "completed";
        }
        other => panic!("told {other}"),
    }
    match random.below(6) {
        0 => {
            pay(client);
            complete(client, key, &result, None);
            run(client, "COMMIT");
            return true;
        }
        1 => {
            pay(client);
            complete(client, key, &result, None);
            run(client, "ROLLBACK");
        }
        2 => {
            assert!(release(client, key, None));
            run(client, "COMMIT");
        }
        3 => {
            // A completion rolled back to a savepoint leaves the claim held.
            run(client, "SAVEPOINT s");
            pay(client);
            complete(client, key, &json!("undone"), None);
            run(client, "ROLLBACK TO s");
            pay(client);
            complete(client, key, &result, None);
            run(client, "COMMIT");
            return true;
        }
        4 => {
            run(client, "SAVEPOINT s");
            pay(client);
            complete(client, key, &json!("undone"), None);
            run(client, "ROLLBACK TO s");
            assert!(release(client, key, None));
            run(client, "COMMIT");
        }
        _ => {
            pay(client);
            run(client, "ROLLBACK");
        }
    }
    false
}

#[test]
fn under_random_rollbacks_releases_and_savepoints_completed_means_exactly_one_row() {
    const THREADS: usize = 12;
    const KEYS: usize = 40;
    const VISITS: usize = 200; // to one key by one client, at the most
    let _alone = alone();
    let db = TestDb::new();
    run(
        &mut db.admin(),
        "CREATE TABLE attempts (key text, nonce bigint); GRANT INSERT ON attempts TO app",
    );
    let mut seeds = Random::new();
    let start = Barrier::new(THREADS);
    scope(|threads| {
        for thread in 0..THREADS {
            let mut random = Random::seeded(seeds.next());
            let start = &start;
            let mut client = db.app();
            threads.spawn(move || {
                // All leave a key when it is completed, so they meet at every one.
                start.wait();
                for key in 0..KEYS {
                    for n in 0..VISITS {
                        let nonce = ((thread * KEYS + key) * VISITS + n) as i64;
                        if visit(&mut client, &format!("key-{key}"), nonce, &mut random) {
                            break;
                        }
                    }
                }
            });
        }
    });

    let mut admin = db.admin();
    let wrong = admin
        .query(
            "SELECT coalesce(a.key, c.key), a.n, a.nonce, c.result::text
             FROM (SELECT key, count(*) AS n, min(nonce) AS nonce FROM attempts GROUP BY key) AS a
             FULL JOIN idem_segment_0 AS c ON c.key = a.key
             WHERE a.n IS DISTINCT FROM 1 OR c.result IS DISTINCT FROM jsonb_build_object('nonce', a.nonce)",
            &[],
        )
        .unwrap();
    assert!(wrong.is_empty(), "{wrong:?}");
    // Nobody completing a key in 12 × 200 visits would say that the test does not do what it should.
    assert_eq!(number(&mut admin, "SELECT count(*) FROM attempts"), KEYS as i64);
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_claims"), 0);
    assert_eq!(our_locks(&mut admin), 0);
}
