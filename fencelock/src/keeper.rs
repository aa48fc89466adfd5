//! The keeper: one task per client that renews all its leases in batches, declares loss by the local deadline,
//! and carries out releases that nobody waits for.
//!
//! It knows nothing of any particular engine. What it must not do is trust one: a renewal that hangs, fails or is
//! never answered ends in a declared loss at the deadline, not in silence.

use crate::clock::margin;
use crate::engine::Engine;
use crate::{Clock, Error, ErrorKind, Grant, Hold, Mode, Moment, Owner, Renewal, Result, Token};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// Renewals that are due within this part of their ttl travel with the one that is due now.
const COALESCE: u32 = 12;
/// The largest number of leases in one renewal call.
const BATCH: usize = 1_000;
/// How many words of loss that came before their grants are remembered.
const EARLY: usize = 1_024;
/// How long a runtime that shuts down, or a drop outside of any runtime, may be held up by a last release.
const LAST_RELEASE: Duration = Duration::from_secs(2);
/// How long one attempt of a background release may take.
const RELEASE_ATTEMPT: Duration = Duration::from_secs(5);

/// Why a lock was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The local deadline passed without a confirmed renewal.
    Deadline,
    /// The engine said so: it expired there, or somebody took it away.
    Taken,
    /// The holder's own cap, `max_hold`, was reached.
    MaxHold,
    /// The client was closed.
    Closed,
}

impl Loss {
    const ALL: [Loss; 4] = [Loss::Deadline, Loss::Taken, Loss::MaxHold, Loss::Closed];
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Deadline => "its lease ran out without a confirmed renewal",
            Loss::Taken => "it expired at the engine or was taken away",
            Loss::MaxHold => "it was held for as long as max_hold allows",
            Loss::Closed => "its client was closed",
        })
    }
}

/// One held lease, shared by its guards (several after re-entry) and the keeper.
pub(crate) struct Held {
    id: u64,
    pub(crate) hold: Hold,
    pub(crate) mode: Mode,
    pub(crate) token: Token,
    /// Somebody else's hold, re-entered by owner id: its end frees nothing.
    pub(crate) borrowed: bool,
    clock: Clock,
    /// `max_hold`, as a moment; the deadline never passes it.
    cap: Moment,
    /// Moved forward by confirmed renewals, never backward.
    deadline: AtomicU64,
    /// Key in the keeper's queue; only touched under the lock of its table.
    due: AtomicU64,
    /// `HELD`, `RELEASED`, or `LOST` + the index of the loss.
    state: AtomicU8,
    /// Guards that still stand for this hold.
    nested: AtomicUsize,
    /// Told when `state` or `deadline` changes.
    changed: Notify,
}

const HELD: u8 = 0;
const RELEASED: u8 = 1;
const LOST: u8 = 2;

impl Held {
    pub(crate) fn loss(&self) -> Option<Loss> {
        match self.state.load(Ordering::Acquire) {
            HELD | RELEASED => None,
            lost => Loss::ALL.get(usize::from(lost - LOST)).copied(),
        }
    }

