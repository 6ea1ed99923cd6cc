//! What the client-side tests of locks share: the calls, and waiting for a lock in the background.
#![allow(dead_code)] // each file in tests/ is a program of its own and uses a part

use std::thread::JoinHandle;
use std::time::Instant;

use idem_harness::eventually;
use postgres::{CancelToken, Client, Error, GenericClient};
use uuid::Uuid;

use crate::common::{SOON, pid, queues, sleeps};

/// What `lock_try` or `lock_acquire` answered; of `lock_try_xact` and `lock_acquire_xact` only `acquired`.
#[derive(Debug)]
pub struct Taken {
    pub acquired: bool,
    pub token: Option<Uuid>,
    pub fence: Option<i64>,
    pub held_by: Option<String>,
    /// Seconds.
    pub retry_after: Option<f64>,
    /// Seconds until `expires_at`, at the moment of the answer.
    pub left: Option<f64>,
    /// `expires_at`, in microseconds.
    pub expires_at: Option<i64>,
}

/// Takes a lock: `call` is for instance `lock_try('n', ttl => '1s')`.
pub fn try_take(client: &mut impl GenericClient, call: &str) -> Result<Taken, Error> {
    let row = client.query_one(
        &format!(
            "SELECT acquired, (answer->>'token')::uuid AS token, (answer->>'fence')::bigint AS fence,
                    answer->>'held_by' AS held_by,
                    extract(epoch FROM (answer->>'retry_after')::interval)::float8 AS retry_after,
                    extract(epoch FROM (answer->>'expires_at')::timestamptz - clock_timestamp())::float8 AS left,
                    (extract(epoch FROM (answer->>'expires_at')::timestamptz) * 1000000)::bigint AS expires_at
             FROM (SELECT acquired, to_jsonb(t) AS answer FROM {call} AS t (acquired) OFFSET 0) AS taken"
        ),
        &[],
    )?;
    Ok(Taken {
        acquired: row.get("acquired"),
        token: row.get("token"),
        fence: row.get("fence"),
        held_by: row.get("held_by"),
        retry_after: row.get("retry_after"),
        left: row.get("left"),
        expires_at: row.get("expires_at"),
    })
}

#[track_caller]
pub fn take(client: &mut impl GenericClient, call: &str) -> Taken {
    try_take(client, call).unwrap_or_else(|error| panic!("{call}: {error:?}"))
}

/// A lock that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    pub token: Uuid,
    pub fence: i64,
}

/// Takes a lock and insists on getting it.
#[track_caller]
pub fn granted(client: &mut impl GenericClient, call: &str) -> Grant {
    let taken = take(client, call);
    assert!(taken.acquired, "{call}: {taken:?}");
    Grant {
        token: taken.token.expect("acquired comes with a token"),
        fence: taken.fence.expect("acquired comes with a fence"),
    }
}

#[track_caller]
pub fn is_busy(client: &mut impl GenericClient, call: &str) -> Taken {
    let taken = take(client, call);
    assert!(!taken.acquired, "{call}: {taken:?}");
    assert!(taken.token.is_none() && taken.fence.is_none(), "{call}: {taken:?}");
    taken
}

pub fn try_guard(client: &mut impl GenericClient, name: &str, token: Uuid) -> Result<i64, Error> {
    client.query_one("SELECT lock_guard($1, $2)", &[&name, &token]).map(|row| row.get(0))
}

#[track_caller]
pub fn guard(client: &mut impl GenericClient, name: &str, token: Uuid) -> i64 {
    try_guard(client, name, token).unwrap_or_else(|error| panic!("lock_guard: {error:?}"))
}

/// Extends the lease; returns its end in microseconds.
pub fn try_extend(
    client: &mut impl GenericClient,
    name: &str,
    token: Uuid,
    ttl: &str,
) -> Result<i64, Error> {
    client
        .query_one(
            "SELECT (extract(epoch FROM lock_extend($1, $2, ttl => $3::text::interval)) * 1000000)::bigint",
            &[&name, &token, &ttl],
        )
        .map(|row| row.get(0))
}

#[track_caller]
pub fn extend(client: &mut impl GenericClient, name: &str, token: Uuid, ttl: &str) -> i64 {
    try_extend(client, name, token, ttl).unwrap_or_else(|error| panic!("lock_extend: {error:?}"))
}

pub fn try_unlock(client: &mut impl GenericClient, name: &str, token: Uuid) -> Result<bool, Error> {
    client.query_one("SELECT lock_unlock($1, $2)", &[&name, &token]).map(|row| row.get(0))
}

#[track_caller]
pub fn unlock(client: &mut impl GenericClient, name: &str, token: Uuid) -> bool {
    try_unlock(client, name, token).unwrap_or_else(|error| panic!("lock_unlock: {error:?}"))
}

/// Somebody who waits for a lock in a thread of its own.
pub struct LockWaiter {
    pub pid: i32,
    pub cancel: CancelToken,
    thread: JoinHandle<(Result<Taken, Error>, Client)>,
}

impl LockWaiter {
    pub fn start(mut client: Client, call: &str) -> LockWaiter {
        let call = call.to_string();
        LockWaiter {
            pid: pid(&mut client),
            cancel: client.cancel_token(),
            thread: std::thread::spawn(move || (try_take(&mut client, &call), client)),
        }
    }

    /// Starts it, and returns when it waits for an open transaction.
    #[track_caller]
    pub fn queueing(admin: &mut Client, client: Client, call: &str) -> LockWaiter {
        let waiter = Self::start(client, call);
        eventually("the waiter queues for the lock", || queues(admin, waiter.pid));
        waiter
    }

    /// Starts it, and returns when it sleeps because of a lease.
    #[track_caller]
    pub fn sleeping(admin: &mut Client, client: Client, call: &str) -> LockWaiter {
        let waiter = Self::start(client, call);
        eventually("the waiter sleeps", || sleeps(admin, waiter.pid));
        waiter
    }

    pub fn still_waits(&self) -> bool {
        !self.thread.is_finished()
    }

    /// What it was told, and its connection. To be called right after what ends the wait: panics if the waiter noticed only
    /// later.
    #[track_caller]
    pub fn end(self) -> (Result<Taken, Error>, Client) {
        let since = Instant::now();
        let outcome = self.thread.join().expect("the waiter does not panic");
        let took = since.elapsed();
        assert!(took < SOON, "the waiter was not woken: it took {took:?}");
        outcome
    }

    /// The same for one that got the lock.
    #[track_caller]
    pub fn acquired(self) -> (Taken, Client) {
        let (answer, client) = self.end();
        let answer = answer.unwrap_or_else(|error| panic!("the waiter failed: {error:?}"));
        assert!(answer.acquired, "{answer:?}");
        (answer, client)
    }
}
