//! Linearizability: many clients begin, complete, release, extend, take over and forget a few keys, take, extend, guard and
//! unlock a few locks, all at once. What they called, when, and what they were told is recorded, and a checker looks for an
//! order of the calls, each between its call and its answer, in which one client alone would have been told the same.
//!
//! Time stands still in the model: leases are an hour long, or over at once (1 microsecond), and so are results.
//! The same with an administrator at work: purging, so that segments turn and are emptied; rewriting tables and indexes.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::scope;

use common::*;
use idem_harness::{TestDb, rounds, sqlstate};
use postgres::{Client, Error};
use todc_utils::linearizability::WGLChecker;
use todc_utils::linearizability::history::Action;
use todc_utils::{History, Specification};
use uuid::Uuid;

/// One call with its answer.
#[derive(Clone, Debug, PartialEq)]
enum Key {
    /// On a lease, which is over at once if not `long`: the token and attempt, or who has it.
    Begin {
        long: bool,
        told: Begun,
    },
    /// In a transaction, then completed: the same, with the result that it stores, for an hour or not at all.
    Run {
        result: i64,
        long: bool,
        told: Begun,
    },
    /// In a transaction that rolls back.
    Undo {
        told: Begun,
    },
    /// `ok` is whether it was not refused with ID003.
    Complete {
        token: Uuid,
        result: i64,
        long: bool,
        ok: bool,
    },
    Release {
        token: Uuid,
        ok: bool,
    },
    Extend {
        token: Uuid,
        long: bool,
        ok: bool,
    },
    Forget {
        ok: bool,
    },
    Get {
        told: Got,
    },
}

#[derive(Clone, Debug, PartialEq)]
enum Begun {
    Acquired {
        token: Uuid,
        attempt: i32,
    },
    Completed {
        result: i64,
    },
    /// On a lease that has an end.
    InProgress,
    /// By an open transaction: there must be one, which is not for the model to say.
    InTransaction,
    Abandoned,
}

#[derive(Clone, Debug, PartialEq)]
enum Got {
    Nothing,
    InProgress { attempt: i32 },
    Abandoned { attempt: i32 },
    Completed { result: i64 },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Record {
    Absent,
    Claimed { token: Uuid, attempt: i32, long: bool },
    Completed { token: Uuid, result: i64 },
}

/// With purges, an abandoned claim may be gone at any time.
struct Keys<const PURGED: bool>;

impl<const PURGED: bool> Specification for Keys<PURGED> {
    type State = Record;
    type Operation = Key;

    fn init() -> Record {
        Record::Absent
    }

