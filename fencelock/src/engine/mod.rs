//! The contract between the client and the systems that keep the truth.
//!
//! An engine knows nothing of tasks, drops and timers of the holder: guard, keeper and releaser live in the
//! client, once, for all engines.

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
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) mod sql;

use crate::{Claim, Clock, Error, ErrorKind, Grant, Hold, Name, Owner, Release, Renewal, Result, Status};
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
        #[cfg(not(feature = "postgres"))]
        "postgres" | "postgresql" => {
            Err(Error::new(ErrorKind::Unsupported, "postgres: needs the cargo feature `postgres`"))
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(mysql::migration()),
        #[cfg(not(feature = "mysql"))]
        "mysql" | "mariadb" => Err(Error::new(ErrorKind::Unsupported, "mysql: needs the cargo feature `mysql`")),
        // A URL may hold a password: only its scheme is shown.
        other => Err(Error::invalid(format!("{other}: needs no tables; migrate is for postgres and mysql"))),
    }
}

/// Which engine a URL asks for.
pub(crate) async fn open(url: &crate::url::Url, text: &str) -> Result<std::sync::Arc<dyn Engine>> {
    match url.scheme.as_str() {
        "memory" => Ok(std::sync::Arc::new(memory::open(url)?)),
        "file" => open_file(url).await,
        "redis" | "rediss" | "redis+unix" => open_redis(url, text).await,
        "postgres" | "postgresql" => open_postgres(url, text).await,
        "mysql" | "mariadb" => open_mysql(url, text).await,
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

#[cfg(feature = "postgres")]
async fn open_postgres(url: &crate::url::Url, text: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Ok(std::sync::Arc::new(postgres::open(url, text).await?))
}

#[cfg(not(feature = "postgres"))]
async fn open_postgres(url: &crate::url::Url, _: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Err(Error::new(ErrorKind::Unsupported, format!("{}: needs the cargo feature `postgres`", url.scheme)))
}

#[cfg(feature = "mysql")]
async fn open_mysql(url: &crate::url::Url, text: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Ok(std::sync::Arc::new(mysql::open(url, text).await?))
}

#[cfg(not(feature = "mysql"))]
async fn open_mysql(url: &crate::url::Url, _: &str) -> Result<std::sync::Arc<dyn Engine>> {
    Err(Error::new(ErrorKind::Unsupported, format!("{}: needs the cargo feature `mysql`", url.scheme)))
}

fn unknown_scheme(scheme: &str) -> Error {
    let planned =
        ["redis", "rediss", "redis+unix", "redis+sentinel", "redis+cluster", "redlock", "zk", "etcd", "etcds"];
    if planned.contains(&scheme) {
        return Error::new(
            ErrorKind::Unsupported,
            format!("this version has no engine for {scheme}: yet; it knows file: and memory:"),
        );
    }
    Error::invalid(format!("unknown scheme {scheme:?} in the engine's URL; use file:/path or memory:"))
}
