//! Fences in a database: the condition that one UPDATE needs, a table of tokens for everything else, the mark, and the version.
//!
//! Nothing here opens a connection. What is done is done with the caller's own client, in the caller's own transaction: with
//! `postgres` (tokio-postgres), `mysql` (mysql_async) and `sqlite` (rusqlite), each behind its feature `fence-…`; or, with any
//! other client, with the text and the parameters that [`Row`] and [`Guard`] make.

#[cfg(feature = "fence-mysql")]
pub mod mysql;
#[cfg(feature = "fence-postgres")]
pub mod postgres;
#[cfg(feature = "fence-sqlite")]
pub mod sqlite;

use super::fenced;
use crate::{Error, ErrorKind, Name, Result, Token};

/// Which SQL is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dialect {
    /// `$1`, `$2`, …
    Postgres,
    /// MySQL and MariaDB: `?`.
    MySql,
    /// `?`
    Sqlite,
}

impl Dialect {
    /// Reads that must see the newest state, and keep it as it is until the transaction ends. SQLite locks the whole file anyway.
    fn locking(self) -> &'static str {
        if self == Dialect::Sqlite { "" } else { " FOR UPDATE" }
    }
}

/// A statement to be carried out: text and parameters, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement<P> {
    /// The text.
    pub sql: String,
    /// The parameters, of the caller's client.
    pub params: Vec<P>,
}

/// One row that is protected: by a fence, a mark or a version, each of which is a column of it.
///
/// `P` is the parameter type of the caller's client. `postgres::row`, `mysql::row` and `sqlite::row` make one.
///
/// # Placeholders
/// The filter is given first. On PostgreSQL its parameters are `$1` to `$n`, and those of what is set go on from `$n+1`. On the others,
/// every parameter is a plain `?`.
///
/// # Texts
/// Table, columns, filter and what is set are parts of a statement, written by a programmer. What comes from outside is a parameter.
///
/// ```
/// use fencelock::fence::sql::{Dialect, Row};
///
/// let row = Row::new("invoices", "id = $1", &["42"]);
/// let update = row.update(Dialect::Postgres, "state = $2", &["billed"], "7");
/// assert_eq!(
///     update.sql,
///     "UPDATE invoices SET state = $2, fence = $3::bigint WHERE (id = $1) AND COALESCE(fence, 0) <= $3::bigint"
/// );
/// assert_eq!(update.params, ["42", "billed", "7"]);
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Row<P> {
    table: String,
    filter: String,
    params: Vec<P>,
    fence: String,
    mark: String,
    version: String,
}

impl<P: Clone> Row<P> {
    /// The row of `table` that `filter` finds: one, by its key.
    pub fn new(table: &str, filter: &str, params: &[P]) -> Self {
        Self {
            table: table.to_owned(),
            filter: filter.to_owned(),
            params: params.to_vec(),
            fence: "fence".to_owned(),
            mark: "mark".to_owned(),
            version: "version".to_owned(),
        }
    }

    /// The column of the newest token, `fence` unless told otherwise: a 64-bit integer, `BIGINT NOT NULL DEFAULT 0`.
    pub fn fence_column(self, column: &str) -> Self {
        Self { fence: column.to_owned(), ..self }
    }

    /// The column of the owner's mark, `mark` unless told otherwise: text of 32 characters.
    pub fn mark_column(self, column: &str) -> Self {
        Self { mark: column.to_owned(), ..self }
    }

    /// The column of the version, `version` unless told otherwise: a 64-bit integer, `BIGINT NOT NULL DEFAULT 0`.
    pub fn version_column(self, column: &str) -> Self {
        Self { version: column.to_owned(), ..self }
    }

    /// `UPDATE … SET <set>, fence = <token> WHERE (<filter>) AND fence <= <token>`. It changes one row, or, with an older token, none.
    /// With an empty `set` it only shows the token.
    pub fn update(&self, dialect: Dialect, set: &str, params: &[P], token: P) -> Statement<P> {
        let fence = &self.fence;
        let extra =
            Extra { value: token, cast: "bigint", assign: Some(fence), compare: &format!("COALESCE({fence}, 0) <=") };
        self.change(dialect, set, params, &extra)
    }

