//! What a Redis server can answer, and how it can be reached: each trouble has its kind, passes by itself when it can, and
//! costs no lock that need not be lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redis")]

use fencelock::{Client, Error, ErrorKind, Guard, Mode, Result, connect};
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::redis::{MASTER, RedisCluster, RedisSentinels, RedisServer};
use fencelock_testkit::wait::{at_once, eventually, line, until_free, until_line};
use futures_util::future::join_all;
use std::time::Duration;

const NAME: &str = "invoice:42";
const LONG: Duration = Duration::from_secs(120);
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];
const SECRET: &str = "hunter2-and-more";

async fn hold(client: &Client, mode: Mode) -> Guard {
    let ask = Ask { name: NAME, mode, ttl: LONG, label: "", owner: None };
    ask.of(client, Patience::Endless).await.unwrap().unwrap()
}

/// A client that does not try for long.
async fn hasty(server: &RedisServer) -> Client {
    connect(format!("{}?patience=200ms", server.url())).await.unwrap()
}

fn told(error: &Error, kind: ErrorKind, word: &str) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert!(text.contains(word) && text.lines().count() == 1, "{word:?} is not in {text:?}");
    assert!(!text.contains(SECRET) && !format!("{error:?}").contains(SECRET), "{text}");
}

/// The server reads its data after a restart, which takes a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loading_server_is_waited_for() {
    let mut server = RedisServer::start();
    let client = connect(format!("{}?quarantine=off", server.url())).await.unwrap();
    let hasty = hasty(&server).await;
    let guard = hold(&client, Mode::Exclusive).await;
    let fill = "for i = 1, 6000 do redis.call('SET', 'filler' .. i, string.rep('x', 100)) end";
    server.run(&["EVAL", fill, "0"]);
    server.run(&["SAVE"]);
    server.kill();
    server.begin_again(&[("key-load-delay", "100"), ("loading-process-events-interval-bytes", "1024")]);
    let mut loading = None;
    eventually("it says that it is loading", async || {
        let error = hasty.mutex("other").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        loading = Some(error.to_string()).filter(|text| text.contains("loading"));
        loading.is_some()
    })
    .await;
    let other = at_once("it is served after that", client.mutex("other").acquire()).await.unwrap();
    drop(guard.reenter().await.unwrap());
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    other.release().await.unwrap();
}

/// The server becomes a replica, as it does after a failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_is_unavailable_until_it_is_a_master_again() {
    let server = RedisServer::start();
    // What is in between is a quarantine otherwise: redis_takeover.rs.
    let at = |options: &str| connect(format!("{}?quarantine=off{options}", server.url()));
    let (client, hasty) = (at("").await.unwrap(), at("&patience=200ms").await.unwrap());
    for mode in MODES {
        let guard = hold(&client, mode).await;
        server.run(&["REPLICAOF", "127.0.0.1", "1"]);
        told(&hasty.mutex("other").acquire().await.unwrap_err(), ErrorKind::Unavailable, "read-only replica");
        assert!(guard.is_valid());
        server.run(&["REPLICAOF", "NO", "ONE"]);
        at_once("it is served", hasty.mutex("other").acquire()).await.unwrap().release().await.unwrap();
        drop(guard.reenter().await.unwrap());
        guard.release().await.unwrap();
    }
}

/// The server is out of memory: nothing new is granted, but what is held stays held, can be renewed, released and handed over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_memory_keeps_what_it_has() {
    let server = RedisServer::start();
    let (client, hasty) = (server.client().await, hasty(&server).await);
    for mode in MODES {
        let guard = hold(&client, mode).await;
        let waits = |label: &str| {
            let mutex = client.mutex(NAME).ttl(LONG).label(label);
            tokio::spawn(async move { mutex.acquire().await.unwrap() })
        };
        let next = waits("next");
        until_line(&client, NAME, 1, 1).await;
        let gives_up = waits("gives up");
        until_line(&client, NAME, 1, 2).await;
        server.run(&["CONFIG", "SET", "maxmemory", "1"]);
        told(&hasty.mutex("other").acquire().await.unwrap_err(), ErrorKind::Unavailable, "maxmemory");
        drop(guard.reenter().await.unwrap());
        // Over another connection as well.
        server.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        drop(guard.reenter().await.unwrap());
        gives_up.abort();
        until_line(&client, NAME, 1, 1).await;
        guard.release().await.unwrap();
        let next = at_once("the next one holds", next).await.unwrap();
        drop(next.reenter().await.unwrap());
        next.release().await.unwrap();
        server.run(&["CONFIG", "SET", "maxmemory", "0"]);
        hasty.mutex("other").acquire().await.unwrap().release().await.unwrap();
        client.settled().await;
        assert_eq!(line(&client, NAME).await, (0, 0));
    }
}

