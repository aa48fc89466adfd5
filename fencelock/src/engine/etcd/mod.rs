//! etcd: a line is the keys under the lock's name, in the order of their creation; a session is a lease.
//!
//! * `key`: the keys of a lock, laid out as `etcdctl lock` does.
//! * `session`: leases and their heartbeat.
//! * `watch`: waiting for the one key that is in the way.
//! * `link`: which server is asked, and asking again.
//! * `url`, `fault`, `proto`: what the user wrote, what an error means, what goes over the wire.
//!
//! Who holds and who waits for what is decided in `engine::line::ahead`. See `docs/engines/etcd.md`.

mod fault;
mod key;
mod link;
mod proto;
mod session;
mod url;
mod watch;

use self::fault::Fault;
use self::key::{Line, Span};
use self::link::{Answer, Link, lock, told};
use self::proto::{
    ASCEND, BY_CREATION, CREATE, Compare, DESCEND, DeleteRangeRequest, KeyValue, NO_PUT, Op, OpAnswer, PutRequest,
    RangeRequest, RangeResponse, RequestOp, TxnRequest, TxnResponse, VALUE, WatchCreateRequest,
};
use self::session::{Lease, Sessions, id_of, session};
use self::watch::{Note, Watcher};
use super::line::ahead::{AheadEngine, Entry, Joined, Left, Ordered, Place, Session, Until, View, blocked};
use super::{Capability, EntryKey, Purpose};
use crate::url::Url;
use crate::{Claim, Error, ErrorKind, Hold, Mode, Moment, Name, Owner, Renewal, Result, Token};
use futures_util::future::join_all;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// So many operations travel in one transaction; the server's own limit is 128.
const TOGETHER: usize = 100;
/// So many keys are listed at a time.
const PAGE: i64 = 5_000;

const TXN: &str = "/etcdserverpb.KV/Txn";
const RANGE: &str = "/etcdserverpb.KV/Range";

/// Opens the cluster that the URL names, and makes sure that it answers and knows us.
pub(crate) async fn open(url: &Url, text: &str) -> Result<AheadEngine<EtcdStore>> {
    let url::Target { link, address, prefix } = url::read(url, text)?;
    let link = Arc::new(link);
    let store =
        EtcdStore { sessions: Sessions::new(Arc::clone(&link)), link, unanswered: Mutex::default(), address, prefix };
    let look = RangeRequest { count_only: true, limit: 1, ..range(Span::prefixed(store.prefix.clone())) };
    let answer = store.link.ask(RANGE, &look).await;
    answer.map(|answer: Answer<RangeResponse>| drop(answer)).map_err(|fault| {
        let kind = if fault.passing { ErrorKind::Unavailable } else { fault.error.kind() };
        Error::new(kind, "the cluster cannot be used").caused_by(fault.error).at_engine(&store.address)
    })?;
    Ok(AheadEngine::new(store))
}

/// Locks in an etcd cluster.
pub(crate) struct EtcdStore {
    link: Arc<Link>,
    sessions: Sessions,
    /// How many requests to join were sent for a claim whose answers were not seen: they may still be under way.
    unanswered: Mutex<HashMap<(Owner, Name), u32>>,
    address: String,
    prefix: String,
}

impl EtcdStore {
    fn line(&self, name: &Name) -> Line {
        Line::new(&self.prefix, name)
    }

    /// Sends the transaction that joins, and keeps count of what was not answered.
    async fn send_join(&self, claim: &Claim, txn: &TxnRequest) -> std::result::Result<Answer<TxnResponse>, Fault> {
        let key = (claim.owner, claim.name.clone());
        let sending = || *lock(&self.unanswered).entry(key.clone()).or_default() += 1;
        let answer = self.link.ask_counting(TXN, txn, sending).await;
        let mut unanswered = lock(&self.unanswered);
        match &answer {
            Ok(Answer { unanswered: 0, .. }) | Err(Fault { sent: false, .. }) => drop(unanswered.remove(&key)),
            Ok(Answer { unanswered: left, .. }) => drop(unanswered.insert(key, *left)),
            // All that were counted.
            Err(_) => {}
        }
        answer
    }