    fn apply(operation: &Key, before: &Record) -> (bool, Record) {
        let mut after = next(operation, before);
        if after.is_none() && PURGED && matches!(before, Record::Claimed { long: false, .. }) {
            after = next(operation, &Record::Absent);
        }
        (after.is_some(), after.unwrap_or_else(|| before.clone()))
    }
}

/// The record after the call; None if the answer would have been another.
fn next(operation: &Key, before: &Record) -> Option<Record> {
    let same = || Some(before.clone());
    let holds =
        |token: &Uuid| matches!(before, Record::Claimed { token: held, .. } if held == token);
    match operation {
        Key::Begin { told, .. } | Key::Run { told, .. } | Key::Undo { told } => {
            match (told, before) {
                (Begun::Acquired { attempt, token }, _) => {
                    let due = match before {
                        Record::Absent => 1,
                        Record::Claimed { attempt, long: false, .. } => attempt + 1,
                        _ => return None,
                    };
                    match operation {
                        _ if *attempt != due => None,
                        Key::Begin { long, .. } => {
                            Some(Record::Claimed { token: *token, attempt: *attempt, long: *long })
                        }
                        Key::Run { result, long, .. } => Some(completed(*token, *result, *long)),
                        _ => same(),
                    }
                }
                (Begun::Completed { result }, Record::Completed { result: stored, .. }) => {
                    (result == stored).then(same)?
                }
                (Begun::InProgress, Record::Claimed { long: true, .. }) => same(),
                (Begun::Abandoned, Record::Claimed { long: false, .. }) => same(),
                (Begun::InTransaction, _) => same(),
                _ => None,
            }
        }
        Key::Complete { token, result, long, ok } => match (before, ok) {
            (_, true) if holds(token) => Some(completed(*token, *result, *long)),
            (Record::Completed { token: by, .. }, true) => (by == token).then(same)?,
            (Record::Completed { token: by, .. }, false) => (by != token).then(same)?,
            (_, false) if !holds(token) => same(),
            _ => None,
        },
        Key::Release { token, ok } => match (holds(token), ok) {
            (true, true) => Some(Record::Absent),
            (false, false) => same(),
            _ => None,
        },
        Key::Extend { token, long, ok } => match (before, ok) {
            (Record::Claimed { token: held, attempt, .. }, true) if held == token => {
                Some(Record::Claimed { token: *token, attempt: *attempt, long: *long })
            }
            (_, false) if !holds(token) => same(),
            _ => None,
        },
        Key::Forget { ok } => match (before, ok) {
            (Record::Absent, false) => same(),
            (Record::Absent, true) | (_, false) => None,
            (_, true) => Some(Record::Absent),
        },
        Key::Get { told } => {
            let expected = match *before {
                Record::Absent => Got::Nothing,
                Record::Claimed { attempt, long: true, .. } => Got::InProgress { attempt },
                Record::Claimed { attempt, long: false, .. } => Got::Abandoned { attempt },
                Record::Completed { result, .. } => Got::Completed { result },
            };
            (*told == expected).then(same)?
        }
    }
}

/// What has expired is as good as absent, for all.
fn completed(token: Uuid, result: i64, long: bool) -> Record {
    if long { Record::Completed { token, result } } else { Record::Absent }
}

#[derive(Clone, Debug, PartialEq)]
enum Lock {
    /// The token and fence of a grant, which is over at once if not `long`.
    Try {
        long: bool,
        told: Taken,
    },
    /// For the transaction, which ends at once.
    TryXact {
        told: Taken,
    },
    Unlock {
        token: Uuid,
        ok: bool,
    },
    Extend {
        token: Uuid,
        long: bool,
        ok: bool,
    },
    Guard {
        token: Uuid,
        fence: Option<i64>,
    },
}

#[derive(Clone, Debug, PartialEq)]
enum Taken {
    Granted {
        token: Uuid,
        fence: i64,
    },
    /// For the transaction.
    Got,
    Held,
    InTransaction,
}

/// The last grant: who has it now, if anybody.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Grant {
    fence: i64,
    holder: Option<Uuid>,
}

struct Locks;

impl Specification for Locks {
    type State = Grant;
    type Operation = Lock;

    fn init() -> Grant {
        Grant { fence: 0, holder: None }
    }

    fn apply(operation: &Lock, before: &Grant) -> (bool, Grant) {
        let holds = |token: &Uuid| before.holder == Some(*token);
        let held = |long: bool, token: &Uuid| long.then_some(*token);
        let after = match operation {
            Lock::Try { long, told: Taken::Granted { token, fence } } => (before.holder.is_none()
                && *fence > before.fence)
                .then(|| Grant { fence: *fence, holder: held(*long, token) }),
            Lock::Try { told: Taken::Held, .. } => before.holder.is_some().then(|| before.clone()),
            // Without a row to show, lock_try_xact cannot tell the two apart.
            Lock::TryXact { told: Taken::Held } => before.holder.is_some().then(|| before.clone()),
            Lock::TryXact { told: Taken::Got } => before.holder.is_none().then(|| before.clone()),
            Lock::Try { told: Taken::InTransaction, .. }
            | Lock::TryXact { told: Taken::InTransaction } => Some(before.clone()),
            Lock::Try { told: Taken::Got, .. } | Lock::TryXact { told: Taken::Granted { .. } } => {
                None
            }
            Lock::Unlock { token, ok } => match (holds(token), ok) {
                (true, true) => Some(Grant { fence: before.fence, holder: None }),
                (false, false) => Some(before.clone()),
                _ => None,
            },
            Lock::Extend { token, long, ok } => match (holds(token), ok) {
                (true, true) => Some(Grant { fence: before.fence, holder: held(*long, token) }),
                (false, false) => Some(before.clone()),
                _ => None,
            },
            Lock::Guard { token, fence } => match (holds(token), fence) {
                (true, Some(fence)) => (*fence == before.fence).then(|| before.clone()),
                (false, None) => Some(before.clone()),
                _ => None,
            },
        };
        (after.is_some(), after.unwrap_or_else(|| before.clone()))
    }
}

/// What happened to one key or lock, in the order in which it was seen: a call or an answer, and of whom.
type Log<T> = Mutex<Vec<(usize, Option<T>)>>;