    pub(crate) fn valid_for(&self) -> Duration {
        if self.state.load(Ordering::Acquire) == HELD {
            self.deadline().since(self.clock.now())
        } else {
            Duration::ZERO
        }
    }

    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Counts one more guard for this hold, unless it has ended.
    pub(crate) fn enter(&self) -> bool {
        let more = |nested| (nested > 0).then_some(nested + 1);
        self.nested.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// Counts one guard less; tells whether it was the last.
    pub(crate) fn exit(&self) -> bool {
        self.nested.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Resolves when the lock is lost; never after a clean release.
    ///
    /// It watches the deadline itself, so that the loss is told even when the keeper's runtime is gone.
    pub(crate) async fn lost(&self) -> Loss {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(loss) = self.loss() {
                return loss;
            }
            if self.state.load(Ordering::Acquire) == RELEASED {
                changed.await;
                continue;
            }
            let deadline = self.deadline();
            tokio::select! {
                () = changed => {}
                () = self.clock.sleep_until(deadline) => {
                    if self.deadline() <= self.clock.now() {
                        self.end(self.deadline_loss());
                    }
                }
            }
        }
    }

    fn deadline_loss(&self) -> Loss {
        if self.deadline() >= self.cap { Loss::MaxHold } else { Loss::Deadline }
    }

    fn end(&self, loss: Loss) -> bool {
        let index = Loss::ALL.iter().position(|known| *known == loss).unwrap_or(0);
        self.leave_held(LOST + u8::try_from(index).unwrap_or(0))
    }

    /// Marks a clean release. Returns the loss if that came first.
    pub(crate) fn mark_released(&self) -> std::result::Result<(), Loss> {
        if self.leave_held(RELEASED) { Ok(()) } else { self.loss().map_or(Ok(()), Err) }
    }

    fn leave_held(&self, state: u8) -> bool {
        let left = self.state.compare_exchange(HELD, state, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if left {
            self.changed.notify_waiters();
        }
        left
    }

    fn extend(&self, from: Moment, lease: Duration) {
        let until = from.after(lease.saturating_sub(margin(lease))).min(self.cap);
        self.deadline.fetch_max(until.as_nanos(), Ordering::AcqRel);
    }
}

/// What the keeper does with a lease when its time comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Renew,
    /// Declare it lost. A renewal may be under way.
    Expire,
}

struct Due {
    held: Arc<Held>,
    task: Task,
}

#[derive(Default)]
struct Table {
    queue: BTreeMap<(Moment, u64), Due>,
    /// The moment until which the task sleeps; an earlier entry must wake it.
    sleeps_until: Moment,
    /// Background releases that are not confirmed yet.
    jobs: BTreeMap<u64, Hold>,
    /// Those of them that nobody has started.
    fresh: Vec<u64>,
    /// Owners whose lock was taken away before they were known here: the word was faster than the grant.
    taken_early: VecDeque<(Owner, Moment)>,
    next_id: u64,
}

impl Table {
    fn schedule(&mut self, held: Arc<Held>, task: Task, at: Moment) {
        held.due.store(at.as_nanos(), Ordering::Relaxed);
        self.queue.insert((at, held.id), Due { held, task });
    }

