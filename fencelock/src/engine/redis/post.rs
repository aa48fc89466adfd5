//! The post office: operations that many tasks issue at the same time travel in one script call.
//!
//! A lone operation is sent at once, by the task that issued it. While calls are under way, operations queue up, and the next
//! call takes them all. It begins when about as many have queued up as travelled together lately, but at the latest when
//! nothing is under way: a call costs much more than an operation, and yet nobody waits for company that does not come.

use super::fault::Fault;
use super::key::{Key, NEWEST, NOBODY, tag_of};
use super::link::{Link, Open};
use crate::{Clock, Error, ErrorKind, Moment, Owner, Result};
use futures_util::future::BoxFuture;
use redis::{Cmd, Script, Value};
use std::borrow::{Borrow, Cow};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::oneshot;

/// The most operations in one call: a batch must not block the server for long.
const BATCH: usize = 64;
/// So many calls are under way at the same time; more operations wait for the next call.
const CALLS: usize = 5;
/// The same where a call carries operations of one slot only.
const CALLS_BY_SLOT: usize = 64;
/// How long a token is remembered after the last use of its lock; later ones are above it by the server's clock.
const REMEMBER: Duration = Duration::from_secs(600);

static LINE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("line.lua")));

/// One operation of `line.lua`. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Op {
    pub(super) code: Cow<'static, str>,
    pub(super) key: Key,
    pub(super) who: Who,
    pub(super) ttl: Duration,
    /// What the server notes of the owner, if anything.
    pub(super) note: Option<Arc<str>>,
}

impl Op {
    /// Whether the script wants to know its ttl and what is noted of its owner.
    fn has_ttl(&self) -> bool {
        !matches!(&*self.code, "r" | "R" | "x" | "v")
    }

    /// Whether its owner may stand in line afterwards.
    fn may_wait(&self) -> bool {
        self.code.starts_with('a')
    }

    /// The same when an earlier attempt may have been carried out.
    pub(super) fn again(&self) -> Self {
        Self { code: again(&self.code).to_owned().into(), ..self.clone() }
    }

    /// Whether its answer may say that its owner holds.
    fn may_hold(&self) -> bool {
        self.code.starts_with(['a', 't', 'n'])
    }

    /// Whether somebody may hold because of it whom the server does not know as a holder yet, nor as the successor of one.
    fn may_let_in(&self) -> bool {
        !matches!(&*self.code, "r" | "n")
    }

    fn travels_with(&self, other: &Op) -> bool {
        let same_note = match (&self.note, &other.note) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
            (one, other) => one == other,
        };
        self.code == other.code && (!self.has_ttl() || self.ttl == other.ttl && same_note)
    }
}

/// The code of an operation when an earlier attempt may have been carried out.
fn again(code: &str) -> &str {
    if code == "r" { "R" } else { code }
}

/// An owner, or one of its holds: owner ':' token '\n'. Kept in place, since it is built for every operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Who {
    text: [u8; 32 + 1 + 20 + 1],
    length: usize,
}

impl Who {
    pub(super) fn owner(owner: Owner) -> Self {
        let mut text = [0; 54];
        text[..32].copy_from_slice(&owner.to_hex());
        Self { text, length: 32 }
    }

    pub(super) fn hold(owner: Owner, token: u64) -> Self {
        Self::owner(owner).with_token(token)
    }

    /// The hold of this owner that has this token.
    fn with_token(&self, token: u64) -> Self {
        let mut who = *self;
        let mut rest = &mut who.text[32..];
        // A token has at most 20 digits: there is room.
        let _ = writeln!(rest, ":{token}");
        who.length = 54 - rest.len();
        who
    }

    fn as_bytes(&self) -> &[u8] {
        &self.text[..self.length]
    }
}

/// What `line.lua` answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    Held {
        token: u64,
    },
    Waits {
        arrival: u64,
        look: Duration,
        foreign: bool,
    },
    Busy,
    Released(u64),
    Renewed(bool),
    OtherPermits(u64),
    GivenUp,
    Evicted(u64),
    /// The server grants nothing to new owners at the moment.
    Quarantined,
}