/// The server wants a password, or another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_asked_for_and_never_shown() {
    let server = RedisServer::options().password(SECRET).start();
    told(&connect(server.url()).await.unwrap_err(), ErrorKind::Invalid, "password");
    let client = connect(server.url_as("default", SECRET)).await.unwrap();
    assert!(!client.address().contains(SECRET) && !format!("{client:?}").contains(SECRET));
    let mutex = client.mutex(NAME);
    assert!(!format!("{mutex:?}").contains(SECRET));
    let guard = mutex.acquire().await.unwrap();
    assert!(!format!("{guard:?}").contains(SECRET));
    guard.release().await.unwrap();
    connect(format!("redis://:{SECRET}@127.0.0.1:{}", server.port())).await.unwrap();

    server.run(&["CONFIG", "SET", "requirepass", "another"]);
    told(&connect(server.url_as("default", SECRET)).await.unwrap_err(), ErrorKind::Invalid, "password");
    told(&connect(server.url_as("nobody", SECRET)).await.unwrap_err(), ErrorKind::Invalid, "password");
}

/// Servers and Sentinels have passwords and names of their own. The error says which of them is wrong, and what to write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_tells_a_server_from_a_sentinel() {
    let watched = RedisSentinels::with_passwords(Some((SECRET, "for-watch")));
    let hosts = watched.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port()));
    let hosts = hosts.collect::<Vec<_>>().join(",");
    let at = |user: &str, name: &str, options: &str| connect(format!("redis+sentinel://{user}{hosts}/{name}{options}"));
    let right = format!(":{SECRET}@");
    let invalid = |outcome: Result<Client>, word: &str| told(&outcome.unwrap_err(), ErrorKind::Invalid, word);
    at(&right, MASTER, "?sentinel_password=for-watch").await.unwrap();
    invalid(at(&right, MASTER, "").await, "sentinel_password=");
    invalid(at(&right, MASTER, "?sentinel_password=wrong").await, "sentinel_user=");
    invalid(at("", MASTER, "?sentinel_password=for-watch").await, "user:password@");
    invalid(at(":wrong@", MASTER, "?sentinel_password=for-watch").await, "refused user or password");
    invalid(at(&right, "lokcs", "?sentinel_password=for-watch").await, "it knows locks");
    let (server, sentinel) = (&watched.servers[0], &watched.sentinels[0]);
    invalid(connect(format!("redis://:for-watch@127.0.0.1:{}", sentinel.port())).await, "redis+sentinel://");
    let address = format!("127.0.0.1:{}", server.port());
    let mistaken = format!("redis+sentinel://{right}{address}/{MASTER}?sentinel_password={SECRET}");
    invalid(connect(mistaken).await, "no Sentinel");
    invalid(connect(format!("redis+cluster://{right}{address}")).await, "write redis://");
}

/// The same on a cluster, whose nodes are all asked: the error is not that none of them serves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_s_password_is_asked_for() {
    let cluster = RedisCluster::start();
    for node in &cluster.nodes {
        node.run(&["ACL", "SETUSER", "locks", "on", &format!(">{SECRET}"), "~*", "&*", "+@all"]);
    }
    let at = |user: &str| connect(cluster.url("").replace("://", &format!("://{user}@")));
    at(&format!("locks:{SECRET}")).await.unwrap().mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    told(&at("locks:wrong").await.unwrap_err(), ErrorKind::Invalid, "refused user or password");
    let of_one = connect(cluster.nodes[0].url()).await;
    let of_one = match of_one {
        Ok(client) => client.mutex(NAME).try_acquire().await.map(drop),
        Err(error) => Err(error),
    };
    told(&of_one.unwrap_err(), ErrorKind::Unsupported, "redis+cluster://");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_not_there_is_the_url_s_fault() {
    let server = RedisServer::start();
    told(&connect(format!("{}/99", server.url())).await.unwrap_err(), ErrorKind::Invalid, "no database of this number");
}

