//! What happens between processes, and when one of them dies or stands still. For engines that serve several.

use super::{LONG, NAME, SHORT};
use crate::probe::{Granted, Reply, Request};
use crate::wait::{at_once, eventually, line, until_free, until_line};
use crate::{Kind, Probe, Subject};
use fencelock::{Client, Guard, Mode, Owner};
use rustix::process::{Pid, Signal, kill_process};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Tells whether the engine serves several processes; if not there is nothing to check.
async fn serves_processes(subject: &Subject) -> Option<Client> {
    let client = subject.client().await;
    client.capability().processes.then_some(client)
}

/// A lease that a death is noticed without, or, where the engine needs its end for that, one that ends soon.
fn lease(client: &Client) -> Duration {
    if client.capability().instant_death { LONG } else { SHORT }
}

fn queue(client: &Client) -> JoinHandle<Guard> {
    let lock = Kind::Mutex.lock(client, NAME).ttl(LONG);
    tokio::spawn(async move { lock.acquire().await.unwrap() })
}

fn granted(reply: Reply) -> Granted {
    match reply {
        Reply::Granted(granted) => granted,
        other => panic!("not granted: {other:?}"),
    }
}

/// `kill -9` of the holder: the next one holds, at once where the engine can tell.
pub async fn a_killed_holder_frees_the_lock(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    let held = probe.acquire(NAME, lease(&client)).await;
    let waiter = queue(&client);
    until_line(&client, NAME, 1, 1).await;
    probe.kill().await;
    let guard = at_once("the next one holds", waiter).await.unwrap();
    assert!(guard.token().as_u64() > held.token);
    guard.release().await.unwrap();
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// A process that ends without releasing anything.
pub async fn a_process_that_exits_without_a_word_frees_the_lock(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    probe.acquire(NAME, lease(&client)).await;
    drop(probe.send(Request::Exit).await);
    probe.ended().await;
    at_once("it is free", client.mutex(NAME).acquire()).await.unwrap().release().await.unwrap();
}

/// What a child inherits from the holder does not keep the lock.
pub async fn a_child_of_a_killed_holder_does_not_keep_the_lock(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    probe.acquire(NAME, lease(&client)).await;
    let Reply::Child(child) = probe.ask(Request::Spawn).await else { panic!("no child") };
    probe.kill().await;
    let acquired = tokio::time::timeout(crate::wait::AT_ONCE, client.mutex(NAME).acquire()).await;
    let child = Pid::from_raw(child).expect("a process id");
    kill_process(child, Signal::KILL).expect("the child lives until now");
    acquired.expect("the lock is free although a child lives").unwrap().release().await.unwrap();
}

/// `kill -9` of the first in line: the one behind follows.
pub async fn a_killed_waiter_is_skipped(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let holder = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let probe = Probe::connect(subject.url()).await;
    let dies = probe.start_acquire(NAME, lease(&client)).await;
    until_line(&client, NAME, 1, 1).await;
    let behind = queue(&client);
    until_line(&client, NAME, 1, 2).await;
    probe.kill().await;
    assert!(dies.await.is_err());
    holder.release().await.unwrap();
    at_once("the dead one is skipped", behind).await.unwrap().release().await.unwrap();
    until_free(&client, NAME).await;
}

/// The holder is stopped for longer than its lease. Another one holds then, with a greater token, and the first one,
/// when it wakes, knows by its own clock that it does not.
pub async fn a_stopped_holder_is_fenced_off(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    let stale = probe.acquire(NAME, SHORT).await;
    assert_eq!(probe.ask(Request::Watch { guard: stale.guard }).await, Reply::Done);
    probe.stop().await;
    let successor = Probe::connect(subject.url()).await;
    let newer = at_once("another one holds", successor.acquire(NAME, LONG)).await;
    assert!(newer.token > stale.token);
    // This question is in its input when it wakes.
    let awake = probe.send(Request::Look { guard: stale.guard }).await;
    probe.resume();
    let Reply::Look(look) = awake.await.unwrap() else { panic!("not an answer") };
    assert!(!look.valid, "it knows at once");
    let last = probe.look(&stale).await.last_valid.expect("it was watched");
    assert!(last < newer.at, "it was never valid at the same time");
    let Reply::Lost(_) = at_once("it is told", probe.ask(Request::Lost { guard: stale.guard })).await else {
        panic!("not lost")
    };
    assert!(matches!(probe.release(&stale).await, Reply::Failed { kind, .. } if kind == "Lost"));
    assert!(successor.look(&newer).await.valid);
    let status = client.status(NAME).await.unwrap();
    assert_eq!(status.holders[0].token.as_u64(), newer.token);
    assert_eq!(successor.release(&newer).await, Reply::Done);
}

/// The first in line is stopped: it is given its turn, sleeps through it, and is served when it is awake again.
pub async fn a_stopped_waiter_is_skipped_and_comes_back(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let holder = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let probe = Probe::connect(subject.url()).await;
    let sleeper = probe.start_acquire(NAME, SHORT).await;
    until_line(&client, NAME, 1, 1).await;
    let behind = queue(&client);
    until_line(&client, NAME, 1, 2).await;
    probe.stop().await;
    holder.release().await.unwrap();
    let guard = at_once("the sleeper is passed over", behind).await.unwrap();
    probe.resume();
    until_line(&client, NAME, 1, 1).await;
    assert!(guard.is_valid());
    let token = guard.token().as_u64();
    guard.release().await.unwrap();
    let late = granted(at_once("the sleeper is served", sleeper).await.unwrap());
    assert!(late.token > token);
    assert!(probe.look(&late).await.valid);
    assert_eq!(probe.release(&late).await, Reply::Done);
    until_free(&client, NAME).await;
}

/// Processes come and go, some of them killed; tokens grow all the same.
pub async fn tokens_grow_across_processes_and_restarts(subject: &Subject) {
    if serves_processes(subject).await.is_none() {
        return;
    }
    let mut newest = 0;
    for round in 0..5 {
        let probe = Probe::connect(subject.url()).await;
        for _ in 0..2 {
            let held = probe.acquire(NAME, LONG).await;
            assert!(held.token > newest, "{} after {newest}", held.token);
            newest = held.token;
            assert_eq!(probe.release(&held).await, Reply::Done);
        }
        if round % 2 == 0 {
            probe.kill().await;
        }
    }
}

/// Three processes in line: one after the other, in order.
pub async fn processes_take_turns_in_order(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probes =
        [Probe::connect(subject.url()).await, Probe::connect(subject.url()).await, Probe::connect(subject.url()).await];
    for _ in 0..3 {
        let holder = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
        let mut newest = holder.token().as_u64();
        let mut waiters = Vec::new();
        for (ahead, probe) in probes.iter().enumerate() {
            waiters.push(probe.start_acquire(NAME, LONG).await);
            until_line(&client, NAME, 1, ahead + 1).await;
        }
        holder.release().await.unwrap();
        for (probe, waiter) in probes.iter().zip(waiters) {
            let held = granted(at_once("its turn", waiter).await.unwrap());
            assert!(held.token > newest);
            newest = held.token;
            assert_eq!(probe.release(&held).await, Reply::Done);
        }
    }
}

/// A nested program that knows the owner enters the hold, and frees nothing.
pub async fn an_owner_re_enters_from_another_process(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let outer = client.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let probe = Probe::connect(subject.url()).await;
    let inner = granted(probe.reenter(NAME, LONG, outer.owner()).await);
    assert!(inner.borrowed);
    assert_eq!((inner.token, inner.owner), (outer.token().as_u64(), outer.owner().to_string()));
    assert_eq!(probe.reenter(NAME, LONG, Owner::random()).await, Reply::Busy, "another owner is somebody else");
    let again = granted(probe.reenter(NAME, LONG, outer.owner()).await);
    assert_eq!(probe.release(&again).await, Reply::Done);
    probe.kill().await;
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none(), "the outer hold stands");
    drop(outer.reenter().await.unwrap());
    outer.release().await.unwrap();
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// A holder in another process learns of its eviction long before its lease ends.
pub async fn eviction_reaches_another_process_at_once(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    let held = probe.acquire(NAME, LONG).await;
    let lost = probe.send(Request::Lost { guard: held.guard }).await;
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    let reply = at_once("it is told", lost).await.unwrap();
    assert!(matches!(reply, Reply::Lost(_)), "{reply:?}");
    assert!(!probe.look(&held).await.valid);
}

async fn hold(probe: &Probe, mode: Mode, ttl: Duration) -> Granted {
    let request = Request::Acquire { name: NAME.to_owned(), mode, ttl, wait: true, owner: None };
    granted(probe.ask(request).await)
}

/// A reader that dies does not keep writers out.
pub async fn a_killed_reader_lets_the_writer_in(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    hold(&probe, Mode::Shared, lease(&client)).await;
    let reading = client.rwlock(NAME).ttl(LONG).read().await.unwrap();
    let writer = queue(&client);
    until_line(&client, NAME, 2, 1).await;
    probe.kill().await;
    eventually("the dead reader is gone", async || line(&client, NAME).await.0 == 1).await;
    assert!(!writer.is_finished(), "somebody else still reads");
    reading.release().await.unwrap();
    at_once("the writer holds", writer).await.unwrap().release().await.unwrap();
}

/// The permits of a process that dies can be had again.
pub async fn a_permit_of_a_killed_process_comes_back(subject: &Subject) {
    let Some(client) = serves_processes(subject).await else { return };
    let probe = Probe::connect(subject.url()).await;
    let two = Mode::Permit { of: 2 };
    hold(&probe, two, lease(&client)).await;
    hold(&probe, two, lease(&client)).await;
    assert!(client.semaphore(NAME, 2).try_acquire().await.unwrap().is_none());
    probe.kill().await;
    let permits = client.semaphore(NAME, 2);
    let one = at_once("one comes back", permits.acquire()).await.unwrap();
    let other = at_once("and the other", permits.acquire()).await.unwrap();
    drop((one, other));
}
