//! Values in Redis that refuse an old holder, and the optimistic lock on a value. Both work on the caller's own connection.

use super::{Retry, fenced};
use crate::engine::redis::companion;
use crate::{Error, ErrorKind, Name, Result, Token};
use redis::aio::ConnectionLike;
use redis::{Arg, Cmd, FromRedisValue, RedisError, Script, ToRedisArgs, Value};
use std::sync::LazyLock;
use std::time::Duration;

static FENCE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("fence.lua")));
static SWAP: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("swap.lua")));

/// A resource in Redis that only the newest holder can change: one key, or several that are meant by one name.
///
/// The newest token is kept in a key of its own, in the same slot of a cluster as the resource's name. Check, command and keeping
/// the token are one script, so nothing comes between them.
///
/// The fence is as durable as the data: a server that loses one by a restart or a failover may have lost the other. What is
/// refused after that is what is older than the newest token that *survived*.
///
/// ```no_run
/// # use fencelock::{fence::redis::RedisFence, Token};
/// # async fn example(mut connection: redis::aio::MultiplexedConnection, token: Token) -> fencelock::Result<()> {
/// let fence = RedisFence::new("stock:7")?;
/// // Reads with the token: from here on nobody older can write.
/// let left: i64 = fence.run(&mut connection, token, redis::cmd("GET").arg("stock:7"), &["stock:7"]).await?;
/// fence.set(&mut connection, token, "stock:7", left - 1).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RedisFence {
    resource: String,
    key: String,
    keep: Option<Duration>,
}

impl RedisFence {
    /// The fence of the resource with this name: that of the lock, or the key of the data.
    ///
    /// # Errors
    /// `Invalid` when the name is empty or longer than [`Name::MAX`] bytes.
    pub fn new(resource: impl AsRef<str>) -> Result<Self> {
        let resource = Name::new(resource)?.as_str().to_owned();
        Ok(Self { key: companion(&resource, 'f'), resource, keep: None })
    }

    /// Forgets the newest token when nothing was written for so long. Without this it is kept for ever.
    ///
    /// Whoever wakes up after a longer pause than this is not refused any more: choose days, not minutes.
    #[must_use]
    pub fn forget_after(self, idle: Duration) -> Self {
        Self { keep: Some(idle.max(Duration::from_millis(1))), ..self }
    }

    /// The key of the newest token.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Shows the token: from here on nobody older can write. The first step of whoever reads, computes and writes back.
    ///
    /// # Errors
    /// As [`run`](RedisFence::run).
    pub async fn raise(&self, connection: &mut impl ConnectionLike, token: Token) -> Result<()> {
        self.invoke::<Value>(connection, token, None, &[]).await.map(drop)
    }

    /// Sets a key to a value, if the token is not older than the newest.
    ///
    /// # Errors
    /// As [`run`](RedisFence::run).
    pub async fn set(
        &self,
        connection: &mut impl ConnectionLike,
        token: Token,
        key: &str,
        value: impl ToRedisArgs,
    ) -> Result<()> {
        let mut set = redis::cmd("SET");
        set.arg(key).arg(value);
        self.invoke::<Value>(connection, token, Some(&set), &[key]).await.map(drop)
    }

    /// Carries out any one command (`HSET`, `INCRBY`, `GET`, …) on these keys, if the token is not older than the newest.
    ///
    /// In a cluster the keys must be in the slot of the resource's name: give the key's name to the fence, or a common `{tag}` to both.
    ///
    /// # Errors
    /// * `Fenced`: the token is older. Nothing was changed.
    /// * `Engine`: the server answered with an error. Nothing was changed.
    /// * `Ambiguous`: the connection broke; the command may have been carried out, under this token. Ask again.
    pub async fn run<T: FromRedisValue>(
        &self,
        connection: &mut impl ConnectionLike,
        token: Token,
        command: &Cmd,
        keys: &[&str],
    ) -> Result<T> {
        self.invoke(connection, token, Some(command), keys).await
    }

    /// The newest token that was seen, if any was.
    ///
    /// # Errors
    /// `Engine` or `Ambiguous` when the server does not answer.
    pub async fn newest(&self, connection: &mut impl ConnectionLike) -> Result<Option<Token>> {
        let newest: Option<u64> =
            redis::cmd("GET").arg(&self.key).query_async(connection).await.map_err(|error| self.explain(error))?;
        Ok(newest.map(Token::new))
    }

