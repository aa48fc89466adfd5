//! What a Redis error means for a lock: its kind, whether trying again can help, and what the user can do.

use crate::{Error, ErrorKind};
use redis::RedisError;

/// A failed exchange with the server.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) error: Error,
    /// The connection is of no use any more.
    pub(super) broken: bool,
    /// The same request may succeed later.
    pub(super) passing: bool,
    /// The server does not know the script.
    pub(super) no_script: bool,
    /// The server refused this very request: with others in one batch, each must be tried by itself.
    pub(super) refused: bool,
    /// This node of the cluster does not serve this slot.
    pub(super) redirect: Option<Redirect>,
}

/// What a node of a cluster says to whoever asks the wrong one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Redirect {
    /// Another one serves the slot from now on.
    Moved,
    /// The slot is on its way to another one. That one would not serve it either: it misses a key; see [`NOBODY`].
    ///
    /// [`NOBODY`]: super::key::NOBODY
    OnItsWay,
}

impl Fault {
    /// Something that will be better later.
    pub(super) fn passing(error: Error) -> Self {
        Self { error, broken: false, passing: true, no_script: false, refused: false, redirect: None }
    }

    /// Several were asked, and none could help. If all of them refuse for the same reason, which is in the URL, it is no use to try again;
    /// unless they did help `before`: then somebody is about to set them up anew.
    pub(super) fn of_several(text: impl Into<String>, answers: Vec<(String, Fault)>, before: bool) -> Self {
        let kind = answers.first().map_or(ErrorKind::Unavailable, |(_, first)| first.error.kind());
        let same = |(_, fault): &(String, Fault)| !fault.passing && fault.error.kind() == kind;
        let final_kind = matches!(kind, ErrorKind::Invalid | ErrorKind::Unsupported);
        let hopeless = final_kind && !before && answers.iter().all(same);
        let kind = if hopeless { kind } else { ErrorKind::Unavailable };
        let told: Vec<String> = answers.iter().map(|(whom, fault)| format!("{whom}: {}", fault.error)).collect();
        let fault = Self::passing(Error::new(kind, text).caused_by(told.join("; ")));
        Self { passing: !hopeless, refused: hopeless, ..fault }
    }

    /// The server answers what nobody understands.
    pub(super) fn unreadable() -> Self {
        let error = Error::new(ErrorKind::Engine, "the script's answer cannot be understood; please report this");
        Self { error, broken: false, passing: false, no_script: false, refused: true, redirect: None }
    }

    /// What it means to who follows the slots of a cluster: wherever it was sent, the move will come to an end.
    pub(super) fn on_cluster(self) -> Self {
        if self.redirect.is_none() {
            return self;
        }
        let text = "the slot of this lock is being moved to another node of the cluster; try again when that is over";
        Self { error: Error::new(ErrorKind::Unavailable, text), passing: true, ..self }
    }

    /// The same for another one of a batch.
    pub(super) fn again(&self) -> Self {
        Self { error: Error::new(self.error.kind(), self.error.to_string()), ..*self }
    }
}

/// What the client is told.
pub(super) fn told(fault: Fault) -> Error {
    fault.error
}

/// Codes of our own: who answers is not what it was taken for.
pub(super) const IS_SENTINEL: &str = "ISSENTINEL";
pub(super) const NO_SENTINEL: &str = "NOSENTINEL";
pub(super) const NO_TLS: &str = "NOTLS";

/// `sent`: the request may have reached the server.
pub(super) fn fault(error: RedisError, sent: bool) -> Fault {
    let code = code(&error);
    let io =
        error.is_io_error() || error.is_connection_dropped() || error.is_timeout() || error.is_unrecoverable_error();
    let redirect = match code.as_str() {
        "MOVED" => Some(Redirect::Moved),
        "ASK" | "TRYAGAIN" => Some(Redirect::OnItsWay),
        _ => None,
    };
    let (kind, text, passing) = if code.is_empty() { without_code(&error, io, sent) } else { with_code(&code) };
    Fault {
        // Who was a master when it was connected to, and is none any more, is not the one to talk to.
        broken: io || code == "READONLY",
        passing,
        no_script: code == "NOSCRIPT",
        refused: !io && !passing && redirect.is_none(),
        redirect,
        error: Error::new(kind, text).caused_by(error),
    }
}

/// The code of an error. Servers before 7.0 hide that of a command inside of a script in the text; a right that a script lacks,
/// and a database that is not there, have no code of their own on any of them.
fn code(error: &RedisError) -> String {
    let code = error.code().unwrap_or_default();
    match error.detail() {
        Some(text) if code == "ERR" => code_in_text(text).unwrap_or(code),
        _ => code,
    }
    .to_owned()
}

