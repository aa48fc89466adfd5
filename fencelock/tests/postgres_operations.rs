//! Running locks on PostgreSQL: users without rights, replicas, poolers, TLS, and what the database says when something is wrong.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "postgres")]

use fencelock::{Error, ErrorKind, Name, advisory_key, connect};
use fencelock_testkit::postgres::{PgBouncer, PostgresDatabase, PostgresServer};
use fencelock_testkit::sql::SqlBase;
use fencelock_testkit::wait::{at_once, eventually, line, until_line};
use std::time::Duration;

const NAME: &str = "invoice:42";
const LONG: Duration = Duration::from_secs(120);

async fn refused(url: &str, kind: ErrorKind, words: &[&str]) -> Error {
    let error = connect(url).await.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    assert!(!text.contains("s3cret"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    error
}

/// Who may not create anything is told what an administrator must do; when that is done, it works with few rights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_the_right_to_create_tables() {
    let server = PostgresServer::start();
    server.ask("postgres", "CREATE ROLE app LOGIN");
    server.ask("postgres", "CREATE DATABASE shop");
    let url = format!("postgres://app@127.0.0.1:{}/shop", server.port());
    refused(&url, ErrorKind::Invalid, &["fencelock migrate --print postgres", "administrator"]).await;
    server.ask("shop", &fencelock::migration("postgres").unwrap());
    refused(&url, ErrorKind::Invalid, &["rights", "permission denied"]).await;
    server.ask(
        "shop",
        "GRANT USAGE ON SCHEMA fencelock TO app; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencelock TO app",
    );
    let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let guard = one.mutex(NAME).acquire().await.unwrap();
    let next = tokio::spawn(async move { two.mutex(NAME).acquire().await.unwrap().release().await });
    until_line(&one, NAME, 1, 1).await;
    assert_eq!(one.list("").await.unwrap().len(), 1);
    guard.release().await.unwrap();
    at_once("its turn", next).await.unwrap().unwrap();
    assert_eq!(one.evict(NAME).await.unwrap(), 0);
    // Doing it again changes nothing.
    let _held = one.mutex(NAME).acquire().await.unwrap();
    server.ask("shop", &fencelock::migration("postgres").unwrap());
    assert_eq!(line(&one, NAME).await, (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_an_unknown_database_and_nobody_there() {
    let server = PostgresServer::options().password_for("locked").start();
    server.ask("postgres", "CREATE ROLE locked LOGIN PASSWORD 's3cret'");
    let at = |user: &str, database: &str| format!("postgres://{user}@127.0.0.1:{}/{database}", server.port());
    refused(&at("locked:wrong-s3cret", "postgres"), ErrorKind::Invalid, &["password"]).await;
    refused(&at("locked", "postgres"), ErrorKind::Invalid, &["password"]).await;
    refused(&at("postgres", "nowhere"), ErrorKind::Invalid, &["no such database", "nowhere"]).await;
    refused(&at("nobody", "postgres"), ErrorKind::Invalid, &["user"]).await;
    let port = fencelock_testkit::redis::free_port();
    let nobody = format!("postgres://a:s3cret@127.0.0.1:{port}/x");
    refused(&nobody, ErrorKind::Unavailable, &["is the server running", "127.0.0.1"]).await;
    for (url, words) in [
        ("postgres://127.0.0.1/x", "user is missing"),
        ("postgres:///x", "postgres://user:password@host"),
        ("postgres://a:s3cret@h:port/x", "postgres://user:password@host"),
        ("postgres://a:s3cret@h/x?notify=maybe", "notify"),
        ("postgres://a:s3cret@h/x?sslmode=maybe", "sslmode"),
        ("postgres://a:s3cret@h/x?ca=/nowhere.pem", "/nowhere.pem"),
        ("postgres://a:s3cret@h/x?sslmode=disable&ca=/nowhere.pem", "sslmode"),
        ("postgres://a:s3cret@h/x?connect_timeout=5", "connect_timeout"),
    ] {
        refused(url, ErrorKind::Invalid, &[words]).await;
    }
    // The right one works, and does not show.
    let client = connect(format!("{}?ttl=5s", at("locked:s3cret", "postgres"))).await;
    let error = client.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "no right to create the schema: {error}");
    server.ask("postgres", "GRANT CREATE ON DATABASE postgres TO locked");
    let client = connect(at("locked:s3cret", "postgres")).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    assert!(!format!("{client:?} {}", client.address()).contains("s3cret"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_replica_says_so_and_several_hosts_find_the_primary() {
    let primary = PostgresServer::start();
    let client = primary.client().await;
    let guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let replica = primary.replica();
    refused(&replica.url(), ErrorKind::Unavailable, &["read-only replica", "primary"]).await;
    let both = format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres", replica.port(), primary.port());
    let found = connect(&both).await.unwrap();
    assert!(found.mutex(NAME).try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    found.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
}

/// The primary is lost for good; its replica takes over. Who holds goes on holding, who waits goes on waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_survive_a_failover_to_a_synchronous_replica() {
    use fencelock_testkit::sql::SqlServer;
    let mut primary =
        PostgresServer::options().set("synchronous_standby_names", "*").set("synchronous_commit", "local").start();
    let replica = primary.replica();
    eventually("it follows", async || {
        primary.number("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'") == 1
    })
    .await;
    primary.ask("postgres", "ALTER SYSTEM SET synchronous_commit = 'on'");
    primary.ask("postgres", "SELECT pg_reload_conf()");
    let both =
        format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?patience=20s", primary.port(), replica.port());
    let (one, two) = (connect(&both).await.unwrap(), connect(&both).await.unwrap());
    let guard = one.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = two.mutex(NAME).ttl(LONG);
        async move { mutex.acquire().await.unwrap() }
    });
    until_line(&one, NAME, 1, 1).await;
    primary.kill();
    replica.ask("postgres", "SELECT pg_promote()");
    drop(at_once("it still holds", guard.reenter()).await.unwrap());
    assert!(one.mutex(NAME).try_acquire().await.unwrap().is_none());
    until_line(&one, NAME, 1, 1).await;
    guard.release().await.unwrap();
    let next = at_once("its turn", waiter).await.unwrap();
    next.release().await.unwrap();
}

/// With TLS the server must prove who it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_used_and_the_server_is_checked() {
    let server = PostgresServer::options().tls().start();
    let encrypted = || {
        server.number("SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl AND application_name = 'fencelock'")
    };
    let client = connect(server.tls_url()).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    assert_eq!(encrypted(), 1);
    client.close().await.unwrap();
    eventually("it has gone", async || encrypted() == 0).await;
    // Whoever it is, and as it comes.
    let client = server.client().await;
    assert_eq!(encrypted(), 1);
    drop(client);
    refused(&format!("{}?sslmode=require", server.url()), ErrorKind::Invalid, &["TLS", "certificate"]).await;
    let plain = connect(format!("{}?sslmode=disable", server.url())).await.unwrap();
    plain.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let without = PostgresServer::start();
    refused(&format!("{}?sslmode=require", without.url()), ErrorKind::Invalid, &["TLS"]).await;
}

/// Many clients through few connections, which change from statement to statement.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_work_through_pgbouncer() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::to(&server);
    let direct = server.client().await;
    let (one, two) = (connect(pooler.url()).await.unwrap(), connect(pooler.url()).await.unwrap());
    assert!(!one.capability().push && direct.capability().push);
    let guard = one.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for (ahead, client) in [&two, &direct, &one, &two].into_iter().enumerate() {
        let mutex = client.mutex(NAME).ttl(LONG);
        waiters.push(tokio::spawn(async move { mutex.acquire().await.unwrap() }));
        until_line(&direct, NAME, 1, ahead + 1).await;
    }
    guard.release().await.unwrap();
    let mut newest = 0;
    for waiter in waiters {
        let guard = at_once("its turn, in order", waiter).await.unwrap();
        assert!(guard.token().as_u64() > newest);
        newest = guard.token().as_u64();
        guard.release().await.unwrap();
    }
    // An eviction is told as well.
    let guard = two.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    assert_eq!(direct.evict(NAME).await.unwrap(), 1);
    at_once("it is told", guard.lost()).await;
    for client in [one, two] {
        client.close().await.unwrap();
    }
    assert_eq!(
        server.number("SELECT (SELECT count(*) FROM fencelock.session) + (SELECT count(*) FROM fencelock.word)"),
        0
    );
    assert_eq!(server.number("SELECT count(*) FROM fencelock.claim"), 0);
}

/// A waiter behind a pooler that dies is passed over, since it does not ask for its words any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_behind_a_pooler_is_skipped() {
    let server = PostgresServer::start();
    let pooler = PgBouncer::to(&server);
    let near = server.client().await;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let dies = fencelock_testkit::Probe::connect(&pooler.url()).await;
    let _waits = dies.start_acquire(NAME, LONG).await;
    until_line(&near, NAME, 1, 1).await;
    dies.kill().await;
    eventually("it is seen to be gone", async || line(&near, NAME).await == (1, 0)).await;
    let next = near.mutex(NAME).ttl(LONG);
    let next = tokio::spawn(async move { next.acquire().await.unwrap() });
    until_line(&near, NAME, 1, 1).await;
    holder.release().await.unwrap();
    at_once("the next one holds", next).await.unwrap().release().await.unwrap();
}

/// A database whose transactions are not READ COMMITTED by default works all the same, or says what is wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_isolation_levels_do_no_harm() {
    let server = PostgresServer::options().set("default_transaction_isolation", "serializable").start();
    let client = server.client().await;
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let pooler = PgBouncer::to(&server);
    let pooled = connect(pooler.url()).await.unwrap();
    let error = pooled.mutex(NAME).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("default_transaction_isolation"), "{error}");
}

