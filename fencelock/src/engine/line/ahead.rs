//! The engine over stores whose entries order themselves and vanish with their session (etcd, ZooKeeper): join, look at
//! those ahead, wait for the one that blocks, look again.
//!
//! The other kind of line (`wait`) is for stores that can run a step with nobody else at it, and hands over actively. Here
//! nobody hands over: the order of the entries says who holds, and whoever is blocked waits for exactly one event.
//! A store is only its protocol: [`Ordered`]. What is granted, when, and for how long is decided here.

use super::{other_permits, rule};
use crate::engine::{Capability, Engine, EntryKey};
use crate::{
    Claim, Clock, Error, ErrorKind, Grant, Hold, Holder, Mode, Moment, Name, Owner, Release, Renewal, Result, Status,
    Token, Waiter,
};
use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// What keeps an entry alive: it vanishes when this ends. A client may have several (etcd: one lease for each length).
pub(crate) type Session = u64;

/// An entry of a line, as the store shows it. Those of other programs that use the same place count as exclusive, unless
/// their recipe says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// What the store calls it, within its line.
    pub(crate) key: String,
    /// Its place: the line is sorted by this.
    pub(crate) order: u64,
    /// [`Place::token`]
    pub(crate) token: u64,
    pub(crate) mode: Mode,
    /// `None` for other programs.
    pub(crate) owner: Option<Owner>,
    pub(crate) label: String,
    pub(crate) session: Session,
    /// How long ago it joined; as far as clocks agree.
    pub(crate) age: Duration,
}

/// Where this client's own entry stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// [`Entry::key`]
    pub(crate) key: String,
    /// [`Entry::order`]
    pub(crate) order: u64,
    /// The fencing token: greater than that of every entry which was ever ahead in this line.
    pub(crate) token: u64,
    pub(crate) session: Session,
    /// [`Grant::seat`]: how the store finds the entry again when it is to leave.
    pub(crate) seat: u64,
}

/// What a claim sees ahead of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct View {
    /// Those ahead, in order. The store may leave out who does not matter to the claim's mode; see [`blocked`]. For an
    /// exclusive claim the last one will do, for a shared one the last that is not shared, for a permit of n the first
    /// n + 1 and the last.
    pub(crate) ahead: Vec<Entry>,
    /// As of when; the store's own count of changes. [`Ordered::wait`] misses nothing that happened since.
    pub(crate) as_of: u64,
    /// When the question was sent.
    pub(crate) asked: Moment,
}

/// What became of a claim that joins.
pub(crate) enum Joined {
    /// It has an entry now.
    In(Place, View),
    /// It was not to wait, would have to, and has no entry.
    Busy,
}

