//! A file that refuses an old holder: whole-file replace and append, each all or nothing, with the token in a file beside it.
//!
//! Next to `report.csv` lies `.report.csv.fence`, which is locked (by the kernel, so a dead writer's lock is gone) for
//! as long as a write takes, and holds the highest token and what an append is about to do. The token is on the disk before the first
//! byte of the data is written: a crash can lose a write that nobody was told of, never a token that was let in.

use super::fenced;
use crate::{Error, ErrorKind, Result, Token};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind as Io, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a write waits for another one of the same file, unless told otherwise.
const PATIENCE: Duration = Duration::from_secs(30);

/// A file that only the newest holder can change.
///
/// All its methods block, on the disk and on other writers of the same file: on a runtime, call them in
/// `tokio::task::spawn_blocking`. The file must be changed through fences only, all of them on one machine: the
/// kernel's locks, as network file systems offer them, are not something that this relies on.
///
/// # Crashes
/// A writer that is killed, or a machine that loses power, in the middle of a write leaves the file as it was before. What
/// an append left half-done is cut off by the next write or read. After `Ok`, the data is on the disk.
///
/// # A writer that is stopped in the middle
/// An old writer that is *stopped* (SIGSTOP, a suspended virtual machine) while it writes holds the kernel's lock until it goes on
/// or dies. Newer writers wait for it, with the [patience](FencedFile::patience) that they have, and get `Timeout` then.
///
/// ```
/// # use fencelock::{fence::file::FencedFile, ErrorKind, Token};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("report.csv");
/// let report = FencedFile::new(path)?;
/// report.replace(Token::new(8), b"by the new holder\n")?;
/// let late = report.replace(Token::new(7), b"by an old one\n").unwrap_err();
/// assert_eq!(late.kind(), ErrorKind::Fenced);
/// assert_eq!(report.read()?.data, b"by the new holder\n");
/// # Ok::<(), fencelock::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FencedFile {
    /// With its directory resolved, so that one file has one fence.
    path: PathBuf,
    fence: PathBuf,
    staged: PathBuf,
    patience: Duration,
}

/// What a fenced file held at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Content {
    /// The data; empty when there is no file yet.
    pub data: Vec<u8>,
    /// The newest token that was let in, if there ever was one.
    pub newest: Option<Token>,
}

