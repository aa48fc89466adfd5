//! What a MySQL or MariaDB error means for a lock: its kind, whether trying again can help, and what the user can do.

use crate::engine::sql::fault::Fault;
use crate::{Error, ErrorKind};
use mysql_async::Error as MyError;

/// What an administrator does where the user may not.
const MIGRATE: &str = "have an administrator run what `fencelock migrate --print mysql` prints";

/// `sent`: the request may have reached the server.
pub(super) fn fault(error: MyError, sent: bool) -> Fault {
    let server = match error {
        MyError::Server(server) => server,
        MyError::Driver(mysql_async::DriverError::NoClientSslFlagFromServer) => {
            let told = Error::invalid("TLS cannot be used: the server does not offer it; see the option sslmode");
            return Fault { broken: true, ..Fault::refusal(told) };
        }
        other => {
            let text = other.to_string();
            // What TLS refuses comes as an error of the stream.
            let tls = !sent && ["certificate", "TLS", "tls"].iter().any(|word| text.contains(word));
            if tls {
                let told = Error::invalid("TLS cannot be used; see the options sslmode and ca").caused_by(text);
                return Fault { broken: true, ..Fault::refusal(told) };
            }
            return Fault::lost(sent, text);
        }
    };
    let (kind, text, passing) = with_code(server.code);
    let told = Error::new(kind, text).caused_by(server.message.clone());
    // Tables and procedures are looked for when a connection is made. A replica may have been the primary; another connection
    // may find that one.
    let broken = matches!(server.code, 1146 | 1305 | 1290 | 1792 | 1836) || ends(server.code);
    if ends(server.code) {
        return Fault::lost(sent, server.message);
    }
    Fault { error: told, broken, passing, refused: !passing && !broken }
}

/// The server closes the connection, or somebody does. It may have carried out the request.
fn ends(code: u16) -> bool {
    matches!(code, 1053 | 1077 | 1078 | 1079 | 1152 | 1153 | 1158..=1161 | 1184 | 1317 | 1927 | 4031)
}

fn with_code(code: u16) -> (ErrorKind, String, bool) {
    let invalid = |text: &str| (ErrorKind::Invalid, text.to_owned(), false);
    let later = |text: &str| (ErrorKind::Unavailable, text.to_owned(), true);
    match code {
        1045 | 1698 => invalid("the server refused user or password; check them in the URL"),
        1049 => invalid("there is no such database; create it, or correct the URL"),
        1046 => invalid("the URL names no database; write mysql://user:password@host/database"),
        1044 | 1142 | 1143 | 1227 | 1370 | 1419 => (
            ErrorKind::Invalid,
            format!("this user lacks rights in the database; {MIGRATE}, which ends with the rights that users need"),
            false,
        ),
        1146 | 1305 => (
            ErrorKind::Unavailable,
            format!("the database has not (all of) fencelock's tables and procedures; connect again, or {MIGRATE}"),
            true,
        ),
        1290 | 1792 | 1836 => later("the server is a read-only replica; name its primary in the URL"),
        1213 | 1020 => later("another transaction was in the way"),
        1205 | 1969 | 3024 => later("the server did not get to it in time"),
        1040 | 1203 | 1226 => later("the server has no connection left; raise max_connections"),
        1021 | 1114 => later("the server's disk is full"),
        1037 | 1038 | 1041 => later("the server lacks memory"),
        _ => (ErrorKind::Engine, "the server answered with an error".to_owned(), false),
    }
}
