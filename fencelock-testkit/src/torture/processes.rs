//! The processes of a torture: started, killed now and then, started again, and in the end waited for.

use super::job::Job;
use super::{Connect, Counters, Plan, failed, hung, worker};
use crate::history::{Recorder, Violation, What};
use crate::rng::Rng;
use futures_util::future::try_join_all;
use std::ffi::OsString;
use std::io::{self, BufRead, Read, Write};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::Instant;

/// Runs the processes until the plan's time is over.
pub(super) async fn run(
    plan: &Plan,
    job: &Job,
    command: &[OsString],
    counters: &Arc<Counters>,
) -> io::Result<Vec<Violation>> {
    let numbers = AtomicU64::new(1);
    let recorder = Recorder::in_dir(&job.dir, 0)?;
    let limit = Instant::now() + plan.lasts + plan.patience * 2;
    let seats = (0..plan.processes).map(|seat| {
        let dice = Rng::new(plan.seed ^ u64::from(seat));
        Seat { plan, job, command, counters, numbers: &numbers, recorder: &recorder, dice, limit }.run()
    });
    let outcomes = try_join_all(seats).await?;
    Ok(outcomes.into_iter().flatten().collect())
}

/// The place of one process, which is another one after each kill.
struct Seat<'a> {
    plan: &'a Plan,
    job: &'a Job,
    command: &'a [OsString],
    counters: &'a Arc<Counters>,
    /// Gives every process a number of its own.
    numbers: &'a AtomicU64,
    /// Writes down who was killed when.
    recorder: &'a Recorder,
    dice: Rng,
    /// When the process must have ended by itself.
    limit: Instant,
}

impl Seat<'_> {
    async fn run(mut self) -> io::Result<Option<Violation>> {
        loop {
            let job = self.job.of_process(self.numbers.fetch_add(1, Ordering::Relaxed));
            // Waiting for a child closes its input if that is still its own, and a worker ends with its input.
            let (mut child, _input) = start(self.command, &job, self.counters).await?;
            let lives = Duration::from_millis(100) + self.dice.span(Duration::from_millis(900));
            tokio::select! {
                status = child.wait() => return status.map(judge),
                () = tokio::time::sleep(lives), if self.plan.kill && !self.job.is_over() => {
                    let since = Recorder::now();
                    child.kill().await?;
                    self.recorder.record(0, What::Killed { process: job.process, since });
                    self.counters.kills.fetch_add(1, Ordering::Relaxed);
                }
                () = tokio::time::sleep_until(self.limit) => {
                    child.kill().await?;
                    return Ok(Some(hung(self.plan.lasts + self.plan.patience * 2)));
                }
            }
            if self.job.is_over() {
                return Ok(None);
            }
        }
    }
}

fn judge(status: ExitStatus) -> Option<Violation> {
    (!status.success()).then(|| failed(&format!("a worker process ended with {status}")))
}

async fn start(command: &[OsString], job: &Job, counters: &Arc<Counters>) -> io::Result<(Child, ChildStdin)> {
    let (program, arguments) = command.split_first().ok_or_else(|| io::Error::other("no command for the workers"))?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut line = serde_json::to_vec(job)?;
    line.push(b'\n');
    let pipes = child.stdin.take().zip(child.stdout.take());
    let (mut stdin, stdout) = pipes.ok_or_else(|| io::Error::other("a worker has no pipes"))?;
    stdin.write_all(&line).await?;
    tokio::spawn(count(stdout, Arc::clone(counters)));
    Ok((child, stdin))
}

/// A worker process prints, every now and then, how many grants there were since the last time.
async fn count(stdout: ChildStdout, counters: Arc<Counters>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        counters.grants.fetch_add(line.parse().unwrap_or(0), Ordering::Relaxed);
    }
}

/// The inside of a worker process.
pub(super) async fn work(connect: Connect) -> io::Result<()> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let job: Job = serde_json::from_str(&line)?;
    end_with_the_coordinator();
    let counters = Arc::new(Counters::default());
    let tell = tokio::spawn(tell(Arc::clone(&counters)));
    let outcome = worker::run(job, connect, counters).await;
    tell.abort();
    outcome
}

async fn tell(counters: Arc<Counters>) {
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let _ = writeln!(io::stdout(), "{}", counters.grants.swap(0, Ordering::Relaxed));
    }
}

/// Nobody is left to read the history when standard input is closed.
fn end_with_the_coordinator() {
    std::thread::spawn(|| {
        let _ = io::stdin().lock().read_to_end(&mut Vec::new());
        std::process::exit(2);
    });
}