    /// Puts the owner's mark on the row, whoever's was there.
    pub fn put_mark(&self, dialect: Dialect, owner: P) -> Statement<P> {
        let (table, mark, filter) = (&self.table, &self.mark, &self.filter);
        match dialect {
            Dialect::Postgres => {
                let params = [&self.params, &[owner][..]].concat();
                let number = params.len();
                Statement { sql: format!("UPDATE {table} SET {mark} = ${number}::text WHERE ({filter})"), params }
            }
            _ => {
                let params = [&[owner][..], &self.params].concat();
                Statement { sql: format!("UPDATE {table} SET {mark} = ? WHERE ({filter})"), params }
            }
        }
    }

    /// `UPDATE … SET <set> WHERE (<filter>) AND mark = <owner>`.
    pub fn update_marked(&self, dialect: Dialect, set: &str, params: &[P], owner: P) -> Statement<P> {
        let extra = Extra { value: owner, cast: "text", assign: None, compare: &format!("{} =", self.mark) };
        self.change(dialect, set, params, &extra)
    }

    /// `UPDATE … SET <set>, version = version + 1 WHERE (<filter>) AND version = <version>`.
    pub fn update_version(&self, dialect: Dialect, set: &str, params: &[P], version: P) -> Statement<P> {
        let column = &self.version;
        let mut list = vec![format!("{column} = {column} + 1")];
        if !set.is_empty() {
            list.insert(0, set.to_owned());
        }
        let extra = Extra { value: version, cast: "bigint", assign: None, compare: &format!("{column} =") };
        self.change(dialect, &list.join(", "), params, &extra)
    }

    /// Reads `columns`, and the version as the last one.
    pub fn read_version(&self, columns: &str) -> Statement<P> {
        self.select(&format!("{columns}, {}", self.version), "")
    }

    /// The token that the row carries, read so that it stays as it is until the transaction ends.
    pub fn seen(&self, dialect: Dialect) -> Statement<P> {
        let column = match dialect {
            Dialect::Postgres => format!("{}::bigint", self.fence),
            Dialect::MySql => format!("CAST({} AS SIGNED)", self.fence),
            Dialect::Sqlite => self.fence.clone(),
        };
        self.select(&column, dialect.locking())
    }

    /// The mark that the row carries, read likewise.
    pub fn seen_mark(&self, dialect: Dialect) -> Statement<P> {
        self.select(&self.mark, dialect.locking())
    }

    fn select(&self, columns: &str, ending: &str) -> Statement<P> {
        let sql = format!("SELECT {columns} FROM {} WHERE ({}){ending}", self.table, self.filter);
        Statement { sql, params: self.params.clone() }
    }

    fn change(&self, dialect: Dialect, set: &str, params: &[P], extra: &Extra<'_, P>) -> Statement<P> {
        let place = match dialect {
            Dialect::Postgres => format!("${}::{}", self.params.len() + params.len() + 1, extra.cast),
            _ => "?".to_owned(),
        };
        let assigned = extra.assign.map(|column| format!("{column} = {place}"));
        let list: Vec<&str> = Some(set).filter(|set| !set.is_empty()).into_iter().chain(assigned.as_deref()).collect();
        let (table, list, filter, compare) = (&self.table, list.join(", "), &self.filter, extra.compare);
        let sql = format!("UPDATE {table} SET {list} WHERE ({filter}) AND {compare} {place}");
        let value = std::slice::from_ref(&extra.value);
        let params = match (dialect, extra.assign) {
            (Dialect::Postgres, _) => [&self.params, params, value].concat(),
            (_, None) => [params, &self.params, value].concat(),
            (_, Some(_)) => [params, value, &self.params, value].concat(),
        };
        Statement { sql, params }
    }

    #[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
    fn describe(&self) -> String {
        format!("the row of {} where {}", self.table, self.filter)
    }

    /// What follows from the number of rows that an UPDATE changed: true when the row must be looked at.
    #[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
    fn must_look(&self, changed: u64) -> Result<bool> {
        if changed <= 1 {
            return Ok(changed == 0);
        }
        Err(Error::invalid(format!(
            "{} is {changed} rows, and a fence is for one: roll back this transaction; for several rows, use a Guard",
            self.describe()
        )))
    }

    /// What follows from what the row carries after an UPDATE that changed nothing: false when the UPDATE is to be repeated,
    /// because the row came about in between. `equal`: the same token twice changes nothing on this database.
    #[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
    fn judge(&self, seen: &[Option<i64>], token: Token, equal: bool) -> Result<bool> {
        let Some(newest) = seen.iter().max() else { return Err(self.no_row()) };
        let newest = Token::new(newest.and_then(|newest| u64::try_from(newest).ok()).unwrap_or(0));
        if newest > token {
            return Err(fenced(&self.describe(), token, newest));
        }
        Ok(equal && newest == token)
    }

