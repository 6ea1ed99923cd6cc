//! Many clients want one lock (issue 3): no two ever hold it at once, while some of them are killed, some stall past their
//! lease, some extend it and some leave it to run out. Shown by the clock of each hold, by the rows that guarded
//! transactions wrote, by a counter that would lose an update, and by the fences.

mod common;
mod lock_common;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use common::*;
use idem_harness::{TestDb, sqlstate};
use lock_common::*;
use postgres::{Client, Error};

const CONNECTIONS: usize = 32;
const NAME: &str = "hot";
const NOW: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

/// A stretch of time in which a client could say that it held the lock, in the server's microseconds.
#[derive(Clone, Copy, Debug)]
struct Hold {
    fence: i64,
    from: i64,
    until: i64,
}

#[derive(Default)]
struct Seen {
    /// What clients were granted: COMMIT returned.
    grants: Mutex<Vec<Grant>>,
    holds: Mutex<Vec<Hold>>,
    guarded: AtomicU64,
    lost: AtomicU64,
    unlocked: AtomicU64,
    killed: AtomicU64,
    stop: AtomicBool,
}

/// Takes the lock once and works under it.
fn work(client: &mut Client, random: &mut Random, seen: &Seen) -> Result<(), Error> {
    // Some leases end while their holder works.
    let ttl = ["4ms", "20ms", "60ms", "200ms"][random.below(4) as usize];
    let taken = try_take(
        client,
        &format!("lock_acquire('{NAME}', wait => '2s', ttl => '{ttl}', holder => 'worker')"),
    )?;
    if !taken.acquired {
        return Ok(());
    }
    let grant = Grant { token: taken.token.unwrap(), fence: taken.fence.unwrap() };
    seen.grants.lock().unwrap().push(grant);
    let mut lease_end = taken.expires_at.unwrap();
    let from: i64 = client.query_one(NOW, &[])?.get(0);

    if random.below(3) == 0 {
        sleep(Duration::from_millis(random.below(30)));
    }
    if random.below(3) == 0 {
        match try_extend(client, NAME, grant.token, "30ms") {
            Ok(end) => lease_end = end,
            Err(error) if sqlstate(&error) == "ID011" => {
                seen.lost.fetch_add(1, Relaxed);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }

    let mut guarded = client.transaction()?;
    match try_guard(&mut guarded, NAME, grant.token) {
        Ok(fence) => {
            assert_eq!(fence, grant.fence);
            let start: i64 = guarded.query_one(NOW, &[])?.get(0);
            let count: i64 = guarded.query_one("SELECT n FROM counter", &[])?.get(0);
            if random.below(4) == 0 {
                sleep(Duration::from_millis(random.below(25)));
            }
            guarded.execute("UPDATE counter SET n = $1", &[&(count + 1)])?;
            guarded.execute(
                &format!("INSERT INTO work (fence, started, ended) VALUES ($1, $2, ({NOW}))"),
                &[&fence, &start],
            )?;
            guarded.commit()?;
            seen.guarded.fetch_add(1, Relaxed);
        }
        Err(error) if sqlstate(&error) == "ID011" => {
            seen.lost.fetch_add(1, Relaxed);
            return Ok(());
        }
        Err(error) => return Err(error),
    }

    let until = client.query_one(NOW, &[])?.get::<_, i64>(0).min(lease_end);
    if from < until {
        seen.holds.lock().unwrap().push(Hold { fence: grant.fence, from, until });
    }
    // One in four is left to run out.
    if random.below(4) > 0 && try_unlock(client, NAME, grant.token)? {
        seen.unlocked.fetch_add(1, Relaxed);
    }
    Ok(())
}

fn worker(db: &TestDb, mut random: Random, seen: &Seen) {
    while !seen.stop.load(Relaxed) {
        let mut client = db.app();
        while !seen.stop.load(Relaxed) {
            match work(&mut client, &mut random, seen) {
                Ok(()) => {}
                // Cut off: told so, or not even that.
                Err(error) if sqlstate(&error) == "57P01" || error.code().is_none() => break,
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

/// Terminates a random worker again and again, and stops all when enough has happened.
fn killer(db: &TestDb, seen: &Seen) {
    let mut admin = db.admin();
    let begun = Instant::now();
    let enough = || {
        seen.grants.lock().unwrap().len() >= 300
            && seen.guarded.load(Relaxed) >= 150
            && seen.unlocked.load(Relaxed) >= 100
            && seen.lost.load(Relaxed) >= 20
            && seen.killed.load(Relaxed) >= 30
    };
    while begun.elapsed() < Duration::from_secs(60) && !enough() {
        sleep(Duration::from_millis(100));
        // Whoever is at work, rather than one of those who wait.
        let killed = admin
            .query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE usename = 'app' AND datname = current_database()
                 ORDER BY wait_event_type IN ('Extension', 'Lock') AND random() < 0.9, random() LIMIT 1",
                &[],
            )
            .unwrap();
        seen.killed.fetch_add(killed.len() as u64, Relaxed);
    }
    let happened = enough();
    seen.stop.store(true, Relaxed);
    assert!(
        happened,
        "too little happened: {} grants, guarded {:?}, unlocked {:?}, lost {:?}, killed {:?}",
        seen.grants.lock().unwrap().len(),
        seen.guarded,
        seen.unlocked,
        seen.lost,
        seen.killed
    );
}

#[test]
fn no_two_of_32_clients_ever_hold_the_lock_at_once() {
    let db = TestDb::new();
    let mut admin = db.admin();
    run(
        &mut admin,
        "CREATE TABLE counter (n bigint); INSERT INTO counter VALUES (0);
         CREATE TABLE work (n bigserial, fence bigint, started bigint, ended bigint);
         GRANT SELECT, UPDATE ON counter TO app; GRANT INSERT ON work TO app; GRANT USAGE ON SEQUENCE work_n_seq TO app",
    );
    let seen = Seen::default();
    let mut random = Random::new();
    scope(|threads| {
        for _ in 0..CONNECTIONS {
            let (db, seen) = (&db, &seen);
            let random = Random::seeded(random.next());
            threads.spawn(move || worker(db, random, seen));
        }
        killer(&db, &seen);
    });

    // Each grant that a client knows of has a fence and a token of its own.
    let grants = seen.grants.into_inner().unwrap();
    let fences: HashSet<i64> = grants.iter().map(|grant| grant.fence).collect();
    let tokens: HashSet<_> = grants.iter().map(|grant| grant.token).collect();
    assert_eq!((fences.len(), tokens.len()), (grants.len(), grants.len()));

    // Guarded transactions, in the order in which they wrote their row: rising fences, no overlap, no lost update.
    let rows = admin.query("SELECT fence, started, ended FROM work ORDER BY n", &[]).unwrap();
    let guarded: Vec<Hold> = rows
        .iter()
        .map(|row| Hold { fence: row.get(0), from: row.get(1), until: row.get(2) })
        .collect();
    for pair in guarded.windows(2) {
        assert!(pair[0].fence < pair[1].fence, "fences fall: {pair:?}");
    }
    assert!(guarded.len() as u64 >= seen.guarded.load(Relaxed), "a committed row is lost");
    assert_eq!(number(&mut admin, "SELECT n FROM counter"), guarded.len() as i64, "a lost update");

    // All stretches of time in which somebody held it, in the order of the fences.
    let mut all = seen.holds.into_inner().unwrap();
    assert!(all.len() > 50, "only {} holds were timed", all.len());
    all.extend(guarded);
    all.sort_by_key(|hold| hold.fence);
    let mut last = all[0];
    for hold in &all[1..] {
        if hold.fence != last.fence {
            assert!(last.until <= hold.from, "two held it at once: {last:?} and {hold:?}");
        }
        if hold.until > last.until || hold.fence != last.fence {
            last = *hold;
        }
    }

    // Nothing is left but one row, whose fence is the highest.
    assert_eq!(our_locks(&mut admin), 0);
    let row = admin.query_one("SELECT count(*), max(fence) FROM idem_locks", &[]).unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
    assert!(row.get::<_, i64>(1) >= *fences.iter().max().unwrap());
    let next = granted(&mut db.app(), &format!("lock_acquire('{NAME}', wait => '30s')"));
    assert!(next.fence > *fences.iter().max().unwrap());
}

#[test]
fn of_many_who_try_at_once_exactly_one_gets_it() {
    let db = TestDb::new();
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|_| db.app()).collect();
    for round in 0..20 {
        // Every second time there is an expired lease to take over.
        let name = format!("round {round}");
        if round % 2 == 1 {
            granted(&mut clients[0], &format!("lock_try('{name}', ttl => '1us')"));
        }
        let barrier = std::sync::Barrier::new(clients.len());
        let winners: Vec<Grant> = scope(|threads| {
            let tries: Vec<_> = clients
                .iter_mut()
                .map(|client| {
                    let (barrier, name) = (&barrier, &name);
                    threads.spawn(move || {
                        barrier.wait();
                        take(client, &format!("lock_try('{name}', ttl => '600s')"))
                    })
                })
                .collect();
            tries
                .into_iter()
                .map(|one| one.join().expect("no panic"))
                .filter(|taken| taken.acquired)
                .map(|taken| Grant { token: taken.token.unwrap(), fence: taken.fence.unwrap() })
                .collect()
        });
        assert_eq!(winners.len(), 1, "{winners:?}");
        assert_eq!(guard(&mut clients[0], &name, winners[0].token), winners[0].fence);
    }
    assert_eq!(our_locks(&mut db.admin()), 0);
}