    fn remove(&mut self, held: &Held) -> bool {
        let due = Moment::from_nanos(held.due.load(Ordering::Relaxed));
        self.queue.remove(&(due, held.id)).is_some()
    }
}

/// Renews, watches deadlines, releases in the background. See the module's head.
pub(crate) struct Keeper {
    engine: Arc<dyn Engine>,
    clock: Clock,
    table: Mutex<Table>,
    /// Wakes the task: an earlier entry, a new job, the end.
    wake: Notify,
    /// Told when a job is done or the task has ended.
    progress: Notify,
    /// Whether the task lives. It dies with the runtime that it was spawned on; the next acquire starts another.
    running: AtomicBool,
    /// No client is left: the task ends when the jobs are done.
    ended: AtomicBool,
    /// `close` was called: nothing new is acquired.
    closed: AtomicBool,
    /// Told when `closed` is set.
    closing: Notify,
    /// Acquires under way: the task outlives them, so that what they give up is released.
    acquiring: AtomicUsize,
}

impl Keeper {
    pub(crate) fn new(engine: Arc<dyn Engine>) -> Arc<Self> {
        Arc::new(Self {
            clock: engine.clock(),
            engine,
            table: Mutex::new(Table { sleeps_until: Moment::NEVER, ..Table::default() }),
            wake: Notify::new(),
            progress: Notify::new(),
            running: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            acquiring: AtomicUsize::new(0),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is never left half-changed: a panic elsewhere must not stop renewals here.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the task if it is not running. Called before every acquire.
    pub(crate) fn ensure(self: &Arc<Self>) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        if self.running.load(Ordering::Acquire) {
            return Ok(());
        }
        let runtime = tokio::runtime::Handle::try_current()
            .map_err(|error| Error::invalid("locks are acquired inside of a tokio runtime").caused_by(error))?;
        if !self.running.swap(true, Ordering::AcqRel) {
            // Made here, not in the task: a runtime that is dropped at once may never poll it.
            let alive = Alive(Arc::clone(self));
            runtime.spawn(async move { alive.0.run().await });
        }
        Ok(())
    }

    /// Runs an acquire, unless the client is closed meanwhile.
    pub(crate) async fn unless_closed<T>(&self, acquire: impl Future<Output = Result<T>>) -> Result<T> {
        let _acquiring = Acquiring::new(self);
        let mut closing = pin!(self.closing.notified());
        closing.as_mut().enable();
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        tokio::select! {
            biased;
            outcome = acquire => outcome,
            () = closing => Err(closed()),
        }
    }

    /// Takes a grant into care. `None` when it is over already: the answer took too long, or it was taken away meanwhile.
    pub(crate) fn keep(
        &self,
        hold: Hold,
        grant: &Grant,
        max_hold: Option<Duration>,
        borrowed: bool,
    ) -> Option<Arc<Held>> {
        // From now, not from the beginning of the lease: that may be the last heartbeat of a session that serves many locks.
        let cap = max_hold.map_or(Moment::NEVER, |span| self.clock.now().after(span));
        let mut table = self.table();
        if let Some(at) = table.taken_early.iter().position(|(owner, _)| *owner == hold.owner) {
            let (_, when) = table.taken_early.remove(at)?;
            // An old word is about an earlier hold of the same owner.
            if when >= grant.from {
                return None;
            }
        }
        table.next_id += 1;
        let held = Arc::new(Held {
            id: table.next_id,
            mode: grant.mode,
            token: grant.token,
            borrowed,
            clock: self.clock,
            cap,
            deadline: AtomicU64::new(0),
            due: AtomicU64::new(0),
            state: AtomicU8::new(HELD),
            nested: AtomicUsize::new(1),
            changed: Notify::new(),
            hold,
        });
        held.extend(grant.from, grant.provisional.unwrap_or(held.hold.ttl));
        if held.deadline() <= self.clock.now() {
            return None;
        }
        let renewal = if grant.provisional.is_some() { grant.from } else { grant.from.after(held.hold.ttl / 3) };
        self.plan(&mut table, Arc::clone(&held), renewal);
        Some(held)
    }

    /// Puts a lease in the queue: the next renewal, or its end when that comes first.
    fn plan(&self, table: &mut Table, held: Arc<Held>, renewal: Moment) {
        let deadline = held.deadline();
        let (task, at) =
            if deadline >= held.cap || renewal >= deadline { (Task::Expire, deadline) } else { (Task::Renew, renewal) };
        table.schedule(held, task, at);
        if at < table.sleeps_until {
            table.sleeps_until = at;
            self.wake.notify_one();
        }
    }

    /// Stops caring for a lease: it is about to be released. False if it was not cared for any more.
    pub(crate) fn forget(&self, held: &Held) -> bool {
        self.table().remove(held)
    }

    /// Asks the engine, now, whether the hold still stands; extends it if so.
    pub(crate) async fn confirm(&self, held: &Arc<Held>) -> Result<()> {
        if held.loss().is_none() && !held.valid_for().is_zero() {
            match self.engine.confirm(&held.hold).await? {
                Renewal::Extended { from } => {
                    self.extended(held, from);
                    return Ok(());
                }
                Renewal::Gone => self.lose(held, Loss::Taken),
                Renewal::Unknown => return Err(cannot_tell()),
            }
        }
        let why = held.loss().unwrap_or(Loss::Deadline);
        Err(Error::new(ErrorKind::Lost, format!("the lock was lost: {why}")))
    }

    fn extended(&self, held: &Arc<Held>, from: Moment) {
        held.extend(from, held.hold.ttl);
        // Where the engine cannot give a whole lease, little is left of it: it is renewed often, but not without a pause.
        let now = self.clock.now();
        let soonest = now.after(held.deadline().since(now) / 8);
        let mut table = self.table();
        // Not in the queue: it was released or lost meanwhile. It must not come back.
        if table.remove(held) {
            self.plan(&mut table, Arc::clone(held), from.after(held.hold.ttl / 3).max(soonest));
        }
    }

    fn lose(&self, held: &Arc<Held>, loss: Loss) {
        self.table().remove(held);
        if held.end(loss) {
            tracing::warn!(name = %held.hold.name, token = %held.token, "lock lost: {loss}");
        }
        // Also when the engine took it, or somebody who awaits the loss found it first: whatever the engine keeps for this owner
        // must go.
        if held.loss().is_some() && !held.borrowed {
            // If the engine has forgotten that it took it, this must not count as the release of one who holds.
            let again = matches!(held.loss(), Some(Loss::Taken | Loss::Deadline));
            self.release_later(Hold { again, ..held.hold.clone() });
        }
    }

    /// Releases in the background, with retries. Works from anywhere, also outside of a runtime.
    pub(crate) fn release_later(&self, hold: Hold) {
        {
            let mut table = self.table();
            table.next_id += 1;
            let id = table.next_id;
            table.jobs.insert(id, hold);
            table.fresh.push(id);
        }
        if self.running.load(Ordering::Acquire) {
            self.wake.notify_one();
        } else {
            self.release_detached();
        }
    }

    /// The last resort when no runtime runs the keeper: a thread of its own finishes the pending releases.
    fn release_detached(&self) {
        let jobs: Vec<Hold> = {
            let mut table = self.table();
            table.fresh.clear();
            // The keeper may have begun with some of them.
            std::mem::take(&mut table.jobs).into_values().map(|hold| Hold { again: true, ..hold }).collect()
        };
        if jobs.is_empty() {
            return;
        }
        let engine = Arc::clone(&self.engine);
        let (done, wait) = std::sync::mpsc::channel();
        let work = move || {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
                return;
            };
            runtime.block_on(async {
                for hold in &jobs {
                    let release = tokio::time::timeout(LAST_RELEASE, engine.release(hold));
                    if !matches!(release.await, Ok(Ok(_))) {
                        tracing::warn!(name = %hold.name, "last release failed; the lock is free when its lease ends");
                    }
                }
            });
            let _ = done.send(());
        };
        if std::thread::Builder::new().name("fencelock-release".into()).spawn(work).is_ok() {
            let _ = wait.recv_timeout(LAST_RELEASE);
        }
        self.progress.notify_waiters();
    }

    /// No client is left; the task may end.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// Gives everything back and ends the task.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        // The task does the work; it may have died with an earlier runtime.
        let _ = self.ensure();
        self.closed.store(true, Ordering::Release);
        self.closing.notify_waiters();
        let held: Vec<Arc<Held>> = self.table().queue.values().map(|due| Arc::clone(&due.held)).collect();
        for held in &held {
            self.lose(held, Loss::Closed);
        }
        self.end();
        loop {
            let mut progress = pin!(self.progress.notified());
            progress.as_mut().enable();
            if !self.running.load(Ordering::Acquire) {
                return Ok(());
            }
            progress.await;
        }
    }

