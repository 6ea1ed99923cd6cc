//! What idem_stats() counts, and when: at commit or at once, over savepoints and PREPARE, over many connections, per
//! database; and that nobody fails where nothing can be counted.

mod common;

use common::*;
use idem_harness::{Server, TestDb, eventually, major, sqlstate};
use postgres::Client;
use serde_json::json;

/// Whether the server has to load the library at its start for it to have shared memory.
fn needs_preload() -> bool {
    major() < 17
}

/// A server that counts: no other test's transactions, and a restart of our own.
fn counting_server() -> Server {
    let server = Server::start(match needs_preload() {
        true => &["shared_preload_libraries=idem"],
        false => &[],
    });
    server.create_database("shop");
    server
}

/// The counters that are not 0, by name.
#[track_caller]
fn counted(client: &mut Client) -> String {
    client
        .query_one(
            "SELECT coalesce(string_agg(format('%s %s', name, value), ', ' ORDER BY position), 'nothing')
             FROM idem_stats() AS stats,
                 json_each_text(to_json(stats)) WITH ORDINALITY AS counter (name, value, position)
             WHERE name <> 'since' AND value <> '0'",
            &[],
        )
        .unwrap_or_else(|error| panic!("idem_stats: {error:?}"))
        .get(0)
}

#[test]
fn a_change_counts_when_it_commits() {
    let server = counting_server();
    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    assert_eq!(counted(&mut admin), "nothing");

    // Rolled back: nothing happened.
    run(&mut app, "BEGIN");
    acquire(&mut app, "k", "");
    complete(&mut app, "k", &json!(1), None);
    run(&mut app, "SELECT lock_try('l'); SELECT lock_try_xact('x')");
    run(&mut app, "ROLLBACK");
    assert_eq!(counted(&mut admin), "nothing");

    // Seen by others with the commit, and not before.
    run(&mut app, "BEGIN");
    acquire(&mut app, "k", "");
    complete(&mut app, "k", &json!(1), None);
    run(
        &mut app,
        "SELECT lock_try('l'); SELECT lock_try('l'); SELECT lock_try_xact('x'); SELECT lock_try_xact('x')",
    );
    assert_eq!(counted(&mut admin), "nothing");
    run(&mut app, "COMMIT");
    assert_eq!(counted(&mut admin), "executed 1, locks_acquired 2", "each lock once");

    // A commit that fails counts nothing.
    run(&mut app, "BEGIN; SELECT idem_once('refused'); SELECT idem_begin('open')");
    assert_eq!(sqlstate(&app.batch_execute("COMMIT").unwrap_err()), "ID007");
    assert_eq!(counted(&mut admin), "executed 1, locks_acquired 2");
}

#[test]
fn what_was_answered_counts_also_if_it_is_rolled_back() {
    let server = counting_server();
    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    run(
        &mut app,
        "BEGIN; SELECT idem_begin('k', '\\x01', owner => 'a'); SELECT idem_complete('k'); COMMIT;
         SELECT lock_try('l')",
    );
    let token = acquire(&mut app, "leased", ", lease => '600s'");
    run(&mut admin, "SELECT idem_stats_reset()");

    run(
        &mut app,
        "BEGIN;
         SELECT idem_begin('k', owner => 'a'); SELECT idem_begin('k', '\\x02'); SELECT idem_begin('k', owner => 'b');
         SELECT idem_begin('leased'); SELECT lock_try('l'); SELECT lock_try_xact('l');
         ROLLBACK",
    );
    let answered = "replayed 1, in_progress 1, mismatch 1, denied 1, locks_busy 2";
    assert_eq!(counted(&mut admin), answered);

    // Errors too, also if they are caught; a release that is refused is no error.
    let nobody = "00000000-0000-4000-8000-000000000000";
    run(
        &mut app,
        &format!(
            "DO $$ BEGIN PERFORM idem_complete('leased', token => '{nobody}'); EXCEPTION WHEN SQLSTATE 'ID003' THEN NULL; END $$;
             SELECT idem_release('leased', '{nobody}'); SELECT lock_unlock('l', '{nobody}')"
        ),
    );
    for (sql, state) in [
        (format!("SELECT idem_extend('leased', '{nobody}')"), "ID003"),
        (format!("SELECT idem_checkpoint('leased', '1', '{nobody}')"), "ID003"),
        ("SELECT idem_complete('never-begun')".to_string(), "ID003"),
        (format!("SELECT lock_guard('l', '{nobody}')"), "ID011"),
        (format!("SELECT lock_extend('l', '{nobody}')"), "ID011"),
    ] {
        assert_eq!(sqlstate(&app.batch_execute(&sql).unwrap_err()), state, "{sql}");
    }
    let answered = "replayed 1, in_progress 1, mismatch 1, denied 1, claims_lost 4, locks_busy 2, locks_lost 2";
    assert_eq!(counted(&mut admin), answered);
    complete(&mut app, "leased", &json!(1), Some(token));
    complete(&mut app, "leased", &json!(1), Some(token));
    assert_eq!(counted(&mut admin), format!("executed 1, {answered}"), "repeated: only once");
}

