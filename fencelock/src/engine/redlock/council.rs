//! The nodes together: collects operations into batches, gives them to all nodes, and knows who may vote.
//!
//! Everything that touches a connection runs on one thread of its own, shared by all Redlock clients of the process: whatever happens
//! to the caller's runtime, votes, releases and pushes go on.

use super::ballot::{Answer, Batch, Code, Next, Op, Voice, Who, millis};
use super::mail::{Letter, deliver};
use super::node::{Intro, Node, Push, Trust, UNTRIED};
use crate::{Clock, Error, ErrorKind, Moment, Name, Owner, Result};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// The most operations in one batch: it must not block a node for long.
const BATCH: usize = 128;
/// So many batches wait for their majority at the same time; more operations wait for the next one.
const CALLS: usize = 2;
/// From this size on it is worth waiting for a batch to become as large as the last ones.
const LARGE: usize = 8;
/// How often the driver lets others run meanwhile; not again when so much time has passed.
const TURNS: u32 = 16;
const GATHER: Duration = Duration::from_millis(1);

/// When a majority is there, the others have so much longer to be there as well.
const MOMENT: Duration = Duration::from_millis(300);

/// A record of founders that nobody knows: no run id.
const FORGOTTEN: &str = "-";

static DRIVER: LazyLock<std::io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_multi_thread().worker_threads(1).thread_name("fencelock-redlock").enable_all().build()
});

/// The runtime of all connections.
pub(super) fn driver() -> Result<&'static Handle> {
    match &*DRIVER {
        Ok(runtime) => Ok(runtime.handle()),
        Err(error) => Err(Error::new(ErrorKind::Unavailable, "no thread can be started").caused_by(error.to_string())),
    }
}

/// When a node that may have lost its memory votes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quarantine {
    /// When no lease of before can stand. A new set of nodes has nothing to wait for.
    Auto,
    /// The same, also for a new set of nodes.
    Strict,
    /// At once.
    Off,
}

struct Desk {
    queue: Vec<Op>,
    calls: usize,
    /// How many operations have travelled together lately.
    usual: usize,
    /// Holds that are renewed, and so may be brought back on nodes that lost them.
    renewing: HashSet<Who>,
}

#[derive(Default)]
struct Roll {
    /// What each node told, and when its process started.
    intros: HashMap<usize, (Intro, Moment)>,
    /// What nodes keep of their founders.
    records: HashSet<String>,
    /// These nodes are no new set: some had a record, or were old, or were other processes before.
    in_use: bool,
}

impl Roll {
    /// What nodes are to keep that have no record.
    fn record(&self) -> &str {
        let mut records = self.records.iter();
        match (records.next(), records.next()) {
            (Some(only), None) => only,
            _ => FORGOTTEN,
        }
    }

    /// This process is as old as its set of nodes. If records differ, somebody has taken for new what was not, and none is believed.
    fn is_founder(&self, run_id: &str) -> bool {
        self.record().split(' ').any(|founder| founder == run_id)
    }
}

/// What nodes pushed for one who waits, and who does not as a rule: it costs little until something comes.
#[derive(Default)]
pub(super) struct Told {
    pushes: Mutex<VecDeque<(usize, Push)>>,
    bell: Notify,
}

impl Told {
    fn tell(&self, node: usize, push: Push) {
        self.pushes.lock().unwrap_or_else(PoisonError::into_inner).push_back((node, push));
        self.bell.notify_one();
    }

    /// The next one. One listener at a time.
    pub(super) async fn next(&self) -> (usize, Push) {
        loop {
            let push = self.pushes.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match push {
                Some(push) => return push,
                None => self.bell.notified().await,
            }
        }
    }
}

type Waiting = HashMap<Owner, (Name, Arc<Told>)>;

