//! Acquiring by mode: which primitive stands for it is decided here, once.

use fencelock::{Client, Guard, Mode, Owner, Result};
use std::time::Duration;

/// A lock to be acquired.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Its name.
    pub name: &'a str,
    /// How.
    pub mode: Mode,
    /// With which lease.
    pub ttl: Duration,
    /// What others see in the line.
    pub label: &'a str,
    /// As which owner.
    pub owner: Option<Owner>,
}

/// How long it may take.
#[derive(Debug, Clone, Copy)]
pub enum Patience {
    /// It must be free.
    None,
    /// At most this long.
    AtMost(Duration),
    /// As long as it takes.
    Endless,
}

impl Ask<'_> {
    /// Acquires. `None` when it was not free and had to be.
    ///
    /// # Errors
    /// Those of the primitive.
    pub async fn of(&self, client: &Client, patience: Patience) -> Result<Option<Guard>> {
        macro_rules! take {
            ($lock:expr, $acquire:ident, $acquire_timeout:ident, $try_acquire:ident) => {{
                let mut lock = $lock.ttl(self.ttl).label(self.label);
                if let Some(owner) = self.owner {
                    lock = lock.owner(owner);
                }
                match patience {
                    Patience::None => lock.$try_acquire().await,
                    Patience::AtMost(span) => lock.$acquire_timeout(span).await.map(Some),
                    Patience::Endless => lock.$acquire().await.map(Some),
                }
            }};
        }
        match self.mode {
            Mode::Exclusive => take!(client.mutex(self.name), acquire, acquire_timeout, try_acquire),
            Mode::Shared => take!(client.rwlock(self.name), read, read_timeout, try_read),
            Mode::Permit { of } => take!(client.semaphore(self.name, of), acquire, acquire_timeout, try_acquire),
        }
    }
}
