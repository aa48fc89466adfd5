//! The SQL fences on real databases: one suite, instantiated for SQLite, PostgreSQL and MySQL.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fencelock::fence::Retry;
use fencelock::fence::sql::{Guard, mysql, postgres, sqlite};
use fencelock::{ErrorKind, Owner, Result, Token};
use fencelock_testkit::mysql::MysqlServer;
use fencelock_testkit::postgres::PostgresServer;
use mysql_async::prelude::Queryable;
use rusqlite::types::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const TABLE: &str =
    "CREATE TABLE docs (id BIGINT PRIMARY KEY, body VARCHAR(200) NOT NULL DEFAULT '', number BIGINT NOT NULL DEFAULT 0,
    fence BIGINT NOT NULL DEFAULT 0, mark VARCHAR(40), version BIGINT NOT NULL DEFAULT 0)";

/// A database in which the suite runs; each makes connections of its own.
trait Database: Clone + Send + Sync + 'static {
    type Connection: Connection;
    async fn connect(&self) -> Self::Connection;
}

/// What the suite does on one connection, the same on each database.
trait Connection: Send {
    async fn run(&mut self, sql: &str);
    async fn number(&mut self, sql: &str) -> i64;
    async fn raise(&mut self, id: i64, token: Token) -> Result<()>;
    async fn write(&mut self, id: i64, token: Token, number: i64) -> Result<()>;
    async fn mark(&mut self, id: i64, owner: Owner) -> Result<()>;
    async fn write_marked(&mut self, id: i64, owner: Owner, number: i64) -> Result<()>;
    async fn admit(&mut self, resource: &str, token: Token) -> Result<()>;
    async fn newest(&mut self, resource: &str) -> Result<Option<Token>>;
    fn add_one(&mut self, id: i64, retry: Retry) -> impl Future<Output = Result<()>> + Send;
    fn guarded_add(&mut self, resource: &'static str, id: i64, token: Token)
    -> impl Future<Output = Result<()>> + Send;
}

// --- SQLite

#[derive(Clone)]
struct Sqlite(Arc<TempDir>);

impl Sqlite {
    fn new() -> Self {
        Self(Arc::new(tempfile::tempdir().unwrap()))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("db")
    }
}

impl Database for Sqlite {
    type Connection = rusqlite::Connection;

    async fn connect(&self) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(self.path()).unwrap();
        connection.busy_timeout(Duration::from_secs(20)).unwrap();
        connection.pragma_update(None, "journal_mode", "WAL").unwrap();
        connection.pragma_update(None, "synchronous", "OFF").unwrap();
        connection
    }
}

impl Connection for rusqlite::Connection {
    async fn run(&mut self, sql: &str) {
        self.execute_batch(sql).unwrap();
    }
    async fn number(&mut self, sql: &str) -> i64 {
        self.query_row(sql, [], |row| row.get(0)).unwrap()
    }
    async fn raise(&mut self, id: i64, token: Token) -> Result<()> {
        sqlite::raise(self, &sqlite::row("docs", "id = ?", &[&id]), token)
    }
    async fn write(&mut self, id: i64, token: Token, number: i64) -> Result<()> {
        sqlite::write(self, &sqlite::row("docs", "id = ?", &[&id]), token, "number = ?", &[&number])
    }
    async fn mark(&mut self, id: i64, owner: Owner) -> Result<()> {
        sqlite::mark(self, &sqlite::row("docs", "id = ?", &[&id]), owner)
    }
    async fn write_marked(&mut self, id: i64, owner: Owner, number: i64) -> Result<()> {
        sqlite::write_marked(self, &sqlite::row("docs", "id = ?", &[&id]), owner, "number = ?", &[&number])
    }
    async fn admit(&mut self, resource: &str, token: Token) -> Result<()> {
        sqlite::create_guard(self, &Guard::default())?;
        sqlite::admit(self, &Guard::default(), resource, token)
    }
    async fn newest(&mut self, resource: &str) -> Result<Option<Token>> {
        sqlite::newest(self, &Guard::default(), resource)
    }
    async fn add_one(&mut self, id: i64, retry: Retry) -> Result<()> {
        sqlite::modify(self, &sqlite::row("docs", "id = ?", &[&id]), retry, "number", "number = ?", |row| {
            Ok(Some(vec![Value::from(row.get::<_, i64>(0).unwrap() + 1)]))
        })
    }
    async fn guarded_add(&mut self, resource: &'static str, id: i64, token: Token) -> Result<()> {
        let work = self.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
        sqlite::admit(&work, &Guard::default(), resource, token)?;
        let number: i64 = work.query_row("SELECT number FROM docs WHERE id = ?", [id], |row| row.get(0)).unwrap();
        work.execute("UPDATE docs SET number = ? WHERE id = ?", (number + 1, id)).unwrap();
        work.commit().unwrap();
        Ok(())
    }
}

