//! What the client-side tests share: the calls of idem, waiting in the background, what is seen from outside.
#![allow(dead_code)] // each file in tests/ is a program of its own and uses a part

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use idem_harness::eventually;
use postgres::{Client, Error, GenericClient, NoTls};
use serde_json::Value;
use uuid::Uuid;

/// A wait that no test sits out.
pub const LONG: &str = ", wait => '120s'";
/// From what ends a wait to the answer, at the most: far above what a busy machine needs, and below the ten seconds after
/// which PostgreSQL's timer for statistics wakes a sleeping backend anyhow.
pub const SOON: Duration = Duration::from_secs(5);

/// What `idem_begin` answered. A NULL status panics.
#[derive(Debug)]
pub struct Begun {
    pub status: String,
    pub token: Option<Uuid>,
    pub attempt: Option<i32>,
    pub result: Option<Value>,
    /// Seconds.
    pub retry_after: Option<f64>,
    /// Seconds until `expires_at`, at the moment of the answer.
    pub left: Option<f64>,
}

/// `options` follow the key, such as `, lease => '30s'`.
pub fn try_begin(
    client: &mut impl GenericClient,
    key: &str,
    options: &str,
) -> Result<Begun, Error> {
    // OFFSET 0 keeps the planner from calling the function once per column.
    let row = client.query_one(
        &format!(
            "SELECT status, token, attempt, result,
                    extract(epoch FROM retry_after)::float8 AS retry_after,
                    extract(epoch FROM expires_at - clock_timestamp())::float8 AS left
             FROM (SELECT * FROM idem_begin($1{options}) OFFSET 0) AS begun"
        ),
        &[&key],
    )?;
    Ok(Begun {
        status: row.get("status"),
        token: row.get("token"),
        attempt: row.get("attempt"),
        result: row.get("result"),
        retry_after: row.get("retry_after"),
        left: row.get("left"),
    })
}

#[track_caller]
pub fn begin(client: &mut impl GenericClient, key: &str, options: &str) -> Begun {
    try_begin(client, key, options).unwrap_or_else(|error| panic!("idem_begin: {error:?}"))
}

/// Begins and insists on getting the key; returns the token.
#[track_caller]
pub fn acquire(client: &mut impl GenericClient, key: &str, options: &str) -> Uuid {
    let begun = begin(client, key, options);
    assert_eq!(begun.status, "acquired", "{begun:?}");
    begun.token.expect("acquired comes with a token")
}

#[track_caller]
pub fn status(client: &mut impl GenericClient, key: &str, options: &str) -> String {
    begin(client, key, options).status
}

pub fn try_complete(
    client: &mut impl GenericClient,
    key: &str,
    result: &Value,
    token: Option<Uuid>,
) -> Result<(), Error> {
    client.execute("SELECT idem_complete($1, $2, token => $3)", &[&key, result, &token]).map(drop)
}

#[track_caller]
pub fn complete(client: &mut impl GenericClient, key: &str, result: &Value, token: Option<Uuid>) {
    try_complete(client, key, result, token)
        .unwrap_or_else(|error| panic!("idem_complete: {error:?}"));
}

#[track_caller]
pub fn release(client: &mut impl GenericClient, key: &str, token: Option<Uuid>) -> bool {
    client
        .query_one("SELECT idem_release($1, $2)", &[&key, &token])
        .unwrap_or_else(|error| panic!("idem_release: {error:?}"))
        .get(0)
}

