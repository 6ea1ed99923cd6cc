//! Crashes (design section 4, invariant 2): a key is completed if and only if the business rows written with it are
//! there, after `kill -9` of a server process or of the whole server, at any moment, with any `synchronous_commit`. No
//! acknowledged commit is lost with `synchronous_commit = on`; a lease, once its COMMIT returned, is never lost.

mod common;

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use common::*;
use idem_harness::{Server, sqlstate};
use postgres::{Client, Error};
use serde_json::json;

/// The WAL writer must not do in time what a commit has not: write its WAL.
const SETTINGS: [&str; 4] =
    ["fsync=on", "wal_writer_delay=10s", "autovacuum=off", "deadlock_timeout=60s"];
const KEYS: u64 = 200; // per round
const THREADS: u64 = 6;

/// What clients were told, and what must therefore be so after the crash.
#[derive(Default)]
struct Told {
    /// COMMIT of the payment returned.
    paid: Mutex<HashSet<String>>,
    /// The latest attempt of which `idem_begin` with a lease returned (it commits by itself).
    leased: Mutex<HashMap<String, i32>>,
}

/// One request to pay; says whether the key is completed.
fn pay(
    client: &mut Client,
    key: &str,
    leased: bool,
    nonce: i64,
    told: &Told,
) -> Result<bool, Error> {
    let options = if leased { ", lease => '400ms'" } else { "" };
    let mut token = None;
    if leased {
        let begun = try_begin(client, key, options)?;
        if begun.status != "acquired" {
            return Ok(begun.status == "completed");
        }
        token = begun.token;
        let attempt = begun.attempt.unwrap();
        let mut leases = told.leased.lock().unwrap();
        let newest = leases.entry(key.to_string()).or_insert(attempt);
        *newest = attempt.max(*newest);
    }
    let mut work = client.transaction()?;
    if !leased {
        let begun = try_begin(&mut work, key, options)?;
        if begun.status != "acquired" {
            return Ok(begun.status == "completed");
        }
    }
    work.execute("INSERT INTO payments VALUES ($1, $2)", &[&key, &nonce])?;
    try_complete(&mut work, key, &json!({ "nonce": nonce }), token)?;
    work.commit()?;
    told.paid.lock().unwrap().insert(key.to_string());
    Ok(true)
}

fn key(round: usize, n: u64) -> (String, bool) {
    (format!("round {round} key {n}"), n.is_multiple_of(3))
}

/// Pays random keys of the round until told to stop; connects again when cut off.
fn customer(
    server: &Server,
    synchronous: &str,
    round: usize,
    mut random: Random,
    told: &Told,
    stop: &AtomicBool,
) {
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut client) = try_connect(server.dir(), "shop", "app") else {
            sleep(Duration::from_millis(10));
            continue;
        };
        if client.batch_execute(&format!("SET synchronous_commit = {synchronous}")).is_err() {
            continue;
        }
        while !stop.load(Ordering::Relaxed) {
            let (key, leased) = key(round, random.below(KEYS));
            let nonce = (random.next() >> 1) as i64;
            match pay(&mut client, &key, leased, nonce, told) {
                Ok(_) => {}
                Err(lost) if sqlstate(&lost) == "ID003" => assert!(leased, "{lost:?}"),
                // Cut off: told so (57P01, 57P02), or not even that.
                Err(error) if sqlstate(&error).starts_with("57P") || error.code().is_none() => {
                    break;
                }
                Err(error) => panic!("{key}: {error:?}"),
            }
        }
    }
}

