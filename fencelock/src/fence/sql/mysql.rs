//! Fences on MySQL and MariaDB, with the caller's mysql_async: a `Conn` or a `Transaction`.

use super::{Dialect, Guard, Row, Statement, number, restless};
use crate::fence::Retry;
use crate::{Error, ErrorKind, Name, Owner, Result, Token};
use mysql_async::prelude::{FromValue, Queryable};
use mysql_async::{Params, Value};

const DIALECT: Dialect = Dialect::MySql;
/// How often a statement is repeated when the row came about in between.
const TRIES: usize = 5;

/// The row of `table` that `filter` finds.
///
/// ```no_run
/// # use fencelock::{fence::sql::mysql, Token};
/// # async fn example(mut conn: mysql_async::Conn, token: Token) -> Result<(), Box<dyn std::error::Error>> {
/// let mut work = conn.start_transaction(mysql_async::TxOpts::default()).await?;
/// let invoice = mysql::row("invoices", "id = ?", &[42.into()]);
/// mysql::write(&mut work, &invoice, token, "state = ?", &["billed".into()]).await?;
/// work.commit().await?;
/// # Ok(()) }
/// ```
pub fn row(table: &str, filter: &str, params: &[Value]) -> Row<Value> {
    Row::new(table, filter, params)
}

/// Shows the token to the row: from here on nobody older can write it.
///
/// # Errors
/// As [`write()`].
pub async fn raise(connection: &mut impl Queryable, row: &Row<Value>, token: Token) -> Result<()> {
    write(connection, row, token, "", &[]).await
}

/// Changes the row, if the token is not older than the newest that it carries.
///
/// # Errors
/// * `Fenced`: the token is older. Nothing was changed.
/// * `Invalid`: there is no such row, or there are several.
/// * `Engine`: the database answered with an error. `Ambiguous`: the connection broke.
pub async fn write(
    connection: &mut impl Queryable,
    row: &Row<Value>,
    token: Token,
    set: &str,
    params: &[Value],
) -> Result<()> {
    let update = row.update(DIALECT, set, params, number(token)?.into());
    for _ in 0..TRIES {
        // The server counts rows that changed: the same write a second time is no change, and no refusal either.
        if !row.must_look(execute(connection, &update).await?)? {
            return Ok(());
        }
        let seen: Vec<Option<i64>> = column(connection, &row.seen(DIALECT)).await?;
        if row.judge(&seen, token, true)? {
            return Ok(());
        }
    }
    Err(restless(&row.describe()))
}

/// Puts the owner's mark on the row.
///
/// # Errors
/// As [`write()`], without `Fenced`.
pub async fn mark(connection: &mut impl Queryable, row: &Row<Value>, owner: Owner) -> Result<()> {
    let owner = owner.to_string();
    let changed = execute(connection, &row.put_mark(DIALECT, owner.as_str().into())).await?;
    if !row.must_look(changed)? {
        return Ok(());
    }
    // Nothing changed: it is there already, or there is no row.
    let seen: Vec<Option<String>> = column(connection, &row.seen_mark(DIALECT)).await?;
    row.judge_mark(&seen, &owner, true).map(drop)
}

/// Changes the row, if it still carries the owner's mark. The mark stays.
///
/// # Errors
/// As [`write()`]; `Fenced` when the row carries another mark.
pub async fn write_marked(
    connection: &mut impl Queryable,
    row: &Row<Value>,
    owner: Owner,
    set: &str,
    params: &[Value],
) -> Result<()> {
    let owner = owner.to_string();
    let update = row.update_marked(DIALECT, set, params, owner.as_str().into());
    for _ in 0..TRIES {
        if !row.must_look(execute(connection, &update).await?)? {
            return Ok(());
        }
        let seen: Vec<Option<String>> = column(connection, &row.seen_mark(DIALECT)).await?;
        if row.judge_mark(&seen, &owner, true)? {
            return Ok(());
        }
    }
    Err(restless(&row.describe()))
}

/// Creates the guard's table if it is not there.
///
/// # Errors
/// `Engine` when the database does not let us.
pub async fn create_guard(connection: &mut impl Queryable, guard: &Guard) -> Result<()> {
    connection.query_drop(guard.create_table(DIALECT)).await.map_err(explain)
}