/// Gives the calls their answers, and looks for an order.
fn linearizable<S: Specification>(log: &[(usize, Option<S::Operation>)]) -> bool {
    let mut actions = Vec::new();
    for (n, (process, entry)) in log.iter().enumerate() {
        actions.push((
            *process,
            match entry {
                Some(operation) => Action::Response(operation.clone()),
                None => {
                    let answer = log[n..]
                        .iter()
                        .find_map(|(of, entry)| entry.as_ref().filter(|_| of == process));
                    Action::Call(answer.expect("every call is answered").clone())
                }
            },
        ));
    }
    WGLChecker::<S>::is_linearizable(History::from_actions(actions))
}

/// "Somebody's transaction has it" must be true: a call that may hold the name's lock overlaps with the call.
fn overlaps<T: Clone>(
    log: &[(usize, Option<T>)],
    told: impl Fn(&T) -> bool,
    holds: impl Fn(&T) -> bool,
) -> Result<(), usize> {
    for (n, (process, entry)) in log.iter().enumerate() {
        if !entry.as_ref().is_some_and(&told) {
            continue;
        }
        let begun = log[..n].iter().rposition(|(of, entry)| of == process && entry.is_none());
        let begun = begun.expect("it was called");
        // Open during the call: answered after its beginning, and called before its end.
        let other = log.iter().enumerate().any(|(end, (of, entry))| {
            of != process
                && end > begun
                && entry.as_ref().is_some_and(&holds)
                && log[..end]
                    .iter()
                    .rposition(|(by, e)| by == of && e.is_none())
                    .is_some_and(|call| call < n)
        });
        if !other {
            return Err(n);
        }
    }
    Ok(())
}

/// True, or false for ID003 and ID011.
fn accepted<T>(outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Ok(value) => Some(value),
        Err(error) => {
            assert!(["ID003", "ID011"].contains(&sqlstate(&error)), "{error:?}");
            None
        }
    }
}

fn lease(long: bool) -> &'static str {
    if long { "1h" } else { "1us" }
}

fn tell(client: &mut impl postgres::GenericClient, key: &str, options: &str) -> Begun {
    let begun = begin(client, key, options);
    match &*begun.status {
        "acquired" => {
            Begun::Acquired { token: begun.token.unwrap(), attempt: begun.attempt.unwrap() }
        }
        "completed" => Begun::Completed { result: begun.result.unwrap().as_i64().unwrap() },
        "in_progress" if begun.retry_after.is_some() => Begun::InProgress,
        "in_progress" => Begun::InTransaction,
        "abandoned" => Begun::Abandoned,
        other => panic!("{other}"),
    }
}

/// Completes; false for ID003.
fn finish(
    client: &mut impl postgres::GenericClient,
    key: &str,
    result: i64,
    token: Option<Uuid>,
    long: bool,
) -> bool {
    let sql = "SELECT idem_complete($1, $2, token => $3, ttl => $4::text::interval)";
    let result = serde_json::Value::from(result);
    accepted(client.execute(sql, &[&key, &result, &token, &lease(long)])).is_some()
}

