//! The connections to one database of MySQL or MariaDB: one for calls, one that asks for words and, by a lock that it holds, shows
//! others that this client is there. Opened when needed, opened again when they break.

use super::fault::fault;
use crate::engine::sql::fault::{Fault, unreadable};
use crate::engine::sql::op::{Op, Push, Reply, hex, mode, owner};
use crate::engine::sql::{Database, Row, SEEN, Which, after_prefix};
use crate::engine::{Capability, Purpose};
use crate::{Error, ErrorKind};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, Row as MyRow};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

/// The version of the procedures that this client calls.
const VERSION: i64 = 1;
/// How long a list of all locks, or the making of the tables, may take.
const LONG: Duration = Duration::from_secs(30);

const NOW: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

type Answer = Result<Vec<MyRow>, Fault>;
type Request = (String, oneshot::Sender<Answer>);

/// A connection, and the task that owns it: whoever asked may go away, the connection stays in order.
struct Open {
    requests: mpsc::UnboundedSender<Request>,
    generation: u64,
    driver: AbortHandle,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// What a connection is for.
#[derive(Default)]
struct Slot {
    open: Mutex<Option<Arc<Open>>>,
    /// Only one task connects.
    connecting: tokio::sync::Mutex<()>,
}

impl Slot {
    fn open(&self) -> MutexGuard<'_, Option<Arc<Open>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn broke(&self, generation: u64) {
        let mut open = self.open();
        if open.as_ref().is_some_and(|open| open.generation == generation) {
            *open = None;
        }
    }
}

pub(crate) struct Link {
    opts: Opts,
    address: String,
    session: [u8; 16],
    timeout: Duration,
    calls: Slot,
    ears: Slot,
    generations: AtomicU64,
    /// The connection that asks for words holds the lock that shows it. After a reconnect, an old one may hold it for a while.
    shown: AtomicBool,
    /// Words that were heard and are still to be deleted: that must not hold up those who wait for them.
    heard: Mutex<Vec<u64>>,
    pushes: mpsc::UnboundedSender<(u64, Push)>,
}

impl Link {
    pub(super) fn new(
        opts: Opts,
        address: String,
        session: [u8; 16],
        timeout: Duration,
        pushes: mpsc::UnboundedSender<(u64, Push)>,
    ) -> Self {
        let (calls, ears) = (Slot::default(), Slot::default());
        let (generations, shown) = (AtomicU64::new(0), AtomicBool::new(false));
        let heard = Mutex::default();
        Self { opts, address, session, timeout, calls, ears, generations, shown, heard, pushes }
    }

    /// The connection of a slot; makes one if there is none.
    async fn connection(&self, slot: &Slot) -> Result<Arc<Open>, Fault> {
        if let Some(open) = slot.open().clone() {
            return Ok(open);
        }
        let _only_one = slot.connecting.lock().await;
        if let Some(open) = slot.open().clone() {
            return Ok(open);
        }
        let mut conn = self.establish().await?;
        if std::ptr::eq(slot, &self.ears) {
            let shown = within(self.timeout, show(&mut conn, &self.session)).await.map_err(not_sent)?;
            self.shown.store(shown, Ordering::Relaxed);
        } else {
            within(LONG, migrate(&mut conn)).await.map_err(not_sent)?;
        }
        let generation = self.generations.fetch_add(1, Ordering::Relaxed) + 1;
        let (requests, asked) = mpsc::unbounded_channel();
        let driver = tokio::spawn(drive(conn, asked, generation, self.pushes.clone())).abort_handle();
        let open = Arc::new(Open { requests, generation, driver });
        *slot.open() = Some(Arc::clone(&open));
        Ok(open)
    }

    /// Nothing that matters is sent: whatever goes wrong, the engine was not reached.
    async fn establish(&self) -> Result<Conn, Fault> {
        let connecting = tokio::time::timeout(self.timeout * 2, Conn::new(self.opts.clone())).await;
        let connected = connecting.map_err(|_| Fault::lost(false, "no answer in time"))?;
        connected.map_err(|error| fault(error, false))
    }

