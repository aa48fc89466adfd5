//! Random schedules of the memory engine under a clock that only the test moves: acquire, try, cancel, release, drop, evict,
//! stop a client where it stands, let time pass. After each step the line must be what the rule says, and whoever believes
//! to hold must be allowed to.
//!
//! Each client lives on a runtime of its own, which runs only when the test says so. All clocks are moved together, also
//! that of a client that is stopped: its time passes, its code does not run.
//!
//! A failure prints its seed; `FENCELOCK_SEED=… cargo test -p fencelock --test schedules` repeats it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fencelock::engine::rule;
use fencelock::{Client, Clock, Guard, Mode, Moment, Result, Status};
use fencelock_testkit::ask::{Ask, Patience};
use fencelock_testkit::rng::Rng;
use std::cell::Cell;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::AbortHandle;

const CLIENTS: usize = 4;
const STEPS: usize = 40;
const TTL: Duration = Duration::from_millis(900);
/// The names, and how each is used.
const NAMES: [(&str, &[Mode]); 3] = [
    ("mutex", &[Mode::Exclusive]),
    ("rwlock", &[Mode::Shared, Mode::Shared, Mode::Exclusive]),
    ("semaphore", &[Mode::Permit { of: 2 }]),
];

#[test]
fn random_schedules_keep_every_promise() {
    let stage = Stage::new();
    if let Ok(seed) = std::env::var("FENCELOCK_SEED") {
        return stage.play(seed.parse().expect("FENCELOCK_SEED is a number"), true);
    }
    let (started, mut played) = (Instant::now(), 0);
    let base = u64::from(std::process::id()) << 32;
    while played < 3_000 && started.elapsed() < Duration::from_secs(10) {
        let seed = base + played;
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| stage.play(seed, false)));
        if let Err(panic) = outcome {
            eprintln!("the schedule with FENCELOCK_SEED={seed} failed");
            std::panic::resume_unwind(panic);
        }
        played += 1;
    }
    println!("{played} schedules in {:?}", started.elapsed());
    assert!(played > 200, "only {played} schedules in {:?}", started.elapsed());
}

/// The runtimes, which are used for all schedules.
struct Stage {
    runtimes: Vec<Runtime>,
    rooms: Cell<u64>,
}

impl Stage {
    fn new() -> Self {
        let paused = || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtimes: Vec<Runtime> = (0..CLIENTS).map(|_| paused().unwrap()).collect();
        let stage = Self { runtimes, rooms: Cell::new(0) };
        // Each paused clock began when its runtime was made.
        let latest = (0..CLIENTS).map(|number| stage.now(number)).max().unwrap();
        for number in 0..CLIENTS {
            stage.move_clock(number, latest.since(stage.now(number)));
        }
        stage
    }

    fn now(&self, number: usize) -> Moment {
        let _inside = self.runtimes[number].enter();
        Clock::Tokio.now()
    }

    /// Moves a clock without letting anything run.
    fn move_clock(&self, number: usize, span: Duration) {
        self.runtimes[number].block_on(async {
            let mut advance = std::pin::pin!(tokio::time::advance(span));
            std::future::poll_fn(|context| {
                let _ = advance.as_mut().poll(context);
                std::task::Poll::Ready(())
            })
            .await;
        });
    }

    /// Lets a client do all that it can do now.
    fn let_run(&self, number: usize) {
        self.runtimes[number].block_on(async {
            // Everything that is ready runs, then the timers that are due, then what these woke.
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        });
    }

    fn play(&self, seed: u64, aloud: bool) {
        self.rooms.set(self.rooms.get() + 1);
        let url = format!("memory:schedule-{}", self.rooms.get());
        let mut play = Play::new(self, &url, Rng::new(seed), aloud);
        for _ in 0..STEPS {
            play.step();
            play.check();
        }
        play.finish();
    }
}

/// A claim in a schedule.
struct Claim {
    /// In the order of arrival.
    number: u64,
    label: String,
    client: usize,
    name: usize,
    mode: Mode,
    answer: Arc<Mutex<Option<Result<Option<Guard>>>>>,
    abort: AbortHandle,
    guard: Option<Guard>,
    /// Its client was stopped since it came: it may have slept through its turn.
    slept: bool,
    /// It was taken away from a client that is stopped and cannot know.
    evicted: bool,
}