    /// What is to be seen of those ahead, by mode. With `below`, of those that came before that revision.
    fn ranges(line: &Line, mode: Mode, below: Option<i64>) -> Vec<RangeRequest> {
        let own = i64::from(below.is_none());
        let look = |span: Span, sort_order: i32, limit: i64| RangeRequest {
            sort_order,
            sort_target: BY_CREATION,
            limit,
            keys_only: true,
            max_create_revision: below.map_or(0, |below| below - 1),
            ..range(span)
        };
        match mode {
            Mode::Exclusive => vec![look(line.all(), DESCEND, 1 + own)],
            Mode::Shared => line.not_readers().map(|span| look(span, DESCEND, 1)).into(),
            Mode::Permit { of } => {
                let first = i64::from(of).saturating_add(1 + own);
                vec![look(line.all(), ASCEND, first), look(line.all(), DESCEND, 1 + own)]
            }
        }
    }

    /// The view from the answers to [`ranges`](Self::ranges).
    fn view(line: &Line, answers: &[proto::ResponseOp], below: i64, as_of: i64, asked: Moment) -> View {
        let kvs = answers.iter().flat_map(range_answer);
        let mut ahead: Vec<Entry> =
            kvs.filter(|kv| kv.create_revision < below).filter_map(|kv| read_entry(line, kv)).collect();
        ahead.sort_by_key(|entry| entry.order);
        ahead.dedup_by_key(|entry| entry.order);
        View { ahead, as_of: revision(as_of), asked }
    }

    async fn try_join(&self, claim: &Claim, wait: bool, lease: &Lease) -> std::result::Result<Attempt, Fault> {
        let line = self.line(&claim.name);
        let own = line.key(&key::entry(claim.owner, claim.mode));
        let put = PutRequest { key: own.clone().into(), value: note(claim, None), lease: lease.id };
        let mut compare = vec![absent(Span::just(&own)), absent(Span::just(&line.given_up(claim.owner)))];
        // Who does not want to wait joins only if that is enough to hold. Permits cannot be counted in a comparison.
        match claim.mode {
            Mode::Exclusive if !wait => compare.push(absent(line.all())),
            Mode::Shared if !wait => compare.extend(line.not_readers().map(absent)),
            _ => {}
        }
        let mut success = vec![op(Op::Put(put))];
        success.extend(Self::ranges(&line, claim.mode, None).into_iter().map(|range| op(Op::Range(range))));
        let failure = [&own, &line.given_up(claim.owner)].map(|key| op(Op::Range(range(Span::just(key)))));
        let txn = TxnRequest { compare, success, failure: failure.into() };
        let answer = self.send_join(claim, &txn).await?;
        let as_of = answer.body.header.as_ref().map_or(0, |header| header.revision);
        if answer.body.succeeded {
            let place = place(claim, lease, as_of);
            let view = Self::view(&line, &answer.body.responses, as_of, as_of, answer.sent);
            return Ok(Attempt::In(place, view));
        }
        let found = |at: usize| answer.body.responses.get(at).and_then(|answer| range_answer(answer).next());
        Ok(match (found(0), found(1)) {
            (_, Some(_)) => Attempt::GivenUp,
            (Some(kv), None) => Attempt::Found(kv.clone()),
            (None, None) => Attempt::Busy,
        })
    }

    /// Whether a permit would have to wait. Who only tries, again and again, should not write each time.
    async fn is_full(&self, claim: &Claim) -> Result<bool> {
        let line = self.entries(&claim.name).await?;
        let own = line.iter().any(|entry| entry.owner == Some(claim.owner));
        Ok(!own && blocked(&line, claim.mode)?.is_some())
    }