    async fn invoke<T: FromRedisValue>(
        &self,
        connection: &mut impl ConnectionLike,
        token: Token,
        command: Option<&Cmd>,
        keys: &[&str],
    ) -> Result<T> {
        let mut call = FENCE.key(&self.key);
        for key in keys {
            call.key(*key);
        }
        call.arg(token.as_u64()).arg(self.keep.map_or(0, |keep| keep.as_millis()).to_string());
        for word in command.into_iter().flat_map(Cmd::args_iter) {
            match word {
                Arg::Simple(word) => _ = call.arg(word),
                _ => {
                    return Err(Error::invalid(
                        "a command that goes through a fence has no cursor; use its plain form",
                    ));
                }
            }
        }
        let (done, answer): (bool, Value) = call.invoke_async(connection).await.map_err(|error| self.explain(error))?;
        if done {
            return T::from_redis_value(answer).map_err(|error| self.explain(error.into()));
        }
        let newest = u64::from_redis_value(answer).map_err(|error| self.explain(error.into()))?;
        Err(fenced(&format!("{:?} in Redis", self.resource), token, Token::new(newest)))
    }

    fn explain(&self, error: RedisError) -> Error {
        explain(&self.resource, error)
    }
}

/// What a failed exchange means for the data.
fn explain(resource: &str, error: RedisError) -> Error {
    let broken = error.is_io_error() || error.is_connection_dropped() || error.is_timeout();
    let (kind, text) = if broken {
        (
            ErrorKind::Ambiguous,
            "no answer was seen; the command may have been carried out, so ask again before going on",
        )
    } else {
        (ErrorKind::Engine, "Redis answered with an error; nothing was changed")
    };
    Error::new(kind, format!("{resource:?}: {text}")).caused_by(error)
}

/// What a [`modify`] is to do with the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Set it to this.
    Set(Vec<u8>),
    /// Remove the key.
    Delete,
    /// Leave it as it is.
    Keep,
}

/// Reads a value, lets `change` compute the next one, and writes it if nobody changed it meanwhile; otherwise starts again, after
/// a pause. The optimistic lock: no lock, no token, no wait for somebody who sleeps.
///
/// `change` is called once per attempt and must have no effect besides its result. The key keeps its time to live. Returns what it
/// decided in the end.
///
/// # Errors
/// * `Conflict`: others changed the value in each attempt. Nothing was changed.
/// * `Engine`, `Ambiguous`: as for [`RedisFence::run`].
/// * Whatever `change` returns.
///
/// ```no_run
/// # use fencelock::fence::{Retry, redis::{Change, modify}};
/// # async fn example(mut connection: redis::aio::MultiplexedConnection) -> fencelock::Result<()> {
/// modify(&mut connection, "visits", Retry::default(), |value| {
///     let count: u64 = value.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok()).unwrap_or(0);
///     Ok(Change::Set((count + 1).to_string().into_bytes()))
/// })
/// .await?;
/// # Ok(()) }
/// ```
pub async fn modify(
    connection: &mut impl ConnectionLike,
    key: &str,
    retry: Retry,
    mut change: impl FnMut(Option<&[u8]>) -> Result<Change>,
) -> Result<Change> {
    let mut failed = 0;
    loop {
        let value: Option<Vec<u8>> =
            redis::cmd("GET").arg(key).query_async(connection).await.map_err(|error| explain(key, error))?;
        let next = change(value.as_deref())?;
        let (what, data): (&str, &[u8]) = match &next {
            Change::Keep => return Ok(next),
            Change::Set(data) => ("set", data),
            Change::Delete => ("delete", &[]),
        };
        let mut swap = SWAP.key(key);
        swap.arg(if value.is_some() { "1" } else { "0" }).arg(value.unwrap_or_default()).arg(what).arg(data);
        let swapped: bool = swap.invoke_async(connection).await.map_err(|error| explain(key, error))?;
        if swapped {
            return Ok(next);
        }
        failed += 1;
        tokio::time::sleep(retry.pause_after(failed, &format!("{key:?} in Redis"))?).await;
    }
}
