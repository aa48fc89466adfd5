//! Redlock: one lock over several Redis servers that know nothing of each other.
//!
//! * `vote.lua`: what one node does, atomically.
//! * `ballot`: operations, and how the nodes' answers are counted.
//! * `node`: one node's connection, and whether it may vote.
//! * `council`: the nodes together; batching.
//! * `mail`: how those who wait for an outcome are told.
//! * `claim`: acquiring, and waiting.
//! * `view`: what a majority sees.
//!
//! See `docs/engines/redlock.md`.

mod ballot;
mod claim;
mod council;
mod mail;
mod node;
mod view;

use self::ballot::{Answer, Code, Op, Outcome, Voice, Who, spell};
use self::council::{Council, Quarantine, driver};
use self::mail::answered;
use self::node::Node;
use self::view::View;
use super::redis::{Target, check_name, connection_info, tls};
use super::{Capability, Engine, Purpose};
use crate::url::Url;
use crate::{
    Claim, Clock, Error, ErrorKind, Grant, Hold, MAX_TTL, Mode, Name, Owner, Release, Renewal, Result, Status, Token,
};
use async_trait::async_trait;
use redis::ConnectionAddr;
use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

const OPTIONS: [&str; 8] = ["ttl", "max_ttl", "timeout", "patience", "quarantine", "ca", "cert", "key"];
/// The longest lease, unless the URL says otherwise: so long is a node out that came back without its memory.
const LONGEST: Duration = Duration::from_secs(300);

/// For operations that concern no proposal.
const NOBODY: Who = Who { token: Who::LEAST, owner: Owner::from_bytes([0; 16]) };

/// Opens the nodes that the URL names, and makes sure that a majority answers.
pub(crate) async fn open(url: &Url, text: &str) -> Result<RedlockEngine> {
    let mut url = url.clone();
    let timeout = url.take_duration("timeout")?.unwrap_or(Duration::from_secs(2));
    let patience = url.take_duration("patience")?.unwrap_or(Duration::from_secs(5));
    let longest = url.take_duration("max_ttl")?.unwrap_or(LONGEST);
    if longest > MAX_TTL || longest < crate::MIN_TTL {
        return Err(Error::invalid(format!("option max_ttl={longest:?} is out of range; choose 100ms to 24h")));
    }
    if timeout.is_zero() {
        return Err(Error::invalid("option timeout=0s leaves a node no time to answer; give it some milliseconds"));
    }
    let quarantine = match url.take("quarantine").as_deref() {
        None | Some("auto") => Quarantine::Auto,
        Some("strict") => Quarantine::Strict,
        Some("off") => Quarantine::Off,
        Some(other) => {
            return Err(Error::invalid(format!("option quarantine={other} is not known; write auto, strict or off")));
        }
    };
    let secure = url.scheme == "redlocks";
    let known_as = std::mem::replace(&mut url.scheme, if secure { "rediss" } else { "redis" }.to_owned());
    let certificates = tls(&mut url)?;
    url.scheme = known_as;
    url.finish(&OPTIONS)?;
    // Half of it: it names an inbox, and need only differ from those of other clients.
    let session: String = spell(Owner::random()).take(11).collect();
    let (mut nodes, mut inboxes, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
    for (index, part) in parts(text)?.into_iter().enumerate() {
        let text = format!("{}://{part}", if secure { "rediss" } else { "redis" });
        let (info, _) = connection_info(&url, &text)?;
        let address = match info.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => format!("{host}:{port}"),
            other => other.to_string(),
        };
        if addresses.contains(&address) {
            return Err(Error::invalid(format!(
                "the node {address} stands twice in the URL; each vote must come from a server of its own"
            )));
        }
        let target = Target::new(info, certificates.clone());
        let (node, inbox) = Node::new(index, address.clone(), target, &session, timeout);
        addresses.push(address);
        nodes.push(Arc::new(node));
        inboxes.push(inbox);
    }
    check_count(addresses.len())?;
    let (lost, taken) = mpsc::unbounded_channel();
    let council = Arc::new(Council::new(nodes, quarantine, longest, lost));
    let driver = driver()?;
    for (node, inbox) in council.nodes.iter().zip(inboxes) {
        driver.spawn(Arc::clone(node).run(Arc::downgrade(&council), inbox));
    }
    let address = format!("{}://{}", url.scheme, addresses.join(","));
    let nameless: Arc<str> = format!("\n{session}\n").into();
    let engine = RedlockEngine {
        council,
        last_note: Mutex::new(Arc::clone(&nameless)),
        nameless,
        address,
        taken: tokio::sync::Mutex::new(taken),
        timeout,
        patience,
        longest,
    };
    engine.assemble().await.map_err(|error| error.at_engine(&engine.address))?;
    Ok(engine)
}