/// What a blocked claim waits for: one event.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Until<'a> {
    /// This entry is gone.
    Gone(&'a Entry),
    /// This entry is gone, or its owner has [marked](Ordered::mark) that it holds.
    Passed(&'a Entry),
    /// One of these, who hold, is gone.
    AnyGone(&'a [Entry]),
}

/// What leaving found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    /// The entry was there, and is gone now.
    Gone,
    /// There was none.
    Nothing,
    /// There was none, but an earlier attempt, whose answer was lost, may have removed it.
    Perhaps,
}

/// A store of lines whose entries order themselves and vanish with their session.
///
/// Errors of the kinds `Unavailable` and `Ambiguous` pass: the same call may succeed later.
pub(crate) trait Ordered: Send + Sync + 'static {
    fn address(&self) -> &str;
    fn capability(&self) -> Capability;

    /// Creates the claim's entry, at the end of the line and under a session that lasts at least as long as the claim's
    /// ttl, and looks ahead, in one round trip. After a lost answer the entry is found again by its owner. One that is left
    /// from an older session of this client is removed, not adopted. Without `wait` the store may answer
    /// [`Busy`](Joined::Busy) instead of joining.
    fn join(&self, claim: &Claim, wait: bool) -> impl Future<Output = Result<Joined>> + Send;

    /// Looks ahead again, and makes sure in the same step that the own entry still stands: the answer is the store's word,
    /// not that of a replica which may be behind. `None` when the entry is gone.
    ///
    /// `after` is the entry whose end was waited for. If its last word says that it held, nobody is ahead any more, and the
    /// store need not go through a long line to see that.
    fn look(
        &self,
        claim: &Claim,
        place: &Place,
        after: Option<&Entry>,
    ) -> impl Future<Output = Result<Option<View>>> + Send;

    /// Resolves when what is waited for has happened since the view. It may resolve too early, never too late.
    fn wait(&self, name: &Name, until: Until<'_>, as_of: u64) -> impl Future<Output = Result<()>> + Send;

    /// Writes into the own entry that it holds, which tells [`Until::Passed`]. False when the entry is gone.
    fn mark(&self, claim: &Claim, place: &Place) -> impl Future<Output = Result<bool>> + Send;

    /// Resolves when an entry of this client that holds is gone, whoever removed it, and also if that was before the call.
    /// Never for any other reason.
    fn gone(&self, name: &Name, place: &Place) -> impl Future<Output = ()> + Send;

    /// Removes this client's own entry. Without a seat its answer was never seen: the store finds it by the owner, and makes
    /// sure that the request, should it still be under way, creates nothing any more.
    ///
    /// With a place in `held` the entry held for itself alone, and others are likely to wait: the store may leave word of that, in the
    /// same step, for the [look](Self::look) of the next one.
    fn leave(&self, hold: &Hold, held: Option<&Place>) -> impl Future<Output = Result<Left>> + Send;

    /// Until when the store keeps the session, by its last word: when the last heartbeat that was answered was *sent*, plus
    /// the length of the session. In the past when it has ended.
    fn good_until(&self, session: Session) -> Moment;

    /// Whether any session of this client goes on, as far as it knows.
    fn is_alive(&self) -> bool;

    /// Resolves when it is known that the session has ended: who waits under it has lost its place.
    fn ended(&self, _session: Session) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// Sends a heartbeat, or waits for the one under way. When it was sent; `None` when the session has ended.
    fn beat(&self, session: Session) -> impl Future<Output = Result<Option<Moment>>> + Send;

    /// Asks for an entry of another client, whose owner this one was told, and keeps it alive if the store can.
    fn renew_borrowed(&self, hold: &Hold) -> impl Future<Output = Result<Renewal>> + Send;

    /// All entries of a line, in order.
    fn entries(&self, name: &Name) -> impl Future<Output = Result<Vec<Entry>>> + Send;

    /// The lines that are not empty and whose names start with `prefix`.
    fn lines(&self, prefix: &str) -> impl Future<Output = Result<Vec<(Name, Vec<Entry>)>>> + Send;

    /// For how long these sessions last without another heartbeat. Those that are not known are left out.
    fn lease_left(
        &self,
        sessions: &BTreeSet<Session>,
    ) -> impl Future<Output = Result<HashMap<Session, Duration>>> + Send;

    /// Where an entry of this client is kept, for transactions at the store itself.
    fn entry_key(&self, _name: &Name, _owner: Owner, _mode: Mode, _token: Token) -> Option<EntryKey> {
        None
    }

    /// Removes these entries, whoever they belong to. Tells how many were still there.
    fn remove(&self, name: &Name, entries: &[Entry]) -> impl Future<Output = Result<usize>> + Send;

    /// Sends heartbeats for as long as the client lives. Runs on the keeper's task: when that ends, they end.
    fn drive(&self) -> impl Future<Output = ()> + Send;

    /// Ends all sessions of this client.
    fn close(&self) -> impl Future<Output = Result<()>> + Send;
}

/// What keeps a claim from holding, given those ahead of it. An error when they use the name with another number of permits.
///
/// * exclusive: the one right ahead;
/// * shared: the nearest one ahead that is not shared;
/// * permit: the first who waits waits for any of the holders, the others for the one right ahead.
///
/// So one event wakes one waiter, except for readers behind a writer, who enter together.
pub(crate) fn blocked(ahead: &[Entry], mode: Mode) -> Result<Option<Until<'_>>> {
    if let Mode::Permit { of } = mode {
        let other = ahead.iter().find_map(|entry| match entry.mode {
            Mode::Permit { of: known } if known != of => Some(known),
            _ => None,
        });
        if let Some(known) = other {
            return Err(other_permits(known, of));
        }
    }
    let Some(last) = ahead.last() else { return Ok(None) };
    let holders = holders(ahead);
    let line: Vec<Mode> = ahead.iter().map(|entry| entry.mode).chain([mode]).collect();
    if rule::holders(&line) == line.len() {
        return Ok(None);
    }
    Ok(Some(match mode {
        Mode::Exclusive => Until::Gone(last),
        Mode::Shared => Until::Gone(ahead.iter().rfind(|entry| entry.mode != Mode::Shared).unwrap_or(last)),
        Mode::Permit { .. } if holders == ahead.len() => Until::AnyGone(ahead),
        Mode::Permit { .. } => Until::Passed(last),
    }))
}

