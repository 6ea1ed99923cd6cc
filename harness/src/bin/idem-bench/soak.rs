//! Steady traffic for half an hour, with a ttl of a minute and a purge every ten seconds: sizes and speed must stay what they
//! are after the first minutes. `make soak` runs it and writes `benches/soak.md`; a missed target is a failure.
//!
//! The rate is fixed, so that sizes depend on nothing but how well the purge keeps up. They rise for the first four minutes, so
//! that a run of less than twelve says little.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use idem_harness::APP;
use postgres::Client;

use crate::load::{Bench, folder};
use crate::measure::percentile;
use crate::plot::{Color, Line};
use crate::report::{Report, shape, thousands};

/// As people run it, autovacuum and checkpoints included.
pub const SETTINGS: [&str; 4] =
    ["fsync=on", "synchronous_commit=off", "shared_buffers=512MB", "log_min_messages=fatal"];

const TTL: &str = "1min";
/// Transactions a second.
const RATE: u32 = 1000;
const CLIENTS: u32 = 8;
/// Scripts of `benches/`, and how often each is run.
const TRAFFIC: [(&str, u32); 7] = [
    ("fresh_idem", 70),
    ("soak_replay", 20),
    ("size_idem", 2),
    ("soak_long", 3),
    ("outside_idem", 2),
    ("soak_abandoned", 1),
    ("soak_lock", 2),
];
/// The table has one line for so many samples at the most.
const LINES: usize = 30;

/// What was seen at the end of an interval, right after the purge, and of the traffic within it.
#[derive(Clone, Default)]
struct Sample {
    minute: f64,
    segments: f64,
    long: f64,
    claims: f64,
    locks: f64,
    catalogue: f64,
    dead: f64,
    purged: f64,
    purge_ms: f64,
    rate: f64,
    p50: f64,
    p99: f64,
}

impl Sample {
    fn size(&self) -> f64 {
        self.segments + self.long + self.claims + self.locks
    }
}

/// Runs it; says whether all targets were met.
pub fn run(bench: &Bench, minutes: u32, report: &mut Report) -> bool {
    let (length, every) = match bench.options.quick {
        true => (Duration::from_secs(6), Duration::from_secs(1)),
        false => (Duration::from_secs(u64::from(minutes) * 60), Duration::from_secs(10)),
    };
    let mut admin = bench.admin();
    admin
        .batch_execute(&format!("ALTER DATABASE bench SET idem.ttl = '{TTL}'"))
        .expect("a setting for the database");
    let begin = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs_f64();
    let mut samples = watch(bench, length, every);
    let latencies = latencies(&bench.scratch, begin, every, samples.len());
    for (sample, (rate, mut latencies)) in samples.iter_mut().zip(latencies) {
        sample.rate = rate;
        sample.p50 = percentile(&mut latencies, 50.0);
        sample.p99 = percentile(&mut latencies, 99.0);
    }
    judge(&samples, report);
    show(&samples, report);
    let head = format!(
        "# Steady traffic with a short ttl\n\nWritten by `make soak`{}: do not edit.\n\n{}\
         - PostgreSQL {}, Unix socket, {} minutes, {CLIENTS} clients of pgbench, {RATE} transactions a second asked for, `idem.ttl` {TTL}, \
           `idem_purge()` every {} s; `fsync = on`, `synchronous_commit = off`, autovacuum and checkpoints by default.\n\
         - Of 100 transactions: {}.\n\
         - Sizes are of tables with their indexes and TOAST, after the purge. Latency counts from the moment a transaction was due.\n",
        if bench.options.quick { " QUICK=1" } else { "" },
        shape(),
        bench.version(),
        length.as_secs() / 60,
        every.as_secs(),
        TRAFFIC.map(|(script, weight)| format!("{weight} `{script}.sql`")).join(", "),
    );
    report.write_as(bench, "soak.md", &head, "");
    bench.options.quick || report.all_met()
}

/// Purges and looks once an interval while the traffic runs.
fn watch(bench: &Bench, length: Duration, every: Duration) -> Vec<Sample> {
    let mut traffic = start(bench, length);
    let mut admin = bench.admin();
    let begun = Instant::now();
    let mut samples = Vec::new();
    for tick in 1..=(length.as_secs() / every.as_secs()) as u32 {
        sleep((every * tick).saturating_sub(begun.elapsed()));
        let purging = Instant::now();
        let purged: i64 = admin.query_one("SELECT idem_purge()", &[]).expect("a purge").get(0);
        let purge_ms = purging.elapsed().as_secs_f64() * 1e3;
        let minute = begun.elapsed().as_secs_f64() / 60.0;
        samples.push(Sample { minute, purged: purged as f64, purge_ms, ..look(&mut admin) });
    }
    let status = traffic.wait().expect("pgbench ends");
    assert!(status.success(), "pgbench failed");
    samples
}

fn start(bench: &Bench, length: Duration) -> Child {
    let scripts = TRAFFIC.map(|(script, weight)| {
        format!("--file={}@{weight}", folder().join(format!("{script}.sql")).display())
    });
    Command::new("pgbench")
        .args(["--no-vacuum", "--protocol=prepared", "--log", "--define=size=10000"])
        .arg(format!("--log-prefix={}", bench.scratch.join("soak").display()))
        .args(["--host", bench.server.dir(), "--username", APP])
        .args([format!("--rate={RATE}"), format!("--time={}", length.as_secs())])
        .args([format!("--client={CLIENTS}"), "--jobs=2".to_string()])
        .args(scripts)
        .arg("bench")
        .stdout(Stdio::null())
        .spawn()
        .expect("pgbench can be run")
}

