//! Engines that break one promise each. They prove that the checks can fail; nothing that is shipped uses them.

use crate::relay::Relay;
use crate::rng::Rng;
use crate::torture::Connect;
use async_trait::async_trait;
use fencelock::engine::{Capability, Engine};
use fencelock::{
    Claim, Client, Clock, Grant, Hold, Mode, Name, Owner, Release, Renewal, Result, Status, Token, connect,
};
use std::collections::{HashMap, HashSet};
use std::str::FromStr;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Which promise is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// A lock is granted although somebody holds it.
    GrantsWhileHeld,
    /// A token is given twice.
    RepeatsTokens,
    /// Whoever came last is served first.
    LastComeFirstServed,
    /// A release is confirmed and not done; the lease lives on.
    ForgetsReleases,
    /// A holder is not told that its lock was taken away, not even when it asks.
    HidesLosses,
}

impl Sabotage {
    /// All of them.
    pub const EACH: [Sabotage; 5] = [
        Sabotage::GrantsWhileHeld,
        Sabotage::RepeatsTokens,
        Sabotage::LastComeFirstServed,
        Sabotage::ForgetsReleases,
        Sabotage::HidesLosses,
    ];
}

impl FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::EACH.into_iter().find(|sabotage| format!("{sabotage:?}") == text);
        found.ok_or_else(|| format!("unknown sabotage {text:?}; there are {:?}", Self::EACH))
    }
}

/// Connects clients whose engine breaks this promise.
pub fn connector(sabotage: Sabotage) -> Connect {
    Arc::new(move |url| {
        Box::pin(async move {
            let engine = Arc::new(Relay::new(connect(&url).await?));
            Ok(Client::with_engine(Arc::new(Saboteur::new(engine, sabotage))))
        })
    })
}

/// An engine that breaks a promise of the one it wraps.
pub struct Saboteur {
    inner: Arc<dyn Engine>,
    sabotage: Sabotage,
    state: Arc<Mutex<State>>,
}

struct State {
    dice: Rng,
    /// Holds that the inner engine knows nothing of.
    forged: HashSet<(Name, Owner)>,
    /// Who waits, the last one at the end.
    waiting: HashMap<(Name, Mode), Vec<Ticket>>,
    /// Whose claim the inner engine takes a hold for that was passed on, and where it keeps that claim.
    passed_on: HashMap<(Name, Owner), (Owner, u64)>,
    /// Some hold: only the client can make one, but a copy can be made into any other.
    pattern: Option<Hold>,
}

struct Ticket {
    owner: Owner,
    tell: oneshot::Sender<Grant>,
}