impl Reply {
    /// Whether something was written for it, which no replica does.
    fn is_of_a_master(&self) -> bool {
        matches!(self, Reply::Held { .. } | Reply::Waits { .. } | Reply::Released(1..))
    }
}

/// A reply, and what is known about how it came.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) reply: Reply,
    /// When the request that it answers was sent.
    pub(super) sent: Moment,
    /// An earlier attempt may have been carried out without our seeing the answer.
    pub(super) repeated: bool,
    /// Why it does not count although the server has done it: it goes back.
    pub(super) void: Option<Arc<Fault>>,
}

pub(super) type Outcome = Result<Answer, Fault>;

/// An operation, and whom to tell.
struct Letter {
    op: Op,
    tell: oneshot::Sender<Outcome>,
}

impl Borrow<Op> for Letter {
    fn borrow(&self) -> &Op {
        &self.op
    }
}

#[derive(Default)]
struct Desk {
    queue: VecDeque<Letter>,
    calls: usize,
    /// How many operations have travelled together lately.
    usual: usize,
    /// Calls of an earlier era do not count any more.
    era: u64,
}

impl Desk {
    /// Whether so many operations should begin another call.
    fn is_worth_a_call(&self, count: usize, by_slot: bool) -> bool {
        if by_slot {
            return self.calls < CALLS_BY_SLOT;
        }
        self.calls == 0 || self.calls < CALLS && count >= self.usual
    }

    fn note_size(&mut self, count: usize) {
        self.usual = (3 * self.usual + count).div_ceil(4);
    }

    fn next_batch(&mut self, by_slot: bool) -> Vec<Letter> {
        let Some(slot) = self.queue.front().map(|letter| letter.op.key.slot) else { return Vec::new() };
        if !by_slot {
            let count = self.queue.len().min(BATCH);
            self.note_size(count);
            return self.queue.drain(..count).collect();
        }
        let mut count = 0;
        let (batch, rest): (Vec<_>, Vec<_>) = self.queue.drain(..).partition(|letter| {
            let fits = letter.op.key.slot == slot && count < BATCH;
            count += usize::from(fits);
            fits
        });
        self.queue = rest.into();
        batch
    }
}

pub(super) struct Post {
    link: Arc<Link>,
    desk: Mutex<Desk>,
    rules: Rules,
}

/// How operations are sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// How long an operation is tried again while the server is away.
    pub(super) patience: Duration,
    /// How many replicas must have a grant before it counts.
    pub(super) replicas: usize,
    /// The server is a node of a cluster: a call carries operations of one slot only.
    pub(super) by_slot: bool,
}

impl Post {
    pub(super) fn new(link: Arc<Link>, rules: Rules) -> Self {
        Self { link, desk: Mutex::default(), rules }
    }

    pub(super) fn replicas(&self) -> usize {
        self.rules.replicas
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out one operation.
    pub(super) async fn submit(self: &Arc<Self>, op: &Op) -> Outcome {
        let mut orphaned = false;
        let mut op = Cow::Borrowed(op);
        loop {
            let outcome = match self.stand_at_desk(&op) {
                Ok(_call) => {
                    let mut outcomes = self.deliver_alone(&op).await;
                    outcomes.pop().unwrap_or_else(|| Err(Fault::unreadable()))
                }
                Err(told) => match told.await {
                    Ok(outcome) => outcome,
                    // The runtime of whoever carried it is gone. It may have been sent.
                    Err(_) => {
                        orphaned = true;
                        op = Cow::Owned(op.again());
                        continue;
                    }
                },
            };
            return outcome.map(|answer| Answer { repeated: answer.repeated | orphaned, ..answer });
        }
    }

    /// Begins a call, or queues up for the next one.
    fn stand_at_desk(self: &Arc<Self>, op: &Op) -> Result<Call, oneshot::Receiver<Outcome>> {
        let mut desk = self.desk();
        let is_worth_it = desk.is_worth_a_call(desk.queue.len() + 1, self.rules.by_slot);
        if is_worth_it && desk.queue.is_empty() {
            desk.note_size(1);
            return Ok(self.call_begun(&mut desk, true));
        }
        let (tell, told) = oneshot::channel();
        desk.queue.push_back(Letter { op: op.clone(), tell });
        if is_worth_it && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let call = self.call_begun(&mut desk, false);
            drop(desk);
            runtime.spawn(call.carry());
        }
        Err(told)
    }

