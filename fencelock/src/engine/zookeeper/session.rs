//! A session with the servers: it keeps this client's entries alive, and says for how long.
//!
//! The sessions of a process live on a thread of their own, so that they outlive the runtime of whoever opened them. They do not
//! outlive the keeper: a session that nobody cares for is ended, and its entries go with it.

use super::fault;
use super::path::Entry;
use super::settings::Settings;
use crate::{Clock, Error, ErrorKind, Moment, Owner, Result};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use zookeeper_client::{Client, SessionState};

/// Where sessions live.
static HOME: LazyLock<std::io::Result<Handle>> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let live = move || runtime.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("fencelock-zookeeper".into()).spawn(live)?;
    Ok(handle)
});

fn home() -> Result<&'static Handle> {
    HOME.as_ref().map_err(|error| {
        Error::new(ErrorKind::Unavailable, "the thread for ZooKeeper sessions cannot be started").caused_by(error.to_string())
    })
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
    /// This session's entries, by their czxid.
    entries: Mutex<HashMap<u64, String>>,
    /// Owners whose entries are being created.
    joining: Mutex<HashMap<Owner, usize>>,
    /// A request to create an entry may be under way that nobody waits for.
    stray: AtomicBool,
}

impl Session {
    /// Opens a session for leases of this length.
    pub(super) async fn open(settings: &Arc<Settings>, ttl: Duration) -> Result<Arc<Self>> {
        let wanted = length_for(ttl);
        let asked = Clock::Boot.now();
        let connecting = {
            let settings = Arc::clone(settings);
            Aborting(home()?.spawn(async move {
                loop {
                    match settings.connect(wanted).await {
                        Err(zookeeper_client::Error::Timeout) => {}
                        outcome => return outcome,
                    }
                }
            }))
        };
        let client = match tokio::time::timeout(settings.patience, connecting).await {
            Ok(Ok(client)) => client.map_err(|fault| unreachable(&fault))?,
            Ok(Err(error)) => {
                return Err(Error::new(ErrorKind::Engine, "the ZooKeeper client failed; please report this").caused_by(error));
            }
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
            joining: Mutex::default(),
            stray: AtomicBool::new(false),
        });
        session.care();
        home()?.spawn(attend(Arc::downgrade(&session), settings.root.clone()));
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
        let Ok(client) = self.client() else { return Ok(None) };
        let sent = Clock::Boot.now();
        let outcome = {
            let mut writer = client.new_multi_writer();
            writer.add_check_version("/", -1).map_err(|fault| fault::error(&fault, false))?;
            writer.commit().await
        };
        match outcome.map_err(zookeeper_client::Error::from) {
            Err(fault) if fault::is_over(&fault) => Ok(None),
            Err(fault) if fault::is_lost(&fault) => Err(fault::error(&fault, true)),
            // Whatever it says, the leader has said it.
            _ => {
                self.heard(sent);
                Ok(Some(sent))
            }
        }
    }

    /// Entries that wait or hold depend on it.
    pub(super) fn is_in_use(&self) -> bool {
        !lock(&self.entries).is_empty()
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

    pub(super) fn add(&self, czxid: u64, path: String) {
        lock(&self.entries).insert(czxid, path);
    }

    pub(super) fn remove(&self, czxid: u64) {
        lock(&self.entries).remove(&czxid);
    }

    pub(super) fn path_of(&self, czxid: u64) -> Option<String> {
        lock(&self.entries).get(&czxid).cloned()
    }

    /// The entries of this session are being added to.
    pub(super) fn join(self: &Arc<Self>, owner: Owner) -> Joining {
        *lock(&self.joining).entry(owner).or_default() += 1;
        Joining { session: Arc::clone(self), owner }
    }

    /// A request to create an entry was given up on. It may still arrive.
    pub(super) fn suspect(&self) {
        self.stray.store(true, Ordering::Release);
    }

    /// Removes entries of this session that nobody knows of: made by a request that was given up on.
    async fn sweep(&self, root: &str) -> Result<(), zookeeper_client::Error> {
        let Ok(client) = self.client() else { return Ok(()) };
        for path in client.list_ephemerals(root).await? {
            if self.is_stray(&path) {
                tracing::debug!("removing {path}: its request was given up on");
                client.delete(&path, None).await?;
            }
        }
        Ok(())
    }

    fn is_stray(&self, path: &str) -> bool {
        let Some((_, name)) = path.rsplit_once('/') else { return false };
        let owner = Entry::parse(name.to_owned()).and_then(|entry| entry.owner);
        // Whoever is joining is asked first: it is known among the entries before it has joined.
        let joining = owner.is_none_or(|owner| lock(&self.joining).contains_key(&owner));
        !joining && !lock(&self.entries).values().any(|known| known == path)
    }
}

fn unreachable(fault: &zookeeper_client::Error) -> Error {
    match fault {
        zookeeper_client::Error::BadArguments(why) => Error::invalid(format!("not an address of ZooKeeper servers: {why}")),
        fault => fault::error(fault, false),
    }
}

/// A task that ends with whoever waits for it.
struct Aborting<T>(tokio::task::JoinHandle<T>);

impl<T> Future for Aborting<T> {
    type Output = Result<T, tokio::task::JoinError>;

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        std::pin::Pin::new(&mut self.0).poll(cx)
    }
}

impl<T> Drop for Aborting<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An entry that is being created.
pub(super) struct Joining {
    session: Arc<Session>,
    owner: Owner,
}

impl Drop for Joining {
    fn drop(&mut self) {
        let mut joining = lock(&self.session.joining);
        if let Some(count) = joining.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                joining.remove(&self.owner);
            }
        }
    }
}

/// Looks after a session: ends it when nobody cares for it any more, and removes what strayed into it.
async fn attend(session: Weak<Session>, root: String) {
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
        if present.stray.load(Ordering::Acquire)
            && state == SessionState::SyncConnected
            && let Err(fault) = present.sweep(&root).await
        {
            tracing::debug!("looking for stray entries: {fault}");
        }
        let pause = (present.length / 8).clamp(Duration::from_millis(50), Duration::from_secs(1));
        drop(present);
        tokio::time::sleep(pause).await;
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
