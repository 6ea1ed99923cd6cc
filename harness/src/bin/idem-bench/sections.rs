//! What is measured, section by section.

use idem_harness::{APP, Server};
use serde_json::json;
use uuid::Uuid;

use crate::clients::{Handover, drive, hand_over};
use crate::expiry;
use crate::load::{Bench, Load, Protocol};
use crate::measure::Sample;
use crate::plot::{Bar, Color};
use crate::redis_store::RedisServer;
use crate::report::{Columns, Report, thousands};

/// As in the scripts.
const HASH: &str = "'\\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef'";

type Section = fn(&Bench, &mut Report);

pub fn run(bench: &Bench, report: &mut Report) {
    let sections: [(&str, Section); 13] = [
        ("fresh", fresh),
        ("protocols", protocols),
        ("replay", replay),
        ("refusals", refusals),
        ("operations", whole_operations),
        ("sizes", sizes),
        ("outside", outside),
        ("locks", locks),
        ("redis", redis),
        ("waits", waits),
        ("crowds", crowds),
        ("scale", scale),
        ("expiry", expiry::run),
    ];
    for (name, section) in sections {
        if !bench.options.wants(name) {
            continue;
        }
        // Recycles the WAL, so that no section pays for another's.
        bench.empty_tables();
        bench.admin().batch_execute("CHECKPOINT").expect("a checkpoint");
        section(bench, report);
    }
}

pub fn labels(loads: &[Load]) -> Vec<&str> {
    loads.iter().map(|load| load.label.as_str()).collect()
}

fn bars(loads: &[Load], samples: &[Sample], of: fn(&Sample) -> f64) -> Vec<Bar> {
    let bar = |(load, sample): (&Load, &Sample)| Bar {
        label: load.label.clone(),
        value: of(sample),
        color: if load.label.starts_with("idem") {
            Color::Idem
        } else if ["bare", "two constant", "plain", "SELECT 1", "a built-in"]
            .iter()
            .any(|floor| load.label.starts_with(floor))
        {
            Color::Floor
        } else {
            Color::Other
        },
    };
    loads.iter().zip(samples).map(bar).collect()
}

const EACH_ONCE: &str =
    "(SELECT count(*) FROM work) = {n} AND (SELECT count(*) FROM idem_segment_0) = {n}";
const EACH_WRITTEN: &str = "(SELECT count(*) FROM work) = {n}";

fn fresh(bench: &Bench, report: &mut Report) {
    report.section(
        "A fresh transaction",
        "One business INSERT under a new key. The floor is the same number of round trips with a plain INSERT of the row that idem writes.",
    );
    let loads = [
        Load::new("bare transaction", "fresh_bare").check(EACH_WRITTEN),
        Load::new("two constant SELECTs", "fresh_selects").check(EACH_WRITTEN),
        Load::new("plain INSERT of the row", "fresh_insert").check(EACH_WRITTEN),
        Load::new("idem", "fresh_idem").check(EACH_ONCE),
        Load::new("INSERT … ON CONFLICT, UPDATE", "fresh_handwritten").check(EACH_WRITTEN),
        Load::new("PL/pgSQL pair", "fresh_pair").check(EACH_WRITTEN),
        Load::new("advisory lock and table", "fresh_advisory").check(EACH_WRITTEN),
        Load::new("claim, commit, complete", "fresh_library").check(EACH_WRITTEN),
    ];
    let samples = bench.compare_rounds(&loads, bench.options.rounds * 2 + 3);
    report.table(Columns::Written, 3, &labels(&loads), &samples);
    report.plot("fresh", "Fresh transactions a second", &bars(&loads, &samples, |s| s.rate));
    report.plot(
        "wal",
        "Bytes of WAL for each fresh transaction",
        &bars(&loads, &samples, |s| s.wal),
    );
    let (floor, idem, handwritten) = (&samples[2], &samples[3], &samples[4]);
    report.at_least("fresh transaction / plain INSERT of the row", idem.rate / floor.rate, 0.97);
    report.at_least("fresh transaction / hand-written SQL", idem.rate / handwritten.rate, 1.15);
    report.at_most("WAL of a fresh transaction / plain INSERT", idem.wal / floor.wal, 1.05, "");
}

