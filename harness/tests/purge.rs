//! Purging: what has expired goes, whoever works meanwhile; what is in use is left for the next call, which never waits.

mod common;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;

use common::*;
use idem_harness::{Server, TestDb, eventually, sqlstate};
use postgres::Client;
use serde_json::json;

/// In every home, whichever they are: the physical rows of records.
const ROWS: &str = "SELECT count(*) FROM idem_records";

fn purge(client: &mut Client) -> i64 {
    number(client, "SELECT idem_purge()")
}

/// Runs a key in a transaction of its own; the record counts for `ttl`.
#[track_caller]
fn run_once(client: &mut Client, key: &str, ttl: &str) {
    let mut work = client.transaction().unwrap();
    acquire(&mut work, key, "");
    work.execute(&format!("SELECT idem_complete($1, '1', ttl => '{ttl}')"), &[&key]).unwrap();
    work.commit().unwrap();
}

/// Fills the current segment with so many records, whose results lie outside the row.
fn fill(admin: &mut Client, rows: i32, expire: &str) {
    let segment = current(admin);
    run(
        admin,
        &format!(
            "INSERT INTO {segment} SELECT gen_random_uuid(), gen_random_uuid(), now(), now(), now() + '{expire}', 1, '', i || repeat('x', 200), NULL, NULL,
                 to_jsonb((SELECT string_agg(gen_random_uuid()::text, '') FROM generate_series(1, 80 + i % 2))), NULL
             FROM generate_series(1, {rows}) AS i;
             SELECT pg_stat_force_next_flush()"
        ),
    );
}

fn current(admin: &mut Client) -> String {
    admin.query_one("SELECT 'idem_segment_' || max(turn) % 8 FROM idem_ring", &[]).unwrap().get(0)
}

/// Has the bound of the current segment be over. Purges read the ring anew each time.
fn end_turn(admin: &mut Client) {
    run(
        admin,
        "UPDATE idem_ring SET bound = now() - interval '1 s' WHERE turn = (SELECT max(turn) FROM idem_ring)",
    );
}

/// Purges until nothing is left that could be reclaimed: autovacuum may be in the way for a moment.
#[track_caller]
fn purge_all(admin: &mut Client) {
    eventually("everything that expired is reclaimed", || {
        purge(admin);
        number(admin, "SELECT count(*) FROM idem_records WHERE state = 'expired'") == 0
    });
}

#[test]
fn a_large_segment_is_emptied_as_a_whole_when_it_is_over_and_not_before() {
    let db = TestDb::new();
    let mut admin = db.admin();
    fill(&mut admin, 3_000, "-1 s");
    let segment = current(&mut admin);
    assert_eq!(purge(&mut admin), 0, "its bound has not passed");
    assert_eq!(number(&mut admin, ROWS), 3_000);
    end_turn(&mut admin);
    let position = "SELECT pg_current_wal_insert_lsn() - '0/0'";
    let before: String =
        admin.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).unwrap().get(0);
    let wal = position.replace("0/0", &before);
    eventually("the segment is emptied", || purge(&mut admin) == 3_000);
    let wal: String = admin.query_one(&format!("SELECT ({wal})::text"), &[]).unwrap().get(0);
    assert!(wal.parse::<u64>().unwrap() < 1 << 20, "{wal} bytes of WAL");
    assert_eq!(number(&mut admin, ROWS), 0);
    // A page of each index and of nothing else.
    assert_eq!(
        number(&mut admin, &format!("SELECT pg_total_relation_size('{segment}')")),
        2 * 8192
    );
    // What is written now fits its new bound.
    run_once(&mut db.app(), "after", "1 h");
    let next = current(&mut admin);
    assert_ne!(next, segment);
    assert_eq!(number(&mut admin, &format!("SELECT count(*) FROM {next}")), 1);
}

