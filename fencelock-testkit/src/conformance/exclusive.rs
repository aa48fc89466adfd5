//! What every lock with one holder at a time must do, whichever primitive plays its part.

use super::{LONG, NAME, SHORT, held_up, keeper_has_run};
use crate::stepped::Stepped;
use crate::wait::{at_once, eventually, line, until_free, until_line};
use crate::{Kind, Subject};
use fencelock::{Client, ErrorKind, Guard, Loss, Owner};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// More polls than any acquire or release takes that makes progress.
const MANY_POLLS: usize = 200;

/// Whoever is inside is alone, and has a greater token than all before.
#[derive(Default)]
struct Room {
    inside: AtomicUsize,
    newest: Mutex<u64>,
    visits: AtomicUsize,
}

impl Room {
    async fn visit(&self, guard: &Guard) {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "somebody else is inside");
        let older = std::mem::replace(&mut *self.newest.lock().unwrap(), guard.token().as_u64());
        assert!(older < guard.token().as_u64(), "token {} after {older}", guard.token());
        tokio::task::yield_now().await;
        assert!(guard.is_valid());
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.visits.fetch_add(1, Ordering::SeqCst);
    }
}

/// Starts to wait, and returns when the engine shows it in line behind `ahead` others.
async fn queue(client: &Client, kind: Kind, ahead: usize, label: &str) -> JoinHandle<Guard> {
    let lock = kind.lock(client, NAME).ttl(LONG).label(label);
    let waiter = tokio::spawn(async move { lock.acquire().await.unwrap() });
    until_line(client, NAME, 1, ahead + 1).await;
    waiter
}

