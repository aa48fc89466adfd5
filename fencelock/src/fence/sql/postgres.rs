//! Fences on PostgreSQL, with the caller's tokio-postgres: a `Client`, a `Transaction`, or what a pool hands out.

use super::{Dialect, Guard, Row, Statement, number, restless};
use crate::fence::Retry;
use crate::{Error, ErrorKind, Name, Owner, Result, Token};
use tokio_postgres::GenericClient;
use tokio_postgres::types::ToSql;

/// A parameter.
pub type Param<'a> = &'a (dyn ToSql + Sync);

const DIALECT: Dialect = Dialect::Postgres;
/// How often a statement is repeated when the row came about in between.
const TRIES: usize = 5;

/// The row of `table` that `filter` finds. Its parameters are `$1` to `$n`.
///
/// ```no_run
/// # use fencelock::{fence::sql::postgres, Token};
/// # async fn example(mut client: tokio_postgres::Client, token: Token) -> Result<(), Box<dyn std::error::Error>> {
/// let work = client.transaction().await?;
/// let invoice = postgres::row("invoices", "id = $1", &[&42_i64]);
/// postgres::write(&work, &invoice, token, "state = $2", &[&"billed"]).await?;
/// work.commit().await?;
/// # Ok(()) }
/// ```
pub fn row<'a>(table: &str, filter: &str, params: &[Param<'a>]) -> Row<Param<'a>> {
    Row::new(table, filter, params)
}

/// Shows the token to the row: from here on nobody older can write it.
///
/// # Errors
/// As [`write()`].
pub async fn raise(client: &impl GenericClient, row: &Row<Param<'_>>, token: Token) -> Result<()> {
    write(client, row, token, "", &[]).await
}

