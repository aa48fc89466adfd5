//! The engine over a store of lines: joins, waits to be told, and looks for itself when a watched session dies or a lease
//! should have ended.

use super::{Line, News, Place, Session, Shelf, Standing, State, Word, World};
use crate::engine::{Capability, Engine};
use crate::{
    Claim, Clock, Error, ErrorKind, Grant, Hold, Holder, Name, Owner, Release, Renewal, Result, Status, Token, Waiter,
};
use async_trait::async_trait;
use futures_util::future::join_all;
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// What a step needs of a line that may not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// It is made.
    Line,
    /// An empty one will do; but if the store knows that there should be one, that is an error.
    Truth,
    /// An empty one will do: the step concerns a claim that is gone with the line.
    Nothing,
}

/// Keeps lines, one step at a time, and carries words to their sessions.
pub(crate) trait LineStore: Send + Sync + 'static {
    type Shelf: Shelf;
    type World: World;

    fn address(&self) -> &str;
    fn capability(&self) -> Capability;
    fn clock(&self) -> Clock;
    fn inbox(&self) -> &Arc<Inbox>;

    /// What the words about this line call it.
    fn line(&self, name: &Name) -> u64;

    /// This client's session; made on first use.
    fn session(&self) -> impl Future<Output = Result<Session>> + Send;

    /// Runs one step on one line with nobody else at it, writes the result down, then tells whom it concerns.
    fn step<R, F>(&self, name: &Name, need: Need, step: F) -> impl Future<Output = Result<R>> + Send
    where
        R: Send + 'static,
        F: FnOnce(&mut Line<'_, Self::Shelf, Self::World>) -> Result<R> + Send + 'static;

    /// Resolves when one of these sessions has died.
    fn watch(&self, sessions: &[Session]) -> impl Future<Output = ()> + Send;

    /// Whether this client still stands on firm ground; asked before each batch of renewals.
    fn sound(&self) -> bool {
        true
    }

    /// The names in use that start with `prefix`.
    fn names(&self, prefix: &str) -> impl Future<Output = Result<Vec<Name>>> + Send;

    /// Receives words from other processes, for ever.
    fn receive(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    fn close(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// Where the words for this client's claims arrive.
#[derive(Default)]
pub(crate) struct Inbox {
    /// By owner and line.
    waiting: Mutex<HashMap<(Owner, u64), oneshot::Sender<Place>>>,
    lost: Mutex<Losses>,
}

/// Losses on their way to the keeper.
#[derive(Default)]
struct Losses {
    keeper: Option<mpsc::UnboundedSender<Owner>>,
    /// Those that came while no keeper was running.
    kept: Vec<Owner>,
}

impl Inbox {
    fn waiting(&self) -> MutexGuard<'_, HashMap<(Owner, u64), oneshot::Sender<Place>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect(self: &Arc<Self>, owner: Owner, line: u64) -> Result<Expected> {
        let (tell, told) = oneshot::channel();
        match self.waiting().entry((owner, line)) {
            Slot::Occupied(_) => Err(Error::invalid(
                "this owner is waiting for a lock already; an owner stands for one acquisition at a time",
            )),
            Slot::Vacant(slot) => {
                slot.insert(tell);
                Ok(Expected { inbox: Arc::clone(self), key: (owner, line), told })
            }
        }
    }

    /// Takes in a word for this client. One that nobody expects belongs to a claim that was given up: its release is on
    /// its way.
    pub(crate) fn deliver(&self, owner: Owner, line: u64, news: News) {
        match news {
            News::Granted(place) => {
                if let Some(tell) = self.waiting().remove(&(owner, line)) {
                    let _ = tell.send(place);
                }
            }
            News::Lost => {
                let mut lost = self.lost();
                let told = lost.keeper.as_ref().is_some_and(|keeper| keeper.send(owner).is_ok());
                if !told {
                    lost.kept.push(owner);
                }
            }
        }
    }

    fn lost(&self) -> MutexGuard<'_, Losses> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_losses_to(&self, keeper: mpsc::UnboundedSender<Owner>) {
        let mut lost = self.lost();
        for owner in lost.kept.drain(..) {
            let _ = keeper.send(owner);
        }
        lost.keeper = Some(keeper);
    }
}

/// A waiter's place in the inbox; goes away with the waiter.
struct Expected {
    inbox: Arc<Inbox>,
    key: (Owner, u64),
    told: oneshot::Receiver<Place>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.inbox.waiting().remove(&self.key);
    }
}

/// An engine that keeps lines in a [`LineStore`].
pub(crate) struct LineEngine<S> {
    store: S,
}

impl<S: LineStore> LineEngine<S> {
    pub(crate) fn new(store: S) -> Self {
        Self { store }
    }

    /// One pass through the line, from joining to holding. `None` if it was thrown out while it waited (it was stopped for so
    /// long that it was granted and expired meanwhile).
    async fn pass(&self, claim: &Claim, wait: bool) -> Result<Option<Standing>> {
        let session = self.store.session().await?;
        let mut expected = self.store.inbox().expect(claim.owner, self.store.line(&claim.name))?;
        let joining = claim.clone();
        let (number, mut standing) = self
            .store
            .step(&claim.name, Need::Line, move |line| {
                let (number, standing) = line.join(&joining, session)?;
                if !wait && !matches!(standing, Standing::Holds(_)) {
                    line.leave(Some(number), joining.owner, None)?;
                }
                Ok((number, standing))
            })
            .await?;
        loop {
            let Standing::Waits { watch, look_again } = &standing else {
                return Ok(Some(standing).filter(|standing| *standing != Standing::Gone));
            };
            if !wait {
                return Ok(Some(standing));
            }
            tokio::select! {
                biased;
                Ok(place) = &mut expected.told => return Ok(Some(Standing::Holds(place))),
                () = self.store.watch(watch) => {}
                () = self.store.clock().sleep_until(*look_again) => {}
            }
            let owner = claim.owner;
            standing = self.store.step(&claim.name, Need::Nothing, move |line| line.check(number, owner)).await?;
        }
    }

