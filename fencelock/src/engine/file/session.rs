//! A client's presence in the directory: a byte lock that the kernel drops when the process dies, and a FIFO that is both
//! its inbox and the means by which others are told of its death.
//!
//! The process keeps the reading end of its FIFO open. Others write words to it; and whoever waits behind it keeps the
//! writing end in its poll set: when the last reader is gone, however it went, the kernel reports an error condition there.

use super::root::{Root, create_fifo};
use crate::engine::line::wait::Inbox;
use crate::engine::line::{News, Place, Session, Word};
use crate::{Mode, Moment, Owner, Result};
use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::unix::pipe;

/// Session ids have this bit, the keys of names do not.
pub(super) const SESSION_BIT: u64 = 1 << 63;
/// A word on the wire; far below PIPE_BUF, so written and read in one piece.
const WORD: usize = 56;
/// How many leftovers of dead sessions one newcomer removes at most.
const SWEEP: usize = 256;
/// How many writing ends are kept open.
const PEERS: usize = 64;

/// This client's own session.
pub(super) struct Own {
    pub(super) id: Session,
    inbox: OwnedFd,
    root: Arc<Root>,
}

impl Own {
    /// Makes the session known: first the byte lock, so that from then on it counts as alive.
    pub(super) fn open(root: &Arc<Root>) -> Result<Self> {
        let id = Owner::random().to_bytes();
        let mut word = [0; 8];
        word.copy_from_slice(&id[..8]);
        let id = u64::from_le_bytes(word) | SESSION_BIT;
        root.mark(id)?;
        let made = create_fifo(&root.sessions, &file_name(id), root.mode).and_then(|()| {
            // Open for writing as well, so that the last foreign writer's leaving does not look like an end of file.
            open(root, id, OFlags::RDWR)
        });
        match made {
            Ok(inbox) => Ok(Self { id, inbox, root: Arc::clone(root) }),
            Err(errno) => {
                root.clear(id);
                Err(root.explain(errno))
            }
        }
    }

    /// Receives words for ever.
    pub(super) async fn receive(&self, inbox: &Inbox) {
        let Ok(copy) = self.inbox.try_clone() else { return };
        let Ok(fifo) = pipe::Receiver::from_owned_fd(copy) else { return };
        let mut buffer = [0; WORD * 64];
        loop {
            if fifo.readable().await.is_err() {
                return;
            }
            match fifo.try_read(&mut buffer) {
                Ok(length) => {
                    for (owner, line, news) in buffer[..length].chunks_exact(WORD).filter_map(decode) {
                        inbox.deliver(owner, line, news);
                    }
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(_) => return,
            }
        }
    }
}

impl Own {
    /// Takes the inbox away: nothing is waited for any more.
    pub(super) fn close(&self) {
        let _ = rustix::fs::unlinkat(&self.root.sessions, file_name(self.id), AtFlags::empty());
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.close();
        self.root.clear(self.id);
    }
}

/// The sessions of others.
pub(super) struct Peers {
    root: Arc<Root>,
    writers: Mutex<HashMap<Session, OwnedFd>>,
    deaths: Mutex<HashMap<Session, Weak<pipe::Sender>>>,
}

impl Peers {
    pub(super) fn new(root: &Arc<Root>) -> Self {
        Self { root: Arc::clone(root), writers: Mutex::default(), deaths: Mutex::default() }
    }

    pub(super) fn alive(&self, session: Session) -> bool {
        self.root.marked_by_other(session)
    }

    /// Writes a word into another session's inbox. Never blocks: if the inbox is full or gone, that session finds out when
    /// it looks for itself.
    pub(super) fn send(&self, word: &Word) {
        let mut writers = lock(&self.writers);
        if !writers.contains_key(&word.to) {
            let Ok(fifo) = open(&self.root, word.to, OFlags::WRONLY) else { return };
            if writers.len() >= PEERS {
                writers.clear();
            }
            writers.insert(word.to, fifo);
        }
        let Some(fifo) = writers.get(&word.to) else { return };
        match rustix::io::write(fifo, &encode(word)) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => drop(writers.remove(&word.to)),
        }
    }

