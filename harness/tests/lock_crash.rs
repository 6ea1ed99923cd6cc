//! Crash, restart, dump and restore (issue 3; design section 4, invariants 2 and 10): a lease that was granted is still
//! held afterwards, by its token; the next fence is higher than any that was given out before.

mod common;
mod lock_common;

use std::process::{Command, Stdio};

use common::*;
use idem_harness::{Server, TestDb};
use lock_common::*;
use uuid::Uuid;

const NAMES: [&str; 5] = ["alone", "in a block", "taken over", "extended", "unlocked and taken"];

/// Takes and says what must be so after a crash: the grant, and more than how many seconds are left of its lease.
fn prepare(app: &mut postgres::Client, name: &str, note: i64) -> (Grant, f64) {
    let lock = |ttl: &str| format!("lock_try('{name}', ttl => '{ttl}', holder => 'me')");
    match name {
        "in a block" => {
            run(app, &format!("BEGIN; INSERT INTO notes VALUES (-1 - {note})"));
            let grant = granted(app, &lock("600s"));
            run(app, "COMMIT");
            (grant, 0.0)
        }
        "taken over" => {
            let first = granted(app, &lock("1us"));
            let grant =
                granted(app, &format!("lock_acquire('{name}', ttl => '600s', holder => 'me')"));
            assert!(grant.fence > first.fence);
            (grant, 0.0)
        }
        "extended" => {
            let grant = granted(app, &lock("600s"));
            extend(app, name, grant.token, "9000s");
            (grant, 8000.0)
        }
        "unlocked and taken" => {
            let first = granted(app, &lock("600s"));
            assert!(unlock(app, name, first.token));
            (granted(app, &lock("600s")), 0.0)
        }
        _ => (granted(app, &lock("600s")), 0.0),
    }
}

#[test]
fn a_granted_lease_survives_a_crash_with_synchronous_commit_off() {
    let server = Server::start(&[
        "fsync=on",
        "wal_writer_delay=10s",
        "autovacuum=off",
        "synchronous_commit=off",
    ]);
    server.create_database("shop");
    run(
        &mut server.connect("shop", "postgres"),
        "CREATE TABLE notes (n bigint); GRANT INSERT, SELECT ON notes TO app; CHECKPOINT",
    );
    let mut lost = 0;
    for (note, name) in (0..).zip(NAMES) {
        let mut app = server.connect("shop", "app");
        let (grant, least) = prepare(&mut app, name, note);
        // What is committed after it, the ordinary way, shows whether this crash loses anything at all.
        app.execute("INSERT INTO notes VALUES ($1)", &[&note]).unwrap();
        server.kill9();
        server.start_again();

        let mut admin = server.connect("shop", "postgres");
        let rows = admin
            .query(
                "SELECT token, fence, holder, extract(epoch FROM expires_at - clock_timestamp())::float8
                 FROM idem_locks WHERE name = $1",
                &[&name],
            )
            .unwrap();
        assert_eq!(rows.len(), 1, "{name}: the lock is lost");
        assert_eq!(rows[0].get::<_, Option<Uuid>>(0), Some(grant.token), "{name}");
        assert_eq!(rows[0].get::<_, i64>(1), grant.fence, "{name}");
        assert_eq!(rows[0].get::<_, &str>(2), "me", "{name}");
        assert!(rows[0].get::<_, f64>(3) > least, "{name}: {rows:?}");
        if name == "in a block" {
            let with_it = format!("SELECT count(*) FROM notes WHERE n = {}", -1 - note);
            assert_eq!(number(&mut admin, &with_it), 1);
        }
        let after = format!("SELECT count(*) FROM notes WHERE n = {note}");
        lost += 1 - number(&mut admin, &after);
        assert_eq!(our_locks(&mut admin), 0);

        // Still excluded; its holder goes on with the token; the next one gets a higher fence.
        let mut app = server.connect("shop", "app");
        let told = is_busy(&mut app, &format!("lock_try('{name}')"));
        assert_eq!(told.held_by.as_deref(), Some("me"));
        assert!(!take(&mut app, &format!("lock_try_xact('{name}')")).acquired);
        assert_eq!(guard(&mut app, name, grant.token), grant.fence);
        assert!(unlock(&mut app, name, grant.token));
        let next = granted(&mut app, &format!("lock_try('{name}', ttl => '600s')"));
        assert!(next.fence > grant.fence, "{name}: {next:?} after {grant:?}");
    }
    assert!(lost > 0, "no crash lost an ordinary asynchronous commit: the test proves nothing");
}

