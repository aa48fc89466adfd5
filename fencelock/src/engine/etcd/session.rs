//! The sessions of a client: one lease for each length in use, whatever the number of locks, kept alive from the keeper's task.
//!
//! etcd counts leases in whole seconds, two at least. A claim's ttl is rounded up to that; the holder's own deadline stays at
//! the ttl that was asked for. A lease that nobody has used for a while is given back; one that could not be kept alive for twice its
//! length is left to end.

use super::fault::Fault;
use super::link::{Link, lock, told};
use super::proto::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    LeaseRevokeResponse, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};
use crate::{Clock, Error, ErrorKind, Moment, Result};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// The shortest lease that is asked for.
const SHORTEST: u64 = 2;
/// A lease that was not used for this long, and for two of its lengths, is given back.
const IDLE: Duration = Duration::from_secs(120);
/// How long it is remembered that a claim was given up; and for how long one lease serves new notes of that.
const GIVEN_UP: Duration = Duration::from_secs(180);
const GIVEN_UP_SERVES: Duration = Duration::from_secs(60);

/// A lease of this client.
pub(super) struct Lease {
    pub(super) id: i64,
    length: Duration,
    /// When the last heartbeat that was answered was sent.
    sent: AtomicU64,
    /// When somebody last asked for it.
    used: AtomicU64,
    ended: AtomicBool,
    /// Told when it has ended.
    over: Notify,
    /// Only one heartbeat at a time.
    beating: tokio::sync::Mutex<()>,
}

impl Lease {
    fn sent(&self) -> Moment {
        Moment::from_nanos(self.sent.load(Ordering::Acquire))
    }

    pub(super) fn good_until(&self) -> Moment {
        if self.is_alive() { self.sent().after(self.length) } else { Moment::default() }
    }

    pub(super) fn is_alive(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    fn touch(&self) {
        self.used.fetch_max(Clock::Boot.now().as_nanos(), Ordering::Relaxed);
    }

    fn is_idle(&self) -> bool {
        let used = Moment::from_nanos(self.used.load(Ordering::Relaxed));
        Clock::Boot.now() > used.after(IDLE.max(self.length * 2))
    }

    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.over.notify_waiters();
    }

    /// Resolves when it is known to have ended.
    pub(super) async fn over(&self) {
        let mut over = pin!(self.over.notified());
        over.as_mut().enable();
        if self.is_alive() {
            over.await;
        }
    }
}

#[derive(Default)]
struct Table {
    /// By length in seconds: the one that new claims get.
    newest: HashMap<u64, Arc<Lease>>,
    /// All that this client ever had, by id; those that ended are told from those of others by this.
    all: HashMap<u64, Arc<Lease>>,
    /// Those that nobody keeps alive yet.
    fresh: Vec<Arc<Lease>>,
}

pub(super) struct Sessions {
    link: Arc<Link>,
    table: Mutex<Table>,
    /// Told when `fresh` has grown.
    born: Notify,
    /// Only one task asks for a lease.
    granting: tokio::sync::Mutex<()>,
    given_up: tokio::sync::Mutex<Option<(i64, Moment)>>,
}

impl Sessions {
    pub(super) fn new(link: Arc<Link>) -> Self {
        Self {
            link,
            table: Mutex::default(),
            born: Notify::new(),
            granting: tokio::sync::Mutex::default(),
            given_up: tokio::sync::Mutex::default(),
        }
    }

    /// The lease for claims with this ttl; asked for on first use.
    pub(super) async fn for_ttl(&self, ttl: Duration) -> Result<Arc<Lease>> {
        let seconds = (ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).max(SHORTEST);
        if let Some(lease) = self.newest(seconds) {
            return Ok(lease);
        }
        let _one = tokio::time::timeout(self.link.timeout(), self.granting.lock()).await.map_err(|_| busy())?;
        if let Some(lease) = self.newest(seconds) {
            return Ok(lease);
        }
        let (id, length, sent) = self.grant(seconds).await?;
        let lease = Arc::new(Lease {
            id,
            length,
            sent: AtomicU64::new(sent.as_nanos()),
            used: AtomicU64::new(sent.as_nanos()),
            ended: AtomicBool::new(false),
            over: Notify::new(),
            beating: tokio::sync::Mutex::default(),
        });
        let mut table = lock(&self.table);
        table.newest.insert(seconds, Arc::clone(&lease));
        table.all.insert(session(id), Arc::clone(&lease));
        table.fresh.push(Arc::clone(&lease));
        drop(table);
        self.born.notify_one();
        Ok(lease)
    }