#[track_caller]
pub fn run(client: &mut impl GenericClient, sql: &str) {
    client.batch_execute(sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

#[track_caller]
pub fn number(client: &mut impl GenericClient, sql: &str) -> i64 {
    client.query_one(sql, &[]).unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

pub fn pid(client: &mut Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0)
}

/// Whether the backend waits in the queue of a lock.
pub fn queues(admin: &mut Client, pid: i32) -> bool {
    admin
        .query_one("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)", &[&pid])
        .unwrap()
        .get(0)
}

/// Whether the backend sleeps until a lease ends.
pub fn sleeps(admin: &mut Client, pid: i32) -> bool {
    admin
        .query_one(
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Extension')",
            &[&pid],
        )
        .unwrap()
        .get(0)
}

/// How many locks of idem's tag space there are in the admin's database: held or waited for, by anybody. A client is told of an
/// error before its transaction has given its locks back, so this waits, for a second at the most, until no session works.
pub fn our_locks(admin: &mut Client) -> i64 {
    let working = "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
         AND state = 'active' AND wait_event IS NULL";
    for _ in 0..200 {
        if number(admin, working) == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    number(
        admin,
        "SELECT count(*) FROM pg_locks
         WHERE locktype = 'advisory' AND objsubid BETWEEN 16384 AND 32767
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
}

/// The locks of one backend, except for its transaction's own id, as `type mode granted`.
pub fn locks_of(admin: &mut Client, pid: i32) -> Vec<String> {
    admin
        .query(
            "SELECT format('%s %s %s', locktype, mode, granted) FROM pg_locks
             WHERE pid = $1 AND locktype <> 'virtualxid' ORDER BY 1",
            &[&pid],
        )
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect()
}

/// Whether the backend is there.
pub fn lives(admin: &mut Client, pid: i32) -> bool {
    admin
        .query_one("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", &[&pid])
        .unwrap()
        .get(0)
}

pub fn terminate(admin: &mut Client, pid: i32) {
    admin.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
    eventually("the terminated backend is gone", || !lives(admin, pid));
}

pub fn kill9(pid: i32) {
    signal("-9", pid);
}

pub fn signal(signal: &str, pid: i32) {
    let sent = std::process::Command::new("kill").args([signal, &pid.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "cannot send {signal} to {pid}");
}

/// A caller of `idem_begin` in a thread of its own.
pub struct Waiter {
    pub pid: i32,
    thread: JoinHandle<(Result<Begun, Error>, Client)>,
}

impl Waiter {
    pub fn start(mut client: Client, key: &str, options: &str) -> Waiter {
        let (key, options) = (key.to_string(), options.to_string());
        Waiter {
            pid: pid(&mut client),
            thread: std::thread::spawn(move || (try_begin(&mut client, &key, &options), client)),
        }
    }

    /// Starts it, and returns when it waits for an open transaction.
    #[track_caller]
    pub fn queueing(admin: &mut Client, client: Client, key: &str, options: &str) -> Waiter {
        let waiter = Self::start(client, key, options);
        eventually("the waiter queues for the lock", || queues(admin, waiter.pid));
        waiter
    }

    /// Starts it, and returns when it sleeps because of a lease.
    #[track_caller]
    pub fn sleeping(admin: &mut Client, client: Client, key: &str, options: &str) -> Waiter {
        let waiter = Self::start(client, key, options);
        eventually("the waiter sleeps", || sleeps(admin, waiter.pid));
        waiter
    }

    pub fn still_waits(&self) -> bool {
        !self.thread.is_finished()
    }

    /// What it was told, and its connection. To be called right after what ends the wait: panics if the waiter noticed only
    /// later.
    #[track_caller]
    pub fn end(self) -> (Result<Begun, Error>, Client) {
        let since = Instant::now();
        let outcome = self.thread.join().expect("the waiter does not panic");
        let took = since.elapsed();
        assert!(took < SOON, "the waiter was not woken: it took {took:?}");
        outcome
    }

    /// The same for one that got an answer.
    #[track_caller]
    pub fn answer(self) -> (Begun, Client) {
        let (answer, client) = self.end();
        (answer.unwrap_or_else(|error| panic!("the waiter failed: {error:?}")), client)
    }
}

/// Connects to a server that may be down.
pub fn try_connect(host: &str, database: &str, user: &str) -> Result<Client, Error> {
    postgres::Config::new()
        .host(host)
        .port(std::env::var("PGPORT").expect("PGPORT is set").parse().expect("a port"))
        .dbname(database)
        .user(user)
        .connect(NoTls)
}

/// Waits until a server that restarts after a crash lets somebody in.
#[track_caller]
pub fn connect_again(host: &str, database: &str, user: &str) -> Client {
    let mut client = None;
    eventually("the server is back", || {
        client = try_connect(host, database, user).ok();
        client.is_some()
    });
    client.expect("just connected")
}

/// Random numbers (xorshift64*); the seed is printed, which is shown when the test fails.
pub struct Random(u64);

impl Random {
    pub fn new() -> Random {
        let time =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
        Self::seeded(time.as_nanos() as u64 ^ (u64::from(std::process::id()) << 40))
    }

    pub fn seeded(seed: u64) -> Random {
        println!("random seed: {seed}");
        Self::quiet(seed)
    }

    pub fn quiet(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// From PROVE_SEED, which repeats the choices of an earlier run, or from the clock.
    pub fn replayable() -> Random {
        match std::env::var("PROVE_SEED") {
            Ok(seed) => Self::seeded(seed.parse().expect("PROVE_SEED is a number")),
            Err(_) => Self::new(),
        }
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| (self.next() >> 32) as u8).collect()
    }
}
