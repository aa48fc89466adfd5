//! Redis behind a bad network, and with a bad memory: nothing is held twice, nothing is stranded, nobody haunts the line.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redis")]

use fencelock::{Client, ErrorKind, Guard, Loss, Mode, Owner, Token, connect};
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::wait::{at_once, eventually, line, until_free, until_line};
use std::time::Duration;
use tokio::task::JoinHandle;

const NAME: &str = "invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];
/// All that a client sends for locks.
const SCRIPTS: [&str; 2] = ["eval", "evalsha"];

/// A server, a client that reaches it through a bad network, and one that reaches it directly.
struct World {
    server: RedisServer,
    proxy: Proxy,
    far: Client,
    near: Client,
}

impl World {
    async fn new() -> Self {
        Self::around(RedisServer::start()).await
    }

    async fn around(server: RedisServer) -> Self {
        let proxy = Proxy::to(server.port());
        let far = connect(format!("{}?timeout=300ms", proxy.redis_url())).await.unwrap();
        let near = server.client().await;
        // The server knows the script and the longest lease, and the client has a connection: from here on, an operation is one
        // exchange.
        far.mutex("warm-up").ttl(LONG).acquire().await.unwrap().release().await.unwrap();
        Self { server, proxy, far, near }
    }

    /// Waits in line through the bad network; returns when it does.
    async fn queue_far(&self, label: &str) -> JoinHandle<Guard> {
        queue(&self.far, &self.near, label).await
    }

    /// Returns when the server has carried out everything that was held back.
    async fn deliver_late(&self) {
        let before = self.server.calls(&SCRIPTS);
        self.proxy.heal();
        eventually("the late message arrives", async || self.server.calls(&SCRIPTS) > before).await;
    }
}

async fn queue(client: &Client, observer: &Client, label: &str) -> JoinHandle<Guard> {
    let mutex = client.mutex(NAME).ttl(LONG).label(label);
    let waiter = tokio::spawn(async move { mutex.acquire().await.unwrap() });
    eventually("it stands in line", async || waiters(observer).await.iter().any(|waiter| waiter == label)).await;
    waiter
}

async fn waiters(client: &Client) -> Vec<String> {
    client.status(NAME).await.unwrap().waiters.into_iter().map(|waiter| waiter.label).collect()
}

async fn hold(client: &Client, mode: Mode) -> Guard {
    let ask = Ask { name: NAME, mode, ttl: LONG, label: "far", owner: None };
    ask.of(client, Patience::Endless).await.unwrap().unwrap()
}

/// One holder, which is this one, and nobody waits.
async fn holds_alone(client: &Client, guard: &Guard) {
    let status = client.status(NAME).await.unwrap();
    assert_eq!((status.holders.len(), status.waiters.len()), (1, 0), "{status:?}");
    assert_eq!(status.holders[0].token, guard.token());
    assert!(guard.is_valid());
}

/// Acquire, renewal and release, each with its answer heard, lost, or lost twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_may_be_lost() {
    let World { proxy, far, near, .. } = &World::new().await;
    let mut lost = 0;
    for mode in MODES {
        for losses in 0..27 {
            let (acquire, renewal, release) = (losses % 3, losses / 3 % 3, losses / 9);
            let told = format!("{mode}: lost {acquire}, {renewal}, {release} times");
            proxy.lose_answers(acquire);
            let guard = at_once(&told, hold(far, mode)).await;
            holds_alone(near, &guard).await;
            assert!(near.mutex(NAME).try_acquire().await.unwrap().is_none(), "{told}");
            proxy.lose_answers(renewal);
            drop(at_once(&told, guard.reenter()).await.expect(&told));
            holds_alone(near, &guard).await;
            proxy.lose_answers(release);
            at_once(&told, guard.release()).await.expect(&told);
            assert_eq!(line(near, NAME).await, (0, 0), "{told}");
            lost += losses % 3 + losses / 3 % 3 + losses / 9;
            // What was answered was answered; nothing is left to lose in the next round.
            assert_eq!(proxy.lost_answers(), lost, "{told}");
        }
    }
}

