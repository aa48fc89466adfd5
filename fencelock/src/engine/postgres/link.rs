//! The connection to one PostgreSQL database: one for calls and for what the server pushes. Opened when needed, opened again when
//! it breaks; it listens to this client's inbox, and a lock that it holds shows others that it does.

use super::fault::fault;
use crate::engine::sql::fault::{Fault, unreadable};
use crate::engine::sql::op::{Op, Push, Reply, hex, mode, owner};
use crate::engine::sql::{Database, Row, SEEN, Which, after_prefix};
use crate::engine::{Capability, Purpose};
use crate::{Error, ErrorKind};
use std::fmt::Write as _;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

/// The version of the functions that this client calls.
const VERSION: i32 = 1;
/// Those who make the tables take turns.
const MIGRATION: i64 = 0x0066_656e_6365_6c6b;
/// How long a list of all locks may take.
const LIST: Duration = Duration::from_secs(30);

const ACT: &str = "SELECT kind, a, b FROM fencelock.act($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
const HEAR: &str = "SELECT hear FROM fencelock.hear($1, $2)";
const LOOK: &str = "SELECT name, owner, holds, mode, permits, token, ends - now, now - since, label \
     FROM fencelock.claim CROSS JOIN (SELECT fencelock.now() AS now OFFSET 0) AS clock \
     WHERE CASE WHEN holds THEN ends > now ELSE fencelock.alive($1, session, polls, now) END AND ";

struct Open {
    client: Arc<Client>,
    /// Prepared where the connection is our own; through a pooler, statements have no names.
    act: Option<Statement>,
    generation: u64,
    driver: AbortHandle,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

pub(crate) struct Link {
    config: Config,
    tls: MakeRustlsConnect,
    address: String,
    session: [u8; 16],
    /// Whether the server pushes; if not, there is a pooler in between, and nothing may depend on the connection.
    notify: bool,
    timeout: Duration,
    open: Mutex<Option<Arc<Open>>>,
    /// Only one task connects.
    connecting: tokio::sync::Mutex<u64>,
    pushes: mpsc::UnboundedSender<(u64, Push)>,
}

impl Link {
    pub(super) fn new(
        config: Config,
        tls: MakeRustlsConnect,
        address: String,
        session: [u8; 16],
        notify: bool,
        timeout: Duration,
        pushes: mpsc::UnboundedSender<(u64, Push)>,
    ) -> Self {
        let (open, connecting) = (Mutex::new(None), tokio::sync::Mutex::new(0));
        Self { config, tls, address, session, notify, timeout, open, connecting, pushes }
    }

    fn open(&self) -> MutexGuard<'_, Option<Arc<Open>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Option<Arc<Open>> {
        self.open().clone()
    }

    /// The connection; makes one if there is none.
    async fn connection(&self) -> Result<Arc<Open>, Fault> {
        if let Some(open) = self.current() {
            return Ok(open);
        }
        let mut generation = self.connecting.lock().await;
        if let Some(open) = self.current() {
            return Ok(open);
        }
        *generation += 1;
        let connecting = tokio::time::timeout(self.timeout * 2, self.establish(*generation));
        let open = connecting.await.unwrap_or_else(|_| Err(Fault::lost(false, "no answer in time")))?;
        let open = Arc::new(open);
        *self.open() = Some(Arc::clone(&open));
        Ok(open)
    }

    async fn establish(&self, generation: u64) -> Result<Open, Fault> {
        let connected = self.config.connect(self.tls.clone()).await;
        // Nothing that matters was sent: whatever went wrong, the engine was not reached.
        let (client, connection) = connected.map_err(|error| fault(error, false))?;
        let pushes = self.pushes.clone();
        let driver = tokio::spawn(drive(connection, generation, pushes)).abort_handle();
        let mut open = Open { client: Arc::new(client), act: None, generation, driver };
        let before = |error| Fault { error: not_sent(error), ..Fault::lost(false, "") };
        let prepared = async {
            if self.notify {
                open.client.batch_execute(&self.greeting()).await.map_err(|error| fault(error, false))?;
            }
            migrate(&open.client).await?;
            if self.notify {
                open.act = Some(open.client.prepare(ACT).await.map_err(|error| fault(error, false))?);
            }
            Ok(())
        };
        prepared.await.map_err(|fault: Fault| match fault.error.kind() {
            ErrorKind::Ambiguous => before(fault.error),
            _ => fault,
        })?;
        Ok(open)
    }

