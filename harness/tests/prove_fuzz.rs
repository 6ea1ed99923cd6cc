//! Hostile arguments through real connections: every SQL function of the extension, with NULLs, extremes and rubbish in every
//! argument, in every kind of transaction and statement, by several clients at once. The server never dies, nobody ever
//! gets an internal error, and afterwards everything works and nothing is locked.

mod common;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread::scope;

use common::*;
use idem_harness::{Server, major, rounds, sqlstate};
use postgres::Client;
use serde_json::json;
use uuid::Uuid;

/// A function: its name and its parameters as (name, type), the last of them perhaps VARIADIC.
struct Function {
    name: String,
    parameters: Vec<(String, String)>,
    variadic: bool,
    composite: bool,
}

fn functions(admin: &mut Client) -> Vec<Function> {
    let rows = admin
        .query(
            "SELECT p.proname, p.pronargs, p.provariadic <> 0, coalesce(p.proargnames, '{}'),
                    ARRAY(SELECT format_type(t, NULL) FROM unnest(p.proargtypes) WITH ORDINALITY AS a (t, n) ORDER BY n),
                    p.prorettype = 'record'::regtype
             FROM pg_proc AS p
             JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
             JOIN pg_extension AS e ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
             WHERE e.extname = 'idem' AND p.prokind = 'f' AND p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)
             ORDER BY 1",
            &[],
        )
        .unwrap();
    rows.iter()
        .map(|row| {
            let count = row.get::<_, i16>(1) as usize;
            let names: Vec<String> = row.get(3);
            let types: Vec<String> = row.get(4);
            Function {
                name: row.get(0),
                parameters: names.into_iter().take(count).zip(types).collect(),
                variadic: row.get(2),
                composite: row.get(5),
            }
        })
        .collect()
}