impl Saboteur {
    /// Breaks a promise of this engine.
    pub fn new(inner: Arc<dyn Engine>, sabotage: Sabotage) -> Self {
        let state = State {
            dice: Rng::new(u64::from(std::process::id())),
            forged: HashSet::new(),
            waiting: HashMap::new(),
            passed_on: HashMap::new(),
            pattern: None,
        };
        Self { inner, sabotage, state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn now_and_then(&self, sabotage: Sabotage, percent: u64) -> bool {
        self.sabotage == sabotage && self.state().dice.chance(percent)
    }

    /// A grant that nobody gave.
    async fn forge(&self, claim: &Claim) -> Result<Grant> {
        let status = self.inner.inspect(&claim.name).await?;
        let newest = status.holders.iter().map(|holder| holder.token.as_u64()).max().unwrap_or_default();
        self.state().forged.insert((claim.name.clone(), claim.owner));
        Ok(Grant::new(Token::new(newest + 1), claim.mode, self.clock().now(), 0))
    }

    /// Waits in the inner line, and passes what comes of it to whoever came last.
    async fn wait_upside_down(&self, claim: &Claim) -> Result<Option<Grant>> {
        let (tell, told) = oneshot::channel();
        let line = (claim.name.clone(), claim.mode);
        self.state().waiting.entry(line.clone()).or_default().push(Ticket { owner: claim.owner, tell });
        let _leaves = Leaves { state: Arc::clone(&self.state), line, owner: claim.owner };
        let (inner, state, mut joins) = (Arc::clone(&self.inner), Arc::clone(&self.state), claim.clone());
        // Whoever gets it: the claim in the inner line may outlive the one that it was made for.
        joins.owner = Owner::random();
        tokio::spawn(async move {
            if let Ok(Some(grant)) = inner.acquire(&joins, true).await {
                pass_on(&*inner, &state, &joins, grant).await;
            }
        });
        Ok(told.await.ok())
    }

    /// What the inner engine knows this hold as; `None` if it is not this one's to touch.
    fn inner_hold(&self, hold: &Hold) -> Option<Hold> {
        let mut state = self.state();
        state.pattern = Some(hold.clone());
        if let Some((owner, seat)) = state.passed_on.get(&key(hold)) {
            let mut inner = hold.clone();
            inner.owner = *owner;
            inner.seat = Some(*seat);
            inner.token = None;
            return Some(inner);
        }
        let in_use = self.sabotage == Sabotage::LastComeFirstServed && hold.seat.is_none();
        (!in_use).then(|| hold.clone())
    }
}

/// One owner may hold several locks.
fn key(hold: &Hold) -> (Name, Owner) {
    (hold.name.clone(), hold.owner)
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a waiter that goes away off the list.
struct Leaves {
    state: Arc<Mutex<State>>,
    line: (Name, Mode),
    owner: Owner,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        if let Some(waiting) = locked(&self.state).waiting.get_mut(&self.line) {
            waiting.retain(|ticket| ticket.owner != self.owner);
        }
    }
}

async fn pass_on(inner: &dyn Engine, state: &Mutex<State>, claim: &Claim, grant: Grant) {
    let passed = {
        let mut state = locked(state);
        let last = state.waiting.get_mut(&(claim.name.clone(), claim.mode)).and_then(Vec::pop);
        last.map(|last| {
            // Before it knows: if it goes away meanwhile, its withdrawal finds this.
            state.passed_on.insert((claim.name.clone(), last.owner), (claim.owner, grant.seat));
            let _ = last.tell.send(grant);
        })
    };
    if passed.is_none() {
        give_back(inner, state, claim, grant).await;
    }
}

/// Everybody who waited has gone.
async fn give_back(inner: &dyn Engine, state: &Mutex<State>, claim: &Claim, grant: Grant) {
    loop {
        let pattern = locked(state).pattern.clone();
        if let Some(mut hold) = pattern {
            (hold.name, hold.owner, hold.seat) = (claim.name.clone(), claim.owner, Some(grant.seat));
            hold.token = Some(grant.token);
            let _ = inner.release(&hold).await;
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[async_trait]
impl Engine for Saboteur {
    fn address(&self) -> &str {
        self.inner.address()
    }

    fn capability(&self) -> Capability {
        self.inner.capability()
    }

    fn clock(&self) -> Clock {
        self.inner.clock()
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        if self.now_and_then(Sabotage::GrantsWhileHeld, 20) {
            return match self.inner.acquire(claim, false).await? {
                None => self.forge(claim).await.map(Some),
                granted => Ok(granted),
            };
        }
        if self.sabotage == Sabotage::LastComeFirstServed && wait {
            return self.wait_upside_down(claim).await;
        }
        let granted = self.inner.acquire(claim, wait).await?;
        if let Some(mut grant) = granted
            && self.sabotage == Sabotage::RepeatsTokens
        {
            grant.token = repeated(&claim.name, grant.token, self.state().dice.chance(10));
            return Ok(Some(grant));
        }
        Ok(granted)
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let inner: Vec<Hold> = holds.iter().map(|hold| self.inner_hold(hold).unwrap_or_else(|| hold.clone())).collect();
        let now = self.clock().now();
        let mut answers = self.inner.renew(&inner).await?;
        for (hold, answer) in holds.iter().zip(&mut answers) {
            if self.sabotage == Sabotage::HidesLosses || self.state().forged.contains(&key(hold)) {
                *answer = Renewal::Extended { from: now };
            }
        }
        Ok(answers)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        if self.state().forged.remove(&key(hold)) {
            return Ok(Release::Freed);
        }
        if hold.seat.is_some() && self.now_and_then(Sabotage::ForgetsReleases, 5) {
            let (inner, hold) = (Arc::clone(&self.inner), hold.clone());
            tokio::spawn(async move { keep_for_ever(&*inner, hold).await });
            return Ok(Release::Freed);
        }
        let Some(inner) = self.inner_hold(hold) else { return Ok(Release::NotHeld) };
        self.state().passed_on.remove(&key(hold));
        self.inner.release(&inner).await
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        self.inner.standing(name, owner).await
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        self.inner.inspect(name).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        self.inner.list(prefix).await
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        self.inner.evict(name).await
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        if self.sabotage == Sabotage::HidesLosses {
            let (nobody, _open) = mpsc::unbounded_channel();
            self.inner.drive(nobody).await;
        } else {
            self.inner.drive(lost).await;
        }
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

async fn keep_for_ever(inner: &dyn Engine, hold: Hold) {
    loop {
        let _ = inner.renew(std::slice::from_ref(&hold)).await;
        tokio::time::sleep(hold.ttl / 3).await;
    }
}

/// The token of the grant before this one, if it is to be repeated.
fn repeated(name: &Name, token: Token, repeat: bool) -> Token {
    static LAST: LazyLock<Mutex<HashMap<Name, Token>>> = LazyLock::new(Mutex::default);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match last.insert(name.clone(), token) {
        Some(before) if repeat => before,
        _ => token,
    }
}
