//! Two-phase commit (design section 4, invariants 2, 5 and 8): transactions with claims, completions, releases, takeovers,
//! locks and guards inside are prepared, the server is killed once or more, and each is then committed or rolled back. In
//! between everything in them is held; afterwards all of it has happened, or none. The fixed cases are in `tests/prepared.rs`.

mod common;
mod lock_common;

use common::*;
use idem_harness::{Server, rounds, sqlstate};
use lock_common::*;
use postgres::Client;
use serde_json::json;
use uuid::Uuid;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    /// A claim of the transaction, completed in it.
    Complete,
    /// A claim on a lease that was committed before, completed, released, extended in it.
    CompleteLeased,
    ReleaseLeased,
    ExtendLeased,
    /// A claim on a lease, made in it; one that takes over.
    Lease,
    TakeOver,
    /// A lease lock, a transaction lock, a guard and an unlocking of a lock that was committed before.
    Lock,
    LockXact,
    Guard,
    Unlock,
}

const ACTS: [Act; 10] = [
    Act::Complete,
    Act::CompleteLeased,
    Act::ReleaseLeased,
    Act::ExtendLeased,
    Act::Lease,
    Act::TakeOver,
    Act::Lock,
    Act::LockXact,
    Act::Guard,
    Act::Unlock,
];

/// One thing that a prepared transaction did.
#[derive(Debug)]
struct Done {
    act: Act,
    name: String,
    /// Of the claim or lock from before the transaction.
    before: Option<Uuid>,
    fence: Option<i64>,
    /// Of the claim or lock that was made in the transaction.
    inside: Option<Uuid>,
}

/// What must be there before the transaction begins.
fn stage(client: &mut Client, act: Act, name: &str) -> Done {
    let mut done = Done { act, name: name.to_string(), before: None, fence: None, inside: None };
    match act {
        Act::CompleteLeased | Act::ReleaseLeased | Act::ExtendLeased => {
            done.before = Some(acquire(client, name, ", lease => '600s'"));
        }
        Act::TakeOver => done.before = Some(acquire(client, name, ", lease => '1us'")),
        Act::Guard | Act::Unlock => {
            let grant = granted(client, &format!("lock_try('{name}', ttl => '600s')"));
            (done.before, done.fence) = (Some(grant.token), Some(grant.fence));
        }
        Act::Complete | Act::Lease | Act::Lock | Act::LockXact => {}
    }
    done
}

fn perform(client: &mut Client, done: &mut Done) {
    let name = &done.name;
    match done.act {
        Act::Complete => {
            acquire(client, name, "");
            complete(client, name, &json!(name), None);
        }
        Act::CompleteLeased => complete(client, name, &json!(name), done.before),
        Act::ReleaseLeased => assert!(release(client, name, done.before)),
        Act::ExtendLeased => {
            client.execute("SELECT idem_extend($1, $2, '9000s')", &[name, &done.before]).unwrap();
        }
        Act::Lease | Act::TakeOver => {
            done.inside = Some(acquire(client, name, &format!(", lease => '600s'{LONG}")));
        }
        Act::Lock => {
            let grant = granted(client, &format!("lock_try('{name}', ttl => '600s')"));
            (done.inside, done.fence) = (Some(grant.token), Some(grant.fence));
        }
        Act::LockXact => assert!(take(client, &format!("lock_try_xact('{name}')")).acquired),
        Act::Guard => assert_eq!(Some(guard(client, name, done.before.unwrap())), done.fence),
        Act::Unlock => assert!(unlock(client, name, done.before.unwrap())),
    }
    client.execute("INSERT INTO effects VALUES ($1)", &[name]).unwrap();
}

/// While the transaction is prepared, everything in it is held, for everybody.
#[track_caller]
fn is_held(client: &mut Client, done: &Done) {
    let name = &done.name;
    match done.act {
        Act::Lock | Act::LockXact | Act::Guard | Act::Unlock => {
            is_busy(client, &format!("lock_try('{name}', ttl => '600s')"));
            assert!(!take(client, &format!("lock_try_xact('{name}')")).acquired, "{done:?}");
        }
        _ => assert_eq!(status(client, name, ", lease => '600s'"), "in_progress", "{done:?}"),
    }
}