/// The next one holds when the answer to the release is lost, and the repeated release does not touch it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_release_leaves_the_successor_alone() {
    let World { proxy, far, near, .. } = &World::new().await;
    for _ in 0..10 {
        let guard = hold(far, Mode::Exclusive).await;
        let next = queue(near, near, "next").await;
        proxy.lose_answers(2);
        guard.release().await.unwrap();
        let next = at_once("the next one holds", next).await.unwrap();
        drop(next.reenter().await.unwrap());
        holds_alone(near, &next).await;
        next.release().await.unwrap();
        proxy.heal();
    }
}

/// The same when the lock is taken away: from its holder, and not from the next one as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_eviction_leaves_the_successor_alone() {
    let World { proxy, far, near, .. } = &World::new().await;
    // Any of the answers that it needs.
    for (spared, mode) in (0..4).flat_map(|spared| [(spared, Mode::Exclusive), (spared, Mode::Shared)]) {
        let told = format!("{mode}: {spared} came through");
        let guard = hold(near, mode).await;
        let next = queue(near, near, "next").await;
        proxy.lose_answer_after(spared);
        assert_eq!(far.evict(NAME).await.expect(&told), 1, "{told}");
        let next = at_once("the next one holds", next).await.unwrap();
        eventually("the holder is told", async || !guard.is_valid()).await;
        drop(next.reenter().await.unwrap());
        holds_alone(near, &next).await;
        next.release().await.unwrap();
        proxy.heal();
    }
    assert!(proxy.lost_answers() >= 4, "an eviction takes two answers at least");
}

/// An acquire that was held up somewhere arrives after its repetition was granted and released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_arrives_after_its_release_takes_nothing() {
    let world = World::new().await;
    let (far, near) = (&world.far, &world.near);
    for mode in MODES {
        world.proxy.hold_present_requests();
        let guard = at_once("the repetition is granted", hold(far, mode)).await;
        guard.release().await.unwrap();
        world.deliver_late().await;
        assert_eq!(line(near, NAME).await, (0, 0), "{mode}: a dead claim holds");

        world.proxy.hold_present_requests();
        at_once("the repetition is granted", hold(far, mode)).await.release().await.unwrap();
        let other = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        world.deliver_late().await;
        holds_alone(near, &other).await;
        other.release().await.unwrap();
        assert_eq!(line(near, NAME).await, (0, 0), "{mode}: a dead claim waited");
    }
}

/// A claim that waited before its repetition was granted by push, and whose first message arrives in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_claim_that_arrives_after_its_release_does_not_wait() {
    let world = World::new().await;
    let holder = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    world.proxy.hold_present_requests();
    let waiter = world.queue_far("far").await;
    holder.release().await.unwrap();
    at_once("it is granted", waiter).await.unwrap().release().await.unwrap();
    let other = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    world.deliver_late().await;
    holds_alone(&world.near, &other).await;
    other.release().await.unwrap();
    assert_eq!(line(&world.near, NAME).await, (0, 0));
}

/// A release and a renewal that were held up arrive when somebody else holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_release_or_renewal_leaves_the_successor_alone() {
    let world = World::new().await;
    for mode in MODES {
        let guard = hold(&world.far, mode).await;
        world.proxy.hold_present_requests();
        drop(guard.reenter().await.unwrap());
        world.proxy.hold_present_requests();
        guard.release().await.unwrap();
        let other = world.near.mutex(NAME).ttl(Duration::from_secs(5)).acquire().await.unwrap();
        world.deliver_late().await;
        holds_alone(&world.near, &other).await;
        let left = world.near.status(NAME).await.unwrap().holders[0].lease_left;
        assert!(left <= Duration::from_secs(5), "somebody else's renewal: {left:?}");
        other.release().await.unwrap();
    }
}