impl Claim {
    fn token(&self) -> u64 {
        self.guard.as_ref().map_or(0, |guard| guard.token().as_u64())
    }
}

/// Drops the future of an acquire; a grant that had arrived goes away with it.
fn give_up(claim: &Claim) {
    claim.abort.abort();
    drop(claim.answer.lock().unwrap().take());
}

/// One schedule.
struct Play<'a> {
    stage: &'a Stage,
    clients: Vec<Client>,
    stopped: [bool; CLIENTS],
    /// In the order of their arrival.
    waiting: Vec<Claim>,
    holding: Vec<Claim>,
    newest: HashMap<usize, u64>,
    dice: Rng,
    claims: u64,
    aloud: bool,
}

impl<'a> Play<'a> {
    fn new(stage: &'a Stage, url: &str, dice: Rng, aloud: bool) -> Self {
        let connect = |runtime: &Runtime| runtime.block_on(fencelock::connect(url)).unwrap();
        Self {
            clients: stage.runtimes.iter().map(connect).collect(),
            stage,
            stopped: [false; CLIENTS],
            waiting: Vec::new(),
            holding: Vec::new(),
            newest: HashMap::new(),
            dice,
            claims: 0,
            aloud,
        }
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.aloud {
            println!("{}", what());
        }
    }

    fn step(&mut self) {
        match self.dice.below(100) {
            0..30 => self.ask(Patience::Endless),
            30..38 => self.ask(Patience::None),
            38..46 => {
                let span = self.dice.span(TTL);
                self.ask(Patience::AtMost(span));
            }
            46..52 => self.cancel(),
            52..72 => self.end_a_hold(),
            72..75 => self.evict(),
            75..82 => self.stop_or_resume(),
            82..97 => {
                let span = self.dice.span(TTL * 3 / 2);
                self.pass_time(span);
            }
            97 if self.dice.chance(50) => self.crowd(),
            _ => self.re_enter(),
        }
        self.settle();
    }

    /// A client that is not stopped, if the dice finds one.
    fn awake(&mut self) -> Option<usize> {
        let client = self.dice.index(CLIENTS);
        (!self.stopped[client]).then_some(client)
    }

    fn ask(&mut self, patience: Patience) {
        let Some(client) = self.awake() else { return };
        let name = self.dice.index(NAMES.len());
        self.join(client, name, patience);
        // It joins now, before anything else happens: so the order of the list is the order of arrival.
        self.stage.let_run(client);
    }

    fn join(&mut self, client: usize, name: usize, patience: Patience) {
        let mode = NAMES[name].1[self.dice.index(NAMES[name].1.len())];
        self.claims += 1;
        let label = format!("claim {}", self.claims);
        self.say(|| format!("{label}: client {client} asks for {} as {mode}, {patience:?}", NAMES[name].0));
        let answer = Arc::new(Mutex::new(None));
        let task = {
            let (locks, label, answer) = (self.clients[client].clone(), label.clone(), Arc::clone(&answer));
            self.stage.runtimes[client].spawn(async move {
                let ask = Ask { name: NAMES[name].0, mode, ttl: TTL, label: &label, owner: None };
                let outcome = ask.of(&locks, patience).await;
                *answer.lock().unwrap() = Some(outcome);
            })
        };
        let (number, abort) = (self.claims, task.abort_handle());
        let claim =
            Claim { number, label, client, name, mode, answer, abort, guard: None, slept: false, evicted: false };
        self.waiting.push(claim);
    }

    /// Many come and all but the last one leave: a line with more gaps than claims.
    fn crowd(&mut self) {
        let Some(client) = self.awake() else { return };
        let (name, before) = (self.dice.index(NAMES.len()), self.waiting.len());
        (0..150).for_each(|_| self.join(client, name, Patience::Endless));
        (0..10).for_each(|_| self.stage.let_run(client));
        for claim in self.waiting.drain(before..before + 149) {
            give_up(&claim);
        }
        (0..10).for_each(|_| self.stage.let_run(client));
    }

    fn cancel(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let claim = self.waiting.remove(self.dice.index(self.waiting.len()));
        self.say(|| format!("{} is cancelled", claim.label));
        give_up(&claim);
    }

