//! The connection to one Redis server: one socket for commands and for what the server pushes. Opened when needed, opened again
//! when it breaks, and always subscribed to this client's inbox.

use super::fault::{Fault, fault};
use super::find::Finder;
use super::key::tag_of;
use super::post::millis;
use super::takeover::{self, History, Policy, Quarantine, Server, Sign};
use super::wire::{News, Told, Wire, answered};
use crate::clock::ServerTime;
use crate::{Clock, Error, ErrorKind, Moment, Owner};
use redis::{Cmd, RedisError, RedisResult, Value};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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

type Listens = Arc<Mutex<HashSet<u16>>>;

/// A connection in use.
#[derive(Clone)]
pub(super) struct Open {
    wire: Wire,
    generation: u64,
    known: Arc<Known>,
    /// Channels can belong to a slot, so that their messages stay on one node of a cluster (Redis 7).
    sharded: bool,
    /// Slots for which words are listened to, on a cluster.
    listens: Listens,
}

/// What a connection knows of its server.
#[derive(Default)]
struct Known {
    quarantine: Sign,
    /// Whose writes the server had when it was connected to.
    history: OnceLock<History>,
    /// The longest lease that a successor of this server would wait for on behalf of this client, in ms.
    announced: AtomicU64,
    /// When something was sent last whose answer shows that the server was a master, and has been since it was connected to. In ns of
    /// the clock since boot.
    heard: AtomicU64,
}

impl Open {
    /// The server has answered as a master what was sent at this moment, and is known to have been one until then.
    pub(super) fn heard(&self, sent: Moment) {
        self.known.heard.store(sent.as_nanos(), Ordering::Relaxed);
    }

    /// Whether nothing may be granted to new owners, also if it should be over: it may have been prolonged.
    pub(super) fn is_in_quarantine(&self) -> bool {
        self.known.quarantine.read().is_some()
    }

    fn listens(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.listens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn quarantine(&self) -> Option<Quarantine> {
        self.known.quarantine.read().filter(|quarantine| !quarantine.left().is_zero())
    }

    /// What `line.lua` appends to the names of inboxes on a cluster; starts with `s` if they are sharded.
    pub(super) fn inbox_suffix(&self, tag: &str) -> String {
        match (tag, self.sharded) {
            ("", _) => String::new(),
            (tag, true) => format!("s:{tag}"),
            (tag, false) => format!("p:{tag}"),
        }
    }
}

/// What a link is made of.
pub(super) struct Plan {
    pub(super) finder: Finder,
    pub(super) session: Arc<str>,
    pub(super) timeout: Duration,
    pub(super) policy: Policy,
    /// The longest lease that this client has asked for, in ms.
    pub(super) longest: Arc<AtomicU64>,
    /// The part of the markers' names that differs from node to node of a cluster, for each place where they are; empty elsewhere.
    pub(super) places: Mutex<Vec<String>>,
    pub(super) pushes: mpsc::UnboundedSender<(u64, Push)>,
}

pub(super) struct Link {
    plan: Plan,
    open: Mutex<Option<Open>>,
    /// Only one task connects.
    connecting: tokio::sync::Mutex<()>,
    /// Why there is no connection.
    trouble: Mutex<Option<String>>,
    server_time: ServerTime,
}

/// A connection over which nothing was heard for longer may lead to a server that was a replica meanwhile.
const QUIET: Duration = Duration::from_secs(1);

/// Numbers connections, of all links.
static GENERATION: AtomicU64 = AtomicU64::new(1);

impl Link {
    pub(super) fn new(plan: Plan) -> Self {
        Self {
            plan,
            open: Mutex::new(None),
            connecting: tokio::sync::Mutex::new(()),
            trouble: Mutex::default(),
            server_time: ServerTime::default(),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.plan.timeout
    }

    fn current(&self) -> Option<Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn is_open(&self) -> bool {
        self.current().is_some()
    }

    /// For how long nothing is granted, and why; as far as the present connection tells.
    pub(super) fn quarantine(&self) -> Option<Quarantine> {
        self.current().and_then(|open| open.quarantine())
    }

    /// Why there is no connection, when there is none and it was tried.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives up a connection that broke, if it is still the one in use.
    pub(super) fn broke(&self, generation: u64) {
        self.give_up(|open| open.generation == generation);
    }

    /// The same when everybody knows.
    pub(super) fn forget(&self, generation: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.take_if(|open| open.generation == generation);
    }

    /// Gives up the connection, whichever it is.
    pub(super) fn drop_connection(&self) {
        self.give_up(|_| true);
    }

    /// Words may be missed from now on, and whoever is connected to next may not know of our holds.
    fn give_up(&self, which: impl FnOnce(&Open) -> bool) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(given_up) = open.take_if(|open| which(open)) {
            let _ = self.plan.pushes.send((given_up.generation, Push::Broken));
        }
    }