#[test]
fn what_is_in_use_is_left_for_the_next_call() {
    let db = TestDb::new();
    let (mut admin, mut other) = (db.admin(), db.admin());
    let toast = "pg_toast.pg_toast_";
    for in_use in [
        // pg_dump, or a query on the view.
        "SELECT 1 FROM SEGMENT LIMIT 1",
        // A completion that is not committed.
        "SELECT idem_begin('open'); SELECT idem_complete('open')",
        // Autovacuum, of the table or of what lies outside the rows.
        "LOCK TABLE SEGMENT IN SHARE UPDATE EXCLUSIVE MODE",
        "SELECT 1 FROM TOAST LIMIT 1",
        "LOCK TABLE ONLY SEGMENT IN ACCESS EXCLUSIVE MODE",
    ] {
        let segment = current(&mut admin);
        fill(&mut admin, 3_000, "-1 s");
        let toast = format!(
            "{toast}{}",
            number(&mut admin, &format!("SELECT '{segment}'::regclass::oid::bigint"))
        );
        run(&mut other, "BEGIN");
        run(&mut other, &in_use.replace("SEGMENT", &segment).replace("TOAST", &toast));
        end_turn(&mut admin);
        // Without waiting; the other is not hurt.
        run(&mut admin, "SET lock_timeout = '1ms'");
        assert_eq!(purge(&mut admin), 0, "{in_use}");
        run(&mut admin, "RESET lock_timeout");
        assert_eq!(our_locks(&mut admin), i64::from(in_use.contains("idem_begin")));
        let size = format!("SELECT pg_table_size('{segment}')");
        if !in_use.contains("EXCLUSIVE MODE") {
            assert!(number(&mut other, &size) > 1 << 20, "{in_use}");
        }
        run(&mut other, "COMMIT");
        eventually("the segment is emptied", || {
            purge(&mut admin);
            number(&mut admin, &size) <= 8192
        });
        run(&mut admin, "SELECT idem_forget('open')");
        // On to a segment of its own for the next.
        eventually("the ring has moved on", || {
            run(&mut admin, "SET idem.ttl = '3649d'");
            purge(&mut admin);
            run(&mut admin, "RESET idem.ttl");
            current(&mut admin) != segment
        });
    }
}

#[test]
fn a_purge_that_is_rolled_back_or_crashes_has_done_nothing() {
    let server = Server::start(&["fsync=on", "autovacuum=off"]);
    server.create_database("shop");
    let mut admin = server.connect("shop", "postgres");
    fill(&mut admin, 3_000, "-1 s");
    run(&mut admin, "SELECT idem_begin('abandoned', lease => '1 us')");
    run(&mut admin, "UPDATE idem_claims SET expires_at = now() - interval '2 days'");
    run(&mut admin, "SELECT lock_try('idle')");
    run(&mut admin, "UPDATE idem_locks SET expires_at = now() - interval '2 days'");
    run_once(&mut admin, "long", "100 days");
    run(&mut admin, "UPDATE idem_long SET expires_at = now()");
    end_turn(&mut admin);
    run(&mut admin, "CHECKPOINT");
    let state = "SELECT (SELECT count(*) FROM idem_records) + 10 * (SELECT count(*) FROM idem_locks) + 100 * (SELECT max(turn) FROM idem_ring)";
    let before = number(&mut admin, state);
    assert_eq!(before, 3_002 + 10);

    for crash in [false, true] {
        run(&mut admin, "BEGIN");
        assert_eq!(purge(&mut admin), 3_003);
        assert_eq!(number(&mut admin, state), 100);
        if crash {
            // So that the WAL of all of it is there.
            run(&mut server.connect("postgres", "postgres"), "SELECT pg_switch_wal()");
            server.kill9();
            server.start_again();
            admin = server.connect("shop", "postgres");
        } else {
            run(&mut admin, "ROLLBACK");
        }
        assert_eq!(number(&mut admin, state), before, "crash {crash}");
        // And works on.
        run_once(&mut admin, &format!("crash {crash}"), "1 day");
        assert_eq!(status(&mut admin, &format!("crash {crash}"), ""), "completed");
        run(&mut admin, &format!("SELECT idem_forget('crash {crash}')"));
    }

    // The crash took the statistics along: the size of the segment is all there is.
    let reclaimed = purge(&mut admin);
    assert!((1_000..10_000).contains(&reclaimed), "{reclaimed}");
    server.kill9();
    server.start_again();
    let mut admin = server.connect("shop", "postgres");
    assert_eq!(number(&mut admin, state), 100, "what was committed is purged for good");
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_floors"), 1);
}

