//! One line file: opening it, entering it alone, and taking it away when nobody needs it.
//!
//! Entering means an exclusive `flock` on a file that is *still* the one its name leads to: between opening and locking,
//! somebody else may have removed it, and a lock on a removed file excludes nobody.

use super::Shared;
use super::page::{PAGE, PageShelf};
use super::root::create;
use super::session::SESSION_BIT;
use crate::engine::line::wait::Need;
use crate::engine::line::{Line, Session, Word, World};
use crate::{Clock, Error, ErrorKind, Moment, Name, Owner, Result};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use tokio::sync::{Mutex, OwnedMutexGuard};

/// Names up to this many encoded bytes are readable in the file's name; longer ones are hashed.
const READABLE: usize = 200;
/// How often a busy gate is tried before a thread is made to wait at it: somebody else's step takes microseconds.
const TRIES: usize = 20;

/// A line's file as this client knows it.
pub(super) struct LineFile {
    pub(super) name: Name,
    file_name: String,
    /// Names the line among the byte locks, and in words.
    pub(super) key: u64,
    gate: Arc<Mutex<Gate>>,
    /// When it was last used, on the cache's count.
    pub(super) used: AtomicU64,
}

/// What is needed to enter; only one task of this client at a time has it.
struct Gate {
    open: Option<(Arc<OwnedFd>, (u64, u64))>,
    buffer: Option<Box<[u8; PAGE]>>,
}

enum Entry {
    Entered(Arc<OwnedFd>),
    Absent,
    Busy,
}

/// A step that is ready to run, here or on a thread that may block.
struct Job<F> {
    shared: Arc<Shared>,
    line: Arc<LineFile>,
    gate: OwnedMutexGuard<Gate>,
    need: Need,
    step: F,
}

impl LineFile {
    pub(super) fn new(name: &Name) -> Self {
        let hash = Sha256::digest(name.as_str().as_bytes());
        let mut word = [0; 8];
        word.copy_from_slice(&hash[..8]);
        Self {
            name: name.clone(),
            file_name: file_name(name, &hash),
            key: u64::from_le_bytes(word) & !SESSION_BIT,
            gate: Arc::new(Mutex::new(Gate { open: None, buffer: None })),
            used: AtomicU64::new(0),
        }
    }

