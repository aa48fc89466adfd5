//! Redis: the line lives in one script; waiting is by push through one inbox per client. One server, one that Sentinels watch
//! over, or a cluster: that is only how the server of a lock is found.
//!
//! * `line.lua`, `inspect.lua`: all that happens to a lock, atomically.
//! * `address`: the URLs.
//! * `key`: the keys of a lock.
//! * `node`, `find`, `cluster`: which server a lock lives on.
//! * `link`: the connection to a server, and what it pushes; `target`, `wire`, `resp`: how it is made, used and read.
//! * `takeover`: servers that took over from others, and must wait.
//! * `post`: batching.
//! * `fault`: what an error means.
//!
//! See `docs/engines/redis.md` and `docs/engines/redis-ha.md`.

mod address;
mod cluster;
mod fault;
mod find;
mod key;
pub(crate) use key::companion;
mod link;
mod node;
mod post;
mod resp;
mod status;
mod takeover;
mod target;
mod wire;

pub(crate) use self::address::open;
use self::fault::{Fault, told};
use self::key::Key;
use self::link::{Link, Push};
use self::node::Nodes;
use self::post::{Answer, Op, Reply, Who};
#[cfg(feature = "redlock")]
pub(in crate::engine) use self::{
    address::{connection_info, tls},
    key::pattern_of,
    link::confirmed,
    post::Packer,
    target::Target,
    wire::{News, Wire, answered},
};
use super::{Capability, Engine, Purpose};
use crate::{
    Claim, Clock, Error, ErrorKind, Grant, Hold, Mode, Moment, Name, Owner, Release, Renewal, Result, Status, Token,
};
use async_trait::async_trait;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// A connection that lasts for longer than this was worth making.
const STABLE: Duration = Duration::from_secs(1);

/// What an error of the server means, for people. `sent`: the request may have reached it.
#[cfg(feature = "redlock")]
pub(in crate::engine) fn explain(error: redis::RedisError, sent: bool) -> Error {
    fault::fault(error, sent).error
}

/// Who of this client waits, for which key, and how to tell it.
#[derive(Default)]
struct Waiting {
    by_owner: HashMap<Owner, (Name, mpsc::UnboundedSender<Push>)>,
    /// Words that were faster than the answer that put their owner in line, and when they came.
    early: VecDeque<(Moment, Push)>,
    /// How often words may have been missed.
    breaks: u64,
}

impl Waiting {
    /// Words wait for so long for their owners, and so many of them.
    const EARLY: (Duration, usize) = (Duration::from_secs(2), 1_000);

    /// Tells a waiter, or keeps the word for it.
    fn tell(&mut self, owner: Owner, key: &str, push: Push) {
        // It may wait for another lock by now; late news of this one must not be taken for news of that.
        if let Some((_, tell)) = self.by_owner.get(&owner).filter(|(name, _)| name.as_str() == key) {
            let _ = tell.send(push);
            return;
        }
        let now = Clock::Boot.now();
        let (span, count) = Self::EARLY;
        while self.early.front().is_some_and(|(came, _)| came.after(span) < now) || self.early.len() >= count {
            self.early.pop_front();
        }
        self.early.push_back((now, push));
    }
}

/// An engine on Redis.
pub(crate) struct RedisEngine {
    nodes: Nodes,
    session: Arc<str>,
    waiting: Mutex<Waiting>,
    /// What the server pushed; the keeper's task takes it from here.
    arrived: tokio::sync::Mutex<mpsc::UnboundedReceiver<(u64, Push)>>,
    /// The newest label, and what the server notes for it.
    note: Mutex<(String, Arc<str>)>,
    /// Told when a connection broke: whoever took over may not know of our holds.
    doubt: Notify,
    address: String,
    db: i64,
}

