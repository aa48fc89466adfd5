//! Who is let in: per resource, the requests of one token at a time, and never an older one after a newer one.
//!
//! A newer token is let in when three things have happened, in this order or at once: older requests that arrive from now on are refused; the token
//! is on the disk; and the older requests that were on their way to the upstream are over, or were cut off.

use super::ledger::Ledger;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// How many resources are kept in memory; those at rest are forgotten first, the store knows them.
const REMEMBERED: usize = 65_536;

/// What becomes of a request.
#[derive(Debug)]
pub(crate) enum Answer {
    /// It may go on to the upstream.
    Admitted(Flight),
    /// A newer token was seen.
    Old { newest: u64 },
    /// The token could not be kept: nobody is let in with it.
    NotKept(String),
}

pub(crate) struct Admission {
    ledger: Ledger,
    /// How long older requests may take to come to their end once a newer token is there.
    drain: Duration,
    resources: Mutex<HashMap<Arc<str>, Arc<Resource>>>,
    /// Counts the times that resources were forgotten.
    forgotten: AtomicU64,
    /// Told when requests of a resource are cut off.
    cut_off: Box<dyn Fn(&str) + Send + Sync>,
    /// Where turns are prepared: requests come from threads that may end earlier.
    home: tokio::runtime::Handle,
}

/// One resource.
struct Resource {
    name: Arc<str>,
    state: Mutex<State>,
}

struct State {
    /// The newest token, and its requests. None before the first.
    newest: Option<Arc<Turn>>,
    /// What the store knew when the resource was first met.
    stored: Option<u64>,
    /// Those before, until they are over.
    older: Vec<Arc<Turn>>,
}

/// The time of one token.
#[derive(Debug)]
struct Turn {
    token: u64,
    phase: watch::Sender<Phase>,
    /// How many requests are on their way.
    flights: AtomicUsize,
    /// Told when there is none left.
    over: Notify,
    /// When a newer token came.
    since: Mutex<Option<Instant>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// The token is being kept, older requests come to their end.
    Opening,
    Open,
    /// The token could not be kept.
    Failed(String),
    /// A newer token is there. What is on its way may come to its end.
    Past,
    /// The time for that is over.
    Cut,
}

/// A request on its way to the upstream. It is over when the last clone of this is dropped.
#[derive(Debug)]
pub(crate) struct Flight(Arc<Turn>);

impl Flight {
    fn new(turn: &Arc<Turn>) -> Self {
        turn.flights.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(turn))
    }

    /// Resolves when the request must not go on.
    pub(crate) fn cut(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        let mut phase = self.0.phase.subscribe();
        async move {
            // The sender lives in the turn, which may go away only when no flight of it is left.
            let _ = phase.wait_for(|phase| *phase == Phase::Cut).await;
        }
    }

    pub(crate) fn is_cut(&self) -> bool {
        *self.0.phase.borrow() == Phase::Cut
    }
}

impl Clone for Flight {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.0.flights.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.over.notify_waiters();
        }
    }
}

impl Turn {
    fn new(token: u64) -> Arc<Self> {
        let (phase, _) = watch::channel(Phase::Opening);
        let (flights, over) = (AtomicUsize::new(0), Notify::new());
        Arc::new(Self { token, phase, flights, over, since: Mutex::new(None) })
    }

    fn is_over(&self) -> bool {
        self.flights.load(Ordering::Acquire) == 0
    }

    async fn end(&self) {
        loop {
            let over = self.over.notified();
            tokio::pin!(over);
            over.as_mut().enable();
            if self.is_over() {
                return;
            }
            over.await;
        }
    }