    /// Runs a statement, which the server must answer in time, and gives the rows of its first answer.
    async fn exchange(&self, slot: &Slot, sql: String) -> Answer {
        let open = self.connection(slot).await?;
        let (tell, told) = oneshot::channel();
        let answer = if open.requests.send((sql, tell)).is_err() {
            Err(Fault { error: unreachable(), ..Fault::lost(false, "") })
        } else {
            match tokio::time::timeout(self.timeout, told).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(Fault::lost(true, "the connection is gone")),
                Err(_) => Err(Fault::lost(true, "no answer in time")),
            }
        };
        if answer.as_ref().is_err_and(|fault| fault.broken) {
            slot.broke(open.generation);
        }
        answer
    }

    fn heard(&self) -> MutexGuard<'_, Vec<u64>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes the words that were heard, and no others: numbers are not committed in their order.
    async fn forget_heard(&self) -> Result<(), Fault> {
        let heard = self.heard().clone();
        if !heard.is_empty() {
            let numbers: Vec<String> = heard.iter().map(u64::to_string).collect();
            let sql = format!("DELETE FROM fencelock_word WHERE number IN ({})", numbers.join(", "));
            self.exchange(&self.ears, sql).await?;
            self.heard().clear();
        }
        Ok(())
    }

    /// A question that may take long, on a connection that goes away with it: renewals must not wait behind it.
    async fn aside(&self, sql: &str) -> Answer {
        let mut conn = self.establish().await?;
        let rows = within(LONG, async { conn.query(sql).await.map_err(|error| fault(error, true)) }).await?;
        let _ = conn.disconnect().await;
        Ok(rows)
    }
}

async fn within<T>(span: Duration, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    tokio::time::timeout(span, work).await.unwrap_or_else(|_| Err(Fault::lost(true, "no answer in time")))
}

fn unreachable() -> Error {
    Error::new(ErrorKind::Unavailable, "the connection is gone")
}

/// What went wrong before anything that matters was sent is not ambiguous.
fn not_sent(fault: Fault) -> Fault {
    match fault.error.kind() {
        ErrorKind::Ambiguous => Fault::lost(false, fault.error.to_string()),
        _ => fault,
    }
}

/// Carries out what is asked, one after the other, until the connection breaks or nobody can ask any more.
async fn drive(
    mut conn: Conn,
    mut asked: mpsc::UnboundedReceiver<Request>,
    generation: u64,
    pushes: mpsc::UnboundedSender<(u64, Push)>,
) {
    while let Some((sql, tell)) = asked.recv().await {
        let answer = conn.query(sql).await.map_err(|error| fault(error, true));
        let broken = answer.as_ref().is_err_and(|fault| fault.broken);
        let _ = tell.send(answer);
        if broken {
            let _ = pushes.send((generation, Push::Broken));
            return;
        }
    }
    let _ = conn.disconnect().await;
}

fn lock_name(session: &[u8; 16]) -> String {
    // In the letters of HEX(): the name is not folded everywhere.
    format!("fencelock:{}", hex(session).to_uppercase())
}

/// Takes the lock that shows that this client is there. False while an old connection of its own has it.
async fn show(conn: &mut Conn, session: &[u8; 16]) -> Result<bool, Fault> {
    let taken: Option<Option<i64>> = conn
        .query_first(format!("SELECT GET_LOCK('{}', 0)", lock_name(session)))
        .await
        .map_err(|error| fault(error, false))?;
    Ok(taken.flatten() == Some(1))
}