    async fn renew_one(&self, hold: &Hold, sound: bool) -> Renewal {
        let (seat, owner, ttl) = (hold.seat.unwrap_or(u64::MAX), hold.owner, hold.ttl);
        let token = hold.token.map(Token::as_u64);
        let from = self.store.clock().now();
        let step =
            self.store.step(&hold.name, Need::Nothing, move |line| Ok(sound && line.renew(seat, owner, token, ttl)?));
        match tokio::time::timeout(ttl / 6, step).await {
            Ok(Ok(true)) => Renewal::Extended { from },
            Ok(Ok(false)) => Renewal::Gone,
            Ok(Err(error)) => {
                tracing::debug!(name = %hold.name, "renewal: {error}");
                Renewal::Unknown
            }
            Err(_) => Renewal::Unknown,
        }
    }

    async fn status(&self, name: &Name, patience: Duration) -> Result<Status> {
        let step = self.store.step(name, Need::Truth, |line| line.entries());
        let entries = within(patience, step).await?;
        let now = self.store.clock().now();
        let mut status = Status::free(name.as_str());
        for entry in entries {
            let owner = entry.owner.short();
            match entry.state {
                State::Holding => status.holders.push(Holder {
                    mode: entry.mode,
                    token: Token::new(entry.token),
                    owner,
                    label: entry.label,
                    held_for: now.since(entry.since),
                    lease_left: entry.deadline.since(now),
                }),
                State::Waiting => status.waiters.push(Waiter {
                    mode: entry.mode,
                    owner,
                    label: entry.label,
                    waiting_for: now.since(entry.since),
                }),
                State::Gone => {}
            }
        }
        Ok(status)
    }
}

/// How long somebody else may be in the middle of a step, which takes microseconds, before one who does not want to wait
/// gives up.
const PATIENCE: Duration = Duration::from_secs(2);

async fn within<T>(patience: Duration, step: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(patience, step).await.unwrap_or_else(|_| {
        Err(Error::new(
            ErrorKind::Unavailable,
            "another process is in the middle of a change to this lock and does not go on; is one stopped (state T in ps)?",
        ))
    })
}

fn grant(place: Place) -> Grant {
    Grant::new(Token::new(place.token), place.mode, place.from, place.number)
}

#[async_trait]
impl<S: LineStore> Engine for LineEngine<S> {
    fn address(&self) -> &str {
        self.store.address()
    }

    fn capability(&self) -> Capability {
        self.store.capability()
    }

    fn clock(&self) -> Clock {
        self.store.clock()
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        loop {
            let pass = self.pass(claim, wait);
            match if wait { pass.await } else { within(PATIENCE, pass).await }? {
                Some(Standing::Holds(place)) => return Ok(Some(grant(place))),
                _ if !wait => return Ok(None),
                _ => {}
            }
        }
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let sound = self.store.sound();
        // All at once: a line at which somebody is stuck holds up nobody else.
        Ok(join_all(holds.iter().map(|hold| self.renew_one(hold, sound))).await)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        let (seat, owner, token) = (hold.seat, hold.owner, hold.token.map(Token::as_u64));
        let leave = self.store.step(&hold.name, Need::Nothing, move |line| line.leave(seat, owner, token));
        let was = within(PATIENCE, leave).await?;
        Ok(match was {
            State::Holding => Release::Freed,
            State::Waiting => Release::Withdrawn,
            State::Gone => Release::NotHeld,
        })
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let look = self.store.step(name, Need::Nothing, move |line| {
            line.reap()?;
            line.settle()?;
            match line.find(None, owner)? {
                Some(number) => line.look(number, owner),
                None => Ok(Standing::Gone),
            }
        });
        let standing = within(PATIENCE, look).await?;
        Ok(match standing {
            Standing::Holds(place) => Some(grant(place)),
            Standing::Waits { .. } | Standing::Gone => None,
        })
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        self.status(name, PATIENCE).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        let mut names = self.store.names(prefix).await?;
        names.sort();
        let mut found = Vec::new();
        for name in names {
            let status = match self.status(&name, PATIENCE / 10).await {
                Ok(status) => status,
                // One that cannot be read does not hide the others.
                Err(error) => {
                    tracing::error!("{name}: {error}");
                    continue;
                }
            };
            if !(status.holders.is_empty() && status.waiters.is_empty()) {
                found.push(status);
            }
        }
        Ok(found)
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        within(PATIENCE, self.store.step(name, Need::Truth, |line| line.evict())).await
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        self.store.inbox().report_losses_to(lost);
        self.store.receive().await;
    }

    async fn close(&self) -> Result<()> {
        self.store.close().await
    }
}

/// Splits words into those for this session, which are delivered, and those for others, which are returned.
pub(crate) fn deliver_own(inbox: &Inbox, session: Option<Session>, words: Vec<Word>) -> Vec<Word> {
    let (own, others): (Vec<Word>, Vec<Word>) = words.into_iter().partition(|word| Some(word.to) == session);
    for word in own {
        inbox.deliver(word.owner, word.line, word.news);
    }
    others
}
