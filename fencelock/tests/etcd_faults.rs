//! etcd behind a bad network, with servers that stop, die and lose their majority: nothing is held twice, nothing is stranded.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "etcd")]

use fencelock::{Client, ErrorKind, Guard, Loss, Mode, Owner, connect};
use fencelock_testkit::Probe;
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::etcd::EtcdCluster;
use fencelock_testkit::probe::{Reply, Request};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::wait::{at_once, eventually, in_time, line, until_free, until_line};
use std::time::Duration;
use tokio::task::JoinHandle;

const NAME: &str = "invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);
/// A lease of the shortest kind that etcd knows.
const SHORT: Duration = Duration::from_secs(2);
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];

/// A server, a client that reaches it through a bad network, and one that reaches it directly.
struct World {
    cluster: EtcdCluster,
    proxy: Proxy,
    far: Client,
    near: Client,
}

impl World {
    async fn new() -> Self {
        let cluster = EtcdCluster::start(1);
        let proxy = Proxy::to(cluster.port());
        let far = connect(format!("etcd://127.0.0.1:{}?timeout=300ms", proxy.port())).await.unwrap();
        let near = cluster.client().await;
        // Both have their sessions: from here on, an operation is one exchange.
        for client in [&far, &near] {
            client.mutex("warm-up").ttl(LONG).acquire().await.unwrap().release().await.unwrap();
        }
        Self { cluster, proxy, far, near }
    }
}

async fn hold(client: &Client, mode: Mode, ttl: Duration) -> Guard {
    let ask = Ask { name: NAME, mode, ttl, label: "holder", owner: None };
    ask.of(client, Patience::Endless).await.unwrap().unwrap()
}

async fn queue(client: &Client, observer: &Client, ttl: Duration) -> JoinHandle<Guard> {
    let (_, waiting) = line(observer, NAME).await;
    let mutex = client.mutex(NAME).ttl(ttl);
    let waiter = tokio::spawn(async move { mutex.acquire().await.unwrap() });
    until_line(observer, NAME, 1, waiting + 1).await;
    waiter
}

async fn holds_alone(client: &Client, guard: &Guard) {
    let status = client.status(NAME).await.unwrap();
    assert_eq!((status.holders.len(), status.waiters.len()), (1, 0), "{status:?}");
    assert_eq!(status.holders[0].token, guard.token());
    assert!(guard.is_valid());
}

/// No entry is left of any lock.
fn nothing_is_left(cluster: &EtcdCluster) {
    let entries = cluster.entries();
    assert!(entries.is_empty(), "{entries:?}");
}

/// Acquire and release, each with its answer heard, lost, or lost twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_may_be_lost() {
    let World { cluster, proxy, far, near } = &World::new().await;
    for mode in MODES {
        for losses in 0..9 {
            let (acquire, release) = (losses % 3, losses / 3);
            let told = format!("{mode}: lost {acquire}, {release} times");
            proxy.lose_answers(acquire);
            let guard = at_once(&told, hold(far, mode, LONG)).await;
            holds_alone(near, &guard).await;
            assert!(near.mutex(NAME).try_acquire().await.unwrap().is_none(), "{told}");
            drop(at_once(&told, guard.reenter()).await.expect(&told));
            proxy.lose_answers(release);
            at_once(&told, guard.release()).await.expect(&told);
            assert_eq!(line(near, NAME).await, (0, 0), "{told}");
            proxy.heal();
        }
    }
    assert!(proxy.lost_answers() >= 3 * 12, "{}", proxy.lost_answers());
    nothing_is_left(cluster);
}