/// How many from the front of a line hold.
fn holders(line: &[Entry]) -> usize {
    rule::holders(&line.iter().map(|entry| entry.mode).collect::<Vec<_>>())
}

/// A waiter that was told nothing looks again after this long: a net under the store's promise to tell.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// How long a waiter pauses when the store does not answer.
const PAUSE: Duration = Duration::from_millis(200);
/// A lock that is held for longer than this is watched, so that its holder learns at once when it is taken away. For a shorter
/// hold that would cost more than the lock itself.
const LONG_HOLD: Duration = Duration::from_millis(50);

/// A hold of this client.
#[derive(Clone)]
struct Held {
    place: Place,
    /// The store reported that the entry is gone.
    gone: bool,
    /// It holds for itself alone, and had to wait for that: probably others wait now.
    alone_after_a_wait: bool,
}

type Key = (Owner, Name);

/// Losses on their way to the keeper.
#[derive(Default)]
struct Losses {
    keeper: Option<mpsc::UnboundedSender<Owner>>,
}

/// An engine on an [`Ordered`] store.
pub(crate) struct AheadEngine<S> {
    store: S,
    /// Who of this client is acquiring what.
    acquiring: Mutex<HashSet<Key>>,
    held: Mutex<HashMap<Key, Held>>,
    /// Holds that are not watched yet, and when they will be; the token tells them from later ones of the same owner.
    young: Mutex<VecDeque<(Moment, Key, u64)>>,
    /// Told when `young` was empty and is not any more.
    grown: Notify,
    losses: Mutex<Losses>,
}

impl<S: Ordered> AheadEngine<S> {
    pub(crate) fn new(store: S) -> Self {
        Self {
            store,
            acquiring: Mutex::default(),
            held: Mutex::default(),
            young: Mutex::default(),
            grown: Notify::new(),
            losses: Mutex::default(),
        }
    }

    /// From a place in line to a grant. `None` if the entry is gone: its session ended while it waited, or somebody removed it.
    async fn queue(&self, claim: &Claim, wait: bool, place: &Place, first: View) -> Result<Option<Turn>> {
        let mut view = first;
        let mut waited = false;
        let mut after = None;
        loop {
            let until = match blocked(&view.ahead, claim.mode) {
                Ok(until) => until,
                Err(error) => {
                    self.step_out(claim, place).await?;
                    return Err(error);
                }
            };
            match until {
                None => {
                    // Who waits behind cannot know otherwise that a place among the holders was taken.
                    let told = waited && matches!(claim.mode, Mode::Permit { .. });
                    if told && !persist(wait, || self.store.mark(claim, place)).await? {
                        return Ok(None);
                    }
                    if let Some(grant) = self.grant(claim, place, view.asked) {
                        return Ok(Some(Turn::Holds { grant, waited }));
                    }
                    // The last word of the session is old. Only a new one makes a lease.
                    if persist(wait, || self.store.beat(place.session)).await?.is_none() {
                        return Ok(None);
                    }
                }
                Some(_) if !wait => {
                    self.step_out(claim, place).await?;
                    return Ok(Some(Turn::Busy));
                }
                Some(until) => {
                    waited = true;
                    after = match until {
                        Until::Gone(entry) => Some(entry.clone()),
                        Until::Passed(_) | Until::AnyGone(_) => None,
                    };
                    let told = tokio::select! {
                        told = self.store.wait(&claim.name, until, view.as_of) => told,
                        () = self.store.ended(place.session) => Ok(()),
                        () = tokio::time::sleep(LOOK_AGAIN) => Ok(()),
                    };
                    if let Err(error) = told {
                        pause_if_passing(error).await?;
                    }
                }
            }
            match persist(wait, || self.store.look(claim, place, after.as_ref())).await? {
                Some(new) => view = new,
                None => return Ok(None),
            }
        }
    }