// --- PostgreSQL

#[derive(Clone)]
struct Postgres(Arc<PostgresServer>);

impl Database for Postgres {
    type Connection = tokio_postgres::Client;

    async fn connect(&self) -> tokio_postgres::Client {
        let (client, connection) = tokio_postgres::connect(&self.0.url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }
}

impl Connection for tokio_postgres::Client {
    async fn run(&mut self, sql: &str) {
        self.batch_execute(sql).await.unwrap();
    }
    async fn number(&mut self, sql: &str) -> i64 {
        self.query_one(sql, &[]).await.unwrap().get(0)
    }
    async fn raise(&mut self, id: i64, token: Token) -> Result<()> {
        postgres::raise(self, &postgres::row("docs", "id = $1", &[&id]), token).await
    }
    async fn write(&mut self, id: i64, token: Token, number: i64) -> Result<()> {
        postgres::write(self, &postgres::row("docs", "id = $1", &[&id]), token, "number = $2", &[&number]).await
    }
    async fn mark(&mut self, id: i64, owner: Owner) -> Result<()> {
        postgres::mark(self, &postgres::row("docs", "id = $1", &[&id]), owner).await
    }
    async fn write_marked(&mut self, id: i64, owner: Owner, number: i64) -> Result<()> {
        postgres::write_marked(self, &postgres::row("docs", "id = $1", &[&id]), owner, "number = $2", &[&number]).await
    }
    async fn admit(&mut self, resource: &str, token: Token) -> Result<()> {
        postgres::create_guard(self, &Guard::default()).await?;
        postgres::admit(self, &Guard::default(), resource, token).await
    }
    async fn newest(&mut self, resource: &str) -> Result<Option<Token>> {
        postgres::newest(self, &Guard::default(), resource).await
    }
    async fn add_one(&mut self, id: i64, retry: Retry) -> Result<()> {
        let row = postgres::row("docs", "id = $1", &[&id]);
        postgres::modify(self, &row, retry, "number", "number = $2", |row| {
            Ok(Some(vec![Box::new(row.get::<_, i64>(0) + 1)]))
        })
        .await
    }
    async fn guarded_add(&mut self, resource: &'static str, id: i64, token: Token) -> Result<()> {
        let work = self.transaction().await.unwrap();
        postgres::admit(&work, &Guard::default(), resource, token).await?;
        let number: i64 = work.query_one("SELECT number FROM docs WHERE id = $1", &[&id]).await.unwrap().get(0);
        work.execute("UPDATE docs SET number = $1 WHERE id = $2", &[&(number + 1), &id]).await.unwrap();
        work.commit().await.unwrap();
        Ok(())
    }
}

// --- MySQL

#[derive(Clone)]
struct MySql(Arc<MysqlServer>);

impl Database for MySql {
    type Connection = mysql_async::Conn;

