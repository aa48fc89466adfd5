//! Processes hammer a database that is killed and started again twice; in a long run they are killed themselves now and then. Every
//! promise is kept, and nothing is left behind.
//!
//! For longer: `FENCELOCK_TORTURE=60s cargo test -p fencelock --features full --test sql_torture -- --nocapture`.

#![cfg(all(feature = "postgres", feature = "mysql"))]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::{ErrorKind, connect, parse_duration};
use fencelock_testkit::history::{Kind, Violation};
use fencelock_testkit::sql::SqlServer;
use fencelock_testkit::torture::{self, Connect, Plan, Workers};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

/// Connects however long it takes: the server may be down when a process starts.
fn patiently() -> Connect {
    Arc::new(|url| {
        Box::pin(async move {
            loop {
                match connect(&url).await {
                    Err(error) if error.kind() == ErrorKind::Unavailable => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    outcome => return outcome,
                }
            }
        })
    })
}

/// Not a test: the inside of the processes that the test below starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "only for the processes of the torture"]
async fn a_worker_process() {
    torture::work(patiently()).await.unwrap();
}

fn processes() -> Workers {
    let mut worker = vec![std::env::current_exe().unwrap().into_os_string()];
    worker.extend(["--ignored", "--exact", "a_worker_process", "--nocapture"].map(OsString::from));
    Workers::Processes(worker)
}

/// What a server that is away for seconds may cost. Order: whose client was not back when its turn came is passed over, and has its
/// place back afterwards. A loss, which the holder is told: a waiter that was granted the lock just before the server died could not
/// confirm that within the claim window. All the rest must hold: exclusion, tokens, nobody stuck, nothing left.
fn excused(violation: &Violation) -> bool {
    match violation.kind {
        Kind::Order | Kind::Lost => true,
        Kind::Failed => violation.detail.contains("it was lost while waiting for the others"),
        _ => false,
    }
}

async fn survives_kills_of_the_server<S: SqlServer>() {
    let mut server = S::make();
    // Makes the tables.
    server.client().await.close().await.unwrap();
    let lasts = std::env::var("FENCELOCK_TORTURE").unwrap_or_else(|_| "9s".to_owned());
    let mut plan = Plan::new(format!("{}?patience=30s", server.address()));
    plan.lasts = parse_duration(&lasts).unwrap();
    // In a short time on a busy machine, processes that are killed all the time do nothing else.
    plan.kill = plan.lasts >= Duration::from_secs(30);
    // Longer than a restart takes on a busy machine: leases survive it.
    plan.ttl = Duration::from_secs(15);
    plan.patience = Duration::from_secs(40);
    plan.excuse = excused;
    println!("seed {}", plan.seed);
    let work = torture::run(&plan, processes(), |_| {});
    let kills = async {
        for _ in 0..2 {
            tokio::time::sleep(plan.lasts / 3).await;
            tokio::task::block_in_place(|| {
                server.kill();
                server.start_again();
            });
        }
    };
    let (verdict, ()) = tokio::join!(work, kills);
    let verdict = verdict.unwrap();
    println!("{verdict}");
    assert!(verdict.ok, "{:#?}\n{verdict}", verdict.violations);
    assert!(verdict.grants > 20 && (verdict.kills > 0 || !plan.kill), "{verdict}");
    // What the killed ones have left is gone when somebody comes by; nothing else is there.
    for table in ["line", "gone"] {
        let column = if table == "line" { "used" } else { "at" };
        server.sql(&format!("UPDATE {} SET {column} = 1", server.table(table)));
    }
    let client = server.client().await;
    for number in 0..100 {
        client.mutex(format!("tidy:{number}")).acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!((server.rows("claim"), server.rows("gone")), (0, 0), "orphan rows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn postgres_keeps_every_promise() {
    survives_kills_of_the_server::<fencelock_testkit::postgres::PostgresServer>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn mysql_keeps_every_promise() {
    survives_kills_of_the_server::<fencelock_testkit::mysql::MysqlServer>().await;
}
