//! Redlock when nodes are slow, gone, forgetful or wrong about the time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redlock")]

use fencelock::{Client, ErrorKind, Loss, connect};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::redlock::{Nodes, TOKENS, url, value};
use fencelock_testkit::wait::{at_once, eventually, in_time, until_free, until_line};
use std::io::{BufRead, BufReader, Write};
use std::time::{Duration, Instant};

const NAME: &str = "invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);

/// Five nodes, a client that reaches them directly, and one that reaches each through a network of its own.
struct World {
    nodes: Nodes,
    proxies: Vec<Proxy>,
    near: Client,
    far: Client,
}

impl World {
    async fn new(options: &str) -> Self {
        Self::around(Nodes::start(5), options).await
    }

    async fn around(nodes: Nodes, options: &str) -> Self {
        let proxies: Vec<Proxy> = nodes.servers.iter().map(|server| Proxy::to(server.port())).collect();
        let ports: Vec<u16> = proxies.iter().map(Proxy::port).collect();
        let near = connect(format!("{}?{options}", nodes.url())).await.unwrap();
        let far = connect(format!("{}?{options}", url(&ports))).await.unwrap();
        far.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
        near.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
        Self { nodes, proxies, near, far }
    }

    /// The far client does not reach these nodes any more, and knows it.
    async fn cut(&self, which: &[usize]) {
        for index in which {
            self.proxies[*index].refuse();
            self.proxies[*index].cut();
        }
        // Whatever it sends now reaches the others only.
        for _ in 0..3 {
            self.far.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// On which nodes the lock's key is.
    fn keys(&self) -> Vec<bool> {
        self.nodes.servers.iter().map(|server| server.ask::<u64>(&["EXISTS", NAME]) == 1).collect()
    }
}

async fn refused(url: &str, expected: &str) {
    let error = connect(url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let text = error.to_string();
    assert!(text.contains(expected) && text.lines().count() == 1 && !text.contains("secret"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urls_that_make_no_sense_are_refused() {
    refused("redlock://a:secret@h1,h2", "at least 3").await;
    refused("redlock://:secret@h1,h2,h1", "twice").await;
    refused("redlock://h1,,h3", "redlock://").await;
    refused("redlock:", "redlock://").await;
    refused("redlock://h1,h2,h3?what=1", "max_ttl").await;
    refused("redlock://h1,h2,h3?quarantine=maybe", "strict").await;
    refused("redlock://h1,h2,h3?max_ttl=25h", "24h").await;
    refused("redlock://h1,h2,h3?timeout=0s", "timeout").await;
    refused("redlock://h1,h2,h3?ca=/nowhere", "ca").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_databases_and_even_numbers_are_accepted() {
    let nodes = Nodes::start_with(4, &RedisServer::options().password("secret"));
    let ports: Vec<String> = nodes.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    let client = connect(format!("redlock://:secret@{}/3", ports.join(","))).await.unwrap();
    let guard = client.mutex(NAME).acquire().await.unwrap();
    assert!(!format!("{client:?}").contains("secret"));
    assert_eq!(nodes.holding(NAME), 0, "it is in another database");
    guard.release().await.unwrap();
    let error = connect(format!("redlock://:wrong@{}", ports.join(","))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(!error.to_string().contains("wrong@"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_nodes_would_not_wait_for_is_refused() {
    let nodes = Nodes::start(3);
    let client = connect(format!("{}?max_ttl=10s&ttl=5s", nodes.url())).await.unwrap();
    let error = client.mutex(NAME).ttl(Duration::from_secs(11)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("max_ttl"), "{error}");
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
}

/// S13. Were anybody to wait for the stopped nodes, it would take longer than "at once".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_stopped_minority() {
    let nodes = Nodes::start(5);
    let client = connect(format!("{}?timeout=60s", nodes.url())).await.unwrap();
    for stopped in [1, 3] {
        nodes.servers[stopped].freeze();
        for _ in 0..20 {
            let guard = at_once("acquired", client.mutex(NAME).acquire()).await.unwrap();
            assert!(at_once("busy", client.mutex(NAME).try_acquire()).await.unwrap().is_none());
            at_once("released", guard.release()).await.unwrap();
        }
    }
    // What is held stays held, and is renewed.
    let short = Duration::from_millis(900);
    let guard = at_once("acquired", client.mutex(NAME).ttl(short).acquire()).await.unwrap();
    let until = tokio::time::Instant::now() + short * 3;
    eventually("three leases have passed", async || tokio::time::Instant::now() > until).await;
    assert!(guard.is_valid());
    at_once("released", guard.release()).await.unwrap();
    // When they are back they get what they missed, long before any lease ends.
    let held = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    nodes.servers[1].thaw();
    nodes.servers[3].thaw();
    held.release().await.unwrap();
    eventually("no node keeps the lock", async || nodes.holding(NAME) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_the_error_names_every_node() {
    let mut nodes = Nodes::start(5);
    let client = connect(format!("{}?timeout=200ms&patience=300ms", nodes.url())).await.unwrap();
    let guard = client.mutex(NAME).ttl(Duration::from_secs(2)).acquire().await.unwrap();
    for index in [0, 2, 4] {
        nodes.servers[index].kill();
    }
    let error = client.mutex("another").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    for server in &nodes.servers {
        assert!(text.contains(&format!("127.0.0.1:{}", server.port())), "{text}");
    }
    assert!(text.contains("2 of 5") && text.contains("3 are needed") && !text.contains('\n'), "{text}");
    assert_eq!(client.mutex("another").acquire().await.unwrap_err().kind(), ErrorKind::Unavailable);
    // A hold that cannot be renewed is lost by the local clock.
    assert_eq!(at_once("it is told", guard.lost()).await, Loss::Deadline);
}

/// Most nodes refuse for good, and one has granted before that was known: it is given back there, not left until its lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_most_nodes_refuse_is_given_back_by_the_others() {
    let nodes = Nodes::start(3);
    for server in &nodes.servers[..2] {
        server.run(&["RPUSH", NAME, "precious"]);
    }
    let client = connect(nodes.url()).await.unwrap();
    for wait in [false, true] {
        let mutex = client.mutex(NAME).ttl(LONG);
        let error = if wait { mutex.acquire().await.map(Some) } else { mutex.try_acquire().await }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("other data"), "{error}");
        eventually("it is given back", async || !nodes.servers[2].ask::<bool>(&["EXISTS", NAME])).await;
    }
}

/// One server has one vote, under however many names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_two_names_is_not_two_nodes() {
    let nodes = Nodes::start(3);
    let [one, two, _] = [0, 1, 2].map(|index| nodes.servers[index].port());
    for options in ["", "?quarantine=off"] {
        let error = connect(format!("redlock://127.0.0.1:{one},127.0.0.1:{two},localhost:{one}{options}")).await;
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("the same server"), "{error}");
    }
}

/// Whoever connects finds the same: too few nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connecting_without_a_majority_fails() {
    let mut nodes = Nodes::start(3);
    nodes.servers[0].kill();
    nodes.servers[1].kill();
    let error = connect(nodes.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains(&nodes.servers[0].port().to_string()), "{error}");
}

/// S14: A holds on nodes 0, 1 and 2; node 2 comes back empty; B could get 2, 3 and 4.
async fn restarted_empty(options: &str) -> (World, fencelock::Guard) {
    let mut world = World::new(options).await;
    world.cut(&[3, 4]).await;
    let guard = world.far.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    assert_eq!(world.keys(), [true, true, true, false, false]);
    world.nodes.servers[2].kill();
    world.nodes.servers[2].start_again();
    eventually("it is reached again", async || world.near.mutex("warm-up").acquire().await.is_ok()).await;
    (world, guard)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_came_back_empty_does_not_vote() {
    let (world, guard) = restarted_empty("patience=3s&timeout=5s").await;
    assert!(world.near.mutex(NAME).try_acquire().await.unwrap().is_none(), "two holders");
    // A client that comes later sees it as well.
    let late = connect(format!("{}?patience=3s&timeout=5s", world.nodes.url())).await.unwrap();
    assert!(late.mutex(NAME).try_acquire().await.unwrap().is_none(), "two holders");
    assert!(guard.is_valid());
    guard.release().await.unwrap();
}

/// The same without the protection, which shows that the test above can fail. The token tells who is newer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_quarantine_there_are_two_holders_and_the_newer_has_the_higher_token() {
    let (world, first) = restarted_empty("quarantine=off&timeout=5s").await;
    let second = at_once("nodes 2, 3 and 4 vote for it", world.near.mutex(NAME).ttl(LONG).acquire()).await.unwrap();
    assert!(first.is_valid() && second.is_valid());
    assert!(second.token() > first.token());
}

/// Three of five came back empty: nobody gets anything until all leases of before are over. Whoever does not wait is told why; whoever does
/// gets it then, and is told why if its time is up before, as is everybody who looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_that_came_back_empty_is_waited_for() {
    let mut nodes = Nodes::start(5);
    let url = format!("{}?patience=1s&timeout=5s&max_ttl=6s&ttl=2s", nodes.url());
    let client = connect(&*url).await.unwrap();
    let first = client.mutex(NAME).acquire().await.unwrap();
    for index in [1, 2, 3] {
        nodes.servers[index].kill();
        nodes.servers[index].start_again();
    }
    let late = connect(&*url).await.unwrap();
    let three = |text: &str| text.matches("does not vote for another").count() == 3;
    let error = late.mutex("another").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(three(&error.to_string()), "{error}");
    let error = late.mutex("another").acquire_timeout(Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(three(&error.to_string()), "{error}");
    let seen = late.status("another").await.unwrap();
    assert!(!seen.is_held() && seen.obstacle.as_deref().is_some_and(three), "{seen:?}");
    drop(first);
    in_time("they vote again", late.mutex("another").acquire()).await.unwrap().release().await.unwrap();
    assert_eq!(late.status("another").await.unwrap().obstacle, None);
}

/// A quarantine is waited for, nodes that are gone are not: not even if they were in quarantine before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_die_in_quarantine_are_not_waited_for() {
    let mut nodes = Nodes::start(3);
    let url = format!("{}?patience=1s&max_ttl=300s", nodes.url());
    let client = connect(&*url).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    for index in [1, 2] {
        nodes.servers[index].kill();
        nodes.servers[index].start_again();
    }
    let in_quarantine = async || client.status(NAME).await.is_ok_and(|seen| seen.obstacle.is_some());
    eventually("the nodes are in quarantine", in_quarantine).await;
    let mutex = client.mutex(NAME);
    let waits = tokio::spawn(async move { mutex.acquire().await });
    let took_part = || nodes.servers[1].calls(&["evalsha", "eval"]);
    let before = took_part();
    eventually("it waits", async || took_part() > before + 2).await;
    assert!(!waits.is_finished());
    for index in [1, 2] {
        nodes.servers[index].kill();
    }
    let error = at_once("its patience ends", waits).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// Where nodes keep it in mind that they are no new set.
const FOUNDED: &str = "fencelock:redlock:founded";

/// Nodes that have been up for so long, and know nothing of it.
async fn old_nodes(seconds: u64) -> Nodes {
    let nodes = Nodes::start(5);
    let uptime = |server: &RedisServer| -> Option<u64> {
        let info: String = server.ask(&["INFO", "server"]);
        info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:")?.trim().parse().ok())
    };
    let old = |server: &RedisServer| uptime(server) >= Some(seconds);
    eventually("they are old", async || nodes.servers.iter().all(old)).await;
    nodes
}

/// One after the other: the client works with each again before the next one goes.
async fn restart_all_empty(nodes: &mut Nodes, client: &Client) {
    for server in &mut nodes.servers {
        server.kill();
        server.start_again();
        let asked = async || client.status(NAME).await.is_ok() && server.calls(&["evalsha", "eval"]) > 0;
        eventually("the client is back", asked).await;
    }
}

/// All nodes have forgotten everything, but not at the same moment: a lease of before may stand, and whoever was there knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_restart_one_after_the_other_are_no_new_set() {
    let longest = Duration::from_secs(3);
    let mut nodes = old_nodes(4).await;
    let url = format!("{}?patience=200ms&timeout=5s&max_ttl=3s&ttl=2s", nodes.url());
    let client = connect(&*url).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let started = Instant::now();
    restart_all_empty(&mut nodes, &client).await;
    eventually("they vote again", async || client.mutex(NAME).try_acquire().await.is_ok()).await;
    assert!(started.elapsed() >= longest, "served after {:?}", started.elapsed());
}

/// Whoever comes later cannot know, and is told by those who were there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_comes_after_all_nodes_were_restarted_is_told() {
    let mut nodes = Nodes::start(5);
    let url = format!("{}?patience=200ms&timeout=5s", nodes.url());
    let client = connect(&*url).await.unwrap();
    let guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    restart_all_empty(&mut nodes, &client).await;
    let late = connect(&*url).await.unwrap();
    let error = late.mutex(NAME).try_acquire().await.expect_err("two holders");
    assert!(error.to_string().contains("does not vote for another"), "{error}");
    drop(guard);
}

/// Nodes that are old by the leases so far are young by those of a client with longer ones, and no new set all the same: one of them
/// may have forgotten something.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_longer_leases_does_not_make_a_set_new() {
    let mut nodes = old_nodes(2).await;
    let client = connect(format!("{}?max_ttl=1s&ttl=1s", nodes.url())).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    nodes.servers[4].kill();
    nodes.servers[4].start_again();
    let longer = connect(format!("{}?patience=200ms&timeout=5s", nodes.url())).await.unwrap();
    let error = longer.mutex(NAME).try_acquire().await.expect_err("a node voted that may have forgotten");
    assert!(error.to_string().contains("does not vote for another"), "{error}");
}

/// The record must last for as long as anybody may come; whoever connects to nodes that were in use puts it where it is missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_record_of_a_set_is_put_back_and_lasts() {
    let mut nodes = Nodes::start(3);
    let client = nodes.client().await;
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let record = |server: &RedisServer| server.ask::<Option<String>>(&["GET", FOUNDED]);
    let founders = record(&nodes.servers[0]);
    assert!(founders.is_some());
    drop(client);
    nodes.servers[1].kill();
    nodes.servers[1].start_again();
    for server in [&nodes.servers[0], &nodes.servers[2]] {
        server.run(&["PEXPIRE", FOUNDED, "20000"]);
    }
    let late = nodes.client().await;
    let lasts = |server: &RedisServer| server.ask::<i64>(&["PTTL", FOUNDED]) > 1_000 * 60 * 60 * 24 * 7;
    eventually("it lasts", async || nodes.servers.iter().all(lasts)).await;
    assert!(nodes.servers.iter().all(|server| record(server) == founders));
    late.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
}

/// Of a process that is gone nobody knows how old it was, or what it knew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_seen_a_node_restart_founds_nothing() {
    let mut nodes = Nodes::start(3);
    nodes.servers[2].kill();
    let client = connect(format!("{}?patience=200ms&timeout=500ms", nodes.url())).await.unwrap();
    assert!(client.mutex(NAME).try_acquire().await.is_err(), "a new set must be complete");
    nodes.servers[0].kill();
    for index in [0, 2] {
        nodes.servers[index].start_again();
        let asked = async || client.status(NAME).await.is_ok() && nodes.servers[index].calls(&["evalsha", "eval"]) > 0;
        eventually("the client is back", asked).await;
    }
    let error = client.mutex(NAME).try_acquire().await.unwrap_err();
    assert!(error.to_string().contains("does not vote for another"), "{error}");
}

/// Somebody has taken a set for new while somebody else knew better.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn founders_count_only_if_all_nodes_name_the_same() {
    let nodes = Nodes::start(3);
    let run_id = |server: &RedisServer| -> String {
        let info: String = server.ask(&["INFO", "server"]);
        info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap().trim().to_owned()
    };
    let founders = nodes.servers.iter().map(run_id).collect::<Vec<_>>().join(" ");
    for (server, record) in nodes.servers.iter().zip([&*founders, &founders, "-"]) {
        server.run(&["SET", FOUNDED, record, "PX", "100000"]);
    }
    let url = format!("{}?patience=200ms&timeout=5s", nodes.url());
    let error = connect(&*url).await.unwrap().mutex(NAME).try_acquire().await.unwrap_err();
    assert_eq!(error.to_string().matches("does not vote for another").count(), 3, "{error}");
    nodes.servers[2].run(&["SET", FOUNDED, &founders, "PX", "100000"]);
    connect(&*url).await.unwrap().mutex(NAME).acquire().await.unwrap().release().await.unwrap();
}

/// A node that writes everything to its disk has nothing to forget.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_persists_every_write_votes_after_a_restart() {
    let mut nodes = Nodes::start_with(3, &RedisServer::options().durable());
    let client = connect(format!("{}?patience=1s", nodes.url())).await.unwrap();
    let guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    eventually("all nodes have it", async || nodes.holding(NAME) == 3).await;
    for index in [0, 1] {
        nodes.servers[index].kill();
        nodes.servers[index].start_again();
    }
    assert_eq!(nodes.holding(NAME), 3);
    let late = connect(format!("{}?patience=3s&timeout=5s", nodes.url())).await.unwrap();
    assert!(late.mutex(NAME).try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    late.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
}

/// In strict mode a new set of nodes waits as well, since it cannot be told from one that forgot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strict_quarantine_lets_new_nodes_wait() {
    let nodes = Nodes::start(3);
    let client = connect(format!("{}?quarantine=strict&patience=1s&max_ttl=3s&ttl=2s", nodes.url())).await.unwrap();
    let error = client.mutex(NAME).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("does not vote") && error.to_string().contains("quarantine=off"), "{error}");
    eventually("the longest lease is over", async || {
        client.mutex(NAME).try_acquire().await.is_ok_and(|guard| guard.is_some())
    })
    .await;
}