/// Afterwards all of it has happened, or nothing.
#[track_caller]
fn has_ended(client: &mut Client, done: &Done, committed: bool) {
    let name = &done.name;
    let effects: i64 =
        client.query_one("SELECT count(*) FROM effects WHERE name = $1", &[name]).unwrap().get(0);
    assert_eq!(effects, i64::from(committed), "{done:?}");
    match (done.act, committed) {
        (Act::Complete | Act::CompleteLeased, true) => {
            assert_eq!(begin(client, name, "").result, Some(json!(name)), "{done:?}");
        }
        (Act::CompleteLeased | Act::ReleaseLeased, false) | (Act::ExtendLeased, _) => {
            let told = begin(client, name, ", lease => '600s'");
            assert_eq!(told.status, "in_progress", "{done:?}");
            let extended = told.retry_after.unwrap() > 700.0;
            assert_eq!(extended, committed && done.act == Act::ExtendLeased, "{done:?} {told:?}");
            complete(client, name, &json!(1), done.before);
        }
        (Act::Complete | Act::Lease, false) | (Act::ReleaseLeased, true) => {
            let told = begin(client, name, ", lease => '600s'");
            assert_eq!((&*told.status, told.attempt), ("acquired", Some(1)), "{done:?}");
        }
        (Act::Lease, true) => complete(client, name, &json!(1), done.inside),
        (Act::TakeOver, true) => {
            let error = try_complete(client, name, &json!(1), done.before).unwrap_err();
            assert_eq!(sqlstate(&error), "ID003", "{done:?} {error:?}");
            complete(client, name, &json!(1), done.inside);
        }
        // Late is not lost: nobody took over in the end.
        (Act::TakeOver, false) => complete(client, name, &json!(1), done.before),
        (Act::Lock, true) => {
            is_busy(client, &format!("lock_try('{name}')"));
            assert_eq!(Some(guard(client, name, done.inside.unwrap())), done.fence);
        }
        (Act::Guard, _) | (Act::Unlock, false) => {
            is_busy(client, &format!("lock_try('{name}')"));
            assert_eq!(Some(guard(client, name, done.before.unwrap())), done.fence);
            assert!(unlock(client, name, done.before.unwrap()));
        }
        (Act::Lock, false) | (Act::LockXact, _) | (Act::Unlock, true) => {
            let next = granted(client, &format!("lock_try('{name}', ttl => '600s')"));
            assert!(done.fence.is_none_or(|fence| next.fence > fence), "{done:?} {next:?}");
        }
    }
}

#[test]
fn all_or_nothing_of_a_prepared_transaction_whatever_restarts() {
    let server = Server::start(&["fsync=on", "synchronous_commit=off", "wal_writer_delay=10s"]);
    server.create_database("shop");
    run(
        &mut server.connect("shop", "postgres"),
        "CREATE TABLE effects (name text); GRANT ALL ON effects TO app",
    );
    let mut random = Random::replayable();
    for round in 0..rounds(2, 100) {
        let mut app = server.connect("shop", "app");
        // Locks of the application itself, beside ours: of the session, and of each prepared transaction.
        run(&mut app, "SELECT pg_advisory_lock(7)");
        let mut transactions = Vec::new();
        for n in 0..5 {
            let mut acts = Vec::new();
            for (i, act) in ACTS.iter().enumerate() {
                // In the first round each act is in some transaction.
                if i % 5 == n || random.below(3) == 0 {
                    acts.push(stage(&mut app, *act, &format!("round {round} {n} {act:?}")));
                }
            }
            run(&mut app, &format!("BEGIN; SELECT pg_advisory_xact_lock(100 + {n})"));
            for done in &mut acts {
                let savepoint = random.below(3);
                if savepoint > 0 {
                    run(&mut app, "SAVEPOINT s");
                }
                perform(&mut app, done);
                match savepoint {
                    1 => run(&mut app, "RELEASE s"),
                    2 => {
                        // Once more: the first time is undone.
                        run(&mut app, "ROLLBACK TO s");
                        perform(&mut app, done);
                    }
                    _ => {}
                }
            }
            run(&mut app, &format!("PREPARE TRANSACTION '{n}'"));
            transactions.push((n, acts));
        }
        for restarts in 0..=random.below(3) {
            match random.below(4) {
                0 => server.restart(),
                1 => {
                    server.stop("immediate");
                    server.start_again();
                }
                2 => {
                    server.kill9();
                    server.start_again();
                }
                _ => run(&mut server.connect("shop", "postgres"), "CHECKPOINT"),
            }
            let mut app = server.connect("shop", "app");
            for (_, acts) in &transactions {
                for done in acts {
                    is_held(&mut app, done);
                }
            }
            if restarts > 0 {
                let mut admin = server.connect("shop", "postgres");
                let theirs = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND objid >= 100";
                assert_eq!(number(&mut admin, theirs), 5);
            }
        }
        let mut app = server.connect("shop", "app");
        while !transactions.is_empty() {
            let next = random.below(transactions.len() as u64) as usize;
            let (n, acts) = transactions.swap_remove(next);
            let commit = random.below(2) == 0;
            run(
                &mut app,
                &format!("{} PREPARED '{n}'", if commit { "COMMIT" } else { "ROLLBACK" }),
            );
            // And it stays so.
            if random.below(3) == 0 {
                server.kill9();
                server.start_again();
                app = server.connect("shop", "app");
            }
            for done in &acts {
                has_ended(&mut app, done, commit);
            }
        }
        assert_eq!(our_locks(&mut server.connect("shop", "postgres")), 0);
    }
}
