//! A session with the servers: it keeps this client's entries alive, and says for how long.
//!
//! The sessions of a process live on a thread of their own, so that they outlive the runtime of whoever opened them. They do not
//! outlive the keeper: a session that nobody cares for is ended, and its entries go with it.

use super::fault;
use super::line::Line;
use super::settings::Settings;
use crate::{Clock, Error, ErrorKind, Moment, Owner, Result};
use async_executor::Executor;
use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use zookeeper_client::{Client, Error as Fault, SessionState};

/// Where sessions live: what is spawned here is run by one thread, which also waits for the network on their behalf.
static HOME: Executor<'static> = Executor::new();

/// Makes sure that the thread runs.
fn home() -> Result<&'static Executor<'static>> {
    static THREAD: LazyLock<std::io::Result<()>> = LazyLock::new(|| {
        let live = || {
            let _scope = spawns::enter(&AtHome);
            async_io::block_on(HOME.run(std::future::pending::<()>()));
        };
        std::thread::Builder::new().name("fencelock-zookeeper".into()).spawn(live).map(drop)
    });
    THREAD.as_ref().map(|()| &HOME).map_err(|error| {
        Error::new(ErrorKind::Unavailable, "the thread for ZooKeeper sessions cannot be started")
            .caused_by(error.to_string())
    })
}

/// What the ZooKeeper client spawns stays on the thread.
struct AtHome;

impl spawns::Spawn for AtHome {
    fn spawn(&self, task: spawns::Task) {
        HOME.spawn(Box::into_pin(task.future)).detach();
    }
}

/// The shortest session that is asked for: heartbeats of a busy machine get through.
const SHORTEST: Duration = Duration::from_secs(2);

/// How long a session must be to cover a lease of this length; see [`covered`].
pub(super) fn length_for(ttl: Duration) -> Duration {
    SHORTEST.max((ttl * 5 / 3).min(ttl + Duration::from_secs(3)))
}

/// Which lease a session of this length covers, from the moment at which a write that the leader confirmed was sent.
///
/// The leader need not have heard of the session at that moment: a follower takes the heartbeats and reports them every half
/// tick. If it is cut off right after the write, what the leader knows is the heartbeat before.
fn covered(length: Duration, heartbeats: Duration) -> Duration {
    let half_tick = (length / 4).min(Duration::from_secs(1));
    length.saturating_sub(heartbeats + half_tick)
}

/// One session.
pub(super) struct Session {
    pub(super) id: u64,
    /// After its last heartbeat, as the servers agreed to it.
    pub(super) length: Duration,
    /// What was asked for; the servers have limits.
    pub(super) wanted: Duration,
    /// The lease that it covers.
    pub(super) lease: Duration,
    /// `None` when it was ended from here.
    client: Mutex<Option<Arc<Client>>>,
    /// When the last write that was answered was sent.
    heard: AtomicU64,
    /// Until when somebody cares for it.
    cared_for: AtomicU64,
    /// One heartbeat at a time serves all who want one.
    beating: tokio::sync::Mutex<()>,
    /// Directories that were seen to exist.
    directories: Mutex<HashSet<String>>,
    entries: Mutex<Entries>,
    /// Who is second in line, by its czxid: the path of the one ahead, and whether that one is gone.
    seconds: Mutex<HashMap<u64, (String, bool)>>,
    /// Numbers requests, so that it is known which of two was sent first.
    sent: AtomicU64,
    /// Who is about to read which directory.
    reads: Mutex<HashMap<String, Arc<Reads>>>,
    /// Requests to create an entry whose answers nobody has heard: their claims were given up before, or the connection broke.
    unheard: Mutex<HashMap<Claimed, Vec<Answer>>>,
}

/// The entries of a session.
#[derive(Default)]
struct Entries {
    /// By their czxid: whose, and the path.
    all: HashMap<u64, (Claimed, String)>,
    /// Mostly one each.
    by_claim: HashMap<Claimed, Vec<u64>>,
}

