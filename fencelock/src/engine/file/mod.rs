//! The file engine: lines in a directory of one machine. Nothing to install, nothing to run.
//!
//! * `root`: the directory, and the byte locks that say who is there.
//! * `session`: a client's inbox and its death.
//! * `gate`: entering one line file alone.
//! * `page`: a line on disk.
//! * `token`: fencing tokens.
//!
//! The kernel is the failure detector: it drops the byte locks and closes the FIFO of a process that dies, however it dies.
//! See `docs/engines/file.md` for the whole story.

mod gate;
mod page;
mod root;
mod session;
mod token;

use self::gate::{FileWorld, LineFile};
use self::page::{Boot, PageShelf};
use self::root::Root;
use self::session::{Own, Peers};
use self::token::Tokens;
use super::line::wait::{Inbox, LineEngine, LineStore, Need, deliver_own};
use super::line::{Line, News, Session, Word};
use super::{Capability, Purpose};
use crate::url::Url;
use crate::{Clock, Error, ErrorKind, Name, Owner, Result};
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// How many line files are kept open, and kept in place when they are empty, for their next use.
const WARM: usize = 128;
/// How many of them go when there are too many.
const COOL: usize = 32;
/// How often a client that is in a line makes sure that the directory is in its place.
const GROUND: Duration = Duration::from_secs(1);
/// How many line files a newcomer looks at for leftovers of the dead.
const SWEEP: usize = 64;

/// Opens the directory that the URL names.
pub(crate) async fn open(url: &Url) -> Result<LineEngine<FileStore>> {
    let mut url = url.clone();
    let allow_network = match url.take("network").as_deref() {
        None | Some("refuse") => false,
        Some("allow") => true,
        Some(other) => {
            return Err(Error::invalid(format!("option network={other} is not known; it is allow or refuse")));
        }
    };
    url.finish(&["ttl", "network"])?;
    let path = directory(&url.rest)?;
    let root = blocking(move || Root::open(&path, allow_network)).await?;
    let address = address(&root);
    let root = Arc::new(root);
    let boot = token::boot_id();
    Ok(LineEngine::new(FileStore {
        shared: Arc::new(Shared {
            peers: Peers::new(&root),
            tokens: Tokens::new(boot),
            boot,
            inbox: Arc::default(),
            own: OnceLock::new(),
            uses: Mutex::default(),
            root,
        }),
        lines: Mutex::default(),
        count: AtomicU64::new(0),
        opened: Notify::new(),
        opening: tokio::sync::Mutex::new(()),
        address,
    }))
}

/// Where `file:` alone, `file:~/x`, `file:relative` and `file:///absolute` lead.
fn directory(rest: &str) -> Result<PathBuf> {
    let env = |key: &str| std::env::var_os(key).filter(|value| !value.is_empty()).map(PathBuf::from);
    // A service may have no HOME: then what the system knows of the user, so that its other processes are met.
    let home = || std::env::home_dir().filter(|home| home.is_absolute());
    if rest.contains('\0') {
        return Err(Error::invalid("a path cannot contain the character NUL"));
    }
    if rest.is_empty() {
        let state = env("XDG_STATE_HOME")
            .filter(|path| path.is_absolute())
            .or_else(|| home().map(|home| home.join(".local/state")));
        return match state {
            Some(state) => Ok(state.join("fencelock")),
            None => Err(Error::invalid("neither HOME nor XDG_STATE_HOME is set; name a directory: file:/path")),
        };
    }
    if let Some(path) = rest.strip_prefix("//") {
        return match path.strip_prefix("localhost").unwrap_or(path) {
            path if path.starts_with('/') => Ok(PathBuf::from(path)),
            _ => Err(Error::invalid(format!("file:{rest} names a host; write file:/path for an absolute path"))),
        };
    }
    if let Some(path) = rest.strip_prefix("~/") {
        return home()
            .map(|home| home.join(path))
            .ok_or_else(|| Error::invalid("HOME is not set; write the path in full: file:/path"));
    }
    Ok(PathBuf::from(rest))
}