/// An acquire that was held up somewhere arrives after its repetition was granted and released, or after it was given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_arrives_after_its_release_takes_nothing() {
    let World { cluster, proxy, far, near } = &World::new().await;
    for mode in MODES {
        for gives_up in [false, true] {
            let owner = Owner::random();
            let ask = Ask { name: NAME, mode, ttl: LONG, label: "far", owner: Some(owner) };
            // Re-entry asks first; what is held back is the acquire itself.
            assert_eq!(line(far, NAME).await, (0, 0));
            proxy.hold_present_requests();
            if gives_up {
                let given_up = ask.of(far, Patience::AtMost(Duration::from_millis(900))).await;
                if let Ok(Some(guard)) = given_up {
                    guard.release().await.unwrap();
                }
            } else {
                let guard = at_once("the repetition is granted", ask.of(far, Patience::Endless)).await;
                guard.unwrap().unwrap().release().await.unwrap();
            }
            far.settled().await;
            proxy.heal();
            // Whatever of it arrives by now, or ever: it finds that it is not wanted.
            for _ in 0..20 {
                assert_eq!(line(near, NAME).await, (0, 0), "{mode}: a dead claim is in line");
            }
        }
    }
    nothing_is_left(cluster);
}

/// What the test above cannot time: a request that comes after its claim was given up, however late, is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_was_given_up_unanswered_cannot_join_any_more() {
    let World { cluster, proxy, far, near } = &World::new().await;
    for mode in MODES {
        let owner = Owner::random();
        let ask = Ask { name: NAME, mode, ttl: LONG, label: "far", owner: None };
        let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        proxy.mute();
        let waits = tokio::spawn({
            let far = far.clone();
            async move { Ask { owner: Some(owner), ..ask }.of(&far, Patience::AtMost(Duration::from_millis(600))).await }
        });
        assert!(waits.await.unwrap().is_err(), "{mode}: nobody answers");
        proxy.heal();
        far.settled().await;
        holder.release().await.unwrap();
        nothing_is_left(cluster);
    }
    // The note itself, and what it does.
    let owner = Owner::random();
    let note = format!("fencelock/{NAME}%x/{owner}");
    cluster.ctl(&["put", &note, "given up"]);
    for wait in [Patience::None, Patience::Endless] {
        let ask = Ask { name: NAME, mode: Mode::Exclusive, ttl: LONG, label: "late", owner: Some(owner) };
        let refused = at_once("it is refused", ask.of(near, wait)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotHeld, "{refused}");
    }
    near.settled().await;
    nothing_is_left(cluster);
}

/// The next one holds when the answer to the release is lost, and the repeated release does not touch it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_release_leaves_the_successor_alone() {
    let World { proxy, far, near, .. } = &World::new().await;
    for _ in 0..5 {
        let guard = hold(far, Mode::Exclusive, LONG).await;
        let next = queue(near, near, LONG).await;
        proxy.lose_answers(2);
        guard.release().await.unwrap();
        let next = at_once("the next one holds", next).await.unwrap();
        drop(next.reenter().await.unwrap());
        holds_alone(near, &next).await;
        next.release().await.unwrap();
        proxy.heal();
    }
}

/// A waiter is told although its connection was cut in between, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_connection_breaks_is_told_all_the_same() {
    let World { proxy, far, near, .. } = &World::new().await;
    for round in 0..6 {
        let holder = hold(near, Mode::Exclusive, LONG).await;
        let waiter = queue(far, near, LONG).await;
        match round % 3 {
            0 => proxy.cut(),
            1 => {
                proxy.cut();
                holder.release().await.unwrap();
                at_once("it is told", waiter).await.unwrap().release().await.unwrap();
                continue;
            }
            _ => {}
        }
        if round % 3 == 2 {
            // Released while the waiter is cut off.
            proxy.refuse();
            proxy.cut();
            holder.release().await.unwrap();
            proxy.heal();
        } else {
            holder.release().await.unwrap();
        }
        at_once("it is told", waiter).await.unwrap().release().await.unwrap();
    }
}

