//! The line rule exists more than once: as a pure function, which the memory engine uses, and inside of servers. Random operations
//! by real clients must come out the same on both.

#![allow(clippy::unwrap_used, reason = "a check fails by panicking")]

use crate::ask::{Ask, Patience};
use crate::rng::Rng;
use crate::wait::eventually;
use fencelock::{Client, ErrorKind, Guard, Mode, Result, connect};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;

const LONG: Duration = Duration::from_secs(120);
/// Of those whose lease ends; long enough to look at the line before.
const SHORT: Duration = Duration::from_millis(500);
const MODES: [Mode; 3] = [Mode::Exclusive, Mode::Shared, Mode::Permit { of: 2 }];
const CLIENTS: usize = 3;

/// What is done, on both engines alike. Claims are numbered.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A client waits in line.
    Join { client: usize, claim: u32, mode: Mode },
    /// A client takes the lock if it is free.
    Try { client: usize, claim: u32, mode: Mode },
    /// A claim leaves, whether it holds or waits.
    Leave { claim: u32 },
    /// A holder extends its lease.
    Renew { claim: u32 },
    /// All holders are thrown out.
    Evict,
    /// A client takes the lock if it is free, and is not heard of again until its lease is over.
    Expire { claim: u32, mode: Mode },
}

/// What a step came to.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Busy,
    Failed(ErrorKind),
}

fn outcome<T>(result: Result<T>) -> Outcome {
    result.map_or_else(|error| Outcome::Failed(error.kind()), |_| Outcome::Done)
}

/// A claim that was made and has not left.
enum Claim {
    Waits(JoinHandle<Result<Guard>>),
    Holds(Guard),
}

/// Who holds, in the order of the tokens, and who waits.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    holders: Vec<(String, Mode)>,
    waiters: Vec<(String, Mode)>,
}

/// One engine, its clients and their claims.
struct World {
    url: String,
    clients: Vec<Client>,
    name: String,
    claims: BTreeMap<u32, Claim>,
}

impl World {
    async fn new(url: String, name: String) -> Self {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(connect(&url).await.unwrap());
        }
        Self { url, clients, name, claims: BTreeMap::new() }
    }

    async fn seen(&self) -> Seen {
        let mut status = self.clients[0].status(&self.name).await.unwrap();
        status.holders.sort_by_key(|holder| holder.token);
        Seen {
            holders: status.holders.into_iter().map(|holder| (holder.label, holder.mode)).collect(),
            waiters: status.waiters.into_iter().map(|waiter| (waiter.label, waiter.mode)).collect(),
        }
    }

    async fn is_in_line(&self, claim: u32) -> bool {
        let (seen, label) = (self.seen().await, claim.to_string());
        seen.holders.iter().chain(&seen.waiters).any(|(known, _)| *known == label)
    }

    async fn step(&mut self, step: Step) -> Outcome {
        match step {
            Step::Join { client, claim, mode } => {
                let (client, name) = (self.clients[client].clone(), self.name.clone());
                let task = tokio::spawn(async move {
                    let label = claim.to_string();
                    let ask = Ask { name: &name, mode, ttl: LONG, label: &label, owner: None };
                    ask.of(&client, Patience::Endless).await.map(|guard| guard.expect("it waits"))
                });
                eventually("it is in line", async || task.is_finished() || self.is_in_line(claim).await).await;
                self.claims.insert(claim, Claim::Waits(task));
                Outcome::Done
            }
            Step::Try { client, claim, mode } => {
                let label = claim.to_string();
                let ask = Ask { name: &self.name, mode, ttl: LONG, label: &label, owner: None };
                let taken = ask.of(&self.clients[client], Patience::None).await;
                self.keep(claim, taken)
            }
            Step::Leave { claim } => self.leave(claim).await,
            Step::Renew { claim } => match self.guard(claim).await {
                Some(guard) => outcome(guard.reenter().await),
                None => Outcome::Busy,
            },
            Step::Evict => {
                // Whoever holds it and has not heard of that yet would not be told of a loss, but wait once more.
                for claim in self.claims.keys().copied().collect::<Vec<_>>() {
                    self.guard(claim).await;
                }
                outcome(self.clients[0].evict(&self.name).await)
            }
            Step::Expire { claim, mode } => {
                let taken = self.take_unattended(claim, mode).await;
                self.keep(claim, taken)
            }
        }
    }

    fn keep(&mut self, claim: u32, taken: Result<Option<Guard>>) -> Outcome {
        match taken {
            Ok(Some(guard)) => {
                self.claims.insert(claim, Claim::Holds(guard));
                Outcome::Done
            }
            Ok(None) => Outcome::Busy,
            Err(error) => Outcome::Failed(error.kind()),
        }
    }

    /// The guard of a claim that holds.
    async fn guard(&mut self, claim: u32) -> Option<&Guard> {
        let label = claim.to_string();
        let holds = self.seen().await.holders.iter().any(|(known, _)| *known == label);
        if holds && let Some(Claim::Waits(task)) = self.claims.get_mut(&claim) {
            let guard = task.await.unwrap().unwrap();
            self.claims.insert(claim, Claim::Holds(guard));
        }
        match self.claims.get(&claim) {
            Some(Claim::Holds(guard)) => Some(guard),
            _ => None,
        }
    }

    async fn leave(&mut self, claim: u32) -> Outcome {
        self.guard(claim).await;
        let outcome = match self.claims.remove(&claim) {
            Some(Claim::Holds(guard)) => outcome(guard.release().await),
            Some(Claim::Waits(task)) => {
                task.abort();
                Outcome::Done
            }
            None => Outcome::Busy,
        };
        eventually("it has left", async || !self.is_in_line(claim).await).await;
        outcome
    }

    /// Takes the lock with a client whose keeper does not run any more.
    async fn take_unattended(&self, claim: u32, mode: Mode) -> Result<Option<Guard>> {
        let (url, name) = (self.url.clone(), self.name.clone());
        let take = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = connect(url).await?;
                let ask = Ask { name: &name, mode, ttl: SHORT, label: &claim.to_string(), owner: None };
                ask.of(&client, Patience::None).await
            })
        };
        tokio::task::spawn_blocking(take).await.unwrap()
    }

    /// What an expired holder has left: nothing, but its guard.
    async fn until_expired(&mut self, claim: u32) {
        eventually("its lease is over", async || !self.is_in_line(claim).await).await;
        self.claims.remove(&claim);
    }
}