    async fn run(&self) {
        let (lost, mut taken) = mpsc::unbounded_channel();
        let engine = Arc::clone(&self.engine);
        let mut drive = pin!(async move { engine.drive(lost).await });
        let mut driving = true;
        let mut renewals = FuturesUnordered::new();
        let mut releases = FuturesUnordered::new();
        {
            let mut table = self.table();
            table.fresh = table.jobs.keys().copied().collect();
        }
        loop {
            for (id, hold) in self.fresh_jobs() {
                releases.push(self.release_with_retries(id, hold));
            }
            let (batch, next) = self.tend();
            for chunk in batch.chunks(BATCH) {
                renewals.push(self.renew(chunk.to_vec()));
            }
            if self.ended.load(Ordering::Acquire) && releases.is_empty() && self.is_idle() {
                break;
            }
            tokio::select! {
                Some(()) = renewals.next(), if !renewals.is_empty() => {}
                Some(()) = releases.next(), if !releases.is_empty() => {}
                Some(owner) = taken.recv() => {
                    let unsure = self.taken(owner);
                    if !unsure.is_empty() {
                        renewals.push(self.renew(unsure));
                    }
                }
                () = self.engine.doubt() => {
                    let held: Vec<Arc<Held>> = self.table().queue.values().map(|due| Arc::clone(&due.held)).collect();
                    for chunk in held.chunks(BATCH) {
                        renewals.push(self.renew(chunk.to_vec()));
                    }
                }
                () = &mut drive, if driving => driving = false,
                () = self.wake.notified() => {}
                () = self.clock.sleep_until(next) => {}
            }
        }
        drop(renewals);
        if let Err(error) = self.engine.close().await {
            tracing::warn!("closing the engine: {error}");
        }
    }

