//! Redis that fails over and restarts: no second holder, whatever the new server does not know.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redis")]

use fencelock::{Client, ErrorKind, Guard, Loss, connect};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::redis::{MASTER, RedisCluster, RedisPair, RedisSentinels, RedisServer, deafen_replicas};
use fencelock_testkit::wait::{at_once, eventually, in_time, line, until_line};
use std::time::{Duration, Instant};

const NAME: &str = "invoice:42";
/// Long enough for a failover to happen while it lasts.
const TTL: Duration = Duration::from_secs(6);

async fn second_holder(policy: &str) -> (Guard, Option<Guard>) {
    let mut pair = RedisPair::start().await;
    // The first one is there before replication stops, as in life; what it locks is not replicated.
    let options = format!("?ttl=6s&patience=500ms&quarantine={policy}");
    let first = connect(format!("{}{options}", pair.master.url())).await.unwrap();
    first.mutex("before").acquire().await.unwrap().release().await.unwrap();
    pair.replica.catch_up_with(&pair.master).await;
    deafen_replicas(&pair.master);
    let held = first.mutex(NAME).acquire().await.unwrap();
    pair.fail_over();
    let second = connect(format!("{}{options}", pair.replica.url())).await.unwrap();
    let attempt = second.mutex(NAME).try_acquire().await;
    if let Err(error) = &attempt {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("took over") && error.to_string().contains("quarantine=off"), "{error}");
    }
    let got = attempt.ok().flatten();
    if got.is_none() {
        // Who gives up waiting is told why, and so is everybody who looks.
        let error = second.mutex(NAME).acquire_timeout(Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("took over") && error.to_string().contains("another "), "{error}");
        let seen = second.status(NAME).await.unwrap();
        assert!(!seen.is_held() && seen.obstacle.is_some_and(|why| why.contains("took over")));
        // A name that was never locked before is no better.
        assert!(second.mutex("never seen").try_acquire().await.is_err());
        // It does come, when every lease of the old master must have ended.
        let start = Instant::now();
        let next = in_time("the quarantine ends", second.mutex(NAME).acquire()).await.unwrap();
        println!("granted {:.1?} after the failover", start.elapsed());
        assert!(!held.is_valid(), "the first holder still believed");
        assert!(next.token() > held.token());
        assert_eq!(second.status(NAME).await.unwrap().obstacle, None);
        next.release().await.unwrap();
    }
    (held, got)
}

/// S11: the master dies before the lock reached the replica, which is promoted. Nobody gets the lock while the first believes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_grants_nothing_while_the_old_holder_believes() {
    let (_held, second) = second_holder("auto").await;
    assert!(second.is_none());
}

/// The same without the protection: that is what it protects from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_quarantine_a_failover_gives_two_holders() {
    let (held, second) = second_holder("off").await;
    assert!(held.is_valid() && second.is_some_and(|second| second.is_valid() && second.token() > held.token()));
}

/// A replica that never heard of any lock is told by its history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_that_knows_of_no_lock_waits_as_well() {
    let mut pair = RedisPair::start().await;
    deafen_replicas(&pair.master);
    pair.fail_over();
    let client = connect(format!("{}?ttl=2s", pair.replica.url())).await.unwrap();
    let error = client.mutex(NAME).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    in_time("the quarantine ends", client.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
    // Once is enough.
    let later = connect(format!("{}?ttl=2s", pair.replica.url())).await.unwrap();
    assert!(later.mutex(NAME).try_acquire().await.unwrap().is_some());
}

/// A restart from a file may lack the last writes. Who still has its key goes on, and may hand over; who lost it learns it at once;
/// nobody new comes in before time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_from_an_old_file_holders_go_on_and_nobody_new_comes_in() {
    let mut server = RedisServer::options().set("dbfilename", "old.rdb").start();
    let url = format!("{}?ttl=5s", server.url());
    let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let kept = one.mutex("kept").acquire().await.unwrap();
    let next = two.mutex("kept");
    let next = tokio::spawn(async move { next.acquire().await });
    until_line(&one, "kept", 1, 1).await;
    server.run(&["SAVE"]);
    let forgotten = one.mutex("forgotten").acquire().await.unwrap();
    server.kill();
    server.start_again();
    assert_eq!(at_once("it learns it at once", forgotten.lost()).await, Loss::Taken);
    drop(kept.reenter().await.unwrap());
    assert!(two.mutex("forgotten").try_acquire().await.is_err());
    eventually("the waiter is back", async || line(&two, "kept").await == (1, 1) || next.is_finished()).await;
    kept.release().await.unwrap();
    let handed = in_time("it is handed over", next).await.unwrap().unwrap();
    handed.release().await.unwrap();
    in_time("the quarantine ends", two.mutex("forgotten").acquire()).await.unwrap().release().await.unwrap();
}