#[test]
fn a_writer_that_waits_for_a_segment_looks_at_its_turn_again() {
    let db = TestDb::new();
    let (mut admin, mut writer) = (db.admin(), db.app());
    run(&mut writer, "BEGIN");
    acquire(&mut writer, "key", "");
    // The ring moves on; its next segment is locked when the writer wants to write to it.
    run(&mut admin, "SET idem.ttl = '3649d'");
    purge(&mut admin);
    assert_eq!(current(&mut admin), "idem_segment_1");
    let mut other = db.admin();
    run(&mut other, "BEGIN; LOCK TABLE idem_segment_1 IN ACCESS EXCLUSIVE MODE");
    let writer_pid = pid(&mut writer);
    let writing = std::thread::spawn(move || {
        complete(&mut writer, "key", &json!(1), None);
        run(&mut writer, "COMMIT");
        writer
    });
    eventually("the writer waits", || queues(&mut admin, writer_pid));
    begin_another_turn(&mut other);
    went_where_it_may_stay(&mut admin, &mut writing.join().unwrap());
}

/// The first segment, locked by this transaction, begins another turn, with a bound that a record would outlive. ALTER tells the
/// sessions.
fn begin_another_turn(owner: &mut Client) {
    run(
        owner,
        "UPDATE idem_ring SET turn = 9, bound = now() + interval '1 s' WHERE turn = 1;
         ALTER TABLE idem_ring SET (fillfactor = 90); COMMIT",
    );
}

fn went_where_it_may_stay(admin: &mut Client, writer: &mut Client) {
    let homes =
        "SELECT 10 * (SELECT count(*) FROM idem_long) + (SELECT count(*) FROM idem_segment_1)";
    assert_eq!(number(admin, homes), 10, "it went where it may stay");
    assert_eq!(status(writer, "key", ""), "completed");
}

/// The same where the ring has moved on between the writer's idea of it and its lock of the segment.
#[test]
fn a_writer_that_finds_another_turn_waits_for_its_segment_and_looks_again() {
    let db = TestDb::new();
    let (mut admin, mut other, mut writer) = (db.admin(), db.admin(), db.app());
    acquire(&mut writer, "key", ", lease => '1 us'");
    run(&mut writer, "BEGIN");
    // It took over, so that it looks for what it is to replace before it writes.
    acquire(&mut writer, "key", "");
    run(&mut other, "BEGIN; LOCK TABLE idem_claims IN ACCESS EXCLUSIVE MODE");
    let writer_pid = pid(&mut writer);
    let writing = std::thread::spawn(move || {
        complete(&mut writer, "key", &json!(1), None);
        run(&mut writer, "COMMIT");
        writer
    });
    eventually("the writer looks", || queues(&mut admin, writer_pid));
    // A purge waits for none of the tables.
    run(&mut admin, "SET idem.ttl = '3649d'; SET lock_timeout = '1ms'");
    purge(&mut admin);
    run(&mut admin, "RESET lock_timeout");
    assert_eq!(current(&mut admin), "idem_segment_1");
    run(&mut admin, "BEGIN; LOCK TABLE idem_segment_1 IN ACCESS EXCLUSIVE MODE");
    run(&mut other, "COMMIT");
    let waits =
        "SELECT count(*) FROM pg_locks WHERE relation = 'idem_segment_1'::regclass AND NOT granted";
    eventually("the writer waits for the new segment", || number(&mut other, waits) == 1);
    begin_another_turn(&mut admin);
    went_where_it_may_stay(&mut admin, &mut writing.join().unwrap());
}

#[test]
fn a_purge_waits_for_no_table() {
    let db = TestDb::new();
    let (mut admin, mut other) = (db.admin(), db.admin());
    run(&mut admin, "SET lock_timeout = '1ms'");
    for table in
        ["idem_claims", "idem_long", "idem_locks", "idem_floors", "idem_ring", "idem_filters"]
    {
        run(&mut other, &format!("BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"));
        assert_eq!(purge(&mut admin), 0, "{table}");
        run(&mut other, "COMMIT");
    }
}

