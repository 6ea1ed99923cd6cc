//! Keys in other encodings than UTF-8 (design section 7a): the digest is of the characters in UTF-8 whatever the
//! encoding of the database, in SQL_ASCII of the bytes as they are.

mod common;

use common::*;
use idem_harness::TestDb;
use postgres::Client;
use serde_json::json;

/// A database with this encoding, with idem.
fn database(encoding: &str) -> TestDb {
    let base = TestDb::bare();
    let name = format!("{}_{}", base.name, encoding.to_lowercase());
    run(
        &mut base.admin(),
        &format!(
            "CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        ),
    );
    let db = TestDb { name };
    run(
        &mut db.admin(),
        "DO $$ BEGIN CREATE ROLE app LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
         CREATE EXTENSION idem; SELECT idem_grant('app')",
    );
    db
}

/// Every character that LATIN1 has beyond ASCII, and some ASCII.
fn latin() -> String {
    "key é ß ÿ".chars().chain('\u{a1}'..='\u{ff}').collect()
}

/// Runs the key through claim, duplicate, completion and replay, on a lease and without; the digest stored for it.
fn digest(db: &TestDb, scope: &str, key: &str) -> String {
    let mut other = db.app();
    let mut client = db.app();
    let set_scope = |client: &mut Client| {
        client.execute("SELECT set_config('idem.scope', $1, false)", &[&scope]).unwrap();
    };
    set_scope(&mut client);
    set_scope(&mut other);
    let mut digests = Vec::new();
    for lease in ["", ", lease => '60s'"] {
        run(&mut client, "BEGIN");
        let token = acquire(&mut client, key, lease);
        assert_eq!(status(&mut other, key, ""), "in_progress");
        if !lease.is_empty() {
            run(&mut client, "COMMIT; BEGIN");
            assert_eq!(status(&mut other, key, ""), "in_progress");
        }
        complete(&mut client, key, &json!(key), Some(token));
        run(&mut client, "COMMIT");
        let replay = begin(&mut other, key, "");
        assert_eq!(replay.status, "completed");
        assert_eq!(replay.result, Some(json!(key)));
        let row = other.query_one("SELECT key, scope FROM idem_get($1)", &[&key]).unwrap();
        assert_eq!(row.get::<_, &str>("key"), key);
        assert_eq!(row.get::<_, &str>("scope"), scope);
        let mut admin = db.admin();
        let stored = admin
            .query_one(
                "SELECT digest::text FROM idem_segment_0 WHERE key = $1 AND scope = $2",
                &[&key, &scope],
            )
            .unwrap();
        digests.push(stored.get::<_, String>(0));
        admin.execute("SELECT idem_forget($1, $2)", &[&key, &scope]).unwrap();
    }
    assert_eq!(digests[0], digests[1]);
    digests.remove(0)
}

#[test]
fn the_same_characters_have_the_same_digest_in_utf8_and_latin1() {
    let (utf8, latin1) = (database("UTF8"), database("LATIN1"));
    for (scope, key) in
        [("", "plain"), ("", "é"), ("münchen", "plain"), ("münchen", &latin()), (&latin(), "é")]
    {
        assert_eq!(digest(&latin1, scope, key), digest(&utf8, scope, key), "{scope} {key}");
    }
    // The bytes really differ.
    let octets = "SELECT octet_length(convert_to('é', getdatabaseencoding()))::bigint";
    assert_eq!(number(&mut latin1.admin(), octets), 1);
    assert_eq!(number(&mut utf8.admin(), octets), 2);
}

#[test]
fn in_sql_ascii_the_bytes_count_as_they_are() {
    let (utf8, ascii) = (database("UTF8"), database("SQL_ASCII"));
    for (scope, key) in [("", "plain"), ("münchen", "€ 𝄞 é"), ("", &latin())] {
        assert_eq!(digest(&ascii, scope, key), digest(&utf8, scope, key), "{scope} {key}");
    }
    // Bytes that are no text in any encoding are a key like any other.
    let mut admin = ascii.admin();
    run(
        &mut admin,
        r"BEGIN; SELECT idem_begin(E'\xff\xfe'); SELECT idem_complete(E'\xff\xfe', '1'); COMMIT",
    );
    let told = |admin: &mut Client, key: &str| -> String {
        admin
            .query_one(&format!("SELECT status FROM idem_begin({key}, lease => '60s')"), &[])
            .unwrap()
            .get(0)
    };
    assert_eq!(told(&mut admin, r"E'\xff\xfe'"), "completed");
    assert_eq!(told(&mut admin, r"E'\xff'"), "acquired");
    assert_eq!(told(&mut admin, r"E'\xff\xff'"), "acquired");
}

#[test]
fn keys_with_different_characters_are_different_keys() {
    for encoding in ["LATIN1", "UTF8", "SQL_ASCII", "WIN1252", "EUC_JP"] {
        let db = database(encoding);
        let mut app = db.app();
        // Composed and decomposed, with a look-alike from elsewhere where the encoding has it.
        let keys: &[&str] = match encoding {
            "LATIN1" => &["é", "e", "É", "è", "e´"],
            "WIN1252" => &["é", "€", "e", "Ÿ", "ž"],
            "EUC_JP" => &["鍵", "カ", "ｶ", "き", "ky"],
            _ => &["é", "e\u{301}", "e", "鍵", "е"],
        };
        for key in keys {
            assert_eq!(status(&mut app, key, ", lease => '60s'"), "acquired", "{encoding} {key}");
        }
        for key in keys {
            assert_eq!(
                status(&mut app, key, ", lease => '60s'"),
                "in_progress",
                "{encoding} {key}"
            );
        }
    }
}