/// What can happen to one claim, and beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Acquire,
    Renew,
    Release,
    GiveUp,
    OtherTries,
    OtherReleases,
}

impl Step {
    const ALL: [Step; 6] =
        [Step::Acquire, Step::Renew, Step::Release, Step::GiveUp, Step::OtherTries, Step::OtherReleases];
}

/// Who holds and waits after some steps, as it should be.
#[derive(Debug, Default)]
struct Expected {
    /// The number of the claim's grant, while it holds.
    grant: Option<u32>,
    grants: u32,
    claim_waits: bool,
    given_up: bool,
    other_holds: bool,
}

impl Expected {
    fn after(&mut self, step: Step) {
        match step {
            Step::Acquire if self.given_up || self.grant.is_some() => {}
            Step::Acquire if self.other_holds => self.claim_waits = true,
            Step::Acquire => self.granted(),
            Step::Renew => {}
            // The client knows of its first grant, and speaks of no other one.
            Step::Release => self.grant = self.grant.filter(|grant| *grant != 1),
            Step::GiveUp => (self.grant, self.claim_waits, self.given_up) = (None, false, true),
            Step::OtherTries => self.other_holds |= self.grant.is_none(),
            Step::OtherReleases => {
                let hands_over = self.other_holds && self.claim_waits;
                self.other_holds = false;
                if hands_over {
                    self.claim_waits = false;
                    self.granted();
                }
            }
        }
    }

    fn granted(&mut self) {
        self.grants += 1;
        self.grant = Some(self.grants);
    }
}

/// The messages of one claim, to be sent by somebody else, at any time, more than once.
struct Messages {
    owner: Owner,
    /// Of the hold that they were overheard from.
    token: Token,
    acquire: Vec<u8>,
    renew: Vec<u8>,
    release: Vec<u8>,
    give_up: Vec<u8>,
}

impl Messages {
    async fn overhear(World { proxy, far, near, .. }: &World) -> Self {
        proxy.listen();
        let guard = hold(far, Mode::Exclusive).await;
        let acquire = proxy.overheard();
        let (owner, token) = (guard.owner(), guard.token());
        proxy.listen();
        drop(guard.reenter().await.unwrap());
        let renew = proxy.overheard();
        proxy.listen();
        guard.release().await.unwrap();
        let release = proxy.overheard();
        let give_up = give_up(far, near, proxy, owner).await;
        Self { owner, token, acquire, renew, release, give_up }
    }

    /// The same message about the hold with another token.
    fn about(&self, message: &[u8], token: Token) -> Vec<u8> {
        let (old, new) = (self.token.to_string(), token.to_string());
        let at = message.windows(old.len()).position(|part| part == old.as_bytes()).expect("it names the hold");
        [&message[..at], new.as_bytes(), &message[at + old.len()..]].concat()
    }
}

/// Every message of a claim, in every order and repeated, between the steps of somebody else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_in_every_order_and_repeated() {
    let world = World::new().await;
    let messages = Messages::overhear(&world).await;
    for number in 0..6_usize.pow(4) {
        let steps = [number % 6, number / 6 % 6, number / 36 % 6, number / 216].map(|step| Step::ALL[step]);
        world.server.run(&["FLUSHALL"]);
        go(&world, &messages, steps).await;
    }
}

