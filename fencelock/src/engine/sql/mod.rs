//! The engine over a database whose functions keep the line: what PostgreSQL and MySQL have in common.
//!
//! * `op`: the operations of the functions, and what they answer.
//! * `post`: batching.
//! * `fault`: what an error means for what is done next.
//!
//! All that happens to a line happens inside of the database; here is the waiting. A client is told through its inbox, by push
//! or by asking for its words, as its [`Database`] can.

pub(crate) mod fault;
pub(crate) mod op;
mod post;

use self::fault::{Fault, unreadable};
use self::op::{Answer, Op, Push, Reply};
use self::post::Post;
use super::{Capability, Engine};
use crate::{
    Claim, Clock, Error, ErrorKind, Grant, Hold, Holder, Mode, Name, Owner, Release, Renewal, Result, Status, Token,
    Waiter,
};
use async_trait::async_trait;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// So many milliseconds apart it asks for words while somebody waits, where the database does not push: 45 questions a second on
/// average, whatever the number of waiters. Not at regular intervals: two clients that take turns would fall into step, and one of
/// them would always wait for the whole interval.
const ASK: std::ops::Range<u32> = 10..34;
/// The same while nobody waits, for words of loss; and how often a client that asks is seen to be there.
const TOUCH: Duration = Duration::from_secs(1);

/// How long a client that gets no answer leaves the server alone.
const AWAY: Duration = Duration::from_millis(100);