impl RedisEngine {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, name: Name) -> Key {
        Key::of(name, self.nodes.are_a_cluster())
    }

    fn op(&self, code: &'static str, name: &Name, owner: Owner, ttl: Duration) -> Op {
        Op { code: code.into(), key: self.key(name.clone()), who: Who::owner(owner), ttl, note: None }
    }

    /// For this hold, and no other one of the same owner.
    fn hold_op(&self, code: &'static str, hold: &Hold) -> Op {
        let op = self.op(code, &hold.name, hold.owner, hold.ttl);
        match hold.seat {
            Some(seat) => Op { who: Who::hold(hold.owner, seat >> 1), ..op },
            None => op,
        }
    }

    fn claim_op(&self, claim: &Claim, wait: bool) -> Op {
        let op = self.op(claim_code(claim.mode, wait), &claim.name, claim.owner, claim.ttl);
        let note = Some(self.note(&claim.label));
        match claim.mode {
            Mode::Permit { .. } => Op { code: with_arrival(claim.mode, wait, 0).into(), note, ..op },
            Mode::Exclusive | Mode::Shared => Op { note, ..op },
        }
    }

    /// What the server notes of a claim with this label. Most claims of a client have the same.
    fn note(&self, label: &str) -> Arc<str> {
        let mut note = self.note.lock().unwrap_or_else(PoisonError::into_inner);
        if note.1.is_empty() || note.0 != label {
            *note = (label.to_owned(), format!("\n{}\n{label}", self.session).into());
        }
        Arc::clone(&note.1)
    }

    fn expect(&self, owner: Owner, name: &Name) -> Result<Expected<'_>> {
        let (tell, told) = mpsc::unbounded_channel();
        let mut waiting = self.waiting();
        let Waiting { by_owner, early, .. } = &mut *waiting;
        match by_owner.entry(owner) {
            Entry::Occupied(_) => Err(Error::invalid(
                "this owner is waiting for a lock already; an owner stands for one acquisition at a time",
            )),
            Entry::Vacant(slot) => {
                early.retain(|(_, push)| {
                    let for_this = push.is_for(owner, name.as_str());
                    if for_this {
                        let _ = tell.send(push.clone());
                    }
                    !for_this
                });
                slot.insert((name.clone(), tell));
                Ok(Expected { engine: self, owner, told })
            }
        }
    }

    /// Waits until the claim holds. `answer`: what the server said when it was asked first, `breaks`: how often words may have been
    /// missed by then.
    async fn stand_in_line(&self, claim: &Claim, mut op: Op, answer: Answer, mut breaks: u64) -> Result<Option<Grant>> {
        // Only who must wait is expected to be told anything.
        let mut place = None;
        let mut watch = None;
        let mut repeated = false;
        let mut answer = Ok(answer);
        loop {
            repeated |= answer
                .as_ref()
                .map_or_else(|error: &Error| error.kind() == ErrorKind::Ambiguous, |answer| answer.repeated);
            let mut look = match answer {
                Ok(Answer { reply: Reply::Waits { arrival, look, foreign }, .. }) => {
                    op.code = with_arrival(claim.mode, true, arrival).into();
                    if foreign && watch.is_none() {
                        watch = KeyWatch::start(self, &op.key).await;
                    }
                    look
                }
                Ok(Answer { reply: Reply::Quarantined, .. }) => self.wait_out_quarantine(claim, &op.key),
                Ok(answer) => return held(claim, &answer, repeated).map(Some),
                // Who has a place in line keeps it while the server is away.
                Err(error) if place.is_some() && passing(&error) => Duration::from_millis(200),
                Err(error) => return Err(error),
            };
            if place.is_none() {
                place = Some(self.expect(claim.owner, &claim.name)?);
                if self.waiting().breaks != breaks {
                    look = Duration::ZERO;
                }
            }
            if let Some(place) = &mut place
                && let Some(grant) = self.wait(claim, &op.key, place, look, repeated).await
            {
                return self.confirmed(claim, grant).await.map(Some);
            }
            breaks = self.waiting().breaks;
            answer = self.nodes.submit(&op).await.map_err(told);
        }
    }

    /// Waits until it is worth asking again, or until the grant arrives.
    async fn wait(
        &self,
        claim: &Claim,
        key: &Key,
        told: &mut Expected<'_>,
        look: Duration,
        repeated: bool,
    ) -> Option<Grant> {
        let mut until = Clock::Boot.now().after(look);
        loop {
            tokio::select! {
                biased;
                push = told.told.recv() => match push {
                    Some(Push::Granted { token, at, lease, .. }) => {
                        let from = self.nodes.of(key)?.link.server_time().local(at);
                        // Told late: only the server knows whether it still stands.
                        let late = Clock::Boot.now() >= from.after(lease / 2);
                        let grant = Grant::new(Token::new(token), claim.mode, from, seat(Token::new(token), repeated));
                        return (!late).then(|| grant.provisional(lease));
                    }
                    Some(Push::First { left, .. }) => {
                        until = Clock::Boot.now().after(left + Duration::from_millis(1));
                    }
                    _ => return None,
                },
                () = Clock::Boot.sleep_until(until) => return None,
            }
        }
    }

    /// How long to wait before asking again.
    fn wait_out_quarantine(&self, claim: &Claim, key: &Key) -> Duration {
        let Some(quarantine) = self.nodes.quarantine(key) else { return Duration::from_millis(10) };
        tracing::warn!(name = %claim.name, "waiting for {:.1?}: {}", quarantine.left(), quarantine.reason());
        quarantine.left() + Duration::from_millis(1)
    }

    fn quarantined(&self, key: &Key) -> Error {
        let why = self.in_quarantine(key).map_or_else(
            || "the server has just ended its quarantine; try again".to_owned(),
            |why| format!("{why}; wait for it (with quarantine=off in the URL there may be two holders)"),
        );
        Error::new(ErrorKind::Unavailable, why)
    }

    fn in_quarantine(&self, key: &Key) -> Option<String> {
        let quarantine = self.nodes.quarantine(key)?;
        Some(format!("{}; nothing new is granted for another {:.1?}", quarantine.reason(), quarantine.left()))
    }

    /// A grant that was handed over counts when enough replicas have it. The one who handed over cannot wait for that.
    async fn confirmed(&self, claim: &Claim, grant: Grant) -> Result<Grant> {
        if self.nodes.replicas() == 0 {
            return Ok(grant);
        }
        let hold = Hold::of(claim, Some(&grant));
        match self.nodes.submit(&self.hold_op("n", &hold)).await {
            Ok(Answer { reply: Reply::Renewed(true), sent, .. }) => {
                Ok(Grant { from: sent, provisional: None, ..grant })
            }
            Ok(_) => Err(Error::new(ErrorKind::Unavailable, "the lock was handed over and lost at once; try again")),
            Err(fault) => {
                let _ = self.release(&hold).await;
                Err(fault.error)
            }
        }
    }

    fn route(&self, push: Push, lost: &mpsc::UnboundedSender<Owner>) {
        match &push {
            Push::Granted { owner, key, .. } | Push::First { owner, key, .. } => {
                self.waiting().tell(*owner, key, push.clone());
            }
            Push::Lost { owner } => {
                let _ = lost.send(*owner);
            }
            // Somebody who tells nobody may have released it.
            Push::Gone { key } => {
                for (_, tell) in self.waiting().by_owner.values().filter(|(name, _)| name.as_str() == key) {
                    let _ = tell.send(push.clone());
                }
            }
            // Words may have been missed: everybody looks for itself.
            Push::Broken => {
                let mut waiting = self.waiting();
                waiting.breaks += 1;
                for (_, tell) in waiting.by_owner.values() {
                    let _ = tell.send(push.clone());
                }
            }
        }
    }
}