async fn go(World { server, near, .. }: &World, messages: &Messages, steps: [Step; 4]) {
    let mut expected = Expected::default();
    let mut other: Option<Guard> = None;
    let mut first: Option<Token> = None;
    for step in steps {
        match step {
            Step::Acquire => server.send_raw(&messages.acquire),
            Step::GiveUp => server.send_raw(&messages.give_up),
            Step::Renew | Step::Release => {
                let message = if step == Step::Renew { &messages.renew } else { &messages.release };
                if let Some(token) = first {
                    server.send_raw(&messages.about(message, token));
                }
            }
            Step::OtherTries if other.is_none() => other = near.mutex(NAME).ttl(LONG).try_acquire().await.unwrap(),
            Step::OtherTries => {}
            Step::OtherReleases => {
                if let Some(other) = other.take() {
                    other.release().await.unwrap_or_else(|error| panic!("{steps:?}: {error}"));
                }
            }
        }
        expected.after(step);
        let told = format!("{steps:?} at {step:?}: {expected:?}");
        let status = near.status(NAME).await.unwrap();
        let others = other.as_ref().map(|other| other.owner().short());
        let claims = expected.grant.map(|_| messages.owner.short());
        assert_eq!(others.is_some(), expected.other_holds, "{told}");
        let holders: Vec<String> = status.holders.iter().map(|holder| holder.owner.clone()).collect();
        assert_eq!(holders, others.or(claims).into_iter().collect::<Vec<_>>(), "{told}");
        assert_eq!(status.waiters.len(), usize::from(expected.claim_waits), "{told}");
        if expected.grant == Some(1) {
            first = Some(status.holders[0].token);
        }
    }
}

/// The message with which a claim of this owner is given up.
async fn give_up(far: &Client, near: &Client, proxy: &Proxy, owner: Owner) -> Vec<u8> {
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let mutex = far.mutex(NAME).ttl(LONG).owner(owner);
    let waiter = tokio::spawn(async move { mutex.acquire().await });
    until_line(near, NAME, 1, 1).await;
    proxy.listen();
    waiter.abort();
    until_line(near, NAME, 1, 0).await;
    let message = proxy.overheard();
    holder.release().await.unwrap();
    message
}

/// A timeout while the answer is swallowed: the server has granted, nobody knows, and it is undone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_given_up_without_an_answer_leaves_nothing() {
    let World { proxy, far, near, .. } = &World::new().await;
    for mode in MODES {
        proxy.mute();
        let ask = Ask { name: NAME, mode, ttl: LONG, label: "far", owner: None };
        let error = ask.of(far, Patience::AtMost(Duration::from_millis(100))).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_eq!(line(near, NAME).await, (1, 0), "the server has granted it");
        proxy.heal();
        at_once("it is undone", until_free(near, NAME)).await;
        far.settled().await;

        proxy.mute();
        let mutex = far.mutex(NAME).ttl(LONG);
        let acquire = tokio::spawn(async move { mutex.acquire().await.map(drop) });
        until_line(near, NAME, 1, 0).await;
        acquire.abort();
        proxy.heal();
        at_once("it is undone", until_free(near, NAME)).await;
        far.settled().await;
    }
}

/// A waiter that gives up while nothing gets through is not in line any more when it does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_gives_up_unheard_does_not_haunt_the_line() {
    let world = World::new().await;
    let holder = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let gives_up = world.queue_far("far").await;
    let behind = queue(&world.near, &world.near, "behind").await;
    world.proxy.partition();
    gives_up.abort();
    world.proxy.heal();
    eventually("it has left", async || waiters(&world.near).await == ["behind"]).await;
    holder.release().await.unwrap();
    at_once("the next one holds", behind).await.unwrap().release().await.unwrap();
    until_free(&world.near, NAME).await;
}

/// Holding needs no connection, as long as renewals get through in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_survives_cut_connections() {
    let World { proxy, far, near, .. } = &World::new().await;
    let ttl = Duration::from_secs(1);
    let guard = far.mutex(NAME).ttl(ttl).acquire().await.unwrap();
    let held = async || near.status(NAME).await.unwrap().holders[0].held_for;
    while held().await < 3 * ttl {
        proxy.cut();
        tokio::time::sleep(ttl / 10).await;
        assert!(guard.is_valid());
    }
    guard.release().await.unwrap();
}