    fn newest(&self, seconds: u64) -> Option<Arc<Lease>> {
        let table = lock(&self.table);
        let lease = table.newest.get(&seconds).filter(|lease| lease.good_until() > Clock::Boot.now())?;
        lease.touch();
        Some(Arc::clone(lease))
    }

    async fn grant(&self, seconds: u64) -> Result<(i64, Duration, Moment)> {
        let request = LeaseGrantRequest { ttl: i64::try_from(seconds).unwrap_or(i64::MAX) };
        let answer = told(self.link.ask("/etcdserverpb.Lease/LeaseGrant", &request).await)?;
        let LeaseGrantResponse { id, ttl, error } = answer.body;
        if !error.is_empty() {
            return Err(Error::new(ErrorKind::Engine, "the server grants no lease").caused_by(error));
        }
        // One that is longer than asked for is fine; the server has a least length of its own.
        Ok((id, seconds_of(ttl), answer.sent))
    }

    /// A lease for notes of claims that were given up. Nobody keeps it alive.
    pub(super) async fn for_given_up(&self) -> Result<i64> {
        let mut known = tokio::time::timeout(self.link.timeout(), self.given_up.lock()).await.map_err(|_| busy())?;
        if let Some((id, since)) = *known
            && Clock::Boot.now() < since.after(GIVEN_UP_SERVES)
        {
            return Ok(id);
        }
        let (id, _, sent) = self.grant(GIVEN_UP.as_secs()).await?;
        *known = Some((id, sent));
        Ok(id)
    }

    pub(super) fn get(&self, session: u64) -> Option<Arc<Lease>> {
        let lease = lock(&self.table).all.get(&session).cloned()?;
        lease.touch();
        Some(lease)
    }

    /// Whether any lease is kept alive.
    pub(super) fn are_alive(&self) -> bool {
        lock(&self.table).all.values().any(|lease| lease.is_alive())
    }

    /// One heartbeat for all who ask at the same time.
    pub(super) async fn beat(&self, lease: &Lease) -> Result<Option<Moment>> {
        let asked = Clock::Boot.now();
        let patience = lease.length / 3;
        let _turn = tokio::time::timeout(patience, lease.beating.lock()).await.map_err(|_| busy())?;
        if !lease.is_alive() {
            return Ok(None);
        }
        if lease.sent() >= asked {
            return Ok(Some(lease.sent()));
        }
        let sent = self.keep_alive(lease.id, lease.length).await?.map(|(sent, _)| sent);
        match sent {
            Some(sent) => drop(lease.sent.fetch_max(sent.as_nanos(), Ordering::AcqRel)),
            None => lease.end(),
        }
        Ok(sent)
    }