fn code_in_text(text: &str) -> Option<&str> {
    if text.contains("The user executing the script can't") {
        return Some("NOPERM");
    }
    if text.contains("DB index is out of range") {
        return Some("NODB");
    }
    if text.contains("cluster support disabled") {
        return Some("NOCLUSTER");
    }
    // "Error running script (call to f_…): @user_script:36: @user_script: 36: -READONLY You can't write …"
    let (_, told) = text.rsplit_once("@user_script")?;
    let mut words = told.split(' ').map(|word| word.trim_start_matches('-'));
    words.find(|word| word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase()))
}

fn without_code(error: &RedisError, io: bool, sent: bool) -> (ErrorKind, &'static str, bool) {
    match error.kind() {
        redis::ErrorKind::AuthenticationFailed => {
            (ErrorKind::Invalid, "the server refused the password; check user and password in the URL", false)
        }
        redis::ErrorKind::InvalidClientConfig => {
            (ErrorKind::Invalid, "the URL or its TLS options cannot be used", false)
        }
        redis::ErrorKind::RESP3NotSupported => {
            (ErrorKind::Unsupported, "the server is too old; fencelock needs Redis 6.2 or newer", false)
        }
        _ if io && sent => (ErrorKind::Ambiguous, "the connection broke, or no answer came in time", true),
        _ if io => (ErrorKind::Unavailable, "cannot connect; is the server running at this address?", true),
        _ => (ErrorKind::Engine, "the server's answer cannot be understood", false),
    }
}

fn with_code(code: &str) -> (ErrorKind, &'static str, bool) {
    match code {
        "LOADING" => (ErrorKind::Unavailable, "the server is loading its data", true),
        "BUSY" => (ErrorKind::Unavailable, "the server is busy with somebody's slow script", true),
        "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" => {
            (ErrorKind::Unavailable, "the server cannot serve at the moment", true)
        }
        "NOSCRIPT" => (ErrorKind::Unavailable, "the server has forgotten the script", true),
        "READONLY" => (ErrorKind::Unavailable, "the server is a read-only replica; name its master in the URL", true),
        "OOM" => (
            ErrorKind::Unavailable,
            "the server has reached its maxmemory and refuses writes; raise it, or let it evict other keys",
            true,
        ),
        "MISCONF" => (ErrorKind::Unavailable, "the server cannot save its data and refuses writes; see its log", true),
        "NOREPLICAS" => (ErrorKind::Unavailable, "the server has too few replicas to accept writes", true),
        "NOAUTH" => {
            (ErrorKind::Invalid, "the server wants a password; write user:password@ before the host in the URL", false)
        }
        "WRONGPASS" => (ErrorKind::Invalid, "the server refused user or password; check them in the URL", false),
        "NOPERM" => (
            ErrorKind::Invalid,
            "the server's ACL does not let this user do it; docs/engines/redis.md and redis-ha.md list the rights that are needed",
            false,
        ),
        "NODB" => (
            ErrorKind::Invalid,
            "the server has no database of this number; choose another after the host in the URL, or leave it out",
            false,
        ),
        "WRONGTYPE" => {
            (ErrorKind::Invalid, "the key of this name holds other data; choose another name for the lock", false)
        }
        "MOVED" | "ASK" | "CROSSSLOT" => {
            (ErrorKind::Unsupported, "the server is part of a cluster; write redis+cluster://", false)
        }
        "NOCLUSTER" => (ErrorKind::Invalid, "the server is not part of a cluster; write redis://", false),
        IS_SENTINEL => (
            ErrorKind::Invalid,
            "this is a Sentinel, which keeps no locks; name the server, or write redis+sentinel://host/master-name",
            false,
        ),
        NO_SENTINEL => (
            ErrorKind::Invalid,
            "this is no Sentinel but a server; Sentinels listen at port 26379 as a rule (without them, write redis://)",
            false,
        ),
        NO_TLS => (
            ErrorKind::Unavailable,
            "no TLS with the server; check ca=, cert= and key= in the URL, and that this port of the server is for TLS",
            true,
        ),
        _ => (ErrorKind::Engine, "the server answered with an error", false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_in_what_old_servers_say_of_scripts() {
        for (text, code) in [
            (
                "Error running script (call to f_5a): @user_script:36: @user_script: 36: -READONLY You can't write",
                "READONLY",
            ),
            ("Error running script (call to f_5a): @user_script:36: @user_script: 36: -OOM command not allowed", "OOM"),
            ("Error running script (call to f_5a): @user_script:64: WRONGTYPE Operation against a key", "WRONGTYPE"),
            (
                "The user executing the script can't run this command or subcommand script: 51, on @user_script:1.",
                "NOPERM",
            ),
        ] {
            assert_eq!(code_in_text(text), Some(code), "{text}");
        }
        assert_eq!(code_in_text("user_script:169: attempt to call a nil value script: ad, on @user_script:169."), None);
    }
}
