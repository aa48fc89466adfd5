//! One node: its connection, what it pushes, whether it may vote, and what is still owed to it.

use super::ballot::{Answer, Batch, Op, Who, number, read, read_owner, text};
use super::council::Council;
use crate::engine::redis::{News, Target, Wire, answered, confirmed, explain, pattern_of};
use crate::{Clock, Error, Moment, Owner};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use redis::{RedisError, RedisResult, Value};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::mpsc;

/// So many batches are under way to one node at most.
const FLIGHTS: usize = 16;
/// How long batches wait for a connection that has just broken to be made again.
const GRACE: Duration = Duration::from_millis(50);
/// More debts than this are not remembered: what they would free ends with its lease.
const DEBTS: usize = 10_000;
/// Where a node keeps the founders' run ids, and the longest lease that any client uses.
const FOUNDED: &str = "fencelock:redlock:founded";
const LONGEST: &str = "fencelock:redlock:longest";
const OUT: &str = "fencelock:redlock:out";
/// How long a node keeps the founders' run ids after the last client was there, and how often one that stays says so.
const RECORD: Duration = Duration::from_secs(30 * 24 * 60 * 60);
const REMIND: Duration = Duration::from_secs(24 * 60 * 60);
/// How the keys begin that hold those who wait; see `vote.lua`.
const QUEUES: &str = "fencelock:rq:";
/// What there is to say of a node before the first attempt to connect has ended.
pub(super) const UNTRIED: &str = "not connected yet";

/// What a node pushes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Push {
    /// Handed over to a waiter: proposal, node time in µs, lease.
    Granted {
        owner: Owner,
        key: String,
        token: u64,
        at: u64,
        lease: Duration,
    },
    /// This waiter should ask again.
    Look {
        owner: Owner,
        key: String,
    },
    /// Taken away from its holder.
    Lost {
        owner: Owner,
    },
    Broken,
}

/// What a node told of itself when it was connected.
#[derive(Debug, Clone)]
pub(super) struct Intro {
    pub(super) run_id: String,
    pub(super) uptime: Duration,
    /// It persists every write before it answers.
    pub(super) durable: bool,
    /// The founders' run ids, if there is such a record.
    pub(super) founded: Option<String>,
    /// The longest lease of all clients.
    pub(super) longest: Duration,
    /// Its clock, in µs.
    pub(super) time: u64,
}

/// Whether a node may vote.
#[derive(Debug, Clone)]
pub(super) enum Trust {
    Full,
    /// Not before this moment, and why; and then only for proposals above this one, which were made when whatever the node may have
    /// forgotten was over.
    After {
        until: Moment,
        floor: u64,
        why: Arc<str>,
    },
}

/// A node's clock against the local one: the difference lies between these two, in µs.
#[derive(Debug, Clone, Copy)]
struct Reading {
    low: i64,
    high: i64,
    at: Moment,
}

struct State {
    /// Why it cannot be reached; `None` while it can.
    down: Option<Arc<str>>,
    /// The first error that another attempt cannot mend.
    hopeless: Option<Error>,
    /// The process that was last connected to.
    run_id: String,
    connection: Option<Wire>,
    trust: Trust,
    /// As the node itself said lately.
    out: Option<(Moment, Arc<str>)>,
    /// Its clock jumped, as far as this client could see.
    jumped: Option<(Moment, Arc<str>)>,
    reading: Option<Reading>,
    debts: Vec<(Op, Moment)>,
}

pub(super) struct Node {
    pub(super) index: usize,
    pub(super) address: String,
    target: Target,
    channel: String,
    timeout: Duration,
    queue: mpsc::UnboundedSender<Arc<Batch>>,
    state: Mutex<State>,
}

type Pushes = mpsc::UnboundedReceiver<Push>;
type Flight = BoxFuture<'static, (Arc<Batch>, Moment, RedisResult<Value>)>;