    /// What makes a connection this client's own: it listens, and holds the lock that shows it.
    fn greeting(&self) -> String {
        let mut text = String::new();
        let millis = self.timeout.as_millis().max(1);
        let _ = write!(text, "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; ");
        let _ = write!(text, "SET statement_timeout = {millis}; SET lock_timeout = 0; ");
        let _ = write!(text, "LISTEN fencelock_{}; ", hex(&self.session));
        let _ = write!(text, "SELECT pg_advisory_lock_shared({})", session_key(&self.session));
        text
    }

    /// Runs a request on the connection, which it must answer in time.
    async fn exchange<T>(
        &self,
        request: impl AsyncFnOnce(&Open) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, Fault> {
        let open = self.connection().await?;
        let answer = match tokio::time::timeout(self.timeout, request(&open)).await {
            Ok(answer) => answer.map_err(|error| fault(error, true)),
            Err(_) => Err(Fault::lost(true, "no answer in time")),
        };
        if answer.as_ref().is_err_and(|fault| fault.broken) {
            self.broke(open.generation);
        }
        answer
    }
}

/// The key of the lock that a listening connection holds: the first half of the session.
fn session_key(session: &[u8; 16]) -> i64 {
    let mut first = [0; 8];
    first.copy_from_slice(&session[..8]);
    i64::from_be_bytes(first)
}

fn not_sent(error: Error) -> Error {
    Error::new(ErrorKind::Unavailable, "cannot connect; is the server running at this address?").caused_by(error)
}

/// Carries what the connection sends and receives, and passes on what the server pushes, until it breaks.
async fn drive<S, T>(mut connection: Connection<S, T>, generation: u64, pushes: mpsc::UnboundedSender<(u64, Push)>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
        if let AsyncMessage::Notification(word) = message
            && let Some(push) = Push::read(word.payload())
        {
            let _ = pushes.send((generation, push));
        }
    }
    let _ = pushes.send((generation, Push::Broken));
}

/// Makes sure that tables and functions are there; makes them if it may.
async fn migrate(client: &Client) -> Result<(), Fault> {
    if is_ready(client).await? {
        return Ok(());
    }
    let run = async |sql: &str| client.batch_execute(sql).await.map_err(|error| fault(error, false));
    run(&format!("BEGIN; SELECT pg_advisory_xact_lock({MIGRATION})")).await?;
    // Somebody else may have been first.
    if !is_ready(client).await? {
        run(super::TABLES).await?;
        run(super::FUNCTIONS).await?;
    }
    run("COMMIT").await
}

/// Whether the functions are there. Those of a later version are an error.
async fn is_ready(client: &Client) -> Result<bool, Fault> {
    let ask = async |sql: &str| client.query_typed(sql, &[]).await.map_err(|error| fault(error, false));
    // By the tables themselves: what the server remembers of them may be older than somebody's migration.
    let there = "SELECT FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace \
                 WHERE nspname = 'fencelock' AND proname = 'version'";
    if ask(there).await?.is_empty() {
        return Ok(false);
    }
    let version = ask("SELECT fencelock.version()").await?;
    let version = version.first().and_then(|row| row.try_get::<_, i32>(0).ok()).unwrap_or(0);
    if version > VERSION {
        let text = format!(
            "the database has version {version} of fencelock's functions; this program knows up to {VERSION}: update it"
        );
        return Err(Fault::refusal(Error::new(ErrorKind::Unsupported, text)));
    }
    Ok(version == VERSION)
}

