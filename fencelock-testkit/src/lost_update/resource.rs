//! The number that the writers of the experiment share: in a database, in Redis, in a file, behind an HTTP API; with and without a fence.

use crate::web;
use fencelock::fence::file::FencedFile;
use fencelock::fence::redis::RedisFence;
use fencelock::fence::sql::{mysql, postgres, sqlite};
use fencelock::{Error, ErrorKind, Result, Token};
use mysql_async::prelude::Queryable;
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use std::path::PathBuf;
use std::time::Duration;

/// What a writer shows to a fence.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// The token of its lock.
    pub token: Token,
}

/// A number that can be read and written.
pub enum Resource {
    /// A row in SQLite.
    Sqlite(rusqlite::Connection),
    /// A row in PostgreSQL.
    Postgres(tokio_postgres::Client),
    /// A row in MySQL or MariaDB.
    MySql(mysql_async::Conn),
    /// A value in Redis.
    Redis(MultiplexedConnection),
    /// A file.
    File(PathBuf),
    /// Something behind HTTP: address and path.
    Http(String, String),
}

const KEY: &str = "lost-update:number";
const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS lost_update (id INTEGER PRIMARY KEY, number BIGINT NOT NULL, fence BIGINT NOT NULL)";
const READ: &str = "SELECT number FROM lost_update WHERE id = 1";