impl Node {
    pub(super) fn new(
        index: usize,
        address: String,
        target: Target,
        session: &str,
        timeout: Duration,
    ) -> (Self, mpsc::UnboundedReceiver<Arc<Batch>>) {
        let (queue, inbox) = mpsc::unbounded_channel();
        let state = State {
            down: Some(UNTRIED.into()),
            hopeless: None,
            run_id: String::new(),
            connection: None,
            trust: Trust::Full,
            out: None,
            jumped: None,
            reading: None,
            debts: Vec::new(),
        };
        let channel = format!("fencelock:inbox:{session}");
        (Self { index, address, target, channel, timeout, queue, state: Mutex::new(state) }, inbox)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, batch: Arc<Batch>) {
        // Without a receiver the client is being dropped, and nobody waits for the answer.
        let _ = self.queue.send(batch);
    }

    pub(super) fn connection(&self) -> Option<Wire> {
        self.state().connection.clone()
    }

    pub(super) fn down(&self) -> Option<Arc<str>> {
        self.state().down.clone()
    }

    pub(super) fn can_vote(&self) -> bool {
        self.down().is_none() && self.out().is_none()
    }

    pub(super) fn run_id(&self) -> String {
        self.state().run_id.clone()
    }

    pub(super) fn take_hopeless(&self) -> Option<Error> {
        self.state().hopeless.take()
    }

    pub(super) fn set_trust(&self, trust: Trust) {
        self.state().trust = trust;
    }

    /// Why it does not vote, and for how long; `None` if it does.
    pub(super) fn out(&self) -> Option<(Arc<str>, Duration)> {
        let now = Clock::Boot.now();
        let state = self.state();
        let trust = match &state.trust {
            Trust::After { until, why, .. } if *until > now => Some((Arc::clone(why), until.since(now))),
            _ => None,
        };
        let said = [&state.jumped, &state.out].into_iter().flatten().find(|(until, _)| *until > now);
        trust.or_else(|| said.map(|(until, why)| (Arc::clone(why), until.since(now))))
    }

    /// Only proposals above this one are votes; `None`: none is.
    pub(super) fn floor(&self) -> Option<u64> {
        let state = self.state();
        let now = Clock::Boot.now();
        if [&state.jumped, &state.out].into_iter().flatten().any(|(until, _)| *until > now) {
            return None;
        }
        match &state.trust {
            Trust::Full => Some(0),
            Trust::After { until, floor, .. } => (*until <= now).then_some(*floor),
        }
    }

    /// The difference between its clock and the local one, in µs.
    pub(super) fn offset(&self) -> Option<i64> {
        let reading = self.state().reading?;
        Some(reading.low.midpoint(reading.high))
    }

    /// A moment of the local clock that is not later than that time of the node.
    pub(super) fn local(&self, time: u64) -> Moment {
        let now = Clock::Boot.now();
        let Some(reading) = self.state().reading else { return now };
        let micros = i64::try_from(time).unwrap_or(i64::MAX).saturating_sub(reading.high);
        Moment::from_nanos(u64::try_from(micros).unwrap_or(0).saturating_mul(1_000)).min(now)
    }

    /// Compares clocks. By how much the node's has jumped, in µs, if it has.
    fn read_clock(&self, sent: Moment, received: Moment, time: u64) -> Option<i64> {
        /// Both clocks may be off by a thousandth, and by this many µs.
        const SLACK: i64 = 10_000;
        let time = i64::try_from(time).unwrap_or(i64::MAX);
        let (low, high) = (time.saturating_sub(micros(received)), time.saturating_sub(micros(sent)));
        let mut state = self.state();
        let Some(known) = state.reading else {
            state.reading = Some(Reading { low, high, at: received });
            return None;
        };
        let drift = i64::try_from(received.since(known.at).as_micros() / 1_000).unwrap_or(i64::MAX);
        let (least, most) = (known.low.saturating_sub(drift), known.high.saturating_add(drift));
        let jump = if low > most.saturating_add(SLACK) {
            Some(low - most)
        } else if high < least.saturating_sub(SLACK) {
            Some(high - least)
        } else {
            None
        };
        let (low, high) = match (low.max(least), high.min(most)) {
            (closer, other) if closer <= other && jump.is_none() => (closer, other),
            _ => (low, high),
        };
        state.reading = Some(Reading { low, high, at: received });
        jump
    }

