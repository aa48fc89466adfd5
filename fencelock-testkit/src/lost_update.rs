//! The lost-update experiment: writers that add one to a number under a lock, while whoever holds the lock is stopped, past its lease, at
//! random moments. Without a fence, a writer that wakes up writes what it computed long ago, and all that others did meanwhile is gone.
//!
//! Every writer is a process of its own ([`work`]), so that SIGSTOP hits it wherever it is. The count of acknowledged updates and the number
//! in the end tell how many were lost.

mod resource;

pub use resource::{Held, Resource};

use crate::probe;
use crate::rng::Rng;
use fencelock::{Client, ErrorKind, connect};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{self, BufRead};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The lock that all writers take.
const LOCK: &str = "the number";
/// The shortest lease there is: what is waited for is its end.
const TTL: Duration = Duration::from_millis(100);
/// How long a writer computes between reading and writing, at most.
const WORK: Duration = Duration::from_millis(4);

/// What is tried.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Where the number is; see [`Resource::open`].
    pub resource: String,
    /// Where the locks are.
    pub locks: String,
    /// With the fence, or as people do it without.
    pub fenced: bool,
    /// How many writers.
    pub writers: u32,
    /// For how long they write.
    pub lasts: Duration,
    /// What chooses the moments.
    pub seed: u64,
}

impl Plan {
    /// 20 writers of this number. `FENCELOCK_LOST_UPDATE_SECONDS` says how long; 3 s if it does not.
    pub fn new(resource: impl Into<String>, locks: impl Into<String>, fenced: bool) -> Self {
        let seconds = std::env::var("FENCELOCK_LOST_UPDATE_SECONDS").ok().and_then(|text| text.parse().ok());
        let lasts = Duration::from_secs(seconds.unwrap_or(3));
        Self { resource: resource.into(), locks: locks.into(), fenced, writers: 20, lasts, seed: 1 }
    }
}

/// What one writer did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Updates that the resource acknowledged.
    pub done: u64,
    /// Updates that it refused, because of an older token.
    pub refused: u64,
    /// Updates of which the writer cannot know.
    pub unknown: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// All writers' updates.
    pub tally: Tally,
    /// The number in the end.
    pub number: u64,
    /// How often a holder was stopped past its lease.
    pub stops: u64,
}

impl Outcome {
    /// How many acknowledged updates are not in the number.
    pub fn lost(&self) -> u64 {
        self.tally.done.saturating_sub(self.number)
    }

    /// Their share of all.
    #[expect(clippy::cast_precision_loss, reason = "counts of seconds' work fit")]
    pub fn share(&self) -> f64 {
        self.lost() as f64 / self.tally.done.max(1) as f64
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tally { done, refused, unknown } = self.tally;
        write!(
            f,
            "{done} updates acknowledged, {} lost ({:.1} %); {refused} refused, {unknown} unknown; holders stopped {} times",
            self.lost(),
            100.0 * self.share(),
            self.stops
        )
    }
}

/// Runs the writers, and stops holders among them.
///
/// # Panics
/// When a writer or the engine fails: then nothing can be said.
pub async fn run(plan: &Plan) -> Outcome {
    Resource::open(&plan.resource).await.reset().await;
    let binary = probe::path().await;
    let locks = connect(&plan.locks).await.expect("the lock engine can be used");
    let mut writers: HashMap<u32, Child> = (0..plan.writers).map(|number| start(binary, plan, number)).collect();
    let stops = stop_holders(plan, &locks, &mut writers).await;
    let mut tally = Tally::default();
    for (_, writer) in writers {
        let output = tokio::task::spawn_blocking(|| writer.wait_with_output()).await;
        let output = output.expect("waiting does not panic").expect("a writer can be waited for");
        assert!(output.status.success(), "a writer ended with {}", output.status);
        let own: Tally = serde_json::from_slice(&output.stdout).expect("a writer tells what it did");
        tally.done += own.done;
        tally.refused += own.refused;
        tally.unknown += own.unknown;
    }
    let number = Resource::open(&plan.resource).await.number().await;
    let _ = locks.close().await;
    Outcome { tally, number, stops }
}

