//! Crashes at random moments (design section 4, invariants 1, 2, 5, 8): clients transfer money under keys, with and without
//! leases, and under locks with fences, while backends and the whole server are killed, stopped, cancelled, terminated.
//! After each recovery: completed if and only if the transfer is there, no key transferred twice, no acknowledged transfer
//! lost (with synchronous_commit = on), no lock left, no fence lower than one that was handed out.
//!
//! The choices of a round follow from its seed, which a failing test shows: PROVE_SEED=n repeats them (which requests, which
//! deaths, in which order, after how long). How the operating system interleaves the clients is not repeated, so a rare
//! failure may need several runs. `tests/crash.rs` has the fixed cases.

mod common;
mod lock_common;

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use common::*;
use idem_harness::{Server, eventually, rounds, sqlstate};
use lock_common::*;
use postgres::{Client, Error};
use serde_json::json;

/// Nobody but a commit writes WAL in time.
const SETTINGS: [&str; 4] =
    ["fsync=on", "wal_writer_delay=10s", "autovacuum=off", "deadlock_timeout=60s"];
const CLIENTS: u64 = 6;
const KEYS: u64 = 120; // a round
const ACCOUNTS: u64 = 8;
const LOCKS: u64 = 3;

#[derive(Clone, Copy, Debug)]
enum Death {
    KillBackend,
    KillServer,
    StopImmediate,
    StopFast,
    Cancel,
    Terminate,
}

const DEATHS: [Death; 6] = [
    Death::KillBackend,
    Death::KillServer,
    Death::StopImmediate,
    Death::StopFast,
    Death::Cancel,
    Death::Terminate,
];

/// What clients were told by a COMMIT that returned, and what must therefore be so ever after.
#[derive(Default)]
struct Told {
    transferred: Mutex<HashSet<String>>,
    /// The latest attempt of a leased claim; a lease is durable with any synchronous_commit.
    attempts: Mutex<HashMap<String, i32>>,
    /// By name, the highest fence; a lease lock is durable with any synchronous_commit.
    fences: Mutex<HashMap<String, i64>>,
    /// How many calls were cut off or failed because of a death, and how many went through.
    cut: AtomicU64,
    served: AtomicU64,
}

fn transfer_rows(client: &mut postgres::Transaction, key: &str, n: u64) -> Result<(), Error> {
    let (from, to) = ((n % ACCOUNTS) as i32, ((n + 1 + n / ACCOUNTS) % ACCOUNTS) as i32);
    client.execute("INSERT INTO transfers VALUES ($1)", &[&key])?;
    // In the order of ids: transfers never deadlock.
    for id in [from.min(to), from.max(to)] {
        let change = i64::from(id == to) - i64::from(id == from);
        client
            .execute("UPDATE accounts SET balance = balance + $1 WHERE id = $2", &[&change, &id])?;
    }
    Ok(())
}

/// One transfer under its key; says whether the key is completed.
fn transfer(client: &mut Client, key: &str, n: u64, told: &Told) -> Result<bool, Error> {
    let leased = n.is_multiple_of(3);
    let mut token = None;
    if leased {
        let begun = try_begin(client, key, ", lease => '300ms'")?;
        if begun.status != "acquired" {
            return Ok(begun.status == "completed");
        }
        token = begun.token;
        let attempt = begun.attempt.expect("acquired comes with an attempt");
        let mut attempts = told.attempts.lock().unwrap();
        let newest = attempts.entry(key.to_string()).or_insert(attempt);
        *newest = attempt.max(*newest);
    }
    let mut work = client.transaction()?;
    if !leased {
        let begun = try_begin(&mut work, key, "")?;
        if begun.status != "acquired" {
            return Ok(begun.status == "completed");
        }
    }
    transfer_rows(&mut work, key, n)?;
    try_complete(&mut work, key, &json!({ "key": key }), token)?;
    work.commit()?;
    told.transferred.lock().unwrap().insert(key.to_string());
    Ok(true)
}

/// Takes a lock, works under its guard, gives it back (or dies with it: the lease ends soon).
fn work_under_lock(client: &mut Client, name: &str, told: &Told) -> Result<(), Error> {
    let before = told.fences.lock().unwrap().get(name).copied().unwrap_or(0);
    let taken =
        try_take(client, &format!("lock_acquire('{name}', wait => '50ms', ttl => '200ms')"))?;
    if !taken.acquired {
        return Ok(());
    }
    let (token, fence) = (taken.token.expect("a token"), taken.fence.expect("a fence"));
    assert!(fence > before, "{name}: fence {fence} after {before}");
    {
        let mut fences = told.fences.lock().unwrap();
        let highest = fences.entry(name.to_string()).or_insert(0);
        *highest = fence.max(*highest);
    }
    let mut work = client.transaction()?;
    assert_eq!(try_guard(&mut work, name, token)?, fence);
    // What a resource outside the database would do: refuse whoever comes with a lower fence than it has seen.
    let row = work.query_one("SELECT fence FROM resource WHERE name = $1", &[&name])?;
    let seen: i64 = row.get(0);
    assert!(seen < fence, "{name}: the resource has seen {seen}, now {fence} comes");
    work.execute("UPDATE resource SET fence = $2 WHERE name = $1", &[&name, &fence])?;
    work.commit()?;
    try_unlock(client, name, token)?;
    Ok(())
}

