//! Readers share, a writer is alone, and nobody starves.

use super::exclusive::costs_the_same;
use super::{LONG, NAME};
use crate::Subject;
use crate::wait::{at_once, line, until_free, until_line};
use fencelock::{Client, ErrorKind, Guard};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use tokio::task::JoinHandle;

fn reader(client: &Client) -> JoinHandle<Guard> {
    let lock = client.rwlock(NAME).ttl(LONG);
    tokio::spawn(async move { lock.read().await.unwrap() })
}

fn writer(client: &Client) -> JoinHandle<Guard> {
    let lock = client.rwlock(NAME).ttl(LONG);
    tokio::spawn(async move { lock.write().await.unwrap() })
}

/// Any number of readers hold at the same time.
pub async fn readers_share(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let readers = [
        one.rwlock(NAME).read().await.unwrap(),
        two.rwlock(NAME).read().await.unwrap(),
        two.rwlock(NAME).try_read().await.unwrap().expect("readers share"),
    ];
    assert_eq!(line(&one, NAME).await, (3, 0));
    for reader in readers {
        assert!(reader.is_valid());
        reader.release().await.unwrap();
    }
    assert_eq!(line(&one, NAME).await, (0, 0));
}

/// A writer excludes readers and writers, and is excluded by them.
pub async fn a_writer_is_alone(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let reading = one.rwlock(NAME).read().await.unwrap();
    assert!(two.rwlock(NAME).try_write().await.unwrap().is_none());
    reading.release().await.unwrap();
    let writing = two.rwlock(NAME).try_write().await.unwrap().expect("nobody reads");
    assert!(one.rwlock(NAME).try_read().await.unwrap().is_none());
    assert!(one.rwlock(NAME).try_write().await.unwrap().is_none());
    let error = one.rwlock(NAME).read_timeout(std::time::Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    writing.release().await.unwrap();
    until_free(&one, NAME).await;
}

/// Readers that come after a waiting writer wait behind it, also those that only try.
pub async fn a_waiting_writer_is_not_overtaken(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let reading = one.rwlock(NAME).ttl(LONG).read().await.unwrap();
    let writer = writer(&two);
    until_line(&one, NAME, 1, 1).await;
    assert!(two.rwlock(NAME).try_read().await.unwrap().is_none(), "a writer waits");
    let late = reader(&one);
    until_line(&one, NAME, 1, 2).await;
    reading.release().await.unwrap();
    let writing = at_once("the writer is next", writer).await.unwrap();
    assert_eq!(line(&one, NAME).await, (1, 1));
    writing.release().await.unwrap();
    at_once("then the late reader", late).await.unwrap().release().await.unwrap();
}

/// When the writer goes, all readers behind it enter, up to the next writer.
pub async fn readers_behind_a_writer_enter_together(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let writing = one.rwlock(NAME).ttl(LONG).write().await.unwrap();
    let readers: Vec<_> = (0..4).map(|number| reader(if number % 2 == 0 { &one } else { &two })).collect();
    until_line(&one, NAME, 1, 4).await;
    let last = writer(&two);
    until_line(&one, NAME, 1, 5).await;
    writing.release().await.unwrap();
    let mut reading = Vec::new();
    for reader in readers {
        reading.push(at_once("the readers enter", reader).await.unwrap());
    }
    assert_eq!(line(&one, NAME).await, (4, 1));
    drop(reading);
    at_once("then the last writer", last).await.unwrap().release().await.unwrap();
}

/// A mutex and the writing side of a read/write lock of the same name are one.
pub async fn a_mutex_and_a_writer_are_the_same_thing(subject: &Subject) {
    let client = subject.client().await;
    let mutex = client.mutex(NAME).acquire().await.unwrap();
    assert!(client.rwlock(NAME).try_write().await.unwrap().is_none());
    assert!(client.rwlock(NAME).try_read().await.unwrap().is_none());
    mutex.release().await.unwrap();
    let reading = client.rwlock(NAME).read().await.unwrap();
    assert!(client.mutex(NAME).try_acquire().await.unwrap().is_none());
    reading.release().await.unwrap();
}

/// Under contention: readers with readers only, a writer with nobody.
pub async fn readers_and_writers_never_meet(subject: &Subject) {
    // How many readers are inside; -1 for a writer.
    let inside = Arc::new(AtomicIsize::new(0));
    let mut tasks = Vec::new();
    for client in [subject.client().await, subject.client().await] {
        for number in 0..8 {
            let (lock, inside) = (client.rwlock(NAME), Arc::clone(&inside));
            tasks.push(tokio::spawn(async move {
                for _ in 0..8 {
                    if number % 4 == 0 {
                        let guard = lock.write().await.unwrap();
                        assert_eq!(inside.swap(-1, Ordering::SeqCst), 0, "a writer is alone");
                        tokio::task::yield_now().await;
                        assert_eq!(inside.swap(0, Ordering::SeqCst), -1, "a writer stays alone");
                        guard.release().await.unwrap();
                    } else {
                        let guard = lock.read().await.unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) >= 0, "a writer is inside");
                        tokio::task::yield_now().await;
                        assert!(inside.fetch_sub(1, Ordering::SeqCst) > 0, "a writer came in");
                        guard.release().await.unwrap();
                    }
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    until_free(&subject.client().await, NAME).await;
}

/// A reader that wants to write must release first: two of them would wait for each other.
pub async fn an_owner_cannot_turn_from_reader_to_writer(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let reading = one.rwlock(NAME).read().await.unwrap();
    let error = at_once("it is refused", two.rwlock(NAME).owner(reading.owner()).write()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
    assert!(reading.is_valid());
    assert_eq!(line(&one, NAME).await, (1, 0));
    reading.release().await.unwrap();
    let writing = one.rwlock(NAME).write().await.unwrap();
    let again = two.rwlock(NAME).owner(writing.owner()).read().await.unwrap();
    assert!(again.is_borrowed(), "a writer may read");
    again.release().await.unwrap();
    writing.release().await.unwrap();
}

/// Readers that come one after another have growing tokens, and so has the writer after them.
pub async fn tokens_of_readers_grow(subject: &Subject) {
    let client = subject.client().await;
    let mut newest = 0;
    let mut reading = Vec::new();
    for _ in 0..5 {
        let guard = client.rwlock(NAME).read().await.unwrap();
        assert!(guard.token().as_u64() > newest);
        newest = guard.token().as_u64();
        reading.push(guard);
    }
    for guard in reading {
        guard.release().await.unwrap();
    }
    assert!(client.rwlock(NAME).write().await.unwrap().token().as_u64() > newest);
}

/// While one reader stays for long, others come and go at the same cost.
pub async fn a_long_reader_does_not_make_the_lock_slow(subject: &Subject) {
    let client = subject.client().await;
    let _long = client.rwlock(NAME).read().await.unwrap();
    let visit = async || client.rwlock(NAME).read().await.unwrap().release().await.unwrap();
    costs_the_same(4_000, visit).await;
}

/// The same when there is always another one who came before the last one left.
pub async fn overlapping_readers_do_not_make_the_lock_slow(subject: &Subject) {
    let client = subject.client().await;
    let _long = client.rwlock(NAME).read().await.unwrap();
    let mut last = client.rwlock(NAME).read().await.unwrap();
    costs_the_same(4_000, async || {
        let next = client.rwlock(NAME).read().await.unwrap();
        std::mem::replace(&mut last, next).release().await.unwrap();
    })
    .await;
}
