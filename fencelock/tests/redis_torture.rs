//! Processes hammer a Redis server through a bad network, and are killed now and then; every promise is kept.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features redis --test redis_torture -- --nocapture`.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::{ErrorKind, connect, parse_duration};
use fencelock_testkit::history::Kind;
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::rng::Rng;
use fencelock_testkit::torture::{self, Connect, Plan, Verdict, Workers};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Goes wrong in every way that a network can, each time for far less than a lease.
async fn trouble(proxy: &Proxy, dice: &mut Rng) {
    match dice.below(8) {
        0 => proxy.cut(),
        1 => proxy.lose_answers(1 + dice.below(5)),
        2 => proxy.mute(),
        3 => proxy.mute_present(),
        4 => proxy.partition(),
        5 => proxy.hold_present_requests(),
        6 => proxy.delay(dice.span(Duration::from_millis(5))),
        _ => {
            proxy.refuse();
            proxy.cut();
        }
    }
    tokio::time::sleep(dice.span(Duration::from_millis(400))).await;
    proxy.heal();
    tokio::time::sleep(dice.span(Duration::from_millis(300))).await;
}

/// Connects however long it takes: the network may be down when a process starts.
fn patiently() -> Connect {
    Arc::new(|url| {
        Box::pin(async move {
            loop {
                match connect(&url).await {
                    Err(error) if error.kind() == ErrorKind::Unavailable => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    outcome => return outcome,
                }
            }
        })
    })
}

/// Not a test: the inside of the processes that the test below starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "only for the processes of the torture"]
async fn a_worker_process() {
    torture::work(patiently()).await.unwrap();
}

fn plan(url: String, usually: &str) -> Plan {
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| usually.to_owned());
    let mut plan = Plan::new(url);
    plan.lasts = parse_duration(&lasts).unwrap();
    plan.kill = true;
    println!("seed {}", plan.seed);
    plan
}

fn processes() -> Workers {
    let mut worker = vec![std::env::current_exe().unwrap().into_os_string()];
    worker.extend(["--ignored", "--exact", "a_worker_process", "--nocapture"].map(OsString::from));
    Workers::Processes(worker)
}

fn good(server: &RedisServer, verdict: &Verdict) {
    assert!(verdict.grants > 100 && verdict.kills > 0, "{verdict}");
    for (key, life) in server.keys() {
        assert!(life > 0, "{key} has no end");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_when_processes_are_killed() {
    let server = RedisServer::start();
    let verdict = torture::run(&plan(server.url(), "5s"), processes(), |_| {}).await.unwrap();
    println!("{verdict}");
    assert!(verdict.ok, "{verdict}");
    good(&server, &verdict);
}

/// All but one: whose connection is broken at the very moment of its turn is passed over, and has its place back afterwards.
/// What was recorded does not tell that from overtaking.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_behind_a_bad_network() {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let mut plan = plan(format!("{}?timeout=500ms", proxy.redis_url()), "8s");
    plan.excuse = |violation| violation.kind == Kind::Order;
    let quiet = Instant::now() + plan.lasts - Duration::from_secs(1);
    let work = torture::run(&plan, processes(), |_| {});
    let network = async {
        let (mut dice, mut troubles) = (Rng::new(plan.seed), 0);
        // Whoever watches it all has connected by then.
        tokio::time::sleep(Duration::from_millis(500)).await;
        while Instant::now() < quiet {
            trouble(&proxy, &mut dice).await;
            troubles += 1;
        }
        troubles
    };
    let (verdict, troubles) = tokio::join!(work, network);
    let verdict = verdict.unwrap();
    println!("{verdict}\n{troubles} troubles, {} connections", proxy.connections());
    assert!(verdict.ok, "{:#?}\n{verdict}", verdict.violations);
    good(&server, &verdict);
}