/// S15: A holds on nodes 0, 1 and 2. The clock of node 2 jumps ahead, and its lease ends early; B could get 2, 3 and 4.
async fn jumped(options: &str) -> (World, fencelock::Guard, Client) {
    let world = World::new(options).await;
    let proxies: Vec<Proxy> = world.nodes.servers.iter().map(|server| Proxy::to(server.port())).collect();
    let ports: Vec<u16> = proxies.iter().map(Proxy::port).collect();
    let other = connect(format!("{}?{options}", url(&ports))).await.unwrap();
    other.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
    world.cut(&[3, 4]).await;
    let first = world.far.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    assert_eq!(world.keys(), [true, true, true, false, false]);
    proxies[2].shift_clock(3600);
    world.nodes.servers[2].run(&["DEL", NAME]);
    // The network goes on for as long as the test does.
    std::mem::forget(proxies);
    (world, first, other)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_jumped_does_not_vote() {
    let (world, first, other) = jumped("patience=500ms&timeout=5s").await;
    assert!(other.mutex(NAME).ttl(LONG).try_acquire().await.unwrap().is_none(), "two holders");
    assert!(first.is_valid());
    // All others are told: a client that knows nothing of how the clock was does not count it either.
    let told = async || world.nodes.servers[2].ask::<u64>(&["EXISTS", "fencelock:redlock:out"]) == 1;
    eventually("the node knows that it is out", told).await;
    let late = connect(format!("{}?patience=500ms&timeout=5s", world.nodes.url())).await.unwrap();
    assert!(late.mutex(NAME).ttl(LONG).try_acquire().await.unwrap().is_none(), "two holders");
    // A minority that is out keeps nobody from other locks.
    late.mutex("another").try_acquire().await.unwrap().expect("four nodes vote").release().await.unwrap();
    first.release().await.unwrap();
}

/// The same with the protection off: the jump is all it takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_quarantine_a_jump_gives_two_holders_and_a_higher_token() {
    let (_world, first, other) = jumped("quarantine=off&timeout=5s").await;
    let second = at_once("nodes 2, 3 and 4 vote for it", other.mutex(NAME).ttl(LONG).acquire()).await.unwrap();
    assert!(first.is_valid() && second.is_valid() && second.token() > first.token());
}

