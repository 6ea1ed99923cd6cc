//! The first thing that must work, from real connections as an ordinary role: begin, complete, replay.

use idem_harness::{Server, TestDb, sqlstate};
use serde_json::{Value, json};

#[test]
fn a_retry_gets_the_stored_result() {
    let db = TestDb::new();
    db.admin()
        .batch_execute("CREATE TABLE orders (id text); GRANT INSERT, SELECT ON orders TO app")
        .unwrap();

    let mut first = db.app();
    let mut work = first.transaction().unwrap();
    let begun =
        work.query_one("SELECT status, token, attempt FROM idem_begin('order-1')", &[]).unwrap();
    assert_eq!(begun.get::<_, &str>("status"), "acquired");
    assert!(begun.get::<_, Option<uuid::Uuid>>("token").is_some());
    assert_eq!(begun.get::<_, Option<i32>>("attempt"), Some(1));
    work.execute("INSERT INTO orders VALUES ('ord_1')", &[]).unwrap();

    let mut second = db.app();
    let busy = second.query_one("SELECT status, token FROM idem_begin('order-1')", &[]).unwrap();
    assert_eq!(busy.get::<_, &str>("status"), "in_progress");

    work.execute("SELECT idem_complete('order-1', $1)", &[&json!({"id": "ord_1"})]).unwrap();
    work.commit().unwrap();

    let replay =
        second.query_one("SELECT status, token, result FROM idem_begin('order-1')", &[]).unwrap();
    assert_eq!(replay.get::<_, &str>("status"), "completed");
    assert_eq!(replay.get::<_, Option<uuid::Uuid>>("token"), None);
    assert_eq!(replay.get::<_, Option<Value>>("result"), Some(json!({"id": "ord_1"})));
    let orders: i64 = second.query_one("SELECT count(*) FROM orders", &[]).unwrap().get(0);
    assert_eq!(orders, 1);
}

#[test]
fn a_forgotten_complete_cannot_be_committed() {
    let db = TestDb::new();
    let mut app = db.app();
    let mut work = app.transaction().unwrap();
    work.query_one("SELECT status FROM idem_begin('order-1')", &[]).unwrap();
    let error = work.commit().unwrap_err();
    assert_eq!(sqlstate(&error), "ID007", "{error}");
}

#[test]
fn a_completed_key_survives_a_killed_server() {
    let server = Server::start(&["fsync=on"]);
    server.create_database("shop");
    let mut app = server.connect("shop", "app");
    let mut work = app.transaction().unwrap();
    work.query_one("SELECT status FROM idem_begin('order-1')", &[]).unwrap();
    work.execute("SELECT idem_complete('order-1', '{\"id\": \"ord_1\"}')", &[]).unwrap();
    work.commit().unwrap();

    server.kill9();
    assert!(app.query_one("SELECT 1", &[]).is_err());
    server.start_again();

    let mut app = server.connect("shop", "app");
    let replay = app.query_one("SELECT status FROM idem_begin('order-1')", &[]).unwrap();
    assert_eq!(replay.get::<_, &str>("status"), "completed");
}
