//! A failed exchange with a database, as far as it matters for what is done next.

use crate::{Error, ErrorKind};

/// What went wrong.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) error: Error,
    /// The connection is of no use any more.
    pub(crate) broken: bool,
    /// The same request may succeed later.
    pub(crate) passing: bool,
    /// The server refused this very request: with others in one batch, each must be tried by itself.
    pub(crate) refused: bool,
}

impl Fault {
    /// The server said no to this request, and would again.
    pub(crate) fn refusal(error: Error) -> Self {
        Self { error, broken: false, passing: false, refused: true }
    }

    /// The connection broke. `sent`: the request may have reached the server.
    pub(crate) fn lost(sent: bool, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        let error = if sent {
            Error::new(ErrorKind::Ambiguous, "the connection broke, or no answer came in time")
        } else {
            Error::new(ErrorKind::Unavailable, "cannot connect; is the server running at this address?")
        };
        Self { error: error.caused_by(source), broken: true, passing: true, refused: false }
    }
}

/// An answer that makes no sense.
pub(crate) fn unreadable() -> Error {
    Error::new(ErrorKind::Engine, "the database's answer cannot be understood; please report this")
}