impl Database for Link {
    const CALLS: usize = 2;
    const BATCH: usize = 64;

    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "postgres",
            processes: true,
            machines: true,
            shared: true,
            permits: true,
            ordered: true,
            push: self.notify,
            instant_death: false,
            durable_tokens: true,
            purpose: Purpose::Correctness,
            survives: "crashed and stopped clients, lost connections and replies, a restart or crash of the server, failover to a \
                       synchronous replica",
            beware: "failover to an asynchronous replica, or a server with synchronous_commit or fsync off, may forget the newest \
                     grants; a clock that jumps ends leases early or late: let the resource compare tokens",
        }
    }

    fn asks(&self) -> bool {
        !self.notify
    }

    async fn act(&self, ops: &[&Op]) -> Result<(u64, Vec<Reply>), Fault> {
        let codes: Vec<&str> = ops.iter().map(|op| op.code).collect();
        let names: Vec<&[u8]> = ops.iter().map(|op| op.name.as_str().as_bytes()).collect();
        let owners: Vec<[u8; 16]> = ops.iter().map(|op| op.owner.to_bytes()).collect();
        let owners: Vec<&[u8]> = owners.iter().map(<[u8; 16]>::as_slice).collect();
        let ttls: Vec<i64> = ops.iter().map(|op| op.ttl_millis()).collect();
        let modes: Vec<&str> = ops.iter().map(|op| op.mode_letter()).collect();
        let permits: Vec<i64> = ops.iter().map(|op| i64::from(op.permits())).collect();
        let arrivals: Vec<i64> = ops.iter().map(|op| op.arrival.cast_signed()).collect();
        let tokens: Vec<i64> = ops.iter().map(|op| op.token.cast_signed()).collect();
        let labels: Vec<&[u8]> = ops.iter().map(|op| op.label.as_bytes()).collect();
        let (caller, asks): (&[u8], bool) = (&self.session, !self.notify);
        let arguments: [(&(dyn ToSql + Sync), Type); 11] = [
            (&caller, Type::BYTEA),
            (&asks, Type::BOOL),
            (&codes, Type::TEXT_ARRAY),
            (&names, Type::BYTEA_ARRAY),
            (&owners, Type::BYTEA_ARRAY),
            (&ttls, Type::INT8_ARRAY),
            (&modes, Type::TEXT_ARRAY),
            (&permits, Type::INT8_ARRAY),
            (&arrivals, Type::INT8_ARRAY),
            (&tokens, Type::INT8_ARRAY),
            (&labels, Type::BYTEA_ARRAY),
        ];
        let rows = self
            .exchange(async |open| match &open.act {
                Some(act) => open.client.query(act, &arguments.each_ref().map(|(value, _)| *value)).await,
                None => open.client.query_typed(ACT, &arguments).await,
            })
            .await?;
        let mut rows = rows.iter().map(read_reply);
        let server = rows.next().flatten().filter(|(kind, ..)| *kind == 0).and_then(|(_, now, _)| now);
        let server = server.and_then(|now| u64::try_from(now).ok());
        let replies: Option<Vec<Reply>> =
            rows.map(|row| row.and_then(|(kind, a, b)| Reply::read(kind, a, b))).collect();
        server.zip(replies).ok_or_else(|| Fault::refusal(unreadable()))
    }

    async fn hear(&self, touch: bool) -> Result<Vec<String>, Fault> {
        let caller: &[u8] = &self.session;
        let arguments: [(&(dyn ToSql + Sync), Type); 2] = [(&caller, Type::BYTEA), (&touch, Type::BOOL)];
        let rows = self.exchange(async |open| open.client.query_typed(HEAR, &arguments).await).await?;
        Ok(rows.iter().filter_map(|row| row.try_get(0).ok()).collect())
    }

    async fn look(&self, which: Which<'_>) -> Result<Vec<Row>, Fault> {
        let order = "ORDER BY name, holds DESC, token, place";
        let caller: &[u8] = &self.session;
        let rows = match which {
            Which::Name(name) => {
                let (query, name) = (format!("{LOOK} name = $2 {order} LIMIT {SEEN}"), name.as_str().as_bytes());
                let arguments: [(&(dyn ToSql + Sync), Type); 2] = [(&caller, Type::BYTEA), (&name, Type::BYTEA)];
                self.exchange(async |open| open.client.query_typed(&query, &arguments).await).await?
            }
            Which::Owner(name, owner) => {
                let (query, name) = (format!("{LOOK} name = $2 AND owner = $3"), name.as_str().as_bytes());
                let owner = owner.to_bytes();
                let owner: &[u8] = &owner;
                let arguments: [(&(dyn ToSql + Sync), Type); 3] =
                    [(&caller, Type::BYTEA), (&name, Type::BYTEA), (&owner, Type::BYTEA)];
                self.exchange(async |open| open.client.query_typed(&query, &arguments).await).await?
            }
            Which::Prefix(prefix) => {
                let query = format!("{LOOK} name >= $2 AND ($3 IS NULL OR name < $3) {order}");
                let (from, to) = (prefix.as_bytes(), after_prefix(prefix));
                let arguments: [(&(dyn ToSql + Sync), Type); 3] =
                    [(&caller, Type::BYTEA), (&from, Type::BYTEA), (&to, Type::BYTEA)];
                self.aside(&query, &arguments).await?
            }
        };
        rows.iter().map(read_row).collect::<Option<_>>().ok_or_else(|| Fault::refusal(unreadable()))
    }

    async fn connect(&self) -> Result<(), Fault> {
        self.connection().await.map(drop)
    }

    fn broke(&self, generation: u64) {
        let mut open = self.open();
        if open.as_ref().is_some_and(|open| open.generation == generation) {
            *open = None;
        }
    }

    fn orphan(&self) {
        *self.open() = None;
    }

    async fn close(&self) {
        if !self.notify {
            let caller: &[u8] = &self.session;
            let query = "WITH words AS (DELETE FROM fencelock.word WHERE session = $1) DELETE FROM fencelock.session WHERE id = $1";
            let goodbye = self.exchange(async |open| open.client.query_typed(query, &[(&caller, Type::BYTEA)]).await);
            if let Err(fault) = goodbye.await {
                tracing::debug!("saying good-bye: {}", fault.error);
            }
        }
        self.orphan();
    }
}

