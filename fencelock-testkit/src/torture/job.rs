//! What a worker process is told: which locks there are, how they are used, when to stop.

use super::Plan;
use crate::history::Recorder;
use fencelock::Mode;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The work of one process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) url: String,
    /// Where histories and rooms are.
    pub(super) dir: PathBuf,
    /// With what the names of this torture's locks begin.
    pub(super) prefix: String,
    /// The number of this process; another one after a restart.
    pub(super) process: u64,
    pub(super) workers: u32,
    pub(super) names: u32,
    pub(super) ttl: Duration,
    pub(super) hold: Duration,
    /// Whether the engine has read/write locks, and semaphores.
    pub(super) offered: (bool, bool),
    pub(super) patience: Duration,
    /// In nanoseconds since boot.
    pub(super) ends: u64,
    pub(super) seed: u64,
}

/// A lock and how it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) name: String,
    pub(super) modes: Vec<Mode>,
}

impl Job {
    pub(super) fn new(plan: &Plan, dir: &Path, prefix: &str) -> Self {
        let lasts = u64::try_from(plan.lasts.as_nanos()).unwrap_or(u64::MAX);
        Self {
            url: plan.url.clone(),
            dir: dir.to_owned(),
            prefix: prefix.to_owned(),
            process: 0,
            workers: plan.workers,
            names: plan.names,
            ttl: plan.ttl,
            hold: plan.hold,
            offered: (true, true),
            patience: plan.patience,
            ends: Recorder::now().saturating_add(lasts),
            seed: plan.seed,
        }
    }

    pub(super) fn of_process(&self, process: u64) -> Self {
        Self { process, seed: self.seed.wrapping_add(process << 20), ..self.clone() }
    }

    pub(super) fn is_over(&self) -> bool {
        Recorder::now() >= self.ends
    }

    /// The locks: mutexes, read/write locks and semaphores in turn.
    pub(super) fn targets(&self) -> Vec<Target> {
        (0..self.names.max(1)).map(|number| self.target(number)).collect()
    }

    fn target(&self, number: u32) -> Target {
        let (sort, modes) = match number % 3 {
            0 => ("mutex", vec![Mode::Exclusive]),
            1 if self.offered.0 => ("rwlock", vec![Mode::Shared, Mode::Shared, Mode::Exclusive]),
            2 if self.offered.1 => ("semaphore", vec![Mode::Permit { of: 2 + number % 2 }]),
            _ => ("mutex", vec![Mode::Exclusive]),
        };
        Target { name: format!("{}{sort}:{number}", self.prefix), modes }
    }

    /// The one lock that is now and then taken away from its holder. Two may believe to hold it for a moment, so it guards
    /// no room.
    pub(super) fn evicted(&self) -> String {
        format!("{}evicted", self.prefix)
    }
}
