//! The contract between the client and the systems that keep the truth.
//!
//! An engine knows nothing of tasks, drops and timers of the holder: guard, keeper and releaser live in the
//! client, once, for all engines.

#[cfg(feature = "etcd")]
pub(crate) mod etcd;
#[cfg(all(feature = "file", target_os = "linux"))]
pub(crate) mod file;
pub(crate) mod line;
pub use line::rule;
pub(crate) mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;

use crate::{Claim, Clock, Error, ErrorKind, Grant, Hold, Mode, Name, Owner, Release, Renewal, Result, Status, Token};
use async_trait::async_trait;
use serde::Serialize;
use tokio::sync::mpsc;

/// A system that keeps lines of claims.
///
/// # Contract
/// * Every method may be called from any tokio runtime, also from another one than the engine was made on.
/// * Every method is safe to cancel in the sense that a later [`release`](Engine::release) of the same owner
///   undoes whatever it did.
/// * `acquire`, `renew` and `release` are idempotent per owner.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// The address for messages: the URL without secrets.
    fn address(&self) -> &str;

    /// What this engine does, and what it survives.
    fn capability(&self) -> Capability;

    /// The clock of [`Grant::from`] and [`Renewal::Extended`].
    fn clock(&self) -> Clock;

    /// Joins the line. With `wait`, returns when the claim holds; without, `None` if it would have to wait, and
    /// then it has left the line again.
    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>>;

    /// Extends the leases of these holds, each only if its owner still holds it. The answers come in the same order. One that
    /// cannot be asked is [`Renewal::Unknown`] and does not hold up the others.
    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>>;

    /// Asks now, of the one who keeps the truth, whether this hold stands, and extends it if so: before it is re-entered.
    async fn confirm(&self, hold: &Hold) -> Result<Renewal> {
        let answers = self.renew(std::slice::from_ref(hold)).await?;
        Ok(answers.first().copied().unwrap_or(Renewal::Unknown))
    }

    /// Takes the owner's claim out of the line, whether it holds or waits. Touches nobody else's.
    async fn release(&self, hold: &Hold) -> Result<Release>;

    /// The grant of this owner, if it holds the lock right now.
    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>>;

    /// Who holds and who waits.
    async fn inspect(&self, name: &Name) -> Result<Status>;

    /// The lines whose names start with `prefix` and that are not empty, in the order of their names.
    async fn list(&self, prefix: &str) -> Result<Vec<Status>>;

    /// Takes the lock away from all its holders; they learn of it. Tells how many there were.
    async fn evict(&self, name: &Name) -> Result<usize>;

    /// Where the engine keeps a hold, for transactions at the engine itself; see [`Guard::entry_key`](crate::Guard::entry_key).
    fn entry_key(&self, _name: &Name, _owner: Owner, _mode: Mode, _token: Token) -> Option<EntryKey> {
        None
    }

    /// Runs for as long as the client lives, on the keeper's task: receives what the engine pushes, wakes waiters, and
    /// reports holds that the engine took away.
    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        let _keep_open = lost;
        std::future::pending().await
    }

    /// Says good-bye: no claim of this client is left in any line.
    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// Where an engine keeps a hold: see [`Guard::entry_key`](crate::Guard::entry_key).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EntryKey {
    /// The engine's own key.
    pub key: String,
    /// The revision by which it was created. As long as the key has it, the lock is held.
    pub revision: u64,
}

/// What an engine does and what it survives. Tests, the command line and the documentation read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Capability {
    /// The engine's short name.
    pub engine: &'static str,
    /// Locks are shared between processes of one machine.
    pub processes: bool,
    /// Locks are shared between machines.
    pub machines: bool,
    /// Read/write locks.
    pub shared: bool,
    /// Semaphores.
    pub permits: bool,
    /// First come, first served.
    pub ordered: bool,
    /// Waiters are told; they do not poll.
    pub push: bool,
    /// A killed process frees its locks at once, without waiting for the lease to end.
    pub instant_death: bool,
    /// Tokens keep growing over a restart of the engine.
    pub durable_tokens: bool,
    /// What it serves.
    pub purpose: Purpose,
    /// In plain words: what the promise of exclusion survives.
    pub survives: &'static str,
    /// In plain words: what it does not survive.
    pub beware: &'static str,
}

/// What a lock is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Purpose {
    /// Avoid doing work twice; a rare double run is harmless.
    Efficiency,
    /// A double run corrupts data.
    Correctness,
}

/// Which engine a URL asks for.
pub(crate) async fn open(url: &crate::url::Url, text: &str) -> Result<std::sync::Arc<dyn Engine>> {
    match url.scheme.as_str() {
        "memory" => Ok(std::sync::Arc::new(memory::open(url)?)),
        "file" => open_file(url).await,
        "redis" | "rediss" | "redis+unix" => open_redis(url, text).await,
        "etcd" | "etcds" => open_etcd(url, text).await,
        other => Err(unknown_scheme(other)),
    }
}

#[cfg(all(feature = "file", target_os = "linux"))]
async fn open_file(url: &crate::url::Url) -> Result<std::sync::Arc<dyn Engine>> {
    Ok(std::sync::Arc::new(file::open(url).await?))
}

#[cfg(not(all(feature = "file", target_os = "linux")))]
async fn open_file(_: &crate::url::Url) -> Result<std::sync::Arc<dyn Engine>> {
    Err(Error::new(ErrorKind::Unsupported, "the file engine needs Linux and the cargo feature `file`"))
}

#[cfg(feature = "redis")]
async fn open_redis(url: &crate::url::Url, text: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Ok(std::sync::Arc::new(redis::open(url, text).await?))
}

#[cfg(not(feature = "redis"))]
async fn open_redis(url: &crate::url::Url, _: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Err(Error::new(ErrorKind::Unsupported, format!("{}: needs the cargo feature `redis`", url.scheme)))
}

#[cfg(feature = "etcd")]
async fn open_etcd(url: &crate::url::Url, text: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Ok(std::sync::Arc::new(etcd::open(url, text).await?))
}

#[cfg(not(feature = "etcd"))]
async fn open_etcd(url: &crate::url::Url, _: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Err(Error::new(ErrorKind::Unsupported, format!("{}: needs the cargo feature `etcd`", url.scheme)))
}

fn unknown_scheme(scheme: &str) -> Error {
    let planned =
        ["redis", "rediss", "redis+unix", "redis+sentinel", "redis+cluster", "redlock", "zk", "postgres", "mysql"];
    if planned.contains(&scheme) {
        return Error::new(
            ErrorKind::Unsupported,
            format!("this version has no engine for {scheme}: yet; it knows file: and memory:"),
        );
    }
    Error::invalid(format!("unknown scheme {scheme:?} in the engine's URL; use file:/path or memory:"))
}