    /// A newer token is there.
    fn pass(&self) {
        lock(&self.since).get_or_insert_with(Instant::now);
        self.phase.send_replace(Phase::Past);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Admission {
    pub(crate) fn new(ledger: Ledger, drain: Duration, cut_off: impl Fn(&str) + Send + Sync + 'static) -> Arc<Self> {
        let (resources, home) = (Mutex::default(), tokio::runtime::Handle::current());
        Arc::new(Self { ledger, drain, resources, forgotten: AtomicU64::new(0), cut_off: Box::new(cut_off), home })
    }

    /// Lets a request in, or not. Waits while a newer token's turn is being prepared.
    pub(crate) async fn ask(self: &Arc<Self>, name: &str, token: u64) -> Answer {
        let resource = match self.resource(name).await {
            Ok(resource) => resource,
            Err(error) => return Answer::NotKept(error),
        };
        // One that failed before is tried again; but not in circles by one request.
        let mut tried = false;
        loop {
            let turn = match self.step(&resource, token, &mut tried) {
                Step::Done(answer) => return answer,
                Step::Wait(turn) => turn,
            };
            let mut phase = turn.phase.subscribe();
            let _ = phase.wait_for(|phase| *phase != Phase::Opening).await;
        }
    }

    fn step(self: &Arc<Self>, resource: &Arc<Resource>, token: u64, tried: &mut bool) -> Step {
        let mut state = lock(&resource.state);
        let known = state.newest.as_ref().map(|turn| turn.token).or(state.stored);
        if let Some(newest) = known.filter(|newest| token < *newest) {
            return Step::Done(Answer::Old { newest });
        }
        let turn = match &state.newest {
            Some(turn) if turn.token == token => Arc::clone(turn),
            _ => {
                *tried = true;
                return Step::Wait(self.begin(resource, &mut state, token));
            }
        };
        let phase = turn.phase.borrow().clone();
        match phase {
            // Counted under the lock under which a newer turn looks at the count.
            Phase::Open => Step::Done(Answer::Admitted(Flight::new(&turn))),
            Phase::Failed(error) if *tried => Step::Done(Answer::NotKept(error)),
            Phase::Failed(_) => {
                *tried = true;
                turn.phase.send_replace(Phase::Opening);
                self.home.spawn(Arc::clone(self).open(Arc::clone(resource), Arc::clone(&turn)));
                Step::Wait(turn)
            }
            Phase::Opening | Phase::Past | Phase::Cut => {
                *tried = true;
                Step::Wait(turn)
            }
        }
    }

    /// Begins the turn of a newer token: from here on, older requests that arrive are refused.
    fn begin(self: &Arc<Self>, resource: &Arc<Resource>, state: &mut State, token: u64) -> Arc<Turn> {
        let turn = Turn::new(token);
        state.older.retain(|older| !older.is_over());
        if let Some(before) = state.newest.replace(Arc::clone(&turn)) {
            before.pass();
            state.older.push(before);
        }
        self.home.spawn(Arc::clone(self).open(Arc::clone(resource), Arc::clone(&turn)));
        turn
    }

    /// Makes a turn ready: its token is kept, and the older requests are over.
    async fn open(self: Arc<Self>, resource: Arc<Resource>, turn: Arc<Turn>) {
        let older = lock(&resource.state).older.clone();
        let drained = async {
            for before in &older {
                self.drain(&resource.name, before).await;
            }
        };
        let (kept, ()) = tokio::join!(self.ledger.keep(Arc::clone(&resource.name), turn.token), drained);
        let next = kept.map_or_else(Phase::Failed, |()| Phase::Open);
        // A newer token may have come meanwhile: then this turn never opens.
        turn.phase.send_if_modified(|phase| {
            let opening = *phase == Phase::Opening;
            if opening {
                *phase = next;
            }
            opening
        });
    }

    /// Waits until an older turn's requests are over, and cuts off those that take too long.
    async fn drain(&self, resource: &str, turn: &Turn) {
        let until = lock(&turn.since).unwrap_or_else(Instant::now) + self.drain;
        if tokio::time::timeout_at(until, turn.end()).await.is_err() {
            if turn.phase.send_replace(Phase::Cut) != Phase::Cut {
                (self.cut_off)(resource);
            }
            turn.end().await;
        }
    }

    async fn resource(&self, name: &str) -> Result<Arc<Resource>, String> {
        loop {
            if let Some(resource) = lock(&self.resources).get(name) {
                return Ok(Arc::clone(resource));
            }
            let forgotten = self.forgotten.load(Ordering::Acquire);
            let name: Arc<str> = name.into();
            let stored = self.ledger.newest(Arc::clone(&name)).await?;
            let mut resources = lock(&self.resources);
            // What was read is old if the resource was used and forgotten in between.
            if self.forgotten.load(Ordering::Acquire) != forgotten {
                continue;
            }
            if resources.len() >= REMEMBERED {
                self.forgotten.fetch_add(1, Ordering::AcqRel);
                resources.retain(|_, resource| Arc::strong_count(resource) > 1 || !resource.is_at_rest());
            }
            let state = State { newest: None, stored, older: Vec::new() };
            let resource = Resource { name: Arc::clone(&name), state: Mutex::new(state) };
            return Ok(Arc::clone(resources.entry(name).or_insert_with(|| Arc::new(resource))));
        }
    }
}

enum Step {
    Done(Answer),
    Wait(Arc<Turn>),
}

impl Resource {
    fn is_at_rest(&self) -> bool {
        let state = lock(&self.state);
        let newest = state.newest.as_ref().is_none_or(|turn| turn.is_over() && *turn.phase.borrow() == Phase::Open);
        newest && state.older.iter().all(|turn| turn.is_over())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(drain: Duration) -> (tempfile::TempDir, Arc<Admission>) {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&dir.path().join("gate.redb")).unwrap();
        (dir, Admission::new(ledger, drain, |_| {}))
    }

    async fn admitted(admission: &Arc<Admission>, token: u64) -> Flight {
        match admission.ask("r", token).await {
            Answer::Admitted(flight) => flight,
            other => panic!("token {token}: {other:?}"),
        }
    }

    #[tokio::test]
    async fn a_newer_token_waits_for_older_requests_and_shuts_them_out() {
        let (_dir, admission) = admission(Duration::from_secs(60));
        let old = admitted(&admission, 1).await;
        let also_old = admitted(&admission, 1).await;
        let mut newer = Box::pin(admission.ask("r", 2));
        assert!(
            tokio::time::timeout(Duration::from_millis(50), &mut newer).await.is_err(),
            "the old ones are not over"
        );
        assert!(matches!(admission.ask("r", 1).await, Answer::Old { newest: 2 }), "it is announced");
        drop(old);
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut newer).await.is_err(), "one is not over");
        drop(also_old);
        assert!(matches!(newer.await, Answer::Admitted(_)));
    }