/// The keeper's task, and the runtime that drives the connection as well. When it ends, nothing that depends on that runtime may
/// hold up the last releases, which another one carries.
struct Home<'a>(&'a RedisEngine);

impl Drop for Home<'_> {
    fn drop(&mut self) {
        self.0.nodes.all().iter().for_each(|node| node.orphan());
    }
}

/// A waiter's place; goes away with the waiter.
struct Expected<'a> {
    engine: &'a RedisEngine,
    owner: Owner,
    told: mpsc::UnboundedReceiver<Push>,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.engine.waiting().by_owner.remove(&self.owner);
    }
}

/// The first in line behind a client of the common recipe hears of its release, if the server tells of deletions.
struct KeyWatch {
    link: Arc<Link>,
    channel: String,
}

impl KeyWatch {
    async fn start(engine: &RedisEngine, key: &Key) -> Option<Self> {
        let link = Arc::clone(&engine.nodes.of(key)?.link);
        let watch = Self { link, channel: format!("__keyspace@{}__:{}", engine.db, key.name) };
        watch.link.watch_key(&watch.channel).await;
        Some(watch)
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
        let (link, channel) = (Arc::clone(&self.link), std::mem::take(&mut self.channel));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { link.unwatch_key(&channel).await });
        }
    }
}