    /// Nobody is acquiring, and nothing is left to be released.
    fn is_idle(&self) -> bool {
        self.acquiring.load(Ordering::Acquire) == 0 && self.table().jobs.is_empty()
    }

    fn fresh_jobs(&self) -> Vec<(u64, Hold)> {
        let mut table = self.table();
        let fresh = std::mem::take(&mut table.fresh);
        fresh.into_iter().filter_map(|id| Some((id, table.jobs.get(&id)?.clone()))).collect()
    }

    /// Declares what is over, and collects what is due for renewal. Also tells until when to sleep.
    fn tend(&self) -> (Vec<Arc<Held>>, Moment) {
        let now = self.clock.now();
        let mut batch = Vec::new();
        let mut over = Vec::new();
        let mut table = self.table();
        if table.queue.first_key_value().is_some_and(|((at, _), _)| *at <= now) {
            let horizon = now.after(Duration::from_secs(1));
            let due: Vec<_> = table
                .queue
                .range(..=(horizon, u64::MAX))
                .filter(|((at, _), due)| match due.task {
                    Task::Expire => *at <= now,
                    Task::Renew => *at <= now.after(due.held.hold.ttl / COALESCE),
                })
                .map(|(key, _)| *key)
                .collect();
            for key in due {
                let Some(Due { held, task }) = table.queue.remove(&key) else { continue };
                let deadline = held.deadline();
                if task == Task::Expire || deadline <= now {
                    over.push(held);
                } else {
                    // Whatever becomes of the renewal, the deadline stands.
                    table.schedule(Arc::clone(&held), Task::Expire, deadline);
                    batch.push(held);
                }
            }
        }
        let mut next = table.queue.first_key_value().map_or(Moment::NEVER, |((at, _), _)| *at);
        // Those who hold for a moment only are gone before their renewals are due. To wake up in vain once costs less than to be
        // woken by each of them.
        if table.sleeps_until > now {
            next = next.min(table.sleeps_until);
        }
        table.sleeps_until = next;
        drop(table);
        for held in over {
            self.lose(&held, held.deadline_loss());
        }
        (batch, next)
    }

