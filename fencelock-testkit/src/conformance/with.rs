//! Running a body under a lock: its value comes back, its panic releases, its loss stops it.

use super::{LONG, NAME};
use crate::Subject;
use crate::wait::{at_once, until_free, until_line};
use fencelock::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells when it goes away.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The body sees the guard, and its value comes back.
pub async fn the_value_of_the_body_comes_back_and_the_lock_is_free(subject: &Subject) {
    let client = subject.client().await;
    let value = client.mutex(NAME).with(async |lock| (lock.token(), lock.is_valid())).await.unwrap();
    assert!(value.1);
    until_free(&client, NAME).await;
    let failed: Result<(), &str> = client.mutex(NAME).with(async |_| Err("the body's own error")).await.unwrap();
    assert_eq!(failed, Err("the body's own error"));
    until_free(&client, NAME).await;
    let names = client.all(["a", "b"]).with(async |lock| lock.names().count()).await.unwrap();
    assert_eq!(names, 2);
    until_free(&client, "b").await;
}

/// A panic unwinds through the lock.
pub async fn a_panic_inside_releases(subject: &Subject) {
    let client = subject.client().await;
    let mutex = client.mutex(NAME).ttl(LONG);
    let task = tokio::spawn(async move {
        let body = mutex.with(async |_| panic!("this panic is part of the check"));
        body.await.unwrap()
    });
    assert!(task.await.unwrap_err().is_panic());
    until_free(&client, NAME).await;
}

/// The body is stopped where it waits, long before the lease ends.
pub async fn a_body_is_stopped_when_the_lock_is_lost(subject: &Subject) {
    let client = subject.client().await;
    let stopped = Arc::new(AtomicBool::new(false));
    let (mutex, flag) = (client.mutex(NAME).ttl(LONG), Flag(Arc::clone(&stopped)));
    let body = tokio::spawn(async move {
        mutex
            .with(async move |_| {
                let _flag = flag;
                std::future::pending::<()>().await
            })
            .await
    });
    until_line(&client, NAME, 1, 0).await;
    assert_eq!(client.evict(NAME).await.unwrap(), 1);
    let error = at_once("the body is stopped", body).await.unwrap().unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::Lost, Some(NAME)), "{error}");
    assert!(stopped.load(Ordering::SeqCst));
}

/// The future of `with` can be sent to another thread.
pub async fn a_body_can_run_in_a_spawned_task(subject: &Subject) {
    let client = subject.client().await;
    let mutex = client.mutex(NAME);
    let task = tokio::spawn(async move {
        mutex
            .with(async |lock| {
                tokio::task::yield_now().await;
                lock.token()
            })
            .await
    });
    assert!(task.await.unwrap().unwrap().as_u64() > 0);
    until_free(&client, NAME).await;
}

/// Dropping the future of `with` drops the body and releases.
pub async fn a_body_that_is_dropped_releases(subject: &Subject) {
    let client = subject.client().await;
    let mutex = client.mutex(NAME).ttl(LONG);
    let task = tokio::spawn(async move { mutex.with(async |_| std::future::pending::<()>().await).await });
    until_line(&client, NAME, 1, 0).await;
    task.abort();
    until_free(&client, NAME).await;
}