/// An empty server cannot be told from a new one. `strict` lets it wait all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_strict_lets_an_empty_server_wait() {
    for (policy, waits) in [("auto", false), ("strict", true), ("off", false)] {
        let mut server = RedisServer::start();
        let url = format!("{}?ttl=3s&quarantine={policy}", server.url());
        let first = connect(&url).await.unwrap();
        drop(in_time("it is granted", first.mutex(NAME).acquire()).await.unwrap());
        server.kill();
        server.start_again();
        let second = connect(&url).await.unwrap();
        assert_eq!(second.mutex(NAME).try_acquire().await.is_err(), waits, "{policy}");
    }
    let error = connect("redis://127.0.0.1:1?quarantine=maybe").await.unwrap_err();
    assert!(error.to_string().contains("auto, strict or off"), "{error}");
}

/// A lease that is longer than any before is announced before it is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_quarantine_is_as_long_as_the_longest_lease() {
    let mut server = RedisServer::options().durable().start();
    let url = format!("{}?ttl=1s", server.url());
    let client = connect(&url).await.unwrap();
    let guard = client.mutex(NAME).ttl(Duration::from_secs(300)).acquire().await.unwrap();
    guard.release().await.unwrap();
    server.kill();
    server.start_again();
    let error = connect(&url).await.unwrap().mutex(NAME).try_acquire().await.unwrap_err();
    assert!(["another 300", "another 29"].iter().any(|span| error.to_string().contains(span)), "{error}");
}

/// On a cluster every shard hears of it, and a promoted replica finds what its predecessor noted, whoever connects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shard_waits_for_the_longest_lease_of_its_own() {
    let mut cluster = RedisCluster::start();
    let client = at_cluster(&cluster, "?ttl=1s&replicas=1").await;
    let shard_of = |cluster: &RedisCluster, name: &str| cluster.master_of(cluster.slot(name));
    let names: Vec<String> = (0..3)
        .map(|shard| (0..).map(|n| format!("n:{n}")).find(|name| shard_of(&cluster, name) == shard).unwrap())
        .collect();
    for name in &names {
        let guard = client.mutex(name).ttl(Duration::from_secs(300)).acquire().await.unwrap();
        guard.release().await.unwrap();
    }
    // The shard that heard of it last.
    cluster.nodes[2].kill();
    let promoted = || cluster.nodes[5].ask::<String>(&["INFO", "replication"]).contains("role:master");
    in_time("the replica is promoted", async { eventually("promoted", async || promoted()).await }).await;
    let other = at_cluster(&cluster, "?ttl=1s&patience=15s").await;
    let error = in_time("an answer", other.mutex(&names[2]).try_acquire()).await.unwrap_err();
    assert!(["another 300", "another 29"].iter().any(|span| error.to_string().contains(span)), "{error}");
}

/// Sentinels whose votes are split choose again after twice their timeout, which is 6 s here: a holder need not be lost by that.
const LEASE: Duration = Duration::from_secs(12);

async fn grant_after_failover(sentinels: &mut RedisSentinels, options: &str) -> (Duration, Guard, Guard) {
    let client = connect(sentinels.url(&format!("?ttl={}s&patience=20s&{options}", LEASE.as_secs()))).await.unwrap();
    let held = client.mutex(NAME).acquire().await.unwrap();
    let old = sentinels.master();
    sentinels.servers[old].kill();
    let start = Instant::now();
    let other = in_time("a lock is granted again", client.mutex("other").acquire()).await.unwrap();
    (start.elapsed(), held, other)
}

/// The switch is followed. What it costs is the quarantine and the Sentinels' decision; without quarantine the decision alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_failover_is_followed() {
    for policy in ["auto", "off"] {
        let mut sentinels = RedisSentinels::start();
        let (span, held, other) = grant_after_failover(&mut sentinels, &format!("quarantine={policy}")).await;
        println!("quarantine={policy}: granted again {span:.1?} after the master was killed (lease 12 s)");
        // It was replicated, and renewed at the new master.
        drop(in_time("it still holds", held.reenter()).await.unwrap());
        held.release().await.unwrap();
        other.release().await.unwrap();
        assert_eq!(policy == "auto", span >= LEASE, "{span:?}");
    }
}

