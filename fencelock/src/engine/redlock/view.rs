//! What the nodes show, put together: somebody holds, or waits, if a majority may say so.

use super::ballot::{Answer, Seen, Voice, Who};
use crate::{Holder, Mode, Status, Token, Waiter};
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

/// What a majority sees of a lock.
#[derive(Debug, Default)]
pub(super) struct View {
    /// Who holds.
    holder: Option<Seen>,
    waiters: Vec<Waiter>,
    /// Everybody who has the vote of a node; `None`: a client that is not fencelock.
    voted_for: HashSet<Option<Who>>,
    /// So many nodes say who holds that those who did not answer do not matter.
    certain: bool,
}

impl View {
    /// Nodes that did not answer may side with anybody.
    pub(super) fn of(voices: &[Voice], nodes: usize) -> Self {
        let seen: Vec<&Seen> = voices
            .iter()
            .filter_map(|voice| if let Answer::Seen(seen) = &voice.answer { Some(seen) } else { None })
            .collect();
        let enough = |count: usize| count > 0 && count + (nodes - seen.len()) > nodes / 2;
        let mut holders: BTreeMap<&str, Vec<&Seen>> = BTreeMap::new();
        let mut waiters: BTreeMap<u64, BTreeMap<String, (usize, Waiter)>> = BTreeMap::new();
        for seen in &seen {
            if !seen.value.is_empty() {
                // The same hold, even if nodes know more or less of its owner.
                let end = Who::read(&seen.value).and_then(|_| seen.value.find('\n')).unwrap_or(seen.value.len());
                holders.entry(&seen.value[..end]).or_default().push(seen);
            }
            for record in &seen.waiters {
                let Some((who, waiter)) = waiter(record, seen.now) else { continue };
                let place = waiters.entry(who.token).or_default();
                place.entry(who.owner.to_string()).or_insert((0, waiter)).0 += 1;
            }
        }
        let voted_for = holders.keys().map(|value| Who::read(value)).collect();
        let holder = holders.into_iter().filter(|(_, by)| enough(by.len())).max_by_key(|(_, by)| by.len());
        let certain = holder.as_ref().is_some_and(|(_, by)| by.len() > nodes / 2);
        let holder = holder.map(|(_, by)| {
            // The lease ends when that of the node which completes a majority does: a middle one.
            let mut by = by;
            by.sort_by_key(|seen| seen.left);
            let known = by.iter().map(|seen| &seen.value).max_by_key(|value| value.len());
            Seen { value: known.cloned().unwrap_or_default(), ..by[by.len() / 2].clone() }
        });
        let waiters = waiters.into_values().flat_map(BTreeMap::into_values);
        let waiters = waiters.filter(|(count, _)| enough(*count)).map(|(_, waiter)| waiter).collect();
        Self { holder, waiters, voted_for, certain }
    }

    pub(super) fn is_certain(&self) -> bool {
        self.certain
    }

    pub(super) fn voted_for(&self) -> &HashSet<Option<Who>> {
        &self.voted_for
    }

    /// The proposal that holds, if it is one of fencelock's.
    pub(super) fn who(&self) -> Option<Who> {
        self.holder.as_ref().and_then(|seen| Who::read(&seen.value))
    }

    pub(super) fn status(self, name: &str) -> Status {
        let mut status = Status::free(name);
        status.holders = self.holder.iter().map(holder).collect();
        status.waiters = self.waiters;
        status
    }
}

fn holder(seen: &Seen) -> Holder {
    let (mode, lease_left) = (Mode::Exclusive, seen.left.unwrap_or(Duration::MAX));
    let Some(who) = Who::read(&seen.value) else {
        return Holder {
            mode,
            token: Token::new(0),
            owner: seen.value.chars().take(8).collect(),
            label: "a client that is not fencelock".to_owned(),
            held_for: Duration::ZERO,
            lease_left,
        };
    };
    let label = seen.value.splitn(3, '\n').nth(2).unwrap_or_default().to_owned();
    Holder {
        mode,
        token: Token::new(who.token),
        owner: who.owner.short(),
        label,
        // A token is the time of its proposal.
        held_for: Duration::from_micros(seen.now.saturating_sub(who.token)),
        lease_left,
    }
}

/// A waiter's record: ttl, since when, proposal, session, label.
fn waiter(record: &str, now: u64) -> Option<(Who, Waiter)> {
    let mut parts = record.splitn(5, '\n').skip(1);
    let since: u64 = parts.next()?.parse().ok()?;
    let who = Who::read(parts.next()?)?;
    let label = parts.nth(1)?.to_owned();
    let waiting_for = Duration::from_micros(now.saturating_sub(since));
    Some((who, Waiter { mode: Mode::Exclusive, owner: who.owner.short(), label, waiting_for }))
}

/// Who holds, for an error: too little to re-enter.
pub(super) fn short(value: &str) -> String {
    match Who::read(value) {
        Some(who) => format!("{} with token {}", who.owner.short(), who.token),
        None => "a client that is not fencelock".to_owned(),
    }
}
