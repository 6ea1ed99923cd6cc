//! Running pgbench: one [`Load`] is a script of `benches/` and how it is run; [`Bench::compare`] runs several in turn.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_harness::{APP, Server, eventually};
use postgres::Client;

use crate::Options;
use crate::measure::Sample;
use crate::soak;

const DATABASE: &str = "bench";

/// The folder of the scripts and the results.
pub fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../benches"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Prepared,
    Simple,
    /// Prepared, and all of the script is sent before the first answer is awaited.
    Pipelined,
}

/// One contender: a script and how it is run. By default on empty tables, with prepared statements, by four clients, without waiting
/// for the disk.
#[derive(Clone)]
pub struct Load {
    pub label: String,
    script: &'static str,
    setup: String,
    check: &'static str,
    protocol: Protocol,
    clients: u32,
    rate: Option<u32>,
    variables: Vec<(&'static str, String)>,
    durable: bool,
    on_empty_tables: bool,
    database: &'static str,
}

impl Load {
    pub fn new(label: &str, script: &'static str) -> Load {
        Load {
            label: label.to_string(),
            script,
            setup: String::new(),
            check: "",
            protocol: Protocol::Prepared,
            clients: 4,
            rate: None,
            variables: Vec::new(),
            durable: false,
            on_empty_tables: true,
            database: DATABASE,
        }
    }

    /// SQL to run before each run.
    pub fn setup(self, sql: &str) -> Load {
        Load { setup: sql.to_string(), ..self }
    }

    /// An SQL condition that must hold after each run; `{n}` is the number of transactions.
    pub fn check(self, condition: &'static str) -> Load {
        Load { check: condition, ..self }
    }

    pub fn protocol(self, protocol: Protocol) -> Load {
        Load { protocol, ..self }
    }

    pub fn clients(self, clients: u32) -> Load {
        Load { clients, ..self }
    }

    /// A fixed number of transactions a second instead of as many as go.
    pub fn rate(self, rate: u32) -> Load {
        Load { rate: Some(rate), ..self }
    }

    pub fn variable(mut self, name: &'static str, value: impl ToString) -> Load {
        self.variables.push((name, value.to_string()));
        self
    }

    /// Every commit waits for the disk.
    pub fn durable(self) -> Load {
        Load { durable: true, ..self }
    }

    /// On the tables as they are.
    pub fn on_full_tables(self) -> Load {
        Load { on_empty_tables: false, ..self }
    }

    /// In another database, on the tables as they are.
    pub fn database(self, database: &'static str) -> Load {
        Load { on_empty_tables: false, database, ..self }
    }
}

/// The server, and all that one run of the benchmarks shares.
pub struct Bench {
    pub options: Options,
    pub server: Server,
    pub scratch: PathBuf,
    runs: AtomicUsize,
    /// Whether the machine lets us count the server's instructions.
    pub counts_instructions: bool,
}

impl Bench {
    pub fn start(options: Options) -> Bench {
        let shared_buffers = if options.quick { "128MB" } else { "2GB" };
        let settings = [
            // Durability is real, and asked for by the runs that are about it.
            "fsync=on",
            "synchronous_commit=off",
            &format!("shared_buffers={shared_buffers}"),
            // Nothing in the background but the WAL writer: checkpoints and dead rows are part of what is measured.
            "autovacuum=off",
            "checkpoint_timeout=1d",
            "max_wal_size=50GB",
            "min_wal_size=2GB",
            "log_min_messages=fatal",
        ];
        let server = Server::start(match options.soak_minutes {
            Some(_) => &soak::SETTINGS,
            None => &settings,
        });
        let scratch = PathBuf::from(server.dir()).join("bench");
        std::fs::create_dir_all(&scratch).expect("the server's folder can be written to");
        let counts_instructions = can_count_instructions();
        let bench =
            Bench { options, server, scratch, runs: AtomicUsize::new(0), counts_instructions };
        bench.create_database(DATABASE);
        bench
    }