    fn owe(&self, op: &Op) {
        let mut state = self.state();
        let now = Clock::Boot.now();
        if state.debts.len() >= DEBTS {
            state.debts.retain(|(_, until)| *until > now);
        }
        if op.code.is_debt() && state.debts.len() < DEBTS {
            let until = now.after(op.ttl + Duration::from_secs(5));
            state.debts.push((op.turned_into(op.code), until));
        }
    }

    fn debts(&self) -> Vec<Op> {
        let now = Clock::Boot.now();
        let debts = std::mem::take(&mut self.state().debts);
        debts.into_iter().filter(|(_, until)| *until > now).map(|(op, _)| op).collect()
    }

    /// Serves until the client is gone.
    pub(super) async fn run(self: Arc<Self>, council: Weak<Council>, mut inbox: mpsc::UnboundedReceiver<Arc<Batch>>) {
        let mut pause = Duration::from_millis(5);
        let mut first = true;
        loop {
            let Some(connected) = self.connect_while_failing(&council, &mut inbox, first).await else { return };
            match connected {
                Ok((connection, pushes)) => {
                    pause = Duration::from_millis(5);
                    first = true;
                    self.serve(&council, &mut inbox, connection, pushes).await;
                    self.state().connection = None;
                    if let Some(council) = council.upgrade() {
                        council.route(self.index, Push::Broken);
                    }
                }
                Err(error) => {
                    first = false;
                    self.note_down(error);
                    if let Some(council) = council.upgrade() {
                        council.tried();
                    }
                    if !self.idle(&council, &mut inbox, pause).await {
                        return;
                    }
                    pause = (pause * 2).min(Duration::from_millis(500));
                }
            }
        }
    }

    fn note_down(&self, error: Error) {
        let mut state = self.state();
        state.connection = None;
        // Once: it is tried again all the time.
        if state.down.as_deref().is_none_or(|why| why == UNTRIED) {
            tracing::warn!(node = %self.address, "the node cannot be used: {error}");
        }
        state.down = Some(error.to_string().into());
        if matches!(error.kind(), crate::ErrorKind::Invalid | crate::ErrorKind::Unsupported) {
            state.hopeless.get_or_insert(error);
        }
    }

    /// Connects, and answers batches meanwhile. `None` when the client is gone.
    async fn connect_while_failing(
        &self,
        council: &Weak<Council>,
        inbox: &mut mpsc::UnboundedReceiver<Arc<Batch>>,
        first: bool,
    ) -> Option<Result<(Wire, Pushes), Error>> {
        let mut connecting = std::pin::pin!(self.connect(council));
        let mut grace = std::pin::pin!(tokio::time::sleep(if first { GRACE } else { Duration::ZERO }));
        let mut patient = true;
        loop {
            tokio::select! {
                biased;
                connected = &mut connecting => return Some(connected),
                () = &mut grace, if patient => patient = false,
                batch = inbox.recv(), if !patient => self.refuse(council, &*batch?),
            }
        }
    }

    /// Lets time pass. False when the client is gone.
    async fn idle(
        &self,
        council: &Weak<Council>,
        inbox: &mut mpsc::UnboundedReceiver<Arc<Batch>>,
        pause: Duration,
    ) -> bool {
        let mut sleep = std::pin::pin!(tokio::time::sleep(pause));
        loop {
            tokio::select! {
                biased;
                () = &mut sleep => return true,
                batch = inbox.recv() => match batch {
                    Some(batch) => self.refuse(council, &batch),
                    None => return false,
                }
            }
        }
    }

    fn fail(&self, council: &Weak<Council>, batch: &Batch, why: &Arc<str>, sent: bool) {
        for op in &batch.ops {
            self.owe(op);
        }
        if let Some(council) = council.upgrade() {
            council.counted(batch.count_failed(self.index, why, sent));
        }
    }

    /// A node that is down: nothing was sent.
    fn refuse(&self, council: &Weak<Council>, batch: &Batch) {
        let why = self.down().unwrap_or_else(|| "the connection broke".into());
        self.fail(council, batch, &why, false);
    }

