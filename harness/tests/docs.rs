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

#[test]
fn errors() {
    run("docs/errors.md");
}

#[test]
fn guarantees() {
    run("docs/guarantees.md");
}

#[test]
fn operations() {
    run("docs/operations.md");
}

#[test]
fn scaling_out() {
    run("docs/scaling-out.md");
}

fn text(name: &str) -> String {
    let path = format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// What stands between two marks, without them.
fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
    text.split(open).skip(1).filter_map(|rest| rest.split(close).next()).collect()
}

/// docs/errors.md and docs/reference.md name every SQLSTATE of the code, and none of our class that the code does not have.
#[test]
fn every_sqlstate_is_documented() {
    let code = text("core/src/error.rs");
    let body = between(&code, "pub fn sqlstate(", "\n    }\n")[0];
    let states: std::collections::BTreeSet<&str> =
        between(body, "=> \"", "\"").into_iter().filter(|state| state.len() == 5).collect();
    assert!(states.len() > 10, "{states:?}");
    let document = text("docs/errors.md");
    let (table, sections) = document.split_once("```sql").expect("a table, then sections");
    for state in &states {
        assert!(
            table.contains(&format!("`{state}`")),
            "{state} is not in the table of docs/errors.md"
        );
        let section = sections.lines().any(|line| line.starts_with("## ") && line.contains(state));
        assert!(section, "{state} has no section in docs/errors.md");
    }
    for name in ["docs/errors.md", "docs/reference.md", "docs/answers.md", "sql/idem.sql"] {
        let document = text(name);
        for (place, _) in document.match_indices("ID0") {
            let state = &document[place..place + 5];
            assert!(states.contains(state), "{name} names {state}, which does not exist");
        }
    }
}

/// Links between the documents lead somewhere, and so do the headings they name.
#[test]
fn links_lead_somewhere() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut names: Vec<String> = std::fs::read_dir(root.join("docs"))
        .expect("docs can be read")
        .map(|entry| format!("docs/{}", entry.unwrap().file_name().to_str().unwrap()))
        .collect();
    for entry in std::fs::read_dir(&root).unwrap() {
        names.push(entry.unwrap().file_name().to_str().unwrap().to_string());
    }
    for name in names.iter().filter(|name| name.ends_with(".md")) {
        let document = text(name);
        for link in between(&document, "](", ")") {
            if link.contains("://") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let folder = root.join(name).parent().unwrap().to_path_buf();
            let target = if file.is_empty() { root.join(name) } else { folder.join(file) };
            assert!(target.exists(), "{name} links to {link}");
            if !heading.is_empty() {
                let target = std::fs::read_to_string(target).unwrap();
                let found = target.lines().filter(|line| line.starts_with('#')).any(|line| {
                    let title = line.trim_start_matches('#').trim().to_lowercase();
                    let kept = title.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
                    kept.collect::<String>().replace(' ', "-") == heading
                });
                assert!(found, "{name} links to the heading {link}");
            }
        }
    }
}