/// A connection breaks and the line stays as it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_keep_their_places_when_their_connection_is_cut() {
    let world = World::new().await;
    let near = &world.near;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let first = world.queue_far("first").await;
    let second = queue(near, near, "second").await;
    let third = world.queue_far("third").await;
    for _ in 0..5 {
        world.proxy.cut();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    eventually("they are all back", async || waiters(near).await == ["first", "second", "third"]).await;
    holder.release().await.unwrap();
    for waiter in [first, second, third] {
        at_once("its turn", waiter).await.unwrap().release().await.unwrap();
    }
    until_free(near, NAME).await;
}

/// Whose connection is gone when its turn comes is passed over, and has its old place when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_was_away_comes_back_to_its_place() {
    let world = World::new().await;
    let near = &world.near;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let first = world.queue_far("first").await;
    let second = queue(near, near, "second").await;
    let third = queue(near, near, "third").await;
    world.proxy.refuse();
    world.proxy.cut();
    holder.release().await.unwrap();
    let second = at_once("who is there holds", second).await.unwrap();
    world.proxy.heal();
    eventually("it is back", async || waiters(near).await == ["first", "third"]).await;
    second.release().await.unwrap();
    at_once("its turn", first).await.unwrap().release().await.unwrap();
    at_once("its turn", third).await.unwrap().release().await.unwrap();
}

/// A grant that is stuck in a partition costs the next one the claim window, and its claim goes on afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_arrives_too_late_is_no_grant() {
    let world = World::new().await;
    let near = &world.near;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let first = world.queue_far("first").await;
    let second = queue(near, near, "second").await;
    world.proxy.partition();
    holder.release().await.unwrap();
    let second = at_once("the next one holds", second).await.unwrap();
    world.proxy.heal();
    eventually("the first one waits again", async || waiters(near).await == ["first"]).await;
    assert!(second.is_valid() && !first.is_finished());
    let newest = second.token();
    second.release().await.unwrap();
    let first = at_once("its turn", first).await.unwrap();
    assert!(first.token() > newest);
    holds_alone(near, &first).await;
    first.release().await.unwrap();
}

/// A grant is swallowed by a connection that stays open: the waiter looks for itself, long before the lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_grant_is_found_again() {
    let world = World::new().await;
    let holder = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let waiter = world.queue_far("far").await;
    world.proxy.mute_present();
    holder.release().await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(10), waiter).await;
    let guard = waited.expect("it looks again within seconds").unwrap();
    holds_alone(&world.near, &guard).await;
}

/// The server forgets its scripts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_scripts_are_sent_again() {
    let World { server, far, near, .. } = &World::new().await;
    let guard = hold(far, Mode::Exclusive).await;
    let waiter = queue(near, near, "near").await;
    server.run(&["SCRIPT", "FLUSH"]);
    drop(guard.reenter().await.unwrap());
    server.run(&["SCRIPT", "FLUSH"]);
    holds_status(near, 1, 1).await;
    server.run(&["SCRIPT", "FLUSH"]);
    guard.release().await.unwrap();
    let next = at_once("its turn", waiter).await.unwrap();
    server.run(&["SCRIPT", "FLUSH"]);
    assert!(far.mutex(NAME).try_acquire().await.unwrap().is_none());
    next.release().await.unwrap();
}

async fn holds_status(client: &Client, holders: usize, waiters: usize) {
    assert_eq!(line(client, NAME).await, (holders, waiters));
}

/// An administrator kills every connection, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_come_back() {
    let World { server, far, near, .. } = &World::new().await;
    let kill = || {
        for kind in ["normal", "pubsub"] {
            server.run(&["CLIENT", "KILL", "TYPE", kind]);
        }
    };
    let guard = hold(far, Mode::Exclusive).await;
    let waiter = queue(near, near, "near").await;
    for _ in 0..5 {
        kill();
        drop(at_once("it holds", guard.reenter()).await.unwrap());
    }
    eventually("it is back", async || waiters(far).await == ["near"]).await;
    kill();
    guard.release().await.unwrap();
    let next = at_once("its turn", waiter).await.unwrap();
    kill();
    holds_alone(far, &next).await;
    next.release().await.unwrap();
}