/// Many tasks of several clients: one inside at a time, tokens grow.
pub async fn one_holder_at_a_time(subject: &Subject, kind: Kind) {
    let room = Arc::new(Room::default());
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let client = subject.client().await;
        for _ in 0..6 {
            let (lock, room) = (kind.lock(&client, NAME), Arc::clone(&room));
            tasks.push(tokio::spawn(async move {
                for round in 0..8 {
                    let guard = lock.acquire().await.unwrap();
                    room.visit(&guard).await;
                    if round % 2 == 0 {
                        guard.release().await.unwrap();
                    }
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(room.visits.load(Ordering::SeqCst), 3 * 6 * 8);
    until_free(&subject.client().await, NAME).await;
}

/// Waiters of several clients are served in the order of their arrival.
pub async fn first_come_first_served(subject: &Subject, kind: Kind) {
    let clients = [subject.client().await, subject.client().await, subject.client().await];
    let holder = kind.lock(&clients[0], NAME).acquire().await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for number in 0..9 {
        let (lock, served) = (kind.lock(&clients[number % 3], NAME), Arc::clone(&served));
        waiters.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            served.lock().unwrap().push(number);
            guard.release().await.unwrap();
        }));
        until_line(&clients[0], NAME, 1, number + 1).await;
    }
    holder.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert!(served.lock().unwrap().iter().copied().eq(0..9), "{served:?}");
}

/// Each grant has a greater token than the one before: across clients, and after the line was empty.
pub async fn tokens_grow_from_holder_to_holder(subject: &Subject, kind: Kind) {
    let mut newest = 0;
    for round in 0..12 {
        // Now and then nobody is connected at all.
        let client = subject.client().await;
        let guard = kind.lock(&client, NAME).acquire().await.unwrap();
        assert!(guard.token().as_u64() > newest, "round {round}: {} after {newest}", guard.token());
        newest = guard.token().as_u64();
        guard.release().await.unwrap();
        if round % 3 == 0 {
            client.close().await.unwrap();
        }
    }
}

/// Busy is `None`, free is a guard, and a refusal leaves no trace.
pub async fn try_acquire_takes_what_is_free_and_nothing_else(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let guard = kind.lock(&one, NAME).try_acquire().await.unwrap().expect("it is free");
    assert!(kind.lock(&one, NAME).try_acquire().await.unwrap().is_none(), "the same client is no exception");
    assert!(kind.lock(&two, NAME).try_acquire().await.unwrap().is_none());
    assert_eq!(line(&two, NAME).await, (1, 0), "who did not get it does not wait");
    guard.release().await.unwrap();
    assert!(kind.lock(&two, NAME).try_acquire().await.unwrap().is_some());
}

/// While somebody waits, trying all the time gets nobody ahead of it.
pub async fn try_acquire_does_not_overtake_a_waiter(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let holder = kind.lock(&one, NAME).acquire().await.unwrap();
    let waiter = queue(&one, kind, 0, "waiter").await;
    let impatient = kind.lock(&two, NAME);
    let impatient = tokio::spawn(async move {
        loop {
            if let Some(guard) = impatient.try_acquire().await.unwrap() {
                return guard.token();
            }
        }
    });
    holder.release().await.unwrap();
    let patient = waiter.await.unwrap();
    let token = patient.token();
    patient.release().await.unwrap();
    assert!(impatient.await.unwrap() > token, "the one who waited comes first");
}

/// However often a held lock was tried, an operation costs the same.
pub async fn polling_a_held_lock_does_not_make_it_slow(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let _holder = kind.lock(&one, NAME).acquire().await.unwrap();
    let lock = kind.lock(&two, NAME);
    costs_the_same(4_000, async || assert!(lock.try_acquire().await.unwrap().is_none())).await;
}

/// However many came and left the line of a held lock, an operation costs the same.
pub async fn waiters_that_gave_up_do_not_make_it_slow(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let _holder = kind.lock(&client, NAME).acquire().await.unwrap();
    let lock = kind.lock(&client, NAME);
    costs_the_same(4_000, async || {
        let gave_up = lock.acquire_timeout(Duration::ZERO).await.unwrap_err();
        assert_eq!(gave_up.kind(), ErrorKind::Timeout);
        client.settled().await;
    })
    .await;
}

/// Does it many times: at the end it may not take much longer than at first. The quickest of many counts, so that a busy
/// machine does not.
pub(super) async fn costs_the_same(times: u32, mut operation: impl AsyncFnMut()) {
    let mut quickest = async |times: u32| {
        let mut quickest = Duration::MAX;
        for _ in 0..times {
            let started = Instant::now();
            operation().await;
            quickest = quickest.min(started.elapsed());
        }
        quickest
    };
    let before = quickest(100).await;
    quickest(times).await;
    let after = quickest(300).await;
    let fair = before * 4 + Duration::from_micros(100);
    assert!(after < fair, "took {before:?} at first, and {after:?} after {times} times");
}

/// A timeout says so, and the line is as it was.
pub async fn a_timeout_leaves_no_waiter(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let holder = kind.lock(&one, NAME).acquire().await.unwrap();
    for span in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(50)] {
        let error = kind.lock(&two, NAME).acquire_timeout(span).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert_eq!(error.name(), Some(NAME), "{error}");
        two.settled().await;
        assert_eq!(line(&one, NAME).await, (1, 0));
    }
    assert!(holder.is_valid());
    holder.release().await.unwrap();
    until_free(&one, NAME).await;
}

/// A lock that becomes free in time is acquired.
pub async fn a_timeout_that_is_long_enough_acquires(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let holder = kind.lock(&client, NAME).acquire().await.unwrap();
    let lock = kind.lock(&client, NAME);
    let waiter = tokio::spawn(async move { lock.acquire_timeout(LONG).await.unwrap() });
    until_line(&client, NAME, 1, 1).await;
    holder.release().await.unwrap();
    at_once("the waiter holds", waiter).await.unwrap().release().await.unwrap();
}

/// An acquire of a free lock, dropped at every point where it waits for something.
pub async fn a_dropped_acquire_leaves_no_trace(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    for polls in 0..MANY_POLLS {
        let lock = kind.lock(&client, NAME).ttl(LONG);
        let mut acquire = Stepped::new(lock.acquire());
        let done = acquire.steps(polls).await;
        drop(acquire);
        if let Some(guard) = done {
            guard.unwrap().release().await.unwrap();
            return assert_eq!(line(&client, NAME).await, (0, 0));
        }
        client.settled().await;
        until_free(&client, NAME).await;
    }
    panic!("acquire does not come to an end");
}

/// A waiter that goes away leaves the line to the others.
pub async fn a_dropped_waiter_leaves_no_trace(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let holder = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
    let lock = kind.lock(&client, NAME).ttl(LONG);
    let mut leaves = Stepped::new(lock.acquire());
    assert!(leaves.until_parked().await.is_none());
    assert_eq!(line(&client, NAME).await, (1, 1));
    let stays = queue(&client, kind, 1, "stays").await;
    drop(leaves);
    client.settled().await;
    assert_eq!(line(&client, NAME).await, (1, 1));
    holder.release().await.unwrap();
    at_once("the one who stayed holds", stays).await.unwrap().release().await.unwrap();
    until_free(&client, NAME).await;
}

/// A waiter that goes away after it was chosen, at every point until it knows.
pub async fn a_waiter_dropped_while_its_grant_arrives_strands_nothing(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    for polls in 0..MANY_POLLS {
        let holder = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
        let lock = kind.lock(&client, NAME).ttl(LONG);
        let mut acquire = Stepped::new(lock.acquire());
        assert!(acquire.until_parked().await.is_none());
        holder.release().await.unwrap();
        let done = acquire.steps(polls).await;
        drop(acquire);
        if let Some(guard) = done {
            return guard.unwrap().release().await.unwrap();
        }
        client.settled().await;
        until_free(&client, NAME).await;
    }
    panic!("acquire does not come to an end");
}

/// Dropping the guard is enough.
pub async fn a_dropped_guard_frees_the_lock(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let guard = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
    let waiter = queue(&client, kind, 0, "next").await;
    drop(guard);
    drop(at_once("the next one holds", waiter).await.unwrap());
    client.settled().await;
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// A guard may go where no runtime is.
pub async fn a_guard_dropped_outside_of_a_runtime_frees_the_lock(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let guard = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    until_free(&client, NAME).await;
}

/// A guard may outlive the runtime that it was acquired on.
pub async fn a_guard_dropped_after_its_runtime_is_gone_frees_the_lock(subject: &Subject, kind: Kind) {
    let observer = subject.client().await;
    let url = subject.url().to_owned();
    let other = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let guard = runtime.block_on(async {
            let client = fencelock::connect(url).await.unwrap();
            kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap()
        });
        drop(runtime);
        assert!(guard.is_valid());
        drop(guard);
    });
    tokio::task::spawn_blocking(move || other.join().unwrap()).await.unwrap();
    until_free(&observer, NAME).await;
}

