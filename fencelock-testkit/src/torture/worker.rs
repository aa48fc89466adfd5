//! A worker: does random things with few locks and writes down what comes of them.

use super::job::{Job, Target};
use super::room::Rooms;
use super::{Connect, Counters};
use crate::ask::{Ask, Patience};
use crate::history::{Ended, GaveUp, Recorder, What};
use crate::rng::Rng;
use fencelock::{Client, Error, ErrorKind, Guard, Mode, Owner, Result};
use futures_util::future::join_all;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Runs all workers of one process until the job is over.
pub(super) async fn run(job: Job, connect: Connect, counters: Arc<Counters>) -> io::Result<()> {
    let job = Arc::new(job);
    let rooms: Vec<Rooms> = (0..job.workers).map(|_| Rooms::open(&job)).collect::<io::Result<_>>()?;
    let recorder = Arc::new(Recorder::in_dir(&job.dir, job.process)?);
    let client = connect(job.url.clone()).await.map_err(io::Error::other)?;
    let workers = rooms.into_iter().zip(0u64..).map(|(rooms, number)| Worker {
        targets: job.targets(),
        dice: Rng::new(job.seed.wrapping_add(number << 40)),
        number,
        evicted_in: 0,
        job: Arc::clone(&job),
        client: client.clone(),
        recorder: Arc::clone(&recorder),
        rooms,
        counters: Arc::clone(&counters),
    });
    let stalls = tokio::spawn(note_stalls(Arc::clone(&recorder), job.ttl));
    let outcomes = join_all(workers.map(|worker| tokio::spawn(worker.run()))).await;
    stalls.abort();
    // Not `close`: whatever a worker left behind by mistake must show.
    let _ = tokio::time::timeout(job.patience, client.settled()).await;
    outcomes.into_iter().try_for_each(|outcome| outcome.map_err(io::Error::other))
}

/// Notices when this process does not get to run: what happens meanwhile proves nothing.
async fn note_stalls(recorder: Arc<Recorder>, ttl: Duration) {
    let mut last = Recorder::now();
    loop {
        tokio::time::sleep(ttl / 20).await;
        let now = Recorder::now();
        if Duration::from_nanos(now - last) > ttl / 4 {
            recorder.record(0, What::Stalled { since: last });
        }
        last = now;
    }
}

struct Worker {
    job: Arc<Job>,
    client: Client,
    recorder: Arc<Recorder>,
    rooms: Rooms,
    targets: Vec<Target>,
    counters: Arc<Counters>,
    dice: Rng,
    number: u64,
    /// The round in which this worker evicted last.
    evicted_in: u64,
}

impl Worker {
    async fn run(mut self) {
        while !self.job.is_over() {
            self.act().await;
            if self.dice.chance(10) {
                tokio::time::sleep(self.dice.span(Duration::from_millis(5))).await;
            }
        }
    }

    /// The first worker holds the lock that the second one takes away.
    async fn act(&mut self) {
        match (self.number, self.dice.below(100)) {
            (0, _) if self.job.workers > 2 => self.hold_for_long(3).await,
            (1, _) if self.job.workers > 2 && self.may_evict() => self.evict().await,
            (_, 0..20) => self.hold_several().await,
            (_, 20..30) => self.hold_one(Patience::None).await,
            (_, 30..40) => {
                let span = self.dice.span(Duration::from_millis(30));
                self.hold_one(Patience::AtMost(span)).await;
            }
            (_, 40..50) => self.wait_and_leave().await,
            (_, 50..60) => self.re_enter().await,
            _ => self.hold_one(Patience::Endless).await,
        }
    }

    /// Any of the locks, in any of its modes.
    fn pick(&mut self) -> (String, Mode) {
        let target = self.dice.index(self.targets.len());
        let mode = self.dice.index(self.targets[target].modes.len());
        (self.targets[target].name.clone(), self.targets[target].modes[mode])
    }

    fn asks(&self, name: &str, mode: Mode) -> u64 {
        let claim = self.recorder.claim();
        let ttl_ms = u64::try_from(self.job.ttl.as_millis()).unwrap_or(u64::MAX);
        self.recorder.record(claim, What::Waits { name: name.to_owned(), mode, ttl_ms });
        claim
    }

    fn label(&self, claim: u64) -> String {
        format!("{}.{claim}", self.job.process)
    }

    async fn hold_one(&mut self, patience: Patience) {
        let (name, mode) = self.pick();
        if let Some((claim, guard)) = self.acquire(&name, mode, patience).await {
            self.hold(&name, mode, claim, guard).await;
        }
    }