    /// The same for a mark.
    #[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
    fn judge_mark(&self, seen: &[Option<String>], owner: &str, equal: bool) -> Result<bool> {
        match seen.first() {
            None => Err(self.no_row()),
            Some(Some(mark)) if mark == owner => Ok(equal),
            Some(_) => Err(Error::new(
                ErrorKind::Fenced,
                format!("{} carries another owner's mark, so this lock was lost; nothing was changed", self.describe()),
            )
            .during("write")),
        }
    }

    #[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
    fn no_row(&self) -> Error {
        Error::invalid(format!("{} does not exist; insert it first. Nothing was changed", self.describe()))
    }
}

/// The one more parameter of a protected UPDATE: it is compared, and may be assigned as well.
struct Extra<'a, P> {
    value: P,
    /// Its type, for PostgreSQL.
    cast: &'static str,
    /// The column that it is assigned to.
    assign: Option<&'a str>,
    /// What it is compared with, and how.
    compare: &'a str,
}

/// A table of tokens, for resources that have no column for one: several rows, other tables, what a procedure does.
///
/// Admit the token first, in the transaction that does the work. Until that transaction ends, others with a token for the same
/// resource wait; once a newer one has been committed, the older one is refused.
///
/// One small row per resource stays for ever. It may be deleted once no holder of an older token can be left.
#[derive(Debug, Clone)]
#[must_use]
pub struct Guard {
    table: String,
}

impl Default for Guard {
    /// The table `fencelock_fence`.
    fn default() -> Self {
        Self { table: "fencelock_fence".to_owned() }
    }
}

