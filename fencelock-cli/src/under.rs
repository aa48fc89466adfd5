//! A command under a lock: forwards signals, lends the terminal, and sees to it that the command does not outlive the lock.
//!
//! The supervisor does the stopping; here is what tells it how long the lease lasts, and that the lock was lost.

use crate::args::OnLost;
use crate::console::Console;
use crate::exit::{Failure, Status};
use crate::hold::Holding;
use crate::protocol::{Order, Report, Setup};
use crate::signals::{Signals, is_ending};
use crate::supervised::Supervised;
use crate::terminal::{self, Loan};
use crate::text::span;
use fencelock::{Clock, Moment};
use rustix::process::{Signal, kill_current_process_group};
use signal_hook::consts::signal::{SIGCONT, SIGINT, SIGKILL, SIGTSTP, SIGTTIN, SIGTTOU};
use std::ffi::OsString;
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

/// How long beyond its own limits the supervisor is trusted.
const TRUST: Duration = Duration::from_secs(3);

/// What is to be run, and how it is to be stopped.
pub(crate) struct Duty<'a> {
    pub(crate) command: &'a [OsString],
    pub(crate) environment: Vec<(&'static str, OsString)>,
    pub(crate) on_lost: OnLost,
    pub(crate) ttl: Duration,
    pub(crate) grace: Duration,
}

/// How it went.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    pub(crate) status: Status,
    /// The lock was lost, or nearly, while the command ran.
    pub(crate) lost: bool,
    /// We were asked to end (SIGTERM and the like).
    pub(crate) asked_to_end: bool,
    /// The command was ended by Ctrl-C on our terminal.
    pub(crate) interrupted: bool,
}

impl Duty<'_> {
    /// Runs the command to its end.
    ///
    /// # Errors
    /// 126 or 127 when it cannot be run; 74 when the lock is lost by then.
    pub(crate) async fn run(
        &self,
        holding: &Holding,
        signals: &mut Signals,
        console: &Console,
    ) -> Result<Ended, Failure> {
        let terminal = terminal::is_interactive();
        let mut loan = Loan::new(terminal);
        let until = Clock::Boot.now().after(holding.valid_for());
        let setup = Setup {
            command: self.command.to_vec(),
            terminal,
            until: (self.on_lost != OnLost::Warn).then_some(until),
            ahead: self.grace,
            patience: if self.on_lost == OnLost::Kill { Duration::ZERO } else { self.grace },
        };
        let command = Supervised::start(&setup, &self.environment).await.inspect_err(|_| loan.take_back(false))?;
        let watch = Watch {
            duty: self,
            holding,
            console,
            command,
            loan,
            status: None,
            lost: false,
            asked_to_end: false,
            asked_to_stop: false,
            warned: false,
            told: until,
        };
        Ok(watch.run(signals).await)
    }
}

/// A command that runs.
struct Watch<'a> {
    duty: &'a Duty<'a>,
    holding: &'a Holding,
    console: &'a Console,
    command: Supervised,
    loan: Loan,
    status: Option<Status>,
    lost: bool,
    asked_to_end: bool,
    /// We were asked to suspend (SIGTSTP).
    asked_to_stop: bool,
    /// That renewals fail was said.
    warned: bool,
    /// The end of the lease that the supervisor knows.
    told: Moment,
}

