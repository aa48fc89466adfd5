//! The supervisor: a second process of this program, between the tool and its command.
//!
//! A command must not run on when the lock is gone, also when the tool cannot see to that: it was killed, or stopped for
//! longer than the lease. So the tool starts this process, which does nothing but watch.
//!
//! * The tool's end of the socket closes, however the tool dies: everything that the command started is killed.
//! * The lease that the tool told last comes to its end: the command is stopped while it still lasts.
//! * The supervisor adopts orphans, so that it finds the command's grandchildren, whatever group they have moved to.
//! * The supervisor itself is killed: the command dies with it (`PR_SET_PDEATHSIG`), the tool cleans up behind.
//!
//! It has one thread, no runtime and its own process group, and waits for a word of the tool or a child's change.

use crate::console::say;
use crate::exit::{Status, USAGE};
use crate::protocol::{Order, Report, Setup};
use crate::signals;
use crate::terminal::Terminal;
use crate::tree::kill_descendants;
use fencelock::{Clock, Moment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, getpid, getppid, kill_process_group, wait};
use signal_hook::consts::signal::SIGCHLD;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The argument by which the program becomes a supervisor.
pub(crate) const ARGUMENT: &str = "__supervise";
/// Its name in a list of processes. Without the program's name, so that `pkill -9 fencelock` does not meet it.
pub(crate) const TITLE: &str = "lock-supervisor";

/// Whether this process was started to be a supervisor.
pub(crate) fn is_asked_for() -> bool {
    std::env::args_os().nth(1).is_some_and(|word| word == OsStr::new(ARGUMENT))
}

pub(crate) fn main() -> ExitCode {
    match supervise() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{ARGUMENT} is for fencelock itself, use `fencelock run` ({error})"));
            ExitCode::from(USAGE)
        }
    }
}

fn supervise() -> io::Result<()> {
    let tool = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (setup, stdin) = Setup::receive(&tool)?;
    let _ = rustix::thread::set_name(c"lock-supervisor");
    rustix::process::set_child_subreaper(Some(getpid()))?;
    outlive_signals()?;
    let (changes, change) = UnixStream::pair()?;
    changes.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(SIGCHLD, change)?;
    // Between the grant and this moment, the tool or the machine may have slept.
    if setup.until.is_some_and(|until| until <= Clock::Boot.now().after(setup.ahead)) {
        report(&tool, Report::Expiring);
        return Ok(());
    }
    match start(&setup, stdin) {
        Ok(child) => {
            report(&tool, Report::Started(child.as_raw_nonzero().get()));
            let stage = setup.until.map_or(Stage::Free, |until| Stage::Leased { until });
            Supervisor { tool, changes, child, setup, running: true, alone: false, stage }.watch()
        }
        Err(error) => {
            report(&tool, Report::Failed(error.raw_os_error().unwrap_or(0)));
            Ok(())
        }
    }
}

/// A signal to all processes of a service reaches this one too; it must stay until the command has ended. Signals are caught
/// rather than ignored, because the command would inherit that.
fn outlive_signals() -> io::Result<()> {
    let nothing = Arc::new(AtomicBool::new(false));
    for signal in signals::to_catch() {
        signal_hook::flag::register(signal, Arc::clone(&nothing))?;
    }
    Ok(())
}

fn start(setup: &Setup, stdin: OwnedFd) -> io::Result<Pid> {
    let (program, arguments) = setup.command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(stdin).process_group(0);
    prepare(&mut command, setup.terminal.then(Terminal::controlling).flatten());
    // The child is waited for in `reap`, with all the others.
    command.spawn().map(|child| Pid::from_child(&child))
}

/// Binds the command to the life of this process, and puts it into the terminal's foreground before it can touch it.
#[allow(unsafe_code)]
fn prepare(command: &mut Command, terminal: Option<Terminal>) {
    let supervisor = getpid();
    let before_exec = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        if getppid() != Some(supervisor) {
            return Err(Errno::SRCH.into());
        }
        if let Some(terminal) = &terminal {
            // Without the foreground it can still run, and ask later.
            let _ = terminal.give_to(getpid());
        }
        Ok(())
    };
    // SAFETY: the closure makes a few system calls; it allocates nothing and takes no locks. And this process has one thread,
    // so that the child of its fork is an intact copy.
    unsafe { command.pre_exec(before_exec) };
}

fn report(tool: &UnixStream, report: Report) {
    // If the tool is gone, reading from it tells.
    let _ = (&mut &*tool).write_all(&report.frame());
}