impl Resource {
    /// By its URL: `sqlite:/path`, `postgres://…`, `mysql://…`, `redis://…`, `file:/path`, `http://host:port/path`.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub async fn open(url: &str) -> Self {
        if let Some(path) = url.strip_prefix("sqlite:") {
            let connection = rusqlite::Connection::open(path).expect("the database opens");
            connection.busy_timeout(Duration::from_secs(30)).expect("a timeout can be set");
            connection.pragma_update(None, "journal_mode", "WAL").expect("the journal can be chosen");
            // The machine does not crash here, only processes are stopped.
            connection.pragma_update(None, "synchronous", "OFF").expect("flushing can be chosen");
            return Resource::Sqlite(connection);
        }
        if let Some(path) = url.strip_prefix("file:") {
            return Resource::File(path.into());
        }
        if let Some(rest) = url.strip_prefix("http://") {
            let (address, path) = rest.split_once('/').expect("a URL with a path");
            return Resource::Http(address.to_owned(), format!("/{path}"));
        }
        if url.starts_with("redis:") {
            let client = redis::Client::open(url).expect("a Redis URL");
            return Resource::Redis(client.get_multiplexed_async_connection().await.expect("the server is there"));
        }
        if url.starts_with("mysql:") {
            return Resource::MySql(mysql_async::Conn::from_url(url).await.expect("the server is there"));
        }
        let (client, connection) =
            tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("the server is there");
        tokio::spawn(connection);
        Resource::Postgres(client)
    }

    /// Makes it, with the number 0, and forgets what its fence has seen.
    ///
    /// # Panics
    /// When that fails.
    pub async fn reset(&mut self) {
        let clear = "DELETE FROM lost_update";
        let insert = "INSERT INTO lost_update VALUES (1, 0, 0)";
        match self {
            Resource::Sqlite(db) => db.execute_batch(&format!("{TABLE}; {clear}; {insert}")).expect("it is made"),
            Resource::Postgres(db) => {
                db.batch_execute(&format!("{TABLE}; {clear}; {insert}")).await.expect("it is made")
            }
            Resource::MySql(db) => {
                for statement in [TABLE, clear, insert] {
                    db.query_drop(statement).await.expect("it is made");
                }
            }
            Resource::Redis(redis) => {
                let fence = RedisFence::new(KEY).expect("a good name");
                let () = redis.del(&[KEY, fence.key()]).await.expect("it is removed");
            }
            Resource::File(path) => {
                let _ = std::fs::remove_file(&path);
                let name = path.file_name().expect("a file").to_string_lossy().into_owned();
                let _ = std::fs::remove_file(path.with_file_name(format!(".{name}.fence")));
            }
            // What is not there counts as 0; and a gate forgets nothing, so each run takes a path of its own.
            Resource::Http(..) => {}
        }
    }

    /// The number, when all is over.
    ///
    /// # Panics
    /// When it cannot be read.
    pub async fn number(&mut self) -> u64 {
        self.read(None).await.expect("the number can be read")
    }

    /// Reads it; who shows a token shows it first.
    ///
    /// # Errors
    /// `Fenced` when the token is old.
    pub async fn read(&mut self, held: Option<Held>) -> Result<u64> {
        let digits = match self {
            Resource::Sqlite(db) => {
                if let Some(held) = held {
                    sqlite::raise(db, &sqlite::row("lost_update", "id = ?", &[&1]), held.token)?;
                }
                return Ok(unsigned(db.query_row(READ, [], |row| row.get(0)).map_err(failed)?));
            }
            Resource::Postgres(db) => {
                if let Some(held) = held {
                    postgres::raise(db, &postgres::row("lost_update", "id = $1", &[&1_i32]), held.token).await?;
                }
                return Ok(unsigned(db.query_one(READ, &[]).await.map_err(failed)?.get(0)));
            }
            Resource::MySql(db) => {
                if let Some(held) = held {
                    mysql::raise(db, &mysql::row("lost_update", "id = ?", &[1.into()]), held.token).await?;
                }
                return Ok(unsigned(db.query_first(READ).await.map_err(failed)?.unwrap_or(0)));
            }
            Resource::Redis(redis) => {
                let value: Option<u64> = match held {
                    Some(held) => {
                        let fence = RedisFence::new(KEY)?;
                        fence.run(redis, held.token, redis::cmd("GET").arg(KEY), &[KEY]).await?
                    }
                    None => redis.get(KEY).await.map_err(failed)?,
                };
                return Ok(value.unwrap_or(0));
            }
            Resource::File(path) => match held {
                Some(held) => FencedFile::new(path)?.raise(held.token)?.data,
                None => std::fs::read(path).unwrap_or_default(),
            },
            Resource::Http(address, path) => request(address, "GET", path, held, b"")?,
        };
        Ok(std::str::from_utf8(&digits).ok().and_then(|digits| digits.trim().parse().ok()).unwrap_or(0))
    }

    /// Writes it.
    ///
    /// # Errors
    /// `Fenced` when the token is old.
    pub async fn write(&mut self, held: Option<Held>, number: u64) -> Result<()> {
        let value = i64::try_from(number).unwrap_or(i64::MAX);
        match (self, held) {
            (Resource::Sqlite(db), Some(held)) => {
                sqlite::write(db, &sqlite::row("lost_update", "id = ?", &[&1]), held.token, "number = ?", &[&value])
            }
            (Resource::Sqlite(db), None) => {
                db.execute("UPDATE lost_update SET number = ? WHERE id = 1", [value]).map(drop).map_err(failed)
            }
            (Resource::Postgres(db), Some(held)) => {
                let row = postgres::row("lost_update", "id = $1", &[&1_i32]);
                postgres::write(db, &row, held.token, "number = $2", &[&value]).await
            }
            (Resource::Postgres(db), None) => {
                let update = "UPDATE lost_update SET number = $1 WHERE id = 1";
                db.execute(update, &[&value]).await.map(drop).map_err(failed)
            }
            (Resource::MySql(db), Some(held)) => {
                let row = mysql::row("lost_update", "id = ?", &[1.into()]);
                mysql::write(db, &row, held.token, "number = ?", &[value.into()]).await
            }
            (Resource::MySql(db), None) => {
                db.exec_drop("UPDATE lost_update SET number = ? WHERE id = 1", (value,)).await.map_err(failed)
            }
            (Resource::Redis(redis), Some(held)) => RedisFence::new(KEY)?.set(redis, held.token, KEY, value).await,
            (Resource::Redis(redis), None) => redis.set(KEY, value).await.map_err(failed),
            (Resource::File(path), Some(held)) => {
                FencedFile::new(path)?.replace(held.token, number.to_string().as_bytes())
            }
            (Resource::File(path), None) => {
                // The usual way to replace a file: nobody sees half of it.
                let new = path.with_extension(format!("new-{}", std::process::id()));
                std::fs::write(&new, number.to_string()).and_then(|()| std::fs::rename(&new, path)).map_err(failed)
            }
            (resource @ Resource::Http(..), held) => resource.write_http(held, number),
        }
    }

    fn write_http(&self, held: Option<Held>, number: u64) -> Result<()> {
        let Resource::Http(address, path) = self else { return Ok(()) };
        request(address, "PUT", path, held, number.to_string().as_bytes()).map(drop)
    }
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Engine, "the resource failed").caused_by(error)
}

fn request(address: &str, method: &str, path: &str, held: Option<Held>, body: &[u8]) -> Result<Vec<u8>> {
    let token = held.map(|held| held.token.to_string());
    let headers: Vec<(&str, &str)> = token.iter().map(|token| ("Fencing-Token", token.as_str())).collect();
    let reply = web::send(address, method, path, &headers, body)
        .map_err(|error| Error::new(ErrorKind::Ambiguous, "the connection broke").caused_by(error))?;
    match reply.status {
        200 | 404 => Ok(reply.body),
        412 => Err(Error::new(ErrorKind::Fenced, reply.text())),
        409 | 502 | 504 => Err(Error::new(ErrorKind::Ambiguous, reply.text())),
        status => Err(Error::new(ErrorKind::Engine, format!("{status}: {}", reply.text()))),
    }
}
