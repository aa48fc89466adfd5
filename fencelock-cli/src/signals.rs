//! The signals that the tool gets, as a queue.
//!
//! A signal that was ignored when the tool was started (by `nohup`, or by a shell for its background jobs) stays ignored,
//! here and in the command.

use crate::exit::Failure;
use signal_hook::consts::signal::{
    SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGVTALRM, SIGWINCH,
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

const ALL: [i32; 13] = [
    SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGCONT, SIGTSTP, SIGWINCH, SIGVTALRM, SIGPROF, SIGIO,
];

/// Whether this signal means: end.
pub(crate) fn is_ending(signal: i32) -> bool {
    [SIGTERM, SIGINT, SIGHUP, SIGQUIT].contains(&signal)
}

/// The signals to catch.
pub(crate) fn to_catch() -> impl Iterator<Item = i32> {
    let ignored = ignored();
    ALL.into_iter().filter(move |signal| ignored & (1 << (signal - 1)) == 0)
}

/// The set of ignored signals. The kernel tells it in `/proc`; the system call for it would need unsafe code.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}

/// Receives what is sent to the tool.
pub(crate) struct Signals(UnboundedReceiver<i32>);

impl Signals {
    /// Catches signals from here on.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let failed = |error| Failure::new(crate::exit::UNAVAILABLE, format!("cannot catch signals: {error}"));
        let mut caught = signal_hook::iterator::Signals::new(to_catch()).map_err(failed)?;
        let (tell, told) = unbounded_channel();
        let listen = move || {
            for signal in caught.forever() {
                if tell.send(signal).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(listen).map_err(failed)?;
        Ok(Self(told))
    }

    /// The next signal. Dropping the future loses none.
    pub(crate) async fn next(&mut self) -> i32 {
        match self.0.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }

    /// The next signal that means: end.
    pub(crate) async fn ending(&mut self) -> i32 {
        loop {
            let signal = self.next().await;
            if is_ending(signal) {
                return signal;
            }
        }
    }
}
