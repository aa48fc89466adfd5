//! The primitives: mutex, read/write lock, semaphore, several at once, election. All are thin: they build a claim.

mod all;
mod election;
mod mutex;
mod rwlock;
mod semaphore;

pub use all::All;
pub use election::Election;
pub use mutex::Mutex;
pub use rwlock::RwLock;
pub use semaphore::Semaphore;

use crate::client::{Client, Request, Wait};
use crate::keeper::Held;
use crate::{Claim, Error, ErrorKind, Guard, Mode, Name, Owner, Result};
use std::sync::Arc;
use std::time::Duration;

/// What every primitive can be told before it acquires.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    client: Client,
    name: Arc<str>,
    ttl: Duration,
    max_hold: Option<Duration>,
    label: Option<Arc<str>>,
    owner: Option<Owner>,
    /// [`Claim::writer`]
    writer: bool,
}

impl Options {
    fn new(client: &Client, name: &str) -> Self {
        Self {
            client: client.clone(),
            name: name.into(),
            ttl: client.default_ttl(),
            max_hold: None,
            label: None,
            owner: None,
            writer: false,
        }
    }

    fn request(&self, name: &Arc<str>, mode: Mode, owner: Owner) -> Result<Request> {
        Ok(Request {
            claim: Claim {
                name: Name::shared(name).map_err(|error| error.during("acquire"))?,
                mode,
                owner,
                ttl: self.ttl,
                label: Arc::clone(self.label.as_ref().unwrap_or(self.client.default_label())),
                writer: self.writer && mode == Mode::Exclusive,
            },
            max_hold: self.max_hold,
            reenter: self.owner.is_some(),
        })
    }

    /// The owner that the user chose, or a new one.
    fn an_owner(&self) -> Owner {
        self.owner.unwrap_or_else(Owner::random)
    }

    async fn hold(&self, name: &Arc<str>, mode: Mode, owner: Owner, wait: Wait) -> Result<Option<Arc<Held>>> {
        self.client.acquire(&self.request(name, mode, owner)?, wait).await
    }

    async fn take(&self, mode: Mode, wait: Wait) -> Result<Option<Guard>> {
        let held = self.hold(&self.name, mode, self.an_owner(), wait).await?;
        Ok(held.map(|held| Guard::new(self.client.clone(), vec![held])))
    }

    async fn acquire(&self, mode: Mode) -> Result<Guard> {
        self.take(mode, Wait::Forever).await?.ok_or_else(not_granted)
    }

    async fn acquire_timeout(&self, mode: Mode, span: Duration) -> Result<Guard> {
        self.take(mode, Wait::AtMost(span)).await?.ok_or_else(not_granted)
    }
}

/// An engine that was told to wait came back without a grant.
fn not_granted() -> Error {
    Error::new(ErrorKind::Engine, "the engine gave up waiting without a reason; please report this")
}

/// Runs `body` under a guard: cancels it when the lock is lost, releases in every case.
async fn run_under<T>(guard: Guard, body: impl AsyncFnOnce(&Guard) -> T) -> Result<T> {
    let lost = guard.lost();
    let why = tokio::select! {
        biased;
        out = body(&guard) => {
            if guard.is_valid() {
                // The value stands, whatever the release says: it goes on in the background if it must.
                if let Err(error) = guard.release().await {
                    tracing::warn!("{error}");
                }
                return Ok(out);
            }
            guard.loss()
        }
        loss = lost => Some(loss),
    };
    let why = why.map_or_else(|| "its lease ran out".to_owned(), |loss| loss.to_string());
    Err(Error::new(ErrorKind::Lost, format!("the lock was lost while the body ran, which was stopped: {why}"))
        .during("with")
        .of_lock(guard.name()))
}

/// The builder methods that all primitives share.
macro_rules! options {
    () => {
        /// How long the engine keeps the lock without a renewal (default 30 s, or the URL's `ttl`): 100 ms to 24 h. It is
        /// renewed in the background, so it need not cover the work; it says how soon others can go on after a crash.
        #[must_use]
        pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
            self.options.ttl = ttl;
            self
        }

        /// The longest time that the lock is held in one go (default: no limit). Then it is released and the guard is lost: a
        /// stuck holder does not block the others for ever.
        #[must_use]
        pub fn max_hold(mut self, span: std::time::Duration) -> Self {
            self.options.max_hold = Some(span);
            self
        }

        /// Who asks, for people who look at the line (default: machine and process id). Cut to 120 bytes.
        #[must_use]
        pub fn label(mut self, text: impl Into<String>) -> Self {
            self.options.label = Some($crate::client::fit_label(&text.into()).into());
            self
        }

        /// Acquires as this owner. If that owner holds the lock, in whatever process, the hold is re-entered: the guard is
        /// *borrowed*, and its release frees nothing. Otherwise it is acquired as usual.
        ///
        /// An owner stands for one acquisition: do not let two tasks wait for the same name as the same owner.
        #[must_use]
        pub fn owner(mut self, owner: $crate::Owner) -> Self {
            self.options.owner = Some(owner);
            self
        }
    };
}
pub(crate) use options;
