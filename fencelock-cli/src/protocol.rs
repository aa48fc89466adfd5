//! What the tool and the supervisor of its command say to each other, over one socket.
//!
//! First the tool sends the setup, with the command's stdin attached (the supervisor's own stdin is the socket). After that,
//! orders go one way and reports the other, nine bytes each. The end of the stream is a message too: the tool has died.

use crate::exit::Status;
use fencelock::Moment;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What the supervisor is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Setup {
    /// The program and its arguments.
    pub(crate) command: Vec<OsString>,
    /// Whether the command takes the terminal's foreground.
    pub(crate) terminal: bool,
    /// Until when the lock is ours, if that matters; later words follow as [`Order::Lease`].
    pub(crate) until: Option<Moment>,
    /// How long before the end of the lease the command is stopped.
    pub(crate) ahead: Duration,
    /// How long after SIGTERM it is killed; with zero it is killed at once.
    pub(crate) patience: Duration,
}

impl Setup {
    /// Sends the setup and the command's stdin.
    pub(crate) fn send(&self, to: &UnixStream, stdin: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [stdin];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(to, &[IoSlice::new(&[u8::from(self.terminal)])], &mut control, SendFlags::empty())?;
        // An argument contains no NUL.
        let command = self.command.iter().map(|word| word.as_bytes()).collect::<Vec<_>>().join(&0);
        let until = self.until.unwrap_or(Moment::NEVER).as_nanos();
        let mut rest = Vec::with_capacity(command.len() + 32);
        for number in [until, nanos(self.ahead), nanos(self.patience), command.len() as u64] {
            rest.extend(number.to_le_bytes());
        }
        rest.extend(command);
        (&mut &*to).write_all(&rest)
    }

    pub(crate) fn receive(from: &UnixStream) -> io::Result<(Self, OwnedFd)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut terminal = [0];
        recvmsg(from, &mut [IoSliceMut::new(&mut terminal)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let stdin = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let stdin = stdin.ok_or(io::ErrorKind::InvalidData)?;
        let number = || {
            let mut bytes = [0; 8];
            (&mut &*from).read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        let (until, ahead, patience, length) = (number()?, number()?, number()?, number()?);
        let mut command = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        (&mut &*from).read_exact(&mut command)?;
        let setup = Self {
            command: command.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect(),
            terminal: terminal == [1],
            until: Some(Moment::from_nanos(until)).filter(|until| *until != Moment::NEVER),
            ahead: Duration::from_nanos(ahead),
            patience: Duration::from_nanos(patience),
        };
        Ok((setup, stdin))
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A message: what it is, and one number.
pub(crate) type Frame = [u8; 9];

fn frame(kind: u8, number: u64) -> Frame {
    let mut frame = [kind; 9];
    frame[1..].copy_from_slice(&number.to_le_bytes());
    frame
}

fn parts(frame: Frame) -> (u8, u64) {
    let [kind, number @ ..] = frame;
    (kind, u64::from_le_bytes(number))
}

/// From the tool to the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Send this signal to the command.
    Signal(i32),
    /// The lock is ours until then, on the machine's boot clock. Without a later word, stop the command before that.
    Lease { until: Moment },
    /// The lock is lost: stop the command.
    Lost,
    /// The command has ended; leave alone what it left running.
    Dismiss,
}

impl Order {
    pub(crate) fn frame(self) -> Frame {
        match self {
            Order::Signal(signal) => frame(b's', u64::from(signal.unsigned_abs())),
            Order::Lease { until } => frame(b'l', until.as_nanos()),
            Order::Lost => frame(b'x', 0),
            Order::Dismiss => frame(b'd', 0),
        }
    }

    pub(crate) fn read(bytes: Frame) -> Option<Self> {
        Some(match parts(bytes) {
            (b's', signal) => Order::Signal(i32::try_from(signal).ok()?),
            (b'l', until) => Order::Lease { until: Moment::from_nanos(until) },
            (b'x', _) => Order::Lost,
            (b'd', _) => Order::Dismiss,
            _ => return None,
        })
    }
}

/// From the supervisor to the tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// The command runs, as this process and process group.
    Started(i32),
    /// It could not be run: the error's number.
    Failed(i32),
    /// It was stopped by this signal (Ctrl-Z, or a touch of the terminal from the background).
    Stopped(i32),
    /// It is being stopped, or was not started, because its lease runs out.
    Expiring,
    Ended(Status),
    /// Nothing that the command started is left.
    Alone,
}

impl Report {
    pub(crate) fn frame(self) -> Frame {
        let number = |number: i32| u64::from(number.unsigned_abs());
        match self {
            Report::Started(pid) => frame(b'S', number(pid)),
            Report::Failed(errno) => frame(b'F', number(errno)),
            Report::Stopped(signal) => frame(b'T', number(signal)),
            Report::Expiring => frame(b'X', 0),
            Report::Ended(Status::Exited(code)) => frame(b'E', number(code)),
            Report::Ended(Status::Killed(signal)) => frame(b'K', number(signal)),
            Report::Alone => frame(b'A', 0),
        }
    }

    pub(crate) fn read(bytes: Frame) -> Option<Self> {
        let (kind, number) = parts(bytes);
        let number = i32::try_from(number).ok()?;
        Some(match kind {
            b'S' => Report::Started(number),
            b'F' => Report::Failed(number),
            b'T' => Report::Stopped(number),
            b'X' => Report::Expiring,
            b'E' => Report::Ended(Status::Exited(number)),
            b'K' => Report::Ended(Status::Killed(number)),
            b'A' => Report::Alone,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn the_setup_arrives_with_its_stdin() {
        let (here, there) = UnixStream::pair().unwrap();
        let (mut feed, stdin) = io::pipe().map(|(read, write)| (write, read)).unwrap();
        let sent = Setup {
            command: vec!["printf".into(), OsString::from_vec(vec![0xff, b' ']), "".into()],
            terminal: true,
            until: Some(Moment::from_nanos(7)),
            ahead: Duration::from_millis(5),
            patience: Duration::ZERO,
        };
        sent.send(&here, stdin.as_fd()).unwrap();
        let (received, stdin) = Setup::receive(&there).unwrap();
        assert_eq!(received, sent);
        feed.write_all(b"x").unwrap();
        let mut byte = [0];
        rustix::io::read(&stdin, &mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn messages_survive_the_way() {
        for order in [Order::Signal(15), Order::Lease { until: Moment::NEVER }, Order::Lost, Order::Dismiss] {
            assert_eq!(Order::read(order.frame()), Some(order));
        }
        for report in [
            Report::Started(77),
            Report::Failed(2),
            Report::Stopped(20),
            Report::Expiring,
            Report::Ended(Status::Exited(3)),
            Report::Ended(Status::Killed(9)),
            Report::Alone,
        ] {
            assert_eq!(Report::read(report.frame()), Some(report));
        }
        assert_eq!(Order::read([0; 9]), None);
    }
}
