//! Processes hammer an ensemble of three while its servers are killed, a follower first and then leaders; every promise is kept.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features zookeeper --test zookeeper_torture -- --nocapture`.

#![cfg(feature = "zookeeper")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::{ErrorKind, connect, parse_duration};
use fencelock_testkit::history::Kind;
use fencelock_testkit::torture::{self, Connect, Plan, Workers};
use fencelock_testkit::wait::eventually;
use fencelock_testkit::zookeeper::ZooKeeper;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connects however long it takes: there may be no leader when a process starts.
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

fn processes() -> Workers {
    let mut worker = vec![std::env::current_exe().unwrap().into_os_string()];
    worker.extend(["--ignored", "--exact", "a_worker_process", "--nocapture"].map(OsString::from));
    Workers::Processes(worker)
}

/// Kills a server every ten seconds, and starts it again: a follower, then one leader after the other.
async fn trouble(mut servers: ZooKeeper, until: Instant, pause: Duration) -> (ZooKeeper, u32) {
    let mut kills = 0;
    let mut clock = tokio::time::interval(pause);
    clock.tick().await;
    loop {
        clock.tick().await;
        if Instant::now() > until {
            return (servers, kills);
        }
        servers = tokio::task::spawn_blocking(move || {
            let victim = if kills == 0 { servers.follower() } else { servers.leader() };
            servers.node(victim).kill();
            // Not until the other two have a leader: ZooKeeper's election between two can take a minute.
            std::thread::sleep(Duration::from_millis(500));
            servers.node(victim).start_again();
            servers
        })
        .await
        .unwrap();
        kills += 1;
    }
}

fn plan(url: String, usually: &str, ttl: Duration) -> Plan {
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| usually.to_owned());
    let mut plan = Plan::new(url);
    plan.lasts = parse_duration(&lasts).unwrap();
    plan.ttl = ttl;
    println!("seed {}", plan.seed);
    plan
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_when_servers_are_killed() {
    let servers = ZooKeeper::three();
    let mut plan = plan(format!("{}?timeout=10s", servers.url_below("/torture")), "15s", Duration::from_secs(6));
    // Whoever asks while its connection moves to another server may be told so; that breaks no promise.
    plan.excuse = |violation| violation.kind == Kind::Failed;
    // The last new leader is in office when the work ends.
    let quiet = Instant::now() + plan.lasts - Duration::from_secs(4);
    let pause = (plan.lasts / 6).min(Duration::from_secs(10));
    let (verdict, (servers, kills)) =
        tokio::join!(torture::run(&plan, processes(), |_| {}), trouble(servers, quiet, pause));
    let verdict = verdict.unwrap();
    println!("{verdict}\n{kills} servers killed");
    assert!(verdict.ok, "{:#?}\n{verdict}", verdict.violations);
    assert!(verdict.grants > 100 && kills >= 2, "{kills} servers killed: {verdict}");
    eventually("no entry is left", async || servers.ephemerals().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_when_processes_are_killed() {
    let server = ZooKeeper::start();
    let mut plan = plan(server.url_below("/torture"), "6s", Duration::from_secs(1));
    plan.kill = true;
    plan.names = 24;
    let verdict = torture::run(&plan, processes(), |_| {}).await.unwrap();
    println!("{verdict}");
    assert!(verdict.ok, "{verdict}");
    assert!(verdict.grants > 100 && verdict.kills > 0, "{verdict}");
    eventually("no entry is left", async || server.ephemerals().is_empty()).await;
}
