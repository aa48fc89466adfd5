//! The lost-update experiment on every resource that the library fences: updates are lost without the fence, and none with it.
//!
//! Short here; `FENCELOCK_LOST_UPDATE_SECONDS=60 cargo test -p fencelock --all-features --test fence_lost_update -- --nocapture` is the long one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock_testkit::lost_update::{Plan, run};
use fencelock_testkit::mysql::MysqlServer;
use fencelock_testkit::postgres::PostgresServer;
use fencelock_testkit::redis::RedisServer;
use tokio::sync::Mutex;

/// One at a time: the experiments are about stops, not about a busy machine.
static TURN: Mutex<()> = Mutex::const_new(());

async fn experiment(what: &str, resource: &str) {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let locks = |name: &str| format!("file:{}", dir.path().join(name).display());
    let without = run(&Plan::new(resource, locks("without"), false)).await;
    println!("{what}, no fence:   {without}");
    let with = run(&Plan::new(resource, locks("with"), true)).await;
    println!("{what}, with fence: {with}");
    assert!(without.stops > 0 && with.stops > 0, "holders were stopped");
    assert!(without.lost() > 0, "{what}: nothing was lost without the fence, so this proves nothing: {without}");
    assert_eq!(with.lost(), 0, "{what}: {with}");
    assert!(with.number <= with.tally.done + with.tally.unknown, "{what}: more than was written: {with}");
    assert!(with.tally.refused > 0, "{what}: the fence had nothing to do: {with}");
}

#[tokio::test]
async fn sqlite() {
    let dir = tempfile::tempdir().unwrap();
    experiment("SQLite", &format!("sqlite:{}", dir.path().join("db").display())).await;
}

#[tokio::test]
async fn postgres() {
    let server = PostgresServer::start();
    experiment("PostgreSQL", &server.url()).await;
}

#[tokio::test]
async fn redis() {
    let server = RedisServer::start();
    experiment("Redis", &server.url()).await;
}

#[tokio::test]
async fn file() {
    let dir = tempfile::tempdir().unwrap();
    experiment("file", &format!("file:{}", dir.path().join("number").display())).await;
}

#[tokio::test]
async fn mysql() {
    let server = MysqlServer::start();
    experiment("MariaDB", &server.url()).await;
}
