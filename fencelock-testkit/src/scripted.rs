//! An engine that does as it is told: answers late, never, wrongly or not at all. It keeps no lines; it is there for the
//! part of the library that must not trust an engine.

use async_trait::async_trait;
use fencelock::engine::{Capability, Engine};
use fencelock::{
    Claim, Clock, Error, ErrorKind, Grant, Hold, Moment, Name, Owner, Release, Renewal, Result, Status, Token,
};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// How the engine answers a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Yes: granted, extended, freed.
    Yes,
    /// No: busy, gone, not held.
    No,
    /// Yes, but the answer takes this long to arrive.
    Late(Duration),
    /// Nothing, ever.
    Never,
    /// An error; nothing was done.
    Fails,
    /// An error, although it was done: the reply got lost.
    FailsAfterwards,
    /// A panic.
    Panics,
}

/// Which operation was called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `acquire`
    Acquire,
    /// `renew`
    Renew,
    /// `release`
    Release,
}

/// A call that the engine got.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// When.
    pub at: Moment,
    /// Which.
    pub operation: Operation,
    /// For whom.
    pub owner: Owner,
}

/// The engine. Grants begin when they are asked for.
pub struct Scripted {
    capability: Capability,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    answers: HashMap<Operation, VecDeque<Answer>>,
    /// What is answered when the script has come to its end.
    then: HashMap<Operation, Answer>,
    calls: Vec<Call>,
    tokens: u64,
    lingers: bool,
    lost: Option<mpsc::UnboundedSender<Owner>>,
}

impl Scripted {
    /// An engine that says yes to everything, on tokio's clock.
    ///
    /// # Panics
    /// When the memory engine, whose capability it shows, cannot be opened.
    pub async fn new() -> Arc<Self> {
        let model = fencelock::connect("memory:").await.expect("the memory engine can be used");
        Arc::new(Self { capability: model.capability(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next answers to this operation; afterwards it goes on as before.
    pub fn next(&self, operation: Operation, answers: impl IntoIterator<Item = Answer>) {
        self.state().answers.entry(operation).or_default().extend(answers);
    }

    /// All answers to this operation from now on.
    pub fn always(&self, operation: Operation, answer: Answer) {
        self.state().then.insert(operation, answer);
    }

    /// From now on nothing ends by itself with its lease: a session goes on, or not.
    pub fn linger(&self, lingers: bool) {
        self.state().lingers = lingers;
    }

    /// Takes a lock away from its holder, as an engine that pushes does.
    pub fn take_away(&self, owner: Owner) {
        if let Some(lost) = &self.state().lost {
            let _ = lost.send(owner);
        }
    }

    /// The calls of this operation so far.
    pub fn calls(&self, operation: Operation) -> Vec<Call> {
        self.state().calls.iter().filter(|call| call.operation == operation).copied().collect()
    }

    async fn answer(&self, operation: Operation, owner: Owner) -> Result<bool> {
        let answer = {
            let mut state = self.state();
            state.calls.push(Call { at: self.clock().now(), operation, owner });
            let then = state.then.get(&operation).copied().unwrap_or(Answer::Yes);
            state.answers.entry(operation).or_default().pop_front().unwrap_or(then)
        };
        match answer {
            Answer::Yes => Ok(true),
            Answer::No => Ok(false),
            Answer::Late(span) => {
                tokio::time::sleep(span).await;
                Ok(true)
            }
            Answer::Never => std::future::pending().await,
            Answer::Fails => Err(Error::new(ErrorKind::Unavailable, "nobody answers")),
            Answer::FailsAfterwards => Err(Error::new(ErrorKind::Ambiguous, "the reply was lost")),
            Answer::Panics => panic!("the script says so"),
        }
    }
}

#[async_trait]
impl Engine for Scripted {
    fn address(&self) -> &str {
        "scripted:"
    }

    fn capability(&self) -> Capability {
        self.capability
    }

    fn clock(&self) -> Clock {
        Clock::Tokio
    }

    async fn acquire(&self, claim: &Claim, _: bool) -> Result<Option<Grant>> {
        let sent = self.clock().now();
        if !self.answer(Operation::Acquire, claim.owner).await? {
            return Ok(None);
        }
        let mut state = self.state();
        state.tokens += 1;
        Ok(Some(Grant::new(Token::new(state.tokens), claim.mode, sent, state.tokens)))
    }

    async fn renew(&self, holds: &[Hold]) -> Result<Vec<Renewal>> {
        let from = self.clock().now();
        let mut answers = Vec::with_capacity(holds.len());
        for hold in holds {
            let stands = self.answer(Operation::Renew, hold.owner).await?;
            answers.push(if stands { Renewal::Extended { from } } else { Renewal::Gone });
        }
        Ok(answers)
    }

    async fn release(&self, hold: &Hold) -> Result<Release> {
        let freed = self.answer(Operation::Release, hold.owner).await?;
        Ok(if freed { Release::Freed } else { Release::NotHeld })
    }

    fn lingers(&self) -> bool {
        self.state().lingers
    }

    async fn standing(&self, _: &Name, _: Owner) -> Result<Option<Grant>> {
        Ok(None)
    }

    async fn inspect(&self, name: &Name) -> Result<Status> {
        Ok(Status::free(name.as_str()))
    }

    async fn list(&self, _: &str) -> Result<Vec<Status>> {
        Ok(Vec::new())
    }

    async fn evict(&self, _: &Name) -> Result<usize> {
        Ok(0)
    }

    async fn drive(&self, lost: mpsc::UnboundedSender<Owner>) {
        self.state().lost = Some(lost);
        std::future::pending().await
    }
}
