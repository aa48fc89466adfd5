//! Writing histories down, one JSON line per event, and reading them back.
//!
//! An event is one `write` to a file that is opened for appending: it survives when the process is killed.

use super::{Event, What};
use fencelock::Clock;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Writes the history of one process.
#[derive(Debug)]
pub struct Recorder {
    process: u64,
    claims: AtomicU64,
    sink: Mutex<Sink>,
}

#[derive(Debug)]
enum Sink {
    Memory(Vec<Event>),
    File(File),
}

impl Recorder {
    /// Keeps the events of process `process` in memory.
    pub fn in_memory(process: u64) -> Self {
        Self { process, claims: AtomicU64::new(0), sink: Mutex::new(Sink::Memory(Vec::new())) }
    }

    /// Writes the events of process `process` to a file in `dir`, from where [`load`] takes them.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn in_dir(dir: &Path, process: u64) -> io::Result<Self> {
        let path = dir.join(format!("history-{process}.jsonl"));
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { process, claims: AtomicU64::new(0), sink: Mutex::new(Sink::File(file)) })
    }

    /// The present, as events count it.
    pub fn now() -> u64 {
        Clock::Boot.now().as_nanos()
    }

    /// A number for a new claim.
    pub fn claim(&self) -> u64 {
        self.claims.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records that something happened now.
    pub fn record(&self, claim: u64, what: What) {
        self.record_at(Self::now(), claim, what);
    }

    /// Records that something happened at a time that was taken before.
    pub fn record_at(&self, at: u64, claim: u64, what: What) {
        let event = Event { at, process: self.process, claim, what };
        match &mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Memory(events) => events.push(event),
            Sink::File(file) => {
                let mut line = serde_json::to_vec(&event).expect("an event can be written as JSON");
                line.push(b'\n');
                file.write_all(&line).expect("the history can be written");
            }
        }
    }

    /// What was recorded in memory so far.
    pub fn events(&self) -> Vec<Event> {
        match &*self.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Memory(events) => events.clone(),
            Sink::File(_) => Vec::new(),
        }
    }
}

/// Reads all histories of a directory.
///
/// # Errors
/// When a file cannot be read, or is not a history.
pub fn load(dir: &Path) -> io::Result<Vec<Event>> {
    let mut events = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            read(&std::fs::read_to_string(path)?, &mut events)?;
        }
    }
    Ok(events)
}

fn read(text: &str, events: &mut Vec<Event>) -> io::Result<()> {
    // What stands after the last line break was being written when the process was killed.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole.lines() {
        events.push(serde_json::from_str(line)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Ended, GaveUp};
    use super::*;
    use fencelock::Mode;

    #[test]
    fn a_history_survives_a_kill_in_the_middle_of_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let recorder = Recorder::in_dir(dir.path(), 7).unwrap();
        let claim = recorder.claim();
        let name = "a\n\0b".to_owned();
        let story = [
            What::Waits { name, mode: Mode::Permit { of: 3 }, ttl_ms: 500 },
            What::InLine { asked: 11 },
            What::Granted { token: u64::MAX },
            What::StillValid,
            What::Ended(Ended::Released),
            What::GaveUp(GaveUp::Stuck),
            What::Stalled { since: 3 },
        ];
        for what in &story {
            recorder.record(claim, what.clone());
        }
        let path = dir.path().join("history-7.jsonl");
        File::options().append(true).open(path).unwrap().write_all(b"{\"at\":12,").unwrap();
        let found = load(dir.path()).unwrap();
        assert!(found.iter().map(|event| &event.what).eq(story.iter()), "{found:?}");
        assert!(found.is_sorted_by_key(|event| event.at) && found.iter().all(|event| event.process == 7));
    }
}
