//! A line on disk: a head and entries of fixed size, read and written a page at a time.
//!
//! Steps are written so that a process that is killed between two system calls leaves a line that the next one understands:
//! a step that stays within the first page is one write, which the kernel does not interrupt; a larger one first
//! marks the head as dirty and writes it last, and whoever finds it dirty derives the head from the entries.

use crate::engine::line::{Entry, Head, Shelf, State};
use crate::{Claim, Error, ErrorKind, Mode, Moment, Name, Owner, Result};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

pub(super) const PAGE: usize = 4096;
const HEAD: usize = 1024;
const ENTRY: usize = 256;
const MAGIC: &[u8; 8] = b"FNCLINE1";
const NAME_AT: usize = 128;
const LABEL_AT: usize = 64;
/// So many numbers behind the first living entry, the living ones are moved to the front of the file.
const COMPACT: u64 = 4096;

/// What identifies this start of the machine: lines of an earlier one are over.
pub(super) type Boot = [u8; 16];

struct Page {
    number: u64,
    bytes: Box<[u8; PAGE]>,
    /// The end of what was changed; 0 if nothing was.
    dirty: usize,
}

/// A line file, for the time of one step, with the pages it touched.
pub(crate) struct PageShelf {
    /// `None` for a line that does not exist.
    file: Option<Arc<OwnedFd>>,
    /// The first one is page 0; the others in the order in which they were touched.
    pages: Vec<Page>,
    head: Head,
    written: Head,
    /// The number of the entry that stands first in the file.
    base: u64,
    boot: Boot,
    /// Nobody has written to this file yet.
    pub(super) fresh: bool,
}

impl PageShelf {
    /// A line without a file: empty, and never written.
    pub(super) fn absent(buffer: Box<[u8; PAGE]>, boot: Boot) -> Self {
        let first = Page { number: 0, bytes: buffer, dirty: 0 };
        let head = Head::default();
        Self { file: None, pages: vec![first], head, written: head, base: 0, boot, fresh: true }
    }

    /// Reads the head. The caller has locked the file.
    pub(super) fn load(file: &Arc<OwnedFd>, mut buffer: Box<[u8; PAGE]>, boot: Boot) -> Result<Self, Errno> {
        let length = read_at(file.as_fd(), &mut buffer[..], 0)?;
        buffer[length..].fill(0);
        let mut shelf = Self::absent(buffer, boot);
        shelf.file = Some(Arc::clone(file));
        if length < HEAD || &shelf.first()[..8] != MAGIC {
            // Empty, or cut off by a power loss: nobody who wrote it can be alive, or the rest would be there.
            shelf.first().fill(0);
            return Ok(shelf);
        }
        shelf.fresh = false;
        if shelf.first()[8..24] != boot {
            shelf.head.token = get_u64(shelf.first(), 72);
            return Ok(shelf);
        }
        shelf.base = get_u64(shelf.first(), 40);
        shelf.head = decode_head(shelf.first());
        shelf.written = shelf.head;
        Ok(shelf)
    }

    /// Whether the file, if it was written to, is that of this name.
    pub(super) fn belongs_to(&mut self, name: &Name) -> bool {
        let text = name.as_str().as_bytes();
        let length = u32::try_from(text.len()).unwrap_or(0);
        self.fresh || (get_u32(self.first(), 80) == length && self.first()[NAME_AT..NAME_AT + text.len()] == *text)
    }

    /// Derives what the head says from the entries, if a step was cut off.
    pub(super) fn recover(&mut self) -> Result<()> {
        if get_u32(self.first(), 24) == 0 || self.fresh {
            return Ok(());
        }
        let mut head = Head { first: self.head.first, waiting: self.head.end, holding: 0, mode: None, ..self.head };
        for number in head.first..head.end {
            let entry = self.get(number)?;
            match entry.state {
                State::Holding => {
                    head.holding += 1;
                    head.mode = Some(entry.mode);
                    head.token = head.token.max(entry.token);
                }
                State::Waiting => head.waiting = head.waiting.min(number),
                State::Gone => {}
            }
        }
        self.head = head;
        Ok(())
    }