    async fn acquire(&mut self, name: &str, mode: Mode, patience: Patience) -> Option<(u64, Guard)> {
        let look = self.dice.chance(30).then(|| self.dice.span(Duration::from_millis(4)));
        let claim = self.asks(name, mode);
        let label = self.label(claim);
        let ask = Ask { name, mode, ttl: self.job.ttl, label: &label, owner: None };
        let answer = self.watched(claim, name, &label, look, ask.of(&self.client, patience)).await?;
        match answer {
            Ok(Some(guard)) => {
                self.granted(claim, guard.token().as_u64());
                return Some((claim, guard));
            }
            Ok(None) => self.recorder.record(claim, What::GaveUp(GaveUp::Busy)),
            Err(error) if error.kind() == ErrorKind::Timeout => {
                self.recorder.record(claim, What::GaveUp(GaveUp::Timeout));
            }
            Err(error) => self.failed(claim, &error),
        }
        None
    }

    fn granted(&self, claim: u64, token: u64) {
        self.recorder.record(claim, What::Granted { token });
        self.counters.grants.fetch_add(1, Ordering::Relaxed);
    }

    fn failed(&self, claim: u64, error: &Error) {
        self.recorder.record(claim, What::Failed { message: error.to_string() });
    }

    /// Waits for an acquire, looks meanwhile whether it stands in line, and gives up when it waits in vain.
    async fn watched<T>(
        &self,
        claim: u64,
        name: &str,
        label: &str,
        look: Option<Duration>,
        acquire: impl Future<Output = Result<T>>,
    ) -> Option<Result<T>> {
        let mut acquire = pin!(acquire);
        let mut in_line = pin!(self.see_in_line(claim, name, label, look));
        let mut in_vain = pin!(tokio::time::sleep(self.job.patience));
        let mut looking = true;
        loop {
            tokio::select! {
                biased;
                answer = &mut acquire => return Some(answer),
                () = &mut in_line, if looking => looking = false,
                () = &mut in_vain => {
                    self.recorder.record(claim, What::GaveUp(GaveUp::Stuck));
                    return None;
                }
            }
        }
    }

    async fn see_in_line(&self, claim: u64, name: &str, label: &str, look: Option<Duration>) {
        let Some(delay) = look else { return };
        // Twice: when it came, and whether it is still there.
        for _ in 0..2 {
            tokio::time::sleep(delay).await;
            let asked = Recorder::now();
            let Ok(status) = self.client.status(name).await else { return };
            if status.waiters.iter().any(|waiter| waiter.label == label) {
                self.recorder.record(claim, What::InLine { asked });
            }
        }
    }

    async fn hold(&mut self, name: &str, mode: Mode, claim: u64, guard: Guard) {
        self.stay(name, mode, claim, &guard).await;
        self.end(&[claim], guard).await;
    }

