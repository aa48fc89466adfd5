//! Databases behind a bad network, killed and started again: nothing is held twice, nothing is stranded, nobody haunts the line.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(all(feature = "postgres", feature = "mysql"))]

use fencelock::{Client, ErrorKind, Guard, Loss, Mode, connect};
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::proxy::Proxy;
use fencelock_testkit::sql::{SqlBase, SqlServer};
use fencelock_testkit::wait::{at_once, eventually, line, until_free, until_line};
use std::time::Duration;
use tokio::task::JoinHandle;

const NAME: &str = "invoice:42";
/// Never ends during a test.
const LONG: Duration = Duration::from_secs(120);
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];

/// Every check, on each database.
macro_rules! checks {
    ($($module:ident $base:ty, $server:ty;)*) => { $(
        mod $module {
            checks! { @each $base; every_answer_may_be_lost a_repeated_release_leaves_the_successor_alone
                a_repeated_eviction_leaves_the_successor_alone
                an_acquire_that_arrives_after_its_release_takes_nothing a_late_release_or_renewal_leaves_the_successor_alone
                an_acquire_given_up_without_an_answer_leaves_nothing a_waiter_that_gives_up_unheard_does_not_haunt_the_line
                a_holder_survives_cut_connections waiters_keep_their_places_when_their_connection_is_cut
                a_waiter_that_was_away_comes_back_to_its_place a_grant_that_arrives_too_late_is_no_grant
                a_lost_grant_is_found_again ended_connections_come_back deleted_claims_are_noticed_and_lines_form_again
                tokens_grow_after_lines_were_forgotten_and_against_the_clock what_is_over_is_cleaned_up
                many_dead_waiters_are_skipped_at_once a_renewal_under_way_counts connections_do_not_grow_with_waiters_and_locks }
            checks! { @each $server; locks_survive_a_kill_and_a_restart a_server_that_is_away_is_unavailable_until_it_is_back
                two_statements_for_a_pair_and_few_for_a_thousand_renewals }
        }
    )* };
    (@each $base:ty; $($check:ident)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $check() {
            super::$check::<$base>().await;
        }
    )* };
}

checks! {
    postgres fencelock_testkit::postgres::PostgresDatabase, fencelock_testkit::postgres::PostgresServer;
    mysql fencelock_testkit::mysql::MysqlDatabase, fencelock_testkit::mysql::MysqlServer;
}

/// A database, a client that reaches it through a bad network, and one that reaches it directly.
struct World<B> {
    base: B,
    proxy: Proxy,
    far: Client,
    near: Client,
}

impl<B: SqlBase> World<B> {
    async fn new() -> Self {
        let base = B::make();
        let proxy = Proxy::to(base.port());
        let far = connect(format!("{}?timeout=300ms", base.url_through(proxy.port()))).await.unwrap();
        let near = base.client().await;
        // Both have a connection: from here on, an operation is one exchange.
        for client in [&far, &near] {
            client.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
        }
        Self { base, proxy, far, near }
    }

    async fn queue_far(&self, label: &str) -> JoinHandle<Guard> {
        queue(&self.far, &self.near, label).await
    }