#[test]
fn a_change_in_a_savepoint_counts_if_all_around_it_commits() {
    let server = counting_server();
    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    run(
        &mut app,
        "BEGIN;
         SELECT idem_once('kept');
         SAVEPOINT a; SELECT idem_once('undone'); SELECT lock_try('undone');
         SAVEPOINT b; SELECT idem_once('released into what is undone'); RELEASE b; ROLLBACK TO a;
         SELECT idem_once('after');
         SAVEPOINT c; SELECT idem_once('released'); SELECT lock_try('kept'); RELEASE c;
         DO $$ BEGIN PERFORM idem_once('caught'); RAISE 'x'; EXCEPTION WHEN raise_exception THEN NULL; END $$;
         COMMIT",
    );
    assert_eq!(counted(&mut admin), "executed 3, locks_acquired 1");

    // A completion rolled back to a savepoint, then done again: one.
    run(
        &mut app,
        "BEGIN; SELECT idem_begin('k'); SAVEPOINT a; SELECT idem_complete('k'); ROLLBACK TO a; SELECT idem_complete('k'); COMMIT",
    );
    assert_eq!(counted(&mut admin), "executed 4, locks_acquired 1");
}

#[test]
fn takeovers_and_releases_count_when_they_commit() {
    let server = counting_server();
    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    acquire(&mut app, "k", ", lease => '1us'");
    assert_eq!(counted(&mut admin), "nothing", "a claim is not counted by itself");
    run(
        &mut app,
        "BEGIN; SELECT idem_begin('k', lease => '1us'); SELECT idem_release('k'); ROLLBACK",
    );
    run(&mut app, "SELECT idem_begin('k', takeover => false)");
    assert_eq!(counted(&mut admin), "nothing");
    let token = acquire(&mut app, "k", ", lease => '1us'");
    assert_eq!(counted(&mut admin), "taken_over 1");
    assert!(release(&mut app, "k", Some(token)));
    assert!(!release(&mut app, "k", Some(token)));
    assert_eq!(counted(&mut admin), "taken_over 1, released 1");
    acquire(&mut app, "k", ", lease => '1us'");
    run(&mut admin, "SELECT idem_forget('k')");
    assert_eq!(counted(&mut admin), "taken_over 1, released 1", "the first of a key, a removal");
}

#[test]
fn prepare_counts_as_commit() {
    let server = counting_server();
    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    run(&mut app, "BEGIN; SELECT idem_once('a'); PREPARE TRANSACTION 'a'");
    assert_eq!(counted(&mut admin), "executed 1");
    run(&mut admin, "COMMIT PREPARED 'a'");
    run(&mut app, "BEGIN; SELECT idem_once('b'); PREPARE TRANSACTION 'b'");
    run(&mut admin, "ROLLBACK PREPARED 'b'");
    assert_eq!(counted(&mut admin), "executed 2", "what is decided elsewhere is not known");
    // What was prepared does not count again with the connection's next transaction.
    run(&mut app, "SELECT idem_once('c')");
    assert_eq!(counted(&mut admin), "executed 3");
}

