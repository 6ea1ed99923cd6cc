//! Standbys and failover (design section 4, invariants 2 and 9): nothing is acquired on a standby; whatever had reached it
//! is there after promotion, record and business row together; what asynchronous replication loses, it loses together, too,
//! so that a retry runs once.

mod common;
mod lock_common;

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;

use common::*;
use idem_harness::{Server, eventually, rounds, sqlstate};
use lock_common::*;
use postgres::{Client, Error};
use serde_json::json;

const SETTINGS: [&str; 2] = ["fsync=on", "autovacuum=off"];

fn shop() -> Server {
    let server = Server::start(&SETTINGS);
    server.create_database("shop");
    run(
        &mut server.connect("shop", "postgres"),
        "CREATE TABLE payments (key text); GRANT ALL ON payments TO app;
         CREATE FUNCTION echo(r jsonb) RETURNS jsonb LANGUAGE sql RETURN r",
    );
    server
}

fn pay(client: &mut Client, key: &str) {
    run(client, "BEGIN");
    acquire(client, key, "");
    client.execute("INSERT INTO payments VALUES ($1)", &[&key]).unwrap();
    complete(client, key, &json!(key), None);
    run(client, "COMMIT");
}

fn payments(client: &mut Client, key: &str) -> i64 {
    client.query_one("SELECT count(*) FROM payments WHERE key = $1", &[&key]).unwrap().get(0)
}

fn state(client: &mut Client, key: &str) -> Option<String> {
    client.query_opt("SELECT state FROM idem_get($1)", &[&key]).unwrap().map(|row| row.get(0))
}

/// Waits until the standby has replayed all that the primary has written so far.
#[track_caller]
fn catch_up(primary: &Server, standby: &Server) {
    let lsn: String = primary
        .connect("shop", "postgres")
        .query_one("SELECT pg_current_wal_flush_lsn()::text", &[])
        .unwrap()
        .get(0);
    let mut reader = standby.connect("shop", "postgres");
    eventually("the standby has caught up", || {
        reader
            .query_one("SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", &[&lsn])
            .unwrap()
            .get(0)
    });
}

/// Cuts the standby off: from now on the primary's commits do not reach it.
#[track_caller]
fn cut_off(standby: &Server) {
    let mut admin = standby.connect("shop", "postgres");
    run(&mut admin, "ALTER SYSTEM SET primary_conninfo = ''");
    run(&mut admin, "SELECT pg_reload_conf()");
    eventually("nothing is received any more", || {
        number(&mut admin, "SELECT count(*) FROM pg_stat_wal_receiver") == 0
    });
}

#[track_caller]
fn promote(standby: &Server) {
    run(&mut standby.connect("shop", "postgres"), "SELECT pg_promote()");
}

