//! Purging by the real pg_cron: Debian's, which is for PostgreSQL 15. On the others, what is said without it (more of that in the SQL
//! test `schedule_purge`).

mod common;

use std::os::unix::fs::MetadataExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use idem_harness::{Server, TestDb, eventually, major, skipped, try_pg};
use postgres::Client;

/// Jobs run when a minute begins.
const TWO_MINUTES: Duration = Duration::from_secs(120);

/// Whether this server has pg_cron now. As root, where everything else is installed too, it must.
fn has_cron() -> bool {
    if major() != 15 {
        return false;
    }
    let root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    match try_pg(&["cron", "15"]) {
        Ok(_) => true,
        Err(error) if root => panic!("{error}"),
        Err(error) => {
            skipped(&format!("pg_cron was not tested, because it is not to be had: {error}"));
            false
        }
    }
}

/// The HINT of an error 55000.
#[track_caller]
fn refused(client: &mut Client, sql: &str) -> String {
    let error = client.query(sql, &[]).expect_err(sql);
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!(error.code().code(), "55000", "{error:?}");
    error.hint().unwrap_or_default().to_string()
}

/// What to run in the other database.
#[track_caller]
fn elsewhere(client: &mut Client, sql: &str) -> String {
    let hint = refused(client, sql);
    hint.strip_prefix("In that database, run: ").unwrap_or_else(|| panic!("{hint}")).to_string()
}

fn strings(client: &mut Client, sql: &str) -> Vec<String> {
    client.query(sql, &[]).unwrap().iter().map(|row| row.get(0)).collect()
}

fn jobs(client: &mut Client) -> Vec<String> {
    strings(
        client,
        "SELECT format('%s | %s | %s | %s | %s | %s', jobname, schedule, command, database, username, active)
         FROM cron.job ORDER BY jobname, jobid",
    )
}

/// As long a name as a database can have, so that the job's is cut off; and with a quote.
const SHOP: &str = "the shop's database, which has the longest name there can be: x";
const IN_JOBS: &str =
    "idem_purge in jobs | * * * * * | SELECT public.idem_purge() | jobs | postgres | t";

fn in_shop() -> String {
    let job = &format!("idem_purge in {SHOP}")[..SHOP.len()];
    format!("{job} | * * * * * | SELECT public.idem_purge() | {SHOP} | postgres | t")
}

#[test]
fn it_purges_and_there_is_one_job() {
    if !has_cron() {
        let hint = refused(&mut TestDb::new().admin(), "SELECT idem_schedule_purge()");
        assert!(hint.starts_with("Put pg_cron into shared_preload_libraries"), "{hint}");
        return;
    }
    let server = Server::start(&["cron.database_name=jobs", "cron.use_background_workers=on"]);
    server.create_database("jobs");
    let mut admin = server.connect("jobs", "postgres");
    let hint = refused(&mut admin, "SELECT idem_schedule_purge()");
    assert!(hint.starts_with("Put pg_cron into shared_preload_libraries"), "{hint}");
    run(&mut admin, "ALTER SYSTEM SET shared_preload_libraries = pg_cron");
    server.restart();
    let mut admin = server.connect("jobs", "postgres");
    server.create_database("shop");
    run(&mut admin, &format!("ALTER DATABASE shop RENAME TO \"{SHOP}\""));
    let mut shop = server.connect(SHOP, "postgres");

    // Loaded, but not created. In another database, the hint is what works there.
    assert_eq!(
        refused(&mut admin, "SELECT idem_schedule_purge()"),
        "Run: CREATE EXTENSION pg_cron;"
    );
    assert!(!truth(&mut admin, "SELECT idem_unschedule_purge()"));
    run(&mut admin, "CREATE EXTENSION pg_cron");
    let statement = elsewhere(&mut shop, "SELECT idem_schedule_purge()");
    run(&mut admin, &statement);
    assert_eq!(jobs(&mut admin), [in_shop()]);
    let statement = elsewhere(&mut shop, "SELECT idem_schedule_purge('5 4 * * 0')");
    assert!(statement.contains("'5 4 * * 0'"), "{statement}");

    // Scheduled twice: one job, changed.
    let first = number(&mut admin, "SELECT idem_schedule_purge('5 4 * * 0')");
    assert_eq!(number(&mut admin, "SELECT idem_schedule_purge()"), first);
    assert_eq!(jobs(&mut admin), [IN_JOBS, &in_shop()]);
    let error = admin.query("SELECT idem_schedule_purge('sometimes')", &[]).unwrap_err();
    assert_eq!(error.code().map(|code| code.code()), Some("22023"), "pg_cron's own: {error:?}");
    // Scheduling one that was switched off switches it on.
    run(&mut admin, "UPDATE cron.job SET active = false WHERE jobname = 'idem_purge in jobs'");
    run(&mut admin, "SELECT idem_schedule_purge()");
    assert_eq!(jobs(&mut admin), [IN_JOBS, &in_shop()]);

    // Another administrator, who is no superuser, sees and changes no job but his own; a superuser takes his place.
    run(
        &mut admin,
        "CREATE ROLE keeper LOGIN;
         GRANT USAGE ON SCHEMA cron TO keeper;
         GRANT EXECUTE ON FUNCTION idem_purge, idem_schedule_purge, idem_unschedule_purge TO keeper",
    );
    let mut keeper = server.connect("jobs", "keeper");
    assert!(!truth(&mut keeper, "SELECT idem_unschedule_purge()"));
    run(&mut keeper, "SELECT idem_schedule_purge(); SELECT idem_schedule_purge()");
    assert_eq!(jobs(&mut keeper), [IN_JOBS.replace("postgres", "keeper")]);
    assert_eq!(jobs(&mut admin).len(), 3);
    run(&mut admin, "SELECT idem_schedule_purge()");
    assert_eq!(jobs(&mut admin), [IN_JOBS, &in_shop()]);

    // It purges, in both databases.
    for client in [&mut admin, &mut shop] {
        run(client, "SELECT idem_once(n::text, ttl => '1ms') FROM generate_series(1, 3) AS n");
        assert_eq!(number(client, "SELECT count(*) FROM idem_records"), 3);
    }
    let end = Instant::now() + TWO_MINUTES;
    for client in [&mut admin, &mut shop] {
        while number(client, "SELECT count(*) FROM idem_records") > 0 {
            assert!(Instant::now() < end, "not purged in two minutes: {}", server.log());
            sleep(Duration::from_millis(200));
        }
    }
    let runs = "SELECT DISTINCT format('%s %s %s', database, username, status) FROM cron.job_run_details ORDER BY 1";
    eventually("both jobs have succeeded", || {
        strings(&mut admin, runs)
            == ["jobs postgres succeeded", &format!("{SHOP} postgres succeeded")]
    });

    assert!(truth(&mut admin, "SELECT idem_unschedule_purge()"));
    assert!(!truth(&mut admin, "SELECT idem_unschedule_purge()"));
    assert_eq!(jobs(&mut admin), [in_shop()]);
    let statement = elsewhere(&mut shop, "SELECT idem_unschedule_purge()");
    run(&mut admin, &statement);
    assert_eq!(jobs(&mut admin), [""; 0]);

    // Created, but not loaded any more.
    run(&mut admin, "ALTER SYSTEM RESET shared_preload_libraries");
    server.restart();
    let mut admin = server.connect("jobs", "postgres");
    assert_eq!(refused(&mut admin, "SELECT idem_schedule_purge()"), hint);
}

fn truth(client: &mut Client, sql: &str) -> bool {
    client.query_one(sql, &[]).unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}