/// What the waiter is to be told was compacted away before it could hear it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_while_watching_loses_nothing() {
    let World { cluster, proxy, far, near } = &World::new().await;
    for mode in MODES {
        let holder = hold(near, Mode::Exclusive, LONG).await;
        let ask = Ask { name: NAME, mode, ttl: LONG, label: "waiter", owner: None };
        let waiter = tokio::spawn({
            let far = far.clone();
            async move { ask.of(&far, Patience::Endless).await.unwrap().unwrap() }
        });
        until_line(near, NAME, 1, 1).await;
        proxy.refuse();
        proxy.cut();
        holder.release().await.unwrap();
        for _ in 0..3 {
            cluster.ctl(&["put", "something", "else"]);
        }
        let status = cluster.ctl(&["get", "something", "-w", "json"]);
        let revision = status.split("\"revision\":").nth(1).unwrap().split(',').next().unwrap();
        cluster.ctl(&["compact", "--physical", revision]);
        proxy.heal();
        at_once("it looks for itself", waiter).await.unwrap().release().await.unwrap();
    }
    // A holder that is watched across a compaction still learns of its loss.
    let holder = hold(far, Mode::Exclusive, LONG).await;
    eventually("it is watched", async || cluster_watchers(cluster) > 0.0).await;
    proxy.refuse();
    proxy.cut();
    assert_eq!(near.evict(NAME).await.unwrap(), 1);
    cluster.ctl(&["put", "something", "else"]);
    let status = cluster.ctl(&["get", "something", "-w", "json"]);
    let revision = status.split("\"revision\":").nth(1).unwrap().split(',').next().unwrap();
    cluster.ctl(&["compact", "--physical", revision]);
    proxy.heal();
    assert_eq!(at_once("it is told", holder.lost()).await, Loss::Taken);
}

fn cluster_watchers(cluster: &EtcdCluster) -> f64 {
    // Counted at the server.
    cluster.first().metric("etcd_debugging_mvcc_watcher_total").unwrap_or(0.0)
}

/// The lease of a waiter ends while it is cut off and the holder goes: it is not told that it holds by a claim that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_session_ended_holds_nothing_until_it_joined_again() {
    let World { cluster, proxy, far, near } = &World::new().await;
    let holder = hold(near, Mode::Exclusive, LONG).await;
    let waiter = queue(far, near, SHORT).await;
    proxy.partition();
    eventually("its session ends", async || line(near, NAME).await == (1, 0)).await;
    let behind = queue(near, near, LONG).await;
    holder.release().await.unwrap();
    let next = at_once("the one behind follows", behind).await.unwrap();
    proxy.heal();
    until_line(near, NAME, 1, 1).await;
    assert!(!waiter.is_finished() && next.is_valid());
    let token = next.token();
    next.release().await.unwrap();
    let late = at_once("it is served in the end", waiter).await.unwrap();
    assert!(late.token() > token);
    late.release().await.unwrap();
    nothing_is_left(cluster);
}

/// The same while the holder stays: it stands in line again as soon as it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_session_ended_joins_again_while_the_holder_stays() {
    let World { proxy, far, near, .. } = &World::new().await;
    let holder = hold(near, Mode::Exclusive, LONG).await;
    let waiter = queue(far, near, SHORT).await;
    proxy.partition();
    eventually("its session ends", async || line(near, NAME).await == (1, 0)).await;
    proxy.heal();
    until_line(near, NAME, 1, 1).await;
    holder.release().await.unwrap();
    at_once("it is served", waiter).await.unwrap().release().await.unwrap();
}

/// Somebody deletes the entry of a waiter, whose session lives on. When its turn would have come, it holds nothing, and joins again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_entry_was_deleted_does_not_hold_by_it() {
    let World { cluster, far, near, .. } = &World::new().await;
    let holder = hold(near, Mode::Exclusive, LONG).await;
    let before = cluster.keys();
    let waiter = queue(far, near, LONG).await;
    let entry = cluster.keys().into_iter().find(|key| !before.contains(key)).unwrap();
    let behind = queue(near, near, LONG).await;
    assert_eq!(cluster.ctl(&["del", &entry]).trim(), "1");
    holder.release().await.unwrap();
    let next = at_once("the one behind holds", behind).await.unwrap();
    until_line(near, NAME, 1, 1).await;
    assert!(!waiter.is_finished() && next.is_valid(), "two hold at the same time");
    let token = next.token();
    next.release().await.unwrap();
    let late = at_once("it is served in the end", waiter).await.unwrap();
    assert!(late.token() > token);
    late.release().await.unwrap();
}

