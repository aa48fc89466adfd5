//! An engine made of a client: what a wrapper puts between itself and a real engine, which only a URL leads to.
//!
//! Every claim becomes a guard of the inner client, whose own keeper keeps it alive. So the lease that the wrapped engine
//! promises is the one that the inner guard still has.

use crate::ask::{Ask, Patience};
use async_trait::async_trait;
use fencelock::engine::{Capability, Engine};
use fencelock::{
    Claim, Client, Clock, ErrorKind, Grant, Guard, Hold, Moment, Name, Owner, Release, Renewal, Result, Status,
};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// An engine whose every operation is done by a client.
pub struct Relay {
    client: Client,
    held: Mutex<HashMap<(Name, Owner), Arc<Guard>>>,
    /// New holds, whose loss must be reported.
    watch: mpsc::UnboundedSender<(Owner, BoxFuture<'static, ()>)>,
    watched: tokio::sync::Mutex<mpsc::UnboundedReceiver<(Owner, BoxFuture<'static, ()>)>>,
}

impl Relay {
    /// An engine that does what this client does.
    pub fn new(client: Client) -> Self {
        let (watch, watched) = mpsc::unbounded_channel();
        Self { client, held: Mutex::default(), watch, watched: tokio::sync::Mutex::new(watched) }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<(Name, Owner), Arc<Guard>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When a lease of this length began that ends when the guard's does.
fn begun(guard: &Guard, ttl: Duration) -> Moment {
    let end = Clock::Boot.now().after(guard.valid_for());
    Moment::from_nanos(end.as_nanos().saturating_sub(u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX)))
}

#[async_trait]
impl Engine for Relay {
    fn address(&self) -> &str {
        self.client.address()
    }

    fn capability(&self) -> Capability {
        self.client.capability()
    }

    fn clock(&self) -> Clock {
        Clock::Boot
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        let patience = if wait { Patience::Endless } else { Patience::None };
        let (name, label) = (claim.name.as_str(), &*claim.label);
        let ask = Ask { name, mode: claim.mode, ttl: claim.ttl, label, owner: Some(claim.owner) };
        let Some(guard) = ask.of(&self.client, patience).await? else { return Ok(None) };
        let lost = guard.lost();
        let _ = self.watch.send((claim.owner, Box::pin(async { _ = lost.await })));
        let grant = Grant::new(guard.token(), guard.mode(), begun(&guard, claim.ttl), 0);
        self.held().insert((claim.name.clone(), claim.owner), Arc::new(guard));
        Ok(Some(grant))
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let mut answers = Vec::with_capacity(holds.len());
        for hold in holds {
            let guard = self.held().get(&(hold.name.clone(), hold.owner)).cloned();
            answers.push(match guard {
                // Re-entering asks the real engine, and extends the lease.
                Some(guard) if guard.reenter().await.is_ok() => Renewal::Extended { from: begun(&guard, hold.ttl) },
                _ => Renewal::Gone,
            });
        }
        Ok(answers)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        let Some(guard) = self.held().remove(&(hold.name.clone(), hold.owner)) else {
            // A claim that was given up: the inner client withdraws it in the background.
            self.client.settled().await;
            return Ok(Release::NotHeld);
        };
        let Ok(guard) = Arc::try_unwrap(guard) else { return Ok(Release::Freed) };
        match guard.release().await {
            Ok(()) => Ok(Release::Freed),
            Err(error) if error.kind() == ErrorKind::Lost => Ok(Release::NotHeld),
            Err(error) => Err(error),
        }
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let held = self.held();
        let guard = held.get(&(name.clone(), owner)).filter(|guard| guard.is_valid());
        Ok(guard.map(|guard| Grant::new(guard.token(), guard.mode(), begun(guard, guard.valid_for()), 0)))
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        self.client.status(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        self.client.list(prefix).await
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        self.client.evict(name).await
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        let mut watched = self.watched.lock().await;
        let mut losses = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some((owner, loss)) = watched.recv() => losses.push(async move { loss.await; owner }),
                Some(owner) = losses.next(), if !losses.is_empty() => drop(lost.send(owner)),
            }
        }
    }

    async fn close(&self) -> Result<()> {
        self.client.close().await
    }
}