pub(super) struct Council {
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) majority: usize,
    quarantine: Quarantine,
    /// The longest lease that anybody uses, in ms.
    longest: AtomicU64,
    desk: Mutex<Desk>,
    roll: tokio::sync::Mutex<Roll>,
    waiting: Mutex<Waiting>,
    lost: mpsc::UnboundedSender<Owner>,
    /// The newest token that this client proposed, and the highest.
    last: AtomicU64,
    /// The nodes' time against the local clock in µs, and when it was compared.
    offset: Mutex<Option<(Moment, i64)>>,
    /// Attempts to connect that came to an end.
    tries: watch::Sender<u64>,
}

impl Council {
    pub(super) fn new(
        nodes: Vec<Arc<Node>>,
        quarantine: Quarantine,
        longest: Duration,
        lost: mpsc::UnboundedSender<Owner>,
    ) -> Self {
        Self {
            majority: nodes.len() / 2 + 1,
            nodes,
            quarantine,
            longest: AtomicU64::new(millis(longest)),
            desk: Mutex::new(Desk { queue: Vec::new(), calls: 0, usual: 0, renewing: HashSet::new() }),
            roll: tokio::sync::Mutex::default(),
            waiting: Mutex::default(),
            lost,
            last: AtomicU64::new(0),
            offset: Mutex::new(None),
            tries: watch::Sender::new(0),
        }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn longest(&self) -> Duration {
        Duration::from_millis(self.longest.load(Ordering::Relaxed))
    }

    /// Gives an operation to all nodes.
    pub(super) fn submit(&self, mut op: Op) -> oneshot::Receiver<Letter> {
        let (tell, told) = oneshot::channel();
        op.tell = Some(tell);
        let mut desk = self.desk();
        desk.add(op);
        self.seal(&mut desk);
        told
    }

    /// Gives many operations to all nodes.
    pub(super) fn submit_all(&self, ops: impl IntoIterator<Item = Op>) -> Vec<oneshot::Receiver<Letter>> {
        let mut told = Vec::new();
        let mut desk = self.desk();
        for mut op in ops {
            let (tell, answer) = oneshot::channel();
            op.tell = Some(tell);
            told.push(answer);
            desk.add(op);
        }
        self.seal(&mut desk);
        told
    }

    /// Gives an operation to all nodes whose outcome nobody waits for.
    pub(super) fn post(&self, op: Op) {
        let mut desk = self.desk();
        desk.add(op);
        self.seal(&mut desk);
    }

    /// All nodes get all batches in the same order, hence under the lock. As on one server, a batch costs much more than an
    /// operation: while one is under way, the next waits until it is as large as they have been lately, or twice that if they were large.
    fn seal(&self, desk: &mut Desk) {
        let second = if desk.usual < LARGE { desk.usual } else { 2 * desk.usual };
        while !desk.queue.is_empty() && (desk.calls == 0 || desk.calls < CALLS && desk.queue.len() >= second) {
            let rest = if desk.queue.len() > BATCH { desk.queue.split_off(BATCH) } else { Vec::new() };
            let ops = std::mem::replace(&mut desk.queue, rest);
            // Rounded so that it gets to where the sizes are, from above as well.
            desk.usual = if ops.len() > desk.usual {
                (3 * desk.usual + ops.len()).div_ceil(4)
            } else {
                (3 * desk.usual + ops.len()) / 4
            };
            desk.calls += 1;
            let batch = Arc::new(self.batch(ops));
            for node in &self.nodes {
                node.send(Arc::clone(&batch));
            }
        }
    }

    pub(super) fn batch(&self, ops: Vec<Op>) -> Batch {
        Batch::new(ops, self.longest(), Clock::Boot.now(), self.nodes.len())
    }

    /// Goes on after an answer was counted.
    pub(super) fn counted(&self, next: Next) {
        let bag = deliver(next.mail);
        if next.room {
            self.gather();
        }
        bag.empty();
        if next.ops.is_empty() && !next.room {
            return;
        }
        let mut desk = self.desk();
        for op in next.ops {
            // What was released meanwhile does not come back.
            if op.code != Code::Restore || desk.renewing.contains(&op.who) {
                desk.add(op);
            }
        }
        if next.room {
            desk.calls = desk.calls.saturating_sub(1);
        }
        self.seal(&mut desk);
    }

    /// Those who have just been told as a rule have the next operation to hand in, and others to tell. They run on other threads, and so
    /// may the nodes on this machine: all get a chance before the driver goes on with the little that is there.
    fn gather(&self) {
        let until = Clock::Boot.now().after(GATHER);
        for _ in 0..TURNS {
            let desk = self.desk();
            let enough = desk.calls > 1 || desk.usual < LARGE || desk.queue.len() >= desk.usual;
            drop(desk);
            if enough || Clock::Boot.now() >= until {
                break;
            }
            std::thread::yield_now();
        }
    }

    /// A token above `seen`, above all that this client has proposed, and not below the nodes' time in µs. None is proposed twice, by the
    /// clock or not: what nodes still say of one that was taken back must not be taken for news of another. And whoever gives up must be
    /// above its own claims.
    pub(super) fn propose(&self, seen: u64) -> u64 {
        let least = self.clock().max(Who::LEAST).max(seen + 1);
        let next = |last: u64| Some(least.max(last + 1));
        let last = self.last.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).unwrap_or_default();
        least.max(last + 1)
    }