    fn end_a_hold(&mut self) {
        if self.holding.is_empty() {
            return;
        }
        let mut claim = self.holding.remove(self.dice.index(self.holding.len()));
        self.say(|| format!("{} goes", claim.label));
        let Some(guard) = claim.guard.take() else { return };
        if self.stopped[claim.client] || self.dice.chance(30) {
            // Dropped: from outside of its runtime, or by a client that cannot do it yet.
            let _inside = self.stage.runtimes[claim.client].enter();
            drop(guard);
        } else {
            let lost = !self.is_valid(&claim, &guard);
            self.stage.runtimes[claim.client].spawn(async move {
                let released = guard.release().await;
                assert!(released.is_ok() || lost, "{released:?}");
            });
        }
    }

    fn evict(&mut self) {
        let Some(client) = self.awake() else { return };
        let name = self.dice.index(NAMES.len());
        self.say(|| format!("client {client} evicts the holders of {}", NAMES[name].0));
        let evicted = self.stage.runtimes[client].block_on(self.clients[client].evict(NAMES[name].0)).unwrap();
        let stopped = self.stopped;
        let victims = self.holding.iter_mut().filter(|claim| claim.name == name && evicted > 0);
        victims.filter(|claim| stopped[claim.client]).for_each(|claim| claim.evicted = true);
        // A waiter that is stopped may have been granted, and lost, without knowing of either.
        let sleepers = self.waiting.iter_mut().filter(|claim| claim.name == name && stopped[claim.client]);
        sleepers.for_each(|claim| claim.evicted = true);
    }

    fn stop_or_resume(&mut self) {
        let client = self.dice.index(CLIENTS);
        self.stopped[client] = !self.stopped[client];
        self.say(|| format!("client {client} is {}", if self.stopped[client] { "stopped" } else { "resumed" }));
        let slept = self.waiting.iter_mut().chain(&mut self.holding).filter(|claim| claim.client == client);
        slept.for_each(|claim| claim.slept = true);
    }

    fn pass_time(&mut self, span: Duration) {
        self.say(|| format!("{span:?} pass"));
        // In steps that are small against the lease, as time passes for code that runs.
        let mut left = span;
        while !left.is_zero() {
            let step = left.min(TTL / 6);
            (0..CLIENTS).for_each(|number| self.stage.move_clock(number, step));
            self.let_all_run(1);
            left -= step;
        }
    }

    fn re_enter(&mut self) {
        if self.holding.is_empty() {
            return;
        }
        let claim = self.dice.index(self.holding.len());
        let claim = &mut self.holding[claim];
        let Some(guard) = claim.guard.take() else { return };
        if self.stopped[claim.client] {
            claim.guard = Some(guard);
            return;
        }
        let again = self.stage.runtimes[claim.client].block_on(guard.reenter());
        if let Ok(again) = again {
            assert_eq!(again.token(), guard.token());
            let _inside = self.stage.runtimes[claim.client].enter();
            drop(guard);
            claim.guard = Some(again);
        } else {
            claim.guard = Some(guard);
        }
    }

    /// Lets everybody run who is not stopped; several times, since one wakes another.
    fn let_all_run(&self, rounds: usize) {
        for _ in 0..rounds {
            (0..CLIENTS).filter(|number| !self.stopped[*number]).for_each(|number| self.stage.let_run(number));
        }
    }

    fn is_valid(&self, claim: &Claim, guard: &Guard) -> bool {
        let _inside = self.stage.runtimes[claim.client].enter();
        guard.is_valid()
    }

    /// Lets everything happen that is under way, and takes note of who holds now.
    fn settle(&mut self) {
        self.let_all_run(4);
        let mut granted = Vec::new();
        for mut claim in std::mem::take(&mut self.waiting) {
            let answer = claim.answer.lock().unwrap().take();
            match answer {
                None => self.waiting.push(claim),
                Some(Ok(Some(guard))) => {
                    claim.guard = Some(guard);
                    granted.push(claim);
                }
                Some(Ok(None)) => self.say(|| format!("{}: busy", claim.label)),
                Some(Err(error)) => assert_eq!(error.kind(), fencelock::ErrorKind::Timeout, "{error}"),
            }
        }
        // In the order in which the engine granted them, the last one first.
        granted.sort_by_key(|claim| std::cmp::Reverse(claim.token()));
        while let Some(claim) = granted.pop() {
            self.granted(claim, &granted);
        }
    }