/// A server that keeps its data is killed and started again: the holder holds, the waiter waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_survive_a_restart_that_keeps_the_data() {
    for mode in MODES {
        let mut server = RedisServer::options().durable().start();
        let url = format!("{}?quarantine=off", server.url());
        let (one, two) = (connect(&url).await.unwrap(), connect(&url).await.unwrap());
        let guard = hold(&one, mode).await;
        let waiter = queue(&two, &two, "next").await;
        server.kill();
        server.start_again();
        drop(at_once("it still holds", guard.reenter()).await.unwrap());
        assert!(two.mutex(NAME).try_acquire().await.unwrap().is_none());
        eventually("the waiter waits", async || waiters(&two).await == ["next"]).await;
        guard.release().await.unwrap();
        let next = at_once("its turn", waiter).await.unwrap();
        holds_alone(&one, &next).await;
    }
}

/// A server that loses its memory: the holder learns it when it renews, and the next token is higher all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_loses_the_data_is_noticed() {
    for mode in MODES {
        let mut server = RedisServer::start();
        let client = server.client().await;
        let ask = Ask { name: NAME, mode, ttl: Duration::from_secs(3), label: "", owner: None };
        let guard = ask.of(&client, Patience::Endless).await.unwrap().unwrap();
        server.kill();
        server.start_again();
        assert_eq!(at_once("the next renewal tells", guard.lost()).await, Loss::Taken);
        let next = hold(&client, mode).await;
        assert!(next.token() > guard.token());
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
        holds_alone(&client, &next).await;
    }
}

/// As long as the server is away, acquires wait for a while and then say so; afterwards all goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_is_unavailable_until_it_is_back() {
    let mut server = RedisServer::start();
    let client = connect(format!("{}?patience=300ms", server.url())).await.unwrap();
    let patient = server.client().await;
    server.kill();
    let error = at_once("it does not hang", client.mutex(NAME).acquire()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains(NAME) && text.contains(&server.url()), "{text}");
    assert_eq!(client.mutex(NAME).try_acquire().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(connect(server.url()).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let waits = tokio::spawn(async move { patient.mutex(NAME).acquire().await.unwrap().release().await });
    server.start_again();
    at_once("who was patient is served", waits).await.unwrap().unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    client.settled().await;
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// A frozen server answers nobody: what was asked is ambiguous, and is cleared up afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_makes_answers_ambiguous() {
    let server = RedisServer::start();
    let client = connect(format!("{}?patience=300ms&timeout=200ms", server.url())).await.unwrap();
    client.mutex("warm-up").ttl(LONG).acquire().await.unwrap().release().await.unwrap();
    server.freeze();
    let error = client.mutex(NAME).ttl(LONG).acquire().await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Ambiguous | ErrorKind::Unavailable), "{error:?}");
    server.thaw();
    at_once("nothing pends", client.settled()).await;
    assert_eq!(line(&client, NAME).await, (0, 0), "what the server did when it woke is undone");
}

/// Somebody empties the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_server_tells_at_the_next_renewal() {
    let World { server, far, near, .. } = &World::new().await;
    for mode in MODES {
        let ask = Ask { name: NAME, mode, ttl: Duration::from_secs(1), label: "", owner: None };
        let guard = ask.of(far, Patience::Endless).await.unwrap().unwrap();
        server.run(&["FLUSHALL"]);
        assert_eq!(at_once("the next renewal tells", guard.lost()).await, Loss::Taken);
        let next = hold(near, mode).await;
        assert!(next.token() > guard.token());
        next.release().await.unwrap();
    }
}

