//! Running locks on MySQL and MariaDB: users without rights, replicas, TLS, and what the database says when something is wrong.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "mysql")]

use fencelock::{ErrorKind, connect};
use fencelock_testkit::mysql::{MysqlDatabase, MysqlServer};
use fencelock_testkit::sql::SqlBase;
use fencelock_testkit::wait::{at_once, line, until_line};

const NAME: &str = "invoice:42";

async fn refused(url: &str, kind: ErrorKind, words: &[&str]) {
    let error = connect(url).await.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    assert!(!text.contains("s3cret"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

/// Who may not create anything is told what an administrator must do; when that is done, it works with few rights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_the_right_to_create_tables() {
    let server = MysqlServer::start();
    server.ask("", "CREATE DATABASE shop");
    server.ask("", "CREATE USER app@'127.0.0.1'");
    server.ask("", "GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE ON shop.* TO app@'127.0.0.1'");
    let url = server.url_as("app", "shop");
    refused(&url, ErrorKind::Invalid, &["fencelock migrate --print mysql", "administrator"]).await;
    server.run_script("shop", &fencelock::migration("mysql").unwrap());
    let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let guard = one.mutex(NAME).acquire().await.unwrap();
    let next = tokio::spawn(async move { two.mutex(NAME).acquire().await.unwrap().release().await });
    until_line(&one, NAME, 1, 1).await;
    assert_eq!(one.list("").await.unwrap().len(), 1);
    guard.release().await.unwrap();
    at_once("its turn", next).await.unwrap().unwrap();
    // Doing it again changes nothing.
    let _held = one.mutex(NAME).acquire().await.unwrap();
    server.run_script("shop", &fencelock::migration("mysql").unwrap());
    assert_eq!(line(&one, NAME).await, (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_an_unknown_database_and_nobody_there() {
    let server = MysqlServer::start();
    server.ask("", "CREATE USER locked@'127.0.0.1' IDENTIFIED BY 's3cret'");
    server.ask("", "GRANT ALL ON locks.* TO locked@'127.0.0.1'");
    refused(&server.url_as("locked:wrong-s3cret", "locks"), ErrorKind::Invalid, &["password"]).await;
    refused(&server.url_as("locked", "locks"), ErrorKind::Invalid, &["password"]).await;
    refused(&server.url_as("fencelock", "nowhere"), ErrorKind::Invalid, &["no such database", "nowhere"]).await;
    let port = fencelock_testkit::redis::free_port();
    let nobody = format!("mysql://a:s3cret@127.0.0.1:{port}/x");
    refused(&nobody, ErrorKind::Unavailable, &["is the server running", "127.0.0.1"]).await;
    for (url, words) in [
        ("mysql://127.0.0.1/x", "user is missing"),
        ("mysql://a:s3cret@127.0.0.1", "database is missing"),
        ("mysql://a:s3cret@h:port/x", "mysql://user:password@host"),
        ("mysql://a:s3cret@h/x?sslmode=maybe", "sslmode"),
        ("mysql://a:s3cret@h/x?ca=/nowhere.pem", "/nowhere.pem"),
        ("mysql://a:s3cret@h/x?pool_min=5", "pool_min"),
    ] {
        refused(url, ErrorKind::Invalid, &[words]).await;
    }
    let client = connect(server.url_as("locked:s3cret", "locks")).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    assert!(!format!("{client:?} {}", client.address()).contains("s3cret"));
}

/// A server that accepts no writes says so; when it does, all goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_server_says_so() {
    let server = MysqlServer::start();
    server.ask("", "CREATE USER app@'127.0.0.1'");
    server.ask("", "GRANT ALL ON locks.* TO app@'127.0.0.1'");
    let url = server.url_as("app", "locks");
    let client = connect(format!("{url}?patience=300ms")).await.unwrap();
    server.ask("", "SET GLOBAL read_only = 1");
    let error = client.mutex(NAME).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("read-only replica"), "{error}");
    server.ask("", "SET GLOBAL read_only = 0");
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
}

/// With TLS the server must prove who it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_used_and_the_server_is_checked() {
    let server = MysqlServer::options().tls().start();
    server.ask("", "ALTER USER fencelock@'127.0.0.1' REQUIRE SSL");
    let client = connect(server.tls_url()).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    refused(&format!("{}?sslmode=require", server.url()), ErrorKind::Invalid, &["TLS"]).await;
    refused(&server.url(), ErrorKind::Invalid, &["refused"]).await;
    let without = MysqlServer::start();
    refused(&format!("{}?sslmode=require", without.url()), ErrorKind::Invalid, &["TLS"]).await;
}

/// Names that differ in case only, and long ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_long_and_case_matters() {
    let base = MysqlDatabase::new();
    let client = base.client().await;
    let long = "x".repeat(511);
    let names = [
        "Invoice",
        "invoice",
        "INVOICE",
        "invoice ",
        &format!("{long}a"),
        &format!("{long}A"),
        &format!("{long}ä")[..511],
    ];
    let mut held = Vec::new();
    for name in names {
        held.push(client.mutex(name).try_acquire().await.unwrap().expect("another name is another lock"));
    }
    assert_eq!(client.list("").await.unwrap().len(), names.len());
}

/// Many clients come at once to a database without tables; functions of a newer version are left alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_first_clients_at_once_and_newer_procedures() {
    let base = MysqlDatabase::new();
    let clients: Vec<_> = (0..8)
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
    // Whoever made the tables has died before it said which version they are.
    base.ask("DELETE FROM fencelock_mark");
    connect(base.url()).await.unwrap().mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    base.ask("UPDATE fencelock_mark SET version = 99");
    refused(&base.url(), ErrorKind::Unsupported, &["99", "update"]).await;
}