/// Nine thousand records in the first segment, whose turn is over, with a filter.
fn filtered(admin: &mut Client) {
    fill_first(admin);
    end_first_turn(admin);
    make_filter(admin);
}

fn fill_first(admin: &mut Client) {
    // Not more at once than there is room for locks.
    for first in [1, 3_001, 6_001] {
        let keys = format!("generate_series({first}, {first} + 2999)");
        run(admin, &format!("SELECT idem_once('key-' || i) FROM {keys} AS i"));
    }
}

fn end_first_turn(admin: &mut Client) {
    run(admin, "UPDATE idem_ring SET started_at = started_at - interval '1 day'");
    eventually("the ring moves on", || {
        purge(admin);
        current(admin) == "idem_segment_1"
    });
}

/// Purges until the first segment has a filter, and one that its state still agrees with. Each call has rows to delete, too.
fn make_filter(admin: &mut Client) {
    run(admin, "SELECT pg_stat_force_next_flush()");
    let expired = "INSERT INTO idem_long SELECT gen_random_uuid(), gen_random_uuid(), now(), now(), now(), 1, '', i::text
                   FROM generate_series(1, 100) AS i";
    let good = "SELECT count(*) FROM idem_filters
                WHERE segment = 0 AND file = pg_relation_filenode('idem_segment_0')
                AND blocks = pg_relation_size('idem_segment_0') / 8192
                AND written = pg_stat_get_tuples_inserted('idem_segment_0'::regclass)";
    eventually("the filter is made", || {
        run(admin, expired);
        purge(admin);
        number(admin, good) == 1
    });
}

/// How often the index of the first segment is looked into while so many keys are begun that are new.
fn looks_for_new_keys(db: &TestDb, admin: &mut Client, keys: i64) -> i64 {
    let looks = "SELECT pg_stat_get_numscans('idem_segment_0_pkey'::regclass)";
    let mut app = db.app();
    run(&mut app, "SELECT pg_stat_force_next_flush()");
    let before = number(admin, looks);
    let begin = format!(
        "SELECT count(*) FROM generate_series(1, {keys}) AS i, LATERAL (SELECT * FROM idem_begin('new-' || i) OFFSET 0) AS b WHERE status = 'acquired'"
    );
    let mut work = app.transaction().unwrap();
    assert_eq!(number(&mut work, &begin), keys);
    work.rollback().unwrap();
    run(&mut app, "SELECT pg_stat_force_next_flush()");
    run(&mut app, "SELECT 1");
    number(admin, looks) - before
}

#[test]
fn new_keys_are_told_by_a_filter_and_old_ones_are_found() {
    let db = TestDb::new();
    let mut admin = db.admin();
    filtered(&mut admin);
    let with = looks_for_new_keys(&db, &mut admin, 1_000);
    assert!(with < 100, "{with} of 1,000 keys were looked for in the segment");
    let replays = "SELECT count(*) FROM generate_series(1, 9000) AS i, LATERAL (SELECT * FROM idem_begin('key-' || i) OFFSET 0) AS b
                   WHERE status = 'completed'";
    assert_eq!(number(&mut db.app(), replays), 9_000);
    // Without it, or with the name of memory that is not there or not idem's, each is looked for.
    for memory in ["1", "memory + (1::bigint << 32)"] {
        run(&mut admin, &format!("UPDATE idem_filters SET memory = {memory}"));
        assert_eq!(looks_for_new_keys(&db, &mut admin, 1_000), 1_000, "{memory}");
        make_filter(&mut admin);
        run(&mut admin, "SELECT 1");
    }
    // It goes with what it is made of.
    run(
        &mut admin,
        "UPDATE idem_segment_0 SET expires_at = now(); UPDATE idem_ring SET bound = now() WHERE turn = 0",
    );
    purge_all(&mut admin);
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_filters"), 0);
}

