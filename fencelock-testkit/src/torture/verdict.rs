//! What a torture found, for people and for programs.

use super::Plan;
use crate::history::{Kind, Report, Violation};
use fencelock::Client;
use serde::Serialize;
use std::fmt;

/// How many violations are told in detail.
const IN_DETAIL: usize = 5;

/// The outcome of a torture.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// The engine.
    pub url: String,
    /// Whether every promise was kept.
    pub ok: bool,
    /// Whether the order was kept: the engine promises one, and nobody who was overtaken had to be excused.
    pub ordered: bool,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Processes at a time.
    pub processes: u32,
    /// Workers in each.
    pub workers: u32,
    /// Processes that were killed.
    pub kills: u64,
    /// Claims that were granted.
    pub grants: u64,
    /// Grants per second.
    pub grants_per_second: f64,
    /// The wait of the median grant, in milliseconds.
    pub median_wait_ms: f64,
    /// The longest wait, in milliseconds.
    pub longest_wait_ms: f64,
    /// Claims that ended because the lock was busy.
    pub busy: u64,
    /// Claims that ended because they took too long.
    pub timeouts: u64,
    /// Claims whose future was dropped.
    pub cancelled: u64,
    /// Evictions.
    pub evictions: u64,
    /// Holds that were lost, with or without a reason.
    pub lost: u64,
    /// The broken promises.
    pub violations: Vec<Violation>,
    /// What the plan excuses, because of the faults that were done to the engine.
    pub excused: Vec<Violation>,
    /// Repeats what was tried, though not when.
    pub seed: u64,
}

impl Verdict {
    /// `watched`: a client of the engine.
    pub(super) fn new(
        plan: &Plan,
        report: Report,
        mut violations: Vec<Violation>,
        kills: u64,
        watched: &Client,
    ) -> Self {
        violations.extend(report.violations);
        violations.sort_by_key(|violation| violation.kind);
        let (excused, violations): (Vec<_>, Vec<_>) = violations.into_iter().partition(plan.excuse);
        let seconds = plan.lasts.as_secs_f64();
        let millis = |nanos: Option<&u64>| nanos.map_or(0.0, |nanos| *nanos as f64 / 1e6);
        Self {
            url: watched.address().to_owned(),
            ok: violations.is_empty(),
            ordered: watched.capability().ordered && excused.iter().all(|violation| violation.kind != Kind::Order),
            seconds,
            processes: plan.processes,
            workers: plan.workers,
            kills,
            grants: report.grants,
            grants_per_second: report.grants as f64 / seconds.max(f64::EPSILON),
            median_wait_ms: millis(report.waits.get(report.waits.len() / 2)),
            longest_wait_ms: millis(report.waits.last()),
            busy: report.busy,
            timeouts: report.timeouts,
            cancelled: report.cancelled,
            evictions: report.evictions,
            lost: report.lost,
            violations,
            excused,
            seed: plan.seed,
        }
    }

    /// Whether a promise of this kind was broken.
    pub fn shows(&self, kind: Kind) -> bool {
        self.violations.iter().any(|violation| violation.kind == kind)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let workers = u64::from(self.processes) * u64::from(self.workers);
        write!(f, "{} workers in {} processes for {:.1} s", workers, self.processes, self.seconds)?;
        match self.kills {
            0 => writeln!(f)?,
            kills => writeln!(f, ", {kills} times one was killed")?,
        }
        writeln!(f, "{} grants, {:.0} per second", self.grants, self.grants_per_second)?;
        writeln!(f, "waits: median {:.2} ms, longest {:.1} ms", self.median_wait_ms, self.longest_wait_ms)?;
        writeln!(
            f,
            "{} busy, {} timed out, {} cancelled, {} evictions, {} lost",
            self.busy, self.timeouts, self.cancelled, self.evictions, self.lost
        )?;
        for excused in self.excused.chunk_by(|one, other| one.kind == other.kind) {
            let (times, kind) = (excused.len(), excused[0].kind);
            writeln!(f, "excused by the faults, {times} times: {kind}")?;
        }
        if self.ok {
            let order = if self.ordered { "first come first served, " } else { "" };
            return write!(f, "ok: one at a time, {order}tokens grow, all free at the end");
        }
        let count = self.violations.len();
        write!(f, "{count} VIOLATION{}", if count == 1 { "" } else { "S" })?;
        for violation in self.violations.iter().take(IN_DETAIL) {
            write!(f, "\n  {violation}")?;
        }
        if self.violations.len() > IN_DETAIL {
            write!(f, "\n  and {} more", self.violations.len() - IN_DETAIL)?;
        }
        Ok(())
    }
}