fn next_step(dice: &mut Rng, claims: &[u32], next: u32) -> Step {
    let (client, mode) = (dice.index(CLIENTS), MODES[dice.index(3)]);
    let claim = if claims.is_empty() { 0 } else { claims[dice.index(claims.len())] };
    match dice.below(100) {
        0..40 => Step::Join { client, claim: next, mode },
        40..55 => Step::Try { client, claim: next, mode },
        55..85 => Step::Leave { claim },
        85..92 => Step::Renew { claim },
        92..97 => Step::Evict,
        _ => Step::Expire { claim: next, mode },
    }
}

/// The same steps on the engine behind this URL and on the memory engine; every now and then the line has run empty, or has grown
/// long.
///
/// # Panics
/// When they do not agree. `FENCELOCK_SEED` repeats the steps.
pub async fn agrees_with_memory(url: &str, rounds: u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = std::env::var("FENCELOCK_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or(u64::try_from(now.as_nanos()).unwrap_or_default());
    println!("FENCELOCK_SEED={seed}");
    let mut dice = Rng::new(seed);
    for round in 0..rounds {
        let mut engine = World::new(url.to_owned(), format!("rule:{round}")).await;
        let mut memory = World::new(format!("memory:rule-{seed}"), format!("rule:{round}")).await;
        let mut story = Vec::new();
        for number in 1..=50 {
            let claims: Vec<u32> = memory.claims.keys().copied().collect();
            let step = next_step(&mut dice, &claims, number);
            story.push(step);
            let (one, other) = tokio::join!(engine.step(step), memory.step(step));
            assert_eq!(one, other, "engine and memory after {story:?}");
            assert_eq!(engine.seen().await, memory.seen().await, "engine and memory after {story:?}");
            if let (Step::Expire { claim, .. }, Outcome::Done) = (step, one) {
                tokio::join!(engine.until_expired(claim), memory.until_expired(claim));
                // Whoever waits looks for itself, on each engine when it thinks best.
                eventually("they agree again", async || engine.seen().await == memory.seen().await).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                assert_eq!(engine.seen().await, memory.seen().await, "engine and memory after {story:?}");
            }
        }
    }
}
