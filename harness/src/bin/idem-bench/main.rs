//! The benchmarks: idem side by side with what people would use instead, in turn on one throw-away server, so that ratios hold on a
//! noisy machine. `make bench` runs it and writes `benches/results.md` with its plots.
//!
//! Environment: `QUICK=1` runs everything once and briefly, to see that it works; `SCALE=full` adds ten million live keys;
//! `SECONDS_A_RUN`, `ROUNDS` (short runs and many turns: a machine that others use too is fast and slow for seconds); `BENCH_OUT`, the folder for
//! the results; `SECTIONS`, the names of some sections, to run only these; `SOAK_MINUTES` runs steady
//! traffic for so long instead (`soak.rs`).

mod clients;
mod expiry;
mod load;
mod measure;
mod plot;
mod redis_store;
mod report;
mod sections;
mod soak;

use std::path::PathBuf;

use load::Bench;
use report::Report;

/// What to run, and where the results go.
pub struct Options {
    pub quick: bool,
    pub full_scale: bool,
    /// Instead of all that, steady traffic for so long.
    pub soak_minutes: Option<u32>,
    /// How long one run of one contender takes.
    pub seconds: u32,
    /// How often each contender has its turn.
    pub rounds: usize,
    pub out: PathBuf,
    /// The sections to run; all if there are none.
    sections: Vec<String>,
}

impl Options {
    pub fn wants(&self, section: &str) -> bool {
        self.sections.is_empty() || self.sections.iter().any(|name| name == section)
    }

    fn from_environment() -> Options {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let number = |name: &str, default: u32| {
            set(name).map_or(default, |value| {
                value.parse().unwrap_or_else(|_| panic!("{name} is not a number: {value}"))
            })
        };
        let quick = set("QUICK").is_some_and(|value| value != "0");
        let out = set("BENCH_OUT").map_or_else(|| load::folder().to_path_buf(), PathBuf::from);
        Options {
            quick,
            soak_minutes: set("SOAK_MINUTES").map(|_| number("SOAK_MINUTES", 0)),
            full_scale: set("SCALE").is_some_and(|value| value == "full"),
            seconds: number("SECONDS_A_RUN", 1),
            rounds: if quick { 1 } else { number("ROUNDS", 5) as usize },
            out,
            sections: set("SECTIONS")
                .map(|names| names.split_whitespace().map(str::to_string).collect())
                .unwrap_or_default(),
        }
    }
}

fn main() {
    let begun = std::time::Instant::now();
    let options = Options::from_environment();
    let bench = Bench::start(options);
    let mut report = Report::new(&bench);
    if let Some(minutes) = bench.options.soak_minutes {
        let flat = soak::run(&bench, minutes, &mut report);
        drop(bench); // exit does not stop the server
        std::process::exit(i32::from(!flat));
    }
    sections::run(&bench, &mut report);
    report.write(&bench, begun.elapsed());
}
