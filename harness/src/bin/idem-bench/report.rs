//! The results: tables in Markdown, and plots.

use std::fmt::Write as _;
use std::process::Command;
use std::time::Duration;

use crate::load::{Bench, folder};
use crate::measure::Sample;
use crate::plot::{self, Bar, Line};
use crate::redis_store::RedisServer;

/// Collects sections of text; written to a file at the end.
pub struct Report {
    text: String,
    targets: Vec<Target>,
    plots: Vec<(&'static str, String)>,
    instructions: bool,
}

struct Target {
    what: String,
    wanted: String,
    measured: String,
    met: bool,
}

/// Columns that a table may show beside rate and latency.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// No more.
    Speed,
    /// What was written, too.
    Written,
}

impl Report {
    pub fn new(bench: &Bench) -> Report {
        Report {
            text: String::new(),
            targets: Vec::new(),
            plots: Vec::new(),
            instructions: bench.counts_instructions,
        }
    }

    pub fn section(&mut self, title: &str, words: &str) {
        eprintln!("bench: {title}");
        let _ = write!(self.text, "\n## {title}\n\n{words}\n");
    }

    pub fn words(&mut self, words: &str) {
        let _ = write!(self.text, "\n{words}\n");
    }

    /// A table of contenders; rates also as multiples of that of number `base`.
    pub fn table(&mut self, columns: Columns, base: usize, labels: &[&str], samples: &[Sample]) {
        let mut header = vec!["", "per second", "relative", "p50 µs", "p99 µs"];
        if columns == Columns::Written {
            header.extend(["CPU µs", "WAL bytes", "dead rows", "table bytes", "index bytes"]);
            if self.instructions {
                header.push("instructions");
            }
        }
        let rows = labels.iter().zip(samples).map(|(label, sample)| {
            let mut row = vec![
                label.to_string(),
                thousands(sample.rate),
                format!("{:.2}", sample.rate / samples[base].rate),
                thousands(sample.p50),
                thousands(sample.p99),
            ];
            if columns == Columns::Written {
                row.push(format!("{:.1}", sample.cpu));
                row.push(thousands(sample.wal));
                row.push(format!("{:.1}", sample.dead.abs()));
                row.extend([sample.heap, sample.index].map(thousands));
                if self.instructions {
                    row.push(thousands(sample.instructions));
                }
            }
            row
        });
        let table = markdown(&header, rows);
        self.text.push_str(&table);
    }

    /// A table of any shape.
    pub fn plain_table(&mut self, header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
        let table = markdown(header, rows);
        self.text.push_str(&table);
    }

    /// A target: at least (or, `at_most`) `wanted`.
    pub fn at_least(&mut self, what: &str, measured: f64, wanted: f64) {
        self.target(what, format!("≥ {wanted}"), format!("{measured:.2}"), measured >= wanted);
    }

    pub fn at_most(&mut self, what: &str, measured: f64, wanted: f64, unit: &str) {
        let (wanted_text, text) = (format!("≤ {wanted}{unit}"), format!("{measured:.2}{unit}"));
        self.target(what, wanted_text, text, measured <= wanted);
    }

    fn target(&mut self, what: &str, wanted: String, measured: String, met: bool) {
        self.targets.push(Target { what: what.to_string(), wanted, measured, met });
    }

    /// A plot of horizontal bars, shown here and written beside the results as `name`.svg.
    pub fn plot(&mut self, name: &'static str, title: &str, bars: &[Bar]) {
        self.plots.push((name, plot::bars(title, bars)));
        let _ = write!(self.text, "\n![{title}]({name}.svg)\n");
    }

    /// A plot of lines over time, likewise.
    pub fn lines(&mut self, name: &'static str, title: &str, lines: &[Line]) {
        self.plots.push((name, plot::lines(title, lines)));
        let _ = write!(self.text, "\n![{title}]({name}.svg)\n");
    }

    pub fn all_met(&self) -> bool {
        self.targets.iter().all(|target| target.met)
    }

    pub fn write(&self, bench: &Bench, elapsed: Duration) {
        let head = format!(
            "# Measured\n\nWritten by `{}`: do not edit. What the contenders are is in the scripts of this folder.\n\n{}",
            command(bench),
            machine(bench, elapsed)
        );
        let notes = std::fs::read_to_string(folder().join("notes.md")).unwrap_or_default();
        self.write_as(bench, "results.md", &head, &notes);
        eprintln!("bench: it took {:.0} s", elapsed.as_secs_f64());
    }

