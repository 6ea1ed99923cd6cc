//! Runs the conformance suite, tests/conformance/, against a server: against idem, or against another implementation of the same
//! contract. The README there says what a case may contain.
//!
//!     PGHOST=… PGPORT=… idem-conformance [--setup FILE.sql] [CASE.case…]
//!
//! Each case gets a fresh database (as the user postgres), in which FILE.sql installs the implementation; by default
//! `CREATE EXTENSION idem`. Without cases: all. It prints a line for each, and exits with 1 if one failed.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use idem_harness::{TestDb, sqlstate};
use postgres::{Client, SimpleQueryMessage};

/// How long a statement may take that nothing holds up, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
enum Kind {
    /// The statement ends by itself.
    Runs,
    /// It does not: something of another session holds it up.
    Waits,
    /// The statement that waited in this session ends now.
    Returns,
}

#[derive(Debug)]
struct Step {
    line: usize,
    session: String,
    kind: Kind,
    sql: String,
    rows: Option<Vec<String>>,
    error: Option<String>,
    save: Vec<String>,
}

/// What a statement ended with: its rows, or an SQLSTATE with its message.
type Outcome = Result<Vec<Vec<Option<String>>>, (String, String)>;

fn parse(text: &str) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let content = line.trim();
        if content.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with([' ', '\t']) {
            let step = steps.last_mut().ok_or(format!("line {number}: belongs to no step"))?;
            match content.split_once(' ').unwrap_or((content, "")) {
                ("=", row) => step.rows.get_or_insert_default().push(row.trim().to_string()),
                ("!", state) => step.error = Some(state.trim().to_string()),
                ("->", names) => step.save = names.split_whitespace().map(str::to_string).collect(),
                _ => {
                    step.sql.push('\n');
                    step.sql.push_str(content);
                }
            }
            continue;
        }
        let (head, sql) = line.split_once(':').unwrap_or((line, ""));
        let words: Vec<&str> = head.split_whitespace().collect();
        let kind = match words[1..] {
            [] if !sql.trim().is_empty() => Kind::Runs,
            ["waits"] if !sql.trim().is_empty() => Kind::Waits,
            ["returns"] if sql.is_empty() => Kind::Returns,
            _ => return Err(format!("line {number}: not a step: {line}")),
        };
        steps.push(Step {
            line: number,
            session: words[0].to_string(),
            kind,
            sql: sql.trim().to_string(),
            rows: None,
            error: None,
            save: Vec::new(),
        });
    }
    if steps.is_empty() { Err("no steps".into()) } else { Ok(steps) }
}

/// A session in a thread of its own, so that a statement can wait.
struct Session {
    pid: i32,
    statements: Sender<String>,
    outcomes: Receiver<Outcome>,
    waiting: bool,
}

impl Session {
    fn open(db: &TestDb) -> Session {
        let mut client = db.admin();
        // So that values are written in one way.
        client
            .batch_execute(
                "SET timezone = 'UTC'; SET datestyle = 'ISO'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex'",
            )
            .expect("settings can be set");
        let pid = client.query_one("SELECT pg_backend_pid()", &[]).expect("it has an id").get(0);
        let (statements, todo) = channel::<String>();
        let (done, outcomes) = channel();
        spawn(move || {
            for sql in todo {
                if done.send(run(&mut client, &sql)).is_err() {
                    break;
                }
            }
        });
        Session { pid, statements, outcomes, waiting: false }
    }
}

fn run(client: &mut Client, sql: &str) -> Outcome {
    let messages = client
        .simple_query(sql)
        .map_err(|error| (sqlstate(&error).to_string(), error.to_string()))?;
    let rows = messages.iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|n| row.get(n).map(str::to_string)).collect())
        }
        _ => None,
    });
    Ok(rows.collect())
}