impl FencedFile {
    /// The file at this path, which need not exist yet; its directory must. Touches nothing.
    ///
    /// # Errors
    /// `Invalid` when the path names no file, or its directory cannot be found.
    pub fn new(path: impl AsRef<Path>) -> Result<Self> {
        let path = resolve(path.as_ref())?;
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Err(no_file(&path)) };
        let beside = |ending: &str| {
            let mut hidden = std::ffi::OsString::from(".");
            hidden.push(name);
            hidden.push(ending);
            dir.join(hidden)
        };
        let (fence, staged) = (beside(".fence"), beside(".fence.new"));
        Ok(Self { path, fence, staged, patience: PATIENCE })
    }

    /// How long to wait for another write of the same file; 30 s unless told otherwise.
    #[must_use]
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets this token in, and returns what the file holds: from here on, nobody older can change it. The first step of whoever
    /// reads, computes and writes back.
    ///
    /// # Errors
    /// `Fenced` when a newer token was let in before. `Timeout` when another write goes on for too long.
    pub fn raise(&self, token: Token) -> Result<Content> {
        self.guarded("raise", || {
            let mut beside = self.lock(true)?;
            self.mend(&beside)?;
            self.admit(&mut beside, token)?;
            Ok(Content { data: self.data()?, newest: Some(token) })
        })
    }

    /// Replaces the whole file: readers see the old data or the new, and never a mixture. The file keeps its permissions.
    ///
    /// # Errors
    /// `Fenced` when a newer token was let in before: the file is unchanged. `Timeout` as for [`raise`](FencedFile::raise).
    /// `Engine` when the disk is full or the file cannot be written: it is unchanged.
    pub fn replace(&self, token: Token, data: &[u8]) -> Result<()> {
        self.guarded("replace", || {
            let mut beside = self.lock(true)?;
            self.mend(&beside)?;
            self.admit(&mut beside, token)?;
            self.stage(data)?;
            fs::rename(&self.staged, &self.path)?;
            self.flush_directory()?;
            Ok(())
        })
    }

    /// Adds to the end of the file: all of the data, or nothing. Readers that do not use [`read`](FencedFile::read) can see a part
    /// of what is being added.
    ///
    /// # Errors
    /// As [`replace`](FencedFile::replace).
    pub fn append(&self, token: Token, data: &[u8]) -> Result<()> {
        self.guarded("append", || {
            let mut beside = self.lock(true)?;
            self.mend(&beside)?;
            let beside = self.permit(&mut beside, token)?;
            let (file, created) = open_or_create(&self.path)?;
            let about = file.metadata()?;
            let plan = Plan { inode: about.ino(), from: about.len(), length: data.len() as u64, sum: checksum(data) };
            beside.write(&Record { token: token.as_u64(), plan, ..beside.record })?;
            if let Err(error) = file.write_all_at(data, plan.from).and_then(|()| file.sync_data()) {
                // The disk is full, say. The next write would cut it off too, but plain readers would see it until then.
                let _ = file.set_len(plan.from);
                return Err(error.into());
            }
            if created {
                self.flush_directory()?;
            }
            Ok(())
        })
    }

    /// What the file holds, without what a crash left half-done; waits for a write that is going on.
    ///
    /// # Errors
    /// `Timeout` when another write goes on for too long. `Engine` when the file cannot be read.
    pub fn read(&self) -> Result<Content> {
        self.guarded("read", || {
            let beside = match self.lock(false) {
                Err(Trouble::System(error)) if error.kind() == Io::NotFound => {
                    return Ok(Content { data: self.data()?, newest: None });
                }
                locked => locked?,
            };
            let mut data = self.data()?;
            if let Some(length) = self.torn(&beside.record.plan)? {
                data.truncate(usize::try_from(length).unwrap_or(usize::MAX));
            }
            let newest = (beside.record.number > 0).then(|| Token::new(beside.record.token));
            Ok(Content { data, newest })
        })
    }

    fn guarded<T>(&self, what: &'static str, work: impl FnOnce() -> Result<T, Trouble>) -> Result<T> {
        work().map_err(|trouble| match trouble {
            Trouble::Told(error) => error,
            Trouble::System(error) => {
                let text = format!(
                    "{} cannot be used; check that it, and files beside it, can be written",
                    self.path.display()
                );
                Error::new(ErrorKind::Engine, text).caused_by(error).during(what)
            }
        })
    }

    /// Refuses an older token; keeps a newer one, on the disk, before anything else is done. The plan of an append goes with that: it
    /// has been dealt with, and the number of its inode may come to mean another file.
    fn admit(&self, beside: &mut Beside, token: Token) -> Result<(), Trouble> {
        let beside = self.permit(beside, token)?;
        let next = Record { token: token.as_u64(), plan: Plan::default(), ..beside.record };
        if beside.record.number == 0 || beside.record != next {
            beside.write(&next)?;
        }
        Ok(())
    }

    /// Refuses an older token.
    fn permit<'a>(&self, beside: &'a mut Beside, token: Token) -> Result<&'a mut Beside, Trouble> {
        let newest = Token::new(beside.record.token);
        if beside.record.number > 0 && token < newest {
            return Err(Trouble::Told(fenced(&self.path.display().to_string(), token, newest)));
        }
        Ok(beside)
    }

    /// Opens the file beside, and locks it against all other fences of this file.
    fn lock(&self, create: bool) -> Result<Beside, Trouble> {
        let until = Instant::now() + self.patience;
        loop {
            let (file, created) = if create { open_or_create(&self.fence)? } else { (File::open(&self.fence)?, false) };
            if created {
                self.flush_directory()?;
            }
            let left = until.saturating_duration_since(Instant::now());
            let Some(file) = locked(file, left)? else { return Err(Trouble::Told(self.busy())) };
            // Somebody may have removed it between our opening and our locking it: then others lock another file.
            if is_at(&file, &self.fence)? {
                return Ok(Beside::new(file)?);
            }
        }
    }

    fn busy(&self) -> Error {
        let text = format!(
            "another write of {} has been going on for {:?}; is its process stopped? `fuser {}` names it",
            self.path.display(),
            self.patience,
            self.fence.display()
        );
        Error::new(ErrorKind::Timeout, text)
    }

    fn data(&self) -> io::Result<Vec<u8>> {
        match fs::read(&self.path) {
            Err(error) if error.kind() == Io::NotFound => Ok(Vec::new()),
            read => read,
        }
    }

    /// Cuts off what an append left half-done when its process died.
    fn mend(&self, beside: &Beside) -> io::Result<()> {
        let Some(length) = self.torn(&beside.record.plan)? else { return Ok(()) };
        let file = OpenOptions::new().write(true).open(&self.path)?;
        file.set_len(length)?;
        file.sync_data()
    }

    /// The length that the file had before an append that did not come to its end, if the last one did not.
    fn torn(&self, plan: &Plan) -> io::Result<Option<u64>> {
        if plan.length == 0 {
            return Ok(None);
        }
        let file = match File::open(&self.path) {
            Err(error) if error.kind() == Io::NotFound => return Ok(None),
            opened => opened?,
        };
        let about = file.metadata()?;
        let end = plan.from.saturating_add(plan.length);
        // Another file, or one that was changed from outside since: the plan says nothing about it.
        if about.ino() != plan.inode || about.len() <= plan.from || about.len() > end {
            return Ok(None);
        }
        if about.len() == end {
            let mut data = vec![0; usize::try_from(plan.length).map_err(io::Error::other)?];
            file.read_exact_at(&mut data, plan.from)?;
            if checksum(&data) == plan.sum {
                return Ok(None);
            }
        }
        Ok(Some(plan.from))
    }

    /// Writes the new data into a file of its own, with the permissions of the old one. Only who holds the lock gets here, so what
    /// a dead writer left is written over.
    fn stage(&self, data: &[u8]) -> io::Result<()> {
        let mut staged = OpenOptions::new().write(true).create(true).truncate(true).open(&self.staged)?;
        if let Ok(about) = fs::metadata(&self.path) {
            staged.set_permissions(fs::Permissions::from_mode(about.mode() & 0o7777))?;
        }
        let written = staged.write_all(data).and_then(|()| staged.sync_all());
        if written.is_err() {
            // The room is wanted; the next write would do it too.
            let _ = fs::remove_file(&self.staged);
        }
        written
    }

    fn flush_directory(&self) -> io::Result<()> {
        self.path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
    }
}

