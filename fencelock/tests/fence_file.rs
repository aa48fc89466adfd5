//! The file fence with real processes that are killed and stopped in the middle of a write.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(unix)]

use fencelock::fence::file::FencedFile;
use fencelock::{ErrorKind, Token};
use fencelock_testkit::rng::Rng;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A block is long enough that it can be seen while it is being written.
const LENGTH: usize = 1 << 20;

/// The inside of a writer process: `FENCE_WRITER` holds how, where and with which token.
#[test]
fn writer_process() {
    let Ok(job) = std::env::var("FENCE_WRITER") else { return };
    let mut words = job.split(' ');
    let (how, path, token) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    let token: u64 = token.parse().unwrap();
    let file = FencedFile::new(path).unwrap();
    println!();
    for number in 0.. {
        let data = record(token, number);
        let outcome = if how == "append" {
            file.append(Token::new(token), &data)
        } else {
            file.replace(Token::new(token), &data)
        };
        match outcome {
            Ok(()) => println!("done {number}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
                println!("fenced");
                return;
            }
        }
    }
}

/// A block that tells who wrote it, and whether it is whole.
fn record(token: u64, number: u64) -> Vec<u8> {
    let word = format!("{token:08} {number:06}\n");
    word.as_bytes().iter().copied().cycle().take(LENGTH).collect()
}

/// The blocks of a file. Fails when one is not whole.
fn records(data: &[u8]) -> Vec<(u64, u64)> {
    assert_eq!(data.len() % LENGTH, 0, "{} bytes are no number of whole blocks", data.len());
    let read = |block: &[u8]| {
        let head = std::str::from_utf8(&block[..15]).unwrap();
        let (token, number) = head.split_once(' ').unwrap();
        let (token, number) = (token.parse().unwrap(), number.parse().unwrap());
        assert!(block == record(token, number), "the block {token} {number} is a mixture");
        (token, number)
    };
    data.chunks(LENGTH).map(read).collect()
}

/// A writer process. Ends with the test, whatever happens.
struct Writer {
    child: Child,
    told: mpsc::Receiver<String>,
}

impl Writer {
    fn start(how: &str, path: &Path, token: u64) -> Self {
        Self::limited(how, path, token, u64::MAX)
    }

    /// A writer that the kernel kills when a file of its grows beyond this length: in the middle of a write.
    fn limited(how: &str, path: &Path, token: u64, length: u64) -> Self {
        let limit = if length == u64::MAX { "unlimited".to_owned() } else { length.to_string() };
        let mut child = Command::new("prlimit")
            .args(["--core=0", &format!("--fsize={limit}")])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "writer_process", "--nocapture", "--quiet"])
            .env("FENCE_WRITER", format!("{how} {} {token}", path.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, told) = mpsc::channel();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok).filter(|line| line.starts_with("done") || line == "fenced") {
                let _ = tell.send(line);
            }
        });
        Self { child, told }
    }

    fn next(&self) -> String {
        self.told.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits until it has died, and returns the numbers of what it was told to be done.
    fn died(mut self) -> BTreeSet<u64> {
        let status = self.child.wait().unwrap();
        assert!(status.signal().is_some(), "{status}");
        self.kill()
    }

    /// Kills it, and returns the numbers of what it was told to be done.
    fn kill(mut self) -> BTreeSet<u64> {
        self.end();
        let number = |line: String| line.strip_prefix("done ").and_then(|number| number.parse().ok());
        self.told.iter().filter_map(number).collect()
    }
}

impl Writer {
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
fn a_writer_killed_in_the_middle_of_an_append_leaves_whole_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let file = FencedFile::new(&path).unwrap();
    let mut dice = Rng::new(3);
    let mut before: Vec<(u64, u64)> = Vec::new();
    let mut torn = 0;
    for round in 1..=30_u64 {
        let room = dice.below(3 * LENGTH as u64);
        let done = Writer::limited("append", &path, round, (before.len() * LENGTH) as u64 + room).died();
        let raw = std::fs::metadata(&path).unwrap().len();
        let content = file.read().unwrap();
        torn += usize::from(raw != content.data.len() as u64);
        assert_eq!(content.newest, Some(Token::new(round)));
        let now = records(&content.data);
        assert!(now.starts_with(&before), "what was there before is gone");
        let new: Vec<u64> = now[before.len()..].iter().map(|(_, number)| *number).collect();
        assert!(new.iter().copied().eq(0..new.len() as u64), "{new:?}");
        assert!(done.iter().copied().eq(new), "{done:?} were acknowledged");
        // The next write begins where the last whole one ended, for every reader.
        if dice.chance(30) {
            file.replace(Token::new(round), &record(round, 77)).unwrap();
        } else {
            file.append(Token::new(round), &record(round, 77)).unwrap();
        }
        before = records(&std::fs::read(&path).unwrap());
        assert_eq!(before.last(), Some(&(round, 77)));
        if before.len() > 6 {
            file.replace(Token::new(round), b"").unwrap();
            before.clear();
        }
    }
    assert!(torn > 20, "only {torn} of 30 kills hit the middle of an append");
}

