//! A holder is stopped for longer than its session while another one acquires and writes. When it goes on, it knows before it asks
//! anybody, it is told, and its write to a row of a database is refused. Without a fence, its write does damage.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(all(feature = "etcd", feature = "zookeeper", feature = "redis", feature = "fence-postgres"))]

use fencelock::fence::sql::postgres::{row, write};
use fencelock::{ErrorKind, Token};
use fencelock_testkit::Probe;
use fencelock_testkit::etcd::EtcdCluster;
use fencelock_testkit::postgres::PostgresServer;
use fencelock_testkit::probe::{Reply, Request};
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::wait::at_once;
use fencelock_testkit::zookeeper::ZooKeeper;
use std::time::Duration;
use tokio_postgres::{Client, NoTls};

const NAME: &str = "invoice:42";

/// One row with a column for the newest token, and one without.
async fn rows(server: &PostgresServer) -> Client {
    let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let tables = "CREATE TABLE fenced (id BIGINT PRIMARY KEY, body TEXT NOT NULL, fence BIGINT NOT NULL DEFAULT 0);
        CREATE TABLE plain (id BIGINT PRIMARY KEY, body TEXT NOT NULL);
        INSERT INTO fenced VALUES (1, 'new'); INSERT INTO plain VALUES (1, 'new')";
    client.batch_execute(tables).await.unwrap();
    client
}

async fn body(database: &Client, table: &str) -> String {
    database.query_one(&format!("SELECT body FROM {table}"), &[]).await.unwrap().get(0)
}

async fn write_both(database: &Client, token: u64, body: &str) -> fencelock::Result<()> {
    database.execute("UPDATE plain SET body = $1", &[&body]).await.unwrap();
    write(database, &row("fenced", "id = $1", &[&1_i64]), Token::new(token), "body = $2", &[&body]).await
}

async fn a_late_write_is_refused(url: &str) {
    let server = PostgresServer::start();
    let database = rows(&server).await;
    let sleeper = Probe::connect(url).await;
    let stale = sleeper.acquire(NAME, Duration::from_secs(1)).await;
    write_both(&database, stale.token, "begun by the first").await.unwrap();
    assert_eq!(sleeper.ask(Request::Watch { guard: stale.guard }).await, Reply::Done);
    sleeper.stop().await;
    let successor = Probe::connect(url).await;
    let newer = successor.acquire(NAME, Duration::from_secs(60)).await;
    assert!(newer.token > stale.token);
    write_both(&database, newer.token, "done by the second").await.unwrap();
    // This question is in its input when it wakes.
    let awake = sleeper.send(Request::Look { guard: stale.guard }).await;
    sleeper.resume();
    let Reply::Look(look) = awake.await.unwrap() else { panic!("not an answer") };
    assert!(!look.valid, "it knows before any call");
    let Reply::Lost(_) = at_once("it is told", sleeper.ask(Request::Lost { guard: stale.guard })).await else {
        panic!("not lost")
    };
    // The write was on its way when the process was stopped: nothing that it knows now can hold it back.
    let refused = write_both(&database, stale.token, "done by the first").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    assert_eq!(body(&database, "fenced").await, "done by the second");
    assert_eq!(body(&database, "plain").await, "done by the first", "without a fence there is damage");
    assert!(successor.look(&newer).await.valid);
    assert_eq!(successor.release(&newer).await, Reply::Done);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd() {
    a_late_write_is_refused(&EtcdCluster::start(1).url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zookeeper() {
    a_late_write_is_refused(&ZooKeeper::shared(1).url_below("/paused")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis() {
    a_late_write_is_refused(&RedisServer::start().url()).await;
}
