//! A distributed lock over the engines that teams already run.
//!
//! One contract on every engine: waiting is first come, first served and without polling; every grant carries a
//! [fencing token](Token); a [`Guard`] knows, by its own clock, when the lock is lost.
//!
//! ```
//! use std::time::Duration;
//!
//! # #[tokio::main] async fn main() -> fencelock::Result<()> {
//! let locks = fencelock::connect("memory:").await?; // or file:/var/lib/billing/locks
//! let mutex = locks.mutex("invoice:42").ttl(Duration::from_secs(30));
//!
//! // Runs the body under the lock, stops it when the lock is lost, always releases.
//! let billed = mutex
//!     .with(async |lock| {
//!         // Send the token along: the database refuses an older one.
//!         format!("UPDATE … SET fence = {0} WHERE id = 42 AND fence <= {0}", lock.token())
//!     })
//!     .await?;
//! # let _ = billed; Ok(()) }
//! ```
//!
//! # Which lock
//! | you want | use |
//! | --- | --- |
//! | one at a time | [`Client::mutex`] |
//! | many readers or one writer | [`Client::rwlock`] |
//! | at most n | [`Client::semaphore`] |
//! | several locks, all or none | [`Client::all`] |
//! | one leader, others stand by | [`Client::election`] |
//!
//! # What a lock cannot do
//! A process can be paused for longer than its lease between checking that it holds the lock and writing. No lock can
//! prevent that. Where a second writer would do damage, the *resource* must compare [tokens](Token) and refuse the older one:
//! [`fence`] does that for databases, Redis values and files.

#![forbid(unsafe_code)]

mod claim;
mod client;
mod clock;
pub mod engine;
mod error;
pub mod fence;
mod guard;
mod keeper;
mod name;
mod primitive;
mod status;
mod token;
mod url;

pub use claim::{Claim, Grant, Hold, Mode, Owner, Release, Renewal};
pub use client::{Client, DEFAULT_TTL, MAX_TTL, MIN_TTL, connect};
pub use clock::{Clock, Moment};
#[cfg(feature = "postgres")]
pub use engine::postgres::advisory_key;
pub use engine::{Capability, EntryKey, Purpose, migration};
pub use error::{Error, ErrorKind, Result};
pub use guard::Guard;
pub use keeper::Loss;
pub use name::Name;
pub use primitive::{All, Election, Mutex, RwLock, Semaphore};
pub use status::{Holder, Status, Waiter};
pub use token::Token;
pub use url::parse_duration;

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