    /// Removes an entry that stands in the own way.
    async fn remove_key(&self, key: &[u8], create_revision: i64) -> Result<bool> {
        let span = Span { from: key.to_vec(), to: Vec::new() };
        let txn = TxnRequest {
            compare: vec![created(span.clone(), create_revision)],
            success: vec![op(Op::Delete(delete(span)))],
            failure: Vec::new(),
        };
        let answer: Answer<TxnResponse> = told(self.link.ask(TXN, &txn).await)?;
        Ok(answer.body.succeeded)
    }

    /// Looks whether what a waiter waits for has happened.
    async fn happened(&self, line: &Line, until: &Until<'_>, as_of: u64) -> Result<bool> {
        let (entries, marks) = match until {
            Until::Gone(entry) => (std::slice::from_ref(*entry), false),
            Until::Passed(entry) => (std::slice::from_ref(*entry), true),
            Until::AnyGone(entries) => (*entries, false),
        };
        for some in entries.chunks(TOGETHER) {
            let look = |entry: &Entry| {
                op(Op::Range(RangeRequest { keys_only: true, ..range(Span::just(&line.key(&entry.key))) }))
            };
            let txn = TxnRequest { success: some.iter().map(look).collect(), ..TxnRequest::default() };
            let answer: Answer<TxnResponse> = told(self.link.ask(TXN, &txn).await)?;
            let stands = |(entry, answer): (&Entry, &proto::ResponseOp)| {
                range_answer(answer).next().is_some_and(|kv| {
                    revision(kv.create_revision) == entry.order && (!marks || revision(kv.mod_revision) <= as_of)
                })
            };
            if !some.iter().zip(&answer.body.responses).all(stands) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// All keys of a span with their values, page by page, as of one revision.
    async fn all(&self, span: Span, by_creation: bool) -> Result<Vec<KeyValue>> {
        if by_creation {
            let request = RangeRequest { sort_order: ASCEND, sort_target: BY_CREATION, ..range(span) };
            let answer: Answer<RangeResponse> = told(self.link.ask(RANGE, &request).await)?;
            return Ok(answer.body.kvs);
        }
        let mut request = RangeRequest { limit: PAGE, ..range(span) };
        let mut found = Vec::new();
        loop {
            let answer: Answer<RangeResponse> = told(self.link.ask(RANGE, &request).await)?;
            let page = answer.body;
            found.extend(page.kvs);
            let (true, Some(last)) = (page.more, found.last()) else { return Ok(found) };
            request.key.clone_from(&last.key);
            request.key.push(0);
            request.revision = page.header.as_ref().map_or(0, |header| header.revision);
        }
    }
}

/// What an attempt to join found.
enum Attempt {
    In(Place, View),
    /// There is an entry of this owner.
    Found(KeyValue),
    /// This claim was given up before.
    GivenUp,
    Busy,
}

impl Ordered for EtcdStore {
    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "etcd",
            processes: true,
            machines: true,
            shared: true,
            permits: true,
            ordered: true,
            push: true,
            instant_death: false,
            durable_tokens: true,
            purpose: Purpose::Correctness,
            survives: "crashed and stopped clients, lost connections and replies, the loss of any minority of the servers and of the leader",
            beware: "a process that stops between its last check and its write: let the resource compare tokens, or write to etcd \
                     itself in a transaction that compares the lock's key",
        }
    }

