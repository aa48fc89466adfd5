//! The tool's side of the supervisor: starts it, gives orders, hears reports.

use crate::exit::{Failure, LOST, NOT_EXECUTABLE, NOT_FOUND};
use crate::protocol::{Frame, Order, Report, Setup};
use crate::supervisor::{ARGUMENT, TITLE};
use crate::text::plain;
use crate::tree::kill_descendants;
use rustix::process::{Pid, getpid};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

/// A command that runs under a supervisor.
///
/// Dropping it kills the command and everything that it started.
pub(crate) struct Supervised {
    /// The command's process and process group.
    pub(crate) group: Pid,
    link: Link,
    supervisor: Child,
}

impl Supervised {
    /// Starts the command with these additions to its environment.
    ///
    /// # Errors
    /// 126 or 127 when the command cannot be run; 74 when it is too late to.
    pub(crate) async fn start(setup: &Setup, environment: &[(&str, OsString)]) -> Result<Self, Failure> {
        let name = setup.command.first().map(|word| word.to_string_lossy()).unwrap_or_default();
        let failed = |error| cannot_run(&name, &error);
        // If the supervisor dies first, its orphans come to us, and can be found.
        rustix::process::set_child_subreaper(Some(getpid())).map_err(|errno| failed(errno.into()))?;
        let (supervisor, socket) = spawn(setup, environment).map_err(failed)?;
        let mut link = Link { socket, frame: [0; 9], filled: 0 };
        let group = match link.report().await {
            Some(Report::Started(pid)) => Pid::from_raw(pid),
            Some(Report::Expiring) => {
                let text = "the lock was lost before the command could be started; try again, with a longer --ttl";
                return Err(Failure::new(LOST, text));
            }
            Some(Report::Failed(errno)) => return Err(failed(io::Error::from_raw_os_error(errno))),
            _ => None,
        };
        let group = group.ok_or_else(|| failed(io::Error::other("its supervisor died; try again")))?;
        Ok(Self { group, link, supervisor })
    }

    pub(crate) fn order(&self, order: Order) {
        // If the supervisor is gone, or hangs, the reports tell.
        let _ = self.link.socket.try_write(&order.frame());
    }

    /// The next report. None when the supervisor is gone; then nothing of the command is left either. Dropping the future
    /// loses nothing.
    pub(crate) async fn report(&mut self) -> Option<Report> {
        let report = self.link.report().await;
        if report.is_none() {
            kill_descendants();
        }
        report
    }

    /// Lets the supervisor go. What the command left running in the background goes on.
    pub(crate) async fn dismiss(mut self) {
        self.order(Order::Dismiss);
        let _ = tokio::time::timeout(Duration::from_secs(1), self.supervisor.wait()).await;
    }
}

fn spawn(setup: &Setup, environment: &[(&str, OsString)]) -> io::Result<(Child, UnixStream)> {
    let (ours, theirs) = StdStream::pair()?;
    // This very program, also when a newer one was installed over it meanwhile.
    let supervisor = Command::new("/proc/self/exe")
        .arg0(TITLE)
        .arg(ARGUMENT)
        .envs(environment.iter().map(|(key, value)| (key, value)))
        .process_group(0)
        .stdin(OwnedFd::from(theirs))
        .spawn()?;
    setup.send(&ours, io::stdin().as_fd())?;
    ours.set_nonblocking(true)?;
    Ok((supervisor, UnixStream::from_std(ours)?))
}

/// The socket, and what has arrived of the next message.
struct Link {
    socket: UnixStream,
    frame: Frame,
    filled: usize,
}

impl Link {
    async fn report(&mut self) -> Option<Report> {
        loop {
            self.socket.readable().await.ok()?;
            match self.socket.try_read(&mut self.frame[self.filled..]) {
                Ok(0) => return None,
                Ok(length) => self.filled += length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
            if self.filled == self.frame.len() {
                self.filled = 0;
                return Report::read(self.frame);
            }
        }
    }
}

/// Why a command cannot be run, in the words and with the exit codes of a shell.
pub(crate) fn cannot_run(name: &str, error: &io::Error) -> Failure {
    let name = plain(name);
    match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::new(NOT_FOUND, format!("{name}: command not found; check its name, its #! line and PATH"))
        }
        io::ErrorKind::PermissionDenied => {
            Failure::new(NOT_EXECUTABLE, format!("{name}: permission denied; is it an executable file (chmod +x)?"))
        }
        _ => Failure::new(NOT_EXECUTABLE, format!("{name}: cannot be run: {error}")),
    }
}
