//! ZooKeeper behind a bad network, and with servers that stop, die and come back: nothing is held twice, nothing is stranded, nobody
//! waits for itself.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "zookeeper")]

use fencelock::{Client, ErrorKind, Guard, Mode, connect};
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::wait::{at_once, eventually, line, until_free, until_line};
use fencelock_testkit::zookeeper::ZooKeeper;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use zookeeper_client::{Acls, CreateMode};

const NAME: &str = "invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);
/// An ensemble is three Java machines: one at a time leaves them room.
static ENSEMBLE: Mutex<()> = Mutex::const_new(());
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];

/// A server, a client that reaches it through a bad network, and one that reaches it directly.
struct World {
    server: Arc<ZooKeeper>,
    proxy: Proxy,
    far: Client,
    near: Client,
}

impl World {
    /// On a path of its own of a server that is shared.
    async fn new(path: &str) -> Self {
        let server = ZooKeeper::shared(1);
        let proxy = Proxy::to(server.nodes()[0].port());
        let far = connect(format!("zk://127.0.0.1:{}{path}?ttl=3s", proxy.port())).await.unwrap();
        let near = connect(server.url_below(path)).await.unwrap();
        // The directory is there, and the clients have their sessions: from here on, an operation is one exchange.
        hold(&far, NAME, Mode::Exclusive, Duration::from_secs(3)).await.release().await.unwrap();
        Self { server, proxy, far, near }
    }
}

async fn hold(client: &Client, name: &str, mode: Mode, ttl: Duration) -> Guard {
    let ask = Ask { name, mode, ttl, label: "holder", owner: None };
    ask.of(client, Patience::Endless).await.unwrap().unwrap()
}

fn queue(client: &Client, label: &str, ttl: Duration) -> JoinHandle<Guard> {
    let mutex = client.mutex(NAME).ttl(ttl).label(label);
    tokio::spawn(async move { mutex.acquire().await.unwrap() })
}

/// One holder, which is this one, and nobody waits.
async fn holds_alone(client: &Client, guard: &Guard, told: &str) {
    let status = client.status(NAME).await.unwrap();
    assert_eq!((status.holders.len(), status.waiters.len()), (1, 0), "{told}: {status:?}");
    assert_eq!(status.holders[0].token, guard.token(), "{told}");
    assert!(guard.is_valid(), "{told}");
}

/// The entries of the lock, as they are called.
async fn entries(server: &ZooKeeper, path: &str) -> Vec<String> {
    server.paths_below(&format!("{path}/{NAME}")).await
}

/// The reply to the creation is lost with its connection: the entry is found again, no second one is made, and nobody waits for
/// itself. The same for the reply to the deletion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_may_be_lost() {
    let World { server, proxy, far, near } = &World::new("/lost-answers").await;
    for mode in MODES {
        for (acquire, release) in [(0, 0), (1, 0), (0, 1), (2, 1), (1, 2)] {
            let told = format!("{mode}: lost {acquire} and {release} times");
            proxy.lose_answers(acquire);
            let guard = at_once(&told, hold(far, NAME, mode, Duration::from_secs(3))).await;
            assert_eq!(entries(server, "/lost-answers").await.len(), 1, "{told}");
            holds_alone(near, &guard, &told).await;
            assert!(near.mutex(NAME).try_acquire().await.unwrap().is_none(), "{told}");
            proxy.lose_answers(release);
            at_once(&told, guard.release()).await.expect(&told);
            assert_eq!(line(near, NAME).await, (0, 0), "{told}");
            proxy.heal();
        }
    }
    assert!(proxy.lost_answers() > 12, "answers were lost: {}", proxy.lost_answers());
}

