//! How a client ends: closed, dropped, or left behind by its runtime.

use super::{LONG, NAME, SHORT};
use crate::Subject;
use crate::wait::{at_once, eventually, line, until_free, until_line};
use fencelock::{ErrorKind, Guard, Loss};
use std::time::Duration;

/// Whatever is held is released, and its guards know.
pub async fn close_gives_everything_back(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let mut guards = Vec::new();
    for name in ["a", "b", "c"] {
        guards.push(one.mutex(name).ttl(LONG).acquire().await.unwrap());
    }
    at_once("closing does not hang", one.close()).await.unwrap();
    assert!(two.list("").await.unwrap().is_empty());
    for guard in guards {
        assert!(!guard.is_valid());
        assert_eq!(guard.loss(), Some(Loss::Closed));
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    }
    at_once("closing twice does not hang", one.close()).await.unwrap();
}

/// After the end there is an error that says so, from every clone.
pub async fn a_closed_client_acquires_nothing(subject: &Subject) {
    let client = subject.client().await;
    let clone = client.clone();
    client.mutex(NAME).acquire().await.unwrap().release().await.unwrap();
    client.close().await.unwrap();
    for client in [client, clone] {
        let error = at_once("it does not wait", client.mutex(NAME).acquire()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(client.mutex(NAME).try_acquire().await.unwrap_err().kind(), ErrorKind::Unavailable);
        at_once("nothing is pending", client.settled()).await;
    }
    until_free(&subject.client().await, NAME).await;
}

/// Who waits while the client is closed acquires nothing, and leaves the line.
pub async fn close_ends_a_waiting_acquire(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let holder = two.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    let mutex = one.mutex(NAME).ttl(LONG);
    let waiter = tokio::spawn(async move { mutex.acquire().await.map(drop) });
    until_line(&two, NAME, 1, 1).await;
    at_once("closing does not hang", one.close()).await.unwrap();
    let error = at_once("the waiter is told", waiter).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(line(&two, NAME).await, (1, 0));
    holder.release().await.unwrap();
    until_free(&two, NAME).await;
}

/// The end of one client is not the end of another.
pub async fn close_leaves_other_clients_alone(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let guard = two.mutex(NAME).ttl(LONG).acquire().await.unwrap();
    one.close().await.unwrap();
    assert!(guard.is_valid());
    assert_eq!(line(&two, NAME).await, (1, 0));
    guard.release().await.unwrap();
}

/// The keeper lives on the runtime that first acquired. When that is gone, the client goes on elsewhere.
pub async fn a_client_outlives_the_runtime_that_it_was_first_used_on(subject: &Subject) {
    let url = subject.url().to_owned();
    let made = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = fencelock::connect(url).await.unwrap();
            let guard = client.mutex("kept").ttl(LONG).acquire().await.unwrap();
            drop(client.mutex(NAME).acquire().await.unwrap());
            (client, guard)
        })
    });
    let (client, kept) = tokio::task::spawn_blocking(move || made.join().unwrap()).await.unwrap();
    until_free(&client, NAME).await;
    let guard = at_once("it acquires again", client.mutex(NAME).acquire()).await.unwrap();
    assert!(guard.is_valid() && kept.is_valid());
    let again = at_once("it renews what it held", kept.reenter()).await.unwrap();
    drop(again);
    kept.release().await.unwrap();
    guard.release().await.unwrap();
    client.close().await.unwrap();
}

/// Nothing of a client that was dropped stays in any line.
pub async fn a_client_that_goes_away_leaves_nothing(subject: &Subject) {
    let observer = subject.client().await;
    let client = subject.client().await;
    let guards = [client.mutex("a").ttl(LONG).acquire().await.unwrap(), client.mutex("b").acquire().await.unwrap()];
    drop(client);
    assert!(guards.iter().all(Guard::is_valid), "guards keep their client alive");
    drop(guards);
    until_free(&observer, "a").await;
    until_free(&observer, "b").await;
}

/// Holds a permit that nobody renews: the runtime of its keeper is gone.
async fn unattended(subject: &Subject, ttl: Duration) -> Guard {
    let url = subject.url().to_owned();
    let made = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = fencelock::connect(url).await.unwrap();
            client.semaphore(NAME, 2).ttl(ttl).acquire().await.unwrap()
        })
    });
    tokio::task::spawn_blocking(move || made.join().unwrap()).await.unwrap()
}

/// A lease that is not renewed ends, for its guard first and then for everybody.
pub async fn what_nobody_renews_is_free_after_its_lease(subject: &Subject) {
    let client = subject.client().await;
    let (one, two) = (unattended(subject, SHORT).await, unattended(subject, SHORT).await);
    let next = client.semaphore(NAME, 2).acquire().await.unwrap();
    assert!(!one.is_valid() && next.is_valid());
    assert_eq!(at_once("the loss is told", one.lost()).await, Loss::Deadline);
    drop((one, two));
    next.release().await.unwrap();
    until_free(&client, NAME).await;
}

/// The first holder left, the second one expired, and a newcomer finds the lock free.
pub async fn a_line_goes_on_after_all_its_holders_expired(subject: &Subject) {
    let client = subject.client().await;
    let leaves = client.semaphore(NAME, 2).acquire().await.unwrap();
    let expires = unattended(subject, fencelock::MIN_TTL).await;
    leaves.release().await.unwrap();
    eventually("the lease is over", async || line(&client, NAME).await == (0, 0)).await;
    assert!(!expires.is_valid());
    let next = client.semaphore(NAME, 2).try_acquire().await.unwrap();
    next.expect("it is free").release().await.unwrap();
}