#[test]
fn a_segment_that_somebody_still_writes_to_gets_no_filter() {
    let db = TestDb::new();
    let (mut admin, mut writer) = (db.admin(), db.app());
    fill_first(&mut admin);
    run(&mut writer, "BEGIN");
    acquire(&mut writer, "late", "");
    complete(&mut writer, "late", &json!(1), None);
    end_first_turn(&mut admin);
    for _ in 0..3 {
        assert_eq!(purge(&mut admin), 0);
    }
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_filters"), 0);
    run(&mut writer, "COMMIT");
    // Nor in a transaction that may be rolled back, from which the memory would stay.
    run(&mut admin, "BEGIN; SELECT idem_purge(); COMMIT");
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_filters"), 0);
    make_filter(&mut admin);
    assert_eq!(status(&mut db.app(), "late", ""), "completed");
}

/// Where one statement purges twice, the second call sees a turn that nobody else knows of.
#[test]
fn a_turn_that_is_not_committed_makes_no_filter_and_no_segment_that_stays_empty() {
    let db = TestDb::new();
    let (mut admin, mut writer) = (db.admin(), db.app());
    let age = "UPDATE idem_ring SET started_at = started_at - interval '1 day'";

    // Segment 0 is empty, and its turn has ended, but for others it goes on. They know the tables already.
    run(&mut writer, "BEGIN; SELECT idem_begin('first'); ROLLBACK");
    run(&mut admin, age);
    run(&mut admin, "BEGIN; SELECT idem_purge()");
    assert_eq!(current(&mut admin), "idem_segment_1");
    assert_eq!(status(&mut admin, "any", ", lease => '1h'"), "acquired");
    run_once(&mut writer, "meanwhile", "1 h");
    assert_eq!(number(&mut db.admin(), "SELECT count(*) FROM idem_segment_0"), 1);
    assert_eq!(status(&mut admin, "meanwhile", ""), "completed");
    run(&mut admin, "ROLLBACK; TRUNCATE idem_segment_0");

    fill_first(&mut admin);
    run(&mut admin, age);
    run(&mut admin, "SELECT sum(idem_purge()) FROM generate_series(1, 4)");
    assert_eq!(current(&mut admin), "idem_segment_1");
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_filters"), 0);
}

/// A call that finds its row purged changes nothing, and so holds nothing.
#[test]
fn a_key_whose_claim_was_purged_meanwhile_is_free() {
    for end in ["SELECT idem_release('k', $1)", "SELECT $1::uuid IS NULL OR idem_forget('k')"] {
        let db = TestDb::new();
        let (mut admin, mut stale) = (db.admin(), db.admin());
        let token = acquire(&mut stale, "k", ", lease => '1 us'");
        run(&mut admin, "UPDATE idem_claims SET expires_at = now() - interval '2 days'");
        run(&mut admin, "BEGIN");
        assert_eq!(purge(&mut admin), 1);
        let pid = pid(&mut stale);
        let ending = std::thread::spawn(move || {
            run(&mut stale, "BEGIN");
            let ended: bool = stale.query_one(end, &[&token]).unwrap().get(0);
            (ended, stale)
        });
        let mut other = db.admin();
        eventually("it waits for the purge", || queues(&mut other, pid));
        run(&mut admin, "COMMIT");
        let (ended, mut stale) = ending.join().unwrap();
        assert!(!ended, "{end}");
        assert_eq!(status(&mut other, "k", ", lease => '1h'"), "acquired", "{end}");
        run(&mut stale, "COMMIT");
    }
}

#[test]
fn a_record_that_was_put_behind_a_filter_by_sql_is_found() {
    let db = TestDb::new();
    let (mut admin, mut app) = (db.admin(), db.app());
    filtered(&mut admin);
    run_once(&mut app, "moved", "1 h");
    assert_eq!(status(&mut app, "moved", ""), "completed");
    // Into a block that is there, so that only the statistics tell.
    run(&mut admin, "DELETE FROM idem_segment_0 WHERE key LIKE 'key-1%'");
    run(&mut admin, "VACUUM idem_segment_0");
    make_filter(&mut admin);
    assert!(looks_for_new_keys(&db, &mut admin, 1_000) < 100);
    let blocks = "SELECT pg_relation_size('idem_segment_0')";
    let before = number(&mut admin, blocks);
    run(
        &mut admin,
        "WITH moved AS (DELETE FROM idem_segment_1 WHERE key = 'moved' RETURNING *)
         INSERT INTO idem_segment_0 SELECT * FROM moved;
         SELECT pg_stat_force_next_flush()",
    );
    assert_eq!(number(&mut admin, blocks), before);
    eventually("it is found", || {
        run(&mut app, "BEGIN");
        let found = status(&mut app, "moved", "") == "completed";
        run(&mut app, "ROLLBACK");
        found
    });
}