fn use_key(client: &mut Client, key: &str, random: &mut Random, tokens: &Mutex<Vec<Uuid>>) -> Key {
    let result = (random.next() >> 12) as i64;
    let token = {
        let tokens = tokens.lock().unwrap();
        // One of the last few: held, completed by, or stale.
        if tokens.is_empty() {
            Uuid::nil()
        } else {
            tokens[tokens.len() - 1 - random.below(tokens.len().min(4) as u64) as usize]
        }
    };
    match random.below(12) {
        0..=2 => {
            let long = random.below(3) > 0;
            let told = tell(client, key, &format!(", lease => '{}'", lease(long)));
            if let Begun::Acquired { token, .. } = told {
                tokens.lock().unwrap().push(token);
            }
            Key::Begin { long, told }
        }
        3 => Key::Begin {
            long: true,
            told: {
                let told = tell(client, key, ", lease => '1h', wait => '2ms'");
                if let Begun::Acquired { token, .. } = told {
                    tokens.lock().unwrap().push(token);
                }
                told
            },
        },
        4 => {
            let long = random.below(3) > 0;
            let mut work = client.transaction().unwrap();
            let told = tell(&mut work, key, "");
            if matches!(told, Begun::Acquired { .. }) {
                assert!(finish(&mut work, key, result, None, long));
            }
            work.commit().unwrap();
            Key::Run { result, long, told }
        }
        5 => {
            let mut work = client.transaction().unwrap();
            let told = tell(&mut work, key, "");
            if matches!(told, Begun::Acquired { .. }) && random.below(2) == 0 {
                assert!(finish(&mut work, key, result, None, true));
            }
            work.rollback().unwrap();
            Key::Undo { told }
        }
        6 => {
            let long = random.below(3) > 0;
            let ok = finish(client, key, result, Some(token), long);
            Key::Complete { token, result, long, ok }
        }
        7 => Key::Release { token, ok: release(client, key, Some(token)) },
        8 => {
            let long = random.below(2) == 0;
            let sql = "SELECT idem_extend($1, $2, $3::text::interval)";
            let ok = accepted(client.execute(sql, &[&key, &token, &lease(long)])).is_some();
            Key::Extend { token, long, ok }
        }
        9 => {
            let ok = client.query_one("SELECT idem_forget($1)", &[&key]).unwrap().get(0);
            Key::Forget { ok }
        }
        _ => {
            let row = client
                .query_opt("SELECT state, attempt, result FROM idem_get($1)", &[&key])
                .unwrap();
            Key::Get {
                told: row.map_or(Got::Nothing, |row| match row.get("state") {
                    "in_progress" => Got::InProgress { attempt: row.get("attempt") },
                    "abandoned" => Got::Abandoned { attempt: row.get("attempt") },
                    "completed" => Got::Completed {
                        result: row.get::<_, serde_json::Value>("result").as_i64().unwrap(),
                    },
                    other => panic!("{other}"),
                }),
            }
        }
    }
}

fn use_lock(
    client: &mut Client,
    name: &str,
    random: &mut Random,
    tokens: &Mutex<Vec<Uuid>>,
) -> Lock {
    let token = {
        let tokens = tokens.lock().unwrap();
        if tokens.is_empty() {
            Uuid::nil()
        } else {
            tokens[tokens.len() - 1 - random.below(tokens.len().min(3) as u64) as usize]
        }
    };
    let long = random.below(3) > 0;
    match random.below(8) {
        kind @ 0..=2 => {
            let call = match kind {
                2 => format!("lock_acquire('{name}', wait => '2ms', ttl => '{}')", lease(long)),
                _ => format!("lock_try('{name}', ttl => '{}')", lease(long)),
            };
            let row = client
                .query_one(
                    &format!("SELECT acquired, token, fence, retry_after IS NOT NULL AS held FROM {call} OFFSET 0"),
                    &[],
                )
                .unwrap();
            let told = match (row.get("acquired"), row.get("held")) {
                (true, _) => {
                    tokens.lock().unwrap().push(row.get("token"));
                    Taken::Granted { token: row.get("token"), fence: row.get("fence") }
                }
                (false, true) => Taken::Held,
                (false, false) => Taken::InTransaction,
            };
            Lock::Try { long, told }
        }
        3 => {
            let mut work = client.transaction().unwrap();
            let got: bool = work.query_one("SELECT lock_try_xact($1)", &[&name]).unwrap().get(0);
            if random.below(2) == 0 {
                work.commit().unwrap();
            } else {
                work.rollback().unwrap();
            }
            Lock::TryXact { told: if got { Taken::Got } else { Taken::InTransaction } }
        }
        4 | 5 => Lock::Unlock {
            token,
            ok: client.query_one("SELECT lock_unlock($1, $2)", &[&name, &token]).unwrap().get(0),
        },
        6 => {
            let sql = "SELECT lock_extend($1, $2, $3::text::interval)";
            let ok = accepted(client.execute(sql, &[&name, &token, &lease(long)])).is_some();
            Lock::Extend { token, long, ok }
        }
        _ => {
            let guarded = client.query_one("SELECT lock_guard($1, $2)", &[&name, &token]);
            Lock::Guard { token, fence: accepted(guarded).map(|row| row.get(0)) }
        }
    }
}