/// A lock goes from one to the other and back, many times. The Sentinels see nothing of that, also when one of them is down.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_do_not_bother_the_sentinels() {
    const TIMES: u64 = 60;
    let mut sentinels = RedisSentinels::start();
    let url = sentinels.url("");
    sentinels.sentinels[2].kill();
    let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    let before = connections(&sentinels.sentinels[..2]);
    let mut guard = one.mutex(NAME).acquire().await.unwrap();
    for turn in 0..TIMES {
        let next = if turn % 2 == 0 { &two } else { &one }.mutex(NAME);
        let next = tokio::spawn(async move { next.acquire().await });
        until_line(&one, NAME, 1, 1).await;
        guard.release().await.unwrap();
        guard = at_once("its turn", next).await.unwrap().unwrap();
    }
    let more = connections(&sentinels.sentinels[..2]) - before;
    assert!(more < TIMES / 2, "{more} connections for {TIMES} hand-overs");
}

/// A switch that happens while no Sentinel can be heard is noticed when they can. The old master was not told either, so nothing
/// else says that it is none any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_switch_that_was_not_heard_of_is_noticed() {
    let sentinels = RedisSentinels::start();
    let proxies: Vec<_> = sentinels.sentinels.iter().map(|sentinel| Proxy::to(sentinel.port())).collect();
    let hosts: Vec<_> = proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
    let client = connect(format!("redis+sentinel://{}/{MASTER}?ttl=2s", hosts.join(","))).await.unwrap();
    let listens = |server: &RedisServer| !server.ask::<Vec<String>>(&["PUBSUB", "CHANNELS", "fencelock:*"]).is_empty();
    let old = sentinels.master();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let heard = |sentinel: &RedisServer| sentinel.ask::<String>(&["CLIENT", "LIST"]).contains(" sub=1 ");
    eventually("it listens to the Sentinels", async || sentinels.sentinels.iter().all(heard)).await;
    for proxy in &proxies {
        proxy.refuse();
        proxy.cut();
    }
    sentinels.servers[old].run(&["ACL", "SETUSER", "default", "-slaveof", "-replicaof", "-client|kill"]);
    sentinels.sentinels[0].run(&["SENTINEL", "FAILOVER", MASTER]);
    let new = sentinels.until_failover(old);
    let port = sentinels.servers[new].port().to_string();
    let is_done = |sentinel: &RedisServer| {
        let state = sentinel.ask::<Vec<String>>(&["SENTINEL", "MASTER", MASTER]);
        state.windows(2).any(|pair| pair[0] == "port" && pair[1] == port)
    };
    eventually("all have told it", async || sentinels.sentinels.iter().all(is_done)).await;
    assert!(listens(&sentinels.servers[old]), "something else told it");
    proxies.iter().for_each(Proxy::heal);
    eventually("it uses the new master", async || listens(&sentinels.servers[new])).await;
    let _guard = in_time("granted there", client.mutex(NAME).acquire()).await.unwrap();
    assert!(sentinels.servers[new].ask::<bool>(&["EXISTS", NAME]));
}

/// Sentinels that have not heard of a switch name the old master. However many they are, they are not believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_know_nothing_of_a_switch_are_not_believed() {
    let mut sentinels = RedisSentinels::start();
    let old = sentinels.master();
    sentinels.servers[old].kill();
    sentinels.until_failover(old);
    let cut_off = [sentinels.cut_off_sentinel(old), sentinels.cut_off_sentinel(old)];
    let [a, b] = cut_off.each_ref().map(RedisServer::port);
    let url = format!("redis+sentinel://127.0.0.1:{a},127.0.0.1:{b},");
    let client = connect(sentinels.url("?ttl=2s").replace("redis+sentinel://", &url)).await.unwrap();
    in_time("granted", client.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
}

