//! Waiting on Redis: by push, past the dead, behind strangers; and nothing stays behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "redis")]

use fencelock::{Client, Guard, Mode, connect};
use fencelock_testkit::Probe;
use fencelock_testkit::probe::{Reply, Request};
use fencelock_testkit::redis::RedisServer;
use fencelock_testkit::wait::{at_once, eventually, line, until_free, until_line};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

const NAME: &str = "invoice:42";
const LONG: Duration = Duration::from_secs(120);
/// What the death of those ahead may cost, and a bit for a busy machine.
const SKIPPED: Duration = Duration::from_millis(1_500);
/// All that clients send for locks.
const SCRIPTS: [&str; 2] = ["eval", "evalsha"];

fn queue(client: &Client, mode: Mode) -> JoinHandle<Guard> {
    let client = client.clone();
    tokio::spawn(async move {
        match mode {
            Mode::Exclusive => client.mutex(NAME).ttl(LONG).acquire().await,
            Mode::Shared => client.rwlock(NAME).ttl(LONG).read().await,
            Mode::Permit { of } => client.semaphore(NAME, of).ttl(LONG).acquire().await,
        }
        .unwrap()
    })
}

async fn held_by_probe(url: &str, mode: Mode, ttl: Duration) -> Probe {
    let probe = Probe::connect(url).await;
    let request = Request::Acquire { name: NAME.to_owned(), mode, ttl, wait: true, owner: None };
    assert!(matches!(probe.ask(request).await, Reply::Granted(_)));
    probe
}

/// How long it takes until somebody is served.
async fn served(waiter: JoinHandle<Guard>, within: Duration) -> (Guard, Duration) {
    let start = Instant::now();
    let guard = tokio::time::timeout(within, waiter).await.expect("it is served in time").unwrap();
    (guard, start.elapsed())
}

/// The first in line is killed, or stopped; then the lock is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_or_stopped_head_of_the_line_is_skipped() {
    let server = RedisServer::start();
    let client = server.client().await;
    for stopped in [false, true] {
        let holder = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        let probe = Probe::connect(&server.url()).await;
        let _first = probe.start_acquire(NAME, LONG).await;
        until_line(&client, NAME, 1, 1).await;
        let behind = queue(&client, Mode::Exclusive);
        until_line(&client, NAME, 1, 2).await;
        if stopped {
            probe.stop().await;
            holder.release().await.unwrap();
        } else {
            probe.kill().await;
            holder.release().await.unwrap();
        }
        let (guard, waited) = served(behind, SKIPPED).await;
        println!("stopped {stopped}: {waited:?}");
        guard.release().await.unwrap();
        until_free(&client, NAME).await;
    }
}

/// The holder is killed, and so are those who are next: whoever lives follows when the lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_who_lives_follows_a_dead_holder() {
    let server = RedisServer::start();
    let client = server.client().await;
    let ttl = Duration::from_secs(1);
    for dead_ahead in [0, 1, 3] {
        let holder = held_by_probe(&server.url(), Mode::Exclusive, ttl).await;
        let next = Probe::connect(&server.url()).await;
        for ahead in 0..dead_ahead {
            drop(next.start_acquire(NAME, LONG).await);
            until_line(&client, NAME, 1, ahead + 1).await;
        }
        let waiter = queue(&client, Mode::Exclusive);
        until_line(&client, NAME, 1, dead_ahead + 1).await;
        holder.kill().await;
        next.kill().await;
        let lease = client.status(NAME).await.unwrap().holders[0].lease_left;
        let (guard, waited) = served(waiter, lease + SKIPPED).await;
        println!("{dead_ahead} dead ahead: served {:?} after the end of the lease", waited.saturating_sub(lease));
        guard.release().await.unwrap();
        until_free(&client, NAME).await;
    }
}

/// One of two permits belongs to a dead process, the other one to somebody who goes on: the dead one's comes back in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_permit_comes_back_while_others_are_in_use() {
    let server = RedisServer::start();
    let client = server.client().await;
    let two = Mode::Permit { of: 2 };
    let ttl = Duration::from_secs(1);
    let _alive = client.semaphore(NAME, 2).ttl(LONG).acquire().await.unwrap();
    let dies = held_by_probe(&server.url(), two, ttl).await;
    let waiter = queue(&client, two);
    until_line(&client, NAME, 2, 1).await;
    dies.kill().await;
    let (_guard, waited) = served(waiter, ttl + SKIPPED).await;
    println!("served after {waited:?} of {ttl:?}");
}

/// The reader with the long lease leaves, the one with the short lease dies: the writer follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_follows_the_last_reader_that_died() {
    let server = RedisServer::start();
    let client = server.client().await;
    let ttl = Duration::from_secs(1);
    let leaves = client.rwlock(NAME).ttl(LONG).read().await.unwrap();
    let dies = held_by_probe(&server.url(), Mode::Shared, ttl).await;
    let writer = queue(&client, Mode::Exclusive);
    until_line(&client, NAME, 2, 1).await;
    dies.kill().await;
    leaves.release().await.unwrap();
    served(writer, ttl + SKIPPED).await.0.release().await.unwrap();
}

