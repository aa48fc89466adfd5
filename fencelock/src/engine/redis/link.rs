//! The connection to one Redis server: one socket for commands and for what the server pushes. Opened when needed, opened again
//! when it breaks, and always subscribed to this client's inbox.

use super::fault::{Fault, fault};
use crate::{Clock, Moment, Owner};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, PushInfo, PushKind, RedisError, Value};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// What arrives without having been asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Push {
    /// Granted to a waiter: token, server time of the grant in µs, provisional lease.
    Granted { owner: Owner, key: String, token: u64, at: u64, lease: Duration },
    /// This waiter is the first in line now; the holders can stay for this long.
    First { owner: Owner, key: String, left: Duration },
    /// Taken away from its holder.
    Lost { owner: Owner },
    /// A key that somebody watches was deleted or has expired.
    Gone { key: String },
    /// The connection broke: words may have been missed.
    Broken,
}

impl Push {
    /// Whether it is a word for this waiter.
    pub(super) fn is_for(&self, waiter: Owner, name: &str) -> bool {
        match self {
            Push::Granted { owner, key, .. } | Push::First { owner, key, .. } => *owner == waiter && key == name,
            Push::Lost { .. } | Push::Gone { .. } | Push::Broken => false,
        }
    }
}

struct Open {
    connection: MultiplexedConnection,
    generation: u64,
}

pub(super) struct Link {
    client: Client,
    /// The channel on which words for this client arrive.
    inbox: String,
    timeout: Duration,
    open: Mutex<Option<Open>>,
    /// Only one task connects.
    connecting: tokio::sync::Mutex<u64>,
    pushes: mpsc::UnboundedSender<(u64, Push)>,
    /// A moment of the local clock that lay before that server time in µs.
    server_time: Mutex<Option<(Moment, u64)>>,
}

impl Link {
    pub(super) fn new(
        client: Client,
        session: &str,
        timeout: Duration,
        pushes: mpsc::UnboundedSender<(u64, Push)>,
    ) -> Self {
        Self {
            client,
            inbox: format!("fencelock:inbox:{session}"),
            timeout,
            open: Mutex::new(None),
            connecting: tokio::sync::Mutex::new(0),
            pushes,
            server_time: Mutex::new(None),
        }
    }

    fn current(&self) -> Option<(MultiplexedConnection, u64)> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map(|open| (open.connection.clone(), open.generation))
    }

    /// Gives up a connection that broke, if it is still the one in use.
    pub(super) fn broke(&self, generation: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.as_ref().is_some_and(|open| open.generation == generation) {
            *open = None;
        }
    }

    /// Gives up the connection, whichever it is: the runtime that drives it is going away.
    pub(super) fn orphan(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The connection; makes one if there is none.
    pub(super) async fn connection(&self) -> Result<(MultiplexedConnection, u64), Fault> {
        if let Some(open) = self.current() {
            return Ok(open);
        }
        let mut generation = self.connecting.lock().await;
        if let Some(open) = self.current() {
            return Ok(open);
        }
        *generation += 1;
        let number = *generation;
        let pushes = self.pushes.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout))
            .set_push_sender(move |push: PushInfo| {
                // Nobody to tell is no reason to break the connection.
                if let Some(push) = read_push(&push) {
                    let _ = pushes.send((number, push));
                }
                Ok::<(), redis::aio::SendError>(())
            });
        let connecting = async {
            let mut connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
            connection.subscribe(&self.inbox).await?;
            Ok::<_, RedisError>(connection)
        };
        // Nothing that matters was sent: whatever went wrong, the engine was not reached.
        let connection = connecting.await.map_err(|error| fault(error, false))?;
        let open = Open { connection: connection.clone(), generation: number };
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(open);
        Ok((connection, number))
    }

    /// Sends one command and returns its answer.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, Fault> {
        let (mut connection, generation) = self.connection().await?;
        connection.send_packed_command(command).await.and_then(Value::extract_error).map_err(|error| {
            let fault = fault(error, true);
            if fault.broken {
                self.broke(generation);
            }
            fault
        })
    }

    /// Asks to be told when a key is deleted or expires; a server that is not configured to tell does not.
    pub(super) async fn watch_key(&self, channel: &str) {
        if let Some((mut connection, _)) = self.current() {
            let _ = connection.subscribe(channel).await;
        }
    }

    pub(super) async fn unwatch_key(&self, channel: &str) {
        if let Some((mut connection, _)) = self.current() {
            let _ = connection.unsubscribe(channel).await;
        }
    }

    /// Notes that the server's clock showed `server` µs after `sent`.
    pub(super) fn note_time(&self, sent: Moment, server: u64) {
        *self.server_time.lock().unwrap_or_else(PoisonError::into_inner) = Some((sent, server));
    }

    /// A moment of the local clock that is not later than that server time.
    pub(super) fn local(&self, server: u64) -> Moment {
        let now = Clock::Boot.now();
        let noted = *self.server_time.lock().unwrap_or_else(PoisonError::into_inner);
        match noted {
            Some((sent, then)) => sent.after(Duration::from_micros(server.saturating_sub(then))).min(now),
            None => now,
        }
    }
}

fn read_push(push: &PushInfo) -> Option<Push> {
    match push.kind {
        PushKind::Disconnection => Some(Push::Broken),
        PushKind::Message => {
            let [channel, message] = push.data.as_slice() else { return None };
            let (channel, message) = (text(channel)?, text(message)?);
            match channel.split_once("__:") {
                Some((space, key)) if space.starts_with("__keyspace@") => {
                    matches!(message, "del" | "expired" | "evicted").then(|| Push::Gone { key: key.to_owned() })
                }
                _ => read_word(message),
            }
        }
        _ => None,
    }
}

/// Owners can stand in several lines: a word names the lock as well, at its end, since a name may have line breaks.
fn read_word(message: &str) -> Option<Push> {
    let (kind, rest) = message.split_once('\n')?;
    let mut parts = match kind {
        "g" => rest.splitn(5, '\n'),
        "h" => rest.splitn(3, '\n'),
        _ => rest.splitn(2, '\n'),
    };
    let owner: Owner = parts.next()?.parse().ok()?;
    let mut number = || parts.next()?.parse::<u64>().ok();
    match kind {
        "g" => {
            let (token, at, lease) = (number()?, number()?, Duration::from_millis(number()?));
            Some(Push::Granted { owner, key: parts.next()?.to_owned(), token, at, lease })
        }
        "h" => {
            let left = Duration::from_millis(number()?);
            Some(Push::First { owner, key: parts.next()?.to_owned(), left })
        }
        "l" => Some(Push::Lost { owner }),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