/// What is asked about lines.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Which<'a> {
    /// One line: its holders, and waiters up to ten thousand claims.
    Name(&'a Name),
    /// One owner's claim.
    Owner(&'a Name, Owner),
    /// All lines whose names start with this.
    Prefix(&'a str),
}

/// A claim as the database shows it. Times in µs.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) owner: Owner,
    pub(crate) holds: bool,
    pub(crate) mode: Mode,
    pub(crate) token: u64,
    /// How much is left of the lease.
    pub(crate) left: u64,
    /// How long it has held, or waited.
    pub(crate) since: u64,
    pub(crate) label: String,
}

/// So many claims of a name are looked at, holders first.
pub(crate) const SEEN: usize = 10_000;

/// A database with fencelock's functions in it.
pub(crate) trait Database: Send + Sync + 'static {
    /// So many calls are under way at the same time.
    const CALLS: usize;
    /// The most operations in one call: a batch must not keep a renewal waiting for long.
    const BATCH: usize;

    fn address(&self) -> &str;
    fn capability(&self) -> Capability;

    /// Whether this client asks for its words, instead of being told.
    fn asks(&self) -> bool;

    /// Carries out operations, which come in the order of their names, in one round trip. Also gives the server's time in µs.
    fn act(&self, ops: &[&Op]) -> impl Future<Output = Result<(u64, Vec<Reply>), Fault>> + Send;

    /// The words for this client; with `touch`, it is seen to be there.
    fn hear(&self, touch: bool) -> impl Future<Output = Result<Vec<String>, Fault>> + Send;

    /// The claims of lines, without those whose leases are over: by name, holders first, in their order.
    fn look(&self, which: Which<'_>) -> impl Future<Output = Result<Vec<Row>, Fault>> + Send;

    /// Connects if there is no connection.
    fn connect(&self) -> impl Future<Output = Result<(), Fault>> + Send;

    /// Gives up the connection with this number, if it is still the one in use.
    fn broke(&self, generation: u64);

    /// Gives up the connection, whichever it is: the runtime that drives it is going away.
    fn orphan(&self);

    /// Says good-bye.
    fn close(&self) -> impl Future<Output = ()> + Send;
}

type Waiting = HashMap<Owner, (Name, mpsc::UnboundedSender<Push>)>;

/// An engine on one database.
pub(crate) struct SqlEngine<D: Database> {
    database: Arc<D>,
    post: Arc<Post<D>>,
    /// Who of this client waits, for which lock, and how to tell it.
    waiting: Mutex<Waiting>,
    /// Somebody has begun to wait.
    waits: tokio::sync::Notify,
    /// What the server pushed; the keeper's task takes it from here.
    arrived: tokio::sync::Mutex<mpsc::UnboundedReceiver<(u64, Push)>>,
}

impl<D: Database> SqlEngine<D> {
    /// `arrived`: what the database pushes, each with the number of its connection.
    pub(crate) fn new(database: D, patience: Duration, arrived: mpsc::UnboundedReceiver<(u64, Push)>) -> Self {
        let database = Arc::new(database);
        Self {
            post: Arc::new(Post::new(Arc::clone(&database), patience)),
            database,
            waiting: Mutex::default(),
            waits: tokio::sync::Notify::new(),
            arrived: tokio::sync::Mutex::new(arrived),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expect(&self, owner: Owner, name: &Name) -> Result<Expected<'_, D>> {
        let (tell, told) = mpsc::unbounded_channel();
        match self.waiting().entry(owner) {
            Entry::Occupied(_) => Err(Error::invalid(
                "this owner is waiting for a lock already; an owner stands for one acquisition at a time",
            )),
            Entry::Vacant(slot) => {
                slot.insert((name.clone(), tell));
                Ok(Expected { engine: self, owner, told })
            }
        }
    }

    /// Waits until it is worth asking again, or until the grant arrives.
    async fn wait(&self, claim: &Claim, told: &mut Expected<'_, D>, look: Duration, repeated: bool) -> Option<Grant> {
        let mut until = Clock::Boot.now().after(look);
        loop {
            tokio::select! {
                biased;
                push = told.told.recv() => match push {
                    Some(Push::Granted { token, at, lease, .. }) => {
                        let from = self.post.time.local(at);
                        // Told late: only the server knows whether it still stands.
                        let late = Clock::Boot.now() >= from.after(lease / 2);
                        let grant = Grant::new(Token::new(token), claim.mode, from, seat(token, repeated));
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
            Push::Granted { owner, name, .. } | Push::First { owner, name, .. } => {
                // It may wait for another lock by now; late news of this one must not be taken for news of that.
                if let Some((_, tell)) = self.waiting().get(owner).filter(|(known, _)| known == name) {
                    let _ = tell.send(push.clone());
                }
            }
            Push::Lost { owner } => {
                let _ = lost.send(*owner);
            }
            // Words may have been missed: everybody looks for itself.
            Push::Broken => {
                for (_, tell) in self.waiting().values() {
                    let _ = tell.send(push.clone());
                }
            }
        }
    }

    /// Takes in what the server pushes.
    async fn listen(&self, lost: &mpsc::UnboundedSender<Owner>) {
        let mut arrived = self.arrived.lock().await;
        while let Some((generation, push)) = arrived.recv().await {
            if push == Push::Broken {
                self.database.broke(generation);
                // Connect at once: until this client listens again, it counts as gone.
                let _ = self.database.connect().await;
            }
            self.route(push, lost);
        }
    }

    /// Asks for words: often while somebody waits, and every now and then while nobody does.
    async fn inquire(&self, lost: &mpsc::UnboundedSender<Owner>) {
        let mut touch = Clock::Boot.now();
        let mut away = false;
        for question in 0_u32.. {
            let now = Clock::Boot.now();
            // Multiples of the golden section, without the whole part, are spread evenly.
            let spread = (u64::from(question.wrapping_mul(0x9e37_79b9)) * u64::from(ASK.end - ASK.start)) >> 32;
            let pause = Duration::from_millis(u64::from(ASK.start) + spread);
            let touches = now >= touch;
            if touches {
                touch = now.after(TOUCH);
            }
            match self.database.hear(touches).await {
                Ok(words) => {
                    for push in words.iter().filter_map(|word| Push::read(word)) {
                        self.route(push, lost);
                    }
                    // Until it was seen again it counted as gone, and may have been passed over.
                    if std::mem::take(&mut away) {
                        self.route(Push::Broken, lost);
                    }
                }
                Err(fault) => {
                    tracing::debug!("asking for words: {}", fault.error);
                    (away, touch) = (true, now);
                    tokio::time::sleep(AWAY).await;
                }
            }
            let idle = self.waiting().is_empty();
            tokio::select! {
                () = Clock::Boot.sleep_until(now.after(pause)), if !idle => {}
                () = Clock::Boot.sleep_until(touch), if idle => {}
                () = self.waits.notified(), if idle => {}
            }
        }
    }
}

/// The keeper's task, and the runtime that drives the connection as well. When it ends, nothing that depends on that runtime may
/// hold up the last releases, which another one carries.
struct Home<'a, D: Database>(&'a SqlEngine<D>);

impl<D: Database> Drop for Home<'_, D> {
    fn drop(&mut self) {
        self.0.database.orphan();
        self.0.post.orphan();
    }
}

/// A waiter's place; goes away with the waiter.
struct Expected<'a, D: Database> {
    engine: &'a SqlEngine<D>,
    owner: Owner,
    told: mpsc::UnboundedReceiver<Push>,
}

impl<D: Database> Drop for Expected<'_, D> {
    fn drop(&mut self) {
        self.engine.waiting().remove(&self.owner);
    }
}

#[async_trait]
impl<D: Database> Engine for SqlEngine<D> {
    fn address(&self) -> &str {
        self.database.address()
    }

    fn capability(&self) -> Capability {
        self.database.capability()
    }

    fn clock(&self) -> Clock {
        Clock::Boot
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        let mut op = Op::claim(claim, wait);
        if !wait {
            return match self.post.submit(op).await? {
                Answer { reply: Reply::Busy, .. } => Ok(None),
                answer => held(claim, &answer, answer.repeated).map(Some),
            };
        }
        let mut told = self.expect(claim.owner, &claim.name)?;
        let (mut placed, mut repeated) = (false, false);
        loop {
            let answer = self.post.submit(op.clone()).await;
            repeated |=
                answer.as_ref().map_or_else(|error| error.kind() == ErrorKind::Ambiguous, |answer| answer.repeated);
            let look = match answer {
                Ok(Answer { reply: Reply::Waits { arrival, look }, .. }) => {
                    op.arrival = arrival;
                    if !placed {
                        self.waits.notify_one();
                    }
                    placed = true;
                    look
                }
                Ok(answer) => return held(claim, &answer, repeated).map(Some),
                // Who has a place in line keeps it while the server is away.
                Err(error) if placed && passing(&error) => AWAY * 2,
                Err(error) => return Err(error),
            };
            if let Some(grant) = self.wait(claim, &mut told, look, repeated).await {
                return Ok(Some(grant));
            }
        }
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let ops: Vec<Op> = holds.iter().map(|hold| Op::hold("n", hold)).collect();
        let mut outcomes = self.post.submit_all(&ops).await;
        if outcomes.iter().all(Result::is_err)
            && let Some(Err(error)) = outcomes.pop()
        {
            return Err(error);
        }
        let renewal = |outcome: Result<Answer>| match outcome {
            Ok(Answer { reply: Reply::Renewed(true), sent, .. }) => Renewal::Extended { from: sent },
            Ok(_) => Renewal::Gone,
            Err(error) => {
                tracing::debug!("renewal: {error}");
                Renewal::Unknown
            }
        };
        Ok(outcomes.into_iter().map(renewal).collect())
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        // A claim that was given up before its answer came, or was sent twice, may still be on its way.
        let once = hold.seat.is_some_and(|seat| seat & 1 == 0);
        let code = if once { "r" } else { "x" };
        match self.post.submit(Op::hold(code, hold)).await? {
            Answer { reply: Reply::Released(1), .. } => Ok(Release::Freed),
            Answer { reply: Reply::Released(2), .. } => Ok(Release::Withdrawn),
            // An earlier attempt, whose answer was lost, has done it.
            Answer { repeated: true, .. } => Ok(Release::Freed),
            _ => Ok(Release::NotHeld),
        }
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let now = Clock::Boot.now();
        let rows = self.post.ask(|| self.database.look(Which::Owner(name, owner))).await?;
        let grant = |row: Row| Grant::new(Token::new(row.token), row.mode, now, seat(row.token, false));
        Ok(rows.into_iter().find(|row| row.holds).map(grant))
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        let rows = self.post.ask(|| self.database.look(Which::Name(name))).await?;
        Ok(statuses(rows).pop().unwrap_or_else(|| Status::free(name.as_str())))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        Ok(statuses(self.post.ask(|| self.database.look(Which::Prefix(prefix))).await?))
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        // Whoever holds at this moment, and nobody else, however often it is sent. If they are too many to be seen: all.
        let seen = self.inspect(name).await?.holders;
        let Some(newest) = seen.iter().map(|holder| holder.token.as_u64()).max() else { return Ok(0) };
        let newest = if seen.len() < SEEN { newest } else { i64::MAX.unsigned_abs() };
        let op = Op { token: newest, ..Op::plain("v", name, Owner::random(), Duration::ZERO) };
        match self.post.submit(op).await? {
            // An earlier attempt, whose answer was lost, has done it.
            Answer { reply: Reply::Evicted(0), repeated: true, .. } => Ok(seen.len()),
            Answer { reply: Reply::Evicted(count), .. } => Ok(usize::try_from(count).unwrap_or(usize::MAX)),
            _ => Err(unreadable()),
        }
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        let _home = Home(self);
        if self.database.asks() {
            tokio::join!(self.listen(&lost), self.inquire(&lost));
        } else {
            self.listen(&lost).await;
        }
    }

    async fn close(&self) -> Result<()> {
        self.database.close().await;
        Ok(())
    }
}

/// Rows come by name.
fn statuses(rows: Vec<Row>) -> Vec<Status> {
    let mut all: Vec<Status> = Vec::new();
    for row in rows {
        if all.last().is_none_or(|status| status.name != row.name) {
            all.push(Status::free(row.name));
        }
        let Some(status) = all.last_mut() else { continue };
        let (mode, owner, label) = (row.mode, row.owner.short(), row.label);
        let since = Duration::from_micros(row.since);
        if row.holds {
            let (token, lease_left) = (Token::new(row.token), Duration::from_micros(row.left));
            status.holders.push(Holder { mode, token, owner, label, held_for: since, lease_left });
        } else {
            status.waiters.push(Waiter { mode, owner, label, waiting_for: since });
        }
    }
    all
}

fn passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Ambiguous)
}