    #[tokio::test]
    async fn older_requests_are_cut_off_when_they_take_too_long() {
        let (_dir, admission) = admission(Duration::from_millis(30));
        let old = admitted(&admission, 1).await;
        let newer = tokio::spawn({
            let admission = Arc::clone(&admission);
            async move { admission.ask("r", 2).await }
        });
        old.cut().await;
        assert!(old.is_cut() && !newer.is_finished(), "not before the old one is gone");
        drop(old);
        assert!(matches!(newer.await.unwrap(), Answer::Admitted(_)));
    }

    #[tokio::test]
    async fn a_token_that_is_overtaken_while_it_waits_is_never_let_in() {
        let (_dir, admission) = admission(Duration::from_secs(60));
        let first = admitted(&admission, 1).await;
        let ask = |token| {
            let admission = Arc::clone(&admission);
            tokio::spawn(async move { admission.ask("r", token).await })
        };
        let second = ask(2);
        while !matches!(admission.ask("r", 1).await, Answer::Old { newest: 2 }) {
            tokio::task::yield_now().await;
        }
        let third = ask(3);
        assert!(matches!(second.await.unwrap(), Answer::Old { newest: 3 }));
        assert!(!third.is_finished());
        drop(first);
        assert!(matches!(third.await.unwrap(), Answer::Admitted(_)));
    }

    /// Many at once, on several threads: whoever is on its way is alone with its token, and tokens never go back.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn turns_do_not_overlap() {
        let (_dir, admission) = admission(Duration::from_secs(60));
        let inside: Arc<Mutex<(u64, usize)>> = Arc::default();
        let tasks: Vec<_> = (0..400_u64)
            .map(|number| {
                let (admission, inside) = (Arc::clone(&admission), Arc::clone(&inside));
                tokio::spawn(async move {
                    let token = number / 10 + number % 7;
                    let Answer::Admitted(flight) = admission.ask("r", token).await else { return 0 };
                    {
                        let mut now = lock(&inside);
                        assert!(now.0 <= token, "{} was let in before {token}", now.0);
                        assert!(now.0 == token || now.1 == 0, "{} requests of {} are on their way", now.1, now.0);
                        *now = (token, now.1 + 1);
                    }
                    tokio::task::yield_now().await;
                    lock(&inside).1 -= 1;
                    drop(flight);
                    1
                })
            })
            .collect();
        let mut let_in = 0;
        for task in tasks {
            let_in += task.await.unwrap();
        }
        assert!(let_in > 0);
    }

    #[tokio::test]
    async fn what_the_store_knows_counts() {
        let (_dir, admission) = admission(Duration::ZERO);
        admission.ledger.keep("r".into(), 7).await.unwrap();
        assert!(matches!(admission.ask("r", 6).await, Answer::Old { newest: 7 }));
        drop(admitted(&admission, 7).await);
    }
}