/// The same where the one ahead had to wait, and leaves with the word that it held: that is no grant for an entry that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_word_grants_nothing_to_a_deleted_entry() {
    let World { cluster, far, near, .. } = &World::new().await;
    let holder = hold(near, Mode::Exclusive, LONG).await;
    let ahead = queue(near, near, LONG).await;
    let before = cluster.entries();
    let waiter = queue(far, near, LONG).await;
    let entry = cluster.entries().into_iter().find(|key| !before.contains(key)).unwrap();
    holder.release().await.unwrap();
    let ahead = at_once("the second holds", ahead).await.unwrap();
    assert_eq!(cluster.ctl(&["del", &entry]).trim(), "1");
    ahead.release().await.unwrap();
    assert!(cluster.keys().iter().any(|key| key.contains("%h/")), "a last word: {:?}", cluster.keys());
    let late = at_once("it joins again", waiter).await.unwrap();
    holds_alone(near, &late).await;
    late.release().await.unwrap();
    nothing_is_left(cluster);
}

/// Who leaves the line without having held says nothing: the one behind waits on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_gives_up_lets_nobody_in() {
    let World { cluster, far, near, .. } = &World::new().await;
    // The client of the one that gives up has had a last word.
    let first = hold(near, Mode::Exclusive, LONG).await;
    let second = queue(far, near, LONG).await;
    first.release().await.unwrap();
    at_once("the second holds", second).await.unwrap().release().await.unwrap();
    let holder = hold(near, Mode::Exclusive, LONG).await;
    let gives_up = queue(far, near, LONG).await;
    let behind = queue(near, near, LONG).await;
    gives_up.abort();
    until_line(near, NAME, 1, 1).await;
    far.settled().await;
    // What the one behind sees now, it sees in one exchange; so do others.
    line(far, NAME).await;
    assert!(!behind.is_finished() && holder.is_valid());
    holder.release().await.unwrap();
    let behind = at_once("its turn", behind).await.unwrap();
    holds_alone(near, &behind).await;
    behind.release().await.unwrap();
    nothing_is_left(cluster);
}

/// A nested program asks for a longer lease than the outer one has: it has no more than that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_borrowed_hold_is_no_longer_than_the_real_one() {
    let World { cluster, far, near, .. } = &World::new().await;
    let outer = hold(near, Mode::Exclusive, SHORT).await;
    let inner = far.mutex(NAME).ttl(LONG).owner(outer.owner()).acquire().await.unwrap();
    assert!(inner.is_borrowed() && inner.is_valid());
    assert!(inner.valid_for() <= SHORT, "{:?}", inner.valid_for());
    let received = || cluster.first().metric("grpc_server_msg_received_total").unwrap();
    let before = received();
    let held = async || near.status(NAME).await.unwrap().holders[0].held_for;
    eventually("it is renewed all the same", async || held().await > SHORT * 2).await;
    assert!(inner.is_valid() && inner.valid_for() <= SHORT);
    assert!(received() - before < 1_000.0, "and not all the time");
    outer.release().await.unwrap();
    at_once("it ends with the real one", inner.lost()).await;
}

/// Who only tries does not wait for a server that is away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_ends_while_nobody_answers() {
    let World { proxy, near, .. } = &World::new().await;
    let url = format!("etcd://127.0.0.1:{}?timeout=200ms&patience=1s", proxy.port());
    let far = connect(&url).await.unwrap();
    far.mutex("warm-up").ttl(LONG).acquire().await.unwrap().release().await.unwrap();
    proxy.partition();
    for mode in MODES {
        let ask = Ask { name: NAME, mode, ttl: LONG, label: "tries", owner: None };
        let error = at_once("it ends", ask.of(&far, Patience::None)).await.unwrap_err();
        assert!(passing(error.kind()), "{error}");
    }
    proxy.heal();
    far.settled().await;
    until_free(near, NAME).await;
}