    async fn renew(&self, batch: Vec<Arc<Held>>) {
        let holds: Vec<Hold> = batch.iter().map(|held| held.hold.clone()).collect();
        let patience = batch.iter().map(|held| held.hold.ttl / 3).min().unwrap_or_default();
        let answers = match tokio::time::timeout(patience, self.engine.renew(&holds)).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(error)) => return self.try_again(&batch, &error.to_string()),
            Err(_) => return self.try_again(&batch, "the engine did not answer in time"),
        };
        let mut unknown = Vec::new();
        for (held, answer) in batch.into_iter().zip(answers) {
            match answer {
                Renewal::Extended { from } => self.extended(&held, from),
                Renewal::Gone => self.lose(&held, Loss::Taken),
                Renewal::Unknown => unknown.push(held),
            }
        }
        if !unknown.is_empty() {
            self.try_again(&unknown, "the engine could not tell");
        }
    }

    fn try_again(&self, batch: &[Arc<Held>], why: &str) {
        tracing::warn!(locks = batch.len(), "renewal failed, trying again until the deadline: {why}");
        let now = self.clock.now();
        let mut table = self.table();
        for held in batch {
            if table.remove(held) {
                let pause = (held.hold.ttl / 20).clamp(Duration::from_millis(20), Duration::from_secs(1));
                let (task, at) = match now.after(pause) {
                    at if at < held.deadline() => (Task::Renew, at),
                    _ => (Task::Expire, held.deadline()),
                };
                table.schedule(Arc::clone(held), task, at);
            }
        }
    }

    async fn release_with_retries(&self, id: u64, mut hold: Hold) {
        let give_up = self.clock.now().after(hold.ttl * 2 + RELEASE_ATTEMPT);
        let mut pause = Duration::from_millis(20);
        let mut warned = false;
        loop {
            let why = match tokio::time::timeout(RELEASE_ATTEMPT, self.engine.release(&hold)).await {
                Ok(Ok(_)) => break,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the engine did not answer in time".to_owned(),
            };
            if self.clock.now() >= give_up {
                // A client that ends takes its sessions along.
                if self.ended.load(Ordering::Acquire) || !self.engine.lingers() {
                    tracing::warn!(name = %hold.name, "release given up, the lease has ended by itself: {why}");
                    break;
                }
                if !warned {
                    warned = true;
                    tracing::warn!(name = %hold.name, "nobody gets the lock until its release succeeds, which is tried on: {why}");
                }
            }
            tracing::debug!(name = %hold.name, "release failed, trying again: {why}");
            hold.again = true;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
        self.table().jobs.remove(&id);
        self.progress.notify_waiters();
    }

    /// The engine took a lock of this owner away. Rare, so a search through the queue will do. Returns those that must be asked
    /// for: an owner of several locks may have lost only one of them.
    fn taken(&self, owner: Owner) -> Vec<Arc<Held>> {
        let lost: Vec<Arc<Held>> = {
            let mut table = self.table();
            let of_owner = table.queue.values().filter(|due| due.held.hold.owner == owner);
            let lost: Vec<_> = of_owner.map(|due| Arc::clone(&due.held)).collect();
            if lost.is_empty() {
                table.taken_early.push_back((owner, self.clock.now()));
                if table.taken_early.len() > EARLY {
                    table.taken_early.pop_front();
                }
            }
            lost
        };
        match lost.as_slice() {
            [held] => self.lose(held, Loss::Taken),
            several => return several.to_vec(),
        }
        Vec::new()
    }

    /// Waits until no background release is pending; for tests and orderly ends.
    pub(crate) async fn settled(&self) {
        loop {
            let mut progress = pin!(self.progress.notified());
            progress.as_mut().enable();
            if self.table().jobs.is_empty() {
                return;
            }
            progress.await;
        }
    }
}

/// The engine was asked whether a hold stands.
pub(crate) fn cannot_tell() -> Error {
    Error::new(ErrorKind::Unavailable, "the engine cannot tell whether the lock is still held; try again")
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "this client was closed; connect again")
}

/// An acquire under way.
struct Acquiring<'a>(&'a Keeper);

impl<'a> Acquiring<'a> {
    fn new(keeper: &'a Keeper) -> Self {
        keeper.acquiring.fetch_add(1, Ordering::AcqRel);
        Self(keeper)
    }
}

impl Drop for Acquiring<'_> {
    fn drop(&mut self) {
        if self.0.acquiring.fetch_sub(1, Ordering::AcqRel) == 1 && self.0.ended.load(Ordering::Acquire) {
            self.0.wake.notify_one();
        }
    }
}

/// Notices the end of the task, also when its runtime is dropped under it.
struct Alive(Arc<Keeper>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
        self.0.release_detached();
        self.0.progress.notify_waiters();
    }
}

/// Awaits the first loss among several leases.
pub(crate) async fn first_loss(parts: Vec<Arc<Held>>) -> Loss {
    let mut losses: FuturesUnordered<_> = parts.iter().map(|held| held.lost()).collect();
    match losses.next().await {
        Some(loss) => loss,
        None => std::future::pending::<Loss>().await,
    }
}