    /// A database with the tables of all contenders.
    pub fn create_database(&self, database: &str) {
        self.server.create_database(database);
        let setup = std::fs::read_to_string(folder().join("setup.sql")).expect("setup.sql");
        let mut admin = self.admin_of(database);
        admin.batch_execute("CREATE EXTENSION pgstattuple").expect("pgstattuple");
        admin.batch_execute(&setup).expect("setup.sql runs");
    }

    pub fn admin(&self) -> Client {
        self.admin_of(DATABASE)
    }

    pub fn admin_of(&self, database: &str) -> Client {
        self.server.connect(database, "postgres")
    }

    /// The server's version.
    pub fn version(&self) -> String {
        let row = self.admin().query_one("SELECT current_setting('server_version')", &[]);
        row.expect("the server answers").get(0)
    }

    /// A connection as the application; `durable`: its commits wait for the disk.
    pub fn app(&self, durable: bool) -> Client {
        let mut client = self.server.connect(DATABASE, APP);
        if durable {
            client.batch_execute("SET synchronous_commit = on").expect("a setting");
        }
        client
    }

    /// Empties every table but the payloads and the state of the ring.
    pub fn empty_tables(&self) {
        self.admin()
            .batch_execute(
                "DO $$ BEGIN EXECUTE (
                    SELECT 'TRUNCATE ' || string_agg(oid::regclass::text, ', ') FROM pg_class
                    WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND relname NOT IN ('payload', 'idem_ring')
                 ); END $$",
            )
            .expect("tables can be emptied");
    }

    /// The medians of the runs of each, which take turns.
    pub fn compare(&self, loads: &[Load]) -> Vec<Sample> {
        self.compare_rounds(loads, self.options.rounds)
    }

    pub fn compare_rounds(&self, loads: &[Load], rounds: usize) -> Vec<Sample> {
        self.in_turn(loads.len(), rounds, |index| self.run(&loads[index]))
    }

    /// The medians of `count` contenders that take turns.
    pub fn in_turn(
        &self,
        count: usize,
        rounds: usize,
        mut run: impl FnMut(usize) -> Sample,
    ) -> Vec<Sample> {
        let rounds = if self.options.quick { 1 } else { rounds };
        let mut samples = vec![Vec::new(); count];
        for _ in 0..rounds {
            for (index, samples) in samples.iter_mut().enumerate() {
                samples.push(run(index));
            }
        }
        samples.iter().map(|samples| Sample::medians(samples)).collect()
    }

    /// Runs one contender once.
    pub fn run(&self, load: &Load) -> Sample {
        if load.on_empty_tables {
            self.empty_tables();
        }
        let mut admin = self.admin_of(load.database);
        admin
            .batch_execute(&load.setup)
            .unwrap_or_else(|error| panic!("{}: setup: {error}", load.label));
        let before = Footprint::of(&mut admin, load.on_empty_tables);
        let (mut sample, transactions) = self.pgbench(load);
        let after = Footprint::of(&mut admin, load.on_empty_tables);
        after.fill(&before, transactions, &mut sample);
        if !load.check.is_empty() {
            let condition = load.check.replace("{n}", &transactions.to_string());
            let holds: bool =
                admin.query_one(&format!("SELECT {condition}"), &[]).expect("a check runs").get(0);
            assert!(holds, "{}: not so after the run: {condition}", load.label);
        }
        sample
    }

