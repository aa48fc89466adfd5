//! The file engine beside the raw system calls that it is made of, in one run: `cargo bench -p fencelock --bench file`.
//!
//! Prints ratios, since the times themselves are the machine's. Also prints what renewing 10,000 held locks costs.

use fencelock_testkit::measure::{self, Latency};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const SPAN: Duration = Duration::from_secs(3);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("peer") => peer(&args[2], args[3].parse().expect("a number of tasks")),
        Some("raw-peer") => measure::raw_peer(Path::new(&args[2]), SPAN).expect("flock works"),
        _ => compare(),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn peer(url: &str, tasks: usize) {
    runtime().block_on(async {
        let client = fencelock::connect(url).await.expect("the directory is there");
        measure::peer(&client, "hand-over", tasks, SPAN).await.expect("the lock works");
        client.close().await.expect("closing works");
    });
}

fn compare() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let url = format!("file:{}", dir.path().join("locks").display());
    let raw = raw_cycle(&dir.path().join("raw"));
    let pair = pair(&url);
    println!("uncontended, one task, one name");
    line("raw open + flock + close", raw, None);
    line("fencelock acquire + release", pair, Some(pair / raw));

    let raw = hand_over(&["raw-peer", &path(dir.path().join("raw"))]).p50_us;
    let two = hand_over(&["peer", &url, "1"]).p50_us;
    let many = hand_over(&["peer", &url, "500"]).p50_us;
    println!("\nhand-over between two processes, p50");
    line("raw blocking flock", raw, None);
    line("fencelock", two, Some(two / raw));
    line("fencelock, 1,000 in line", many, Some(many / raw));

    println!("\nrenewing 10,000 held locks in the background (memory engine, ttl 30 s)");
    println!("  {:<28} {:>9.2} % of a core", "cpu", renewal_share() * 100.0);
}

fn line(what: &str, micros: f64, ratio: Option<f64>) {
    let ratio = ratio.map_or(String::new(), |ratio| format!("   {ratio:.1} times the raw one"));
    println!("  {what:<28} {micros:>9.2} µs{ratio}");
}

fn path(path: PathBuf) -> String {
    path.to_string_lossy().into_owned()
}

fn raw_cycle(file: &Path) -> f64 {
    File::create(file).expect("the file can be made");
    per_cycle(|| File::open(file).and_then(|file| file.lock()).expect("flock works"))
}

fn per_cycle(mut cycle: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut count = 0.0;
    while start.elapsed() < SPAN {
        for _ in 0..100 {
            cycle();
        }
        count += 100.0;
    }
    start.elapsed().as_secs_f64() * 1e6 / count
}

fn pair(url: &str) -> f64 {
    let runtime = runtime();
    let client = runtime.block_on(fencelock::connect(url)).expect("the directory is there");
    let mutex = client.mutex("uncontended");
    let micros = per_cycle(|| {
        runtime.block_on(async { mutex.acquire().await.expect("free").release().await.expect("held") });
    });
    runtime.block_on(client.close()).expect("closing works");
    micros
}

fn hand_over(args: &[&str]) -> Latency {
    let program = std::env::current_exe().expect("this program");
    measure::hand_overs(|_| {
        let mut command = Command::new(&program);
        command.args(args);
        command
    })
    .expect("both processes ran")
}

/// The share of a core that the keeper takes for 10,000 locks over more than one round of renewals.
fn renewal_share() -> f64 {
    runtime().block_on(async {
        let client = fencelock::connect("memory:").await.expect("memory");
        let mut guards = Vec::new();
        for index in 0..10_000 {
            guards.push(client.mutex(format!("held-{index}")).acquire().await.expect("free"));
        }
        let (start, cpu) = (Instant::now(), cpu_time());
        tokio::time::sleep(Duration::from_secs(21)).await;
        assert!(guards.iter().all(fencelock::Guard::is_valid), "a lock was lost");
        (cpu_time() - cpu).as_secs_f64() / start.elapsed().as_secs_f64()
    })
}

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