    fn call_begun(self: &Arc<Self>, desk: &mut Desk, begun: bool) -> Call {
        desk.calls += 1;
        Call { post: Arc::clone(self), era: desk.era, begun }
    }

    /// The runtime that carried calls is going away, and they may never come to an end: whoever waits for them sends for itself.
    pub(super) fn orphan(&self) {
        let mut desk = self.desk();
        *desk = Desk { era: desk.era + 1, ..Desk::default() };
    }

    /// Carries out many operations, in as many calls as it takes, one after the other. On a cluster they are of one slot.
    pub(super) async fn submit_all(&self, ops: &[Op]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for chunk in ops.chunks(BATCH) {
            outcomes.extend(self.deliver(chunk).await);
        }
        outcomes
    }

    /// One call, with repetitions: every operation is idempotent by its owner, or by a token. An operation that the server refuses
    /// spoils its batch; then each is tried by itself.
    async fn deliver<O: Borrow<Op> + Sync>(&self, ops: &[O]) -> Vec<Outcome> {
        match self.call(ops).await {
            Ok(answers) if answers.iter().all(|answer| answer.void.is_none()) => answers.into_iter().map(Ok).collect(),
            Ok(answers) => self.take_back(ops, answers).await,
            Err(fault) if ops.len() == 1 => vec![Err(fault)],
            Err(fault) if fault.refused => {
                let mut outcomes = Vec::with_capacity(ops.len());
                for op in ops {
                    // The batch may have got as far as this one before it was refused.
                    let alone = self.deliver_alone(&op.borrow().again()).await.pop();
                    let alone = alone.unwrap_or_else(|| Err(Fault::unreadable()));
                    outcomes.push(alone.map(|answer| Answer { repeated: true, ..answer }));
                }
                outcomes
            }
            Err(fault) => ops.iter().map(|_| Err(fault.again())).collect(),
        }
    }

    /// In a box: most operations queue up, and need no room for this.
    fn deliver_alone<'a>(&'a self, op: &'a Op) -> BoxFuture<'a, Vec<Outcome>> {
        Box::pin(self.deliver(std::slice::from_ref(op)))
    }