    /// Goes into the room for a while.
    async fn stay(&mut self, name: &str, mode: Mode, claim: u64, guard: &Guard) {
        let pauses: Vec<Duration> =
            (0..self.dice.below(4)).map(|_| self.dice.span(Duration::from_micros(1500))).collect();
        self.see_valid(claim, guard);
        let inside = self.rooms.enter(name, mode);
        if inside.is_none() {
            self.recorder.record(claim, What::Clash);
        }
        for pause in pauses {
            if pause > Duration::from_millis(1) {
                tokio::time::sleep(pause).await;
            } else {
                tokio::task::yield_now().await;
            }
            self.see_valid(claim, guard);
        }
        if !self.job.hold.is_zero() && self.dice.chance(10) {
            let until = Recorder::now() + nanos(self.dice.span(self.job.hold));
            while Recorder::now() < until && self.see_valid(claim, guard) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        drop(inside);
    }

    fn see_valid(&self, claim: u64, guard: &Guard) -> bool {
        let now = Recorder::now();
        let valid = guard.is_valid();
        if valid {
            self.recorder.record_at(now, claim, What::StillValid);
        }
        valid
    }

    /// Gives the lock back in one of the ways there are.
    async fn end(&mut self, claims: &[u64], guard: Guard) {
        let how = if self.dice.chance(30) {
            let valid = guard.is_valid();
            drop(guard);
            if valid { Ended::Dropped } else { Ended::Lost }
        } else {
            match guard.release().await {
                Ok(()) => Ended::Released,
                Err(error) if error.kind() == ErrorKind::Lost => Ended::Lost,
                Err(error) => return claims.iter().for_each(|claim| self.failed(*claim, &error)),
            }
        };
        for claim in claims {
            self.recorder.record(*claim, What::Ended(how));
        }
    }

    /// Waits in line and leaves it again, at any point.
    async fn wait_and_leave(&mut self) {
        let (name, mode) = self.pick();
        let claim = self.asks(&name, mode);
        let label = self.label(claim);
        let ask = Ask { name: &name, mode, ttl: self.job.ttl, label: &label, owner: None };
        let leaves = self.dice.span(Duration::from_millis(10));
        let look = self.dice.chance(50).then(|| leaves / 3);
        let answer = {
            let acquire = self.watched(claim, &name, &label, look, ask.of(&self.client, Patience::Endless));
            let mut acquire = pin!(acquire);
            tokio::select! {
                biased;
                answer = &mut acquire => answer,
                () = tokio::time::sleep(leaves) => {
                    self.recorder.record(claim, What::GaveUp(GaveUp::Cancelled));
                    return;
                }
            }
        };
        match answer {
            Some(Ok(Some(guard))) => {
                self.granted(claim, guard.token().as_u64());
                self.hold(&name, mode, claim, guard).await;
            }
            Some(Err(error)) => self.failed(claim, &error),
            Some(Ok(None)) | None => {}
        }
    }

    /// Two mutexes at once, named in any order.
    async fn hold_several(&mut self) {
        let alone: Vec<String> = self
            .targets
            .iter()
            .filter(|target| target.modes == [Mode::Exclusive])
            .map(|target| target.name.clone())
            .collect();
        let (one, other) = (self.dice.index(alone.len()), self.dice.index(alone.len()));
        if one == other {
            return self.hold_one(Patience::Endless).await;
        }
        let names = [alone[one].as_str(), alone[other].as_str()];
        let claims = names.map(|name| self.asks(name, Mode::Exclusive));
        let mut all = self.client.all(names).ttl(self.job.ttl).label(self.label(claims[0]));
        if self.dice.chance(50) {
            all = all.owner(Owner::random());
        }
        let guard = match self.watched(claims[0], names[0], "", None, all.acquire()).await {
            Some(Ok(guard)) => guard,
            Some(Err(error)) => return self.failed(claims[0], &error),
            None => return,
        };
        for (name, claim) in names.into_iter().zip(claims) {
            self.granted(claim, guard.token_of(name).map_or(0, fencelock::Token::as_u64));
        }
        for (name, claim) in names.into_iter().zip(claims) {
            self.stay(name, Mode::Exclusive, claim, &guard).await;
        }
        self.end(&claims, guard).await;
    }

    /// Enters a hold once more, in both ways, and leaves in any order.
    async fn re_enter(&mut self) {
        let (name, mode) = self.pick();
        let Some((claim, guard)) = self.acquire(&name, mode, Patience::Endless).await else { return };
        let again = match self.enter_again(&name, mode, &guard).await {
            Ok(again) => again,
            Err(error) => {
                if guard.is_valid() {
                    self.failed(claim, &error);
                }
                Vec::new()
            }
        };
        let (first, last) = if self.dice.chance(50) { (again, vec![guard]) } else { (vec![guard], again) };
        drop(first);
        for guard in last {
            self.stay(&name, mode, claim, &guard).await;
            self.end(&[claim], guard).await;
        }
    }

    async fn enter_again(&self, name: &str, mode: Mode, guard: &Guard) -> Result<Vec<Guard>> {
        let ask = Ask { name, mode, ttl: self.job.ttl, label: "again", owner: Some(guard.owner()) };
        let borrowed = ask.of(&self.client, Patience::None).await?;
        if borrowed.as_ref().is_none_or(|borrowed| !borrowed.is_borrowed() || borrowed.token() != guard.token()) {
            return Err(Error::new(ErrorKind::Engine, "a hold could not be re-entered by its owner"));
        }
        drop(borrowed);
        Ok(vec![guard.reenter().await?])
    }

    /// Holds the lock that is taken away now and then, for so many leases, or until it learns of its loss.
    async fn hold_for_long(&mut self, leases: u32) {
        let (name, ttl) = (self.job.evicted(), self.job.ttl);
        let Some((claim, guard)) = self.acquire(&name, Mode::Exclusive, Patience::AtMost(ttl)).await else { return };
        let until = Recorder::now() + nanos(ttl * leases);
        while self.see_valid(claim, &guard) && Recorder::now() < until && !self.job.is_over() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        self.end(&[claim], guard).await;
    }

    /// All processes evict at the same time, so that it is quiet for long enough afterwards to see who believes too long.
    fn may_evict(&mut self) -> bool {
        let round = nanos(self.job.ttl * 5);
        let (number, since) = (Recorder::now() / round, Recorder::now() % round);
        let now = since < round / 20 && number != self.evicted_in;
        if now {
            self.evicted_in = number;
        }
        now
    }

    /// Takes the lock away and holds it.
    async fn evict(&mut self) {
        let (claim, name) = (self.recorder.claim(), self.job.evicted());
        self.recorder.record(claim, What::Evicts { name: name.clone() });
        let evicted = self.client.evict(&name).await;
        self.recorder.record(claim, What::Evicted);
        if let Err(error) = evicted {
            self.failed(claim, &error);
        }
        self.hold_for_long(2).await;
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