/// Somebody sets the Sentinels up anew. Who was served before keeps its place meanwhile; who comes is told what is wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_the_sentinels_forget_for_a_while_costs_nobody_its_place() {
    let sentinels = RedisSentinels::start();
    let (patient, hasty) = (sentinels.url("?ttl=60s&patience=20s"), sentinels.url("?ttl=60s&patience=200ms"));
    let (one, two) = (connect(&patient).await.unwrap(), connect(&hasty).await.unwrap());
    let guard = one.mutex(NAME).acquire().await.unwrap();
    let next = two.mutex(NAME);
    let next = tokio::spawn(async move { next.acquire().await });
    until_line(&one, NAME, 1, 1).await;
    let master = &sentinels.servers[sentinels.master()];
    let all = |command: &[&str]| sentinels.sentinels.iter().for_each(|sentinel| sentinel.run(command));
    all(&["SENTINEL", "REMOVE", MASTER]);
    master.run(&["CLIENT", "KILL", "TYPE", "normal"]);
    master.run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    for _ in 0..5 {
        let error = two.status(NAME).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("watches over no master of this name; it knows none"), "{error}");
    }
    assert!(two.obstacle(NAME).is_some_and(|why| why.contains("no Sentinel tells")));
    let error = connect(&hasty).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(!next.is_finished(), "it lost its place");
    all(&["SENTINEL", "MONITOR", MASTER, "127.0.0.1", &master.port().to_string(), "2"]);
    in_time("it is released", guard.release()).await.unwrap();
    in_time("it is its turn", next).await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(two.obstacle(NAME), None);
}

/// What was in the way for a moment is not told of when it is over, whether somebody tells who serves what or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_back_is_in_nobody_s_way() {
    let cluster = RedisCluster::start();
    let client = at_cluster(&cluster, "?ttl=2s&timeout=200ms&patience=300ms").await;
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let node = &cluster.nodes[cluster.master_of(cluster.slot(NAME))];
    for node in &cluster.nodes {
        node.run(&["ACL", "SETUSER", "default", "-cluster|slots"]);
    }
    node.freeze();
    eventually("it is in the way", async || client.status(NAME).await.is_err() && client.obstacle(NAME).is_some())
        .await;
    node.thaw();
    eventually("it is back", async || client.status(NAME).await.is_ok()).await;
    assert_eq!(client.obstacle(NAME), None);
}

/// Who comes when the old master is dead and the new one not yet named waits for it, as those do who were there before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_comes_in_the_middle_of_a_failover_is_served_after_it() {
    let mut sentinels = RedisSentinels::start();
    let old = sentinels.master();
    sentinels.servers[old].kill();
    let client = connect(sentinels.url("?ttl=2s&patience=20s")).await.unwrap();
    in_time("the quarantine ends", client.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
}

/// Passwords for both kinds of server; they are shown to nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_have_passwords_of_their_own() {
    let sentinels = RedisSentinels::with_passwords(Some(("for-data", "for-watch")));
    let url = sentinels.url("?sentinel_password=for-watch").replacen("://", "://:for-data@", 1);
    let client = connect(&url).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    assert!(!client.address().contains("for-"), "{}", client.address());
    for bad in [sentinels.url(""), sentinels.url("?sentinel_password=for-watch"), url.replace("for-data", "wrong")] {
        let error = connect(&bad).await.unwrap_err();
        assert!(!error.to_string().contains("for-data") && !error.to_string().contains("for-watch"), "{error}");
    }
    let unknown = connect(url.replace("/locks", "/nobody")).await.unwrap_err();
    assert!(unknown.to_string().contains("\"nobody\""), "{unknown}");
}

/// `replicas=2`: with one replica gone, a grant does not count, is taken back, and the error says so. 0 asks nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_too_few_replicas_have_is_taken_back() {
    let sentinels = RedisSentinels::start();
    let client = connect(sentinels.url("?replicas=2&timeout=600ms")).await.unwrap();
    let plain = connect(sentinels.url("")).await.unwrap();
    let master = &sentinels.servers[sentinels.master()];
    let guard = client.mutex(NAME).acquire().await.unwrap();
    // Handed over, it counts as well.
    let waiting = client.mutex(NAME);
    let waiting = tokio::spawn(async move { waiting.acquire().await });
    until_line(&plain, NAME, 1, 1).await;
    guard.release().await.unwrap();
    let guard = in_time("its turn", waiting).await.unwrap().unwrap();
    let replica = (sentinels.master() + 1) % 3;
    sentinels.servers[replica].freeze();
    let error = client.mutex("other").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("1 of the 2 replicas"), "{error}");
    assert_eq!(line(&plain, "other").await, (0, 0));
    let next = client.mutex(NAME);
    let next = tokio::spawn(async move { next.acquire().await });
    until_line(&plain, NAME, 1, 1).await;
    guard.release().await.unwrap();
    let error = in_time("it is told", next).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("1 of the 2 replicas"), "{error}");
    client.settled().await;
    assert_eq!(line(&plain, NAME).await, (0, 0));
    sentinels.servers[replica].thaw();
    let waits = master.calls(&["wait"]);
    plain.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    assert_eq!(master.calls(&["wait"]), waits, "nobody asked for replicas");
}

