//! MySQL and MariaDB: the line lives in procedures of the database; a client asks for its words on a connection of its own.
//!
//! * `tables.sql`, `line.sql`: what is kept, and all that happens to a lock.
//! * `link`: the connections.
//! * `fault`: what an error means.
//!
//! See `docs/engines/mysql.md`.

mod fault;
mod link;

use self::link::Link;
use super::sql::{Database, SqlEngine, session};
use crate::url::Url;
use crate::{Error, Result};
use mysql_async::{Opts, OptsBuilder, SslOpts};
use rustls::crypto::CryptoProvider;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::mpsc;

const OPTIONS: [&str; 5] = ["ttl", "timeout", "patience", "sslmode", "ca"];

const TABLES: &str = include_str!("tables.sql");
const PROCEDURES: &str = include_str!("line.sql");

/// What an administrator grants to users who may not create anything.
const RIGHTS: &str = "
-- The rights that a user of the locks needs, if it is not the one who runs this (put its name and the database's in):
--   GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE ON shop.* TO 'app'@'%';
";

/// All that fencelock needs in a database of MySQL or MariaDB, as the `mysql` program reads it: tables and procedures.
pub(crate) fn migration() -> String {
    format!("{TABLES}\n{PROCEDURES}{RIGHTS}")
}

/// The same, statement by statement.
fn statements() -> Vec<String> {
    let (procedures, last) = PROCEDURES.split_once("DELIMITER ;\n").unwrap_or((PROCEDURES, ""));
    let procedures = procedures.replace("DELIMITER //\n", "");
    let parts = TABLES.split(";\n").chain(procedures.split("\n//\n")).chain(last.split(";\n"));
    let code = |part: &&str| part.lines().any(|line| !line.trim().is_empty() && !line.starts_with("--"));
    parts.filter(code).map(str::to_owned).collect()
}

/// Opens the database that the URL names, and makes sure that it can be used.
pub(crate) async fn open(url: &Url, text: &str) -> Result<SqlEngine<Link>> {
    let mut url = url.clone();
    let timeout = url.take_duration("timeout")?.unwrap_or(Duration::from_secs(2));
    let patience = url.take_duration("patience")?.unwrap_or(Duration::from_secs(5));
    let ssl = ssl(&mut url)?;
    url.finish(&OPTIONS)?;
    let opts = opts(text)?;
    let (host, database) = (opts.ip_or_hostname().to_owned(), opts.db_name().unwrap_or_default().to_owned());
    let address = format!("mysql://{host}:{}/{database}", opts.tcp_port());
    let lock_wait = timeout.as_secs().max(1);
    let opts = OptsBuilder::from_opts(opts)
        .ssl_opts(ssl)
        .tcp_nodelay(true)
        .prefer_socket(false)
        // Otherwise the server would be asked for them with each connection.
        .max_allowed_packet(Some(1 << 20))
        .wait_timeout(Some(86_400))
        .init(vec![format!(
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES', SESSION wait_timeout = 86400, \
             SESSION innodb_lock_wait_timeout = {lock_wait}"
        )]);
    let (pushes, arrived) = mpsc::unbounded_channel();
    let link = Link::new(opts.into(), address.clone(), session(), timeout, pushes);
    link.connect().await.map_err(|fault| fault.error.at_engine(&address))?;
    Ok(SqlEngine::new(link, patience, arrived))
}

/// `sslmode` and `ca`. `disable`, or nothing: no TLS. `require`, `verify-full`, or a `ca`: always, and the server must prove that
/// it is the one of the URL.
fn ssl(url: &mut Url) -> Result<Option<SslOpts>> {
    let ca = url.take("ca");
    match (url.take("sslmode").as_deref(), &ca) {
        (Some("require" | "verify-full"), _) | (None, Some(_)) => {}
        (Some("disable") | None, None) => return Ok(None),
        (Some("disable"), Some(_)) => {
            return Err(Error::invalid("option ca is for TLS; write sslmode=verify-full, or leave sslmode out"));
        }
        (Some(other), _) => {
            return Err(Error::invalid(format!(
                "option sslmode={other}: write disable, require or verify-full (the last two mean the same here)"
            )));
        }
    }
    if CryptoProvider::get_default().is_none() {
        // TLS panics in a program that has chosen no cryptography. Somebody else may choose at the same moment: that is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let Some(path) = ca else { return Ok(Some(SslOpts::default())) };
    if let Err(error) = std::fs::read(&path) {
        return Err(Error::invalid(format!("option ca={path}: cannot read the file")).caused_by(error));
    }
    let roots = vec![PathBuf::from(path).into()];
    Ok(Some(SslOpts::default().with_root_certs(roots).with_disable_built_in_roots(true)))
}

fn opts(text: &str) -> Result<Opts> {
    let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
    let bare = bare.strip_prefix("mariadb:").map_or_else(|| bare.to_owned(), |rest| format!("mysql:{rest}"));
    let bad = |why: &str| {
        Error::invalid(format!("not a MySQL URL ({why}); write mysql://user:password@host[:port]/database"))
    };
    // What the parser says may hold the password.
    let opts = Opts::from_url(&bare)
        .map_err(|_| bad("it cannot be parsed; in user and password write special characters as %XX"))?;
    match (opts.user(), opts.db_name()) {
        (None | Some(""), _) => Err(bad("the user is missing")),
        (_, None | Some("")) => Err(bad("the database is missing")),
        _ => Ok(opts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_migration_is_cut_into_statements() {
        let statements = statements();
        assert_eq!(statements.iter().filter(|text| text.contains("CREATE TABLE")).count(), 5);
        let procedures = statements.iter().filter(|text| text.contains("CREATE PROCEDURE")).count();
        assert_eq!(procedures, statements.iter().filter(|text| text.contains("DROP PROCEDURE")).count());
        assert_eq!(procedures, PROCEDURES.matches("CREATE PROCEDURE").count());
        assert!(statements.iter().all(|text| !text.contains("DELIMITER") && !text.contains("//\n")));
        assert!(statements.last().is_some_and(|text| text.contains("INSERT INTO fencelock_mark")));
    }
}
