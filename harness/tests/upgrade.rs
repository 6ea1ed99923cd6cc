//! ALTER EXTENSION idem UPDATE, from every released version: the result is a fresh installation to the last comment, records and
//! tokens live on, and nobody who uses it meanwhile sees more than a clear error. Library and SQL objects of
//! different versions never crash a session.

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::scope;

use common::*;
use idem_harness::{TestDb, eventually, sqlstate};
use postgres::Client;
use serde_json::json;

/// Everything the catalogue knows about the extension's objects, one fact a line, without OIDs.
const CATALOGUE: &str = "
WITH extension AS (SELECT * FROM pg_extension WHERE extname = 'idem'),
member AS (
    SELECT classid, objid FROM pg_depend
    WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e' AND refobjid = (SELECT oid FROM extension)),
relation AS (
    SELECT c.* FROM member JOIN pg_class AS c ON classid = 'pg_class'::regclass AND c.oid = objid),
toast AS (SELECT r.relname AS of, c.* FROM relation AS r JOIN pg_class AS c ON c.oid = r.reltoastrelid)
SELECT concat_ws(' | ', 'member', pg_describe_object(classid, objid, 0), obj_description(objid, classid::regclass::name)) FROM member
UNION ALL SELECT concat_ws(' | ', 'extension', extversion, extrelocatable, extowner::regrole) FROM extension
UNION ALL SELECT concat_ws(' | ', 'dumped', config::regclass, condition) FROM extension, unnest(extconfig, extcondition) AS dumped (config, condition)
UNION ALL SELECT concat_ws(' | ', 'function', pg_get_functiondef(p.oid), proowner::regrole, prorows, procost, proisstrict, probin, prosrc)
    FROM member JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND p.oid = objid
UNION ALL SELECT concat_ws(' | ', 'function acl', p.oid::regprocedure, a.grantor::regrole, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END, a.privilege_type, a.is_grantable)
    FROM member JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND p.oid = objid, aclexplode(coalesce(proacl, acldefault('f', proowner))) AS a
UNION ALL SELECT concat_ws(' | ', 'relation', relname, relkind, relpersistence, relowner::regrole, reloptions::text, relreplident, relrowsecurity, relforcerowsecurity, relhastriggers, relispartition,
        (SELECT amname FROM pg_am WHERE pg_am.oid = relam), (SELECT reloptions::text FROM toast WHERE toast.of = relation.relname), relnatts)
    FROM relation
UNION ALL SELECT concat_ws(' | ', 'relation acl', relname, a.grantor::regrole, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END, a.privilege_type, a.is_grantable)
    FROM relation, aclexplode(coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::\"char\", relowner))) AS a
UNION ALL SELECT concat_ws(' | ', 'view', relname, pg_get_viewdef(oid)) FROM relation WHERE relkind = 'v'
UNION ALL SELECT concat_ws(' | ', 'column', relname, attnum, attname, format_type(atttypid, atttypmod), attnotnull, attstorage, attcompression, attcollation::regcollation, attoptions::text, attacl::text, attidentity, attgenerated,
        attisdropped, pg_get_expr(adbin, adrelid), col_description(attrelid, attnum))
    FROM relation JOIN pg_attribute ON attrelid = relation.oid AND attnum > 0 LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
UNION ALL SELECT concat_ws(' | ', 'constraint', relname, conname, pg_get_constraintdef(c.oid), convalidated, obj_description(c.oid, 'pg_constraint'))
    FROM relation JOIN pg_constraint AS c ON conrelid = relation.oid
UNION ALL SELECT concat_ws(' | ', 'index', pg_get_indexdef(indexrelid), indisvalid, indisreplident, indisclustered, (SELECT reloptions::text FROM pg_class WHERE pg_class.oid = indexrelid), obj_description(indexrelid, 'pg_class'))
    FROM relation JOIN pg_index ON indrelid = relation.oid
UNION ALL SELECT concat_ws(' | ', 'trigger', pg_get_triggerdef(t.oid)) FROM relation JOIN pg_trigger AS t ON tgrelid = relation.oid
UNION ALL SELECT concat_ws(' | ', 'sequence', relname, seqtypid::regtype, seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle) FROM relation JOIN pg_sequence ON seqrelid = relation.oid
UNION ALL SELECT concat_ws(' | ', 'first acl', pg_describe_object(i.classoid, i.objoid, i.objsubid), i.privtype, (SELECT string_agg(acl::text, ',' ORDER BY acl::text) FROM unnest(initprivs) AS acl))
    FROM member JOIN pg_init_privs AS i ON i.classoid = classid AND i.objoid = objid
ORDER BY 1";

fn catalogue(admin: &mut Client) -> BTreeSet<String> {
    // Names are shown without a schema in both.
    run(admin, "SET search_path = public");
    let facts: BTreeSet<String> =
        admin.query(CATALOGUE, &[]).unwrap().iter().map(|row| row.get(0)).collect();
    assert!(facts.len() > 100, "{facts:?}");
    facts
}

fn difference(one: &BTreeSet<String>, other: &BTreeSet<String>) -> String {
    let only = |sign: &str, one: &BTreeSet<String>, other: &BTreeSet<String>| {
        one.difference(other).map(|fact| format!("{sign} {fact}\n")).collect::<String>()
    };
    only("-", one, other) + &only("+", other, one)
}

/// The versions there are install scripts of, but for the one that is being worked on.
fn released() -> Vec<String> {
    let manifest = include_str!("../../Cargo.toml");
    let line = manifest.lines().find(|line| line.starts_with("version = ")).unwrap();
    let current = line.split('"').nth(1).unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../sql");
    let mut versions = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let version = name.strip_prefix("idem--").and_then(|rest| rest.strip_suffix(".sql"));
        if let Some(version) = version
            && !version.contains("--")
            && version != current
        {
            versions.push(version.to_string());
        }
    }
    assert!(!versions.is_empty(), "no script of a released version is in sql/");
    versions
}

fn install(db: &TestDb, version: Option<&str>) {
    let version = version.map_or(String::new(), |version| format!(" VERSION '{version}'"));
    run(
        &mut db.admin(),
        &format!(
            "DO $$ BEGIN CREATE ROLE app LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
             CREATE EXTENSION idem{version}; SELECT idem_grant('app')"
        ),
    );
}

#[test]
fn an_updated_extension_is_like_a_fresh_one() {
    let fresh = TestDb::bare();
    install(&fresh, None);
    let expected = catalogue(&mut fresh.admin());
    for version in released() {
        let db = TestDb::bare();
        install(&db, Some(&version));
        let mut admin = db.admin();
        run(&mut admin, "ALTER EXTENSION idem UPDATE");
        let found = difference(&expected, &catalogue(&mut admin));
        assert!(
            found.is_empty(),
            "{version}, updated, differs from a fresh installation:\n{found}"
        );
    }
}

/// The comparison above would see it if an upgrade script forgot anything: each of these changes shows.
#[test]
fn the_comparison_sees_every_difference() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let expected = catalogue(&mut admin);
    for change in [
        "COMMENT ON FUNCTION idem_forget(text, text) IS 'other'",
        "COMMENT ON TABLE idem_claims IS NULL",
        "COMMENT ON COLUMN idem_claims.token IS 'other'",
        "GRANT EXECUTE ON FUNCTION idem_forget(text, text) TO PUBLIC",
        "REVOKE EXECUTE ON FUNCTION idem_release(text, uuid, text) FROM app",
        "GRANT SELECT ON idem_locks TO app",
        "GRANT SELECT (name) ON idem_locks TO app",
        "ALTER FUNCTION idem_get(text, text, text) ROWS 2",
        "ALTER FUNCTION idem_run(text, regprocedure, jsonb, text, text, interval, interval, boolean) COST 1",
        "ALTER FUNCTION idem_change_privileges(regrole, boolean, text[]) RESET search_path",
        "ALTER FUNCTION idem_compose_key(text[]) PARALLEL UNSAFE",
        "ALTER TABLE idem_locks RESET (fillfactor)",
        "ALTER TABLE idem_claims SET (toast.autovacuum_enabled = false)",
        "ALTER TABLE idem_claims ALTER owner SET NOT NULL",
        "ALTER TABLE idem_claims ALTER lease SET DEFAULT '1s'",
        "ALTER TABLE idem_claims ALTER checkpoint SET STORAGE external",
        "ALTER TABLE idem_claims ADD COLUMN more text",
        "ALTER TABLE idem_claims ADD CHECK (attempt > 0)",
        "ALTER TABLE idem_claims REPLICA IDENTITY FULL",
        "CREATE INDEX ON idem_claims (expires_at)",
        "ALTER EXTENSION idem DROP FUNCTION idem_forget(text, text)",
        "CREATE VIEW more AS SELECT 1 AS one; ALTER EXTENSION idem ADD VIEW more",
        "UPDATE pg_extension SET extcondition[1] = 'WHERE false' WHERE extname = 'idem'",
        "UPDATE pg_extension SET extrelocatable = false WHERE extname = 'idem'",
    ] {
        run(&mut admin, &format!("BEGIN; {change}"));
        let changed = catalogue(&mut admin);
        run(&mut admin, "ROLLBACK");
        assert!(!difference(&expected, &changed).is_empty(), "not seen: {change}");
    }
    assert_eq!(difference(&expected, &catalogue(&mut admin)), "");
}