    /// Takes back what does not count.
    async fn take_back<O: Borrow<Op>>(&self, ops: &[O], answers: Vec<Answer>) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(answers.len());
        for (op, answer) in ops.iter().map(Borrow::borrow).zip(answers) {
            outcomes.push(match (&answer.void, &answer.reply) {
                (Some(why), Reply::Held { token }) => {
                    let undo = Op { code: "r".into(), who: op.who.with_token(*token), note: None, ..op.clone() };
                    // If this fails as well, the lease ends by itself.
                    let _ = self.call(std::slice::from_ref(&undo)).await;
                    Err(why.again())
                }
                (Some(why), Reply::Renewed(true)) => Err(why.again()),
                _ => Ok(answer),
            });
        }
        outcomes
    }

    async fn call<O: Borrow<Op>>(&self, ops: &[O]) -> Result<Vec<Answer>, Fault> {
        let give_up = Clock::Boot.now().after(self.rules.patience);
        let mut pause = Duration::from_millis(10);
        let mut repeated = false;
        let mut by_hash = true;
        let groups = Group::of(ops);
        loop {
            let fault = match self.attempt(&groups, by_hash, repeated).await {
                Err(fault) => fault,
                answers => return answers,
            };
            if fault.no_script && by_hash {
                by_hash = false;
                continue;
            }
            repeated |= fault.error.kind() == ErrorKind::Ambiguous;
            wait_it_out(fault, give_up, &mut pause).await?;
        }
    }

    async fn attempt(&self, groups: &Groups<'_>, by_hash: bool, repeated: bool) -> Result<Vec<Answer>, Fault> {
        let open = self.link.open().await?;
        let vouched = self.link.vouch(&open, groups.longest_lease(), groups.any(Op::may_let_in)).await?;
        let waits = self.rules.by_slot && groups.any(Op::may_wait);
        let listening = if waits { self.link.listen_at(&open, groups.slot) } else { None };
        let mut packed = Vec::with_capacity(512 + groups.count * 128);
        self.pack(&mut packed, groups, by_hash, repeated, &open);
        let replicas = self.rules.replicas > 0 && groups.any(Op::may_hold);
        if replicas {
            let span = (groups.shortest_lease() / 3).min(self.link.timeout() / 2).max(Duration::from_millis(1));
            packed.extend(redis::cmd("WAIT").arg(self.rules.replicas).arg(millis(span)).get_packed_command());
        }
        let sent = Clock::Boot.now();
        let values = self.link.send(&open, &packed, 1 + usize::from(replicas)).await;
        let deaf = match listening {
            Some(told) => self.link.listens(&open, groups.slot, told).await.err(),
            None => None,
        };
        let mut values = values?.into_iter();
        let value = values.next().unwrap_or_else(|| Err(Fault::unreadable()))?;
        let (server, replies) = read(&value, groups).ok_or_else(Fault::unreadable)?;
        if vouched && replies.iter().any(Reply::is_of_a_master) {
            open.heard(sent);
        }
        if server > 0 {
            self.link.server_time().note(sent, server);
        }
        // Who waits and hears nothing is not told of its turn. It is asked again, unless that is refused; then nothing may be held by it.
        let deaf = match deaf {
            Some(deaf) if !deaf.refused || !replies.iter().any(|reply| matches!(reply, Reply::Held { .. })) => {
                return Err(deaf);
            }
            deaf => deaf,
        };
        let void = deaf.or_else(|| values.next().and_then(|confirmed| self.too_few(confirmed))).map(Arc::new);
        let answer = |reply| Answer { reply, sent, repeated, void: void.clone() };
        Ok(replies.into_iter().map(answer).collect())
    }

    /// What is wrong with the answer to WAIT, if anything is.
    fn too_few(&self, confirmed: Result<Value, Fault>) -> Option<Fault> {
        let wanted = self.rules.replicas;
        let have = match confirmed {
            Ok(value) => number(&value).map_or(0, |have| usize::try_from(have).unwrap_or(usize::MAX)),
            Err(fault) => return Some(fault),
        };
        let text = format!(
            "only {have} of the {wanted} replicas that the URL asks for have confirmed it in time, so it does not count; are they \
             running?"
        );
        // Not passing: no other server would have more of them.
        let fault = Fault::passing(Error::new(ErrorKind::Unavailable, text));
        (have < wanted).then_some(Fault { passing: false, ..fault })
    }

    /// Asks something that changes nothing, with repetitions.
    pub(super) async fn ask(&self, command: impl Fn(&Open) -> Cmd) -> Result<Value, Fault> {
        let give_up = Clock::Boot.now().after(self.rules.patience);
        let mut pause = Duration::from_millis(10);
        loop {
            let answer = match self.link.open().await {
                Ok(open) => self.link.send_to(&open, &command(&open)).await,
                Err(fault) => Err(fault),
            };
            match answer {
                Err(fault) if !fault.no_script => wait_it_out(fault, give_up, &mut pause).await?,
                answer => return answer,
            }
        }
    }
}

/// Returns when the next attempt is due; the fault itself when there is none.
async fn wait_it_out(fault: Fault, give_up: Moment, pause: &mut Duration) -> Result<(), Fault> {
    if !fault.passing || Clock::Boot.now().after(*pause) >= give_up {
        return Err(fault);
    }
    tracing::debug!("trying again: {}", fault.error);
    tokio::time::sleep(*pause).await;
    *pause = (*pause * 2).min(Duration::from_millis(500));
    Ok(())
}