fn protocols(bench: &Bench, report: &mut Report) {
    report.section("A fresh transaction, otherwise sent", "The same scripts.");
    let ways = [
        ("simple protocol", Protocol::Simple, 4),
        ("pipelined", Protocol::Pipelined, 4),
        ("one client", Protocol::Prepared, 1),
    ];
    for (way, protocol, clients) in ways {
        let loads = [
            Load::new(&format!("plain INSERT of the row, {way}"), "fresh_insert")
                .check(EACH_WRITTEN),
            Load::new(&format!("idem, {way}"), "fresh_idem").check(EACH_ONCE),
            Load::new(&format!("INSERT … ON CONFLICT, UPDATE, {way}"), "fresh_handwritten")
                .check(EACH_WRITTEN),
        ]
        .map(|load| load.protocol(protocol).clients(clients));
        let samples = bench.compare(&loads);
        report.table(Columns::Speed, 1, &labels(&loads), &samples);
    }
}

/// Completes a thousand keys, 1 to 1000, by two calls.
fn a_thousand(begin: &str, complete: &str) -> String {
    format!(
        "DO $$ BEGIN FOR i IN 1..1000 LOOP
            PERFORM {begin}(i::text, {HASH});
            PERFORM {complete}(i::text, '{{\"id\": \"ord_1\", \"sku\": \"book\"}}');
         END LOOP; END $$"
    )
}

fn replay(bench: &Bench, report: &mut Report) {
    report.section(
        "A replay",
        "One of a thousand finished keys, asked for again. Whoever looks first needs the INSERT all the same for a key that is new.",
    );
    let handwritten = format!(
        "INSERT INTO handwritten SELECT i::text, {HASH}, 'completed', '{{\"id\": \"ord_1\", \"sku\": \"book\"}}' FROM generate_series(1, 1000) AS i"
    );
    let loads = [
        Load::new("SELECT 1", "replay_select"),
        Load::new("idem", "replay_idem")
            .setup(&a_thousand("idem_begin", "idem_complete"))
            .check("(SELECT count(*) FROM idem_segment_0) = 1000 AND {n} > 0"),
        Load::new("INSERT … ON CONFLICT, SELECT", "replay_handwritten").setup(&handwritten),
        Load::new("a built-in function in FROM", "replay_function"),
        Load::new("SELECT first", "replay_lookup").setup(&handwritten),
        Load::new("PL/pgSQL pair", "replay_pair").setup(&a_thousand("pair_begin", "pair_complete")),
    ];
    let samples = bench.compare_rounds(&loads, bench.options.rounds * 2 + 3);
    report.table(Columns::Written, 1, &labels(&loads), &samples);
    report.plot("replay", "Replays a second", &bars(&loads, &samples, |s| s.rate));
    report.at_least("replay / SELECT 1", samples[1].rate / samples[0].rate, 0.85);
    report.at_least("replay / hand-written SQL", samples[1].rate / samples[2].rate, 2.0);
}

fn refusals(bench: &Bench, report: &mut Report) {
    report.section(
        "A key that cannot be had",
        "Held by an open transaction: before idem says so, it makes sure for about a tenth of a millisecond that the holder is not just \
         ending. Hand-written SQL would wait.",
    );
    // The holder's transaction keeps the tables locked: they cannot be emptied meanwhile.
    let mut holder = bench.app(false);
    holder
        .batch_execute(
            "BEGIN;
             SELECT count(status) FROM generate_series(1, 1000) AS i, idem_begin(i::text);
             SELECT count(pg_advisory_xact_lock(hashtext(i::text))) FROM generate_series(1, 1000) AS i",
        )
        .expect("a thousand keys are held");
    let loads = [
        Load::new("pg_try_advisory_xact_lock", "busy_advisory"),
        Load::new("idem: in_progress, an open transaction", "busy_idem"),
    ]
    .map(Load::on_full_tables);
    let mut names: Vec<String> = loads.iter().map(|load| load.label.clone()).collect();
    let mut samples = bench.compare(&loads);
    drop(holder);
    let loads = [
        Load::new("idem: in_progress, a lease", "busy_idem").setup(
            "SELECT count(status) FROM generate_series(1, 1000) AS i, idem_begin(i::text, lease => '1h')",
        ),
        Load::new("idem: mismatch", "mismatch_idem").setup(&a_thousand("idem_begin", "idem_complete")),
    ];
    names.extend(loads.iter().map(|load| load.label.clone()));
    samples.extend(bench.compare(&loads));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    report.table(Columns::Speed, 0, &names, &samples);
}