/// Waiters come back by themselves when the line is deleted under them, in their order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_line_forms_again() {
    let World { server, near, .. } = &World::new().await;
    let _holder = hold(near, Mode::Exclusive).await;
    let _first = queue(near, near, "first").await;
    let _second = queue(near, near, "second").await;
    for part in ["q", "w"] {
        for (key, _) in server.keys() {
            if key.starts_with(&format!("fencelock:{part}:")) {
                server.run(&["DEL", &key]);
            }
        }
        eventually("the line is back", async || waiters(near).await == ["first", "second"]).await;
    }
}

/// Tokens grow although the counter is gone, and although the clock seems to run backwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_without_the_counter_and_against_the_clock() {
    let World { server, far, near, .. } = &World::new().await;
    let mut newest = 0;
    let mut grows = |guard: &Guard| {
        assert!(guard.token().as_u64() > newest, "{} after {newest}", guard.token());
        newest = guard.token().as_u64();
    };
    let counter = "fencelock:t";
    for round in 0..30 {
        let mode = MODES[round % 3];
        let guard = hold(if round % 2 == 0 { far } else { near }, mode).await;
        grows(&guard);
        if round % 4 == 1 {
            assert_eq!(server.ask::<u64>(&["DEL", counter]), 1);
        }
        guard.release().await.unwrap();
    }
    let guard = hold(near, Mode::Exclusive).await;
    grows(&guard);
    guard.release().await.unwrap();
    // The newest token was given when the clock was an hour ahead.
    let ahead = newest + 3_600_000_000;
    server.run(&["SET", counter, &ahead.to_string()]);
    newest = ahead;
    for _ in 0..3 {
        let guard = near.mutex(NAME).acquire().await.unwrap();
        assert!(guard.token().as_u64() > newest);
        newest = guard.token().as_u64();
        guard.release().await.unwrap();
    }
}

/// The counter is evicted between a grant and the repeated question for it: the token is a good one all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_acquire_gets_a_good_token_without_the_counter() {
    let World { server, proxy, far, near } = &World::new().await;
    for mode in MODES {
        let before = near.mutex(NAME).with(async |guard| guard.token()).await.unwrap();
        proxy.mute();
        let mutex = far.clone();
        let acquire = tokio::spawn(async move { hold(&mutex, mode).await });
        until_line(near, NAME, 1, 0).await;
        server.run(&["DEL", "fencelock:t", &format!("fencelock:w:{NAME}")]);
        proxy.heal();
        let guard = at_once("it is granted", acquire).await.unwrap();
        let token = guard.token();
        assert!(token > before, "{mode}: {token} after {before}");
        guard.release().await.unwrap();
        let next = near.mutex(NAME).with(async |guard| guard.token()).await.unwrap();
        assert!(next > token, "{mode}: {next} after {token}");
    }
}

/// What is evicted beside a lock that is held does not cost the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_companions_do_not_cost_an_exclusive_lock() {
    let World { server, near, .. } = &World::new().await;
    let guard = hold(near, Mode::Exclusive).await;
    let next = queue(near, near, "next").await;
    for (key, _) in server.keys() {
        if key.starts_with("fencelock:") {
            server.run(&["DEL", &key]);
        }
    }
    drop(guard.reenter().await.unwrap());
    assert!(near.mutex(NAME).try_acquire().await.unwrap().is_none());
    guard.release().await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(10), next).await;
    waited.expect("the waiter looks for itself").unwrap().release().await.unwrap();
}

/// Without the list of its readers a lock stays closed to writers: who reads cannot be told from who does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_readers_still_keep_writers_out() {
    let World { server, near, .. } = &World::new().await;
    let ttl = Duration::from_secs(1);
    let reader = near.rwlock(NAME).ttl(ttl).read().await.unwrap();
    server.run(&["DEL", &format!("fencelock:d:{NAME}")]);
    while reader.is_valid() {
        assert!(near.rwlock(NAME).try_write().await.unwrap().is_none() || !reader.is_valid());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    at_once("then the writer holds", near.rwlock(NAME).write()).await.unwrap().release().await.unwrap();
}
