//! Finds in a history what no engine may do. It reports only what the recorded times prove: a claim that may have been
//! granted in time, or whose process stood still, is given the benefit of the doubt.

use super::{Ended, Event, GaveUp, What};
use fencelock::Mode;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// The promise that was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Two held the lock at the same time although their modes exclude each other.
    Exclusion,
    /// A token was not greater than all those before it.
    Token,
    /// A later claim was granted before an earlier one.
    Order,
    /// A lock was lost although nobody took it away and its holder was awake.
    Lost,
    /// A claim was not granted although the lock was free.
    Stuck,
    /// A holder found somebody else in the room that the lock protects.
    Clash,
    /// A lock is held at the end although nobody is left.
    Leftover,
    /// The engine reported an error.
    Failed,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Exclusion => "two at a time",
            Kind::Token => "token out of order",
            Kind::Order => "not first come, first served",
            Kind::Lost => "lost for no reason",
            Kind::Stuck => "waited in vain",
            Kind::Clash => "somebody else was inside",
            Kind::Leftover => "not free at the end",
            Kind::Failed => "the engine failed",
        })
    }
}

/// A promise that was broken, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Which promise.
    pub kind: Kind,
    /// On which lock.
    pub name: String,
    /// What the history shows.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?}): {}", self.kind, self.name, self.detail)
    }
}

/// What a history shows.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The broken promises.
    pub violations: Vec<Violation>,
    /// Claims that were granted.
    pub grants: u64,
    /// Claims that ended because the lock was busy.
    pub busy: u64,
    /// Claims that ended because they took too long.
    pub timeouts: u64,
    /// Claims whose future was dropped.
    pub cancelled: u64,
    /// Holds that were lost, for whatever reason.
    pub lost: u64,
    /// Evictions.
    pub evictions: u64,
    /// How long the granted claims waited, in nanoseconds, sorted.
    pub waits: Vec<u64>,
}

impl Report {
    /// Whether a promise of this kind was broken.
    pub fn shows(&self, kind: Kind) -> bool {
        self.violations.iter().any(|violation| violation.kind == kind)
    }
}

/// Checks the histories of all processes, in whatever order their events come.
pub fn check(events: &[Event]) -> Report {
    let mut report = Report::default();
    let lines = lines(events);
    for (name, line) in &lines {
        let mut found = Finder { name, line, report: &mut report };
        found.count();
        found.exclusion();
        found.tokens();
        found.order();
        found.losses();
        found.ends();
    }
    report.waits.sort_unstable();
    report
}

/// All that is known of one claim.
#[derive(Debug, Clone)]
struct Story {
    process: u64,
    claim: u64,
    mode: Mode,
    ttl: u64,
    waits: u64,
    /// When it was first known to be in line.
    in_line: Option<u64>,
    /// A time at which it was still waiting, or a little earlier.
    waiting: Option<u64>,
    /// When it was seen to be granted, and with which token.
    granted: Option<(u64, u64)>,
    /// When it was last known to be valid.
    valid: Option<u64>,
    ended: Option<(u64, Ended)>,
    gave_up: Option<(u64, GaveUp)>,
    failed: Option<String>,
    clash: Option<u64>,
    /// The last that was heard of it.
    last: u64,
    /// Its process stood still meanwhile.
    stalled: bool,
    /// From when until when its process was dying.
    dying: Option<(u64, u64)>,
}

impl Story {
    fn new(event: &Event, mode: Mode, ttl_ms: u64) -> Self {
        Self {
            process: event.process,
            claim: event.claim,
            mode,
            ttl: ttl_ms * 1_000_000,
            waits: event.at,
            in_line: None,
            waiting: None,
            granted: None,
            valid: None,
            ended: None,
            gave_up: None,
            failed: None,
            clash: None,
            last: event.at,
            stalled: false,
            dying: None,
        }
    }

    fn take(&mut self, event: &Event) {
        self.last = self.last.max(event.at);
        match &event.what {
            What::InLine { asked } => {
                self.in_line.get_or_insert(event.at);
                self.waiting = self.waiting.max(Some(*asked));
            }
            What::Granted { token } => self.granted = Some((event.at, *token)),
            What::StillValid => self.valid = self.valid.max(Some(event.at)),
            What::Ended(how) => self.ended = Some((event.at, *how)),
            What::GaveUp(why) => self.gave_up = Some((event.at, *why)),
            What::Failed { message } => self.failed = Some(message.clone()),
            What::Clash => self.clash = Some(event.at),
            What::Waits { .. } | What::Evicts { .. } | What::Evicted | What::Killed { .. } | What::Stalled { .. } => {}
        }
    }

