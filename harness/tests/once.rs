//! `idem_once` and `idem_run` beside each other: a duplicate waits until the outcome is known; batches; many keys.

use std::sync::Barrier;
use std::thread::scope;

use idem_harness::{TestDb, eventually, sqlstate};
use postgres::Client;

fn once(client: &mut Client, key: &str) -> bool {
    client.query_one("SELECT idem_once($1)", &[&key]).expect("idem_once answers").get(0)
}

/// Whether a backend of this database waits for a lock.
fn somebody_waits(db: &TestDb) -> bool {
    let waiting: i64 = db
        .admin()
        .query_one(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
            &[],
        )
        .unwrap()
        .get(0);
    waiting > 0
}

/// Lets one transaction do a key once, a duplicate wait for it, and ends the first by `end`.
fn duplicate_of(end: &str) -> bool {
    let db = TestDb::new();
    let (mut first, mut second) = (db.app(), db.app());
    first.batch_execute("BEGIN").unwrap();
    assert!(once(&mut first, "message"));
    scope(|threads| {
        let duplicate = threads.spawn(|| once(&mut second, "message"));
        eventually("the duplicate waits", || somebody_waits(&db));
        first.batch_execute(end).unwrap();
        duplicate.join().unwrap()
    })
}

#[test]
fn a_duplicate_waits_and_learns_that_it_was_done() {
    assert!(!duplicate_of("COMMIT"));
}

#[test]
fn a_duplicate_waits_and_does_it_if_the_first_rolls_back() {
    assert!(duplicate_of("ROLLBACK"));
}

#[test]
fn a_message_delivered_to_many_consumers_at_once_is_handled_once() {
    const CONSUMERS: usize = 16;
    let db = TestDb::new();
    db.admin()
        .batch_execute("CREATE TABLE handled (id text); GRANT INSERT ON handled TO app")
        .unwrap();
    let together = Barrier::new(CONSUMERS);
    scope(|threads| {
        for _ in 0..CONSUMERS {
            threads.spawn(|| {
                let mut app = db.app();
                for round in 0..20 {
                    together.wait();
                    // Each gets the whole batch, in one statement; ordered, so that none deadlock.
                    app.execute(
                        "INSERT INTO handled
                         SELECT id FROM (SELECT 'm-' || $1 || '-' || n AS id FROM generate_series(1, 10) AS n ORDER BY 1) AS batch
                         WHERE idem_once(id)",
                        &[&round.to_string()],
                    )
                    .expect("a batch is handled without an error");
                }
            });
        }
    });
    let (all, distinct): (i64, i64) = {
        let row =
            db.admin().query_one("SELECT count(*), count(DISTINCT id) FROM handled", &[]).unwrap();
        (row.get(0), row.get(1))
    };
    assert_eq!((all, distinct), (200, 200));
}

#[test]
fn five_thousand_keys_in_one_transaction() {
    let db = TestDb::new();
    let mut app = db.app();
    let count = "SELECT count(*) FROM generate_series(1, 5000) AS n WHERE idem_once('key-' || n)";
    app.batch_execute("BEGIN").unwrap();
    let first: i64 = app.query_one(count, &[]).unwrap().get(0);
    let again: i64 = app.query_one(count, &[]).unwrap().get(0);
    app.batch_execute("COMMIT").unwrap();
    let later: i64 = app.query_one(count, &[]).unwrap().get(0);
    assert_eq!((first, again, later), (5000, 0, 0));
}

#[test]
fn a_retried_run_waits_and_gets_the_result_of_the_first() {
    let db = TestDb::new();
    db.admin()
        .batch_execute(
            "CREATE TABLE runs (n int GENERATED ALWAYS AS IDENTITY);
             GRANT INSERT, SELECT ON runs TO app;
             CREATE FUNCTION work(request jsonb) RETURNS jsonb LANGUAGE sql AS
             $$ INSERT INTO runs DEFAULT VALUES; SELECT to_jsonb(count(*)) FROM runs $$;",
        )
        .unwrap();
    let (mut first, mut second) = (db.app(), db.app());
    let run = "SELECT idem_run('key', 'work(jsonb)', '1', wait => '60 s')::text";
    first.batch_execute("BEGIN").unwrap();
    let one: String = first.query_one(run, &[]).unwrap().get(0);
    // Without a wait it is told at once.
    let busy = second.query_one("SELECT idem_run('key', 'work(jsonb)', '1')", &[]).unwrap_err();
    assert_eq!(sqlstate(&busy), "ID001");
    let two: String = scope(|threads| {
        let retry = threads.spawn(|| second.query_one(run, &[]).unwrap().get(0));
        eventually("the retry waits", || somebody_waits(&db));
        first.batch_execute("COMMIT").unwrap();
        retry.join().unwrap()
    });
    assert_eq!((one.as_str(), two.as_str()), ("1", "1"));
    let runs: i64 = db.admin().query_one("SELECT count(*) FROM runs", &[]).unwrap().get(0);
    assert_eq!(runs, 1);
}