fn quoted(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

fn any_text(random: &mut Random) -> String {
    let length = *random.pick(&[1, 3, 10, 40, 300]);
    let kind = random.below(4);
    (0..1 + random.below(length))
        .map(|_| {
            loop {
                let code = match kind {
                    0 => 1 + random.below(0x7f) as u32,
                    1 => 1 + random.below(0xff) as u32,
                    2 => 1 + random.below(0xffff) as u32,
                    _ => 1 + random.below(0x10_ffff) as u32,
                };
                if let Some(character) = char::from_u32(code) {
                    break character;
                }
            }
        })
        .collect()
}

fn any_json(random: &mut Random, depth: u32) -> serde_json::Value {
    let numbers: &[&str] =
        &["0", "-0", "1e-400", "1e400", "123456789012345678901234567890.5", "-1.0"];
    match random.below(if depth == 0 { 4 } else { 6 }) {
        0 => json!(null),
        1 => json!(random.below(2) == 0),
        2 => json!(any_text(random)),
        3 => serde_json::from_str(random.pick::<&str>(numbers)).unwrap_or(json!(1)),
        4 => (0..random.below(4)).map(|_| any_json(random, depth - 1)).collect(),
        _ => {
            (0..random.below(4)).map(|_| (any_text(random), any_json(random, depth - 1))).collect()
        }
    }
}

/// An SQL expression of the type; half of the time one that makes sense.
fn expression(random: &mut Random, kind: &str, tokens: &Mutex<Vec<Uuid>>) -> String {
    if random.below(12) == 0 {
        return format!("NULL::{kind}");
    }
    let sense = random.below(2) == 0;
    match kind {
        "text" if sense => format!("'k{}'", random.below(4)),
        "text" => match random.below(4) {
            0 => (*random.pick(&[
                "''",
                "' '",
                "repeat('x', 1024)",
                "repeat('x', 1025)",
                "repeat('é', 512)",
                "repeat('é', 513)",
                "repeat('x', 3000000)",
                "E'\\x01\\x7f'",
                "U&'\\FFFF'",
                "'* * * * *'",
                "'NaN'",
            ]))
            .to_string(),
            _ => quoted(&any_text(random)),
        },
        "bytea" if sense => "'\\x00ff'::bytea".into(),
        "bytea" => match random.below(3) {
            0 => (*random.pick(&[
                "''::bytea",
                "convert_to(repeat('x', 1048576), 'UTF8')",
                "convert_to(repeat('x', 1048577), 'UTF8')",
                "convert_to(repeat('x', 20000000), 'UTF8')",
            ]))
            .to_string(),
            _ => {
                let length = random.below(100) as usize;
                let bytes = random.bytes(length);
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("'\\x{hex}'::bytea")
            }
        },
        "interval" if sense => {
            (*random.pick(&["interval '1us'", "interval '1ms'", "interval '1h'", "interval '0'"]))
                .into()
        }
        "interval" => match random.below(3) {
            0 => (*random.pick(&[
                "interval '-1s'",
                "interval '3650 days'",
                "interval '3650 days 1us'",
                "interval '3651 days'",
                "interval '178000000 years'",
                "interval '-178000000 years'",
                "interval '1 mon -30 days'",
                "interval '1 mon -29 days -23:59:59.999999'",
                "interval '2147483647 mons 2147483647 days'",
                "interval '-2147483648 mons -2147483648 days'",
                "interval '2562047788:00:54.775807'",
                "interval '-2562047788:00:54.775808'",
            ]))
            .to_string(),
            1 if major() >= 17 => {
                (*random.pick(&["interval 'infinity'", "interval '-infinity'"])).to_string()
            }
            _ => format!(
                "make_interval(months => {}, days => {}) + interval '1us' * {}",
                random.next() as i32,
                random.next() as i32,
                (random.next() as i64) >> random.below(60)
            ),
        },
        "uuid" if sense => {
            let tokens = tokens.lock().unwrap();
            let token = if tokens.is_empty() { Uuid::nil() } else { *random.pick(&tokens) };
            format!("'{token}'::uuid")
        }
        "uuid" => match random.below(2) {
            0 => "'00000000-0000-0000-0000-000000000000'::uuid".into(),
            _ => "gen_random_uuid()".into(),
        },
        "jsonb" if sense => "'{\"a\": 1}'::jsonb".into(),
        "jsonb" => match random.below(4) {
            0 => (*random.pick(&[
                "'null'::jsonb",
                "'1e131071'::jsonb",
                "'1e-16383'::jsonb",
                "('1' || repeat('0', 100000))::jsonb",
                "(repeat('[', 2000) || repeat(']', 2000))::jsonb",
                "(repeat('[', 60000) || repeat(']', 60000))::jsonb",
                "to_jsonb(repeat('x', 1048575))",
                "to_jsonb(repeat('x', 5000000))",
                "(SELECT jsonb_object_agg(n, n) FROM generate_series(1, 5000) AS n)",
                "(SELECT jsonb_agg(n) FROM generate_series(1, 20000) AS n)",
                "'{\"\": {\"\": \"\\ud834\\udd1e\"}}'::jsonb",
            ]))
            .to_string(),
            _ => {
                let depth = random.below(5) as u32;
                format!(
                    "{}::jsonb",
                    quoted(&any_json(random, depth).to_string().replace("\\u0000", "0"))
                )
            }
        },
        "boolean" => (*random.pick(&["true", "false"])).into(),
        "integer" | "bigint" => match random.below(3) {
            0 => format!("(-1)::{kind}"),
            1 => format!("1000::{kind}"),
            _ => (if kind == "integer" { "2147483647" } else { "9223372036854775807" }).into(),
        },
        "text[]" => match random.below(8) {
            0 => "'{}'::text[]".into(),
            1 => "ARRAY['a', NULL]".into(),
            2 => "ARRAY[['a', 'b'], ['c', 'd']]".into(),
            3 => "'[-5:-4]={a,b}'::text[]".into(),
            4 => "array_fill('x'::text, ARRAY[100000])".into(),
            5 => "ARRAY[repeat('x', 3000000)]".into(),
            _ => {
                let parts: Vec<String> =
                    (0..1 + random.below(4)).map(|_| quoted(&any_text(random))).collect();
                format!("ARRAY[{}]", parts.join(", "))
            }
        },
        "regprocedure" if sense => "'echo(jsonb)'::regprocedure".into(),
        "regprocedure" => (*random.pick(&[
            "0::oid::regprocedure",
            "4294967295::oid::regprocedure",
            "1::oid::regprocedure",
            "'fails(jsonb)'::regprocedure",
            "'strict(jsonb)'::regprocedure",
            "'rows(jsonb)'::regprocedure",
            "'again(jsonb)'::regprocedure",
            "'commits(jsonb)'::regprocedure",
            "'nothing(jsonb)'::regprocedure",
            "'deep(jsonb)'::regprocedure",
            "'closes(jsonb)'::regprocedure",
            "'jsonb_send(jsonb)'::regprocedure",
            "'jsonb_in(cstring)'::regprocedure",
            "'count(\"any\")'::regprocedure",
            "'jsonb_agg(anyelement)'::regprocedure",
            "'rank()'::regprocedure",
            "'pg_sleep(double precision)'::regprocedure",
            "'idem_fingerprint_json(jsonb)'::regprocedure",
        ]))
        .into(),
        "regrole" => {
            (*random.pick(&["0::oid::regrole", "4294967295::oid::regrole", "'app'::regrole"]))
                .into()
        }
        "regclass" => (*random.pick(&["0::oid::regclass", "'pg_class'::regclass"])).into(),
        "oid" => (*random.pick(&["0::oid", "4294967295::oid"])).into(),
        "timestamp with time zone" => {
            (*random.pick(&["now()", "'infinity'::timestamptz", "'-infinity'::timestamptz"])).into()
        }
        other => panic!("teach the fuzzer values of type {other}"),
    }
}

fn call(random: &mut Random, function: &Function, tokens: &Mutex<Vec<Uuid>>) -> String {
    let last = function.parameters.len();
    let mut arguments = Vec::new();
    for (n, (name, kind)) in function.parameters.iter().enumerate() {
        let variadic = function.variadic && n + 1 == last;
        // Most have a default; what must be given is not always given.
        if !variadic && n > 0 && random.below(2) == 0 {
            continue;
        }
        // Nobody waits for long, but the fuzzer gets to waiting.
        let value = match name.as_str() {
            "wait" if random.below(4) > 0 => "interval '1ms'".to_string(),
            _ => expression(random, kind, tokens),
        };
        arguments.push(match variadic {
            true => format!("VARIADIC {value}"),
            false => format!("{name} => {value}"),
        });
    }
    format!("{}({})", function.name, arguments.join(", "))
}

fn statement(random: &mut Random, function: &Function, call: &str) -> String {
    match random.below(if function.composite { 11 } else { 10 }) {
        0 | 1 => format!("SELECT * FROM {call}"),
        2 => format!("SELECT {call}"),
        3 => format!("SELECT {call} FROM generate_series(1, 3)"),
        4 => {
            format!("SELECT * FROM generate_series(1, 2) AS n, LATERAL {call} WITH ORDINALITY AS f")
        }
        5 => format!(
            "DO $do$ BEGIN PERFORM {call}; EXCEPTION WHEN OTHERS THEN IF SQLSTATE < 'XX' THEN NULL; ELSE RAISE; END IF; END $do$"
        ),
        6 => format!("EXPLAIN (ANALYZE, VERBOSE) SELECT {call}"),
        7 => format!(
            "BEGIN; DECLARE c CURSOR FOR SELECT {call} FROM generate_series(1, 3); FETCH 2 FROM c; COMMIT"
        ),
        8 => format!(
            "SELECT count(*) FROM (SELECT {call} AS c FROM generate_series(1, 2)) AS s WHERE c IS NOT NULL GROUP BY c::text"
        ),
        9 => format!(
            "WITH w AS MATERIALIZED (SELECT {call} AS c) SELECT c, c FROM w UNION ALL SELECT {call}, NULL"
        ),
        _ => format!("SELECT ({call}).*"),
    }
}

/// What an argument, a state or a time limit may answer. Everything else is a bug.
fn expected(state: &str) -> bool {
    state.starts_with("ID0")
        || state.starts_with("22") // a value that is refused, by us or before it comes to us
        || [
            "0A000", // not in this context: a set in FROM alone
            "21000", // more than one row of a sub-select
            "25006", // read only
            "25P01", "25P02", // there is no transaction, or it has failed
            "2D000", // COMMIT inside a function
            "3B001", // no such savepoint: it went with the failure
            "40001", "40P01", // what concurrent transactions may say
            "42501", // a role without the right
            "42601", // not a statement: a record where none can be
            "42704", // no such role
            "42803", "42804", "42809", "42883", "42846", "42725", "42P18", "42P03", "42702", "42703", "42701", // not a function to be run so
            "53200", // too many locks
            "54000", "54001", "54011", "54023", // too large, too deep
            "55000", "55P03", // not in this state; lock_timeout
            "57014", // statement_timeout
            "F0001", // what the user's function raises
        ]
        .contains(&state)
}

#[test]
fn no_argument_kills_the_server_or_gets_an_internal_error() {
    let server = Server::start(&["max_stack_depth=1MB"]);
    server.create_database("shop");
    let mut admin = server.connect("shop", "postgres");
    run(
        &mut admin,
        "CREATE FUNCTION echo(r jsonb) RETURNS jsonb LANGUAGE sql RETURN r;
         CREATE FUNCTION nothing(r jsonb) RETURNS jsonb LANGUAGE sql RETURN NULL::jsonb;
         CREATE FUNCTION strict(r jsonb) RETURNS jsonb STRICT LANGUAGE sql RETURN r;
         CREATE FUNCTION rows(r jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT r FROM generate_series(1, 3)';
         CREATE FUNCTION fails(r jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RAISE 'no' USING ERRCODE = 'F0001'; END $$;
         CREATE FUNCTION again(r jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN idem_run('k0', 'again(jsonb)', r); END $$;
         CREATE FUNCTION deep(r jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN idem_run(gen_random_uuid()::text, 'deep(jsonb)', r); END $$;
         CREATE FUNCTION commits(r jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN COMMIT; RETURN r; END $$;
         CREATE FUNCTION closes(r jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN PERFORM idem_release('k0'), idem_complete('k1'); RETURN r; END $$",
    );
    let functions = functions(&mut admin);
    assert!(functions.len() >= 21, "{} functions", functions.len());
    let seen: Mutex<BTreeMap<String, u64>> = Mutex::default();
    let called: Mutex<BTreeMap<String, u64>> = Mutex::default();
    let tokens: Mutex<Vec<Uuid>> = Mutex::default();
    let mut random = Random::replayable();
    let calls = rounds(700, 150_000);
    scope(|threads| {
        for n in 0..4 {
            let mut random = Random::seeded(random.next());
            let (server, functions, seen, called, tokens) =
                (&server, &functions, &seen, &called, &tokens);
            threads.spawn(move || {
                let mut client = server.connect("shop", if n == 0 { "postgres" } else { "app" });
                run(
                    &mut client,
                    "SET statement_timeout = '150ms'; SET client_min_messages = error",
                );
                for _ in 0..calls {
                    let opening = random.below(6);
                    let text = match opening {
                        0 => "BEGIN".to_string(),
                        1 => "BEGIN ISOLATION LEVEL SERIALIZABLE".into(),
                        2 => "BEGIN READ ONLY".into(),
                        _ => String::new(),
                    };
                    run(&mut client, &text);
                    for _ in 0..if opening < 3 { 1 + random.below(4) } else { 1 } {
                        let function = random.pick(functions);
                        let call = call(&mut random, function, tokens);
                        let mut sql = statement(&mut random, function, &call);
                        match random.below(8) {
                            0 if opening < 3 => sql = format!("SAVEPOINT s; {sql}"),
                            1 if opening < 3 => sql = format!("ROLLBACK TO s; {sql}"),
                            _ => {}
                        }
                        *called.lock().unwrap().entry(function.name.clone()).or_default() += 1;
                        let state = match client.simple_query(&sql) {
                            Ok(_) => "00000".to_string(),
                            Err(error) => {
                                let state = sqlstate(&error).to_string();
                                let short: String = sql.chars().take(3000).collect();
                                assert!(expected(&state), "{short}: {error:?}");
                                state
                            }
                        };
                        *seen.lock().unwrap().entry(state).or_default() += 1;
                    }
                    // COMMIT of an open claim is refused; ROLLBACK never is.
                    let _ = client.batch_execute(if random.below(2) == 0 {
                        "COMMIT"
                    } else {
                        "ROLLBACK"
                    });
                    run(&mut client, "ROLLBACK");
                    // Live tokens of live keys, so that calls get past the check of the token.
                    if random.below(20) == 0 {
                        let (key, name) = (random.below(4), random.below(4));
                        let sql = format!(
                            "SELECT (SELECT token FROM idem_begin('k{key}', lease => '50ms')),
                                    (SELECT token FROM lock_try('k{name}', ttl => '50ms'))"
                        );
                        if let Ok(row) = client.query_one(&sql, &[]) {
                            let mut tokens = tokens.lock().unwrap();
                            tokens.extend((0..2).filter_map(|n| row.get::<_, Option<Uuid>>(n)));
                            let old = tokens.len().saturating_sub(8);
                            tokens.drain(..old);
                        }
                    }
                }
            });
        }
    });
    println!("{:?}\n{:?}", seen.lock().unwrap(), called.lock().unwrap());
    for state in ["00000", "22023", "22004", "ID003", "ID007", "ID011", "25006"] {
        assert!(
            seen.lock().unwrap().contains_key(state),
            "{state} never came: the fuzzer is too wild"
        );
    }
    assert_eq!(called.lock().unwrap().len(), functions.len());
    let log = server.log();
    for sign in [
        "PANIC:",
        "TRAP:",
        "terminated by signal",
        "server process (PID",
        "XX000",
        "stack backtrace",
    ] {
        assert!(!log.contains(sign), "the server's log has: {sign}");
    }
    assert_eq!(our_locks(&mut admin), 0);
    // All works as ever.
    run(&mut admin, "SELECT idem_grant('app')");
    let mut app = server.connect("shop", "app");
    run(&mut app, "BEGIN");
    acquire(&mut app, "afterwards", "");
    complete(&mut app, "afterwards", &json!(1), None);
    run(&mut app, "COMMIT");
    assert_eq!(status(&mut app, "afterwards", ""), "completed");
}