#[test]
fn filters_are_made_anew_after_a_restart_or_crash() {
    let server = Server::start(&["fsync=on", "autovacuum=off"]);
    server.create_database("shop");
    let mut admin = server.connect("shop", "postgres");
    filtered(&mut admin);
    let name = "SELECT memory FROM idem_filters WHERE segment = 0";
    for kill in [Server::kill9, |server: &Server| server.stop("fast")] {
        let before = number(&mut admin, name);
        kill(&server);
        server.start_again();
        admin = server.connect("shop", "postgres");
        for (key, told) in [("key-1", "completed"), ("new", "acquired")] {
            let sql =
                "SELECT status FROM (SELECT * FROM idem_begin($1, lease => '1h') OFFSET 0) AS b";
            let mut work = admin.transaction().unwrap();
            let status: String = work.query_one(sql, &[&key]).unwrap().get(0);
            assert_eq!(status, told);
            work.rollback().unwrap();
        }
        make_filter(&mut admin);
        eventually("a filter that is there", || {
            purge(&mut admin);
            number(&mut admin, name) != before
        });
    }
}

#[test]
fn a_record_that_a_transaction_replaces_is_not_purged_and_one_that_is_purged_is_gone() {
    let db = TestDb::new();
    let (mut admin, mut client) = (db.admin(), db.app());
    let expire = "UPDATE idem_claims SET expires_at = now() - interval '2 days'";

    // Taken over at this moment: not removed, whether or not it commits.
    acquire(&mut client, "claim", ", lease => '1 us'");
    run(&mut admin, expire);
    run(&mut client, "BEGIN");
    assert_eq!(begin(&mut client, "claim", ", lease => '1 h'").attempt, Some(2));
    assert_eq!(purge(&mut admin), 0);
    run(&mut client, "ROLLBACK; BEGIN");
    let taken = begin(&mut client, "claim", ", lease => '1 h'");
    assert_eq!(taken.attempt, Some(2));
    assert_eq!(purge(&mut admin), 0);
    run(&mut client, "COMMIT");
    assert_eq!(purge(&mut admin), 0);
    complete(&mut client, "claim", &json!(1), taken.token);

    // Purged at this moment: who wants it waits for the purge, and finds nothing.
    for purged in [true, false] {
        for what in ["takeover", "complete", "extend", "release", "lock"] {
            let key = format!("{what} {purged}");
            let mut token = None;
            if what == "lock" {
                run(&mut client, &format!("SELECT lock_try('{key}')"));
                run(
                    &mut admin,
                    "UPDATE idem_locks SET expires_at = now() - interval '2 days', fence = fence + 1000000000000000",
                );
            } else {
                token = Some(acquire(&mut client, &key, ", lease => '1 us'"));
                run(&mut admin, expire);
            }
            run(&mut admin, "BEGIN");
            assert_eq!(purge(&mut admin), 1, "{key}");
            let mut other = db.app();
            let (other_pid, asked) = (pid(&mut other), key.clone());
            let waiting = std::thread::spawn(move || -> String {
                match what {
                    "takeover" => {
                        let begun = begin(&mut other, &asked, ", lease => '1 h'");
                        format!("{} {:?}", begun.status, begun.attempt.unwrap())
                    }
                    "complete" => match try_complete(&mut other, &asked, &json!(1), token) {
                        Ok(()) => "completed".into(),
                        Err(error) => sqlstate(&error).into(),
                    },
                    "extend" => {
                        let extend = "SELECT idem_extend($1, $2)";
                        match other.execute(extend, &[&asked, &token]) {
                            Ok(_) => "extended".into(),
                            Err(error) => sqlstate(&error).into(),
                        }
                    }
                    "release" => release(&mut other, &asked, token).to_string(),
                    _ => {
                        let row = other
                            .query_one(
                                "SELECT acquired AND fence > 1000000000000000 FROM lock_try($1)",
                                &[&asked],
                            )
                            .unwrap();
                        row.get::<_, bool>(0).to_string()
                    }
                }
            });
            eventually("it waits", || queues(&mut db.admin(), other_pid));
            run(&mut admin, if purged { "COMMIT" } else { "ROLLBACK" });
            let expected = match (what, purged) {
                ("takeover", true) => "acquired 1",
                ("takeover", false) => "acquired 2",
                ("complete" | "extend", true) => "ID003",
                ("complete", false) => "completed",
                ("extend", false) => "extended",
                ("release", true) => "false",
                _ => "true",
            };
            assert_eq!(waiting.join().unwrap(), expected, "{key}");
            run(
                &mut admin,
                "DELETE FROM idem_claims; DELETE FROM idem_locks; DELETE FROM idem_floors",
            );
        }
    }
}