/// Likewise for one who has to wait: it has one place, and gets its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_reply_is_lost_has_one_place() {
    let World { server, proxy, far, near } = &World::new("/lost-place").await;
    for _ in 0..3 {
        let holder = hold(near, NAME, Mode::Exclusive, LONG).await;
        proxy.lose_answers(1);
        let waiter = queue(far, "far", Duration::from_secs(3));
        until_line(near, NAME, 1, 1).await;
        proxy.cut();
        holder.release().await.unwrap();
        let guard = at_once("it holds", waiter).await.unwrap();
        assert_eq!(entries(server, "/lost-place").await.len(), 1);
        guard.release().await.unwrap();
        until_free(near, NAME).await;
    }
}

/// A request to create an entry is held up until its sender has a new connection, and arrives in the end: it makes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_arrives_after_its_release_leaves_nothing() {
    let World { proxy, far, near, .. } = &World::new("/late").await;
    for _ in 0..2 {
        proxy.hold_present_requests();
        let guard = hold(far, NAME, Mode::Exclusive, Duration::from_secs(3)).await;
        guard.release().await.unwrap();
        assert_eq!(line(near, NAME).await, (0, 0));
        proxy.heal();
        until_free(near, NAME).await;
        let other = at_once("the lock is free", near.mutex(NAME).acquire()).await.unwrap();
        other.release().await.unwrap();
    }
}

/// The server dies with the reply, and is away for so long that the client begins a new session; the old one is still alive when
/// the server is back. Its entry is removed, not adopted: it would vanish under its holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_entry_of_a_dying_session_is_removed() {
    let mut server = ZooKeeper::start();
    let ttl = Duration::from_secs(2);
    let proxy = Proxy::to(server.nodes()[0].port());
    let client = connect(format!("zk://127.0.0.1:{}?ttl=2s&timeout=40s", proxy.port())).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    // The answer never comes; the connection stays open until the server is gone.
    proxy.mute_present();
    let acquire = queue(&client, "far", ttl);
    let watcher = server.plain().await;
    let children = async || watcher.list_children(&format!("/{NAME}")).await.unwrap_or_default();
    eventually("the entry is there", async || !children().await.is_empty()).await;
    let old = children().await;
    let session = async |entry: &str| {
        let stat = watcher.check_stat(&format!("/{NAME}/{entry}")).await.unwrap();
        stat.map(|stat| stat.ephemeral_owner)
    };
    let dying = session(&old[0]).await.unwrap();
    // Its requests for a connection wait for the server: it is back before the old session is over, which has all its time
    // once more when the server starts.
    proxy.partition();
    server.node(0).kill();
    // The client waits for 1.4 times its session of 3.3 s before it gives up.
    tokio::time::sleep(Duration::from_secs(6)).await;
    server.node(0).start_again();
    proxy.heal();
    let plain = server.plain().await;
    let old_path = format!("/{NAME}/{}", old[0]);
    eventually("the old entry is gone", async || plain.check_stat(&old_path).await.unwrap().is_none()).await;
    let alive = server.nodes()[0].ask("dump").unwrap();
    assert!(alive.contains(&format!("{dying:#x}")), "it went with its session: {alive}");
    let guard = acquire.await.unwrap();
    let now = plain.list_children(&format!("/{NAME}")).await.unwrap();
    assert_eq!(now.len(), 1, "{now:?}");
    assert_ne!(now, old, "the old entry was adopted");
    let stat = plain.check_stat(&format!("/{NAME}/{}", now[0])).await.unwrap().unwrap();
    assert_ne!(stat.ephemeral_owner, dying);
    let started = Instant::now();
    eventually("it outlives the old session", async || {
        assert!(guard.is_valid(), "{:?}", guard.loss());
        started.elapsed() > Duration::from_secs(3)
    })
    .await;
    guard.release().await.unwrap();
}