async fn at_cluster(cluster: &RedisCluster, options: &str) -> Client {
    connect(cluster.url(options)).await.unwrap()
}

/// S12: the slot of locks that are held and waited for moves to another node, key by key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_lock_is_lost_when_its_slot_moves() {
    let cluster = RedisCluster::start();
    let (one, two) = (at_cluster(&cluster, "?ttl=20s").await, at_cluster(&cluster, "?ttl=20s").await);
    let slot = cluster.slot(NAME);
    let from = cluster.master_of(slot);
    let to = (from + 1) % 3;
    let guard = one.mutex(NAME).acquire().await.unwrap();
    let waiting = two.mutex(NAME);
    let waiting = tokio::spawn(async move { waiting.acquire().await });
    until_line(&one, NAME, 1, 1).await;
    cluster.migrate(slot, from, to, || {});
    drop(in_time("it still holds", guard.reenter()).await.unwrap());
    eventually("the waiter waits there", async || line(&one, NAME).await == (1, 1)).await;
    guard.release().await.unwrap();
    let guard = in_time("its turn", waiting).await.unwrap().unwrap();
    // In the middle of the next move, operations wait or go where the keys are.
    let token = guard.token();
    let meanwhile = std::sync::Mutex::new(None);
    cluster.migrate(slot, to, from, || {
        *meanwhile.lock().unwrap() = Some(tokio::spawn(async move { guard.release().await }));
        std::thread::sleep(Duration::from_millis(100));
    });
    let release = meanwhile.lock().unwrap().take().unwrap();
    in_time("released in the middle", release).await.unwrap().unwrap();
    let next = in_time("free again", two.mutex(NAME).acquire()).await.unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
}

/// In the middle of a move, a node has a part of the keys of a lock. It does not take it for all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_of_a_lock_is_not_taken_for_all_of_it() {
    let cluster = RedisCluster::start();
    let client = at_cluster(&cluster, "?ttl=20s&patience=1s").await;
    let slot = cluster.slot(NAME);
    let from = cluster.master_of(slot);
    let semaphore = client.semaphore(NAME, 2);
    let held = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
    let try_now =
        || tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(semaphore.try_acquire()));
    // All but who holds.
    let first = |key: &str| !key.starts_with("fencelock:d:");
    cluster.migrate_first(slot, from, (from + 1) % 3, first, || {
        assert!(!matches!(try_now(), Ok(Some(_))), "a third permit of two");
    });
    assert!(in_time("an answer", semaphore.try_acquire()).await.unwrap().is_none());
    for guard in held {
        guard.release().await.unwrap();
    }
}

/// The slot of a lock is on its way to another node, one that has served nothing before among them. Who asks meanwhile is told so
/// when its patience ends, and has not bothered the servers; who waits keeps its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_turned_away_while_a_slot_is_on_its_way() {
    let mut cluster = RedisCluster::start();
    let url = cluster.url("?ttl=20s&patience=1s");
    cluster.add_node();
    let slot = cluster.slot(NAME);
    let mut from = cluster.master_of(slot);
    for to in [(from + 1) % 3, 6] {
        let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
        let guard = in_time("granted", one.mutex(NAME).acquire()).await.unwrap();
        let waiting = two.mutex(NAME);
        let waiting = tokio::spawn(async move { waiting.acquire().await });
        until_line(&one, NAME, 1, 1).await;
        let in_between = async {
            let before = connections(&cluster.nodes);
            // Everybody looks for itself.
            cluster.nodes[from].run(&["CLIENT", "KILL", "TYPE", "pubsub"]);
            let seen = in_time("an answer", one.status(NAME)).await.unwrap_err();
            let other = in_time("an answer", one.mutex(format!("{{{NAME}}}")).try_acquire()).await.unwrap_err();
            for error in [seen, other] {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                assert!(error.to_string().contains("is being moved"), "{error}");
            }
            let more = connections(&cluster.nodes) - before;
            assert!(more < 100, "{more} connections");
            assert!(!waiting.is_finished(), "thrown out");
        };
        // All keys have gone, and nobody serves them yet.
        cluster.migrate_first(
            slot,
            from,
            to,
            |_| true,
            || {
                tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(in_between));
            },
        );
        in_time("released", guard.release()).await.unwrap();
        in_time("its turn", waiting).await.unwrap().unwrap().release().await.unwrap();
        from = to;
    }
}

