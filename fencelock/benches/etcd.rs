//! The etcd engine beside the raw requests that a lock needs, in one run: `cargo bench -p fencelock --features etcd --bench etcd`.
//!
//! Starts a server of its own on loopback. Prints ratios, since the times themselves are the machine's.

#![allow(dead_code, reason = "the messages of the engine, of which a few are used")]

#[path = "../src/engine/etcd/proto.rs"]
mod proto;

use fencelock_testkit::etcd::EtcdCluster;
use fencelock_testkit::measure::{self, Latency, median, times};
use proto::{
    BY_CREATION, CREATE, Compare, DESCEND, DeleteRangeRequest, LeaseGrantRequest, LeaseGrantResponse, Op, PutRequest,
    RangeRequest, RequestOp, TxnRequest, TxnResponse, WatchCreateRequest, WatchOrder, WatchRequest, WatchResponse,
};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

const SPAN: Duration = Duration::from_secs(3);
const ROUNDS: usize = 9;

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("peer") => peer(&args[2], &args[3], args[4].parse().expect("a number of tasks")).await,
        _ => compare().await,
    }
}

async fn peer(url: &str, name: &str, tasks: usize) {
    let client = fencelock::connect(url).await.expect("the server is there");
    measure::peer(&client, name, tasks, SPAN).await.expect("the lock works");
    client.close().await.expect("closing works");
}

async fn compare() {
    let cluster = EtcdCluster::start(1);
    let url = cluster.url();
    println!("uncontended acquire + release, distinct names, pairs per second (raw: the same two transactions)");
    println!("(medians of {ROUNDS} rounds in turns; the ratios are medians of the rounds' own)");
    for tasks in [1, 64] {
        let (mut ours, mut raw) = (Vec::new(), Vec::new());
        // In turns, so that a busy moment of the machine hits both. The names differ: deleted keys cost something until the server
        // compacts its history.
        for round in 0..ROUNDS {
            ours.push(measure::our_rate(&url, &format!("bench:{round}:"), tasks, SPAN / 4).await);
            raw.push(raw_pairs(cluster.port(), &format!("raw:{round}:"), tasks).await);
        }
        let (shown, beside, times) = (median(&ours), median(&raw), times(&raw, &ours));
        println!("  {tasks:>4} tasks   fencelock {shown:>8.0}   raw {beside:>8.0}   raw / fencelock {times:.2}");
    }
    println!("\nhand-over between two processes, p50 (raw: from a delete to its watch event)");
    let count = |what: &str| cluster.first().metric(what).unwrap_or(0.0);
    let events = || count("etcd_debugging_mvcc_events_total");
    // Each release is a delete.
    let releases = || count("etcd_debugging_mvcc_delete_total");
    let mut raw = Vec::new();
    let mut lines = [("fencelock", "1", Vec::new(), 0.0), ("fencelock, 1,000 in line", "500", Vec::new(), 0.0)];
    for round in 0..ROUNDS {
        raw.push(raw_round(cluster.port()).await);
        for (_, tasks, latencies, told) in &mut lines {
            let before = (events(), releases());
            latencies.push(hand_over(&url, &format!("hand-over:{round}:{tasks}"), tasks).p50_us);
            *told = (events() - before.0) / (releases() - before.1).max(1.0);
        }
    }
    println!("  raw                               {:>8.1} µs", median(&raw));
    for (what, _, latencies, told) in &lines {
        let (p50, times) = (median(latencies), times(latencies, &raw));
        println!("  {what:<33} {p50:>8.1} µs   {times:.2} times   {told:.2} notifications for each release");
    }
}

async fn channel(port: u16) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).expect("an address");
    endpoint.tcp_nodelay(true).connect().await.expect("the server is there")
}

async fn txn(channel: &Channel, request: TxnRequest) -> TxnResponse {
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.expect("connected");
    let codec = ProstCodec::<TxnRequest, TxnResponse>::default();
    let path = PathAndQuery::from_static("/etcdserverpb.KV/Txn");
    grpc.unary(Request::new(request), path, codec).await.expect("it works").into_inner()
}

async fn lease(channel: &Channel) -> i64 {
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.expect("connected");
    let codec = ProstCodec::<LeaseGrantRequest, LeaseGrantResponse>::default();
    let path = PathAndQuery::from_static("/etcdserverpb.Lease/LeaseGrant");
    let request = Request::new(LeaseGrantRequest { ttl: 60 });
    grpc.unary(request, path, codec).await.expect("it works").into_inner().id
}