/// Somebody deletes the entry of a waiter, whose session lives on. The one ahead leaves with the word that it held: that is no grant
/// for an entry that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_word_grants_nothing_to_a_deleted_entry() {
    let World { server, far, near, .. } = &World::new("/last-word").await;
    let plain = server.plain().await;
    let holder = hold(near, NAME, Mode::Exclusive, LONG).await;
    let ahead = queue(near, "ahead", LONG);
    until_line(near, NAME, 1, 1).await;
    let before = entries(server, "/last-word").await;
    let waiter = queue(far, "waiter", LONG);
    until_line(near, NAME, 1, 2).await;
    let now = entries(server, "/last-word").await;
    let entry = now.iter().find(|entry| !before.contains(entry)).unwrap();
    holder.release().await.unwrap();
    let ahead = at_once("the second holds", ahead).await.unwrap();
    plain.delete(entry, None).await.unwrap();
    ahead.release().await.unwrap();
    let (word, _) = plain.get_data(&format!("/last-word/{NAME}")).await.unwrap();
    assert!(before.iter().any(|entry| entry.as_bytes().ends_with(&word)) && !word.is_empty(), "a last word: {word:?}");
    let late = at_once("it joins again", waiter).await.unwrap();
    holds_alone(near, &late, "after a last word").await;
    late.release().await.unwrap();
}

/// The directory of a lock is removed whenever it is empty, as the servers do it with containers, only much more often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_may_vanish_between_two_calls() {
    let server = ZooKeeper::shared(1);
    let plain = server.plain().await;
    let (one, two) = (
        connect(server.url_below("/vanish/here")).await.unwrap(),
        connect(server.url_below("/vanish/here")).await.unwrap(),
    );
    let remover = tokio::spawn(async move {
        let mut removed = 0;
        loop {
            removed += u32::from(plain.delete(&format!("/vanish/here/{NAME}"), None).await.is_ok());
            if removed >= 50 {
                return;
            }
        }
    });
    let mut newest = 0;
    while !remover.is_finished() {
        for client in [&one, &two] {
            let guard = at_once("it is acquired", client.mutex(NAME).acquire()).await.unwrap();
            assert!(guard.token().as_u64() > newest);
            newest = guard.token().as_u64();
            guard.release().await.unwrap();
        }
    }
    remover.await.unwrap();
}

/// Sequence numbers end at 2147483647. Whoever has such a number is ahead of those that come later with small ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_the_numbers_does_not_change_the_order() {
    let server = ZooKeeper::shared(1);
    let client = connect(server.url_below("/numbers")).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let plain = server.plain().await;
    let ephemeral = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
    let mut foreign = Vec::new();
    // Servers have been seen to give the last number twice.
    for first in ["ffffffff", "00000000", "88888888"] {
        let path = format!("/numbers/{NAME}/_c_{first}-6a0e-4b55-a6a4-0e6d0b1b2c3d-lock-2147483647");
        plain.create(&path, b"10.0.0.1", &ephemeral).await.unwrap();
        foreign.push(path);
    }
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none());
    let waiter = queue(&client, "small", LONG);
    until_line(&client, NAME, 1, 3).await;
    let status = client.status(NAME).await.unwrap();
    let order: Vec<&str> = status.waiters.iter().map(|waiter| waiter.owner.as_str()).collect();
    assert_eq!((status.holders[0].owner.as_str(), &order[..2]), ("ffffffff", &["00000000", "88888888"][..]));
    assert_eq!(status.waiters[2].label, "small", "{status:?}");
    for path in &foreign {
        assert!(!waiter.is_finished());
        plain.delete(path, None).await.unwrap();
    }
    at_once("its turn", waiter).await.unwrap().release().await.unwrap();
}

/// To which server this guard's client is connected.
async fn server_of(servers: &ZooKeeper, name: &str) -> usize {
    let plain = servers.plain().await;
    plain.sync("/").await.unwrap();
    let entry = plain.list_children(&format!("/{name}")).await.unwrap().remove(0);
    let stat = plain.check_stat(&format!("/{name}/{entry}")).await.unwrap().unwrap();
    let session = format!("sid={:#x}", stat.ephemeral_owner);
    let mut found = None;
    eventually("the session is connected", async || {
        let has =
            |node: &fencelock_testkit::zookeeper::Node| node.ask("cons").is_ok_and(|text| text.contains(&session));
        found = servers.nodes().iter().position(has);
        found.is_some()
    })
    .await;
    found.unwrap()
}

