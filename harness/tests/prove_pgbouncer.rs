//! Real poolers (design section 4, invariant 8): PgBouncer in transaction pooling, and a client library's own pool (r2d2).
//! Many clients share few connections; whoever is killed between begin and complete leaves nothing behind.

mod common;

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread::scope;

use common::*;
use idem_harness::{Server, eventually, rounds, sqlstate};
use postgres::types::Type;
use postgres::{Client, Error, NoTls};
use serde_json::json;
use uuid::Uuid;

const POOL: u32 = 3; // connections to the server
const CLIENTS: u64 = 10;
const PORT: u16 = 6432;

/// A PgBouncer before the server, in the server's folder and as the server's user.
struct Bouncer<'a> {
    server: &'a Server,
    process: Child,
}

impl Bouncer<'_> {
    fn start(server: &Server) -> Bouncer<'_> {
        let dir = server.dir();
        let settings = format!(
            "[databases]\nshop = host={dir} port={} pool_size={POOL}\n\
             [pgbouncer]\npool_mode = transaction\nlisten_addr =\nlisten_port = {PORT}\nunix_socket_dir = {dir}\n\
             auth_type = trust\nauth_file = {dir}/userlist.txt\nmax_client_conn = 100\nserver_login_retry = 1\nserver_round_robin = 1\n",
            std::env::var("PGPORT").expect("PGPORT is set")
        );
        fs::write(format!("{dir}/pgbouncer.ini"), settings).expect("settings can be written");
        fs::write(format!("{dir}/userlist.txt"), "\"app\" \"\"\n\"postgres\" \"\"\n")
            .expect("users can be written");
        let owner = fs::metadata(dir).expect("the server has a folder");
        let log = File::create(format!("{dir}/pgbouncer.log")).expect("a log can be written");
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"]
            .into_iter()
            .find(|path| fs::exists(path).is_ok_and(|there| there))
            .unwrap_or("pgbouncer");
        let process = Command::new(program)
            .arg(format!("{dir}/pgbouncer.ini"))
            .current_dir("/")
            .uid(owner.uid())
            .gid(owner.gid())
            .stderr(log)
            .spawn()
            .expect("pgbouncer can be run: scripts/pg packages");
        let bouncer = Bouncer { server, process };
        eventually("PgBouncer answers", || bouncer.try_connect().is_ok());
        bouncer
    }

    fn try_connect(&self) -> Result<Client, Error> {
        postgres::Config::new()
            .host(self.server.dir())
            .port(PORT)
            .dbname("shop")
            .user("app")
            .connect(NoTls)
    }

    fn connect(&self) -> Client {
        self.try_connect().expect("PgBouncer lets clients in")
    }

    fn kill9(&mut self) {
        self.process.kill().expect("PgBouncer can be killed");
        self.process.wait().expect("PgBouncer ends");
        let socket = format!("{}/.s.PGSQL.{PORT}", self.server.dir());
        let _ = fs::remove_file(socket);
    }
}

impl Drop for Bouncer<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn shop() -> Server {
    let server = Server::start(&[]);
    server.create_database("shop");
    run(
        &mut server.connect("shop", "postgres"),
        "CREATE TABLE orders (key text, pid int DEFAULT pg_backend_pid()); GRANT ALL ON orders TO app",
    );
    server
}

/// Claims on a lease, in one call without a statement prepared by name: such a call may land anywhere.
/// → status, token, process
fn begin_unnamed(client: &mut Client, key: &str) -> Result<(String, Option<Uuid>, i32), Error> {
    let row = &client.query_typed(
        "SELECT status, token, pg_backend_pid() FROM idem_begin($1, lease => '600s') OFFSET 0",
        &[(&key, Type::TEXT)],
    )?[0];
    Ok((row.get(0), row.get(1), row.get(2)))
}

/// Orders under a leased claim. Says whether the transaction ran in another process than the claim was made in;
/// None if the key was somebody else's.
fn order_leased(client: &mut Client, key: &str) -> Option<bool> {
    let (status, token, process) = begin_unnamed(client, key).unwrap();
    if status != "acquired" {
        assert!(["in_progress", "completed"].contains(&&*status), "{status}");
        return None;
    }
    run(client, "BEGIN");
    client.query_typed("INSERT INTO orders VALUES ($1)", &[(&key, Type::TEXT)]).unwrap();
    let rows = client
        .query_typed(
            "SELECT pg_backend_pid() FROM idem_complete($1, to_jsonb($1), token => $2)",
            &[(&key, Type::TEXT), (&token, Type::UUID)],
        )
        .unwrap();
    let moved = rows[0].get::<_, i32>(0) != process;
    run(client, "COMMIT");
    Some(moved)
}