/// Makes sure that tables and procedures are there; makes them if it may.
async fn migrate(conn: &mut Conn) -> Result<(), Fault> {
    if is_ready(conn).await? {
        return Ok(());
    }
    // Those who make them take turns.
    conn.query_drop("SELECT GET_LOCK('fencelock:migrate', 20)").await.map_err(|error| fault(error, false))?;
    if !is_ready(conn).await? {
        for statement in super::statements() {
            conn.query_drop(statement).await.map_err(|error| fault(error, false))?;
        }
    }
    conn.query_drop("SELECT RELEASE_LOCK('fencelock:migrate')").await.map_err(|error| fault(error, false))
}

/// Whether the procedures are there. Those of a later version are an error.
async fn is_ready(conn: &mut Conn) -> Result<bool, Fault> {
    // Somebody may have made the table, and not yet said which version it is.
    let version: Result<Option<Option<i64>>, _> = conn.query_first("SELECT MAX(version) FROM fencelock_mark").await;
    let version = match version {
        Ok(version) => version.flatten().unwrap_or(0),
        Err(mysql_async::Error::Server(error)) if error.code == 1146 => 0,
        Err(error) => return Err(fault(error, false)),
    };
    if version > VERSION {
        let text = format!(
            "the database has version {version} of fencelock's procedures; this program knows up to {VERSION}: update it"
        );
        return Err(Fault::refusal(Error::new(ErrorKind::Unsupported, text)));
    }
    Ok(version == VERSION)
}