/// Whose entry, and in which directory.
pub(super) type Claimed = (Owner, String);

/// The czxid and the path of a new entry, when it is there.
type Answer = Pin<Box<dyn Future<Output = std::result::Result<(u64, String), Fault>> + Send>>;

/// A request to create an entry. Dropped before it is answered, it leaves the answer to whoever removes the entry, who then need
/// not search for it.
pub(super) struct Creating<'a> {
    session: &'a Session,
    claimed: Claimed,
    /// `None` when it was told.
    answer: Option<Answer>,
}

impl<'a> Creating<'a> {
    /// Sends the request: that is what its future does first.
    pub(super) fn send<F>(session: &'a Session, claimed: Claimed, request: F) -> Self
    where
        F: Future<Output = std::result::Result<(u64, String), Fault>> + Send + 'static,
    {
        let mut answer: Answer = Box::pin(request);
        if let Poll::Ready(told) = answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            answer = Box::pin(std::future::ready(told));
        }
        Self { session, claimed, answer: Some(answer) }
    }
}

impl Future for Creating<'_> {
    type Output = std::result::Result<(u64, String), Fault>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(answer) = &mut self.answer else { return Poll::Pending };
        let told = ready!(answer.as_mut().poll(context));
        self.answer = None;
        match &told {
            // Perhaps it has created one.
            Err(fault) if fault::is_lost(fault) => {
                self.session.leave_unheard(&self.claimed, Box::pin(std::future::ready(told.clone())))
            }
            // Nothing has come of earlier attempts, or this one would not have been made.
            _ => drop(self.session.unheard(&self.claimed)),
        }
        Poll::Ready(told)
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            self.session.leave_unheard(&self.claimed, answer);
        }
    }
}

impl Session {
    /// Opens a session for leases of this length.
    pub(super) async fn open(settings: &Arc<Settings>, ttl: Duration) -> Result<Arc<Self>> {
        let wanted = length_for(ttl);
        let asked = Clock::Boot.now();
        // Dropped with this future, the task ends.
        let connecting = {
            let settings = Arc::clone(settings);
            home()?.spawn(async move {
                loop {
                    match settings.connect(wanted).await {
                        Err(zookeeper_client::Error::Timeout) => {}
                        outcome => return outcome,
                    }
                }
            })
        };
        let client = match tokio::time::timeout(settings.patience, connecting).await {
            Ok(client) => client.map_err(|fault| unreachable(&fault))?,
            Err(_) => return Err(unreachable(&zookeeper_client::Error::Timeout)),
        };
        let length = client.session_timeout();
        let session = Arc::new(Self {
            id: client.session_id().0.cast_unsigned(),
            length,
            wanted,
            lease: covered(length, Settings::heartbeats(length)),
            client: Mutex::new(Some(Arc::new(client))),
            heard: AtomicU64::new(asked.as_nanos()),
            cared_for: AtomicU64::new(0),
            beating: tokio::sync::Mutex::default(),
            directories: Mutex::default(),
            entries: Mutex::default(),
            seconds: Mutex::default(),
            sent: AtomicU64::new(0),
            reads: Mutex::default(),
            unheard: Mutex::default(),
        });
        session.care();
        home()?.spawn(attend(Arc::downgrade(&session))).detach();
        Ok(session)
    }

    /// To send requests through; an error when the session is over.
    pub(super) fn client(&self) -> Result<Arc<Client>> {
        let client = lock(&self.client).clone().filter(|client| !client.state().is_terminated());
        client.ok_or_else(|| fault::error(&zookeeper_client::Error::SessionExpired, false))
    }

    pub(super) fn is_over(&self) -> bool {
        lock(&self.client).as_ref().is_none_or(|client| client.state().is_terminated())
    }

    /// Ends it: its entries go. Returns when the servers know, or do not answer.
    pub(super) async fn end(&self) {
        let Some(client) = lock(&self.client).take() else { return };
        let mut state = client.state_watcher();
        drop(client);
        while !state.peek_state().is_terminated() && !state.changed().await.is_terminated() {}
    }

