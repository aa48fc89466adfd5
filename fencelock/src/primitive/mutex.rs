//! One holder at a time.

use super::{Options, options, run_under};
use crate::client::{Client, Wait};
use crate::{Guard, Mode, Result};
use std::time::Duration;

/// A lock with one holder at a time, granted in the order of arrival.
///
/// Use it when work must not run twice at the same time. For readers that may share see [`RwLock`](crate::RwLock), for a
/// limited number of holders [`Semaphore`](crate::Semaphore).
///
/// It is a description, not a hold: cheap to make, free to clone, reusable. Each `acquire` is an acquisition of its own.
///
/// ```
/// use std::time::Duration;
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let mutex = locks.mutex("invoice:42").ttl(Duration::from_secs(10));
///
/// let guard = mutex.acquire().await?;
/// assert!(mutex.try_acquire().await?.is_none());
/// guard.release().await?;
///
/// let billed = mutex.with(async |lock| format!("billed under token {}", lock.token())).await?;
/// assert!(billed.starts_with("billed"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Mutex {
    options: Options,
}

impl Mutex {
    pub(crate) fn new(client: &Client, name: &str) -> Self {
        Self { options: Options::new(client, name) }
    }

    options!();

    /// Waits in line until the lock is ours.
    ///
    /// # Cancellation safety
    /// Dropping the future leaves the line; if the grant was on its way, it is released.
    ///
    /// # Errors
    /// `Invalid` for a bad name or option; what the engine reports.
    pub async fn acquire(&self) -> Result<Guard> {
        self.options.acquire(Mode::Exclusive).await
    }

    /// Takes the lock if it is free and nobody waits for it.
    ///
    /// # Cancellation safety
    /// As for [`acquire`](Mutex::acquire).
    ///
    /// # Errors
    /// As for [`acquire`](Mutex::acquire).
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        self.options.take(Mode::Exclusive, Wait::No).await
    }

    /// Waits in line for at most this long.
    ///
    /// # Cancellation safety
    /// As for [`acquire`](Mutex::acquire).
    ///
    /// # Errors
    /// `Timeout` when the time was not enough; otherwise as for [`acquire`](Mutex::acquire).
    pub async fn acquire_timeout(&self, span: Duration) -> Result<Guard> {
        self.options.acquire_timeout(Mode::Exclusive, span).await
    }

    /// Acquires, runs the body, releases: also when the body panics. When the lock is lost, the body is stopped where it
    /// waits.
    ///
    /// A release that fails does not cost the body's value; it goes on in the background. A body that can fail itself gives a
    /// result in a result: `mutex.with(async |lock| write(lock.token()).await).await??`.
    ///
    /// # Errors
    /// `Lost` when the lock was lost before the body was done; otherwise as for [`acquire`](Mutex::acquire).
    pub async fn with<T>(&self, body: impl AsyncFnOnce(&Guard) -> T) -> Result<T> {
        run_under(self.acquire().await?, body).await
    }
}
