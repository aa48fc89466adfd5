//! Several locks at once: all or none, without deadlock.

use super::{LONG, held_up, keeper_has_run};
use crate::Subject;
use crate::stepped::Stepped;
use crate::wait::{at_once, line, until_free, until_line};
use fencelock::{Client, ErrorKind, Owner};
use std::time::Duration;

async fn all_free(client: &Client, names: &[&str]) {
    for name in names {
        until_free(client, name).await;
    }
}

/// Two who name the same locks in opposite orders get through.
pub async fn opposite_orders_do_not_deadlock(subject: &Subject) {
    let mut tasks = Vec::new();
    for client in [subject.client().await, subject.client().await] {
        for names in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]] {
            let all = client.all(names);
            tasks.push(tokio::spawn(async move {
                for _ in 0..15 {
                    let guard = all.acquire().await.unwrap();
                    tokio::task::yield_now().await;
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    all_free(&subject.client().await, &["a", "b", "c"]).await;
}

/// If one of them is busy, none of them is taken.
pub async fn try_takes_all_or_nothing(subject: &Subject) {
    let client = subject.client().await;
    for busy in ["a", "b", "c"] {
        let guard = client.mutex(busy).acquire().await.unwrap();
        assert!(client.all(["c", "a", "b"]).try_acquire().await.unwrap().is_none());
        client.settled().await;
        for name in ["a", "b", "c"] {
            assert_eq!(line(&client, name).await, (usize::from(name == busy), 0), "{name}, busy {busy}");
        }
        guard.release().await.unwrap();
    }
    let all = client.all(["c", "a", "b"]).try_acquire().await.unwrap().expect("all are free");
    all.release().await.unwrap();
    all_free(&client, &["a", "b", "c"]).await;
}

/// Nothing stays behind when the time is over, and the time is for all of them together.
pub async fn a_timeout_takes_all_or_nothing(subject: &Subject) {
    let client = subject.client().await;
    let busy = client.mutex("b").acquire().await.unwrap();
    let error = client.all(["c", "b", "a"]).acquire_timeout(Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    client.settled().await;
    assert_eq!(line(&client, "b").await, (1, 0));
    all_free(&client, &["a", "c"]).await;
    busy.release().await.unwrap();
}

/// Dropped while it waits for the second one, it gives the first one back.
pub async fn a_dropped_acquire_of_several_leaves_no_trace(subject: &Subject) {
    let client = subject.client().await;
    let busy = client.mutex("b").acquire().await.unwrap();
    let all = client.all(["a", "b", "c"]);
    let mut acquire = Stepped::new(all.acquire());
    assert!(acquire.until_parked().await.is_none());
    assert_eq!((line(&client, "a").await, line(&client, "b").await), ((1, 0), (1, 1)));
    drop(acquire);
    client.settled().await;
    assert_eq!(line(&client, "b").await, (1, 0));
    all_free(&client, &["a", "c"]).await;
    busy.release().await.unwrap();
}

/// The guard tells the token of each, which is the one that the engine shows.
pub async fn each_lock_has_its_token(subject: &Subject) {
    let client = subject.client().await;
    client.mutex("b").acquire().await.unwrap().release().await.unwrap();
    let guard = client.all(["c", "a", "b"]).acquire().await.unwrap();
    assert!(guard.names().eq(["c", "a", "b"]), "in the order of the caller");
    assert_eq!(guard.name(), "c");
    assert_eq!(Some(guard.token()), guard.token_of("c"));
    for name in ["a", "b", "c"] {
        let status = client.status(name).await.unwrap();
        assert_eq!(guard.token_of(name), Some(status.holders[0].token), "{name}");
    }
    assert_eq!(guard.token_of("d"), None);
    guard.release().await.unwrap();
}

/// When one is taken away the guard is lost, and the release gives the others back.
pub async fn the_loss_of_one_is_the_loss_of_all(subject: &Subject) {
    let client = subject.client().await;
    let guard = client.all(["a", "b", "c"]).ttl(LONG).acquire().await.unwrap();
    let lost = tokio::spawn(guard.lost());
    assert_eq!(client.evict("b").await.unwrap(), 1);
    at_once("the loss is told", lost).await.unwrap();
    assert!(!guard.is_valid());
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    all_free(&client, &["a", "b", "c"]).await;
}

/// The owner of several locks re-enters them, all together and each of them.
pub async fn several_locks_are_re_entered_by_their_owner(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let outer = one.all(["b", "a"]).ttl(LONG).acquire().await.unwrap();
    let again = at_once("all of them", two.all(["a", "b"]).owner(outer.owner()).acquire()).await.unwrap();
    assert!(again.is_borrowed());
    assert_eq!(again.token_of("b"), outer.token_of("b"));
    again.release().await.unwrap();
    for name in ["a", "b"] {
        let inner = at_once("each of them", two.mutex(name).owner(outer.owner()).acquire()).await.unwrap();
        assert!(inner.is_borrowed());
        inner.release().await.unwrap();
    }
    until_line(&one, "a", 1, 0).await;
    outer.release().await.unwrap();
    all_free(&one, &["a", "b"]).await;
}

/// Naming a lock twice is no self-deadlock.
pub async fn a_name_that_stands_twice_is_taken_once(subject: &Subject) {
    let client = subject.client().await;
    let guard = at_once("no deadlock", client.all(["a", "b", "a"]).acquire()).await.unwrap();
    assert!(guard.names().eq(["a", "b"]));
    guard.release().await.unwrap();
    all_free(&client, &["a", "b"]).await;
}

/// An owner holds a first lock and waits for a second one when the news that it holds the first one arrives.
pub async fn late_news_of_one_lock_is_not_taken_for_another(subject: &Subject) {
    let client = subject.client().await;
    let (late, go_on) = held_up(subject).await;
    let busy = client.mutex("b").ttl(LONG).acquire().await.unwrap();
    // The waiter looks for itself when this short lease should have ended. Not too short: it must not be lost on a busy machine.
    let first = client.mutex("a").ttl(Duration::from_secs(2)).acquire().await.unwrap();
    let both = late.all(["a", "b"]).ttl(LONG).owner(Owner::random());
    let waiter = tokio::spawn(async move { both.acquire().await.map(drop) });
    until_line(&client, "a", 1, 1).await;
    first.release().await.unwrap();
    until_line(&client, "b", 1, 1).await;
    go_on.send(()).unwrap();
    keeper_has_run(&late).await;
    assert!(!waiter.is_finished(), "it believes to hold what somebody else holds");
    assert_eq!(line(&client, "b").await, (1, 1));
    busy.release().await.unwrap();
    at_once("both are free", waiter).await.unwrap().unwrap();
    all_free(&client, &["a", "b"]).await;
}