    /// The grant of an entry that holds, unless less than half of the lease is left of the session's last word.
    fn grant(&self, claim: &Claim, place: &Place, asked: Moment) -> Option<Grant> {
        let from = self.lease_from(place.session, claim.ttl).min(asked);
        let enough = self.clock().now() < from.after(claim.ttl / 2);
        enough.then(|| Grant::new(Token::new(place.token), claim.mode, from, place.seat))
    }

    /// The latest moment at which a lease of this length can have begun that the session covers.
    fn lease_from(&self, session: Session, ttl: Duration) -> Moment {
        let ttl = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        Moment::from_nanos(self.store.good_until(session).as_nanos().saturating_sub(ttl))
    }

    async fn step_out(&self, claim: &Claim, place: &Place) -> Result<()> {
        let grant = Grant::new(Token::new(place.token), claim.mode, Moment::default(), place.seat);
        self.store.leave(&Hold::of(claim, Some(&grant)), None).await.map(drop)
    }

    fn remember(&self, claim: &Claim, place: Place, waited: bool) {
        let alone_after_a_wait = waited && claim.mode == Mode::Exclusive;
        let key = (claim.owner, claim.name.clone());
        let due = self.clock().now().after(LONG_HOLD);
        let token = place.token;
        lock(&self.held).insert(key.clone(), Held { place, gone: false, alone_after_a_wait });
        self.watch_from(due, key, token);
    }

    fn watch_from(&self, due: Moment, key: Key, token: u64) {
        let mut young = lock(&self.young);
        young.push_back((due, key, token));
        if young.len() == 1 {
            self.grown.notify_one();
        }
    }

    /// What is known of a hold of this client; with a token, only of the hold with that token.
    fn known(&self, hold: &Hold) -> Option<Held> {
        let held = lock(&self.held);
        let known = held.get(&(hold.owner, hold.name.clone()))?;
        hold.token.is_none_or(|token| token.as_u64() == known.place.token).then(|| known.clone())
    }

    async fn renew_one(&self, hold: &Hold) -> Renewal {
        let outcome = match self.known(hold) {
            Some(Held { gone: true, .. }) => return Renewal::Gone,
            Some(Held { place, .. }) => self.extend(&place, hold.ttl).await,
            None => self.store.renew_borrowed(hold).await,
        };
        outcome.unwrap_or_else(|error| {
            tracing::debug!(name = %hold.name, "renewal: {error}");
            Renewal::Unknown
        })
    }

    /// A lease lasts as long as its session: one heartbeat serves all locks, and where the session's last word covers a whole
    /// lease from now on, none is needed.
    async fn extend(&self, place: &Place, ttl: Duration) -> Result<Renewal> {
        let now = self.clock().now();
        let covered = self.lease_from(place.session, ttl);
        if covered.after(ttl / 12) >= now {
            return Ok(Renewal::Extended { from: covered.min(now) });
        }
        Ok(match self.store.beat(place.session).await? {
            Some(sent) => Renewal::Extended { from: self.lease_from(place.session, ttl).min(sent) },
            None => Renewal::Gone,
        })
    }

    /// Holds that are no longer young, and when the next one will be.
    fn grown_up(&self) -> (Vec<(Key, Place)>, Moment) {
        let now = self.clock().now();
        let mut young = lock(&self.young);
        let mut ready = Vec::new();
        while let Some((due, key, token)) = young.front() {
            // Most have been released by now, and need not be waited for.
            let held = lock(&self.held).get(key).filter(|held| held.place.token == *token).cloned();
            if held.is_some() && *due > now {
                return (ready, *due);
            }
            let Some((_, key, _)) = young.pop_front() else { break };
            ready.extend(held.map(|held| (key, held.place)));
        }
        (ready, Moment::NEVER)
    }

