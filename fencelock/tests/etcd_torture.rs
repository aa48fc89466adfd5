//! Processes hammer a cluster of three etcd servers and are killed now and then, or the servers are: a follower first, then the
//! leader, again and again. Every promise is kept.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features etcd --test etcd_torture -- --nocapture`.

#![cfg(feature = "etcd")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::parse_duration;
use fencelock_testkit::etcd::EtcdCluster;
use fencelock_testkit::torture::{self, Plan, Workers};
use std::ffi::OsString;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Not a test: the inside of the processes that the tests below start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "only for the processes of the torture"]
async fn a_worker_process() {
    torture::work(torture::by_url()).await.unwrap();
}

fn processes() -> Workers {
    let mut worker = vec![std::env::current_exe().unwrap().into_os_string()];
    worker.extend(["--ignored", "--exact", "a_worker_process", "--nocapture"].map(OsString::from));
    Workers::Processes(worker)
}

/// Kills a follower, and then the leader every time, until it is told to end. Returns the cluster and how often it killed.
fn kill_servers(mut cluster: EtcdCluster, every: Duration, end: &mpsc::Receiver<()>) -> (EtcdCluster, u32) {
    let mut kills = 0;
    let mut next = Instant::now() + every / 3;
    while end.recv_timeout(next.saturating_duration_since(Instant::now())) == Err(RecvTimeoutError::Timeout) {
        next += every;
        let leader = cluster.wait_for_leader();
        let victim = if kills == 0 { (leader + 1) % 3 } else { leader };
        cluster.server(victim).kill();
        // It is away until the others have a leader and go on without it.
        cluster.wait_for_leader();
        cluster.server(victim).start_again();
        cluster.wait_until_well();
        kills += 1;
    }
    (cluster, kills)
}

fn plan(url: String, usually: &str) -> Plan {
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| usually.to_owned());
    let mut plan = Plan::new(url);
    plan.lasts = parse_duration(&lasts).unwrap();
    println!("seed {}", plan.seed);
    plan
}

/// No entry of any lock.
fn nothing_is_left(cluster: &EtcdCluster) {
    let entries = cluster.entries();
    assert!(entries.is_empty(), "{entries:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_when_processes_are_killed() {
    let cluster = EtcdCluster::start(3);
    let mut plan = plan(cluster.url(), "8s");
    plan.kill = true;
    let verdict = torture::run(&plan, processes(), |_| {}).await.unwrap();
    println!("{verdict}");
    assert!(verdict.ok && verdict.grants > 5 && verdict.kills > 0, "{verdict}");
    nothing_is_left(&cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_when_leaders_are_killed() {
    let cluster = EtcdCluster::start(3);
    let mut plan = plan(format!("{}?patience=20s", cluster.url()), "15s");
    // Nobody can do anything while a new leader is elected, which takes seconds on a busy machine: leases and patience are
    // longer than that.
    plan.ttl = Duration::from_secs(12);
    plan.patience = Duration::from_secs(60);
    let every = (plan.lasts / 2).min(Duration::from_secs(10));
    let (end, ends) = mpsc::channel();
    let killer = std::thread::spawn(move || kill_servers(cluster, every, &ends));
    let verdict = torture::run(&plan, processes(), |_| {}).await.unwrap();
    end.send(()).unwrap();
    let (cluster, kills) = tokio::task::spawn_blocking(move || killer.join().unwrap()).await.unwrap();
    println!("{verdict}\n{kills} servers were killed");
    assert!(verdict.ok, "{verdict}");
    assert!(verdict.grants > 100 && kills > 1, "{verdict}, {kills} servers were killed");
    nothing_is_left(&cluster);
}