#[track_caller]
fn judge(server: &Server, synchronous: &str, round: usize, told: &Told) {
    let mut admin = connect_again(server.dir(), "shop", "postgres");
    let wrong: Vec<String> = admin
        .query(
            "SELECT format('%s: %s payments, %s, result %s', coalesce(p.key, c.key), p.n, p.nonce, c.result)
             FROM (SELECT key, count(*) AS n, min(nonce) AS nonce FROM payments GROUP BY key) AS p
             FULL JOIN idem_segment_0 AS c ON c.key = p.key
             WHERE p.n IS DISTINCT FROM 1 OR c.result IS DISTINCT FROM jsonb_build_object('nonce', p.nonce)",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert!(wrong.is_empty(), "completed if and only if paid, once: {wrong:#?}");
    let strings = |admin: &mut Client, sql: &str| -> HashSet<String> {
        let rows = admin.query(sql, &[]).unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    let paid = strings(&mut admin, "SELECT key FROM payments");
    if synchronous == "on" {
        let told = told.paid.lock().unwrap();
        let lost: Vec<_> = told.difference(&paid).collect();
        assert!(lost.is_empty(), "round {round}: acknowledged, and lost: {lost:?}");
    }
    // A record may have moved on (taken over, completed), never back.
    let attempts: HashMap<String, i32> = admin
        .query(
            "SELECT key, attempt FROM idem_claims UNION ALL SELECT key, attempt FROM idem_segment_0",
            &[],
        )
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    for (key, attempt) in told.leased.lock().unwrap().iter() {
        assert!(
            attempts.get(key).is_some_and(|found| found >= attempt),
            "round {round}: {key} was leased as attempt {attempt}; found {:?}",
            attempts.get(key)
        );
    }
    assert_eq!(our_locks(&mut admin), 0);
    let both = "SELECT count(*) FROM idem_claims JOIN idem_segment_0 USING (digest)";
    assert_eq!(number(&mut admin, both), 0, "one record per key");
}

/// Every request of the round is retried until it is answered: all are paid, once.
fn settle(server: &Server, round: usize) {
    let mut app = connect_again(server.dir(), "shop", "app");
    let told = Told::default();
    for n in 0..KEYS {
        let (key, leased) = key(round, n);
        idem_harness::eventually("the retry is answered", || {
            pay(&mut app, &key, leased, n as i64, &told).unwrap()
        });
    }
    let mut admin = connect_again(server.dir(), "shop", "postgres");
    let found = number(
        &mut admin,
        &format!("SELECT count(*) FROM payments WHERE key LIKE 'round {round} %'"),
    );
    assert_eq!(found, KEYS as i64);
}

fn crashes(synchronous: &str) {
    let server = Server::start(&SETTINGS);
    server.create_database("shop");
    run(
        &mut server.connect("shop", "postgres"),
        "CREATE TABLE payments (key text, nonce bigint); GRANT INSERT, SELECT ON payments TO app;
         CHECKPOINT",
    );
    let mut random = Random::new();
    for round in 0..4 {
        let whole_server = round % 2 == 0;
        let told = Told::default();
        let stop = AtomicBool::new(false);
        scope(|threads| {
            for _ in 0..THREADS {
                let (server, told, stop) = (&server, &told, &stop);
                let random = Random::seeded(random.next());
                threads.spawn(move || customer(server, synchronous, round, random, told, stop));
            }
            if whole_server {
                sleep(Duration::from_millis(30 + random.below(170)));
                server.kill9();
            } else {
                for _ in 0..2 {
                    let mut admin = connect_again(server.dir(), "shop", "postgres");
                    sleep(Duration::from_millis(30 + random.below(170)));
                    // Whoever is in the middle of a transaction now.
                    let victim = admin.query_opt(
                        "SELECT pid FROM pg_stat_activity WHERE usename = 'app' AND xact_start IS NOT NULL
                         ORDER BY random() LIMIT 1",
                        &[],
                    );
                    if let Ok(Some(victim)) = victim {
                        kill9(victim.get(0));
                        idem_harness::eventually("the server takes note", || {
                            admin.batch_execute("SELECT 1").is_err()
                        });
                    }
                }
                drop(connect_again(server.dir(), "shop", "postgres"));
            }
            stop.store(true, Ordering::Relaxed);
        });
        if whole_server {
            server.start_again();
        }
        assert!(
            !told.paid.lock().unwrap().is_empty(),
            "round {round}: nobody was served before the crash"
        );
        judge(&server, synchronous, round, &told);
        settle(&server, round);
        judge(&server, "off", round, &Told::default());
    }
}

#[test]
fn after_crashes_completed_means_paid_once_and_no_acknowledged_payment_is_lost() {
    crashes("on");
}

#[test]
fn after_crashes_completed_means_paid_once_also_with_synchronous_commit_off() {
    crashes("off");
}

#[test]
fn a_lease_that_was_granted_survives_a_crash_with_synchronous_commit_off() {
    let server = Server::start(&SETTINGS);
    server.create_database("shop");
    run(
        &mut server.connect("shop", "postgres"),
        "CREATE TABLE notes (n int); GRANT INSERT, SELECT ON notes TO app; CHECKPOINT",
    );
    let mut extended = None;
    let mut lost = 0;
    for round in 0..4 {
        let mut app = server.connect("shop", "app");
        run(&mut app, "SET synchronous_commit = off");
        let key = format!("key {round}");
        let token;
        match round {
            // By itself, in a block with other work, as a takeover, by extending.
            0 => token = acquire(&mut app, &key, ", lease => '600s'"),
            1 => {
                run(&mut app, "BEGIN; INSERT INTO notes VALUES (-1)");
                token = acquire(&mut app, &key, ", lease => '600s'");
                run(&mut app, "COMMIT");
            }
            2 => {
                acquire(&mut app, &key, ", lease => '1ms'");
                token = acquire(&mut app, &key, &format!(", lease => '600s'{LONG}"));
            }
            _ => {
                token = acquire(&mut app, &key, ", lease => '600s'");
                let left: f64 = app
                    .query_one(
                        "SELECT extract(epoch FROM idem_extend($1, $2, '9000s') - clock_timestamp())::float8",
                        &[&key, &token],
                    )
                    .unwrap()
                    .get(0);
                extended = Some(left);
            }
        }
        // What is committed after it, the ordinary way, shows whether this crash loses anything at all.
        app.execute("INSERT INTO notes VALUES ($1)", &[&round]).unwrap();
        server.kill9();
        server.start_again();

        let mut admin = server.connect("shop", "postgres");
        let rows = admin
            .query(
                "SELECT token, attempt, extract(epoch FROM expires_at - clock_timestamp())::float8
                 FROM idem_claims WHERE key = $1",
                &[&key],
            )
            .unwrap();
        assert_eq!(rows.len(), 1, "{key} is lost");
        assert_eq!(rows[0].get::<_, uuid::Uuid>(0), token, "{key}");
        assert_eq!(rows[0].get::<_, i32>(1), if round == 2 { 2 } else { 1 });
        let left: f64 = rows[0].get(2);
        assert_eq!(left > 600.0, round == 3, "{key}: {left} s are left");
        if round == 1 {
            let with_it = "SELECT count(*) FROM notes WHERE n = -1";
            assert_eq!(number(&mut admin, with_it), 1);
        }
        lost += 1 - admin
            .query_one("SELECT count(*) FROM notes WHERE n = $1", &[&round])
            .unwrap()
            .get::<_, i64>(0);

        // Its holder goes on with the token.
        let mut app = server.connect("shop", "app");
        assert_eq!(status(&mut app, &key, ""), "in_progress");
        complete(&mut app, &key, &json!(round), Some(token));
        assert_eq!(status(&mut app, &key, ""), "completed");
    }
    assert!(extended.is_some_and(|left| left > 8000.0), "{extended:?}");
    assert!(lost > 0, "no crash lost an ordinary asynchronous commit: the test proves nothing");
}
