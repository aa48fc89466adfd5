//! At most n hold, and every permit comes back.

use super::{LONG, NAME};
use crate::Subject;
use crate::wait::{at_once, line, until_free, until_line};
use fencelock::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Under contention: never more than n, and n at some time.
pub async fn at_most_n_hold(subject: &Subject) {
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for client in [subject.client().await, subject.client().await] {
        for _ in 0..8 {
            let (lock, inside, most) = (client.semaphore(NAME, 3), Arc::clone(&inside), Arc::clone(&most));
            tasks.push(tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = lock.acquire().await.unwrap();
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} at a time");
                    most.fetch_max(now, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    until_free(&subject.client().await, NAME).await;
    let client = subject.client().await;
    let all = [(); 3].map(|()| client.semaphore(NAME, 3));
    let mut guards = Vec::new();
    for permit in &all {
        guards.push(permit.try_acquire().await.unwrap().expect("three fit"));
    }
    assert!(client.semaphore(NAME, 3).try_acquire().await.unwrap().is_none(), "a fourth does not");
    assert!(guards.windows(2).all(|pair| pair[0].token() < pair[1].token()));
}

/// First come, first served, and one permit wakes one waiter.
pub async fn permits_are_given_in_the_order_of_arrival(subject: &Subject) {
    let client = subject.client().await;
    let one = client.semaphore(NAME, 2).ttl(LONG).acquire().await.unwrap();
    let two = client.semaphore(NAME, 2).ttl(LONG).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for ahead in 0..4 {
        let lock = client.semaphore(NAME, 2).ttl(LONG);
        waiters.push(tokio::spawn(async move { lock.acquire().await.unwrap() }));
        until_line(&client, NAME, 2, ahead + 1).await;
    }
    assert!(client.semaphore(NAME, 2).try_acquire().await.unwrap().is_none());
    let mut newest = two.token();
    one.release().await.unwrap();
    assert_eq!(line(&client, NAME).await, (2, 3));
    two.release().await.unwrap();
    for waiter in waiters {
        let guard = at_once("the next one", waiter).await.unwrap();
        assert!(guard.token() > newest, "in the order of arrival");
        newest = guard.token();
        guard.release().await.unwrap();
    }
}

/// All must agree on the number; who does not is told both numbers.
pub async fn another_number_of_permits_is_refused(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let guard = one.semaphore(NAME, 4).acquire().await.unwrap();
    for other in [3, 5] {
        let error = two.semaphore(NAME, other).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let text = error.to_string();
        assert!(text.contains('4') && text.contains(&other.to_string()) && !text.contains('\n'), "{text}");
        assert_eq!(two.semaphore(NAME, other).try_acquire().await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    two.settled().await;
    assert_eq!(line(&one, NAME).await, (1, 0));
    assert!(guard.is_valid());
    guard.release().await.unwrap();
}

/// A semaphore that nobody uses has no number.
pub async fn the_number_may_change_when_nobody_is_left(subject: &Subject) {
    let client = subject.client().await;
    client.semaphore(NAME, 2).acquire().await.unwrap().release().await.unwrap();
    client.semaphore(NAME, 9).acquire().await.unwrap().release().await.unwrap();
}

/// The permit of a guard that is dropped goes to the next one.
pub async fn a_dropped_permit_comes_back(subject: &Subject) {
    let client = subject.client().await;
    let lock = client.semaphore(NAME, 2).ttl(LONG);
    let (one, two) = (lock.acquire().await.unwrap(), lock.acquire().await.unwrap());
    drop(one);
    let three = at_once("a permit is free", lock.acquire()).await.unwrap();
    drop(two);
    drop(three);
    client.settled().await;
    assert_eq!(line(&client, NAME).await, (0, 0));
}

/// An eviction takes the lock away from all who hold it, and tells each.
pub async fn eviction_takes_all_permits_away(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let first = one.semaphore(NAME, 3).ttl(LONG).acquire().await.unwrap();
    let second = two.semaphore(NAME, 3).ttl(LONG).acquire().await.unwrap();
    assert_eq!(one.evict(NAME).await.unwrap(), 2);
    at_once("the first is told", first.lost()).await;
    at_once("the second is told", second.lost()).await;
    until_free(&one, NAME).await;
}