    async fn until_gone(&self, key: Key, place: Place) -> (Key, u64) {
        self.store.gone(&key.1, &place).await;
        (key, place.token)
    }

    /// An entry is gone. If its hold was not released, it was taken away.
    fn taken(&self, key: &Key, token: u64) {
        let mut held = lock(&self.held);
        let Some(held) = held.get_mut(key).filter(|held| held.place.token == token) else { return };
        held.gone = true;
        if let Some(keeper) = &lock(&self.losses).keeper {
            let _ = keeper.send(key.0);
        }
    }

    async fn status(&self, lines: Vec<(Name, Vec<Entry>)>) -> Result<Vec<Status>> {
        let holding = |line: &[Entry]| holders(line);
        let sessions: BTreeSet<Session> =
            lines.iter().flat_map(|(_, line)| line[..holding(line)].iter().map(|entry| entry.session)).collect();
        let left = self.store.lease_left(&sessions).await?;
        let tell = |(name, line): (Name, Vec<Entry>)| {
            let mut status = Status::free(name.as_str());
            let count = holding(&line);
            for (index, entry) in line.into_iter().enumerate() {
                let owner = entry.owner.map_or_else(|| short(&entry.key), Owner::short);
                if index < count {
                    let lease_left = left.get(&entry.session).copied().unwrap_or_default();
                    let token = Token::new(entry.token);
                    let (mode, label, held_for) = (entry.mode, entry.label, entry.age);
                    status.holders.push(Holder { mode, token, owner, label, held_for, lease_left });
                } else {
                    let (mode, label, waiting_for) = (entry.mode, entry.label, entry.age);
                    status.waiters.push(Waiter { mode, owner, label, waiting_for });
                }
            }
            status
        };
        Ok(lines.into_iter().map(tell).collect())
    }
}

/// Where the wait has led.
enum Turn {
    Holds { grant: Grant, waited: bool },
    Busy,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn short(key: &str) -> String {
    key.chars().take(8).collect()
}

fn passes(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Ambiguous)
}

async fn pause_if_passing(error: Error) -> Result<()> {
    if !passes(&error) {
        return Err(error);
    }
    tracing::debug!("waiting in line: {error}");
    tokio::time::sleep(PAUSE).await;
    Ok(())
}

/// Asks until the store answers: who waits and has a place in line keeps it while the store is away.
async fn persist<T, F: Future<Output = Result<T>>>(wait: bool, mut ask: impl FnMut() -> F) -> Result<T> {
    loop {
        match ask().await {
            Err(error) if wait => pause_if_passing(error).await?,
            answer => return answer,
        }
    }
}

/// A claim under way: an owner stands for one acquisition of a lock at a time.
struct Acquiring<'a> {
    all: &'a Mutex<HashSet<Key>>,
    key: Key,
}

impl<'a> Acquiring<'a> {
    fn new(all: &'a Mutex<HashSet<Key>>, claim: &Claim) -> Result<Self> {
        let key = (claim.owner, claim.name.clone());
        if !lock(all).insert(key.clone()) {
            return Err(Error::invalid(
                "this owner is waiting for a lock already; an owner stands for one acquisition at a time",
            ));
        }
        Ok(Self { all, key })
    }
}

impl Drop for Acquiring<'_> {
    fn drop(&mut self) {
        lock(self.all).remove(&self.key);
    }
}

#[async_trait]
impl<S: Ordered> Engine for AheadEngine<S> {
    fn address(&self) -> &str {
        self.store.address()
    }

    fn capability(&self) -> Capability {
        self.store.capability()
    }

    fn clock(&self) -> Clock {
        Clock::Boot
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        let _acquiring = Acquiring::new(&self.acquiring, claim)?;
        let mut joined = self.store.join(claim, wait).await?;
        loop {
            let Joined::In(place, view) = joined else { return Ok(None) };
            match self.queue(claim, wait, &place, view).await? {
                Some(Turn::Holds { grant, waited }) => {
                    self.remember(claim, place, waited);
                    return Ok(Some(grant));
                }
                Some(Turn::Busy) => return Ok(None),
                // The place is lost; it joins again, at the end.
                None => joined = persist(wait, || self.store.join(claim, wait)).await?,
            }
        }
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        Ok(join_all(holds.iter().map(|hold| self.renew_one(hold))).await)
    }