fn whole_operations(bench: &Bench, report: &mut Report) {
    report.section("Whole operations", "The work is a function of one INSERT; the inbox of a consumer is one INSERT beside its key.");
    let loads = [
        Load::new("idem: begin, work, complete", "run_three_calls").check(EACH_ONCE),
        Load::new("idem_run", "run_idem").check(EACH_ONCE),
        Load::new("inbox: INSERT … ON CONFLICT", "once_handwritten").check(EACH_WRITTEN),
        Load::new("inbox: idem_once", "once_idem").check(EACH_ONCE),
    ];
    let samples = bench.compare(&loads);
    report.table(Columns::Written, 0, &labels(&loads), &samples);
    report.at_least(
        "idem_run / begin, work, complete in three calls",
        samples[1].rate / samples[0].rate,
        1.3,
    );
}

fn sizes(bench: &Bench, report: &mut Report) {
    report.section(
        "Results of other sizes",
        "A fresh transaction whose result is a jsonb string that does not compress.",
    );
    for (size, name) in [(0, "no result"), (100, "100 B"), (10_000, "10 kB"), (1_000_000, "1 MB")] {
        let loads = [
            Load::new(&format!("plain INSERT of the row, {name}"), "size_insert")
                .check(EACH_WRITTEN),
            Load::new(&format!("idem, {name}"), "size_idem").check(EACH_ONCE),
            Load::new(&format!("INSERT … ON CONFLICT, UPDATE, {name}"), "size_handwritten")
                .check(EACH_WRITTEN),
        ]
        .map(|load| load.variable("size", size));
        let samples = bench.compare_rounds(&loads, 3);
        report.table(Columns::Written, 1, &labels(&loads), &samples);
    }
}

fn outside(bench: &Bench, report: &mut Report) {
    report.section(
        "An effect outside the database",
        "Claim, commit, (call,) complete with the business row, commit: two commits that wait for the disk. `synchronous_commit = on`.",
    );
    for clients in [1, 16] {
        let loads = [
            Load::new(&format!("client library, {clients} clients"), "fresh_library")
                .check(EACH_WRITTEN),
            Load::new(&format!("idem with a lease, {clients} clients"), "outside_idem")
                .check(EACH_ONCE),
        ]
        .map(|load| load.clients(clients).durable());
        let samples = bench.compare_rounds(&loads, 3);
        report.table(Columns::Written, 1, &labels(&loads), &samples);
    }
}

fn locks(bench: &Bench, report: &mut Report) {
    report.section(
        "Locks",
        "A lease lock is taken and given back: two commits that wait for the disk, by one client. A lock for the transaction is taken \
         around one INSERT, and so is a guard.",
    );
    let leases = [
        Load::new("a table, INSERT … ON CONFLICT DO UPDATE, UPDATE", "lock_table"),
        Load::new("idem: lock_try, lock_unlock", "lock_idem"),
    ]
    .map(|load| load.clients(1).durable());
    let samples = bench.compare_rounds(&leases, 3);
    report.table(Columns::Written, 1, &labels(&leases), &samples);
    for clients in [4, 32] {
        let loads = [
            Load::new(&format!("pg_try_advisory_xact_lock, {clients} clients"), "lock_advisory"),
            Load::new(&format!("idem: lock_try_xact, {clients} clients"), "lock_xact"),
        ]
        .map(|load| load.clients(clients).check(EACH_WRITTEN));
        let samples = bench.compare_rounds(&loads, 3);
        report.table(Columns::Speed, 1, &labels(&loads), &samples);
    }
    let taken = "INSERT INTO lease SELECT i::text, token, expires_at FROM generate_series(0, 3) AS i, lock_try(i::text, '1h')";
    let loads =
        [Load::new("no guard", "lock_unguarded"), Load::new("idem: lock_guard", "lock_guard")]
            .map(|load| load.setup(taken).check(EACH_WRITTEN));
    let samples = bench.compare_rounds(&loads, 3);
    report.table(Columns::Speed, 1, &labels(&loads), &samples);
}

