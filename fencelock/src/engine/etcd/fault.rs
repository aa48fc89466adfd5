//! What an error of etcd means for a lock: its kind, whether trying again can help, and what the user can do.

use crate::{Error, ErrorKind};
use std::error::Error as StdError;
use tonic::{Code, Status};

/// A failed exchange with a server.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) error: Error,
    /// The same request may succeed later, or on another server.
    pub(super) passing: bool,
    /// The connection, or the server at its other end, is of no use at present.
    pub(super) broken: bool,
    /// The request may have been carried out.
    pub(super) sent: bool,
    /// The token that proves who we are has expired.
    pub(super) stale_token: bool,
    /// The lease does not exist (any more).
    pub(super) no_lease: bool,
}

impl Fault {
    fn new(kind: ErrorKind, text: &str, passing: bool) -> Self {
        let error = Error::new(kind, text);
        Self { error, passing, broken: false, sent: false, stale_token: false, no_lease: false }
    }

    /// No answer came in time.
    pub(super) fn silence() -> Self {
        let fault = Self::new(ErrorKind::Ambiguous, "no answer came in time", true);
        Self { broken: true, sent: true, ..fault }
    }
}

pub(super) fn fault(status: Status) -> Fault {
    let told = status.message().to_owned();
    let mut fault = meaning(&status);
    let source: Box<dyn StdError + Send + Sync> = match root(&status) {
        Some(root) => root.into(),
        None => told.into(),
    };
    fault.error = fault.error.caused_by(source);
    fault
}

/// The innermost reason of a failure on the way; "transport error" alone tells nothing.
fn root(status: &Status) -> Option<String> {
    let mut cause = status.source()?;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    Some(cause.to_string())
}

fn meaning(status: &Status) -> Fault {
    let told = status.message();
    let says = |text: &str| told.contains(text);
    match status.code() {
        Code::NotFound if says("lease not found") => {
            Fault { no_lease: true, ..Fault::new(ErrorKind::Unavailable, "the session has ended", true) }
        }
        Code::Unauthenticated => stale(),
        Code::InvalidArgument if says("revision of auth store is old") => stale(),
        Code::InvalidArgument if says("user name is empty") => {
            Fault::new(ErrorKind::Invalid, "the server wants a user; write etcd://user:password@host", false)
        }
        Code::InvalidArgument if says("authentication failed") => {
            Fault::new(ErrorKind::Invalid, "the server refused user or password; check them in the URL", false)
        }
        Code::FailedPrecondition if says("authentication is not enabled") => {
            Fault::new(ErrorKind::Invalid, "the server knows no users; leave user and password out of the URL", false)
        }
        Code::PermissionDenied => Fault::new(
            ErrorKind::Invalid,
            "the server does not let this user do it; it must be able to read and write all keys under the URL's prefix",
            false,
        ),
        Code::ResourceExhausted if says("too many requests") => {
            Fault::new(ErrorKind::Unavailable, "the server is overloaded", true)
        }
        Code::ResourceExhausted if says("database space exceeded") => Fault::new(
            ErrorKind::Unavailable,
            "the server's space is used up and it refuses writes; compact and defragment it, then disarm the alarm",
            true,
        ),
        Code::Unimplemented => Fault::new(
            ErrorKind::Unsupported,
            "this server does not speak etcd's v3 API; fencelock needs etcd 3.4 or newer",
            false,
        ),
        // The server knows that it did not do it.
        Code::Unavailable if says("no leader") || says("not capable") || says("server stopped") => {
            let fault = Fault::new(ErrorKind::Unavailable, "the cluster has no leader at the moment", true);
            Fault { broken: true, ..fault }
        }
        Code::Unavailable if never_sent(status) => {
            let fault =
                Fault::new(ErrorKind::Unavailable, "cannot connect; is the server running at this address?", true);
            Fault { broken: true, ..fault }
        }
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Unknown
        | Code::Internal
        | Code::Aborted => {
            let fault =
                Fault::new(ErrorKind::Ambiguous, "the connection broke, or the cluster did not agree in time", true);
            Fault { broken: true, sent: true, ..fault }
        }
        _ => Fault::new(ErrorKind::Engine, "the server answered with an error", false),
    }
}

fn stale() -> Fault {
    let fault = Fault::new(ErrorKind::Invalid, "the server does not accept this user's token any more", true);
    Fault { stale_token: true, ..fault }
}

/// Whether it failed while connecting.
fn never_sent(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}