impl Watch<'_> {
    async fn run(mut self, signals: &mut Signals) -> Ended {
        let mut loss = pin!(self.holding.lost());
        let mut loss_seen = false;
        // Often enough that the supervisor's idea of the lease is not far behind; never so often that it costs.
        let mut beat = interval((self.duty.ttl / 12).clamp(Duration::from_millis(5), Duration::from_secs(1)));
        beat.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut give_up = None;
        let status = loop {
            if self.lost && self.stops() && give_up.is_none() {
                give_up = Some(Instant::now() + self.duty.grace + TRUST);
            }
            tokio::select! {
                report = self.command.report() => {
                    if let Some(status) = self.heard(report) {
                        break status;
                    }
                }
                signal = signals.next() => self.forward(signal),
                loss = &mut loss, if !loss_seen => {
                    loss_seen = true;
                    self.lose(&format!("was lost: {loss}"));
                }
                _ = beat.tick() => self.beat(),
                () = at(give_up) => {
                    self.console.warn("something that the command started cannot be killed; it may still run");
                    break self.status.unwrap_or(Status::Killed(SIGKILL));
                }
            }
        };
        self.finish(status).await
    }

    /// Takes in a report. Some when the command has ended, and with a lost lock, all that it started as well.
    fn heard(&mut self, report: Option<Report>) -> Option<Status> {
        match report {
            Some(Report::Stopped(signal)) => self.stopped(signal),
            Some(Report::Expiring) => self.lose("cannot be renewed and is about to be lost"),
            Some(Report::Ended(status)) => {
                self.status = Some(status);
                if !self.holding.is_valid() && !self.lost {
                    self.lose("was lost at its end");
                }
                return (!self.lost || !self.stops()).then_some(status);
            }
            Some(Report::Alone) => return self.status,
            // The supervisor was killed, and the command with it.
            None => return Some(self.status.unwrap_or(Status::Killed(SIGKILL))),
            Some(Report::Started(_) | Report::Failed(_)) => {}
        }
        None
    }

    fn stops(&self) -> bool {
        self.duty.on_lost != OnLost::Warn
    }

    /// The lock is lost, or will be in a moment.
    fn lose(&mut self, why: &str) {
        if self.lost {
            return;
        }
        self.lost = true;
        let consequence = match self.duty.on_lost {
            OnLost::Term => format!("stopping the command, and killing it after {}", span(self.duty.grace)),
            OnLost::Kill => "killing the command".to_owned(),
            OnLost::Warn => "the command runs on (--on-lost warn)".to_owned(),
        };
        self.console.warn(&format!("{:?} {why}; {consequence}", self.holding.lost_name()));
        if self.stops() {
            self.command.order(Order::Lost);
        }
    }

    /// Tells the supervisor how long the lease lasts.
    fn beat(&mut self) {
        let left = self.holding.valid_for();
        if left.is_zero() {
            // A loss is told as such, and has a grace.
            return;
        }
        if self.stops() {
            let until = Clock::Boot.now().after(left);
            if until > self.told {
                self.told = until;
                self.command.order(Order::Lease { until });
            }
        } else if left < self.duty.grace && !self.lost && !self.warned {
            self.warned = true;
            let name = self.holding.name();
            self.console.warn(&format!("{name:?} cannot be renewed and will be lost in {}", span(left)));
        }
    }

    fn forward(&mut self, signal: i32) {
        self.asked_to_end |= is_ending(signal);
        self.asked_to_stop |= signal == SIGTSTP;
        if signal == SIGCONT {
            self.resume();
        } else {
            self.command.order(Order::Signal(signal));
        }
    }

    /// The command was stopped. On a terminal that is meant for the whole job: we stop as well, and the shell takes over.
    /// If somebody stopped just the command, it stays stopped, and the lock held.
    fn stopped(&mut self, signal: i32) {
        let wants_terminal = signal == SIGTTIN || signal == SIGTTOU;
        if wants_terminal && self.loan.give(self.command.group) {
            return self.command.order(Order::Signal(SIGCONT));
        }
        if !(wants_terminal || self.asked_to_stop || self.loan.is_given()) {
            return;
        }
        self.loan.take_back(true);
        let left = span(self.holding.valid_for());
        self.console.say(&format!("suspended; {:?} is lost unless continued within {left}", self.holding.name()));
        if !terminal::suspend() {
            self.resume();
        }
        // Otherwise SIGCONT, which woke us, comes in as a signal.
    }

    /// Continues the command, unless the lock was lost while it was suspended.
    fn resume(&mut self) {
        self.asked_to_stop = false;
        if self.holding.is_valid() {
            if terminal::is_interactive() {
                self.loan.give(self.command.group);
            }
            self.command.order(Order::Signal(SIGCONT));
        }
    }

    async fn finish(mut self, status: Status) -> Ended {
        let had_terminal = self.loan.is_given();
        self.loan.take_back(matches!(status, Status::Killed(_)));
        self.command.dismiss().await;
        let interrupted = status == Status::Killed(SIGINT) && terminal::is_foreground();
        if interrupted && had_terminal {
            // Ctrl-C reached only the command. Without us, the rest of the job would have got it too.
            let _ = kill_current_process_group(Signal::INT);
        }
        Ended { status, lost: self.lost, asked_to_end: self.asked_to_end, interrupted }
    }
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
