//! How the tool ends: the exit codes of the manual, and the failures that lead to them.

use fencelock::{Error, ErrorKind};
use std::fmt;

/// The input is wrong.
pub(crate) const USAGE: u8 = 64;
/// The engine cannot be reached, or failed.
pub(crate) const UNAVAILABLE: u8 = 69;
/// The lock was lost while the command ran.
pub(crate) const LOST: u8 = 74;
/// The lock was not acquired in the time that was given.
pub(crate) const BUSY: u8 = 75;
/// The command is there, but cannot be run.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// There is no such command.
pub(crate) const NOT_FOUND: u8 = 127;

/// How a run of the tool ends when nothing is to be said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// With this exit code.
    Code(u8),
    /// By SIGINT itself: only then does the shell that waits for us know that Ctrl-C was meant for its script too.
    Interrupted,
}

impl Exit {
    pub(crate) const OK: Exit = Exit::Code(0);

    /// The exit that tells of a signal, as shells do.
    pub(crate) fn by_signal(signal: i32) -> Self {
        Exit::Code(u8::try_from(128 + signal).unwrap_or(u8::MAX))
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Exited(i32),
    Killed(i32),
}

impl Status {
    pub(crate) fn exit(self) -> Exit {
        match self {
            Status::Exited(code) => Exit::Code(u8::try_from(code).unwrap_or(u8::MAX)),
            Status::Killed(signal) => Exit::by_signal(signal),
        }
    }

    pub(crate) fn is_success(self) -> bool {
        self == Status::Exited(0)
    }
}

/// Why the tool cannot go on: an exit code and one line for people.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(code: u8, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(USAGE, text)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Invalid | ErrorKind::Unsupported => USAGE,
            ErrorKind::Timeout => BUSY,
            ErrorKind::Lost | ErrorKind::NotHeld => LOST,
            _ => UNAVAILABLE,
        };
        Self::new(code, error.to_string())
    }
}