#[test]
fn a_standby_acquires_nothing_and_shows_every_record() {
    let primary = shop();
    let mut app = primary.connect("shop", "app");
    pay(&mut app, "paid");
    acquire(&mut app, "leased", ", lease => '600s'");
    acquire(&mut app, "over", ", lease => '1us'");
    let grant = granted(&mut app, "lock_try('held', ttl => '600s')");
    // An open transaction: nobody sees anything of it.
    let mut open = primary.connect("shop", "app");
    run(&mut open, "BEGIN");
    acquire(&mut open, "open", "");
    complete(&mut open, "open", &json!(1), None);

    let standby = primary.standby(&[]);
    pay(&mut app, "paid later");
    catch_up(&primary, &standby);

    let mut reader = standby.connect("shop", "app");
    for (key, expected) in [
        ("paid", Some("completed")),
        ("paid later", Some("completed")),
        ("leased", Some("in_progress")),
        ("over", Some("abandoned")),
        ("open", None),
        ("absent", None),
    ] {
        assert_eq!(state(&mut reader, key).as_deref(), expected, "{key}");
    }
    let result: serde_json::Value =
        reader.query_one("SELECT result FROM idem_get('paid')", &[]).unwrap().get(0);
    assert_eq!(result, json!("paid"));

    // Not even a completed key, an own claim, or nothing at all is answered.
    let token = grant.token;
    for call in [
        "idem_begin('paid')".to_string(),
        "idem_begin('absent')".to_string(),
        "idem_begin('absent', lease => '1s')".to_string(),
        "idem_begin('leased', wait => '1s')".to_string(),
        "idem_complete('leased')".to_string(),
        format!("idem_complete('leased', token => '{token}')"),
        "idem_release('leased')".to_string(),
        format!("idem_release('leased', '{token}')"),
        format!("idem_extend('leased', '{token}')"),
        format!("idem_checkpoint('leased', '1', '{token}')"),
        "idem_run('paid', 'echo(jsonb)', '1')".to_string(),
        "idem_once('paid')".to_string(),
        "lock_try('held')".to_string(),
        "lock_try('free')".to_string(),
        "lock_acquire('free', wait => '1s')".to_string(),
        format!("lock_extend('held', '{token}')"),
        format!("lock_unlock('held', '{token}')"),
        format!("lock_guard('held', '{token}')"),
        "lock_try_xact('free')".to_string(),
        "lock_acquire_xact('free', wait => '1s')".to_string(),
    ] {
        let error = reader.batch_execute(&format!("SELECT * FROM {call}")).unwrap_err();
        assert_eq!(sqlstate(&error), "25006", "{call}: {error:?}");
    }
    let mut admin = standby.connect("shop", "postgres");
    let error = admin.batch_execute("SELECT idem_forget('paid')").unwrap_err();
    assert_eq!(sqlstate(&error), "25006", "{error:?}");
    assert_eq!(our_locks(&mut admin), 0);
    // Pure functions work.
    run(
        &mut reader,
        "SELECT idem_fingerprint('a'), idem_fingerprint_json('1'), idem_compose_key('a')",
    );
}