    fn pgbench(&self, load: &Load) -> (Sample, u64) {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        let script = self.scratch.join(format!("{number}.sql"));
        let log = self.scratch.join(format!("{number}.log"));
        let text = std::fs::read_to_string(folder().join(format!("{}.sql", load.script)))
            .unwrap_or_else(|error| panic!("{}: {error}", load.script));
        let (script_text, protocol) = match load.protocol {
            Protocol::Prepared => (text, "prepared"),
            Protocol::Simple => (text, "simple"),
            Protocol::Pipelined => (pipelined(&text), "prepared"),
        };
        std::fs::write(&script, script_text).expect("a script can be written");

        // Where the machine can count instructions, perf runs pgbench and counts those of the server.
        let counted = self.scratch.join("instructions");
        let mut command = match self.counts_instructions {
            true => {
                let mut perf = perf_stat();
                perf.arg("-o").arg(&counted).arg("-p").arg(self.postmaster()).arg("pgbench");
                perf
            }
            false => Command::new("pgbench"),
        };
        command
            .args(["--no-vacuum", "--log", "--protocol", protocol])
            .args(["--host", self.server.dir(), "--username", APP])
            .arg(format!("--file={}", script.display()))
            .arg(format!("--log-prefix={}", log.display()))
            .arg(format!("--client={}", load.clients))
            .arg(format!("--jobs={}", load.clients.min(2)))
            .args(load.rate.map(|rate| format!("--rate={rate}")))
            .args(load.variables.iter().map(|(name, value)| format!("--define={name}={value}")))
            .arg(match self.options.quick {
                true => "--transactions=10".to_string(),
                false => format!("--time={}", self.options.seconds),
            });
        if load.durable {
            command.env("PGOPTIONS", "-c synchronous_commit=on");
        }
        let cpu_before = self.cpu_of_backends();
        let output = command.arg(load.database).output().expect("pgbench can be run");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: pgbench failed:\n{text}{errors}", load.label);

        let transactions =
            number_after(&text, "number of transactions actually processed:").unwrap_or(0.0);
        assert!(transactions > 0.0, "{}: no transactions:\n{text}", load.label);
        let mut latencies = self.take_logs(&format!("{number}.log."));
        let mut sample = Sample::of_latencies(&mut latencies, Duration::from_secs(1));
        sample.rate = number_after(&text, "tps =").expect("pgbench tells the rate");
        sample.cpu = (self.cpu_of_backends() - cpu_before) / transactions;
        if self.counts_instructions {
            let text = std::fs::read_to_string(counted).expect("perf wrote what it counted");
            sample.instructions = count_in(&text).unwrap_or(0.0) / transactions;
        }
        let _ = std::fs::remove_file(script);
        (sample, transactions as u64)
    }

    /// CPU time of all backends that have ended, once those of the load have, in microseconds.
    fn cpu_of_backends(&self) -> f64 {
        let mut admin = self.admin();
        eventually("the load's backends have ended", || {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app' AND application_name = 'pgbench'";
            admin.query_one(sql, &[]).expect("the server answers").get::<_, i64>(0) == 0
        });
        // Then the postmaster takes their times over, at once.
        std::thread::sleep(Duration::from_millis(10));
        let file = format!("/proc/{}/stat", self.postmaster());
        let text = std::fs::read_to_string(file).expect("the server runs");
        cpu_of_children(&text) * 10_000.0
    }

    fn postmaster(&self) -> String {
        let file = Path::new(self.server.dir()).join("data/postmaster.pid");
        let text = std::fs::read_to_string(file).expect("the server runs");
        text.lines().next().expect("a process id").to_string()
    }

    /// The latencies in pgbench's logs, in microseconds; removes them.
    fn take_logs(&self, prefix: &str) -> Vec<f64> {
        let mut latencies = Vec::new();
        for entry in std::fs::read_dir(&self.scratch).expect("the scratch folder").flatten() {
            if entry.file_name().to_string_lossy().starts_with(prefix) {
                let text = std::fs::read_to_string(entry.path()).expect("a log of pgbench");
                latencies.extend(latencies_in(&text));
                let _ = std::fs::remove_file(entry.path());
            }
        }
        latencies
    }
}

/// The third word of each line.
fn latencies_in(log: &str) -> impl Iterator<Item = f64> {
    log.lines().filter_map(|line| line.split(' ').nth(2)?.parse().ok())
}