/// One of the calls under way; gives its place up when it is done or dropped.
struct Call {
    post: Arc<Post>,
    era: u64,
    /// A call that a runtime drops before it has begun was not wanted there: that runtime is going away.
    begun: bool,
}

impl Call {
    /// Takes along whoever has queued up, until nobody is left.
    async fn carry(mut self) {
        self.begun = true;
        loop {
            let batch: Vec<_> = {
                let (mut desk, by_slot) = (self.post.desk(), self.post.rules.by_slot);
                // This call itself does not count.
                let others = desk.calls.saturating_sub(1);
                let is_worth_it = others == 0 || by_slot || desk.queue.len() >= desk.usual / 2;
                if desk.era == self.era && is_worth_it { desk.next_batch(by_slot) } else { Vec::new() }
            };
            if batch.is_empty() {
                return;
            }
            let outcomes = self.post.deliver(&batch).await;
            for (letter, outcome) in batch.into_iter().zip(outcomes) {
                let _ = letter.tell.send(outcome);
            }
            let_others_go_first().await;
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut desk = self.post.desk();
        if desk.era != self.era {
            return;
        }
        desk.calls -= 1;
        if desk.queue.is_empty() || !desk.is_worth_a_call(desk.queue.len(), self.post.rules.by_slot) {
            return;
        }
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) if self.begun => {
                let next = self.post.call_begun(&mut desk, false);
                drop(desk);
                runtime.spawn(next.carry());
            }
            // Nobody is left here who could travel: whoever waits sends for itself.
            _ => desk.queue.clear(),
        }
    }
}

/// Lets tasks run that were told something: as a rule they have something to send again, and the next batch is larger. Unlike
/// tokio's own way to yield, it does not have a look at the sockets first, which would cost more than what is gained.
async fn let_others_go_first() {
    let mut first = true;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut first, false) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    })
    .await;
}

/// Operations that travel together: those of the same kind, lifetime and note.
struct Group<'a> {
    like: &'a Op,
    /// Which of the batch.
    members: Vec<(usize, &'a Op)>,
}

/// A batch.
struct Groups<'a> {
    groups: Vec<Group<'a>>,
    count: usize,
    /// On a cluster, all are of this one.
    slot: u16,
}

impl<'a> Group<'a> {
    fn of<O: Borrow<Op>>(ops: &'a [O]) -> Groups<'a> {
        let mut groups: Vec<Self> = Vec::with_capacity(4);
        for (index, op) in ops.iter().map(Borrow::borrow).enumerate() {
            match groups.iter_mut().rev().find(|group| group.like.travels_with(op)) {
                Some(group) => group.members.push((index, op)),
                None => {
                    let mut members = Vec::with_capacity(ops.len() - index);
                    members.push((index, op));
                    groups.push(Self { like: op, members });
                }
            }
        }
        let slot = groups.first().map_or(0, |group| group.like.key.slot);
        Groups { groups, count: ops.len(), slot }
    }
}

impl Groups<'_> {
    fn any(&self, is: fn(&Op) -> bool) -> bool {
        self.groups.iter().any(|group| is(group.like))
    }

    fn members(&self) -> impl Iterator<Item = &Op> {
        self.groups.iter().flat_map(|group| &group.members).map(|(_, op)| *op)
    }

    fn longest(&self) -> Duration {
        self.members().map(|op| op.ttl).max().unwrap_or_default()
    }

    fn leases(&self) -> impl Iterator<Item = Duration> {
        self.members().filter(|op| op.may_hold()).map(|op| op.ttl)
    }

    fn longest_lease(&self) -> Duration {
        self.leases().max().unwrap_or_default()
    }

    fn shortest_lease(&self) -> Duration {
        self.leases().min().unwrap_or_default()
    }
}

/// Writes a command as the server reads it.
pub(in crate::engine) struct Packer<'a>(pub(in crate::engine) &'a mut Vec<u8>);