/// What goes wrong on the way: something that is told as it is, or the system's word.
enum Trouble {
    Told(Error),
    System(io::Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Trouble::System(error)
    }
}

fn no_file(path: &Path) -> Error {
    Error::invalid(format!("{} names no file; give the path of the file to write", path.display()))
}

/// The path with links followed: who comes by another way meets the same fence.
fn resolve(path: &Path) -> Result<PathBuf> {
    if let Ok(known) = fs::canonicalize(path) {
        return if known.is_dir() { Err(no_file(path)) } else { Ok(known) };
    }
    let name = path.file_name().ok_or_else(|| no_file(path))?;
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let dir = fs::canonicalize(dir).map_err(|error| {
        Error::invalid(format!("the directory of {} cannot be found; create it first", path.display())).caused_by(error)
    })?;
    Ok(dir.join(name))
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// The file, and whether it was created just now: then its directory must be flushed.
fn open_or_create(path: &Path) -> io::Result<(File, bool)> {
    loop {
        match open(path) {
            Err(error) if error.kind() == Io::NotFound => {}
            opened => return opened.map(|file| (file, false)),
        }
        match OpenOptions::new().read(true).write(true).create_new(true).open(path) {
            Err(error) if error.kind() == Io::AlreadyExists => {}
            created => return created.map(|file| (file, true)),
        }
    }
}

/// The file, locked; `None` when that takes too long.
///
/// Only the kernel knows who waits, and it has no time limit: so a thread waits, and lets go of the lock if it comes too late.
fn locked(file: File, patience: Duration) -> io::Result<Option<File>> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(Some(file)),
        Err(Errno::WOULDBLOCK | Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let (tell, told) = mpsc::channel();
    let wait = move || {
        let outcome = loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                outcome => break outcome,
            }
        };
        let _ = tell.send(outcome.map(|()| file));
    };
    std::thread::Builder::new().name("fence".to_owned()).spawn(wait)?;
    match told.recv_timeout(patience) {
        Ok(outcome) => Ok(Some(outcome?)),
        Err(_) => Ok(None),
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (ours, there) = (file.metadata()?, fs::metadata(path));
    Ok(there.is_ok_and(|there| there.dev() == ours.dev() && there.ino() == ours.ino()))
}