/// S16: when the votes are in, the lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vote_that_takes_longer_than_the_lease_is_no_grant() {
    let world = World::new("timeout=5s").await;
    for proxy in &world.proxies {
        proxy.delay(Duration::from_millis(120));
    }
    let slow = world.far.mutex(NAME).ttl(Duration::from_millis(200));
    let error = slow.acquire_timeout(Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    for proxy in &world.proxies {
        proxy.heal();
    }
    world.far.settled().await;
    until_free(&world.near, NAME).await;
    slow.ttl(LONG).acquire().await.unwrap().release().await.unwrap();
}

/// S17: many at once on a free lock, again and again. Somebody always wins, and everybody does in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn split_votes_come_to_an_end() {
    let nodes = Nodes::start(5);
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(nodes.client().await);
    }
    for round in 0..10 {
        let name = format!("{NAME}:{round}");
        let claims: Vec<_> = clients
            .iter()
            .map(|client| {
                let mutex = client.mutex(&name).ttl(LONG);
                tokio::spawn(async move { mutex.acquire().await.unwrap().release().await.unwrap() })
            })
            .collect();
        for claim in claims {
            claim.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_brings_back_what_a_node_has_lost() {
    let world = World::new("").await;
    let guard = world.near.mutex(NAME).ttl(Duration::from_secs(3)).acquire().await.unwrap();
    eventually("all nodes have it", async || world.nodes.holding(NAME) == 5).await;
    world.nodes.servers[1].run(&["DEL", NAME]);
    world.nodes.servers[2].run(&["DEL", NAME]);
    world.nodes.servers[2].run(&["SET", NAME, "somebody else", "PX", "60000"]);
    eventually("it is back", async || world.keys()[1]).await;
    assert_eq!(world.nodes.servers[2].ask::<String>(&["GET", NAME]), "somebody else", "not over somebody else's");
    assert!(guard.is_valid());
    guard.release().await.unwrap();
    eventually("only the other one is left", async || world.nodes.holding(NAME) == 1).await;
}

/// Two of five are not enough, however willing the others are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_without_a_majority_is_a_loss() {
    let world = World::new("").await;
    let guard = world.near.mutex(NAME).ttl(Duration::from_secs(3)).acquire().await.unwrap();
    eventually("all nodes have it", async || world.nodes.holding(NAME) == 5).await;
    for index in [0, 1, 2] {
        world.nodes.servers[index].run(&["DEL", NAME]);
    }
    assert_eq!(at_once("it is told", guard.lost()).await, Loss::Taken);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    eventually("nothing is left", async || world.nodes.holding(NAME) == 0).await;
}

/// A claim that arrives after it was given up does not come to life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_claim_is_not_stranded() {
    let world = World::new("timeout=300ms&patience=1s").await;
    for proxy in &world.proxies {
        proxy.hold_present_requests();
    }
    let error = world.far.mutex(NAME).ttl(LONG).acquire_timeout(Duration::from_millis(200)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    // On new connections it is given up.
    world.far.settled().await;
    let calls =
        |world: &World| world.nodes.servers.iter().map(|server| server.calls(&["evalsha", "eval"])).sum::<u64>();
    let before = calls(&world);
    for proxy in &world.proxies {
        proxy.heal();
    }
    eventually("the late messages arrive", async || calls(&world) > before + 4).await;
    until_free(&world.near, NAME).await;
    eventually("no node keeps it", async || world.nodes.holding(NAME) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_get_lost_do_no_harm() {
    let world = World::new("timeout=300ms").await;
    for round in 0..6 {
        for index in [round % 5, (round + 1) % 5] {
            world.proxies[index].lose_answers(1);
        }
        let guard = world.far.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        assert!(world.near.mutex(NAME).try_acquire().await.unwrap().is_none());
        world.proxies[(round + 2) % 5].lose_answers(1);
        guard.release().await.unwrap();
    }
    world.far.settled().await;
    eventually("no node keeps it", async || world.nodes.holding(NAME) == 0).await;
}

/// Clients of the common recipe and fencelock exclude each other over the same nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_the_common_recipe_are_respected_and_respect_us() {
    let nodes = Nodes::start(5);
    let client = nodes.client().await;
    let manager = rslock::LockManager::new(nodes.urls());
    let theirs = manager.lock(NAME.as_bytes(), LONG).await.unwrap();
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none());
    let status = client.status(NAME).await.unwrap();
    assert_eq!(status.holders[0].label, "a client that is not fencelock");
    let mutex = client.mutex(NAME).ttl(LONG);
    let waiter = tokio::spawn(async move { mutex.acquire().await.unwrap() });
    until_line(&client, NAME, 1, 1).await;
    manager.unlock(&theirs).await;
    let ours = at_once("it is free", waiter).await.unwrap();
    assert!(manager.lock(NAME.as_bytes(), LONG).await.is_err(), "it is held");
    ours.release().await.unwrap();
    manager.unlock(&manager.lock(NAME.as_bytes(), LONG).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_above_what_any_majority_accepted() {
    let nodes = Nodes::start(5);
    let client = nodes.client().await;
    let mut newest = 0;
    for round in 0..10 {
        let guard = client.mutex(NAME).acquire().await.unwrap();
        assert!(guard.token().as_u64() > newest, "round {round}");
        newest = guard.token().as_u64();
        guard.release().await.unwrap();
        until_free(&client, NAME).await;
        // A minority forgets what it accepted; another time somebody's clock was ahead by half a minute.
        nodes.servers[round % 5].run(&["DEL", TOKENS]);
        if round == 4 {
            newest += 30_000_000;
            nodes.note_token(NAME, newest);
        }
        // What nodes noted is old by now, and makes room.
        if round >= 4 {
            nodes.age();
        }
    }
}

/// The first node tells the holder, which gives the lock back on the others before the eviction gets there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_counts_though_the_holder_is_faster_on_the_other_nodes() {
    let world = World::new("timeout=5s").await;
    let guard = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    eventually("it is held everywhere", async || world.keys() == [true; 5]).await;
    for proxy in &world.proxies[1..] {
        proxy.delay(Duration::from_millis(300));
    }
    assert_eq!(world.far.evict(NAME).await.unwrap(), 1);
    assert!(!guard.is_valid());
    assert_eq!(world.far.evict(NAME).await.unwrap(), 0, "nobody holds it");
}

/// By the time the eviction gets to the other nodes, the next one may hold there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_takes_the_lock_from_its_holder_and_not_from_the_next_one() {
    let world = World::new("timeout=5s").await;
    for lost in [false, true] {
        let first = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        let mutex = world.near.mutex(NAME).ttl(LONG);
        let waiter = tokio::spawn(async move { mutex.acquire().await.unwrap() });
        until_line(&world.near, NAME, 1, 1).await;
        for proxy in &world.proxies[1..] {
            proxy.delay(Duration::from_millis(300));
        }
        // The first node's answer to the eviction; the one before that is to the look at who holds.
        if lost {
            world.proxies[0].lose_answer_after(1);
        }
        let count = world.far.evict(NAME).await.unwrap();
        assert!(count == 1 || lost, "{count}");
        assert!(!first.is_valid());
        let next = at_once("handed over", waiter).await.unwrap();
        next.confirm().await.unwrap();
        assert_eq!(world.keys(), [true; 5]);
        assert_eq!(world.proxies[0].lost_answers(), u64::from(lost));
        next.release().await.unwrap();
        for proxy in &world.proxies {
            proxy.heal();
        }
    }
}

/// Nodes that do not answer may side with anybody: everybody is meant whose votes last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_finds_the_holder_though_nodes_are_away() {
    let nodes = Nodes::start(5);
    let client = connect(format!("{}?timeout=300ms", nodes.url())).await.unwrap();
    let guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    eventually("it is held everywhere", async || nodes.holding(NAME) == 5).await;
    for server in &nodes.servers[1..3] {
        server.run(&["SET", NAME, &value(1_700_000_000_000_000, "a")]);
    }
    for server in &nodes.servers[3..] {
        server.freeze();
    }
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    at_once("the holder is told", guard.lost()).await;
    for server in &nodes.servers[3..] {
        server.thaw();
    }
}

