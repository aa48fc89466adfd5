//! `fencelock run`: stands in line, runs the command under the lock, gives the lock back.

use crate::args::{OnLost, Run};
use crate::command::{self, environment};
use crate::console::Console;
use crate::exit::{BUSY, Exit, Failure, LOST};
use crate::hold::{Holding, Patience, Wanted, outer_owner, ttl_of, url_for_others};
use crate::line::{View, stand};
use crate::signals::Signals;
use crate::terminal;
use crate::text::span;
use crate::under::{Duty, Ended};
use fencelock::{Client, DEFAULT_TTL, ErrorKind};
use signal_hook::consts::signal::SIGINT;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// How long the engine may take to confirm a release.
const GOODBYE: Duration = Duration::from_secs(5);
/// How long it may take to hear our good-bye, when nothing is held any more.
const FAREWELL: Duration = Duration::from_secs(1);

pub(crate) async fn run(url: &str, run: &Run) -> Result<Exit, Failure> {
    run.check()?;
    let ttl = run.lease.ttl.or_else(|| ttl_of(url)).unwrap_or(DEFAULT_TTL);
    let grace = run.lease.grace(ttl)?;
    command::check(&run.command)?;
    let console = Console::new(run.volume.quiet, run.volume.verbose);
    let mut signals = Signals::listen()?;
    let client = match connect(url, &mut signals).await? {
        Ok(client) => client,
        Err(exit) => return Ok(exit),
    };
    let job = Job { client: &client, url, run, ttl, grace, console: &console };
    let outcome = job.run(&mut signals).await;
    close(&client).await;
    outcome
}

/// Connects, unless a signal comes first.
pub(crate) async fn connect(url: &str, signals: &mut Signals) -> Result<Result<Client, Exit>, Failure> {
    tokio::select! {
        client = reach(url) => Ok(Ok(client?)),
        signal = signals.ending() => Ok(Err(ended_by(signal))),
    }
}

/// Leaves nothing behind at the engine: what is still on its way out is waited for.
pub(crate) async fn close(client: &Client) {
    if !matches!(timeout(FAREWELL, client.close()).await, Ok(Ok(()))) {
        tracing::warn!("the engine did not confirm the good-bye; what is left there goes with its lease");
    }
}

/// The exit for a signal that ended the tool itself.
pub(crate) fn ended_by(signal: i32) -> Exit {
    if signal == SIGINT && terminal::is_foreground() { Exit::Interrupted } else { Exit::by_signal(signal) }
}

struct Job<'a> {
    client: &'a Client,
    url: &'a str,
    run: &'a Run,
    ttl: Duration,
    grace: Duration,
    console: &'a Console,
}

impl Job<'_> {
    async fn run(&self, signals: &mut Signals) -> Result<Exit, Failure> {
        let started = Instant::now();
        let holding = match self.acquire(signals).await? {
            Ok(holding) => holding,
            Err(exit) => return Ok(exit),
        };
        let how = if holding.is_borrowed() { "re-entered" } else { "acquired" };
        let (name, token) = (holding.name(), holding.token());
        self.console.note(&format!("{how} {name:?} after {}, token {token}", span(started.elapsed())));
        if let Err(error) = holding.last(self.grace).await {
            let _ = release(holding, true, self.console).await;
            return Err(error.into());
        }
        let url = url_for_others(self.client, self.url);
        let duty = Duty {
            command: &self.run.command,
            environment: environment(&holding, &url),
            on_lost: self.run.on_lost,
            ttl: self.ttl,
            grace: self.grace,
        };
        let mut ended = match duty.run(&holding, signals, self.console).await {
            Ok(ended) => ended,
            Err(failure) => {
                // It never ran: nobody should wait because of it.
                let _ = release(holding, true, self.console).await;
                return Err(failure);
            }
        };
        if !(ended.lost || ended.asked_to_end || ended.interrupted) {
            self.keep(&holding, signals).await;
        }
        let held = holding.since.elapsed();
        ended.lost |= !release(holding, ended.lost, self.console).await;
        self.console.note(&format!("held {:?} for {}", self.run.name, span(held)));
        Ok(self.exit(ended))
    }

    /// Stands in line. The inner error is not a failure: a signal came, or the lock is busy.
    async fn acquire(&self, signals: &mut Signals) -> Result<Result<Holding, Exit>, Failure> {
        let label = command::label(&self.run.command);
        let names: Vec<&str> = std::iter::once(&self.run.name).chain(&self.run.also).map(String::as_str).collect();
        let mut outer = Vec::new();
        for name in &names {
            outer.push(outer_owner(self.client, self.url, name).await?);
        }
        let names_and_owners = names.iter().copied().zip(outer).collect();
        let view = View { client: self.client, names, label: &label, console: self.console };
        let wanted = Wanted {
            client: self.client,
            run: self.run,
            ttl: self.ttl,
            label: &label,
            names: names_and_owners,
            patience: Patience::of(self.run),
        };
        let answer = match stand(wanted.acquire(), &view, signals).await {
            Ok(answer) => answer,
            Err(signal) => return Ok(Err(ended_by(signal))),
        };
        match answer {
            Ok(Some(holding)) => return Ok(Ok(holding)),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            Err(error) => return Err(error.into()),
        }
        let obstacle = view.last_obstacle().await;
        self.console.say(&match wanted.patience {
            Patience::AtMost(given) => format!("not acquired within {}: {obstacle}", span(given)),
            _ => format!("{obstacle}; to wait for it, leave out -n or use -w"),
        });
        Ok(Err(Exit::Code(BUSY)))
    }

    /// `--min-hold`: waits until the lock was held for long enough, or a signal ends that.
    async fn keep(&self, holding: &Holding, signals: &mut Signals) {
        let left = self.run.min_hold.unwrap_or_default().saturating_sub(holding.since.elapsed());
        if left.is_zero() {
            return;
        }
        self.console.note(&format!("keeping {:?} for another {}", self.run.name, span(left)));
        tokio::select! {
            () = tokio::time::sleep(left) => {}
            _ = signals.ending() => {}
            _ = holding.lost() => {}
        }
    }

    fn exit(&self, ended: Ended) -> Exit {
        let own_failure = self.run.on_lost == OnLost::Warn && !ended.status.is_success();
        if ended.lost && !own_failure {
            return Exit::Code(LOST);
        }
        if ended.interrupted { Exit::Interrupted } else { ended.status.exit() }
    }
}

/// Gives the lock back. False if it was not ours any more, which is said unless it is known.
pub(crate) async fn release(holding: Holding, known_lost: bool, console: &Console) -> bool {
    let name = holding.name().to_owned();
    let patience = if known_lost { FAREWELL } else { GOODBYE };
    let (ours, trouble) = match timeout(patience, holding.release()).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) if error.kind() == ErrorKind::Lost => (false, error.to_string()),
        Ok(Err(error)) => (true, format!("{error}; it is free when its lease ends")),
        Err(_) => (true, format!("the release of {name:?} was not confirmed in time; it is free when its lease ends")),
    };
    if !known_lost {
        console.warn(&trouble);
    }
    ours
}

/// Connects to an engine that other processes see: a lock that only this one sees would keep nobody apart.
pub(crate) async fn reach(url: &str) -> Result<Client, Failure> {
    let client = fencelock::connect(url).await?;
    let capability = client.capability();
    if !capability.processes {
        return Err(Failure::usage(format!(
            "{}: is seen by one process only, so it cannot keep two commands apart; use file:/path",
            capability.engine
        )));
    }
    Ok(client)
}
