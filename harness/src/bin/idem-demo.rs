//! The demo: payments retried in every way a client can retry them, each made once. Real connections as the ordinary
//! role `app`, on the throw-away server that `make demo` starts. The exit status says whether every check held.

use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use idem_harness::{TestDb, major, sqlstate};
use postgres::{Client, Error, GenericClient};
use serde_json::{Value, json};
use uuid::Uuid;

const DUPLICATES: usize = 16;

/// What a client learns from a request to pay.
#[derive(Debug, PartialEq)]
enum Answer {
    Paid,
    /// The stored answer of the request that paid.
    Replayed(Value),
    InProgress,
    Mismatch,
}

/// The shop's request to pay, as an application writes it: one transaction, without a lease.
fn pay(client: &mut Client, item: &str, euros: i32, work: Duration) -> Result<Answer, Error> {
    let mut transaction = client.transaction()?;
    let begun = begin(&mut transaction, item, euros)?;
    let answer = match begun.get("status") {
        "acquired" => {
            insert(&mut transaction, item, euros)?;
            sleep(work);
            transaction
                .execute("SELECT idem_complete($1, $2)", &[&item, &json!({ "receipt": item })])?;
            Answer::Paid
        }
        "completed" => Answer::Replayed(begun.get("result")),
        "in_progress" => Answer::InProgress,
        "mismatch" => Answer::Mismatch,
        other => panic!("idem_begin answered {other}"),
    };
    transaction.commit()?;
    Ok(answer)
}

fn begin(client: &mut impl GenericClient, item: &str, euros: i32) -> Result<postgres::Row, Error> {
    let request = format!("{item}, {euros} EUR");
    client.query_one("SELECT * FROM idem_begin($1, sha256($2))", &[&item, &request.as_bytes()])
}

fn begin_with_lease(client: &mut Client, item: &str, lease: &str) -> Result<(Uuid, i32), Error> {
    let begun = client.query_one(
        "SELECT token, attempt FROM idem_begin($1, lease => $2::text::interval)",
        &[&item, &lease],
    )?;
    Ok((begun.get("token"), begun.get("attempt")))
}

fn insert(client: &mut impl GenericClient, item: &str, euros: i32) -> Result<u64, Error> {
    client.execute("INSERT INTO payments (item, euros) VALUES ($1, $2)", &[&item, &euros])
}

/// What happened so far, and whether it is what should have.
struct Report {
    scene: u32,
    failures: u32,
    /// Item, and how often it was sent.
    sent: Vec<(&'static str, usize)>,
}

impl Report {
    fn scene(&mut self, title: &str, item: &'static str, sent: usize) {
        self.title(title);
        self.sent(item, sent);
    }

    fn title(&mut self, title: &str) {
        self.scene += 1;
        println!("\n{}. {title}", self.scene);
    }

    fn sent(&mut self, item: &'static str, sent: usize) {
        match self.sent.iter_mut().find(|(known, _)| *known == item) {
            Some((_, count)) => *count += sent,
            None => self.sent.push((item, sent)),
        }
    }