    async fn join(&self, claim: &Claim, wait: bool) -> Result<Joined> {
        if !wait && matches!(claim.mode, Mode::Permit { .. }) && self.is_full(claim).await? {
            return Ok(Joined::Busy);
        }
        loop {
            let lease = self.sessions.for_ttl(claim.ttl).await?;
            let kv = match self.try_join(claim, wait, &lease).await {
                Ok(Attempt::In(place, view)) => return Ok(Joined::In(place, view)),
                Ok(Attempt::Busy) => return Ok(Joined::Busy),
                Ok(Attempt::GivenUp) => {
                    return Err(Error::new(
                        ErrorKind::NotHeld,
                        "this claim was given up; acquire again with a new owner",
                    ));
                }
                Ok(Attempt::Found(kv)) => kv,
                // It has ended since we heard of it: another one is asked for.
                Err(Fault { no_lease: true, .. }) => {
                    lease.end();
                    continue;
                }
                Err(fault) => return Err(fault.error),
            };
            if kv.lease == lease.id {
                // An earlier attempt has created it, and its answer was lost.
                let place = place(claim, &lease, kv.create_revision);
                match self.look(claim, &place, None).await? {
                    Some(view) => return Ok(Joined::In(place, view)),
                    None => continue,
                }
            }
            if self.sessions.get(session(kv.lease)).is_none() {
                return Err(Error::invalid(
                    "this owner is in the line already, through another client; an owner stands for one acquisition at a time",
                ));
            }
            // Left from an older session of this client.
            self.remove_key(&kv.key, kv.create_revision).await?;
        }
    }

    async fn look(&self, claim: &Claim, place: &Place, after: Option<&Entry>) -> Result<Option<View>> {
        // A waiter's questions show that its lease is in use. One that was given up may still be there, with the entry.
        if self.sessions.get(place.session).is_none_or(|lease| !lease.is_alive()) {
            return Ok(None);
        }
        let line = self.line(&claim.name);
        let own = Span::just(&line.key(&place.key));
        let below = number(place.order);
        // A range is what makes the servers answer for the majority.
        let stands = op(Op::Range(RangeRequest { keys_only: true, ..range(own.clone()) }));
        let ranges = Self::ranges(&line, claim.mode, Some(below));
        let mut all = vec![stands.clone()];
        all.extend(ranges.into_iter().map(|range| op(Op::Range(range))));
        let txn = match after {
            // To sort a long line takes the servers long.
            Some(after) => {
                let held = Span::just(&key::last_word(&self.prefix, after.session));
                let compare = vec![created(own, below), says(held, after.order)];
                TxnRequest { compare, success: vec![stands], failure: all }
            }
            None => TxnRequest { compare: vec![created(own, below)], success: all, failure: Vec::new() },
        };
        let answer: Answer<TxnResponse> = told(self.link.ask(TXN, &txn).await)?;
        let as_of = answer.body.header.as_ref().map_or(0, |header| header.revision);
        let [own, ahead @ ..] = answer.body.responses.as_slice() else { return Ok(None) };
        let stands = range_answer(own).any(|kv| kv.create_revision == below);
        Ok(stands.then(|| Self::view(&line, ahead, below, as_of, answer.sent)))
    }

    async fn wait(&self, name: &Name, until: Until<'_>, as_of: u64) -> Result<()> {
        let line = self.line(name);
        let (span, filters) = match &until {
            Until::Gone(entry) => (Span::just(&line.key(&entry.key)), vec![NO_PUT]),
            Until::Passed(entry) => (Span::just(&line.key(&entry.key)), Vec::new()),
            Until::AnyGone(_) => (line.all(), vec![NO_PUT]),
        };
        let mut watching = Watcher::begin(&self.link, watch_from(span, as_of + 1, filters));
        loop {
            match watching.next().await {
                Some(Note::Behind) => {
                    if self.happened(&line, &until, as_of).await? {
                        return Ok(());
                    }
                }
                Some(Note::Happened | Note::Missed) => return Ok(()),
                None => return Err(Error::new(ErrorKind::Unavailable, "the runtime is shutting down")),
            }
        }
    }

    async fn mark(&self, claim: &Claim, place: &Place) -> Result<bool> {
        let span = Span::just(&self.line(&claim.name).key(&place.key));
        let put =
            PutRequest { key: span.from.clone(), value: note(claim, Some(wall_clock())), lease: id_of(place.session) };
        let txn = TxnRequest {
            compare: vec![created(span, number(place.order))],
            success: vec![op(Op::Put(put))],
            failure: Vec::new(),
        };
        match self.link.ask(TXN, &txn).await {
            Ok(Answer::<TxnResponse> { body, .. }) => Ok(body.succeeded),
            Err(Fault { no_lease: true, .. }) => Ok(false),
            Err(fault) => Err(fault.error),
        }
    }