    /// Resolves when another server has become the one to talk to.
    pub(super) async fn moved(&self) {
        self.plan.finder.moved().await;
    }

    /// The connection; makes one if there is none.
    pub(super) async fn open(&self) -> Result<Open, Fault> {
        if let Some(open) = self.current() {
            return Ok(open);
        }
        let _alone = self.connecting.lock().await;
        if let Some(open) = self.current() {
            return Ok(open);
        }
        // In a box: everybody passes here, and hardly anybody connects.
        let open = Box::pin(self.connect()).await;
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) =
            open.as_ref().err().map(|fault| fault.error.to_string());
        let open = open?;
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(open.clone());
        Ok(open)
    }

    async fn connect(&self) -> Result<Open, Fault> {
        let Plan { timeout, session, .. } = &self.plan;
        let target = self.plan.finder.server(*timeout).await?;
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        let pushes = self.plan.pushes.clone();
        let listens: Listens = Arc::default();
        let heard = Arc::clone(&listens);
        let listener = Box::new(move |news| {
            let push = match news {
                News::Broken => Some(Push::Broken),
                News::Push(values) => read_push(&values, &heard),
            };
            // Nobody to tell is no reason to break the connection.
            if let Some(push) = push {
                let _ = pushes.send((generation, push));
            }
        });
        let connecting = async {
            let wire = target.connect(*timeout, listener).await?;
            confirmed(wire.subscribe("SUBSCRIBE", &format!("fencelock:inbox:{session}"))).await?;
            Ok::<_, RedisError>(wire)
        };
        // Nothing that matters was sent: whatever went wrong, the engine was not reached.
        let mut wire = connecting.await.map_err(|error| fault(error, false))?;
        let mut open = Open { wire: wire.clone(), generation, known: Arc::default(), sharded: false, listens };
        if self.plan.policy != Policy::Off || self.is_in_cluster() {
            let now = Clock::Boot.now();
            let server = takeover::look(&mut wire).await?;
            open.sharded = server.sharded_channels();
            let _ = open.known.history.set(server.history().clone());
            open.heard(now);
            self.check(&open, &server, self.plan.longest.load(Ordering::Relaxed)).await?;
        }
        if let Some(quarantine) = open.quarantine() {
            tracing::warn!("nothing is granted to new owners for {:.1?}: {}", quarantine.left(), quarantine.reason());
        }
        Ok(open)
    }