/// Votes that nobody came back for would be in everybody's way for the length of a lease, and those of other clients for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_clears_votes_that_nobody_won_with() {
    let nodes = Nodes::start(5);
    let client = connect(format!("{}?timeout=200ms", nodes.url())).await.unwrap();
    let dead = value(1_700_000_000_000_000, "a");
    for (server, value) in nodes.servers.iter().zip([dead.as_str(), &dead, "theirs", "others'"]) {
        server.run(&["SET", NAME, value]);
    }
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none());
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_some());
}

/// What a node is told of this lock from now on: letter and token, for operations that travel alone.
fn overhear(server: &RedisServer) -> impl FnMut() -> Option<(char, u64)> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(b"MONITOR\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "+OK");
    move || loop {
        let line = lines.next()?.ok()?;
        let Some((before, after)) = line.split_once(&format!("\"{NAME}\" \"")) else { continue };
        // Letter, count and ttl stand before the name.
        let letter = before.split('"').rev().nth(5).and_then(|letter| letter.chars().next());
        if let (true, Some(letter), Some(token)) = (before.contains("\"EVAL"), letter, after.get(..16)) {
            return token.parse().ok().map(|token| (letter, token));
        }
    }
}

/// Nodes may still speak of a proposal that was taken back: what they say must not be taken for news of the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposal_that_was_taken_back_is_never_made_again() {
    let nodes = Nodes::start(3);
    let client = nodes.client().await;
    let newest = client.mutex(NAME).acquire().await.unwrap().token().as_u64();
    until_free(&client, NAME).await;
    // The clock of somebody else was ahead by half a minute; and nobody has a majority, for a while.
    nodes.note_token(NAME, newest + 30_000_000);
    nodes.servers[1].run(&["SET", NAME, "somebody", "PX", "100000"]);
    nodes.servers[2].run(&["SET", NAME, "somebody else", "PX", "100000"]);
    let mut said = overhear(&nodes.servers[0]);
    let mutex = client.mutex(NAME).ttl(LONG);
    let waiter = tokio::spawn(async move { mutex.acquire().await.unwrap() });
    let mut taken_back = Vec::new();
    while taken_back.len() < 5 {
        let (letter, token) = said().expect("it tries again and again");
        match letter {
            'u' => taken_back.push(token),
            _ => assert!(taken_back.iter().all(|earlier| token > *earlier), "{token} after {taken_back:?}"),
        }
    }
    nodes.servers[1].run(&["DEL", NAME]);
    at_once("two of three vote for it", waiter).await.unwrap().release().await.unwrap();
}