/// The URL that leads here from everywhere.
fn address(root: &Root) -> String {
    let path = root.path.to_string_lossy();
    format!("file:{}", path.replace('%', "%25").replace('?', "%3f"))
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> Result<R> + Send + 'static) -> Result<R> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::new(ErrorKind::Engine, "the runtime is shutting down").caused_by(error)))
}

/// What the steps of all lines share.
pub(crate) struct Shared {
    root: Arc<Root>,
    boot: Boot,
    tokens: Tokens,
    peers: Peers,
    inbox: Arc<Inbox>,
    /// Made with the first claim: who only looks needs none.
    own: OnceLock<Own>,
    /// Who of this client is in which line, by the line's key; each key is marked among the byte locks.
    uses: Mutex<HashMap<u64, Vec<Owner>>>,
}

impl Shared {
    fn own_id(&self) -> Option<Session> {
        self.own.get().map(|own| own.id)
    }

    fn uses(&self, key: u64) -> bool {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&key)
    }

    /// Looks now and then whether the directory is still in its place; if not, others lock elsewhere, and whoever is in a line
    /// here is told.
    async fn watch_ground(&self) {
        loop {
            tokio::time::sleep(GROUND).await;
            let users: Vec<(u64, Owner)> = {
                let uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
                uses.iter().flat_map(|(line, owners)| owners.iter().map(|owner| (*line, *owner))).collect()
            };
            if !users.is_empty() && !self.root.in_place() {
                for (line, owner) in users {
                    self.inbox.deliver(owner, line, News::Lost);
                }
            }
        }
    }

    /// Carries words to whom they concern.
    fn send(&self, words: Vec<Word>) {
        if words.is_empty() {
            return;
        }
        for word in deliver_own(&self.inbox, self.own_id(), words) {
            self.peers.send(&word);
        }
    }
}

pub(crate) struct FileStore {
    shared: Arc<Shared>,
    lines: Mutex<HashMap<Name, Arc<LineFile>>>,
    /// Ages the lines.
    count: AtomicU64,
    /// Tells the receiver that there is a session to receive for.
    opened: Notify,
    opening: tokio::sync::Mutex<()>,
    address: String,
}

impl FileStore {
    fn lines(&self) -> MutexGuard<'_, HashMap<Name, Arc<LineFile>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line's file, kept warm.
    fn line_file(&self, name: &Name) -> Arc<LineFile> {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let mut cold = Vec::new();
        let line = {
            let mut lines = self.lines();
            let line = match lines.get(name) {
                Some(line) => Arc::clone(line),
                None => {
                    if lines.len() >= WARM {
                        cold = coldest(&mut lines);
                    }
                    let line = Arc::new(LineFile::new(name));
                    lines.insert(name.clone(), Arc::clone(&line));
                    line
                }
            };
            line.touch(count);
            line
        };
        for line in cold {
            line.retire(&self.shared);
        }
        line
    }

    /// Removes leftovers of the dead, a bounded number.
    fn sweep(shared: &Arc<Shared>) {
        shared.peers.sweep(shared.own_id().unwrap_or(0));
        for name in names_in(&shared.root, SWEEP).unwrap_or_default() {
            Arc::new(LineFile::new(&name)).retire(shared);
        }
    }
}

/// Takes the least recently used ones that nobody is using out of the cache.
fn coldest(lines: &mut HashMap<Name, Arc<LineFile>>) -> Vec<Arc<LineFile>> {
    let mut idle: Vec<(u64, Name)> = lines
        .iter()
        .filter(|(_, line)| Arc::strong_count(line) == 1)
        .map(|(name, line)| (line.used.load(Ordering::Relaxed), name.clone()))
        .collect();
    idle.sort_unstable();
    idle.into_iter().take(COOL).filter_map(|(_, name)| lines.remove(&name)).collect()
}