    /// When the heartbeat was sent, and how long the lease lasts from then on. Asks quickly rather than patiently: there may be
    /// another server that answers, and the lease is running.
    pub(super) async fn keep_alive(&self, id: i64, length: Duration) -> Result<Option<(Moment, Duration)>> {
        let until = Clock::Boot.now().after(length / 3);
        let limit = if self.link.is_alone() { length / 3 } else { length / 6 };
        let least = Duration::from_millis(200);
        let limit = limit.clamp(least, self.link.timeout().max(least));
        loop {
            let sent = Clock::Boot.now();
            let request = LeaseKeepAliveRequest { id };
            let answer = self.link.attempt("/etcdserverpb.Lease/LeaseKeepAlive", request, limit).await;
            let fault = match answer {
                Ok(LeaseKeepAliveResponse { ttl, .. }) => return Ok((ttl > 0).then(|| (sent, seconds_of(ttl)))),
                Err(Fault { no_lease: true, .. }) => return Ok(None),
                Err(fault) => fault,
            };
            if fault.stale_token {
                self.link.log_in_again();
            }
            if Clock::Boot.now() >= until || !fault.passing {
                return Err(fault.error);
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    /// How long a lease lasts without another heartbeat. `None` when there is no such lease.
    pub(super) async fn left(&self, session: u64) -> Result<Option<Duration>> {
        let request = LeaseTimeToLiveRequest { id: id_of(session) };
        let answer = self.link.ask("/etcdserverpb.Lease/LeaseTimeToLive", &request).await;
        match answer {
            Ok(answer) => {
                let LeaseTimeToLiveResponse { ttl } = answer.body;
                Ok((ttl >= 0).then(|| seconds_of(ttl)))
            }
            Err(Fault { no_lease: true, .. }) => Ok(None),
            Err(fault) => Err(fault.error),
        }
    }

    /// Keeps all leases alive, for ever.
    pub(super) async fn drive(&self) {
        let mut kept = FuturesUnordered::new();
        let alive = |lease: &&Arc<Lease>| lease.is_alive();
        {
            let mut table = lock(&self.table);
            table.fresh = table.all.values().filter(alive).cloned().collect();
        }
        loop {
            let fresh = std::mem::take(&mut lock(&self.table).fresh);
            kept.extend(fresh.into_iter().map(|lease| self.keep(lease)));
            tokio::select! {
                Some(()) = kept.next(), if !kept.is_empty() => {}
                () = self.born.notified() => {}
            }
        }
    }

    /// Keeps one lease alive until it ends, or until nobody uses it.
    async fn keep(&self, lease: Arc<Lease>) {
        loop {
            Clock::Boot.sleep_until(lease.sent().after(lease.length / 3)).await;
            if lease.is_idle() {
                self.forget(&lease);
                return self.revoke(lease.id).await;
            }
            match self.beat(&lease).await {
                Ok(Some(_)) => {}
                Ok(None) => return self.forget(&lease),
                // The cluster may keep it for as long as it is away itself. By now nobody holds anything by it, and what releases could not
                // reach goes with the lease, if nobody revives it.
                Err(error) if Clock::Boot.now() >= lease.good_until().after(lease.length) => {
                    tracing::debug!("heartbeat given up: {error}");
                    return self.forget(&lease);
                }
                Err(error) => {
                    tracing::debug!("heartbeat: {error}");
                    tokio::time::sleep((lease.length / 20).min(Duration::from_secs(1))).await;
                }
            }
        }
    }

    /// No new claim gets it. That it was ours is remembered.
    fn forget(&self, lease: &Lease) {
        lease.end();
        lock(&self.table).newest.retain(|_, known| known.id != lease.id);
    }

    async fn revoke(&self, id: i64) {
        let request = LeaseRevokeRequest { id };
        let answer = self.link.attempt("/etcdserverpb.Lease/LeaseRevoke", request, self.link.timeout()).await;
        if let Err(fault) = answer.map(|LeaseRevokeResponse {}| ())
            && !fault.no_lease
        {
            tracing::debug!("giving a lease back; it ends by itself: {}", fault.error);
        }
    }

    /// Gives all leases back, and with them whatever this client has in any line.
    pub(super) async fn close(&self) {
        let leases: Vec<Arc<Lease>> = lock(&self.table).all.drain().map(|(_, lease)| lease).collect();
        let alive: Vec<&Arc<Lease>> = leases.iter().filter(|lease| lease.is_alive()).collect();
        join_all(alive.into_iter().map(|lease| {
            lease.end();
            self.revoke(lease.id)
        }))
        .await;
    }
}

fn busy() -> Error {
    Error::new(ErrorKind::Unavailable, "the cluster does not answer")
}

pub(super) fn session(lease: i64) -> u64 {
    lease.cast_unsigned()
}

pub(super) fn id_of(session: u64) -> i64 {
    session.cast_signed()
}

fn seconds_of(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or(0))
}
