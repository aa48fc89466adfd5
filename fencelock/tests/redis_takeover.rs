//! Redis servers that took over from others: what was lost on the way, who finds it out, and who waits for how long.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redis")]

use fencelock::{ErrorKind, Guard, Loss, Result, connect};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::redis::{RedisCluster, RedisPair, RedisServer, deafen_replicas};
use fencelock_testkit::wait::{at_once, eventually, in_time, until_line};
use std::time::{Duration, Instant};

const NAME: &str = "invoice:42";
/// Long enough for a failover to happen while it lasts.
const TTL: Duration = Duration::from_secs(6);

fn is_in_quarantine(attempt: &Result<Option<Guard>>) -> bool {
    attempt.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable && error.to_string().contains("another"))
}

/// The old master carries out a release, hands the lock over, and dies before the answer arrives; the new one has not heard of it. The
/// release is sent again, and proves nothing there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_release_hands_nothing_over_in_quarantine() {
    let mut pair = RedisPair::start().await;
    let proxies = [(); 3].map(|()| Proxy::to(pair.master.port()));
    let url = |proxy: &Proxy| format!("{}?ttl=6s&timeout=500ms&patience=20s", proxy.redis_url());
    let [one, two, three] = [
        connect(url(&proxies[0])).await.unwrap(),
        connect(url(&proxies[1])).await.unwrap(),
        connect(url(&proxies[2])).await.unwrap(),
    ];
    let first = one.mutex(NAME).acquire().await.unwrap();
    let second = two.mutex(NAME);
    let second = tokio::spawn(async move { second.acquire().await });
    until_line(&one, NAME, 1, 1).await;
    let third = three.mutex(NAME);
    let third = tokio::spawn(async move { third.acquire().await });
    until_line(&one, NAME, 1, 2).await;
    pair.replica.catch_up_with(&pair.master).await;
    deafen_replicas(&pair.master);
    proxies[0].mute();
    let released = tokio::spawn(first.release());
    let second = in_time("it is handed over", second).await.unwrap().unwrap();
    eventually("it is confirmed", async || second.valid_for() > TTL / 2).await;
    proxies[1].refuse();
    proxies[1].cut();
    pair.fail_over();
    for proxy in [&proxies[0], &proxies[2]] {
        proxy.lead_to(pair.replica.port());
        proxy.heal();
        proxy.cut();
    }
    in_time("an answer to the release", released).await.unwrap().unwrap();
    assert!(second.is_valid(), "it was too slow to tell anything");
    let third = in_time("its turn", third).await.unwrap().unwrap();
    assert!(!second.is_valid(), "two holders");
    assert!(third.token() > second.token());
}

/// A master that follows another one for a while and is promoted again is the same process, and keeps its connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_was_a_replica_meanwhile_is_in_quarantine() {
    // Whether it has heard that the other one granted something.
    for told in [true, false] {
        let RedisPair { master: a, replica: mut b } = RedisPair::start().await;
        let old = connect(format!("{}?ttl=3s", a.url())).await.unwrap();
        old.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
        b.promote();
        a.follow(&b).await;
        if !told {
            deafen_replicas(&b);
        }
        let url = if told { b.url() } else { b.url_as("default", "changed") };
        let between = connect(format!("{url}?ttl=3s")).await.unwrap();
        in_time("the first quarantine ends", between.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
        if told {
            a.catch_up_with(&b).await;
            deafen_replicas(&b);
        }
        let held = between.mutex(NAME).acquire().await.unwrap();
        b.kill();
        a.promote();
        let attempt = old.mutex(NAME).try_acquire().await;
        assert!(is_in_quarantine(&attempt), "an old connection, told {told}: {attempt:?}");
        let new = connect(format!("{}?ttl=3s", a.url())).await.unwrap();
        let attempt = new.mutex(NAME).try_acquire().await;
        assert!(is_in_quarantine(&attempt), "a new connection, told {told}: {attempt:?}");
        assert!(held.is_valid(), "it was too slow to tell anything");
        in_time("the second quarantine ends", old.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
        assert!(!held.is_valid(), "two holders");
    }
}

/// `strict`: the lease that counts is the one that is asked for, also when it is longer than the URL's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_young_server_waits_for_the_lease_that_is_asked_for() {
    let server = RedisServer::start();
    let client = connect(format!("{}?ttl=1s&quarantine=strict", server.url())).await.unwrap();
    in_time("it is old enough", client.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
    let attempt = client.mutex(NAME).ttl(Duration::from_secs(300)).try_acquire().await;
    assert!(is_in_quarantine(&attempt), "{attempt:?}");
}

/// The old master was told of a longer lease, and the new one was not. Whoever had it comes along and tells.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quarantine_is_prolonged_by_those_who_had_longer_leases() {
    let mut pair = RedisPair::start().await;
    let proxy = Proxy::to(pair.master.port());
    let first = connect(format!("{}?ttl=2s", proxy.redis_url())).await.unwrap();
    first.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    pair.replica.catch_up_with(&pair.master).await;
    deafen_replicas(&pair.master);
    let held = first.mutex(NAME).ttl(Duration::from_secs(60)).acquire().await.unwrap();
    proxy.refuse();
    pair.fail_over();
    let second = connect(format!("{}?ttl=2s", pair.replica.url())).await.unwrap();
    assert!(is_in_quarantine(&second.mutex(NAME).try_acquire().await));
    proxy.lead_to(pair.replica.port());
    proxy.heal();
    assert_eq!(at_once("it learns that it is gone", held.lost()).await, Loss::Taken);
    // The second one looks again when what it knows of is over.
    eventually("it is told of the longer one", async || {
        let attempt = second.mutex(NAME).try_acquire().await;
        assert!(is_in_quarantine(&attempt), "{attempt:?}");
        let told = attempt.unwrap_err().to_string();
        let span = told.split_once("for another ").and_then(|(_, rest)| rest.split_once(';')).unwrap().0;
        fencelock::parse_duration(span).unwrap() > Duration::from_secs(10)
    })
    .await;
}