fn look(admin: &mut Client) -> Sample {
    let row = admin
        .query_one(
            "SELECT sum(pg_total_relation_size(c.oid)) FILTER (WHERE c.relname LIKE 'idem\\_segment\\__')::float8,
                    sum(pg_total_relation_size(c.oid)) FILTER (WHERE c.relname = 'idem_long')::float8,
                    sum(pg_total_relation_size(c.oid)) FILTER (WHERE c.relname = 'idem_claims')::float8,
                    sum(pg_total_relation_size(c.oid)) FILTER (WHERE c.relname IN ('idem_locks', 'idem_floors', 'idem_ring'))::float8,
                    sum(n_dead_tup)::float8,
                    (pg_total_relation_size('pg_class') + pg_total_relation_size('pg_attribute'))::float8
             FROM pg_class AS c JOIN pg_stat_user_tables AS s ON s.relid = c.oid WHERE c.relname LIKE 'idem\\_%'",
            &[],
        )
        .expect("sizes can be asked for");
    Sample {
        segments: row.get(0),
        long: row.get(1),
        claims: row.get(2),
        locks: row.get(3),
        dead: row.get(4),
        catalogue: row.get(5),
        ..Sample::default()
    }
}

/// For each interval, transactions a second and their latencies in microseconds, from pgbench's logs: a line has the client, its
/// transaction, the latency, the script, and seconds and microseconds of the moment it ended.
fn latencies(
    scratch: &Path,
    begin: f64,
    every: Duration,
    intervals: usize,
) -> Vec<(f64, Vec<f64>)> {
    let mut found = vec![Vec::new(); intervals];
    for entry in std::fs::read_dir(scratch).expect("the scratch folder").flatten() {
        if !entry.file_name().to_string_lossy().starts_with("soak.") {
            continue;
        }
        let text = std::fs::read_to_string(entry.path()).expect("a log of pgbench");
        for (latency, end) in text.lines().filter_map(ended) {
            let interval = ((end - begin) / every.as_secs_f64()) as usize;
            if let Some(found) = found.get_mut(interval) {
                found.push(latency);
            }
        }
    }
    found.into_iter().map(|found| (found.len() as f64 / every.as_secs_f64(), found)).collect()
}

/// Latency and end of the transaction in a line of the log.
fn ended(line: &str) -> Option<(f64, f64)> {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |index: usize| words.get(index)?.parse::<f64>().ok();
    Some((number(2)?, number(4)? + number(5)? / 1e6))
}

/// The means of a number over the middle third of the samples and over the last.
fn thirds(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> (f64, f64) {
    let third = samples.len() / 3;
    let mean = |samples: &[Sample]| samples.iter().map(&of).sum::<f64>() / samples.len() as f64;
    (mean(&samples[third..samples.len() - third]), mean(&samples[samples.len() - third..]))
}

fn judge(samples: &[Sample], report: &mut Report) {
    let ratio = |of: fn(&Sample) -> f64| {
        let (middle, last) = thirds(samples, of);
        last / middle
    };
    report.at_most("size, last third against the middle third", ratio(Sample::size), 1.1, "");
    report.at_most("of that, the segments", ratio(|s| s.segments), 1.1, "");
    report.at_most("pg_class and pg_attribute, likewise", ratio(|s| s.catalogue), 1.1, "");
    report.at_least("transactions a second, likewise", ratio(|s| s.rate), 0.97);
    let (_, last) = thirds(samples, |s| s.rate);
    report.at_least(
        "transactions a second in the last third, of those asked for",
        last / f64::from(RATE),
        0.97,
    );
}

fn show(samples: &[Sample], report: &mut Report) {
    let line = |label: &str, color, of: fn(&Sample) -> f64| Line {
        label: label.to_string(),
        color,
        points: samples.iter().map(|sample| (sample.minute, of(sample) / 1e6)).collect(),
    };
    report.section("What was seen", "Each line is an interval between two purges, and what the second of them left; those between the lines are left out.");
    report.lines(
        "soak",
        "MB of tables, indexes and TOAST over the minutes",
        &[
            line("all of idem", Color::Idem, Sample::size),
            line("its segments", Color::Floor, |sample| sample.segments),
            line("everything else", Color::Other, |sample| sample.size() - sample.segments),
        ],
    );
    let step = samples.len().div_ceil(LINES);
    let rows = samples.iter().skip(step - 1).step_by(step).map(|sample| {
        let kilobytes = |bytes: f64| thousands(bytes / 1e3);
        vec![
            format!("{:.1}", sample.minute),
            thousands(sample.rate),
            thousands(sample.p50),
            thousands(sample.p99),
            kilobytes(sample.segments),
            kilobytes(sample.long),
            kilobytes(sample.claims),
            kilobytes(sample.locks),
            thousands(sample.dead),
            kilobytes(sample.catalogue),
            thousands(sample.purged),
            format!("{:.1}", sample.purge_ms),
        ]
    });
    report.plain_table(
        &[
            "minute",
            "per second",
            "p50 µs",
            "p99 µs",
            "segments kB",
            "long kB",
            "claims kB",
            "locks kB",
            "dead rows",
            "pg_class, pg_attribute kB",
            "rows purged",
            "purge ms",
        ],
        rows,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirds_leave_out_the_first() {
        let sample = |rate| Sample { rate, ..Sample::default() };
        let samples: Vec<Sample> = [9.0, 9.0, 1.0, 2.0, 3.0, 5.0, 7.0].map(sample).to_vec();
        assert_eq!(thirds(&samples, |sample| sample.rate), (2.0, 6.0));
    }

    #[test]
    fn a_line_of_the_log_is_understood() {
        assert_eq!(ended("3 17 250 2 1764427330 500000 12"), Some((250.0, 1764427330.5)));
        assert_eq!(ended("3 17 skipped"), None);
    }
}
