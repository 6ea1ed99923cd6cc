//! The SQL in the documents works: every block fenced as `sql` is executed by psql, in order, one fresh database a
//! document. A block fenced as `sql fails XXXXX` must fail with that SQLSTATE. So are the queries in blocks of `yaml`.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use idem_harness::TestDb;

/// A fenced block: the line it starts at, the SQLSTATE it must fail with, its text.
struct Block<'a> {
    line: usize,
    fails: Option<&'a str>,
    text: String,
}

fn blocks(document: &str) -> Vec<Block<'_>> {
    let mut found = Vec::new();
    let mut lines = document.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(info) = line.strip_prefix("```") else {
            continue;
        };
        let text: Vec<&str> =
            lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let mut words = info.split_whitespace();
        let (fails, text) = match words.next() {
            Some("sql") => (words.nth(1), text.join("\n")),
            Some("yaml") => (None, queries(&text)),
            _ => continue,
        };
        found.push(Block { line: number + 1, fails, text });
    }
    found
}

/// The values of `query: "..."`.
fn queries(yaml: &[&str]) -> String {
    let query =
        |line: &&str| Some(line.trim().strip_prefix("query: \"")?.strip_suffix('"')?.to_string());
    yaml.iter().filter_map(query).map(|query| query + ";\n").collect()
}

fn run(name: &str) {
    let path = format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(path).expect("the document can be read");
    let blocks = blocks(&document);
    assert!(!blocks.is_empty(), "{name} has no SQL");

    let mut script = String::new();
    for Block { line, fails, text } in blocks {
        writeln!(script, "\\echo {name}:{line}").unwrap();
        match fails {
            None => writeln!(script, "\\set ON_ERROR_STOP on\n{text}").unwrap(),
            Some(state) => writeln!(
                script,
                "\\set LAST_ERROR_SQLSTATE none\n\\set ON_ERROR_STOP off\n{text}\nROLLBACK;\n\
                 SELECT :'LAST_ERROR_SQLSTATE' = '{state}' AS expected \\gset\n\
                 \\if :expected\n\\else\n\\echo not {state} but :LAST_ERROR_SQLSTATE\n\\set ON_ERROR_STOP on\nSELECT 1/0;\n\\endif"
            )
            .unwrap(),
        }
    }

    let db = TestDb::bare();
    let mut psql = Command::new("psql")
        .args(["-qX", "-d", &db.name])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("psql can be started");
    psql.stdin.take().unwrap().write_all(script.as_bytes()).expect("psql reads the script");
    let output = psql.wait_with_output().expect("psql ends");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // Roles belong to the server, which other documents share.
    let mut cleanup = "DROP EXTENSION idem CASCADE".to_string();
    for role in document.lines().filter_map(|line| line.strip_prefix("CREATE ROLE ")) {
        write!(cleanup, "; DROP ROLE {role}").unwrap();
    }
    let _ = db.admin().batch_execute(&cleanup);
}

#[test]
fn readme() {
    run("README.md");
}

#[test]
fn reference() {
    run("docs/reference.md");
}

#[test]
fn monitoring() {
    run("docs/monitoring.md");
}