    async fn connect(&self, council: &Weak<Council>) -> Result<(Wire, Pushes), Error> {
        let (tell, pushes) = mpsc::unbounded_channel();
        let listener = Box::new(move |news| {
            let push = match news {
                News::Broken => Some(Push::Broken),
                News::Push(values) => read_push(&values),
            };
            // Nobody to tell is no reason to break the connection.
            if let Some(push) = push {
                let _ = tell.send(push);
            }
        });
        let introduce = async {
            let mut connection = self.target.connect(self.timeout, listener).await?;
            confirmed(connection.subscribe("SUBSCRIBE", &self.channel)).await?;
            let intro = self.introduce(&mut connection).await?;
            Ok::<_, RedisError>((connection, intro))
        };
        let (connection, intro) = introduce.await.map_err(|error| explain(error, false))?;
        {
            let mut state = self.state();
            state.connection = Some(connection.clone());
            state.run_id.clone_from(&intro.run_id);
        }
        let council = council.upgrade();
        if let Some(council) = &council {
            council.introduced(self.index, intro).await;
        }
        {
            let mut state = self.state();
            state.down = None;
            state.hopeless = None;
        }
        if let Some(council) = &council {
            council.tried();
        }
        Ok((connection, pushes))
    }

    async fn introduce(&self, connection: &mut Wire) -> RedisResult<Intro> {
        let mut questions = redis::pipe();
        questions.cmd("INFO").arg("server").cmd("GET").arg(FOUNDED).cmd("GET").arg(LONGEST).cmd("TIME");
        let sent = Clock::Boot.now();
        let (info, founded, longest, (seconds, rest)): (String, Option<String>, Option<u64>, (u64, u64)) =
            questions.query_async(connection).await?;
        // A jump since the last connection is found by the next answer: here it would only be forgotten.
        if self.state().reading.is_none() {
            let _ = self.read_clock(sent, Clock::Boot.now(), seconds * 1_000_000 + rest);
        }
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        Ok(Intro {
            run_id: field("run_id"),
            uptime: Duration::from_secs(field("uptime_in_seconds").parse().unwrap_or(0)),
            durable: is_durable(connection).await,
            founded,
            longest: Duration::from_millis(longest.unwrap_or(0)),
            time: seconds * 1_000_000 + rest,
        })
    }

    /// Tells the node of the longest lease that a client uses.
    pub(super) async fn note_longest(&self, longest: Duration) {
        if let Some(connection) = self.connection() {
            let mut command = redis::cmd("SET");
            command.arg(LONGEST).arg(super::ballot::millis(longest)).arg("PX").arg(24 * 60 * 60 * 1_000);
            let _ = connection.call(&command).await;
        }
    }

    /// Writes down the founders, unless others were. The record that stands.
    pub(super) async fn found(&self, run_ids: &str) -> Option<String> {
        let mut connection = self.connection()?;
        let mut found = redis::pipe();
        found.cmd("SET").arg(FOUNDED).arg(run_ids).arg("NX").arg("PX").arg(super::ballot::millis(RECORD)).ignore();
        found.cmd("GET").arg(FOUNDED);
        let (record,): (Option<String>,) = found.query_async(&mut connection).await.ok()?;
        record
    }

    /// Lets the founders' record last.
    fn prolong_record(connection: &Wire) {
        let connection = connection.clone();
        tokio::spawn(async move {
            let life = super::ballot::millis(RECORD);
            let _ = connection.call(redis::cmd("PEXPIRE").arg(FOUNDED).arg(life)).await;
        });
    }

