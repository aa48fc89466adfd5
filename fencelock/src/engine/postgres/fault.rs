//! What a PostgreSQL error means for a lock: its kind, whether trying again can help, and what the user can do.

use crate::engine::sql::fault::Fault;
use crate::{Error, ErrorKind};
use tokio_postgres::error::{Error as PgError, SqlState};

/// What an administrator does where the user may not.
const MIGRATE: &str = "have an administrator run what `fencelock migrate --print postgres` prints";

/// `sent`: the request may have reached the server.
pub(super) fn fault(error: PgError, sent: bool) -> Fault {
    let Some(code) = error.code().cloned() else { return without_code(error, sent) };
    // 08, 57P0x: the server closes the connection. It says so before it does anything with a request, or after it did.
    let ends = code.code().starts_with("08")
        || [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN].contains(&code)
        || code.code() == "57P05";
    if ends {
        return Fault::lost(sent, plain(&error));
    }
    let (kind, text, passing) = with_code(&code);
    let told = Error::new(kind, text).caused_by(plain(&error));
    let missing = [
        SqlState::INVALID_SCHEMA_NAME,
        SqlState::UNDEFINED_FUNCTION,
        SqlState::UNDEFINED_TABLE,
        SqlState::UNDEFINED_COLUMN,
    ]
    .contains(&code);
    // A server that became a replica: another connection may find the primary.
    let broken = missing || code == SqlState::READ_ONLY_SQL_TRANSACTION;
    Fault { error: told, broken, passing, refused: !passing && !broken }
}

/// What the server said, without the words around it.
fn plain(error: &PgError) -> String {
    error.as_db_error().map_or_else(
        || {
            let mut text = error.to_string();
            let mut source = std::error::Error::source(error);
            while let Some(cause) = source {
                text = format!("{text}: {cause}");
                source = cause.source();
            }
            text
        },
        |error| error.message().to_owned(),
    )
}

fn without_code(error: PgError, sent: bool) -> Fault {
    let text = plain(&error);
    let refusal = |kind, words: &str| Fault {
        broken: true,
        ..Fault::refusal(Error::new(kind, words.to_owned()).caused_by(text.clone()))
    };
    if text.contains("does not allow writes") {
        let error = Error::new(ErrorKind::Unavailable, "no server of this URL is a primary; name it in the URL");
        return Fault { error: error.caused_by(text), broken: true, passing: true, refused: false };
    }
    if !sent && (text.contains("password missing") || text.contains("authentication")) {
        return refusal(ErrorKind::Invalid, "the server wants a password; write postgres://user:password@host/db");
    }
    if !sent && (text.contains("TLS") || text.contains("certificate")) {
        return refusal(ErrorKind::Invalid, "TLS cannot be used; see the options sslmode and ca");
    }
    Fault::lost(sent, text)
}

fn with_code(code: &SqlState) -> (ErrorKind, String, bool) {
    let invalid = |text: &str| (ErrorKind::Invalid, text.to_owned(), false);
    let later = |text: &str| (ErrorKind::Unavailable, text.to_owned(), true);
    match code.code() {
        "28P01" => invalid("the server refused user or password; check them in the URL"),
        "28000" => {
            invalid("the server does not let this user in from here; check the URL, and the server's pg_hba.conf")
        }
        "3D000" => invalid("there is no such database; create it, or correct the URL"),
        "42501" => (
            ErrorKind::Invalid,
            format!("this user lacks rights in the database; {MIGRATE}, which ends with the rights that users need"),
            false,
        ),
        "3F000" | "42883" | "42P01" | "42703" => (
            ErrorKind::Invalid,
            format!("the database has not (all of) fencelock's tables and functions; connect again, or {MIGRATE}"),
            false,
        ),
        "25006" => later("the server is a read-only replica; name its primary in the URL"),
        "40001" | "40P01" => later("another transaction was in the way"),
        "55P03" | "57014" => later("the server did not get to it in time"),
        "57P03" => later("the server is starting up or shutting down"),
        "53300" => later("the server has no connection left; raise max_connections, or use PgBouncer with notify=off"),
        "53100" => later("the server's disk is full"),
        "53000" | "53200" | "53400" => later("the server lacks resources"),
        "FL001" => invalid(
            "transactions of this user are not READ COMMITTED by default; set default_transaction_isolation for it to \
             'read committed'",
        ),
        "26000" | "42P05" => invalid(
            "the server forgets prepared statements: there is a connection pooler in between; add notify=off to the URL",
        ),
        _ => (ErrorKind::Engine, "the server answered with an error".to_owned(), false),
    }
}