    /// A write that was sent at this moment was answered.
    pub(super) fn heard(&self, sent: Moment) {
        self.heard.fetch_max(sent.as_nanos(), Ordering::AcqRel);
    }

    /// Until when it covers leases, by the last word of the servers.
    pub(super) fn good_until(&self) -> Moment {
        if self.is_over() { Moment::default() } else { self.last_heard().after(self.lease) }
    }

    fn last_heard(&self) -> Moment {
        Moment::from_nanos(self.heard.load(Ordering::Acquire))
    }

    /// Somebody cares for this session: it is kept for another while.
    pub(super) fn care(&self) {
        self.cared_for.fetch_max(Clock::Boot.now().after(self.length).as_nanos(), Ordering::AcqRel);
    }

    fn is_cared_for(&self) -> bool {
        Moment::from_nanos(self.cared_for.load(Ordering::Acquire)) > Clock::Boot.now()
    }

    /// Has the leader confirm the session: when that was asked; `None` when the session is over.
    ///
    /// Any write would do. A plain heartbeat would not: a server that was cut off from the others answers it.
    pub(super) async fn beat(&self) -> Result<Option<Moment>> {
        self.care();
        let wanted = Clock::Boot.now();
        let _turn = self.beating.lock().await;
        if self.last_heard() >= wanted {
            return Ok(Some(self.last_heard()));
        }
        let mut repeated = false;
        loop {
            let Ok(client) = self.client() else { return Ok(None) };
            let sent = Clock::Boot.now();
            let outcome = {
                let mut writer = client.new_multi_writer();
                writer.add_check_version("/", -1).map_err(|fault| fault::error(&fault, false))?;
                writer.commit().await
            };
            match outcome.map_err(Fault::from) {
                Err(fault) if fault::is_over(&fault) => return Ok(None),
                // Sent again, it waits until there is a connection: who only tries is not told of one that was lost meanwhile.
                Err(fault) if fault::is_lost(&fault) && !repeated => repeated = true,
                Err(fault) if fault::is_lost(&fault) => return Err(fault::error(&fault, true)),
                // Whatever it says, the leader has said it.
                _ => {
                    self.heard(sent);
                    return Ok(Some(sent));
                }
            }
        }
    }

    /// Entries that wait or hold depend on it.
    pub(super) fn is_in_use(&self) -> bool {
        !lock(&self.entries).all.is_empty()
    }

    pub(super) fn knows(&self, directory: &str) -> bool {
        lock(&self.directories).contains(directory)
    }

    pub(super) fn learn(&self, directory: &str) {
        /// More than this many are not remembered.
        const KNOWN: usize = 4096;
        let mut known = lock(&self.directories);
        if known.len() >= KNOWN {
            known.clear();
        }
        known.insert(directory.to_owned());
    }

    pub(super) fn forget(&self, directory: &str) {
        lock(&self.directories).remove(directory);
    }

    pub(super) fn add(&self, czxid: u64, claimed: Claimed, path: String) {
        let mut entries = lock(&self.entries);
        entries.by_claim.entry(claimed.clone()).or_default().push(czxid);
        entries.all.insert(czxid, (claimed, path));
    }

    pub(super) fn remove(&self, czxid: u64) {
        let mut entries = lock(&self.entries);
        if let Some((claimed, _)) = entries.all.remove(&czxid)
            && let Some(of_claim) = entries.by_claim.get_mut(&claimed)
        {
            of_claim.retain(|other| *other != czxid);
            if of_claim.is_empty() {
                entries.by_claim.remove(&claimed);
            }
        }
        drop(entries);
        lock(&self.seconds).remove(&czxid);
    }

    /// The entries of a claim that are known, by their czxid.
    pub(super) fn entries_of(&self, claimed: &Claimed) -> Vec<(u64, String)> {
        let entries = lock(&self.entries);
        let known = entries.by_claim.get(claimed).into_iter().flatten();
        known.filter_map(|czxid| Some((*czxid, entries.all.get(czxid)?.1.clone()))).collect()
    }