    /// The time during which it certainly believed to hold.
    fn believed(&self) -> Option<(u64, u64)> {
        let (from, _) = self.granted?;
        self.valid.filter(|until| *until > from).map(|until| (from, until))
    }

    fn token(&self) -> Option<u64> {
        self.granted.map(|(_, token)| token)
    }

    /// Whether it can tell about the order: it was seen in line, and it was awake.
    fn place_in_line(&self) -> Option<u64> {
        self.in_line.filter(|_| !self.stalled)
    }
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claim {}.{} ({}, came at {}", self.process, self.claim, self.mode, seconds(self.waits))?;
        if let Some(at) = self.in_line {
            write!(f, ", in line at {}", seconds(at))?;
        }
        if let Some((at, token)) = self.granted {
            write!(f, ", granted token {token} at {}", seconds(at))?;
        }
        if let Some(at) = self.valid {
            write!(f, ", valid at {}", seconds(at))?;
        }
        f.write_str(")")
    }
}

fn seconds(nanos: u64) -> String {
    format!("{}.{:06}s", nanos / 1_000_000_000, nanos / 1_000 % 1_000_000)
}

/// All that is known of one lock.
#[derive(Default)]
struct LineStory {
    claims: Vec<Story>,
    /// From when until when somebody took the lock away.
    evictions: Vec<(u64, u64)>,
}

fn lines(events: &[Event]) -> BTreeMap<String, LineStory> {
    let mut ordered: Vec<&Event> = events.iter().collect();
    ordered.sort_by_key(|event| (event.process, event.claim, !opens(&event.what), event.at));
    let mut lines: BTreeMap<String, LineStory> = BTreeMap::new();
    let mut current: Option<(u64, u64, &str)> = None;
    for event in &ordered {
        match &event.what {
            What::Waits { name, mode, ttl_ms } => {
                lines.entry(name.clone()).or_default().claims.push(Story::new(event, *mode, *ttl_ms));
                current = Some((event.process, event.claim, name));
            }
            What::Evicts { name } => {
                lines.entry(name.clone()).or_default().evictions.push((event.at, u64::MAX));
                current = Some((event.process, event.claim, name));
            }
            what => {
                let Some((_, _, name)) =
                    current.filter(|(process, claim, _)| (*process, *claim) == (event.process, event.claim))
                else {
                    continue;
                };
                let Some(line) = lines.get_mut(name) else { continue };
                match (what, line.claims.last_mut(), line.evictions.last_mut()) {
                    (What::Evicted, _, Some(eviction)) => eviction.1 = event.at,
                    (_, Some(story), _) => story.take(event),
                    _ => {}
                }
            }
        }
    }
    mark_stalled(&ordered, &mut lines);
    mark_dying(&ordered, &mut lines);
    lines
}

fn opens(what: &What) -> bool {
    matches!(what, What::Waits { .. } | What::Evicts { .. })
}

fn mark_stalled(events: &[&Event], lines: &mut BTreeMap<String, LineStory>) {
    let mut stalls: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    for event in events {
        if let What::Stalled { since } = event.what {
            stalls.entry(event.process).or_default().push((since, event.at));
        }
    }
    for story in lines.values_mut().flat_map(|line| &mut line.claims) {
        let stalls = stalls.get(&story.process).map_or(&[][..], Vec::as_slice);
        story.stalled = stalls.iter().any(|(since, until)| *since <= story.last && *until >= story.waits);
    }
}

fn mark_dying(events: &[&Event], lines: &mut BTreeMap<String, LineStory>) {
    let mut deaths: HashMap<u64, (u64, u64)> = HashMap::new();
    for event in events {
        if let What::Killed { process, since } = event.what {
            deaths.insert(process, (since, event.at));
        }
    }
    for story in lines.values_mut().flat_map(|line| &mut line.claims) {
        story.dying = deaths.get(&story.process).copied();
    }
}

/// Goes through the story of one lock.
struct Finder<'a> {
    name: &'a str,
    line: &'a LineStory,
    report: &'a mut Report,
}