    /// Writes down what the step changed.
    pub(super) fn commit(&mut self, name: &Name) -> Result<(), Errno> {
        let Some(file) = self.file.clone() else { return Ok(()) };
        let file = file.as_fd();
        if self.head.end == 0 {
            self.base = 0;
        }
        self.compact(file)?;
        let cut_off = get_u32(self.first(), 24) != 0;
        let unchanged = self.head == self.written && self.pages.iter().all(|page| page.dirty == 0);
        if unchanged && !self.fresh && !cut_off {
            return Ok(());
        }
        if self.pages.iter().skip(1).any(|page| page.dirty > 0) {
            if !self.fresh {
                write_at(file, &1u32.to_le_bytes(), 24)?;
            }
            for page in self.pages.iter().skip(1).filter(|page| page.dirty > 0) {
                write_at(file, &page.bytes[..], page.number * PAGE as u64)?;
            }
        }
        let (head, base, boot) = (self.head, self.base, self.boot);
        encode_head(self.first(), &head, base, boot);
        let mut length = NAME_AT.max(self.pages[0].dirty);
        if self.fresh {
            let (bytes, text) = (self.first(), name.as_str().as_bytes());
            put_u32(bytes, 80, u32::try_from(text.len()).unwrap_or(0));
            bytes[NAME_AT..NAME_AT + text.len()].copy_from_slice(text);
            length = length.max(HEAD);
        }
        write_at(file, &self.first()[..length], 0)
    }

    /// Moves the living entries to the front when the file has grown long behind them. What is overwritten is gone, and
    /// the old copies count until the head is written.
    fn compact(&mut self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        let passed = self.head.first.saturating_sub(self.base);
        let living = self.head.end.saturating_sub(self.head.first);
        if passed < COMPACT || living >= passed / 2 {
            return Ok(());
        }
        let mut entries = Vec::new();
        for number in self.head.first..self.head.end {
            let at = self.locate(number);
            let page = self.page(at.0)?;
            entries.extend_from_slice(&page.bytes[at.1..at.1 + ENTRY]);
        }
        let room = PAGE - HEAD;
        let (front, rest) = entries.split_at(room.min(entries.len()));
        write_at(file, rest, PAGE as u64)?;
        self.pages.truncate(1);
        let end = HEAD + front.len();
        self.first()[HEAD..end].copy_from_slice(front);
        self.pages[0].dirty = end;
        self.base = self.head.first;
        Ok(())
    }

    fn first(&mut self) -> &mut [u8; PAGE] {
        &mut self.pages[0].bytes
    }

    /// Gives the buffer back, for the next step.
    pub(super) fn into_buffer(mut self) -> Box<[u8; PAGE]> {
        self.pages.swap_remove(0).bytes
    }

    fn locate(&self, number: u64) -> (u64, usize) {
        let offset = HEAD as u64 + number.saturating_sub(self.base).saturating_mul(ENTRY as u64);
        let within = usize::try_from(offset % PAGE as u64).unwrap_or(0);
        (offset / PAGE as u64, within)
    }

    fn page(&mut self, number: u64) -> Result<&mut Page, Errno> {
        if let Some(at) = self.pages.iter().position(|page| page.number == number) {
            return Ok(&mut self.pages[at]);
        }
        let mut bytes = Box::new([0; PAGE]);
        if let Some(file) = &self.file {
            let length = read_at(file.as_fd(), &mut bytes[..], number * PAGE as u64)?;
            bytes[length..].fill(0);
        }
        self.pages.push(Page { number, bytes, dirty: 0 });
        let last = self.pages.len() - 1;
        Ok(&mut self.pages[last])
    }
}

impl Shelf for PageShelf {
    fn head(&mut self) -> &mut Head {
        &mut self.head
    }

    fn get(&mut self, number: u64) -> Result<Entry> {
        let (page, at) = self.locate(number);
        let page = self.page(page).map_err(failed)?;
        decode_entry(&page.bytes[at..at + ENTRY])
            .ok_or_else(|| Error::new(ErrorKind::Engine, "the lock's file is damaged; remove it when nobody uses the lock"))
    }

    fn put(&mut self, number: u64, entry: &Entry) -> Result<()> {
        let (page, at) = self.locate(number);
        let page = self.page(page).map_err(failed)?;
        encode_entry(&mut page.bytes[at..at + ENTRY], entry);
        page.dirty = page.dirty.max(at + ENTRY);
        Ok(())
    }
}