/// A grant's seat: its token, and in the lowest bit whether the claim was sent more than once; then one of its messages may come
/// late. (Tokens are times in µs: there is room.)
fn seat(token: u64, repeated: bool) -> u64 {
    token << 1 | u64::from(repeated)
}

fn held(claim: &Claim, answer: &Answer, repeated: bool) -> Result<Grant> {
    match answer.reply {
        Reply::Held { token } => Ok(Grant::new(Token::new(token), claim.mode, answer.sent, seat(token, repeated))),
        Reply::OtherPermits(known) => {
            let of = if let Mode::Permit { of } = claim.mode { of } else { 0 };
            Err(super::line::other_permits(u32::try_from(known).unwrap_or(u32::MAX), of))
        }
        Reply::GivenUp => {
            Err(Error::new(ErrorKind::NotHeld, "this claim was given up; acquire again with a new owner"))
        }
        _ => Err(unreadable()),
    }
}

/// The first name after all that start with this prefix; `None` when there is no such name.
pub(crate) fn after_prefix(prefix: &str) -> Option<Vec<u8>> {
    let mut end = prefix.as_bytes().to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return Some(end);
        }
    }
    None
}

/// A new session: the id of a client.
pub(crate) fn session() -> [u8; 16] {
    Owner::random().to_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_have_an_end() {
        assert_eq!(after_prefix("ab"), Some(b"ac".to_vec()));
        assert_eq!(after_prefix(""), None);
        assert_eq!(after_prefix("a\u{7f}").as_deref(), Some(&b"a\x80"[..]));
    }
}