/// Changes the row, if the token is not older than the newest that it carries.
///
/// # Errors
/// * `Fenced`: the token is older. Nothing was changed.
/// * `Invalid`: there is no such row, or there are several.
/// * `Engine`: the database answered with an error. `Ambiguous`: the connection broke.
pub async fn write(
    client: &impl GenericClient,
    row: &Row<Param<'_>>,
    token: Token,
    set: &str,
    params: &[Param<'_>],
) -> Result<()> {
    let token_number = number(token)?;
    let update = row.update(DIALECT, set, params, &token_number);
    for _ in 0..TRIES {
        if !row.must_look(execute(client, &update).await?)? {
            return Ok(());
        }
        let seen = query(client, &row.seen(DIALECT)).await?;
        let seen: Vec<Option<i64>> = column(&seen)?;
        if row.judge(&seen, token, false)? {
            return Ok(());
        }
    }
    Err(restless(&row.describe()))
}

/// Puts the owner's mark on the row.
///
/// # Errors
/// As [`write()`], without `Fenced`.
pub async fn mark(client: &impl GenericClient, row: &Row<Param<'_>>, owner: Owner) -> Result<()> {
    let owner = owner.to_string();
    let changed = execute(client, &row.put_mark(DIALECT, &owner)).await?;
    if row.must_look(changed)? { Err(row.no_row()) } else { Ok(()) }
}

/// Changes the row, if it still carries the owner's mark. The mark stays.
///
/// # Errors
/// As [`write()`]; `Fenced` when the row carries another mark.
pub async fn write_marked(
    client: &impl GenericClient,
    row: &Row<Param<'_>>,
    owner: Owner,
    set: &str,
    params: &[Param<'_>],
) -> Result<()> {
    let owner = owner.to_string();
    let update = row.update_marked(DIALECT, set, params, &owner);
    for _ in 0..TRIES {
        if !row.must_look(execute(client, &update).await?)? {
            return Ok(());
        }
        let seen = query(client, &row.seen_mark(DIALECT)).await?;
        let seen: Vec<Option<String>> = column(&seen)?;
        if row.judge_mark(&seen, &owner, false)? {
            return Ok(());
        }
    }
    Err(restless(&row.describe()))
}

/// Creates the guard's table if it is not there.
///
/// # Errors
/// `Engine` when the database does not let us.
pub async fn create_guard(client: &impl GenericClient, guard: &Guard) -> Result<()> {
    client.batch_execute(&guard.create_table(DIALECT)).await.map_err(explain)
}

/// Lets the token in for this resource: the first step of the caller's transaction, which does the rest.
///
/// # Errors
/// `Fenced` when the token is older: nothing was changed; roll back. Others as for [`write()`].
pub async fn admit(client: &impl GenericClient, guard: &Guard, resource: &str, token: Token) -> Result<()> {
    let (resource, token_number) = (Name::new(resource)?, number(token)?);
    let name = resource.as_str();
    let params = vec![&name as Param<'_>, &token_number];
    if execute(client, &Statement { sql: guard.admit(DIALECT), params }).await? > 0 {
        return Ok(());
    }
    Guard::judge(&resource, newest_number(client, guard, resource.as_str()).await?, token)
}

/// The newest token that the guard has let in for this resource.
///
/// # Errors
/// `Engine` when the database answers with an error.
pub async fn newest(client: &impl GenericClient, guard: &Guard, resource: &str) -> Result<Option<Token>> {
    let newest = newest_number(client, guard, resource).await?;
    Ok(newest.and_then(|newest| u64::try_from(newest).ok()).map(Token::new))
}

async fn newest_number(client: &impl GenericClient, guard: &Guard, resource: &str) -> Result<Option<i64>> {
    let select = Statement { sql: guard.seen(DIALECT, false), params: vec![&resource as Param<'_>] };
    Ok(column::<i64>(&query(client, &select).await?)?.into_iter().flatten().next())
}

/// What [`modify`] is to set: the parameters after those of the row's filter.
pub type Values = Vec<Box<dyn ToSql + Sync + Send>>;

/// Reads `columns` of the row, lets `change` compute the parameters of `set`, and writes if the version is still the one that was
/// read; otherwise starts again, after a pause. `None` from `change` leaves the row as it is.
///
/// Not inside of a transaction that repeats its reads: that would see the same version for ever.
///
/// # Errors
/// * `Conflict`: others changed the row in each attempt. Nothing was changed.
/// * `Invalid`: there is no such row. `Engine`, `Ambiguous`: as for [`write()`]. And whatever `change` returns.
///
/// ```no_run
/// # use fencelock::fence::{Retry, sql::postgres};
/// # async fn example(client: tokio_postgres::Client) -> fencelock::Result<()> {
/// let account = postgres::row("accounts", "id = $1", &[&7_i64]);
/// postgres::modify(&client, &account, Retry::default(), "balance", "balance = $2", |row| {
///     let balance: i64 = row.get(0);
///     Ok(Some(vec![Box::new(balance + 5)]))
/// })
/// .await?;
/// # Ok(()) }
/// ```
pub async fn modify(
    client: &impl GenericClient,
    row: &Row<Param<'_>>,
    retry: Retry,
    columns: &str,
    set: &str,
    mut change: impl FnMut(&tokio_postgres::Row) -> Result<Option<Values>>,
) -> Result<()> {
    let read = row.read_version(columns);
    let mut failed = 0;
    loop {
        let found = query(client, &read).await?;
        let found = found.first().ok_or_else(|| row.no_row())?;
        let version: i64 = found.try_get(found.len() - 1).map_err(explain)?;
        let Some(next) = change(found)? else { return Ok(()) };
        let params: Vec<Param<'_>> = next.iter().map(|value| &**value as Param<'_>).collect();
        if execute(client, &row.update_version(DIALECT, set, &params, &version)).await? > 0 {
            return Ok(());
        }
        failed += 1;
        tokio::time::sleep(retry.pause_after(failed, &row.describe())?).await;
    }
}

async fn execute(client: &impl GenericClient, statement: &Statement<Param<'_>>) -> Result<u64> {
    client.execute(&statement.sql, &statement.params).await.map_err(explain)
}

async fn query(client: &impl GenericClient, statement: &Statement<Param<'_>>) -> Result<Vec<tokio_postgres::Row>> {
    client.query(&statement.sql, &statement.params).await.map_err(explain)
}

fn column<'a, T: tokio_postgres::types::FromSql<'a>>(rows: &'a [tokio_postgres::Row]) -> Result<Vec<Option<T>>> {
    rows.iter().map(|row| row.try_get(0).map_err(explain)).collect()
}

fn explain(error: tokio_postgres::Error) -> Error {
    if error.is_closed()
        || error.as_db_error().is_none()
            && std::error::Error::source(&error).is_some_and(|source| source.is::<std::io::Error>())
    {
        return Error::new(
            ErrorKind::Ambiguous,
            "the connection to PostgreSQL broke; the statement may have been carried out, so look before going on",
        )
        .caused_by(error);
    }
    // The client's own text is only "db error"; what the server said stands in the source.
    let told = error.as_db_error().map(|told| format!(": {} ({})", told.message(), told.code().code()));
    Error::new(
        ErrorKind::Engine,
        format!("PostgreSQL answered with an error, and nothing was changed{}", told.unwrap_or_default()),
    )
    .caused_by(error)
}