/// Whatever is wrong with a URL, its password is not repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_urls_do_not_give_the_password_away() {
    let dead = fencelock_testkit::redis::free_port();
    for url in [
        format!("redis://user:{SECRET}@127.0.0.1:{dead}"),
        format!("redis://user:{SECRET}@127.0.0.1:port"),
        format!("redis://user:{SECRET}@127.0.0.1:1/db"),
        format!("redis://user:{SECRET}@127.0.0.1:99999"),
        format!("redis://user:{SECRET}@"),
        format!("redis://user:{SECRET}@[::1"),
        format!("redis:user:{SECRET}@127.0.0.1"),
        format!("redis://user:{SECRET}%zz@127.0.0.1"),
        format!("redis://user:{SECRET}@127.0.0.1?what={SECRET}"),
        format!("redis://user:{SECRET}@127.0.0.1?ca=/nowhere"),
        format!("rediss://user:{SECRET}@127.0.0.1:{dead}?cert=/dev/null"),
        format!("redis+unix://user:{SECRET}@/nowhere"),
    ] {
        let error = connect(&url).await.map(drop).expect_err(&url);
        told(&error, error.kind(), "connect");
        assert!(matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unavailable), "{error:?}");
    }
}

/// What a user must be allowed to do, and nothing else; docs/engines/redis.md has the same list.
const RIGHTS: [&str; 29] = [
    "~*",
    "&fencelock:inbox:*",
    "+eval",
    "+evalsha",
    "+subscribe",
    "+publish",
    "+pubsub|numsub",
    "+info",
    "+scan",
    "+time",
    "+get",
    "+mget",
    "+getrange",
    "+append",
    "+set",
    "+del",
    "+exists",
    "+pttl",
    "+pexpire",
    "+hget",
    "+hset",
    "+hdel",
    "+zadd",
    "+zrem",
    "+zrange",
    "+zrank",
    "+zcard",
    "+zscore",
    "+zmscore",
];
/// Further ones, for what happens in the background or makes waiting behind foreign clients shorter.
const QUIET_RIGHTS: [&str; 4] = ["&__keyspace@0__:*", "+unsubscribe", "+zrangebyscore", "+zremrangebyscore"];

/// Uses everything that there is; the first error ends it.
async fn use_everything(server: &RedisServer, client: &Client) -> Result<()> {
    for mode in MODES {
        let ask = Ask { name: NAME, mode, ttl: LONG, label: "", owner: None };
        let guard = ask.of(client, Patience::Endless).await?.expect("it waits");
        drop(guard.reenter().await?);
        let outcome = client.mutex(NAME).acquire_timeout(Duration::from_millis(20)).await;
        outcome.map(drop).or_else(|error| if error.kind() == ErrorKind::Timeout { Ok(()) } else { Err(error) })?;
        settled(client).await;
        let mutex = client.mutex(NAME);
        let next = tokio::spawn(async move { mutex.acquire().await });
        while client.status(NAME).await?.waiters.is_empty() {
            if next.is_finished() {
                return next.await.expect("no panic").map(drop);
            }
        }
        guard.release().await?;
        next.await.expect("no panic")?.release().await?;
    }
    client.list("").await?;
    let guard = client.mutex(NAME).acquire().await?;
    client.evict(NAME).await?;
    guard.lost().await;
    server.run(&["SET", NAME, "somebody else", "PX", "20"]);
    client.mutex(NAME).acquire().await?.release().await?;
    settled(client).await;
    Ok(())
}

/// What goes on in the background does not come to an end where a right is missing.
async fn settled(client: &Client) {
    let _ = tokio::time::timeout(Duration::from_millis(100), client.settled()).await;
}