    /// The nodes' time in µs: that of the middle one, so that a few that are wrong do not matter.
    fn clock(&self) -> u64 {
        let now = Clock::Boot.now();
        let mut offset = self.offset.lock().unwrap_or_else(PoisonError::into_inner);
        let known = offset.filter(|(at, _)| now.since(*at) < Duration::from_secs(1));
        let (_, difference) = *known.as_ref().unwrap_or_else(|| {
            let mut all: Vec<i64> = self.nodes.iter().filter_map(|node| node.offset()).collect();
            all.sort_unstable();
            offset.insert((now, all.get(all.len() / 2).copied().unwrap_or(0)))
        });
        let local = i64::try_from(now.as_nanos() / 1_000).unwrap_or(i64::MAX);
        u64::try_from(local.saturating_add(difference)).unwrap_or(0)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, what nodes push for this owner is told. One claim at a time.
    pub(super) fn expect(self: &Arc<Self>, owner: Owner, name: &Name) -> Result<Expected> {
        let mut waiting = self.waiting();
        if waiting.contains_key(&owner) {
            return Err(Error::invalid(
                "this owner is waiting for a lock already; an owner stands for one acquisition at a time",
            ));
        }
        let told = Arc::<Told>::default();
        waiting.insert(owner, (name.clone(), Arc::clone(&told)));
        Ok(Expected { council: Arc::clone(self), owner, told })
    }

    /// Passes on what a node pushed.
    pub(super) fn route(&self, node: usize, push: Push) {
        match &push {
            Push::Granted { owner, key, .. } | Push::Look { owner, key } => {
                // It may wait for another lock by now; late news of this one must not be taken for news of that.
                if let Some((_, told)) = self.waiting().get(owner).filter(|(name, _)| name.as_str() == key) {
                    told.tell(node, push.clone());
                }
            }
            Push::Lost { owner } => {
                let _ = self.lost.send(*owner);
            }
            // Words may have been missed.
            Push::Broken => {
                for (_, told) in self.waiting().values() {
                    told.tell(node, push.clone());
                }
            }
        }
    }

    /// An attempt to connect to a node has come to an end.
    pub(super) fn tried(&self) {
        self.tries.send_modify(|tries| *tries += 1);
    }

    /// Waits until a majority can vote and every node was tried, or has had a moment more, or until it is clear that too few are there. Nodes that are there but do
    /// not vote may only lack the others: a new set of nodes is founded by all of them.
    pub(super) async fn assembled(&self, limit: Duration) {
        let mut tries = self.tries.subscribe();
        let all = async {
            loop {
                let count = |what: fn(&Node) -> bool| self.nodes.iter().filter(|node| what(node)).count();
                let untried = count(|node| node.down().is_some_and(|why| &*why == UNTRIED));
                let down = count(|node| node.down().is_some());
                let votes = count(Node::can_vote);
                let clear = down == 0 || votes >= self.majority || down > self.nodes.len() - self.majority;
                if untried == 0 && clear {
                    return;
                }
                // When a majority can vote, whoever does not answer is not waited for.
                let patience = if votes >= self.majority { MOMENT } else { limit };
                if !matches!(tokio::time::timeout(patience, tries.changed()).await, Ok(Ok(()))) {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(limit, all).await;
    }

    pub(super) fn trusts_all(&self) -> bool {
        self.quarantine == Quarantine::Off
    }

    /// A node was connected and has told of itself: decides which nodes may vote.
    pub(super) async fn introduced(&self, index: usize, intro: Intro) {
        let known = self.longest.fetch_max(millis(intro.longest), Ordering::Relaxed);
        if known > millis(intro.longest) {
            self.nodes[index].note_longest(Duration::from_millis(known)).await;
        }
        if self.trusts_all() {
            return;
        }
        let now = Clock::Boot.now();
        let since = Moment::from_nanos(now.as_nanos().saturating_sub(nanos(intro.uptime)));
        let mut roll = self.roll.lock().await;
        roll.records.extend(intro.founded.clone());
        let restarted = roll.intros.get(&index).is_some_and(|(known, _)| known.run_id != intro.run_id);
        roll.intros.insert(index, (intro, since));
        let old = roll.intros.values().any(|(_, since)| now.since(*since) >= self.longest());
        roll.in_use |= restarted || old || !roll.records.is_empty();
        if roll.in_use {
            self.pass_on(&mut roll, index).await;
        } else if self.quarantine == Quarantine::Auto {
            self.found(&mut roll).await;
        }
        for (index, (intro, since)) in &roll.intros {
            self.nodes[*index].set_trust(self.trust(&roll, intro, *since, now));
        }
    }

    /// All nodes are young, and neither they nor this client know of others before them: a new set, in which nobody can hold anything yet.
    async fn found(&self, roll: &mut Roll) {
        if roll.intros.len() < self.nodes.len() {
            return;
        }
        let mut ids: Vec<&str> = roll.intros.values().map(|(intro, _)| intro.run_id.as_str()).collect();
        ids.sort_unstable();
        let record = ids.join(" ");
        let standing = self.nodes.iter().map(|node| node.found(&record));
        let standing = futures_util::future::join_all(standing).await;
        // Another client may have been faster; it saw the same processes, or this set is not new.
        if standing.iter().all(Option::is_some) {
            roll.records.extend(standing.into_iter().flatten());
        }
    }

    /// Nodes that forget are reminded by the others that they are no new set: a client that comes when all have forgotten, one after the
    /// other, cannot know. The newest one comes last, since the others may know the founders.
    async fn pass_on(&self, roll: &mut Roll, newest: usize) {
        for last in [false, true] {
            let lacks = |(index, (intro, _)): (&usize, &(Intro, Moment))| {
                (intro.founded.is_none() && (*index == newest) == last).then_some(*index)
            };
            let lacking: Vec<usize> = roll.intros.iter().filter_map(lacks).collect();
            let standing = lacking.iter().map(|index| self.nodes[*index].found(roll.record()));
            let standing = futures_util::future::join_all(standing).await;
            for (index, record) in lacking.iter().zip(standing) {
                roll.records.extend(record.clone());
                if let Some((intro, _)) = roll.intros.get_mut(index) {
                    intro.founded = record;
                }
            }
        }
    }

    fn trust(&self, roll: &Roll, intro: &Intro, since: Moment, now: Moment) -> Trust {
        // Uptime comes in whole seconds.
        let until = since.after(self.longest() + Duration::from_secs(1));
        if intro.durable || roll.is_founder(&intro.run_id) {
            return Trust::Full;
        }
        let span = self.longest() + Duration::from_secs(1);
        let began = intro.time.saturating_sub(u64::try_from(intro.uptime.as_micros()).unwrap_or(u64::MAX));
        let floor = began.saturating_add(u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
        let why = format!(
            "it started {:.0?} ago and may have forgotten leases of up to {:?} (max_ttl); quarantine=off lets it vote, \
             at the risk of two holders",
            now.since(since),
            self.longest()
        );
        Trust::After { until, floor, why: why.into() }
    }

    /// A node's clock jumped: leases on it may have ended early.
    pub(super) fn jumped(&self, node: &Node, micros: i64) {
        #[expect(clippy::cast_precision_loss, reason = "for people")]
        let seconds = micros as f64 / 1e6;
        tracing::warn!(node = %node.address, "the node's clock jumped by {seconds:+.3} s");
        if !self.trusts_all() {
            let why =
                format!("its clock jumped by {seconds:+.3} s; quarantine=off lets it vote, at the risk of two holders");
            node.put_out(&why, self.longest());
        }
        *self.offset.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Too few nodes voted: what each of them did.
    pub(super) fn too_few(&self, voices: &[Voice]) -> Error {
        let accounts = self.nodes.iter().map(|node| {
            let voice = voices.iter().find(|voice| voice.node == node.index);
            match (voice, node.down()) {
                (None, Some(why)) => node.account(Some(&Answer::Failed(why, false)), false),
                (voice, _) => node.account(voice.map(|voice| &voice.answer), voice.is_some_and(|voice| voice.votes)),
            }
        });
        let votes = voices.iter().filter(|voice| voice.votes).count();
        Error::new(ErrorKind::Unavailable, self.poll(votes, "voted", accounts))
    }

    /// Too few nodes can vote at this moment, and why.
    pub(super) fn obstacle(&self) -> Option<String> {
        let votes = self.nodes.iter().filter(|node| node.can_vote()).count();
        let others = self.nodes.iter().filter(|node| !node.can_vote());
        let accounts =
            others.map(|node| node.account(node.down().map(|why| Answer::Failed(why, false)).as_ref(), false));
        (votes < self.majority).then(|| self.poll(votes, "can vote", accounts))
    }

    /// How long until enough of the nodes that can be reached vote, if that is all that is missing.
    pub(super) fn quarantine(&self) -> Option<Duration> {
        let reached = self.nodes.iter().filter(|node| node.down().is_none());
        let mut spans: Vec<Duration> =
            reached.map(|node| node.out().map_or(Duration::ZERO, |(_, left)| left)).collect();
        spans.sort_unstable();
        spans.get(self.majority - 1).copied().filter(|left| !left.is_zero())
    }

    fn poll(&self, votes: usize, what: &str, accounts: impl Iterator<Item = String>) -> String {
        let accounts: Vec<String> = accounts.collect();
        format!("{votes} of {} nodes {what}, {} are needed: {}", self.nodes.len(), self.majority, accounts.join("; "))
    }
}

impl Desk {
    fn add(&mut self, op: Op) {
        match op.code {
            Code::Renew => {
                // Those of borrowed holds are never released here. What is forgotten comes back with its next renewal.
                if self.renewing.len() > 200_000 {
                    self.renewing.clear();
                }
                self.renewing.insert(op.who);
            }
            Code::Release | Code::GiveUp if !self.renewing.is_empty() => {
                self.renewing.remove(&op.who);
            }
            _ => {}
        }
        self.queue.push(op);
    }
}

/// A waiter's place here; goes away with the waiter.
pub(super) struct Expected {
    council: Arc<Council>,
    owner: Owner,
    pub(super) told: Arc<Told>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.council.waiting().remove(&self.owner);
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