/// How far things have come with the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing to enforce.
    Free,
    Leased {
        until: Moment,
    },
    /// SIGTERM was sent.
    Stopping {
        kill_at: Moment,
    },
    Killed,
}

struct Supervisor {
    tool: UnixStream,
    /// Readable when a child has changed.
    changes: UnixStream,
    child: Pid,
    setup: Setup,
    running: bool,
    alone: bool,
    stage: Stage,
}

impl Supervisor {
    fn watch(mut self) -> io::Result<()> {
        loop {
            self.reap();
            self.enforce();
            if !self.sleep()? {
                continue;
            }
            match self.order() {
                Some(Order::Signal(signal)) => self.signal(signal),
                Some(Order::Lease { until }) => self.lease(until),
                Some(Order::Lost) => self.stop(Clock::Boot.now().after(self.setup.patience)),
                Some(Order::Dismiss) => return Ok(()),
                None => {
                    self.kill();
                    return Ok(());
                }
            }
        }
    }

    /// Waits until something happens or is due. True if the tool has something to say.
    fn sleep(&mut self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.tool, PollFlags::IN), PollFd::new(&self.changes, PollFlags::IN)];
        match poll(&mut fds, self.pause().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let spoken = !fds[0].revents().is_empty();
        let mut bytes = [0; 64];
        while matches!(self.changes.read(&mut bytes), Ok(1..)) {}
        Ok(spoken)
    }

    fn pause(&self) -> Option<Timespec> {
        // Timers stand still while the machine sleeps, the lease does not: look once per second.
        const LONGEST: Duration = Duration::from_secs(1);
        let due = match self.stage {
            Stage::Free | Stage::Killed => return None,
            Stage::Leased { until } => until.since(Clock::Boot.now().after(self.setup.ahead)),
            Stage::Stopping { kill_at } => kill_at.since(Clock::Boot.now()),
        };
        Timespec::try_from(due.min(LONGEST)).ok()
    }

    /// The next order. None when the tool is gone.
    fn order(&mut self) -> Option<Order> {
        let mut frame = [0; 9];
        self.tool.read_exact(&mut frame).ok()?;
        Order::read(frame)
    }

    fn signal(&self, signal: i32) {
        if let (true, Some(signal)) = (self.running, Signal::from_named_raw(signal)) {
            let _ = kill_process_group(self.child, signal);
        }
    }

    fn lease(&mut self, until: Moment) {
        // Once the command was told to stop, that stands.
        if matches!(self.stage, Stage::Free | Stage::Leased { .. }) {
            self.stage = Stage::Leased { until };
        }
    }

    /// Does what the clock demands.
    fn enforce(&mut self) {
        let now = Clock::Boot.now();
        match self.stage {
            Stage::Leased { until } if until <= now.after(self.setup.ahead) => {
                report(&self.tool, Report::Expiring);
                self.stop(until.min(now.after(self.setup.patience)));
            }
            Stage::Stopping { kill_at } if kill_at <= now => self.kill(),
            _ => {}
        }
    }

    fn stop(&mut self, kill_at: Moment) {
        if !matches!(self.stage, Stage::Free | Stage::Leased { .. }) {
            return;
        }
        if self.setup.patience.is_zero() {
            return self.kill();
        }
        self.stage = Stage::Stopping { kill_at };
        self.signal(Signal::TERM.as_raw());
        // What is suspended would not notice.
        self.signal(Signal::CONT.as_raw());
    }

    /// Kills all that the command has started. Gives up on what cannot be killed (another user's, or stuck in the kernel).
    fn kill(&mut self) {
        const ATTEMPTS: u32 = 500;
        self.stage = Stage::Killed;
        for _ in 0..ATTEMPTS {
            if self.running {
                let _ = kill_process_group(self.child, Signal::KILL);
            }
            // Again and again, because what is being killed may just have forked.
            kill_descendants();
            self.reap();
            if self.alone {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Collects children that have ended, adopted ones included, and reports what became of the command.
    fn reap(&mut self) {
        while !self.alone {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid == self.child => {
                    if let Some(signal) = status.stopping_signal() {
                        report(&self.tool, Report::Stopped(signal));
                        continue;
                    }
                    let killed = status.terminating_signal().map(Status::Killed);
                    let ended = killed.or(status.exit_status().map(Status::Exited));
                    if let Some(ended) = ended {
                        self.running = false;
                        report(&self.tool, Report::Ended(ended));
                    }
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return,
                Err(_) => {
                    self.alone = true;
                    report(&self.tool, Report::Alone);
                }
            }
        }
    }
}
