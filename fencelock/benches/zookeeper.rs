//! The ZooKeeper engine beside the raw requests that a lock needs, in one run:
//! `cargo bench -p fencelock --features zookeeper --bench zookeeper`.
//!
//! Starts a server of its own on loopback. Prints ratios, since the times themselves are the machine's.

use fencelock_testkit::measure::{self, Latency, median, times};
use fencelock_testkit::zookeeper::ZooKeeper;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zookeeper_client::{Acls, Client, CreateMode};

const SPAN: Duration = Duration::from_secs(3);
const ROUNDS: usize = 9;

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("peer") => peer(&args[2], args[3].parse().expect("a number of tasks")).await,
        _ => compare().await,
    }
}

async fn peer(url: &str, tasks: usize) {
    let client = fencelock::connect(url).await.expect("the server is there");
    measure::peer(&client, "hand-over", tasks, SPAN).await.expect("the lock works");
    client.close().await.expect("closing works");
}

async fn compare() {
    let server = ZooKeeper::start();
    let url = server.url();
    warm_up(&server).await;
    println!("uncontended acquire + release, distinct names, pairs per second");
    println!("(medians of {ROUNDS} rounds in turns; the ratios are medians of the rounds' own)");
    for tasks in [1, 64] {
        let (mut ours, mut raw, mut recipe) = (Vec::new(), Vec::new(), Vec::new());
        // In turns, so that a busy moment of the machine hits all, and since the server gets faster with time.
        for _ in 0..ROUNDS {
            ours.push(measure::our_rate(&url, "bench:", tasks, SPAN / 4).await);
            raw.push(raw_pairs(&server, tasks, false).await);
            recipe.push(raw_pairs(&server, tasks, true).await);
        }
        println!("  {tasks:>4} tasks   fencelock            {:>7.0}", median(&ours));
        for (what, raw) in [("raw create, delete       ", &raw), ("raw create + list, delete", &recipe)] {
            println!("       {what}     {:>7.0}   raw / fencelock {:.2}", median(raw), times(raw, &ours));
        }
    }
    println!("\nhand-over between two processes, p50");
    let mut raw = Vec::new();
    let mut lines = [("fencelock", 1, Vec::new(), 0.0), ("fencelock, 1,000 in line", 500, Vec::new(), 0.0)];
    for _ in 0..ROUNDS {
        raw.push(raw_hand_over(&server).await);
        for (_, tasks, latencies, each) in &mut lines {
            let before = notifications(&server);
            let latency = hand_over(&url, *tasks);
            // Of many, each has one turn; two alternate.
            let releases = if *tasks > 1 { 2 * *tasks - 1 } else { latency.count.max(1) };
            #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
            let told = (notifications(&server) - before) as f64 / releases as f64;
            *each = told;
            latencies.push(latency.p50_us);
        }
    }
    println!("  raw delete to watch event         {:>8.1} µs", median(&raw));
    for (what, _, latencies, each) in &lines {
        let (p50, times) = (median(latencies), times(latencies, &raw));
        println!("  {what:<33} {p50:>8.1} µs   {times:.2} times   {each:.2} notifications for each release");
    }
}

/// The Java machine is slow for the first few thousand requests.
async fn warm_up(server: &ZooKeeper) {
    for _ in 0..3 {
        raw_pairs(server, 16, true).await;
    }
    let client = server.client().await;
    measure::pairs(&client, "warm-up:", 16, SPAN).await.expect("the lock works");
    client.close().await.expect("closing works");
}

/// How many watchers the server has told of a deletion.
fn notifications(server: &ZooKeeper) -> u64 {
    server.statistic("zk_sum_node_deleted_watch_count")
}

/// The two round trips that a lock needs at least, on one session; with the list that tells whether one is alone, or without.
async fn raw_pairs(server: &ZooKeeper, tasks: usize, list: bool) -> f64 {
    let client = Arc::new(server.plain().await);
    for task in 0..tasks {
        let open = CreateMode::Persistent.with_acls(Acls::anyone_all());
        let _ = client.create(&format!("/raw-{task}"), &[], &open).await;
    }
    measure::rate(tasks, SPAN / 4, move |task| {
        let client = Arc::clone(&client);
        async move {
            let dir = format!("/raw-{task}");
            let prefix = format!("{dir}/_c_2f0a4d4b-6a0e-4b55-a6a4-0e6d0b1b2c3d-lock-");
            let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
            let creating = client.create(&prefix, b"holder", &options);
            let listing = list.then(|| client.list_children(&dir));
            let (_, sequence) = creating.await.expect("created");
            if let Some(listing) = listing {
                assert_eq!(listing.await.expect("listed").len(), 1);
            }
            client.delete(&format!("{prefix}{sequence}"), None).await.expect("deleted");
        }
    })
    .await
}

/// From starting a deletion to the event at another client: what a hand-over must at least cost.
async fn raw_hand_over(server: &ZooKeeper) -> f64 {
    let (holder, waiter): (Client, Client) = (server.plain().await, server.plain().await);
    let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
    let mut latencies = measure::histogram();
    let start = Instant::now();
    while start.elapsed() < SPAN / 4 {
        holder.create("/raw-node", &[], &options).await.expect("created");
        waiter.sync("/raw-node").await.expect("the server answers");
        let (_, _, watcher) = waiter.get_and_watch_data("/raw-node").await.expect("it is there");
        // As in the measurement of hand-overs, the machine is idle in between.
        tokio::time::sleep(Duration::from_micros(300)).await;
        let sent = Instant::now();
        let (deleted, at) = tokio::join!(holder.delete("/raw-node", None), async {
            watcher.changed().await;
            sent.elapsed()
        });
        deleted.expect("deleted");
        latencies.saturating_record(u64::try_from(at.as_nanos()).unwrap_or(u64::MAX));
    }
    Latency::of(&latencies).p50_us
}

fn hand_over(url: &str, tasks: u64) -> Latency {
    let program = std::env::current_exe().expect("this program");
    measure::hand_overs(|_| {
        let mut command = Command::new(&program);
        command.args(["peer", url, &tasks.to_string()]);
        command
    })
    .expect("both processes ran")
}