impl Packer<'_> {
    pub(in crate::engine) fn head(&mut self, mark: char, number: usize) {
        // Writing to a vector cannot fail.
        let _ = write!(self.0, "{mark}{number}\r\n");
    }

    pub(in crate::engine) fn text(&mut self, text: &(impl AsRef<[u8]> + ?Sized)) {
        let text = text.as_ref();
        self.head('$', text.len());
        self.0.extend_from_slice(text);
        self.0.extend_from_slice(b"\r\n");
    }

    pub(in crate::engine) fn number(&mut self, number: u64) {
        self.text(&number.to_string());
    }
}

impl Post {
    fn pack(&self, packed: &mut Vec<u8>, groups: &Groups<'_>, by_hash: bool, repeated: bool, open: &Open) {
        let keys = groups.count + if self.rules.by_slot { 2 } else { 1 };
        let heads: usize = groups.groups.iter().map(|group| if group.like.has_ttl() { 4 } else { 2 }).sum();
        let mut packer = Packer(packed);
        packer.head('*', 3 + keys + 2 + heads + groups.count);
        packer.text(if by_hash { "EVALSHA" } else { "EVAL" });
        packer.text(if by_hash { LINE.get_hash() } else { include_str!("line.lua") });
        packer.number(keys as u64);
        for op in groups.members() {
            packer.text(op.key.name.as_str());
        }
        let quarantined = if open.is_in_quarantine() { "1" } else { "0" };
        let remember = millis(REMEMBER + groups.longest());
        if self.rules.by_slot {
            let tag = tag_of(groups.slot);
            packer.text(&format!("{NOBODY}{tag}"));
            packer.text(&format!("{NEWEST}{tag}"));
            packer.number(remember);
            packer.text(&format!("{quarantined}{}", open.inbox_suffix(&tag)));
        } else {
            packer.text(NEWEST);
            packer.number(remember);
            packer.text(quarantined);
        }
        for Group { like, members } in &groups.groups {
            packer.text(if repeated { again(&like.code) } else { &like.code });
            packer.number(members.len() as u64);
            if like.has_ttl() {
                packer.number(millis(like.ttl));
                packer.text(like.note.as_deref().unwrap_or_default());
            }
            for (_, op) in members {
                packer.text(op.who.as_bytes());
            }
        }
    }
}

pub(super) fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// The server's time, and the replies in the order of the operations.
fn read(value: &Value, groups: &Groups<'_>) -> Option<(u64, Vec<Reply>)> {
    let Value::Array(values) = value else { return None };
    let (server, values) = values.split_first()?;
    let mut replies = vec![Reply::Busy; groups.count];
    if values.len() != groups.groups.len() {
        return None;
    }
    for (group, value) in groups.groups.iter().zip(values) {
        match value {
            Value::Array(values) if values.len() == group.members.len() => {
                for ((index, _), value) in group.members.iter().zip(values) {
                    replies[*index] = read_reply(value)?;
                }
            }
            Value::Int(_) => {
                let reply = read_reply(value)?;
                for (index, _) in &group.members {
                    replies[*index] = reply.clone();
                }
            }
            _ => return None,
        }
    }
    Some((number(server)?, replies))
}

fn read_reply(value: &Value) -> Option<Reply> {
    let parts = match value {
        Value::Int(4) => return Some(Reply::Released(1)),
        Value::Int(5) => return Some(Reply::Renewed(true)),
        Value::Int(_) => return Some(Reply::Held { token: number(value)? }),
        Value::Array(parts) => parts,
        _ => return None,
    };
    let at = |index: usize| parts.get(index).and_then(number);
    Some(match at(0)? {
        2 => Reply::Waits { arrival: at(1)?, look: Duration::from_millis(at(2)?), foreign: at(3)? == 1 },
        3 => Reply::Busy,
        4 => Reply::Released(at(1)?),
        5 => Reply::Renewed(at(1)? == 1),
        6 => Reply::OtherPermits(at(1)?),
        7 => Reply::GivenUp,
        8 => Reply::Evicted(at(1)?),
        9 => Reply::Quarantined,
        _ => return None,
    })
}

pub(super) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
        _ => None,
    }
}