#[test]
fn a_writer_killed_in_the_middle_of_a_replace_leaves_the_old_file_or_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report");
    let file = FencedFile::new(&path).unwrap();
    let mut dice = Rng::new(4);
    for round in 1..=20_u64 {
        let old = record(2 * round, 77);
        file.replace(Token::new(2 * round), &old).unwrap();
        // In the middle of writing the new one.
        let done = Writer::limited("replace", &path, 2 * round + 1, dice.below(LENGTH as u64)).died();
        assert!(done.is_empty());
        assert!(std::fs::read(&path).unwrap() == old, "readers that know nothing of fences see the old file");
        let late = file.replace(Token::new(2 * round), b"old").unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Fenced, "the newer token was let in, and stays");
        // Anywhere.
        let writer = Writer::start("replace", &path, 2 * round + 1);
        let first: u64 = writer.next().strip_prefix("done ").unwrap().parse().unwrap();
        std::thread::sleep(dice.span(Duration::from_millis(8)));
        let newest = writer.kill().last().copied().unwrap_or(first);
        let seen = records(&std::fs::read(&path).unwrap());
        assert!(seen.len() == 1 && seen[0].0 == 2 * round + 1 && seen[0].1 >= newest, "{seen:?} after {newest}");
    }
    let files = std::fs::read_dir(dir.path()).unwrap().count();
    assert!(files <= 3, "{files} files: killed writers leave no heap of them");
}

#[test]
fn plain_readers_of_a_replaced_file_never_see_half_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report");
    let writer = Writer::start("replace", &path, 1);
    writer.next();
    let mut last = 0;
    for _ in 0..300 {
        let seen = records(&std::fs::read(&path).unwrap());
        assert!(seen.len() == 1 && seen[0].1 >= last, "{seen:?} after {last}");
        last = seen[0].1;
    }
}

#[test]
fn a_stopped_writer_is_fenced_off_when_it_goes_on() {
    for (round, how) in ["append", "replace"].into_iter().cycle().take(10).enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let file = FencedFile::new(&path).unwrap().patience(Duration::from_millis(20));
        let old = Writer::start(how, &path, 1);
        old.next();
        std::thread::sleep(Rng::new(round as u64).span(Duration::from_millis(4)));
        old.signal(Signal::STOP);
        // Stopped in the middle of a write, it keeps the newer one waiting; anywhere else it does not.
        let (newer, first) = (record(2, 0), file.replace(Token::new(2), &record(2, 0)));
        match first {
            Ok(()) => old.signal(Signal::CONT),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                old.signal(Signal::CONT);
                file.clone().patience(Duration::from_secs(30)).replace(Token::new(2), &newer).unwrap();
            }
        }
        // What it told before it was stopped comes first.
        assert!((0..200).any(|_| old.next() == "fenced"), "the old writer goes on and on");
        assert_eq!(records(&std::fs::read(&path).unwrap()), [(2, 0)], "{how}");
    }
}

#[test]
fn many_writers_at_one_time_leave_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let threads: Vec<_> = (0..8_u64)
        .map(|writer| {
            let file = FencedFile::new(&path).unwrap();
            std::thread::spawn(move || {
                let mut newest = 0;
                for step in 0..20 {
                    let token = 1 + (step * 8 + writer * 5) % 160;
                    match file.replace(Token::new(token), token.to_string().as_bytes()) {
                        Ok(()) => {
                            assert!(token >= newest);
                            newest = token;
                        }
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced, "{error}"),
                    }
                }
                newest
            })
        })
        .collect();
    let newest = threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap();
    let content = FencedFile::new(&path).unwrap().read().unwrap();
    assert_eq!(content.newest, Some(Token::new(newest)));
    assert_eq!(content.data, newest.to_string().as_bytes());
}

#[test]
fn one_file_has_one_fence_however_it_is_reached() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("real")).unwrap();
    symlink("real", dir.path().join("link")).unwrap();
    let real = FencedFile::new(dir.path().join("real/data")).unwrap();
    real.replace(Token::new(5), b"five").unwrap();
    symlink("real/data", dir.path().join("other name")).unwrap();
    for way in ["link/data", "real/../real/data", "other name"] {
        let file = FencedFile::new(dir.path().join(way)).unwrap();
        assert_eq!(file.replace(Token::new(4), b"four").unwrap_err().kind(), ErrorKind::Fenced, "{way}");
        file.replace(Token::new(5), b"five").unwrap();
    }
    assert!(dir.path().join("other name").is_symlink(), "the link stays a link");
}

#[test]
fn permissions_stay_and_bad_paths_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let file = FencedFile::new(&path).unwrap();
    file.replace(Token::new(1), b"one").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    file.replace(Token::new(2), b"two").unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    for bad in ["", "/", "..", "no/such/dir/file"] {
        let error = FencedFile::new(dir.path().join(bad)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{bad}: {error}");
    }
    // A directory that cannot be written to.
    let error = FencedFile::new("/proc/fencelock-test").unwrap().replace(Token::new(1), b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Engine, "{error}");
    assert!(error.to_string().contains("/proc/fencelock-test"), "{error}");
}
