//! The benchmarks run, and what they measure is what they say: in the quick mode each contender is checked to have done its work.
//! Nothing here depends on time.

use std::path::Path;
use std::process::Command;

#[test]
fn the_soak_is_measured() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("soak-{}", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_idem-bench"))
        .envs([("QUICK", "1"), ("SOAK_MINUTES", "1")])
        .env("BENCH_OUT", &out)
        .output()
        .expect("idem-bench can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let results = std::fs::read_to_string(out.join("soak.md")).expect("results were written");
    assert!(results.contains("\n## Targets\n"), "{results}");
    assert!(!results.contains("NaN") && !results.contains("inf"), "{results}");
    assert_eq!(results.matches("\n| 0.").count(), 6, "a line for each interval: {results}");
    let svg = std::fs::read_to_string(out.join("soak.svg")).expect("a plot");
    assert_eq!(svg.matches("<polyline").count(), 3, "{svg}");
    std::fs::remove_dir_all(out).expect("the results can be removed");
}

#[test]
fn every_section_is_measured() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{}", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_idem-bench"))
        .env("QUICK", "1")
        .env("BENCH_OUT", &out)
        .output()
        .expect("idem-bench can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let results = std::fs::read_to_string(out.join("results.md")).expect("results were written");
    for section in [
        "## Targets",
        "## A fresh transaction",
        "## A replay",
        "## A key that cannot be had",
        "## Whole operations",
        "## Results of other sizes",
        "## An effect outside the database",
        "## Locks",
        "## Redis",
        "## How soon a waiter wakes up",
        "## Many clients on one key",
        "## With many live keys",
    ] {
        assert!(results.contains(&format!("\n{section}\n")), "there is no {section}");
    }
    assert!(!results.contains("NaN") && !results.contains("inf"), "{results}");
    for plot in ["fresh", "wal", "replay"] {
        let svg = std::fs::read_to_string(out.join(format!("{plot}.svg"))).expect("a plot");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{plot}: {svg}");
    }
    std::fs::remove_dir_all(out).expect("the results can be removed");
}