    /// Runs a step alone on this line. Calls that could wait for another process run on a thread of their own; the others take
    /// microseconds and run here.
    pub(super) async fn step<R, F>(self: Arc<Self>, shared: &Arc<Shared>, need: Need, step: F) -> Result<R>
    where
        R: Send + 'static,
        F: FnOnce(&mut Line<'_, PageShelf, FileWorld>) -> Result<R> + Send + 'static,
    {
        let gate = Arc::clone(&self.gate).lock_owned().await;
        let job = Job { shared: Arc::clone(shared), line: self, gate, need, step };
        match job.run(false) {
            Ok(done) => done,
            Err(job) => tokio::task::spawn_blocking(move || match job.run(true) {
                Ok(done) => done,
                Err(_) => Err(Error::new(ErrorKind::Engine, "the lock's file stayed busy; please report this")),
            })
            .await
            .unwrap_or_else(|error| {
                Err(Error::new(ErrorKind::Ambiguous, "the runtime stopped in the middle of a step").caused_by(error))
            }),
        }
    }

    /// Removes the file if nobody is in line and nobody is at it. Used on the way out of the cache.
    pub(super) fn retire(self: &Arc<Self>, shared: &Arc<Shared>) {
        let Ok(mut gate) = Arc::clone(&self.gate).try_lock_owned() else { return };
        let Ok(Entry::Entered(file)) = gate.enter(shared, self, false, false) else { return };
        let job = Job { shared: Arc::clone(shared), line: Arc::clone(self), gate, need: Need::Nothing, step: () };
        let emptied = job.load(&file).and_then(|mut shelf| {
            let world = FileWorld { shared: Arc::clone(shared), line: Arc::clone(self) };
            let mut line = Line::new(&mut shelf, &world);
            line.reap()?;
            line.settle()?;
            let (empty, words) = (line.is_empty(), line.words);
            shelf.commit(&self.name).map_err(|errno| shared.root.explain(errno))?;
            Ok((empty, words))
        });
        // Somebody who was thrown out while it was stopped keeps its mark: without the file, its name would look unused.
        let unused = !shared.uses(self.key) && !shared.root.marked_by_other(self.key);
        if matches!(&emptied, Ok((true, _))) && unused {
            let _ = rustix::fs::unlinkat(&shared.root.lines, &self.file_name, AtFlags::empty());
        }
        let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
        if let Ok((_, words)) = emptied {
            shared.send(words);
        }
    }

    fn removed(&self, shared: &Shared) -> Error {
        Error::new(
            ErrorKind::Engine,
            format!(
                "the file of this lock was removed from {} while it is in use; it works again when those who use it have \
                 released it or ended",
                shared.root.path.display()
            ),
        )
    }
}

impl Gate {
    fn enter(&mut self, shared: &Shared, line: &LineFile, make: bool, block: bool) -> Result<Entry> {
        let explain = |errno| shared.root.explain(errno);
        loop {
            let (file, identity) = match &self.open {
                Some(open) => open.clone(),
                None => match open(shared, line, make).map_err(explain)? {
                    Some(open) => self.open.insert(open).clone(),
                    None => return Ok(Entry::Absent),
                },
            };
            if !lock(&file, block).map_err(explain)? {
                return Ok(Entry::Busy);
            }
            let stat = rustix::fs::statat(&shared.root.lines, &line.file_name, AtFlags::SYMLINK_NOFOLLOW);
            if stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == identity) {
                return Ok(Entry::Entered(file));
            }
            let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
            self.open = None;
        }
    }
}

/// Locks the file; without `block`, false if somebody else is in and stays.
fn lock(file: &OwnedFd, block: bool) -> Result<bool, Errno> {
    let mut tries = 0;
    loop {
        let how = if block { FlockOperation::LockExclusive } else { FlockOperation::NonBlockingLockExclusive };
        match rustix::fs::flock(file, how) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if tries < TRIES => {
                tries += 1;
                std::thread::yield_now();
            }
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(errno) => return Err(errno),
        }
    }
}

type Opened = (Arc<OwnedFd>, (u64, u64));

fn open(shared: &Shared, line: &LineFile, make: bool) -> Result<Option<Opened>, Errno> {
    let root = &shared.root;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = match rustix::fs::openat(&root.lines, &line.file_name, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) if make => create(&root.lines, &line.file_name, root.mode)?,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno),
    };
    let stat = rustix::fs::fstat(&file)?;
    Ok(Some((Arc::new(file), (stat.st_dev, stat.st_ino))))
}

impl<F> Job<F> {
    fn load(&self, file: &Arc<OwnedFd>) -> Result<PageShelf> {
        let mut shelf = PageShelf::load(file, Box::new([0; PAGE]), self.shared.boot)
            .map_err(|errno| self.shared.root.explain(errno))?;
        shelf.recover()?;
        Ok(shelf)
    }