    /// Writes `file` and the plots: `head`, the targets, `notes`, the sections.
    pub fn write_as(&self, bench: &Bench, file: &str, head: &str, notes: &str) {
        let out = &bench.options.out;
        std::fs::create_dir_all(out).expect("the folder of the results");
        for (name, svg) in &self.plots {
            std::fs::write(out.join(format!("{name}.svg")), svg).expect("a plot can be written");
        }
        let targets = markdown(
            &["target", "wanted", "measured", ""],
            self.targets.iter().map(|target| {
                vec![
                    target.what.clone(),
                    target.wanted.clone(),
                    target.measured.clone(),
                    if target.met { "met" } else { "**missed**" }.to_string(),
                ]
            }),
        );
        let text = format!("{head}\n## Targets\n{targets}\n{notes}{}", self.text);
        let file = out.join(file);
        std::fs::write(&file, text).expect("the results can be written");
        eprintln!("bench: wrote {}", file.display());
    }
}

fn command(bench: &Bench) -> String {
    let mut command = "make bench".to_string();
    if bench.options.quick {
        command += " QUICK=1";
    }
    if bench.options.full_scale {
        command += " SCALE=full";
    }
    command
}

/// The machine's shape, as a line of a list.
pub fn shape() -> String {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let after_colon = |text: &str, label: &str| {
        let line = text.lines().find(|line| line.starts_with(label)).map(str::to_string);
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_string())).unwrap_or_default()
    };
    let (cpu_info, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
    let memory: f64 = after_colon(&memory, "MemTotal")
        .split(' ')
        .next()
        .and_then(|kilobytes| kilobytes.parse().ok())
        .unwrap_or(0.0);
    format!(
        "- Machine: {cores} cores ({}), {:.0} GB of memory, Linux {}; load generator and servers share it.\n",
        after_colon(&cpu_info, "model name"),
        memory / 1e6,
        said("uname", "-r").split('-').next().unwrap_or_default(),
    )
}

fn said(program: &str, argument: &str) -> String {
    let output = Command::new(program).arg(argument).output();
    output.map_or(String::new(), |out| String::from_utf8_lossy(&out.stdout).trim().to_string())
}

/// The machine's shape, versions and settings, as a list.
fn machine(bench: &Bench, elapsed: Duration) -> String {
    let redis = RedisServer::version().map_or("none".to_string(), |version| version);
    let counters = match bench.counts_instructions {
        true => "counted with `perf stat`, in the server, for each transaction",
        false => "not counted: this machine gives `perf stat` no counters",
    };
    format!(
        "{}\
         - PostgreSQL {}, Redis {redis}, {}; Unix sockets everywhere.\n\
         - {} s a run, {} rounds in turn (fresh transactions and replays {}), medians; all of it took {:.0} minutes. Tables are emptied before each run.\n\
         - Unless a table says otherwise: 4 clients of pgbench with prepared statements, `fsync = on`, `synchronous_commit = off` \
           (so that what is compared is work, not one disk), no autovacuum, no checkpoint during a run.\n\
         - CPU time (of the server's backends), bytes and rows are for each transaction, business row included. Instructions are {counters}.\n",
        shape(),
        bench.version(),
        said("rustc", "--version"),
        bench.options.seconds,
        bench.options.rounds,
        bench.options.rounds * 2 + 3,
        elapsed.as_secs_f64() / 60.0,
    )
}

fn markdown(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut text =
        format!("\n| {} |\n|---{}|\n", header.join(" | "), "|--:".repeat(header.len() - 1));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

/// 1234567.8 → 1,234,568
pub fn thousands(number: f64) -> String {
    let digits = format!("{:.0}", number.abs());
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number <= -0.5 { format!("-{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        for (number, text) in
            [(0.0, "0"), (-0.2, "0"), (999.4, "999"), (1234567.8, "1,234,568"), (-1500.0, "-1,500")]
        {
            assert_eq!(thousands(number), text);
        }
    }

    #[test]
    fn a_table_has_one_line_for_each_row() {
        let rows = [vec!["a".to_string(), "1".to_string()]];
        assert_eq!(markdown(&["", "n"], rows), "\n|  | n |\n|---|--:|\n| a | 1 |\n");
    }
}