fn key(round: u64, n: u64) -> String {
    format!("round {round} key {n}")
}

/// Sends random requests until told to stop; connects again when cut off.
fn customer(
    server: &Server,
    synchronous: &str,
    round: u64,
    mut random: Random,
    told: &Told,
    stop: &AtomicBool,
) {
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut client) = try_connect(server.dir(), "bank", "app") else {
            sleep(Duration::from_millis(10));
            continue;
        };
        if client.batch_execute(&format!("SET synchronous_commit = {synchronous}")).is_err() {
            continue;
        }
        while !stop.load(Ordering::Relaxed) {
            let outcome = if random.below(4) == 0 {
                work_under_lock(&mut client, &format!("lock {}", random.below(LOCKS)), told)
            } else {
                let n = random.below(KEYS);
                transfer(&mut client, &key(round, n), n, told).map(drop)
            };
            match outcome.as_ref().map_err(sqlstate) {
                Ok(()) => drop(told.served.fetch_add(1, Ordering::Relaxed)),
                Err("ID003" | "ID011") => {} // the lease ran out, somebody took over
                Err("57014") => drop(told.cut.fetch_add(1, Ordering::Relaxed)),
                // Cut off: told so, or not even that.
                Err("57P01" | "57P02" | "57P03" | "") => {
                    told.cut.fetch_add(1, Ordering::Relaxed);
                    break;
                }
                Err(_) => panic!("{outcome:?}"),
            }
        }
    }
}

/// Purges all the time, so that segments of records turn under the clients: each call has another idea of how long records live.
fn purger(server: &Server, stop: &AtomicBool) {
    let Ok(mut admin) = try_connect(server.dir(), "bank", "postgres") else { return };
    for ttl in ["1h", "100h"].iter().cycle() {
        let purged = admin.batch_execute(&format!("SET idem.ttl = '{ttl}'; SELECT idem_purge()"));
        if purged.is_err() || stop.load(Ordering::Relaxed) {
            return; // it is struck like everybody
        }
    }
}

/// A process of a client that is in the middle of a transaction now, if there is one.
fn victim(admin: &mut Client, random: &mut Random) -> Option<i32> {
    let rows = admin
        .query(
            "SELECT pid FROM pg_stat_activity WHERE usename = 'app' AND xact_start IS NOT NULL ORDER BY pid",
            &[],
        )
        .ok()?;
    (!rows.is_empty()).then(|| random.pick(&rows).get(0))
}

fn strike(server: &Server, death: Death, random: &mut Random) {
    let mut admin = connect_again(server.dir(), "bank", "postgres");
    match death {
        Death::KillServer => server.kill9(),
        Death::StopImmediate => server.stop("immediate"),
        Death::StopFast => server.stop("fast"),
        Death::KillBackend => {
            if let Some(pid) = victim(&mut admin, random) {
                kill9(pid);
                // All others are thrown out, and the server recovers.
                eventually("the server takes note", || admin.batch_execute("SELECT 1").is_err());
            }
        }
        Death::Cancel | Death::Terminate => {
            let function = match death {
                Death::Cancel => "pg_cancel_backend",
                _ => "pg_terminate_backend",
            };
            for _ in 0..5 {
                if let Some(pid) = victim(&mut admin, random) {
                    admin.execute(&format!("SELECT {function}($1)"), &[&pid]).unwrap();
                }
            }
        }
    }
    if matches!(death, Death::KillServer | Death::StopImmediate | Death::StopFast) {
        server.start_again();
    }
}