fn connections(servers: &[RedisServer]) -> u64 {
    let made = |server: &RedisServer| {
        let info = server.ask::<String>(&["INFO", "stats"]);
        let count = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        count.unwrap().trim().parse::<u64>().unwrap()
    };
    servers.iter().map(made).sum()
}

/// A master that is cut off from the others tells clients what it knew before, for ever. They do not go by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_cut_off_is_not_believed() {
    let mut cluster = RedisCluster::start();
    let shard = cluster.master_of(cluster.slot(NAME));
    cluster.cut_off(shard);
    let promoted = || cluster.nodes[shard + 3].ask::<String>(&["INFO", "replication"]).contains("role:master");
    in_time("the replica is promoted", async { eventually("promoted", async || promoted()).await }).await;
    // In which order nodes are asked is a matter of luck.
    for _ in 0..12 {
        let url = format!("redis+cluster://127.0.0.1:{}?quarantine=off", cluster.nodes[shard].port());
        let client = connect(url).await.unwrap();
        client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    }
}

/// While a client looks for the successor of one node, and another one does not answer, it hears what the rest has to say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_go_on_while_the_cluster_is_looked_at() {
    let mut cluster = RedisCluster::start();
    let here = cluster.master_of(cluster.slot(NAME));
    let (gone, silent) = ((here + 1) % 3, (here + 2) % 3);
    let at_gone = (0..).map(|n| format!("n:{n}")).find(|name| cluster.master_of(cluster.slot(name)) == gone).unwrap();
    let [near, far] = [here, silent].map(|node| {
        let proxy = Proxy::to(cluster.nodes[node].port());
        cluster.nodes[node].run(&["CONFIG", "SET", "cluster-announce-port", &proxy.port().to_string()]);
        cluster.nodes[node].run(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
        proxy
    });
    let announced = || {
        let slots = cluster.nodes[here].ask::<String>(&["CLUSTER", "NODES"]);
        [&near, &far].iter().all(|proxy| slots.contains(&format!(":{}@", proxy.port())))
    };
    eventually("the proxies are known", async || announced()).await;
    let url = format!("redis+cluster://127.0.0.1:{}?timeout=8s&ttl=20s", near.port());
    let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
    two.mutex(at_gone).acquire().await.unwrap().release().await.unwrap();
    let guard = one.mutex(NAME).acquire().await.unwrap();
    let waiting = two.mutex(NAME);
    let waiting = tokio::spawn(async move { waiting.acquire().await });
    until_line(&one, NAME, 1, 1).await;
    // Who does not take what it is given is passed over.
    let next = one.mutex(NAME);
    let next = tokio::spawn(async move { next.acquire().await });
    until_line(&one, NAME, 1, 2).await;
    near.refuse();
    far.partition();
    let before = far.connections();
    cluster.nodes[gone].kill();
    eventually("it looks for a successor", async || far.connections() > before).await;
    guard.release().await.unwrap();
    let first = tokio::select! {
        first = waiting => first,
        _ = next => panic!("it was passed over"),
    };
    first.unwrap().unwrap().release().await.unwrap();
}