/// Holds for at least this long without a doubt.
async fn stays_valid(guard: &Guard, span: Duration) {
    let started = Instant::now();
    while started.elapsed() < span {
        assert!(guard.is_valid(), "{:?} after {:?}", guard.loss(), started.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The server to which the holder is connected stops without a word: the client goes to another one in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_costs_nobody_the_lock() {
    let _alone = ENSEMBLE.lock().await;
    let servers = ZooKeeper::three();
    let (one, two) = (servers.client().await, servers.client().await);
    let ttl = Duration::from_secs(6);
    let guard = one.mutex(NAME).ttl(ttl).acquire().await.unwrap();
    let waiter = queue(&two, "waiter", ttl);
    until_line(&two, NAME, 1, 1).await;
    let stopped = server_of(&servers, NAME).await;
    servers.nodes()[stopped].freeze();
    stays_valid(&guard, ttl * 2).await;
    guard.release().await.unwrap();
    let next = waiter.await.unwrap();
    assert!(next.is_valid());
    servers.nodes()[stopped].thaw();
    next.release().await.unwrap();
    close(&servers, [one, two]).await;
}

async fn close<const N: usize>(servers: &ZooKeeper, clients: [Client; N]) {
    for client in clients {
        client.close().await.unwrap();
    }
    eventually("nothing is left", async || servers.ephemerals().is_empty()).await;
}

/// The leader dies: the holder holds on, those in line keep their places, and the next one follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_leader_costs_nobody_its_place() {
    let _alone = ENSEMBLE.lock().await;
    let mut servers = ZooKeeper::three();
    let (one, two) = (servers.client().await, servers.client().await);
    let ttl = Duration::from_secs(12);
    let guard = one.mutex(NAME).ttl(ttl).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for (ahead, label) in ["first", "second", "third"].into_iter().enumerate() {
        waiters.push(queue(&two, label, ttl));
        until_line(&two, NAME, 1, ahead + 1).await;
    }
    let before = servers.paths_below("/").await;
    let leader = servers.leader();
    servers.node(leader).kill();
    stays_valid(&guard, ttl * 3 / 2).await;
    assert_eq!(servers.paths_below("/").await, before, "somebody lost its place");
    let mut newest = guard.token();
    guard.release().await.unwrap();
    for waiter in waiters {
        let next = at_once("its turn", waiter).await.unwrap();
        assert!(next.token() > newest);
        newest = next.token();
        next.release().await.unwrap();
    }
    close(&servers, [one, two]).await;
}

/// Without a majority nobody can tell who holds: the holder knows at its deadline, and nobody else is let in. With a majority all
/// goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_the_holder_knows_in_time() {
    let _alone = ENSEMBLE.lock().await;
    let mut servers = ZooKeeper::three();
    let ttl = Duration::from_secs(3);
    let one = connect(format!("{}?ttl=3s&timeout=2s", servers.url())).await.unwrap();
    let two = connect(format!("{}?ttl=3s&timeout=2s", servers.url())).await.unwrap();
    let guard = one.mutex(NAME).acquire().await.unwrap();
    let waiter = queue(&two, "waiter", ttl);
    until_line(&two, NAME, 1, 1).await;
    let started = Instant::now();
    servers.node(0).kill();
    servers.node(1).kill();
    let lost = tokio::time::timeout(ttl * 2, guard.lost()).await;
    assert!(lost.is_ok(), "the holder believes for longer than its lease");
    assert!(!guard.is_valid() && started.elapsed() < ttl * 2);
    assert!(!waiter.is_finished(), "somebody was let in without a majority");
    let error = at_once("it does not hang", two.mutex("another").try_acquire()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Ambiguous), "{error:?}");
    servers.node(0).begin_again();
    servers.node(1).start_again();
    let token = guard.token();
    drop(guard);
    let next = tokio::time::timeout(Duration::from_secs(60), waiter).await.unwrap().unwrap();
    assert!(next.token() > token && next.is_valid());
    next.release().await.unwrap();
    close(&servers, [one, two]).await;
}
