//! What client-side tests stand on: databases on the shared throw-away server ([`TestDb`]) and servers of one's own to
//! kill and restart ([`Server`]). Both come from `scripts/pg`, which must run the tests: `make client`.
//!
//! It is a test harness: what does not work panics, and says where.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use postgres::{Client, NoTls};

/// The ordinary role of an application: it may call what `idem_grant` grants, and nothing else.
pub const APP: &str = "app";

/// The SQLSTATE of an error; empty for one that is not the server's (a lost connection).
pub fn sqlstate(error: &postgres::Error) -> &str {
    error.code().map_or("", |code| code.code())
}

/// Polls until `condition` holds; panics after ten seconds.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < end, "still not so after ten seconds: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The major version of PostgreSQL that the tests run on.
pub fn major() -> u32 {
    environment("IDEM_PG_MAJOR").parse().expect("IDEM_PG_MAJOR is a number")
}

/// How often to repeat what proves more the oftener it is done: `few` times in `make test`, `many` times in `make prove`
/// (PROVE=1; PROVE=3 does three times as many).
pub fn rounds(few: u64, many: u64) -> u64 {
    match std::env::var("PROVE").unwrap_or_default().as_str() {
        "" | "0" => few,
        times => many * times.parse::<u64>().expect("PROVE is a number"),
    }
}

/// Says that something is not tested here, past the test runner, which shows what is printed by failing tests only.
pub fn skipped(why: &str) {
    let words = format!("\nSKIPPED: {why}\n");
    std::io::Write::write_all(&mut std::io::stderr(), words.as_bytes()).expect("stderr");
}

fn environment(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: run this with `make client` or `scripts/pg run`")
    })
}

/// A number that no other use in this process gets.
fn unique() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[track_caller]
fn connect(host: &str, port: &str, database: &str, user: &str) -> Client {
    postgres::Config::new()
        .host(host)
        .port(port.parse().expect("a port is a number"))
        .dbname(database)
        .user(user)
        .connect(NoTls)
        .unwrap_or_else(|error| panic!("cannot connect to {database} as {user}: {error:?}"))
}

/// Installs idem in the client's database, with the role [`APP`] granted. Roles belong to the whole server, so another
/// test may be creating it now.
fn prepare(admin: &mut Client) {
    admin
        .batch_execute(
            "DO $$ BEGIN CREATE ROLE app LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
             CREATE EXTENSION idem;
             SELECT idem_grant('app');",
        )
        .expect("idem can be installed and granted");
}

/// A fresh database on the shared server, with idem and the granted role [`APP`]; dropped at the end.
pub struct TestDb {
    pub name: String,
}

impl TestDb {
    #[track_caller]
    #[allow(clippy::new_without_default)] // it makes a database: nothing to do by default
    pub fn new() -> Self {
        let db = Self::bare();
        prepare(&mut db.admin());
        db
    }

    /// The same without idem.
    #[track_caller]
    pub fn bare() -> Self {
        let name = format!("test_{}_{}", std::process::id(), unique());
        Self::server("postgres")
            .batch_execute(&format!("CREATE DATABASE {name} TEMPLATE template0"))
            .expect("a database can be created");
        Self { name }
    }

    /// A new connection as superuser.
    #[track_caller]
    pub fn admin(&self) -> Client {
        self.connect("postgres")
    }

    /// A new connection as the application.
    #[track_caller]
    pub fn app(&self) -> Client {
        self.connect(APP)
    }

    #[track_caller]
    pub fn connect(&self, user: &str) -> Client {
        connect(&environment("PGHOST"), &environment("PGPORT"), &self.name, user)
    }

    #[track_caller]
    fn server(database: &str) -> Client {
        connect(&environment("PGHOST"), &environment("PGPORT"), database, "postgres")
    }
}

impl Drop for TestDb {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // what the test left may help to find out why; the server is thrown away anyway
        }
        // A prepared transaction that a test left makes this fail; the server is thrown away anyway.
        let _ = Self::server("postgres")
            .batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.name));
    }
}

/// A server of its own for one test, stopped and removed at the end. It lives in the folder of `scripts/pg run`, which
/// removes it if the test is killed.
pub struct Server {
    major: u32,
    dir: PathBuf,
    settings: Vec<String>,
}

impl Server {
    /// Starts one on a new cluster; settings as `name=value`. Give `fsync=on` if it must survive more than its own crash.
    #[track_caller]
    pub fn start(settings: &[&str]) -> Self {
        Self::start_major(major(), settings)
    }

    /// The same on another major version, on which idem must be installed ([`installed`]).
    #[track_caller]
    pub fn start_major(major: u32, settings: &[&str]) -> Self {
        let settings = settings.iter().map(|setting| setting.to_string()).collect();
        let server = Self { major, dir: Self::new_dir(), settings };
        server.start_again();
        server
    }

