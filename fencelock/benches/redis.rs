//! The Redis engine beside rslock and raw redis-rs, in one run: `cargo bench -p fencelock --features redis --bench redis`.
//!
//! Starts a server of its own on loopback. Prints ratios, since the times themselves are the machine's.

use fencelock_testkit::measure::{self, Latency, median, times};
use fencelock_testkit::redis::RedisServer;
use redis::aio::MultiplexedConnection;
use std::process::Command;
use std::time::{Duration, Instant};

const SPAN: Duration = Duration::from_secs(3);
const ROUND: Duration = Duration::from_secs(1);
const ROUNDS: usize = 7;
/// The common recipe's release.
const UNLOCK: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";

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
    let server = RedisServer::start();
    let url = server.url();
    println!("uncontended acquire + release, distinct names, pairs per second");
    println!("(medians of {ROUNDS} rounds in turns; the ratios are medians of the rounds' own)");
    for tasks in [1, 64, 512] {
        let (mut ours, mut raw, mut rslock) = (Vec::new(), Vec::new(), Vec::new());
        // In turns, so that a busy moment of the machine hits all.
        for _ in 0..ROUNDS {
            ours.push(measure::our_rate(&url, "bench:", tasks, ROUND).await);
            raw.push(raw_pairs(&url, tasks).await);
            rslock.push(rslock_pairs(&url, tasks).await);
        }
        println!(
            "  {tasks:>4} tasks   fencelock {:>8.0}   rslock {:>8.0} ({:.2} times)   raw SET + EVALSHA {:>8.0} ({:.2} times; {:.2} times its latency)",
            median(&ours),
            median(&rslock),
            times(&ours, &rslock),
            median(&raw),
            times(&ours, &raw),
            times(&raw, &ours)
        );
    }
    println!("\nhand-over between two processes, p50");
    let raw = raw_round(&url).await;
    println!("  raw script-publish to subscriber  {raw:>8.1} µs");
    for (what, tasks) in [("fencelock", "1"), ("fencelock, 1,000 in line", "500")] {
        // Each release deletes the key once.
        let count = || (server.calls(&["evalsha"]), server.calls(&["del"]));
        let before = count();
        let latency = hand_over(&url, tasks);
        let after = count();
        #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
        let calls = (after.0 - before.0) as f64 / (after.1 - before.1).max(1) as f64;
        println!(
            "  {what:<33} {:>8.1} µs   {:.2} times   {calls:.1} script calls for each release",
            latency.p50_us,
            latency.p50_us / raw
        );
    }
    renewals(&url).await;
}

async fn connection(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("a Redis URL");
    client.get_multiplexed_async_connection().await.expect("the server is there")
}

async fn raw_pairs(url: &str, tasks: usize) -> f64 {
    let connection = connection(url).await;
    let mut loader = connection.clone();
    let hash: String = redis::cmd("SCRIPT").arg("LOAD").arg(UNLOCK).query_async(&mut loader).await.expect("loaded");
    measure::rate(tasks, ROUND, move |task| {
        let (mut connection, hash) = (connection.clone(), hash.clone());
        async move {
            let key = format!("raw:{task}");
            let mut set = redis::cmd("SET");
            set.arg(&key).arg("owner").arg("NX").arg("PX").arg(30_000);
            let _: redis::Value = set.query_async(&mut connection).await.expect("SET works");
            let mut unlock = redis::cmd("EVALSHA");
            unlock.arg(&hash).arg(1).arg(&key).arg("owner");
            let _: redis::Value = unlock.query_async(&mut connection).await.expect("EVALSHA works");
        }
    })
    .await
}

async fn rslock_pairs(url: &str, tasks: usize) -> f64 {
    let manager = rslock::LockManager::new(vec![url.to_owned()]);
    measure::rate(tasks, ROUND, move |task| {
        let manager = manager.clone();
        async move {
            let name = format!("rslock:{task}");
            let lock = manager.lock(name.as_bytes(), Duration::from_secs(30)).await.expect("free");
            manager.unlock(&lock).await;
        }
    })
    .await
}

/// From starting a script that publishes to the subscriber's receipt, in another task: what a hand-over must at least cost.
async fn raw_round(url: &str) -> f64 {
    use redis::{AsyncConnectionConfig, IntoConnectionInfo, ProtocolVersion, PushInfo, PushKind};
    let info = url.into_connection_info().expect("a Redis URL");
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let client = redis::Client::open(info.set_redis_settings(settings)).expect("a Redis URL");
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel::<PushInfo>();
    let config = AsyncConnectionConfig::new().set_push_sender(sender);
    let mut subscriber = client.get_multiplexed_async_connection_with_config(&config).await.expect("connected");
    subscriber.subscribe("round").await.expect("subscribed");
    let mut publisher = connection(url).await;
    let script = redis::Script::new("return redis.call('PUBLISH', KEYS[1], ARGV[1])");
    let mut latencies = measure::histogram();
    let start = Instant::now();
    while start.elapsed() < SPAN {
        // As in the measurement of hand-overs, the machine is idle in between.
        tokio::time::sleep(Duration::from_micros(300)).await;
        let sent = Instant::now();
        let (_, ()) = tokio::join!(
            async { script.key("round").arg("x").invoke_async::<i64>(&mut publisher).await.expect("published") },
            async {
                while receiver.recv().await.is_some_and(|push| push.kind != PushKind::Message) {}
                latencies.saturating_record(u64::try_from(sent.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
        );
    }
    Latency::of(&latencies).p50_us
}

fn hand_over(url: &str, tasks: &str) -> Latency {
    let program = std::env::current_exe().expect("this program");
    measure::hand_overs(|_| {
        let mut command = Command::new(&program);
        command.args(["peer", url, tasks]);
        command
    })
    .expect("both processes ran")
}

/// What holding 100,000 locks costs in the background.
async fn renewals(url: &str) {
    const LOCKS: usize = 100_000;
    let client = fencelock::connect(url).await.expect("the server is there");
    let before = resident();
    let mut guards = Vec::with_capacity(LOCKS);
    for chunk in 0..LOCKS / 500 {
        let batch = (0..500).map(|index| {
            let mutex = client.mutex(format!("held:{chunk}:{index}"));
            tokio::spawn(async move { mutex.acquire().await })
        });
        for acquired in batch.collect::<Vec<_>>() {
            guards.push(acquired.await.expect("no panic").expect("free"));
        }
    }
    let memory = resident().saturating_sub(before) / LOCKS;
    let (start, cpu) = (Instant::now(), cpu_time());
    tokio::time::sleep(Duration::from_secs(21)).await;
    let share = (cpu_time() - cpu).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(guards.iter().all(fencelock::Guard::is_valid), "a lock was lost");
    println!("\n100,000 locks held by one process, ttl 30 s");
    println!("  renewals take {:.1} % of a core; {memory} bytes of memory per lock", share * 100.0);
    client.close().await.expect("closing works");
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}