/// Orders in one transaction, with statements prepared by name within it, once at the level of the protocol (what the driver
/// does by itself), once in SQL.
fn order_prepared(client: &mut Client, key: &str, in_sql: bool) -> bool {
    let mut work = client.transaction().unwrap();
    if in_sql {
        run(
            &mut work,
            "PREPARE claim(text) AS SELECT status FROM idem_begin($1) OFFSET 0;
             PREPARE finish(text) AS SELECT idem_complete($1, to_jsonb($1))",
        );
    }
    let (claim, finish) = if in_sql {
        (format!("EXECUTE claim('{key}')"), format!("EXECUTE finish('{key}')"))
    } else {
        let named = work.prepare("SELECT status FROM idem_begin($1) OFFSET 0").unwrap();
        assert!(!named.params().is_empty());
        (
            "SELECT status FROM idem_begin($1) OFFSET 0".into(),
            "SELECT idem_complete($1, to_jsonb($1::text))".into(),
        )
    };
    let parameters: &[&(dyn postgres::types::ToSql + Sync)] = if in_sql { &[] } else { &[&key] };
    let status: String = work.query_one(&claim, parameters).unwrap().get(0);
    let acquired = status == "acquired";
    if acquired {
        work.execute("INSERT INTO orders VALUES ($1)", &[&key]).unwrap();
        work.execute(&finish, parameters).unwrap();
    }
    if in_sql {
        run(&mut work, "DEALLOCATE claim; DEALLOCATE finish");
    }
    work.commit().unwrap();
    acquired
}

#[track_caller]
fn each_ordered_once(server: &Server, keys: u64) {
    let mut admin = server.connect("shop", "postgres");
    assert_eq!(number(&mut admin, "SELECT count(*) FROM orders"), keys as i64);
    let completed = number(
        &mut admin,
        "SELECT count(DISTINCT o.key) FROM orders AS o, idem_get(o.key) AS r WHERE r.state = 'completed'",
    );
    assert_eq!(completed, keys as i64);
    assert_eq!(our_locks(&mut admin), 0);
}