fn names_in(root: &Root, limit: usize) -> Result<Vec<Name>> {
    let dir = rustix::fs::Dir::read_from(&root.lines).map_err(|errno| root.explain(errno))?;
    let mut names = Vec::new();
    for entry in dir.flatten() {
        if entry.file_name().to_bytes().starts_with(b".") {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let Ok(file) = rustix::fs::openat(&root.lines, entry.file_name(), flags, Mode::empty()) else { continue };
        names.extend(page::name_of(file.as_fd()));
        if names.len() >= limit {
            break;
        }
    }
    Ok(names)
}

impl LineStore for FileStore {
    type Shelf = PageShelf;
    type World = FileWorld;

    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "file",
            processes: true,
            machines: false,
            shared: true,
            permits: true,
            ordered: true,
            push: true,
            instant_death: true,
            durable_tokens: true,
            purpose: Purpose::Correctness,
            survives: "kill -9 of holders and waiters (noticed at once), a holder that is stopped (its lease ends), restarts and \
                       power losses of the machine, files removed by mistake",
            beware: "it is for one machine; a holder that was stopped for longer than its lease must be fenced off by its token",
        }
    }

    fn clock(&self) -> Clock {
        Clock::Boot
    }

    fn inbox(&self) -> &Arc<Inbox> {
        &self.shared.inbox
    }

    fn line(&self, name: &Name) -> u64 {
        self.line_file(name).key
    }

    async fn session(&self) -> Result<Session> {
        if self.shared.tokens.low() {
            let shared = Arc::clone(&self.shared);
            blocking(move || shared.tokens.refill(&shared.root, 0)).await?;
        }
        if let Some(id) = self.shared.own_id() {
            return Ok(id);
        }
        let _alone = self.opening.lock().await;
        if let Some(id) = self.shared.own_id() {
            return Ok(id);
        }
        let shared = Arc::clone(&self.shared);
        let own = blocking(move || Own::open(&shared.root)).await?;
        let id = own.id;
        let _ = self.shared.own.set(own);
        self.opened.notify_waiters();
        let shared = Arc::clone(&self.shared);
        drop(tokio::task::spawn_blocking(move || Self::sweep(&shared)));
        Ok(id)
    }

    async fn step<R, F>(&self, name: &Name, need: Need, step: F) -> Result<R>
    where
        R: Send + 'static,
        F: FnOnce(&mut Line<'_, PageShelf, FileWorld>) -> Result<R> + Send + 'static,
    {
        self.line_file(name).step(&self.shared, need, step).await
    }

    async fn watch(&self, sessions: &[Session]) {
        let own = self.shared.own_id();
        let others: Vec<Session> = sessions.iter().copied().filter(|session| Some(*session) != own).collect();
        self.shared.peers.death(&others).await;
    }

    fn sound(&self) -> bool {
        self.shared.root.in_place()
    }

    async fn names(&self, prefix: &str) -> Result<Vec<Name>> {
        let shared = Arc::clone(&self.shared);
        let mut names = blocking(move || names_in(&shared.root, usize::MAX)).await?;
        names.retain(|name| name.as_str().starts_with(prefix));
        Ok(names)
    }

    async fn receive(&self) {
        loop {
            let opened = self.opened.notified();
            tokio::pin!(opened);
            opened.as_mut().enable();
            if let Some(own) = self.shared.own.get() {
                tokio::select! {
                    () = own.receive(&self.shared.inbox) => {}
                    () = self.shared.watch_ground() => {}
                }
                tracing::warn!("the inbox in {} cannot be read; waiters look for themselves", self.address);
                return;
            }
            opened.await;
        }
    }

    async fn close(&self) -> Result<()> {
        let lines: Vec<Arc<LineFile>> = self.lines().drain().map(|(_, line)| line).collect();
        for line in lines {
            line.retire(&self.shared);
        }
        if let Some(own) = self.shared.own.get() {
            own.close();
        }
        Ok(())
    }
}
