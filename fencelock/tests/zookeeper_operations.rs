//! How the ZooKeeper engine is reached and what it keeps where: TLS, users, paths, sessions, notifications.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "zookeeper")]

use fencelock::{ErrorKind, connect};
use fencelock_testkit::wait::{at_once, eventually, until_line};
use fencelock_testkit::zookeeper::ZooKeeper;
use std::time::{Duration, Instant};
use zookeeper_client::Error as Fault;

const LONG: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_reaches_a_server_that_the_authority_vouches_for() {
    let server = ZooKeeper::options().tls().start();
    let client = connect(server.tls_url()).await.unwrap();
    let guard = client.mutex("secret").acquire().await.unwrap();
    assert!(guard.is_valid() && client.address().starts_with("zks://127.0.0.1:"));
    guard.release().await.unwrap();
    // Another authority, of which the server knows nothing.
    let other = ZooKeeper::options().tls().start();
    let url = server
        .tls_url()
        .replace(&server.file("ca.pem").display().to_string(), &other.file("ca.pem").display().to_string());
    let error = connect(format!("{url}&timeout=1s")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // No file, or not a certificate: refused before anything is sent.
    for ca in ["/nowhere/ca.pem".to_owned(), server.file("zoo.cfg").display().to_string()] {
        let error = connect(format!("zks://127.0.0.1:1?ca={ca}")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_shares_locks_with_itself_only() {
    let server = ZooKeeper::shared(1);
    let url = server.url_below("/users").replace("zk://", "zk://app:s3cret@");
    let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let guard = one.mutex("job").ttl(LONG).acquire().await.unwrap();
    assert!(two.mutex("job").try_acquire().await.unwrap().is_none());
    let stranger = server.plain().await;
    let entry = server.ephemerals().into_iter().find(|path| path.starts_with("/users/job/")).unwrap();
    assert_eq!(stranger.delete(&entry, None).await, Err(Fault::NoAuth));
    let anonymous = connect(server.url_below("/users")).await.unwrap();
    let error = anonymous.mutex("job").acquire().await.unwrap_err();
    assert!(error.kind() == ErrorKind::Unavailable && error.to_string().contains("ACL"), "{error}");
    for text in [format!("{one:?} {error} {guard:?}"), one.address().to_owned()] {
        assert!(!text.contains("s3cret"), "{text}");
    }
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_there_is_told_in_time() {
    let started = Instant::now();
    let error = connect("zk://127.0.0.1:1/x?timeout=500ms").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(error.to_string().contains("zk://127.0.0.1:1/x"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_no_session_covers_is_refused() {
    let server = ZooKeeper::options().set("maxSessionTimeout", "4000").start();
    let error = connect(server.url()).await.unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("maxSessionTimeout"), "{error}");
    let client = connect(format!("{}?ttl=2s", server.url())).await.unwrap();
    let error = client.mutex("long").ttl(LONG).acquire().await.unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("120s"), "{error}");
    client.mutex("short").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_one_session_whatever_the_number_of_its_locks() {
    let server = ZooKeeper::start();
    let client = server.client().await;
    let mut guards = Vec::new();
    for number in 0..100 {
        guards.push(client.mutex(format!("lock-{number}")).acquire().await.unwrap());
    }
    let sessions = |text: &str| text.lines().filter(|line| line.starts_with("0x")).count();
    assert_eq!(sessions(&server.nodes()[0].ask("dump").unwrap()), 1);
    assert_eq!(server.ephemerals().len(), 100);
    drop(guards);
    client.close().await.unwrap();
    assert_eq!(server.ephemerals(), Vec::<String>::new());
}

/// A plain name is where Java services look for it; any other one is one component of a path all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_paths_that_others_can_find() {
    let server = ZooKeeper::shared(1);
    let client = connect(server.url_below("/names/here")).await.unwrap();
    let mut guards = Vec::new();
    for name in ["invoice:42", "a/b", "..", "zookeeper", "\u{1}", "🔒", "100%"] {
        guards.push(client.mutex(name).ttl(LONG).acquire().await.unwrap());
    }
    let plain = server.plain().await;
    let mut found = plain.list_children("/names/here").await.unwrap();
    found.sort();
    assert_eq!(found, ["%01", "%2E.", "%7Aookeeper", "%F0%9F%94%92", "100%25", "a%2Fb", "invoice:42"]);
    let entries = plain.list_children("/names/here/invoice:42").await.unwrap();
    assert!(entries[0].starts_with("_c_") && entries[0].ends_with("-lock-0000000000"), "{entries:?}");
    let listed: Vec<String> = client.list("").await.unwrap().into_iter().map(|status| status.name).collect();
    assert_eq!(listed, ["\u{1}", "..", "100%", "a/b", "invoice:42", "zookeeper", "🔒"]);
}

/// Each waiter watches one entry: a release tells the next one, and nobody else. (A holder of longer standing watches its own
/// entry, too.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_wakes_one_waiter() {
    const WAITERS: u64 = 50;
    let server = ZooKeeper::start();
    let (one, two) = (server.client().await, server.client().await);
    let holder = one.mutex("line").ttl(LONG).acquire().await.unwrap();
    let waiters: Vec<_> = (0..WAITERS)
        .map(|number| {
            let mutex = if number % 2 == 0 { &one } else { &two }.mutex("line").ttl(LONG);
            tokio::spawn(async move { mutex.acquire().await.unwrap().release().await.unwrap() })
        })
        .collect();
    until_line(&two, "line", 1, usize::try_from(WAITERS).unwrap()).await;
    eventually("all watch", async || server.statistic("zk_watch_count") >= WAITERS).await;
    assert!(server.statistic("zk_watch_count") <= WAITERS + 1, "one each, and the holder's own");
    let before = server.statistic("zk_sum_node_deleted_watch_count");
    holder.release().await.unwrap();
    for waiter in waiters {
        at_once("its turn", waiter).await.unwrap();
    }
    let told = server.statistic("zk_sum_node_deleted_watch_count") - before;
    assert!((WAITERS..=2 * WAITERS + 1).contains(&told), "{told} notifications for {WAITERS} hand-overs");
}
