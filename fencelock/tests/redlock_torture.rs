//! Processes hammer Redlock while two of its five nodes at a time are killed and come back empty. With the default settings every promise
//! is kept; without quarantine two hold at the same time, which shows that this test can see it.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features redlock --test redlock_torture -- --nocapture`.

#![cfg(feature = "redlock")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::{connect, parse_duration};
use fencelock_testkit::history::Kind;
use fencelock_testkit::redlock::{Nodes, url};
use fencelock_testkit::torture::{self, Plan, Verdict, Workers};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The lease, and the longest one: so long is a node out that came back.
const TTL: Duration = Duration::from_secs(4);

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
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| "16s".to_owned());
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
    let mut plan = plan(format!("{}?max_ttl=4s&ttl=4s", nodes.url()));
    plan.kill = kill;
    // Who held on a bare majority, of which a node forgets, is told that it lost the lock: that is kept too.
    plan.excuse = |violation| matches!(violation.kind, Kind::Lost | Kind::Failed);
    // The first client founds the set of nodes.
    let founder = connect(&plan.url).await.unwrap();
    let until = Instant::now() + plan.lasts;
    let (verdict, kills) = tokio::join!(torture::run(&plan, processes(), |_| {}), forgetful(&mut nodes, until));
    drop(founder);
    (verdict.unwrap(), kills)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_promise_is_kept_while_nodes_come_back_empty() {
    let (verdict, kills) = torture(false).await;
    println!("{verdict}\n{kills} nodes came back empty");
    assert!(verdict.ok, "{:#?}\n{verdict}", verdict.violations);
    assert!(verdict.grants > 100 && kills >= 2, "{verdict}");
}

/// Half of the clients reach nodes 0, 1 and 2 only, the others 2, 3 and 4. Node 2, on which both depend, and one more are killed and
/// come back empty, again and again.
async fn torn(options: &str, pause: Duration) -> Verdict {
    let mut nodes = Nodes::start(5);
    let options = format!("max_ttl=6s&ttl=6s&patience=20s&{options}");
    let founder = connect(format!("{}?{options}", nodes.url())).await.unwrap();
    let mut plan = plan(format!("{}?{options}", nodes.url()));
    // Holds that outlast the restart of a node, and a lease that outlasts the hold.
    (plan.ttl, plan.hold) = (Duration::from_secs(6), Duration::from_secs(4));
    (plan.names, plan.workers, plan.processes) = (1, 1, 2);
    plan.lasts = plan.lasts.max(Duration::from_secs(24));
    let urls = [[0, 1, 2], [2, 3, 4]].map(|reached| {
        // Nobody listens on the ports of the others.
        let ports = nodes.servers.iter().enumerate().map(|(index, server)| {
            let nobody = u16::try_from(index).unwrap() + 1;
            if reached.contains(&index) { server.port() } else { nobody }
        });
        format!("{}?{options}", url(&ports.collect::<Vec<_>>()))
    });
    let next = Arc::new(AtomicUsize::new(0));
    let whole = plan.url.clone();
    let connect: torture::Connect = Arc::new(move |_| {
        // The first one is the observer, who sees all.
        let number = next.fetch_add(1, Ordering::SeqCst);
        let url = if number == 0 { whole.clone() } else { urls[number % 2].clone() };
        Box::pin(async move { connect(url).await })
    });
    let until = Instant::now() + plan.lasts;
    let faults = async {
        let mut other = 0;
        tokio::time::sleep(Duration::from_secs(1)).await;
        while Instant::now() + TTL < until {
            for node in [2, [0, 4][other % 2]] {
                nodes.servers[node].kill();
                nodes.servers[node].start_again();
            }
            other += 1;
            tokio::time::sleep(pause).await;
        }
    };
    let (verdict, ()) = tokio::join!(torture::run(&plan, Workers::Here(connect), |_| {}), faults);
    drop(founder);
    verdict.unwrap()
}

/// What must never be, whatever the nodes forget.
fn broken(verdict: &Verdict) -> bool {
    verdict.shows(Kind::Exclusion) || verdict.shows(Kind::Clash) || verdict.shows(Kind::Token)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_quarantine_nobody_meets_anybody_though_the_nodes_that_both_need_forget() {
    let verdict = torn("quarantine=auto", Duration::from_secs(9)).await;
    println!("{verdict}");
    assert!(!broken(&verdict), "{verdict}");
    assert!(verdict.grants > 2, "{verdict}");
}

/// The same faults without the protection. Nobody has to wait, so they come sooner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_quarantine_the_same_torture_sees_two_holders() {
    let verdict = torn("quarantine=off", Duration::from_secs(3)).await;
    println!("{verdict}");
    assert!(verdict.shows(Kind::Exclusion) || verdict.shows(Kind::Clash), "{verdict}");
    assert!(!verdict.shows(Kind::Token), "tokens grow all the same: {verdict}");
}