fn redis(bench: &Bench, report: &mut Report) {
    report.section(
        "Redis",
        "Rust clients, each with a name of its own. Durable: `appendfsync always` against `synchronous_commit = on`. Relaxed: \
         `appendfsync everysec` against `synchronous_commit = off`; but a lease lock of idem always waits for the disk, so its \
         relaxed row is a server with `fsync = off`. With Redis a fresh request is SET NX PX, the transaction, SET: a crash between the two \
         stores leaves them disagreeing.",
    );
    if RedisServer::version().is_none() {
        report.words("Not measured: there is no `redis-server` here.");
        return;
    }
    let dir = std::path::Path::new(bench.server.dir()).join("bench");
    let (always, everysec) =
        (RedisServer::start(&dir, "always"), RedisServer::start(&dir, "everysec"));
    let unsafe_server = Server::start(&[]);
    unsafe_server.create_database("bench");

    let rounds = 3;
    for clients in [1, 32] {
        let samples = bench.in_turn(4, rounds, |contender| match contender {
            0 => drive(bench, clients, |client| redis_lock(&always, client)),
            1 => drive(bench, clients, |client| idem_lock(bench.app(true), client)),
            2 => drive(bench, clients, |client| redis_lock(&everysec, client)),
            _ => drive(bench, clients, |client| {
                idem_lock(unsafe_server.connect("bench", APP), client)
            }),
        });
        let names = [
            "Redis lock, durable",
            "idem lock, durable",
            "Redis lock, relaxed",
            "idem lock, relaxed (fsync = off)",
        ]
        .map(|name| format!("{name}, {clients} clients"));
        report.table(Columns::Speed, 1, &names.each_ref().map(String::as_str), &samples);
        let what = format!("lock_try + lock_unlock / Redis, equal durability, {clients} clients");
        report.at_least(&what, samples[1].rate / samples[0].rate, 1.0);
        if clients == 1 {
            let bar =
                |i: usize, color| Bar { label: names[i].clone(), value: samples[i].rate, color };
            let bars = [bar(0, Color::Other), bar(1, Color::Idem)];
            report.plot("locks", "Locks taken and given back a second, on disk", &bars);
        }
    }
    bench.empty_tables();
    let samples = bench.in_turn(4, rounds, |contender| match contender {
        0 => drive(bench, 4, |_| redis_fresh(&always, bench.app(true))),
        1 => drive(bench, 4, |_| idem_fresh(bench.app(true))),
        2 => drive(bench, 4, |_| redis_fresh(&everysec, bench.app(false))),
        _ => drive(bench, 4, |_| idem_fresh(bench.app(false))),
    });
    let names = [
        "fresh, Redis, durable",
        "fresh, idem, durable",
        "fresh, Redis, relaxed",
        "fresh, idem, relaxed",
    ];
    report.table(Columns::Speed, 1, &names, &samples);
}

fn redis_lock(server: &RedisServer, client: usize) -> impl FnMut() + use<> {
    let (mut store, name) = (server.connect(), format!("lock-{client}"));
    move || {
        let token = Uuid::new_v4().to_string();
        assert!(store.take(&name, &token), "the lock was taken by somebody else");
        assert!(store.free(&name, &token), "the lock was lost");
    }
}

fn idem_lock(mut connection: postgres::Client, client: usize) -> impl FnMut() + use<> {
    let name = format!("lock-{client}");
    let take = connection.prepare("SELECT acquired, token FROM lock_try($1)").expect("lock_try");
    let free = connection.prepare("SELECT lock_unlock($1, $2)").expect("lock_unlock");
    move || {
        let row = connection.query_one(&take, &[&name]).expect("lock_try");
        assert!(row.get::<_, bool>(0), "the lock was taken by somebody else");
        let freed =
            connection.query_one(&free, &[&name, &row.get::<_, Uuid>(1)]).expect("lock_unlock");
        assert!(freed.get::<_, bool>(0), "the lock was lost");
    }
}

