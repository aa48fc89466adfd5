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
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
#[cfg(feature = "redlock")]
pub(crate) mod redlock;
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) mod sql;
#[cfg(feature = "zookeeper")]
pub(crate) mod zookeeper;

use crate::{Claim, Clock, Error, ErrorKind, Grant, Hold, Mode, Name, Owner, Release, Renewal, Result, Status, Token};
use async_trait::async_trait;
use serde::Serialize;
use std::sync::Arc;
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

    /// Whether what a release has not reached may outlive the lease that it was for, since a session of this client goes on and keeps it.
    fn lingers(&self) -> bool {
        false
    }

    /// The grant of this owner, if it holds the lock right now.
    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>>;

    /// Who holds and who waits.
    async fn inspect(&self, name: &Name) -> Result<Status>;

    /// What is in the way of new holders of this lock apart from those who hold it, in words, as far as it is known without asking.
    fn obstacle(&self, _name: &Name) -> Option<String> {
        None
    }

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

    /// Resolves when the holds of this client should be confirmed at once: whoever keeps the truth may have changed.
    async fn doubt(&self) {
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

/// What an administrator runs in a database before the first client comes, where clients may not create tables: SQL for the engine
/// of this URL scheme.
///
/// # Errors
/// `Invalid` for an engine that needs nothing of that kind, `Unsupported` for one that this build does not have.
pub fn migration(scheme: &str) -> Result<String> {
    match scheme.split(':').next().unwrap_or_default() {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(postgres::migration()),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(mysql::migration()),
        other if SCHEMES.iter().any(|(known, by)| *known == other && ["postgres", "mysql"].contains(by)) => {
            Err(no_engine(other))
        }
        // A URL may hold a password: only its scheme is shown.
        other => Err(Error::invalid(format!("{other}: needs no tables; migrate is for postgres and mysql"))),
    }
}

/// Which engine a URL asks for.
pub(crate) async fn open(url: &crate::url::Url, text: &str) -> Result<Arc<dyn Engine>> {
    // Not needed by all engines.
    let _ = text;
    match url.scheme.as_str() {
        "memory" => Ok(Arc::new(memory::open(url)?)),
        #[cfg(all(feature = "file", target_os = "linux"))]
        "file" => Ok(Arc::new(file::open(url).await?)),
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis+unix" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster"
        | "rediss+cluster" => Ok(Arc::new(redis::open(url, text).await?)),
        #[cfg(feature = "redlock")]
        "redlock" | "redlocks" => Ok(Arc::new(redlock::open(url, text).await?)),
        #[cfg(feature = "etcd")]
        "etcd" | "etcds" => Ok(Arc::new(etcd::open(url, text).await?)),
        #[cfg(feature = "zookeeper")]
        "zk" | "zks" => Ok(Arc::new(zookeeper::open(url, text).await?)),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(postgres::open(url, text).await?)),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(Arc::new(mysql::open(url, text).await?)),
        other => Err(no_engine(other)),
    }
}

/// The schemes of all engines, and the cargo features that bring them.
const SCHEMES: &[(&str, &str)] = &[
    ("file", "file"),
    ("redis", "redis"),
    ("rediss", "redis"),
    ("redis+unix", "redis"),
    ("redis+sentinel", "redis"),
    ("rediss+sentinel", "redis"),
    ("redis+cluster", "redis"),
    ("rediss+cluster", "redis"),
    ("redlock", "redlock"),
    ("redlocks", "redlock"),
    ("etcd", "etcd"),
    ("etcds", "etcd"),
    ("zk", "zookeeper"),
    ("zks", "zookeeper"),
    ("postgres", "postgres"),
    ("postgresql", "postgres"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
];

fn no_engine(scheme: &str) -> Error {
    match SCHEMES.iter().find(|(known, _)| *known == scheme) {
        Some((_, "file")) => {
            Error::new(ErrorKind::Unsupported, "the file engine needs Linux and the cargo feature `file`")
        }
        Some((_, feature)) => {
            Error::new(ErrorKind::Unsupported, format!("{scheme}: needs the cargo feature `{feature}`"))
        }
        None => {
            let known: Vec<&str> = SCHEMES.iter().map(|(known, _)| *known).collect();
            let known = known.join(", ");
            Error::invalid(format!("unknown scheme {scheme:?} in the engine's URL; use one of {known}, memory"))
        }
    }
}