    async fn gone(&self, name: &Name, place: &Place) {
        let span = Span::just(&self.line(name).key(&place.key));
        let mut from = place.order + 1;
        loop {
            let mut watching = Watcher::begin(&self.link, watch_from(span.clone(), from, vec![NO_PUT]));
            loop {
                match watching.next().await {
                    Some(Note::Behind) => {}
                    // Only the entry itself has this key, and deletions alone are told.
                    Some(Note::Happened) => return,
                    Some(Note::Missed) => break,
                    None => return std::future::pending().await,
                }
            }
            match self.link.ask(RANGE, &RangeRequest { keys_only: true, ..range(span.clone()) }).await {
                Ok(Answer::<RangeResponse> { body, .. }) => {
                    if body.kvs.first().is_none_or(|kv| revision(kv.create_revision) != place.order) {
                        return;
                    }
                    from = revision(body.header.as_ref().map_or(0, |header| header.revision)) + 1;
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    async fn leave(&self, hold: &Hold, held: Option<&Place>) -> Result<Left> {
        let line = self.line(&hold.name);
        let own = (hold.owner, hold.name.clone());
        let under_way = lock(&self.unanswered).get(&own).copied().unwrap_or(0);
        let places = match (hold.seat.and_then(kind), hold.token) {
            (Some(kind), Some(_)) => vec![line.of_owner(hold.owner)[kind].clone()],
            _ => line.of_owner(hold.owner).into(),
        };
        let deletes = places.iter().cloned().map(|span| op(Op::Delete(delete(span)))).collect::<Vec<_>>();
        let mut txn = match hold.token {
            // This hold, and no later one of the same owner.
            Some(token) => TxnRequest {
                compare: places.into_iter().map(|span| created(span, number(token.as_u64()))).collect(),
                success: deletes,
                failure: Vec::new(),
            },
            None => {
                TxnRequest { compare: places.into_iter().map(absent).collect(), success: Vec::new(), failure: deletes }
            }
        };
        if under_way > 0 {
            // A request to join may arrive after this one: it must find that it is not wanted any more.
            let lease = self.sessions.for_given_up().await?;
            let given_up = line.given_up(hold.owner);
            let note = op(Op::Put(PutRequest { key: given_up.into(), value: b"given up".to_vec(), lease }));
            txn.success.push(note.clone());
            if hold.token.is_some() || under_way > 1 {
                txn.failure.push(note);
            }
        }
        let answer: Answer<TxnResponse> = match held {
            Some(place) => {
                let key = key::last_word(&self.prefix, place.session).into();
                let put = PutRequest { key, value: word(place.order), lease: id_of(place.session) };
                let mut saying = txn.clone();
                saying.success.push(op(Op::Put(put)));
                match self.link.ask(TXN, &saying).await {
                    // No lease, no last word.
                    Err(Fault { no_lease: true, .. }) => told(self.link.ask(TXN, &txn).await)?,
                    answer => told(answer)?,
                }
            }
            None => told(self.link.ask(TXN, &txn).await)?,
        };
        lock(&self.unanswered).remove(&own);
        let deleted = answer
            .body
            .responses
            .iter()
            .any(|answer| matches!(&answer.response, Some(OpAnswer::Delete(answer)) if answer.deleted > 0));
        Ok(match (deleted, answer.unanswered) {
            (true, _) => Left::Gone,
            (false, 0) => Left::Nothing,
            (false, _) => Left::Perhaps,
        })
    }

    fn good_until(&self, session: Session) -> Moment {
        self.sessions.get(session).map_or(Moment::default(), |lease| lease.good_until())
    }

    fn is_alive(&self) -> bool {
        self.sessions.are_alive()
    }

    async fn ended(&self, session: Session) {
        if let Some(lease) = self.sessions.get(session) {
            lease.over().await;
        }
    }

    async fn beat(&self, session: Session) -> Result<Option<Moment>> {
        match self.sessions.get(session) {
            Some(lease) => self.sessions.beat(&lease).await,
            None => Ok(None),
        }
    }

    async fn renew_borrowed(&self, hold: &Hold) -> Result<Renewal> {
        let line = self.line(&hold.name);
        let look = |span: Span| op(Op::Range(RangeRequest { keys_only: true, ..range(span) }));
        let txn = TxnRequest { success: line.of_owner(hold.owner).map(look).into(), ..TxnRequest::default() };
        let answer: Answer<TxnResponse> = told(self.link.ask(TXN, &txn).await)?;
        let stands = |kv: &&KeyValue| hold.token.is_none_or(|token| token.as_u64() == revision(kv.create_revision));
        let Some(kv) = answer.body.responses.iter().flat_map(range_answer).find(stands) else {
            return Ok(Renewal::Gone);
        };
        Ok(match self.sessions.keep_alive(kv.lease, hold.ttl).await? {
            // The other client's lease may be shorter than what this one asks for: then so is the hold.
            Some((sent, length)) => {
                let missing = u64::try_from(hold.ttl.saturating_sub(length).as_nanos()).unwrap_or(u64::MAX);
                Renewal::Extended { from: Moment::from_nanos(sent.as_nanos().saturating_sub(missing)) }
            }
            None => Renewal::Gone,
        })
    }

    async fn entries(&self, name: &Name) -> Result<Vec<Entry>> {
        let line = self.line(name);
        let found = self.all(line.all(), true).await?;
        Ok(found.iter().filter_map(|kv| read_entry(&line, kv)).collect())
    }

    async fn lines(&self, prefix: &str) -> Result<Vec<(Name, Vec<Entry>)>> {
        let span = Span::prefixed(format!("{}{}", self.prefix, key::escape(prefix)));
        let mut lines: HashMap<Name, Vec<Entry>> = HashMap::new();
        for kv in self.all(span, false).await? {
            let name =
                std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(&*self.prefix)).and_then(key::split);
            let Some((name, _)) = name else { continue };
            let entry = read_entry(&self.line(&name), &kv);
            lines.entry(name).or_default().extend(entry);
        }
        for line in lines.values_mut() {
            line.sort_by_key(|entry| entry.order);
        }
        Ok(lines.into_iter().collect())
    }

    async fn lease_left(&self, sessions: &BTreeSet<Session>) -> Result<HashMap<Session, Duration>> {
        let mut left = HashMap::new();
        let answers = join_all(sessions.iter().map(|session| self.sessions.left(*session))).await;
        for (session, answer) in sessions.iter().zip(answers) {
            left.extend(answer?.map(|answer| (*session, answer)));
        }
        Ok(left)
    }

    async fn remove(&self, name: &Name, entries: &[Entry]) -> Result<usize> {
        let line = self.line(name);
        let remove = entries.iter().map(|entry| {
            let key = line.key(&entry.key);
            async move { self.remove_key(key.as_bytes(), number(entry.order)).await }
        });
        let mut count = 0;
        for removed in join_all(remove).await {
            count += usize::from(removed?);
        }
        Ok(count)
    }

    fn entry_key(&self, name: &Name, owner: Owner, mode: Mode, token: Token) -> Option<EntryKey> {
        let key = self.line(name).key(&key::entry(owner, mode));
        Some(EntryKey { key, revision: token.as_u64() })
    }

    async fn drive(&self) {
        let _leaving = Leaving(&self.link, tokio::runtime::Handle::current().id());
        self.sessions.drive().await;
    }

    async fn close(&self) -> Result<()> {
        self.sessions.close().await;
        Ok(())
    }
}

/// The keeper's runtime. When it goes away, its connection is of no use to the last releases, which another one carries.
struct Leaving<'a>(&'a Link, tokio::runtime::Id);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.forget_home(self.1);
    }
}

