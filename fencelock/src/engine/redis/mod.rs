//! Redis, one node: the line lives in one script; waiting is by push through one inbox per client.
//!
//! * `line.lua`, `inspect.lua`: all that happens to a lock, atomically.
//! * `key`: the keys of a lock.
//! * `link`: the connection, and what the server pushes.
//! * `post`: batching.
//! * `fault`: what an error means.
//!
//! See `docs/engines/redis.md`.

mod fault;
mod key;
pub(crate) use key::companion;
mod link;
mod post;
mod status;

use self::key::Keys;
use self::link::{Link, Push};
use self::post::{Answer, Op, Post, Reply};
use super::{Capability, Engine, Purpose};
use crate::url::Url;
use crate::{Claim, Clock, Error, ErrorKind, Grant, Hold, Mode, Name, Owner, Release, Renewal, Result, Status, Token};
use async_trait::async_trait;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, TlsCertificates};
use rustls::crypto::CryptoProvider;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

const OPTIONS: [&str; 6] = ["ttl", "timeout", "patience", "ca", "cert", "key"];

/// Opens the server that the URL names, and makes sure that it answers.
pub(crate) async fn open(url: &Url, text: &str) -> Result<RedisEngine> {
    let mut url = url.clone();
    let timeout = url.take_duration("timeout")?.unwrap_or(Duration::from_secs(2));
    let patience = url.take_duration("patience")?.unwrap_or(Duration::from_secs(5));
    let tls = tls(&mut url)?;
    url.finish(&OPTIONS)?;
    let (info, address) = connection_info(&url, text)?;
    if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) && CryptoProvider::get_default().is_none() {
        // TLS panics in a program that has chosen no cryptography. Somebody else may choose at the same moment: that is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
    let db = info.redis_settings().db();
    let client = match tls {
        Some(tls) => redis::Client::build_with_tls(info, tls),
        None => redis::Client::open(info),
    };
    let client = client.map_err(|error| fault::fault(error, false).error)?;
    let session = Owner::random().to_string();
    let (pushes, arrived) = mpsc::unbounded_channel();
    let link = Arc::new(Link::new(client, &session, timeout, pushes));
    let engine = RedisEngine {
        post: Arc::new(Post::new(Arc::clone(&link), patience)),
        link,
        session: session.into(),
        waiting: Mutex::default(),
        arrived: tokio::sync::Mutex::new(arrived),
        keys: Mutex::default(),
        address,
        db,
    };
    engine.link.connection().await.map_err(|fault| fault.error.at_engine(&engine.address))?;
    Ok(engine)
}

fn tls(url: &mut Url) -> Result<Option<TlsCertificates>> {
    let mut read = |option: &str| {
        url.take(option)
            .map(|path| {
                std::fs::read(&path).map_err(|error| {
                    Error::invalid(format!("option {option}={path}: cannot read the file")).caused_by(error)
                })
            })
            .transpose()
    };
    let (ca, cert, key) = (read("ca")?, read("cert")?, read("key")?);
    let client_tls = match (cert, key) {
        (Some(client_cert), Some(client_key)) => Some(redis::ClientTlsConfig { client_cert, client_key }),
        (None, None) => None,
        _ => return Err(Error::invalid("options cert and key go together: the client's certificate and its key")),
    };
    if ca.is_none() && client_tls.is_none() {
        return Ok(None);
    }
    if url.scheme != "rediss" {
        return Err(Error::invalid("options ca, cert and key need TLS; write rediss://"));
    }
    Ok(Some(TlsCertificates { client_tls, root_cert: ca }))
}

/// What to connect to, and the address to show: without secrets.
fn connection_info(url: &Url, text: &str) -> Result<(ConnectionInfo, String)> {
    let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
    let bare = bare.strip_prefix("redis+").unwrap_or(bare);
    let info = bare.into_connection_info().map_err(|error| {
        Error::invalid(format!(
            "not a Redis URL; write {}://[user:password@]host[:port][/db], or redis+unix:///path",
            url.scheme
        ))
        .caused_by(error.detail().unwrap_or("it cannot be parsed").to_owned())
    })?;
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        .set_lib_name("fencelock", env!("CARGO_PKG_VERSION"));
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
    let db = match info.redis_settings().db() {
        0 => String::new(),
        db => format!("/{db}"),
    };
    let address = match info.addr() {
        ConnectionAddr::Tcp(host, port) => format!("redis://{host}:{port}{db}"),
        ConnectionAddr::TcpTls { host, port, .. } => format!("rediss://{host}:{port}{db}"),
        ConnectionAddr::Unix(path) => format!("redis+unix://{}", path.display()),
        _ => url.scheme.clone(),
    };
    Ok((info, address))
}