#[test]
fn ten_clients_on_three_connections_run_each_key_once() {
    let server = shop();
    let bouncer = Bouncer::start(&server);
    let keys = rounds(60, 3000);
    let moved: u64 = scope(|threads| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                threads.spawn(|| {
                    let mut client = bouncer.connect();
                    let mut moved = 0;
                    for n in 0..keys {
                        let key = format!("key {n}");
                        match n % 3 {
                            0 => moved += u64::from(order_leased(&mut client, &key) == Some(true)),
                            kind => drop(order_prepared(&mut client, &key, kind == 1)),
                        }
                    }
                    moved
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    each_ordered_once(&server, keys);
    let mut admin = server.connect("shop", "postgres");
    let connections = number(
        &mut admin,
        "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app' AND datname = 'shop'",
    );
    assert!((1..=i64::from(POOL)).contains(&connections), "{connections}: not pooled");
    assert!(
        moved > 0,
        "claim and completion always met on one connection: the test proves nothing"
    );
}

#[test]
fn a_claim_is_nobody_elses_on_a_shared_connection() {
    let server = shop();
    let bouncer = Bouncer::start(&server);
    let (mut one, mut two) = (bouncer.connect(), bouncer.connect());
    let (_, token, _) = begin_unnamed(&mut one, "k").unwrap();
    // Whatever connection these land on, also the one the claim was made on.
    for _ in 0..2 * POOL {
        assert_eq!(begin_unnamed(&mut two, "k").unwrap().0, "in_progress");
        let error = two.batch_execute("SELECT idem_complete('k')").unwrap_err();
        assert_eq!(sqlstate(&error), "ID003", "{error:?}");
    }
    two.query_typed("SELECT idem_complete('k', token => $1)", &[(&token, Type::UUID)]).unwrap();
    assert_eq!(begin_unnamed(&mut one, "k").unwrap().0, "completed");

    // What SET LOCAL sets ends with the transaction; the next client on the connection has its own scope.
    for n in 0..2 * POOL {
        run(&mut one, &format!("BEGIN; SET LOCAL idem.scope = 'tenant {n}'"));
        acquire(&mut one, "scoped", "");
        complete(&mut one, "scoped", &json!(n), None);
        run(&mut one, "COMMIT");
        let rows = two.query_typed("SELECT count(*) FROM idem_get('scoped')", &[]).unwrap();
        assert_eq!(rows[0].get::<_, i64>(0), 0);
    }
}

#[test]
fn whoever_dies_between_begin_and_complete_leaves_the_key_free() {
    let server = shop();
    let mut bouncer = Bouncer::start(&server);
    let mut admin = server.connect("shop", "postgres");
    for death in ["client", "server process", "kill -9 of it", "PgBouncer"] {
        let mut client = bouncer.connect();
        run(&mut client, "BEGIN");
        let process = pid(&mut client);
        acquire(&mut client, death, "");
        client.execute("INSERT INTO orders VALUES ($1)", &[&death]).unwrap();
        match death {
            "client" => drop(client),
            "server process" => terminate(&mut admin, process),
            "PgBouncer" => bouncer.kill9(),
            _ => {
                kill9(process);
                eventually("the server takes note", || admin.batch_execute("SELECT 1").is_err());
                admin = connect_again(server.dir(), "shop", "postgres");
            }
        }
        eventually("the process is gone", || !lives(&mut admin, process));
        assert_eq!(our_locks(&mut admin), 0, "{death}");
        if death == "PgBouncer" {
            drop(bouncer);
            bouncer = Bouncer::start(&server);
        }
        // A pooler may first hand out connections that are dead.
        let mut retried = false;
        eventually("the retry runs", || {
            let Ok(mut client) = bouncer.try_connect() else {
                return false;
            };
            let works = client.batch_execute("BEGIN; SELECT 1; COMMIT").is_ok();
            if works && !retried {
                retried = order_prepared(&mut client, death, false);
                assert!(retried, "{death}: the key is not free");
            }
            works
        });
    }
    each_ordered_once(&server, 4);
}

#[test]
fn a_client_librarys_pool() {
    let server = shop();
    let mut config = postgres::Config::new();
    config.host(server.dir()).port(std::env::var("PGPORT").unwrap().parse().unwrap());
    config.dbname("shop").user("app");
    let pool = r2d2::Pool::builder()
        .max_size(POOL)
        .build(r2d2_postgres::PostgresConnectionManager::new(config, NoTls))
        .unwrap();
    let keys = rounds(60, 3000);
    let processes: HashSet<i32> = scope(|threads| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (pool, server) = (&pool, &server);
                threads.spawn(move || {
                    let mut processes = HashSet::new();
                    let mut admin = server.connect("shop", "postgres");
                    for n in 0..keys {
                        let key = format!("key {n}");
                        let begun = begin(&mut *pool.get().unwrap(), &key, ", lease => '600s'");
                        if begun.status != "acquired" {
                            continue;
                        }
                        if client == 0 {
                            // A connection dies in the pool, between begin and complete: the claim does not, and the pool
                            // hands out another.
                            let mut connection = pool.get().unwrap();
                            let pid = pid(&mut connection);
                            terminate(&mut admin, pid);
                        }
                        let mut cut = client == 0 && n % 2 == 0;
                        eventually("the order is completed", || {
                            let mut connection = pool.get().unwrap();
                            let mut work = connection.transaction().unwrap();
                            work.execute("INSERT INTO orders VALUES ($1)", &[&key]).unwrap();
                            complete(&mut work, &key, &json!(n), begun.token);
                            if std::mem::take(&mut cut) {
                                // The other one dies with all its work undone; it is sent again.
                                let pid =
                                    number(&mut work, "SELECT pg_backend_pid()::bigint") as i32;
                                terminate(&mut admin, pid);
                            }
                            work.commit().is_ok()
                        });
                        processes.insert(pid(&mut pool.get().unwrap()));
                    }
                    processes
                })
            })
            .collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    each_ordered_once(&server, keys);
    assert!(processes.len() > 1, "one connection served all: the test proves nothing");
}