    fn places(&self) -> Vec<String> {
        self.plan.places.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn is_in_cluster(&self) -> bool {
        self.places().iter().any(|place| !place.is_empty())
    }

    /// This node serves other slots than before: the marker of who grants belongs into one of them.
    pub(super) fn move_to(&self, places: Vec<String>) {
        let mut now = self.plan.places.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != places {
            *now = places;
            drop(now);
            // It is written when the next connection is made.
            self.drop_connection();
        }
    }

    /// Finds out whether the server must wait, and notes there how long leases last.
    async fn check(&self, open: &Open, server: &Server, longest: u64) -> Result<(), Fault> {
        if self.plan.policy == Policy::Off {
            return Ok(());
        }
        let (mut wire, span) = (open.wire.clone(), Duration::from_millis(longest));
        let quarantine = takeover::check(&mut wire, server, self.plan.policy, span, &self.places()).await?;
        open.known.quarantine.put(quarantine);
        open.known.announced.fetch_max(longest, Ordering::Relaxed);
        Ok(())
    }

    /// Makes sure that a successor of this server would wait for as long as this lease; and if somebody may be let in, that this server
    /// has not followed another master since it was connected to, which connections outlive, and that a quarantine is over. Returns
    /// whether it is known to have been a master until now.
    pub(super) async fn vouch(&self, open: &Open, lease: Duration, lets_in: bool) -> Result<bool, Fault> {
        if self.plan.policy == Policy::Off {
            return Ok(false);
        }
        let announced = open.known.announced.load(Ordering::Relaxed) >= millis(lease);
        let heard = Moment::from_nanos(open.known.heard.load(Ordering::Relaxed));
        let quiet = Clock::Boot.now().since(heard) > QUIET;
        let over = lets_in && open.is_in_quarantine() && open.quarantine().is_none();
        if announced && !over && !(quiet && lets_in) {
            return Ok(!quiet);
        }
        // In a box: everybody passes here, and hardly anybody stays.
        let vouched = Box::pin(async {
            if quiet && lets_in {
                self.see_history(open).await?;
            }
            if announced && !over { Ok(()) } else { self.announce(open, lease).await }
        });
        match vouched.await {
            Ok(()) => Ok(lets_in || !quiet),
            Err(fault) if fault.broken => {
                self.broke(open.generation);
                Err(fault)
            }
            Err(fault) if lets_in => Err(fault),
            // Who holds already goes on.
            Err(_) => Ok(false),
        }
    }

    async fn see_history(&self, open: &Open) -> Result<(), Fault> {
        let now = Clock::Boot.now();
        let history = takeover::look_at_history(&mut open.wire.clone()).await?;
        if open.known.history.get().is_some_and(|then| history.has_turned_since(then)) {
            let text = "the server has taken over from another one meanwhile";
            return Err(Fault { broken: true, ..Fault::passing(Error::new(ErrorKind::Unavailable, text)) });
        }
        open.heard(now);
        Ok(())
    }

    async fn announce(&self, open: &Open, lease: Duration) -> Result<(), Fault> {
        // Whichever server is connected to next hears of it, too.
        let longest = self.plan.longest.fetch_max(millis(lease), Ordering::Relaxed).max(millis(lease));
        let server = takeover::look(&mut open.wire.clone()).await?;
        self.check(open, &server, longest).await
    }

    /// Sends one command and returns its answer.
    pub(super) async fn send_to(&self, open: &Open, command: &Cmd) -> Result<Value, Fault> {
        open.wire.call(command).await.and_then(Value::extract_error).map_err(|error| self.failed(open, error))
    }

    /// Sends something that has so many answers, and returns them. Each of them may be an error of its own.
    pub(super) async fn send(
        &self,
        open: &Open,
        packed: &[u8],
        answers: usize,
    ) -> Result<Vec<Result<Value, Fault>>, Fault> {
        let values = answered(open.wire.send(packed, answers)).await.map_err(|error| self.failed(open, error))?;
        let each = |value: Value| value.extract_error().map_err(|error| self.failed(open, error));
        Ok(values.into_iter().map(each).collect())
    }

    fn failed(&self, open: &Open, error: RedisError) -> Fault {
        let fault = fault(error, true);
        if fault.broken {
            self.broke(open.generation);
        }
        fault
    }

    /// On a cluster: listens for words about the locks of this slot. What to wait for, if it is not known yet to succeed: after
    /// the answer to what is sent next.
    pub(super) fn listen_at(&self, open: &Open, slot: u16) -> Option<Told> {
        if !open.listens().insert(slot) {
            return None;
        }
        let command = if open.sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        let channel = format!("fencelock:inbox:{}:{}", self.plan.session, tag_of(slot));
        Some(open.wire.subscribe(command, &channel))
    }

    pub(super) async fn listens(&self, open: &Open, slot: u16, told: Told) -> Result<(), Fault> {
        confirmed(told).await.map_err(|error| {
            open.listens().remove(&slot);
            self.failed(open, error)
        })
    }

    /// Asks to be told when a key is deleted or expires; a server that is not configured to tell does not.
    pub(super) async fn watch_key(&self, channel: &str) {
        if let Some(open) = self.current() {
            let _ = confirmed(open.wire.subscribe("SUBSCRIBE", channel)).await;
        }
    }

    pub(super) async fn unwatch_key(&self, channel: &str) {
        if let Some(open) = self.current() {
            let _ = confirmed(open.wire.subscribe("UNSUBSCRIBE", channel)).await;
        }
    }

    pub(super) fn server_time(&self) -> &ServerTime {
        &self.server_time
    }
}

/// Waits until a server has confirmed a subscription.
pub(in crate::engine) async fn confirmed(told: Told) -> RedisResult<()> {
    // It answers only if it refuses.
    answered(told).await?.into_iter().try_for_each(|refusal| refusal.extract_error().map(drop))
}

fn read_push(push: &[Value], listens: &Mutex<HashSet<u16>>) -> Option<Push> {
    let [kind, channel, rest @ ..] = push else { return None };
    let channel = text(channel)?;
    match (text(kind)?, rest) {
        // The slot has moved to another node, and the words about its locks as well.
        ("sunsubscribe", _) => {
            listens.lock().unwrap_or_else(PoisonError::into_inner).retain(|slot| !channel.ends_with(&tag_of(*slot)));
            Some(Push::Broken)
        }
        ("message" | "smessage", [message]) => match channel.split_once("__:") {
            Some((space, key)) if space.starts_with("__keyspace@") => {
                matches!(text(message)?, "del" | "expired" | "evicted").then(|| Push::Gone { key: key.to_owned() })
            }
            _ => read_word(text(message)?),
        },
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

pub(super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