async fn with_rights(server: &RedisServer, rights: &[&str]) -> Result<()> {
    let mut command = vec!["ACL", "SETUSER", "locks", "reset", "resetchannels", "on", ">secret"];
    command.extend(rights);
    server.run(&["FLUSHALL"]);
    server.run(&["SCRIPT", "FLUSH"]);
    server.run(&command);
    server.run(&["ACL", "LOG", "RESET"]);
    let client = connect(format!("{}?patience=200ms", server.url_as("locks", "secret"))).await?;
    use_everything(server, &client).await
}

/// A user with few rights can use all locks; with one right less, the error says where to look.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn few_rights_are_enough_and_all_of_them_are_needed() {
    let server = RedisServer::start();
    let all: Vec<&str> = RIGHTS.iter().chain(&QUIET_RIGHTS).copied().collect();
    at_once("all of them", with_rights(&server, &all)).await.unwrap();
    assert_eq!(server.ask::<Vec<::redis::Value>>(&["ACL", "LOG"]), []);
    for right in &all {
        let fewer: Vec<&str> = all.iter().filter(|other| *other != right).copied().collect();
        let outcome = at_once(right, with_rights(&server, &fewer)).await;
        let denied: Vec<::redis::Value> = server.ask(&["ACL", "LOG"]);
        println!("{right}: {} denied, {outcome:?}", denied.len());
        assert!(!denied.is_empty(), "{right} is not needed");
        match outcome {
            Ok(()) => assert!(QUIET_RIGHTS.contains(right), "{right} is needed in the background only"),
            Err(error) => told(&error, ErrorKind::Invalid, "docs/engines/redis.md"),
        }
    }
}

/// The server grants, and what must follow is not allowed: that is told, once, and nothing stays behind until its lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_cannot_be_confirmed_is_taken_back() {
    let cluster = RedisCluster::start();
    let server = &cluster.nodes[cluster.master_of(cluster.slot(NAME))];
    let mutes = [("-wait", "?replicas=1"), ("-ssubscribe", "")];
    for (number, (right, options)) in mutes.into_iter().enumerate() {
        let user = format!("mute{number}");
        for node in &cluster.nodes {
            node.run(&["ACL", "SETUSER", &user, "on", ">secret", "~*", "&*", "+@all", right]);
        }
        let url = cluster.url(options).replace("://", &format!("://{user}:secret@"));
        let client = connect(url).await.unwrap();
        let claim = client.mutex(NAME).ttl(LONG);
        told(&claim.acquire().await.unwrap_err(), ErrorKind::Invalid, "redis-ha.md");
        assert!(!server.ask::<bool>(&["EXISTS", NAME]), "{right}");
    }
    // No other node has more replicas: nobody else is asked.
    let client = connect(cluster.url("?replicas=5&timeout=200ms")).await.unwrap();
    told(&client.mutex(NAME).acquire().await.unwrap_err(), ErrorKind::Unavailable, "only 1 of the 5 replicas");
    assert_eq!(server.calls(&["wait"]), 1);
    assert!(!server.ask::<bool>(&["EXISTS", NAME]));
}

/// The key of a lock holds something else: that lock cannot be used, all others can, also those of the same batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_under_the_name_spoils_only_that_lock() {
    let server = RedisServer::start();
    let client = server.client().await;
    server.run(&["RPUSH", NAME, "precious"]);
    let attempts: Vec<_> = (0..200)
        .map(|number| {
            let name = if number % 50 == 7 { NAME.to_owned() } else { format!("other:{number}") };
            let mutex = client.mutex(name);
            tokio::spawn(async move { (mutex.acquire().await.map(drop), number % 50 == 7) })
        })
        .collect();
    for attempt in attempts {
        match attempt.await.unwrap() {
            (outcome, true) => told(&outcome.unwrap_err(), ErrorKind::Invalid, "other data"),
            (outcome, false) => outcome.unwrap(),
        }
    }
    for outcome in [client.mutex(NAME).try_acquire().await.map(drop), client.status(NAME).await.map(drop)] {
        told(&outcome.unwrap_err(), ErrorKind::Invalid, NAME);
    }
    assert_eq!(server.ask::<Vec<String>>(&["LRANGE", NAME, "0", "-1"]), ["precious"]);
}