/// A release, dropped at every point where it waits for something.
pub async fn a_release_dropped_halfway_is_finished(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    for polls in 0..MANY_POLLS {
        let guard = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
        let mut release = Stepped::new(guard.release());
        let done = release.steps(polls).await;
        drop(release);
        client.settled().await;
        until_free(&client, NAME).await;
        if let Some(released) = done {
            return released.unwrap();
        }
    }
    panic!("release does not come to an end");
}

/// Evicts the holder of a lock that a second one then holds.
async fn overtaken(subject: &Subject, kind: Kind) -> (Client, Guard, Guard) {
    let (one, two) = (subject.client().await, subject.client().await);
    let first = kind.lock(&one, NAME).ttl(LONG).acquire().await.unwrap();
    assert_eq!(two.evict(NAME).await.unwrap(), 1);
    let second = at_once("the lock is free", kind.lock(&two, NAME).ttl(LONG).acquire()).await.unwrap();
    assert!(second.token() > first.token());
    (two, first, second)
}

/// Who lost the lock is told when it releases, and touches nobody else's.
pub async fn a_late_release_says_lost_and_leaves_the_successor_alone(subject: &Subject, kind: Kind) {
    let (client, first, second) = overtaken(subject, kind).await;
    let error = first.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert_eq!(error.name(), Some(NAME), "{error}");
    holds_alone(&client, &second).await;
    second.release().await.unwrap();
}

/// The same for a guard that is dropped.
pub async fn a_late_drop_leaves_the_successor_alone(subject: &Subject, kind: Kind) {
    let (client, first, second) = overtaken(subject, kind).await;
    drop(first);
    client.settled().await;
    holds_alone(&client, &second).await;
    second.release().await.unwrap();
}

/// The holder hears late that it lost the lock, and gives back what it does not have. Meanwhile a nested program, which was
/// told its owner, has acquired the lock as that owner.
pub async fn a_late_release_leaves_the_next_hold_of_the_same_owner_alone(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let (late, go_on) = held_up(subject).await;
    let first = kind.lock(&late, NAME).ttl(LONG).acquire().await.unwrap();
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    let second = kind.lock(&client, NAME).ttl(LONG).owner(first.owner()).acquire().await.unwrap();
    assert!(!second.is_borrowed() && second.token() > first.token());
    go_on.send(()).unwrap();
    at_once("the first holder is told", first.lost()).await;
    drop(first);
    keeper_has_run(&late).await;
    holds_alone(&client, &second).await;
    second.release().await.unwrap();
}

async fn holds_alone(client: &Client, guard: &Guard) {
    let status = client.status(NAME).await.unwrap();
    assert_eq!(status.holders.len(), 1, "{status:?}");
    assert_eq!(status.holders[0].token, guard.token(), "{status:?}");
    assert!(guard.is_valid());
    drop(guard.reenter().await.unwrap());
}