const MAGIC: &[u8; 8] = b"FNCFILE1";
const RECORD: usize = 64;
/// Two places a sector apart, written in turn: a torn write of one leaves the other.
const PLACES: [u64; 2] = [0, 512];

/// What lies in the file beside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Record {
    /// Counts the writes; the place with the higher number counts. 0 when there was none.
    number: u64,
    /// The newest token that was let in.
    token: u64,
    plan: Plan,
}

/// What the last append was about to do; a length of 0 when there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Plan {
    inode: u64,
    from: u64,
    length: u64,
    sum: u64,
}

impl Record {
    fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..8].copy_from_slice(MAGIC);
        let words = [self.number, self.token, self.plan.inode, self.plan.from, self.plan.length, self.plan.sum];
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let sum = checksum(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; RECORD] = bytes.try_into().ok()?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let whole = &bytes[..8] == MAGIC && word(56) == checksum(&bytes[..56]);
        let plan = Plan { inode: word(24), from: word(32), length: word(40), sum: word(48) };
        whole.then(|| Self { number: word(8), token: word(16), plan })
    }
}

/// The file beside, locked until this is dropped.
struct Beside {
    file: File,
    record: Record,
}

impl Beside {
    fn new(mut file: File) -> io::Result<Self> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let at = |place: u64| {
            let from = usize::try_from(place).ok()?;
            Record::decode(bytes.get(from..from + RECORD)?)
        };
        let record = PLACES.into_iter().filter_map(at).max_by_key(|record| record.number);
        if record.is_none() && bytes.len() >= RECORD && bytes.iter().any(|byte| *byte != 0) {
            // A first record that was torn is shorter, or all zero; this is something else, and forgetting a token is not safe.
            return Err(io::Error::new(
                Io::InvalidData,
                "the file beside it that keeps the token is damaged; restore it, or remove it when no old holder can be left",
            ));
        }
        Ok(Self { file, record: record.unwrap_or_default() })
    }

    /// Keeps the record, on the disk, in the place of the older one.
    fn write(&mut self, record: &Record) -> io::Result<()> {
        let record = Record { number: self.record.number + 1, ..*record };
        let place = PLACES[usize::from(record.number.is_multiple_of(2))];
        self.file.write_all_at(&record.encode(), place)?;
        self.file.sync_data()?;
        self.record = record;
        Ok(())
    }
}