/// What the keys of the round say, next to what the business tables say.
#[track_caller]
fn judge(server: &Server, synchronous: &str, round: u64, told: &Told) {
    let mut admin = connect_again(server.dir(), "bank", "postgres");
    let keys: Vec<String> = (0..KEYS).map(|n| key(round, n)).collect();
    let wrong: Vec<String> = admin
        .query(
            "SELECT format('%s: %s, result %s, %s transfers', k, r.state, r.result, t.n)
             FROM unnest($1::text[]) AS k
             LEFT JOIN LATERAL idem_get(k) AS r ON true
             CROSS JOIN LATERAL (SELECT count(*) AS n FROM transfers AS t WHERE t.key = k) AS t
             WHERE (r.state IS NOT DISTINCT FROM 'completed') <> (t.n = 1) OR t.n > 1
                 OR r.result IS DISTINCT FROM CASE WHEN t.n = 1 THEN jsonb_build_object('key', k) END",
            &[&keys],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert!(wrong.is_empty(), "completed if and only if transferred, once: {wrong:#?}");
    assert_eq!(number(&mut admin, "SELECT sum(balance)::bigint FROM accounts"), 0);

    let there: HashSet<String> = admin
        .query("SELECT key FROM transfers", &[])
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    if synchronous == "on" {
        let transferred = told.transferred.lock().unwrap();
        let lost: Vec<_> = transferred.difference(&there).collect();
        assert!(lost.is_empty(), "acknowledged, and lost: {lost:?}");
    }
    for (key, attempt) in told.attempts.lock().unwrap().iter() {
        let found: Option<i32> = admin
            .query_opt("SELECT attempt FROM idem_get($1)", &[key])
            .unwrap()
            .map(|row| row.get(0));
        assert!(
            found.is_some_and(|found| found >= *attempt),
            "{key} was leased as attempt {attempt}; found {found:?}"
        );
    }
    eventually("no lock of ours is left", || our_locks(&mut admin) == 0);
}

/// Every request of the round is sent again until it is answered, and each lock is taken once more.
fn settle(server: &Server, round: u64, told: &Told) {
    let mut app = connect_again(server.dir(), "bank", "app");
    for n in 0..KEYS {
        eventually("the retry is answered", || {
            transfer(&mut app, &key(round, n), n, told).unwrap()
        });
    }
    for n in 0..LOCKS {
        let name = format!("lock {n}");
        let next = granted(&mut app, &format!("lock_acquire('{name}', wait => '10s')"));
        let highest = told.fences.lock().unwrap().get(&name).copied().unwrap_or(0);
        assert!(next.fence > highest, "{name}: {next:?} after {highest}");
        assert!(unlock(&mut app, &name, next.token));
        told.fences.lock().unwrap().insert(name, next.fence);
    }
    let mut admin = connect_again(server.dir(), "bank", "postgres");
    let found = admin
        .query_one(
            "SELECT count(*) FROM transfers WHERE key LIKE $1",
            &[&format!("round {round} %")],
        )
        .unwrap();
    assert_eq!(found.get::<_, i64>(0), KEYS as i64);
}

fn crashes(synchronous: &str) {
    let server = Server::start(&SETTINGS);
    server.create_database("bank");
    run(
        &mut server.connect("bank", "postgres"),
        &format!(
            "CREATE TABLE transfers (key text);
             CREATE TABLE accounts (id int PRIMARY KEY, balance bigint NOT NULL);
             INSERT INTO accounts SELECT n, 0 FROM generate_series(0, {ACCOUNTS} - 1) AS n;
             CREATE TABLE resource (name text PRIMARY KEY, fence bigint NOT NULL);
             INSERT INTO resource SELECT 'lock ' || n, 0 FROM generate_series(0, {LOCKS} - 1) AS n;
             GRANT ALL ON transfers, accounts, resource TO app;
             CHECKPOINT"
        ),
    );
    let mut seeds = Random::replayable();
    let mut told = Told::default();
    let mut deaths = HashMap::new();
    let (mut cut, mut served) = (0, 0);
    for round in 0..rounds(6, 200) {
        let mut random = Random::seeded(seeds.next());
        // Each kind of death once, then at random.
        let death = *DEATHS.get(round as usize).unwrap_or_else(|| random.pick(&DEATHS));
        let after = Duration::from_millis(20 + random.below(180));
        println!("round {round}: {death:?} after {after:?}");
        let stop = AtomicBool::new(false);
        scope(|threads| {
            for _ in 0..CLIENTS {
                let (server, told, stop) = (&server, &told, &stop);
                let random = Random::seeded(random.next());
                threads.spawn(move || customer(server, synchronous, round, random, told, stop));
            }
            threads.spawn(|| purger(&server, &stop));
            sleep(after);
            let struck = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                strike(&server, death, &mut random);
            }));
            stop.store(true, Ordering::Relaxed); // also when it failed, else the clients never end
            struck.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
        judge(&server, synchronous, round, &told);
        settle(&server, round, &told);
        judge(&server, "on", round, &Told::default());
        *deaths.entry(format!("{death:?}")).or_insert(0) += 1;
        cut += told.cut.load(Ordering::Relaxed);
        served += told.served.load(Ordering::Relaxed);
        // The next round's keys are others; the fences are the same names for ever.
        told = Told { fences: told.fences, ..Told::default() };
    }
    println!("{deaths:?}; {served} requests served, {cut} cut off");
    assert!(served > 0 && cut > 0, "{served} served, {cut} cut off: the test proves nothing");
}

#[test]
fn nothing_is_lost_or_done_twice_whatever_dies() {
    crashes("on");
}

#[test]
fn nothing_is_half_done_or_done_twice_with_synchronous_commit_off() {
    crashes("off");
}