    async fn connect(&self) -> mysql_async::Conn {
        mysql_async::Conn::from_url(self.0.url()).await.unwrap()
    }
}

impl Connection for mysql_async::Conn {
    async fn run(&mut self, sql: &str) {
        for statement in sql.split(';').filter(|statement| !statement.trim().is_empty()) {
            self.query_drop(statement).await.unwrap();
        }
    }
    async fn number(&mut self, sql: &str) -> i64 {
        self.query_first(sql).await.unwrap().unwrap()
    }
    async fn raise(&mut self, id: i64, token: Token) -> Result<()> {
        mysql::raise(self, &mysql::row("docs", "id = ?", &[id.into()]), token).await
    }
    async fn write(&mut self, id: i64, token: Token, number: i64) -> Result<()> {
        mysql::write(self, &mysql::row("docs", "id = ?", &[id.into()]), token, "number = ?", &[number.into()]).await
    }
    async fn mark(&mut self, id: i64, owner: Owner) -> Result<()> {
        mysql::mark(self, &mysql::row("docs", "id = ?", &[id.into()]), owner).await
    }
    async fn write_marked(&mut self, id: i64, owner: Owner, number: i64) -> Result<()> {
        let row = mysql::row("docs", "id = ?", &[id.into()]);
        mysql::write_marked(self, &row, owner, "number = ?", &[number.into()]).await
    }
    async fn admit(&mut self, resource: &str, token: Token) -> Result<()> {
        mysql::create_guard(self, &Guard::default()).await?;
        mysql::admit(self, &Guard::default(), resource, token).await
    }
    async fn newest(&mut self, resource: &str) -> Result<Option<Token>> {
        mysql::newest(self, &Guard::default(), resource).await
    }
    async fn add_one(&mut self, id: i64, retry: Retry) -> Result<()> {
        let row = mysql::row("docs", "id = ?", &[id.into()]);
        mysql::modify(self, &row, retry, "number", "number = ?", |row| {
            Ok(Some(vec![(row.get::<i64, _>(0).unwrap() + 1).into()]))
        })
        .await
    }
    async fn guarded_add(&mut self, resource: &'static str, id: i64, token: Token) -> Result<()> {
        let mut work = self.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
        if let Err(error) = mysql::admit(&mut work, &Guard::default(), resource, token).await {
            work.rollback().await.unwrap();
            return Err(error);
        }
        let number: i64 =
            work.exec_first("SELECT number FROM docs WHERE id = ? FOR UPDATE", (id,)).await.unwrap().unwrap();
        work.exec_drop("UPDATE docs SET number = ? WHERE id = ?", (number + 1, id)).await.unwrap();
        work.commit().await.unwrap();
        Ok(())
    }
}

// --- the suite

fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

async fn fresh(database: &impl Database) -> impl Connection {
    let mut db = database.connect().await;
    db.run("DROP TABLE IF EXISTS docs; DROP TABLE IF EXISTS fencelock_fence").await;
    db.run(TABLE).await;
    db.run("INSERT INTO docs (id) VALUES (1); INSERT INTO docs (id) VALUES (2)").await;
    db
}

async fn an_older_token_changes_nothing(database: &impl Database) {
    let mut db = fresh(database).await;
    db.write(1, Token::new(5), 50).await.unwrap();
    db.write(1, Token::new(5), 50).await.unwrap();
    db.write(1, Token::new(5), 51).await.unwrap();
    let error = db.write(1, Token::new(4), 40).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.to_string().contains("token 4") && error.to_string().contains("token 5"), "{error}");
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, 51);
    assert_eq!(db.number("SELECT fence FROM docs WHERE id = 1").await, 5);
    db.write(2, Token::new(1), 10).await.unwrap();
    // Showing a token is enough to shut out the older one.
    db.raise(1, Token::new(9)).await.unwrap();
    db.raise(1, Token::new(9)).await.unwrap();
    assert_eq!(kind(db.write(1, Token::new(8), 80).await), ErrorKind::Fenced);
    assert_eq!(kind(db.raise(1, Token::new(8)).await), ErrorKind::Fenced);
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, 51);
    // No row, several rows, a number that is no token.
    let missing = db.write(77, Token::new(1), 1).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Invalid, "{missing}");
    assert_eq!(kind(db.write(1, Token::new(u64::MAX), 1).await), ErrorKind::Invalid);
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, 51);
}

async fn a_row_of_before_the_fence_has_no_token(database: &impl Database) {
    let mut db = fresh(database).await;
    db.run("DROP TABLE docs").await;
    db.run("CREATE TABLE docs (id BIGINT PRIMARY KEY, number BIGINT, fence BIGINT)").await;
    db.run("INSERT INTO docs VALUES (1, 0, NULL)").await;
    db.write(1, Token::new(3), 30).await.unwrap();
    assert_eq!(kind(db.write(1, Token::new(2), 20).await), ErrorKind::Fenced);
}

async fn only_who_put_the_mark_can_write(database: &impl Database) {
    let mut db = fresh(database).await;
    let (first, second) = (Owner::random(), Owner::random());
    assert_eq!(kind(db.write_marked(1, first, 1).await), ErrorKind::Fenced, "there is no mark yet");
    db.mark(1, first).await.unwrap();
    db.mark(1, first).await.unwrap();
    db.write_marked(1, first, 10).await.unwrap();
    db.write_marked(1, first, 10).await.unwrap();
    db.mark(1, second).await.unwrap();
    assert_eq!(kind(db.write_marked(1, first, 11).await), ErrorKind::Fenced);
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, 10);
    db.write_marked(1, second, 20).await.unwrap();
    assert_eq!(kind(db.mark(77, first).await), ErrorKind::Invalid);
    assert_eq!(kind(db.write_marked(77, first, 1).await), ErrorKind::Invalid);
}