    async fn confirm(&self, hold: &Hold) -> Result<Renewal> {
        let standing = self.standing(&hold.name, hold.owner).await?;
        if standing.is_none_or(|grant| hold.token.is_some_and(|token| token != grant.token)) {
            return Ok(Renewal::Gone);
        }
        Ok(self.renew_one(hold).await)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        let known = self.known(hold);
        if known.is_some() {
            lock(&self.held).remove(&(hold.owner, hold.name.clone()));
        }
        if known.as_ref().is_some_and(|held| held.gone) {
            return Ok(Release::NotHeld);
        }
        let held = known.filter(|held| held.alone_after_a_wait).map(|held| held.place);
        Ok(match self.store.leave(hold, held.as_ref()).await? {
            Left::Gone | Left::Perhaps if hold.seat.is_some() => Release::Freed,
            Left::Gone => Release::Withdrawn,
            Left::Nothing | Left::Perhaps => Release::NotHeld,
        })
    }

    fn lingers(&self) -> bool {
        self.store.is_alive()
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let asked = self.clock().now();
        let line = self.store.entries(name).await?;
        let count = holders(&line);
        let own = line.into_iter().take(count).find(|entry| entry.owner == Some(owner));
        // The seat is for leaving, and who borrows a hold never leaves.
        Ok(own.map(|entry| Grant::new(Token::new(entry.token), entry.mode, asked, entry.token)))
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        let line = self.store.entries(name).await?;
        let status = self.status(vec![(name.clone(), line)]).await?.pop();
        Ok(status.unwrap_or_else(|| Status::free(name.as_str())))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        let mut lines = self.store.lines(prefix).await?;
        lines.retain(|(_, line)| !line.is_empty());
        lines.sort_by(|(one, _), (other, _)| one.cmp(other));
        self.status(lines).await
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        let mut line = self.store.entries(name).await?;
        line.truncate(holders(&line));
        self.store.remove(name, &line).await
    }

    fn entry_key(&self, name: &Name, owner: Owner, mode: Mode, token: Token) -> Option<EntryKey> {
        self.store.entry_key(name, owner, mode, token)
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        lock(&self.losses).keeper = Some(lost);
        // Whatever was held while no keeper ran is watched from now on.
        let held: Vec<(Key, u64)> =
            lock(&self.held).iter().map(|(key, held)| (key.clone(), held.place.token)).collect();
        for (key, token) in held {
            self.watch_from(self.clock().now(), key, token);
        }
        let mut store = pin!(self.store.drive());
        let mut watched = FuturesUnordered::new();
        loop {
            let (ready, next) = self.grown_up();
            watched.extend(ready.into_iter().map(|(key, place)| self.until_gone(key, place)));
            tokio::select! {
                Some((key, token)) = watched.next(), if !watched.is_empty() => self.taken(&key, token),
                () = self.clock().sleep_until(next) => {}
                () = self.grown.notified() => {}
                () = &mut store => return,
            }
        }
    }