    /// Resolves when one of these has died.
    pub(super) async fn death(&self, sessions: &[Session]) {
        match sessions {
            [] => std::future::pending().await,
            [one] => self.one_death(*one).await,
            many => {
                let deaths = many.iter().map(|session| Box::pin(self.one_death(*session)));
                futures_util::future::select_all(deaths).await;
            }
        }
    }

    async fn one_death(&self, session: Session) {
        match self.death_watch(session) {
            Ok(watch) => {
                let _ = watch.ready(Interest::ERROR).await;
            }
            // Nobody reads it, or it is gone: the session is dead, unless its files were removed under it.
            Err(Errno::NXIO | Errno::NOENT) => {}
            Err(_) => std::future::pending().await,
        }
        // The kernel closes a dead process's files one after the other: the byte lock may outlast the FIFO for a moment.
        let mut pause = Duration::from_millis(1);
        for turn in 0.. {
            if !self.alive(session) {
                return;
            }
            if turn < 64 {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }

    /// One descriptor per watched session, however many wait behind it.
    fn death_watch(&self, session: Session) -> Result<Arc<pipe::Sender>, Errno> {
        let mut deaths = lock(&self.deaths);
        if let Some(watch) = deaths.get(&session).and_then(Weak::upgrade) {
            return Ok(watch);
        }
        let fifo = open(&self.root, session, OFlags::WRONLY)?;
        let watch = pipe::Sender::from_owned_fd(fifo).map_err(|_| Errno::IO)?;
        let watch = Arc::new(watch);
        deaths.retain(|_, watch| watch.strong_count() > 0);
        deaths.insert(session, Arc::downgrade(&watch));
        Ok(watch)
    }

    /// Removes what dead sessions left behind, a bounded number of them.
    pub(super) fn sweep(&self, own: Session) {
        let Ok(dir) = rustix::fs::Dir::read_from(&self.root.sessions) else { return };
        for entry in dir.flatten().take(SWEEP) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(session) = u64::from_str_radix(&name, 16) else { continue };
            if session != own && session & SESSION_BIT != 0 && !self.alive(session) {
                let _ = rustix::fs::unlinkat(&self.root.sessions, name, AtFlags::empty());
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn file_name(session: Session) -> String {
    format!("{session:016x}")
}

fn open(root: &Root, session: Session, access: OFlags) -> Result<OwnedFd, Errno> {
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(&root.sessions, file_name(session), flags, rustix::fs::Mode::empty())
}

fn encode(word: &Word) -> [u8; WORD] {
    let mut bytes = [0; WORD];
    bytes[..16].copy_from_slice(&word.owner.to_bytes());
    bytes[48..56].copy_from_slice(&word.line.to_le_bytes());
    match word.news {
        News::Lost => bytes[16] = 1,
        News::Granted(place) => {
            let (tag, of) = match place.mode {
                Mode::Exclusive => (1, 0),
                Mode::Shared => (2, 0),
                Mode::Permit { of } => (3, of),
            };
            bytes[16] = 2;
            bytes[17] = tag;
            bytes[20..24].copy_from_slice(&of.to_le_bytes());
            bytes[24..32].copy_from_slice(&place.number.to_le_bytes());
            bytes[32..40].copy_from_slice(&place.token.to_le_bytes());
            bytes[40..48].copy_from_slice(&place.from.as_nanos().to_le_bytes());
        }
    }
    bytes
}

fn decode(bytes: &[u8]) -> Option<(Owner, u64, News)> {
    let number = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    let owner = Owner::from_bytes(bytes.get(..16)?.try_into().ok()?);
    let news = match bytes.get(16)? {
        1 => News::Lost,
        2 => News::Granted(Place {
            mode: match bytes.get(17)? {
                1 => Mode::Exclusive,
                2 => Mode::Shared,
                3 => Mode::Permit { of: u32::from_le_bytes(bytes.get(20..24)?.try_into().ok()?) },
                _ => return None,
            },
            number: number(24)?,
            token: number(32)?,
            from: Moment::from_nanos(number(40)?),
        }),
        _ => return None,
    };
    Some((owner, number(48)?, news))
}
