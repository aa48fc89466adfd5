//! Redlock over five nodes beside rslock over the same nodes, in one run:
//! `cargo bench -p fencelock --features redlock --bench redlock`.
//!
//! Starts five servers of its own on loopback. Prints ratios, since the times themselves are the machine's.

use fencelock::Clock;
use fencelock_testkit::measure::{self, Latency, median, middle_half, times};
use fencelock_testkit::redlock::Nodes;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Many short rounds, so that a busy moment of the machine hits few of them.
const SPAN: Duration = Duration::from_millis(500);
const ROUNDS: usize = 15;
const PROCESSES: usize = 20;
/// Processes have to come to life first.
const CONTENTION_SPAN: Duration = Duration::from_secs(6);
const CONTENTION_ROUNDS: usize = 3;

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
    println!(
        "uncontended acquire + release, 5 nodes, distinct names, pairs per second, medians of {ROUNDS} rounds in turns"
    );
    for tasks in [1, 64, 512] {
        let (mut ours, mut rslock) = (Vec::new(), Vec::new());
        // In turns, so that a busy moment of the machine hits both.
        for _ in 0..ROUNDS {
            ours.push(measure::our_rate(&nodes.url(), "bench:", tasks, SPAN).await);
            rslock.push(rslock_pairs(&nodes, tasks).await);
        }
        let (low, high) = middle_half(&ours, &rslock);
        println!(
            "  {tasks:>4} tasks   fencelock {:>8.0}   rslock {:>8.0}   {:.2} times (half of the rounds {low:.2} to {high:.2})",
            median(&ours),
            median(&rslock),
            times(&ours, &rslock)
        );
    }
    one_stopped(&nodes).await;
    let (mut ours, mut rslock) = (Vec::new(), Vec::new());
    for _ in 0..CONTENTION_ROUNDS {
        ours.push(Contention::run(&nodes, "contend"));
        rslock.push(Contention::run(&nodes, "contend-rslock"));
    }
    println!("\n{PROCESSES} processes and one name, medians of {CONTENTION_ROUNDS} rounds in turns");
    let rates = |seen: &[Contention]| seen.iter().map(Contention::rate).collect::<Vec<_>>();
    for (what, seen) in [("fencelock", &ours), ("rslock", &rslock)] {
        let counts = || seen.iter().flat_map(|seen| &seen.counts);
        let (least, most) = (counts().min().unwrap_or(&0), counts().max().unwrap_or(&0));
        let rate = median(&rates(seen));
        println!("  {what:<10} {rate:>7.1} hand-overs per second   held {least} to {most} times per process and round");
    }
    println!("  {:.1} times", times(&rates(&ours), &rates(&rslock)));
}

/// The same with a node that does not answer any more.
async fn one_stopped(nodes: &Nodes) {
    let client = nodes.client().await;
    let (mut all, mut four) = (Vec::new(), Vec::new());
    // In turns, so that a busy moment of the machine hits both.
    for _ in 0..ROUNDS {
        all.push(measure::pairs(&client, "stop:", 1, SPAN).await.expect("the lock works").acquire);
        nodes.servers[4].freeze();
        four.push(measure::pairs(&client, "stop:", 1, SPAN).await.expect("the lock works").acquire);
        nodes.servers[4].thaw();
    }
    println!("\none of the five nodes stopped, one task, acquire, medians of {ROUNDS} rounds");
    let of = |rounds: &[Latency], what: fn(&Latency) -> f64| median(&rounds.iter().map(what).collect::<Vec<_>>());
    let p50 = |rounds: &[Latency]| of(rounds, |latency| latency.p50_us);
    for (what, rounds) in [("all five", &all), ("four", &four)] {
        let (p99, p999) = (of(rounds, |latency| latency.p99_us), of(rounds, |latency| latency.p999_us));
        println!("  {what:<10} p50 {:>6.0} µs   p99 {p99:>6.0} µs   p99.9 {p999:>6.0} µs", p50(rounds));
    }
    println!("  p50 {:+.0} %", (p50(&four) / p50(&all) - 1.0) * 100.0);
    client.close().await.expect("closing works");
}

async fn rslock_pairs(nodes: &Nodes, tasks: usize) -> f64 {
    let manager = rslock::LockManager::new(nodes.urls());
    measure::rate(tasks, SPAN, move |task| {
        let manager = manager.clone();
        async move {
            let name = format!("rslock:{task}");
            let lock = manager.lock(name.as_bytes(), Duration::from_secs(30)).await.expect("free");
            manager.unlock(&lock).await;
        }
    })
    .await
}

/// What many processes saw that wanted one lock.
struct Contention {
    /// How often each of them held it.
    counts: Vec<usize>,
    /// How often it went from one to another.
    hand_overs: u32,
}

impl Contention {
    fn run(nodes: &Nodes, part: &str) -> Self {
        let program = std::env::current_exe().expect("this program");
        let url = if part == "contend" { nodes.url() } else { nodes.urls().join(",") };
        let children: Vec<_> = (0..PROCESSES)
            .map(|_| {
                let mut command = Command::new(&program);
                command.args([part, &url]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process")
            })
            .collect();
        let (mut counts, mut grants) = (Vec::new(), Vec::new());
        for (index, mut child) in children.into_iter().enumerate() {
            let mut text = String::new();
            child.stdout.take().expect("piped").read_to_string(&mut text).expect("readable");
            assert!(child.wait().expect("a child").success(), "a process failed");
            counts.push(text.lines().count());
            grants.extend(text.lines().map(|at| (at.parse::<u64>().expect("a time"), index)));
        }
        grants.sort_unstable();
        let hand_overs = grants.windows(2).map(|pair| u32::from(pair[0].1 != pair[1].1)).sum();
        Self { counts, hand_overs }
    }

    fn rate(&self) -> f64 {
        f64::from(self.hand_overs) / CONTENTION_SPAN.as_secs_f64()
    }
}

/// Tells when the lock was held.
fn print_grants(grants: &[u64]) {
    for at in grants {
        println!("{at}");
    }
}

async fn contend(url: &str) {
    let client = fencelock::connect(url).await.expect("the nodes are there");
    let mutex = client.mutex("contended").ttl(Duration::from_secs(10));
    // The first one is for everybody to be there.
    mutex.acquire().await.expect("the lock works").release().await.expect("released");
    let (start, mut grants) = (Instant::now(), Vec::new());
    while start.elapsed() < CONTENTION_SPAN {
        let left = CONTENTION_SPAN.saturating_sub(start.elapsed());
        match mutex.acquire_timeout(left).await {
            Ok(guard) => {
                grants.push(Clock::Boot.now().as_nanos());
                guard.release().await.expect("released");
            }
            Err(error) if error.kind() == fencelock::ErrorKind::Timeout => break,
            Err(error) => panic!("{error}"),
        }
    }
    client.close().await.expect("closing works");
    print_grants(&grants);
}

async fn contend_rslock(urls: &str) {
    let manager = rslock::LockManager::new(urls.split(',').map(str::to_owned).collect::<Vec<_>>());
    let (start, mut grants) = (Instant::now(), Vec::new());
    while start.elapsed() < CONTENTION_SPAN {
        // It gives up after three attempts; then it is asked again.
        if let Ok(lock) = manager.lock(b"contended-rslock", Duration::from_secs(10)).await {
            grants.push(Clock::Boot.now().as_nanos());
            manager.unlock(&lock).await;
        }
    }
    print_grants(&grants);
}