/// User and system time of the children that were waited for, in hundredths of a second: columns 16 and 17 of /proc/PID/stat,
/// counted behind the name, which may hold blanks.
fn cpu_of_children(stat: &str) -> f64 {
    let columns = stat.rsplit(") ").next().unwrap_or_default();
    columns.split(' ').skip(13).take(2).filter_map(|word| word.parse::<f64>().ok()).sum()
}

fn number_after(text: &str, label: &str) -> Option<f64> {
    let rest = &text[text.find(label)? + label.len()..];
    let word = rest.split_whitespace().next()?;
    word.split('/').next()?.parse().ok()
}

/// All commands but `\set` in one pipeline.
fn pipelined(script: &str) -> String {
    let (before, statements): (Vec<&str>, Vec<&str>) =
        script.lines().partition(|line| line.starts_with("\\set ") || line.starts_with("--"));
    let mut lines = before;
    lines.push("\\startpipeline");
    lines.extend(statements);
    lines.push("\\endpipeline");
    lines.join("\n") + "\n"
}

/// Where the WAL is, and how large the tables are.
struct Footprint {
    wal: f64,
    heap: f64,
    index: f64,
    dead: f64,
}

impl Footprint {
    /// `dead`: also counts the dead rows, which reads all tables.
    fn of(admin: &mut Client, dead: bool) -> Footprint {
        let count = if dead { "(pgstattuple(oid)).dead_tuple_count" } else { "0" };
        let row = admin
            .query_one(
                &format!(
                    "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8, sum(pg_table_size(oid))::float8,
                            sum(pg_indexes_size(oid))::float8, sum({count})::float8
                     FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
                ),
                &[],
            )
            .expect("sizes can be asked for");
        Footprint { wal: row.get(0), heap: row.get(1), index: row.get(2), dead: row.get(3) }
    }

    /// What each transaction added since `before`.
    fn fill(&self, before: &Footprint, transactions: u64, sample: &mut Sample) {
        let each = |after: f64, before: f64| (after - before) / transactions as f64;
        sample.wal = each(self.wal, before.wal);
        sample.heap = each(self.heap, before.heap);
        sample.index = each(self.index, before.index);
        sample.dead = each(self.dead, before.dead);
    }
}

fn perf_stat() -> Command {
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x,", "-e", "instructions:u"]);
    perf
}

/// Many virtual machines have no counters.
fn can_count_instructions() -> bool {
    let tried = perf_stat().arg("true").output();
    tried.is_ok_and(|output| count_in(&String::from_utf8_lossy(&output.stderr)).is_some())
}

/// The first number of `perf stat -x,`: `1234,,instructions:u,...`
fn count_in(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains("instructions"))?;
    line.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_holds_all_commands_but_those_of_pgbench() {
        assert_eq!(
            pipelined("-- why\n\\set key 1\nBEGIN;\nCOMMIT;\n"),
            "-- why\n\\set key 1\n\\startpipeline\nBEGIN;\nCOMMIT;\n\\endpipeline\n"
        );
    }

    #[test]
    fn what_pgbench_and_perf_write_is_understood() {
        let text = "number of transactions actually processed: 20/20\ntps = 412.5 (without)\n";
        assert_eq!(number_after(text, "actually processed:"), Some(20.0));
        assert_eq!(number_after(text, "tps ="), Some(412.5));
        assert_eq!(number_after(text, "nothing"), None);
        let log = "0 1 250 0 1764427330 12345\n1 1 90 0 1764427330 12399\n";
        assert_eq!(latencies_in(log).collect::<Vec<_>>(), [250.0, 90.0]);
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4 5 6 7 8 90 91 100 23 20 0 1 0 55";
        assert_eq!(cpu_of_children(stat), 123.0);
        assert_eq!(count_in("# started\n\n8123,,instructions:u,1,100.00,,\n"), Some(8123.0));
        assert_eq!(count_in("<not supported>,,instructions:u,0,100.00,,\n"), None);
    }
}