/// A lock's name is a key; these are the keys of the engine itself.
pub(in crate::engine) fn check_name(name: &Name) -> Result<()> {
    if !name.as_str().starts_with("fencelock:") {
        return Ok(());
    }
    Err(Error::invalid(
        "on Redis, names that start with \"fencelock:\" are keys of fencelock itself; choose another name",
    ))
}

#[async_trait]
impl Engine for RedisEngine {
    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "redis",
            processes: true,
            machines: true,
            shared: true,
            permits: true,
            ordered: true,
            push: true,
            instant_death: false,
            durable_tokens: true,
            purpose: Purpose::Efficiency,
            survives: "crashed and stopped clients, lost connections and replies, a lost script cache, a restart that keeps the data",
            beware: "a server that loses its memory or its clock forgets who held the lock; the next token is higher all the same, so \
                     let the resource compare tokens",
        }
    }

    fn clock(&self) -> Clock {
        Clock::Boot
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        check_name(&claim.name)?;
        let op = self.claim_op(claim, wait);
        let breaks = if wait { self.waiting().breaks } else { 0 };
        let answer = self.nodes.submit(&op).await.map_err(told)?;
        match answer.reply {
            Reply::Busy if !wait => Ok(None),
            Reply::Quarantined if !wait => Err(self.quarantined(&op.key)),
            // In a box: most claims are granted at once, and need no room for this.
            Reply::Waits { .. } | Reply::Quarantined => Box::pin(self.stand_in_line(claim, op, answer, breaks)).await,
            _ => held(claim, &answer, answer.repeated).map(Some),
        }
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let ops: Vec<Op> = holds.iter().map(|hold| self.hold_op("n", hold)).collect();
        let mut outcomes = self.nodes.submit_all(&ops).await;
        if outcomes.iter().all(Result::is_err)
            && let Some(Err(Fault { error, .. })) = outcomes.pop()
        {
            return Err(error);
        }
        let mut renewals = Vec::with_capacity(holds.len());
        for outcome in outcomes {
            renewals.push(match outcome {
                Ok(Answer { reply: Reply::Renewed(true), sent, .. }) => Renewal::Extended { from: sent },
                Ok(_) => Renewal::Gone,
                Err(fault) => {
                    tracing::debug!("renewal: {}", fault.error);
                    Renewal::Unknown
                }
            });
        }
        Ok(renewals)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        // A claim that was given up before its answer came, or was sent twice, may still be on its way.
        let once = hold.seat.is_some_and(|seat| seat & 1 == 0);
        let code = match (once, hold.again || hold.mode != Mode::Exclusive) {
            (true, false) => "r",
            (true, true) => "R",
            (false, _) => "x",
        };
        match self.nodes.submit(&self.hold_op(code, hold)).await.map_err(told)? {
            Answer { reply: Reply::Released(1), .. } => Ok(Release::Freed),
            Answer { reply: Reply::Released(2), .. } => Ok(Release::Withdrawn),
            // An earlier attempt, whose answer was lost, has done it.
            Answer { repeated: true, .. } => Ok(Release::Freed),
            _ => Ok(Release::NotHeld),
        }
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let line = status::inspect(&self.nodes, &self.key(name.clone()), 0).await?;
        Ok(line.grant_of(owner, Clock::Boot.now()))
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        Ok(status::inspect(&self.nodes, &self.key(name.clone()), 10_000).await?.status(name.as_str()))
    }

    fn obstacle(&self, name: &Name) -> Option<String> {
        let key = self.key(name.clone());
        self.in_quarantine(&key).or_else(|| self.nodes.trouble(&key))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        let mut found = Vec::new();
        for name in status::names(&self.nodes, prefix).await? {
            let status = status::inspect(&self.nodes, &self.key(Name::new(&name)?), 1_000).await?.status(&name);
            if status.is_held() || !status.waiters.is_empty() {
                found.push(status);
            }
        }
        Ok(found)
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        check_name(name)?;
        // Whoever holds at this moment, and nobody else, however often it is sent.
        let seen = status::inspect(&self.nodes, &self.key(name.clone()), 0).await?.status(name.as_str()).holders;
        let Some(newest) = seen.iter().map(|holder| holder.token.as_u64()).max() else { return Ok(0) };
        let op = self.op("v", name, Owner::random(), Duration::ZERO);
        let op = Op { who: Who::hold(Owner::random(), newest), ..op };
        match self.nodes.submit(&op).await.map_err(told)? {
            // An earlier attempt, whose answer was lost, has done it.
            Answer { reply: Reply::Evicted(0), repeated: true, .. } => Ok(seen.len()),
            Answer { reply: Reply::Evicted(count), .. } => Ok(usize::try_from(count).unwrap_or(usize::MAX)),
            _ => Err(Error::new(ErrorKind::Engine, "the script's answer cannot be understood; please report this")),
        }
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        let _home = Home(self);
        let mut arrived = self.arrived.lock().await;
        let broken = Notify::new();
        let listening = async {
            while let Some((generation, push)) = arrived.recv().await {
                if push == Push::Broken {
                    self.nodes.all().iter().for_each(|node| node.link.forget(generation));
                    broken.notify_one();
                } else {
                    self.route(push, &lost);
                }
            }
        };
        let moving = async {
            loop {
                self.nodes.moved().await;
                broken.notify_one();
            }
        };
        // Beside the others: a server that does not answer takes its time, and what the rest has to say must not wait for it.
        let connecting = async {
            let (mut last, mut pause) = (Moment::default(), Duration::ZERO);
            loop {
                broken.notified().await;
                // At once, unless that was not long ago: who closes what it has just accepted has enough to do.
                pause = match Clock::Boot.now().since(last) {
                    lasted if lasted > STABLE => Duration::ZERO,
                    _ => (pause * 2).clamp(Duration::from_millis(10), Duration::from_millis(500)),
                };
                tokio::time::sleep(pause).await;
                last = Clock::Boot.now();
                // Connect at once: until this client listens again, it counts as gone.
                let _ = self.nodes.connect().await;
                self.doubt.notify_one();
                self.route(Push::Broken, &lost);
            }
        };
        tokio::select! {
            () = listening => {}
            () = moving => {}
            () = connecting => {}
        }
    }

    async fn doubt(&self) {
        self.doubt.notified().await;
    }
}

