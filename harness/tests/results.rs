//! A result is stored as given (design section 3): `body` byte for byte, in the text and the binary format of the
//! protocol, `result` as an equal jsonb; large ones too, once the limit is raised. Field case: a replay was not
//! byte-identical, or a large response was not stored and the protection silently lost.

mod common;

use common::*;
use idem_harness::{TestDb, sqlstate};
use postgres::{Client, SimpleQueryMessage};
use serde_json::{Value, json};

fn with_limit(limit: &str) -> TestDb {
    let db = TestDb::new();
    run(
        &mut db.admin(),
        &format!("ALTER DATABASE {} SET idem.max_result_size = '{limit}'", db.name),
    );
    db
}

fn store_body(client: &mut Client, key: &str, body: &[u8], leased: bool) {
    run(client, "BEGIN");
    let token = acquire(client, key, if leased { ", lease => '60s'" } else { "" });
    if leased {
        run(client, "COMMIT; BEGIN");
    }
    client
        .execute("SELECT idem_complete($1, body => $2, token => $3)", &[&key, &body, &token])
        .unwrap();
    run(client, "COMMIT");
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::from("\\x"), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// The body comes back from begin and get, binary and as text.
#[track_caller]
fn body_comes_back(client: &mut Client, key: &str, body: &[u8]) {
    for call in ["idem_begin", "idem_get"] {
        let row =
            client.query_one(&format!("SELECT body, result FROM {call}($1)"), &[&key]).unwrap();
        let found: Vec<u8> = row.get("body");
        assert!(found == body, "{call}: {} bytes, not these", body.len());
        assert_eq!(row.get::<_, Option<Value>>("result"), None);
        let text = client.simple_query(&format!("SELECT body FROM {call}('{key}')")).unwrap();
        let text = text.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        assert!(text == Some(&hex(body)), "{call}: {} bytes as text", body.len());
    }
}

#[test]
fn a_body_comes_back_byte_for_byte_whatever_its_size() {
    let db = with_limit("16MB");
    let mut app = db.app();
    let mut random = Random::new();
    let mut n = 0;
    for size in [0, 1, 2, 126, 127, 1_990, 2_040, 8_190, 100_000, 1_048_577, 5 << 20] {
        // Random bytes do not compress, zeros do, and small changes of size matter at the borders of TOAST.
        for body in [random.bytes(size), vec![0; size]] {
            let key = format!("{n}");
            store_body(&mut app, &key, &body, n % 3 == 0);
            body_comes_back(&mut app, &key, &body);
            n += 1;
        }
    }
}

#[test]
fn every_byte_is_kept() {
    let db = TestDb::new();
    let mut app = db.app();
    let all: Vec<u8> = (0..=255).collect();
    store_body(&mut app, "k", &all, false);
    body_comes_back(&mut app, "k", &all);
}

#[test]
fn a_large_jsonb_comes_back_equal() {
    let db = with_limit("16MB");
    let mut app = db.app();
    let mut random = Random::new();
    let items: Vec<Value> = (0..30_000)
        .map(|n| json!({"n": n, "name": format!("{:x}", random.next()), "tags": [n % 7, null, true, "ä€𝄞"]}))
        .collect();
    let large = json!({ "items": items });
    run(&mut app, "BEGIN");
    acquire(&mut app, "k", "");
    complete(&mut app, "k", &large, None);
    run(&mut app, "COMMIT");
    assert!(begin(&mut app, "k", "").result == Some(large.clone()));
    let equal: bool = app
        .query_one(
            "SELECT b.result = $1 AND g.result = $1 AND b.result::text = $1::jsonb::text AND b.body IS NULL
             FROM idem_begin('k') AS b, idem_get('k') AS g",
            &[&large],
        )
        .unwrap()
        .get(0);
    assert!(equal);
}

#[test]
fn numbers_and_texts_of_a_jsonb_keep_every_digit() {
    let db = TestDb::new();
    let mut app = db.app();
    for (n, text) in [
        "123456789012345678901234567890.123456789012345678901234567890",
        "1.10",
        "-0.0000000000000000000000000000001",
        "null",
        "[]",
        r#""\u0001\\ \" ä""#,
        r#"{"": {"a": [[[[]]]]}}"#,
    ]
    .iter()
    .enumerate()
    {
        let key = format!("{n}");
        run(&mut app, "BEGIN");
        acquire(&mut app, &key, "");
        app.execute("SELECT idem_complete($1, $2::text::jsonb)", &[&key, text]).unwrap();
        run(&mut app, "COMMIT");
        let row = app
            .query_one(
                "SELECT result::text, $2::text::jsonb::text FROM idem_begin($1)",
                &[&key, text],
            )
            .unwrap();
        // A result that is the JSON null is not an absent one.
        assert_eq!(row.get::<_, Option<String>>(0), Some(row.get(1)));
    }
}

#[test]
fn a_body_taken_from_a_table_outlives_the_table() {
    // Such a value arrives as a pointer into the table's TOAST, which must not be stored as it is.
    let db = with_limit("16MB");
    let (mut admin, mut app) = (db.admin(), db.app());
    let body = Random::new().bytes(500_000);
    let document = json!({ "text": hex(&body) });
    run(
        &mut admin,
        "CREATE TABLE documents (body bytea, document jsonb); GRANT ALL ON documents TO app",
    );
    app.execute("INSERT INTO documents VALUES ($1, $2)", &[&body, &document]).unwrap();
    run(&mut app, "BEGIN");
    acquire(&mut app, "k", "");
    run(&mut app, "SELECT idem_complete('k', document, body) FROM documents; COMMIT");
    run(&mut admin, "DROP TABLE documents");
    for call in ["idem_begin", "idem_get"] {
        let row = app.query_one(&format!("SELECT body, result FROM {call}('k')"), &[]).unwrap();
        assert!(row.get::<_, Vec<u8>>("body") == body);
        assert!(row.get::<_, Value>("result") == document);
    }
}

#[test]
fn a_result_over_the_limit_is_refused_before_anything_is_written() {
    let db = with_limit("1000B");
    let mut app = db.app();
    run(&mut app, "BEGIN");
    acquire(&mut app, "k", "");
    run(&mut app, "SAVEPOINT s");
    // "…" with its quotation marks and the body count together.
    let text = json!("x".repeat(500));
    let store = |app: &mut Client, bytes: usize| {
        app.execute("SELECT idem_complete('k', $1, $2)", &[&text, &vec![7u8; bytes]])
    };
    let error = store(&mut app, 499).unwrap_err();
    assert_eq!(sqlstate(&error), "ID006", "{error:?}");
    run(&mut app, "ROLLBACK TO s");
    assert_eq!(status(&mut db.app(), "k", ""), "in_progress", "still held");
    store(&mut app, 498).unwrap();
    run(&mut app, "COMMIT");
    let replay = app.query_one("SELECT result, body FROM idem_begin('k')", &[]).unwrap();
    assert_eq!(replay.get::<_, Value>(0), text);
    assert_eq!(replay.get::<_, Vec<u8>>(1), vec![7u8; 498]);
}