/// A client of the common recipe takes and releases the lock without telling anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_is_waited_for() {
    for notifying in [false, true] {
        let server = if notifying { RedisServer::options().notifying().start() } else { RedisServer::start() };
        let client = server.client().await;
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }] {
            server.run(&["SET", NAME, "a stranger", "NX", "PX", "120000"]);
            assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none());
            assert!(client.rwlock(NAME).try_read().await.unwrap().is_none());
            assert!(client.semaphore(NAME, 2).try_acquire().await.unwrap().is_none());
            let status = client.status(NAME).await.unwrap();
            assert_eq!(status.holders[0].label, "a client that is not fencelock");
            // Somebody stood before it, and leaves: the one behind must know that it waits for a stranger.
            let leaves = queue(&client, Mode::Exclusive);
            until_line(&client, NAME, 1, 1).await;
            let waiter = queue(&client, mode);
            until_line(&client, NAME, 1, 2).await;
            leaves.abort();
            until_line(&client, NAME, 1, 1).await;
            if notifying {
                let channel = format!("__keyspace@0__:{NAME}");
                eventually("it listens", async || server.ask::<(String, u64)>(&["PUBSUB", "NUMSUB", &channel]).1 == 1)
                    .await;
            } else {
                // By now it has looked, and will not look again at once.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            server.run(&["DEL", NAME]);
            let within = if notifying { Duration::from_millis(500) } else { SKIPPED };
            let (guard, waited) = served(waiter, within).await;
            println!("notifying {notifying}, {mode}: {waited:?}");
            assert_eq!(server.ask::<Option<String>>(&["SET", NAME, "a stranger", "NX", "PX", "1000"]), None);
            guard.release().await.unwrap();
        }
    }
}

/// The stranger's lock ends by itself, or has no end at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_that_expires_is_followed() {
    let server = RedisServer::start();
    let client = server.client().await;
    server.run(&["SET", NAME, "a stranger", "PX", "300"]);
    served(queue(&client, Mode::Exclusive), SKIPPED).await.0.release().await.unwrap();
    server.run(&["SET", NAME, "a stranger that never ends"]);
    let waiter = queue(&client, Mode::Exclusive);
    until_line(&client, NAME, 1, 1).await;
    server.run(&["DEL", NAME]);
    served(waiter, SKIPPED).await.0.release().await.unwrap();
}

/// A hundred wait, and the server has nothing to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_costs_the_server_nothing() {
    let server = RedisServer::start();
    let clients = [server.client().await, server.client().await];
    let holder = clients[0].mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let waiters: Vec<_> = (0..100).map(|number| queue(&clients[number % 2], Mode::Exclusive)).collect();
    until_line(&clients[0], NAME, 1, 100).await;
    let before = server.calls(&SCRIPTS);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let calls = server.calls(&SCRIPTS) - before;
    assert!(calls <= 5, "{calls} calls while nothing happened");
    holder.release().await.unwrap();
    for waiter in waiters {
        // In whatever order the two clients' tasks came.
        tokio::spawn(async move { waiter.await.unwrap().release().await.unwrap() });
    }
    until_free(&clients[0], NAME).await;
}

/// So many commands does the server carry out for one hand-over, in scripts and outside.
async fn commands_per_hand_over(waiters: u32) -> f64 {
    const TURNS: u32 = 100;
    let server = RedisServer::start();
    let client = server.client().await;
    let mut guard = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let mut line = tokio::task::JoinSet::new();
    for _ in 0..waiters {
        let (mutex, tell) = (client.mutex(NAME).ttl(LONG), tell.clone());
        line.spawn(async move { tell.send(mutex.acquire().await.unwrap()).unwrap() });
    }
    until_line(&client, NAME, 1, waiters as usize).await;
    let before = server.calls(&[]);
    let turns = TURNS.min(waiters);
    for _ in 0..turns {
        guard.release().await.unwrap();
        guard = at_once("the next one", told.recv()).await.unwrap();
        // The grant is provisional until it is confirmed; what that costs belongs to the hand-over.
        while guard.valid_for() < LONG / 2 {
            tokio::task::yield_now().await;
        }
    }
    let calls = server.calls(&[]) - before;
    line.shutdown().await;
    client.settled().await;
    f64::from(u32::try_from(calls).unwrap()) / f64::from(turns)
}

/// A hand-over costs the same however long the line is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_costs_the_same_in_a_long_line() {
    let (short, long) = (commands_per_hand_over(10).await, commands_per_hand_over(500).await);
    println!("{short} commands per hand-over with 10 in line, {long} with 500");
    assert!(long < short * 1.5 + 3.0, "{long} commands with 500 in line, {short} with 10");
}