/// What an administrator does meanwhile: purges, with a ttl so short that a segment has its turn for half a second;
/// rewrites tables and indexes. None of it waits for long, and what it cannot have it leaves.
fn administer(admin: &mut Client, random: &mut Random) {
    if random.below(2) == 0 {
        run(admin, "SELECT idem_purge(5)");
        return;
    }
    let tables = admin
        .query(
            "SELECT objid::regclass::text FROM pg_depend
             JOIN pg_extension AS e ON refclassid = 'pg_extension'::regclass AND refobjid = e.oid
             JOIN pg_class AS c ON classid = 'pg_class'::regclass AND objid = c.oid
             WHERE extname = 'idem' AND relkind = 'r'",
            &[],
        )
        .unwrap();
    let table: String = random.pick(&tables).get(0);
    let command = random.pick(&["VACUUM", "VACUUM FULL", "ANALYZE", "REINDEX TABLE CONCURRENTLY"]);
    if let Err(error) = admin.batch_execute(&format!("{command} {table}")) {
        assert!(["55P03", "40P01"].contains(&sqlstate(&error)), "{command} {table}: {error:?}");
        // An index that could not be finished stays behind, invalid.
        let rest = "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid LIMIT 1";
        if let Some(index) = admin.query_opt(rest, &[]).unwrap() {
            let _ = admin.batch_execute(&format!("DROP INDEX {}", index.get::<_, &str>(0)));
        }
    }
}

/// Lets clients loose on a few names and records what each is told.
fn record<T: Send>(
    db: &TestDb,
    random: &mut Random,
    names: &[String],
    calls: u64,
    administered: bool,
    operate: impl Fn(&mut Client, &str, &mut Random, &Mutex<Vec<Uuid>>) -> T + Sync,
) -> Vec<Vec<(usize, Option<T>)>> {
    let logs: Vec<Log<T>> = names.iter().map(|_| Mutex::default()).collect();
    let tokens: Vec<Mutex<Vec<Uuid>>> = names.iter().map(|_| Mutex::default()).collect();
    let busy = AtomicU64::new(6);
    scope(|threads| {
        if administered {
            let (mut admin, mut random) = (db.admin(), Random::seeded(random.next()));
            run(&mut admin, "SET idem.ttl = '1s'; SET lock_timeout = '20ms'");
            let busy = &busy;
            threads.spawn(move || {
                while busy.load(Ordering::Relaxed) > 0 {
                    administer(&mut admin, &mut random);
                }
            });
        }
        for process in 0..6 {
            let mut random = Random::seeded(random.next());
            let (logs, tokens, operate, busy) = (&logs, &tokens, &operate, &busy);
            threads.spawn(move || {
                let _done = Done(busy);
                let mut client = db.admin();
                for _ in 0..calls {
                    let n = random.below(names.len() as u64) as usize;
                    logs[n].lock().unwrap().push((process, None));
                    let operation = operate(&mut client, &names[n], &mut random, &tokens[n]);
                    logs[n].lock().unwrap().push((process, Some(operation)));
                }
            });
        }
    });
    logs.into_iter().map(|log| log.into_inner().unwrap()).collect()
}

/// Counts a client less, also when it panics.
struct Done<'a>(&'a AtomicU64);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[track_caller]
fn shown<T: std::fmt::Debug>(log: &[(usize, Option<T>)]) -> String {
    log.iter().map(|(process, entry)| format!("{process} {entry:?}\n")).collect()
}

fn keys<const PURGED: bool>() {
    let db = TestDb::new();
    let mut random = Random::replayable();
    for round in 0..rounds(8, 700) {
        let names: Vec<String> = (0..2).map(|n| format!("{round} {n}")).collect();
        for log in record(&db, &mut random, &names, 40, PURGED, use_key) {
            assert!(linearizable::<Keys<PURGED>>(&log), "round {round}:\n{}", shown(&log));
            let told = |key: &Key| {
                matches!(
                    key,
                    Key::Begin { told: Begun::InTransaction, .. }
                        | Key::Run { told: Begun::InTransaction, .. }
                        | Key::Undo { told: Begun::InTransaction }
                )
            };
            let expires = log.iter().any(|(_, key)| {
                matches!(
                    key,
                    Some(Key::Run { long: false, .. } | Key::Complete { long: false, .. })
                )
            });
            // Who only looked, or was refused, does not hold the key (invariant 4).
            let holds = |key: &Key| match key {
                Key::Begin { told, .. } | Key::Run { told, .. } | Key::Undo { told } => {
                    matches!(told, Begun::Acquired { .. })
                }
                Key::Complete { ok, .. } | Key::Release { ok, .. } | Key::Extend { ok, .. } => *ok,
                // What has expired is removed too, though it was as good as absent.
                Key::Forget { ok } => *ok || expires,
                Key::Get { .. } => false,
            };
            if let Err(line) = overlaps(&log, told, holds) {
                panic!("round {round}: in progress by nobody, line {line}:\n{}", shown(&log));
            }
        }
    }
    assert_eq!(our_locks(&mut db.admin()), 0);
}