/// The operation of `line.lua` for a claim that has no place in line yet.
fn claim_code(mode: Mode, wait: bool) -> &'static str {
    match (mode, wait) {
        (Mode::Exclusive, true) => "ae",
        (Mode::Exclusive, false) => "te",
        (Mode::Shared, true) => "as",
        (Mode::Shared, false) => "ts",
        (Mode::Permit { .. }, true) => "ap",
        (Mode::Permit { .. }, false) => "tp",
    }
}

/// The same for one that has: it says when it came.
fn with_arrival(mode: Mode, wait: bool, arrival: u64) -> String {
    let permits = if let Mode::Permit { of } = mode { of } else { 0 };
    format!("{}:{permits}:{arrival}", claim_code(mode, wait))
}

fn passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Ambiguous)
}

/// A grant's seat: its token, and in the lowest bit whether the claim was sent more than once; then one of its messages may come
/// late. (Tokens are times in µs: there is room.)
fn seat(token: Token, repeated: bool) -> u64 {
    token.as_u64() << 1 | u64::from(repeated)
}

fn held(claim: &Claim, answer: &Answer, repeated: bool) -> Result<Grant> {
    match answer.reply {
        Reply::Held { token } => {
            Ok(Grant::new(Token::new(token), claim.mode, answer.sent, seat(Token::new(token), repeated)))
        }
        Reply::OtherPermits(known) => {
            let of = if let Mode::Permit { of } = claim.mode { of } else { 0 };
            Err(crate::engine::line::other_permits(u32::try_from(known).unwrap_or(u32::MAX), of))
        }
        Reply::GivenUp => {
            Err(Error::new(ErrorKind::NotHeld, "this claim was given up; acquire again with a new owner"))
        }
        _ => Err(Error::new(ErrorKind::Engine, "the script's answer cannot be understood; please report this")),
    }
}