    /// Starts a standby that this server streams to.
    #[track_caller]
    pub fn standby(&self, settings: &[&str]) -> Self {
        let settings = settings.iter().map(|setting| setting.to_string()).collect();
        let standby = Self { major: self.major, dir: Self::new_dir(), settings };
        std::fs::create_dir(&standby.dir).expect("a folder for the server can be made");
        let data = standby.dir.join("data");
        let output = Command::new("pg_basebackup")
            .args(["-h", self.dir(), "-U", "postgres", "-R", "-X", "stream", "-c", "fast"])
            .args(["--no-sync", "-D"])
            .arg(&data)
            .output()
            .expect("pg_basebackup can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        standby.start_again();
        standby
    }

    /// Stops it, and moves its cluster to a newer major version with pg_upgrade.
    #[track_caller]
    pub fn upgrade(self, major: u32) -> Self {
        let new = Self { major, dir: Self::new_dir(), settings: self.settings.clone() };
        pg(&["upgrade", self.dir(), &major.to_string(), new.dir()]);
        new.start_again();
        new
    }

    fn new_dir() -> PathBuf {
        let name = format!("{}-{}", std::process::id(), unique());
        Path::new(&environment("IDEM_RUN_DIR")).join(name)
    }

    /// Starts it after [`stop`](Self::stop) or [`kill9`](Self::kill9), with the same settings.
    #[track_caller]
    pub fn start_again(&self) {
        let major = self.major.to_string();
        let mut arguments = vec!["start", &major, self.dir()];
        for setting in &self.settings {
            arguments.extend(["-c", setting]);
        }
        pg(&arguments);
    }

    /// Stops it in a mode of pg_ctl: `fast`, `immediate`.
    #[track_caller]
    pub fn stop(&self, mode: &str) {
        pg(&["stop", self.dir(), mode]);
    }

    #[track_caller]
    pub fn restart(&self) {
        self.stop("fast");
        self.start_again();
    }

    /// kill -9 for the postmaster and all its processes, as in a power cut, but for what the kernel still writes.
    #[track_caller]
    pub fn kill9(&self) {
        pg(&["kill", self.dir()]);
    }

    /// Creates a database with idem and the granted role [`APP`].
    #[track_caller]
    pub fn create_database(&self, name: &str) {
        self.connect("postgres", "postgres")
            .batch_execute(&format!("CREATE DATABASE {name} TEMPLATE template0"))
            .expect("a database can be created");
        prepare(&mut self.connect(name, "postgres"));
    }

    #[track_caller]
    pub fn connect(&self, database: &str, user: &str) -> Client {
        connect(self.dir(), &environment("PGPORT"), database, user)
    }

    /// What the server has logged so far.
    #[track_caller]
    pub fn log(&self) -> String {
        let log = std::fs::read(self.dir.join("log")).expect("the server has a log");
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Its folder: the cluster is in `data`, the socket in the folder itself.
    pub fn dir(&self) -> &str {
        self.dir.to_str().expect("the path is UTF-8")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let removed = Command::new(script()).args(["remove", self.dir()]).status();
        if !std::thread::panicking() {
            assert!(
                removed.is_ok_and(|status| status.success()),
                "cannot remove the server in {}",
                self.dir()
            );
        }
    }
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/pg")
}

/// The folder of this checkout's server of a major version, if it is there with idem of this very checkout installed, as
/// `make test` has it for all majors before the one that is being tested.
#[track_caller]
pub fn installed(major: u32) -> Option<PathBuf> {
    let home = PathBuf::from(pg(&["home", &major.to_string()]).trim());
    let config = Command::new(home.join("bin/pg_config")).arg("--sharedir").output().ok()?;
    let extension = Path::new(String::from_utf8(config.stdout).ok()?.trim()).join("extension");
    let script = |path: &Path| std::fs::read(path).ok();
    let ours = script(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../sql/idem.sql"));
    let control = std::fs::read_to_string(extension.join("idem.control")).ok()?;
    let version = control.lines().find_map(|line| line.strip_prefix("default_version = "))?;
    let theirs = script(&extension.join(format!("idem--{}.sql", version.trim_matches('\''))));
    (theirs == ours).then_some(home)
}

/// Runs `scripts/pg` and returns what it answers.
#[track_caller]
pub fn pg(arguments: &[&str]) -> String {
    try_pg(arguments).unwrap_or_else(|error| panic!("{error}"))
}

/// The same for what a machine may be unable to do: the error is what it said.
pub fn try_pg(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(script()).args(arguments).output().expect("scripts/pg can be run");
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).expect("scripts/pg answers in UTF-8")),
        false => Err(format!(
            "scripts/pg {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}