/// Applications pay, each key once, while the extension is updated under them. Their library is the new one throughout, and the
/// SQL objects at first the old ones.
#[test]
fn it_is_updated_while_it_is_used() {
    for version in released() {
        let db = TestDb::bare();
        install(&db, Some(&version));
        let (mut admin, mut app) = (db.admin(), db.app());
        run(&mut admin, "CREATE TABLE paid (key text); GRANT ALL ON paid TO app");

        // What is known from before.
        run(
            &mut app,
            "BEGIN; SELECT idem_begin('done'); SELECT idem_complete('done', '1'); COMMIT",
        );
        let claim = acquire(&mut app, "claimed", ", lease => '1h'");
        let row = app.query_one("SELECT token, fence FROM lock_try('held', ttl => '1h')", &[]);
        let row = row.unwrap();
        let (lock, fence): (uuid::Uuid, i64) = (row.get(0), row.get(1));
        // A transaction that is open while the update runs, or keeps it waiting.
        let mut open = db.app();
        run(&mut open, "BEGIN; SELECT idem_begin('open')");
        let open_pid = pid(&mut open);

        let stop = AtomicBool::new(false);
        let (acknowledged, refused) = (AtomicU32::new(0), AtomicU32::new(0));
        scope(|threads| {
            for worker in 0..3 {
                let (mut app, version) = (db.app(), &version);
                let (stop, acknowledged, refused) = (&stop, &acknowledged, &refused);
                threads.spawn(move || {
                    for n in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let key = format!("worker {worker} key {n}");
                        // Twice, as a client that did not hear the answer.
                        for _ in 0..2 {
                            let done = (|| {
                                let mut work = app.transaction()?;
                                if try_begin(&mut work, &key, "")?.status == "acquired" {
                                    work.execute("INSERT INTO paid VALUES ($1)", &[&key])?;
                                    try_complete(&mut work, &key, &json!(n), None)?;
                                }
                                work.commit()
                            })();
                            match done {
                                Ok(()) => acknowledged.fetch_add(1, Ordering::Relaxed),
                                Err(error) if sqlstate(&error) == "55000" => {
                                    refused.fetch_add(1, Ordering::Relaxed)
                                }
                                Err(error) => panic!("{version}: {error:?}"),
                            };
                        }
                    }
                });
            }
            let more = |than: u32| {
                eventually("the workers go on", || acknowledged.load(Ordering::Relaxed) > than);
            };
            more(20);
            let mut updater = db.admin();
            let update = threads.spawn(move || run(&mut updater, "ALTER EXTENSION idem UPDATE"));
            // The update needs the tables for itself only if it changes them; then it waits for whoever has written to one.
            eventually("the update is done or waits", || {
                update.is_finished()
                    || number(
                        &mut admin,
                        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'ALTER EXTENSION%'",
                    ) > 0
            });
            assert!(lives(&mut admin, open_pid));
            run(&mut open, "SELECT idem_complete('open', '2'); COMMIT");
            update.join().expect("the update succeeds");
            more(acknowledged.load(Ordering::Relaxed) + 20);
            stop.store(true, Ordering::Relaxed);
        });

        // One payment a key, and every one that was acknowledged.
        let twice = "SELECT count(*) - count(DISTINCT key) FROM paid";
        assert_eq!(number(&mut admin, twice), 0, "{version}: paid twice");
        assert!(number(&mut admin, "SELECT count(*) FROM paid") > 20);
        let lost = "SELECT count(*) FROM paid WHERE NOT EXISTS (SELECT FROM idem_get(paid.key))";
        assert_eq!(number(&mut admin, lost), 0, "{version}: paid without a record");
        // In the session of before the update and in a new one.
        for app in [&mut app, &mut db.app()] {
            assert_eq!(status(app, "done", ""), "completed");
            assert_eq!(status(app, "open", ""), "completed");
            let held: i64 =
                app.query_one("SELECT lock_guard('held', $1)", &[&lock]).unwrap().get(0);
            assert_eq!(held, fence);
            complete(app, "claimed", &json!(1), Some(claim));
        }
    }
}

