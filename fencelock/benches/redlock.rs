//! Redlock over five nodes beside rslock over the same nodes, in one run:
//! `cargo bench -p fencelock --features redlock --bench redlock`.
//!
//! Starts five servers of its own on loopback. Prints ratios, since the times themselves are the machine's.

use fencelock_testkit::measure;
use fencelock_testkit::redlock::Nodes;
use std::collections::BTreeMap;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SPAN: Duration = Duration::from_secs(3);
const PROCESSES: usize = 20;

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("contend") => contend(&args[2]).await,
        Some("contend-rslock") => contend_rslock(&args[2]).await,
        _ => compare().await,
    }
}

async fn compare() {
    let nodes = Nodes::start(5);
    println!("uncontended acquire + release, 5 nodes, distinct names, pairs per second");
    for tasks in [1, 64, 512] {
        let client = nodes.client().await;
        let ours = measure::pairs(&client, "bench:", tasks, SPAN).await.expect("the lock works");
        client.close().await.expect("closing works");
        let rslock = rslock_pairs(&nodes, tasks).await;
        println!(
            "  {tasks:>4} tasks   fencelock {:>8.0} (acquire p50 {:.0} µs)   rslock {rslock:>8.0}   {:.2} times",
            ours.per_second,
            ours.acquire.p50_us,
            ours.per_second / rslock
        );
    }
    one_stopped(&nodes).await;
    let ours = contention(&nodes, "contend");
    let rslock = contention(&nodes, "contend-rslock");
    println!("\n{PROCESSES} processes and one name, hand-overs per second");
    for (what, counts) in [("fencelock", &ours), ("rslock", &rslock)] {
        println!(
            "  {what:<10} {:>7.1}   least {} and most {} per process",
            rate(counts),
            counts.iter().min().unwrap_or(&0),
            counts.iter().max().unwrap_or(&0)
        );
    }
    println!("  {:.1} times", rate(&ours) / rate(&rslock));
}

/// The same with a node that does not answer any more.
async fn one_stopped(nodes: &Nodes) {
    let client = nodes.client().await;
    let all = measure::pairs(&client, "stop:", 1, SPAN).await.expect("the lock works").acquire;
    nodes.servers[4].freeze();
    let four = measure::pairs(&client, "stop:", 1, SPAN).await.expect("the lock works").acquire;
    nodes.servers[4].thaw();
    println!("\none of the five nodes stopped, one task, acquire");
    println!("  all five   p50 {:>6.0} µs   p99 {:>6.0} µs   p99.9 {:>6.0} µs", all.p50_us, all.p99_us, all.p999_us);
    println!("  four       p50 {:>6.0} µs   p99 {:>6.0} µs   p99.9 {:>6.0} µs", four.p50_us, four.p99_us, four.p999_us);
    println!("  p50 {:+.0} %", (four.p50_us / all.p50_us - 1.0) * 100.0);
    client.close().await.expect("closing works");
}

async fn rslock_pairs(nodes: &Nodes, tasks: usize) -> f64 {
    let manager = rslock::LockManager::new(nodes.urls());
    let start = Instant::now();
    let workers: Vec<_> = (0..tasks)
        .map(|task| {
            let manager = manager.clone();
            tokio::spawn(async move {
                let name = format!("rslock:{task}");
                let mut count = 0_u32;
                while start.elapsed() < SPAN {
                    let lock = manager.lock(name.as_bytes(), Duration::from_secs(30)).await.expect("free");
                    manager.unlock(&lock).await;
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut total = 0.0;
    for worker in workers {
        total += f64::from(worker.await.expect("a worker does not panic"));
    }
    total / start.elapsed().as_secs_f64()
}

fn rate(counts: &[u32]) -> f64 {
    f64::from(counts.iter().sum::<u32>()) / (SPAN * 2).as_secs_f64()
}

/// How often each of the processes held the lock.
fn contention(nodes: &Nodes, part: &str) -> Vec<u32> {
    let program = std::env::current_exe().expect("this program");
    let url = if part == "contend" { nodes.url() } else { nodes.urls().join(",") };
    let children: Vec<_> = (0..PROCESSES)
        .map(|_| {
            let mut command = Command::new(&program);
            command.args([part, &url]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process")
        })
        .collect();
    let mut counts = BTreeMap::new();
    for (index, mut child) in children.into_iter().enumerate() {
        let mut text = String::new();
        child.stdout.take().expect("piped").read_to_string(&mut text).expect("readable");
        assert!(child.wait().expect("a child").success(), "a process failed");
        counts.insert(index, text.trim().parse().expect("a number"));
    }
    counts.into_values().collect()
}

async fn contend(url: &str) {
    let client = fencelock::connect(url).await.expect("the nodes are there");
    let mutex = client.mutex("contended").ttl(Duration::from_secs(10));
    // The first one is for everybody to be there.
    mutex.acquire().await.expect("the lock works").release().await.expect("released");
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < SPAN * 2 {
        let left = (SPAN * 2).saturating_sub(start.elapsed());
        match mutex.acquire_timeout(left).await {
            Ok(guard) => guard.release().await.expect("released"),
            Err(error) if error.kind() == fencelock::ErrorKind::Timeout => break,
            Err(error) => panic!("{error}"),
        }
        count += 1;
    }
    client.close().await.expect("closing works");
    println!("{count}");
}

async fn contend_rslock(urls: &str) {
    let manager = rslock::LockManager::new(urls.split(',').map(str::to_owned).collect::<Vec<_>>());
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < SPAN * 2 {
        // It gives up after three attempts; then it is asked again.
        if let Ok(lock) = manager.lock(b"contended-rslock", Duration::from_secs(10)).await {
            manager.unlock(&lock).await;
            count += 1;
        }
    }
    println!("{count}");
}
