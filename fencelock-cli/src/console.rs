//! What the tool says on stderr: messages, and the one line that is rewritten while it waits.

use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};

/// Says one line. A closed stderr is no reason to fail.
pub(crate) fn say(text: &str) {
    let _ = writeln!(stderr(), "fencelock: {text}");
}

/// stderr, at the volume that the user asked for.
pub(crate) struct Console {
    quiet: bool,
    pub(crate) verbose: bool,
    /// Whether the rewritten line is on the screen now.
    shown: AtomicBool,
}

impl Console {
    pub(crate) fn new(quiet: bool, verbose: bool) -> Self {
        Self { quiet, verbose, shown: AtomicBool::new(false) }
    }

    /// Says what the user should know.
    pub(crate) fn say(&self, text: &str) {
        if !self.quiet {
            self.warn(text);
        }
    }

    /// Says what even `-q` does not keep back: a promise that is not kept.
    pub(crate) fn warn(&self, text: &str) {
        self.clear();
        say(text);
    }

    /// Says what only `-v` wants to know.
    pub(crate) fn note(&self, text: &str) {
        if self.verbose {
            self.say(text);
        }
    }

    /// Whether there is somebody to show a changing line to.
    pub(crate) fn is_live(&self) -> bool {
        !self.quiet && stderr().is_terminal()
    }

    /// Shows a line in place of the one before, cut to the width of the terminal.
    pub(crate) fn show(&self, text: &str) {
        // Some terminals do not know how wide they are.
        let width = rustix::termios::tcgetwinsize(stderr()).ok().map(|size| usize::from(size.ws_col));
        let width = width.filter(|width| *width > 0).unwrap_or(80).max(20);
        let line: String = format!("fencelock: {text}").chars().take(width - 1).collect();
        self.shown.store(true, Ordering::Relaxed);
        let _ = write!(stderr(), "\r{line}\x1b[K");
        let _ = stderr().flush();
    }

    /// Takes the changing line away.
    pub(crate) fn clear(&self) {
        if self.shown.swap(false, Ordering::Relaxed) {
            let _ = write!(stderr(), "\r\x1b[K");
            let _ = stderr().flush();
        }
    }
}