/// What is known of a release that took more than one attempt.
struct Freeing {
    freed: Vec<bool>,
    /// These have not answered an attempt: they may have carried it out, or do so as soon as they can be reached.
    unsure: Vec<bool>,
    withdrawn: bool,
}

impl Freeing {
    fn new(nodes: usize) -> Self {
        Self { freed: vec![false; nodes], unsure: vec![false; nodes], withdrawn: false }
    }

    /// Takes in the answers to an attempt that no majority confirmed. `None` when they are too few.
    fn hear(&mut self, voices: &[Voice], majority: usize) -> Option<Release> {
        let mut answers = 0;
        for voice in voices {
            let earlier = std::mem::replace(&mut self.unsure[voice.node], false);
            match voice.answer {
                Answer::Failed(..) => self.unsure[voice.node] = true,
                Answer::Freed => self.freed[voice.node] = true,
                // An earlier attempt, whose answer was lost, has done it.
                Answer::Nothing => self.freed[voice.node] |= earlier,
                Answer::Withdrawn => self.withdrawn = true,
                _ => {}
            }
            answers += usize::from(!matches!(voice.answer, Answer::Failed(..)));
        }
        if answers < majority {
            return None;
        }
        // One that is away, or has not been heard since, may have been the one that completed the majority.
        let count = |nodes: &[bool]| nodes.iter().filter(|node| **node).count();
        let (freed, unsure) = (count(&self.freed), count(&self.unsure));
        Some(if freed > 0 && freed + unsure >= majority {
            Release::Freed
        } else if self.withdrawn {
            Release::Withdrawn
        } else {
            Release::NotHeld
        })
    }
}

/// The nodes of a URL, each as `[user:password@]host[:port][/db]`. What the first one has of credentials and the last one of a
/// database counts for all that have none.
fn parts(text: &str) -> Result<Vec<String>> {
    let bare = text.split_once('?').map_or(text, |(bare, _)| bare);
    let bad = || Error::invalid("not a Redlock URL; write redlock://[user:password@]host[:port],host[:port],…[/db]");
    let (_, rest) = bare.split_once("://").ok_or_else(bad)?;
    let (hosts, db) = rest.split_once('/').map_or((rest, String::new()), |(hosts, db)| (hosts, format!("/{db}")));
    let shared = hosts.split(',').next().and_then(|first| first.rsplit_once('@')).map(|(credentials, _)| credentials);
    let nodes = hosts.split(',').map(|host| match (host.rsplit_once('@'), shared) {
        (None, Some(credentials)) => format!("{credentials}@{host}{db}"),
        _ => format!("{host}{db}"),
    });
    let nodes: Vec<String> = nodes.collect();
    if hosts.split(',').any(|host| host.rsplit_once('@').map_or(host, |(_, host)| host).is_empty()) {
        return Err(bad());
    }
    Ok(nodes)
}

fn check_count(count: usize) -> Result<()> {
    if count < 3 {
        return Err(Error::invalid(format!(
            "redlock needs at least 3 nodes, and this URL names {count}; for a single server write redis://"
        )));
    }
    if count.is_multiple_of(2) {
        tracing::warn!(
            "redlock over {count} nodes survives the loss of {} of them, as {} nodes would: an odd number is better",
            count - count / 2 - 1,
            count - 1
        );
    }
    Ok(())
}

/// An engine over several Redis servers.
pub(crate) struct RedlockEngine {
    council: Arc<Council>,
    /// What nodes note of an owner without a label: the session.
    nameless: Arc<str>,
    last_note: Mutex<Arc<str>>,
    address: String,
    /// Owners whose lock was taken away.
    taken: tokio::sync::Mutex<mpsc::UnboundedReceiver<Owner>>,
    timeout: Duration,
    patience: Duration,
    longest: Duration,
}

