//! Acquiring: propose, count, and if it is not enough, wait for the nodes to hand the lock over.

use super::ballot::{Answer, Code, Holder, Op, Outcome, Voice, Who};
use super::council::{Expected, Told};
use super::mail::answered;
use super::node::Push;
use super::{RedlockEngine, refused};
use crate::{Claim, Clock, Error, ErrorKind, Grant, Mode, Moment, Result, Token};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// A waiter that was told nothing looks at least this often; the first in line, and those close to it, more often: whoever is ahead may
/// have been handed the lock and do nothing about it.
const RECHECK: Duration = Duration::from_secs(5);
const FIRST_RECHECK: Duration = Duration::from_secs(1);
/// How long after the first node handed the lock over the others may take.
const GRACE: Duration = Duration::from_millis(20);
/// So often a claim that does not wait tries again when nobody won.
const TRIES: u32 = 6;

pub(super) async fn acquire(engine: &RedlockEngine, claim: &Claim, wait: bool) -> Result<Option<Grant>> {
    let expected = if wait { Some(engine.council.expect(claim.owner, &claim.name)?) } else { None };
    let candidate = Candidate {
        engine,
        claim,
        note: engine.note(&claim.label),
        token: engine.council.propose(0),
        highest: 0,
        splits: 0,
        placed: false,
        warned: false,
        give_up: Clock::Boot.now().after(engine.patience),
    };
    match expected {
        Some(expected) => candidate.wait(expected).await.map(Some),
        None => candidate.try_it().await,
    }
}

/// A claim on its way to a majority.
struct Candidate<'a> {
    engine: &'a RedlockEngine,
    claim: &'a Claim,
    note: Arc<str>,
    token: u64,
    /// The highest token that a node told of.
    highest: u64,
    /// How often nobody won.
    splits: u32,
    /// It stands in line on some node.
    placed: bool,
    /// It was said what is waited for.
    warned: bool,
    give_up: Moment,
}

/// What the answers to a claim that did not win mean.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    /// Somebody else may hold: so long until a majority can be free. `stuck`: it may also be somebody else who waits, with votes that this
    /// one needs and a better claim to them.
    Held { look: Duration, stuck: bool },
    /// Nobody has a majority. Whether this one has the best claim to it.
    Split { best: bool },
    /// The proposal was too low.
    TooLow,
    /// Too few nodes vote.
    TooFew,
}