    fn run<R>(mut self, block: bool) -> Result<Result<R>, Self>
    where
        F: FnOnce(&mut Line<'_, PageShelf, FileWorld>) -> Result<R>,
    {
        let (shared, line) = (Arc::clone(&self.shared), Arc::clone(&self.line));
        let make = self.need == Need::Line;
        let file = match self.gate.enter(&shared, &line, make, block) {
            Ok(Entry::Entered(file)) => Some(file),
            Ok(Entry::Absent) => None,
            Ok(Entry::Busy) => return Err(self),
            Err(error) => return Ok(Err(error)),
        };
        let outcome = self.run_alone(file.as_ref());
        if let Some(file) = &file {
            let _ = rustix::fs::flock(file, FlockOperation::Unlock);
        }
        Ok(outcome.and_then(|(result, words)| {
            // Also after an error: what the step did before it stands, and those who were granted must be told.
            shared.send(words);
            result
        }))
    }

    fn run_alone<R>(mut self, file: Option<&Arc<OwnedFd>>) -> Result<(Result<R>, Vec<Word>)>
    where
        F: FnOnce(&mut Line<'_, PageShelf, FileWorld>) -> Result<R>,
    {
        let explain = |errno| self.shared.root.explain(errno);
        let buffer = self.gate.buffer.take().unwrap_or_else(|| Box::new([0; PAGE]));
        let mut shelf = match file {
            Some(file) => PageShelf::load(file, buffer, self.shared.boot).map_err(explain)?,
            None => PageShelf::absent(buffer, self.shared.boot),
        };
        shelf.recover()?;
        if !shelf.belongs_to(&self.line.name) {
            if self.need != Need::Nothing {
                return Err(Error::new(
                    ErrorKind::Engine,
                    format!("{} is the file of another lock, renamed; remove it", self.line.file_name),
                ));
            }
            shelf = PageShelf::absent(shelf.into_buffer(), self.shared.boot);
        }
        // A line that nobody has written to, of a name that is in use: its file was removed under those who use it.
        let in_use = || self.shared.uses(self.line.key) || self.shared.root.marked_by_other(self.line.key);
        if self.need != Need::Nothing && shelf.fresh && in_use() {
            return Err(self.line.removed(&self.shared));
        }
        let world = FileWorld { shared: Arc::clone(&self.shared), line: Arc::clone(&self.line) };
        let mut line = Line::new(&mut shelf, &world);
        let result = (self.step)(&mut line);
        let words = line.words;
        shelf.commit(&self.line.name).map_err(explain)?;
        self.gate.buffer = Some(shelf.into_buffer());
        Ok((result, words))
    }
}

/// What the steps of a line see of the directory.
pub(crate) struct FileWorld {
    shared: Arc<Shared>,
    line: Arc<LineFile>,
}

impl World for FileWorld {
    fn line(&self) -> u64 {
        self.line.key
    }

    fn now(&self) -> Moment {
        Clock::Boot.now()
    }

    fn token(&self, last: u64) -> Result<u64> {
        self.shared.tokens.next(&self.shared.root, last)
    }

    fn alive(&self, session: Session) -> bool {
        self.shared.own_id() == Some(session) || self.shared.peers.alive(session)
    }

    fn enter(&self, owner: Owner) -> Result<()> {
        let mut uses = self.shared.uses.lock().unwrap_or_else(PoisonError::into_inner);
        let owners = uses.entry(self.line.key).or_default();
        if owners.is_empty() {
            self.shared.root.mark(self.line.key)?;
        }
        if !owners.contains(&owner) {
            owners.push(owner);
        }
        Ok(())
    }

    fn exit(&self, owner: Owner) {
        let mut uses = self.shared.uses.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(owners) = uses.get_mut(&self.line.key) else { return };
        owners.retain(|known| *known != owner);
        if owners.is_empty() {
            uses.remove(&self.line.key);
            self.shared.root.clear(self.line.key);
        }
    }
}

impl LineFile {
    pub(super) fn touch(&self, count: u64) {
        self.used.store(count, Ordering::Relaxed);
    }
}

/// Readable where possible: letters, digits, `-`, `_`, and `.` inside; the rest as `%xx`. Hashed when that gets too long.
fn file_name(name: &Name, hash: &[u8]) -> String {
    let mut text = String::new();
    for byte in name.as_str().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => text.push(char::from(byte)),
            b'.' if !text.is_empty() => text.push('.'),
            other => text.push_str(&format!("%{other:02x}")),
        }
        if text.len() > READABLE {
            let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            // `+` appears in no readable name.
            return format!("{}+{digits}", &text[..32]);
        }
    }
    text
}