/// Whoever gives up leaves the line, also if its token is ahead of the clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giving_up_a_claim_whose_token_is_ahead_of_the_clock_leaves_nothing() {
    let nodes = Nodes::start(3);
    let (client, other) = (nodes.client().await, nodes.client().await);
    let newest = client.mutex(NAME).acquire().await.unwrap().token().as_u64();
    until_free(&client, NAME).await;
    nodes.note_token(NAME, newest + 30_000_000);
    let guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let mutex = other.mutex(NAME).ttl(LONG);
    let waiter = tokio::spawn(async move { mutex.acquire().await.map(drop) });
    let score = |server: &RedisServer| -> Vec<(String, u64)> {
        server.ask(&["ZRANGE", "fencelock:rq:invoice:42", "0", "-1", "WITHSCORES"])
    };
    let ahead = |server: &RedisServer| score(server).iter().any(|(_, token)| *token > guard.token().as_u64());
    eventually("it waits with a token above the holder's", async || nodes.servers.iter().all(ahead)).await;
    waiter.abort();
    until_line(&client, NAME, 1, 0).await;
    guard.release().await.unwrap();
    at_once("nobody stands in the way", client.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
}

/// A node that hangs is not waited for by those who come, either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_node_that_hangs_to_connect() {
    let nodes = Nodes::start(5);
    let client = nodes.client().await;
    nodes.servers[4].freeze();
    let other = at_once("connected", connect(format!("{}?timeout=60s", nodes.url()))).await.unwrap();
    at_once("granted", other.mutex("job").acquire()).await.unwrap().release().await.unwrap();
    nodes.servers[4].thaw();
    drop(client);
}
