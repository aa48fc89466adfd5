//! The ZooKeeper engine beside the raw requests that a lock needs, in one run:
//! `cargo bench -p fencelock --features zookeeper --bench zookeeper`.
//!
//! Starts a server of its own on loopback. Prints ratios, since the times themselves are the machine's.

use fencelock_testkit::measure::{self, Latency};
use fencelock_testkit::zookeeper::ZooKeeper;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zookeeper_client::{Acls, Client, CreateMode};

const SPAN: Duration = Duration::from_secs(3);
const ROUNDS: u32 = 3;

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
    for tasks in [1, 64] {
        // Turn and turn about, since the server gets faster with time.
        let (mut ours, mut raw, mut recipe) = (Pairs::default(), Pairs::default(), Pairs::default());
        for _ in 0..ROUNDS {
            ours += our_pairs(&url, tasks).await;
            raw += raw_pairs(&server, tasks, false, SPAN).await;
            recipe += raw_pairs(&server, tasks, true, SPAN).await;
        }
        println!("  {tasks:>4} tasks   fencelock            {ours}");
        println!("       raw create, delete            {raw}   {}", ours.beside(&raw));
        println!("       raw create + list, delete     {recipe}   {}", ours.beside(&recipe));
    }
    println!("\nhand-over between two processes, p50");
    let raw = raw_hand_over(&server).await;
    println!("  raw delete to watch event         {raw:>8.1} µs");
    for (what, tasks) in [("fencelock", 1), ("fencelock, 1,000 in line", 500)] {
        let before = notifications(&server);
        let latency = hand_over(&url, tasks);
        // Of many, each has one turn; two alternate.
        let releases = if tasks > 1 { 2 * tasks - 1 } else { latency.count.max(1) };
        #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
        let each = (notifications(&server) - before) as f64 / releases as f64;
        println!(
            "  {what:<33} {:>8.1} µs   {:.2} times   {each:.2} notifications for each of {releases} releases",
            latency.p50_us,
            latency.p50_us / raw,
        );
    }
}

/// What several rounds of pairs have shown, added up.
#[derive(Default)]
struct Pairs {
    per_second: f64,
    p50_us: f64,
}

impl std::ops::AddAssign for Pairs {
    fn add_assign(&mut self, other: Self) {
        self.per_second += other.per_second;
        self.p50_us += other.p50_us;
    }
}

impl std::fmt::Display for Pairs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rounds = f64::from(ROUNDS);
        write!(f, "{:>7.0} per second, p50 of a pair {:>7.0} µs", self.per_second / rounds, self.p50_us / rounds)
    }
}

impl Pairs {
    fn beside(&self, raw: &Self) -> String {
        let (rate, p50) = (raw.per_second / self.per_second, self.p50_us / raw.p50_us);
        format!("{rate:.2} times as long, p50 {p50:.2} times")
    }
}

async fn our_pairs(url: &str, tasks: usize) -> Pairs {
    let client = fencelock::connect(url).await.expect("the server is there");
    let pairs = measure::pairs(&client, "bench:", tasks, SPAN).await.expect("the lock works");
    client.close().await.expect("closing works");
    Pairs { per_second: pairs.per_second, p50_us: pairs.acquire.p50_us + pairs.release.p50_us }
}

/// The Java machine is slow for the first few thousand requests.
async fn warm_up(server: &ZooKeeper) {
    raw_pairs(server, 16, true, SPAN).await;
    let client = server.client().await;
    measure::pairs(&client, "warm-up:", 16, SPAN).await.expect("the lock works");
    client.close().await.expect("closing works");
}

/// How many watchers the server has told of a deletion.
fn notifications(server: &ZooKeeper) -> u64 {
    server.statistic("zk_sum_node_deleted_watch_count")
}

/// The two round trips that a lock needs at least, on one session; with the list that tells whether one is alone, or without.
async fn raw_pairs(server: &ZooKeeper, tasks: usize, list: bool, span: Duration) -> Pairs {
    let client = Arc::new(server.plain().await);
    let start = Instant::now();
    let workers: Vec<_> = (0..tasks)
        .map(|task| {
            let client = Arc::clone(&client);
            tokio::spawn(async move {
                let dir = format!("/raw-{task}");
                let _ = client.create(&dir, &[], &CreateMode::Persistent.with_acls(Acls::anyone_all())).await;
                let prefix = format!("{dir}/_c_2f0a4d4b-6a0e-4b55-a6a4-0e6d0b1b2c3d-lock-");
                let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
                let mut latencies = measure::histogram();
                while start.elapsed() < span {
                    let asked = Instant::now();
                    let creating = client.create(&prefix, b"holder", &options);
                    let listing = list.then(|| client.list_children(&dir));
                    let (_, sequence) = creating.await.expect("created");
                    if let Some(listing) = listing {
                        assert_eq!(listing.await.expect("listed").len(), 1);
                    }
                    client.delete(&format!("{prefix}{sequence}"), None).await.expect("deleted");
                    latencies.saturating_record(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
                }
                latencies
            })
        })
        .collect();
    let mut all = measure::histogram();
    for worker in workers {
        all.add(worker.await.expect("a worker does not panic")).expect("the same bounds");
    }
    let latency = Latency::of(&all);
    #[expect(clippy::cast_precision_loss, reason = "a count of seconds' work fits")]
    let per_second = latency.count as f64 / start.elapsed().as_secs_f64();
    Pairs { per_second, p50_us: latency.p50_us }
}

/// From starting a deletion to the event at another client: what a hand-over must at least cost.
async fn raw_hand_over(server: &ZooKeeper) -> f64 {
    let (holder, waiter): (Client, Client) = (server.plain().await, server.plain().await);
    let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
    let mut latencies = measure::histogram();
    let start = Instant::now();
    while start.elapsed() < SPAN {
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