fn redis_fresh(server: &RedisServer, mut connection: postgres::Client) -> impl FnMut() + use<> {
    let mut store = server.connect();
    let work = connection.prepare("INSERT INTO work (sku, qty) VALUES ('book', 1)").expect("work");
    move || {
        let key = Uuid::new_v4().to_string();
        assert!(store.take(&key, "claimed"), "the key was taken by somebody else");
        connection.batch_execute("BEGIN").expect("BEGIN");
        connection.execute(&work, &[]).expect("work");
        connection.batch_execute("COMMIT").expect("COMMIT");
        store.store(&key, "{\"id\": \"ord_1\", \"sku\": \"book\"}");
    }
}

fn idem_fresh(mut connection: postgres::Client) -> impl FnMut() + use<> {
    let begin =
        connection.prepare("SELECT status, result FROM idem_begin($1)").expect("idem_begin");
    let work = connection.prepare("INSERT INTO work (sku, qty) VALUES ('book', 1)").expect("work");
    let complete = connection.prepare("SELECT idem_complete($1, $2)").expect("idem_complete");
    let result = json!({ "id": "ord_1", "sku": "book" });
    move || {
        let key = Uuid::new_v4().to_string();
        connection.batch_execute("BEGIN").expect("BEGIN");
        let status: String = connection.query_one(&begin, &[&key]).expect("idem_begin").get(0);
        assert_eq!(status, "acquired");
        connection.execute(&work, &[]).expect("work");
        connection.execute(&complete, &[&key, &result]).expect("idem_complete");
        connection.batch_execute("COMMIT").expect("COMMIT");
    }
}

fn waits(bench: &Bench, report: &mut Report) {
    report.section(
        "How soon a waiter wakes up",
        "From the return of the holder's commit to the return of the waiter's call, in two connections; 0 if the waiter's answer was here \
         first. With a lease the waiter's own commit is in it, which waits for the disk. CPU is what the waiter's backend used while it \
         waited for one second.",
    );
    let lease_begin = "SELECT token::text FROM idem_begin($1, lease => '30s')";
    let handovers = [
        Handover {
            label: "hand-written: INSERT behind an open INSERT",
            take: "INSERT INTO handwritten (key) VALUES ($1)",
            in_transaction: true,
            wait: "INSERT INTO handwritten (key) VALUES ($1) ON CONFLICT DO NOTHING",
            end: "UPDATE handwritten SET status = 'completed' WHERE key = $1",
        },
        Handover {
            label: "idem_begin behind an open transaction",
            take: "SELECT token::text FROM idem_begin($1)",
            in_transaction: true,
            wait: "SELECT status FROM idem_begin($1, wait => '10s')",
            end: "SELECT idem_complete($1)",
        },
        Handover {
            label: "lock_acquire_xact behind an open transaction",
            take: "SELECT lock_try_xact($1)::text",
            in_transaction: true,
            wait: "SELECT lock_acquire_xact($1, '10s')",
            end: "SELECT $1::text",
        },
        Handover {
            label: "idem_begin behind a lease that is completed",
            take: lease_begin,
            in_transaction: false,
            wait: "SELECT status FROM idem_begin($1, wait => '10s')",
            end: "SELECT idem_complete($1, token => $2::text::uuid)",
        },
        Handover {
            label: "idem_begin behind a lease that is released",
            take: lease_begin,
            in_transaction: false,
            wait: "SELECT status FROM idem_begin($1, lease => '30s', wait => '10s')",
            end: "SELECT idem_release($1, $2::text::uuid)",
        },
        Handover {
            label: "lock_acquire behind a lease that is unlocked",
            take: "SELECT token::text FROM lock_try($1)",
            in_transaction: false,
            wait: "SELECT acquired FROM lock_acquire($1, '10s')",
            end: "SELECT lock_unlock($1, $2::text::uuid)",
        },
    ];
    let delays: Vec<_> = handovers.iter().map(|handover| hand_over(bench, handover)).collect();
    let rows = handovers.iter().zip(&delays).map(|(handover, delays)| {
        let cpu = format!("{:.1}", delays.cpu);
        vec![handover.label.to_string(), thousands(delays.p50), thousands(delays.p99), cpu]
    });
    report.plain_table(&["", "median µs", "p99 µs", "CPU ms"], rows);
    let millis = |i: usize| delays[i].p50 / 1000.0;
    report.at_most("waiter on an open transaction, median", millis(1).max(millis(2)), 2.0, " ms");
    report.at_most(
        "waiter on a lease, median",
        millis(3).max(millis(4)).max(millis(5)),
        20.0,
        " ms",
    );
    let cpu = delays[3].cpu.max(delays[4].cpu).max(delays[5].cpu);
    report.at_most("CPU of a waiter on a lease in one second", cpu, 1.0, " ms");
}