/// A holder that is cut off knows of its end before anybody else can hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_cut_off_knows_in_time() {
    let World { proxy, far, near, .. } = &World::new().await;
    for ttl in [Duration::from_millis(500), SHORT] {
        let guard = hold(far, Mode::Exclusive, ttl).await;
        proxy.partition();
        let next = hold(near, Mode::Exclusive, LONG).await;
        assert!(!guard.is_valid(), "two hold at the same time");
        assert_eq!(at_once("it is told", guard.lost()).await, Loss::Deadline);
        assert!(next.token() > guard.token());
        proxy.heal();
        drop(guard);
        far.settled().await;
        holds_alone(near, &next).await;
        next.release().await.unwrap();
    }
}

/// Taken away by etcd's own means, which know nothing of fencelock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_somebody_deletes_is_a_loss() {
    let World { cluster, far, near, .. } = &World::new().await;
    let guard = hold(far, Mode::Exclusive, LONG).await;
    let waiter = queue(near, near, LONG).await;
    let key = guard.entry_key().unwrap().key;
    assert_eq!(cluster.ctl(&["del", &key]).trim(), "1");
    assert_eq!(at_once("it is told", guard.lost()).await, Loss::Taken);
    at_once("the next one follows", waiter).await.unwrap().release().await.unwrap();
}

/// The whole session is revoked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_somebody_revokes_is_a_loss_of_all_and_the_client_goes_on() {
    let World { cluster, far, near, .. } = &World::new().await;
    let guard = hold(far, Mode::Exclusive, LONG).await;
    let other = far.mutex("another").ttl(LONG).acquire().await.unwrap();
    let waiter = {
        let mutex = far.mutex("third").ttl(LONG);
        let _holder = near.mutex("third").ttl(LONG).acquire().await.unwrap();
        let waiter = tokio::spawn(async move { mutex.acquire().await.unwrap() });
        until_line(near, "third", 1, 1).await;
        for lease in cluster.leases() {
            cluster.ctl(&["lease", "revoke", &lease]);
        }
        waiter
    };
    assert_eq!(at_once("it is told", guard.lost()).await, Loss::Taken);
    at_once("of the other one, too", other.lost()).await;
    at_once("the waiter joins again", waiter).await.unwrap().release().await.unwrap();
    at_once("a new session is made", hold(far, Mode::Exclusive, LONG)).await.release().await.unwrap();
}

/// One session and one heartbeat, whatever the number of locks; nothing of it is left at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_lease_serves_all_locks_and_goes_with_the_client() {
    let cluster = EtcdCluster::start(1);
    let client = cluster.client().await;
    let mut guards = Vec::new();
    for number in 0..200 {
        guards.push(client.mutex(format!("many:{number}")).ttl(SHORT).acquire().await.unwrap());
    }
    assert_eq!(cluster.leases().len(), 1);
    let held = async || client.status("many:0").await.unwrap().holders[0].held_for;
    eventually("they outlived their lease", async || held().await > SHORT * 2).await;
    assert!(guards.iter().all(Guard::is_valid));
    let other = client.mutex("longer").ttl(LONG).acquire().await.unwrap();
    assert_eq!(cluster.leases().len(), 2, "another length is another lease");
    client.close().await.unwrap();
    assert!(cluster.leases().is_empty(), "{:?}", cluster.leases());
    assert!(cluster.keys().is_empty(), "{:?}", cluster.keys());
    drop((guards, other));
}

