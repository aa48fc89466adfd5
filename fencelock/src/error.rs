//! The one error type: what failed, on which lock, at which engine, and what to do about it.

use std::error::Error as StdError;
use std::fmt;

/// What `Result` means throughout this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

type Source = Box<dyn StdError + Send + Sync + 'static>;

/// Why an operation failed: a [`kind`](Error::kind) to match on, and a sentence for people.
///
/// The sentence names the operation, the lock and the engine's address (never a password).
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    operation: Option<&'static str>,
    name: Option<String>,
    engine: Option<String>,
    source: Option<Source>,
}

/// The kinds of failure. Match on these; the text of an [`Error`] is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The lock was not acquired in the time that was given.
    Timeout,
    /// The lock was held, and is not any more: its lease ended or it was taken away.
    Lost,
    /// The lock is not held by this owner.
    NotHeld,
    /// The engine cannot be reached or cannot serve now. Nothing was done.
    Unavailable,
    /// The request was sent and no answer was seen: it may or may not have been carried out.
    Ambiguous,
    /// The resource refused the write: it has seen a newer token, or carries somebody else's mark. Nothing was changed.
    Fenced,
    /// Others changed the value each time, between reading and writing it. Nothing was changed.
    Conflict,
    /// This engine cannot do that; the message says why.
    Unsupported,
    /// The input is wrong; the message names it and the remedy.
    Invalid,
    /// The engine answered with an error of its own.
    Engine,
}

impl Error {
    /// An error of this kind with a sentence for people.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), operation: None, name: None, engine: None, source: None }))
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// The kind, to match on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was being done (`acquire`, `renew`, …), if known.
    pub fn operation(&self) -> Option<&'static str> {
        self.0.operation
    }

    /// The name of the lock concerned, if one is.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// The engine's address, without secrets, if one is concerned.
    pub fn engine(&self) -> Option<&str> {
        self.0.engine.as_deref()
    }

    /// Adds what was being done. The innermost word stands.
    #[must_use]
    pub fn during(mut self, operation: &'static str) -> Self {
        self.0.operation.get_or_insert(operation);
        self
    }

    /// Adds the name of the lock. The innermost word stands.
    #[must_use]
    pub fn of_lock(mut self, name: &str) -> Self {
        self.0.name.get_or_insert_with(|| name.to_owned());
        self
    }

    /// Adds the engine's address. The innermost word stands.
    #[must_use]
    pub fn at_engine(mut self, engine: &str) -> Self {
        self.0.engine.get_or_insert_with(|| engine.to_owned());
        self
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Source>) -> Self {
        self.0.source = Some(source.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = &*self.0;
        let operation = inner.operation.map(str::to_owned);
        let name = inner.name.as_ref().map(|name| format!("{name:?}"));
        let engine = inner.engine.as_ref().map(|engine| format!("on {engine}"));
        let context: Vec<String> = [operation, name, engine].into_iter().flatten().collect();
        if !context.is_empty() {
            write!(f, "{}: ", context.join(" "))?;
        }
        f.write_str(&inner.message)?;
        if let Some(source) = &inner.source {
            write!(f, " ({source})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorKind::Timeout => "not acquired in time",
            ErrorKind::Lost => "the lock was lost",
            ErrorKind::NotHeld => "the lock is not held",
            ErrorKind::Unavailable => "the engine is not available",
            ErrorKind::Ambiguous => "the outcome is not known",
            ErrorKind::Fenced => "the resource has seen a newer holder",
            ErrorKind::Conflict => "others changed the value meanwhile",
            ErrorKind::Unsupported => "not supported by this engine",
            ErrorKind::Invalid => "invalid input",
            ErrorKind::Engine => "the engine reported an error",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_tells_operation_lock_engine_and_cause_in_one_line() {
        let error = Error::new(ErrorKind::Unavailable, "the disk is full; free some space")
            .caused_by(std::io::Error::from_raw_os_error(28))
            .during("acquire")
            .of_lock("a\nb")
            .at_engine("file:/tmp/x");
        let text = error.to_string();
        assert!(text.starts_with(r#"acquire "a\nb" on file:/tmp/x: the disk is full; free some space ("#), "{text}");
        assert!(!text.contains('\n'));
        let short = Error::invalid("no").during("connect");
        assert_eq!(short.to_string(), "connect: no");
    }
}
