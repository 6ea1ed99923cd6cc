//! A throw-away Redis, used the way people use it for idempotency keys and locks.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Connection, Script};

/// A running `redis-server`; it ends with this value.
pub struct RedisServer {
    process: Child,
    socket: PathBuf,
}

impl RedisServer {
    pub fn version() -> Option<String> {
        let output = Command::new("redis-server").arg("--version").output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace().find_map(|word| word.strip_prefix("v=")).map(str::to_string)
    }

    /// Starts one below `dir`, with an append-only file that is synced `always` or `everysec`.
    pub fn start(dir: &Path, appendfsync: &str) -> RedisServer {
        let dir = dir.join(format!("redis-{appendfsync}"));
        std::fs::create_dir_all(&dir).expect("a folder for Redis");
        let socket = dir.join("socket");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "yes", "--daemonize", "no"])
            .args(["--appendfsync", appendfsync])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(&dir)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server can be run");
        let server = RedisServer { process, socket };
        let end = Instant::now() + Duration::from_secs(10);
        while server.try_connect().is_err() {
            assert!(Instant::now() < end, "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn try_connect(&self) -> redis::RedisResult<Connection> {
        let url = format!("redis+unix://{}", self.socket.display());
        let mut connection = redis::Client::open(url)?.get_connection()?;
        redis::cmd("PING").exec(&mut connection)?;
        Ok(connection)
    }

    pub fn connect(&self) -> Store {
        Store {
            connection: self.try_connect().expect("Redis answers"),
            delete: Script::new(
                "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0",
            ),
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// One connection.
pub struct Store {
    connection: Connection,
    delete: Script,
}

impl Store {
    /// SET NX PX: whether the key was taken.
    pub fn take(&mut self, key: &str, token: &str) -> bool {
        let mut command = redis::cmd("SET");
        command.arg(key).arg(token).arg("NX").arg("PX").arg(30_000);
        let answer: Option<String> = command.query(&mut self.connection).expect("SET NX PX");
        answer.is_some()
    }

    /// Stores the result in place of the claim.
    pub fn store(&mut self, key: &str, result: &str) {
        let mut command = redis::cmd("SET");
        command.arg(key).arg(result).arg("PX").arg(86_400_000);
        command.exec(&mut self.connection).expect("SET PX");
    }

    /// Compare and delete, by script: whether the token held the key.
    pub fn free(&mut self, key: &str, token: &str) -> bool {
        let deleted: i32 =
            self.delete.key(key).arg(token).invoke(&mut self.connection).expect("EVALSHA");
        deleted == 1
    }
}