impl Finder<'_> {
    fn found(&mut self, kind: Kind, detail: String) {
        self.report.violations.push(Violation { kind, name: self.name.to_owned(), detail });
    }

    fn count(&mut self) {
        self.report.evictions += self.line.evictions.len() as u64;
        for story in &self.line.claims {
            if let Some((at, _)) = story.granted {
                self.report.grants += 1;
                self.report.waits.push(at.saturating_sub(story.waits));
            }
            match story.gave_up.map(|(_, why)| why) {
                Some(GaveUp::Busy) => self.report.busy += 1,
                Some(GaveUp::Timeout) => self.report.timeouts += 1,
                Some(GaveUp::Cancelled) => self.report.cancelled += 1,
                Some(GaveUp::Stuck) | None => {}
            }
            self.report.lost += u64::from(matches!(story.ended, Some((_, Ended::Lost))));
        }
    }

    /// Whoever believed to hold at the same time must have been allowed to.
    fn exclusion(&mut self) {
        let mut spans: Vec<(u64, u64, usize)> = Vec::new();
        for (index, story) in self.line.claims.iter().enumerate() {
            spans.extend(self.certain(story).into_iter().map(|(from, until)| (from, until, index)));
        }
        spans.sort_unstable();
        let mut active: Vec<(u64, usize)> = Vec::new();
        for (from, until, index) in spans {
            active.retain(|(until, other)| *until > from && *other != index);
            let story = &self.line.claims[index];
            let others: Vec<&Story> = active.iter().map(|(_, other)| &self.line.claims[*other]).collect();
            if let Some(other) = in_the_way(story, &others) {
                let detail = format!("{story} while {other}");
                self.found(Kind::Exclusion, detail);
            }
            active.push((until, index));
        }
    }

    /// The times during which this claim believed to hold and nothing excuses it. After an eviction a holder may believe for
    /// as long as its lease.
    fn certain(&self, story: &Story) -> Vec<(u64, u64)> {
        let mut spans: Vec<(u64, u64)> = story.believed().into_iter().collect();
        let granted = story.granted.map_or(0, |(at, _)| at);
        for (from, until) in &self.line.evictions {
            if story.waits <= *until {
                let told = until.max(&granted).saturating_add(story.ttl);
                spans = spans.into_iter().flat_map(|span| without(span, (*from, told))).collect();
            }
        }
        spans
    }

    fn tokens(&mut self) {
        self.tokens_are_unique();
        self.tokens_grow_with_time();
        self.tokens_follow_the_holders();
    }

    fn tokens_are_unique(&mut self) {
        let mut seen: HashMap<u64, &Story> = HashMap::new();
        for story in &self.line.claims {
            let Some(token) = story.token() else { continue };
            if let Some(other) = seen.insert(token, story) {
                let detail = format!("the same token for {story} and {other}");
                self.found(Kind::Token, detail);
            }
        }
    }

    /// A claim that was made after a grant was seen gets a greater token than that grant. True for every mode.
    fn tokens_grow_with_time(&mut self) {
        let mut seen: Vec<&Story> = self.line.claims.iter().filter(|story| story.granted.is_some()).collect();
        let mut asked = seen.clone();
        seen.sort_by_key(|story| story.granted);
        asked.sort_by_key(|story| story.waits);
        let mut seen = seen.into_iter().peekable();
        let mut newest: Option<&Story> = None;
        for story in asked {
            while let Some(earlier) = seen.next_if(|earlier| earlier.granted.is_some_and(|(at, _)| at < story.waits)) {
                if newest.is_none_or(|newest| newest.token() < earlier.token()) {
                    newest = Some(earlier);
                }
            }
            if let Some(newest) = newest
                && story.token() <= newest.token()
            {
                let detail = format!("{story} came after {newest}");
                self.found(Kind::Token, detail);
            }
        }
    }

    /// Of two who held alone, the later one has the greater token.
    fn tokens_follow_the_holders(&mut self) {
        if !self.line.evictions.is_empty() {
            return;
        }
        let alone = |story: &&Story| story.mode == Mode::Exclusive && story.believed().is_some();
        let mut holders: Vec<&Story> = self.line.claims.iter().filter(alone).collect();
        holders.sort_by_key(|story| story.granted);
        for pair in holders.windows(2) {
            if pair[1].token() <= pair[0].token() {
                let detail = format!("{} held after {}", pair[1], pair[0]);
                self.found(Kind::Token, detail);
            }
        }
    }

    /// A claim that was made after another was seen in line is granted after that one: its token is greater, and it is not
    /// granted while that one is still seen in line. An eviction makes places in line uncertain.
    fn order(&mut self) {
        if !self.line.evictions.is_empty() {
            return;
        }
        let mut granted: Vec<&Story> = self.line.claims.iter().filter(|story| story.granted.is_some()).collect();
        granted.sort_by_key(|story| story.waits);
        let lowest = least_from(&granted, |story| story.token().unwrap_or(u64::MAX));
        let soonest = least_from(&granted, |story| story.granted.map_or(u64::MAX, |(at, _)| at));
        for story in &self.line.claims {
            let Some(in_line) = story.place_in_line() else { continue };
            let later = granted.partition_point(|other| other.waits <= in_line);
            let Some((lowest, soonest)) = lowest.get(later).zip(soonest.get(later)) else { continue };
            let overtaken = if story.token().is_some_and(|token| lowest.token() < Some(token)) {
                Some(lowest)
            } else {
                story.waiting.filter(|at| soonest.granted.is_some_and(|(granted, _)| granted < *at)).map(|_| soonest)
            };
            if let Some(other) = overtaken {
                let detail = format!("{other} overtook {story}");
                self.found(Kind::Order, detail);
            }
        }
    }

    fn losses(&mut self) {
        for story in &self.line.claims {
            let Some((at, Ended::Lost)) = story.ended else { continue };
            let evicted = self.line.evictions.iter().any(|(from, _)| *from <= at);
            if !evicted && !story.stalled {
                self.found(Kind::Lost, story.to_string());
            }
        }
    }

    fn ends(&mut self) {
        for story in &self.line.claims {
            if let Some((at, GaveUp::Stuck)) = story.gave_up {
                self.found(Kind::Stuck, format!("{story} waited until {}", seconds(at)));
            }
            if let Some(message) = &story.failed {
                self.found(Kind::Failed, format!("{story}: {message}"));
            }
            if let Some(at) = story.clash
                && !self.overstayed(story, at)
            {
                self.found(Kind::Clash, format!("{story} found somebody inside at {}", seconds(at)));
            }
        }
    }

    /// Whether somebody else was inside longer than its lock lasted, and says so itself, or was just dying: then the kernel
    /// may free its lock before its room.
    fn overstayed(&self, story: &Story, at: u64) -> bool {
        self.line.claims.iter().any(|other| {
            let late = other.stalled || matches!(other.ended, Some((_, Ended::Lost)));
            let inside = other.granted.is_some_and(|(from, _)| from <= at);
            let dying = other.ended.is_none() && other.dying.is_some_and(|(from, until)| (from..=until).contains(&at));
            let another = (other.process, other.claim) != (story.process, story.claim);
            another && inside && (dying || late && other.last >= at)
        })
    }
}

/// For every position, the claim with the smallest key from there to the end.
fn least_from<'a>(stories: &[&'a Story], key: impl Fn(&Story) -> u64) -> Vec<&'a Story> {
    let mut least: Vec<&Story> = Vec::with_capacity(stories.len());
    for story in stories.iter().rev() {
        let best = least.last().filter(|best| key(best) <= key(story)).unwrap_or(story);
        least.push(best);
    }
    least.reverse();
    least
}

/// Who of those that hold excludes this one.
fn in_the_way<'a>(story: &Story, holders: &[&'a Story]) -> Option<&'a Story> {
    let fits = |other: &Story| match (story.mode, other.mode) {
        (Mode::Shared, Mode::Shared) => true,
        (Mode::Permit { of }, Mode::Permit { of: theirs }) => of == theirs && holders.len() < of as usize,
        _ => false,
    };
    holders.iter().copied().find(|other| !fits(other))
}

/// What is left of a span without another.
fn without((from, until): (u64, u64), (hole_from, hole_until): (u64, u64)) -> Vec<(u64, u64)> {
    let before = (from, until.min(hole_from));
    let after = (from.max(hole_until), until);
    [before, after].into_iter().filter(|(from, until)| from < until).collect()
}

#[cfg(test)]
mod tests;