/// The server that a client uses stops without a word. The client goes on with another one, and keeps what it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_costs_no_lock() {
    let mut cluster = EtcdCluster::start(3);
    let (one, two) = (cluster.client().await, cluster.client().await);
    let ttl = Duration::from_secs(10);
    for number in 0..3 {
        let guard = hold(&one, Mode::Exclusive, ttl).await;
        let waiter = queue(&two, &one, ttl).await;
        cluster.server(number).freeze();
        let again = hold_other(&one, ttl).await;
        assert!(guard.is_valid() && again.is_valid());
        guard.release().await.unwrap();
        let next = tokio::time::timeout(ttl * 2, waiter).await.expect("the waiter is told").unwrap();
        next.release().await.unwrap();
        again.release().await.unwrap();
        cluster.server(number).thaw();
        cluster.wait_until_well();
    }
    nothing_is_left(&cluster);
}

async fn hold_other(client: &Client, ttl: Duration) -> Guard {
    // Several rounds: while the leader is frozen, nobody can do anything until there is another one.
    loop {
        match client.mutex("another").ttl(ttl).acquire().await {
            Ok(guard) => return guard,
            Err(error) => assert!(passing(error.kind()), "{error}"),
        }
    }
}

fn passing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Ambiguous)
}

/// The leader dies, three times. Who holds keeps the lock, who waits keeps its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_the_leader_costs_no_lock_and_no_place() {
    let mut cluster = EtcdCluster::start(3);
    let (one, two) = (cluster.client().await, cluster.client().await);
    let ttl = Duration::from_secs(20);
    for _ in 0..3 {
        let guard = hold(&one, Mode::Exclusive, ttl).await;
        let first = queue(&two, &one, ttl).await;
        let second = queue(&one, &one, ttl).await;
        let leader = leader(&mut cluster).await;
        cluster.server(leader).kill();
        eventually("the cluster works again", async || two.mutex("another").try_acquire().await.is_ok()).await;
        assert!(guard.is_valid());
        guard.release().await.unwrap();
        let first = tokio::time::timeout(ttl, first).await.expect("the first is told").unwrap();
        assert!(!second.is_finished());
        let token = first.token();
        first.release().await.unwrap();
        let second = tokio::time::timeout(ttl, second).await.expect("the second is told").unwrap();
        assert!(second.token() > token, "in order");
        second.release().await.unwrap();
        cluster.server(leader).start_again();
        cluster.wait_until_well();
    }
    two.settled().await;
    nothing_is_left(&cluster);
}

async fn leader(cluster: &mut EtcdCluster) -> usize {
    let mut leader = None;
    eventually("there is a leader", async || {
        leader = cluster.leader();
        leader.is_some()
    })
    .await;
    leader.unwrap()
}

/// Two of three die: nobody is granted anything, the holder knows in time. When they are back, the waiter has its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_majority_grants_nothing_and_comes_back() {
    let mut cluster = EtcdCluster::start(3);
    let (one, two) = (cluster.client().await, cluster.client().await);
    let guard = hold(&one, Mode::Exclusive, SHORT).await;
    let first = queue(&two, &one, LONG).await;
    let second = queue(&two, &one, LONG).await;
    cluster.server(0).kill();
    cluster.server(1).kill();
    tokio::time::timeout(SHORT * 2, guard.lost()).await.expect("the holder knows by its own clock");
    assert!(!guard.is_valid());
    let refused = two.mutex("another").try_acquire().await.unwrap_err();
    assert!(passing(refused.kind()), "{refused}");
    assert!(!first.is_finished(), "nobody grants anything");
    cluster.server(0).start_again();
    cluster.server(1).start_again();
    cluster.wait_until_well();
    drop(guard);
    let first = tokio::time::timeout(Duration::from_secs(30), first).await.expect("the first is told").unwrap();
    assert!(!second.is_finished());
    let token = first.token();
    first.release().await.unwrap();
    let second = tokio::time::timeout(Duration::from_secs(30), second).await.expect("the second is told").unwrap();
    assert!(second.token() > token);
    second.release().await.unwrap();
    until_free(&two, NAME).await;
    one.settled().await;
    two.settled().await;
    nothing_is_left(&cluster);
}

