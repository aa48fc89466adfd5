//! Waiting for conditions instead of for fixed times.

use fencelock::Client;
use std::future::Future;
use std::time::{Duration, Instant};

/// How long something that must happen may take on a busy machine before a check fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What "at once" means on a busy machine: far below the leases of the checks that ask for it.
pub const AT_ONCE: Duration = Duration::from_secs(5);

/// Waits until the condition holds.
///
/// # Panics
/// When it does not hold within [`PATIENCE`].
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    while !holds().await {
        assert!(started.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain until {what}");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// The result of something that must happen at once.
///
/// # Panics
/// When it takes longer than [`AT_ONCE`].
pub async fn at_once<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(AT_ONCE, future).await {
        Ok(out) => out,
        Err(_) => panic!("did not happen within {AT_ONCE:?}: {what}"),
    }
}

/// The result of something that servers need time for: an election, a quarantine.
///
/// # Panics
/// When it takes much longer than that.
pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(40);
    tokio::time::timeout(limit, future).await.unwrap_or_else(|_| panic!("did not happen within {limit:?}: {what}"))
}

/// How many hold and how many wait.
///
/// # Panics
/// When the engine cannot tell.
pub async fn line(client: &Client, name: &str) -> (usize, usize) {
    let status = client.status(name).await.expect("the engine tells who holds and who waits");
    (status.holders.len(), status.waiters.len())
}

/// Waits until so many hold and so many wait.
///
/// # Panics
/// When that does not come about.
pub async fn until_line(client: &Client, name: &str, holders: usize, waiters: usize) {
    let what = format!("{holders} hold and {waiters} wait for {name:?}");
    eventually(&what, async || line(client, name).await == (holders, waiters)).await;
}

/// Waits until nobody holds the lock or waits for it.
///
/// # Panics
/// When that does not come about.
pub async fn until_free(client: &Client, name: &str) {
    until_line(client, name, 0, 0).await;
}