type Waiting = HashMap<Owner, (Arc<Keys>, mpsc::UnboundedSender<Push>)>;

/// An engine on one Redis server.
pub(crate) struct RedisEngine {
    link: Arc<Link>,
    post: Arc<Post>,
    session: Arc<str>,
    /// Who of this client waits, for which key, and how to tell it.
    waiting: Mutex<Waiting>,
    /// What the server pushed; the keeper's task takes it from here.
    arrived: tokio::sync::Mutex<mpsc::UnboundedReceiver<(u64, Push)>>,
    /// The keys of names in use, so that they are not built for each operation.
    keys: Mutex<HashMap<Name, Arc<Keys>>>,
    address: String,
    db: i64,
}

impl RedisEngine {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keys(&self, name: &Name) -> Arc<Keys> {
        /// More than this many are not remembered.
        const KNOWN: usize = 4096;
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = keys.get(name) {
            return Arc::clone(known);
        }
        if keys.len() >= KNOWN {
            keys.clear();
        }
        let new = Arc::new(Keys::of(name.as_str()));
        keys.insert(name.clone(), Arc::clone(&new));
        new
    }

    fn op(&self, code: &'static str, name: &Name, owner: Owner, ttl: Duration) -> Op {
        Op { code: code.into(), keys: self.keys(name), owner: owner.to_string(), ttl, note: String::new() }
    }

    /// For this hold, and no other one of the same owner.
    fn hold_op(&self, code: &'static str, hold: &Hold) -> Op {
        let op = self.op(code, &hold.name, hold.owner, hold.ttl);
        match hold.seat {
            Some(seat) => Op { owner: format!("{}:{}", op.owner, seat >> 1), ..op },
            None => op,
        }
    }

    fn claim_op(&self, claim: &Claim, wait: bool) -> Op {
        let op = self.op(claim_code(claim.mode, wait), &claim.name, claim.owner, claim.ttl);
        let note = format!("\n{}\n{}\n{}", op.owner, self.session, claim.label);
        match claim.mode {
            Mode::Permit { .. } => Op { code: with_arrival(claim.mode, wait, 0).into(), note, ..op },
            Mode::Exclusive | Mode::Shared => Op { note, ..op },
        }
    }