    async fn close(&self) -> Result<()> {
        self.store.close().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mode() -> impl Strategy<Value = Mode> {
        // A name is used with one number of permits.
        prop_oneof![Just(Mode::Exclusive), Just(Mode::Shared), Just(Mode::Permit { of: 3 })]
    }

    fn line() -> impl Strategy<Value = Vec<Entry>> {
        prop::collection::vec(mode(), 0..12).prop_map(|modes| modes.into_iter().enumerate().map(entry).collect())
    }

    fn entry((number, mode): (usize, Mode)) -> Entry {
        let (key, order) = (number.to_string(), number as u64);
        Entry { key, order, token: order, mode, owner: None, label: String::new(), session: 0, age: Duration::ZERO }
    }

    /// What a store shows at least.
    fn trimmed(ahead: &[Entry], mode: Mode) -> Vec<Entry> {
        match mode {
            Mode::Exclusive => ahead.last().cloned().into_iter().collect(),
            Mode::Shared => ahead.iter().rfind(|entry| entry.mode != Mode::Shared).cloned().into_iter().collect(),
            Mode::Permit { of } => {
                let first = ahead.len().min(of as usize + 1);
                let last = ahead.last().filter(|_| ahead.len() > first);
                ahead[..first].iter().chain(last).cloned().collect()
            }
        }
    }

    proptest! {
        #[test]
        fn nobody_is_blocked_whom_the_rule_lets_hold(ahead in line(), mode in mode()) {
            let modes: Vec<Mode> = ahead.iter().map(|entry| entry.mode).chain([mode]).collect();
            let holds = rule::holders(&modes) == modes.len();
            prop_assert_eq!(blocked(&ahead, mode).unwrap().is_none(), holds);
        }

        #[test]
        fn what_a_store_may_leave_out_changes_nothing(ahead in line(), mode in mode()) {
            let short = trimmed(&ahead, mode);
            let (all, few) = (blocked(&ahead, mode).unwrap(), blocked(&short, mode).unwrap());
            match (all, few) {
                // Of many who must go first, some are as good as all: it looks again when one of them goes.
                (Some(_), Some(Until::AnyGone(few))) => prop_assert!(few.iter().all(|one| ahead.contains(one))),
                (all, few) => prop_assert_eq!(all, few),
            }
        }

        /// Whoever goes, in whatever order: each waiter whose turn comes is woken by the one event that it waits for.
        #[test]
        fn nobody_sleeps_through_its_turn(line in line(), order in prop::collection::vec(any::<prop::sample::Index>(), 12)) {
            let mut line = line;
            let mut waits: HashMap<String, Event> = HashMap::new();
            for at in 0..line.len() {
                waits.extend(event(&line, at).map(|event| (line[at].key.clone(), event)));
            }
            for pick in order.iter().take(line.len()) {
                let gone = line.remove(pick.index(line.len()));
                waits.remove(&gone.key);
                let mut happened = vec![Event::Gone(gone.key)];
                while let Some(what) = happened.pop() {
                    for at in 0..line.len() {
                        let key = &line[at].key;
                        if !waits.get(key).is_some_and(|awaited| awaited.is(&what)) {
                            continue;
                        }
                        match event(&line, at) {
                            Some(next) => waits.insert(key.clone(), next),
                            None => {
                                happened.push(Event::Marked(key.clone()));
                                waits.remove(key)
                            }
                        };
                    }
                }
                for at in 0..line.len() {
                    let asleep = waits.contains_key(&line[at].key) && event(&line, at).is_none();
                    prop_assert!(!asleep, "{} sleeps, {line:?}", line[at].key);
                }
            }
        }
    }

    #[derive(Debug, Clone, PartialEq)]
    enum Event {
        Gone(String),
        Marked(String),
        Passed(String),
        AnyGone(Vec<String>),
    }

    impl Event {
        fn is(&self, what: &Event) -> bool {
            match (self, what) {
                (Event::Gone(one), Event::Gone(other)) => one == other,
                (Event::Passed(one), Event::Gone(other) | Event::Marked(other)) => one == other,
                (Event::AnyGone(some), Event::Gone(other)) => some.contains(other),
                _ => false,
            }
        }
    }

    /// What the one at this place waits for.
    fn event(line: &[Entry], at: usize) -> Option<Event> {
        blocked(&line[..at], line[at].mode).unwrap().map(|until| match until {
            Until::Gone(other) => Event::Gone(other.key.clone()),
            Until::Passed(other) => Event::Passed(other.key.clone()),
            Until::AnyGone(some) => Event::AnyGone(some.iter().map(|entry| entry.key.clone()).collect()),
        })
    }

    #[test]
    fn another_number_of_permits_is_refused() {
        let ahead = [entry((0, Mode::Permit { of: 4 }))];
        assert_eq!(blocked(&ahead, Mode::Permit { of: 3 }).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(blocked(&ahead, Mode::Permit { of: 4 }).unwrap().is_none());
    }
}