#[test]
fn two_purges_and_a_purge_in_a_transaction_that_uses_the_tables() {
    let db = TestDb::new();
    let (mut admin, mut other) = (db.admin(), db.admin());
    fill(&mut admin, 3_000, "-1 s");
    end_turn(&mut admin);
    run(&mut admin, "BEGIN");
    assert_eq!(purge(&mut admin), 3_000);
    run(&mut other, "SET lock_timeout = '1ms'");
    assert_eq!(purge(&mut other), 0, "the other waits for nothing");
    run(&mut admin, "COMMIT");
    run(&mut other, "RESET lock_timeout");
    run_once(&mut admin, "a", "1 h");

    // A cursor on the view has the tables open: they are left alone, and the cursor works on.
    run(
        &mut admin,
        "INSERT INTO idem_segment_0 SELECT * FROM idem_segment_1; UPDATE idem_segment_0 SET expires_at = now()",
    );
    run(&mut admin, "BEGIN; DECLARE c CURSOR FOR SELECT key FROM idem_records; FETCH c");
    assert_eq!(purge(&mut admin), 0);
    run(&mut admin, "FETCH ALL FROM c; COMMIT");
    purge_all(&mut admin);

    // In the very transaction that has looked and written.
    run(&mut admin, "BEGIN");
    acquire(&mut admin, "b", "");
    complete(&mut admin, "b", &json!(1), None);
    purge(&mut admin);
    assert_eq!(status(&mut admin, "b", ""), "completed");
    run(&mut admin, "SAVEPOINT s; SET LOCAL idem.ttl = '3649d'");
    purge(&mut admin);
    run(&mut admin, "ROLLBACK TO s");
    acquire(&mut admin, "c", "");
    complete(&mut admin, "c", &json!(1), None);
    run(&mut admin, "COMMIT");
    assert_eq!(current(&mut admin), "idem_segment_1");
    for key in ["a", "b", "c"] {
        assert_eq!(status(&mut other, key, ""), "completed", "{key}");
    }
}

#[test]
fn expired_rows_go_in_batches_and_others_stay() {
    let db = TestDb::new();
    let (mut admin, mut app) = (db.admin(), db.app());
    for i in 0..5 {
        run_once(&mut app, &format!("long {i}"), "100 days");
        run_once(&mut app, &format!("short {i}"), "1 h");
        acquire(&mut app, &format!("claim {i}"), ", lease => '1 us'");
        run(&mut app, &format!("SELECT lock_try('lock {i}', ttl => '1 us')"));
    }
    assert_eq!(number(&mut admin, "SELECT count(*) FROM idem_long"), 5);
    run(
        &mut admin,
        "UPDATE idem_long SET expires_at = now() WHERE key <> 'long 4';
         UPDATE idem_claims SET expires_at = now() - interval '1 day' WHERE key <> 'claim 4';
         UPDATE idem_locks SET expires_at = now() - interval '1 day' WHERE name <> 'lock 4'",
    );
    let left = "SELECT (SELECT count(*) FROM idem_records) + (SELECT count(*) FROM idem_locks)";
    for (rows, deleted, then) in [(3, 3, 17), (3, 3, 14), (5, 5, 9), (5, 1, 8), (5, 0, 8)] {
        assert_eq!(number(&mut admin, &format!("SELECT idem_purge({rows})")), deleted);
        assert_eq!(number(&mut admin, left), then);
    }
    // The one that was abandoned a moment ago keeps its attempt.
    assert_eq!(begin(&mut app, "claim 4", ", lease => '1 h'").attempt, Some(2));
    assert_eq!(begin(&mut app, "claim 3", ", lease => '1 h'").attempt, Some(1));
    assert_eq!(status(&mut app, "long 4", ""), "completed");
}