    async fn serve(
        self: &Arc<Self>,
        council: &Weak<Council>,
        inbox: &mut mpsc::UnboundedReceiver<Arc<Batch>>,
        connection: Wire,
        mut pushes: Pushes,
    ) {
        let mut flights: FuturesUnordered<Flight> = FuturesUnordered::new();
        // What is under way, so that nobody waits for it when the connection breaks.
        let mut away: Vec<Arc<Batch>> = Vec::new();
        if let Some(council) = council.upgrade() {
            let mut debts = self.debts();
            while !debts.is_empty() {
                let chunk = debts.split_off(debts.len().saturating_sub(256));
                let batch = Arc::new(council.batch(chunk));
                away.push(Arc::clone(&batch));
                flights.push(fly(batch, &connection, true));
            }
        }
        let mut remind = tokio::time::interval(REMIND);
        loop {
            tokio::select! {
                biased;
                Some(push) = pushes.recv() => {
                    if push == Push::Broken {
                        break;
                    }
                    let Some(council) = council.upgrade() else { return };
                    council.route(self.index, push);
                }
                Some((batch, sent, outcome)) = flights.next(), if !flights.is_empty() => {
                    let Some(held) = council.upgrade() else { return };
                    let error = match outcome.and_then(Value::extract_error) {
                        Ok(value) => {
                            away.retain(|other| !Arc::ptr_eq(other, &batch));
                            self.take(&held, &batch, sent, value);
                            continue;
                        }
                        Err(error) => error,
                    };
                    if error.code() == Some("NOSCRIPT") {
                        flights.push(fly(batch, &connection, false));
                        continue;
                    }
                    let broken = error.code().is_none();
                    let why: Arc<str> = explain(error, true).to_string().into();
                    if broken {
                        self.state().down = Some(why);
                        break;
                    }
                    away.retain(|other| !Arc::ptr_eq(other, &batch));
                    self.fail(council, &batch, &why, true);
                }
                batch = inbox.recv(), if flights.len() < FLIGHTS => match batch {
                    Some(batch) => {
                        away.push(Arc::clone(&batch));
                        flights.push(fly(batch, &connection, true));
                    }
                    None => return,
                },
                _ = remind.tick() => Self::prolong_record(&connection),
            }
        }
        let why = Arc::clone(self.state().down.get_or_insert_with(|| "the connection broke".into()));
        // Whatever was under way may have been carried out.
        for batch in away {
            self.fail(council, &batch, &why, true);
        }
    }

    fn take(&self, council: &Arc<Council>, batch: &Batch, sent: Moment, value: Value) {
        let received = Clock::Boot.now();
        let Some(reply) = read(value, batch.ops.len()) else {
            let why: Arc<str> = "its answer cannot be understood; please report this".into();
            return council.counted(batch.count_failed(self.index, &why, true));
        };
        if let Some(now) = reply.now {
            if let Some(jump) = self.read_clock(sent, received, now) {
                council.jumped(self, jump);
            }
            self.state().out = reply.out.map(|(why, left)| (received.after(left), why.into()));
        }
        let floor = if council.trusts_all() { Some(0) } else { self.floor() };
        council.counted(batch.count(self.index, floor, reply.answers));
    }

    /// Lets all clients know that this node does not vote.
    pub(super) fn put_out(&self, why: &str, span: Duration) {
        self.state().jumped = Some((Clock::Boot.now().after(span), why.into()));
        let Some(connection) = self.connection() else { return };
        let mut command = redis::cmd("SET");
        command.arg(OUT).arg(why).arg("PX").arg(super::ballot::millis(span));
        tokio::spawn(async move {
            let _ = connection.call(&command).await;
        });
    }

    /// One line for an error: what this node did.
    pub(super) fn account(&self, answer: Option<&Answer>, votes: bool) -> String {
        let what = match answer {
            None => "no answer yet".to_owned(),
            Some(Answer::Granted) => "granted".to_owned(),
            Some(Answer::Busy(holder) | Answer::Waits { holder, .. }) => {
                format!("held by {}", super::view::short(&holder.value))
            }
            Some(Answer::TooLow(highest)) => format!("has accepted token {highest}"),
            Some(Answer::Refused(why)) => format!("refused: {why}"),
            Some(Answer::Failed(why, _)) => why.to_string(),
            Some(answer) => format!("{answer:?}").to_lowercase(),
        };
        match self.out() {
            Some((why, left)) if !votes && !matches!(answer, Some(Answer::Failed(..))) => {
                format!("{} does not vote for another {:.0?}: {why}", self.address, left)
            }
            _ => format!("{} {what}", self.address),
        }
    }
}