impl Link {
    /// A question that may take long, on a connection that goes away with it: renewals must not wait behind it.
    async fn aside(
        &self,
        query: &str,
        arguments: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<tokio_postgres::Row>, Fault> {
        let asking = async {
            let (client, connection) =
                self.config.connect(self.tls.clone()).await.map_err(|error| fault(error, false))?;
            let driver = tokio::spawn(connection);
            let rows = client.query_typed(query, arguments).await.map_err(|error| fault(error, true));
            driver.abort();
            rows
        };
        tokio::time::timeout(LIST, asking).await.unwrap_or_else(|_| Err(Fault::lost(true, "no answer in time")))
    }
}

fn read_reply(row: &tokio_postgres::Row) -> Option<(i64, Option<i64>, Option<i64>)> {
    Some((i64::from(row.try_get::<_, i32>(0).ok()?), row.try_get(1).ok()?, row.try_get(2).ok()?))
}

fn read_row(row: &tokio_postgres::Row) -> Option<Row> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let number = |index: usize| row.try_get::<_, i64>(index).ok();
    let micros = |value: i64| u64::try_from(value).unwrap_or(0);
    Some(Row {
        name: text(row.try_get(0).ok()?),
        owner: owner(row.try_get(1).ok()?)?,
        holds: row.try_get(2).ok()?,
        mode: mode(row.try_get(3).ok()?, number(4)?)?,
        token: u64::try_from(number(5)?).ok()?,
        left: micros(number(6)?),
        since: micros(number(7)?),
        label: text(row.try_get(8).ok()?),
    })
}
