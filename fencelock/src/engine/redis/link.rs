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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    quarantine: Arc<Sign>,
    /// Whose writes the server had when it was connected to.
    history: Option<History>,
    /// Channels can belong to a slot, so that their messages stay on one node of a cluster (Redis 7).
    sharded: bool,
    /// Slots for which words are listened to, on a cluster.
    listens: Listens,
}

impl Open {
    fn listens(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.listens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn quarantine(&self) -> Option<Quarantine> {
        self.quarantine.read().filter(|quarantine| !quarantine.left().is_zero())
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
    /// The longest lease that a successor of this server would wait for on behalf of this client, in ms.
    announced: AtomicU64,
    /// When something was sent last that the server has answered as a master, in ns of the clock since boot.
    heard: AtomicU64,
    /// Only one task connects.
    connecting: tokio::sync::Mutex<()>,
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
            announced: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            connecting: tokio::sync::Mutex::new(()),
            server_time: ServerTime::default(),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.plan.timeout
    }

    fn current(&self) -> Option<Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// For how long nothing is granted, and why; as far as the present connection tells.
    pub(super) fn quarantine(&self) -> Option<Quarantine> {
        self.current().and_then(|open| open.quarantine())
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
        let open = Box::pin(self.connect()).await?;
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
        let mut open =
            Open { wire: wire.clone(), generation, quarantine: Arc::default(), history: None, sharded: false, listens };
        if self.plan.policy != Policy::Off || self.is_in_cluster() {
            let server = takeover::look(&mut wire).await?;
            open.sharded = server.sharded_channels();
            let longest = self.plan.longest.load(Ordering::Relaxed);
            open.quarantine.put(self.check(&mut wire, &server, longest).await?);
            open.history = Some(server.history().clone());
            self.announced.store(longest, Ordering::Relaxed);
            self.heard(Clock::Boot.now());
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

    async fn check(&self, wire: &mut Wire, server: &Server, longest: u64) -> Result<Option<Quarantine>, Fault> {
        if self.plan.policy == Policy::Off {
            return Ok(None);
        }
        takeover::check(wire, server, self.plan.policy, Duration::from_millis(longest), &self.places()).await
    }

    /// The server has answered as a master what was sent at this moment.
    pub(super) fn heard(&self, sent: Moment) {
        self.heard.store(sent.as_nanos(), Ordering::Relaxed);
    }

    /// Makes sure that a successor of this server would wait for as long as this lease; and if `fresh`, that this server has not
    /// followed another master since it was connected to. Connections outlive that.
    pub(super) async fn vouch(&self, open: &Open, lease: Duration, fresh: bool) -> Result<(), Fault> {
        if self.plan.policy == Policy::Off {
            return Ok(());
        }
        let announced = self.announced.load(Ordering::Relaxed) >= millis(lease);
        let heard = Duration::from_nanos(self.heard.load(Ordering::Relaxed));
        let quiet = fresh && Duration::from_nanos(Clock::Boot.now().as_nanos()).saturating_sub(heard) > QUIET;
        // Somebody may have prolonged it.
        let over = open.quarantine.read().is_some_and(|quarantine| quarantine.left().is_zero());
        if announced && !quiet && !over {
            return Ok(());
        }
        // In a box: everybody passes here, and hardly anybody stays.
        let vouched = Box::pin(async {
            if quiet {
                self.see_history(open).await?;
            }
            if announced && !over { Ok(()) } else { self.announce(open, lease).await }
        });
        vouched.await.inspect_err(|_| self.broke(open.generation))
    }

    async fn see_history(&self, open: &Open) -> Result<(), Fault> {
        let now = Clock::Boot.now();
        let history = takeover::look_at_history(&mut open.wire.clone()).await?;
        if open.history.as_ref().is_some_and(|then| history.has_turned_since(then)) {
            return Err(turned());
        }
        self.heard(now);
        Ok(())
    }

    async fn announce(&self, open: &Open, lease: Duration) -> Result<(), Fault> {
        // Whichever server is connected to next hears of it, too.
        let longest = self.plan.longest.fetch_max(millis(lease), Ordering::Relaxed).max(millis(lease));
        let mut wire = open.wire.clone();
        let server = takeover::look(&mut wire).await?;
        open.quarantine.put(self.check(&mut wire, &server, longest).await?);
        self.announced.fetch_max(longest, Ordering::Relaxed);
        Ok(())
    }

    /// Sends one command and returns its answer.
    pub(super) async fn send_to(&self, open: &Open, command: &Cmd) -> Result<Value, Fault> {
        open.wire.call(command).await.and_then(Value::extract_error).map_err(|error| self.failed(open, error))
    }

    /// Sends something that has so many answers, and returns them.
    pub(super) async fn send(&self, open: &Open, packed: &[u8], answers: usize) -> Result<Vec<Value>, Fault> {
        let values = answered(open.wire.send(packed, answers)).await.map_err(|error| self.failed(open, error))?;
        values.into_iter().map(|value| value.extract_error().map_err(|error| self.failed(open, error))).collect()
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

fn turned() -> Fault {
    Fault::passing(Error::new(ErrorKind::Unavailable, "the server has taken over from another one meanwhile"))
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