    fn expect(&self, owner: Owner, keys: &Arc<Keys>) -> Result<Expected<'_>> {
        let (tell, told) = mpsc::unbounded_channel();
        match self.waiting().entry(owner) {
            Entry::Occupied(_) => Err(Error::invalid(
                "this owner is waiting for a lock already; an owner stands for one acquisition at a time",
            )),
            Entry::Vacant(slot) => {
                slot.insert((Arc::clone(keys), tell));
                Ok(Expected { engine: self, owner, told })
            }
        }
    }

    /// Waits until it is worth asking again, or until the grant arrives.
    async fn wait(&self, claim: &Claim, told: &mut Expected<'_>, look: Duration, repeated: bool) -> Option<Grant> {
        let mut until = Clock::Boot.now().after(look);
        loop {
            tokio::select! {
                biased;
                push = told.told.recv() => match push {
                    Some(Push::Granted { token, at, lease, .. }) => {
                        let from = self.link.local(at);
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

    fn route(&self, push: Push, lost: &mpsc::UnboundedSender<Owner>) {
        match &push {
            Push::Granted { owner, key, .. } | Push::First { owner, key, .. } => {
                // It may wait for another lock by now; late news of this one must not be taken for news of that.
                if let Some((_, tell)) = self.waiting().get(owner).filter(|(keys, _)| keys.main == *key) {
                    let _ = tell.send(push.clone());
                }
            }
            Push::Lost { owner } => {
                let _ = lost.send(*owner);
            }
            // Somebody who tells nobody may have released it.
            Push::Gone { key } => {
                for (_, tell) in self.waiting().values().filter(|(keys, _)| keys.main == *key) {
                    let _ = tell.send(push.clone());
                }
            }
            // Words may have been missed: everybody looks for itself.
            Push::Broken => {
                for (_, tell) in self.waiting().values() {
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
        self.0.link.orphan();
        self.0.post.orphan();
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
        self.engine.waiting().remove(&self.owner);
    }
}

/// The first in line behind a client of the common recipe hears of its release, if the server tells of deletions.
struct KeyWatch {
    link: Arc<Link>,
    channel: String,
}

impl KeyWatch {
    async fn start(engine: &RedisEngine, name: &Name) -> Self {
        let watch = Self { link: Arc::clone(&engine.link), channel: format!("__keyspace@{}__:{name}", engine.db) };
        watch.link.watch_key(&watch.channel).await;
        watch
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
        let mut op = self.claim_op(claim, wait);
        if !wait {
            return match self.post.submit(op).await? {
                Answer { reply: Reply::Busy, .. } => Ok(None),
                answer => held(claim, &answer, answer.repeated).map(Some),
            };
        }
        let mut told = self.expect(claim.owner, &op.keys)?;
        let mut watch = None;
        let (mut placed, mut repeated) = (false, false);
        loop {
            let answer = self.post.submit(op.clone()).await;
            repeated |=
                answer.as_ref().map_or_else(|error| error.kind() == ErrorKind::Ambiguous, |answer| answer.repeated);
            let look = match answer {
                Ok(Answer { reply: Reply::Waits { arrival, look, foreign }, .. }) => {
                    op.code = with_arrival(claim.mode, wait, arrival).into();
                    placed = true;
                    if foreign && watch.is_none() {
                        watch = Some(KeyWatch::start(self, &claim.name).await);
                    }
                    look
                }
                Ok(answer) => return held(claim, &answer, repeated).map(Some),
                // Who has a place in line keeps it while the server is away.
                Err(error) if placed && passing(&error) => Duration::from_millis(200),
                Err(error) => return Err(error),
            };
            if let Some(grant) = self.wait(claim, &mut told, look, repeated).await {
                return Ok(Some(grant));
            }
        }
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let ops: Vec<Op> = holds.iter().map(|hold| self.hold_op("n", hold)).collect();
        let mut outcomes = self.post.submit_all(&ops).await;
        if outcomes.iter().all(Result::is_err)
            && let Some(Err(error)) = outcomes.pop()
        {
            return Err(error);
        }
        let mut renewals = Vec::with_capacity(holds.len());
        for outcome in outcomes {
            renewals.push(match outcome {
                Ok(Answer { reply: Reply::Renewed(true), sent, .. }) => Renewal::Extended { from: sent },
                Ok(_) => Renewal::Gone,
                Err(error) => {
                    tracing::debug!("renewal: {error}");
                    Renewal::Unknown
                }
            });
        }
        Ok(renewals)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        // A claim that was given up before its answer came, or was sent twice, may still be on its way.
        let once = hold.seat.is_some_and(|seat| seat & 1 == 0);
        let code = if once { "r" } else { "x" };
        match self.post.submit(self.hold_op(code, hold)).await? {
            Answer { reply: Reply::Released(1), .. } => Ok(Release::Freed),
            Answer { reply: Reply::Released(2), .. } => Ok(Release::Withdrawn),
            // An earlier attempt, whose answer was lost, has done it.
            Answer { repeated: true, .. } => Ok(Release::Freed),
            _ => Ok(Release::NotHeld),
        }
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let line = status::inspect(&self.post, &self.keys(name), 0).await?;
        Ok(line.grant_of(owner, Clock::Boot.now()))
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        Ok(status::inspect(&self.post, &self.keys(name), 10_000).await?.status(name.as_str()))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        let mut found = Vec::new();
        for name in status::names(&self.post, prefix).await? {
            let status = status::inspect(&self.post, &Keys::of(&name), 1_000).await?.status(&name);
            if status.is_held() || !status.waiters.is_empty() {
                found.push(status);
            }
        }
        Ok(found)
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        match self.post.submit(self.op("v", name, Owner::random(), Duration::ZERO)).await?.reply {
            Reply::Evicted(count) => Ok(usize::try_from(count).unwrap_or(usize::MAX)),
            _ => Err(Error::new(ErrorKind::Engine, "the script's answer cannot be understood; please report this")),
        }
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        let _home = Home(self);
        let mut arrived = self.arrived.lock().await;
        while let Some((generation, push)) = arrived.recv().await {
            if push == Push::Broken {
                self.link.broke(generation);
                // Connect at once: until this client listens again, it counts as gone.
                let _ = self.link.connection().await;
            }
            self.route(push, &lost);
        }
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
