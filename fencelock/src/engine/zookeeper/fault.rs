//! What an error of the client means for a lock.

use crate::{Error, ErrorKind};
use zookeeper_client::Error as Fault;

/// In the words of this crate. `sent`: whether the request may have reached the server.
pub(super) fn error(fault: &Fault, sent: bool) -> Error {
    let (kind, text) = match fault {
        fault if sent && is_lost(fault) => {
            (ErrorKind::Ambiguous, "the connection to the ZooKeeper server was lost before it answered")
        }
        Fault::Timeout | Fault::NoHosts => (
            ErrorKind::Unavailable,
            "no ZooKeeper server answers, or there is no majority of them; check the addresses",
        ),
        Fault::SessionExpired | Fault::ClientClosed => (ErrorKind::Unavailable, "the ZooKeeper session is over"),
        Fault::AuthFailed => (ErrorKind::Unavailable, "ZooKeeper refuses the user or the password"),
        Fault::NoAuth => (
            ErrorKind::Unavailable,
            "ZooKeeper does not let this user do that; check the access list (ACL) of the path, and user:password@ in the URL",
        ),
        Fault::NotReadOnly | Fault::Throttled => {
            (ErrorKind::Unavailable, "the ZooKeeper server does not accept writes now")
        }
        fault if is_lost(fault) => (ErrorKind::Unavailable, "the connection to the ZooKeeper server was lost"),
        Fault::QuotaExceeded => (ErrorKind::Engine, "the quota of the path is used up; raise it"),
        _ => (ErrorKind::Engine, "ZooKeeper answered with an error"),
    };
    Error::new(kind, text).caused_by(fault.to_string())
}

/// Whether nobody knows what became of the request.
pub(super) fn is_lost(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::ConnectionLoss
            | Fault::SessionMoved
            | Fault::Timeout
            // A connection that failed, was silent for too long, or carried nonsense.
            | Fault::Custom(_)
            | Fault::UnexpectedError(_)
            | Fault::UnmarshalError { .. }
    )
}

/// Whether the session is no more: its entries go away, and requests need another one.
pub(super) fn is_over(fault: &Fault) -> bool {
    matches!(fault, Fault::SessionExpired | Fault::ClientClosed | Fault::AuthFailed | Fault::NoHosts)
}