/// The SQL of another version may declare a function with other arguments or columns than the library has: a clear error, whichever it is.
#[test]
fn functions_of_another_version_are_refused() {
    let db = TestDb::new();
    let mut admin = db.admin();
    let functions = admin
        .query(
            "SELECT prosrc, ARRAY(SELECT t::regtype::text FROM unnest(proargtypes) AS t), prorettype = 'record'::regtype
             FROM pg_depend JOIN pg_proc ON pg_proc.oid = objid JOIN pg_language ON pg_language.oid = prolang
             WHERE classid = 'pg_proc'::regclass AND refclassid = 'pg_extension'::regclass AND deptype = 'e' AND lanname = 'c'
                 AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')",
            &[],
        )
        .unwrap();
    assert!(functions.len() > 15);
    run(&mut admin, "CREATE TYPE pair AS (one text, two text); SELECT idem_once('key')");
    for function in functions {
        let symbol: &str = function.get(0);
        let (types, record): (Vec<String>, bool) = (function.get(1), function.get(2));
        let mut refuses = |types: &[String], returns: &str| {
            let values: Vec<String> = types
                .iter()
                .enumerate()
                .map(|(n, type_)| match (n, type_.as_str()) {
                    (0, "text") => "'key'".to_string(),
                    (_, "boolean") => "true".to_string(),
                    _ => format!("NULL::{type_}"),
                })
                .collect();
            run(
                &mut admin,
                &format!(
                    "CREATE FUNCTION other({}) RETURNS {returns} LANGUAGE c AS '$libdir/idem', '{symbol}'",
                    types.join(", ")
                ),
            );
            let call = format!("SELECT * FROM other({})", values.join(", "));
            let called = admin.batch_execute(&call);
            run(&mut admin, "DROP FUNCTION other");
            let error = called.expect_err(&format!("{symbol}: {call}"));
            // 42804 is PostgreSQL's own, if only the columns of the result are others.
            let clear = ["55000", if record { "42804" } else { "" }];
            assert!(clear.contains(&sqlstate(&error)), "{symbol}: {call}: {error:?}");
        };
        let returns = if record { "pair" } else { "text" };
        if record {
            refuses(&types, returns); // the arguments are right, the columns are not
        }
        if !types.is_empty() {
            refuses(&types[1..], returns);
        }
        let more: Vec<String> = types.iter().cloned().chain(["text".to_string()]).collect();
        refuses(&more, returns);
    }
}