/// The cluster is away for longer than anybody tries to release. The client lives on, and so could its lease, with the entry of the hold
/// that is lost: whoever waits would wait for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_longer_than_any_release_strands_nothing() {
    let mut cluster = EtcdCluster::start(1);
    let (one, two) = (cluster.client().await, cluster.client().await);
    let guard = hold(&one, Mode::Exclusive, SHORT).await;
    let next = queue(&two, &one, LONG).await;
    let behind = queue(&one, &two, SHORT).await;
    cluster.server(0).kill();
    at_once("it is lost", guard.lost()).await;
    in_time("the release is given up", one.settled()).await;
    cluster.server(0).start_again();
    let next = in_time("the entry has gone with its lease", next).await.unwrap();
    // Who waited by that lease stands at the end of the line, and did not ask all the time whether it does.
    let asked = cluster.first().metric("grpc_server_msg_received_total").unwrap();
    assert!(asked < 500.0, "{asked} questions");
    until_line(&two, NAME, 1, 1).await;
    next.release().await.unwrap();
    in_time("it is its turn", behind).await.unwrap().release().await.unwrap();
    // The client has another lease now.
    hold(&one, Mode::Exclusive, SHORT).await.release().await.unwrap();
    nothing_is_left(&cluster);
}

/// A holder is stopped for longer than its lease, and another one holds. The first one, awake again, knows it before it asks
/// anybody; its write that compares the lock's key is refused, and the write that compares nothing does damage.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_holder_is_fenced_off_and_its_late_write_is_refused() {
    let cluster = EtcdCluster::start(1);
    let probe = Probe::connect(&cluster.url()).await;
    let stale = probe.acquire(NAME, SHORT).await;
    let stale_key = format!("fencelock/{NAME}/{}", stale.owner);
    assert!(guarded_put(&cluster, &stale_key, stale.token, "row", "by the first"), "while it holds, it may write");
    assert_eq!(probe.ask(Request::Watch { guard: stale.guard }).await, Reply::Done);
    probe.stop().await;
    let client = cluster.client().await;
    let next = hold(&client, Mode::Exclusive, LONG).await;
    assert!(next.token().as_u64() > stale.token);
    let entry = next.entry_key().unwrap();
    assert!(guarded_put(&cluster, &entry.key, entry.revision, "row", "by the second"));
    let look = probe.send(Request::Look { guard: stale.guard }).await;
    probe.resume();
    let Reply::Look(look) = look.await.unwrap() else { panic!("not an answer") };
    assert!(!look.valid, "it knows before any network call");
    assert!(look.last_valid.unwrap() < fencelock::Clock::Boot.now().as_nanos());
    let Reply::Lost(_) = at_once("it is told", probe.ask(Request::Lost { guard: stale.guard })).await else {
        panic!("not lost")
    };
    assert!(!guarded_put(&cluster, &stale_key, stale.token, "row", "late"), "the late write is refused");
    assert_eq!(row(&cluster), "by the second");
    cluster.ctl(&["put", "row", "late, and nobody asked"]);
    assert_eq!(row(&cluster), "late, and nobody asked", "without the comparison there is damage");
    next.release().await.unwrap();
}

/// What a user's own etcd client does: a put in a transaction that compares the create revision of the lock's key.
fn guarded_put(cluster: &EtcdCluster, key: &str, revision: u64, row: &str, value: &str) -> bool {
    use std::io::Write;
    let mut command = cluster.ctl_command(&["txn"]);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let text = format!("create(\"{key}\") = \"{revision}\"\n\nput {row} \"{value}\"\n\n\n");
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{told}");
    told.starts_with("SUCCESS")
}

fn row(cluster: &EtcdCluster) -> String {
    cluster.ctl(&["get", "row", "--print-value-only"]).trim().to_owned()
}