/// An eviction is told long before the lease ends, and the next in line follows.
pub async fn an_evicted_holder_learns_it_at_once_and_the_next_one_follows(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let guard = kind.lock(&one, NAME).ttl(LONG).acquire().await.unwrap();
    let waiter = queue(&two, kind, 0, "next").await;
    let lost = tokio::spawn(guard.lost());
    assert_eq!(two.evict(NAME).await.unwrap(), 1);
    assert_eq!(at_once("the holder is told", lost).await.unwrap(), Loss::Taken);
    assert!(!guard.is_valid() && guard.valid_for().is_zero());
    assert_eq!(guard.loss(), Some(Loss::Taken));
    assert_eq!(at_once("a late question is answered too", guard.lost()).await, Loss::Taken);
    let next = at_once("the next one follows", waiter).await.unwrap();
    assert!(next.token() > guard.token());
    next.release().await.unwrap();
    assert_eq!(two.evict(NAME).await.unwrap(), 0, "nobody is left");
}

/// The lock is taken away after it was granted and before the holder knows: it must not believe for a third of its lease.
pub async fn an_eviction_while_the_grant_arrives_is_told(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let holder = kind.lock(&two, NAME).ttl(LONG).acquire().await.unwrap();
    let lock = kind.lock(&one, NAME).ttl(LONG);
    let mut waiter = Stepped::new(lock.acquire());
    eventually("it stands in line", async || {
        assert!(waiter.until_parked().await.is_none());
        line(&two, NAME).await == (1, 1)
    })
    .await;
    holder.release().await.unwrap();
    assert_eq!(two.evict(NAME).await.unwrap(), 1);
    // It hears of it before the waiter does.
    keeper_has_run(&one).await;
    let guard = at_once("the waiter is served", waiter.finish()).await.unwrap();
    eventually("the guard and the engine agree", async || {
        let status = two.status(NAME).await.unwrap();
        guard.is_valid() == status.holders.iter().any(|holder| holder.token == guard.token())
    })
    .await;
}

/// The lock is taken away before the keeper of a new client has run for the first time.
pub async fn an_eviction_right_after_the_first_acquire_is_told(subject: &Subject, kind: Kind) {
    let url = subject.url().to_owned();
    let told = move || {
        // On one thread nothing else runs until this task waits for something.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = fencelock::connect(url).await.unwrap();
            let guard = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
            assert_eq!(client.evict(NAME).await.unwrap(), 1);
            assert_eq!(at_once("the holder is told", guard.lost()).await, Loss::Taken);
        });
    };
    tokio::task::spawn_blocking(move || std::thread::spawn(told).join().unwrap()).await.unwrap();
}

/// A released lock is not reported as lost, however long one listens, and nothing renews it.
pub async fn a_clean_release_is_no_loss_and_ends_the_renewals(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let guard = kind.lock(&client, NAME).ttl(SHORT).acquire().await.unwrap();
    let other = kind.lock(&client, "another").ttl(SHORT).acquire().await.unwrap();
    let listener = tokio::spawn(guard.lost());
    guard.release().await.unwrap();
    let held = async || client.status("another").await.unwrap().holders[0].held_for;
    eventually("another lock was renewed beyond the lease", async || held().await > SHORT * 2).await;
    assert!(!listener.is_finished(), "a clean release is no loss");
    assert_eq!(line(&client, NAME).await, (0, 0), "nothing brings it back");
    assert!(other.is_valid());
    listener.abort();
}

/// The lease is renewed for as long as the guard lives.
pub async fn the_lock_outlives_its_lease_by_renewals(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let guard = kind.lock(&one, NAME).ttl(SHORT).acquire().await.unwrap();
    let waiter = queue(&two, kind, 0, "waiter").await;
    eventually("it was held for three leases", async || {
        assert!(guard.is_valid(), "{:?}", guard.loss());
        let status = two.status(NAME).await.unwrap();
        assert_eq!(status.holders.len(), 1);
        assert_eq!(status.holders[0].token, guard.token());
        status.holders[0].held_for > SHORT * 3
    })
    .await;
    assert!(!waiter.is_finished());
    guard.release().await.unwrap();
    waiter.await.unwrap().release().await.unwrap();
}