/// Every key that is left has a time to live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_key_outlives_its_use_for_long() {
    let server = RedisServer::start();
    let (one, two) = (server.client().await, server.client().await);
    for (number, mode) in [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 1 }].into_iter().enumerate() {
        let guard = queue(&one, mode).await.unwrap();
        let next = queue(&two, Mode::Exclusive);
        until_line(&one, NAME, 1, 1).await;
        let gives_up = queue(&two, mode);
        until_line(&one, NAME, 1, 2).await;
        gives_up.abort();
        until_line(&one, NAME, 1, 1).await;
        for (key, life) in server.keys() {
            assert!(life > 0, "{key} has no end while the lock is in use");
        }
        guard.release().await.unwrap();
        next.await.unwrap().release().await.unwrap();
        two.evict(NAME).await.unwrap();
        drop(one.mutex(format!("other:{number}")).acquire().await.unwrap());
        one.settled().await;
    }
    let keys = server.keys();
    assert!(!keys.iter().any(|(key, _)| !key.starts_with("fencelock:")), "a lock is held: {keys:?}");
    for (key, life) in keys {
        // One key of the server, not of a lock, stays for three months: which process granted.
        let limit = if key == "fencelock:n" { 90 * 24 * 60 } else { 15 };
        assert!(life > 0 && life <= limit * 60 * 1000, "{key} lives for {life} ms");
    }
}

/// What is noted about a holder lives as long as its lease, however long that is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_belongs_to_a_lock_outlives_its_lease() {
    let server = RedisServer::start();
    let client = server.client().await;
    let day = Duration::from_secs(24 * 60 * 60);
    let guards =
        [client.mutex("alone").ttl(day).acquire().await.unwrap(), client.rwlock("read").ttl(day).read().await.unwrap()];
    for guard in guards {
        drop(guard.reenter().await.unwrap());
        let lock: i64 = server.ask(&["PTTL", guard.name()]);
        for (key, life) in server.keys().into_iter().filter(|(key, _)| key.contains(&format!("{{{}}}", guard.name()))) {
            assert!(life >= lock, "{key} ends {} ms before the lock", lock - life);
        }
        guard.release().await.unwrap();
    }
}

/// A lock that became free without a word belongs to the one who waits for it, not to a newcomer, come alone or with others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_overtakes_when_the_key_is_gone() {
    let server = RedisServer::start();
    let client = server.client().await;
    let newcomer = server.client().await;
    for company in [0, 100] {
        let _holder = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        let waiter = queue(&client, Mode::Exclusive);
        until_line(&client, NAME, 1, 1).await;
        server.run(&["DEL", NAME]);
        let names = (0..company).map(|n| format!("other:{company}:{n}")).chain([NAME.to_owned()]);
        let newcomers = names.map(async |name| newcomer.mutex(name).acquire_timeout(Duration::from_millis(300)).await);
        let mut got = futures_util::future::join_all(newcomers).await;
        assert!(got.pop().unwrap().is_err(), "the newcomer, with {company} others");
        assert!(got.iter().all(Result::is_ok), "other locks are free");
        served(waiter, SKIPPED).await.0.release().await.unwrap();
    }
}

/// Claims that were given up are remembered for a while, not for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tombstones_do_not_pile_up() {
    let server = RedisServer::start();
    let client = server.client().await;
    let holder = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let tombstones = "fencelock:x";
    let give_up = async || {
        client.mutex(NAME).acquire_timeout(Duration::from_millis(5)).await.unwrap_err();
        client.settled().await;
    };
    for _ in 0..20 {
        give_up().await;
    }
    // Those with a time; one entry says that somebody has waited.
    let owners: Vec<String> = server.ask(&["ZRANGE", tombstones, "(0", "+inf", "BYSCORE"]);
    assert_eq!(owners.len(), 20);
    for owner in &owners {
        server.run(&["ZINCRBY", tombstones, "-70000", owner]);
    }
    give_up().await;
    assert_eq!(server.ask::<u64>(&["ZCOUNT", tombstones, "(0", "+inf"]), 1, "those of a minute ago are gone");
    holder.release().await.unwrap();
}

/// A process that was cut off for longer than its lease, and did not know, is fenced off; then it works again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_cut_off_knows_it_in_time() {
    let server = RedisServer::start();
    let proxy = fencelock_testkit::proxy::Proxy::to(server.port());
    let far = connect(format!("{}?timeout=200ms", proxy.redis_url())).await.unwrap();
    let near = server.client().await;
    let guard = far.mutex(NAME).ttl(Duration::from_secs(1)).acquire().await.unwrap();
    proxy.partition();
    let next = near.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    assert!(!guard.is_valid(), "its lease was over before the next one held");
    assert!(next.token() > guard.token());
    proxy.heal();
    far.settled().await;
    assert_eq!(line(&near, NAME).await, (1, 0));
    next.release().await.unwrap();
    at_once("it works again", far.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
}