impl Span {
    fn just(key: &str) -> Self {
        Self { from: key.as_bytes().to_vec(), to: Vec::new() }
    }
}

fn range(span: Span) -> RangeRequest {
    RangeRequest { key: span.from, range_end: span.to, ..RangeRequest::default() }
}

fn delete(span: Span) -> DeleteRangeRequest {
    DeleteRangeRequest { key: span.from, range_end: span.to }
}

fn op(request: Op) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// All keys of the span were created by this revision, and there is one.
fn created(span: Span, revision: i64) -> Compare {
    let create_revision = Some(revision);
    Compare { result: 0, target: CREATE, key: span.from, create_revision, value: None, range_end: span.to }
}

/// The span has no keys.
fn absent(span: Span) -> Compare {
    created(span, 0)
}

/// The key's value names the entry with this order.
fn says(span: Span, order: u64) -> Compare {
    Compare { target: VALUE, create_revision: None, value: Some(word(order)), ..absent(span) }
}

/// A holder's last word: which entry it was.
fn word(order: u64) -> Vec<u8> {
    order.to_string().into_bytes()
}

fn watch_from(span: Span, revision: u64, filters: Vec<i32>) -> WatchCreateRequest {
    WatchCreateRequest { key: span.from, range_end: span.to, start_revision: number(revision), filters, watch_id: 0 }
}

