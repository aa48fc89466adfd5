//! Processes hammer Redlock while two of its five nodes at a time are killed and come back empty. With the default settings every promise
//! is kept; without quarantine two hold at the same time, which shows that this test can see it.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features redlock --test redlock_torture -- --nocapture`.

#![cfg(feature = "redlock")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::{Client, connect, parse_duration};
use fencelock_testkit::history::Kind;
use fencelock_testkit::redlock::{Nodes, url};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::torture::{self, Plan, Verdict, Workers};
use std::ffi::OsString;
use std::time::{Duration, Instant};

/// The lease, and the longest one: so long is a node out that came back.
const TTL: Duration = Duration::from_secs(2);

/// Not a test: the inside of the processes that the test below starts.
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

fn plan(url: String) -> Plan {
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| "12s".to_owned());
    let mut plan = Plan::new(url);
    plan.lasts = parse_duration(&lasts).unwrap();
    plan.ttl = TTL;
    println!("seed {}", plan.seed);
    plan
}

/// Kills two nodes and starts them again without their data; then the next two, when the first ones may vote again.
async fn forgetful(nodes: &mut Nodes, until: Instant) -> u32 {
    let (mut kills, mut next) = (0, 0);
    tokio::time::sleep(Duration::from_millis(500)).await;
    while Instant::now() + TTL * 2 < until {
        for step in 0..2 {
            let node = (next + step) % nodes.servers.len();
            nodes.servers[node].kill();
            nodes.servers[node].start_again();
            kills += 1;
        }
        next += 2;
        // Uptime comes in whole seconds.
        tokio::time::sleep(TTL + Duration::from_millis(2500)).await;
    }
    kills
}

async fn torture(kill: bool) -> (Verdict, u32) {
    let mut nodes = Nodes::start(5);
    let mut plan = plan(format!("{}?max_ttl=2s&ttl=2s", nodes.url()));
    plan.kill = kill;
    // The first client founds the set of nodes.
    let founder = connect(&plan.url).await.unwrap();
    let until = Instant::now() + plan.lasts;
    let (verdict, kills) = tokio::join!(torture::run(&plan, processes(), |_| {}), forgetful(&mut nodes, until));
    drop(founder);
    (verdict.unwrap(), kills)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_while_nodes_come_back_empty() {
    let (verdict, kills) = torture(true).await;
    println!("{verdict}\n{kills} nodes came back empty");
    assert!(verdict.ok, "{verdict}");
    assert!(verdict.grants > 100 && kills >= 2, "{verdict}");
}

/// A client that reaches only these nodes.
async fn reaching(proxies: &[Proxy], which: &[usize], options: &str) -> Client {
    let ports: Vec<u16> = proxies.iter().map(Proxy::port).collect();
    let client = connect(format!("{}?{options}", url(&ports))).await.unwrap();
    client.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
    for (index, proxy) in proxies.iter().enumerate().filter(|(index, _)| !which.contains(index)) {
        proxy.refuse();
        proxy.cut();
        assert!(index < 5);
    }
    client
}

/// How often two held at the same time, while one after another of the nodes that both reach comes back empty.
async fn double_holds(options: &str, rounds: u32) -> u32 {
    let mut nodes = Nodes::start(5);
    let mut seen = 0;
    for _ in 0..rounds {
        let left: Vec<Proxy> = nodes.servers.iter().map(|server| Proxy::to(server.port())).collect();
        let right: Vec<Proxy> = nodes.servers.iter().map(|server| Proxy::to(server.port())).collect();
        let one = reaching(&left, &[0, 1, 2], options).await;
        let two = reaching(&right, &[2, 3, 4], options).await;
        let name = "torn";
        let first = tokio::time::timeout(Duration::from_secs(10), one.mutex(name).ttl(TTL).acquire()).await;
        let Ok(Ok(first)) = first else { continue };
        nodes.servers[2].kill();
        nodes.servers[2].start_again();
        let second = two.mutex(name).ttl(TTL).acquire_timeout(Duration::from_secs(1)).await;
        if let Ok(second) = second {
            let both = first.is_valid() && second.is_valid();
            assert!(!both || second.token() > first.token(), "tokens grow all the same");
            seen += u32::from(both);
        }
        drop(first);
        tokio::time::sleep(TTL * 2).await;
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_quarantine_two_holders_are_seen_and_with_it_none() {
    let off = double_holds("max_ttl=2s&ttl=2s&quarantine=off&patience=1s", 2).await;
    assert!(off > 0, "the test sees what happens without protection");
    assert_eq!(double_holds("max_ttl=2s&ttl=2s&patience=1s", 2).await, 0);
    assert!(Kind::Exclusion < Kind::Failed);
}