/// The holder's own deadline is never later than the engine's.
pub async fn the_holder_knows_of_the_end_before_the_engine_does(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let guard = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
    let asked = Instant::now();
    let here = guard.valid_for();
    let there = client.status(NAME).await.unwrap().holders[0].lease_left;
    assert!(here <= there + asked.elapsed(), "here {here:?}, there {there:?}");
    assert!(here < LONG && here > LONG / 2, "{here:?}");
}

/// A holder that is stuck loses the lock when its cap is reached, not when its lease is.
pub async fn max_hold_ends_a_stuck_hold(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let cap = Duration::from_millis(100);
    let stuck = kind.lock(&client, NAME).ttl(LONG).max_hold(cap).acquire().await.unwrap();
    assert!(stuck.valid_for() <= cap);
    let next = at_once("the next one holds", kind.lock(&client, NAME).acquire()).await.unwrap();
    assert!(!stuck.is_valid() && next.is_valid());
    assert_eq!(at_once("the loss is told", stuck.lost()).await, Loss::MaxHold);
    assert_eq!(stuck.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.is_valid());
    next.release().await.unwrap();
}

/// The same while tasks wait for the loss: whoever notices it first, the lock is given back.
pub async fn max_hold_frees_the_lock_also_when_its_loss_is_awaited(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let names: Vec<String> = (0..16).map(|number| format!("stuck:{number}")).collect();
    let mut stuck = Vec::new();
    for name in &names {
        let guard = kind.lock(&client, name).ttl(LONG).max_hold(Duration::from_millis(80)).acquire().await.unwrap();
        for _ in 0..4 {
            tokio::spawn(guard.lost());
        }
        stuck.push(guard);
    }
    for name in &names {
        until_free(&client, name).await;
    }
    assert!(stuck.iter().all(|guard| guard.loss() == Some(Loss::MaxHold)));
}