impl Candidate<'_> {
    fn who(&self) -> Who {
        Who { token: self.token, owner: self.claim.owner }
    }

    fn op(&self, code: Code) -> Op {
        let claim = self.claim;
        Op { code, name: claim.name.clone(), who: self.who(), ttl: claim.ttl, note: Arc::clone(&self.note), tell: None }
    }

    fn grant(&self, from: Moment) -> Grant {
        Grant::new(Token::new(self.token), Mode::Exclusive, from, self.token)
    }

    fn propose(&mut self) {
        self.token = self.engine.council.propose(self.highest);
    }

    /// Asks all nodes. A lease must not be over before its votes are counted.
    async fn ask(&self, code: Code) -> Result<Outcome> {
        let told = self.engine.council.submit(self.op(code));
        let limit = self.claim.ttl / 4;
        if limit >= self.engine.timeout {
            return answered(told).await;
        }
        match tokio::time::timeout(limit, answered(told)).await {
            Ok(outcome) => outcome,
            Err(_) => Ok(Outcome { won: false, sent: Clock::Boot.now(), voices: Vec::new() }),
        }
    }

    fn learn(&mut self, outcome: &Outcome) {
        for voice in &outcome.voices {
            let seen = match &voice.answer {
                Answer::TooLow(highest) => Some(*highest),
                Answer::Busy(holder) | Answer::Waits { holder, .. } => Who::read(&holder.value).map(|who| who.token),
                _ => None,
            };
            self.highest = self.highest.max(seen.unwrap_or(0));
        }
        // Nobody is put up with for ever who only once stood behind somebody, be it behind an earlier attempt of the same client.
        if outcome.voices.iter().any(|voice| matches!(voice.answer, Answer::Waits { .. })) {
            self.placed = true;
            self.give_up = Clock::Boot.now().after(self.engine.patience);
        } else if outcome.voices.iter().any(|voice| !matches!(voice.answer, Answer::Failed(..))) {
            self.placed = false;
        }
    }

    async fn try_it(mut self) -> Result<Option<Grant>> {
        let mut tries = 0;
        loop {
            let outcome = self.ask(Code::Try).await?;
            if outcome.won {
                return Ok(Some(self.grant(outcome.sent)));
            }
            self.learn(&outcome);
            if let Some(error) = final_answer(&outcome) {
                // Others may have granted it.
                self.step_back();
                return Err(error);
            }
            match self.find(&outcome) {
                Finding::Held { .. } => return Ok(None),
                Finding::Split { .. } | Finding::TooLow if tries < TRIES => {
                    tries += 1;
                    self.splits += 1;
                    tokio::time::sleep(self.pause()).await;
                    self.propose();
                }
                Finding::Split { .. } | Finding::TooLow => return Ok(None),
                Finding::TooFew => self.be_patient(&outcome, false).await?,
            }
        }
    }

    /// Lets some time pass while too few nodes vote; an error when that takes too long. A quarantine ends at a known time: whoever has come
    /// to wait waits for it, however patient it is with nodes that do not answer.
    async fn be_patient(&mut self, outcome: &Outcome, waits: bool) -> Result<()> {
        let council = &self.engine.council;
        let now = Clock::Boot.now();
        let quarantine = council.quarantine().filter(|_| waits);
        if quarantine.is_some() {
            self.give_up = self.give_up.max(now.after(self.engine.patience));
        }
        // For whoever has not, a quarantine that outlasts the patience is no use.
        let outlasts = |left: Duration| !waits && now.after(left) > self.give_up;
        let out = council.nodes.iter().filter(|node| node.out().is_some_and(|(_, left)| outlasts(left))).count();
        if council.nodes.len() - out < council.majority || now >= self.give_up {
            return Err(council.too_few(&outcome.voices));
        }
        if !self.warned {
            self.warned = true;
            tracing::warn!(name = %self.claim.name, "waiting for votes: {}", council.too_few(&outcome.voices));
        }
        self.step_back();
        let pause = quarantine.map_or(Duration::from_millis(20), |left| left.min(FIRST_RECHECK));
        tokio::time::sleep(pause + self.pause()).await;
        self.propose();
        Ok(())
    }

    fn pause(&self) -> Duration {
        let most = 2_000_u64 << self.splits.min(5);
        Duration::from_micros(200 + random() % most)
    }

    fn find(&self, outcome: &Outcome) -> Finding {
        let (all, majority) = (self.engine.council.nodes.len(), self.engine.council.majority);
        let mut rivals: HashMap<&str, usize> = HashMap::new();
        let (mut votes, mut low, mut unknown) = (0, 0, all);
        for voice in &outcome.voices {
            match &voice.answer {
                Answer::Failed(..) => continue,
                Answer::Busy(holder) | Answer::Waits { holder, .. } => *rivals.entry(&holder.value).or_default() += 1,
                Answer::TooLow(_) => low += 1,
                _ => {}
            }
            // A node that does not vote may have forgotten whom it voted for.
            if voice.votes {
                votes += 1;
                unknown -= 1;
            }
        }
        let best = rivals.keys().all(|rival| Who::read(rival).is_some_and(|who| who.token < self.token));
        if let Some((rival, count)) = rivals.iter().find(|(_, count)| **count + unknown >= majority) {
            let soon = Duration::from_millis(100 + random() % 200);
            // A client of the common recipe tells nobody when it releases; and if only those say so whom nobody hears, it is worth
            // asking again soon.
            let certain = *count >= majority && Who::read(rival).is_some();
            let look = if certain { self.look(outcome) } else { self.look(outcome).min(soon) };
            let granted = outcome.voices.iter().any(|voice| voice.answer == Answer::Granted);
            return Finding::Held { look, stuck: granted && !certain && !best };
        }
        if votes < majority {
            return Finding::TooFew;
        }
        if low > 0 && (rivals.is_empty() || low + rivals.len() > all - majority) {
            return Finding::TooLow;
        }
        Finding::Split { best }
    }

    /// How long until a majority of the nodes can be free.
    fn look(&self, outcome: &Outcome) -> Duration {
        let left = |holder: &Holder| holder.left.unwrap_or(RECHECK);
        let mut spans = Vec::new();
        let mut most_ahead = 0;
        for voice in &outcome.voices {
            match &voice.answer {
                Answer::Waits { holder, ahead } => {
                    spans.push(left(holder));
                    most_ahead = most_ahead.max(*ahead);
                }
                Answer::Busy(holder) => spans.push(left(holder)),
                Answer::Granted | Answer::TooLow(_) => spans.push(Duration::ZERO),
                _ => {}
            }
        }
        spans.sort_unstable();
        let free = spans.get(self.engine.council.majority - 1).or(spans.last()).copied().unwrap_or(RECHECK);
        // Those ahead may be dead: then the first who lives looks first, and a moment later the next ones do.
        let turn = Duration::from_millis((30 * most_ahead).min(900));
        let often = RECHECK.min(FIRST_RECHECK * u32::try_from(most_ahead + 1).unwrap_or(u32::MAX));
        (free + turn).min(often) + Duration::from_micros(1_000 + random() % 4_000)
    }

    async fn wait(mut self, expected: Expected) -> Result<Grant> {
        loop {
            let outcome = self.ask(Code::Acquire).await?;
            if outcome.won {
                return Ok(self.grant(outcome.sent));
            }
            self.learn(&outcome);
            if let Some(error) = final_answer(&outcome) {
                // Others may have granted it.
                self.step_back();
                return Err(error);
            }
            let look = match self.find(&outcome) {
                Finding::Held { look, stuck: false } => look,
                // Whoever has the highest token waits a little for the others to step back.
                Finding::Split { best: true } if self.splits % 4 != 3 => {
                    self.splits += 1;
                    self.pause() * 4
                }
                Finding::Split { .. } | Finding::Held { stuck: true, .. } => {
                    self.splits += 1;
                    self.step_back();
                    tokio::time::sleep(self.pause()).await;
                    self.propose();
                    continue;
                }
                Finding::TooLow => {
                    self.step_back();
                    self.propose();
                    continue;
                }
                Finding::TooFew if self.placed => {
                    // A node that could have forgotten something votes only for newer proposals.
                    if outcome.voices.iter().any(|voice| voice.answer == Answer::Granted && !voice.votes) {
                        self.step_back();
                        tokio::time::sleep(Duration::from_millis(100) + self.pause()).await;
                        self.propose();
                        continue;
                    }
                    Duration::from_millis(200)
                }
                Finding::TooFew => {
                    self.be_patient(&outcome, true).await?;
                    continue;
                }
            };
            if let Some(grant) = self.listen(&expected.told, look, &outcome).await {
                return Ok(grant);
            }
            // A holder, or somebody who tried, had a higher token: this one's must be above it, wherever it is asked for.
            if self.highest > self.token {
                self.step_back();
                self.propose();
            }
        }
    }

    /// Takes the proposal back on all nodes. It must not be counted again: what a node says of it may be old.
    fn step_back(&self) {
        self.engine.council.post(self.op(Code::Undo));
    }

    /// Waits until a majority has handed the lock over, or until it is worth asking again. What was granted before counts as well.
    async fn listen(&self, told: &Told, look: Duration, outcome: &Outcome) -> Option<Grant> {
        let mut until = Clock::Boot.now().after(look);
        let granted = outcome.voices.iter().filter(|voice| voice.votes && voice.answer == Answer::Granted);
        let mut votes: HashSet<usize> = granted.map(|voice| voice.node).collect();
        let mut from = if votes.is_empty() { Moment::NEVER } else { outcome.sent };
        let mut window = self.claim.ttl;
        loop {
            let (node, push) = tokio::select! {
                biased;
                push = told.next() => push,
                () = Clock::Boot.sleep_until(until) => return None,
            };
            match push {
                Push::Granted { token, at, lease, .. } if token == self.token => {
                    let node = &self.engine.council.nodes[node];
                    if self.engine.council.trusts_all() || node.floor().is_some_and(|floor| token > floor) {
                        votes.insert(node.index);
                        from = from.min(node.local(at));
                        window = window.min(lease);
                    }
                    if votes.len() >= self.engine.council.majority {
                        // Told late: only the nodes know whether it still stands.
                        let late = Clock::Boot.now() >= from.after(window / 2);
                        return (!late).then(|| self.grant(from).provisional(window));
                    }
                    until = until.min(Clock::Boot.now().after(GRACE));
                }
                Push::Look { .. } => return None,
                Push::Broken => {
                    let soon = Duration::from_micros(5_000 + random() % 50_000);
                    until = until.min(Clock::Boot.now().after(soon));
                }
                Push::Granted { .. } | Push::Lost { .. } => {}
            }
        }
    }
}

/// An answer that no further attempt can change.
fn final_answer(outcome: &Outcome) -> Option<Error> {
    let given_up = |voice: &Voice| voice.answer == Answer::GivenUp;
    if outcome.voices.iter().any(given_up) {
        return Some(Error::new(ErrorKind::NotHeld, "this claim was given up; acquire again with a new owner"));
    }
    refused(outcome)
}

fn random() -> u64 {
    // Without randomness, the time will do: it only has to differ from that of others.
    getrandom::u64().unwrap_or_else(|_| Clock::Boot.now().as_nanos())
}