fn op(request: Op) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn created(key: &str, revision: i64) -> Compare {
    let (key, create_revision) = (key.as_bytes().to_vec(), Some(revision));
    Compare { target: CREATE, key, create_revision, ..Compare::default() }
}

/// What Go's `concurrency` package sends for a mutex: put and look in one transaction.
fn lock(line: &str, key: &str, lease: i64) -> TxnRequest {
    let put = PutRequest { key: key.into(), value: b"somebody".to_vec(), lease };
    let mut end = line.as_bytes().to_vec();
    *end.last_mut().expect("not empty") += 1;
    let look = RangeRequest {
        key: line.into(),
        range_end: end,
        limit: 2,
        sort_order: DESCEND,
        sort_target: BY_CREATION,
        ..RangeRequest::default()
    };
    TxnRequest {
        compare: vec![created(key, 0)],
        success: vec![op(Op::Put(put)), op(Op::Range(look))],
        failure: Vec::new(),
    }
}

fn unlock(key: &str, revision: i64) -> TxnRequest {
    let delete = DeleteRangeRequest { key: key.into(), range_end: Vec::new() };
    TxnRequest { compare: vec![created(key, revision)], success: vec![op(Op::Delete(delete))], failure: Vec::new() }
}

async fn raw_pairs(port: u16, prefix: &str, tasks: usize) -> f64 {
    let prefix = prefix.to_owned();
    let channel = channel(port).await;
    let lease = lease(&channel).await;
    let count = Arc::new(AtomicU64::new(0));
    measure::rate(tasks, SPAN / 4, move |task| {
        let (channel, prefix) = (channel.clone(), prefix.clone());
        let count = count.fetch_add(1, Ordering::Relaxed);
        async move {
            let line = format!("{prefix}{task}/");
            let key = format!("{line}{count:032x}");
            let revision = txn(&channel, lock(&line, &key, lease)).await.header.map_or(0, |header| header.revision);
            txn(&channel, unlock(&key, revision)).await;
        }
    })
    .await
}

/// From sending a delete to its event at a watcher on another connection: what a hand-over must at least cost.
async fn raw_round(port: u16) -> f64 {
    let (deleter, watcher) = (channel(port).await, channel(port).await);
    let (orders, mut taken) = tokio::sync::mpsc::unbounded_channel();
    let watch = WatchCreateRequest {
        key: b"round/".to_vec(),
        range_end: b"round0".to_vec(),
        filters: vec![0],
        ..WatchCreateRequest::default()
    };
    orders.send(WatchRequest { request_union: Some(WatchOrder::Create(watch)) }).expect("open");
    let mut grpc = Grpc::new(watcher);
    grpc.ready().await.expect("connected");
    let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
    let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
    let requests = Request::new(futures_util::stream::poll_fn(move |context| taken.poll_recv(context)));
    let mut stream = grpc.streaming(requests, path, codec).await.expect("it works").into_inner();
    assert!(stream.message().await.expect("it works").is_some_and(|answer| answer.created));
    let mut latencies = measure::histogram();
    let start = Instant::now();
    let mut round = 0;
    while start.elapsed() < SPAN / 4 {
        round += 1;
        let key = format!("round/{round}");
        let revision = txn(&deleter, lock("round/", &key, 0)).await.header.map_or(0, |header| header.revision);
        // As in the measurement of hand-overs, the machine is idle in between.
        tokio::time::sleep(Duration::from_micros(300)).await;
        let sent = Instant::now();
        let (_, ()) = tokio::join!(txn(&deleter, unlock(&key, revision)), async {
            while stream.message().await.expect("it works").is_some_and(|answer| answer.events.is_empty()) {}
            latencies.saturating_record(u64::try_from(sent.elapsed().as_nanos()).unwrap_or(u64::MAX));
        });
    }
    Latency::of(&latencies).p50_us
}

fn hand_over(url: &str, name: &str, tasks: &str) -> Latency {
    let program = std::env::current_exe().expect("this program");
    measure::hand_overs(|_| {
        let mut command = Command::new(&program);
        command.args(["peer", url, name, tasks]);
        command
    })
    .expect("both processes ran")
}