fn start(binary: &Path, plan: &Plan, number: u32) -> (u32, Child) {
    let mut own = plan.clone();
    own.seed = plan.seed.wrapping_mul(1_000).wrapping_add(number.into());
    let mut child = Command::new(binary)
        .arg("lost-update-writer")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a writer can be started");
    let stdin = child.stdin.take().expect("a pipe");
    serde_json::to_writer(stdin, &own).expect("a writer takes its plan");
    (child.id(), child)
}

/// Stops whoever holds the lock, for longer than its lease, again and again.
async fn stop_holders(plan: &Plan, locks: &Client, writers: &mut HashMap<u32, Child>) -> u64 {
    let mut dice = Rng::new(plan.seed);
    let until = Instant::now() + plan.lasts;
    let mut stops = 0;
    while Instant::now() < until {
        tokio::time::sleep(dice.span(Duration::from_millis(30))).await;
        let Ok(status) = locks.status(LOCK).await else { continue };
        // The label ends with the process id.
        let holder = status.holders.first().and_then(|holder| holder.label.rsplit(':').next()?.parse::<u32>().ok());
        let Some(holder) = holder.and_then(|id| writers.get_mut(&id)) else { continue };
        if holder.try_wait().is_ok_and(|ended| ended.is_some()) {
            continue;
        }
        let holder = Pid::from_child(holder);
        let _paused = Paused::new(holder);
        tokio::time::sleep(TTL + TTL / 2 + dice.span(TTL)).await;
        stops += 1;
    }
    stops
}

/// A process that is stopped until this is dropped, also by a panic: a writer that sleeps would never end.
struct Paused(Pid);

impl Paused {
    fn new(process: Pid) -> Self {
        let _ = kill_process(process, Signal::STOP);
        Self(process)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// The inside of a writer process: takes its plan from standard input, and prints its [`Tally`].
///
/// # Panics
/// When something fails that the experiment does not foresee.
pub async fn work() {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).expect("the plan can be read");
    let plan: Plan = serde_json::from_str(&line).expect("a plan");
    let mut dice = Rng::new(plan.seed);
    let mut resource = Resource::open(&plan.resource).await;
    let locks = connect(&plan.locks).await.expect("the lock engine can be used");
    let mutex = locks.mutex(LOCK).ttl(TTL).label(format!("writer:{}", std::process::id()));
    let until = Instant::now() + plan.lasts;
    let mut tally = Tally::default();
    while Instant::now() < until {
        let guard = match mutex.acquire_timeout(Duration::from_secs(5)).await {
            Ok(guard) => guard,
            Err(error) if [ErrorKind::Timeout, ErrorKind::Lost].contains(&error.kind()) => continue,
            Err(error) => panic!("cannot acquire: {error}"),
        };
        // As the recipe goes: whoever has the lock reads, computes and writes. That it was lost meanwhile, nobody looks at.
        let held = plan.fenced.then(|| Held { token: guard.token() });
        match update(&mut resource, held, dice.span(WORK)).await {
            Ok(()) => tally.done += 1,
            Err(error) if error.kind() == ErrorKind::Fenced => tally.refused += 1,
            Err(error) if error.kind() == ErrorKind::Ambiguous => tally.unknown += 1,
            Err(error) => panic!("cannot write: {error}"),
        }
        let _ = guard.release().await;
    }
    let _ = locks.close().await;
    println!("{}", serde_json::to_string(&tally).expect("a tally is plain data"));
}

async fn update(resource: &mut Resource, held: Option<Held>, work: Duration) -> fencelock::Result<()> {
    let number = resource.read(held).await?;
    tokio::time::sleep(work).await;
    resource.write(held, number + 1).await
}