    /// One line of what happened, if it did.
    fn line(&mut self, who: &str, happened: bool, what: &str) {
        let mark = if happened { "" } else { "   <- NOT SO" };
        println!("   {who:<14} {what}{mark}");
        self.failures += u32::from(!happened);
    }
}

fn main() -> ExitCode {
    let db = TestDb::new();
    db.admin()
        .batch_execute(
            "CREATE TABLE payments (item text NOT NULL, euros int NOT NULL);
             CREATE TABLE reports (made_by text NOT NULL, fence bigint PRIMARY KEY);
             GRANT SELECT, INSERT ON payments, reports TO app;
             CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE sql AS
             $$ INSERT INTO payments VALUES (request->>'item', (request->>'euros')::int)
                RETURNING jsonb_build_object('receipt', item) $$",
        )
        .expect("the shop's table can be created");
    let mut report = Report { scene: 0, failures: 0, sent: Vec::new() };
    println!(
        "idem on PostgreSQL {}: a shop whose clients retry. One payment has one key, the item.",
        major()
    );

    if let Err(error) = play(&db, &mut report) {
        println!("\nThe demo stopped: {error}");
        return ExitCode::FAILURE;
    }
    if report.failures > 0 {
        println!("\n{} checks failed.", report.failures);
        return ExitCode::FAILURE;
    }
    println!("\nEvery payment was made exactly once, and every report by one replica.");
    ExitCode::SUCCESS
}

fn play(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    retried(db, report)?;
    other_amount(db, report)?;
    duplicates(db, report)?;
    killed(db, report)?;
    forgotten(db, report)?;
    lost_lease(db, report)?;
    whole(db, report)?;
    resumed(db, report)?;
    one_of_four(db, report)?;
    stalled(db, report)?;
    table(db, report)
}

fn retried(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("A payment, and the same request again", "book", 2);
    let first = pay(&mut db.app(), "book", 20, Duration::ZERO)?;
    report.line(
        "first",
        first == Answer::Paid,
        "acquired: paid, the answer stored in the same transaction",
    );
    let second = pay(&mut db.app(), "book", 20, Duration::ZERO)?;
    let replayed = second == Answer::Replayed(json!({ "receipt": "book" }));
    report.line("again", replayed, r#"completed: answered with the stored {"receipt": "book"}"#);
    Ok(())
}

fn other_amount(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("The same key with another amount", "book", 1);
    let answer = pay(&mut db.app(), "book", 2000, Duration::ZERO)?;
    report.line("2000 EUR", answer == Answer::Mismatch, "mismatch: refused, nothing paid");
    Ok(())
}

fn duplicates(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene(&format!("{DUPLICATES} duplicates at once"), "lamp", DUPLICATES);
    let together = Barrier::new(DUPLICATES);
    let retries = AtomicUsize::new(0);
    // Each client: its first answer, and the last one after retrying while the payment was in progress.
    let answers = scope(|threads| {
        let client = || {
            let mut client = db.app();
            together.wait();
            let first = pay(&mut client, "lamp", 35, Duration::from_millis(200))?;
            let mut last = Answer::InProgress;
            if first == Answer::InProgress {
                while last == Answer::InProgress {
                    sleep(Duration::from_millis(70));
                    last = pay(&mut client, "lamp", 35, Duration::ZERO)?;
                    retries.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok((first, last))
        };
        let clients: Vec<_> = (0..DUPLICATES).map(|_| threads.spawn(client)).collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("a client does not panic"))
            .collect::<Result<Vec<_>, Error>>()
    })?;
    report.sent("lamp", retries.into_inner());
    let stored = Answer::Replayed(json!({ "receipt": "lamp" }));
    let paid = answers.iter().filter(|(first, _)| *first == Answer::Paid).count();
    let busy = answers.iter().filter(|(first, _)| *first == Answer::InProgress).count();
    let replayed = answers.iter().filter(|(first, _)| *first == stored).count();
    let retried = answers
        .iter()
        .filter(|(first, last)| *first == Answer::InProgress && *last == stored)
        .count();
    report.line(&format!("{paid} client"), paid == 1, "acquired: paid");
    report.line(
        &format!("{} clients", busy + replayed),
        paid + busy + replayed == DUPLICATES && retried == busy,
        &format!("{busy} told at once: in progress; later, all of them: the stored answer"),
    );
    Ok(())
}

fn killed(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("A client killed after it wrote the payment, before COMMIT", "chair", 2);
    let mut doomed = db.app();
    let mut transaction = doomed.transaction()?;
    begin(&mut transaction, "chair", 80)?;
    insert(&mut transaction, "chair", 80)?;
    let pid: i32 = transaction.query_one("SELECT pg_backend_pid()", &[])?.get(0);
    db.admin().execute("SELECT pg_terminate_backend($1, 10000)", &[&pid])?;
    report.line(
        "first",
        transaction.commit().is_err(),
        "its backend was terminated: claim and payment are gone",
    );
    let answer = pay(&mut db.app(), "chair", 80, Duration::ZERO)?;
    report.line("retry, at once", answer == Answer::Paid, "acquired: paid");
    Ok(())
}

fn forgotten(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("A program that forgets idem_complete", "desk", 2);
    let mut client = db.app();
    let mut transaction = client.transaction()?;
    begin(&mut transaction, "desk", 150)?;
    insert(&mut transaction, "desk", 150)?;
    let refused = match transaction.commit() {
        Err(error) => sqlstate(&error) == "ID007",
        Ok(()) => false,
    };
    report.line("COMMIT", refused, "refused (ID007): else a retry would pay twice");
    let answer = pay(&mut client, "desk", 150, Duration::ZERO)?;
    report.line("corrected", answer == Answer::Paid, "acquired: paid");
    Ok(())
}

/// The charge itself happens outside the database, at a provider who is given the same key.
fn lost_lease(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("A worker that charges outside, on a lease, and stalls", "phone", 2);
    let (mut slow, mut quick) = (db.app(), db.app());
    let (slow_token, _) = begin_with_lease(&mut slow, "phone", "100 milliseconds")?;
    sleep(Duration::from_millis(150)); // the provider does not answer, and the lease runs out
    let (quick_token, attempt) = begin_with_lease(&mut quick, "phone", "30 seconds")?;
    let book = |client: &mut Client, token: Uuid| {
        let mut transaction = client.transaction()?;
        insert(&mut transaction, "phone", 600)?;
        transaction.execute(
            "SELECT idem_complete('phone', $1, token => $2)",
            &[&json!({ "receipt": "phone" }), &token],
        )?;
        transaction.commit()
    };
    let paid = book(&mut quick, quick_token);
    report.line(
        "second worker",
        attempt == 2 && paid.is_ok(),
        "takes over after the lease (attempt 2): paid",
    );
    paid?;
    let late = book(&mut slow, slow_token);
    let refused = late.is_err_and(|error| sqlstate(&error) == "ID003");
    report.line(
        "first worker",
        refused,
        "comes back late: refused (ID003), its payment rolled back",
    );
    Ok(())
}

/// The same payment as one call: the work is a function.
fn whole(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("The whole operation in one call, idem_run", "sofa", 3);
    let run = |euros: i32| -> Result<Value, Error> {
        let request = json!({ "item": "sofa", "euros": euros });
        let row = db.app().query_one("SELECT idem_run('sofa', 'pay(jsonb)', $1)", &[&request])?;
        Ok(row.get(0))
    };
    let receipt = json!({ "receipt": "sofa" });
    report.line("first", run(900)? == receipt, "runs pay(request): paid");
    report.line("again", run(900)? == receipt, "the stored answer");
    let mismatch = run(9000).is_err_and(|error| sqlstate(&error) == "ID002");
    report.line("9000 EUR", mismatch, "refused (ID002)");
    Ok(())
}

/// Charges at the provider, then books: a worker that dies in between has noted the charge.
fn resumed(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.scene("A worker killed between two steps, and the next one resumes", "bike", 2);
    let mut charges = 0;
    let mut charge = || {
        charges += 1;
        format!("charge-{charges}")
    };

    let mut doomed = db.app();
    let (token, _) = begin_with_lease(&mut doomed, "bike", "300 milliseconds")?;
    doomed.execute(
        "SELECT idem_checkpoint('bike', $1, token => $2)",
        &[&json!({ "charged": charge() }), &token],
    )?;
    let pid: i32 = doomed.query_one("SELECT pg_backend_pid()", &[])?.get(0);
    db.admin().execute("SELECT pg_terminate_backend($1, 10000)", &[&pid])?;
    let killed = doomed.is_valid(Duration::from_secs(1)).is_err();
    report.line("first worker", killed, "charges outside, saves a checkpoint, is killed");

    let mut next = db.app();
    let begun = next.query_one(
        "SELECT token, attempt, checkpoint FROM idem_begin('bike', lease => '30 s', wait => '10 s')",
        &[],
    )?;
    let checkpoint: Option<Value> = begun.get("checkpoint");
    let known = match &checkpoint {
        Some(checkpoint) => checkpoint["charged"].as_str().unwrap_or_default().to_string(),
        None => charge(),
    };
    let mut transaction = next.transaction()?;
    insert(&mut transaction, "bike", 450)?;
    transaction.execute(
        "SELECT idem_complete('bike', $1, token => $2)",
        &[&json!({ "receipt": known }), &begun.get::<_, Uuid>("token")],
    )?;
    transaction.commit()?;
    report.line(
        "second worker",
        begun.get::<_, i32>("attempt") == 2 && known == "charge-1",
        "takes over with the checkpoint (attempt 2): books, with the charge that was made",
    );
    report.line("provider", charges == 1, "charged once");
    Ok(())
}

/// What a replica gets when it takes the lock `nightly-report`.
struct Lock {
    token: Uuid,
    fence: i64,
}

fn lock(client: &mut Client, how: &str, replica: &str) -> Result<Result<Lock, String>, Error> {
    let row = client.query_one(&format!("SELECT * FROM {how}, holder => $1)"), &[&replica])?;
    Ok(match row.get("acquired") {
        true => Ok(Lock { token: row.get("token"), fence: row.get("fence") }),
        false => Err(row.get::<_, Option<String>>("held_by").unwrap_or_default()),
    })
}

/// Writes the report in a transaction that is guarded by the lock.
fn guarded(client: &mut Client, replica: &str, lock: &Lock, work: Duration) -> Result<(), Error> {
    let mut transaction = client.transaction()?;
    transaction.execute("SELECT lock_guard('nightly-report', $1)", &[&lock.token])?;
    sleep(work);
    transaction.execute("INSERT INTO reports VALUES ($1, $2)", &[&replica, &lock.fence])?;
    transaction.commit()
}

fn one_of_four(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.title("A nightly report on four replicas, to be made by one");
    let together = Barrier::new(4);
    let outcomes = scope(|threads| {
        let replica = |number: usize| {
            let (name, mut client) = (format!("replica-{number}"), db.app());
            together.wait();
            let taken = lock(&mut client, "lock_try('nightly-report', ttl => '1 min'", &name)?;
            if let Ok(lock) = &taken {
                guarded(&mut client, &name, lock, Duration::ZERO)?;
            }
            together.wait();
            if let Ok(lock) = &taken {
                client.execute("SELECT lock_unlock('nightly-report', $1)", &[&lock.token])?;
            }
            Ok(taken.is_ok())
        };
        let replicas: Vec<_> =
            (1..=4).map(|number| threads.spawn(move || replica(number))).collect();
        replicas
            .into_iter()
            .map(|replica| replica.join().expect("a replica does not panic"))
            .collect::<Result<Vec<bool>, Error>>()
    })?;
    let made: i64 = db.app().query_one("SELECT count(*) FROM reports", &[])?.get(0);
    report.line("1 replica", made == 1, "lock_try: acquired; lock_guard in its transaction: made");
    let busy = outcomes.iter().filter(|acquired| !**acquired).count();
    report.line("3 replicas", busy == 3, "told at once: somebody else has it");
    Ok(())
}

fn stalled(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    report.title("A replica stalls past its lease");
    let (mut slow, mut quick) = (db.app(), db.app());
    let take = |client: &mut Client, ttl: &str, replica: &str| {
        let how = format!("lock_acquire('nightly-report', ttl => '{ttl}'");
        Ok(lock(client, &how, replica)?.unwrap_or_else(|holder| panic!("still held by {holder}")))
    };
    let first = take(&mut slow, "100 milliseconds", "slow")?;
    let second = take(&mut quick, "500 milliseconds", "quick")?;
    report.line(
        "second",
        second.fence > first.fence,
        "waits for the end of the lease: acquired, with a higher fence",
    );
    let late = guarded(&mut slow, "slow", &first, Duration::ZERO);
    let refused = late.is_err_and(|error| sqlstate(&error) == "ID011");
    report.line("first", refused, "comes back late: refused (ID011), its report rolled back");

    let third = scope(|threads| {
        let in_time =
            threads.spawn(|| guarded(&mut quick, "quick", &second, Duration::from_millis(800)));
        let mut third = db.app();
        let taken = take(&mut third, "1 min", "third")?;
        let made: i64 = third
            .query_one("SELECT count(*) FROM reports WHERE fence = $1", &[&second.fence])?
            .get(0);
        in_time.join().expect("a replica does not panic")?;
        Ok::<_, Error>((taken.fence > second.fence, made))
    })?;
    report.line(
        "second, third",
        third == (true, 1),
        "guarded in time, it outlasts its lease: the third gets the lock after its COMMIT",
    );
    Ok(())
}

/// Each item was asked for once, however often the request was sent.
fn table(db: &TestDb, report: &mut Report) -> Result<(), Error> {
    println!("\n   {:<10} {:>5} {:>6} {:>5}", "payment", "sent", "asked", "made");
    let mut client = db.app();
    let mut total = (0, 0, 0);
    for (item, sent) in std::mem::take(&mut report.sent) {
        let made: i64 =
            client.query_one("SELECT count(*) FROM payments WHERE item = $1", &[&item])?.get(0);
        row(report, item, (sent, 1, made));
        total = (total.0 + sent, total.1 + 1, total.2 + made);
    }
    row(report, "all", total);
    let made: i64 = client.query_one("SELECT count(*) FROM payments", &[])?.get(0);
    assert_eq!(made, total.2, "a payment that nobody asked for");
    Ok(())
}

fn row(report: &mut Report, item: &str, (sent, asked, made): (usize, i64, i64)) {
    let verdict = if asked == made { "ok" } else { "WRONG" };
    println!("   {item:<10} {sent:>5} {asked:>6} {made:>5}   {verdict}");
    report.failures += u32::from(asked != made);
}
