//! The rooms that the locks protect: files on which the kernel keeps its own locks. Whoever holds a lock of the engine
//! must find its room free; this depends on no clock and on no history. Only while a process is dying may its room be
//! taken although its lock is free: the kernel closes its files in whatever order.

use super::job::{Job, Target};
use fencelock::Mode;
use rustix::fs::{FlockOperation, flock};
use std::collections::HashMap;
use std::fs::File;
use std::io;

/// One worker's doors to all rooms.
#[derive(Debug)]
pub(super) struct Rooms(HashMap<String, Vec<File>>);

/// Somebody is inside until this is dropped.
#[derive(Debug)]
pub(super) struct Inside<'a>(Option<&'a File>);

impl Rooms {
    pub(super) fn open(job: &Job) -> io::Result<Self> {
        let targets = job.targets();
        let rooms = targets.into_iter().enumerate().map(|(number, target)| {
            let doors = (0..places(&target)).map(|place| {
                let path = job.dir.join(format!("room-{number}-{place}"));
                File::options().create(true).append(true).open(path)
            });
            Ok((target.name, doors.collect::<io::Result<_>>()?))
        });
        rooms.collect::<io::Result<_>>().map(Self)
    }

    /// Goes in. `None` when somebody is inside who excludes this mode.
    pub(super) fn enter(&self, name: &str, mode: Mode) -> Option<Inside<'_>> {
        let Some(doors) = self.0.get(name) else { return Some(Inside(None)) };
        let how = match mode {
            Mode::Shared => FlockOperation::NonBlockingLockShared,
            Mode::Exclusive | Mode::Permit { .. } => FlockOperation::NonBlockingLockExclusive,
        };
        doors.iter().find(|door| flock(door, how).is_ok()).map(|door| Inside(Some(door)))
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if let Some(door) = self.0 {
            let _ = flock(door, FlockOperation::Unlock);
        }
    }
}

/// How many can be inside without sharing.
fn places(target: &Target) -> u32 {
    target.modes.iter().map(|mode| if let Mode::Permit { of } = mode { *of } else { 1 }).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::super::Plan;
    use super::*;

    #[test]
    fn a_room_lets_in_whom_its_lock_lets_in() {
        let dir = tempfile::tempdir().unwrap();
        let job = Job::new(&Plan::new("memory:"), dir.path(), "x");
        let (one, two) = (Rooms::open(&job).unwrap(), Rooms::open(&job).unwrap());
        let three = Rooms::open(&job).unwrap();
        let names: Vec<String> = job.targets().into_iter().map(|target| target.name).collect();

        let inside = one.enter(&names[0], Mode::Exclusive);
        assert!(inside.is_some() && two.enter(&names[0], Mode::Exclusive).is_none());
        drop(inside);
        assert!(two.enter(&names[0], Mode::Exclusive).is_some());

        let readers = (one.enter(&names[1], Mode::Shared), two.enter(&names[1], Mode::Shared));
        assert!(readers.0.is_some() && readers.1.is_some() && three.enter(&names[1], Mode::Exclusive).is_none());

        let two_of = Mode::Permit { of: 2 };
        let permits = (one.enter(&names[2], two_of), two.enter(&names[2], two_of));
        assert!(permits.0.is_some() && permits.1.is_some() && three.enter(&names[2], two_of).is_none());
    }
}