impl Database for Link {
    const CALLS: usize = 1;
    const BATCH: usize = 32;

    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "mysql",
            processes: true,
            machines: true,
            shared: true,
            permits: true,
            ordered: true,
            push: false,
            instant_death: false,
            durable_tokens: true,
            purpose: Purpose::Correctness,
            survives: "crashed and stopped clients, lost connections and replies, a restart or crash of the server, failover that \
                       loses no committed transaction",
            beware: "failover to a replica that lags behind, or innodb_flush_log_at_trx_commit other than 1, may forget the newest \
                     grants; a clock that jumps ends leases early or late: let the resource compare tokens",
        }
    }

    fn asks(&self) -> bool {
        true
    }

    async fn act(&self, ops: &[&Op]) -> Result<(u64, Vec<Reply>), Fault> {
        let mut sql = format!("CALL fencelock_act(x'{}', '", hex(&self.session));
        for op in ops {
            let (name, owner) = (hex(op.name.as_str().as_bytes()), hex(&op.owner.to_bytes()));
            let (code, ttl, mode, permits) = (op.code, op.ttl_millis(), op.mode_letter(), op.permits());
            let (arrival, token, label) = (op.arrival, op.token, hex(op.label.as_bytes()));
            let _ = write!(sql, "{code} {name} {owner} {ttl} {mode} {permits} {arrival} {token} {label};");
        }
        sql.push_str("')");
        let rows = self.exchange(&self.calls, sql).await?;
        let text: Option<Vec<u8>> = rows.first().and_then(|row| row.get(0));
        let text = text.and_then(|text| String::from_utf8(text).ok()).unwrap_or_default();
        let (replies, words) = text.split_once('|').unwrap_or_default();
        for push in words.split(';').filter_map(Push::read) {
            let _ = self.pushes.send((0, push));
        }
        read_replies(replies).ok_or_else(|| Fault::refusal(unreadable()))
    }

    async fn hear(&self, touch: bool) -> Result<Vec<String>, Fault> {
        if touch && !self.shown.load(Ordering::Relaxed) {
            let taken =
                self.exchange(&self.ears, format!("SELECT GET_LOCK('{}', 0)", lock_name(&self.session))).await?;
            let taken = taken.first().and_then(|row| row.get::<Option<i64>, _>(0)).flatten() == Some(1);
            self.shown.store(taken, Ordering::Relaxed);
        }
        self.forget_heard().await?;
        let session = hex(&self.session);
        let sql = format!("SELECT number, word FROM fencelock_word WHERE session = x'{session}' ORDER BY number");
        let rows = self.exchange(&self.ears, sql).await?;
        let number = |row: &MyRow| row.get::<u64, _>(0);
        let word = |row: &MyRow| row.get::<Vec<u8>, _>(1).and_then(|word| String::from_utf8(word).ok());
        self.heard().extend(rows.iter().filter_map(number));
        Ok(rows.iter().filter_map(word).collect())
    }

    async fn look(&self, which: Which<'_>) -> Result<Vec<Row>, Fault> {
        let alive = format!(
            "session = x'{}' OR IS_USED_LOCK(CONCAT('fencelock:', HEX(session))) IS NOT NULL",
            hex(&self.session)
        );
        let select = |condition: &str| {
            format!(
                "SELECT name, owner, holds, mode, permits, token, ends - now, now - since, label \
                 FROM fencelock_claim CROSS JOIN (SELECT {NOW} AS now) AS clock \
                 WHERE {condition} AND IF(holds = 1, ends > now, {alive}) ORDER BY name, holds DESC, token, place"
            )
        };
        let literal = |name: &str| format!("x'{}'", hex(name.as_bytes()));
        let rows = match which {
            Which::Name(name) => {
                let sql = select(&format!("name = {}", literal(name.as_str())));
                self.exchange(&self.calls, format!("{sql} LIMIT {SEEN}")).await?
            }
            Which::Owner(name, owner) => {
                let owner = hex(&owner.to_bytes());
                let condition = format!("name = {} AND owner = x'{owner}'", literal(name.as_str()));
                self.exchange(&self.calls, select(&condition)).await?
            }
            Which::Prefix(prefix) => {
                let mut condition = format!("name >= {}", literal(prefix));
                if let Some(end) = after_prefix(prefix) {
                    let _ = write!(condition, " AND name < x'{}'", hex(&end));
                }
                self.aside(&select(&condition)).await?
            }
        };
        rows.iter().map(read_row).collect::<Option<_>>().ok_or_else(|| Fault::refusal(unreadable()))
    }

    async fn connect(&self) -> Result<(), Fault> {
        self.connection(&self.calls).await?;
        self.connection(&self.ears).await?;
        Ok(())
    }

    fn broke(&self, generation: u64) {
        self.calls.broke(generation);
        self.ears.broke(generation);
    }

    fn orphan(&self) {
        *self.calls.open() = None;
        *self.ears.open() = None;
    }

    async fn close(&self) {
        let sql = format!("DELETE FROM fencelock_word WHERE session = x'{}'", hex(&self.session));
        if let Err(fault) = self.exchange(&self.calls, sql).await {
            tracing::debug!("saying good-bye: {}", fault.error);
        }
        self.orphan();
    }
}

/// The server's time, then a reply for each operation.
fn read_replies(text: &str) -> Option<(u64, Vec<Reply>)> {
    let mut parts = text.strip_suffix(';')?.split(';');
    let server = parts.next()?.parse().ok()?;
    let reply = |part: &str| {
        let mut numbers = part.split(' ').map(|number| number.parse::<i64>().ok());
        Reply::read(numbers.next()??, numbers.next().flatten(), numbers.next().flatten())
    };
    Some((server, parts.map(reply).collect::<Option<_>>()?))
}

fn read_row(row: &MyRow) -> Option<Row> {
    let bytes = |index: usize| row.get_opt::<Vec<u8>, _>(index)?.ok();
    let text = |index: usize| Some(String::from_utf8_lossy(&bytes(index)?).into_owned());
    let number = |index: usize| row.get_opt::<i64, _>(index)?.ok();
    let micros = |index: usize| Some(u64::try_from(number(index)?).unwrap_or(0));
    Some(Row {
        name: text(0)?,
        owner: owner(&bytes(1)?)?,
        holds: number(2)? == 1,
        mode: mode(&text(3)?, number(4)?)?,
        token: micros(5)?,
        left: micros(6)?,
        since: micros(7)?,
        label: text(8)?,
    })
}
