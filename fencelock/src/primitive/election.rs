//! One leader at a time.

use super::{Options, options};
use crate::client::{Client, Wait};
use crate::{Guard, Holder, Mode, Result};
use std::time::Duration;

/// An election: candidates campaign, one of them leads, the others stand by and follow in the order of arrival.
///
/// The leader is whoever holds the guard. It resigns by releasing it, and must stop leading when
/// [`lost`](Guard::lost) resolves. The label of a candidate is what [`leader`](Election::leader) shows to others.
///
/// ```
/// # #[tokio::main] async fn main() -> fencelock::Result<()> {
/// let locks = fencelock::connect("memory:").await?;
/// let election = locks.election("scheduler").label("node-1");
/// let leadership = election.campaign().await?;
/// assert_eq!(election.leader().await?.unwrap().label, "node-1");
/// leadership.release().await?; // resign
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Election {
    options: Options,
}

impl Election {
    pub(crate) fn new(client: &Client, name: &str) -> Self {
        Self { options: Options::new(client, name) }
    }

    options!();

    /// Waits until this candidate leads. Cancellation as for [`Mutex::acquire`](crate::Mutex::acquire).
    ///
    /// # Errors
    /// As for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn campaign(&self) -> Result<Guard> {
        self.options.acquire(Mode::Exclusive).await
    }

    /// Leads if nobody does.
    ///
    /// # Errors
    /// As for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn try_campaign(&self) -> Result<Option<Guard>> {
        self.options.take(Mode::Exclusive, Wait::No).await
    }

    /// Waits to lead, for at most this long.
    ///
    /// # Errors
    /// `Timeout`; otherwise as for [`Mutex::acquire`](crate::Mutex::acquire).
    pub async fn campaign_timeout(&self, span: Duration) -> Result<Guard> {
        self.options.acquire_timeout(Mode::Exclusive, span).await
    }

    /// Who leads now, if anybody.
    ///
    /// # Errors
    /// As for [`Client::status`].
    pub async fn leader(&self) -> Result<Option<Holder>> {
        let status = self.options.client.status(&self.options.name).await?;
        Ok(status.holders.into_iter().next())
    }
}