/// User and password; the token expires all the time, and nobody notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_are_known_and_tokens_are_renewed() {
    let cluster = EtcdCluster::options(1).argument("--auth-token-ttl=1").start();
    for command in [
        &["user", "add", "root:secret"][..],
        &["user", "grant-role", "root", "root"],
        &["role", "add", "locks"],
        &["role", "grant-permission", "locks", "--prefix=true", "readwrite", "fencelock/"],
        &["user", "add", "app:pa@ss/word"],
        &["user", "grant-role", "app", "locks"],
        &["auth", "enable"],
    ] {
        cluster.ctl(command);
    }
    for (url, why) in [
        (cluster.url(), "user"),
        (cluster.url_as("app", "wrong"), "password"),
        (format!("{}/elsewhere", cluster.url_as("app", "pa%40ss%2Fword")), "prefix"),
    ] {
        let error = connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert!(!error.to_string().contains("wrong") && !error.to_string().contains("pa@ss"), "{error}");
    }
    let client = connect(cluster.url_as("app", "pa%40ss%2Fword")).await.unwrap();
    let other = connect(cluster.url_as("app", "pa%40ss%2Fword")).await.unwrap();
    let guard = hold(&client, Mode::Exclusive, SHORT).await;
    let waiter = queue(&other, &client, SHORT).await;
    let held = async || client.status(NAME).await.unwrap().holders[0].held_for;
    eventually("it outlived token and lease", async || held().await > SHORT * 3).await;
    assert!(guard.is_valid());
    guard.release().await.unwrap();
    at_once("the waiter is told", waiter).await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_with_and_without_client_certificates() {
    let cluster = EtcdCluster::options(1).tls().start();
    let ca = cluster.file("ca.pem").display().to_string();
    let client = connect(format!("{}?ca={ca}", cluster.url())).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let untrusted = connect(format!("{}?patience=500ms", cluster.url())).await.unwrap_err();
    assert_eq!(untrusted.kind(), ErrorKind::Unavailable, "{untrusted}");
    let plain = connect(format!("{}?patience=500ms", cluster.url().replace("etcds", "etcd"))).await.unwrap_err();
    assert_eq!(plain.kind(), ErrorKind::Unavailable, "{plain}");

    let cluster = EtcdCluster::options(1).client_certificates().start();
    let file = |name: &str| cluster.file(name).display().to_string();
    let (ca, cert, key) = (file("ca.pem"), file("server.pem"), file("server.key"));
    let client = connect(format!("{}?ca={ca}&cert={cert}&key={key}", cluster.url())).await.unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    let anonymous = connect(format!("{}?ca={ca}&patience=500ms", cluster.url())).await.unwrap_err();
    assert_eq!(anonymous.kind(), ErrorKind::Unavailable, "{anonymous}");
}

/// With a thousand in line, each hand-over is told to one of them, as the server counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_is_one_notification_however_long_the_line_is() {
    const WAITERS: usize = 1_000;
    let cluster = EtcdCluster::start(1);
    let client = cluster.client().await;
    let holder = hold(&client, Mode::Exclusive, LONG).await;
    let mut waiters = Vec::new();
    for _ in 0..WAITERS {
        let mutex = client.mutex(NAME).ttl(LONG);
        waiters.push(tokio::spawn(async move { mutex.acquire().await.unwrap().release().await.unwrap() }));
    }
    until_line(&client, NAME, 1, WAITERS).await;
    // One watch for each waiter, and one for the holder itself.
    eventually("all watch", async || {
        cluster.first().metric("etcd_debugging_mvcc_watcher_total").unwrap_or(0.0) as usize == WAITERS + 1
    })
    .await;
    let events = || cluster.first().metric("etcd_debugging_mvcc_events_total").unwrap_or(0.0);
    let before = events();
    holder.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    let told = events() - before;
    let hand_overs = WAITERS as f64;
    assert!(told >= hand_overs && told <= hand_overs * 1.1 + 10.0, "{told} notifications for {hand_overs} hand-overs");
}
