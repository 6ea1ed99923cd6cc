//! What expiry costs: a ring full of records beside an empty one, and a purge of them all beside traffic.

use std::time::{Duration, Instant};

use postgres::Client;

use crate::load::{Bench, Load};
use crate::report::{Columns, Report, thousands};
use crate::sections::labels;

/// The database with the full ring.
const FULL: &str = "full_ring";

/// The segments that are full; the next one is the current one.
const SEGMENTS: u64 = 3;

pub fn run(bench: &Bench, report: &mut Report) {
    let records = match (bench.options.quick, bench.options.full_scale) {
        (true, _) => 3_000,
        (false, false) => 1_000_000,
        (false, true) => 10_000_000,
    };
    bench.create_database(FULL);
    fill(bench, records);
    let filters = make_filters(bench);
    full_ring(bench, report, records, filters);
    purge(bench, report, records);
}

/// Fills the older segments, as if their turns had passed and their records still counted.
fn fill(bench: &Bench, records: u64) {
    let mut admin = bench.admin_of(FULL);
    for segment in 0..SEGMENTS {
        let table = format!("idem_segment_{segment}");
        let rows = records / SEGMENTS + u64::from(segment < records % SEGMENTS);
        admin
            .batch_execute(&format!(
                "SET maintenance_work_mem = '1GB';
                 ALTER TABLE {table} DROP CONSTRAINT {table}_pkey;
                 INSERT INTO {table} SELECT gen_random_uuid(), gen_random_uuid(), now(), now(), now() + interval '24h', 1, '', (i::bigint * 1000)::text,
                    NULL, sha256(i::text::bytea), '{{\"id\": \"ord_1\", \"sku\": \"book\"}}' FROM generate_series(1, {rows}) AS i;
                 ALTER TABLE {table} ADD PRIMARY KEY (digest);
                 INSERT INTO idem_ring SELECT {segment} + 1, now(), now() + interval '42h'"
            ))
            .expect("a segment can be filled");
    }
    admin
        .batch_execute("SELECT pg_stat_force_next_flush()")
        .and_then(|()| admin.batch_execute("VACUUM (ANALYZE)"))
        .expect("VACUUM runs");
}

/// Purges until each of the full segments has its filter, if they are large enough; says how long the longest call took.
fn make_filters(bench: &Bench) -> Duration {
    let mut admin = bench.admin_of(FULL);
    let calls = (0..=SEGMENTS).map(|_| {
        let since = Instant::now();
        let rows: i64 = admin.query_one("SELECT idem_purge()", &[]).expect("a purge runs").get(0);
        assert_eq!(rows, 0, "everything counts");
        since.elapsed()
    });
    let longest = calls.max().expect("there are segments");
    let filters: i64 =
        admin.query_one("SELECT count(*) FROM idem_filters", &[]).expect("it can be read").get(0);
    assert!(bench.options.quick || filters == SEGMENTS as i64, "{filters} filters");
    longest
}

fn full_ring(bench: &Bench, report: &mut Report, records: u64, filters: Duration) {
    report.section(
        "A full ring",
        &format!(
            "Fresh transactions where all records that count are in three older segments and the current one is young, beside a ring \
             without a single record; each run right after a checkpoint. The older segments have their filters, of which \
             idem_purge made one a call, in {:.1} s at the most.",
            filters.as_secs_f64()
        ),
    );
    let records = thousands(records as f64);
    let loads = [
        Load::new("empty, 4,000/s", "fresh_idem").rate(4000).setup("CHECKPOINT"),
        Load::new(&format!("{records} live, 4,000/s"), "fresh_idem")
            .rate(4000)
            .setup("TRUNCATE idem_segment_3; CHECKPOINT")
            .database(FULL),
        Load::new("empty, full speed", "fresh_idem").setup("CHECKPOINT"),
        Load::new(&format!("{records} live, full speed"), "fresh_idem")
            .setup("TRUNCATE idem_segment_3; CHECKPOINT")
            .database(FULL),
    ];
    let samples = bench.compare_rounds(&loads, bench.options.rounds * 2 + 1);
    report.table(Columns::Written, 2, &labels(&loads), &samples);
    report.at_most(
        "WAL at a fixed rate, full ring against none",
        samples[1].wal / samples[0].wal,
        1.5,
        "",
    );
    report.at_least(
        "fresh transaction, full ring against an empty one",
        samples[3].rate / samples[2].rate,
        0.95,
    );
}

fn purge(bench: &Bench, report: &mut Report, records: u64) {
    report.section(
        "A purge",
        "The bounds of the full segments are set back, then idem_purge() is called once, in the middle of fresh transactions at 2,000 a \
         second. WAL is that of the whole server while the purge ran, so it has that of some transactions in it.",
    );
    let load = Load::new("fresh transactions at 2,000/s", "fresh_idem").rate(2000).database(FULL);
    let before = bench.compare(std::slice::from_ref(&load)).remove(0);
    let mut admin = bench.admin_of(FULL);
    admin
        .batch_execute("UPDATE idem_ring SET bound = now() WHERE turn < 3")
        .expect("the ring can be changed");
    let (during, purged) = std::thread::scope(|scope| {
        let traffic = scope.spawn(|| bench.run(&load));
        if !bench.options.quick {
            std::thread::sleep(Duration::from_millis(u64::from(bench.options.seconds) * 500));
        }
        let purged = Purged::by(&mut admin);
        (traffic.join().expect("the traffic runs"), purged)
    });
    assert!(purged.rows > 0 && purged.left == 0, "the records are purged: {purged:?}");
    report.plain_table(
        &["", "records", "ms", "WAL bytes", "dead rows"],
        [vec![
            "idem_purge()".to_string(),
            thousands(records as f64),
            thousands(purged.took.as_secs_f64() * 1000.0),
            thousands(purged.wal),
            thousands(purged.dead as f64),
        ]],
    );
    let samples = [before, during];
    report.table(Columns::Speed, 0, &["before", "while it purged"], &samples);
    let megabytes = purged.wal / f64::from(1 << 20);
    report.at_most("purge of the full ring", purged.took.as_secs_f64(), 2.0, " s");
    report.at_most("WAL of that purge", megabytes, 1.0, " MB");
    report.at_most("dead rows after it", purged.dead as f64, 0.0, "");
    report.at_most("p99 during it against before", samples[1].p99 / samples[0].p99, 2.0, "");
}

/// What a purge did.
#[derive(Debug)]
struct Purged {
    rows: i64,
    took: Duration,
    wal: f64,
    /// Rows in the purged segments: dead ones, and those that are still there.
    dead: i64,
    left: i64,
}

impl Purged {
    fn by(admin: &mut Client) -> Purged {
        let position = |admin: &mut Client| -> f64 {
            let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
            admin.query_one(sql, &[]).expect("the server answers").get(0)
        };
        let (before, since) = (position(admin), Instant::now());
        let rows = admin.query_one("SELECT idem_purge()", &[]).expect("a purge runs").get(0);
        let took = since.elapsed();
        let wal = position(admin) - before;
        let segments = (0..SEGMENTS).map(|n| {
            format!("SELECT (t).dead_tuple_count AS dead, (t).tuple_count AS live FROM pgstattuple('idem_segment_{n}') AS t")
        });
        let sql = format!(
            "SELECT sum(dead)::bigint, sum(live)::bigint FROM ({}) AS s",
            segments.collect::<Vec<_>>().join(" UNION ALL ")
        );
        let row = admin.query_one(&sql, &[]).expect("segments can be read");
        Purged { rows, took, wal, dead: row.get(0), left: row.get(1) }
    }
}