/// Nested holds are the same hold; only the last release frees.
pub async fn only_the_last_of_nested_holds_frees(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let outer = kind.lock(&client, NAME).acquire().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    let innermost = inner.reenter().await.unwrap();
    assert_eq!((inner.token(), innermost.token()), (outer.token(), outer.token()));
    assert_eq!((inner.owner(), innermost.owner()), (outer.owner(), outer.owner()));
    innermost.release().await.unwrap();
    drop(inner);
    client.settled().await;
    assert_eq!(line(&client, NAME).await, (1, 0));
    assert!(outer.is_valid());
    outer.release().await.unwrap();
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// The outer one may go first.
pub async fn nested_holds_end_in_any_order(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let outer = kind.lock(&client, NAME).ttl(SHORT).acquire().await.unwrap();
    let inner = outer.reenter().await.unwrap();
    outer.release().await.unwrap();
    eventually("the inner one outlived the lease", async || {
        assert!(inner.is_valid());
        client.status(NAME).await.unwrap().holders[0].held_for > SHORT * 2
    })
    .await;
    let again = inner.reenter().await.unwrap();
    drop(inner);
    assert!(again.is_valid());
    again.release().await.unwrap();
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// Re-entry asks the engine instead of trusting local memory.
pub async fn re_entering_a_lost_hold_says_lost(subject: &Subject, kind: Kind) {
    let (client, first, second) = overtaken(subject, kind).await;
    let error = first.reenter().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    holds_alone(&client, &second).await;
}

/// Also when the lock was just handed over, and little is left until its first renewal.
pub async fn confirming_gives_a_whole_lease_or_says_lost(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let first = kind.lock(&one, NAME).ttl(LONG).acquire().await.unwrap();
    first.confirm().await.unwrap();
    let waiting = kind.lock(&two, NAME).ttl(LONG);
    let waiting = tokio::spawn(async move { waiting.acquire().await });
    until_line(&one, NAME, 1, 1).await;
    first.release().await.unwrap();
    let second = at_once("it is handed over", waiting).await.unwrap().unwrap();
    second.confirm().await.unwrap();
    assert!(second.valid_for() > LONG / 2, "{:?}", second.valid_for());
    assert_eq!(one.evict(NAME).await.unwrap(), 1);
    let error = second.confirm().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
}

/// Who knows the owner enters its hold, also through another client; that frees nothing.
pub async fn an_owner_re_enters_from_another_client(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let outer = kind.lock(&one, NAME).ttl(LONG).acquire().await.unwrap();
    let again = kind.lock(&two, NAME).ttl(LONG).owner(outer.owner());
    let inner = at_once("re-entry does not wait", again.acquire()).await.unwrap();
    assert!(inner.is_borrowed() && !outer.is_borrowed());
    assert_eq!((inner.token(), inner.owner()), (outer.token(), outer.owner()));
    inner.release().await.unwrap();
    drop(again.try_acquire().await.unwrap().expect("trying re-enters as well"));
    two.settled().await;
    holds_alone(&two, &outer).await;
    outer.release().await.unwrap();
    assert_eq!(line(&one, NAME).await, (0, 0));
}

/// A borrowed hold learns of the end of the one that it borrowed from.
pub async fn a_borrowed_hold_ends_with_the_real_one(subject: &Subject, kind: Kind) {
    let (one, two) = (subject.client().await, subject.client().await);
    let outer = kind.lock(&one, NAME).ttl(SHORT).acquire().await.unwrap();
    let inner = kind.lock(&two, NAME).ttl(SHORT).owner(outer.owner()).acquire().await.unwrap();
    outer.release().await.unwrap();
    let next = at_once("the next one holds", kind.lock(&one, NAME).acquire()).await.unwrap();
    at_once("the borrowed hold is lost", inner.lost()).await;
    assert!(!inner.is_valid());
    drop(inner);
    two.settled().await;
    holds_alone(&one, &next).await;
}

/// An owner of one's own is no way around the line.
pub async fn an_owner_that_holds_nothing_waits_like_everybody(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let holder = kind.lock(&client, NAME).acquire().await.unwrap();
    let owner = Owner::random();
    let lock = kind.lock(&client, NAME).owner(owner);
    assert!(lock.try_acquire().await.unwrap().is_none());
    let waiter = tokio::spawn(async move { lock.acquire().await.unwrap() });
    until_line(&client, NAME, 1, 1).await;
    holder.release().await.unwrap();
    let guard = at_once("the owner holds", waiter).await.unwrap();
    assert_eq!((guard.owner(), guard.is_borrowed()), (owner, false));
    guard.release().await.unwrap();
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// A second claim of an owner that waits already is refused or served; the first one keeps its place and its lock.
pub async fn a_second_claim_of_a_waiting_owner_does_no_harm(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let holder = kind.lock(&client, NAME).ttl(LONG).acquire().await.unwrap();
    let lock = kind.lock(&client, NAME).ttl(LONG).owner(Owner::random()).label("twice");
    let twice = lock.clone();
    let first = tokio::spawn(async move { twice.acquire().await.unwrap() });
    until_line(&client, NAME, 1, 1).await;
    let behind = queue(&client, kind, 1, "behind").await;
    let second = lock.try_acquire().await;
    assert!(!matches!(second, Ok(Some(_))), "somebody else holds it");
    client.settled().await;
    let status = client.status(NAME).await.unwrap();
    let labels: Vec<&str> = status.waiters.iter().map(|waiter| waiter.label.as_str()).collect();
    assert_eq!(labels, ["twice", "behind"], "the first claim stays in line ({second:?})");
    holder.release().await.unwrap();
    let guard = at_once("the first claim is served first", first).await.unwrap();
    holds_alone(&client, &guard).await;
    guard.release().await.unwrap();
    at_once("then the one behind", behind).await.unwrap().release().await.unwrap();
}

/// A thousand tasks of one client on one name.
pub async fn a_thousand_tasks_take_turns(subject: &Subject, kind: Kind) {
    let client = subject.client().await;
    let room = Arc::new(Room::default());
    let tasks: Vec<_> = (0..1_000)
        .map(|_| {
            let (lock, room) = (kind.lock(&client, NAME), Arc::clone(&room));
            tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                room.visit(&guard).await;
                guard.release().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(room.visits.load(Ordering::SeqCst), 1_000);
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// Clients on runtimes of their own hand the lock to each other.
pub async fn clients_of_two_runtimes_take_turns(subject: &Subject, kind: Kind) {
    let room = Arc::new(Room::default());
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let (url, room) = (subject.url().to_owned(), Arc::clone(&room));
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let client = fencelock::connect(url).await.unwrap();
                    for _ in 0..50 {
                        let guard = kind.lock(&client, NAME).acquire().await.unwrap();
                        room.visit(&guard).await;
                        guard.release().await.unwrap();
                    }
                    client.close().await.unwrap();
                });
            })
        })
        .collect();
    let all = tokio::task::spawn_blocking(move || threads.into_iter().for_each(|thread| thread.join().unwrap()));
    all.await.unwrap();
    assert_eq!(room.visits.load(Ordering::SeqCst), 100);
}
