//! The engine inside of one process: the reference for all others, and the one for tests.
//!
//! It keeps time by tokio's clock, so that a test can pause and advance it. Nothing of it survives the process.

use super::line::wait::{Inbox, LineEngine, LineStore, Need, deliver_own};
use super::line::{Entry, Head, Line, Session, Shelf, Word, World};
use super::{Capability, Purpose};
use crate::url::Url;
use crate::{Clock, Error, ErrorKind, Moment, Name, Result};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// `memory:` is a room of its own, `memory:name` one that is shared within the process.
pub(crate) fn open(url: &Url) -> Result<LineEngine<MemoryStore>> {
    static SHARED: LazyLock<Mutex<HashMap<String, Arc<Room>>>> = LazyLock::new(Mutex::default);
    url.finish(&["ttl"])?;
    let room = if url.rest.is_empty() {
        Arc::default()
    } else {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(shared.entry(url.rest.clone()).or_default())
    };
    Ok(LineEngine::new(MemoryStore::new(room, format!("memory:{}", url.rest))))
}

/// All lines that a set of clients share.
#[derive(Default)]
struct Room {
    lines: Mutex<BTreeMap<Name, MemoryShelf>>,
    inboxes: Mutex<HashMap<Session, Weak<Inbox>>>,
}

impl Room {
    fn lines(&self) -> MutexGuard<'_, BTreeMap<Name, MemoryShelf>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inboxes(&self) -> MutexGuard<'_, HashMap<Session, Weak<Inbox>>> {
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct MemoryStore {
    room: Arc<Room>,
    inbox: Arc<Inbox>,
    session: Session,
    address: String,
}

impl MemoryStore {
    fn new(room: Arc<Room>, address: String) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let session = NEXT.fetch_add(1, Ordering::Relaxed);
        let inbox = Arc::new(Inbox::default());
        room.inboxes().insert(session, Arc::downgrade(&inbox));
        Self { room, inbox, session, address }
    }

    fn send(&self, words: Vec<Word>) {
        for word in deliver_own(&self.inbox, Some(self.session), words) {
            let inbox = self.room.inboxes().get(&word.to).and_then(Weak::upgrade);
            if let Some(inbox) = inbox {
                inbox.deliver(word.owner, word.line, word.news);
            }
        }
    }
}

impl Drop for MemoryStore {
    fn drop(&mut self) {
        self.room.inboxes().remove(&self.session);
    }
}

/// A line as a queue.
#[derive(Default)]
pub(crate) struct MemoryShelf {
    head: Head,
    /// The number of the first of `entries`.
    base: u64,
    entries: VecDeque<Entry>,
}

impl MemoryShelf {
    fn at(&self, number: u64) -> Result<usize> {
        number
            .checked_sub(self.base)
            .and_then(|at| usize::try_from(at).ok())
            .filter(|at| *at <= self.entries.len())
            .ok_or_else(|| Error::new(ErrorKind::Engine, "the line lost an entry; please report this"))
    }

    /// Drops what the line has passed.
    pub(super) fn trim(&mut self) {
        while self.base < self.head.first {
            self.entries.pop_front();
            self.base += 1;
        }
        self.entries.truncate(usize::try_from(self.head.end - self.base).unwrap_or(usize::MAX));
    }
}

impl Shelf for MemoryShelf {
    fn head(&mut self) -> &mut Head {
        &mut self.head
    }

    fn get(&mut self, number: u64) -> Result<Entry> {
        let at = self.at(number)?;
        self.entries
            .get(at)
            .cloned()
            .ok_or_else(|| Error::new(ErrorKind::Engine, "the line lost an entry; please report this"))
    }

    fn put(&mut self, number: u64, entry: &Entry) -> Result<()> {
        let at = self.at(number)?;
        match self.entries.get_mut(at) {
            Some(place) => *place = entry.clone(),
            None => self.entries.push_back(entry.clone()),
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.base = 0;
    }
}

pub(crate) struct MemoryWorld {
    line: u64,
}

impl World for MemoryWorld {
    fn line(&self) -> u64 {
        self.line
    }

    fn now(&self) -> Moment {
        Clock::Tokio.now()
    }

    fn token(&self, last: u64) -> Result<u64> {
        // One counter for all rooms of the process: it outlives every line.
        static NEWEST: AtomicU64 = AtomicU64::new(0);
        Ok(last.max(NEWEST.fetch_add(1, Ordering::Relaxed)) + 1)
    }

    fn alive(&self, _: Session) -> bool {
        true
    }
}

impl LineStore for MemoryStore {
    type Shelf = MemoryShelf;
    type World = MemoryWorld;

    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "memory",
            processes: false,
            machines: false,
            shared: true,
            permits: true,
            ordered: true,
            push: true,
            instant_death: true,
            durable_tokens: false,
            purpose: Purpose::Correctness,
            survives: "tasks that panic, are cancelled or hang",
            beware: "it is seen by one process only and ends with it",
        }
    }

    fn clock(&self) -> Clock {
        Clock::Tokio
    }

    fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    fn line(&self, name: &Name) -> u64 {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        hasher.finish()
    }

    async fn session(&self) -> Result<Session> {
        Ok(self.session)
    }

    async fn step<R, F>(&self, name: &Name, need: Need, step: F) -> Result<R>
    where
        R: Send + 'static,
        F: FnOnce(&mut Line<'_, MemoryShelf, MemoryWorld>) -> Result<R> + Send + 'static,
    {
        let world = MemoryWorld { line: self.line(name) };
        let (result, words) = {
            let mut lines = self.room.lines();
            let mut none = MemoryShelf::default();
            let shelf = match lines.get_mut(name) {
                Some(shelf) => shelf,
                None if need == Need::Line => lines.entry(name.clone()).or_default(),
                None => &mut none,
            };
            let mut line = Line::new(shelf, &world);
            let result = step(&mut line);
            let words = line.words;
            shelf.trim();
            if shelf.entries.is_empty() {
                lines.remove(name);
            }
            (result, words)
        };
        self.send(words);
        result
    }

    async fn watch(&self, _: &[Session]) {
        std::future::pending().await
    }

    async fn names(&self, prefix: &str) -> Result<Vec<Name>> {
        let lines = self.room.lines();
        Ok(lines.keys().filter(|name| name.as_str().starts_with(prefix)).cloned().collect())
    }
}