/// The key is the same in Rust and in the database, and excludes in transactions of one's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_inside_of_a_transaction() {
    let base = PostgresDatabase::new();
    for name in ["invoice:42", "ü'\\\n", &"x".repeat(512)] {
        let key = advisory_key(&Name::new(name).unwrap()).to_string();
        let quoted = format!("$fl${name}$fl$");
        assert_eq!(base.ask(&format!("SELECT fencelock.advisory_key({quoted})"))[0][0], key, "{name}");
    }
    let key = advisory_key(&Name::new(NAME).unwrap());
    let (client, connection) = tokio_postgres::connect(&base.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock({key})")).await.unwrap();
    let tries =
        || base.ask(&format!("SELECT pg_try_advisory_xact_lock(fencelock.advisory_key('{NAME}'))"))[0][0].clone();
    assert_eq!(tries(), "f");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(tries(), "t");
}

/// Functions of a newer version are not replaced by older ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newer_database_is_left_alone() {
    let base = PostgresDatabase::new();
    base.ask("CREATE OR REPLACE FUNCTION fencelock.version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 99'");
    refused(&base.url(), ErrorKind::Unsupported, &["99", "update"]).await;
    base.ask("CREATE OR REPLACE FUNCTION fencelock.version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 0'");
    base.client().await.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    assert_eq!(base.ask("SELECT fencelock.version()")[0][0], "1");
}

/// Many clients come at once to a database without tables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_first_clients_at_once() {
    let base = PostgresDatabase::new();
    base.ask("DROP SCHEMA fencelock CASCADE");
    let clients: Vec<_> = (0..12)
        .map(|_| {
            let url = base.url();
            tokio::spawn(
                async move { connect(url).await.unwrap().mutex(NAME).acquire().await.unwrap().release().await },
            )
        })
        .collect();
    for client in clients {
        client.await.unwrap().unwrap();
    }
}
