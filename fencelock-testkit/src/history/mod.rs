//! A record of what happened to locks, and a checker that finds what must not have happened.
//!
//! Times are nanoseconds of the machine's clock since boot, so the records of several processes of one machine can be
//! laid side by side. They are chosen so that what they claim is certain: a hold is recorded to begin after it began
//! and to be valid before it was last seen valid.

mod check;
mod record;

pub use check::{Kind, Report, Violation, check};
pub use record::{Recorder, load};

use fencelock::Mode;
use serde::{Deserialize, Serialize};

/// Something that happened to a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in nanoseconds since boot.
    pub at: u64,
    /// In which process; a process that was started again is another one.
    pub process: u64,
    /// To which claim of that process; 0 for what concerns none.
    pub claim: u64,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A claim is about to be made. Recorded before the engine is asked.
    Waits {
        /// For which lock.
        name: String,
        /// How.
        mode: Mode,
        /// With which lease.
        ttl_ms: u64,
    },
    /// The engine has shown the claim among those who wait. Recorded after it was seen.
    InLine {
        /// When the engine was asked: it was waiting then or later.
        asked: u64,
    },
    /// The claim was granted. Recorded after the grant was seen.
    Granted {
        /// With this token.
        token: u64,
    },
    /// The guard said that it is valid. The time was taken before it was asked.
    StillValid,
    /// The hold is over.
    Ended(Ended),
    /// The claim was given up. It may have been granted already, without having seen that.
    GaveUp(GaveUp),
    /// The engine reported an error, which nothing in a history explains.
    Failed {
        /// What it said.
        message: String,
    },
    /// The holder found somebody else in the room that the lock protects.
    Clash,
    /// Somebody is about to take the lock away from its holders.
    Evicts {
        /// Which lock.
        name: String,
    },
    /// The lock was taken away; follows `Evicts` of the same claim number.
    Evicted,
    /// Another process was killed, and is gone now.
    Killed {
        /// Which one.
        process: u64,
        /// When it was about to be killed, in nanoseconds since boot.
        since: u64,
    },
    /// The process stood still from then until now.
    Stalled {
        /// When it ran last, in nanoseconds since boot.
        since: u64,
    },
}

/// How a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// Released, and it was ours to the end.
    Released,
    /// The guard was dropped.
    Dropped,
    /// The lock was lost before it was released.
    Lost,
}

/// How a claim ended that was not granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GaveUp {
    /// It did not want to wait.
    Busy,
    /// It did not want to wait for longer.
    Timeout,
    /// Its future was dropped.
    Cancelled,
    /// It waited far longer than everybody ahead can have taken.
    Stuck,
}