/// Releases that travelled with an operation that was refused are not told that they lost what they had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_operation_does_not_spoil_its_batch() {
    let server = RedisServer::start();
    let client = server.client().await;
    server.run(&["RPUSH", NAME, "precious"]);
    for _ in 0..10 {
        let mut guards = Vec::new();
        for number in 0..30 {
            guards.push(client.mutex(format!("other:{number}")).acquire().await.unwrap());
        }
        let spoiler = client.mutex(NAME);
        let spoilers = (0..10).map(|_| spoiler.try_acquire());
        let releases = guards.into_iter().map(Guard::release);
        let (refused, released) = tokio::join!(join_all(spoilers), join_all(releases));
        assert!(refused.iter().all(Result::is_err));
        for outcome in released {
            outcome.unwrap();
        }
        client.settled().await;
    }
}

/// A slow script of somebody else blocks the server for longer than anybody waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_server_is_unavailable_until_it_is_not() {
    let server = RedisServer::options().set("lua-time-limit", "50").start();
    let (client, hasty) = (server.client().await, hasty(&server).await);
    let guard = hold(&client, Mode::Exclusive).await;
    let slow = tokio::task::spawn_blocking({
        let url = server.url();
        move || {
            let mut connection = ::redis::Client::open(url).unwrap().get_connection().unwrap();
            let _ = ::redis::cmd("EVAL").arg("while true do end").arg(0).query::<()>(&mut connection);
        }
    });
    eventually("somebody's script blocks the server", async || {
        let outcome = hasty.mutex("other").try_acquire().await;
        outcome.is_err_and(|error| error.kind() == ErrorKind::Unavailable && error.to_string().contains("slow script"))
    })
    .await;
    server.run(&["SCRIPT", "KILL"]);
    slow.await.unwrap();
    at_once("it is served", hasty.mutex("other").acquire()).await.unwrap().release().await.unwrap();
    guard.release().await.unwrap();
}

/// The same locks over a socket of the file system, over TLS, and in the clear.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_and_tls_lead_to_the_same_locks() {
    let server = RedisServer::options().unix_socket().tls().start();
    let mut clients = Vec::new();
    for url in [server.url(), server.unix_url(), server.tls_url()] {
        clients.push(connect(&url).await.unwrap());
    }
    for one in &clients {
        let guard = one.mutex(NAME).acquire().await.unwrap();
        for other in &clients {
            assert!(other.mutex(NAME).try_acquire().await.unwrap().is_none());
        }
        let next = clients[2].mutex(NAME);
        let next = tokio::spawn(async move { next.acquire().await.unwrap() });
        until_line(one, NAME, 1, 1).await;
        guard.release().await.unwrap();
        at_once("it is handed over", next).await.unwrap().release().await.unwrap();
    }
    assert!(clients[1].address().starts_with("redis+unix://") && clients[2].address().starts_with("rediss://"));
    // Nobody whom this machine trusts has signed the certificate.
    let (untrusted, _) = server.tls_url().split_once('?').map(|(url, rest)| (url.to_owned(), rest.to_owned())).unwrap();
    let error = connect(untrusted).await.unwrap_err();
    told(&error, ErrorKind::Unavailable, "certificate");
    told(&error, ErrorKind::Unavailable, "check ca=");
}

/// Databases of one server are separate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_database_has_its_own_locks() {
    let server = RedisServer::options().notifying().start();
    let (zero, three) = (server.client().await, connect(format!("{}/3", server.url())).await.unwrap());
    let guard = zero.mutex(NAME).acquire().await.unwrap();
    let other = three.mutex(NAME).try_acquire().await.unwrap().expect("it is free there");
    assert_eq!(three.list("").await.unwrap().len(), 1);
    other.release().await.unwrap();
    assert_eq!(line(&zero, NAME).await, (1, 0));
    until_free(&three, NAME).await;
    guard.release().await.unwrap();
}
