//! Elections, what `status` tells, and large numbers.

use super::{LONG, NAME, SHORT};
use crate::Subject;
use crate::wait::{at_once, eventually, until_line};
use fencelock::{Client, Guard, Mode};
use futures_util::{StreamExt, stream};
use std::time::Duration;

/// The others see who leads, and one of them follows when it resigns.
pub async fn the_leader_is_known_and_another_follows(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let election = two.election(NAME).ttl(LONG).label("node-2");
    assert!(election.leader().await.unwrap().is_none());
    let leads = one.election(NAME).ttl(LONG).label("node-1").campaign().await.unwrap();
    let leader = election.leader().await.unwrap().expect("somebody leads");
    assert_eq!((leader.label.as_str(), leader.token), ("node-1", leads.token()));
    assert!(election.try_campaign().await.unwrap().is_none());
    let next = tokio::spawn({
        let election = election.clone();
        async move { election.campaign().await.unwrap() }
    });
    until_line(&one, NAME, 1, 1).await;
    leads.release().await.unwrap();
    let next = at_once("the next one leads", next).await.unwrap();
    assert_eq!(election.leader().await.unwrap().expect("somebody leads").label, "node-2");
    next.release().await.unwrap();
    assert!(election.leader().await.unwrap().is_none());
}

/// A leader that is removed learns it, and the next one leads.
pub async fn an_evicted_leader_is_followed(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let leads = one.election(NAME).ttl(LONG).campaign().await.unwrap();
    let next = tokio::spawn({
        let election = two.election(NAME).ttl(LONG);
        async move { election.campaign_timeout(LONG).await.unwrap() }
    });
    until_line(&one, NAME, 1, 1).await;
    assert_eq!(two.evict(NAME).await.unwrap(), 1);
    at_once("the leader steps down", leads.lost()).await;
    assert!(at_once("the next one leads", next).await.unwrap().token() > leads.token());
}

/// Holders and waiters with label, mode, token and times; owners only as far as tells them apart.
pub async fn status_tells_who_holds_and_who_waits(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let free = one.status(NAME).await.unwrap();
    assert!(!free.is_held() && free.waiters.is_empty() && free.name == NAME);
    let reader = |client: &Client, label: &str| client.rwlock(NAME).ttl(LONG).label(label);
    let (readers, mode) = if one.capability().shared {
        let first = reader(&one, "reader one").read().await.unwrap();
        (vec![first, reader(&two, "reader two").read().await.unwrap()], Mode::Shared)
    } else {
        (vec![reader(&one, "reader one").write().await.unwrap()], Mode::Exclusive)
    };
    let waiter = tokio::spawn({
        let lock = two.rwlock(NAME).ttl(LONG).label("writer");
        async move { lock.write().await }
    });
    until_line(&one, NAME, readers.len(), 1).await;
    let status = one.status(NAME).await.unwrap();
    for (holder, guard) in status.holders.iter().zip(&readers) {
        assert_eq!((holder.mode, holder.token), (mode, guard.token()));
        assert_eq!(holder.owner, guard.owner().short());
        assert!(holder.lease_left <= LONG && holder.lease_left > LONG / 2, "{holder:?}");
        assert!(holder.held_for < LONG / 2, "{holder:?}");
    }
    let labels: Vec<&str> = status.holders.iter().map(|holder| holder.label.as_str()).collect();
    assert_eq!(labels, ["reader one", "reader two"][..readers.len()]);
    assert_eq!((status.waiters[0].mode, status.waiters[0].label.as_str()), (Mode::Exclusive, "writer"));
    waiter.abort();
}

async fn hold_many(client: &Client, many: usize, ttl: Duration) -> Vec<Guard> {
    let locks = (0..many).map(|number| client.mutex(format!("many:{number:05}")).ttl(ttl));
    let guards = stream::iter(locks).map(|lock| async move { lock.acquire().await.unwrap() });
    guards.buffer_unordered(64).collect().await
}

/// One client holds ten thousand locks, and gives them all back.
pub async fn ten_thousand_locks_at_once(subject: &Subject) {
    let client = subject.client().await;
    let guards = hold_many(&client, 10_000, LONG).await;
    assert!(guards.iter().all(Guard::is_valid));
    let listed = client.list("many:").await.unwrap();
    assert_eq!(listed.len(), 10_000);
    assert!(listed.is_sorted_by_key(|status| &status.name));
    drop(guards);
    client.settled().await;
    assert!(client.list("").await.unwrap().is_empty());
}

/// One client keeps a thousand short leases alive.
pub async fn a_thousand_leases_are_renewed_in_time(subject: &Subject) {
    let client = subject.client().await;
    let ttl = SHORT * 2;
    let guards = hold_many(&client, 1_000, ttl).await;
    let held = async || client.status(guards[0].name()).await.unwrap().holders[0].held_for;
    eventually("they were held for two leases", async || held().await > ttl * 2).await;
    let lost: Vec<_> = guards.iter().filter(|guard| !guard.is_valid()).collect();
    assert!(lost.is_empty(), "{} were lost: {lost:?}", lost.len());
}