    /// Returns when the server has carried out everything that was held back: then those connections end.
    async fn deliver_late(&self, connections: usize) {
        eventually("something is held back", async || self.base.connections() > connections).await;
        self.proxy.heal();
        eventually("the late message was carried out", async || self.base.connections() == connections).await;
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

/// Acquire, renewal and release, each with its answer heard, lost, or lost twice: each is sent again, and does nothing twice.
async fn every_answer_may_be_lost<B: SqlBase>() {
    let World { proxy, far, near, .. } = &World::<B>::new().await;
    let lost = || proxy.lost_answers();
    for mode in MODES {
        for losses in 0..8 {
            let (acquire, renewal, release) = (losses % 2, losses / 2 % 2, losses / 4);
            let told = format!("{mode}: lost {acquire}, {renewal}, {release} times");
            let before = lost();
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
            // What was answered was answered; nothing is left to lose in the next round.
            assert_eq!(lost() - before, acquire + renewal + release, "{told}");
        }
    }
}

/// The next one holds when the answer to the release is lost, and the repeated release does not touch it.
async fn a_repeated_release_leaves_the_successor_alone<B: SqlBase>() {
    let World { proxy, far, near, .. } = &World::<B>::new().await;
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
async fn a_repeated_eviction_leaves_the_successor_alone<B: SqlBase>() {
    let World { proxy, far, near, .. } = &World::<B>::new().await;
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
async fn an_acquire_that_arrives_after_its_release_takes_nothing<B: SqlBase>() {
    let world = World::<B>::new().await;
    let (far, near) = (&world.far, &world.near);
    let connections = world.base.connections();
    for mode in MODES {
        world.proxy.hold_present_requests();
        let guard = at_once("the repetition is granted", hold(far, mode)).await;
        guard.release().await.unwrap();
        world.deliver_late(connections).await;
        assert_eq!(line(near, NAME).await, (0, 0), "{mode}: a dead claim holds");

        world.proxy.hold_present_requests();
        at_once("the repetition is granted", hold(far, mode)).await.release().await.unwrap();
        let other = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        world.deliver_late(connections).await;
        holds_alone(near, &other).await;
        other.release().await.unwrap();
        assert_eq!(line(near, NAME).await, (0, 0), "{mode}: a dead claim waited");
    }
}

/// A release and a renewal that were held up arrive when somebody else holds.
async fn a_late_release_or_renewal_leaves_the_successor_alone<B: SqlBase>() {
    let world = World::<B>::new().await;
    let connections = world.base.connections();
    for mode in MODES {
        let guard = hold(&world.far, mode).await;
        world.proxy.hold_present_requests();
        drop(guard.reenter().await.unwrap());
        world.proxy.hold_present_requests();
        guard.release().await.unwrap();
        let other = world.near.mutex(NAME).ttl(Duration::from_secs(5)).acquire().await.unwrap();
        world.deliver_late(connections).await;
        holds_alone(&world.near, &other).await;
        let left = world.near.status(NAME).await.unwrap().holders[0].lease_left;
        assert!(left <= Duration::from_secs(5), "somebody else's renewal: {left:?}");
        other.release().await.unwrap();
    }
}

/// A timeout while the answer is swallowed: the server has granted, nobody knows, and it is undone.
async fn an_acquire_given_up_without_an_answer_leaves_nothing<B: SqlBase>() {
    let World { proxy, far, near, .. } = &World::<B>::new().await;
    for mode in MODES {
        proxy.mute();
        let ask = Ask { name: NAME, mode, ttl: LONG, label: "far", owner: None };
        let error = ask.of(far, Patience::AtMost(Duration::from_millis(200))).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_eq!(line(near, NAME).await, (1, 0), "the server has granted it");
        proxy.heal();
        at_once("it is undone", until_free(near, NAME)).await;
        far.settled().await;
    }
}

/// A waiter that gives up while nothing gets through is not in line any more when it does.
async fn a_waiter_that_gives_up_unheard_does_not_haunt_the_line<B: SqlBase>() {
    let world = World::<B>::new().await;
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
async fn a_holder_survives_cut_connections<B: SqlBase>() {
    let World { proxy, far, near, .. } = &World::<B>::new().await;
    let ttl = Duration::from_secs(1);
    let guard = far.mutex(NAME).ttl(ttl).acquire().await.unwrap();
    let held = async || near.status(NAME).await.unwrap().holders[0].held_for;
    while held().await < 3 * ttl {
        proxy.cut();
        tokio::time::sleep(ttl / 5).await;
        assert!(guard.is_valid());
    }
    guard.release().await.unwrap();
}

/// A connection breaks and the line stays as it was.
async fn waiters_keep_their_places_when_their_connection_is_cut<B: SqlBase>() {
    let world = World::<B>::new().await;
    let near = &world.near;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let first = world.queue_far("first").await;
    let second = queue(near, near, "second").await;
    let third = world.queue_far("third").await;
    for _ in 0..5 {
        world.proxy.cut();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    eventually("they are all back", async || waiters(near).await == ["first", "second", "third"]).await;
    holder.release().await.unwrap();
    for waiter in [first, second, third] {
        at_once("its turn", waiter).await.unwrap().release().await.unwrap();
    }
    until_free(near, NAME).await;
}

/// Whose connection is gone when its turn comes is passed over, and has its old place when it is back.
async fn a_waiter_that_was_away_comes_back_to_its_place<B: SqlBase>() {
    let world = World::<B>::new().await;
    let near = &world.near;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let first = world.queue_far("first").await;
    let second = queue(near, near, "second").await;
    let third = queue(near, near, "third").await;
    let connections = world.base.connections();
    world.proxy.refuse();
    world.proxy.cut();
    eventually("the server knows", async || world.base.connections() < connections).await;
    holder.release().await.unwrap();
    let second = at_once("who is there holds", second).await.unwrap();
    world.proxy.heal();
    eventually("it is back", async || waiters(near).await == ["first", "third"]).await;
    second.release().await.unwrap();
    at_once("its turn", first).await.unwrap().release().await.unwrap();
    at_once("its turn", third).await.unwrap().release().await.unwrap();
}

/// A grant that is stuck in a partition costs the next one the claim window, and its claim goes on afterwards.
async fn a_grant_that_arrives_too_late_is_no_grant<B: SqlBase>() {
    let world = World::<B>::new().await;
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
    eventually("it holds", async || line(near, NAME).await == (1, 0)).await;
    holds_alone(near, &first).await;
    first.release().await.unwrap();
}

/// A grant is swallowed by a connection that stays open: the waiter looks for itself, long before the lease ends.
async fn a_lost_grant_is_found_again<B: SqlBase>() {
    let world = World::<B>::new().await;
    let holder = world.near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let waiter = world.queue_far("far").await;
    world.proxy.mute_present();
    holder.release().await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(10), waiter).await;
    let guard = waited.expect("it looks again within seconds").unwrap();
    holds_alone(&world.near, &guard).await;
}

/// An administrator ends every connection, again and again.
async fn ended_connections_come_back<B: SqlBase>() {
    let World { base, far, near, .. } = &World::<B>::new().await;
    let guard = hold(far, Mode::Exclusive).await;
    let waiter = queue(near, near, "near").await;
    for _ in 0..5 {
        base.cut_connections();
        drop(at_once("it holds", guard.reenter()).await.unwrap());
    }
    eventually("it is back", async || waiters(far).await == ["near"]).await;
    base.cut_connections();
    guard.release().await.unwrap();
    let next = at_once("its turn", waiter).await.unwrap();
    base.cut_connections();
    holds_alone(far, &next).await;
    next.release().await.unwrap();
}

/// Somebody deletes all claims: the holder learns it when it renews, and waiters come back in their order.
async fn deleted_claims_are_noticed_and_lines_form_again<B: SqlBase>() {
    let World { base, far, near, .. } = &World::<B>::new().await;
    for mode in MODES {
        let ask = Ask { name: NAME, mode, ttl: Duration::from_secs(1), label: "", owner: None };
        let guard = ask.of(far, Patience::Endless).await.unwrap().unwrap();
        base.sql(&format!("DELETE FROM {}", base.table("claim")));
        assert_eq!(at_once("the next renewal tells", guard.lost()).await, Loss::Taken);
        let next = hold(near, mode).await;
        assert!(next.token() > guard.token());
        next.release().await.unwrap();
    }
    let _holder = hold(near, Mode::Exclusive).await;
    let _first = queue(near, near, "first").await;
    let _second = queue(near, near, "second").await;
    let waiting = "token = 0";
    base.sql(&format!("DELETE FROM {} WHERE {waiting}", base.table("claim")));
    eventually("the line is back", async || waiters(near).await == ["first", "second"]).await;
}

/// Tokens grow although the line was forgotten in between, and although the clock seems to run backwards.
async fn tokens_grow_after_lines_were_forgotten_and_against_the_clock<B: SqlBase>() {
    let World { base, far, near, .. } = &World::<B>::new().await;
    let lines = base.table("line");
    let mut newest = 0;
    for round in 0..8 {
        let guard = hold(if round % 2 == 0 { far } else { near }, MODES[round % 3]).await;
        let token = guard.token().as_u64();
        assert!(token > newest, "{token} after {newest}");
        guard.release().await.unwrap();
        // This one was given when the clock was hours ahead.
        newest = token + 3_600_000_000;
        base.sql(&format!("UPDATE {lines} SET token = {newest}, used = 0 WHERE token = {token}"));
        // Whoever comes by tidies up.
        for other in 0..4 {
            near.mutex(format!("other:{round}:{other}")).acquire().await.unwrap().release().await.unwrap();
        }
        let left = base.sql(&format!("SELECT count(*) FROM {lines} WHERE token = {newest}"));
        assert_eq!(left[0][0], "0", "the line is forgotten");
    }
}

/// Claims of those who are dead, their lines and tombstones do not stay, also if nobody uses their names any more.
async fn what_is_over_is_cleaned_up<B: SqlBase>() {
    let World { base, near, .. } = &World::<B>::new().await;
    for number in 0..20 {
        let mutex = near.mutex(format!("old:{number}"));
        let guard = mutex.acquire().await.unwrap();
        mutex.acquire_timeout(Duration::from_millis(1)).await.unwrap_err();
        drop(guard);
    }
    near.settled().await;
    let dead = near.mutex("dead").acquire().await.unwrap();
    let claims = base.table("claim");
    base.sql(&format!("UPDATE {claims} SET ends = 1 WHERE token = {}", dead.token()));
    base.sql(&format!("UPDATE {} SET used = 1", base.table("line")));
    base.sql(&format!("UPDATE {} SET at = 1", base.table("gone")));
    assert_eq!(base.rows("line"), 22);
    // Each newcomer tidies up after a few others.
    for number in 0..12 {
        near.mutex(format!("new:{number}")).acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!((base.rows("line"), base.rows("claim"), base.rows("gone")), (12, 0, 0));
}

/// A client with many waiters goes away without a word: all of them are skipped at once, not one after the other.
async fn many_dead_waiters_are_skipped_at_once<B: SqlBase>() {
    let World { base, proxy, far, near } = &World::<B>::new().await;
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    for _ in 0..60 {
        let mutex = far.mutex(NAME).ttl(LONG);
        tokio::spawn(async move { mutex.acquire().await.map(drop) });
    }
    until_line(near, NAME, 1, 60).await;
    let behind = queue(near, near, "behind").await;
    let connections = base.connections();
    proxy.refuse();
    proxy.cut();
    // One of the two clients is left.
    eventually("the server knows", async || base.connections() <= connections / 2).await;
    holder.release().await.unwrap();
    at_once("who is there holds", behind).await.unwrap().release().await.unwrap();
}

/// A lease seems to be over while its renewal, begun in time, is not yet committed: it is not.
async fn a_renewal_under_way_counts<B: SqlBase>() {
    let World { base, near, .. } = &World::<B>::new().await;
    let two = Mode::Permit { of: 2 };
    let (one, other) = (hold(near, two).await, hold(near, two).await);
    let waiter = tokio::spawn({
        let permit = near.semaphore(NAME, 2).ttl(LONG);
        async move { permit.acquire().await.unwrap() }
    });
    until_line(near, NAME, 2, 1).await;
    // To everybody else the second lease is over.
    let (claims, token) = (base.table("claim"), other.token());
    let ends = base.sql(&format!("SELECT ends FROM {claims} WHERE token = {token}"))[0][0].clone();
    base.sql(&format!("UPDATE {claims} SET ends = 1 WHERE token = {token}"));
    let renewal = format!("BEGIN; UPDATE {claims} SET ends = {ends} WHERE token = {token}; {}; COMMIT", B::nap(1.0));
    tokio::join!(async { tokio::task::block_in_place(|| base.sql(&renewal)) }, async {
        // The renewal has begun; whoever comes now must wait for it.
        tokio::time::sleep(Duration::from_millis(300)).await;
        one.release().await.unwrap();
    });
    let next = at_once("one permit is free", waiter).await.unwrap();
    assert!(near.semaphore(NAME, 2).try_acquire().await.unwrap().is_none(), "two hold");
    assert!(next.is_valid() && other.is_valid());
    drop(other.reenter().await.expect("it was renewed"));
}

/// A thousand waiters and a thousand locks: as many connections as one of each.
async fn connections_do_not_grow_with_waiters_and_locks<B: SqlBase>() {
    let World { base, near, .. } = &World::<B>::new().await;
    let connections = base.connections();
    let holder = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let waiting: Vec<_> = (0..1_000)
        .map(|_| {
            let mutex = near.mutex(NAME).ttl(LONG);
            tokio::spawn(async move { mutex.acquire().await.unwrap() })
        })
        .collect();
    until_line(near, NAME, 1, 1_000).await;
    let mut held = Vec::new();
    for number in 0..1_000 {
        held.push(near.mutex(format!("held:{number}")).ttl(LONG).acquire().await.unwrap());
    }
    assert_eq!(base.connections(), connections);
    for waiter in &waiting {
        waiter.abort();
    }
    drop((holder, held));
    near.settled().await;
    until_free(near, NAME).await;
}

/// The server is killed and started again: the holder holds, the waiter waits.
async fn locks_survive_a_kill_and_a_restart<S: SqlServer>() {
    let mut server = S::make();
    let (one, two) = (server.client().await, server.client().await);
    for mode in MODES {
        let guard = hold(&one, mode).await;
        let waiter = queue(&two, &two, "next").await;
        server.kill();
        server.start_again();
        drop(at_once("it still holds", guard.reenter()).await.unwrap());
        assert!(two.mutex(NAME).try_acquire().await.unwrap().is_none());
        eventually("the waiter waits", async || waiters(&two).await == ["next"]).await;
        guard.release().await.unwrap();
        let next = at_once("its turn", waiter).await.unwrap();
        assert!(next.is_valid());
        next.release().await.unwrap();
        until_free(&one, NAME).await;
    }
}

/// As long as the server is away, acquires wait for a while and then say so; afterwards all goes on.
async fn a_server_that_is_away_is_unavailable_until_it_is_back<S: SqlServer>() {
    let mut server = S::make();
    let client = connect(format!("{}?patience=300ms", server.address())).await.unwrap();
    let patient = connect(format!("{}?patience=60s", server.address())).await.unwrap();
    server.kill();
    let error = at_once("it does not hang", client.mutex(NAME).acquire()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Ambiguous), "{error}");
    let text = error.to_string();
    assert!(text.contains(NAME) && text.contains(client.address()), "{text}");
    assert_eq!(client.mutex(NAME).try_acquire().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(connect(server.address()).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let waits = tokio::spawn(async move { patient.mutex(NAME).acquire().await.unwrap().release().await });
    server.start_again();
    at_once("who was patient is served", waits).await.unwrap().unwrap();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    client.settled().await;
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// Counted at the server: an acquire and a release are two statements; the renewals of a thousand locks travel together.
async fn two_statements_for_a_pair_and_few_for_a_thousand_renewals<S: SqlServer>() {
    let server = S::make();
    let client = connect(format!("{}?ttl=24h", server.address())).await.unwrap();
    client.mutex("warm-up").acquire().await.unwrap().release().await.unwrap();
    let (before, _) = server.statements();
    for round in 0..10 {
        client.mutex(format!("pair:{round}")).acquire().await.unwrap().release().await.unwrap();
    }
    assert_eq!(server.statements().0 - before, 20, "two for each pair");
    let ttl = Duration::from_secs(6);
    let mut guards = Vec::new();
    for number in 0..1_000 {
        guards.push(client.mutex(format!("held:{number}")).ttl(ttl).acquire().await.unwrap());
    }
    let (before, _) = server.statements();
    eventually("all are renewed", async || guards.iter().all(|guard| guard.valid_for() > ttl / 2)).await;
    tokio::time::sleep(ttl).await;
    let statements = server.statements().0 - before;
    assert!(guards.iter().all(Guard::is_valid));
    // Three rounds of renewals at most, each of a thousand locks that were acquired over some time.
    assert!(statements < 100, "{statements} statements for some three thousand renewals");
}
