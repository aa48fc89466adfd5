//! Fences on SQLite, with the caller's rusqlite. A `Transaction` is a `Connection`, so all of this works in one.

use super::{Dialect, Guard, Row, Statement, number, restless};
use crate::fence::Retry;
use crate::{Error, ErrorKind, Name, Owner, Result, Token};
use rusqlite::types::Value;
use rusqlite::{Connection, ErrorCode, OptionalExtension, ToSql, params_from_iter};

/// A parameter.
pub type Param<'a> = &'a dyn ToSql;

const DIALECT: Dialect = Dialect::Sqlite;
/// How often a statement is repeated when the row came about in between.
const TRIES: usize = 5;

/// The row of `table` that `filter` finds.
pub fn row<'a>(table: &str, filter: &str, params: &[Param<'a>]) -> Row<Param<'a>> {
    Row::new(table, filter, params)
}

/// Shows the token to the row: from here on nobody older can write it.
///
/// # Errors
/// As [`write()`].
pub fn raise(connection: &Connection, row: &Row<Param<'_>>, token: Token) -> Result<()> {
    write(connection, row, token, "", &[])
}

/// Changes the row, if the token is not older than the newest that it carries.
///
/// # Errors
/// * `Fenced`: the token is older. Nothing was changed.
/// * `Invalid`: there is no such row, or there are several.
/// * `Unavailable`: the database was busy for too long. `Engine`: it answered with an error.
///
/// ```
/// # use fencelock::{fence::sql::sqlite, ErrorKind, Token};
/// # let db = rusqlite::Connection::open_in_memory().unwrap();
/// # db.execute_batch("CREATE TABLE invoices (id INTEGER PRIMARY KEY, state TEXT, fence BIGINT NOT NULL DEFAULT 0); INSERT INTO invoices (id) VALUES (42)").unwrap();
/// let invoice = sqlite::row("invoices", "id = ?", &[&42]);
/// sqlite::write(&db, &invoice, Token::new(8), "state = ?", &[&"billed"])?;
/// let late = sqlite::write(&db, &invoice, Token::new(7), "state = ?", &[&"draft"]).unwrap_err();
/// assert_eq!(late.kind(), ErrorKind::Fenced);
/// # Ok::<(), fencelock::Error>(())
/// ```
pub fn write(
    connection: &Connection,
    row: &Row<Param<'_>>,
    token: Token,
    set: &str,
    params: &[Param<'_>],
) -> Result<()> {
    let token_number = number(token)?;
    let update = row.update(DIALECT, set, params, &token_number);
    for _ in 0..TRIES {
        if !row.must_look(execute(connection, &update)?)?
            || row.judge(&all(connection, &row.seen(DIALECT))?, token, false)?
        {
            return Ok(());
        }
    }
    Err(restless(&row.describe()))
}

/// Puts the owner's mark on the row.
///
/// # Errors
/// As [`write()`], without `Fenced`.
pub fn mark(connection: &Connection, row: &Row<Param<'_>>, owner: Owner) -> Result<()> {
    let owner = owner.to_string();
    if row.must_look(execute(connection, &row.put_mark(DIALECT, &owner))?)? { Err(row.no_row()) } else { Ok(()) }
}

/// Changes the row, if it still carries the owner's mark. The mark stays.
///
/// # Errors
/// As [`write()`]; `Fenced` when the row carries another mark.
pub fn write_marked(
    connection: &Connection,
    row: &Row<Param<'_>>,
    owner: Owner,
    set: &str,
    params: &[Param<'_>],
) -> Result<()> {
    let owner = owner.to_string();
    let update = row.update_marked(DIALECT, set, params, &owner);
    for _ in 0..TRIES {
        let done = !row.must_look(execute(connection, &update)?)?
            || row.judge_mark(&all(connection, &row.seen_mark(DIALECT))?, &owner, false)?;
        if done {
            return Ok(());
        }
    }
    Err(restless(&row.describe()))
}

/// Creates the guard's table if it is not there.
///
/// # Errors
/// `Engine` when the database does not let us.
pub fn create_guard(connection: &Connection, guard: &Guard) -> Result<()> {
    connection.execute_batch(&guard.create_table(DIALECT)).map_err(explain)
}

/// Lets the token in for this resource: the first step of the caller's transaction, which does the rest.
///
/// # Errors
/// `Fenced` when the token is older: nothing was changed; roll back. Others as for [`write()`].
pub fn admit(connection: &Connection, guard: &Guard, resource: &str, token: Token) -> Result<()> {
    let (resource, token_number) = (Name::new(resource)?, number(token)?);
    let mut insert = connection.prepare_cached(&guard.admit(DIALECT)).map_err(explain)?;
    if insert.execute((resource.as_str(), token_number)).map_err(explain)? > 0 {
        return Ok(());
    }
    Guard::judge(&resource, newest_number(connection, guard, resource.as_str())?, token)
}

/// The newest token that the guard has let in for this resource.
///
/// # Errors
/// `Engine` when the database answers with an error.
pub fn newest(connection: &Connection, guard: &Guard, resource: &str) -> Result<Option<Token>> {
    let newest = newest_number(connection, guard, resource)?;
    Ok(newest.and_then(|newest| u64::try_from(newest).ok()).map(Token::new))
}

fn newest_number(connection: &Connection, guard: &Guard, resource: &str) -> Result<Option<i64>> {
    connection.query_row(&guard.seen(DIALECT, false), [resource], |row| row.get(0)).optional().map_err(explain)
}

/// Reads `columns` of the row, lets `change` compute the parameters of `set`, and writes if the version is still the one that was
/// read; otherwise starts again, after a pause. `None` from `change` leaves the row as it is. Blocks.
///
/// Not inside of a transaction: that would see the same version for ever.
///
/// # Errors
/// * `Conflict`: others changed the row in each attempt. Nothing was changed.
/// * `Invalid`: there is no such row. `Unavailable`, `Engine`: as for [`write()`]. And whatever `change` returns.
pub fn modify(
    connection: &Connection,
    row: &Row<Param<'_>>,
    retry: Retry,
    columns: &str,
    set: &str,
    mut change: impl FnMut(&rusqlite::Row<'_>) -> Result<Option<Vec<Value>>>,
) -> Result<()> {
    let read = row.read_version(columns);
    let mut failed = 0;
    loop {
        let found = {
            let mut select = connection.prepare_cached(&read.sql).map_err(explain)?;
            let last = select.column_count() - 1;
            let mut rows = select.query(params_from_iter(&read.params)).map_err(explain)?;
            match rows.next().map_err(explain)? {
                None => return Err(row.no_row()),
                Some(found) => (found.get::<_, i64>(last).map_err(explain)?, change(found)?),
            }
        };
        let (version, Some(next)) = found else { return Ok(()) };
        let params: Vec<Param<'_>> = next.iter().map(|value| value as Param<'_>).collect();
        if execute(connection, &row.update_version(DIALECT, set, &params, &version))? > 0 {
            return Ok(());
        }
        failed += 1;
        std::thread::sleep(retry.pause_after(failed, &row.describe())?);
    }
}

fn execute(connection: &Connection, statement: &Statement<Param<'_>>) -> Result<u64> {
    let mut prepared = connection.prepare_cached(&statement.sql).map_err(explain)?;
    let changed = prepared.execute(params_from_iter(&statement.params)).map_err(explain)?;
    Ok(changed as u64)
}

fn all<T: rusqlite::types::FromSql>(
    connection: &Connection,
    statement: &Statement<Param<'_>>,
) -> Result<Vec<Option<T>>> {
    let mut prepared = connection.prepare_cached(&statement.sql).map_err(explain)?;
    let rows = prepared.query_map(params_from_iter(&statement.params), |row| row.get(0)).map_err(explain)?;
    rows.collect::<rusqlite::Result<_>>().map_err(explain)
}

fn explain(error: rusqlite::Error) -> Error {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::new(
            ErrorKind::Unavailable,
            "SQLite is busy with another writer; set a busy_timeout, or begin the transaction as IMMEDIATE",
        ),
        _ => Error::new(ErrorKind::Engine, "SQLite answered with an error; nothing was changed"),
    }
    .caused_by(error)
}
