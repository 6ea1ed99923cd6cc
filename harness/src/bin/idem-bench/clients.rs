//! Loads from Rust clients: what pgbench cannot do, because Redis is asked too or because it matters who waits for whom.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use idem_harness::eventually;
use postgres::Client;

use crate::load::Bench;
use crate::measure::{Sample, percentile};

/// Has `clients` threads repeat what `connect` gives each of them, and measures it.
pub fn drive<F: FnMut()>(
    bench: &Bench,
    clients: usize,
    connect: impl Fn(usize) -> F + Sync,
) -> Sample {
    let start = Barrier::new(clients + 1);
    let stop = AtomicBool::new(false);
    let (mut latencies, elapsed) = scope(|threads| {
        let (start, stop, connect) = (&start, &stop, &connect);
        let workers: Vec<_> = (0..clients)
            .map(|client| {
                threads.spawn(move || {
                    let mut once = connect(client);
                    let mut latencies = Vec::new();
                    start.wait();
                    loop {
                        let begun = Instant::now();
                        once();
                        latencies.push(begun.elapsed().as_secs_f64() * 1e6);
                        if stop.load(Ordering::Relaxed) {
                            return latencies;
                        }
                    }
                })
            })
            .collect();
        start.wait();
        let begun = Instant::now();
        sleep(match bench.options.quick {
            true => Duration::from_millis(50),
            false => Duration::from_secs(bench.options.seconds.into()),
        });
        stop.store(true, Ordering::Relaxed);
        let latencies: Vec<f64> =
            workers.into_iter().flat_map(|worker| worker.join().expect("a client ran")).collect();
        (latencies, begun.elapsed())
    });
    Sample::of_latencies(&mut latencies, elapsed)
}

/// How a waiter waits, and what ends its wait.
pub struct Handover {
    pub label: &'static str,
    /// What the holder does before; `$1` is the name. What it returns, if anything, is `$2` of `end`.
    pub take: &'static str,
    /// Whether the holder keeps its transaction open meanwhile.
    pub in_transaction: bool,
    /// What the waiter calls; returns when the wait is over.
    pub wait: &'static str,
    /// What the holder does to end the wait, before it commits.
    pub end: &'static str,
}

/// What was measured of many hand-overs.
pub struct Delays {
    /// From the return of the holder's commit to the return of the waiter's call, in microseconds.
    pub p50: f64,
    pub p99: f64,
    /// CPU time of the waiter's backend while it waited for a second, in milliseconds.
    pub cpu: f64,
}

/// Hands a name over many times.
pub fn hand_over(bench: &Bench, handover: &Handover) -> Delays {
    let count = if bench.options.quick { 3 } else { 200 };
    let (mut holder, mut waiter, mut watcher) = (bench.app(false), bench.app(false), bench.admin());
    let waiter_pid = backend(&mut waiter);
    let mut delays: Vec<f64> = (0..count)
        .map(|i| {
            let waiting = Duration::from_millis(10);
            hand_over_once(handover, &mut holder, &mut waiter, i, || {
                until_it_waits(&mut watcher, waiter_pid);
                sleep(waiting);
            })
        })
        .collect();
    let mut cpu = 0.0;
    hand_over_once(handover, &mut holder, &mut waiter, count, || {
        until_it_waits(&mut watcher, waiter_pid);
        let before = cpu_of(waiter_pid);
        sleep(Duration::from_millis(if bench.options.quick { 50 } else { 1000 }));
        cpu = cpu_of(waiter_pid) - before;
    });
    Delays { p50: percentile(&mut delays, 50.0), p99: percentile(&mut delays, 99.0), cpu }
}

fn hand_over_once(
    handover: &Handover,
    holder: &mut Client,
    waiter: &mut Client,
    number: usize,
    meanwhile: impl FnOnce(),
) -> f64 {
    let name = format!("{}-{number}", handover.label);
    if handover.in_transaction {
        holder.batch_execute("BEGIN").expect("BEGIN");
    }
    let row = holder.query(handover.take, &[&name]).expect("the name is taken");
    let token: Option<String> = row.first().and_then(|row| row.get(0));
    let end = holder.prepare(handover.end).expect("the end is prepared");
    let wait = waiter.prepare(handover.wait).expect("the wait is prepared");
    scope(|threads| {
        let waiting = threads.spawn(|| {
            waiter.query(&wait, &[&name]).expect("the wait ends well");
            Instant::now()
        });
        meanwhile();
        match end.params().len() {
            2 => holder.query(&end, &[&name, &token]).expect("the wait is ended"),
            _ => holder.query(&end, &[&name]).expect("the wait is ended"),
        };
        if handover.in_transaction {
            holder.batch_execute("COMMIT").expect("COMMIT");
        }
        let ended = Instant::now();
        let woken = waiting.join().expect("the waiter ran");
        // Zero if the waiter's answer was here before the holder's.
        woken.saturating_duration_since(ended).as_secs_f64() * 1e6
    })
}

fn backend(client: &mut Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).expect("a connection").get(0)
}

fn until_it_waits(watcher: &mut Client, pid: i32) {
    eventually("the waiter waits", || {
        let row = watcher.query_one(
            "SELECT wait_event_type IN ('Lock', 'Extension') FROM pg_stat_activity WHERE pid = $1",
            &[&pid],
        );
        row.expect("the waiter lives").get::<_, Option<bool>>(0) == Some(true)
    });
}

/// CPU time of a process so far, in milliseconds.
fn cpu_of(pid: i32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    text.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0) / 1e6
}