#[test]
fn the_ring_turns_under_traffic_and_every_key_still_runs_once() {
    let db = TestDb::new();
    let mut admin = db.admin();
    run(&mut admin, &format!("ALTER DATABASE {} SET idem.ttl = '1 s'", db.name));
    // Two rows of a key are at least its ttl apart.
    run(
        &mut admin,
        "CREATE TABLE effect (key text, at timestamptz DEFAULT clock_timestamp());
         GRANT ALL ON effect TO app; CREATE INDEX ON effect (key, at)",
    );
    let stop = AtomicBool::new(false);
    let turns = Mutex::new(HashSet::new());
    scope(|scope| {
        for thread in 0..4 {
            let (db, stop) = (&db, &stop);
            scope.spawn(move || {
                let (mut client, mut random) = (db.app(), Random::new());
                while !stop.load(Ordering::Relaxed) {
                    let key = format!("key {}", random.below(50));
                    let ttl = ["300 ms", "1 s", "10 s"][random.below(3) as usize];
                    if random.below(4) == 0 {
                        // Leased, and mostly abandoned.
                        let begun =
                            begin(&mut client, &format!("{key} leased"), ", lease => '5 ms'");
                        if begun.status == "acquired" && random.below(2) == 0 {
                            let done = try_complete(
                                &mut client,
                                &format!("{key} leased"),
                                &json!(thread),
                                begun.token,
                            );
                            if let Err(error) = done {
                                assert_eq!(sqlstate(&error), "ID003", "{error:?}");
                            }
                        }
                        run(&mut client, "SELECT lock_try('name', ttl => '1 us')");
                        continue;
                    }
                    let mut work = client.transaction().unwrap();
                    match status(&mut work, &key, "").as_str() {
                        "acquired" => {
                            work.execute("INSERT INTO effect (key) VALUES ($1)", &[&key]).unwrap();
                            work.execute(
                                &format!("SELECT idem_complete($1, '1', ttl => '{ttl}')"),
                                &[&key],
                            )
                            .unwrap();
                        }
                        "completed" | "in_progress" => {}
                        other => panic!("{other}"),
                    }
                    work.commit().unwrap();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                let mut client = db.admin();
                while !stop.load(Ordering::Relaxed) {
                    purge(&mut client);
                    turns.lock().unwrap().insert(current(&mut client));
                    // Not the whole time: the clients shall get somewhere.
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
            });
        }
        let done = std::panic::catch_unwind(|| {
            let mut admin = db.admin();
            for turn in [3, 6, 9] {
                eventually("the ring turns", || {
                    number(&mut admin, "SELECT max(turn) FROM idem_ring") >= turn
                });
            }
        });
        stop.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    assert_eq!(turns.lock().unwrap().len(), 8, "each segment had its turn");
    let early = "SELECT count(*) FROM (SELECT at - lag(at) OVER (PARTITION BY key ORDER BY at) AS apart FROM effect) AS e
                 WHERE apart < interval '250 ms'";
    assert_eq!(number(&mut admin, early), 0, "a key ran again before its record had expired");
    let twice = "SELECT count(*) FROM (SELECT 1 FROM idem_records GROUP BY scope, key HAVING count(*) > 1) AS twice";
    assert_eq!(number(&mut admin, twice), 0, "at most one row a key");
    let outlives = (0..8)
        .map(|n| {
            format!(
                "SELECT expires_at FROM idem_segment_{n}, (SELECT bound FROM idem_ring WHERE turn % 8 = {n} ORDER BY turn DESC LIMIT 1) AS turn
                 WHERE expires_at > bound"
            )
        })
        .collect::<Vec<_>>()
        .join(" UNION ALL ");
    assert_eq!(number(&mut admin, &format!("SELECT count(*) FROM ({outlives}) AS outlives")), 0);
}