    /// There is one entry ahead, and no other.
    pub(super) fn is_second(&self, czxid: u64, ahead: String) {
        lock(&self.seconds).insert(czxid, (ahead, false));
    }

    /// This node was deleted.
    pub(super) fn deleted(&self, path: &str) {
        for (ahead, gone) in lock(&self.seconds).values_mut() {
            *gone |= ahead == path;
        }
    }

    /// Whether the only one ahead was seen to go: then nobody is, since nobody can come ahead.
    pub(super) fn is_first(&self, czxid: u64) -> bool {
        lock(&self.seconds).remove(&czxid).is_some_and(|(_, gone)| gone)
    }

    pub(super) fn path_of(&self, czxid: u64) -> Option<String> {
        lock(&self.entries).all.get(&czxid).map(|(_, path)| path.clone())
    }

    /// Takes the answers that a claim has not heard.
    pub(super) fn unheard(&self, claimed: &Claimed) -> Vec<Answer> {
        lock(&self.unheard).remove(claimed).unwrap_or_default()
    }

    fn leave_unheard(&self, claimed: &Claimed, answer: Answer) {
        lock(&self.unheard).entry(claimed.clone()).or_default().push(answer);
    }

    /// The next number of a request: taken after a write was sent, and before a read is.
    pub(super) fn number(&self) -> u64 {
        self.sent.fetch_add(1, Ordering::AcqRel)
    }

    /// Takes turns in reading a directory with all others of this session who want to.
    pub(super) fn reads(self: &Arc<Self>, directory: &str) -> Reading {
        let mut all = lock(&self.reads);
        let reads = Arc::clone(all.entry(directory.to_owned()).or_default());
        Reading { reads, session: Arc::clone(self), directory: directory.to_owned() }
    }
}

fn unreachable(fault: &zookeeper_client::Error) -> Error {
    match fault {
        zookeeper_client::Error::BadArguments(why) => {
            Error::invalid(format!("not an address of ZooKeeper servers: {why}"))
        }
        fault => fault::error(fault, false),
    }
}

/// One reads a directory at a time; those who wait meanwhile share the next answer. It has the number of its request.
pub(super) type Reads = tokio::sync::Mutex<Option<(u64, Arc<Line>)>>;

/// Somebody who is about to read a directory. The last one to go forgets what was read.
pub(super) struct Reading {
    pub(super) reads: Arc<Reads>,
    session: Arc<Session>,
    directory: String,
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut all = lock(&self.session.reads);
        // The table's own, and this one's.
        if Arc::strong_count(&self.reads) <= 2 {
            all.remove(&self.directory);
        }
    }
}

/// Looks after a session: ends it when nobody cares for it any more.
async fn attend(session: Weak<Session>) {
    let mut state = SessionState::SyncConnected;
    loop {
        let Some(present) = session.upgrade() else { return };
        if present.is_over() {
            return;
        }
        if !present.is_cared_for() {
            tracing::warn!("nobody renews the locks of this ZooKeeper session: it is ended");
            return present.end().await;
        }
        if let Ok(client) = present.client()
            && client.state() != state
        {
            state = client.state();
            tracing::info!("ZooKeeper session {:#x}: {state}", present.id);
        }
        let pause = (present.length / 8).clamp(Duration::from_millis(50), Duration::from_secs(1));
        drop(present);
        async_io::Timer::after(pause).await;
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_covers_the_lease_that_it_was_asked_for() {
        for millis in [100, 600, 1_000, 2_000, 3_000, 4_000, 6_000, 10_000, 30_000, 120_000, 86_400_000] {
            let ttl = Duration::from_millis(millis);
            let length = length_for(ttl);
            let lease = covered(length, Settings::heartbeats(length));
            assert!(lease >= ttl, "{ttl:?}: a session of {length:?} covers {lease:?}");
            assert!(lease < length);
        }
    }
}