#[test]
fn promotion_with_claims_in_flight() {
    let primary = shop();
    let standby = primary.standby(&[]);
    let mut app = primary.connect("shop", "app");
    let token = acquire(&mut app, "leased", ", lease => '600s'");
    acquire(&mut app, "over", ", lease => '1us'");
    let grant = granted(&mut app, "lock_try('held', ttl => '600s')");
    let mut open = primary.connect("shop", "app");
    run(&mut open, "BEGIN; INSERT INTO payments VALUES ('open')");
    acquire(&mut open, "open", "");
    complete(&mut open, "open", &json!(1), None);
    granted(&mut open, "lock_try('open', ttl => '600s')");
    let mut extending = primary.connect("shop", "app");
    run(&mut extending, "BEGIN");
    extending.execute("SELECT idem_extend('leased', $1, '1us')", &[&token]).unwrap();
    run(&mut app, "BEGIN; INSERT INTO payments VALUES ('prepared')");
    acquire(&mut app, "prepared", "");
    complete(&mut app, "prepared", &json!(2), None);
    run(&mut app, "PREPARE TRANSACTION 'p'");
    catch_up(&primary, &standby);
    primary.kill9();
    promote(&standby);

    let (mut app, mut admin) =
        (standby.connect("shop", "app"), standby.connect("shop", "postgres"));
    // Only the prepared transaction's lock came along.
    assert_eq!(our_locks(&mut admin), 1);
    assert_eq!(status(&mut app, "prepared", ""), "in_progress");
    run(&mut app, "COMMIT PREPARED 'p'");
    assert_eq!(begin(&mut app, "prepared", "").result, Some(json!(2)));
    assert_eq!(payments(&mut app, "prepared"), 1);
    // The open transaction is gone, with its lock and its business row.
    assert_eq!(payments(&mut app, "open"), 0);
    pay(&mut app, "open");
    granted(&mut app, "lock_try('open')");
    // Leases hold, for who has the token.
    let told = begin(&mut app, "leased", "");
    assert_eq!(told.status, "in_progress");
    assert!(told.retry_after.is_some_and(|left| left > 300.0), "{told:?}");
    complete(&mut app, "leased", &json!(3), Some(token));
    let next = begin(&mut app, "over", ", lease => '600s'");
    assert_eq!((&*next.status, next.attempt), ("acquired", Some(2)));
    is_busy(&mut app, "lock_try('held')");
    assert_eq!(guard(&mut app, "held", grant.token), grant.fence);
    assert!(unlock(&mut app, "held", grant.token));
    assert!(granted(&mut app, "lock_try('held')").fence > grant.fence);
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn asynchronous_failover_loses_key_and_business_row_together() {
    let primary = shop();
    let standby = primary.standby(&[]);
    let mut app = primary.connect("shop", "app");
    pay(&mut app, "replicated");
    let kept = granted(&mut app, "lock_try('replicated', ttl => '1us')");
    catch_up(&primary, &standby);
    cut_off(&standby);
    // Acknowledged by the primary, and never sent.
    pay(&mut app, "lost");
    let token = acquire(&mut app, "leased", ", lease => '600s'");
    let lost = granted(&mut app, "lock_try('lost', ttl => '600s')");
    let again = granted(&mut app, "lock_try('replicated', ttl => '600s')");
    assert!(again.fence > kept.fence);
    primary.kill9();
    promote(&standby);

    let mut app = standby.connect("shop", "app");
    assert_eq!(status(&mut app, "replicated", ""), "completed");
    assert_eq!(payments(&mut app, "replicated"), 1);
    // Both or neither: here, neither. The client's retry pays, once.
    assert_eq!(payments(&mut app, "lost"), 0);
    assert_eq!(state(&mut app, "lost"), None);
    pay(&mut app, "lost");
    assert_eq!(status(&mut app, "lost", ""), "completed");
    assert_eq!(payments(&mut app, "lost"), 1);
    // A lost lease: another may hold the key now, and the old holder's completion is refused.
    let next = acquire(&mut app, "leased", ", lease => '600s'");
    let error = try_complete(&mut app, "leased", &json!(1), Some(token)).unwrap_err();
    assert_eq!(sqlstate(&error), "ID003", "{error:?}");
    complete(&mut app, "leased", &json!(2), Some(next));
    // Lost grants: excluded by nobody any more, but the next fences are higher all the same.
    for (name, last) in [("lost", lost), ("replicated", again)] {
        let next = granted(&mut app, &format!("lock_try('{name}', ttl => '600s')"));
        assert!(next.fence > last.fence, "{name}: {next:?} after {last:?}");
        let error = try_guard(&mut app, name, last.token).unwrap_err();
        assert_eq!(sqlstate(&error), "ID011", "{error:?}");
    }
}

/// What clients were told by a COMMIT that returned, so that two servers have it.
#[derive(Default)]
struct Told {
    paid: Mutex<HashSet<String>>,
    leased: Mutex<HashMap<String, i32>>,
}

const KEYS: u64 = 100; // a round

fn customer(server: &Server, round: u64, mut random: Random, told: &Told, stop: &AtomicBool) {
    let Ok(mut client) = try_connect(server.dir(), "shop", "app") else { return };
    let mut request = || -> Result<(), Error> {
        let n = random.below(KEYS);
        let key = format!("round {round} key {n}");
        let mut token = None;
        if n.is_multiple_of(3) {
            let begun = try_begin(&mut client, &key, ", lease => '200ms'")?;
            if begun.status != "acquired" {
                return Ok(());
            }
            token = begun.token;
            let attempt = begun.attempt.expect("acquired comes with an attempt");
            let mut leased = told.leased.lock().unwrap();
            let newest = leased.entry(key.clone()).or_insert(attempt);
            *newest = attempt.max(*newest);
        }
        let mut work = client.transaction()?;
        if token.is_none() && try_begin(&mut work, &key, "")?.status != "acquired" {
            return Ok(());
        }
        work.execute("INSERT INTO payments VALUES ($1)", &[&key])?;
        try_complete(&mut work, &key, &json!(key), token)?;
        work.commit()?;
        told.paid.lock().unwrap().insert(key);
        Ok(())
    };
    while !stop.load(Ordering::Relaxed) {
        match request() {
            Ok(()) => {}
            Err(error) if sqlstate(&error) == "ID003" => {}
            Err(error) if error.code().is_none() || sqlstate(&error).starts_with("57P") => return,
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn synchronous_failover_loses_nothing_that_was_acknowledged() {
    let mut random = Random::replayable();
    let mut primary = shop();
    for round in 0..rounds(1, 40) {
        let standby = primary.standby(&SETTINGS);
        let mut admin = primary.connect("shop", "postgres");
        run(&mut admin, "ALTER SYSTEM SET synchronous_standby_names = '*'");
        run(&mut admin, "SELECT pg_reload_conf()");
        eventually("the standby is synchronous", || {
            let synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
            number(&mut admin, synchronous) == 1
        });
        let (told, stop) = (Told::default(), AtomicBool::new(false));
        scope(|threads| {
            for _ in 0..6 {
                let random = Random::seeded(random.next());
                let (primary, told, stop) = (&primary, &told, &stop);
                threads.spawn(move || customer(primary, round, random, told, stop));
            }
            eventually("some are paid", || told.paid.lock().unwrap().len() > 20);
            std::thread::sleep(std::time::Duration::from_millis(random.below(100)));
            primary.kill9();
            stop.store(true, Ordering::Relaxed);
        });
        promote(&standby);

        let mut admin = standby.connect("shop", "postgres");
        run(&mut admin, "ALTER SYSTEM RESET synchronous_standby_names");
        run(&mut admin, "SELECT pg_reload_conf()");
        let keys: Vec<String> = (0..KEYS).map(|n| format!("round {round} key {n}")).collect();
        for key in &keys {
            let (paid, completed) =
                (payments(&mut admin, key), state(&mut admin, key).as_deref() == Some("completed"));
            assert!(paid == i64::from(completed), "{key}: {paid} payments, completed: {completed}");
            if told.paid.lock().unwrap().contains(key) {
                assert_eq!(paid, 1, "{key}: acknowledged, and lost");
            }
            if let Some(attempt) = told.leased.lock().unwrap().get(key) {
                let found: Option<i32> = admin
                    .query_opt("SELECT attempt FROM idem_get($1)", &[key])
                    .unwrap()
                    .map(|row| row.get(0));
                assert!(found.is_some_and(|found| found >= *attempt), "{key}: {attempt} {found:?}");
            }
        }
        assert_eq!(our_locks(&mut admin), 0);
        primary = standby; // of the next round; the old one is removed
    }
}

#[test]
fn a_logical_subscriber_reads_the_records() {
    let publisher = Server::start(&["wal_level=logical"]);
    publisher.create_database("shop");
    let mut admin = publisher.connect("shop", "postgres");
    run(&mut admin, "CREATE TABLE payments (key text); GRANT ALL ON payments TO app");
    let mut app = publisher.connect("shop", "app");
    pay(&mut app, "before");
    run(&mut admin, "CREATE PUBLICATION everything FOR ALL TABLES");

    let subscriber = Server::start(&[]);
    subscriber.create_database("shop");
    let mut reader = subscriber.connect("shop", "postgres");
    run(
        &mut reader,
        "CREATE TABLE payments (key text);
         DO $$ DECLARE t regclass; BEGIN
             FOR t IN SELECT objid::regclass FROM pg_depend JOIN pg_extension AS e ON e.oid = refobjid
                 JOIN pg_class AS c ON c.oid = objid
                 WHERE extname = 'idem' AND classid = 'pg_class'::regclass AND relkind = 'r'
             LOOP EXECUTE format('TRUNCATE %s', t); END LOOP;
         END $$",
    );
    run(
        &mut reader,
        &format!(
            "CREATE SUBSCRIPTION reader CONNECTION 'host={} dbname=shop user=postgres' PUBLICATION everything",
            publisher.dir()
        ),
    );
    let token = acquire(&mut app, "leased", ", lease => '600s'");
    pay(&mut app, "after");
    for (key, expected) in
        [("before", "completed"), ("after", "completed"), ("leased", "in_progress")]
    {
        eventually("the record arrives", || state(&mut reader, key).as_deref() == Some(expected));
    }
    complete(&mut app, "leased", &json!(1), Some(token));
    eventually("the completion arrives", || {
        state(&mut reader, "leased").as_deref() == Some("completed")
    });
    run(&mut admin, "SELECT idem_forget('before')");
    eventually("the removal arrives", || state(&mut reader, "before").is_none());
    eventually("the business rows are there", || payments(&mut reader, "after") == 1);
    assert_eq!(payments(&mut reader, "before"), 1);
}
