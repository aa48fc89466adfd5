//! PostgreSQL: the line lives in functions of the database; waiting is by LISTEN/NOTIFY on one connection per client.
//!
//! * `tables.sql`, `line.sql`: what is kept, and all that happens to a lock.
//! * `link`: the connection, and what the server pushes.
//! * `fault`: what an error means. `tls`: how the connection is protected.
//!
//! See `docs/engines/postgres.md`.

mod fault;
mod link;
mod tls;

use self::link::Link;
use super::sql::{Database, SqlEngine, session};
use crate::url::Url;
use crate::{Error, Name, Result};
use sha2::{Digest, Sha256};
use std::str::FromStr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, TargetSessionAttrs};

const OPTIONS: [&str; 6] = ["ttl", "timeout", "patience", "notify", "sslmode", "ca"];

const TABLES: &str = include_str!("tables.sql");
const FUNCTIONS: &str = include_str!("line.sql");

/// What an administrator grants to users who may not create anything.
const RIGHTS: &str = "
-- The rights that a user of the locks needs, if it is not the one who runs this (put its name in):
--   GRANT USAGE ON SCHEMA fencelock TO app;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencelock TO app;
";

/// All that fencelock needs in a PostgreSQL database, as SQL: tables and functions.
pub(crate) fn migration() -> String {
    format!("BEGIN;\n{TABLES}\n{FUNCTIONS}\nCOMMIT;\n{RIGHTS}")
}

/// The key under which this name is locked inside of a PostgreSQL transaction of one's own; the same that
/// `fencelock.advisory_key(name)` gives in the database.
///
/// ```sql
/// SELECT pg_advisory_xact_lock($1)  -- held until the transaction ends
/// ```
///
/// Such a lock costs no lease and no connection of its own, and it ends exactly with the transaction. It has no token, knows no
/// order of arrival across connections, and **does not exclude** holders of [`Client::mutex`](crate::Client::mutex) of the same name.
///
/// ```
/// let key = fencelock::advisory_key(&fencelock::Name::new("invoice:42")?);
/// assert_eq!(key, 2_061_704_259_760_273_600);
/// # Ok::<(), fencelock::Error>(())
/// ```
pub fn advisory_key(name: &Name) -> i64 {
    let digest = Sha256::new().chain_update("fencelock:").chain_update(name.as_str()).finalize();
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::from_be_bytes(first)
}

/// Opens the database that the URL names, and makes sure that it can be used.
pub(crate) async fn open(url: &Url, text: &str) -> Result<SqlEngine<Link>> {
    let mut url = url.clone();
    let timeout = url.take_duration("timeout")?.unwrap_or(Duration::from_secs(2));
    let patience = url.take_duration("patience")?.unwrap_or(Duration::from_secs(5));
    let notify = match url.take("notify").as_deref() {
        None | Some("on") => true,
        Some("off") => false,
        Some(other) => return Err(Error::invalid(format!("option notify={other}: write on or off"))),
    };
    let (ssl_mode, tls) = tls::options(&mut url)?;
    url.finish(&OPTIONS)?;
    let mut config = config(text)?;
    config.ssl_mode(ssl_mode).connect_timeout(timeout).keepalives_idle(Duration::from_secs(15));
    config.application_name("fencelock");
    if config.get_hosts().len() > 1 {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    let address = address(&config);
    let (pushes, arrived) = mpsc::unbounded_channel();
    let link = Link::new(config, tls, address.clone(), session(), notify, timeout, pushes);
    link.connect().await.map_err(|fault| fault.error.at_engine(&address))?;
    Ok(SqlEngine::new(link, patience, arrived))
}

fn config(text: &str) -> Result<Config> {
    let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
    let bad = |why: &str| {
        Error::invalid(format!(
            "not a PostgreSQL URL ({why}); write postgres://user:password@host[:port][,host…]/database"
        ))
    };
    let mut config = Config::from_str(bare).map_err(|error| {
        // Its text may hold the password.
        let _ = error;
        bad("it cannot be parsed; in user and password write special characters as %XX")
    })?;
    if config.get_hosts().is_empty() {
        return Err(bad("the host is missing"));
    }
    let Some(user) = config.get_user().map(str::to_owned) else { return Err(bad("the user is missing")) };
    if config.get_dbname().is_none() {
        config.dbname(user);
    }
    Ok(config)
}

/// The address to show: without user and password.
fn address(config: &Config) -> String {
    let ports = config.get_ports();
    let hosts = config.get_hosts().iter().enumerate().map(|(index, host)| {
        let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
        match host {
            Host::Tcp(host) => format!("{host}:{port}"),
            #[cfg(unix)]
            Host::Unix(path) => format!("{}:{port}", path.display()),
        }
    });
    format!("postgres://{}/{}", hosts.collect::<Vec<_>>().join(","), config.get_dbname().unwrap_or_default())
}