async fn the_guard_lets_in_what_is_not_older(database: &impl Database) {
    let mut db = fresh(database).await;
    let long = "ü".repeat(256);
    for resource in ["report", "Report", "a'b\"c;--", &long] {
        db.admit(resource, Token::new(5)).await.unwrap();
        db.admit(resource, Token::new(5)).await.unwrap();
        db.admit(resource, Token::new(7)).await.unwrap();
        let error = db.admit(resource, Token::new(6)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
        assert!(error.to_string().contains("token 6") && error.to_string().contains("token 7"), "{error}");
        assert_eq!(db.newest(resource).await.unwrap(), Some(Token::new(7)), "{resource}");
    }
    assert_eq!(db.newest("never seen").await.unwrap(), None);
    assert_eq!(kind(db.admit("", Token::new(1)).await), ErrorKind::Invalid);
    assert_eq!(kind(db.admit("x", Token::new(u64::MAX)).await), ErrorKind::Invalid);
}

/// Many connections with tokens in any order: the row ends with the greatest one's number, and no write came after a newer one.
async fn writers_at_one_time_leave_the_newest(database: &impl Database) {
    let mut db = fresh(database).await;
    let tasks: Vec<_> = (0..8_u64)
        .map(|writer| {
            let database = database.clone();
            tokio::task::spawn_local(async move {
                let mut db = database.connect().await;
                let mut done = Vec::new();
                for step in 0..25 {
                    let token = 1 + (step * 8 + writer * 5) % 200;
                    match db.write(1, Token::new(token), i64::try_from(token).unwrap()).await {
                        Ok(()) => done.push(token),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced, "{error}"),
                    }
                    tokio::task::yield_now().await;
                }
                done
            })
        })
        .collect();
    let mut newest = 0;
    for task in tasks {
        let done = task.await.unwrap();
        assert!(done.is_sorted(), "a writer's own older token was taken after its newer one: {done:?}");
        newest = newest.max(done.last().copied().unwrap_or(0));
    }
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, i64::try_from(newest).unwrap());
    assert_eq!(db.number("SELECT fence FROM docs WHERE id = 1").await, i64::try_from(newest).unwrap());
}

/// Transactions under the guard take turns, so none loses another's update; refused ones change nothing.
async fn guarded_transactions_take_turns(database: &impl Database) {
    let mut db = fresh(database).await;
    db.admit("docs", Token::new(1)).await.unwrap();
    let tasks: Vec<_> = (0..6_u64)
        .map(|writer| {
            let database = database.clone();
            tokio::task::spawn_local(async move {
                let mut db = database.connect().await;
                let mut done = 0;
                for step in 0..15 {
                    let token = Token::new(2 + step + writer % 3);
                    match db.guarded_add("docs", 1, token).await {
                        Ok(()) => done += 1,
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced, "{error}"),
                    }
                    tokio::task::yield_now().await;
                }
                done
            })
        })
        .collect();
    let mut done = 0;
    for task in tasks {
        done += task.await.unwrap();
    }
    assert!(done > 0);
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, done);
}

async fn the_optimistic_lock_loses_no_update(database: &impl Database) {
    let mut db = fresh(database).await;
    let tasks: Vec<_> = (0..6)
        .map(|_| {
            let database = database.clone();
            tokio::task::spawn_local(async move {
                let mut db = database.connect().await;
                for _ in 0..10 {
                    db.add_one(1, Retry::default().attempts(1_000).longest_pause(Duration::from_millis(20)))
                        .await
                        .unwrap();
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(db.number("SELECT number FROM docs WHERE id = 1").await, 60);
    assert_eq!(db.number("SELECT version FROM docs WHERE id = 1").await, 60);
    assert_eq!(kind(db.add_one(77, Retry::default()).await), ErrorKind::Invalid);
}

async fn all(database: impl Database) {
    let suite = async {
        an_older_token_changes_nothing(&database).await;
        a_row_of_before_the_fence_has_no_token(&database).await;
        only_who_put_the_mark_can_write(&database).await;
        the_guard_lets_in_what_is_not_older(&database).await;
        writers_at_one_time_leave_the_newest(&database).await;
        guarded_transactions_take_turns(&database).await;
        the_optimistic_lock_loses_no_update(&database).await;
    };
    tokio::task::LocalSet::new().run_until(suite).await;
}

#[tokio::test]
async fn on_sqlite() {
    all(Sqlite::new()).await;
}

#[tokio::test]
async fn on_postgres() {
    all(Postgres(Arc::new(PostgresServer::start()))).await;
}

#[tokio::test]
async fn on_mysql() {
    all(MySql(Arc::new(MysqlServer::start()))).await;
}