/// FNV-1a: finds what a crash tore, and is not meant to find what somebody forged.
fn checksum(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn place() -> (tempfile::TempDir, FencedFile) {
        let dir = tempfile::tempdir().unwrap();
        let file = FencedFile::new(dir.path().join("data")).unwrap();
        (dir, file)
    }

    #[test]
    fn a_torn_record_leaves_the_one_before() {
        let (_dir, file) = place();
        file.replace(Token::new(5), b"five").unwrap();
        file.replace(Token::new(6), b"six").unwrap();
        let before = fs::read(&file.fence).unwrap();
        let newer = Record::decode(&before[512..576]).unwrap();
        assert_eq!((newer.number, newer.token), (2, 6), "the second record is in the second place");
        for kept in 0..RECORD {
            // The next record goes to the first place; only a part of it arrives.
            let next = Record { number: 3, token: 7, plan: Plan::default() }.encode();
            let mut torn = before.clone();
            torn[..kept].copy_from_slice(&next[..kept]);
            fs::write(&file.fence, &torn).unwrap();
            assert_eq!(file.read().unwrap().newest, Some(Token::new(6)), "{kept} bytes arrived");
        }
    }

    #[test]
    fn an_append_that_did_not_come_to_its_end_is_cut_off() {
        for kept in 0..=6 {
            let (_dir, file) = place();
            file.append(Token::new(1), b"whole\n").unwrap();
            // What a process leaves that dies after so many bytes.
            let mut beside = Beside::new(open(&file.fence).unwrap()).unwrap();
            let inode = fs::metadata(&file.path).unwrap().ino();
            let plan = Plan { inode, from: 6, length: 6, sum: checksum(b"second") };
            let record = beside.record;
            beside.write(&Record { token: 2, plan, ..record }).unwrap();
            open(&file.path).unwrap().write_all_at(&b"second"[..kept], 6).unwrap();
            drop(beside);
            let expected: &[u8] = if kept == 6 { b"whole\nsecond" } else { b"whole\n" };
            assert_eq!(file.read().unwrap().data, expected, "{kept} bytes were written");
            file.append(Token::new(3), b"!").unwrap();
            assert_eq!(fs::read(&file.path).unwrap(), [expected, b"!"].concat(), "{kept} bytes were written");
        }
    }

    #[test]
    fn a_damaged_fence_is_not_taken_for_a_new_one() {
        let (_dir, file) = place();
        file.replace(Token::new(9), b"nine").unwrap();
        fs::write(&file.fence, [0x55; 600]).unwrap();
        let error = file.replace(Token::new(1), b"one").unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        assert_eq!(fs::read(&file.path).unwrap(), b"nine");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is done in whatever order, the file is what a writer would have made that knows the rule.
        #[test]
        fn the_file_follows_the_rule(steps in prop::collection::vec((0_u8..4, 0_u64..6, prop::collection::vec(any::<u8>(), 0..20)), 1..12)) {
            let (_dir, file) = place();
            let (mut data, mut newest) = (Vec::new(), None);
            for (what, token, bytes) in steps {
                let token = Token::new(token);
                let old = newest.is_some_and(|newest| token < newest);
                let outcome = match what {
                    0 => file.replace(token, &bytes),
                    1 => file.append(token, &bytes),
                    2 => file.raise(token).map(|content| assert_eq!(content.data, data)),
                    _ => { prop_assert_eq!(file.read().unwrap(), Content { data: data.clone(), newest }); continue }
                };
                match outcome {
                    Err(error) => {
                        prop_assert!(old);
                        prop_assert_eq!(error.kind(), ErrorKind::Fenced);
                    }
                    Ok(()) => {
                        prop_assert!(!old);
                        newest = Some(token);
                        match what { 0 => data = bytes, 1 => data.extend(bytes), _ => {} }
                    }
                }
                prop_assert_eq!(&fs::read(&file.path).unwrap_or_default(), &data);
            }
        }

        #[test]
        fn records_survive_being_written(number: u64, token: u64, inode: u64, from: u64, length: u64, sum: u64) {
            let record = Record { number, token, plan: Plan { inode, from, length, sum } };
            prop_assert_eq!(Record::decode(&record.encode()), Some(record));
        }
    }
}