impl Guard {
    /// The guard in the table of this name, which may have a schema in front of it.
    ///
    /// # Errors
    /// `Invalid` when that is no plain name: letters, digits, underscores.
    pub fn in_table(table: &str) -> Result<Self> {
        let plain = |part: &str| {
            !part.is_empty()
                && !part.starts_with(|first: char| first.is_ascii_digit())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        if table.len() > 128 || !table.split('.').all(plain) {
            return Err(Error::invalid(format!(
                "{table:?} is no plain name of a table; use letters, digits and underscores, as in fencelock_fence"
            )));
        }
        Ok(Self { table: table.to_owned() })
    }

    /// Creates the table if it is not there.
    pub fn create_table(&self, dialect: Dialect) -> String {
        // Names are compared byte by byte: MySQL's text would take "A" for "a".
        let resource = match dialect {
            Dialect::MySql => "VARBINARY(512)",
            _ => "TEXT",
        };
        let table = &self.table;
        format!("CREATE TABLE IF NOT EXISTS {table} (resource {resource} NOT NULL PRIMARY KEY, token BIGINT NOT NULL)")
    }

    /// Lets a token in. The parameters are resource and token, and on MySQL the token once more.
    ///
    /// PostgreSQL and SQLite: no row is changed when the token is older. MySQL: the row keeps the newer token; read it with
    /// [`seen`](Guard::seen).
    pub fn admit(&self, dialect: Dialect) -> String {
        let table = &self.table;
        let (first, second) = if dialect == Dialect::Postgres { ("$1", "$2") } else { ("?", "?") };
        match dialect {
            Dialect::MySql => format!(
                "INSERT INTO {table} (resource, token) VALUES (?, ?) ON DUPLICATE KEY UPDATE token = GREATEST(token, ?)"
            ),
            _ => format!(
                "INSERT INTO {table} AS kept (resource, token) VALUES ({first}, {second}) \
                 ON CONFLICT (resource) DO UPDATE SET token = excluded.token WHERE kept.token <= excluded.token"
            ),
        }
    }

    /// Reads the newest token of a resource, the one parameter. `lock`: and keeps it as it is until the transaction ends.
    pub fn seen(&self, dialect: Dialect, lock: bool) -> String {
        let place = if dialect == Dialect::Postgres { "$1" } else { "?" };
        let ending = if lock { dialect.locking() } else { "" };
        format!("SELECT token FROM {} WHERE resource = {place}{ending}", self.table)
    }

    /// What follows from the newest token that the table holds after an attempt to let `token` in.
    #[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
    fn judge(resource: &Name, seen: Option<i64>, token: Token) -> Result<()> {
        let newest = Token::new(seen.and_then(|newest| u64::try_from(newest).ok()).unwrap_or(0));
        if newest > token { Err(fenced(&format!("{:?}", resource.as_str()), token, newest)) } else { Ok(()) }
    }
}

/// A token as a number of a database, whose integers have a sign.
///
/// # Errors
/// `Invalid` when it does not fit, which no engine's tokens do for the next 290,000 years.
pub fn number(token: Token) -> Result<i64> {
    i64::try_from(token.as_u64())
        .map_err(|_| Error::invalid(format!("token {token} does not fit into a BIGINT; is it a token of fencelock?")))
}

/// A row came about, or went away, each time between two statements.
#[cfg_attr(not(feature = "fence-sqlite"), allow(dead_code, reason = "used by executors"))]
fn restless(what: &str) -> Error {
    Error::new(ErrorKind::Conflict, format!("{what} comes and goes while it is written; nothing was changed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_dialect_gets_its_placeholders_in_order() {
        let row = Row::new("t", "id = ? OR 1 = 0", &["id"]);
        let update = row.update(Dialect::MySql, "a = ?, b = ?", &["a", "b"], "7");
        assert_eq!(
            update.sql,
            "UPDATE t SET a = ?, b = ?, fence = ? WHERE (id = ? OR 1 = 0) AND COALESCE(fence, 0) <= ?"
        );
        assert_eq!(update.params, ["a", "b", "7", "id", "7"]);
        let raise = row.clone().fence_column("f").update(Dialect::Sqlite, "", &[], "7");
        assert_eq!(raise.sql, "UPDATE t SET f = ? WHERE (id = ? OR 1 = 0) AND COALESCE(f, 0) <= ?");
        let marked = row.update_marked(Dialect::MySql, "a = ?", &["a"], "me");
        assert_eq!(marked.sql, "UPDATE t SET a = ? WHERE (id = ? OR 1 = 0) AND mark = ?");
        assert_eq!(marked.params, ["a", "id", "me"]);
        let row = Row::new("t", "id = $1", &["id"]);
        let version = row.update_version(Dialect::Postgres, "a = $2", &["a"], "3");
        assert_eq!(version.sql, "UPDATE t SET a = $2, version = version + 1 WHERE (id = $1) AND version = $3::bigint");
        assert_eq!(version.params, ["id", "a", "3"]);
        assert_eq!(row.put_mark(Dialect::Postgres, "me").sql, "UPDATE t SET mark = $2::text WHERE (id = $1)");
        let marked = row.update_marked(Dialect::Postgres, "a = $2", &["a"], "me");
        assert_eq!(marked.sql, "UPDATE t SET a = $2 WHERE (id = $1) AND mark = $3::text");
        assert_eq!(row.seen(Dialect::MySql).sql, "SELECT CAST(fence AS SIGNED) FROM t WHERE (id = $1) FOR UPDATE");
    }

    #[test]
    fn a_guard_has_a_plain_name() {
        for good in ["fences", "ops.fences_2", "_x"] {
            assert!(Guard::in_table(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a;DROP TABLE x", "1a", "a..b", "ä", "a.", &"x".repeat(129)] {
            assert_eq!(Guard::in_table(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
        }
    }

    proptest! {
        /// As many placeholders as parameters, whatever there is of each.
        #[test]
        fn placeholders_and_parameters_match(filters in 0_usize..5, sets in 0_usize..5) {
            let list = |from: usize, count: usize, dollar: bool| {
                let items: Vec<String> = (from..from + count)
                    .map(|n| if dollar { format!("c{n} = ${}", n + 1) } else { format!("c{n} = ?") })
                    .collect();
                items.join(", ")
            };
            for dialect in [Dialect::Postgres, Dialect::MySql, Dialect::Sqlite] {
                let dollar = dialect == Dialect::Postgres;
                let row = Row::new("t", &format!("true {}", list(0, filters, dollar)), &vec![0; filters]);
                let statement = row.update(dialect, &list(filters, sets, dollar), &vec![1; sets], 2);
                if dollar {
                    for n in 1..=statement.params.len() {
                        let number = format!("${n}");
                        prop_assert!(statement.sql.contains(&number), "{} lacks {}", statement.sql, number);
                    }
                    let next = format!("${}", statement.params.len() + 1);
                    prop_assert!(!statement.sql.contains(&next), "{} has {}", statement.sql, next);
                } else {
                    prop_assert_eq!(statement.sql.matches('?').count(), statement.params.len());
                }
            }
        }
    }
}