fn locks(administered: bool) {
    let db = TestDb::new();
    let mut random = Random::replayable();
    for round in 0..rounds(8, 700) {
        let names: Vec<String> = (0..2).map(|n| format!("{round} {n}")).collect();
        for mut log in record(&db, &mut random, &names, 40, administered, use_lock) {
            // Refused for the transaction: by a lease, or by a transaction. What a transaction does not explain, the model must.
            while let Err(line) = overlaps(
                &log,
                |lock| matches!(lock, Lock::TryXact { told: Taken::InTransaction }),
                |_| true,
            ) {
                log[line].1 = Some(Lock::TryXact { told: Taken::Held });
            }
            assert!(linearizable::<Locks>(&log), "round {round}:\n{}", shown(&log));
            // Who only looks may be in the way of a lock for an instant; somebody must.
            let told = |lock: &Lock| matches!(lock, Lock::Try { told: Taken::InTransaction, .. });
            if let Err(line) = overlaps(&log, told, |_| true) {
                panic!("round {round}: busy by nobody, line {line}:\n{}", shown(&log));
            }
        }
    }
    assert_eq!(our_locks(&mut db.admin()), 0);
}

#[test]
fn keys_are_linearizable() {
    keys::<false>();
}

#[test]
fn keys_are_linearizable_while_an_administrator_works() {
    keys::<true>();
}

#[test]
fn locks_are_linearizable() {
    locks(false);
}

#[test]
fn locks_are_linearizable_while_an_administrator_works() {
    locks(true);
}

/// The checker and the model can say no.
#[test]
fn histories_that_no_order_explains_are_found() {
    let (a, b) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let acquired =
        |token, attempt| Key::Begin { long: true, told: Begun::Acquired { token, attempt } };
    let replay = |result| Key::Begin { long: true, told: Begun::Completed { result } };
    let one_after_the_other = |operations: &[Key]| {
        let log: Vec<_> = operations
            .iter()
            .flat_map(|operation| [(0, None), (0, Some(operation.clone()))])
            .collect();
        linearizable::<Keys<false>>(&log)
    };
    let done = Key::Complete { token: a, result: 7, long: true, ok: true };
    assert!(one_after_the_other(&[acquired(a, 1), done.clone(), replay(7)]));
    // Two holders; a stale holder; another result; a lost completion; an attempt out of turn; progress of nobody.
    assert!(!one_after_the_other(&[acquired(a, 1), acquired(b, 1)]));
    assert!(!one_after_the_other(&[
        acquired(a, 1),
        Key::Complete { token: b, result: 7, long: true, ok: true }
    ]));
    assert!(!one_after_the_other(&[acquired(a, 1), done.clone(), replay(8)]));
    assert!(!one_after_the_other(&[acquired(a, 1), done.clone(), acquired(b, 1)]));
    assert!(!one_after_the_other(&[acquired(a, 2)]));
    assert!(!one_after_the_other(&[Key::Begin { long: true, told: Begun::InProgress }]));
    // At once, each may be first, but not both.
    let at_once = |x: Key, y: Key| {
        linearizable::<Keys<false>>(&[(0, None), (1, None), (1, Some(x)), (0, Some(y))])
    };
    let busy = Key::Begin { long: true, told: Begun::InProgress };
    assert!(at_once(busy.clone(), acquired(a, 1)) && at_once(acquired(a, 1), busy));
    assert!(!at_once(acquired(a, 1), acquired(b, 1)));

    let told = |key: &Key| matches!(key, Key::Undo { told: Begun::InTransaction });
    let holds = |key: &Key| matches!(key, Key::Forget { ok: true });
    let (busy, gone) = (Key::Undo { told: Begun::InTransaction }, Key::Forget { ok: true });
    let log = [(0, None), (1, None), (1, Some(busy.clone())), (0, Some(gone.clone()))];
    assert!(overlaps(&log, told, holds).is_ok());
    let log = [(0, None), (0, Some(gone)), (1, None), (1, Some(busy))];
    assert_eq!(overlaps(&log, told, holds), Err(3));
}
