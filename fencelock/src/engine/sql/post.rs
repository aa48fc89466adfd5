//! The post office: operations that many tasks issue at the same time travel in one call, which is one transaction.
//!
//! A lone operation is sent at once, by the task that issued it. While calls are under way, operations queue up, and the next
//! call takes them all. Nobody waits for a batch to fill.

use super::Database;
use super::fault::{Fault, unreadable};
use super::op::{Answer, Op};
use crate::clock::ServerTime;
use crate::{Clock, Error, ErrorKind, Moment, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// The most renewals in one call: each touches one row, and keeps nobody waiting.
const RENEWALS: usize = 500;

type Outcome = Result<Answer>;

#[derive(Default)]
struct Desk {
    queue: VecDeque<(Op, oneshot::Sender<Outcome>)>,
    calls: usize,
    /// Calls of an earlier era do not count any more.
    era: u64,
}

pub(crate) struct Post<D> {
    database: Arc<D>,
    desk: Mutex<Desk>,
    patience: Duration,
    pub(super) time: ServerTime,
}

impl<D: Database> Post<D> {
    pub(super) fn new(database: Arc<D>, patience: Duration) -> Self {
        Self { database, desk: Mutex::default(), patience, time: ServerTime::default() }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out one operation.
    pub(super) async fn submit(self: &Arc<Self>, op: Op) -> Outcome {
        let mut orphaned = false;
        loop {
            let outcome = match self.stand_at_desk(&op) {
                Ok(_call) => self.deliver(std::slice::from_ref(&op)).await.pop().unwrap_or_else(|| Err(unreadable())),
                Err(told) => match told.await {
                    Ok(outcome) => outcome,
                    // The runtime of whoever carried it is gone. It may have been sent.
                    Err(_) => {
                        orphaned = true;
                        continue;
                    }
                },
            };
            return outcome.map(|answer| Answer { repeated: answer.repeated | orphaned, ..answer });
        }
    }

    /// Begins a call, or queues up for the next one.
    fn stand_at_desk(self: &Arc<Self>, op: &Op) -> Result<Call<D>, oneshot::Receiver<Outcome>> {
        let mut desk = self.desk();
        if desk.calls < D::CALLS && desk.queue.is_empty() {
            desk.calls += 1;
            return Ok(Call { post: Arc::clone(self), era: desk.era, begun: true });
        }
        let (tell, told) = oneshot::channel();
        // Who gives something back goes first: somebody waits for it.
        if op.gives_back() {
            desk.queue.push_front((op.clone(), tell));
        } else {
            desk.queue.push_back((op.clone(), tell));
        }
        Err(told)
    }

    /// The runtime that carried calls is going away, and they may never come to an end: whoever waits for them sends for itself.
    pub(super) fn orphan(&self) {
        let mut desk = self.desk();
        *desk = Desk { era: desk.era + 1, ..Desk::default() };
    }

    /// Carries out many renewals, in as many calls as it takes, one after the other.
    pub(super) async fn submit_all(&self, ops: &[Op]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for chunk in ops.chunks(RENEWALS) {
            outcomes.extend(self.deliver(chunk).await);
        }
        outcomes
    }

    /// One call, with repetitions: every operation is idempotent by its owner, or by a token. An operation that the server refuses
    /// spoils its batch; then each is tried by itself.
    async fn deliver(&self, ops: &[Op]) -> Vec<Outcome> {
        match self.call(ops).await {
            Ok(answers) => answers.into_iter().map(Ok).collect(),
            Err(fault) if ops.len() == 1 => vec![Err(fault.error)],
            Err(fault) if fault.refused => {
                let mut outcomes = Vec::with_capacity(ops.len());
                for op in ops {
                    let alone = self.call(std::slice::from_ref(op)).await.map_err(|fault| fault.error);
                    outcomes.push(alone.and_then(|mut answers| answers.pop().ok_or_else(unreadable)));
                }
                outcomes
            }
            Err(fault) => {
                let again = || Error::new(fault.error.kind(), fault.error.to_string());
                ops.iter().map(|_| Err(again())).collect()
            }
        }
    }

    async fn call(&self, ops: &[Op]) -> Result<Vec<Answer>, Fault> {
        // In the order of their names, so that two batches cannot block each other.
        let mut order: Vec<usize> = (0..ops.len()).collect();
        order.sort_by(|one, other| ops[*one].name.cmp(&ops[*other].name));
        let sorted: Vec<&Op> = order.iter().map(|index| &ops[*index]).collect();
        let give_up = Clock::Boot.now().after(self.patience);
        let mut pause = Duration::from_millis(10);
        let mut repeated = false;
        loop {
            let sent = Clock::Boot.now();
            let fault = match self.database.act(&sorted).await {
                Ok((server, replies)) if replies.len() == ops.len() => {
                    self.time.note(sent, server);
                    let mut answers: Vec<(usize, Answer)> = Vec::with_capacity(ops.len());
                    answers.extend(
                        order.iter().zip(replies).map(|(index, reply)| (*index, Answer { reply, sent, repeated })),
                    );
                    answers.sort_by_key(|(index, _)| *index);
                    return Ok(answers.into_iter().map(|(_, answer)| answer).collect());
                }
                Ok(_) => return Err(Fault::refusal(unreadable())),
                Err(fault) => fault,
            };
            repeated |= fault.error.kind() == ErrorKind::Ambiguous;
            wait_it_out(fault, give_up, &mut pause).await?;
        }
    }

    /// Asks something that changes nothing, with repetitions.
    pub(super) async fn ask<T, F>(&self, mut question: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<T, Fault>>,
    {
        let give_up = Clock::Boot.now().after(self.patience);
        let mut pause = Duration::from_millis(10);
        loop {
            match question().await {
                Ok(answer) => return Ok(answer),
                Err(fault) => wait_it_out(fault, give_up, &mut pause).await.map_err(|fault| fault.error)?,
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
struct Call<D: Database> {
    post: Arc<Post<D>>,
    era: u64,
    /// A call that a runtime drops before it has begun was not wanted there: that runtime is going away.
    begun: bool,
}

impl<D: Database> Call<D> {
    /// Takes along whoever has queued up, until nobody is left.
    async fn carry(mut self) {
        self.begun = true;
        loop {
            let batch: Vec<_> = {
                let mut desk = self.post.desk();
                let count = if desk.era == self.era { desk.queue.len().min(D::BATCH) } else { 0 };
                desk.queue.drain(..count).collect()
            };
            if batch.is_empty() {
                return;
            }
            let (ops, tells): (Vec<Op>, Vec<_>) = batch.into_iter().unzip();
            for (tell, outcome) in tells.into_iter().zip(self.post.deliver(&ops).await) {
                let _ = tell.send(outcome);
            }
        }
    }
}

impl<D: Database> Drop for Call<D> {
    fn drop(&mut self) {
        let mut desk = self.post.desk();
        if desk.era != self.era {
            return;
        }
        desk.calls -= 1;
        if desk.queue.is_empty() {
            return;
        }
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) if self.begun => {
                desk.calls += 1;
                let next = Call { post: Arc::clone(&self.post), era: self.era, begun: false };
                drop(desk);
                runtime.spawn(next.carry());
            }
            // Nobody is left here who could travel: whoever waits sends for itself.
            _ => desk.queue.clear(),
        }
    }
}