#[test]
fn the_fence_rises_over_restarts_and_crashes_also_when_it_is_ahead_of_the_clock() {
    let server = Server::start(&["fsync=on", "wal_writer_delay=10s", "synchronous_commit=off"]);
    server.create_database("shop");
    let last = granted(&mut server.connect("shop", "app"), "lock_try('ahead', ttl => '1us')");
    // As if the clock had been set back by a century meanwhile.
    run(
        &mut server.connect("shop", "postgres"),
        "SET synchronous_commit = on; UPDATE idem_locks SET fence = fence + 3155760000000000",
    );
    let mut last = [last.fence + 3_155_760_000_000_000, 0];
    for round in 0..4 {
        let mut app = server.connect("shop", "app");
        for (name, last) in ["ahead", "plain"].iter().zip(&mut last) {
            let next = granted(&mut app, &format!("lock_try('{name}', ttl => '600s')"));
            assert!(next.fence > *last, "round {round}, {name}: {next:?} after {last}");
            *last = next.fence;
            // The next one takes it over, or finds it unlocked; that unlocking may be lost in the crash.
            extend(&mut app, name, next.token, "1us");
        }
        match round {
            0 => server.restart(),
            1 => {
                server.stop("immediate");
                server.start_again();
            }
            _ => {
                server.kill9();
                server.start_again();
            }
        }
    }
}

/// Dumps a database and restores it into a fresh one.
#[track_caller]
fn restored(db: &TestDb, options: &[&str]) -> TestDb {
    let copy = TestDb::bare();
    let mut dump = Command::new("pg_dump")
        .args(options)
        .arg(&db.name)
        .stdout(Stdio::piped())
        .spawn()
        .expect("pg_dump can be run");
    let restore = Command::new("psql")
        .args(["-qX", "-v", "ON_ERROR_STOP=1", "-d", &copy.name])
        .stdin(dump.stdout.take().expect("piped"))
        .output()
        .expect("psql can be run");
    assert!(dump.wait().is_ok_and(|status| status.success()));
    assert!(restore.status.success(), "{}", String::from_utf8_lossy(&restore.stderr));
    copy
}

#[test]
fn dump_and_restore_carry_held_locks_and_fences() {
    let db = TestDb::new();
    let mut app = db.app();
    let held = granted(&mut app, "lock_try('held', ttl => '600s', scope => 's', holder => 'me')");
    let free = granted(&mut app, "lock_try('free', ttl => '600s')");
    assert!(unlock(&mut app, "free", free.token));
    let expired = granted(&mut app, "lock_try('expired', ttl => '1us')");
    granted(&mut app, "lock_try('ahead', ttl => '1us')");
    run(&mut db.admin(), "UPDATE idem_locks SET fence = 9000000000000000000 WHERE name = 'ahead'");

    for options in [&[][..], &["--column-inserts"]] {
        let copy = restored(&db, options);
        let mut app = copy.app();
        let told = is_busy(&mut app, "lock_try('held', scope => 's')");
        assert_eq!(told.held_by.as_deref(), Some("me"));
        assert!(told.retry_after.is_some_and(|left| left > 300.0), "{told:?}");
        let fence: i64 = app
            .query_one("SELECT lock_guard('held', $1, scope => 's')", &[&held.token])
            .unwrap()
            .get(0);
        assert_eq!(fence, held.fence);
        for (name, last) in
            [("free", free.fence), ("expired", expired.fence), ("ahead", 9_000_000_000_000_000_000)]
        {
            let next = granted(&mut app, &format!("lock_try('{name}')"));
            assert!(next.fence > last, "{name}: {next:?} after {last}");
        }
        let unlocked: bool = app
            .query_one("SELECT lock_unlock('held', $1, scope => 's')", &[&held.token])
            .unwrap()
            .get(0);
        assert!(unlocked);
        let next = granted(&mut app, "lock_try('held', scope => 's')");
        assert!(next.fence > held.fence);
    }
}
