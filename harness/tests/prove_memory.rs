//! A backend does not grow with the number of calls: every kind of call, tens of thousands of times in `make test`, a
//! million times in `make prove`, in transactions of their own and in one that goes on and on.

mod common;

use common::*;
use idem_harness::{TestDb, rounds};
use postgres::Client;

/// A batch of `{n}` calls; `{from}` is a number that no other batch has.
const KINDS: &[(&str, &str)] = &[
    (
        "fresh transactions",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP
             PERFORM idem_begin('fresh ' || {from} + i, '\\x01'); PERFORM idem_complete('fresh ' || {from} + i, '{\"a\": 1}', ttl => '1us'); COMMIT;
         END LOOP; END $$",
    ),
    (
        "replays, one transaction each",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP PERFORM idem_begin('done'); COMMIT; END LOOP; END $$",
    ),
    (
        "replays in one transaction",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP PERFORM idem_begin('done'); END LOOP; END $$",
    ),
    (
        "the same claim again, in one transaction",
        "DO $$ BEGIN PERFORM idem_begin('again'); FOR i IN 1..{n} LOOP PERFORM idem_begin('again'); END LOOP;
         PERFORM idem_release('again'); END $$",
    ),
    (
        "mismatches and denials",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP PERFORM idem_begin('done', '\\x02'), idem_begin('done', owner => 'other'); END LOOP; END $$",
    ),
    (
        "leases: begun, extended, saved, released",
        "DO $$ DECLARE b record; BEGIN FOR i IN 1..{n} LOOP
             b := idem_begin('leased', lease => '1h'); COMMIT;
             PERFORM idem_extend('leased', b.token), idem_checkpoint('leased', '{\"a\": [1, 2]}', b.token); COMMIT;
             PERFORM idem_release('leased', b.token); COMMIT;
         END LOOP; END $$",
    ),
    (
        "errors that are caught",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP
             BEGIN PERFORM idem_complete('done', '1'); EXCEPTION WHEN SQLSTATE 'ID003' THEN NULL; END;
             BEGIN PERFORM idem_begin(''); EXCEPTION WHEN invalid_parameter_value THEN NULL; END;
             BEGIN PERFORM idem_run('bad', 'fails(jsonb)', '1'); EXCEPTION WHEN division_by_zero THEN NULL; END;
             COMMIT;
         END LOOP; END $$",
    ),
    (
        "claims rolled back with their savepoint",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP
             BEGIN PERFORM idem_begin('undone'); PERFORM idem_complete('undone', '1'); RAISE division_by_zero;
             EXCEPTION WHEN division_by_zero THEN NULL; END;
             IF i % 1000 = 0 THEN COMMIT; END IF;
         END LOOP; END $$",
    ),
    (
        "whole operations",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP
             PERFORM idem_run('run', 'echo(jsonb)', '{\"a\": 1}'), idem_once('once'), idem_once('once ' || {from} + i, ttl => '1us'); COMMIT;
         END LOOP; END $$",
    ),
    (
        "locks",
        "DO $$ DECLARE l record; BEGIN FOR i IN 1..{n} LOOP
             l := lock_try('n', ttl => '1h', holder => 'me'); COMMIT;
             PERFORM lock_guard('n', l.token), lock_extend('n', l.token); COMMIT;
             PERFORM lock_unlock('n', l.token); COMMIT;
             PERFORM lock_try_xact('x'), lock_acquire_xact('y', wait => '1ms'), lock_try('busy'); COMMIT;
         END LOOP; END $$",
    ),
    (
        "looks",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP PERFORM * FROM idem_get('done'); PERFORM * FROM idem_get('absent'); END LOOP; END $$",
    ),
    (
        "fingerprints",
        "DO $$ BEGIN FOR i IN 1..{n} LOOP
             PERFORM idem_fingerprint('a', i::text), idem_compose_key('a', i::text), idem_fingerprint_json(jsonb_build_object('a', i, 'b', ARRAY[1, 2]));
         END LOOP; END $$",
    ),
];

/// Bytes of all memory contexts, and of the process that are its own.
fn measure(client: &mut Client) -> (i64, i64) {
    let row = client
        .query_one(
            "SELECT sum(total_bytes)::bigint, pg_backend_pid() FROM pg_backend_memory_contexts",
            &[],
        )
        .unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", row.get::<_, i32>(1))).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("Linux says so");
    let kilobytes: i64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    (row.get(0), kilobytes * 1024)
}

#[test]
fn a_backend_does_not_grow() {
    let db = TestDb::new();
    let mut admin = db.admin();
    run(
        &mut admin,
        "CREATE FUNCTION echo(r jsonb) RETURNS jsonb LANGUAGE sql RETURN r;
         CREATE FUNCTION fails(r jsonb) RETURNS jsonb LANGUAGE sql RETURN to_jsonb(1 / (r::int - 1));
         SELECT idem_run('done', 'echo(jsonb)', '1', owner => 'me')",
    );
    run(&mut admin, "SELECT lock_try('busy', ttl => '10h')");
    let batch = 250;
    let batches = rounds(40, 4_000);
    for (kind, sql) in KINDS {
        let mut client = db.admin();
        run(&mut client, "SET synchronous_commit = off");
        let mut from = 0;
        let mut calls = |client: &mut Client, batches: u64| {
            for _ in 0..batches {
                let text =
                    sql.replace("{n}", &batch.to_string()).replace("{from}", &from.to_string());
                run(client, &text);
                from += batch;
            }
        };
        // Caches fill at first.
        calls(&mut client, batches.min(100) / 2);
        let (contexts, process) = measure(&mut client);
        calls(&mut client, batches);
        let (contexts_after, process_after) = measure(&mut client);
        let grown = contexts_after - contexts;
        let process_grown = process_after - process;
        println!(
            "{kind}: {} × : contexts {grown:+}, process {process_grown:+} bytes",
            batches * batch
        );
        // Not a byte a call: what is left over is the caches' business.
        assert!(grown < 128 << 10, "{kind}: memory contexts grew by {grown} bytes");
        assert!(process_grown < 1 << 20, "{kind}: the process grew by {process_grown} bytes");
    }
}
