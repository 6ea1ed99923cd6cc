//! idem passes its own conformance suite (tests/conformance/), and the runner sees what is wrong: each kind of expectation
//! fails when it is not met.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_idem-conformance"))
        .args(arguments)
        .output()
        .expect("idem-conformance can be run")
}

#[test]
fn idem_conforms() {
    let output = run(&[]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    let cases = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/conformance/cases"));
    assert!(told.ends_with(&format!("\n{} cases, 0 failed\n", cases.unwrap().count())), "{told}");
}

#[test]
fn the_runner_sees_what_is_wrong() {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("conformance-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let setup = folder.join("setup.sql");
    fs::write(&setup, "CREATE TABLE t (n int); INSERT INTO t VALUES (1), (NULL)").unwrap();
    let holds = "a: SELECT n, n + 1 FROM t\n  = 1 | 2\n  = NULL | NULL\na: SELECT n FROM t ORDER BY 1\n  -> one\n\
        b: SELECT $one +\n  1\n  = 2\nb: SELECT 1/0\n  ! 22012\na: BEGIN\na: LOCK t\nb waits: SELECT count(*) FROM t\n\
        a: ROLLBACK\nb returns\n  = 2\n";
    for (text, expected) in [
        (holds, None),
        ("a: SELECT n FROM t\n  = 1\n", Some("line 1: a: [\"1\", \"NULL\"] in place of [\"1\"]")),
        ("a: SELECT n FROM t\n  = 1\n  = \n", Some("in place of")),
        ("a: SELECT 1\n  ! 22012\n", Some("in place of 22012")),
        ("a: SELECT 1/0\n  ! 22013\n", Some("22012 (")),
        ("a: SELECT 1/0\n", Some("22012 (")),
        ("a waits: SELECT 1\n", Some("it should wait, but ended")),
        (
            "a: BEGIN\na: LOCK t\nb waits: SELECT * FROM t\nb: SELECT 1\n",
            Some("a statement waits in it"),
        ),
        ("a returns\n", Some("nothing waits in it")),
        ("a: SELECT n FROM t WHERE n = 2\n  -> one\n", Some("there is no value for one")),
        ("a SELECT 1\n", Some("line 1: not a step")),
        ("# nothing\n", Some("no steps")),
    ] {
        let case = folder.join("it.case");
        fs::write(&case, text).unwrap();
        let output = run(&["--setup", setup.to_str().unwrap(), case.to_str().unwrap()]);
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success(), expected.is_none(), "{text}{told}");
        assert!(expected.is_none_or(|why| told.contains(why)), "{text}{told}");
    }
    fs::remove_dir_all(folder).unwrap();
}
