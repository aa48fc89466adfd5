//! Several locks at once.

use super::{Options, not_granted, options, run_under};
use crate::client::{Client, Wait};
use crate::keeper::Held;
use crate::{Error, ErrorKind, Guard, Mode, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Several mutexes, all or none.
///
/// They are taken in one order everywhere (that of their names), so that two who want the same ones cannot wait for each
/// other. The one [`Guard`] stands for all of them; [`Guard::token_of`] gives the token of each.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let both = locks.all(["account:7", "account:3"]).acquire().await?;
/// assert!(both.token_of("account:3").is_some());
/// both.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct All {
    options: Options,
    /// As the caller named them, without repetitions.
    names: Vec<Arc<str>>,
}

impl All {
    pub(crate) fn new(client: &Client, names: impl IntoIterator<Item = impl AsRef<str>>) -> Self {
        let mut kept: Vec<Arc<str>> = Vec::new();
        for name in names {
            if !kept.iter().any(|known| **known == *name.as_ref()) {
                kept.push(name.as_ref().into());
            }
        }
        Self { options: Options::new(client, ""), names: kept }
    }

    options!();

    /// Waits in line for each of them.
    ///
    /// # Cancellation safety
    /// Dropping the future releases what was taken and leaves the line.
    ///
    /// # Errors
    /// `Invalid` without any name; otherwise as for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn acquire(&self) -> Result<Guard> {
        self.take(Wait::Forever).await?.ok_or_else(not_granted)
    }

    /// Takes all of them if all are free.
    ///
    /// # Errors
    /// As for [`acquire`](All::acquire).
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        self.take(Wait::No).await
    }

    /// Waits for at most this long, for all of them together.
    ///
    /// # Errors
    /// `Timeout`; otherwise as for [`acquire`](All::acquire).
    pub async fn acquire_timeout(&self, span: Duration) -> Result<Guard> {
        self.take(Wait::AtMost(span)).await?.ok_or_else(not_granted)
    }

    /// As [`Mutex::with`](crate::Mutex::with), under all of them.
    ///
    /// # Errors
    /// As for [`Mutex::with`](crate::Mutex::with).
    pub async fn with<T>(&self, body: impl AsyncFnOnce(&Guard) -> T) -> Result<T> {
        run_under(self.acquire().await?, body).await
    }

    async fn take(&self, wait: Wait) -> Result<Option<Guard>> {
        if self.names.is_empty() {
            return Err(Error::invalid("no lock was named; give at least one name").during("acquire"));
        }
        // One owner for all of them: who knows it can re-enter each.
        let owner = self.options.an_owner();
        // A bad name among them is told before anything is touched.
        for name in &self.names {
            self.options.request(name, Mode::Exclusive, owner)?;
        }
        let mut sorted: Vec<&Arc<str>> = self.names.iter().collect();
        sorted.sort();
        let until = match wait {
            // A span beyond the clock's end is for ever.
            Wait::AtMost(span) => Instant::now().checked_add(span),
            Wait::No | Wait::Forever => None,
        };
        // Each part becomes a guard at once, so that it is released if a later one fails or this future is dropped.
        let mut guards: Vec<Guard> = Vec::with_capacity(sorted.len());
        let mut parts: Vec<Arc<Held>> = Vec::with_capacity(sorted.len());
        for name in sorted {
            let wait = match (until, wait) {
                (Some(until), _) => Wait::AtMost(until.saturating_duration_since(Instant::now())),
                (None, Wait::AtMost(_)) => Wait::Forever,
                (None, wait) => wait,
            };
            let Some(held) = self.options.hold(name, Mode::Exclusive, owner, wait).await? else {
                return Ok(None);
            };
            parts.push(Arc::clone(&held));
            guards.push(Guard::new(self.options.client.clone(), vec![held]));
        }
        if let Some(lost) = guards.iter().find(|guard| !guard.is_valid()) {
            return Err(Error::new(ErrorKind::Lost, "it was lost while waiting for the others; try again")
                .during("acquire")
                .of_lock(lost.name()));
        }
        for guard in guards {
            guard.defuse();
        }
        parts.sort_by_key(|held| self.names.iter().position(|name| **name == *held.hold.name.as_str()));
        Ok(Some(Guard::new(self.options.client.clone(), parts)))
    }
}
