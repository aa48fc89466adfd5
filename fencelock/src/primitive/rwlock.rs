//! Many readers or one writer.

use super::{Options, options};
use crate::client::{Client, Wait};
use crate::{Guard, Mode, Result};
use std::time::Duration;

/// A lock that many readers share or one writer has alone.
///
/// First come, first served: a waiting writer is not overtaken by readers that came later, so a stream of readers cannot
/// starve it. The plain [`Mutex`](crate::Mutex) of the same name and the writer are the same thing.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let config = locks.rwlock("config");
/// let one = config.read().await?;
/// let two = config.read().await?;
/// assert!(config.try_write().await?.is_none());
/// # drop((one, two)); Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RwLock {
    options: Options,
}

impl RwLock {
    pub(crate) fn new(client: &Client, name: &str) -> Self {
        Self { options: Options { writer: true, ..Options::new(client, name) } }
    }

    options!();

    /// Waits in line to read. Cancellation and errors as for [`Mutex::acquire`](crate::Mutex::acquire).
    ///
    /// # Errors
    /// As for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn read(&self) -> Result<Guard> {
        self.options.acquire(Mode::Shared).await
    }

    /// Reads if no writer holds or waits.
    ///
    /// # Errors
    /// As for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn try_read(&self) -> Result<Option<Guard>> {
        self.options.take(Mode::Shared, Wait::No).await
    }

    /// Waits in line to read, for at most this long.
    ///
    /// # Errors
    /// `Timeout`; otherwise as for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn read_timeout(&self, span: Duration) -> Result<Guard> {
        self.options.acquire_timeout(Mode::Shared, span).await
    }

    /// Waits in line to write. Cancellation and errors as for [`Mutex::acquire`](crate::Mutex::acquire).
    ///
    /// # Errors
    /// As for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn write(&self) -> Result<Guard> {
        self.options.acquire(Mode::Exclusive).await
    }

    /// Writes if nobody holds or waits.
    ///
    /// # Errors
    /// As for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn try_write(&self) -> Result<Option<Guard>> {
        self.options.take(Mode::Exclusive, Wait::No).await
    }

    /// Waits in line to write, for at most this long.
    ///
    /// # Errors
    /// `Timeout`; otherwise as for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn write_timeout(&self, span: Duration) -> Result<Guard> {
        self.options.acquire_timeout(Mode::Exclusive, span).await
    }
}