/// Whether the session waits: it is not done, and whenever one looks it waits for something.
fn waits(admin: &mut Client, session: &Session) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    let mut seen = 0;
    while seen < 10 {
        if let Ok(outcome) = session.outcomes.try_recv() {
            return Err(format!("it should wait, but ended: {outcome:?}"));
        }
        let waiting: bool = admin
            .query_one(
                "SELECT count(*) = 1 FROM pg_stat_activity
                 WHERE pid = $1 AND state = 'active' AND wait_event_type NOT IN ('Client', 'IO', 'LWLock')",
                &[&session.pid],
            )
            .map_err(|error| error.to_string())?
            .get(0);
        seen = if waiting { seen + 1 } else { 0 };
        if Instant::now() > end {
            return Err("it should wait, but works".into());
        }
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn judge(step: &Step, outcome: Outcome, saved: &mut HashMap<String, String>) -> Result<(), String> {
    let rows = match (outcome, &step.error) {
        (Err((state, _)), Some(expected)) if state == *expected => return Ok(()),
        (Err((state, message)), Some(expected)) => {
            return Err(format!("{state} ({message}) in place of {expected}"));
        }
        (Err((state, message)), None) => return Err(format!("{state} ({message})")),
        (Ok(rows), Some(expected)) => return Err(format!("{rows:?} in place of {expected}")),
        (Ok(rows), None) => rows,
    };
    if let Some(expected) = &step.rows {
        let found: Vec<String> = rows
            .iter()
            .map(|row| {
                row.iter()
                    .map(|value| value.as_deref().unwrap_or("NULL"))
                    .collect::<Vec<_>>()
                    .join(" | ")
            })
            .collect();
        let expected: Vec<String> = expected.iter().map(|row| substituted(row, saved)).collect();
        if found != expected {
            return Err(format!("{found:?} in place of {expected:?}"));
        }
    }
    for (n, name) in step.save.iter().enumerate() {
        let value = rows.first().and_then(|row| row.get(n)).cloned().flatten();
        saved.insert(name.clone(), value.ok_or(format!("there is no value for {name}"))?);
    }
    Ok(())
}

fn substituted(text: &str, saved: &HashMap<String, String>) -> String {
    // The longest name first: $token2 is not $token.
    let mut names: Vec<&String> = saved.keys().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    names
        .iter()
        .fold(text.to_string(), |text, name| text.replace(&format!("${name}"), &saved[*name]))
}

fn run_case(steps: &[Step], setup: &str) -> Result<(), String> {
    let db = TestDb::bare();
    let mut admin = db.admin();
    admin.batch_execute(setup).map_err(|error| format!("setup: {error}"))?;
    let mut sessions: HashMap<&str, Session> = HashMap::new();
    let mut saved = HashMap::new();
    for step in steps {
        let session = sessions.entry(&step.session).or_insert_with(|| Session::open(&db));
        let at = |message: String| format!("line {}: {}: {message}", step.line, step.session);
        match (&step.kind, session.waiting) {
            (Kind::Returns, false) => return Err(at("nothing waits in it".into())),
            (Kind::Runs | Kind::Waits, true) => return Err(at("a statement waits in it".into())),
            _ => {}
        }
        if !matches!(step.kind, Kind::Returns) {
            let sql = substituted(&step.sql, &saved);
            session.statements.send(sql).map_err(|_| at("the session is gone".into()))?;
        }
        if matches!(step.kind, Kind::Waits) {
            waits(&mut admin, session).map_err(at)?;
            session.waiting = true;
        } else {
            session.waiting = false;
            let outcome = session
                .outcomes
                .recv_timeout(PATIENCE)
                .map_err(|_| at(format!("no answer within {PATIENCE:?}")))?;
            judge(step, outcome, &mut saved).map_err(at)?;
        }
    }
    Ok(())
}

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/conformance/cases");
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .expect("the cases can be listed")
        .map(|entry| entry.expect("a file").path())
        .collect();
    files.sort();
    files
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut setup = "CREATE EXTENSION idem".to_string();
    if arguments.first().is_some_and(|first| first == "--setup") {
        arguments.remove(0);
        setup = fs::read_to_string(arguments.remove(0)).expect("the setup can be read");
    }
    let files =
        if arguments.is_empty() { cases() } else { arguments.iter().map(PathBuf::from).collect() };
    let mut failed = 0;
    for file in &files {
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let outcome = fs::read_to_string(file)
            .map_err(|error| error.to_string())
            .and_then(|text| parse(&text))
            .and_then(|steps| run_case(&steps, &setup));
        match outcome {
            Ok(()) => println!("ok      {name}"),
            Err(why) => {
                failed += 1;
                println!("FAILED  {name}: {why}");
            }
        }
    }
    println!("{} cases, {failed} failed", files.len());
    ExitCode::from(u8::from(failed > 0 || files.is_empty()))
}