/// A master of a cluster dies; its replica takes over, and is in quarantine. The other shards are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_fails_over_is_in_quarantine_alone() {
    let mut cluster = RedisCluster::start();
    let client = at_cluster(&cluster, "?ttl=6s&patience=15s").await;
    let shard = cluster.master_of(cluster.slot(NAME));
    let elsewhere =
        (0..).map(|number| format!("other:{number}")).find(|name| cluster.master_of(cluster.slot(name)) != shard);
    let elsewhere = elsewhere.unwrap();
    let held = client.mutex(NAME).acquire().await.unwrap();
    cluster.nodes[shard].kill();
    let start = Instant::now();
    in_time("other shards go on", client.mutex(&elsewhere).acquire()).await.unwrap().release().await.unwrap();
    let same_shard = client.mutex(format!("{{{NAME}}}"));
    let other = in_time("granted again", same_shard.acquire()).await.unwrap();
    println!("granted again {:.1?} after the shard's master was killed (lease 6 s)", start.elapsed());
    assert!(start.elapsed() >= TTL);
    drop(in_time("it still holds", held.reenter()).await.unwrap());
    held.release().await.unwrap();
    other.release().await.unwrap();
}

/// A client that acquires when it is told to, and is stopped right after that: nothing runs behind its guard.
struct Paused {
    acquire: std::sync::mpsc::Sender<()>,
    guard: tokio::sync::oneshot::Receiver<Guard>,
}

impl Paused {
    async fn connect(url: String) -> Self {
        let (acquire, wait) = std::sync::mpsc::channel();
        let (tell, guard) = tokio::sync::oneshot::channel();
        let (ready, connected) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = connect(url).await.unwrap();
                client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
                ready.send(()).unwrap();
                wait.recv().unwrap();
                tell.send(client.mutex(NAME).acquire().await.unwrap()).unwrap();
                // For as long as the other end lives.
                let _ = wait.recv();
            });
        });
        connected.await.unwrap();
        Self { acquire, guard }
    }
}

/// S11 in a cluster: the shard's master dies before the lock reached its replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_gives_no_second_holder_unless_it_is_told_to() {
    for (policy, second_holder) in [("auto", false), ("off", true)] {
        let mut cluster = RedisCluster::start();
        let shard = cluster.master_of(cluster.slot(NAME));
        let url = cluster.url(&format!("?ttl=12s&patience=15s&quarantine={policy}"));
        let second = connect(&url).await.unwrap();
        let Paused { acquire, guard } = Paused::connect(url).await;
        deafen_replicas(&cluster.nodes[shard]);
        acquire.send(()).unwrap();
        let held = guard.await.unwrap();
        cluster.nodes[shard].kill();
        let promoted = || cluster.nodes[shard + 3].ask::<String>(&["INFO", "replication"]).contains("role:master");
        in_time("the replica is promoted", async { eventually("promoted", async || promoted()).await }).await;
        let attempt = in_time("an answer", second.mutex(NAME).try_acquire()).await;
        assert!(held.is_valid(), "it was too slow to tell anything");
        assert_eq!(matches!(attempt, Ok(Some(_))), second_holder, "{policy}: {attempt:?}");
    }
}

/// Names with any braces, and words of hand-overs that stay on their node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_on_a_cluster_are_not_broadcast() {
    let cluster = RedisCluster::start();
    let client = at_cluster(&cluster, "").await;
    for name in [NAME, "{a}b", "a{b", "}{", "{}x", "{{y}}", "z}"] {
        let guard = client.mutex(name).acquire().await.unwrap();
        let waiting = client.mutex(name);
        let waiting = tokio::spawn(async move { waiting.acquire().await });
        until_line(&client, name, 1, 1).await;
        guard.release().await.unwrap();
        at_once("its turn", waiting).await.unwrap().unwrap().release().await.unwrap();
    }
    for node in &cluster.nodes {
        assert_eq!(node.calls(&["publish"]), 0);
    }
    assert!(cluster.nodes.iter().map(|node| node.calls(&["spublish"])).sum::<u64>() >= 7);
}

/// What is wrong with a URL is said before anything is touched.
#[tokio::test]
async fn bad_urls_are_refused() {
    for (url, word) in [
        ("redis+sentinel://a,b,c", "master"),
        ("redis+sentinel://a:x,b/locks", "port"),
        ("redis+sentinel://a,,b/locks", "host"),
        ("redis+sentinel://a/locks/x", "database"),
        ("redis+cluster://a,b/0", "no databases"),
        ("redis+cluster://", "host"),
        ("redis+cluster://a?sentinel_user=x", "sentinel"),
        ("redis+sentinel://a/locks?replicas=many", "number"),
        ("redis+cluster://a?ca=/nowhere", "ca=/nowhere"),
    ] {
        let error = connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
        assert!(error.to_string().contains(word), "{url}: {error}");
    }
}