impl RedlockEngine {
    /// Waits for the nodes; an error when too few are there.
    async fn assemble(&self) -> Result<()> {
        // Every attempt ends by itself; a busy machine may need several answers for one.
        self.council.assembled(self.timeout * 4 + Duration::from_secs(5)).await;
        let up: Vec<_> = self.council.nodes.iter().filter(|node| node.down().is_none()).collect();
        for (at, node) in up.iter().enumerate() {
            if let Some(other) =
                up[..at].iter().find(|other| !node.run_id().is_empty() && other.run_id() == node.run_id())
            {
                return Err(Error::invalid(format!(
                    "{} and {} are the same server; each node must be a server of its own",
                    other.address, node.address
                )));
            }
        }
        if up.len() >= self.council.majority {
            return Ok(());
        }
        // A wrong password stays wrong: that is what the user must know.
        let hopeless = self.council.nodes.iter().find_map(|node| Some((&node.address, node.take_hopeless()?)));
        match hopeless {
            Some((address, error)) => Err(error.at_engine(&format!("redis://{address}"))),
            None => {
                let why = self.council.obstacle().unwrap_or_else(|| "too few nodes can be reached".to_owned());
                Err(Error::new(ErrorKind::Unavailable, why))
            }
        }
    }

    /// What nodes note of an owner with this label. As a rule a client has one label for all.
    fn note(&self, label: &str) -> Arc<str> {
        let mut last = self.last_note.lock().unwrap_or_else(PoisonError::into_inner);
        if last.strip_prefix(&*self.nameless) != Some(label) {
            *last = format!("{}{label}", self.nameless).into();
        }
        Arc::clone(&last)
    }

