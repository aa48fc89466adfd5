//! The PostgreSQL and MySQL engines beside the raw databases, in one run: `cargo bench -p fencelock --features full --bench sql`.
//!
//! Starts servers of its own on loopback. Prints ratios, since the times themselves are the machine's.

use fencelock_testkit::measure::{self, Latency};
use fencelock_testkit::mysql::MysqlServer;
use fencelock_testkit::postgres::{PgBouncer, PostgresServer};
use fencelock_testkit::sql::{SqlBase, SqlServer};
use std::future::poll_fn;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio_postgres::{AsyncMessage, NoTls};

const SPAN: Duration = Duration::from_secs(3);

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
    let postgres = PostgresServer::start();
    println!("PostgreSQL (fsync off)");
    pairs(&postgres).await;
    let raw = raw_round(&postgres).await;
    println!("  raw NOTIFY to listener                    p50 {:>8.2} ms", raw / 1_000.0);
    for (what, tasks) in [("hand-over between two processes", "1"), ("hand-over, 200 in line", "100")] {
        let latency = hand_over(&postgres.url(), tasks);
        println!("  {what:<41} p50 {:>8.2} ms   {:.2} times", latency.p50_us / 1_000.0, latency.p50_us / raw);
    }
    let pooler = PgBouncer::to(&postgres);
    let latency = hand_over(&pooler.url(), "1");
    println!("  hand-over through PgBouncer (notify=off)  p50 {:>8.2} ms", latency.p50_us / 1_000.0);
    drop((pooler, postgres));

    let mysql = MysqlServer::make();
    println!("\nMariaDB");
    pairs(&mysql).await;
    for (what, tasks) in [("hand-over between two processes", "1"), ("hand-over, 200 in line", "100")] {
        let (_, before) = mysql.statements();
        let started = Instant::now();
        let latency = hand_over(&mysql.url(), tasks);
        let (_, after) = mysql.statements();
        #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
        let rate = (after - before) as f64 / started.elapsed().as_secs_f64() / 2.0;
        println!(
            "  {what:<41} p50 {:>8.2} ms   {rate:.0} statements a second and process, {} hand-overs",
            latency.p50_us / 1_000.0,
            latency.count
        );
    }
    println!("  waiting alone: {:.0} statements a second, whatever the number of waiters", waiting(&mysql).await);
}

/// Uncontended pairs, and what the server counted for them.
async fn pairs(server: &impl SqlServer) {
    for tasks in [1, 64] {
        let client = server.client().await;
        let pairs = measure::pairs(&client, "bench:", tasks, SPAN).await.expect("the lock works");
        client.close().await.expect("closing works");
        println!(
            "  {tasks:>3} tasks: {:>6.0} pairs of acquire and release a second; acquire p50 {:.2} ms, release p50 {:.2} ms",
            pairs.per_second,
            pairs.acquire.p50_us / 1_000.0,
            pairs.release.p50_us / 1_000.0
        );
    }
}

/// From starting a statement that notifies to the listener's receipt, in another task: what a hand-over must at least cost.
async fn raw_round(server: &PostgresServer) -> f64 {
    let (notifier, connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connected");
    tokio::spawn(connection);
    let (listener, mut connection) = tokio_postgres::connect(&server.url(), NoTls).await.expect("connected");
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(_) = message {
                let _ = tell.send(Instant::now());
            }
        }
    });
    listener.batch_execute("LISTEN round").await.expect("it listens");
    let notify = notifier.prepare("SELECT pg_notify('round', $1)").await.expect("prepared");
    let mut latencies = measure::histogram();
    let start = Instant::now();
    while start.elapsed() < SPAN {
        // As in the measurement of hand-overs, the machine is idle in between.
        tokio::time::sleep(Duration::from_micros(300)).await;
        let sent = Instant::now();
        notifier.query(&notify, &[&"x"]).await.expect("notified");
        let received = told.recv().await.expect("received");
        latencies.saturating_record(u64::try_from((received - sent).as_nanos()).unwrap_or(u64::MAX));
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

/// What a process costs whose 100 tasks wait for one lock.
async fn waiting(server: &impl SqlServer) -> f64 {
    let (holder, client) = (server.client().await, server.client().await);
    let guard = holder.mutex("held").acquire().await.expect("free");
    let waiters: Vec<_> = (0..100)
        .map(|_| {
            let mutex = client.mutex("held");
            tokio::spawn(async move { mutex.acquire().await.map(drop) })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (_, before) = server.statements();
    let started = Instant::now();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (_, after) = server.statements();
    #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
    let rate = (after - before) as f64 / started.elapsed().as_secs_f64();
    for waiter in waiters {
        waiter.abort();
    }
    drop(guard);
    rate
}