fn micros(moment: Moment) -> i64 {
    i64::try_from(moment.as_nanos() / 1_000).unwrap_or(i64::MAX)
}

fn fly(batch: Arc<Batch>, connection: &Wire, knows_script: bool) -> Flight {
    let sent = Clock::Boot.now();
    let told = match knows_script {
        true => connection.send(batch.packed(), 1),
        false => connection.send(&batch.packed_with_source(), 1),
    };
    Box::pin(async move {
        let outcome = answered(told).await.map(|mut values| values.pop().unwrap_or(Value::Nil));
        (batch, sent, outcome)
    })
}

/// Whether the node writes everything to its disk before it answers. One that does not let us ask counts as one that does not.
async fn is_durable(connection: &Wire) -> bool {
    let setting = async |name: &str| -> Option<String> {
        let value = connection.call(redis::cmd("CONFIG").arg("GET").arg(name)).await.ok()?;
        match value {
            Value::Map(pairs) => pairs.first().and_then(|(_, value)| text(value)),
            Value::Array(parts) => parts.get(1).and_then(text),
            _ => None,
        }
    };
    setting("appendonly").await.as_deref() == Some("yes") && setting("appendfsync").await.as_deref() == Some("always")
}

fn read_push(push: &[Value]) -> Option<Push> {
    let [kind, _, message] = push else { return None };
    if text(kind)? == "message" { read_word(&text(message)?) } else { None }
}

/// A name may have line breaks: it stands at the end.
fn read_word(word: &str) -> Option<Push> {
    let (kind, rest) = word.split_once('\n')?;
    let parts: Vec<&str> = match kind {
        "g" => rest.splitn(5, '\n').collect(),
        "h" => rest.splitn(3, '\n').collect(),
        _ => vec![rest],
    };
    let owner = read_owner(parts.first()?)?;
    let at = |index: usize| parts.get(index)?.parse::<u64>().ok();
    match kind {
        "g" => Some(Push::Granted {
            owner,
            key: (*parts.get(4)?).to_owned(),
            token: at(1)?,
            at: at(2)?,
            lease: Duration::from_millis(at(3)?),
        }),
        "h" => Some(Push::Look { owner, key: (*parts.get(2)?).to_owned() }),
        "l" => Some(Push::Lost { owner }),
        _ => None,
    }
}

/// The names of locks that are held on this node by fencelock, or waited for: scans in small steps.
pub(super) async fn names(connection: Wire, prefix: &str) -> RedisResult<Vec<String>> {
    let mut names = Vec::new();
    let queues = scan(&connection, "zset", &format!("{QUEUES}*")).await?;
    let waited_for = queues.iter().filter_map(|key| key.strip_prefix(QUEUES));
    names.extend(waited_for.filter(|name| name.starts_with(prefix)).map(str::to_owned));
    for keys in scan(&connection, "string", &pattern_of(prefix)).await?.chunks(1_000) {
        // Others' strings may be large: only their beginnings are read.
        let mut values = redis::pipe();
        for key in keys {
            values.cmd("GETRANGE").arg(key).arg(0).arg(99);
        }
        let values: Vec<Value> = values.query_async(&mut connection.clone()).await?;
        let is_ours =
            |value: &Value| text(value).is_some_and(|value| value.contains('\n') && Who::read(&value).is_some());
        names.extend(keys.iter().zip(&values).filter(|(_, value)| is_ours(value)).map(|(key, _)| key.clone()));
    }
    Ok(names)
}

async fn scan(connection: &Wire, kind: &str, pattern: &str) -> RedisResult<Vec<String>> {
    let mut found = Vec::new();
    let mut cursor = 0_u64;
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(1_000).arg("TYPE").arg(kind);
        let value = connection.call(&scan).await?.extract_error()?;
        let Value::Array(parts) = value else { break };
        let [next, Value::Array(keys)] = parts.as_slice() else { break };
        found.extend(keys.iter().filter_map(text));
        match number(next) {
            Some(next) if next != 0 => cursor = next,
            _ => break,
        }
    }
    Ok(found)
}