fn range_answer(answer: &proto::ResponseOp) -> std::slice::Iter<'_, KeyValue> {
    match &answer.response {
        Some(OpAnswer::Range(answer)) => answer.kvs.iter(),
        _ => [].iter(),
    }
}

fn place(claim: &Claim, lease: &Lease, created: i64) -> Place {
    let order = revision(created);
    let seat = order << 2 | seat_kind(claim.mode);
    Place { key: key::entry(claim.owner, claim.mode), order, token: order, session: session(lease.id), seat }
}

/// A seat tells in its lowest bits which of [`Line::of_owner`] the entry is in.
fn seat_kind(mode: Mode) -> u64 {
    match mode {
        Mode::Exclusive => 0,
        Mode::Shared => 1,
        Mode::Permit { .. } => 2,
    }
}

fn kind(seat: u64) -> Option<usize> {
    usize::try_from(seat & 3).ok().filter(|kind| *kind < 3)
}

fn revision(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn number(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

/// What people see in an entry: when it joined and when it was granted, in milliseconds since 1970 by the client's clock, and
/// who it is. Nothing depends on it.
fn note(claim: &Claim, granted: Option<Duration>) -> Vec<u8> {
    let since = granted.unwrap_or_else(wall_clock).as_millis();
    let state = if granted.is_some() { "held" } else { "joined" };
    format!("fencelock {state} {since}\n{}", claim.label).into_bytes()
}

fn read_note(value: &[u8]) -> Option<(Duration, String)> {
    let text = std::str::from_utf8(value).ok()?.strip_prefix("fencelock ")?;
    let (first, label) = text.split_once('\n')?;
    let (_, since) = first.split_once(' ')?;
    let since = Duration::from_millis(since.parse().ok()?);
    Some((wall_clock().saturating_sub(since), label.to_owned()))
}

fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn read_entry(line: &Line, kv: &KeyValue) -> Option<Entry> {
    let key = String::from_utf8_lossy(&kv.key);
    let key = key.strip_prefix(&line.key(""))?.to_owned();
    let (mode, owner) = key::read_entry(&key);
    let order = revision(kv.create_revision);
    let foreign = || (Duration::ZERO, "a client that is not fencelock".to_owned());
    let (age, label) = read_note(&kv.value).unwrap_or_else(foreign);
    Some(Entry { key, order, token: order, mode, owner, label, session: session(kv.lease), age })
}
