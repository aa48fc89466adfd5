//! At most n holders.

use super::{Options, options};
use crate::client::{Client, Wait};
use crate::{Guard, Mode, Result};
use std::time::Duration;

/// A lock with at most n holders, in the order of arrival.
///
/// Everybody who uses the name must give the same n; a different one is refused while the name is in use.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let gpus = locks.semaphore("gpu", 2);
/// let one = gpus.acquire().await?;
/// let two = gpus.acquire().await?;
/// assert!(gpus.try_acquire().await?.is_none());
/// # drop((one, two)); Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Semaphore {
    options: Options,
    mode: Mode,
}

impl Semaphore {
    pub(crate) fn new(client: &Client, name: &str, permits: u32) -> Self {
        Self { options: Options::new(client, name), mode: Mode::Permit { of: permits } }
    }

    options!();

    /// Waits in line for a permit. Cancellation as for [`Mutex::acquire`](crate::Mutex::acquire).
    ///
    /// # Errors
    /// `Invalid` when the number of permits is 0, or another than the one in use; otherwise as for
    /// [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn acquire(&self) -> Result<Guard> {
        self.options.acquire(self.mode).await
    }

    /// Takes a permit if one is free and nobody waits.
    ///
    /// # Errors
    /// As for [`acquire`](Semaphore::acquire).
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        self.options.take(self.mode, Wait::No).await
    }

    /// Waits in line for a permit, for at most this long.
    ///
    /// # Errors
    /// `Timeout`; otherwise as for [`acquire`](Semaphore::acquire).
    pub async fn acquire_timeout(&self, span: Duration) -> Result<Guard> {
        self.options.acquire_timeout(self.mode, span).await
    }
}