/// Lets the token in for this resource: the first step of the caller's transaction, which does the rest.
///
/// # Errors
/// `Fenced` when the token is older: nothing was changed; roll back. Others as for [`write()`]. Two transactions that come
/// with the first tokens of a resource at one moment can meet in a deadlock, which the server ends with error 1213: repeat the
/// transaction, as after any deadlock.
pub async fn admit(connection: &mut impl Queryable, guard: &Guard, resource: &str, token: Token) -> Result<()> {
    let (resource, token_number) = (Name::new(resource)?, number(token)?);
    let name = Value::Bytes(resource.as_str().as_bytes().to_vec());
    let params = vec![name.clone(), token_number.into(), token_number.into()];
    let changed = execute(connection, &Statement { sql: guard.admit(DIALECT), params }).await?;
    // Two is the server's way to say that a row was there and was changed. One and none depend on the connection's settings.
    if changed == 2 {
        return Ok(());
    }
    let seen = Statement { sql: guard.seen(DIALECT, true), params: vec![name] };
    let seen: Vec<Option<i64>> = column(connection, &seen).await?;
    Guard::judge(&resource, seen.into_iter().flatten().next(), token)
}

/// The newest token that the guard has let in for this resource.
///
/// # Errors
/// `Engine` when the database answers with an error.
pub async fn newest(connection: &mut impl Queryable, guard: &Guard, resource: &str) -> Result<Option<Token>> {
    let name = Value::Bytes(resource.as_bytes().to_vec());
    let seen = Statement { sql: guard.seen(DIALECT, false), params: vec![name] };
    let seen: Vec<Option<i64>> = column(connection, &seen).await?;
    Ok(seen.into_iter().flatten().next().and_then(|newest| u64::try_from(newest).ok()).map(Token::new))
}

/// Reads `columns` of the row, lets `change` compute the parameters of `set`, and writes if the version is still the one that was
/// read; otherwise starts again, after a pause. `None` from `change` leaves the row as it is.
///
/// Not inside of a transaction, which repeats its reads and would see the same version for ever.
///
/// # Errors
/// * `Conflict`: others changed the row in each attempt. Nothing was changed.
/// * `Invalid`: there is no such row. `Engine`, `Ambiguous`: as for [`write()`]. And whatever `change` returns.
pub async fn modify(
    connection: &mut impl Queryable,
    row: &Row<Value>,
    retry: Retry,
    columns: &str,
    set: &str,
    mut change: impl FnMut(&mysql_async::Row) -> Result<Option<Vec<Value>>>,
) -> Result<()> {
    let read = row.read_version(columns);
    let mut failed = 0;
    loop {
        let found: Option<mysql_async::Row> =
            connection.exec_first(&read.sql, positional(&read.params)).await.map_err(explain)?;
        let found = found.ok_or_else(|| row.no_row())?;
        let version: i64 = value(&found, found.len() - 1)?;
        let Some(next) = change(&found)? else { return Ok(()) };
        if execute(connection, &row.update_version(DIALECT, set, &next, version.into())).await? > 0 {
            return Ok(());
        }
        failed += 1;
        tokio::time::sleep(retry.pause_after(failed, &row.describe())?).await;
    }
}

fn positional(params: &[Value]) -> Params {
    if params.is_empty() { Params::Empty } else { Params::Positional(params.to_vec()) }
}

async fn execute(connection: &mut impl Queryable, statement: &Statement<Value>) -> Result<u64> {
    let done = connection.exec_iter(&statement.sql, positional(&statement.params)).await.map_err(explain)?;
    let changed = done.affected_rows();
    done.drop_result().await.map_err(explain)?;
    Ok(changed)
}

async fn column<T: FromValue>(connection: &mut impl Queryable, statement: &Statement<Value>) -> Result<Vec<Option<T>>> {
    let rows: Vec<mysql_async::Row> =
        connection.exec(&statement.sql, positional(&statement.params)).await.map_err(explain)?;
    rows.iter().map(|row| value(row, 0)).collect()
}

fn value<T: FromValue>(row: &mysql_async::Row, index: usize) -> Result<T> {
    let value = row.get_opt::<T, _>(index).and_then(std::result::Result::ok);
    value
        .ok_or_else(|| Error::invalid("a column of the fence holds something else; it must be BIGINT, a mark CHAR(32)"))
}

fn explain(error: mysql_async::Error) -> Error {
    let broken = matches!(error, mysql_async::Error::Io(_));
    let (kind, text) = if broken {
        (
            ErrorKind::Ambiguous,
            "the connection to the database broke; the statement may have been carried out, so look before going on",
        )
    } else {
        (ErrorKind::Engine, "the database answered with an error; nothing was changed")
    };
    Error::new(kind, text).caused_by(error)
}