fn crowds(bench: &Bench, report: &mut Report) {
    report.section(
        "Many clients on one key",
        "64 clients ask for the same key at full speed; the key changes every 50 ms and its work takes 2 ms. A transaction is an answer: run, \
         replayed, or (idem only) in progress. After each run it is checked that each key's work was done once.",
    );
    let once = "(SELECT count(*) = count(DISTINCT sku) AND count(*) > 0 AND {n} > 0 FROM work)";
    let loads = [
        Load::new("idem", "storm_idem"),
        Load::new("INSERT … ON CONFLICT, UPDATE", "storm_handwritten"),
        Load::new("advisory lock and table", "storm_advisory"),
    ]
    .map(|load| load.clients(64).check(once));
    let samples = bench.compare_rounds(&loads, 3);
    report.table(Columns::Speed, 0, &labels(&loads), &samples);
}

fn scale(bench: &Bench, report: &mut Report) {
    report.section(
        "With many live keys",
        "A fresh transaction beside that many records, each run right after a checkpoint, at 4,000 transactions a second and at full speed. What \
         grows is the images of index pages that PostgreSQL writes when a page is first changed after a checkpoint: random keys touch \
         another page each.",
    );
    let counts: &[u64] = match (bench.options.quick, bench.options.full_scale) {
        (true, _) => &[0, 1000],
        (false, false) => &[0, 1_000_000],
        (false, true) => &[0, 1_000_000, 10_000_000],
    };
    for &count in counts {
        bench.empty_tables();
        bench
            .admin()
            .batch_execute(&format!(
                "INSERT INTO idem_segment_0 SELECT gen_random_uuid(), gen_random_uuid(), now(), now(), now() + interval '24h', 1, '', (i::bigint * 1000)::text,
                    NULL, {HASH}, '{{\"id\": \"ord_1\", \"sku\": \"book\"}}' FROM generate_series(1, {count}) AS i;
                 INSERT INTO handwritten SELECT (random() * 1e18)::bigint::text, {HASH}, 'completed', '{{\"id\": \"ord_1\", \"sku\": \"book\"}}', now(), now()
                    FROM generate_series(1, {count}) AS i ON CONFLICT DO NOTHING"
            ))
            .expect("the tables can be filled");
        let keys = thousands(count as f64);
        let loads = [
            Load::new(&format!("idem, {keys} keys, 4,000/s"), "fresh_idem").rate(4000),
            Load::new(
                &format!("INSERT … ON CONFLICT, UPDATE, {keys} keys, 4,000/s"),
                "fresh_handwritten",
            )
            .rate(4000),
            Load::new(&format!("idem, {keys} keys, full speed"), "fresh_idem"),
            Load::new(
                &format!("INSERT … ON CONFLICT, UPDATE, {keys} keys, full speed"),
                "fresh_handwritten",
            ),
        ]
        .map(|load| load.on_full_tables().setup("CHECKPOINT"));
        let samples = bench.compare_rounds(&loads, 3);
        report.table(Columns::Written, 2, &labels(&loads), &samples);
    }
}