/// A server hangs, and another one has taken its address. The client gives the connection up by itself: then too it looks after its
/// holds at once, not at the next renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loss_is_told_at_once_when_the_client_gives_up_a_connection() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::to(old.port());
    let client = connect(format!("{}?ttl=60s&timeout=500ms", proxy.redis_url())).await.unwrap();
    let held = client.mutex(NAME).acquire().await.unwrap();
    old.freeze();
    proxy.lead_to(new.port());
    client.mutex("other").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(at_once("it is told", held.lost()).await, Loss::Taken);
    old.thaw();
}

/// What a shard notes of who grants can move to another shard with its slot. Then its master is restarted from an older file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_lost_its_marker_is_in_quarantine_after_a_restart() {
    let mut cluster = RedisCluster::start();
    let shard = cluster.master_of(cluster.slot(NAME));
    let url = cluster.url("?ttl=30s&patience=15s");
    let first = connect(&url).await.unwrap();
    first.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let keys = cluster.nodes[shard].keys();
    let markers = keys.iter().filter(|(key, _)| key.starts_with("fencelock:n"));
    markers.for_each(|(marker, _)| cluster.nodes[shard].run(&["DEL", marker]));
    // Without replicas nothing else tells that it had a past.
    cluster.nodes[shard + 3].kill();
    cluster.nodes[shard].run(&["CONFIG", "SET", "repl-backlog-ttl", "1"]);
    let forgets = || cluster.nodes[shard].ask::<String>(&["INFO", "replication"]).contains("repl_backlog_active:0");
    eventually("it has no history", async || forgets()).await;
    cluster.nodes[shard].run(&["SAVE"]);
    let held = first.mutex(NAME).acquire().await.unwrap();
    cluster.nodes[shard].kill();
    cluster.nodes[shard].start_again();
    let second = connect(&url).await.unwrap();
    let attempt = in_time("an answer", second.mutex(NAME).try_acquire()).await;
    assert!(is_in_quarantine(&attempt), "{attempt:?}");
    drop(held);
}

/// The slot in which a shard notes who grants is on its way to another one, and stays so. The other locks of the shard are served, to
/// new clients too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_marker_that_is_on_its_way_stops_nobody() {
    let cluster = RedisCluster::start();
    let slot = cluster.slot(NAME);
    let shard = cluster.master_of(slot);
    let lowest = (0..slot).find(|slot| cluster.master_of(*slot) == shard).unwrap();
    let first = connect(cluster.url("?ttl=30s")).await.unwrap();
    first.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let served = std::sync::Mutex::new(None);
    let url = cluster.url("?ttl=30s&patience=2s");
    cluster.migrate_first(
        lowest,
        shard,
        (shard + 1) % 3,
        |_| false,
        || {
            let attempt = async {
                let second = connect(&url).await?;
                second.mutex(NAME).try_acquire().await
            };
            let attempt = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(attempt));
            *served.lock().unwrap() = Some(attempt);
        },
    );
    let attempt = served.lock().unwrap().take().unwrap();
    assert!(matches!(attempt, Ok(Some(_))), "{attempt:?}");
}

/// What is done for a hold over an old connection does not show that its server has not followed another one meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_over_an_old_connection_does_not_vouch_for_the_server() {
    let RedisPair { master: a, replica: mut b } = RedisPair::start().await;
    let old = connect(format!("{}?ttl=20s", a.url())).await.unwrap();
    let job = old.mutex("job").acquire().await.unwrap();
    let quiet_since = Instant::now();
    b.catch_up_with(&a).await;
    b.promote();
    a.follow(&b).await;
    let between = connect(format!("{}?ttl=20s&quarantine=off", b.url())).await.unwrap();
    deafen_replicas(&b);
    let held = between.mutex(NAME).acquire().await.unwrap();
    b.kill();
    a.promote();
    eventually("the connection was quiet", async || quiet_since.elapsed() > Duration::from_millis(1500)).await;
    job.release().await.unwrap();
    let attempt = old.mutex(NAME).try_acquire().await;
    assert!(is_in_quarantine(&attempt), "{attempt:?}");
    assert!(held.is_valid(), "it was too slow to tell anything");
}

/// Whoever accepts connections only to close them (a full server, a balancer with nothing behind it) is not overrun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_closed_at_once_are_not_made_without_a_pause() {
    let server = RedisServer::start();
    let proxy = Proxy::to(server.port());
    let client = connect(proxy.redis_url()).await.unwrap();
    let held = client.mutex(NAME).acquire().await.unwrap();
    // Nobody listens there.
    proxy.lead_to(1);
    let before = proxy.connections();
    proxy.cut();
    let start = Instant::now();
    eventually("a while", async || start.elapsed() > Duration::from_secs(2)).await;
    let made = proxy.connections() - before;
    assert!(made < 100, "{made} connections in two seconds");
    proxy.lead_to(server.port());
    eventually("it holds", async || held.confirm().await.is_ok()).await;
    held.release().await.unwrap();
}