    /// As a rule that of any hold.
    fn last_note(&self) -> Arc<str> {
        Arc::clone(&self.last_note.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn op(&self, code: Code, name: &Name, who: Who, ttl: Duration) -> Op {
        Op { code, name: name.clone(), who, ttl, note: Arc::clone(&self.nameless), tell: None }
    }

    /// For this hold, and no other one of the same owner; or for all that an owner may have asked for so far.
    fn hold_op(&self, code: Code, hold: &Hold) -> Op {
        match hold.token {
            Some(token) => self.op(code, &hold.name, Who { token: token.as_u64(), owner: hold.owner }, hold.ttl),
            None => {
                let who = Who { token: self.council.propose(0), owner: hold.owner };
                self.op(Code::GiveUp, &hold.name, who, hold.ttl)
            }
        }
    }

    fn inspect_op(&self, name: &Name, waiters: usize) -> Op {
        Op { note: waiters.to_string().into(), ..self.op(Code::Inspect, name, NOBODY, Duration::ZERO) }
    }

    async fn view(&self, name: &Name, waiters: usize) -> Result<View> {
        let outcome = answered(self.council.submit(self.inspect_op(name, waiters))).await?;
        self.viewed(&outcome)
    }

    fn viewed(&self, outcome: &Outcome) -> Result<View> {
        let seen = outcome.voices.iter().filter(|voice| matches!(voice.answer, Answer::Seen(_))).count();
        if seen < self.council.majority {
            return Err(refused(outcome).unwrap_or_else(|| self.council.too_few(&outcome.voices)));
        }
        Ok(View::of(&outcome.voices, self.council.nodes.len()))
    }

    /// Takes the lock from its holder. Where nobody is seen to have a majority, somebody is as a rule about to get it and is waited for; if
    /// not, it is a holder whose nodes do not answer, or votes that nobody came back for: they are taken one by one, until somebody wins.
    /// Whether there was something to take.
    async fn clear(&self, name: &Name) -> Result<bool> {
        let give_up = Clock::Boot.now().after(self.timeout);
        let mut lasting: Option<HashSet<Option<Who>>> = None;
        let mut taken = false;
        loop {
            let view = self.view(name, 0).await?;
            if view.is_certain() {
                return if taken { Ok(true) } else { self.take_from(name, view.who()).await };
            }
            let late = lasting.is_some() && Clock::Boot.now() >= give_up;
            let mut still = lasting.map_or_else(|| view.voted_for().clone(), |lasting| &lasting & view.voted_for());
            if view.voted_for().is_empty() || late && still.is_empty() {
                return Ok(taken);
            }
            if late && let Some(who) = still.iter().next().copied() {
                still.remove(&who);
                taken |= self.take_from(name, who).await?;
            } else {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            lasting = Some(still);
        }
    }

    /// Takes the lock from this proposal, or from a client of another kind. Whether there was something to take.
    async fn take_from(&self, name: &Name, who: Option<Who>) -> Result<bool> {
        let op = match who {
            Some(who) => self.op(Code::Evict, name, who, Duration::ZERO),
            None => self.op(Code::EvictForeign, name, NOBODY, Duration::ZERO),
        };
        let outcome = answered(self.council.submit(op)).await?;
        let count = |what: fn(&Answer) -> bool| outcome.voices.iter().filter(|voice| what(&voice.answer)).count();
        if count(|answer| matches!(answer, Answer::Failed(..))) > self.council.nodes.len() - self.council.majority {
            return Err(self.council.too_few(&outcome.voices));
        }
        match refused(&outcome) {
            Some(error) => Err(error),
            // A holder that is told by the first node gives the lock back on the others, and they have nothing to free.
            None => Ok(count(|answer| *answer == Answer::Freed) > 0),
        }
    }

    async fn names(&self, prefix: &str) -> Result<BTreeSet<String>> {
        let scans = self.council.nodes.iter().filter_map(|node| {
            let (connection, prefix) = (node.connection()?, prefix.to_owned());
            Some(driver().map(|driver| driver.spawn(async move { node::names(connection, &prefix).await })))
        });
        let (mut names, mut answered) = (BTreeSet::new(), 0);
        for scan in scans.collect::<Result<Vec<_>>>()? {
            if let Ok(Ok(found)) = scan.await {
                names.extend(found);
                answered += 1;
            }
        }
        if answered < self.council.majority { Err(self.council.too_few(&[])) } else { Ok(names) }
    }
}

/// An operation that a node refuses for what it is: other nodes refuse it as well.
fn refused(outcome: &Outcome) -> Option<Error> {
    outcome.voices.iter().find_map(|voice| match &voice.answer {
        Answer::Refused(why) if why.contains("WRONGTYPE") => {
            Some(Error::invalid("the key of this name holds other data on a node; choose another name for the lock"))
        }
        Answer::Refused(why) if why.contains("NOPERM") || why.contains("The user executing the script can't") => {
            let text =
                "a node's ACL does not let this user do it; docs/engines/redlock.md lists the rights that are needed";
            Some(Error::invalid(text).caused_by(why.to_string()))
        }
        Answer::Refused(why) => Some(Error::new(ErrorKind::Engine, format!("a node refused it: {why}"))),
        _ => None,
    })
}

#[async_trait]
impl Engine for RedlockEngine {
    fn address(&self) -> &str {
        &self.address
    }

    fn capability(&self) -> Capability {
        Capability {
            engine: "redlock",
            processes: true,
            machines: true,
            shared: false,
            permits: false,
            ordered: false,
            push: true,
            instant_death: false,
            durable_tokens: true,
            purpose: Purpose::Efficiency,
            survives: "crashed and stopped clients, the loss of a minority of the nodes, nodes that come back without their memory, \
                       lost connections and replies, clocks that jump on a minority",
            beware: "two holders are possible when a majority forgets or jumps at the same time; the next token is higher all the same, \
                     so let the resource compare tokens",
        }
    }

    fn clock(&self) -> Clock {
        Clock::Boot
    }

    async fn acquire(&self, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
        check_name(&claim.name)?;
        if claim.mode != Mode::Exclusive {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "redlock has exclusive locks only: nodes that know nothing of each other cannot agree on who holds together; \
                 use redis+sentinel:// or redis+cluster:// for read/write locks and semaphores",
            ));
        }
        if claim.ttl > self.longest {
            return Err(Error::invalid(format!(
                "a ttl of {:?} is longer than this URL allows; raise max_ttl={:?} for all clients of these nodes (so long is a node out \
                 that restarted)",
                claim.ttl, self.longest
            )));
        }
        claim::acquire(self, claim, wait).await
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let told = self.council.submit_all(holds.iter().map(|hold| self.hold_op(Code::Renew, hold)));
        let mut renewals = Vec::with_capacity(holds.len());
        let mut unknown = None;
        for told in told {
            let outcome = answered(told).await?;
            let gone = |answer: &Answer| matches!(answer, Answer::Missing | Answer::Others | Answer::Refused(_));
            let gone = outcome.voices.iter().filter(|voice| gone(&voice.answer)).count();
            renewals.push(if outcome.won {
                Renewal::Extended { from: outcome.sent }
            } else if gone > self.council.nodes.len() - self.council.majority {
                Renewal::Gone
            } else {
                unknown = Some(outcome);
                Renewal::Unknown
            });
        }
        match unknown {
            Some(outcome) if renewals.iter().all(|renewal| *renewal == Renewal::Unknown) => {
                Err(self.council.too_few(&outcome.voices))
            }
            _ => Ok(renewals),
        }
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        let give_up = Clock::Boot.now().after(self.patience);
        let mut freeing = None;
        loop {
            let op = Op { note: self.last_note(), ..self.hold_op(Code::Release, hold) };
            let outcome = answered(self.council.submit(op)).await?;
            if outcome.won {
                return Ok(Release::Freed);
            }
            let freeing = freeing.get_or_insert_with(|| Freeing::new(self.council.nodes.len()));
            if let Some(release) = freeing.hear(&outcome.voices, self.council.majority) {
                return Ok(release);
            }
            if Clock::Boot.now() >= give_up {
                let error = self.council.too_few(&outcome.voices);
                return Err(Error::new(ErrorKind::Ambiguous, error.to_string()));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn standing(&self, name: &Name, owner: Owner) -> Result<Option<Grant>> {
        let now = Clock::Boot.now();
        let who = self.view(name, 0).await?.who().filter(|who| who.owner == owner);
        Ok(who.map(|who| Grant::new(Token::new(who.token), Mode::Exclusive, now, who.token)))
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        Ok(self.view(name, 10_000).await?.status(name.as_str()))
    }

    fn obstacle(&self, _name: &Name) -> Option<String> {
        self.council.obstacle()
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Status>> {
        let mut found = Vec::new();
        let names: Vec<Name> = self.names(prefix).await?.into_iter().filter_map(|name| Name::new(name).ok()).collect();
        let told = self.council.submit_all(names.iter().map(|name| self.inspect_op(name, 1_000)));
        for (name, told) in names.iter().zip(told) {
            let status = self.viewed(&answered(told).await?)?.status(name.as_str());
            if status.is_held() || !status.waiters.is_empty() {
                found.push(status);
            }
        }
        Ok(found)
    }

    async fn evict(&self, name: &Name) -> Result<usize> {
        check_name(name)?;
        self.clear(name).await.map(usize::from)
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        let mut taken = self.taken.lock().await;
        while let Some(owner) = taken.recv().await {
            let _ = lost.send(owner);
        }
    }

    async fn close(&self) -> Result<()> {
        // Every node gets everything in order: when this is answered, so is what was released before.
        if let Ok(name) = Name::new("fencelock:redlock") {
            let _ = tokio::time::timeout(self.timeout, self.council.submit(self.inspect_op(&name, 0))).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hear(freeing: &mut Freeing, answers: &[(usize, Answer)]) -> Option<Release> {
        let voices: Vec<Voice> =
            answers.iter().map(|(node, answer)| Voice { node: *node, votes: true, answer: answer.clone() }).collect();
        freeing.hear(&voices, 3)
    }

    fn away() -> Answer {
        Answer::Failed("away".into(), true)
    }

    /// The second attempt is decided by those who have nothing to free, before the one is heard whose first answer was lost.
    #[test]
    fn a_release_is_not_taken_for_a_loss_because_of_an_answer_that_was_lost() {
        let mut freeing = Freeing::new(5);
        let first = [(3, Answer::Freed), (4, Answer::Freed), (0, away()), (1, away()), (2, away())];
        assert_eq!(hear(&mut freeing, &first), None);
        let second = [(0, Answer::Nothing), (3, Answer::Nothing), (4, Answer::Nothing)];
        assert_eq!(hear(&mut freeing, &second), Some(Release::Freed));
    }

    #[test]
    fn what_nobody_has_is_lost() {
        let mut freeing = Freeing::new(5);
        assert_eq!(hear(&mut freeing, &[(0, away()), (1, away()), (2, Answer::Nothing)]), None);
        let nothing: Vec<_> = [2, 3, 4].map(|node| (node, Answer::Nothing)).into();
        assert_eq!(hear(&mut freeing, &nothing), Some(Release::NotHeld), "no node had it");
        let mut freeing = Freeing::new(5);
        let others = [(0, Answer::Freed), (1, Answer::Nothing), (2, Answer::Nothing), (3, Answer::Nothing)];
        assert_eq!(hear(&mut freeing, &others), Some(Release::NotHeld), "a minority had it");
    }
}