#[test]
fn whole_operations_count_once() {
    let server = counting_server();
    let (mut app, mut admin) = (server.connect("shop", "app"), server.connect("shop", "postgres"));
    run(
        &mut admin,
        "CREATE FUNCTION work(request jsonb) RETURNS jsonb LANGUAGE sql RETURN request;
         CREATE FUNCTION again(request jsonb) RETURNS jsonb LANGUAGE sql BEGIN ATOMIC SELECT idem_run('again', 'work(jsonb)'); END;
         CREATE FUNCTION by_itself(request jsonb) RETURNS jsonb LANGUAGE sql BEGIN ATOMIC SELECT idem_complete('by_itself'); SELECT request; END",
    );
    for sql in [
        "SELECT idem_run('run', 'work(jsonb)', '1'), idem_once('once')",
        "SELECT idem_run('run', 'work(jsonb)', '1'), idem_once('once')",
    ] {
        run(&mut app, sql);
    }
    assert_eq!(counted(&mut admin), "executed 2, replayed 2");
    for (sql, state) in [
        ("SELECT idem_run('run', 'work(jsonb)', '2')", "ID002"),
        ("SELECT idem_run('again', 'again(jsonb)')", "ID001"),
        ("SELECT idem_run('by_itself', 'by_itself(jsonb)')", "ID003"),
    ] {
        assert_eq!(sqlstate(&app.batch_execute(sql).unwrap_err()), state, "{sql}");
    }
    let counts = "executed 2, replayed 2, in_progress 1, mismatch 1, claims_lost 1";
    assert_eq!(counted(&mut admin), counts);
}

#[test]
fn many_connections_add_up_exactly() {
    const CLIENTS: u64 = 16;
    const KEYS: u64 = 50;
    let server = counting_server();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let server = &server;
            scope.spawn(move || {
                let mut app = server.connect("shop", "app");
                for key in 0..KEYS {
                    let own = format!("{client}-{key}");
                    let sql = "SELECT idem_once($1), idem_once($2), lock_try_xact($1)";
                    // The one key of all is done by one of them, replayed to the others.
                    app.query(sql, &[&own, &"shared"]).unwrap();
                }
            });
        }
    });
    let all = CLIENTS * KEYS;
    assert_eq!(
        counted(&mut server.connect("shop", "postgres")),
        format!("executed {}, replayed {}, locks_acquired {all}", all + 1, all - 1)
    );
}

#[test]
fn each_database_counts_for_itself_until_the_server_restarts() {
    let server = counting_server();
    server.create_database("other");
    let (mut shop, mut other) =
        (server.connect("shop", "postgres"), server.connect("other", "postgres"));
    run(&mut shop, "SELECT idem_once('k')");
    run(&mut other, "SELECT idem_once('k'); SELECT idem_once('k')");
    assert_eq!(counted(&mut shop), "executed 1");
    assert_eq!(counted(&mut other), "executed 1, replayed 1");

    let since = "SELECT since > pg_postmaster_start_time() AND since <= clock_timestamp() FROM idem_stats()";
    assert!(shop.query_one(since, &[]).unwrap().get::<_, bool>(0));
    run(&mut shop, "CREATE TEMP TABLE before AS SELECT since FROM idem_stats()");
    run(&mut shop, "SELECT idem_stats_reset()");
    assert_eq!(counted(&mut shop), "nothing");
    assert!(
        shop.query_one("SELECT i.since > b.since FROM idem_stats() AS i, before AS b", &[])
            .unwrap()
            .get::<_, bool>(0)
    );
    assert_eq!(counted(&mut other), "executed 1, replayed 1", "not another database's");

    server.restart();
    let mut other = server.connect("other", "postgres");
    assert_eq!(counted(&mut other), "nothing");
    assert!(other.query_one(since, &[]).unwrap().get::<_, bool>(0));

    // A crash of one backend empties the shared memory of all.
    run(&mut other, "SELECT idem_once('k')");
    assert_eq!(counted(&mut other), "replayed 1");
    let mut shop = server.connect("shop", "postgres");
    kill9(pid(&mut other));
    eventually("all connections end", || shop.simple_query("SELECT 1").is_err());
    let mut other = connect_again(server.dir(), "other", "postgres");
    assert_eq!(counted(&mut other), "nothing");
    run(&mut other, "SELECT idem_once('k')");
    assert_eq!(counted(&mut other), "replayed 1");
}

/// Nobody fails, and who asks is told why there are no numbers.
fn counts_nothing(server: &Server, mut admin: Client, hint: &str) {
    run(&mut admin, "SELECT idem_once('k'), idem_once('k'), lock_try('l'), lock_try_xact('m')");
    run(
        &mut admin,
        "BEGIN; SELECT idem_begin('n'); SAVEPOINT a; SELECT idem_complete('n'); ROLLBACK TO a; SELECT idem_release('n'); COMMIT",
    );
    let lost = admin.batch_execute("SELECT idem_complete('never-begun')").unwrap_err();
    assert_eq!(sqlstate(&lost), "ID003");

    run(&mut admin, "SET client_min_messages = warning");
    let nothing = "SELECT num_nulls(s.executed, s.replayed, s.in_progress, s.mismatch, s.denied, s.taken_over, s.released,
        s.claims_lost, s.locks_acquired, s.locks_busy, s.locks_lost, s.since)::int8 FROM idem_stats() AS s";
    assert_eq!(number(&mut admin, nothing), 12);
    run(&mut admin, "SELECT idem_stats_reset()");

    run(&mut admin, "SET log_min_messages = notice; SELECT idem_stats()");
    let log = server.log();
    assert!(log.contains("NOTICE:  idem counts nothing"), "{log}");
    assert!(log.contains(hint), "{log}");
}