fn failed(errno: Errno) -> Error {
    Error::new(ErrorKind::Engine, "cannot read the lock's file").caused_by(std::io::Error::from(errno))
}

/// The name that a line file belongs to.
pub(super) fn name_of(file: BorrowedFd<'_>) -> Option<Name> {
    let mut bytes = [0; HEAD];
    let length = read_at(file, &mut bytes, 0).ok()?;
    if length < HEAD || &bytes[..8] != MAGIC {
        return None;
    }
    let length = usize::try_from(get_u32(&bytes, 80)).ok()?;
    let name = bytes.get(NAME_AT..NAME_AT.checked_add(length)?)?;
    Name::new(std::str::from_utf8(name).ok()?).ok()
}

fn read_at(file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(file, &mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

fn write_at(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], offset + done as u64) {
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn encode_mode(mode: Option<Mode>) -> (u8, u32) {
    match mode {
        None => (0, 0),
        Some(Mode::Exclusive) => (1, 0),
        Some(Mode::Shared) => (2, 0),
        Some(Mode::Permit { of }) => (3, of),
    }
}

fn decode_mode(tag: u8, of: u32) -> Option<Mode> {
    match tag {
        1 => Some(Mode::Exclusive),
        2 => Some(Mode::Shared),
        3 => Some(Mode::Permit { of }),
        _ => None,
    }
}

fn encode_head(bytes: &mut [u8; PAGE], head: &Head, base: u64, boot: Boot) {
    let (tag, of) = encode_mode(head.mode);
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(&boot);
    put_u32(bytes, 24, 0); // not dirty
    put_u32(bytes, 28, head.holding);
    put_u32(bytes, 32, u32::from(tag));
    put_u32(bytes, 36, of);
    put_u64(bytes, 40, base);
    put_u64(bytes, 48, head.first);
    put_u64(bytes, 56, head.waiting);
    put_u64(bytes, 64, head.end);
    put_u64(bytes, 72, head.token);
}

fn decode_head(bytes: &[u8; PAGE]) -> Head {
    Head {
        holding: get_u32(bytes, 28),
        mode: decode_mode(u8::try_from(get_u32(bytes, 32)).unwrap_or(0), get_u32(bytes, 36)),
        first: get_u64(bytes, 48),
        waiting: get_u64(bytes, 56),
        end: get_u64(bytes, 64),
        token: get_u64(bytes, 72),
    }
}

fn encode_entry(bytes: &mut [u8], entry: &Entry) {
    let (tag, of) = encode_mode(Some(entry.mode));
    let label = entry.label.as_bytes();
    let length = label.len().min(Claim::LABEL_MAX);
    bytes[0] = match entry.state {
        State::Gone => 1,
        State::Waiting => 2,
        State::Holding => 3,
    };
    bytes[1] = tag;
    bytes[2] = u8::try_from(length).unwrap_or(0);
    put_u32(bytes, 4, of);
    put_u64(bytes, 8, entry.session);
    bytes[16..32].copy_from_slice(&entry.owner.to_bytes());
    put_u64(bytes, 32, u64::try_from(entry.ttl.as_nanos()).unwrap_or(u64::MAX));
    put_u64(bytes, 40, entry.token);
    put_u64(bytes, 48, entry.deadline.as_nanos());
    put_u64(bytes, 56, entry.since.as_nanos());
    bytes[LABEL_AT..LABEL_AT + length].copy_from_slice(&label[..length]);
}

fn decode_entry(bytes: &[u8]) -> Option<Entry> {
    let state = match bytes[0] {
        1 => State::Gone,
        2 => State::Waiting,
        3 => State::Holding,
        _ => return None,
    };
    let mut owner = [0; 16];
    owner.copy_from_slice(&bytes[16..32]);
    let label = bytes.get(LABEL_AT..LABEL_AT + usize::from(bytes[2]))?;
    Some(Entry {
        state,
        mode: decode_mode(bytes[1], get_u32(bytes, 4))?,
        owner: Owner::from_bytes(owner),
        session: get_u64(bytes, 8),
        ttl: Duration::from_nanos(get_u64(bytes, 32)),
        token: get_u64(bytes, 40),
        deadline: Moment::from_nanos(get_u64(bytes, 48)),
        since: Moment::from_nanos(get_u64(bytes, 56)),
        label: String::from_utf8_lossy(label).into_owned(),
    })
}
