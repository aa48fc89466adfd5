//! Processes hammer Redis while its master fails over, and the last writes are lost on the way. With the default settings nobody
//! holds twice; without quarantine two do, which shows that this test can see it.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features redis --test redis_ha_torture -- --nocapture`.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::{connect, parse_duration};
use fencelock_testkit::history::{Kind, Violation};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::redis::{MASTER, RedisCluster, RedisSentinels, deafen_replicas};
use fencelock_testkit::torture::{self, Plan, Verdict, Workers};
use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const TTL: Duration = Duration::from_secs(5);

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

fn plan(url: String) -> Plan {
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| "14s".to_owned());
    let mut plan = Plan::new(url);
    plan.lasts = parse_duration(&lasts).unwrap();
    plan.ttl = TTL;
    // A lock is held by somebody who stays for most of the time, so that many of those who hold when it happens still do afterwards.
    plan.hold = TTL * 3;
    // Fewer than three in each, so that no lock is for evictions only, whose holders stay for long.
    (plan.processes, plan.workers) = (8, 2);
    plan.names = 6;
    plan.excuse = must_be_borne;
    // Longer than all the others can hold, one after the other.
    plan.patience = Duration::from_secs(180);
    println!("seed {}", plan.seed);
    plan
}

/// What a failover that loses writes cannot spare its clients: who was forgotten lost the lock, or its place in line, or was told
/// that nobody serves.
fn must_be_borne(violation: &Violation) -> bool {
    matches!(violation.kind, Kind::Lost | Kind::Order | Kind::Failed)
}

fn saw_two_holders(verdict: &Verdict) -> bool {
    verdict.violations.iter().any(|violation| matches!(violation.kind, Kind::Exclusion | Kind::Clash))
}

/// Each failover loses what was written in the last moments before it. Every other client cannot reach the Sentinels while it
/// happens, and goes on believing in its locks.
async fn sentinel(options: &str) -> (Verdict, usize) {
    let mut sentinels = RedisSentinels::start();
    let proxies: Vec<Proxy> = sentinels.sentinels.iter().map(|sentinel| Proxy::to(sentinel.port())).collect();
    let options = format!("?ttl=5s&patience=20s&{options}");
    let far: Vec<String> = proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
    let urls = [sentinels.url(&options), format!("redis+sentinel://{}/{MASTER}{options}", far.join(","))];
    let plan = plan(urls[0].clone());
    let next = Arc::new(AtomicUsize::new(0));
    let connect: torture::Connect = Arc::new(move |_| {
        let url = urls[next.fetch_add(1, Ordering::SeqCst) % 2].clone();
        Box::pin(async move { connect(url).await })
    });
    let until = Instant::now() + plan.lasts;
    let faults = async {
        let mut failovers = 0;
        tokio::time::sleep(Duration::from_secs(2)).await;
        while Instant::now() + TTL < until {
            let old = sentinels.master();
            deafen_replicas(&sentinels.servers[old]);
            // Locks are taken and renewed meanwhile, and no replica hears of it.
            tokio::time::sleep(Duration::from_secs(3)).await;
            proxies.iter().for_each(Proxy::partition);
            sentinels.servers[old].kill();
            let new = tokio::task::block_in_place(|| sentinels.until_failover(old));
            failovers += 1;
            tokio::time::sleep(TTL).await;
            proxies.iter().for_each(Proxy::heal);
            // It comes back as a replica, for the next time.
            sentinels.servers[old].start_again();
            let ready = |sentinels: &RedisSentinels| {
                let info = sentinels.servers[new].try_ask::<String>(&["INFO", "replication"]);
                info.is_ok_and(|info| info.contains("connected_slaves:2"))
            };
            let patience = Instant::now() + Duration::from_secs(15);
            while !ready(&sentinels) && Instant::now() < patience {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            tokio::time::sleep(TTL).await;
        }
        failovers
    };
    let (verdict, failovers) = tokio::join!(torture::run(&plan, Workers::Here(connect), |_| {}), faults);
    (verdict.unwrap(), failovers)
}

async fn cluster(options: &str) -> (Verdict, usize) {
    let mut cluster = RedisCluster::start();
    let plan = plan(cluster.url(&format!("?ttl=5s&patience=20s&{options}")));
    let until = Instant::now() + plan.lasts;
    let faults = async {
        let mut failovers = 0;
        for shard in 0..3 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            if Instant::now() + TTL >= until {
                break;
            }
            deafen_replicas(&cluster.nodes[shard]);
            tokio::time::sleep(Duration::from_secs(3)).await;
            cluster.nodes[shard].kill();
            let promoted = |cluster: &RedisCluster| {
                let info = cluster.nodes[shard + 3].try_ask::<String>(&["INFO", "replication"]);
                info.is_ok_and(|info| info.contains("role:master"))
            };
            let patience = Instant::now() + Duration::from_secs(15);
            while !promoted(&cluster) && Instant::now() < patience {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            failovers += usize::from(promoted(&cluster));
            tokio::time::sleep(TTL * 2).await;
        }
        failovers
    };
    let (verdict, failovers) = tokio::join!(torture::run(&plan, processes(), |_| {}), faults);
    (verdict.unwrap(), failovers)
}

fn good(verdict: &Verdict, failovers: usize) {
    println!("{verdict}\n{failovers} failovers");
    // Holds are longer than leases, and nobody is granted anything in quarantine: in this time there are not many grants.
    assert!(failovers > 0 && verdict.grants > 20, "{verdict}");
    assert!(verdict.ok, "{:#?}\n{verdict}", verdict.violations);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_holds_twice_when_sentinels_fail_over() {
    let (verdict, failovers) = sentinel("quarantine=auto").await;
    good(&verdict, failovers);
}

/// It takes a lock that is held by somebody who is cut off and wanted by somebody who is not: nearly always there is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_quarantine_a_failover_is_seen_to_give_two_holders() {
    for _ in 0..4 {
        let (verdict, failovers) = sentinel("quarantine=off").await;
        println!("{verdict}\n{failovers} failovers");
        if failovers > 0 && saw_two_holders(&verdict) {
            return;
        }
    }
    panic!("the checker does not see what is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_holds_twice_when_a_shard_fails_over() {
    let (verdict, failovers) = cluster("quarantine=auto").await;
    good(&verdict, failovers);
}
