//! Hammers an engine and tells whether it kept its promises.
//!
//! Many workers, in many processes where the engine serves processes, do random things with few locks. All that happens
//! is recorded and checked afterwards; besides, whoever holds a lock enters a room that the kernel guards, and must find
//! it empty, so that nothing depends on the recorded times alone.

mod job;
mod processes;
mod room;
mod verdict;
mod worker;

pub use verdict::Verdict;

use crate::history::{self, Kind, Recorder, Violation};
use fencelock::{Client, Error, ErrorKind, Owner, Result, connect};
use futures_util::future::{BoxFuture, join_all};
use job::Job;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Connects a client to the engine behind a URL.
pub type Connect = Arc<dyn Fn(String) -> BoxFuture<'static, Result<Client>> + Send + Sync>;

/// Connects as everybody does.
pub fn by_url() -> Connect {
    Arc::new(|url| Box::pin(async move { connect(&url).await }))
}

/// Everybody uses clones of this client: for an engine that no other client sees.
pub fn by_client(client: Client) -> Connect {
    Arc::new(move |_| {
        let client = client.clone();
        Box::pin(async move { Ok(client) })
    })
}

/// What is to be done.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// The engine.
    pub url: String,
    /// How long.
    pub lasts: Duration,
    /// How many processes; for an engine that serves one process, how many clients.
    pub processes: u32,
    /// How many workers in each of them.
    pub workers: u32,
    /// How many locks.
    pub names: u32,
    /// The lease.
    pub ttl: Duration,
    /// How long one in ten holders stays at most, besides what all have to do.
    pub hold: Duration,
    /// Whether processes are killed and started again.
    pub kill: bool,
    /// How long a claim may wait before that counts as in vain.
    pub patience: Duration,
    /// What the faults that are done to the engine meanwhile cannot spare its users: told, but no broken promise.
    pub excuse: fn(&Violation) -> bool,
    /// Where chance begins. Timing has a say as well, so a seed repeats what is tried, not what happens.
    pub seed: u64,
}

impl Plan {
    /// A plan for this engine, of ten seconds.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            lasts: Duration::from_secs(10),
            processes: 4,
            workers: 8,
            names: 6,
            ttl: Duration::from_secs(3),
            hold: Duration::ZERO,
            kill: false,
            patience: Duration::from_secs(20),
            excuse: |_| false,
            seed: Recorder::now(),
        }
    }
}

/// Where the workers run.
#[derive(Clone)]
pub enum Workers {
    /// In this process, connected like this.
    Here(Connect),
    /// In processes that this command starts; it must call [`work`].
    Processes(Vec<OsString>),
}

/// How far a torture has come.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Progress {
    /// How long it has been going on.
    pub elapsed: Duration,
    /// How many claims were granted.
    pub grants: u64,
    /// How many processes were killed.
    pub kills: u64,
}

/// What the coordinator and its processes count.
#[derive(Debug, Default)]
struct Counters {
    grants: AtomicU64,
    kills: AtomicU64,
}

/// Carries out a plan. It ends by itself, whatever the engine does.
///
/// # Errors
/// When the engine cannot be reached or the workers cannot be started. Broken promises are in the verdict.
pub async fn run(plan: &Plan, workers: Workers, mut progress: impl FnMut(Progress)) -> Result<Verdict> {
    let dir = tempfile::Builder::new().prefix("fencelock-torture-").tempdir().map_err(local)?;
    let watcher = match &workers {
        Workers::Here(connect) => connect(plan.url.clone()).await?,
        Workers::Processes(_) => connect(&plan.url).await?,
    };
    let mut job = Job::new(plan, dir.path(), &format!("torture:{}:", Owner::random().short()));
    let capability = watcher.capability();
    job.offered = (capability.shared, capability.permits);
    let counters = Arc::new(Counters::default());
    let started = Instant::now();
    let mut violations = {
        let work = start(plan, &job, workers, &counters);
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                outcome = &mut work => break outcome.map_err(local)?,
                () = tokio::time::sleep(Duration::from_millis(250)) => {}
            }
            let (grants, kills) = (counters.grants.load(Ordering::Relaxed), counters.kills.load(Ordering::Relaxed));
            progress(Progress { elapsed: started.elapsed(), grants, kills });
        }
    };
    violations.extend(leftovers(&watcher, &job, plan).await?);
    let mut report = read(dir.path()).await.map_err(local)?;
    if !capability.ordered {
        report.violations.retain(|violation| violation.kind != Kind::Order);
    }
    watcher.close().await?;
    Ok(Verdict::new(plan, report, violations, counters.kills.load(Ordering::Relaxed), &watcher))
}

async fn start(plan: &Plan, job: &Job, workers: Workers, counters: &Arc<Counters>) -> io::Result<Vec<Violation>> {
    match workers {
        Workers::Here(connect) => work_here(plan, job, &connect, counters).await,
        Workers::Processes(command) => processes::run(plan, job, &command, counters).await,
    }
}

async fn work_here(plan: &Plan, job: &Job, connect: &Connect, counters: &Arc<Counters>) -> io::Result<Vec<Violation>> {
    let jobs = (0..plan.processes).map(|process| job.of_process(u64::from(process) + 1));
    let work = jobs.map(|job| tokio::spawn(worker::run(job, Arc::clone(connect), Arc::clone(counters))));
    let limit = plan.lasts + plan.patience * 2;
    let Ok(outcomes) = tokio::time::timeout(limit, join_all(work)).await else {
        return Ok(vec![hung(limit)]);
    };
    let mut violations = Vec::new();
    for outcome in outcomes {
        if let Err(error) = outcome.map_err(io::Error::other).and_then(|done| done) {
            violations.push(failed(&error.to_string()));
        }
    }
    Ok(violations)
}

fn hung(limit: Duration) -> Violation {
    let detail = format!("the workers did not come to an end within {limit:?}");
    Violation { kind: Kind::Stuck, name: "torture".to_owned(), detail }
}

fn failed(detail: &str) -> Violation {
    Violation { kind: Kind::Failed, name: "torture".to_owned(), detail: detail.to_owned() }
}

/// Nobody is left: every lock must be free, at once or when the leases of killed processes have ended.
async fn leftovers(watcher: &Client, job: &Job, plan: &Plan) -> Result<Vec<Violation>> {
    let lease = if watcher.capability().instant_death { Duration::ZERO } else { plan.ttl };
    let until = Instant::now() + lease + Duration::from_secs(3);
    loop {
        let left = watcher.list(&job.prefix).await?;
        if left.is_empty() || Instant::now() > until {
            let kind = Kind::Leftover;
            let violation = |status: fencelock::Status| {
                let detail = format!("{} hold and {} wait", status.holders.len(), status.waiters.len());
                Violation { kind, name: status.name, detail }
            };
            return Ok(left.into_iter().map(violation).collect());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A long history is read and checked on a thread of its own.
async fn read(dir: &Path) -> io::Result<history::Report> {
    let dir = dir.to_owned();
    let checked = tokio::task::spawn_blocking(move || history::load(&dir).map(|events| history::check(&events)));
    checked.await.map_err(io::Error::other)?
}

/// The work of one process of a torture: takes its job from standard input, and ends early when that is closed.
///
/// # Errors
/// When there is no job, or the engine cannot be reached.
pub async fn work(connect: Connect) -> Result<()> {
    processes::work(connect).await.map_err(local)
}

fn local(error: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "the torture cannot be carried out on this machine")
        .during("torture")
        .caused_by(error)
}
