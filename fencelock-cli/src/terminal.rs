//! The controlling terminal: who is in its foreground, and being suspended with Ctrl-Z.

use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::process::{Pid, Signal, getpgid, getpgrp, getppid, getsid, kill_current_process_group};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};
use std::fs::File;
use std::io::{self, IsTerminal};

/// The terminal that this session belongs to.
pub(crate) struct Terminal(File);

impl Terminal {
    pub(crate) fn controlling() -> Option<Self> {
        File::options().read(true).write(true).open("/dev/tty").ok().map(Self)
    }

    /// Whether our process group is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        tcgetpgrp(&self.0).is_ok_and(|group| group == getpgrp())
    }

    /// Puts a process group into the foreground, also from the background.
    ///
    /// Makes system calls only, so it can be used between fork and exec.
    pub(crate) fn give_to(&self, group: Pid) -> io::Result<()> {
        // The kernel stops a background process that does this, unless it blocks SIGTTOU.
        let mut ttou = SigSet::empty();
        ttou.add(NixSignal::SIGTTOU);
        ttou.thread_block()?;
        let given = tcsetpgrp(&self.0, group);
        ttou.thread_unblock()?;
        Ok(given?)
    }
}

/// Whether the user, at this moment, types to us.
pub(crate) fn is_foreground() -> bool {
    Terminal::controlling().is_some_and(|terminal| terminal.is_ours())
}

/// Whether a command should have the terminal from the start. In a pipeline another part of it (`| less`) may need the
/// terminal; then the command gets it when it asks.
pub(crate) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal() && is_foreground()
}

/// Stops our process group, as Ctrl-Z does, until somebody continues it. False if nobody would.
pub(crate) fn suspend() -> bool {
    is_resumable() && kill_current_process_group(Signal::STOP).is_ok()
}

/// Whether there is a shell with job control behind us: a parent in our session, but not in our process group. Without one,
/// a stopped process stays stopped for ever; the kernel does not stop such processes either.
fn is_resumable() -> bool {
    let Some(parent) = getppid() else { return false };
    let same_session = getsid(Some(parent)).is_ok_and(|session| getsid(None) == Ok(session));
    same_session && getpgid(Some(parent)).is_ok_and(|group| group != getpgrp())
}

/// The terminal while the command may have it.
pub(crate) struct Loan {
    terminal: Option<Terminal>,
    /// How the terminal was set, in case the command dies without setting it back.
    modes: Option<Termios>,
    given: bool,
}

impl Loan {
    /// `given`: the command takes the terminal by itself, before it runs.
    pub(crate) fn new(given: bool) -> Self {
        let terminal = Terminal::controlling();
        let modes = terminal.as_ref().and_then(|terminal| tcgetattr(&terminal.0).ok());
        Self { terminal, modes, given }
    }

    pub(crate) fn is_given(&self) -> bool {
        self.given
    }

    /// Gives the terminal to the command, if it is ours to give.
    pub(crate) fn give(&mut self, group: Pid) -> bool {
        if let Some(terminal) = &self.terminal
            && terminal.is_ours()
        {
            self.given = terminal.give_to(group).is_ok();
        }
        self.given
    }

    /// Takes the terminal back; and resets it, if the command cannot have done so.
    pub(crate) fn take_back(&mut self, reset: bool) {
        if !std::mem::take(&mut self.given) {
            return;
        }
        let Some(terminal) = &self.terminal else { return };
        if terminal.give_to(getpgrp()).is_ok()
            && reset
            && let Some(modes) = &self.modes
        {
            let _ = tcsetattr(&terminal.0, OptionalActions::Drain, modes);
        }
    }
}