    fn granted(&mut self, claim: Claim, later: &[Claim]) {
        self.say(|| format!("{} is granted token {}", claim.label, claim.token()));
        let mut others = self.waiting.iter().chain(later).filter(|other| other.name == claim.name && !other.slept);
        if let Some(overtaken) = others.find(|other| other.number < claim.number) {
            panic!("{} overtook {}", claim.label, overtaken.label);
        }
        // What was granted to a client that slept is seen late.
        let newest = self.newest.entry(claim.name).or_default();
        assert!(claim.slept || claim.token() > *newest, "{}: token {} after {newest}", claim.label, claim.token());
        *newest = claim.token().max(*newest);
        self.holding.push(claim);
    }

    fn check(&mut self) {
        for name in 0..NAMES.len() {
            self.believers_are_allowed(name);
        }
        if let Some(observer) = self.stopped.iter().position(|stopped| !stopped) {
            for name in 0..NAMES.len() {
                let status = self.status(observer, name);
                self.the_line_follows_the_rule(name, &status);
            }
        }
        // Whoever lost its lock is of no interest any more.
        let stage = self.stage;
        self.holding.retain(|claim| {
            let _inside = stage.runtimes[claim.client].enter();
            claim.guard.as_ref().is_some_and(Guard::is_valid)
        });
    }

    fn status(&self, observer: usize, name: usize) -> Status {
        self.stage.runtimes[observer].block_on(self.clients[observer].status(NAMES[name].0)).unwrap()
    }

    /// At every moment those whose guards say that they are valid may hold together, whoever sleeps.
    fn believers_are_allowed(&self, name: usize) {
        let believes = |claim: &&Claim| {
            let guard = claim.guard.as_ref().unwrap();
            claim.name == name && !claim.evicted && self.is_valid(claim, guard)
        };
        let believers: Vec<&Claim> = self.holding.iter().filter(believes).collect();
        let modes: Vec<Mode> = believers.iter().map(|claim| claim.mode).collect();
        let labels: Vec<&str> = believers.iter().map(|claim| claim.label.as_str()).collect();
        assert_eq!(rule::holders(&modes), modes.len(), "they all believe to hold {}: {labels:?}", NAMES[name].0);
    }

    /// While nobody sleeps, the line is exactly what the rule says, and exactly those hold who believe to.
    fn the_line_follows_the_rule(&self, name: usize, status: &Status) {
        let modes: Vec<Mode> = status
            .holders
            .iter()
            .map(|holder| holder.mode)
            .chain(status.waiters.iter().map(|waiter| waiter.mode))
            .collect();
        assert!(status.holders.len() <= rule::holders(&modes), "too many hold: {status:#?}");
        let in_use = |claim: &&Claim| claim.name == name && (self.stopped[claim.client] || claim.slept);
        if self.stopped.contains(&true) || self.waiting.iter().chain(&self.holding).any(|claim| in_use(&claim)) {
            return;
        }
        assert_eq!(status.holders.len(), rule::holders(&modes), "not all hold who may: {status:#?}");
        let labels: Vec<&str> = status.waiters.iter().map(|waiter| waiter.label.as_str()).collect();
        let waiting = self.waiting.iter().filter(|claim| claim.name == name).map(|claim| claim.label.as_str());
        assert!(waiting.eq(labels.iter().copied()), "the line is not in the order of arrival: {status:#?}");
        let valid = |claim: &&Claim| claim.name == name && self.is_valid(claim, claim.guard.as_ref().unwrap());
        let believers = self.holding.iter().filter(valid).count();
        assert_eq!(status.holders.len(), believers, "the engine and the guards disagree: {status:#?}");
    }

    /// Everybody wakes, everybody goes: nothing is left.
    fn finish(mut self) {
        self.stopped = [false; CLIENTS];
        self.pass_time(TTL * 3 / 2);
        self.settle();
        self.waiting.drain(..).for_each(|claim| give_up(&claim));
        for mut claim in self.holding.drain(..) {
            let _inside = self.stage.runtimes[claim.client].enter();
            claim.guard.take();
        }
        self.let_all_run(4);
        let left = self.stage.runtimes[0].block_on(self.clients[0].list("")).unwrap();
        assert!(left.is_empty(), "not free at the end: {left:#?}");
    }
}