#[test]
fn without_shared_memory_nobody_fails() {
    if needs_preload() {
        let server = Server::start(&[]);
        server.create_database("shop");
        let admin = server.connect("shop", "postgres");
        counts_nothing(&server, admin, "HINT:  Add idem to shared_preload_libraries");
        return;
    }
    // No memory can be had, because the folder is gone in which it would be a file. Who connects later needs some itself.
    let server = Server::start(&["dynamic_shared_memory_type=mmap"]);
    server.create_database("shop");
    let admin = server.connect("shop", "postgres");
    let folder = std::path::Path::new(server.dir()).join("data/pg_dynshmem");
    let elsewhere = folder.with_extension("moved");
    std::fs::rename(&folder, &elsewhere).unwrap();
    counts_nothing(&server, admin, "HINT:  See dynamic_shared_memory_type");
    std::fs::rename(&elsewhere, &folder).unwrap();
    assert_eq!(counted(&mut server.connect("shop", "postgres")), "nothing");
}

#[test]
fn loaded_with_the_server_it_counts_on_every_version() {
    let server = Server::start(&["shared_preload_libraries=idem"]);
    server.create_database("shop");
    let mut app = server.connect("shop", "app");
    run(&mut app, "SELECT idem_once('k'), idem_once('k')");
    assert_eq!(counted(&mut server.connect("shop", "postgres")), "executed 1, replayed 1");
}

/// The view of docs/monitoring.md tells from a waiter to the key and its holder.
#[test]
fn the_documented_view_finds_who_waits_for_whom() {
    let document = include_str!("../../docs/monitoring.md");
    let from = document.find("CREATE VIEW idem_sessions").expect("the document has the view");
    let view = &document[from..from + document[from..].find("```").expect("its block ends")];
    let db = TestDb::new();
    let mut admin = db.admin();
    run(&mut admin, view);

    let mut holder = db.app();
    let token =
        acquire(&mut holder, "k", ", scope => 'tenant-ü', owner => 'alice', lease => '600s'");
    let sleeper = Waiter::sleeping(
        &mut admin,
        db.app(),
        "k",
        ", scope => 'tenant-ü', lease => '1s', wait => '120s'",
    );
    let session = "SELECT format('%s: %s %s %s of %s, blocked by %s', state, kind, scope, name, holder, blocked_by)
        FROM idem_sessions WHERE pid = $1";
    let mut of = |pid: i32| admin.query_one(session, &[&pid]).unwrap().get::<_, String>(0);
    assert_eq!(of(sleeper.pid), "waits for a lease: key tenant-ü k of alice, blocked by ");

    run(&mut holder, "BEGIN");
    let extend = "SELECT idem_extend('k', $1, scope => 'tenant-ü')";
    holder.query_one(extend, &[&token]).unwrap();
    let mut second = db.app();
    let queued = pid(&mut second);
    let release = std::thread::spawn(move || {
        second
            .query_one("SELECT idem_release('k', $1, 'tenant-ü')", &[&token])
            .map(|row| row.get::<_, bool>(0))
    });
    eventually("the second queues", || queues(&mut db.admin(), queued));
    let holding = pid(&mut holder);
    let waits =
        format!("waits for a transaction: key tenant-ü k of alice, blocked by {{{holding}}}");
    assert_eq!(of(queued), waits);
    assert_eq!(of(holding), "holds: key tenant-ü k of alice, blocked by ");
    run(&mut holder, "COMMIT");
    assert!(release.join().unwrap().unwrap());
    assert_eq!(sleeper.answer().0.status, "acquired");

    // Locks likewise.
    let token: uuid::Uuid =
        holder.query_one("SELECT token FROM lock_try('k', holder => 'bob')", &[]).unwrap().get(0);
    run(&mut holder, "BEGIN");
    holder.query_one("SELECT lock_guard('k', $1)", &[&token]).unwrap();
    assert_eq!(of(holding), "holds: lock  k of bob, blocked by ");
}
