//! A line on disk: a head and entries of fixed size, read and written a page at a time.
//!
//! Steps are written so that a process that is killed between two system calls leaves a line that the next one understands:
//! a step that stays within the first page is one write, which the kernel does not interrupt; a larger one first
//! marks the head as dirty and writes it last, and whoever finds it dirty derives the head from the entries.

use crate::engine::line::{Entry, Head, Shelf, State};
use crate::{Claim, Error, ErrorKind, Mode, Moment, Name, Owner, Result};
use rustix::io::Errno;
use std::collections::HashSet;
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
        let mut head = Head { waiting: self.head.end, holding: 0, mode: None, gone: 0, ..self.head };
        let mut seen = HashSet::new();
        for number in head.first..head.end {
            let mut entry = self.get(number)?;
            // Gaps were being closed: what stands further ahead is the newer copy.
            if entry.state != State::Gone && !seen.insert(entry.owner) {
                entry.state = State::Gone;
                self.put(number, &entry)?;
            }
            match entry.state {
                State::Holding => {
                    head.holding += 1;
                    head.mode = Some(entry.mode);
                    head.token = head.token.max(entry.token);
                }
                State::Waiting => head.waiting = head.waiting.min(number),
                State::Gone => head.gone += 1,
            }
        }
        self.head = head;
        Ok(())
    }

    /// Writes down what the step changed.
    pub(super) fn commit(&mut self, name: &Name) -> Result<(), Errno> {
        let Some(file) = self.file.clone() else { return Ok(()) };
        let file = file.as_fd();
        self.compact(file)?;
        let cut_off = get_u32(self.first(), 24) != 0;
        let unchanged = self.head == self.written && self.pages.iter().all(|page| page.dirty == 0);
        // Who only looks leaves no trace: a file that was written to counts as made by somebody who may (see `gate`).
        if unchanged && !cut_off {
            return Ok(());
        }
        let (head, base, boot) = (self.head, self.base, self.boot);
        let mut length = NAME_AT;
        if self.pages.iter().skip(1).any(|page| page.dirty > 0) {
            self.write_pages(file)?;
        } else {
            length = length.max(self.pages[0].dirty);
        }
        encode_head(self.first(), &head, base, boot, false);
        if self.fresh {
            let (bytes, text) = (self.first(), name.as_str().as_bytes());
            put_u32(bytes, 80, u32::try_from(text.len()).unwrap_or(0));
            bytes[NAME_AT..NAME_AT + text.len()].copy_from_slice(text);
            length = length.max(HEAD);
        }
        write_at(file, &self.first()[..length], 0)
    }

    /// Writes the entries of a step that reaches beyond the first page, under the old head, marked as unfinished. In the
    /// order of the line: a holder is seen to be gone before the next one is seen to hold.
    fn write_pages(&mut self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        let (head, base, boot) = (self.written, self.base, self.boot);
        encode_head(self.first(), &head, base, boot, true);
        let length = NAME_AT.max(self.pages[0].dirty);
        write_at(file, &self.first()[..length], 0)?;
        self.pages[1..].sort_by_key(|page| page.number);
        for page in self.pages.iter().skip(1).filter(|page| page.dirty > 0) {
            write_at(file, &page.bytes[..], page.number * PAGE as u64)?;
        }
        Ok(())
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
        decode_entry(&page.bytes[at..at + ENTRY]).ok_or_else(|| {
            Error::new(ErrorKind::Engine, "the lock's file is damaged; remove it when nobody uses the lock")
        })
    }

    fn put(&mut self, number: u64, entry: &Entry) -> Result<()> {
        let (page, at) = self.locate(number);
        let page = self.page(page).map_err(failed)?;
        encode_entry(&mut page.bytes[at..at + ENTRY], entry);
        page.dirty = page.dirty.max(at + ENTRY);
        Ok(())
    }

    fn clear(&mut self) {
        // The entries beyond the first page mean nothing under the new head; under the old one, they stand as they were.
        for page in &mut self.pages[1..] {
            page.dirty = 0;
        }
        self.base = 0;
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
    #[cfg(test)]
    tests::count_write()?;
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

fn encode_head(bytes: &mut [u8; PAGE], head: &Head, base: u64, boot: Boot, unfinished: bool) {
    let (tag, of) = encode_mode(head.mode);
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(&boot);
    put_u32(bytes, 24, u32::from(unfinished));
    put_u32(bytes, 28, head.holding);
    put_u32(bytes, 32, u32::from(tag));
    put_u32(bytes, 36, of);
    put_u64(bytes, 40, base);
    put_u64(bytes, 48, head.first);
    put_u64(bytes, 56, head.waiting);
    put_u64(bytes, 64, head.end);
    put_u64(bytes, 72, head.token);
    put_u64(bytes, 96, head.gone);
}

fn decode_head(bytes: &[u8; PAGE]) -> Head {
    Head {
        holding: get_u32(bytes, 28),
        mode: decode_mode(u8::try_from(get_u32(bytes, 32)).unwrap_or(0), get_u32(bytes, 36)),
        first: get_u64(bytes, 48),
        waiting: get_u64(bytes, 56),
        end: get_u64(bytes, 64),
        token: get_u64(bytes, 72),
        gone: get_u64(bytes, 96),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::line::{Line, Session, Standing, World};
    use crate::engine::memory::MemoryShelf;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::collections::BTreeMap;

    thread_local! {
        /// How many writes the "process" still does before it is killed.
        static WRITES: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    pub(super) fn count_write() -> Result<(), Errno> {
        let left = WRITES.get();
        if left == 0 {
            return Err(Errno::CANCELED);
        }
        WRITES.set(left.saturating_sub(1));
        Ok(())
    }

    const BOOT: Boot = [7; 16];

    #[derive(Default)]
    struct Play {
        now: Cell<u64>,
        token: Cell<u64>,
        dead: std::cell::RefCell<Vec<Session>>,
    }

    impl World for Play {
        fn line(&self) -> u64 {
            1
        }
        fn now(&self) -> Moment {
            Moment::from_nanos(self.now.get())
        }
        fn token(&self, last: u64) -> Result<u64> {
            self.token.set(self.token.get().max(last) + 1);
            Ok(self.token.get())
        }
        fn alive(&self, session: Session) -> bool {
            !self.dead.borrow().contains(&session)
        }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Join(u8, u64),
        Leave(prop::sample::Index),
        Renew(prop::sample::Index),
        Die(Session),
        Wait(u64),
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0u8..3, 1u64..4).prop_map(|(mode, session)| Op::Join(mode, session)),
            5 => any::<prop::sample::Index>().prop_map(Op::Leave),
            2 => any::<prop::sample::Index>().prop_map(Op::Renew),
            1 => (2u64..4).prop_map(Op::Die),
            2 => (0u64..120).prop_map(Op::Wait),
            1 => Just(Op::Evict),
        ]
    }

    fn claim(mode: u8) -> Claim {
        Claim {
            name: Name::new("n").unwrap(),
            mode: [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }][usize::from(mode)],
            owner: Owner::random(),
            ttl: Duration::from_nanos(100),
            label: "somebody".into(),
            writer: false,
        }
    }

    /// What a step did, and what the line looks like after it.
    fn apply<S: Shelf>(shelf: &mut S, world: &Play, op: &Op, claim: &Claim, known: &[(u64, Owner)]) -> Result<String> {
        let pick = |index: &prop::sample::Index| (!known.is_empty()).then(|| known[index.index(known.len())]);
        let mut line = Line::new(shelf, world);
        let did = match op {
            Op::Join(_, session) => format!("{:?}", line.join(claim, *session)?),
            Op::Leave(index) => match pick(index) {
                Some((number, owner)) => format!("{:?}", line.leave(Some(number), owner, None)?),
                None => String::new(),
            },
            Op::Renew(index) => match pick(index) {
                Some((number, owner)) => format!("{:?}", line.renew(number, owner, None, claim.ttl)?),
                None => String::new(),
            },
            Op::Evict => format!("{:?}", line.evict()?),
            // Somebody else's next step finds out.
            Op::Die(_) | Op::Wait(_) => String::new(),
        };
        let words = std::mem::take(&mut line.words);
        Ok(format!("{did} {words:?} {:?} {:?}", line.entries()?, shelf.head()))
    }

    fn on_file(file: &Arc<OwnedFd>, step: impl FnOnce(&mut PageShelf) -> Result<String>) -> Result<String> {
        let mut shelf = PageShelf::load(file, Box::new([0; PAGE]), BOOT).map_err(failed)?;
        shelf.recover()?;
        let did = step(&mut shelf)?;
        shelf.commit(&Name::new("n")?).map_err(failed)?;
        Ok(did)
    }

    fn outside(world: &Play, op: &Op) {
        match op {
            Op::Die(session) => world.dead.borrow_mut().push(*session),
            Op::Wait(span) => world.now.set(world.now.get() + span),
            _ => {}
        }
    }

    fn scratch() -> Arc<OwnedFd> {
        Arc::new(tempfile::tempfile().unwrap().into())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// A line on disk and a line in memory are the same line.
        #[test]
        fn the_file_keeps_what_memory_keeps(ops in prop::collection::vec(op(), 1..80)) {
            let (file, mut memory) = (scratch(), MemoryShelf::default());
            let (here, there) = (Play::default(), Play::default());
            let mut known: Vec<(u64, Owner)> = Vec::new();
            for op in &ops {
                let claim = claim(if let Op::Join(mode, _) = op { *mode } else { 0 });
                outside(&here, op);
                outside(&there, op);
                if let Op::Join(..) = op {
                    known.push((memory.head().end, claim.owner));
                }
                let one = on_file(&file, |shelf| apply(shelf, &here, op, &claim, &known)).map_err(|e| e.to_string());
                let two = apply(&mut memory, &there, op, &claim, &known).map_err(|e| e.to_string());
                memory.trim();
                prop_assert_eq!(one, two);
            }
        }

        /// Killed after any number of writes, a step leaves a line in which nobody holds against anybody, nobody living is
        /// missing, and which goes on.
        #[test]
        fn a_step_that_is_cut_off_leaves_a_sound_line(
            before in 0usize..40, ops in prop::collection::vec((op(), 0usize..5), 1..30),
        ) {
            let (file, world) = (scratch(), Play::default());
            let mut known: BTreeMap<String, (u64, Owner)> = BTreeMap::new();
            let entries = |world: &Play| {
                let mut shelf = PageShelf::load(&file, Box::new([0; PAGE]), BOOT).unwrap();
                shelf.recover().unwrap();
                Line::new(&mut shelf, world).entries().unwrap()
            };
            for number in 0..before as u64 {
                let claim = claim(0);
                known.insert(claim.owner.to_string(), (number, claim.owner));
                on_file(&file, |shelf| apply(shelf, &world, &Op::Join(0, 1), &claim, &[])).unwrap();
            }
            for (op, writes) in &ops {
                let claim = claim(if let Op::Join(mode, _) = op { *mode } else { 0 });
                outside(&world, op);
                let living = entries(&world);
                let all: Vec<(u64, Owner)> = known.values().copied().collect();
                WRITES.set(*writes);
                let _ = on_file(&file, |shelf| {
                    if let Op::Join(..) = op {
                        known.insert(claim.owner.to_string(), (shelf.head().end, claim.owner));
                    }
                    apply(shelf, &world, op, &claim, &all)
                });
                WRITES.set(usize::MAX);
                // A session that is dead or a lease that is over may stand there until somebody comes by; the living ones not.
                let now = entries(&world);
                let holding: Vec<&Entry> = now.iter().filter(|entry| entry.state == State::Holding).collect();
                let modes: Vec<Mode> = holding.iter().map(|entry| entry.mode).collect();
                prop_assert_eq!(crate::engine::rule::holders(&modes), modes.len(), "{:?} after {:?}", now, op);
                if matches!(op, Op::Join(..) | Op::Die(_) | Op::Wait(_)) {
                    for entry in &living {
                        prop_assert!(now.iter().any(|other| other.owner == entry.owner), "{entry:?} vanished in {op:?}");
                    }
                }
            }
            // Whatever happened, the line moves on: everybody leaves, and it is empty.
            while let Some(entry) = entries(&world).first().cloned() {
                on_file(&file, |shelf| {
                    let mut line = Line::new(shelf, &world);
                    line.reap()?;
                    line.settle()?;
                    line.leave(None, entry.owner, None)?;
                    Ok(String::new())
                }).unwrap();
            }
        }
    }

    /// The holder is in the first page, the next one in line beyond it, and the process that hands over is killed after each
    /// possible number of writes.
    #[test]
    fn a_hand_over_across_pages_that_is_cut_off_makes_no_second_holder() {
        for writes in 0..5 {
            let (file, world) = (scratch(), Play::default());
            let claims: Vec<Claim> = (0..20).map(|_| claim(0)).collect();
            for claim in &claims {
                on_file(&file, |shelf| apply(shelf, &world, &Op::Join(0, 1), claim, &[])).unwrap();
            }
            for (number, claim) in (0..).zip(&claims).skip(1).take(14) {
                on_file(&file, |shelf| {
                    Ok(format!("{:?}", Line::new(shelf, &world).leave(Some(number), claim.owner, None)?))
                })
                .unwrap();
            }
            WRITES.set(writes);
            let done = on_file(&file, |shelf| Ok(format!("{}", Line::new(shelf, &world).evict()?))).is_ok();
            WRITES.set(usize::MAX);
            let mut shelf = PageShelf::load(&file, Box::new([0; PAGE]), BOOT).unwrap();
            shelf.recover().unwrap();
            let all: Vec<Entry> = (0..20).map(|number| shelf.get(number).unwrap()).collect();
            let holding = all.iter().filter(|entry| entry.state == State::Holding).count();
            assert!(holding <= 1, "{holding} hold after {writes} writes");
            assert_eq!(shelf.head().holding as usize, holding, "after {writes} writes");
            // The line goes on from there.
            let mut line = Line::new(&mut shelf, &world);
            line.settle().unwrap();
            assert_eq!(shelf.head().holding, 1);
            assert!(done || writes < 3, "a hand-over across two pages takes three writes");
        }
    }

    #[test]
    fn who_only_looks_does_not_make_a_line() {
        let (file, world) = (scratch(), Play::default());
        on_file(&file, |shelf| Ok(format!("{:?}", Line::new(shelf, &world).entries()?))).unwrap();
        on_file(&file, |shelf| Ok(format!("{:?}", Line::new(shelf, &world).leave(None, Owner::random(), None)?)))
            .unwrap();
        assert!(PageShelf::load(&file, Box::new([0; PAGE]), BOOT).unwrap().fresh);
    }

    #[test]
    fn a_line_that_is_never_empty_does_not_grow_for_ever() {
        let (file, world) = (scratch(), Play::default());
        let mut last: Option<(u64, Owner)> = None;
        for _ in 0..3 * COMPACT {
            let claim = claim(0);
            on_file(&file, |shelf| {
                let mut line = Line::new(shelf, &world);
                let (number, standing) = line.join(&claim, 1)?;
                if let Some((number, owner)) = last.replace((number, claim.owner)) {
                    assert!(matches!(standing, Standing::Waits { .. }));
                    line.leave(Some(number), owner, None)?;
                }
                Ok(String::new())
            })
            .unwrap();
        }
        let size = rustix::fs::fstat(&file).unwrap().st_size;
        assert!(size < 3 * 1024 * 1024, "the file has {size} bytes");
    }

    #[test]
    fn a_line_of_an_earlier_start_of_the_machine_is_over_but_its_token_counts() {
        let (file, world) = (scratch(), Play::default());
        on_file(&file, |shelf| apply(shelf, &world, &Op::Join(0, 1), &claim(0), &[])).unwrap();
        let mut shelf = PageShelf::load(&file, Box::new([0; PAGE]), [8; 16]).unwrap();
        assert_eq!((shelf.head().end, shelf.head().token), (0, 1));
        let mut shelf = PageShelf::load(&file, Box::new([0; PAGE]), BOOT).unwrap();
        assert_eq!(shelf.head().end, 1);
    }
}
